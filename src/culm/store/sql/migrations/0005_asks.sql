-- What an agent waits for a person for: permission for one call, or answers to its questions.
CREATE TABLE asks (
  no         INTEGER PRIMARY KEY,
  id         TEXT    NOT NULL UNIQUE,
  kind       TEXT    NOT NULL,             -- permission or question
  session_id TEXT    NOT NULL,
  run_id     TEXT    NOT NULL,
  message_id TEXT    NOT NULL,
  call_id    TEXT    NOT NULL,
  request    TEXT    NOT NULL,             -- as clients are shown it
  digest     TEXT    NOT NULL DEFAULT '',  -- of the action as it was resolved
  grains     TEXT    NOT NULL DEFAULT '[]',
  why        TEXT    NOT NULL DEFAULT '',
  deadline   INTEGER NOT NULL DEFAULT 0,
  state      TEXT    NOT NULL,
  answered_by TEXT   NOT NULL DEFAULT '',
  created_at INTEGER NOT NULL,
  closed_at  INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX asks_open ON asks (run_id) WHERE state = 'open';
CREATE INDEX asks_of_session ON asks (session_id, no);
CREATE INDEX asks_of_message ON asks (message_id);

-- What a person allowed for more than one call.
CREATE TABLE grants (
  no         INTEGER PRIMARY KEY,
  id         TEXT    NOT NULL UNIQUE,
  scope      TEXT    NOT NULL,  -- session or workspace
  session_id TEXT    NOT NULL,  -- in which it was asked for
  tool       TEXT    NOT NULL,
  action     TEXT    NOT NULL,
  grains     TEXT    NOT NULL,
  ask_id     TEXT    NOT NULL,
  granted_by TEXT    NOT NULL,
  created_at INTEGER NOT NULL
);

-- What its caller said about permissions, and whether anybody is there to be asked.
ALTER TABLE runs ADD COLUMN headless INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN approve  TEXT    NOT NULL DEFAULT 'null';

-- Processes that were still there when a cancelled run was given up: a list of pids, as JSON.
ALTER TABLE cancelled_runs ADD COLUMN pids TEXT NOT NULL DEFAULT '[]';
