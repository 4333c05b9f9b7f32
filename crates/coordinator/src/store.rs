//! The state of one mesh, in an SQLite file or in [`etcd`], which several coordinators share. With
//! etcd, each coordinator has a copy in an in-memory SQLite database. The tables and the code are
//! the same in both cases.
//!
//! [`Store::open`] creates or opens the file; [`Store::init`] sets the networks of the mesh once.
//!
//! - [`tokens`], [`join`], [`members`]: life of a member
//! - [`devices`]: devices behind members
//! - [`changes`]: changes that members receive
//! - [`policy`]: members that may talk to each other
//! - [`relays`]: relays, and tickets for them
//! - [`audit`]: log for operators
//! - [`snapshot`]: export of the whole state, and import
//!
//! Several processes may open the file. Each change is one transaction that holds the write lock
//! from its start, so it never depends on data that another process has changed meanwhile. A change
//! that members receive takes the next revision from a single row, so revisions have the order of
//! the changes.
//!
//! All functions block. Callers pass the time, in seconds since 1970; only the log entry of a
//! restore reads the clock.

mod audit;
mod changes;
mod devices;
mod error;
mod etcd;
mod join;
mod members;
mod numbers;
mod policy;
mod relays;
mod snapshot;
mod tokens;

#[cfg(test)]
pub(crate) mod tests;

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use etcd::Replica;
use ipnet::{Ipv4Net, Ipv6Net};
use rusqlite::types::FromSql;
use rusqlite::{
    Connection, ErrorCode, OpenFlags, OptionalExtension as _, Params, Row, Transaction,
    TransactionBehavior,
};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Networks, Pin, RelayAddress};

use crate::lock;
pub use audit::{Actor, AuditEntry};
pub use changes::Answer;
pub use devices::DeviceInfo;
pub use error::StoreError;
#[cfg(fuzzing)]
pub use etcd::fuzzing;
pub use etcd::{Etcd, PREFIX as ETCD_PREFIX};
pub use join::Joining;
pub use members::{MemberId, MemberInfo, MemberRef};
pub use relays::RelayInfo;
pub use tokens::{NewToken, TokenId, TokenInfo};

/// Scripts that bring the schema from each version to the next.
const MIGRATIONS: [&str; 10] = [
    include_str!("store/schema.sql"),
    include_str!("store/relays.sql"),
    include_str!("store/schema2.sql"),
    include_str!("store/schema3.sql"),
    include_str!("store/schema4.sql"),
    include_str!("store/relay_tls.sql"),
    include_str!("store/schema5.sql"),
    include_str!("store/schema6.sql"),
    include_str!("store/schema7.sql"),
    include_str!("store/schema8.sql"),
];
/// Version of the schema that this program reads and writes.
const SCHEMA: i64 = MIGRATIONS.len() as i64;
/// Maximum time for which a change waits for the lock of another process.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two attempts where SQLite does not wait itself.
const PAUSE: Duration = Duration::from_millis(20);

/// State of one mesh. Threads may share it; their calls run one after the other.
#[derive(Debug)]
pub struct Store {
    backing: Backing,
    /// Policies parsed lately.
    parsed: policy::PolicyCache,
    /// The first members, as last read.
    first_members: changes::MemberCache,
}

/// Location of the state.
#[derive(Debug)]
enum Backing {
    File(Mutex<Connection>),
    Etcd(Replica),
}

impl Store {
    /// Opens the database at `path`, and creates it if there is none: the file with mode 0600, its
    /// folder with 0700. A file of an earlier version is upgraded.
    ///
    /// # Errors
    /// [`StoreError::Io`] if it cannot be created; [`StoreError::LaterVersion`];
    /// [`StoreError::NoWal`]; [`StoreError::Sqlite`] if it is no database or cannot be read and
    /// written.
    pub fn open(path: &Path) -> Result<Store, StoreError> {
        let made = make_folder(path).and_then(|()| make_private(path));
        made.map_err(|source| StoreError::Io {
            path: path.to_owned(),
            source,
        })?;
        Ok(Store {
            backing: Backing::File(Mutex::new(open_file(path)?)),
            parsed: policy::PolicyCache::default(),
            first_members: changes::MemberCache::default(),
        })
    }

