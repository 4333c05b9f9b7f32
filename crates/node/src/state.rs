//! What has to be taken back, kept where it survives the daemon.
//!
//! The interface goes with the daemon, and its addresses and routes go with the interface. Rules,
//! sysctls, name servers and firewall tables do not. Each is written to `/run/seikan` *before* it is
//! made ([`Journal::will_do`]) and the file is removed once all are taken back
//! ([`Journal::take_back`]). The file is the monitor's ([`crate::monitor`]), which outlives a daemon
//! that was killed and takes everything back. If the monitor was killed, too, `down` or the next
//! `up` of the interface does ([`Journal::open`]); after a restart of the machine only what outlives
//! that ([`Undo::outlives_boot`]).
//!
//! The file is locked by whoever may take back what is in it, so that only one does; the kernel lets
//! go of the lock with the process, however that ends. (That there is no second instance is seen to
//! by the control sockets' lock.)

use crate::setup::Change;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a clean-up after a killed daemon is waited for.
const CLEAN_UP_PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two looks at a lock that somebody holds.
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// Another text after each restart of the machine (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Why there is no journal.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Somebody else is at it.
    #[error(
        "cannot clean up after {name}: another process{} has its journal; wait until it has ended, and try again",
        pid.map(|pid| format!(" (of {pid})")).unwrap_or_default()
    )]
    Locked {
        /// The journal's: the interface's.
        name: String,
        /// Whose journal it is, if it says.
        pid: Option<u32>,
    },
    /// The file cannot be made or written.
    #[error("cannot keep a journal in {}: {source}; {}", path.display(), remedy(source))]
    File {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room in that file system"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "make the folder writable for the user who runs the tunnel"
        }
        _ => "check that folder",
    }
}

/// A change that can be noted and taken back.
pub trait Undo: Serialize + DeserializeOwned + Clone + PartialEq {
    /// Whether the other is a change of the very same thing.
    fn undoes_as(&self, other: &Self) -> bool {
        self == other
    }

    /// Whether it is still in force after a restart of the machine.
    fn outlives_boot(&self) -> bool {
        true
    }

    /// Takes it back. What is gone already is no failure.
    ///
    /// # Errors
    /// What could not be taken back, and why, for people.
    fn take_back(self) -> Result<(), String>;
}

/// Keeps note of changes.
pub trait Notes {
    /// Notes a change that is about to be made, or made again. The text is the reason why the note does not outlive the
    /// process that keeps it.
    fn will_do(&mut self, change: Change) -> Result<(), String>;
}

impl Notes for Journal {
    fn will_do(&mut self, change: Change) -> Result<(), String> {
        Journal::will_do(self, change).map_err(|error| error.to_string())
    }
}

/// The changes in force that outlive the process.
#[derive(Debug)]
pub struct Journal<C: Undo = Change> {
    /// Locked; `None` where no file can be kept.
    file: Option<(File, PathBuf)>,
    changes: Vec<C>,
}

impl<C: Undo> Journal<C> {
    /// Takes the lock. What an instance that was killed had not taken back comes as the second
    /// value; the caller takes it back.
    ///
    /// # Errors
    /// [`StateError::Locked`] while another process has it; [`StateError::File`] where no file can
    /// be kept, without which one can go on ([`Journal::in_memory`]).
    pub fn open(directory: &Path, name: &str) -> Result<(Journal<C>, Vec<C>), StateError> {
        let path = directory.join(format!("{name}.journal"));
        let failed = |source| StateError::File {
            path: path.clone(),
            source,
        };
        if !directory.exists() {
            let mut builder = fs::DirBuilder::new();
            builder.recursive(true).mode(0o700);
            builder.create(directory).map_err(failed)?;
        }
        let mut file = lock(&path, CLEAN_UP_PATIENCE)
            .map_err(failed)?
            .ok_or_else(|| StateError::Locked {
                name: name.to_owned(),
                pid: owner(&path),
            })?;
        let (owner, mut left) = read::<C>(&mut file).map_err(failed)?;
        if owner.is_some_and(|owner| owner.is_of_another_boot()) {
            left.retain(C::outlives_boot);
        }
        write_owner(&mut file).map_err(failed)?;
        let journal = Journal {
            file: Some((file, path)),
            changes: Vec::new(),
        };
        Ok((journal, left))
    }

    /// A journal that does not survive the process.
    pub fn in_memory() -> Journal<C> {
        Journal {
            file: None,
            changes: Vec::new(),
        }
    }

