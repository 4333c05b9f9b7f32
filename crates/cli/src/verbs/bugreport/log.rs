//! The last lines of the log of a tunnel.
//!
//! A daemon logs to its standard error. A compromised daemon may have replaced it with another file,
//! even with one that the daemon may not read (`O_PATH` of open(2)), and root would open that file
//! with root's rights. So root opens the standard error of the monitor instead: it is the same log,
//! and the daemon cannot change it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow, bail};
use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use seikan_node::control::{RuntimeDirs, ask};

use super::output_of;

/// Length of the log in a report, in bytes.
const LOG_BYTES: u64 = 256 << 10;
/// Lines of the journal in a report.
const LOG_LINES: &str = "1000";

/// Returns the end of the log: of the file to which the daemon logs, or of the journal.
pub fn last_lines_of(dirs: &RuntimeDirs, name: &str) -> anyhow::Result<String> {
    match ask::pid(dirs, name) {
        Ok(daemon) => of_daemon(daemon, name),
        // After a failure the log of a background process stays.
        Err(error) => match open_file(&dirs.log(name), OFlag::O_NOFOLLOW) {
            Ok(file) => last_lines(file),
            Err(_) => journal(name).with_context(|| error.to_string()),
        },
    }
}

fn of_daemon(daemon: u32, name: &str) -> anyhow::Result<String> {
    let process = writer_of(daemon)?;
    let stderr = process.path("fd/2");
    let failed = || {
        format!(
            "cannot inspect the standard error of process {}",
            process.pid
        )
    };
    let kind = fs::metadata(&stderr).with_context(failed)?.file_type();
    if kind.is_file() {
        return last_lines(open_file(&stderr, OFlag::empty())?);
    }
    if kind.is_socket() {
        return journal(name);
    }
    let target = fs::read_link(&stderr).unwrap_or_default();
    bail!(
        "process {} logs to {}: add its last lines by hand",
        process.pid,
        target.display()
    )
}

/// Returns the process whose standard error is the log: the daemon if it has this process's rights
/// anyway, else its monitor.
fn writer_of(daemon: u32) -> anyhow::Result<Process> {
    let failed = || format!("cannot inspect process {daemon}");
    let process = Process::open(daemon).with_context(failed)?;
    let Identity { users, .. } = process.identity().with_context(failed)?;
    let own = [geteuid().as_raw(); 4];
    if users == own {
        return Ok(process);
    }
    let processes = fs::read_dir("/proc").context("cannot list processes")?;
    let numbers = processes.flatten().map(|entry| entry.file_name());
    let mut others =
        numbers.filter_map(|number| Process::open(number.to_str()?.parse().ok()?).ok());
    let is_monitor = |process: &Process| {
        let identity = process.identity();
        identity.is_ok_and(|identity| identity.parent == daemon && identity.users == own)
    };
    others.find(is_monitor).ok_or_else(|| {
        anyhow!(
            "process {daemon} of user {} has no monitor of this user, so its log cannot be trusted: add lines by hand",
            users[1]
        )
    })
}

/// A process. It does not refer to a later process with the same id.
struct Process {
    pid: u32,
    folder: File,
}

/// Owner and parent of a process (proc_pid_status(5)).
struct Identity {
    /// Real, effective, saved, and of the file system.
    users: [u32; 4],
    parent: u32,
}

impl Process {
    fn open(pid: u32) -> io::Result<Process> {
        let folder = File::open(format!("/proc/{pid}"))?;
        Ok(Process { pid, folder })
    }

    /// Returns the path of a file of procfs about the process.
    fn path(&self, file: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{file}", self.folder.as_raw_fd()).into()
    }

    fn identity(&self) -> io::Result<Identity> {
        let status = fs::read(self.path("status"))?;
        // The name of a process need not be UTF-8.
        let status = String::from_utf8_lossy(&status);
        let numbers = |key: &str| -> Option<Vec<u32>> {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.split_whitespace().map(|n| n.parse().ok()).collect()
        };
        let identity = || {
            Some(Identity {
                users: numbers("Uid:")?.try_into().ok()?,
                parent: *numbers("PPid:")?.first()?,
            })
        };
        identity().ok_or_else(|| io::Error::other("it has no owner"))
    }
}

