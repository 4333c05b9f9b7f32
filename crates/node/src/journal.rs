//! Journal of changes to the system, stored where it survives the daemon.
//!
//! The interface disappears with the daemon, and addresses and routes disappear with the interface. Rules,
//! sysctls, name servers and firewall tables do not. Each is written to `/run/seikan` *before* it is made
//! ([`Journal::will_do`]), and the file is removed once all are undone ([`Journal::take_back`]); a change that cannot
//! be undone stays in it, for the next attempt. The monitor
//! owns the file; it outlives a daemon that was killed, and undoes everything. If the monitor was killed too,
//! `down` or the next `up` of the interface does it ([`Journal::open`]); after a reboot, only for changes that
//! outlive one ([`Undo::outlives_boot`]).
//!
//! The file is locked by the process that may undo its changes; the kernel releases the lock with the process.
//! (The control sockets' lock prevents a second instance.)

pub mod change;

use change::Change;
use seikan_sys::netns::NetNs;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Maximum time to wait for the clean-up after a killed daemon.
const CLEAN_UP_PATIENCE: Duration = Duration::from_secs(5);
/// Interval between two attempts to take a lock.
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// An identifier that changes with each boot (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Why there is no journal.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another process uses the journal.
    #[error(
        "cannot clean up after {name}: another process{} has its journal; wait until it has ended, and try again",
        pid.map(|pid| format!(" (of {pid})")).unwrap_or_default()
    )]
    Locked {
        /// Name of the journal, which is the interface's.
        name: String,
        /// Process that has the journal, if it says so.
        pid: Option<u32>,
    },
    /// The file cannot be created or written.
    #[error("cannot keep a journal in {}: {source}; {}", path.display(), remedy(source))]
    File {
        /// Its path.
        path: PathBuf,
        /// The error.
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

/// A change that can be recorded and undone.
pub trait Undo: Serialize + DeserializeOwned + Clone + PartialEq {
    /// Whether the other change affects the same object.
    fn undoes_as(&self, other: &Self) -> bool {
        self == other
    }

    /// Whether the change outlives a reboot.
    fn outlives_boot(&self) -> bool {
        true
    }

    /// Undoes the change. If it is undone already, that is no error.
    ///
    /// # Errors
    /// A failure, as a text for the user.
    fn take_back(self) -> Result<(), String>;
}

/// Records changes.
pub trait Notes {
    /// Records a change that is about to be made, perhaps again. The error is the reason why the record does
    /// not outlive the process that keeps it.
    fn will_do(&mut self, change: Change) -> Result<(), String>;
}

impl Notes for Journal {
    fn will_do(&mut self, change: Change) -> Result<(), String> {
        Journal::will_do(self, change).map_err(|error| error.to_string())
    }
}

/// Changes in force that outlive the process.
#[derive(Debug)]
pub struct Journal<C: Undo = Change> {
    /// The locked file; `None` if none can be kept.
    file: Option<(File, PathBuf)>,
    changes: Vec<C>,
}

impl<C: Undo> Journal<C> {
    /// Takes the lock. The second value is the changes of an earlier instance, which the caller undoes before it calls
    /// [`Journal::settle`]. Until then they stay recorded.
    ///
    /// # Errors
    /// [`JournalError::Locked`] while another process has the lock; [`JournalError::File`] if no file can be
    /// kept; [`Journal::in_memory`] works without.
    pub fn open(directory: &Path, name: &str) -> Result<(Journal<C>, Vec<C>), JournalError> {
        let path = directory.join(format!("{name}.journal"));
        let failed = |source| JournalError::File {
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
            .ok_or_else(|| JournalError::Locked {
                name: name.to_owned(),
                pid: owner(&path),
            })?;
        let (owner, mut left) = read::<C>(&mut file).map_err(failed)?;
        if owner.is_some_and(|owner| owner.is_of_another_boot()) {
            left.retain(C::outlives_boot);
        }
        // This process may be killed before they are undone.
        let file = replace(&path, &left).map_err(failed)?;
        let journal = Journal {
            file: Some((file, path)),
            changes: left.clone(),
        };
        Ok((journal, left))
    }

    /// Takes the outcome of undoing the changes of an earlier instance: the remaining ones are undone with this
    /// instance's.
    ///
    /// # Errors
    /// [`JournalError::File`]: the file has all changes of the earlier instance.
    pub fn settle(&mut self, remaining: Vec<C>) -> Result<(), JournalError> {
        if self.changes == remaining {
            return Ok(());
        }
        self.changes = remaining;
        if let Some((file, path)) = &mut self.file {
            *file = replace(path, &self.changes).map_err(|source| JournalError::File {
                path: path.clone(),
                source,
            })?;
        }
        Ok(())
    }

    /// A journal that does not survive the process.
    pub fn in_memory() -> Journal<C> {
        Journal {
            file: None,
            changes: Vec::new(),
        }
    }

    /// Returns the descriptor of the open file, if there is one.
    pub fn file(&self) -> Option<RawFd> {
        self.file.as_ref().map(|(file, _)| file.as_raw_fd())
    }

    /// Closes this process's copy of the file after a fork; the other process owns the journal.
    pub fn leave_to_the_other(mut self) {
        self.file = None;
        self.changes.clear();
    }

    /// Returns the recorded changes.
    pub fn changes(&self) -> &[C] {
        &self.changes
    }

    /// Returns the path of the file, if there is one.
    pub fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|(_, path)| path.as_path())
    }

    /// Records a change that is about to be made, perhaps again. It is undone also if writing the record fails,
    /// unless the process is killed.
    pub fn will_do(&mut self, change: C) -> Result<(), JournalError> {
        let last = self.changes.iter().rfind(|noted| noted.undoes_as(&change));
        if last == Some(&change) {
            return Ok(());
        }
        let written = match &mut self.file {
            Some((file, path)) => append(file, &change).map_err(|source| JournalError::File {
                path: path.clone(),
                source,
            }),
            None => Ok(()),
        };
        self.changes.push(change);
        written
    }

    /// Leaves the changes in force and moves their records to another file of the directory, which no clean-up
    /// reads but [`undo`] does.
    ///
    /// # Errors
    /// [`JournalError::File`]: the changes are in force and recorded in the old file.
    pub fn keep(self, file_name: &str) -> Result<(), JournalError> {
        let Some((_, path)) = &self.file else {
            return Ok(());
        };
        fs::rename(path, path.with_file_name(file_name)).map_err(|source| JournalError::File {
            path: path.clone(),
            source,
        })
    }

    /// Undoes all changes, the last first, and removes the file. Continues after a failure, and returns all
    /// failures. The file stays if there is one, with the changes that could not be undone.
    pub fn take_back(&mut self) -> Vec<String> {
        let failures = self.revert();
        self.close();
        failures
    }

    /// Undoes all changes as [`Journal::take_back`] does. The file stays locked, and as it is, until [`Journal::close`].
    pub fn revert(&mut self) -> Vec<String> {
        let (remaining, failures) = take_back(std::mem::take(&mut self.changes));
        self.changes = remaining;
        failures
    }

    /// Removes the file, or leaves it with the remaining changes, and releases the lock.
    pub fn close(&mut self) {
        if let Some((file, path)) = self.file.take() {
            store(&path, &self.changes);
            drop(file);
        }
    }
}

