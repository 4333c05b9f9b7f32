//! What a coordinator knows: in one SQLite file, or with others in [`etcd`], of which each has a copy in SQLite's memory. Either way the
//! same work is done on the same tables.
//!
//! [`Store::open`] makes the file or takes the one that is there; [`Store::init`] says once which
//! networks the mesh has. Then [`tokens`], [`join`], [`members`] and [`changes`] are the life of a
//! member, [`policy`] says whom it may talk to, [`relays`] helps those that do not reach each other, and [`audit`] says who did what.
//! [`moving`] brings all of it from a file to etcd, and back. Several processes may have the file open: each change is
//! one transaction that holds the write lock from its start, so nothing is decided on what another
//! process has changed meanwhile. A change that members are to hear of takes the next revision; one
//! row has it, so the order of revisions is the order of changes.
//!
//! All of it blocks. There is no clock in here, but for the note of a restore: times are seconds since 1970 that the caller gives.

mod audit;
mod changes;
mod error;
mod etcd;
mod join;
mod members;
mod moving;
mod policy;
mod relays;
mod tokens;

#[cfg(test)]
pub(crate) mod tests;

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use etcd::Replica;
use ipnet::{Ipv4Net, Ipv6Net};
use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Networks, Pin, RelayAddress};

pub use audit::{Actor, AuditEntry};
pub use changes::Answer;
pub use error::StoreError;
#[cfg(fuzzing)]
pub use etcd::fuzzing;
pub use etcd::{Etcd, PREFIX as ETCD_PREFIX};
pub use join::Joining;
pub use members::{MemberId, MemberInfo, Whom};
pub use moving::{Hold, Moved, PutAway};
pub use relays::RelayInfo;
pub use tokens::{NewToken, TokenId, TokenInfo};

/// What makes the schema of each version out of the one before.
const STEPS: [&str; 7] = [
    include_str!("store/schema.sql"),
    include_str!("store/relays.sql"),
    include_str!("store/schema2.sql"),
    include_str!("store/schema3.sql"),
    include_str!("store/schema4.sql"),
    include_str!("store/relay_tls.sql"),
    include_str!("store/schema5.sql"),
];
/// The schema that this version reads and writes.
const SCHEMA: i64 = STEPS.len() as i64;
/// How long a change waits for that of another process.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two tries where SQLite does not wait by itself.
const PAUSE: Duration = Duration::from_millis(20);

/// What is known of one mesh. Threads may share it; one at a time gets a turn.
#[derive(Debug)]
pub struct Store {
    backing: Backing,
    /// The policies that were read lately.
    parsed: policy::Parsed,
    /// The members as they were last read together.
    everybody: changes::Last,
    /// Of a file: its folder, locked for as long as this has the file open, so that nobody moves it away meanwhile.
    _folder: Option<fs::File>,
}

/// Where it is.
#[derive(Debug)]
enum Backing {
    File(Mutex<Connection>),
    Etcd(Replica),
}

impl Store {
    /// The database at `path`. If there is none it is made: the file for its owner only (mode 0600), its
    /// folder too (0700) unless it is there. One of an earlier version becomes one of this.
    ///
    /// # Errors
    /// [`StoreError::Io`] if it cannot be made; [`StoreError::InUse`] if it is being moved, [`StoreError::Moving`] if that was broken off;
    /// [`StoreError::LaterVersion`]; [`StoreError::NoWal`];
    /// [`StoreError::Sqlite`] if it is no database or cannot be read and written.
    pub fn open(path: &Path) -> Result<Store, StoreError> {
        Store::open_held(Store::hold(path)?)
    }

