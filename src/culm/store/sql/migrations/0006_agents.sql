-- Agents that were started for others, or by a client: who works for whom, and what became of it.
CREATE TABLE agents (
  no                INTEGER PRIMARY KEY,
  id                TEXT    NOT NULL UNIQUE,
  session_id        TEXT    NOT NULL UNIQUE,
  parent_id         TEXT    NOT NULL,             -- the agent above it; empty if a client started it
  parent_session_id TEXT    NOT NULL,
  name              TEXT    NOT NULL,
  role              TEXT    NOT NULL,
  provider          TEXT    NOT NULL,
  model             TEXT    NOT NULL,
  terms             TEXT    NOT NULL,             -- what else it was started with, as JSON
  budget            TEXT    NOT NULL,             -- limits, as JSON
  is_detached       INTEGER NOT NULL,
  is_read_only      INTEGER NOT NULL,
  worktree          TEXT    NOT NULL DEFAULT '',
  branch            TEXT    NOT NULL DEFAULT '',
  -- These follow its runs, in the same transactions.
  state             TEXT    NOT NULL DEFAULT 'pending',
  outcome           TEXT,
  reason            TEXT    NOT NULL DEFAULT '',
  run_id            TEXT    NOT NULL DEFAULT '',  -- its latest
  started_at        INTEGER NOT NULL DEFAULT 0,
  ended_at          INTEGER NOT NULL DEFAULT 0,
  -- These are true while a server runs it.
  waiting_for       TEXT    NOT NULL DEFAULT '',
  pid               INTEGER NOT NULL DEFAULT 0,
  created_at        INTEGER NOT NULL,
  -- These are derived from the links above and from `runs`, and can be made anew.
  depth             INTEGER NOT NULL,
  path              TEXT    NOT NULL,             -- agents from the top down to it, as JSON
  children          INTEGER NOT NULL DEFAULT 0,
  cost              REAL    NOT NULL DEFAULT 0,   -- of it and all below
  tokens            INTEGER NOT NULL DEFAULT 0,
  -- The agent as clients see it (`wire.agents.Agent`). Kept, since trees of thousands are listed:
  -- to take a row apart and put it together again costs ten times as much as to pass this on.
  shown             TEXT    NOT NULL GENERATED ALWAYS AS (json_object(
    'agent_id', id, 'parent_id', parent_id, 'session_id', session_id,
    'parent_session_id', parent_session_id, 'depth', depth, 'name', name, 'role', role,
    'provider', provider, 'model', model, 'state', state, 'waiting_for', waiting_for, 'pid', pid,
    'outcome', outcome, 'reason', reason, 'run_id', run_id,
    'is_detached', json(iif(is_detached, 'true', 'false')),
    'is_read_only', json(iif(is_read_only, 'true', 'false')),
    'worktree', worktree, 'branch', branch, 'children', children,
    'cost', json(printf('%!.17g', cost)), 'tokens', tokens, 'budget', json(budget),
    'created_at', created_at, 'started_at', started_at, 'ended_at', ended_at
  )) STORED
);
CREATE INDEX agents_of_parent ON agents (parent_id, no, id);
CREATE INDEX agents_by_path ON agents (path);  -- all below one are a range of it
CREATE INDEX agents_in_worktrees ON agents (no) WHERE worktree <> '';
CREATE INDEX agents_at_work ON agents (no) WHERE state <> 'ended';

-- For whom a run works: its agent, and the run that wants its result. A detached one outlives that.
ALTER TABLE runs ADD COLUMN agent_id      TEXT    NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN parent_run_id TEXT    NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN detached      INTEGER NOT NULL DEFAULT 0;
-- Of it and all that works for it; derived.
ALTER TABLE runs ADD COLUMN tree_steps    INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN tree_tokens   INTEGER NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN tree_cost     REAL    NOT NULL DEFAULT 0;
UPDATE runs SET tree_steps = steps, tree_tokens = prompt_tokens + completion_tokens, tree_cost = cost;
CREATE INDEX runs_of_parent ON runs (parent_run_id) WHERE parent_run_id <> '';
CREATE INDEX runs_of_agent ON runs (agent_id, seq) WHERE agent_id <> '';

-- Which agents lead to whoever asks, as JSON.
ALTER TABLE asks ADD COLUMN agent_path TEXT NOT NULL DEFAULT '[]';

-- Letters between agents, from the moment the server has seen them. Mailboxes hold what they say.
CREATE TABLE letters (
  no             INTEGER PRIMARY KEY,
  id             TEXT    NOT NULL UNIQUE,
  sender         TEXT    NOT NULL,
  recipient      TEXT    NOT NULL,
  kind           TEXT    NOT NULL,
  state          TEXT    NOT NULL,
  correlation_id TEXT    NOT NULL DEFAULT '',
  answer_id      TEXT    NOT NULL DEFAULT '',
  run_id         TEXT    NOT NULL DEFAULT '',  -- the run that brings it to its recipient
  created_at     INTEGER NOT NULL,
  changed_at     INTEGER NOT NULL
);
CREATE INDEX letters_of_run ON letters (run_id) WHERE run_id <> '';
CREATE INDEX letters_to ON letters (recipient, no);