impl<C: Undo> Drop for Journal<C> {
    /// Removes an empty journal; one with changes is left for the process that cleans up.
    fn drop(&mut self) {
        if self.changes.is_empty() {
            self.close();
        }
    }
}

/// Undoes changes, the last first. Of two changes of the same object, such as a recreated interface, the last
/// has the old value. Returns the changes that could not be undone, in their order, and the reasons.
pub fn take_back<C: Undo>(changes: Vec<C>) -> (Vec<C>, Vec<String>) {
    let mut tried: Vec<C> = Vec::new();
    let (mut remaining, mut failures) = (Vec::new(), Vec::new());
    for change in changes.into_iter().rev() {
        if !tried.iter().any(|other| other.undoes_as(&change)) {
            tried.push(change.clone());
            if let Err(failure) = change.clone().take_back() {
                remaining.push(change);
                failures.push(failure);
            }
        }
    }
    remaining.reverse();
    (remaining, failures)
}

/// Runs in the process that outlives `pid`, and undoes its changes. `first` gets the changes before. Does
/// nothing after a regular end.
pub fn clean_up_after<C: Undo>(pid: u32, path: &Path, first: impl FnOnce(&[C])) -> Vec<String> {
    if !path.exists() {
        return Vec::new();
    }
    let Ok(Some(mut file)) = lock(path, CLEAN_UP_PATIENCE) else {
        return Vec::new();
    };
    match read(&mut file) {
        Ok((Some(owner), changes)) if owner.pid == pid => {
            first(&changes);
            let (remaining, failures) = take_back(changes);
            store(path, &remaining);
            failures
        }
        // Another instance has taken the journal first.
        _ => Vec::new(),
    }
}

