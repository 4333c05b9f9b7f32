-- Version 2: relays of the mesh. Their secrets sign tickets, so they are stored in plain text.
CREATE TABLE relay (
    address TEXT PRIMARY KEY,
    kind    TEXT NOT NULL,     -- seikan or turn
    secret  TEXT NOT NULL
) STRICT, WITHOUT ROWID;
