-- What was asked of the agent, from the moment it was accepted to its end and after.
CREATE TABLE runs (
  seq               INTEGER PRIMARY KEY AUTOINCREMENT,  -- in which order they were accepted
  id                TEXT    NOT NULL UNIQUE,
  session_id        TEXT    NOT NULL,
  kind              TEXT    NOT NULL,
  state             TEXT    NOT NULL,
  place             INTEGER NOT NULL DEFAULT 0,         -- in the queue of its session
  given             INTEGER NOT NULL,                   -- whether the caller chose the id
  digest            TEXT    NOT NULL,                   -- of all that was asked
  prompt            TEXT    NOT NULL,                   -- its beginning
  limits            TEXT    NOT NULL DEFAULT '{}',
  provider          TEXT    NOT NULL DEFAULT '',
  model             TEXT    NOT NULL DEFAULT '',
  outcome           TEXT,
  title             TEXT    NOT NULL DEFAULT '',
  details           TEXT    NOT NULL DEFAULT '',
  host_id           TEXT    NOT NULL DEFAULT '',        -- the run it was folded into
  message_id        TEXT    NOT NULL DEFAULT '',        -- its last answer
  steps             INTEGER NOT NULL DEFAULT 0,
  prompt_tokens     INTEGER NOT NULL DEFAULT 0,
  completion_tokens INTEGER NOT NULL DEFAULT 0,
  cost              REAL    NOT NULL DEFAULT 0,
  estimated         INTEGER NOT NULL DEFAULT 0,
  created_at        INTEGER NOT NULL,
  started_at        INTEGER NOT NULL DEFAULT 0,
  ended_at          INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX runs_of_session ON runs (session_id, seq);
CREATE INDEX runs_unfinished ON runs (session_id, place, seq) WHERE state <> 'ended';
CREATE INDEX runs_of_host ON runs (host_id) WHERE host_id <> '';

-- What was asked in full, until the user message has it. Apart from `runs`, whose rows stay small.
CREATE TABLE run_bodies (
  run_id      TEXT PRIMARY KEY,
  prompt      TEXT NOT NULL,
  attachments TEXT NOT NULL
);

-- Which runs somebody cancelled. Settled when each of them has its word.
CREATE TABLE cancels (
  id         TEXT    PRIMARY KEY,
  session_id TEXT    NOT NULL,
  target     TEXT    NOT NULL,  -- session or run
  at         INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE cancelled_runs (
  cancel_id TEXT NOT NULL,
  run_id    TEXT NOT NULL,
  settled   TEXT,               -- canceled, finished_first or not_stopped
  PRIMARY KEY (cancel_id, run_id)
) WITHOUT ROWID;
CREATE INDEX cancels_of_run ON cancelled_runs (run_id);

-- Every call of a tool that a run has begun to answer.
CREATE TABLE calls (
  message_id TEXT    NOT NULL,
  call_id    TEXT    NOT NULL,
  no         INTEGER NOT NULL,  -- its order in the message
  run_id     TEXT    NOT NULL,
  name       TEXT    NOT NULL,
  crash      TEXT    NOT NULL,  -- again, ask or never
  state      TEXT    NOT NULL,  -- known, started or answered
  PRIMARY KEY (message_id, call_id)
) WITHOUT ROWID;
CREATE INDEX calls_of_run ON calls (run_id);