/// Undoes the changes recorded in a file that is not locked, and removes it. Returns the changes, and the
/// failures.
///
/// # Errors
/// [`JournalError::Locked`] while another process has the lock; [`JournalError::File`] if the file cannot be
/// read.
pub fn undo<C: Undo>(path: &Path) -> Result<(Vec<C>, Vec<String>), JournalError> {
    let failed = |source| JournalError::File {
        path: path.to_owned(),
        source,
    };
    let mut file =
        lock(path, Duration::ZERO)
            .map_err(failed)?
            .ok_or_else(|| JournalError::Locked {
                name: path.display().to_string(),
                pid: owner(path),
            })?;
    let (_, changes) = read(&mut file).map_err(failed)?;
    let (remaining, failures) = take_back(changes.clone());
    if remaining.is_empty() {
        fs::remove_file(path).map_err(failed)?;
    } else {
        replace(path, &remaining).map_err(failed)?;
    }
    Ok((changes, failures))
}

/// Opens and locks the file at `path`; `None` if another process has it locked for all of `patience`. A process
/// that was killed may hold the lock for a moment, since the kernel closes its files one by one.
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
            // The former holder may have removed the file meanwhile.
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

/// Returns the changes of all journals of a directory but that of this name, as far as they were made in this network
/// namespace.
pub fn of_others<C: Undo>(directory: &Path, name: &str) -> Vec<C> {
    let own = directory.join(format!("{name}.journal"));
    let paths = fs::read_dir(directory).into_iter().flatten().flatten();
    let paths = paths
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "journal") && *path != own)
        // Drafts that a killed process has left.
        .filter(|path| {
            let name = path.file_name().unwrap_or_default();
            name.as_encoded_bytes().first() != Some(&b'.')
        });
    let changes = |path: PathBuf| match read(&mut File::open(path).ok()?) {
        Ok((Some(owner), changes)) => owner.is_of_this_namespace().then_some(changes),
        _ => None,
    };
    paths.filter_map(changes).flatten().collect()
}

/// Whether a directory has changes of an earlier instance that no process holds.
pub fn is_left(directory: &Path, name: &str) -> bool {
    let path = directory.join(format!("{name}.journal"));
    let Ok(file) = File::open(path) else {
        return false;
    };
    file.try_lock_shared().is_ok() && BufReader::new(file).lines().nth(1).is_some()
}

/// Writer of a file.
struct Owner {
    pid: u32,
    boot: Option<String>,
    /// Its network namespace.
    namespace: Option<u64>,
}

impl Owner {
    fn parse(line: &str) -> Option<Owner> {
        let mut words = line.split_whitespace();
        Some(Owner {
            pid: words.next()?.parse().ok()?,
            boot: words.next().map(str::to_owned),
            namespace: words.next().and_then(|word| word.parse().ok()),
        })
    }

    fn is_of_this_namespace(&self) -> bool {
        self.namespace.is_some() && self.namespace == namespace() && self.boot == boot_id()
    }

    /// Whether the file is of an earlier boot; a file without an identifier counts as of this one.
    fn is_of_another_boot(&self) -> bool {
        self.boot.is_some() && boot_id().is_some() && self.boot != boot_id()
    }
}

fn boot_id() -> Option<String> {
    let id = fs::read_to_string(BOOT_ID).ok()?;
    Some(id.trim().to_owned())
}

fn namespace() -> Option<u64> {
    NetNs::current().ok()?.id().ok()
}

/// Returns the process that holds the file, as written in it.
fn owner(path: &Path) -> Option<u32> {
    let text = fs::read_to_string(path).ok()?;
    Some(Owner::parse(text.lines().next()?)?.pid)
}

/// Replaces the file at `path`, whose lock this process has, by one of this process with these changes. Returns the new
/// file, which is locked before it has its name. In place of a replacement, a process that is killed half-way would lose
/// changes.
fn replace<C: Undo>(path: &Path, changes: &[C]) -> io::Result<File> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    let new = path.with_file_name(name);
    let write = || {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(true);
        let mut file = options.mode(0o600).open(&new)?;
        file.lock()?;
        let words = [
            Some(std::process::id().to_string()),
            boot_id(),
            namespace().map(|id| id.to_string()),
        ];
        let words: Vec<String> = words.into_iter().map_while(|word| word).collect();
        file.write_all(format!("{}\n", words.join(" ")).as_bytes())?;
        changes
            .iter()
            .try_for_each(|change| append(&mut file, change))?;
        fs::rename(&new, path)?;
        Ok(file)
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })
}

/// Removes the file at `path`, whose lock this process has, or leaves it with the remaining changes. If that fails, it
/// stays as it is.
fn store<C: Undo>(path: &Path, remaining: &[C]) {
    // Before the lock is released, so that no process locks a file that is about to be removed.
    let _ = match remaining {
        [] => fs::remove_file(path),
        _ => replace(path, remaining).map(drop),
    };
}