    /// The number of the open file, if there is one.
    pub fn file(&self) -> Option<RawFd> {
        self.file.as_ref().map(|(file, _)| file.as_raw_fd())
    }

    /// Closes this process's copy of the file after a fork; the journal is the other process's.
    pub fn leave_to_the_other(mut self) {
        self.file = None;
        self.changes.clear();
    }

    /// What is noted.
    pub fn changes(&self) -> &[C] {
        &self.changes
    }

    /// Where it is, if anywhere.
    pub fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|(_, path)| path.as_path())
    }

    /// Notes a change that is about to be made, or made again. It will be taken back even if the
    /// note cannot be written down, unless the process is killed before.
    pub fn will_do(&mut self, change: C) -> Result<(), StateError> {
        let last = self.changes.iter().rfind(|noted| noted.undoes_as(&change));
        if last == Some(&change) {
            return Ok(());
        }
        let written = match &mut self.file {
            Some((file, path)) => append(file, &change).map_err(|source| StateError::File {
                path: path.clone(),
                source,
            }),
            None => Ok(()),
        };
        self.changes.push(change);
        written
    }

    /// Leaves the changes in force and notes them in another file of that folder, so that no clean-up takes them back.
    /// [`undo`] does.
    ///
    /// # Errors
    /// [`StateError::File`]: they are in force, and noted where they were.
    pub fn keep(self, file_name: &str) -> Result<(), StateError> {
        let Some((_, path)) = &self.file else {
            return Ok(());
        };
        fs::rename(path, path.with_file_name(file_name)).map_err(|source| StateError::File {
            path: path.clone(),
            source,
        })
    }

    /// Takes all changes back, the last first, and removes the file. Goes on after a failure and
    /// returns every one.
    pub fn take_back(&mut self) -> Vec<String> {
        let failures = take_back(std::mem::take(&mut self.changes));
        if let Some((file, path)) = self.file.take() {
            // Before the lock goes, so that nobody locks a file that is about to vanish unseen.
            let _ = fs::remove_file(path);
            drop(file);
        }
        failures
    }
}

impl<C: Undo> Drop for Journal<C> {
    /// A journal with nothing in it is of no use to anybody; one with changes is what the process
    /// that cleans up reads.
    fn drop(&mut self) {
        if self.changes.is_empty() {
            self.take_back();
        }
    }
}

/// Takes changes back, the last first. Of two to the same thing, such as the card that was made anew
/// under its name, the last knows how that was.
pub fn take_back<C: Undo>(changes: Vec<C>) -> Vec<String> {
    let mut undone: Vec<C> = Vec::new();
    let mut failures = Vec::new();
    for change in changes.into_iter().rev() {
        if !undone.iter().any(|other| other.undoes_as(&change)) {
            undone.push(change.clone());
            failures.extend(change.take_back().err());
        }
    }
    failures
}

/// In the process that outlives the one of `pid`: takes back what that had not. `first` sees the changes before. Nothing
/// happens after a clean end.
pub fn clean_up_after<C: Undo>(pid: u32, path: &Path, first: impl FnOnce(&[C])) -> Vec<String> {
    if !path.exists() {
        return Vec::new();
    }
    let Ok(Some(mut file)) = lock(path, CLEAN_UP_PATIENCE) else {
        return Vec::new();
    };
    let failures = match read(&mut file) {
        Ok((Some(owner), changes)) if owner.pid == pid => {
            first(&changes);
            take_back(changes)
        }
        // Another instance was faster.
        _ => return Vec::new(),
    };
    let _ = fs::remove_file(path);
    failures
}

/// Takes back what is noted in a file that nobody holds, and removes it; what was noted, and the failures.
///
/// # Errors
/// [`StateError::Locked`] while another process has it; [`StateError::File`] where it cannot be read.
pub fn undo<C: Undo>(path: &Path) -> Result<(Vec<C>, Vec<String>), StateError> {
    let failed = |source| StateError::File {
        path: path.to_owned(),
        source,
    };
    let mut file =
        lock(path, Duration::ZERO)
            .map_err(failed)?
            .ok_or_else(|| StateError::Locked {
                name: path.display().to_string(),
                pid: owner(path),
            })?;
    let (_, changes) = read(&mut file).map_err(failed)?;
    let failures = take_back(changes.clone());
    if failures.is_empty() {
        fs::remove_file(path).map_err(failed)?;
    }
    Ok((changes, failures))
}

