BEGIN TRANSACTION;
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
INSERT INTO "agents" VALUES(1,'80000000-0000-4000-8000-000000000001','10000000-0000-4000-8000-000000000005','10000000-0000-4000-8000-000000000001','10000000-0000-4000-8000-000000000001','Lead','worker','demo','demo-1','{"prompt":"Lead it."}','{"steps":9}',0,0,'','','ended','completed','','40000000-0000-4000-8000-000000000008',1790000040,1790000043,'',0,1790000040,1,'["10000000-0000-4000-8000-000000000001","80000000-0000-4000-8000-000000000001"]',2,0.5,150);
INSERT INTO "agents" VALUES(2,'80000000-0000-4000-8000-000000000002','10000000-0000-4000-8000-000000000006','80000000-0000-4000-8000-000000000001','10000000-0000-4000-8000-000000000005','Leaf','explorer','demo','demo-1','{"prompt":"Count."}','{}',1,1,'','','running',NULL,'','40000000-0000-4000-8000-000000000009',1790000041,0,'ask',4712,1790000041,2,'["10000000-0000-4000-8000-000000000001","80000000-0000-4000-8000-000000000001","80000000-0000-4000-8000-000000000002"]',0,0.25,50);
INSERT INTO "agents" VALUES(3,'80000000-0000-4000-8000-000000000003','10000000-0000-4000-8000-000000000007','80000000-0000-4000-8000-000000000001','10000000-0000-4000-8000-000000000005','Later','worker','demo','demo-1','{"prompt":"Wait."}','{}',0,0,'','','pending',NULL,'','40000000-0000-4000-8000-00000000000b',0,0,'slot',0,1790000042,2,'["10000000-0000-4000-8000-000000000001","80000000-0000-4000-8000-000000000001","80000000-0000-4000-8000-000000000003"]',0,0.0,0);
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
, agent_path TEXT NOT NULL DEFAULT '[]');
INSERT INTO "asks" VALUES(1,'60000000-0000-4000-8000-000000000001','permission','10000000-0000-4000-8000-000000000001','40000000-0000-4000-8000-000000000001','20000000-0000-4000-8000-000000000002','call_0','{"id":"60000000-0000-4000-8000-000000000001","session_id":"10000000-0000-4000-8000-000000000001","tool_call_id":"call_0","tool_name":"bash","description":"Run make","action":"execute","params":null,"path":"/frozen/project"}','digest','["make"]','no rule allows it',1790000300,'expired','',1790000003,1790000303,'[]');
INSERT INTO "asks" VALUES(2,'60000000-0000-4000-8000-000000000002','question','10000000-0000-4000-8000-000000000004','40000000-0000-4000-8000-000000000007','20000000-0000-4000-8000-000000000008','call_5','{"id":"60000000-0000-4000-8000-000000000002","session_id":"10000000-0000-4000-8000-000000000004","tool_call_id":"call_5","questions":[{"id":"60000000-0000-4000-8000-000000000003","type":"yes_no","question":"Go on?","label":"","description":"Or not.","choices":[]}],"confirm_title":"","confirm_description":""}','39210fc37d6e8993f692107818b8fef4589c4476fd135ad92bca4c5e02eca99c','[]','',0,'open','',1790000030,0,'[]');
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
INSERT INTO "calls" VALUES('20000000-0000-4000-8000-000000000006','call_1',0,'40000000-0000-4000-8000-000000000004','bash','ask','started');
INSERT INTO "calls" VALUES('20000000-0000-4000-8000-000000000006','call_2',1,'40000000-0000-4000-8000-000000000004','write','again','started');
INSERT INTO "calls" VALUES('20000000-0000-4000-8000-000000000006','call_3',2,'40000000-0000-4000-8000-000000000004','agent','never','started');
INSERT INTO "calls" VALUES('20000000-0000-4000-8000-000000000006','call_4',3,'40000000-0000-4000-8000-000000000004','view','again','known');
INSERT INTO "calls" VALUES('20000000-0000-4000-8000-000000000008','call_5',0,'40000000-0000-4000-8000-000000000007','question','again','known');
CREATE TABLE cancelled_runs (
  cancel_id TEXT NOT NULL,
  run_id    TEXT NOT NULL,
  settled   TEXT, pids TEXT NOT NULL DEFAULT '[]',               -- canceled, finished_first or not_stopped
  PRIMARY KEY (cancel_id, run_id)
) WITHOUT ROWID;
INSERT INTO "cancelled_runs" VALUES('50000000-0000-4000-8000-000000000001','40000000-0000-4000-8000-000000000001','finished_first','[]');
INSERT INTO "cancelled_runs" VALUES('50000000-0000-4000-8000-000000000001','40000000-0000-4000-8000-000000000003','not_stopped','[4711]');
CREATE TABLE cancels (
  id         TEXT    PRIMARY KEY,
  session_id TEXT    NOT NULL,
  target     TEXT    NOT NULL,  -- session or run
  at         INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "cancels" VALUES('50000000-0000-4000-8000-000000000001','10000000-0000-4000-8000-000000000001','run',1790000006);
CREATE TABLE chunks (
  message_id TEXT    NOT NULL,
  part       INTEGER NOT NULL,
  pos        INTEGER NOT NULL,  -- in code points
  kind       TEXT    NOT NULL,
  text       TEXT    NOT NULL,
  PRIMARY KEY (message_id, part, pos)
) WITHOUT ROWID;
INSERT INTO "chunks" VALUES('20000000-0000-4000-8000-000000000004',0,4,'text',' text');
INSERT INTO "chunks" VALUES('20000000-0000-4000-8000-000000000004',0,9,'text',' grows');
INSERT INTO "chunks" VALUES('20000000-0000-4000-8000-00000000000a',0,4,'reasoning','king');
INSERT INTO "chunks" VALUES('20000000-0000-4000-8000-00000000000a',1,6,'input','and":"ls"}');
CREATE TABLE deleted_mailboxes (address TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE events (
  seq        INTEGER PRIMARY KEY,
  type       TEXT    NOT NULL,
  op         TEXT    NOT NULL,
  session_id TEXT    NOT NULL,
  entity_id  TEXT    NOT NULL,
  fields     TEXT,              -- the payload, where no table holds the body
  at         INTEGER NOT NULL
);
INSERT INTO "events" VALUES(1,'session','created','10000000-0000-4000-8000-000000000001','10000000-0000-4000-8000-000000000001',NULL,1790000000);
INSERT INTO "events" VALUES(2,'message','created','10000000-0000-4000-8000-000000000001','20000000-0000-4000-8000-000000000001',NULL,1790000003);
INSERT INTO "events" VALUES(3,'run_complete','updated','10000000-0000-4000-8000-000000000001','40000000-0000-4000-8000-000000000003','{"session_id":"10000000-0000-4000-8000-000000000001","run_id":"40000000-0000-4000-8000-000000000003","message_id":"20000000-0000-4000-8000-000000000002","text":"","error":"","cancelled":false,"culm_reason":""}',1790000051);
CREATE TABLE files (
  no         INTEGER PRIMARY KEY,
  id         TEXT    NOT NULL UNIQUE,
  session_id TEXT    NOT NULL,
  path       TEXT    NOT NULL,
  version    INTEGER NOT NULL CHECK (version >= 0),
  content    TEXT    NOT NULL,
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL
);
INSERT INTO "files" VALUES(1,'30000000-0000-4000-8000-000000000001','10000000-0000-4000-8000-000000000001','/frozen/project/main.go',0,'package main',1790000010,1790000010);
INSERT INTO "files" VALUES(2,'30000000-0000-4000-8000-000000000002','10000000-0000-4000-8000-000000000001','/frozen/project/main.go',1,'package main // changed',1790000011,1790000011);
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
INSERT INTO "grants" VALUES(1,'70000000-0000-4000-8000-000000000001','session','10000000-0000-4000-8000-000000000001','bash','execute','["make"]','60000000-0000-4000-8000-000000000001','',1790000003);
INSERT INTO "grants" VALUES(2,'70000000-0000-4000-8000-000000000002','workspace','10000000-0000-4000-8000-000000000001','write','write','["write:/frozen/project"]','60000000-0000-4000-8000-000000000001','',1790000004);
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
INSERT INTO "letters" VALUES(1,'90000000-0000-4000-8000-000000000001','10000000-0000-4000-8000-000000000001','80000000-0000-4000-8000-000000000001','ask','answered','','90000000-0000-4000-8000-000000000002','40000000-0000-4000-8000-000000000008',1790000042,1790000043);
INSERT INTO "letters" VALUES(2,'90000000-0000-4000-8000-000000000002','80000000-0000-4000-8000-000000000001','10000000-0000-4000-8000-000000000001','reply','admitted','90000000-0000-4000-8000-000000000001','','',1790000043,1790000043);
INSERT INTO "letters" VALUES(3,'90000000-0000-4000-8000-000000000003','person','80000000-0000-4000-8000-000000000001','handoff','expired','','','',1790000044,1790000045);
INSERT INTO "letters" VALUES(4,'90000000-0000-4000-8000-000000000004','person','gone','task','dead','','','',1790000046,1790000046);
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
, run_id TEXT NOT NULL DEFAULT '');
INSERT INTO "messages" VALUES(4294967297,'20000000-0000-4000-8000-000000000001','user','[{"type":"text","data":{"text":"Is this kept?"}},{"type":"finish","data":{"reason":"stop","time":0}}]',0,'','',0,0,0,1790000003,1790000003,'');
INSERT INTO "messages" VALUES(4294967298,'20000000-0000-4000-8000-000000000002','assistant','[null,{"type":"finish","data":{"reason":"end_turn","time":1790000004}}]',1,'demo-1','demo',0,1,0,1790000004,1790000004,'');
INSERT INTO "messages" VALUES(4294967299,'20000000-0000-4000-8000-000000000003','assistant','[{"type":"text","data":{"text":"A summary."}},{"type":"finish","data":{"reason":"end_turn","time":1790000005}}]',0,'demo-1','demo',1,1,0,1790000005,1790000005,'');
INSERT INTO "messages" VALUES(4294967300,'20000000-0000-4000-8000-000000000004','assistant','[{"type":"text","data":{"text":"Open"}}]',0,'demo-1','demo',0,0,1,1790000006,1790000006,'');
INSERT INTO "messages" VALUES(4294967301,'20000000-0000-4000-8000-000000000009','user','[{"type":"text","data":{"text":"Of a run."}},{"type":"finish","data":{"reason":"stop","time":0}}]',0,'','',0,0,0,1790000050,1790000050,'40000000-0000-4000-8000-000000000003');
INSERT INTO "messages" VALUES(8589934593,'20000000-0000-4000-8000-000000000005','user','[{"type":"text","data":{"text":"Was cut off."}},{"type":"finish","data":{"reason":"stop","time":0}}]',0,'','',0,0,0,1790000020,1790000020,'');
INSERT INTO "messages" VALUES(8589934594,'20000000-0000-4000-8000-000000000006','assistant','[{"type":"tool_call","data":{"id":"call_1","name":"bash","input":"{}","finished":true}},{"type":"tool_call","data":{"id":"call_2","name":"write","input":"{}","finished":true}},{"type":"tool_call","data":{"id":"call_3","name":"agent","input":"{}","finished":true}},{"type":"tool_call","data":{"id":"call_4","name":"view","input":"{}","finished":true}}]',0,'demo-1','demo',0,0,1,1790000020,1790000020,'');
INSERT INTO "messages" VALUES(12884901889,'20000000-0000-4000-8000-00000000000a','assistant','[{"type":"reasoning","data":{"thinking":"Thin","signature":"","started_at":1790000007,"finished_at":0}},{"type":"tool_call","data":{"id":"call_9","name":"bash","input":"{\"comm","finished":false}}]',0,'demo-1','demo',0,0,1,1790000007,1790000007,'');
INSERT INTO "messages" VALUES(17179869185,'20000000-0000-4000-8000-000000000007','user','[{"type":"text","data":{"text":"Ask me."}},{"type":"finish","data":{"reason":"stop","time":0}}]',0,'','',0,0,0,1790000030,1790000030,'');
INSERT INTO "messages" VALUES(17179869186,'20000000-0000-4000-8000-000000000008','assistant','[{"type":"tool_call","data":{"id":"call_5","name":"question","input":"{\"questions\":[{\"type\":\"yes_no\",\"question\":\"Go on?\",\"description\":\"Or not.\"}]}","finished":true}}]',0,'offline','offline',0,0,1,1790000030,1790000030,'');
CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) WITHOUT ROWID;
INSERT INTO "meta" VALUES('clean','0');
INSERT INTO "meta" VALUES('epoch','a1b2c3d4e5f6');
INSERT INTO "meta" VALUES('erase_due','1');
CREATE TABLE parts (
  message_id TEXT    NOT NULL,
  part       INTEGER NOT NULL,
  body       TEXT    NOT NULL,
  PRIMARY KEY (message_id, part)
) WITHOUT ROWID;
INSERT INTO "parts" VALUES('20000000-0000-4000-8000-000000000002',0,'{"type":"text","data":{"text":"It is kept in a row of its own."}}');
CREATE TABLE read_files (
  session_id TEXT    NOT NULL,
  path       TEXT    NOT NULL,
  read_no    INTEGER NOT NULL,  -- orders what was read in one second
  read_at    INTEGER NOT NULL, stamp TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (session_id, path)
) WITHOUT ROWID;
INSERT INTO "read_files" VALUES('10000000-0000-4000-8000-000000000001','/frozen/project/AGENTS.md',2,1790000013,'1790000000000000000.12.77');
INSERT INTO "read_files" VALUES('10000000-0000-4000-8000-000000000001','/frozen/project/main.go',1,1790000012,'');
CREATE TABLE run_bodies (
  run_id      TEXT PRIMARY KEY,
  prompt      TEXT NOT NULL,
  attachments TEXT NOT NULL
);
INSERT INTO "run_bodies" VALUES('40000000-0000-4000-8000-000000000005','Waits behind it.','[]');
INSERT INTO "run_bodies" VALUES('40000000-0000-4000-8000-000000000006','Rests.','[{"file_path":"shot.png","file_name":"shot.png","mime_type":"image/png","content":"iVBORw0KGgo="}]');
INSERT INTO "run_bodies" VALUES('40000000-0000-4000-8000-00000000000b','Wait.','[]');
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
, headless INTEGER NOT NULL DEFAULT 0, approve  TEXT    NOT NULL DEFAULT 'null', agent_id      TEXT    NOT NULL DEFAULT '', parent_run_id TEXT    NOT NULL DEFAULT '', detached      INTEGER NOT NULL DEFAULT 0, tree_steps    INTEGER NOT NULL DEFAULT 0, tree_tokens   INTEGER NOT NULL DEFAULT 0, tree_cost     REAL    NOT NULL DEFAULT 0);
INSERT INTO "runs" VALUES(1,'40000000-0000-4000-8000-000000000001','10000000-0000-4000-8000-000000000001','prompt','ended',1,0,'d1','Is this kept?','{}','demo','demo-1','end_turn','','','','20000000-0000-4000-8000-000000000002',1,900,12,0.25,0,1790000003,1790000003,1790000004,0,'null','','',0,1,912,0.25);
INSERT INTO "runs" VALUES(2,'40000000-0000-4000-8000-000000000002','10000000-0000-4000-8000-000000000001','summary','ended',1,0,'d2','','{}','demo','demo-1','end_turn','','','','',1,10,2,0.0,1,1790000005,1790000005,1790000005,0,'null','','',0,1,12,0.0);
INSERT INTO "runs" VALUES(3,'40000000-0000-4000-8000-000000000003','10000000-0000-4000-8000-000000000001','prompt','ended',1,1,'d3','Stop it.','{"steps":9}','demo','demo-1','canceled','User canceled request','','','',0,0,0,0.0,0,1790000005,1790000005,1790000006,0,'null','','',0,0,0,0.0);
INSERT INTO "runs" VALUES(4,'40000000-0000-4000-8000-000000000004','10000000-0000-4000-8000-000000000002','prompt','active',1,0,'d4','Was cut off.','{}','demo','demo-1',NULL,'','','','',0,0,0,0.0,0,1790000020,1790000020,0,0,'null','','',0,0,0,0.0);
INSERT INTO "runs" VALUES(5,'40000000-0000-4000-8000-000000000005','10000000-0000-4000-8000-000000000002','prompt','queued',2,1,'d5','Waits behind it.','{}','demo','demo-1',NULL,'','','','',0,0,0,0.0,0,1790000021,0,0,0,'null','','',0,0,0,0.0);
INSERT INTO "runs" VALUES(6,'40000000-0000-4000-8000-000000000006','10000000-0000-4000-8000-000000000002','prompt','held',3,1,'d6','Rests.','{}','demo','demo-1',NULL,'the run before it was interrupted','','','',0,0,0,0.0,0,1790000022,0,0,0,'null','','',0,0,0,0.0);
INSERT INTO "runs" VALUES(7,'40000000-0000-4000-8000-000000000007','10000000-0000-4000-8000-000000000004','prompt','active',1,0,'d7','Ask me.','{}','offline','offline',NULL,'','','','',0,0,0,0.0,0,1790000030,1790000030,0,0,'"ask"','','',0,0,0,0.0);
INSERT INTO "runs" VALUES(8,'40000000-0000-4000-8000-000000000008','10000000-0000-4000-8000-000000000005','prompt','ended',1,0,'d8','Lead it.','{"steps":9}','demo','demo-1','end_turn','','','','',1,90,10,0.25,0,1790000040,1790000040,1790000043,0,'null','80000000-0000-4000-8000-000000000001','40000000-0000-4000-8000-000000000001',0,2,150,0.5);
INSERT INTO "runs" VALUES(9,'40000000-0000-4000-8000-000000000009','10000000-0000-4000-8000-000000000006','prompt','active',1,0,'d9','Count.','{}','demo','demo-1',NULL,'','','','',1,40,10,0.25,0,1790000041,1790000041,0,0,'null','80000000-0000-4000-8000-000000000002','40000000-0000-4000-8000-000000000008',1,1,50,0.25);
INSERT INTO "runs" VALUES(10,'40000000-0000-4000-8000-00000000000a','10000000-0000-4000-8000-000000000002','prompt','folded',1,0,'d10','Joined it.','{}','demo','demo-1',NULL,'','','40000000-0000-4000-8000-000000000004','',0,0,0,0.0,0,1790000020,1790000021,0,0,'null','','',0,0,0,0.0);
INSERT INTO "runs" VALUES(11,'40000000-0000-4000-8000-00000000000b','10000000-0000-4000-8000-000000000007','prompt','accepted',1,0,'d11','Wait.','{}','demo','demo-1',NULL,'','','','',0,0,0,0.0,0,1790000042,0,0,0,'null','80000000-0000-4000-8000-000000000003','40000000-0000-4000-8000-000000000008',0,0,0,0.0);
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
INSERT INTO "sessions" VALUES(1,'10000000-0000-4000-8000-000000000001','','First',5,900,12,'20000000-0000-4000-8000-000000000003',0.25,'[{"content":"Look","status":"completed","active_form":""}]',6,1790000000,1790000009);
INSERT INTO "sessions" VALUES(2,'10000000-0000-4000-8000-000000000002','','Second “Ä” 🙂',2,0,0,'',0.0,'[]',3,1790000001,1790000001);
INSERT INTO "sessions" VALUES(3,'10000000-0000-4000-8000-000000000003','10000000-0000-4000-8000-000000000001','Child',1,0,0,'',0.0,'[]',2,1790000002,1790000002);
INSERT INTO "sessions" VALUES(4,'10000000-0000-4000-8000-000000000004','','Waiting',2,0,0,'',0.0,'[]',3,1790000030,1790000030);
INSERT INTO "sessions" VALUES(5,'10000000-0000-4000-8000-000000000005','10000000-0000-4000-8000-000000000001','Lead',0,0,0,'',0.5,'[]',1,1790000040,1790000040);
INSERT INTO "sessions" VALUES(6,'10000000-0000-4000-8000-000000000006','10000000-0000-4000-8000-000000000005','Leaf',0,0,0,'',0.25,'[]',1,1790000041,1790000041);
INSERT INTO "sessions" VALUES(7,'10000000-0000-4000-8000-000000000007','10000000-0000-4000-8000-000000000005','Later',0,0,0,'',0.0,'[]',1,1790000042,1790000042);
CREATE INDEX sessions_by_parent ON sessions (parent_id, updated_at);
CREATE INDEX messages_open ON messages (is_open) WHERE is_open = 1;
CREATE INDEX messages_of_users ON messages (created_at) WHERE role = 'user';
CREATE INDEX files_of_session ON files (session_id, version);
CREATE INDEX files_by_path ON files (path, version);
CREATE INDEX runs_of_session ON runs (session_id, seq);
CREATE INDEX runs_unfinished ON runs (session_id, place, seq) WHERE state <> 'ended';
CREATE INDEX runs_of_host ON runs (host_id) WHERE host_id <> '';
CREATE INDEX cancels_of_run ON cancelled_runs (run_id);
CREATE INDEX calls_of_run ON calls (run_id);
CREATE INDEX asks_open ON asks (run_id) WHERE state = 'open';
CREATE INDEX asks_of_session ON asks (session_id, no);
CREATE INDEX asks_of_message ON asks (message_id);
CREATE INDEX agents_of_parent ON agents (parent_id, no, id);
CREATE INDEX agents_by_path ON agents (path);
CREATE INDEX agents_in_worktrees ON agents (no) WHERE worktree <> '';
CREATE INDEX agents_at_work ON agents (no) WHERE state <> 'ended';
CREATE INDEX runs_of_parent ON runs (parent_run_id) WHERE parent_run_id <> '';
CREATE INDEX runs_of_agent ON runs (agent_id, seq) WHERE agent_id <> '';
CREATE INDEX letters_of_run ON letters (run_id) WHERE run_id <> '';
CREATE INDEX letters_to ON letters (recipient, no);
CREATE VIEW message_rows AS
SELECT m.id, m.role, s.id AS session_id, m.parts, m.model, m.provider, m.created_at, m.updated_at,
       m.is_summary, m.rev, m.run_id, m.large, m.is_open, m.place
FROM messages m JOIN sessions s ON s.no = m.place >> 32;
CREATE INDEX events_of_session ON events (session_id) WHERE fields IS NOT NULL;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('runs',11);
COMMIT;
PRAGMA user_version = 8;