    /// Opens a mesh in etcd, which other coordinators may have open at the same time. Loads
    /// everything before it returns.
    ///
    /// # Errors
    /// [`StoreError::EtcdSettings`], [`StoreError::Unreadable`]; [`StoreError::Unavailable`]; [`StoreError::LaterVersion`];
    /// [`StoreError::CorruptRow`]; [`StoreError::OtherMesh`].
    pub fn open_etcd(settings: &Etcd) -> Result<Store, StoreError> {
        Ok(Store {
            backing: Backing::Etcd(Replica::open(settings)?),
            parsed: policy::PolicyCache::default(),
            first_members: changes::MemberCache::default(),
        })
    }

    /// Sets the networks of the mesh. They cannot change later, because members have addresses in
    /// them. Setting the same networks again is no error.
    ///
    /// # Errors
    /// [`StoreError::OtherNetworks`] if it has others; [`StoreError::Sqlite`].
    pub fn init(&self, networks: Networks, by: &Actor, now: u64) -> Result<(), StoreError> {
        let by = by.clone();
        self.change(move |transaction| {
            match networks_of(transaction)? {
                Some(have) if have == networks => return Ok(()),
                Some(have) => return Err(StoreError::OtherNetworks { have }),
                None => {}
            }
            let (v4, v6) = (networks.v4.to_string(), networks.v6.to_string());
            transaction.execute("UPDATE mesh SET v4 = ?1, v6 = ?2", (&v4, &v6))?;
            let subject = format!("{v4} {v6}");
            audit::record(transaction, seconds(now), "networks set", &subject, &by)
        })
    }

    /// Returns the networks of the mesh; `None` before [`Store::init`].
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn networks(&self) -> Result<Option<Networks>, StoreError> {
        self.read(networks_of)
    }

