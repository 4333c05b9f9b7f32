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
    Actor, Backing, PATIENCE, PAUSE, Store, StoreError, audit, lock, make_folder, networks_of,
    open_file, seconds,
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

/// A file whose mesh is not in it any more.
#[derive(Debug)]
pub struct PutAway {
    /// Its new name.
    pub file: PathBuf,
    /// Why it still has its mark, and nobody opens it; `None`: it is as it was, for whoever takes it up again on purpose.
    pub marked: Option<StoreError>,
}

impl Moved {
    /// Renames the file, so that nobody takes it for the mesh any more: `.moved` comes after its name, and a number if that is there.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn put_away(self) -> Result<PutAway, StoreError> {
        let away = away(&self.file).map_err(|source| failed(&self.file, source))?;
        fs::rename(&self.file, &away).map_err(|source| failed(&self.file, source))?;
        let unmarked = open_file(&away).and_then(|connection| unmark(&connection));
        Ok(PutAway {
            file: away,
            marked: unmarked.err(),
        })
    }
}

/// A name that nothing has: what was moved before may be the only copy of another mesh.
fn away(file: &Path) -> io::Result<PathBuf> {
    let named = |number: Option<u32>| {
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
        .map(named)
    {
        match fs::symlink_metadata(&name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(name),
            Err(error) => return Err(error),
            Ok(_) => {}
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// A file that nobody moves as long as this is there.
#[derive(Debug)]
pub struct Hold {
    pub(super) file: PathBuf,
    pub(super) folder: fs::File,
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
    /// was never a mesh; [`StoreError::Moving`] if it is being moved elsewhere, also if another etcd has the same prefix; those of [`Store::open`] and [`Store::open_etcd`].
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
        let cluster = etcd::cluster(into)?;
        let mesh = match &begun {
            Some(mark) => mark.is_of(into, cluster, file)?.mesh,
            None => mark(&connection, into, cluster)?,
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

    /// Takes back a move that was broken off: the mesh stays in its file. Once that is sure, and before the file is opened by anybody else,
    /// `forget` is told the number that the mesh would have had.
    ///
    /// # Errors
    /// [`StoreError::NotMoving`]; [`StoreError::HasMoved`] if all of it is in etcd; [`StoreError::Unavailable`] if that is not known;
    /// [`StoreError::Moving`] if it is being moved elsewhere; [`StoreError::Io`] of `forget`; [`StoreError::InUse`], [`StoreError::Sqlite`].
    pub fn undo_move(
        file: &Path,
        into: &Etcd,
        forget: impl FnOnce(u64) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let _folder = hold_alone(file)?;
        let connection = open_file(file)?;
        let path = file.to_owned();
        let mark = mark_of(&connection)?.ok_or(StoreError::NotMoving { path })?;
        let mesh = mark.is_of(into, etcd::cluster(into)?, file)?.mesh;
        etcd::give_up(into, mesh)?;
        forget(mesh).map_err(|source| failed(file, source))?;
        unmark(&connection)
    }

    /// Holds a file, which need not be there, and makes its folder if that is not: nobody moves its mesh until it is opened, or this is gone.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if it is being moved right now; [`StoreError::Io`].
    pub fn hold(file: &Path) -> Result<Hold, StoreError> {
        make_folder(file).map_err(|source| failed(file, source))?;
        Ok(Hold {
            folder: hold(file)?,
            file: file.to_owned(),
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

/// Where the mesh of a file is being moved.
pub(super) struct Mark {
    /// What keys begin with there.
    prefix: String,
    /// The number that the mesh has or will have.
    mesh: u64,
    /// That of the etcd cluster: another one may have the same prefix.
    cluster: u64,
    /// As it was said where that is.
    endpoints: String,
}

impl Mark {
    /// Itself, if it is going there.
    fn is_of(&self, into: &Etcd, cluster: u64, file: &Path) -> Result<&Mark, StoreError> {
        match self.prefix == into.prefix && self.cluster == cluster {
            true => Ok(self),
            false => Err(self.error(file)),
        }
    }

    /// That nobody opens the file meanwhile.
    pub fn error(&self, file: &Path) -> StoreError {
        StoreError::Moving {
            path: file.to_owned(),
            prefix: self.prefix.clone(),
            endpoints: self.endpoints.clone(),
        }
    }
}

pub(super) fn mark_of(connection: &Connection) -> Result<Option<Mark>, StoreError> {
    // No part of the schema: no file has it for long.
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

/// Marks a file; the number that its mesh will have.
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
