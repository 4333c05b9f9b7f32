//! Handover of directories from root to the user that a daemon becomes.
//!
//! Such a directory belongs to root, and its group is the daemon's, so root can enter it without
//! the capabilities that override permissions. Directories above it need not be accessible to the
//! daemon: it opens files through the descriptor of the directory ([`Folder::inside`]).

use std::fs::{DirBuilder, File, OpenOptions, Permissions, read_dir};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{
    DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, fchown,
};
use std::path::{Path, PathBuf};

use crate::privilege::{Identity, UNNAMED};

/// An open directory.
#[derive(Debug)]
pub struct Folder {
    file: File,
}

impl Folder {
    /// Creates the directory if necessary, opens it to `user`, and gives `user` the plain files in
    /// it. With `None`, nothing changes owner.
    ///
    /// # Errors
    /// The directory cannot be created or opened, is a symbolic link, or does not belong to root.
    pub fn give(path: &Path, user: Option<Identity>) -> io::Result<Folder> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(path)?;
        let mut options = OpenOptions::new();
        options
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW);
        let folder = Folder {
            file: options.open(path)?,
        };
        if let Some(user) = user {
            folder.give_to(user)?;
        }
        Ok(folder)
    }

    fn give_to(&self, to: Identity) -> io::Result<()> {
        let owner = self.file.metadata()?.uid();
        if owner != 0 {
            return Err(io::Error::other(format!(
                "it belongs to user {owner}; give it to root (chown root), or move it elsewhere"
            )));
        }
        give_files(&self.inside(""), to)?;
        fchown(&self.file, None, Some(to.group))?;
        self.file.set_permissions(Permissions::from_mode(0o770))
    }

    /// Returns a path in this process to a file in the directory, which works whatever the
    /// permissions above it are (proc_pid_fd(5)).
    pub fn inside(&self, name: &str) -> PathBuf {
        itself(&self.file).join(name)
    }
}

/// Gives the plain files of a directory to a daemon: those of root, and those of a daemon under
/// another user id.
pub(crate) fn give_files(folder: &Path, to: Identity) -> io::Result<()> {
    for entry in read_dir(folder)? {
        // Opens the file itself: follows no link, waits for no pipe, and needs no read permission.
        let mut options = OpenOptions::new();
        options
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_NOFOLLOW);
        let Ok(file) = options.open(entry?.path()) else {
            continue;
        };
        let of = file.metadata()?;
        // With a second hard link, it would be a file elsewhere.
        if of.is_file() && of.nlink() == 1 && [0, UNNAMED].contains(&of.uid()) {
            chown(itself(&file), Some(to.user), Some(to.group))?;
        }
    }
    Ok(())
}

/// Returns the path of an open file in this process.
fn itself(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Opens a plain file for reading in a directory of another user: does not follow a link, and does
/// not wait for the other end of a pipe.
///
/// # Errors
/// The file cannot be opened, or is not a plain file.
pub fn open_plain(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a plain file",
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::privilege::drop_to;
    use crate::test_namespace::namespace;
    use crate::testing::in_child;

    const DAEMON: Identity = Identity {
        user: UNNAMED,
        group: UNNAMED,
    };

    #[test]
    fn the_daemon_can_open_files_below_closed_directories() {
        if namespace().is_none() {
            return;
        }
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("state/wg0");
        fs::set_permissions(above.path(), Permissions::from_mode(0o700)).unwrap();
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("before"), "1").unwrap();
        in_child(|| {
            let said = |error: io::Error| error.to_string();
            let folder = Folder::give(&path, Some(DAEMON)).map_err(said)?;
            drop_to(&[], Some(DAEMON)).map_err(|error| error.to_string())?;
            if fs::read_dir(above.path()).is_ok() {
                return Err("it can look above its folder".to_owned());
            }
            fs::read(folder.inside("before")).map_err(said)?;
            fs::write(folder.inside("new"), "2").map_err(said)?;
            fs::rename(folder.inside("new"), folder.inside("before")).map_err(said)
        });
        assert_eq!(fs::read(path.join("before")).unwrap(), b"2");
    }

    #[test]
    fn links_hard_linked_files_and_files_of_others_keep_their_owner() {
        if namespace().is_none() {
            return;
        }
        let above = tempfile::tempdir().unwrap();
        let (path, secret) = (above.path().join("state"), above.path().join("secret"));
        fs::create_dir(&path).unwrap();
        fs::write(&secret, "").unwrap();
        fs::hard_link(&secret, path.join("second")).unwrap();
        symlink(&secret, path.join("link")).unwrap();
        fs::write(path.join("other"), "").unwrap();
        chown(path.join("other"), Some(1234), None).unwrap();
        fs::write(path.join("plain"), "").unwrap();
        Folder::give(&path, Some(DAEMON)).unwrap();
        let owner = |name: &str| fs::symlink_metadata(path.join(name)).unwrap().uid();
        let owners = ["../secret", "second", "link", "other", "plain", "."].map(owner);
        assert_eq!(owners, [0, 0, 0, 1234, UNNAMED, 0]);
    }

    #[test]
    fn a_folder_of_somebody_else_and_a_link_are_refused() {
        if namespace().is_none() {
            return;
        }
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("state");
        fs::create_dir(&path).unwrap();
        chown(&path, Some(1234), None).unwrap();
        let error = Folder::give(&path, Some(DAEMON)).unwrap_err();
        assert!(error.to_string().contains("user 1234"), "{error}");
        let link = above.path().join("link");
        symlink("/etc", &link).unwrap();
        assert!(Folder::give(&link, Some(DAEMON)).is_err());
        assert_eq!(fs::metadata("/etc").unwrap().uid(), 0);
    }
}
