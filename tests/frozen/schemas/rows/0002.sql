-- Two versions of a file, and a file that was read.
INSERT INTO files (no, id, session_id, path, version, content, created_at, updated_at) VALUES
  (1, '30000000-0000-4000-8000-000000000001', '10000000-0000-4000-8000-000000000001', '/frozen/project/main.go', 0, 'package main', 1790000010, 1790000010),
  (2, '30000000-0000-4000-8000-000000000002', '10000000-0000-4000-8000-000000000001', '/frozen/project/main.go', 1, 'package main // changed', 1790000011, 1790000011);
INSERT INTO read_files (session_id, path, read_no, read_at) VALUES
  ('10000000-0000-4000-8000-000000000001', '/frozen/project/main.go', 1, 1790000012);
