ALTER TABLE audit RENAME COLUMN what TO change;
ALTER TABLE refused RENAME COLUMN what TO change;
