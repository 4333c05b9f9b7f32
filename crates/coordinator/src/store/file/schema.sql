-- Version 1. Times are seconds since 1970 (UTC). Secrets of hosts are stored as digests only.

-- One row: values of the whole mesh.
CREATE TABLE mesh (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    v4       TEXT,             -- NULL until the networks are set
    v6       TEXT,
    revision INTEGER NOT NULL, -- of the latest change that members receive
    highest  INTEGER NOT NULL  -- greatest number that a member has had
) STRICT;
INSERT INTO mesh (id, revision, highest) VALUES (1, 0, 0);

CREATE TABLE token (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    digest    BLOB NOT NULL UNIQUE,
    label     TEXT,
    uses      INTEGER,         -- NULL: without limit
    used      INTEGER NOT NULL,
    created   INTEGER NOT NULL,
    expires   INTEGER,
    withdrawn INTEGER,
    tags      TEXT NOT NULL    -- a JSON array
) STRICT;

-- Current members. Ids are never reused.
CREATE TABLE member (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    number     INTEGER NOT NULL UNIQUE,
    name       TEXT NOT NULL UNIQUE,
    public_key BLOB NOT NULL UNIQUE,
    credential BLOB NOT NULL UNIQUE,
    token      INTEGER NOT NULL REFERENCES token (id),
    tags       TEXT NOT NULL,  -- a JSON array
    endpoints  TEXT NOT NULL,  -- a JSON array
    revision   INTEGER NOT NULL UNIQUE,
    joined     INTEGER NOT NULL,
    seen       INTEGER NOT NULL
) STRICT;

-- Former members, kept forever: others receive the removal whenever they poll.
CREATE TABLE removed (
    public_key BLOB PRIMARY KEY,
    revision   INTEGER NOT NULL UNIQUE
) STRICT, WITHOUT ROWID;

-- Free numbers that members have had, with the revision of the removal.
CREATE TABLE freed (
    number INTEGER PRIMARY KEY,
    since  INTEGER NOT NULL UNIQUE
) STRICT;

CREATE TABLE audit (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    at      INTEGER NOT NULL,
    what    TEXT NOT NULL,
    subject TEXT NOT NULL,
    actor   TEXT NOT NULL
) STRICT;

-- Refused joins, apart from the audit: unauthenticated hosts can fill only this table.
CREATE TABLE refused (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    at      INTEGER NOT NULL,
    what    TEXT NOT NULL,
    subject TEXT NOT NULL,
    actor   TEXT NOT NULL
) STRICT;
