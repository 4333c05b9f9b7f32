//! State on disk: the membership, with which a host starts while no coordinator answers, and the known keys,
//! with which it detects changed ones.

use seikan_proto::mesh::{MAX_ANSWER, Membership};
use seikan_sys::handover::open_plain;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file that cannot be replaced cannot be read.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot read {}, the members' keys as this host first saw them: {source}; restore the file, or move it away to \
     trust the keys that the coordinator names next",
    file.display()
)]
pub struct KnownError {
    /// Path of the file.
    pub file: PathBuf,
    /// The error.
    pub source: io::Error,
}

/// Maximum size of a file in bytes.
const MAX_FILE: u64 = 8 * MAX_ANSWER as u64;

/// Returns the file of the membership in an interface's directory.
pub(super) fn file(folder: &Path) -> PathBuf {
    folder.join("members.json")
}

/// Returns the file of the known keys in an interface's directory.
pub(super) fn known_file(folder: &Path) -> PathBuf {
    folder.join("known.json")
}

/// Removes the stored state of an interface's mesh: its directory in `state`.
pub fn forget(state: &Path, interface: &str) {
    // A missing directory is as good.
    let _ = fs::remove_dir_all(state.join(interface));
}

/// Returns the stored membership of an interface, a few seconds old at most while its tunnel is connected to a
/// coordinator.
///
/// # Errors
/// Nothing is stored, or it cannot be read.
pub fn stored_membership(state: &Path, interface: &str) -> io::Result<Membership> {
    read(&file(&state.join(interface)))
}

/// Loads a file that the coordinator can replace: empty if it is missing or of another version.
pub(super) fn load<T: DeserializeOwned + Default>(file: &Path) -> T {
    read(file).unwrap_or_default()
}

/// Loads a file that nothing can replace; empty if it is missing.
///
/// # Errors
/// The file exists, but cannot be read or parsed. It must not count as missing, or its contents would be
/// forgotten.
pub(super) fn load_known<T: DeserializeOwned + Default>(file: &Path) -> Result<T, KnownError> {
    match read(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        other => other.map_err(|source| KnownError {
            file: real(file),
            source,
        }),
    }
}

/// Returns the real path of a file in a directory that is named by a descriptor of this process.
fn real(file: &Path) -> PathBuf {
    let folder = file.parent().and_then(|folder| fs::read_link(folder).ok());
    match (folder, file.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => file.to_owned(),
    }
}

/// Reads a file.
pub(super) fn read<T: DeserializeOwned>(file: &Path) -> io::Result<T> {
    let mut text = Vec::new();
    // The directory belongs to the daemon's user, and root reads it too.
    open_plain(file)?.take(MAX_FILE).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Writes a file, readable by this user only; after a full disk or a crash the old one remains.
pub(super) fn store(file: &Path, value: &impl Serialize) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let temporary = file.with_extension("new");
    let mut new = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)?;
    new.write_all(&serde_json::to_vec(value)?)?;
    new.sync_all()?;
    fs::rename(&temporary, file)?;
    // Makes the new name durable.
    fs::File::open(folder)?.sync_all()
}

/// Removes a file.
pub(super) fn remove(file: &Path) {
    // A missing file is as good.
    let _ = fs::remove_file(file);
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_proto::mesh::{Changes, Membership};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn stored_data_is_read_again_and_private() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = file(&folder.path().join("state"));
        assert_eq!(load::<Membership>(&file), Membership::default());
        let mut membership = Membership::default();
        membership.take(Changes {
            revision: 7,
            ..Changes::default()
        });
        store(&file, &membership).expect("stored");
        assert_eq!(load::<Membership>(&file), membership);
        let mode = fs::metadata(&file).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        remove(&file);
        assert_eq!(load::<Membership>(&file), Membership::default());
    }

    #[test]
    fn a_spoilt_file_is_as_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = file(folder.path());
        for text in ["", "{", "[]", r#"{"revision": "x"}"#] {
            fs::write(&file, text).expect("written");
            assert_eq!(load::<Membership>(&file), Membership::default());
            assert!(load_known::<Membership>(&file).is_err());
        }
        fs::remove_file(&file).expect("removed");
        assert!(load_known::<Membership>(&file).is_ok());
    }
}
