-- The end of a run without the text of its answer, which the message has.
INSERT INTO events (seq, type, op, session_id, entity_id, fields, at) VALUES
  (3, 'run_complete', 'updated', '10000000-0000-4000-8000-000000000001', '40000000-0000-4000-8000-000000000003', '{"session_id":"10000000-0000-4000-8000-000000000001","run_id":"40000000-0000-4000-8000-000000000003","message_id":"20000000-0000-4000-8000-000000000002","text":"","error":"","cancelled":false,"culm_reason":""}', 1790000051);