/// Reads one change per line; a line that is none is skipped.
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
    let end = file.seek(SeekFrom::End(0))?;
    file.write_all(&line).inspect_err(|_| {
        // On a full disk; the next record must not follow a part of this one on its line.
        let _ = file.set_len(end);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::slice;

    fn sysctl(path: &Path) -> Change {
        Change::Sysctl {
            path: path.into(),
            before: "0".into(),
        }
    }

    #[test]
    fn changes_are_undone_and_the_file_removed() {
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
    fn a_repeated_change_restores_the_last_old_value() {
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
    fn the_next_instance_gets_the_changes_of_a_killed_one() {
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
    fn changes_stay_recorded_until_they_are_undone() {
        let folder = tempfile::tempdir().expect("folder");
        let open = || Journal::<Change>::open(folder.path(), "wg0").expect("open");
        let (mut journal, _) = open();
        let changes = [Change::Hooks, sysctl(Path::new("/switch"))];
        for change in changes.clone() {
            journal.will_do(change).expect("note");
        }
        drop(journal);
        // As one that is killed before it has undone them.
        let (journal, left) = open();
        assert_eq!(left, changes);
        journal.leave_to_the_other();
        let (mut journal, left) = open();
        assert_eq!(left, changes);
        journal.settle(vec![Change::Hooks]).expect("settled");
        journal.leave_to_the_other();
        let (mut journal, left) = open();
        assert_eq!(left, [Change::Hooks]);
        journal.settle(Vec::new()).expect("settled");
        drop(journal);
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 0);
    }

    #[test]
    fn a_change_that_cannot_be_undone_stays_recorded() {
        let folder = tempfile::tempdir().expect("folder");
        let switch = folder.path().join("switch");
        fs::write(&switch, "1").expect("write");
        // A directory cannot be written.
        let stuck = sysctl(folder.path());
        let note = |path: &Path| {
            let (mut journal, _) = Journal::open(path, "wg0").expect("open");
            for change in [stuck.clone(), sysctl(&switch)] {
                journal.will_do(change).expect("note");
            }
            journal
        };
        let run = folder.path().join("run");
        let left = || Journal::<Change>::open(&run, "wg0").expect("open").1;
        let mut journal = note(&run);
        assert_eq!(journal.take_back().len(), 1);
        drop(journal);
        assert_eq!(left(), slice::from_ref(&stuck));

        let run = folder.path().join("other");
        let left = || Journal::<Change>::open(&run, "wg0").expect("open").1;
        let journal = note(&run);
        let path = journal.path().expect("a file").to_owned();
        drop(journal);
        let failures = clean_up_after(std::process::id(), &path, |_: &[Change]| ());
        assert_eq!(failures.len(), 1, "{failures:?}");
        assert_eq!(left(), [stuck]);
    }

    /// Runs itself again with a limit to the size of files, in place of a full disk.
    #[test]
    fn a_record_that_does_not_fit_leaves_no_part_of_itself() {
        const NAME: &str = "journal::tests::a_record_that_does_not_fit_leaves_no_part_of_itself";
        const LIMITED: &str = "SEIKAN_TEST_LIMITED";
        if std::env::var_os(LIMITED).is_none() {
            let script = r#"trap "" XFSZ; ulimit -f 1; exec "$0" --exact "$1""#;
            let program = std::env::current_exe().expect("a program");
            let mut command = std::process::Command::new("sh");
            command.args(["-c", script]).arg(program).arg(NAME);
            let output = command.env(LIMITED, "1").output().expect("sh");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && text.contains("1 passed"),
                "{text}"
            );
            return;
        }
        let folder = tempfile::tempdir().expect("folder");
        let (mut journal, _) = Journal::open(folder.path(), "wg0").expect("open");
        let path = journal.path().expect("a file").to_owned();
        let changes = (0..100).map(|i| sysctl(Path::new(&format!("/switch/{i}"))));
        let noted = changes.map(|change| journal.will_do(change));
        let fit = noted.filter(Result::is_ok).count();
        assert!((1..100).contains(&fit));
        let text = fs::read_to_string(&path).expect("read");
        assert!(
            text.ends_with('\n') && text.lines().count() == fit + 1,
            "{text}"
        );
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
        // The lock belongs to the open file, so the process can compete with itself.
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
    fn a_clean_up_shows_the_changes_first() {
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
    fn kept_changes_are_not_cleaned_up_and_can_be_undone() {
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
