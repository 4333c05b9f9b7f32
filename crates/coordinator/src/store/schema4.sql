-- Version 5: where members are reached by TURN servers.
ALTER TABLE member ADD COLUMN relayed TEXT NOT NULL DEFAULT '[]'; -- JSON, as endpoints
