-- Runs that have started. A run that was folded into another has no usage of its own.

-- name: usage
SELECT COUNT(*) AS runs, COALESCE(SUM(prompt_tokens), 0) AS prompt_tokens,
  COALESCE(SUM(completion_tokens), 0) AS completion_tokens, COALESCE(SUM(cost), 0) AS cost,
  COALESCE(SUM(estimated), 0) AS estimated_runs
FROM runs WHERE started_at > 0 AND host_id = '' AND created_at >= ?

-- name: usage_by_model
SELECT provider, model, COUNT(*) AS runs, SUM(prompt_tokens) AS prompt_tokens,
  SUM(completion_tokens) AS completion_tokens, SUM(cost) AS cost, SUM(estimated) AS estimated_runs
FROM runs WHERE started_at > 0 AND host_id = '' AND created_at >= ?
GROUP BY provider, model
ORDER BY SUM(cost) DESC, SUM(prompt_tokens + completion_tokens) DESC, provider, model LIMIT ?

-- name: usage_by_day
SELECT date(created_at + ?2, 'unixepoch') AS day, COUNT(*) AS runs,
  SUM(prompt_tokens) AS prompt_tokens, SUM(completion_tokens) AS completion_tokens,
  SUM(cost) AS cost, SUM(estimated) AS estimated_runs
FROM runs WHERE started_at > 0 AND host_id = '' AND created_at >= ?1
GROUP BY day ORDER BY day DESC LIMIT ?3

-- name: usage_by_session
WITH RECURSIVE tops (id, top) AS (
  SELECT id, id FROM sessions WHERE parent_id = ''
  UNION ALL
  SELECT s.id, t.top FROM tops t JOIN sessions s ON s.parent_id = t.id
)
SELECT COALESCE(t.top, r.session_id) AS session_id, COUNT(*) AS runs,
  SUM(r.prompt_tokens) AS prompt_tokens, SUM(r.completion_tokens) AS completion_tokens,
  SUM(r.cost) AS cost, SUM(r.estimated) AS estimated_runs,
  COALESCE(
    (SELECT title FROM sessions s WHERE s.id = COALESCE(t.top, r.session_id)), ''
  ) AS title
FROM runs r LEFT JOIN tops t ON t.id = r.session_id
WHERE r.started_at > 0 AND r.host_id = '' AND r.created_at >= ?
GROUP BY COALESCE(t.top, r.session_id)
ORDER BY SUM(r.cost) DESC, SUM(r.prompt_tokens + r.completion_tokens) DESC, session_id LIMIT ?
