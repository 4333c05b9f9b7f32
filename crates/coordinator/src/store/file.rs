//! A mesh in an SQLite file: keys and values in one table, and a copy of them in memory.
//!
//! Several processes may open the file. Each change is one transaction that holds the write lock
//! from its start, and first reads what other processes have changed.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};

use super::StoreError;
use super::rows::{Mesh, Rows};

/// Scripts that bring the schema from each version to the next.
pub(super) const MIGRATIONS: [&str; 11] = [
    include_str!("file/schema.sql"),
    include_str!("file/relays.sql"),
    include_str!("file/schema2.sql"),
    include_str!("file/schema3.sql"),
    include_str!("file/schema4.sql"),
    include_str!("file/relay_tls.sql"),
    include_str!("file/schema5.sql"),
    include_str!("file/schema6.sql"),
    include_str!("file/schema7.sql"),
    include_str!("file/schema8.sql"),
    include_str!("file/schema9.sql"),
];
/// Version of the schema that this program reads and writes.
pub(super) const SCHEMA: i64 = MIGRATIONS.len() as i64;
/// Maximum time for which a change waits for the lock of another process.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two attempts where SQLite does not wait itself.
const PAUSE: Duration = Duration::from_millis(20);

/// Number of changes for which the file remembers that a row was deleted. A process that is further
/// behind reads the file anew.
const DELETIONS_KEPT: i64 = 10_000;
/// Number of changes after which older deletions are forgotten.
const FORGET_EVERY: i64 = 1024;

/// An open database file, and the copy of its rows in memory.
#[derive(Debug)]
pub(super) struct File {
    pub connection: Connection,
    mesh: Box<Mesh>,
    /// Number of the latest change that the copy has.
    change: i64,
    /// Version of the file when the copy was last brought up to date.
    version: i64,
}

impl File {
    /// Opens the file, and creates it if there is none.
    pub fn open(path: &Path) -> Result<File, StoreError> {
        let made = make_folder(path).and_then(|()| make_private(path));
        made.map_err(|source| StoreError::Io {
            path: path.to_owned(),
            source,
        })?;
        File::of(connect(path)?)
    }

    /// Reads all rows of a database.
    pub fn of(connection: Connection) -> Result<File, StoreError> {
        let mut file = File {
            connection,
            mesh: Box::default(),
            change: 0,
            version: -1,
        };
        file.copy()?;
        Ok(file)
    }

    /// Returns the copy, brought up to date with the changes of other processes.
    pub fn copy(&mut self) -> Result<&Mesh, StoreError> {
        // A change that panicked has left its writes.
        self.mesh.undo(0);
        let version = self.data_version()?;
        if version != self.version {
            load(&self.connection, &mut self.mesh, &mut self.change)?;
            self.version = version;
        }
        Ok(&self.mesh)
    }

    /// Returns a number that changes when another process has written to the file.
    pub fn data_version(&self) -> Result<i64, StoreError> {
        let mut statement = self.connection.prepare_cached("PRAGMA data_version")?;
        Ok(statement.query_row([], |row| row.get(0))?)
    }

    /// Changes rows within one transaction.
    pub fn change<T>(
        &mut self,
        work: impl FnOnce(&mut Mesh) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.mesh.undo(0);
        let begin = TransactionBehavior::Immediate;
        let transaction = self.connection.transaction_with_behavior(begin)?;
        load(&transaction, &mut self.mesh, &mut self.change)?;
        let change = || {
            let done = work(&mut self.mesh)?;
            let rows = self.mesh.changed();
            write(&transaction, &rows, self.change + 1)?;
            transaction.commit()?;
            self.change += i64::from(!rows.is_empty());
            Ok(done)
        };
        let done = change();
        match done {
            Ok(_) => self.mesh.forget(),
            Err(_) => self.mesh.undo(0),
        }
        done
    }
}

/// Reads rows that were changed later than `change`.
fn load(connection: &Connection, mesh: &mut Mesh, change: &mut i64) -> Result<(), StoreError> {
    let sql = "SELECT coalesce(max(change), 0) FROM kv";
    let newest: i64 = connection
        .prepare_cached(sql)?
        .query_row([], |row| row.get(0))?;
    if newest - *change >= DELETIONS_KEPT && *change > 0 {
        (*mesh, *change) = (Mesh::default(), 0);
    }
    let sql = "SELECT key, value, change FROM kv WHERE change > ?1";
    let mut statement = connection.prepare_cached(sql)?;
    let mut found = statement.query([*change])?;
    let (mut rows, mut last) = (Rows::new(), *change);
    while let Some(row) = found.next()? {
        rows.insert(row.get(0)?, row.get(1)?);
        last = last.max(row.get(2)?);
    }
    mesh.apply(&rows)?;
    *change = last;
    Ok(())
}

fn write(connection: &Connection, rows: &Rows, change: i64) -> Result<(), StoreError> {
    let sql = "INSERT OR REPLACE INTO kv (key, value, change) VALUES (?1, ?2, ?3)";
    let mut statement = connection.prepare_cached(sql)?;
    for (key, value) in rows {
        statement.execute((key, value, change))?;
    }
    if change % FORGET_EVERY == 0 {
        let sql = "DELETE FROM kv WHERE value IS NULL AND change < ?1";
        connection.execute(sql, [change - DELETIONS_KEPT])?;
    }
    Ok(())
}

/// Returns a database in memory with the rows of a mesh.
pub(super) fn database_of(rows: &Rows) -> Result<Connection, StoreError> {
    let mut database = Connection::open_in_memory()?;
    create_schema(&mut database, Path::new("memory"))?;
    let transaction = database.transaction()?;
    write(&transaction, rows, 1)?;
    transaction.commit()?;
    Ok(database)
}

