-- Version 4: separate tables for columns that are large or change often.

-- One row: the policy.
CREATE TABLE policy (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    text     TEXT NOT NULL,    -- as the administrator wrote it
    revision INTEGER NOT NULL  -- of its latest change
) STRICT;
INSERT INTO policy (id, text, revision) SELECT 1, policy, policy_revision FROM mesh;
ALTER TABLE mesh DROP COLUMN policy;
ALTER TABLE mesh DROP COLUMN policy_revision;

-- Times of members' latest activity. Members do not receive them.
CREATE TABLE seen (
    member INTEGER PRIMARY KEY,
    at     INTEGER NOT NULL
) STRICT;
INSERT INTO seen (member, at) SELECT id, seen FROM member;
ALTER TABLE member DROP COLUMN seen;