/// Opens a regular file, without waiting for the writer of a FIFO. The type is checked after the
/// opening, when it cannot change.
fn open_file(path: &Path, flags: OFlag) -> anyhow::Result<File> {
    let flags = flags | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(flags.bits()).open(path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    if !file.metadata()?.is_file() {
        bail!("{} is not a regular file", path.display());
    }
    Ok(file)
}

fn last_lines(mut file: File) -> anyhow::Result<String> {
    let start = file.metadata()?.len().saturating_sub(LOG_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(match text.split_once('\n') {
        // The first line may be incomplete.
        Some((_, rest)) if start > 0 => rest.to_owned(),
        _ => text.into_owned(),
    })
}

/// Returns the last lines that the unit of a tunnel logged to the journal.
fn journal(name: &str) -> anyhow::Result<String> {
    let unit = format!("seikan@{name}.service");
    let mut command = Command::new("journalctl");
    command.args(["--unit", &unit, "--lines", LOG_LINES]);
    command.args(["--no-pager", "--quiet", "--output", "short-iso"]);
    let text = output_of(&mut command)
        .with_context(|| format!("cannot read the journal of {unit}, and there is no log file"))?;
    if text.is_empty() {
        bail!("there is no log file, and the journal has no line of {unit}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{Signal, killpg};
    use nix::sys::stat::Mode;
    use nix::unistd::{Pid, mkfifo};
    use std::os::unix::process::CommandExt;
    use std::time::{Duration, Instant};

    /// Processes like a daemon and, as its child, a monitor.
    struct Pair(std::process::Child);

    impl Drop for Pair {
        fn drop(&mut self) {
            let _ = killpg(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGKILL);
            let _ = self.0.wait();
        }
    }

    impl Pair {
        /// Starts both: a daemon with this standard error that becomes another user, and `monitor`,
        /// a command of a shell.
        fn start(stderr: File, monitor: &str) -> Pair {
            let other_user = "setpriv --reuid=65534 --regid=65534 --clear-groups sleep 600";
            let mut command = Command::new("sh");
            command.args(["-c", &format!("{monitor} & exec {other_user}")]);
            let child = command.stderr(stderr).process_group(0).spawn();
            let pair = Pair(child.expect("started"));
            let deadline = Instant::now() + Duration::from_secs(60);
            let has_become = |process: &Process| {
                let identity = process.identity().expect("a process");
                identity.users == [65534; 4]
            };
            let process = Process::open(pair.0.id()).expect("a process");
            while !has_become(&process) {
                assert!(Instant::now() < deadline, "it stays root");
                std::thread::sleep(Duration::from_millis(10));
            }
            pair
        }
    }

    #[test]
    fn root_reads_the_log_of_the_monitor_and_never_a_file_of_a_daemon() {
        if !geteuid().is_root() {
            let required = std::env::var("SEIKAN_REQUIRE_ALL").is_ok_and(|value| value == "1");
            assert!(!required, "another user needs root");
            eprintln!("SKIPPED: another user needs root");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let secret = folder.path().join("secret");
        fs::write(&secret, "horse-battery\n").expect("written");
        let unread = || {
            let mut options = OpenOptions::new();
            let options = options.read(true).custom_flags(OFlag::O_PATH.bits());
            options.open(&secret).expect("a descriptor")
        };
        let log = folder.path().join("log");
        fs::write(&log, "up\n").expect("written");

        let monitor = format!("sleep 600 2>>{}", log.display());
        let pair = Pair::start(unread(), &monitor);
        let lines = of_daemon(pair.0.id(), "office").expect("a log");
        assert_eq!(lines, "up\n");
        drop(pair);

        let other_user = "setpriv --reuid=65534 --regid=65534 --clear-groups sleep 600";
        let pair = Pair::start(unread(), &format!("{other_user} 2>/dev/null"));
        // The child is root's until it has become the other user.
        let deadline = Instant::now() + Duration::from_secs(60);
        let error = loop {
            match of_daemon(pair.0.id(), "office") {
                Err(error) if error.to_string().contains("no monitor") => break error,
                other => assert!(Instant::now() < deadline, "{other:?}"),
            }
        };
        assert!(error.to_string().contains("user 65534"), "{error}");
    }

    #[test]
    fn a_log_is_a_regular_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let fifo = folder.path().join("fifo");
        mkfifo(&fifo, Mode::S_IRWXU).expect("a FIFO");
        let device = Path::new("/dev/null");
        for path in [&*fifo, device, folder.path()] {
            let error = open_file(path, OFlag::empty()).expect_err("no file");
            assert!(error.to_string().contains("not a regular file"), "{error}");
        }
        let link = folder.path().join("link");
        let file = folder.path().join("file");
        fs::write(&file, "").expect("written");
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        open_file(&file, OFlag::O_NOFOLLOW).expect("a file");
        open_file(&link, OFlag::O_NOFOLLOW).expect_err("a link");
    }
}
