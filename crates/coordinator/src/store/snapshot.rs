//! Snapshots: a whole mesh at one moment, as the content of a file.
//!
//! A snapshot is an SQLite database of the store's schema, whose version is its `user_version`. It
//! is the same for a mesh in a file and for one in etcd, and either can be made from it. Ids,
//! numbers, revisions and the digests of secrets stay the same, so members notice nothing.
//!
//! An import is complete or has no effect. It never changes an existing mesh. The log of refused
//! joins is not imported into etcd: each coordinator has its own.

use std::fs;
use std::io;
use std::path::Path;

use rusqlite::Connection;
use seikan_proto::mesh::Pin;

use super::file::{File, create_schema, database_of, make_folder, with_suffix, write_new};
use super::rows::{Head, Mesh, Rows};
use super::{Actor, Etcd, Store, StoreError, audit, etcd};

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
        let mut rows = self.read(Mesh::rows)?;
        if let Some(replica) = self.replica() {
            let seen = replica.member_values("seen")?.into_iter();
            rows.extend(seen.map(|(member, row)| (format!("seen/{member}"), Some(row))));
        }
        Ok(database_of(&rows)?.serialize("main")?.to_vec())
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
        let rows = open_snapshot(snapshot, None, by, now)?;
        // SQLite would apply the log of a former file to the new one.
        if file.exists() || with_suffix(file, "-wal").exists() {
            return Err(not_empty());
        }
        make_folder(file).map_err(failed)?;
        let mut database = database_of(&rows)?;
        let content = database.serialize("main")?;
        // Unlike a rename, this never replaces a file.
        let written = write_new(file, &content, |new| fs::hard_link(new, file));
        written.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => not_empty(),
            _ => failed(error),
        })
    }

    /// Creates a mesh in etcd from a snapshot, and returns its number. Other coordinators see all
    /// of it or nothing. `pin` belongs to the certificate that members verify; `None` if a public
    /// CA signed that certificate. An interrupted import may be repeated.
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
        etcd::import(open_snapshot(snapshot, pin, by, now)?, into)
    }
}

/// Returns the rows of a snapshot, upgraded to this version, with this pin and a log entry of the
/// import.
fn open_snapshot(
    snapshot: &[u8],
    pin: Option<Pin>,
    by: &Actor,
    now: u64,
) -> Result<Rows, StoreError> {
    if !snapshot.starts_with(MAGIC) || snapshot.get(FORMAT) != Some(&1) {
        return Err(StoreError::NotASnapshot);
    }
    let mut copy = Connection::open_in_memory()?;
    copy.deserialize_read_exact("main", snapshot, snapshot.len(), false)?;
    create_schema(&mut copy, "the snapshot".as_ref())?;
    File::of(copy)?.change(|mesh| {
        mesh.networks()?.ok_or(StoreError::NoNetworks)?;
        let head = mesh.head();
        mesh.put(Head { pin, ..head })?;
        let subject = format!("revision {}", head.revision);
        audit::record(mesh, now, "imported", &subject, by)?;
        mesh.rows()
    })
}
