-- name: get_meta
SELECT value FROM meta WHERE key = ?

-- name: set_meta
INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value

-- name: delete_meta
DELETE FROM meta WHERE key = ?

-- name: add_event
INSERT INTO events (seq, type, op, session_id, entity_id, fields, at) VALUES (?, ?, ?, ?, ?, ?, ?)

-- name: last_seq
SELECT MAX(
  COALESCE((SELECT MAX(seq) FROM events), 0),
  COALESCE((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'trimmed_to'), 0)
)

-- name: events_after
SELECT seq, type, op, session_id, entity_id, fields FROM events
WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?

-- name: first_fresh_seq
SELECT COALESCE((SELECT seq FROM events WHERE at >= ? ORDER BY seq LIMIT 1), ?)

-- name: trim_events
DELETE FROM events WHERE seq <= ?

-- name: strip_events_of_session
UPDATE events SET fields = json_replace(
  fields,
  '$.error', iif(fields ->> '$.error' <> '', 'The session was deleted.', ''),
  '$.reason', '', '$.description', '', '$.session_title', '', '$.name', '', '$.worktree', '',
  '$.branch', '', '$.items', json('[]'), '$.grains', json('[]')
)
WHERE session_id = ? AND fields IS NOT NULL
  AND NOT (type = 'grant_changed' AND entity_id IN (SELECT id FROM grants))

-- name: add_session
INSERT INTO sessions (id, parent_id, title, created_at, updated_at) VALUES (?, ?, ?, ?, ?)
RETURNING *

-- name: count_sessions
SELECT COUNT(*) FROM sessions

-- name: rename_session
UPDATE sessions SET title = ?, updated_at = ? WHERE id = ? RETURNING *

-- name: delete_session
DELETE FROM sessions WHERE id = ?

-- name: get_session
SELECT * FROM sessions WHERE id = ?

-- name: top_sessions
SELECT * FROM sessions WHERE parent_id = '' ORDER BY updated_at DESC, no DESC

-- name: all_sessions
SELECT * FROM sessions ORDER BY no

-- name: next_message
UPDATE sessions SET next_seq = next_seq + 1, message_count = message_count + 1, updated_at = ?
WHERE id = ? RETURNING *

-- name: one_message_less
UPDATE sessions SET message_count = message_count - 1, updated_at = ? WHERE no = ? RETURNING *