    /// Returns the revision of the latest change that members receive; 0 before the first.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn revision(&self) -> Result<u64, StoreError> {
        self.read(revision_of).map(unsigned)
    }

    /// Returns a number that changes when another process or another [`Store`] has written to the
    /// same state. Changes by this store leave it as it is. The call is cheap.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn data_version(&self) -> Result<i64, StoreError> {
        match &self.backing {
            Backing::File(connection) => value(&lock(connection), "PRAGMA data_version", []),
            Backing::Etcd(replica) => Ok(replica.foreign()),
        }
    }

    /// Returns the random number of a mesh in etcd; `None` for a file.
    pub fn mesh(&self) -> Option<u64> {
        self.replica()?.mesh()
    }

    /// Returns a number that all who have the same state open share, and that differs after the
    /// state was restored from a backup; `None` for a file.
    pub fn epoch(&self) -> Option<u64> {
        self.replica().map(Replica::epoch)
    }

    /// Repairs a mesh that came back from an earlier backup of etcd: continues revisions, numbers
    /// and ids after those that this store knows. Call it whenever [`Store::data_version`] has
    /// changed; changes do it themselves.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]; [`StoreError::Unknown`].
    pub fn repair(&self) -> Result<(), StoreError> {
        self.replica().map_or(Ok(()), Replica::repair)
    }

    /// Sets a function that is called when others have changed something or call a member, on a
    /// thread that must not block. For a file it is never called.
    pub fn listen(&self, listener: impl Fn() + Send + Sync + 'static) {
        if let Some(replica) = self.replica() {
            replica.listen(Box::new(listener));
        }
    }

    /// Reports a call of a member to the other coordinators of the mesh.
    pub fn call(&self, member: MemberId, caller: PublicKey) {
        if let Some(replica) = self.replica() {
            replica.call(member.0, caller);
        }
    }

    /// Returns whether a member that has polled here has polled another coordinator since.
    pub fn polls_elsewhere(&self, member: MemberId) -> bool {
        self.replica()
            .is_some_and(|replica| replica.polls_elsewhere(member.0))
    }

    /// Takes the calls that other coordinators have reported since the last call of this function:
    /// the callee and the caller.
    pub fn calls(&self) -> Vec<(MemberId, PublicKey)> {
        let calls = self.replica().map(Replica::calls).unwrap_or_default();
        let member = |(member, caller)| (MemberId(member), caller);
        calls.into_iter().map(member).collect()
    }

    /// Returns the addresses of the live coordinators of the mesh, this one included; empty for a
    /// file.
    pub fn coordinators(&self) -> Vec<RelayAddress> {
        let coordinators = self.replica().map(Replica::coordinators);
        coordinators.unwrap_or_default()
    }

    /// Returns the pin by which members verify every coordinator of the mesh: `own`, unless an
    /// earlier coordinator has stored another one.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]; [`StoreError::CorruptRow`].
    pub fn agree_on_pin(&self, own: Pin) -> Result<Pin, StoreError> {
        let Some(replica) = self.replica() else {
            return Ok(own);
        };
        let noted = replica.agree("pin", &own.to_string())?.parse();
        noted.map_err(|_| StoreError::CorruptRow {
            key: "pin".to_owned(),
        })
    }

    /// Waits until the copy has all changes that others have made so far. Returns whether the copy
    /// may have been behind; a file never is.
    fn catch_up(&self) -> Result<bool, StoreError> {
        let replica = self.replica();
        replica.map_or(Ok(false), |replica| replica.catch_up().map(|()| true))
    }

    /// Returns the replica of a mesh in etcd; `None` for a file.
    fn replica(&self) -> Option<&Replica> {
        match &self.backing {
            Backing::File(_) => None,
            Backing::Etcd(replica) => Some(replica),
        }
    }

    /// Returns the database: the file, or the copy in memory.
    fn database(&self) -> Result<MutexGuard<'_, Connection>, StoreError> {
        match &self.backing {
            Backing::File(connection) => Ok(lock(connection)),
            Backing::Etcd(replica) => replica.database(),
        }
    }

    /// Reads within one transaction.
    fn read<T>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        // After a panic the transaction was rolled back: the connection is still usable.
        work(&*self.database()?.transaction()?)
    }

    /// Reads; on an error waits for the changes of others and reads again, because the copy may
    /// have been behind.
    fn read_latest<T>(
        &self,
        work: impl Fn(&Connection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let found = self.read(&work);
        match found {
            // Also if the copy was up to date now: the change may have arrived right after the
            // first read.
            Err(_) if self.catch_up()? => self.read(&work),
            found => found,
        }
    }

    /// Changes the state within one transaction. The work may run more than once, of which one run
    /// counts, and on another thread.
    fn change<T: Send + 'static>(
        &self,
        work: impl Fn(&Transaction<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        match &self.backing {
            Backing::File(connection) => commit(&mut lock(connection), &work),
            Backing::Etcd(replica) => replica.change(work),
        }
    }

    /// Changes tables that coordinators do not share.
    fn change_local<T>(
        &self,
        work: impl Fn(&Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        commit(&mut *self.database()?, &work)
    }
}

fn commit<T>(
    connection: &mut Connection,
    work: &dyn Fn(&Transaction<'_>) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let done = work(&transaction)?;
    transaction.commit()?;
    Ok(done)
}

/// Returns the first row of a query.
fn first<T>(
    connection: &Connection,
    sql: &str,
    parameters: impl Params,
    read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<Option<T>, StoreError> {
    let mut statement = connection.prepare_cached(sql)?;
    Ok(statement.query_row(parameters, read).optional()?)
}

/// Returns the only value of a query that has one.
fn value<T: FromSql>(
    connection: &Connection,
    sql: &str,
    parameters: impl Params,
) -> Result<T, StoreError> {
    let mut statement = connection.prepare_cached(sql)?;
    Ok(statement.query_row(parameters, |row| row.get(0))?)
}

/// Opens an existing file.
fn open_file(path: &Path) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(PATIENCE)?;
    // Checked before anything is written: a file of a later version must stay as it is.
    let version = version(&connection, path)?;
    write_ahead(&connection)?;
    // With the default, a power failure could lose a committed change.
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    // Temporary folders may be inaccessible to the coordinator.
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    if version < SCHEMA {
        upgrade(&mut connection, path)?;
    }
    Ok(connection)
}

/// Creates the schema of a new file; upgrades that of an earlier version, and keeps a copy as it was, since an earlier
/// version of the program refuses the upgraded file.
fn upgrade(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Another process may have done so meanwhile.
    let version = version(&transaction, path)?;
    if (1..SCHEMA).contains(&version) {
        keep_copy(path, version)?;
    }
    migrate(&transaction, version)?;
    Ok(transaction.commit()?)
}

/// Copies a file, whose writers wait, to the same name with `.schema` and `version` appended.
fn keep_copy(path: &Path, version: i64) -> Result<(), StoreError> {
    let copy = with_suffix(path, &format!(".schema{version}"));
    let failed = |source: io::Error| StoreError::Copy {
        path: copy.clone(),
        source,
    };
    let of_sqlite = |error: rusqlite::Error| failed(io::Error::other(error));
    let unfinished = with_suffix(&copy, ".new");
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    // SQLite fills an empty file (sqlite.org/lang_vacuum.html), and would create one that others can read.
    let file = create_new(&unfinished).map_err(failed)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let reader = Connection::open_with_flags(path, flags).map_err(of_sqlite)?;
    let in_memory = reader.pragma_update(None, "temp_store", "MEMORY");
    let name = unfinished.to_str();
    let name = name.ok_or_else(|| failed(io::Error::other("its path is not UTF-8")))?;
    in_memory
        .and_then(|()| reader.execute("VACUUM INTO ?1", [name]))
        .map_err(of_sqlite)?;
    let folder = path.parent().filter(|f| !f.as_os_str().is_empty());
    file.sync_all()
        .and_then(|()| fs::rename(&unfinished, &copy))
        // The copy is there before the upgraded file is, also after a power failure.
        .and_then(|()| fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all())
        .map_err(failed)
}

/// Creates the folder of the file if there is none.
fn make_folder(path: &Path) -> io::Result<()> {
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
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
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

/// Creates the schema, or upgrades that of an earlier version.
fn create_schema(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    migrate(&transaction, version(&transaction, path)?)?;
    Ok(transaction.commit()?)
}

fn migrate(connection: &Connection, version: i64) -> Result<(), StoreError> {
    for migration in MIGRATIONS
        .iter()
        .skip(usize::try_from(version).unwrap_or(0))
    {
        connection.execute_batch(migration)?;
    }
    Ok(connection.pragma_update(None, "user_version", SCHEMA)?)
}

fn networks_of(connection: &Connection) -> Result<Option<Networks>, StoreError> {
    let sql = "SELECT v4, v6 FROM mesh WHERE v4 NOT NULL AND v6 NOT NULL";
    let row = |row: &Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?));
    let Some((v4, v6)) = first(connection, sql, [], row)? else {
        return Ok(None);
    };
    let parsed = (v4.parse::<Ipv4Net>(), v6.parse::<Ipv6Net>());
    let (Ok(v4), Ok(v6)) = parsed else {
        return Err(StoreError::Corrupt("networks"));
    };
    let networks = Networks::new(v4, v6).map_err(|_| StoreError::Corrupt("networks"))?;
    Ok(Some(networks))
}

fn revision_of(connection: &Connection) -> Result<i64, StoreError> {
    value(connection, "SELECT revision FROM mesh", [])
}

/// Increments the revision and returns it.
fn next_revision(transaction: &Transaction<'_>) -> Result<i64, StoreError> {
    transaction.execute("UPDATE mesh SET revision = revision + 1", [])?;
    revision_of(transaction)
}

/// Converts a time to SQLite's range; later times are clamped.
fn seconds(time: u64) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX)
}

/// Converts a number from the database, which has no negative ones.
fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
