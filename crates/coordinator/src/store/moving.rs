//! How a mesh moves between a file and etcd.
//!
//! Whoever has the file open holds a lock on its folder together with the others ([`hold`]); who moves it holds that alone. So what is
//! acknowledged is in what is moved. Ids, numbers, revisions and the digests of secrets stay what they are: members go on with what they
//! have.

use std::collections::BTreeMap;
use std::fs::{self, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, TransactionBehavior};
use seikan_proto::mesh::Pin;

use super::etcd::{self, Beside, Etcd};
use super::{
    Actor, Backing, PATIENCE, PAUSE, Store, StoreError, audit, lock, networks_of, open_file,
    seconds,
};

/// How long those who have the file open are waited for: a verb ends soon, a coordinator does not.
const ENDS: Duration = Duration::from_secs(1);

/// A mesh that has been moved from a file.
#[derive(Debug)]
pub struct Moved {
    /// Where it is now.
    pub store: Store,
    file: PathBuf,
    _folder: fs::File,
}

impl Moved {
    /// Renames the file, so that nobody takes it for the mesh any more: `.moved` comes after its name. Its new name.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn put_away(self) -> Result<PathBuf, StoreError> {
        let mut name = self.file.clone().into_os_string();
        name.push(".moved");
        let away = PathBuf::from(name);
        fs::rename(&self.file, &away).map_err(|source| failed(&self.file, source))?;
        Ok(away)
    }
}

impl Store {
    /// Brings the mesh of a file into etcd, all of it or, for whoever looks, nothing; `pin` is that of the certificate that members know,
    /// `None` if systems trust it. The file stays as it is. With `replace` it takes the place of a mesh that is there, whose members then
    /// are none any more.
    ///
    /// What strangers were refused is not brought: it is each coordinator's own.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if somebody has the file open; [`StoreError::NotEmpty`]; [`StoreError::NoNetworks`] if it was never a mesh;
    /// those of [`Store::open`] and [`Store::open_etcd`].
    pub fn move_to_etcd(
        file: &Path,
        into: &Etcd,
        pin: Option<Pin>,
        replace: bool,
        by: &Actor,
        now: u64,
    ) -> Result<Moved, StoreError> {
        let folder = hold_alone(file)?;
        let mut connection = open_file(file)?;
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        networks_of(&transaction)?.ok_or(StoreError::NoNetworks)?;
        audit::note(
            &transaction,
            seconds(now),
            "moved to etcd",
            &into.prefix,
            by,
        )?;
        let seen = seen(&transaction)?;
        etcd::import(&transaction, &Beside { seen, pin }, into, replace)?;
        transaction.rollback()?;
        // That it makes sense there, too, before anybody does without the file.
        let store = Store::open_etcd(into)?;
        Ok(Moved {
            store,
            file: file.to_owned(),
            _folder: folder,
        })
    }

    /// All of it as of one moment, as what a file has: a copy to keep, or for one coordinator to go on with. What is changed afterwards is
    /// not in it.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`], [`StoreError::Sqlite`].
    pub fn export(&self) -> Result<Vec<u8>, StoreError> {
        self.catch_up()?;
        let seen = match &self.backing {
            Backing::File(_) => BTreeMap::new(),
            Backing::Etcd(replica) => replica.of_members("seen")?,
        };
        let mut copy = Connection::open_in_memory()?;
        match &self.backing {
            Backing::File(connection) => copy_all(&lock(connection), &mut copy)?,
            Backing::Etcd(replica) => copy_all(&*replica.database()?, &mut copy)?,
        }
        let transaction = copy.transaction()?;
        for (member, at) in &seen {
            let at: i64 = at.parse().unwrap_or(0);
            let sql =
                "INSERT OR REPLACE INTO seen (member, at) SELECT id, ?2 FROM member WHERE id = ?1";
            transaction.execute(sql, (member, at))?;
        }
        transaction.commit()?;
        // Nothing of what was deleted, such as the secret of a relay.
        copy.execute("VACUUM", [])?;
        Ok(copy.serialize("main")?.to_vec())
    }
}

/// All pages, of one moment.
fn copy_all(from: &Connection, to: &mut Connection) -> Result<(), StoreError> {
    let deadline = Instant::now() + PATIENCE;
    let copying = Backup::new(from, to)?;
    loop {
        match copying.step(-1)? {
            StepResult::Done => return Ok(()),
            // Somebody lays the file out, or changes it right now.
            _ if Instant::now() < deadline => thread::sleep(PAUSE),
            _ => return Err(StoreError::Interrupted),
        }
    }
}

/// A lock on the folder of the file, with all others who have the file open.
///
/// Not on the file itself: closing that would take away SQLite's own locks (sqlite.org/howtocorrupt.html, section 2.2).
pub(super) fn hold(file: &Path) -> Result<fs::File, StoreError> {
    let folder = folder(file)?;
    match folder.try_lock_shared() {
        Ok(()) => Ok(folder),
        Err(error) => Err(not_held(file, error)),
    }
}

/// The same for nobody else.
fn hold_alone(file: &Path) -> Result<fs::File, StoreError> {
    let folder = folder(file)?;
    let deadline = Instant::now() + ENDS;
    loop {
        match folder.try_lock() {
            Ok(()) => return Ok(folder),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(PAUSE),
            Err(error) => return Err(not_held(file, error)),
        }
    }
}

fn folder(file: &Path) -> Result<fs::File, StoreError> {
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    fs::File::open(folder).map_err(|source| failed(folder, source))
}

fn not_held(file: &Path, error: TryLockError) -> StoreError {
    match error {
        TryLockError::WouldBlock => StoreError::InUse {
            path: file.to_owned(),
        },
        TryLockError::Error(source) => failed(file, source),
    }
}

fn seen(connection: &Connection) -> Result<BTreeMap<i64, i64>, StoreError> {
    let mut statement = connection.prepare("SELECT member, at FROM seen")?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

fn failed(path: &Path, source: io::Error) -> StoreError {
    StoreError::Io {
        path: path.to_owned(),
        source,
    }
}
