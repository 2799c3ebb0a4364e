-- name: add_agent
INSERT INTO agents (id, session_id, parent_id, parent_session_id, name, role, provider, model, terms,
                    budget, is_detached, is_read_only, worktree, branch, created_at, depth, path)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING *

-- name: one_child_more
UPDATE agents SET children = children + 1 WHERE id = ? RETURNING *

-- name: one_child_less
UPDATE agents SET children = children - 1 WHERE id = ? RETURNING *

-- name: get_agent
SELECT * FROM agents WHERE id = ?

-- name: agent_of_session
SELECT * FROM agents WHERE session_id = ?

-- name: agents_of_parent
SELECT * FROM agents WHERE parent_id = ? ORDER BY no

-- name: all_agents
SELECT * FROM agents ORDER BY no

-- name: agents_at_work
SELECT * FROM agents WHERE state <> 'ended' ORDER BY no

-- name: agents_below
WITH RECURSIVE below (no, id) AS (
  SELECT no, id FROM agents WHERE parent_id = ?1
  UNION
  SELECT a.no, a.id FROM agents a JOIN below b ON a.parent_id = b.id
)
SELECT * FROM agents WHERE no IN (SELECT no FROM below) ORDER BY no

-- name: all_agents_shown
SELECT shown FROM agents ORDER BY no

-- name: agents_below_shown
SELECT shown FROM agents WHERE no IN (SELECT no FROM agents WHERE path > ? AND path < ?) ORDER BY no

-- name: agents_in_worktrees
SELECT id FROM agents WHERE worktree <> '' ORDER BY no DESC

-- name: worktrees_around_agent
SELECT id FROM agents
WHERE worktree <> '' AND id IN (SELECT value FROM json_each((SELECT path FROM agents WHERE id = ?)))

-- name: agent_to_sweep
SELECT * FROM agents AS own WHERE id = ? AND worktree <> '' AND NOT EXISTS (
  SELECT 1 FROM agents AS other, json_each(other.path) AS above
  WHERE other.state <> 'ended' AND above.value = own.id
)

-- name: take_up_agent
UPDATE agents SET state = 'pending', outcome = NULL, reason = '', run_id = ?, ended_at = 0
WHERE id = ? AND (state = 'ended' OR run_id = '') RETURNING *

-- name: begin_agent
UPDATE agents SET state = 'running', outcome = NULL, reason = '', run_id = ?, started_at = ?,
  ended_at = 0, waiting_for = ''
WHERE id = ? RETURNING *

-- name: end_agent
UPDATE agents SET state = 'ended', outcome = ?, reason = ?, ended_at = ?, waiting_for = '', pid = 0
WHERE id = ? AND run_id = ? RETURNING *

-- name: end_lost_agents
UPDATE agents SET state = 'ended', outcome = 'interrupted', ended_at = ?
WHERE state <> 'ended' AND NOT EXISTS (
  SELECT 1 FROM runs WHERE agent_id = agents.id AND agent_id <> '' AND state <> 'ended'
) RETURNING *

-- name: rest_agents
UPDATE agents SET waiting_for = '', pid = 0 WHERE waiting_for <> '' OR pid <> 0 RETURNING *

-- name: note_agent
UPDATE agents SET waiting_for = ?, pid = ? WHERE id = ? AND state <> 'ended' RETURNING *

-- name: set_budget
UPDATE agents SET budget = ? WHERE id = ? RETURNING *

-- name: set_worktree
UPDATE agents SET worktree = ?, branch = ?, terms = ? WHERE id = ? RETURNING *

-- name: delete_agent_of_session
DELETE FROM agents WHERE session_id = ? RETURNING *

-- name: sessions_above
WITH RECURSIVE above (id) AS (
  SELECT parent_id FROM sessions WHERE id = ?1
  UNION
  SELECT s.parent_id FROM sessions s JOIN above a ON s.id = a.id
)
SELECT id FROM above WHERE id <> ''

-- name: add_cost
UPDATE sessions SET cost = cost + ?, updated_at = ? WHERE id = ? RETURNING *

