-- Version 11: keys and values, as in etcd, in place of a table of columns for each type of rows.
CREATE TABLE kv (
    key    TEXT PRIMARY KEY, -- TABLE/KEY
    value  TEXT,             -- a JSON object; NULL: deleted
    change INTEGER NOT NULL  -- number of the latest change of the row
) STRICT, WITHOUT ROWID;
CREATE INDEX kv_change ON kv (change);

INSERT INTO kv SELECT 'mesh/1', json_object(
    'networks', json(CASE WHEN v4 NOT NULL AND v6 NOT NULL THEN json_object('v4', v4, 'v6', v6) END),
    'revision', revision, 'highest', highest,
    'last_member', ifnull((SELECT seq FROM sqlite_sequence WHERE name = 'member'), 0)), 1 FROM mesh;
INSERT INTO kv SELECT 'policy/1', json_object('text', text, 'revision', revision), 1 FROM policy;
INSERT INTO kv SELECT 'relay/' || address, json_object(
    'info', json_object('address', address, 'kind', kind,
        'tls', json(CASE WHEN tls_port NOT NULL THEN json_object('port', tls_port, 'pin', tls_pin) END)),
    'secret', secret), 1 FROM relay;
INSERT INTO kv SELECT 'token/' || id, json_object(
    'digest', lower(hex(digest)), 'info', json_object(
        'id', id, 'label', label, 'uses', uses, 'used', used, 'created', created, 'expires', expires,
        'withdrawn', withdrawn, 'tags', json(tags), 'devices', json(iif(devices, 'true', 'false')))), 1
FROM token;
INSERT INTO kv SELECT 'member/' || id, json_object(
    'id', id, 'number', number, 'own', json_object('name', name, 'tags', json(tags)),
    'public_key', lower(hex(public_key)), 'credential', lower(hex(credential)), 'token', token,
    'endpoints', json_object('endpoints', json(endpoints), 'relayed', json(relayed)),
    'devices', json(devices), 'revision', revision, 'joined', joined), 1 FROM member;
INSERT INTO kv SELECT 'former/' || revision, json_object(
    'revision', revision, 'member', member, 'public_key', lower(hex(public_key)),
    'own', json(CASE WHEN name NOT NULL AND tags NOT NULL
        THEN json_object('name', name, 'tags', json(tags)) END),
    'devices', json(ifnull(devices, '[]'))), 1
FROM (SELECT revision, 0 AS member, public_key, name, tags, devices FROM removed
      UNION ALL SELECT revision, member, public_key, name, tags, devices FROM former);
INSERT INTO kv SELECT 'freed/' || since, json_object(
    'since', since, 'number', number, 'device', json(device)), 1 FROM freed;
INSERT INTO kv SELECT 'audit/' || (id % 100000), json_object('id', id, 'entry', json_object(
    'time', at, 'change', change, 'subject', subject, 'actor', actor)), 1 FROM audit;
INSERT INTO kv SELECT 'refused/' || (id % 1000), json_object('id', id, 'entry', json_object(
    'time', at, 'change', change, 'subject', subject, 'actor', actor)), 1 FROM refused;
INSERT INTO kv SELECT 'seen/' || member, json_object('member', member, 'at', at), 1 FROM seen;

DROP TABLE mesh;
DROP TABLE policy;
DROP TABLE relay;
DROP TABLE member;
DROP TABLE token;
DROP TABLE removed;
DROP TABLE former;
DROP TABLE freed;
DROP TABLE audit;
DROP TABLE refused;
DROP TABLE seen;
