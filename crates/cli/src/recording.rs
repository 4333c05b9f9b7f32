//! Recordings as files: written beside their place and moved there when they are whole; read as bytes of a stranger.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use seikan_diagnose::Recording;
use seikan_diagnose::recording::MAX_BYTES;
use tempfile::NamedTempFile;

/// A file that is being written. Nothing is left of it unless it is [kept](Draft::keep).
#[derive(Debug)]
pub struct Draft {
    /// For its owner only.
    file: NamedTempFile,
    place: PathBuf,
}

impl Draft {
    /// Begins a file that will be at this place.
    ///
    /// # Errors
    /// Something else than a file is there, or none can be made beside it.
    pub fn create(place: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot write {}", place.display());
        if let Ok(there) = place.symlink_metadata()
            && !there.is_file()
        {
            bail!("{}: it is there and no regular file", cannot());
        }
        let Some(name) = place.file_name() else {
            bail!("{}: it has no file name", cannot());
        };
        let folder = match place.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(name);
        prefix.push(".");
        let mut builder = tempfile::Builder::new();
        let file = builder.prefix(&prefix).suffix(".part").tempfile_in(folder);
        Ok(Draft {
            file: file.with_context(cannot)?,
            place: place.to_owned(),
        })
    }

    /// Where to write.
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Moves it to its place; returns its length in bytes.
    ///
    /// # Errors
    /// It cannot be stored or moved.
    pub fn keep(self) -> anyhow::Result<u64> {
        let cannot = || format!("cannot write {}", self.place.display());
        self.file.as_file().sync_all().with_context(cannot)?;
        let length = self.file.as_file().metadata().with_context(cannot)?.len();
        let place = &self.place;
        let kept = self.file.persist(place).map_err(|error| error.error);
        kept.with_context(|| format!("cannot write {}", place.display()))?;
        Ok(length)
    }
}

/// Reads a recording.
///
/// # Errors
/// It cannot be read, or is none.
pub fn read(path: &Path) -> anyhow::Result<Recording> {
    let cannot = || format!("cannot read {}", path.display());
    let file = File::open(path).with_context(cannot)?;
    let mut bytes = Vec::new();
    // One more than may be: that it is too large is told by who parses it.
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
        let place = folder.path().join("a.parquet");
        std::fs::write(&place, "old").expect("write");
        let draft = Draft::create(&place).expect("draft");
        draft.file().write_all(b"new one").expect("write");
        assert_eq!(std::fs::read(&place).expect("read"), b"old");
        assert_eq!(draft.keep().expect("kept"), 7);
        assert_eq!(std::fs::read(&place).expect("read"), b"new one");
        let mode = place.metadata().expect("metadata").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn nothing_is_left_of_a_file_that_is_not_kept() {
        let folder = tempfile::tempdir().expect("folder");
        drop(Draft::create(&folder.path().join("a")).expect("draft"));
        assert_eq!(folder.path().read_dir().expect("list").count(), 0);
    }

    #[test]
    fn a_device_is_not_replaced() {
        let error = Draft::create(Path::new("/dev/null")).expect_err("refused");
        assert!(error.to_string().contains("no regular file"), "{error}");
        assert!(Draft::create(Path::new("/")).is_err());
    }
}
