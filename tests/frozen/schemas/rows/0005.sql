-- Closed asks of both kinds, a run that waits for answers, grants of both scopes.
INSERT INTO sessions (no, id, parent_id, title, message_count, next_seq, created_at, updated_at) VALUES
  (4, '10000000-0000-4000-8000-000000000004', '', 'Waiting', 2, 3, 1790000030, 1790000030);
INSERT INTO messages (place, id, role, parts, large, model, provider, is_summary, rev, is_open, created_at, updated_at) VALUES
  (17179869185, '20000000-0000-4000-8000-000000000007', 'user', '[{"type":"text","data":{"text":"Ask me."}},{"type":"finish","data":{"reason":"stop","time":0}}]', 0, '', '', 0, 0, 0, 1790000030, 1790000030),
  (17179869186, '20000000-0000-4000-8000-000000000008', 'assistant', '[{"type":"tool_call","data":{"id":"call_5","name":"question","input":"{\"questions\":[{\"type\":\"yes_no\",\"question\":\"Go on?\",\"description\":\"Or not.\"}]}","finished":true}}]', 0, 'offline', 'offline', 0, 0, 1, 1790000030, 1790000030);
INSERT INTO runs (seq, id, session_id, kind, state, place, given, digest, prompt, limits, provider, model, created_at, started_at, headless, approve) VALUES
  (7, '40000000-0000-4000-8000-000000000007', '10000000-0000-4000-8000-000000000004', 'prompt', 'active', 1, 0, 'd7', 'Ask me.', '{}', 'offline', 'offline', 1790000030, 1790000030, 0, '"ask"');
INSERT INTO calls (message_id, call_id, no, run_id, name, crash, state) VALUES
  ('20000000-0000-4000-8000-000000000008', 'call_5', 0, '40000000-0000-4000-8000-000000000007', 'question', 'again', 'known');
INSERT INTO asks (no, id, kind, session_id, run_id, message_id, call_id, request, digest, grains, why, deadline, state, answered_by, created_at, closed_at) VALUES
  (1, '60000000-0000-4000-8000-000000000001', 'permission', '10000000-0000-4000-8000-000000000001', '40000000-0000-4000-8000-000000000001', '20000000-0000-4000-8000-000000000002', 'call_0', '{"id":"60000000-0000-4000-8000-000000000001","session_id":"10000000-0000-4000-8000-000000000001","tool_call_id":"call_0","tool_name":"bash","description":"Run make","action":"execute","params":null,"path":"/frozen/project"}', 'digest', '["make"]', 'no rule allows it', 1790000300, 'expired', '', 1790000003, 1790000303),
  (2, '60000000-0000-4000-8000-000000000002', 'question', '10000000-0000-4000-8000-000000000004', '40000000-0000-4000-8000-000000000007', '20000000-0000-4000-8000-000000000008', 'call_5', '{"id":"60000000-0000-4000-8000-000000000002","session_id":"10000000-0000-4000-8000-000000000004","tool_call_id":"call_5","questions":[{"id":"60000000-0000-4000-8000-000000000003","type":"yes_no","question":"Go on?","label":"","description":"Or not.","choices":[]}],"confirm_title":"","confirm_description":""}', '39210fc37d6e8993f692107818b8fef4589c4476fd135ad92bca4c5e02eca99c', '[]', '', 0, 'open', '', 1790000030, 0);
INSERT INTO grants (no, id, scope, session_id, tool, action, grains, ask_id, granted_by, created_at) VALUES
  (1, '70000000-0000-4000-8000-000000000001', 'session', '10000000-0000-4000-8000-000000000001', 'bash', 'execute', '["make"]', '60000000-0000-4000-8000-000000000001', '', 1790000003),
  (2, '70000000-0000-4000-8000-000000000002', 'workspace', '10000000-0000-4000-8000-000000000001', 'write', 'write', '["write:/frozen/project"]', '60000000-0000-4000-8000-000000000001', '', 1790000004);
UPDATE cancelled_runs SET pids = '[4711]', settled = 'not_stopped' WHERE settled = 'canceled';