/// Opens and locks the file at `path`; `None` if somebody else holds it for all of `patience`. A
/// process that was killed may hold it for some time still: the kernel closes its files one by one.
fn lock(path: &Path, patience: Duration) -> io::Result<Option<File>> {
    let until = Instant::now() + patience;
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        match file.try_lock() {
            // The one who held it may have removed it in between: then this is no longer the file.
            Ok(()) => match fs::metadata(path) {
                Ok(there) if there.ino() == file.metadata()?.ino() => return Ok(Some(file)),
                _ => continue,
            },
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
        if Instant::now() > until {
            return Ok(None);
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

/// Whether changes of an earlier instance are noted in the folder, and nobody holds them now.
pub fn is_left(directory: &Path, name: &str) -> bool {
    let path = directory.join(format!("{name}.journal"));
    let Ok(file) = File::open(path) else {
        return false;
    };
    file.try_lock_shared().is_ok() && BufReader::new(file).lines().nth(1).is_some()
}

/// Who wrote the file.
struct Owner {
    pid: u32,
    boot: Option<String>,
}

impl Owner {
    fn parse(line: &str) -> Option<Owner> {
        let mut words = line.split_whitespace();
        Some(Owner {
            pid: words.next()?.parse().ok()?,
            boot: words.next().map(str::to_owned),
        })
    }

    /// A file that does not say is taken to be of this one.
    fn is_of_another_boot(&self) -> bool {
        self.boot.is_some() && boot_id().is_some() && self.boot != boot_id()
    }
}

fn boot_id() -> Option<String> {
    let id = fs::read_to_string(BOOT_ID).ok()?;
    Some(id.trim().to_owned())
}

/// The process that holds the file, by its own word.
fn owner(path: &Path) -> Option<u32> {
    let text = fs::read_to_string(path).ok()?;
    Some(Owner::parse(text.lines().next()?)?.pid)
}

fn write_owner(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    let (pid, boot) = (std::process::id(), boot_id().unwrap_or_default());
    file.write_all(format!("{pid} {boot}\n").as_bytes())
}

/// One line for each change; a line that was cut off by a full disk is passed over.
fn read<C: Undo>(file: &mut File) -> io::Result<(Option<Owner>, Vec<C>)> {
    file.seek(SeekFrom::Start(0))?;
    let mut lines = BufReader::new(file).lines();
    let owner = lines.next().transpose()?;
    let owner = owner.and_then(|line| Owner::parse(&line));
    let mut changes = Vec::new();
    for line in lines {
        changes.extend(serde_json::from_str::<C>(&line?));
    }
    Ok((owner, changes))
}

fn append<C: Undo>(file: &mut File, change: &C) -> io::Result<()> {
    let mut line = serde_json::to_vec(change)?;
    line.push(b'\n');
    file.seek(SeekFrom::End(0))?;
    file.write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sysctl(path: &Path) -> Change {
        Change::Sysctl {
            path: path.into(),
            before: "0".into(),
        }
    }

    #[test]
    fn what_was_changed_is_taken_back_and_the_file_goes() {
        let folder = tempfile::tempdir().expect("folder");
        let switch = folder.path().join("switch");
        fs::write(&switch, "1").expect("write");
        let (mut journal, left) = Journal::<Change>::open(folder.path(), "wg0").expect("open");
        assert!(left.is_empty());
        journal.will_do(sysctl(&switch)).expect("note");
        let path = journal.path().expect("a file").to_owned();
        assert_eq!(journal.take_back(), Vec::<String>::new());
        assert_eq!(fs::read_to_string(&switch).expect("read"), "0");
        assert!(!path.exists());
    }

    #[test]
    fn what_was_changed_anew_gets_what_it_had_last() {
        let folder = tempfile::tempdir().expect("folder");
        let switch = folder.path().join("switch");
        fs::write(&switch, "1").expect("write");
        let (mut journal, _) = Journal::open(folder.path(), "wg0").expect("open");
        for before in ["0", "7", "7"] {
            let path = switch.clone();
            let before = before.into();
            let noted = journal.will_do(Change::Sysctl { path, before });
            noted.expect("note");
        }
        let path = journal.path().expect("a file");
        let lines = fs::read_to_string(path).expect("read").lines().count();
        assert_eq!(lines, 3, "the owner, and each note once");
        assert_eq!(journal.take_back(), Vec::<String>::new());
        assert_eq!(fs::read_to_string(&switch).expect("read"), "7");
    }

    #[test]
    fn the_next_instance_is_told_what_a_killed_one_left() {
        let folder = tempfile::tempdir().expect("folder");
        let switch = folder.path().join("switch");
        let (mut journal, _) = Journal::open(folder.path(), "wg0").expect("open");
        journal.will_do(sysctl(&switch)).expect("note");
        drop(journal); // as the kernel closes the files of a killed process
        let (_, left) = Journal::<Change>::open(folder.path(), "wg0").expect("open");
        assert_eq!(left, [sysctl(&switch)]);
    }

    #[test]
    fn after_a_restart_of_the_machine_only_a_file_on_disk_is_left() {
        let folder = tempfile::tempdir().expect("folder");
        let name_server = Change::ResolvConf {
            interface: "wg0".into(),
            server: [10, 0, 0, 1].into(),
        };
        let (mut journal, _) = Journal::open(folder.path(), "wg0").expect("open");
        for change in [sysctl(Path::new("/switch")), name_server.clone()] {
            journal.will_do(change).expect("note");
        }
        let path = journal.path().expect("a file").to_owned();
        drop(journal);
        assert!(is_left(folder.path(), "wg0"));
        let text = fs::read_to_string(&path).expect("read");
        let boot = boot_id().expect("a boot id");
        fs::write(&path, text.replace(&boot, "another")).expect("write");
        let (_, left) = Journal::<Change>::open(folder.path(), "wg0").expect("open");
        assert_eq!(left, [name_server]);
    }

    #[test]
    fn an_empty_journal_leaves_no_file() {
        let folder = tempfile::tempdir().expect("folder");
        drop(Journal::<Change>::open(folder.path(), "wg0").expect("open"));
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 0);
    }

    #[test]
    fn only_one_at_a_time_takes_back() {
        let folder = tempfile::tempdir().expect("folder");
        // The lock belongs to the open file, so this process can be its own rival.
        let (journal, _) = Journal::<Change>::open(folder.path(), "wg0").expect("open");
        let path = journal.path().expect("a file").to_owned();
        let try_once = || lock(&path, Duration::ZERO).expect("open").is_some();
        assert!(!try_once());
        drop(journal);
        assert!(try_once());
    }

    #[test]
    fn the_clean_up_leaves_another_instance_alone() {
        let folder = tempfile::tempdir().expect("folder");
        let switch = folder.path().join("switch");
        fs::write(&switch, "1").expect("write");
        let (mut journal, _) = Journal::open(folder.path(), "wg0").expect("open");
        journal.will_do(sysctl(&switch)).expect("note");
        let path = journal.path().expect("a file").to_owned();
        drop(journal);
        let pid = std::process::id();
        clean_up_after(pid + 1, &path, |_: &[Change]| panic!("not its own"));
        assert_eq!(fs::read_to_string(&switch).expect("read"), "1");
        clean_up_after(pid, &path, |_: &[Change]| ());
        assert_eq!(fs::read_to_string(&switch).expect("read"), "0");
        assert!(!path.exists());
    }

    #[test]
    fn what_is_to_be_cleaned_up_is_shown_first() {
        let folder = tempfile::tempdir().expect("folder");
        let (mut journal, _) = Journal::open(folder.path(), "wg0").expect("open");
        journal.will_do(Change::Hooks).expect("note");
        let path = journal.path().expect("a file").to_owned();
        drop(journal);
        let mut ran = false;
        clean_up_after(std::process::id(), &path, |changes| {
            ran = changes.contains(&Change::Hooks);
        });
        assert!(ran);
    }

    #[test]
    fn what_is_kept_is_cleaned_up_by_nobody_and_can_be_undone() {
        let folder = tempfile::tempdir().expect("folder");
        let switch = folder.path().join("switch");
        fs::write(&switch, "1").expect("write");
        let (mut journal, _) = Journal::open(folder.path(), "wg0").expect("open");
        journal.will_do(sysctl(&switch)).expect("note");
        let path = journal.path().expect("a file").to_owned();
        journal.keep("wg0.kept").expect("keep");
        clean_up_after(std::process::id(), &path, |_: &[Change]| panic!("kept"));
        assert_eq!(fs::read_to_string(&switch).expect("read"), "1");
        let kept = folder.path().join("wg0.kept");
        let undone = undo::<Change>(&kept).expect("undo");
        assert_eq!(undone, (vec![sysctl(&switch)], vec![]));
        assert_eq!(fs::read_to_string(&switch).expect("read"), "0");
        assert!(!kept.exists());
    }
}
