-- Version 10: the device that had a free number last, so that it keeps the number at another gateway.
-- A JSON object: name; gateway; tags, unless they were those of its gateway; token of its gateway.
ALTER TABLE freed ADD COLUMN device TEXT; -- NULL: a member had the number, or this is not known
CREATE INDEX freed_device ON freed (device ->> 'name') WHERE device NOT NULL;
