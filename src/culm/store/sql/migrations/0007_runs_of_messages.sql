-- In whose turn a message stands; empty if no run wrote it. So are those from before: which run they
-- were of was not kept, and a guess by their order would be wrong where turns were shared.
ALTER TABLE messages ADD COLUMN run_id TEXT NOT NULL DEFAULT '';

-- In the order of `wire.messages.RawMessage`, then what only the store needs.
DROP VIEW message_rows;
CREATE VIEW message_rows AS
SELECT m.id, m.role, s.id AS session_id, m.parts, m.model, m.provider, m.created_at, m.updated_at,
       m.is_summary, m.rev, m.run_id, m.large, m.is_open, m.place
FROM messages m JOIN sessions s ON s.no = m.place >> 32;
