//! Moves of a mesh between a file and etcd.
//!
//! A process that has the file open holds a shared lock on its folder ([`lock_shared`]); a process
//! that moves the mesh holds it exclusively, so the move includes every acknowledged change. The
//! file has a mark ([`mark_of`]) from before the first row is in etcd until the outcome is known.
//! Nobody opens a marked file, so there are never two copies of one mesh in use. Ids, numbers,
//! revisions and the digests of secrets stay the same: members notice nothing.

use std::collections::BTreeMap;
use std::fs::{self, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, TransactionBehavior};
use seikan_proto::mesh::Pin;

use super::etcd::{self, Etcd, Extras};
use super::{
    Actor, Backing, PATIENCE, PAUSE, Store, StoreError, audit, lock, make_folder, networks_of,
    open_file, seconds,
};

/// Time to wait until other processes close the file: a command ends soon, a coordinator does not.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A mesh that was moved from a file to etcd.
#[derive(Debug)]
pub struct Moved {
    /// The mesh in etcd.
    pub store: Store,
    file: PathBuf,
    _folder: fs::File,
}

/// A file whose mesh was moved.
#[derive(Debug)]
pub struct RetiredFile {
    /// New path of the file.
    pub file: PathBuf,
    /// Error that kept its mark, so that nobody can open it; `None`: the mark is gone, and the file
    /// can be used again on purpose.
    pub marked: Option<StoreError>,
}

impl Moved {
    /// Renames the file so that nobody takes it for the current mesh: appends `.moved`, and a
    /// number if that name is taken.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn retire(self) -> Result<RetiredFile, StoreError> {
        let free_name = free_name(&self.file).map_err(|source| failed(&self.file, source))?;
        fs::rename(&self.file, &free_name).map_err(|source| failed(&self.file, source))?;
        let unmarked = open_file(&free_name).and_then(|connection| unmark(&connection));
        Ok(RetiredFile {
            file: free_name,
            marked: unmarked.err(),
        })
    }
}

