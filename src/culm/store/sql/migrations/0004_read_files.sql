-- How a file looked when it was read (its time of change, size and inode): an edit refuses one that
-- looks otherwise. Empty if a client said that it was read, and nobody looked.
ALTER TABLE read_files ADD COLUMN stamp TEXT NOT NULL DEFAULT '';
