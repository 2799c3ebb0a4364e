-- A message that says in whose turn it stands.
UPDATE sessions SET message_count = 5, next_seq = 6 WHERE no = 1;
INSERT INTO messages (place, id, role, parts, large, model, provider, is_summary, rev, is_open, created_at, updated_at, run_id) VALUES
  (4294967301, '20000000-0000-4000-8000-000000000009', 'user', '[{"type":"text","data":{"text":"Of a run."}},{"type":"finish","data":{"reason":"stop","time":0}}]', 0, '', '', 0, 0, 0, 1790000050, 1790000050, '40000000-0000-4000-8000-000000000003');
