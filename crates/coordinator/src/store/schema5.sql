-- Version 7: what members were known by, so that each is told of those alone that it may talk to.
ALTER TABLE removed ADD COLUMN name TEXT; -- as a member; NULL: not known, so everybody is told
ALTER TABLE removed ADD COLUMN tags TEXT; -- the same

-- What members were before their tags were others, and who was a member before it came again. Who saw one so and does not see it any more
-- is to hear of it, whenever it asks.
CREATE TABLE former (
    revision   INTEGER PRIMARY KEY, -- of the change that ended it
    member     INTEGER NOT NULL,    -- whose tags changed; 0: it was none any more
    public_key BLOB NOT NULL,
    name       TEXT,
    tags       TEXT
) STRICT;