/// Returns an unused name: a file that was moved before may be the only copy of another mesh.
fn free_name(file: &Path) -> io::Result<PathBuf> {
    let candidate = |number: Option<u32>| {
        let mut name = file.as_os_str().to_owned();
        name.push(".moved");
        if let Some(number) = number {
            name.push(format!(".{number}"));
        }
        PathBuf::from(name)
    };
    for name in [None]
        .into_iter()
        .chain((2..=u32::MAX).map(Some))
        .map(candidate)
    {
        match fs::symlink_metadata(&name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(name),
            Err(error) => return Err(error),
            Ok(_) => {}
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// A file whose mesh cannot be moved while this value lives.
#[derive(Debug)]
pub struct LockedFile {
    pub(super) file: PathBuf,
    pub(super) folder: fs::File,
}

impl Store {
    /// Copies the mesh of a file into etcd. Others see all of it or nothing. `pin` is that of the
    /// certificate that members verify; `None` if a public CA signed it. The file stays unchanged.
    /// With `replace`, the mesh replaces an existing one, whose members lose their membership.
    ///
    /// The log of refused joins is not copied: each coordinator has its own. If the outcome is
    /// unknown, or the move is interrupted, nobody can open the file until the same move has been
    /// repeated or [`Store::undo_move`] has cancelled it.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if another process has the file open; [`StoreError::NotEmpty`],
    /// [`StoreError::Changing`]; [`StoreError::NoNetworks`] if the file has no mesh;
    /// [`StoreError::Moving`] if a move to another etcd or prefix has begun; those of
    /// [`Store::open`] and [`Store::open_etcd`].
    pub fn move_to_etcd(
        file: &Path,
        into: &Etcd,
        pin: Option<Pin>,
        replace: bool,
        by: &Actor,
        now: u64,
    ) -> Result<Moved, StoreError> {
        let folder = lock_exclusive(file)?;
        let mut connection = open_file(file)?;
        networks_of(&connection)?.ok_or(StoreError::NoNetworks)?;
        let existing_mark = mark_of(&connection)?;
        let cluster = etcd::cluster(into)?;
        let mesh = match &existing_mark {
            Some(mark) => mark.check_target(into, cluster, file)?.mesh,
            None => mark(&connection, into, cluster)?,
        };
        let copy = |connection: &mut Connection| {
            let behaviour = TransactionBehavior::Immediate;
            let transaction = connection.transaction_with_behavior(behaviour)?;
            let at = seconds(now);
            audit::record(&transaction, at, "moved to etcd", &into.prefix, by)?;
            let extras = Extras {
                seen: seen_times(&transaction)?,
                pin,
            };
            etcd::import(&transaction, &extras, into, mesh, replace)?;
            Ok(transaction.rollback()?)
        };
        copy(&mut connection).or_else(|error| {
            // The outcome of an earlier attempt is still unknown.
            if existing_mark.is_none() && !matches!(error, StoreError::Unknown(_)) {
                unmark(&connection)?;
            }
            Err(error)
        })?;
        // Opening the mesh checks it before the caller gives up the file.
        let store = Store::open_etcd(&Etcd {
            mesh: Some(mesh),
            ..into.clone()
        })?;
        Ok(Moved {
            store,
            file: file.to_owned(),
            _folder: folder,
        })
    }

    /// Returns whether a move of the file's mesh was interrupted or has an unknown outcome.
    ///
    /// # Errors
    /// [`StoreError::InUse`]; [`StoreError::LaterVersion`], [`StoreError::Sqlite`].
    pub fn is_moving(file: &Path) -> Result<bool, StoreError> {
        let _folder = lock_shared(file)?;
        Ok(mark_of(&open_file(file)?)?.is_some())
    }

    /// Cancels an interrupted move: the mesh stays in its file. Once that is certain, and before
    /// another process can open the file, `forget` is called with the number that the mesh would
    /// have had.
    ///
    /// # Errors
    /// [`StoreError::NotMoving`]; [`StoreError::HasMoved`] if the move is complete;
    /// [`StoreError::Unavailable`] if that is unknown; [`StoreError::Moving`] if it is a move to
    /// another etcd or prefix; [`StoreError::Io`] of `forget`; [`StoreError::InUse`],
    /// [`StoreError::Sqlite`].
    pub fn undo_move(
        file: &Path,
        into: &Etcd,
        forget: impl FnOnce(u64) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let _folder = lock_exclusive(file)?;
        let connection = open_file(file)?;
        let path = file.to_owned();
        let mark = mark_of(&connection)?.ok_or(StoreError::NotMoving { path })?;
        let mesh = mark.check_target(into, etcd::cluster(into)?, file)?.mesh;
        etcd::give_up(into, mesh)?;
        forget(mesh).map_err(|source| failed(file, source))?;
        unmark(&connection)
    }

    /// Locks a file against moves until it is opened or the result is dropped. Creates its folder,
    /// but not the file.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if it is being moved; [`StoreError::Io`].
    pub fn lock_file(file: &Path) -> Result<LockedFile, StoreError> {
        make_folder(file).map_err(|source| failed(file, source))?;
        Ok(LockedFile {
            folder: lock_shared(file)?,
            file: file.to_owned(),
        })
    }

    /// Returns the contents of a database file with the state at one moment: a backup, or the file
    /// of a single coordinator.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`], [`StoreError::Sqlite`].
    pub fn export(&self) -> Result<Vec<u8>, StoreError> {
        self.catch_up()?;
        let seen_times = match &self.backing {
            Backing::File(_) => BTreeMap::new(),
            Backing::Etcd(replica) => replica.member_values("seen")?,
        };
        let mut copy = Connection::open_in_memory()?;
        match &self.backing {
            Backing::File(connection) => copy_all(&lock(connection), &mut copy)?,
            Backing::Etcd(replica) => copy_all(&*replica.database()?, &mut copy)?,
        }
        let transaction = copy.transaction()?;
        for (member, at) in &seen_times {
            let at: i64 = at.parse().unwrap_or(0);
            let sql =
                "INSERT OR REPLACE INTO seen (member, at) SELECT id, ?2 FROM member WHERE id = ?1";
            transaction.execute(sql, (member, at))?;
        }
        transaction.commit()?;
        // Removes deleted data, such as the secrets of relays, from free pages.
        copy.execute("VACUUM", [])?;
        Ok(copy.serialize("main")?.to_vec())
    }
}

/// Copies all pages of one moment.
fn copy_all(from: &Connection, to: &mut Connection) -> Result<(), StoreError> {
    let deadline = Instant::now() + PATIENCE;
    let copying = Backup::new(from, to)?;
    loop {
        match copying.step(-1)? {
            StepResult::Done => return Ok(()),
            // Another process upgrades or changes the file.
            _ if Instant::now() < deadline => thread::sleep(PAUSE),
            _ => return Err(StoreError::Interrupted),
        }
    }
}

/// Mark of a file whose mesh is being moved.
pub(super) struct Mark {
    /// Prefix of the keys in etcd.
    prefix: String,
    /// Number of the mesh in etcd.
    mesh: u64,
    /// Id of the etcd cluster: another one may use the same prefix.
    cluster: u64,
    /// URLs of the cluster, as the operator gave them.
    endpoints: String,
}

impl Mark {
    /// Returns the mark if the move goes to this prefix and cluster.
    fn check_target(&self, into: &Etcd, cluster: u64, file: &Path) -> Result<&Mark, StoreError> {
        match self.prefix == into.prefix && self.cluster == cluster {
            true => Ok(self),
            false => Err(self.error(file)),
        }
    }

    /// Returns the error for opening the file.
    pub fn error(&self, file: &Path) -> StoreError {
        StoreError::Moving {
            path: file.to_owned(),
            prefix: self.prefix.clone(),
            endpoints: self.endpoints.clone(),
        }
    }
}

pub(super) fn mark_of(connection: &Connection) -> Result<Option<Mark>, StoreError> {
    // The table is not part of the schema, because it is temporary.
    if !connection.table_exists(Some("main"), "moving")? {
        return Ok(None);
    }
    let sql = "SELECT prefix, mesh, cluster, endpoints FROM moving";
    let found = connection.query_row(sql, [], |row| {
        let texts: [String; 4] = [row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?];
        Ok(texts)
    });
    let [prefix, mesh, cluster, endpoints] = found?;
    let number = |text: String| text.parse().map_err(|_| StoreError::Corrupt("move"));
    Ok(Some(Mark {
        prefix,
        mesh: number(mesh)?,
        cluster: number(cluster)?,
        endpoints,
    }))
}

/// Marks a file; returns the number that its mesh will have.
pub(super) fn mark(connection: &Connection, into: &Etcd, cluster: u64) -> Result<u64, StoreError> {
    let mesh = etcd::random()?;
    let transaction = connection.unchecked_transaction()?;
    let sql = "CREATE TABLE moving (prefix TEXT, mesh TEXT, cluster TEXT, endpoints TEXT) STRICT";
    transaction.execute(sql, [])?;
    let sql = "INSERT INTO moving (prefix, mesh, cluster, endpoints) VALUES (?1, ?2, ?3, ?4)";
    let (mesh_text, cluster) = (mesh.to_string(), cluster.to_string());
    let values = (&into.prefix, mesh_text, cluster, into.endpoints.join(","));
    transaction.execute(sql, values)?;
    transaction.commit()?;
    Ok(mesh)
}

fn unmark(connection: &Connection) -> Result<(), StoreError> {
    connection.execute("DROP TABLE IF EXISTS moving", [])?;
    Ok(())
}

/// Takes a shared lock on the folder of the file.
///
/// The file itself must not be locked: closing it would release SQLite's own locks
/// (sqlite.org/howtocorrupt.html, section 2.2).
pub(super) fn lock_shared(file: &Path) -> Result<fs::File, StoreError> {
    let folder = folder(file)?;
    match folder.try_lock_shared() {
        Ok(()) => Ok(folder),
        Err(error) => Err(lock_error(file, error)),
    }
}

/// Takes an exclusive lock on the folder of the file.
fn lock_exclusive(file: &Path) -> Result<fs::File, StoreError> {
    let folder = folder(file)?;
    let deadline = Instant::now() + CLOSE_TIMEOUT;
    loop {
        match folder.try_lock() {
            Ok(()) => return Ok(folder),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(PAUSE),
            Err(error) => return Err(lock_error(file, error)),
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

fn lock_error(file: &Path, error: TryLockError) -> StoreError {
    match error {
        TryLockError::WouldBlock => StoreError::InUse {
            path: file.to_owned(),
        },
        TryLockError::Error(source) => failed(file, source),
    }
}

fn seen_times(connection: &Connection) -> Result<BTreeMap<i64, i64>, StoreError> {
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