-- name: add_message
INSERT INTO messages
  (place, id, role, model, provider, is_summary, created_at, run_id, parts, large, rev, is_open,
   updated_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: save_message
UPDATE messages
SET model = ?, provider = ?, parts = ?, large = ?, rev = ?, is_open = ?, updated_at = ?
WHERE id = ?

-- name: delete_message
DELETE FROM messages WHERE id = ? RETURNING place >> 32

-- name: delete_messages_of_session
DELETE FROM messages WHERE place BETWEEN ? AND ?

-- name: get_message
SELECT * FROM message_rows WHERE id = ?

-- name: messages_of_session
SELECT m.id, m.role, s.id, m.parts, m.model, m.provider, m.created_at, m.updated_at,
       m.is_summary, m.rev, m.run_id, m.large, m.is_open
FROM sessions s JOIN messages m ON m.place BETWEEN s.no << 32 AND MIN(?2, s.no + 1 << 32) - 1
WHERE s.id = ?1 ORDER BY m.place DESC LIMIT ?3

-- name: place_of_message
SELECT place FROM message_rows WHERE id = ? AND session_id = ?

-- name: messages_from
SELECT m.id, m.role, s.id, m.parts, m.model, m.provider, m.created_at, m.updated_at,
       m.is_summary, m.rev, m.run_id, m.large, m.is_open
FROM messages first
JOIN sessions s ON s.no = first.place >> 32
JOIN messages m ON m.place BETWEEN first.place AND (s.no << 32) + 4294967295
WHERE first.id = ? ORDER BY m.place

-- name: all_messages
SELECT * FROM message_rows ORDER BY place LIMIT ?

-- name: user_messages_of_session
SELECT m.id, m.role, s.id, m.parts, m.model, m.provider, m.created_at, m.updated_at,
       m.is_summary, m.rev, m.run_id, m.large, m.is_open
FROM sessions s JOIN messages m ON m.place BETWEEN s.no << 32 AND (s.no << 32) + 4294967295
WHERE s.id = ? AND m.role = 'user' ORDER BY m.place DESC LIMIT ?

-- name: user_messages
SELECT * FROM message_rows WHERE role = 'user'
ORDER BY created_at DESC, place DESC LIMIT ?

-- name: open_messages
SELECT * FROM message_rows WHERE is_open = 1 ORDER BY place

-- name: add_part
INSERT INTO parts (message_id, part, body) VALUES (?, ?, ?)

-- name: parts_of
SELECT part, body FROM parts WHERE message_id = ?

-- name: delete_parts
DELETE FROM parts WHERE message_id = ?

-- name: delete_parts_of_session
DELETE FROM parts WHERE message_id IN (SELECT id FROM messages WHERE place BETWEEN ? AND ?)

-- name: is_open_at
SELECT 1 FROM messages WHERE id = ? AND is_open = 1 AND rev = ?

-- name: add_chunk
INSERT INTO chunks (message_id, part, pos, kind, text) VALUES (?, ?, ?, ?, ?)

-- name: chunks_of
SELECT part, pos, kind, text FROM chunks WHERE message_id = ? ORDER BY part, pos

-- name: delete_chunks
DELETE FROM chunks WHERE message_id = ?

-- name: delete_chunks_of_session
DELETE FROM chunks WHERE message_id IN (SELECT id FROM messages WHERE place BETWEEN ? AND ?)

-- name: add_file
INSERT INTO files (id, session_id, path, version, content, created_at, updated_at)
VALUES (?1, ?2, ?3, (SELECT COALESCE(MAX(version) + 1, 0) FROM files WHERE path = ?3), ?4, ?5, ?5)
RETURNING version

-- name: get_file
SELECT * FROM files WHERE id = ?

-- name: files_of_session
SELECT * FROM files WHERE session_id = ? ORDER BY version, no

-- name: has_latest_content
SELECT content = ?3 FROM files WHERE session_id = ?1 AND path = ?2 ORDER BY version DESC LIMIT 1

-- name: delete_files_of_session
DELETE FROM files WHERE session_id = ?

-- name: mark_read
INSERT INTO read_files (session_id, path, read_no, read_at, stamp)
VALUES (
  ?1, ?2, (SELECT COALESCE(MAX(read_no), 0) + 1 FROM read_files WHERE session_id = ?1), ?3, ?4
)
ON CONFLICT (session_id, path) DO UPDATE SET
  read_no = excluded.read_no, read_at = excluded.read_at,
  stamp = CASE WHEN excluded.stamp = '' THEN stamp ELSE excluded.stamp END

-- name: forget_first_read
DELETE FROM read_files WHERE session_id = ?1 AND path = (
  SELECT path FROM read_files WHERE session_id = ?1 ORDER BY read_no LIMIT 1
)

-- name: count_read_files
SELECT COUNT(*) FROM read_files WHERE session_id = ?

-- name: last_read
SELECT read_at, stamp FROM read_files WHERE session_id = ? AND path = ?

-- name: read_files
SELECT path FROM read_files WHERE session_id = ? ORDER BY read_no DESC

-- name: delete_read_files_of_session
DELETE FROM read_files WHERE session_id = ?

-- name: add_usage
UPDATE sessions SET
  prompt_tokens = CASE WHEN ?1 > 0 THEN ?1 ELSE prompt_tokens END,
  completion_tokens = CASE WHEN ?2 > 0 THEN ?2 ELSE completion_tokens END,
  cost = cost + ?3,
  updated_at = ?4
WHERE id = ?5 RETURNING *

-- name: set_summary
UPDATE sessions SET
  summary_message_id = ?1, prompt_tokens = 0, completion_tokens = ?2, cost = cost + ?3,
  updated_at = ?4
WHERE id = ?5 RETURNING *

-- name: set_title
UPDATE sessions SET title = CASE WHEN title = ?1 THEN ?2 ELSE title END, cost = cost + ?3,
  updated_at = ?4
WHERE id = ?5 RETURNING *

-- name: set_todos
UPDATE sessions SET todos = ?, updated_at = ? WHERE id = ? RETURNING *

-- name: add_run
INSERT INTO runs (id, session_id, kind, state, given, digest, prompt, limits,
                  provider, model, created_at, place, headless, approve,
                  agent_id, parent_run_id, detached)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING *

-- name: add_body
INSERT INTO run_bodies (run_id, prompt, attachments) VALUES (?, ?, ?)

-- name: get_body
SELECT prompt, attachments FROM run_bodies WHERE run_id = ?

-- name: edit_body
UPDATE run_bodies SET prompt = ? WHERE run_id = ?

-- name: delete_body
DELETE FROM run_bodies WHERE run_id = ?

-- name: next_place
SELECT COALESCE(MAX(place), 0) + 1 FROM runs WHERE session_id = ? AND state <> 'ended'

-- name: get_run
SELECT * FROM runs WHERE id = ?

-- name: runs
SELECT * FROM runs WHERE (?1 = '' OR session_id = ?1) AND (?2 = '' OR state = ?2)
ORDER BY seq DESC LIMIT ?3

-- name: unfinished_runs
SELECT * FROM runs WHERE state <> 'ended' ORDER BY session_id, place, seq

-- name: count_unfinished_runs
SELECT COUNT(*) FROM runs WHERE state <> 'ended' AND state <> 'held'

-- name: queued_runs
SELECT id, prompt FROM runs WHERE session_id = ? AND state <> 'ended' AND state = 'queued'
ORDER BY place, seq

-- name: start_run
UPDATE runs SET state = 'active', started_at = ?
WHERE id = ? AND state IN ('accepted', 'queued') RETURNING *

-- name: fold_run
UPDATE runs SET state = 'folded', host_id = ?, started_at = ?
WHERE id = ? AND state = 'queued' RETURNING *

-- name: hold_run
UPDATE runs SET state = 'held', title = ?
WHERE id = ? AND state IN ('accepted', 'queued') RETURNING *

-- name: release_run
UPDATE runs SET state = ?, title = '', place = ? WHERE id = ? AND state = 'held' RETURNING *

-- name: end_run
UPDATE runs SET state = 'ended', outcome = ?, title = ?, details = ?, message_id = ?, ended_at = ?
WHERE id = ? AND state <> 'ended' RETURNING *

-- name: folded_runs
SELECT id FROM runs WHERE host_id <> '' AND host_id = ? AND state = 'folded' ORDER BY place, seq

-- name: set_limits
UPDATE runs SET limits = ? WHERE id = ?

-- name: name_model
UPDATE runs SET provider = ?, model = ? WHERE id = ?

-- name: count_on_run
UPDATE runs SET steps = steps + 1, prompt_tokens = prompt_tokens + ?,
  completion_tokens = completion_tokens + ?, cost = cost + ?, estimated = estimated OR ?
WHERE id = ?

-- name: edit_run
UPDATE runs SET prompt = ? WHERE id = ? AND state = 'queued' RETURNING *

-- name: place_run
UPDATE runs SET place = ? WHERE id = ? AND state = 'queued'

-- name: held_runs_of_session
SELECT id FROM runs WHERE session_id = ? AND state <> 'ended' AND state = 'held'

-- name: delete_bodies_of_session
DELETE FROM run_bodies WHERE run_id IN (SELECT id FROM runs WHERE session_id = ?)

-- name: delete_runs_of_session
DELETE FROM runs WHERE session_id = ?

-- name: delete_calls_of_session
DELETE FROM calls WHERE run_id IN (SELECT id FROM runs WHERE session_id = ?)

-- name: delete_cancelled_runs_of_session
DELETE FROM cancelled_runs WHERE cancel_id IN (SELECT id FROM cancels WHERE session_id = ?)

-- name: delete_cancels_of_session
DELETE FROM cancels WHERE session_id = ?

-- name: add_cancel
INSERT INTO cancels (id, session_id, target, at) VALUES (?, ?, ?, ?)

-- name: add_cancelled_run
INSERT INTO cancelled_runs (cancel_id, run_id) VALUES (?, ?)

-- name: settle_cancelled_run
UPDATE cancelled_runs SET settled = ?, pids = ? WHERE run_id = ? AND settled IS NULL
RETURNING cancel_id

-- name: get_cancel
SELECT * FROM cancels WHERE id = ?

-- name: runs_of_cancel
SELECT run_id, settled, pids FROM cancelled_runs WHERE cancel_id = ? ORDER BY run_id

-- name: is_cancelled
SELECT 1 FROM cancelled_runs WHERE run_id = ?

-- name: add_call
INSERT INTO calls (message_id, call_id, no, run_id, name, crash, state)
VALUES (?, ?, ?, ?, ?, ?, 'known')

-- name: set_call_state
UPDATE calls SET state = ? WHERE message_id = ? AND call_id = ?

-- name: calls_of_message
SELECT call_id, crash, state FROM calls WHERE message_id = ? ORDER BY no

-- name: open_message_of_session
SELECT * FROM message_rows WHERE is_open = 1 AND session_id = ? ORDER BY place

-- name: answers_of_run
SELECT COUNT(*) FROM sessions s
JOIN messages m ON m.place BETWEEN s.no << 32 AND (s.no << 32) + 4294967295
WHERE s.id = ? AND m.run_id = ? AND m.role = 'assistant'

-- name: last_message_of_session
SELECT * FROM message_rows
WHERE place BETWEEN (SELECT no << 32 FROM sessions WHERE id = ?1)
            AND (SELECT (no << 32) + 4294967295 FROM sessions WHERE id = ?1)
  AND is_summary = 0
ORDER BY place DESC LIMIT 1
