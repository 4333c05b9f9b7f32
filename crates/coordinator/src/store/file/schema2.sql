-- Version 3: the policy.
ALTER TABLE mesh ADD COLUMN policy TEXT NOT NULL DEFAULT '';            -- as the administrator wrote it
ALTER TABLE mesh ADD COLUMN policy_revision INTEGER NOT NULL DEFAULT 0; -- of its latest change
