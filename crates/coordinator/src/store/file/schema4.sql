-- Version 5: relayed addresses of members on TURN servers.
ALTER TABLE member ADD COLUMN relayed TEXT NOT NULL DEFAULT '[]'; -- JSON, as endpoints
