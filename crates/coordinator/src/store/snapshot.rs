//! Snapshots: a whole mesh at one moment, as the content of a file.
//!
//! A snapshot is an SQLite database of the store's schema, whose version is its `user_version`. It
//! is the same for a mesh in a file and for one in etcd, and either can be made from it. Ids,
//! numbers, revisions and the digests of secrets stay the same, so members notice nothing.
//!
//! An import is complete or has no effect. It never changes an existing mesh. The log of refused
//! joins is not imported into etcd: each coordinator has its own.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::path::Path;
use std::thread;
use std::time::Instant;

use rusqlite::Connection;
use rusqlite::backup::{Backup, StepResult};
use seikan_proto::mesh::Pin;

use super::{
    Actor, Etcd, PATIENCE, PAUSE, Store, StoreError, audit, create_new, create_schema, etcd,
    make_folder, networks_of, revision_of, seconds, with_suffix,
};

/// First bytes of a database file (sqlite.org/fileformat.html, section 1.3).
const MAGIC: &[u8] = b"SQLite format 3\0";
/// Position of the file format version, which is 1 in a snapshot and 2 in a file with a write-ahead
/// log. The latter may be incomplete without its log.
const FORMAT: usize = 18;

impl Store {
    /// Returns a snapshot.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`], [`StoreError::Sqlite`].
    pub fn export(&self) -> Result<Vec<u8>, StoreError> {
        self.catch_up()?;
        let seen_times = match self.replica() {
            None => BTreeMap::new(),
            Some(replica) => replica.member_values("seen")?,
        };
        let mut copy = Connection::open_in_memory()?;
        copy_all(&*self.database()?, &mut copy)?;
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

    /// Makes the file of a mesh from a snapshot, with mode 0600.
    ///
    /// # Errors
    /// [`StoreError::NotEmpty`] if the file exists; [`StoreError::NotASnapshot`],
    /// [`StoreError::LaterVersion`], [`StoreError::NoNetworks`]; [`StoreError::Io`],
    /// [`StoreError::Sqlite`].
    pub fn import_file(
        snapshot: &[u8],
        file: &Path,
        by: &Actor,
        now: u64,
    ) -> Result<(), StoreError> {
        let failed = |source| StoreError::Io {
            path: file.to_owned(),
            source,
        };
        let not_empty = || StoreError::NotEmpty {
            location: file.display().to_string(),
        };
        let mut copy = open_snapshot(snapshot, by, now)?;
        // SQLite would apply the log of a former file to the new one.
        if file.exists() || with_suffix(file, "-wal").exists() {
            return Err(not_empty());
        }
        make_folder(file).map_err(failed)?;
        let temporary = with_suffix(file, ".new");
        // Left by an interrupted import.
        let _ = fs::remove_file(&temporary);
        let content = copy.serialize("main")?;
        let write = || {
            let mut new = create_new(&temporary)?;
            new.write_all(&content)?;
            new.sync_all()?;
            // Unlike a rename, this never replaces a file.
            fs::hard_link(&temporary, file)
        };
        let written = write();
        let _ = fs::remove_file(&temporary);
        written.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => not_empty(),
            _ => failed(error),
        })
    }

    /// Makes a mesh in etcd from a snapshot; returns its number. Other coordinators see all of it
    /// or nothing. `pin` is that of the certificate that members verify; `None` if a public CA
    /// signed it. An interrupted import may be repeated.
    ///
    /// # Errors
    /// [`StoreError::NotEmpty`] if there is a mesh under the prefix; [`StoreError::NotASnapshot`],
    /// [`StoreError::LaterVersion`], [`StoreError::NoNetworks`]; [`StoreError::Unknown`] if the
    /// mesh may be in etcd, [`StoreError::Unavailable`] if it is not; [`StoreError::EtcdSettings`],
    /// [`StoreError::Unreadable`], [`StoreError::Sqlite`].
    pub fn import_etcd(
        snapshot: &[u8],
        into: &Etcd,
        pin: Option<Pin>,
        by: &Actor,
        now: u64,
    ) -> Result<u64, StoreError> {
        etcd::import(&open_snapshot(snapshot, by, now)?, pin, into)
    }
}

/// Opens a copy of a snapshot, upgraded to this version, with a log entry of the import.
fn open_snapshot(snapshot: &[u8], by: &Actor, now: u64) -> Result<Connection, StoreError> {
    if !snapshot.starts_with(MAGIC) || snapshot.get(FORMAT) != Some(&1) {
        return Err(StoreError::NotASnapshot);
    }
    let mut copy = Connection::open_in_memory()?;
    copy.deserialize_read_exact("main", snapshot, snapshot.len(), false)?;
    create_schema(&mut copy, "the snapshot".as_ref())?;
    networks_of(&copy)?.ok_or(StoreError::NoNetworks)?;
    let transaction = copy.transaction()?;
    let subject = format!("revision {}", revision_of(&transaction)?);
    audit::record(&transaction, seconds(now), "imported", &subject, by)?;
    transaction.commit()?;
    Ok(copy)
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
