//! Files of recordings, bug reports and members. They are written to a temporary file and renamed
//! when complete. Recordings are read as untrusted input.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use nix::unistd::Uid;
use seikan_diagnose::Recording;
use seikan_diagnose::recording::MAX_BYTES;
use tempfile::NamedTempFile;

/// A file that is being written. It is removed unless it is [kept](Draft::keep).
#[derive(Debug)]
pub struct Draft {
    /// Accessible to its owner only.
    file: NamedTempFile,
    path: PathBuf,
    /// Whether an existing file stays.
    is_new: bool,
}

impl Draft {
    /// Creates a temporary file next to `path`.
    ///
    /// # Errors
    /// `path` exists and is not a regular file, or the file cannot be created.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot write {}", path.display());
        if let Ok(there) = path.symlink_metadata()
            && !there.is_file()
        {
            bail!("{}: it exists and is not a regular file", cannot());
        }
        let Some(name) = path.file_name() else {
            bail!("{}: it has no file name", cannot());
        };
        let folder = folder_of(path);
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(name);
        prefix.push(".");
        let mut builder = tempfile::Builder::new();
        let file = builder.prefix(&prefix).suffix(".part").tempfile_in(folder);
        Ok(Draft {
            file: file.with_context(cannot)?,
            path: path.to_owned(),
            is_new: false,
        })
    }

    /// Creates a file at a path that must not exist, neither now nor when the file is kept.
    ///
    /// # Errors
    /// `path` exists, or the file cannot be created.
    pub fn create_new(path: &Path) -> anyhow::Result<Self> {
        if path.symlink_metadata().is_ok() {
            bail!(
                "cannot write {}: it exists already; name another file",
                path.display()
            );
        }
        let mut draft = Draft::create(path)?;
        draft.is_new = true;
        Ok(draft)
    }

    /// Returns the file to write to.
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Like [`Self::keep`]; after sudo(8), the file is handed to the user who ran it, if the
    /// directory is that user's.
    ///
    /// # Errors
    /// The file cannot be stored or renamed.
    pub fn keep_for_user(self) -> anyhow::Result<u64> {
        if Uid::effective().is_root() {
            let number = |name| std::env::var(name).ok()?.parse().ok();
            hand_over(
                self.file(),
                &self.path,
                number("SUDO_UID"),
                number("SUDO_GID"),
            );
        }
        self.keep()
    }

    /// Renames the file to its final path; returns its length in bytes.
    ///
    /// # Errors
    /// The file cannot be stored or renamed.
    pub fn keep(self) -> anyhow::Result<u64> {
        let cannot = || format!("cannot write {}", self.path.display());
        self.file.as_file().sync_all().with_context(cannot)?;
        let length = self.file.as_file().metadata().with_context(cannot)?.len();
        let path = &self.path;
        let kept = if self.is_new {
            self.file.persist_noclobber(path)
        } else {
            self.file.persist(path)
        };
        let kept = kept.map_err(|error| error.error);
        kept.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(length)
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Gives an open file at `path` to a user, if the directory is that user's. Otherwise, and after a
/// failure, it stays root's.
fn hand_over(file: &File, path: &Path, user: Option<u32>, group: Option<u32>) {
    if let (Some(user), Some(group), Ok(folder)) = (user, group, folder_of(path).metadata())
        && folder.uid() == user
    {
        let _ = fchown(file, Some(user), Some(group));
    }
}

/// Reads a recording.
///
/// # Errors
/// The file cannot be read, or is not a recording.
pub fn read(path: &Path) -> anyhow::Result<Recording> {
    let cannot = || format!("cannot read {}", path.display());
    let file = File::open(path).with_context(cannot)?;
    let mut bytes = Vec::new();
    // One byte more than the maximum: the parser reports that it is too large.
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .with_context(cannot)?;
    Recording::parse(&bytes).with_context(cannot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_is_there_when_it_is_whole() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a.parquet");
        std::fs::write(&path, "old").expect("write");
        let draft = Draft::create(&path).expect("draft");
        draft.file().write_all(b"new one").expect("write");
        assert_eq!(std::fs::read(&path).expect("read"), b"old");
        assert_eq!(draft.keep().expect("kept"), 7);
        assert_eq!(std::fs::read(&path).expect("read"), b"new one");
        let mode = path.metadata().expect("metadata").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_file_is_handed_over_in_a_directory_of_the_user_only() {
        if !Uid::effective().is_root() {
            eprintln!("SKIPPED: not root");
            return;
        }
        let folder = tempfile::tempdir().expect("folder");
        let draft = Draft::create(&folder.path().join("a")).expect("draft");
        let owner = |user, group| {
            hand_over(draft.file(), &draft.path, user, group);
            let data = draft.file().metadata().expect("metadata");
            (data.uid(), data.gid())
        };
        assert_eq!(owner(Some(1234), Some(1235)), (0, 0), "root's directory");
        std::os::unix::fs::chown(folder.path(), Some(1234), None).expect("chown");
        assert_eq!(owner(Some(1234), None), (0, 0));
        assert_eq!(owner(Some(1236), Some(1235)), (0, 0), "another user");
        assert_eq!(owner(Some(1234), Some(1235)), (1234, 1235));
    }

    #[test]
    fn nothing_is_left_of_a_file_that_is_not_kept() {
        let folder = tempfile::tempdir().expect("folder");
        drop(Draft::create(&folder.path().join("a")).expect("draft"));
        assert_eq!(folder.path().read_dir().expect("list").count(), 0);
    }

    #[test]
    fn a_new_file_replaces_none_that_came_meanwhile() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a");
        let draft = Draft::create_new(&path).expect("draft");
        std::fs::write(&path, "other").expect("write");
        assert!(draft.keep().is_err() && Draft::create_new(&path).is_err());
        assert_eq!(std::fs::read(&path).expect("read"), b"other");
        assert_eq!(folder.path().read_dir().expect("list").count(), 1);
    }

    #[test]
    fn a_device_is_not_replaced() {
        let error = Draft::create(Path::new("/dev/null")).expect_err("refused");
        assert!(error.to_string().contains("not a regular file"), "{error}");
        assert!(Draft::create(Path::new("/")).is_err());
    }
}
