-- A file that was read, with how it looked.
INSERT INTO read_files (session_id, path, read_no, read_at, stamp) VALUES
  ('10000000-0000-4000-8000-000000000001', '/frozen/project/AGENTS.md', 2, 1790000013, '1790000000000000000.12.77');