-- name: count_on_agent
UPDATE agents SET cost = cost + ?, tokens = tokens + ? WHERE session_id = ? RETURNING *

-- name: count_on_tree
WITH RECURSIVE above (id) AS (
  SELECT ?4
  UNION
  SELECT r.parent_run_id FROM runs r JOIN above a ON r.id = a.id WHERE r.parent_run_id <> ''
)
UPDATE runs SET tree_steps = tree_steps + ?1, tree_tokens = tree_tokens + ?2,
  tree_cost = tree_cost + ?3
WHERE id IN (SELECT id FROM above)

-- name: agent_links
SELECT id, parent_id, worktree FROM agents ORDER BY no

-- name: cut_agent
UPDATE agents SET parent_id = '', parent_session_id = '' WHERE id = ?

-- name: cut_session_of_agent
UPDATE sessions SET parent_id = '' WHERE id = (SELECT session_id FROM agents WHERE id = ?)

-- name: runs_for_rebuild
SELECT id, session_id, agent_id, parent_run_id, steps, prompt_tokens + completion_tokens AS tokens,
  cost, tree_steps, tree_tokens, tree_cost
FROM runs ORDER BY seq

-- name: set_derived_of_agent
UPDATE agents SET depth = ?, path = ?, children = ?, cost = ?, tokens = ? WHERE id = ?

-- name: set_derived_of_run
UPDATE runs SET tree_steps = ?, tree_tokens = ?, tree_cost = ? WHERE id = ?

-- name: add_letter
INSERT INTO letters (id, sender, recipient, kind, state, correlation_id, run_id, created_at, changed_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING RETURNING *

-- name: get_letter
SELECT * FROM letters WHERE id = ?

-- name: letters
SELECT * FROM letters WHERE (?1 = '' OR recipient = ?1 OR sender = ?1) ORDER BY no DESC LIMIT ?2

-- name: set_letter_state
UPDATE letters SET state = ?, changed_at = ? WHERE id = ? AND state = ? RETURNING *

-- name: admit_letters_of_run
UPDATE letters SET state = 'admitted', changed_at = ?
WHERE run_id = ? AND run_id <> '' AND state = 'delivered' RETURNING *

-- name: answer_letter
UPDATE letters SET state = 'answered', answer_id = ?1, changed_at = ?2
WHERE id = ?3 AND state IN ('delivered', 'admitted') AND ?4 IN ('', recipient) RETURNING *

-- name: unanswered_asks
SELECT l.*, r.outcome FROM letters l JOIN runs r ON r.id = l.run_id
WHERE l.kind = 'ask' AND l.state = 'admitted' AND l.changed_at > ?1 AND r.state = 'ended'
  AND l.no > ?2
  -- External programs (cli-*) have no row; any other sender without a row has been deleted.
  AND (l.sender LIKE 'cli-%' OR EXISTS (SELECT 1 FROM sessions WHERE id = l.sender)
    OR EXISTS (SELECT 1 FROM agents WHERE id = l.sender))
ORDER BY l.no LIMIT ?3

-- name: askers_left
SELECT DISTINCT l.sender FROM letters l JOIN runs r ON r.id = l.run_id
WHERE l.kind = 'ask' AND l.state = 'admitted' AND l.changed_at > ?1 AND r.state = 'ended'
  AND (l.sender LIKE 'cli-%' OR EXISTS (SELECT 1 FROM sessions WHERE id = l.sender)
    OR EXISTS (SELECT 1 FROM agents WHERE id = l.sender))

-- name: delete_letters_to
DELETE FROM letters WHERE recipient = ?

-- name: add_deleted_mailbox
INSERT OR IGNORE INTO deleted_mailboxes VALUES (?)

-- name: deleted_mailboxes
SELECT address FROM deleted_mailboxes

-- name: forget_deleted_mailbox
DELETE FROM deleted_mailboxes WHERE address = ?

-- name: letter_of_run
SELECT 1 FROM letters WHERE run_id = ? AND run_id <> ''
