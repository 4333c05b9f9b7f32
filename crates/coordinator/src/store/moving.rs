//! How a mesh moves between a file and etcd.
//!
//! Whoever has the file open holds a lock on its folder together with the others ([`hold`]); who moves it holds that alone. So what is
//! acknowledged is in what is moved. From before anything of it is in etcd until it is known what became of that, the file has a mark
//! ([`mark_of`]), and nobody opens it: there are never two of one mesh. Ids, numbers, revisions and the digests of secrets stay what they
//! are: members go on with what they have.

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
    /// [`StoreError::Io`], [`StoreError::Sqlite`].
    pub fn put_away(self) -> Result<PathBuf, StoreError> {
        let mut name = self.file.clone().into_os_string();
        name.push(".moved");
        let away = PathBuf::from(name);
        fs::rename(&self.file, &away).map_err(|source| failed(&self.file, source))?;
        // As it was, for whoever takes it up again on purpose.
        unmark(&open_file(&away)?)?;
        Ok(away)
    }
}

impl Store {
    /// Brings the mesh of a file into etcd, all of it or, for whoever looks, nothing; `pin` is that of the certificate that members know,
    /// `None` if systems trust it. The file stays as it is. With `replace` it takes the place of a mesh that is there, whose members then
    /// are none any more.
    ///
    /// What strangers were refused is not brought: it is each coordinator's own. If it is not known in the end whether all of it is there, or
    /// this is broken off, nobody opens the file until the same has been done again, which finds out, or [`Store::undo_move`].
    ///
    /// # Errors
    /// [`StoreError::InUse`] if somebody has the file open; [`StoreError::NotEmpty`], [`StoreError::Changing`]; [`StoreError::NoNetworks`] if it
    /// was never a mesh; [`StoreError::Moving`] if it is being moved elsewhere; those of [`Store::open`] and [`Store::open_etcd`].
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
        networks_of(&connection)?.ok_or(StoreError::NoNetworks)?;
        let begun = mark_of(&connection)?;
        let mesh = match &begun {
            Some((prefix, _)) if *prefix != into.prefix => {
                let (path, prefix) = (file.to_owned(), prefix.clone());
                return Err(StoreError::Moving { path, prefix });
            }
            Some((_, mesh)) => *mesh,
            None => mark(&connection, &into.prefix)?,
        };
        let bring = |connection: &mut Connection| {
            let behaviour = TransactionBehavior::Immediate;
            let transaction = connection.transaction_with_behavior(behaviour)?;
            let at = seconds(now);
            audit::note(&transaction, at, "moved to etcd", &into.prefix, by)?;
            let seen = seen(&transaction)?;
            etcd::import(&transaction, &Beside { seen, pin }, into, mesh, replace)?;
            Ok(transaction.rollback()?)
        };
        bring(&mut connection).or_else(|error| {
            // What an earlier try has come to is not known by this.
            if begun.is_none() && !matches!(error, StoreError::Unknown(_)) {
                unmark(&connection)?;
            }
            Err(error)
        })?;
        // That it makes sense there, too, before anybody does without the file.
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

    /// Whether a move of the mesh of a file was broken off, or it is not known whether it was done.
    ///
    /// # Errors
    /// [`StoreError::InUse`]; [`StoreError::LaterVersion`], [`StoreError::Sqlite`].
    pub fn is_moving(file: &Path) -> Result<bool, StoreError> {
        let _folder = hold(file)?;
        Ok(mark_of(&open_file(file)?)?.is_some())
    }

    /// Takes back a move that was broken off: the mesh stays in its file.
    ///
    /// # Errors
    /// [`StoreError::NotMoving`]; [`StoreError::HasMoved`] if all of it is in etcd; [`StoreError::Unavailable`] if that is not known;
    /// [`StoreError::Moving`] if it is being moved elsewhere; [`StoreError::InUse`], [`StoreError::Sqlite`].
    pub fn undo_move(file: &Path, into: &Etcd) -> Result<(), StoreError> {
        let _folder = hold_alone(file)?;
        let connection = open_file(file)?;
        let path = file.to_owned();
        match mark_of(&connection)? {
            None => Err(StoreError::NotMoving { path }),
            Some((prefix, _)) if prefix != into.prefix => Err(StoreError::Moving { path, prefix }),
            Some((_, mesh)) => etcd::give_up(into, mesh).and_then(|()| unmark(&connection)),
        }
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

/// What keys begin with where the mesh of a file is being moved, and the number that it has or will have there.
pub(super) fn mark_of(connection: &Connection) -> Result<Option<(String, u64)>, StoreError> {
    // No part of the schema: no file has it for long.
    if !connection.table_exists(Some("main"), "moving")? {
        return Ok(None);
    }
    let sql = "SELECT prefix, mesh FROM moving";
    let found = connection.query_row(sql, [], |row| Ok((row.get(0)?, row.get::<_, String>(1)?)));
    let (prefix, mesh) = found?;
    let mesh = mesh.parse().map_err(|_| StoreError::Corrupt("move"))?;
    Ok(Some((prefix, mesh)))
}

/// Marks a file; the number that its mesh will have.
pub(super) fn mark(connection: &Connection, prefix: &str) -> Result<u64, StoreError> {
    let mesh = etcd::random()?;
    let transaction = connection.unchecked_transaction()?;
    transaction.execute("CREATE TABLE moving (prefix TEXT, mesh TEXT) STRICT", [])?;
    let sql = "INSERT INTO moving (prefix, mesh) VALUES (?1, ?2)";
    transaction.execute(sql, (prefix, mesh.to_string()))?;
    transaction.commit()?;
    Ok(mesh)
}

fn unmark(connection: &Connection) -> Result<(), StoreError> {
    connection.execute("DROP TABLE moving", [])?;
    Ok(())
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
