-- Events with fields of their own, which the deletion of a session strips of text.
CREATE INDEX events_of_session ON events (session_id) WHERE fields IS NOT NULL;

-- The message has the text of an answer.
UPDATE events SET fields = json_replace(fields, '$.text', '')
WHERE type = 'run_complete' AND fields ->> '$.text' <> '';

-- Events of sessions that were deleted before.
UPDATE events SET fields = json_replace(
  fields,
  '$.error', iif(fields ->> '$.error' <> '', 'The session was deleted.', ''),
  '$.reason', '', '$.description', '', '$.session_title', '', '$.name', '', '$.worktree', '',
  '$.branch', '', '$.items', json('[]'), '$.grains', json('[]')
)
WHERE fields IS NOT NULL AND session_id <> '' AND session_id NOT IN (SELECT id FROM sessions)
  AND NOT (type = 'grant_changed' AND entity_id IN (SELECT id FROM grants));

-- Mailboxes of deleted sessions and agents that are not removed yet.
CREATE TABLE deleted_mailboxes (address TEXT PRIMARY KEY) WITHOUT ROWID;

-- Text that was deleted before may be anywhere in the file.
INSERT INTO meta (key, value) SELECT 'erase_due', '1' WHERE EXISTS (SELECT 1 FROM events);
