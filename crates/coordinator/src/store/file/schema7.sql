-- Version 9: devices behind members, as a JSON array of objects:
-- name; number, which determines the addresses, if it is approved; tags
ALTER TABLE member ADD COLUMN devices TEXT NOT NULL DEFAULT '[]';
ALTER TABLE removed ADD COLUMN devices TEXT; -- as name and tags; NULL: none
ALTER TABLE former ADD COLUMN devices TEXT;  -- the same
-- Whether devices of the members that it admits need no approval.
ALTER TABLE token ADD COLUMN devices INTEGER NOT NULL DEFAULT 0;
