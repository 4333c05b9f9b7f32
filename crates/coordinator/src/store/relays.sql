-- Relays of the mesh. Tickets are made with their secrets, so these are here as they are.
CREATE TABLE relay (
    address TEXT PRIMARY KEY,
    kind    TEXT NOT NULL,     -- seikan or turn
    secret  TEXT NOT NULL
) STRICT, WITHOUT ROWID;
