-- Runs that ended, one that was at work with another folded into it, one behind it, one at rest;
-- cancels; calls of every policy.
INSERT INTO runs (seq, id, session_id, kind, state, place, given, digest, prompt, limits, provider, model, outcome, title, details, host_id, message_id, steps, prompt_tokens, completion_tokens, cost, estimated, created_at, started_at, ended_at) VALUES
  (1, '40000000-0000-4000-8000-000000000001', '10000000-0000-4000-8000-000000000001', 'prompt', 'ended', 1, 0, 'd1', 'Is this kept?', '{}', 'demo', 'demo-1', 'end_turn', '', '', '', '20000000-0000-4000-8000-000000000002', 1, 900, 12, 0.25, 0, 1790000003, 1790000003, 1790000004),
  (2, '40000000-0000-4000-8000-000000000002', '10000000-0000-4000-8000-000000000001', 'summary', 'ended', 1, 0, 'd2', '', '{}', 'demo', 'demo-1', 'end_turn', '', '', '', '', 1, 10, 2, 0.0, 1, 1790000005, 1790000005, 1790000005),
  (3, '40000000-0000-4000-8000-000000000003', '10000000-0000-4000-8000-000000000001', 'prompt', 'ended', 1, 1, 'd3', 'Stop it.', '{"steps":9}', 'demo', 'demo-1', 'canceled', 'User canceled request', '', '', '', 0, 0, 0, 0.0, 0, 1790000005, 1790000005, 1790000006),
  (4, '40000000-0000-4000-8000-000000000004', '10000000-0000-4000-8000-000000000002', 'prompt', 'active', 1, 0, 'd4', 'Was cut off.', '{}', 'demo', 'demo-1', NULL, '', '', '', '', 0, 0, 0, 0.0, 0, 1790000020, 1790000020, 0),
  (5, '40000000-0000-4000-8000-000000000005', '10000000-0000-4000-8000-000000000002', 'prompt', 'queued', 2, 1, 'd5', 'Waits behind it.', '{}', 'demo', 'demo-1', NULL, '', '', '', '', 0, 0, 0, 0.0, 0, 1790000021, 0, 0),
  (6, '40000000-0000-4000-8000-000000000006', '10000000-0000-4000-8000-000000000002', 'prompt', 'held', 3, 1, 'd6', 'Rests.', '{}', 'demo', 'demo-1', NULL, 'the run before it was interrupted', '', '', '', 0, 0, 0, 0.0, 0, 1790000022, 0, 0),
  (10, '40000000-0000-4000-8000-00000000000a', '10000000-0000-4000-8000-000000000002', 'prompt', 'folded', 1, 0, 'd10', 'Joined it.', '{}', 'demo', 'demo-1', NULL, '', '', '40000000-0000-4000-8000-000000000004', '', 0, 0, 0, 0.0, 0, 1790000020, 1790000021, 0);
INSERT INTO run_bodies (run_id, prompt, attachments) VALUES
  ('40000000-0000-4000-8000-000000000005', 'Waits behind it.', '[]'),
  ('40000000-0000-4000-8000-000000000006', 'Rests.', '[{"file_path":"shot.png","file_name":"shot.png","mime_type":"image/png","content":"iVBORw0KGgo="}]');
INSERT INTO cancels (id, session_id, target, at) VALUES
  ('50000000-0000-4000-8000-000000000001', '10000000-0000-4000-8000-000000000001', 'run', 1790000006);
INSERT INTO cancelled_runs (cancel_id, run_id, settled) VALUES
  ('50000000-0000-4000-8000-000000000001', '40000000-0000-4000-8000-000000000003', 'canceled'),
  ('50000000-0000-4000-8000-000000000001', '40000000-0000-4000-8000-000000000001', 'finished_first');
UPDATE sessions SET message_count = 2, next_seq = 3 WHERE no = 2;
INSERT INTO messages (place, id, role, parts, large, model, provider, is_summary, rev, is_open, created_at, updated_at) VALUES
  (8589934593, '20000000-0000-4000-8000-000000000005', 'user', '[{"type":"text","data":{"text":"Was cut off."}},{"type":"finish","data":{"reason":"stop","time":0}}]', 0, '', '', 0, 0, 0, 1790000020, 1790000020),
  (8589934594, '20000000-0000-4000-8000-000000000006', 'assistant', '[{"type":"tool_call","data":{"id":"call_1","name":"bash","input":"{}","finished":true}},{"type":"tool_call","data":{"id":"call_2","name":"write","input":"{}","finished":true}},{"type":"tool_call","data":{"id":"call_3","name":"agent","input":"{}","finished":true}},{"type":"tool_call","data":{"id":"call_4","name":"view","input":"{}","finished":true}}]', 0, 'demo-1', 'demo', 0, 0, 1, 1790000020, 1790000020);
INSERT INTO calls (message_id, call_id, no, run_id, name, crash, state) VALUES
  ('20000000-0000-4000-8000-000000000006', 'call_1', 0, '40000000-0000-4000-8000-000000000004', 'bash', 'ask', 'started'),
  ('20000000-0000-4000-8000-000000000006', 'call_2', 1, '40000000-0000-4000-8000-000000000004', 'write', 'again', 'started'),
  ('20000000-0000-4000-8000-000000000006', 'call_3', 2, '40000000-0000-4000-8000-000000000004', 'agent', 'never', 'started'),
  ('20000000-0000-4000-8000-000000000006', 'call_4', 3, '40000000-0000-4000-8000-000000000004', 'view', 'again', 'known');
