"""Changes the database of a coordinator as a later version does, for tests of the way back.

    later_version.py upgrade FILE   its first start: a copy of the file as it was, and another schema
    later_version.py kill FILE      a process of it that is killed: its last change is in the log, not in the file
"""
import os
import sqlite3
import sys

action, path = sys.argv[1:]
database = sqlite3.connect(path, isolation_level=None)
if action == "upgrade":
    owner = os.stat(path)
    schema = database.execute("PRAGMA user_version").fetchone()[0]
    copied = f"{path}.schema{schema}"
    copy = sqlite3.connect(copied)
    database.backup(copy)
    copy.close()
    database.execute("ALTER TABLE kv RENAME TO later")
    database.execute(f"PRAGMA user_version = {schema + 1}")
    database.close()
    os.chown(copied, owner.st_uid, owner.st_gid)
    os.chmod(copied, 0o600)
else:
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("DELETE FROM later")
    os._exit(0)
