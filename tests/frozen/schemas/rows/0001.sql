-- Two sessions and a child, a part of its own row, an open message with chunks, a killed server.
INSERT INTO meta (key, value) VALUES ('epoch', 'a1b2c3d4e5f6'), ('clean', '0');
INSERT INTO sessions (no, id, parent_id, title, message_count, prompt_tokens, completion_tokens, summary_message_id, cost, todos, next_seq, created_at, updated_at) VALUES
  (1, '10000000-0000-4000-8000-000000000001', '', 'First', 4, 900, 12, '20000000-0000-4000-8000-000000000003', 0.25, '[{"content":"Look","status":"completed","active_form":""}]', 5, 1790000000, 1790000009),
  (2, '10000000-0000-4000-8000-000000000002', '', 'Second “Ä” 🙂', 0, 0, 0, '', 0.0, '[]', 1, 1790000001, 1790000001),
  (3, '10000000-0000-4000-8000-000000000003', '10000000-0000-4000-8000-000000000001', 'Child', 1, 0, 0, '', 0.0, '[]', 2, 1790000002, 1790000002);
INSERT INTO messages (place, id, role, parts, large, model, provider, is_summary, rev, is_open, created_at, updated_at) VALUES
  (4294967297, '20000000-0000-4000-8000-000000000001', 'user', '[{"type":"text","data":{"text":"Is this kept?"}},{"type":"finish","data":{"reason":"stop","time":0}}]', 0, '', '', 0, 0, 0, 1790000003, 1790000003),
  (4294967298, '20000000-0000-4000-8000-000000000002', 'assistant', '[null,{"type":"finish","data":{"reason":"end_turn","time":1790000004}}]', 1, 'demo-1', 'demo', 0, 1, 0, 1790000004, 1790000004),
  (4294967299, '20000000-0000-4000-8000-000000000003', 'assistant', '[{"type":"text","data":{"text":"A summary."}},{"type":"finish","data":{"reason":"end_turn","time":1790000005}}]', 0, 'demo-1', 'demo', 1, 1, 0, 1790000005, 1790000005),
  (4294967300, '20000000-0000-4000-8000-000000000004', 'assistant', '[{"type":"text","data":{"text":"Open"}}]', 0, 'demo-1', 'demo', 0, 0, 1, 1790000006, 1790000006),
  (12884901889, '20000000-0000-4000-8000-00000000000a', 'assistant', '[{"type":"reasoning","data":{"thinking":"Thin","signature":"","started_at":1790000007,"finished_at":0}},{"type":"tool_call","data":{"id":"call_9","name":"bash","input":"{\"comm","finished":false}}]', 0, 'demo-1', 'demo', 0, 0, 1, 1790000007, 1790000007);
INSERT INTO parts (message_id, part, body) VALUES
  ('20000000-0000-4000-8000-000000000002', 0, '{"type":"text","data":{"text":"It is kept in a row of its own."}}');
INSERT INTO chunks (message_id, part, pos, kind, text) VALUES
  ('20000000-0000-4000-8000-000000000004', 0, 4, 'text', ' text'),
  ('20000000-0000-4000-8000-000000000004', 0, 9, 'text', ' grows'),
  ('20000000-0000-4000-8000-00000000000a', 0, 4, 'reasoning', 'king'),
  ('20000000-0000-4000-8000-00000000000a', 1, 6, 'input', 'and":"ls"}');
INSERT INTO events (seq, type, op, session_id, entity_id, fields, at) VALUES
  (1, 'session', 'created', '10000000-0000-4000-8000-000000000001', '10000000-0000-4000-8000-000000000001', NULL, 1790000000),
  (2, 'message', 'created', '10000000-0000-4000-8000-000000000001', '20000000-0000-4000-8000-000000000001', NULL, 1790000003);
