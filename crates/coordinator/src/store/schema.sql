-- Version 1. Times are seconds since 1970 (UTC). Of secrets there are digests only.

-- One row: what holds for the whole mesh.
CREATE TABLE mesh (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    v4       TEXT,             -- NULL until the networks are set
    v6       TEXT,
    revision INTEGER NOT NULL, -- of the latest change that members are told of
    highest  INTEGER NOT NULL  -- no greater number was ever a member's
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

-- Who is a member now. An id is never used twice, so that none stands for a later member.
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

-- Who was one: the others are to hear of it, whenever they ask.
CREATE TABLE removed (
    public_key BLOB PRIMARY KEY,
    revision   INTEGER NOT NULL UNIQUE
) STRICT, WITHOUT ROWID;

-- Numbers that were members' and are nobody's now, each with the revision of the removal.
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

-- The same for what strangers were refused: they can fill this one and not the other.
CREATE TABLE refused (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    at      INTEGER NOT NULL,
    what    TEXT NOT NULL,
    subject TEXT NOT NULL,
    actor   TEXT NOT NULL
) STRICT;
