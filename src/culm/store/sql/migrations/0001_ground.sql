-- What this file is: its epoch, whether it was closed cleanly, how far its log is trimmed.
CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE sessions (
  no                 INTEGER PRIMARY KEY,
  id                 TEXT    NOT NULL UNIQUE,
  parent_id          TEXT    NOT NULL DEFAULT '',
  title              TEXT    NOT NULL,
  message_count      INTEGER NOT NULL DEFAULT 0 CHECK (message_count >= 0),
  prompt_tokens      INTEGER NOT NULL DEFAULT 0 CHECK (prompt_tokens >= 0),
  completion_tokens  INTEGER NOT NULL DEFAULT 0 CHECK (completion_tokens >= 0),
  summary_message_id TEXT    NOT NULL DEFAULT '',
  cost               REAL    NOT NULL DEFAULT 0 CHECK (cost >= 0),
  todos              TEXT    NOT NULL DEFAULT '[]',
  next_seq           INTEGER NOT NULL DEFAULT 1,  -- the order of its next message
  created_at         INTEGER NOT NULL,
  updated_at         INTEGER NOT NULL
);
CREATE INDEX sessions_by_parent ON sessions (parent_id, updated_at);

-- Clustered by session, so that listing one is a single range of small rows. Not WITHOUT ROWID:
-- there a row of 1 KB already spills onto a page of its own.
CREATE TABLE messages (
  place      INTEGER PRIMARY KEY,         -- sessions.no << 32 | order in the session
  id         TEXT    NOT NULL UNIQUE,
  role       TEXT    NOT NULL,
  parts      TEXT    NOT NULL,            -- JSON list; a part kept in `parts` is null here
  large      INTEGER NOT NULL DEFAULT 0,  -- how many are kept there
  model      TEXT    NOT NULL DEFAULT '',
  provider   TEXT    NOT NULL DEFAULT '',
  is_summary INTEGER NOT NULL DEFAULT 0,
  rev        INTEGER NOT NULL DEFAULT 0,
  is_open    INTEGER NOT NULL DEFAULT 0,  -- still being written by somebody
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL
);
CREATE INDEX messages_open ON messages (is_open) WHERE is_open = 1;
CREATE INDEX messages_of_users ON messages (created_at) WHERE role = 'user';

-- In the order of `wire.messages.RawMessage`, then what only the store needs.
CREATE VIEW message_rows AS
SELECT m.id, m.role, s.id AS session_id, m.parts, m.model, m.provider, m.created_at, m.updated_at,
       m.is_summary, m.rev, m.large, m.is_open, m.place
FROM messages m JOIN sessions s ON s.no = m.place >> 32;

-- Parts over 8 KiB, out of the way of the range above.
CREATE TABLE parts (
  message_id TEXT    NOT NULL,
  part       INTEGER NOT NULL,
  body       TEXT    NOT NULL,
  PRIMARY KEY (message_id, part)
) WITHOUT ROWID;

-- The text of open messages that their rows do not have yet.
CREATE TABLE chunks (
  message_id TEXT    NOT NULL,
  part       INTEGER NOT NULL,
  pos        INTEGER NOT NULL,  -- in code points
  kind       TEXT    NOT NULL,
  text       TEXT    NOT NULL,
  PRIMARY KEY (message_id, part, pos)
) WITHOUT ROWID;

-- One log of everything a client may be told, in the order it was committed.
CREATE TABLE events (
  seq        INTEGER PRIMARY KEY,
  type       TEXT    NOT NULL,
  op         TEXT    NOT NULL,
  session_id TEXT    NOT NULL,
  entity_id  TEXT    NOT NULL,
  fields     TEXT,              -- the payload, where no table holds the body
  at         INTEGER NOT NULL
);
