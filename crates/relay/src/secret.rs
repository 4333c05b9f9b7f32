//! The secret that a relay shares with coordinators: one file, for its owner only.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use seikan_proto::mesh::{RelayKind, RelaySecret, RelaySecretError};
use seikan_proto::rng::Rng;
use zeroize::Zeroizing;

/// The file in a relay's folder.
const FILE: &str = "secret";

/// Why there is no secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretFileError {
    /// The file cannot be read or made.
    #[error("cannot read or make {}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What is in it is none.
    #[error("{} has no secret: {source}; without the file, the next start makes another", path.display())]
    NoSecret {
        /// Which.
        path: PathBuf,
        /// Why.
        source: RelaySecretError,
    },
}

/// The secret of the relay with this folder. If there is none it is made: the file with mode 0600, the folder too (0700)
/// unless it is there.
///
/// # Errors
/// [`SecretFileError`].
pub fn load(folder: &Path, rng: &mut dyn Rng) -> Result<RelaySecret, SecretFileError> {
    let path = folder.join(FILE);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make(folder, &path, rng).and_then(|()| fs::read_to_string(&path))
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

/// Makes it, whole or not at all; who is first of two that do so at once has made it.
fn make(folder: &Path, path: &Path, rng: &mut dyn Rng) -> io::Result<()> {
    if !folder.exists() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)?;
    }
    let draft = folder.join(format!("{FILE}.{}", std::process::id()));
    let made = write(&draft, &RelaySecret::generate(rng)).and_then(|()| {
        match fs::hard_link(&draft, path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    });
    let _ = fs::remove_file(&draft);
    made
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
    fn it_is_made_once_for_its_owner_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().join("relay");
        let first = load(&folder, &mut Same(1)).expect("a secret");
        let again = load(&folder, &mut Same(2)).expect("the same");
        assert_eq!(first.reveal(), again.reveal());
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700);
        assert_eq!(mode(&folder.join(FILE)), 0o600);
        assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1);
    }

    #[test]
    fn what_is_no_secret_is_refused_and_not_shown() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join(FILE), "hunter2\n").expect("written");
        let error = load(folder.path(), &mut Same(1)).expect_err("no secret");
        let text = error.to_string();
        assert!(
            text.contains("has no secret") && !text.contains("hunter2"),
            "{text}"
        );
    }
}