    /// The same of a file that is held already: what was looked at since has not changed by a move.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_held(held: Hold) -> Result<Store, StoreError> {
        let Hold { file, folder } = held;
        make_private(&file).map_err(|source| StoreError::Io {
            path: file.clone(),
            source,
        })?;
        let connection = open_file(&file)?;
        if let Some(mark) = moving::mark_of(&connection)? {
            return Err(mark.error(&file));
        }
        Ok(Store {
            backing: Backing::File(Mutex::new(connection)),
            parsed: policy::Parsed::default(),
            everybody: changes::Last::default(),
            _folder: Some(folder),
        })
    }

    /// What etcd has, which other coordinators may have open at the same time. Everything is loaded before this returns.
    ///
    /// # Errors
    /// [`StoreError::EtcdSettings`], [`StoreError::Unreadable`]; [`StoreError::Unavailable`]; [`StoreError::LaterVersion`];
    /// [`StoreError::CorruptRow`]; [`StoreError::OtherMesh`].
    pub fn open_etcd(settings: &Etcd) -> Result<Store, StoreError> {
        Ok(Store {
            backing: Backing::Etcd(Replica::open(settings)?),
            parsed: policy::Parsed::default(),
            everybody: changes::Last::default(),
            _folder: None,
        })
    }

    /// Says which networks the mesh has. They stay: members have addresses in them. Saying the same
    /// again is no error.
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
            audit::note(transaction, seconds(now), "networks set", &subject, &by)
        })
    }

    /// The networks of the mesh; `None` before [`Store::init`].
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn networks(&self) -> Result<Option<Networks>, StoreError> {
        self.look(networks_of)
    }

    /// The revision of the latest change that members are told of; 0 before the first.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn revision(&self) -> Result<u64, StoreError> {
        self.look(revision_of).map(unsigned)
    }

    /// A number that is another one after somebody else (another process, another [`Store`]) has
    /// written to the same; own changes leave it as it is. Asking is cheap.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn data_version(&self) -> Result<i64, StoreError> {
        let connection = match &self.backing {
            Backing::File(connection) => lock(connection),
            Backing::Etcd(replica) => return Ok(replica.foreign()),
        };
        let mut statement = connection.prepare_cached("PRAGMA data_version")?;
        Ok(statement.query_row([], |row| row.get(0))?)
    }

    /// The number by which a mesh in etcd is known from others; `None` of a file.
    pub fn mesh(&self) -> Option<u64> {
        match &self.backing {
            Backing::File(_) => None,
            Backing::Etcd(replica) => replica.mesh(),
        }
    }

    /// A number that all who have the same open have in common, and that is another one for what is put in its place from a backup;
    /// `None` if that cannot be known.
    pub fn epoch(&self) -> Option<u64> {
        match &self.backing {
            Backing::File(_) => None,
            Backing::Etcd(replica) => Some(replica.epoch()),
        }
    }

    /// Has the mesh go on from where it was known to be here, if what is shared came back from an earlier backup. To be called whenever
    /// [`Store::data_version`] is another one; changes do it by themselves.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]; [`StoreError::Unknown`].
    pub fn mend(&self) -> Result<(), StoreError> {
        match &self.backing {
            Backing::File(_) => Ok(()),
            Backing::Etcd(replica) => replica.mend(),
        }
    }

    /// Has `listener` told when others have changed something or call somebody, on a thread that must not wait; of a file it never is.
    pub fn listen(&self, listener: impl Fn() + Send + Sync + 'static) {
        if let Backing::Etcd(replica) = &self.backing {
            replica.listen(Box::new(listener));
        }
    }

    /// Tells other coordinators of the mesh, if there are any, that a member is called, which does not ask here.
    pub fn call(&self, member: MemberId, caller: PublicKey) {
        if let Backing::Etcd(replica) = &self.backing {
            replica.call(member.0, caller);
        }
    }

    /// Whether a member that asked here is known to have asked another coordinator since.
    pub fn asks_elsewhere(&self, member: MemberId) -> bool {
        match &self.backing {
            Backing::File(_) => false,
            Backing::Etcd(replica) => replica.asks_elsewhere(member.0),
        }
    }

    /// Whom other coordinators call, each with who calls, since this was last asked.
    pub fn calls(&self) -> Vec<(MemberId, PublicKey)> {
        let calls = match &self.backing {
            Backing::File(_) => Vec::new(),
            Backing::Etcd(replica) => replica.calls(),
        };
        let member = |(member, caller)| (MemberId(member), caller);
        calls.into_iter().map(member).collect()
    }

    /// Where members reach the coordinators of the mesh that live, this one included; none if there is but one.
    pub fn coordinators(&self) -> Vec<RelayAddress> {
        match &self.backing {
            Backing::File(_) => Vec::new(),
            Backing::Etcd(replica) => replica.coordinators(),
        }
    }

    /// The pin by which members know every coordinator of the mesh: `own`, unless one that was there before has another.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]; [`StoreError::CorruptRow`].
    pub fn agree_on_pin(&self, own: Pin) -> Result<Pin, StoreError> {
        match &self.backing {
            Backing::File(_) => Ok(own),
            Backing::Etcd(replica) => {
                let noted = replica.agree("pin", &own.to_string())?.parse();
                noted.map_err(|_| StoreError::CorruptRow {
                    key: "pin".to_owned(),
                })
            }
        }
    }

    /// Waits until what others have changed before is known here; whether it may not have been. Of a file it always is.
    fn catch_up(&self) -> Result<bool, StoreError> {
        match &self.backing {
            Backing::File(_) => Ok(false),
            Backing::Etcd(replica) => replica.catch_up().map(|()| true),
        }
    }

    /// Reads, all of it at one moment.
    fn look<T>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        // After a panic the transaction was rolled back: the connection is as good as before.
        let mut connection = match &self.backing {
            Backing::File(connection) => lock(connection),
            Backing::Etcd(replica) => replica.database()?,
        };
        let transaction = connection.transaction()?;
        work(&transaction)
    }

    /// The same for what somebody is refused by: before that, what others have changed has to be known.
    fn look_surely<T>(
        &self,
        work: impl Fn(&Connection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let found = self.look(&work);
        match found {
            // Also if nothing was left to catch up with: it may have come right after that look.
            Err(_) if self.catch_up()? => self.look(&work),
            found => found,
        }
    }

    /// Changes, all of it or nothing. The work may be done more than once, of which one counts, and by another thread.
    fn change<T: Send + 'static>(
        &self,
        work: impl Fn(&Transaction<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        match &self.backing {
            Backing::File(connection) => commit(&mut lock(connection), &work),
            Backing::Etcd(replica) => replica.change(work),
        }
    }

    /// Changes what is not shared with other coordinators.
    fn note<T>(
        &self,
        work: impl Fn(&Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match &self.backing {
            Backing::File(connection) => commit(&mut lock(connection), &work),
            Backing::Etcd(replica) => commit(&mut *replica.database()?, &work),
        }
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

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The connection to a file that is there.
fn open_file(path: &Path) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(PATIENCE)?;
    // Before anything is written: a later version's file is left as it is.
    let version = version(&connection, path)?;
    write_ahead(&connection)?;
    // With the default, a change that was confirmed could be gone after a power cut.
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    // Not in folders that the coordinator does not have.
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    if version < SCHEMA {
        lay_out(&mut connection, path)?;
    }
    Ok(connection)
}

/// Makes the folder of the file if it is not there.
fn make_folder(path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty())
        && !folder.exists()
    {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(folder)?;
    }
    Ok(())
}

/// Makes the file if it is not there.
fn make_private(path: &Path) -> io::Result<()> {
    // Never opened if it is there: closing it again would take away this process' locks on it
    // (sqlite.org/howtocorrupt.html, section 2.2).
    let made = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// The file's schema, 0 for a new file.
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

/// Readers do not wait for a writer then, nor it for them.
fn write_ahead(connection: &Connection) -> Result<(), StoreError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let set = connection
            .pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get::<_, String>(0));
        match set {
            Ok(mode) if mode.eq_ignore_ascii_case("wal") => return Ok(()),
            Ok(mode) => return Err(StoreError::NoWal { mode }),
            // Two that open a new file at once: here SQLite does not wait by itself.
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

/// Brings a new file, or one of an earlier version, to this version's schema.
fn lay_out(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Another process may have done it meanwhile.
    let version = usize::try_from(version(&transaction, path)?).unwrap_or(0);
    for step in STEPS.iter().skip(version) {
        transaction.execute_batch(step)?;
    }
    transaction.pragma_update(None, "user_version", SCHEMA)?;
    Ok(transaction.commit()?)
}

fn networks_of(connection: &Connection) -> Result<Option<Networks>, StoreError> {
    let mut statement = connection.prepare_cached("SELECT v4, v6 FROM mesh")?;
    let row: (Option<String>, Option<String>) =
        statement.query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let (Some(v4), Some(v6)) = row else {
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
    let mut statement = connection.prepare_cached("SELECT revision FROM mesh")?;
    Ok(statement.query_row([], |row| row.get(0))?)
}

/// Takes the next revision.
fn next_revision(transaction: &Transaction<'_>) -> Result<i64, StoreError> {
    transaction.execute("UPDATE mesh SET revision = revision + 1", [])?;
    revision_of(transaction)
}

/// As SQLite keeps it: what is beyond its range is as far as its range goes.
fn seconds(time: u64) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX)
}

/// Back again; the file has no negative ones.
fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
