-- name: add_ask
INSERT INTO asks (id, kind, session_id, run_id, message_id, call_id, request, digest, grains, why,
  deadline, state, created_at, agent_path)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'open', ?, ?) RETURNING *

-- name: close_ask
UPDATE asks SET state = ?, answered_by = ?, closed_at = ?,
  request = CASE kind WHEN 'permission' THEN json_set(request, '$.params', NULL) ELSE request END
WHERE id = ? AND state = 'open' RETURNING *

-- name: close_asks_of_run
UPDATE asks SET state = 'withdrawn', closed_at = ?,
  request = CASE kind WHEN 'permission' THEN json_set(request, '$.params', NULL) ELSE request END
WHERE run_id = ? AND state = 'open' RETURNING *

-- name: open_asks_of_run
SELECT * FROM asks WHERE run_id = ? AND state = 'open' ORDER BY no

-- name: decided_ask
SELECT 1 FROM asks a LEFT JOIN calls c ON c.message_id = a.message_id AND c.call_id = a.call_id
WHERE a.message_id = ? AND (a.state IN ('denied', 'expired', 'canceled')
  OR a.state IN ('allowed', 'answered') AND c.state = 'known')

-- name: refused_asks
SELECT call_id, kind, state FROM asks
WHERE message_id = ? AND state IN ('denied', 'expired', 'canceled')

-- name: asks
SELECT * FROM asks WHERE kind = ?1 AND (?2 = '' OR session_id = ?2) AND (?3 = '' OR state = ?3)
ORDER BY no DESC LIMIT ?4

-- name: delete_asks_of_session
DELETE FROM asks WHERE session_id = ?

-- name: add_grant
INSERT INTO grants (id, scope, session_id, tool, action, grains, ask_id, granted_by, created_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: grants
SELECT * FROM grants ORDER BY no

-- name: delete_grant
DELETE FROM grants WHERE id = ? RETURNING *

-- name: delete_grants_of_session
DELETE FROM grants WHERE session_id = ? AND scope = 'session'
