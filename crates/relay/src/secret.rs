//! The file with the secret that a relay shares with coordinators. Only its owner can read it.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use seikan_proto::mesh::{RelayKind, RelaySecret, RelaySecretError};
use seikan_proto::rng::Rng;
use zeroize::Zeroizing;

/// Name of the file in the directory of the relay.
const FILE: &str = "secret";

/// Why the secret could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum SecretFileError {
    /// The file cannot be read or created.
    #[error("cannot read or create {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file does not contain a secret.
    #[error("{} has no secret: {source}; delete the file and the next start creates a new one", path.display())]
    NoSecret {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: RelaySecretError,
    },
}

/// Loads the secret from the directory of a relay. Creates the file (mode 0600) with a random secret, and the directory (mode
/// 0700), if they do not exist.
///
/// # Errors
/// [`SecretFileError`].
pub fn load(directory: &Path, rng: &mut dyn Rng) -> Result<RelaySecret, SecretFileError> {
    let path = directory.join(FILE);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            create(directory, &path, rng).and_then(|()| fs::read_to_string(&path))
        }
        read => read,
    };
    match text {
        Ok(text) => {
            let text = Zeroizing::new(text);
            RelaySecret::parse(text.trim(), RelayKind::Seikan)
                .map_err(|source| SecretFileError::NoSecret { path, source })
        }
        Err(source) => Err(SecretFileError::Io { path, source }),
    }
}

/// Creates the file atomically. Of two processes that do so at the same time, the first one wins.
fn create(directory: &Path, path: &Path, rng: &mut dyn Rng) -> io::Result<()> {
    if !directory.exists() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
    }
    // Not the id of the process: in a container each has the same, and a draft may be left from a crash.
    let mut number = [0; 8];
    rng.fill(&mut number);
    let draft = directory.join(format!("{FILE}.{:016x}", u64::from_be_bytes(number)));
    let created = write(&draft, &RelaySecret::generate(rng)).and_then(|()| {
        match fs::hard_link(&draft, path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    });
    let _ = fs::remove_file(&draft);
    created
}

fn write(path: &Path, secret: &RelaySecret) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    writeln!(file, "{}", secret.reveal())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    struct Same(u8);

    impl Rng for Same {
        fn fill(&mut self, destination: &mut [u8]) {
            destination.fill(self.0);
        }
    }

    #[test]
    fn it_is_created_once_for_its_owner_only() {
        let directory = tempfile::tempdir().expect("a directory");
        let directory = directory.path().join("relay");
        let first = load(&directory, &mut Same(1)).expect("a secret");
        let again = load(&directory, &mut Same(2)).expect("the same");
        assert_eq!(first.reveal(), again.reveal());
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!(mode(&directory), 0o700);
        assert_eq!(mode(&directory.join(FILE)), 0o600);
        assert_eq!(fs::read_dir(&directory).expect("a directory").count(), 1);
    }

    #[test]
    fn a_draft_of_a_process_that_was_killed_is_no_obstacle() {
        let directory = tempfile::tempdir().expect("a directory");
        // In a container this process would have the same id.
        let draft = format!("{FILE}.{}", std::process::id());
        fs::write(directory.path().join(draft), "skr_").expect("written");
        load(directory.path(), &mut Same(1)).expect("a secret");
    }

    #[test]
    fn an_invalid_secret_is_refused_and_not_printed() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join(FILE), "hunter2\n").expect("written");
        let error = load(directory.path(), &mut Same(1)).expect_err("no secret");
        let text = error.to_string();
        assert!(
            text.contains("has no secret") && !text.contains("hunter2"),
            "{text}"
        );
    }
}
