-- Every version of a file that a session wrote; its first of a path is what it found there.
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
CREATE INDEX files_of_session ON files (session_id, version);
CREATE INDEX files_by_path ON files (path, version);

-- When a session last read a file.
CREATE TABLE read_files (
  session_id TEXT    NOT NULL,
  path       TEXT    NOT NULL,
  read_no    INTEGER NOT NULL,  -- orders what was read in one second
  read_at    INTEGER NOT NULL,
  PRIMARY KEY (session_id, path)
) WITHOUT ROWID;
