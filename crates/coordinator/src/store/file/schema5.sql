-- Version 7: former names and tags, so that a member receives only removals of members that it saw.
ALTER TABLE removed ADD COLUMN name TEXT; -- as a member; NULL: unknown, so all members receive the removal
ALTER TABLE removed ADD COLUMN tags TEXT; -- the same

-- Members before a change of their tags, and removed members that have joined again. A member that saw the former
-- one and does not see the current one receives a removal.
CREATE TABLE former (
    revision   INTEGER PRIMARY KEY, -- of the change that ended it
    member     INTEGER NOT NULL,    -- whose tags changed; 0: it had been removed
    public_key BLOB NOT NULL,
    name       TEXT,
    tags       TEXT
) STRICT;