/// Opens an existing file.
fn connect(path: &Path) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(PATIENCE)?;
    // Checked before anything is written: a file of a later version must stay as it is.
    let version = version(&connection, path)?;
    write_ahead(&connection)?;
    // With the default setting, a power failure could lose a committed change.
    connection.pragma_update(None, "synchronous", "FULL")?;
    // Temporary folders may be inaccessible to the coordinator.
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    if version < SCHEMA {
        upgrade(&mut connection, path, |version| {
            let mut reader = Connection::open_with_flags(path, flags)?;
            let copy = with_suffix(path, &format!(".schema{version}"));
            let copied = write_new(&copy, &reader.serialize("main")?, |new| {
                fs::rename(new, &copy)
            });
            copied.map_err(|source| StoreError::Copy { path: copy, source })
        })?;
    }
    Ok(connection)
}

/// Creates the schema, or upgrades that of an earlier version.
pub(super) fn create_schema(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    upgrade(connection, path, |_| Ok(()))
}

/// Creates the schema, or upgrades it. Before an upgrade, it calls `keep` with the earlier version,
/// while writers of the file wait.
fn upgrade(
    connection: &mut Connection,
    path: &Path,
    keep: impl FnOnce(i64) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Another process may have upgraded the file meanwhile.
    let version = version(&transaction, path)?;
    if (1..SCHEMA).contains(&version) {
        keep(version)?;
    }
    for migration in &MIGRATIONS[usize::try_from(version).unwrap_or(0)..] {
        transaction.execute_batch(migration)?;
    }
    transaction.pragma_update(None, "user_version", SCHEMA)?;
    Ok(transaction.commit()?)
}

/// Writes a file that only its owner can read. After a power failure the file is complete or
/// absent: `publish` moves the complete file to `path`.
pub(super) fn write_new(
    path: &Path,
    content: &[u8],
    publish: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let unfinished = with_suffix(path, ".new");
    // Left by an interrupted process.
    let _ = fs::remove_file(&unfinished);
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty());
    let write = || {
        let mut file = create_new(&unfinished)?;
        file.write_all(content)?;
        file.sync_all()?;
        publish(&unfinished)?;
        fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    };
    let written = write();
    let _ = fs::remove_file(&unfinished);
    written
}

/// Creates the folder of the file if there is none.
pub(super) fn make_folder(path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty())
        && !folder.exists()
    {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(folder)?;
    }
    Ok(())
}

/// Creates the file if there is none.
fn make_private(path: &Path) -> io::Result<()> {
    // An existing file must not be opened: closing it would release this process' locks on it
    // (sqlite.org/howtocorrupt.html, section 2.2).
    match create_new(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Creates a file for its owner only.
fn create_new(path: &Path) -> io::Result<fs::File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).open(path)
}

/// Returns the path with `suffix` after the name.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Returns the version of the file's schema; 0 for a new file.
fn version(connection: &Connection, path: &Path) -> Result<i64, StoreError> {
    let found: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    match found {
        0..=SCHEMA => Ok(found),
        _ => Err(StoreError::LaterVersion {
            path: path.to_owned(),
            found,
            known: SCHEMA,
        }),
    }
}

/// Enables the write-ahead log: readers and writers do not block each other.
fn write_ahead(connection: &Connection) -> Result<(), StoreError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let set = connection
            .pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get::<_, String>(0));
        match set {
            Ok(mode) if mode.eq_ignore_ascii_case("wal") => return Ok(()),
            Ok(mode) => return Err(StoreError::NoWal { mode }),
            // Two processes open a new file at once: SQLite does not wait here.
            Err(error)
                if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy)
                    && Instant::now() < deadline =>
            {
                thread::sleep(PAUSE);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deletions_are_forgotten_after_many_changes() {
        let row = |key: &str, value: Option<&str>| (key.to_owned(), value.map(str::to_owned));
        let rows = Rows::from([row("seen/1", None), row("seen/2", Some("{}"))]);
        let database = database_of(&rows).expect("a database");
        let count = || {
            let sql = "SELECT count(*) FROM kv WHERE key LIKE 'seen/%'";
            database.query_row(sql, [], |row| row.get::<_, i64>(0))
        };
        let write_at = |change| write(&database, &Rows::new(), change).expect("written");
        write_at(DELETIONS_KEPT / FORGET_EVERY * FORGET_EVERY);
        assert_eq!(count().expect("counted"), 2);
        write_at((DELETIONS_KEPT / FORGET_EVERY + 1) * FORGET_EVERY);
        assert_eq!(count().expect("counted"), 1);
    }

    #[test]
    fn a_copy_that_is_far_behind_is_read_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("mesh.db");
        let mut behind = File::open(&path).expect("a file");
        let database = connect(&path).expect("the same file");
        let seen = |member: i64| Some(format!(r#"{{"member":{member},"at":1}}"#));
        let write_at = |change, key: &str, value| {
            let rows = Rows::from([(key.to_owned(), value)]);
            write(&database, &rows, change).expect("written");
        };
        write_at(2, "seen/1", seen(1));
        assert!(behind.copy().expect("read").seen.get(&1).is_some());
        write_at(3, "seen/1", None);
        let forgets = (DELETIONS_KEPT / FORGET_EVERY + 1) * FORGET_EVERY;
        write_at(forgets, "seen/2", seen(2));
        assert!(behind.copy().expect("read").seen.get(&1).is_none());
    }
}
