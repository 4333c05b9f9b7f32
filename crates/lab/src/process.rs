//! Programs run inside a host: their log, their memory, their end.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use seikan_ui::Interrupt;

use crate::cleanup::remove_at_end;
use crate::error::{Doing, LabError, Result};
use crate::site::Host;

/// Maximum time until a program ends after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(3);
/// Pause between two attempts of [`wait_for`].
const LOOK: Duration = Duration::from_millis(20);
/// Number of lines of a log that an error quotes.
const QUOTED_LINES: usize = 8;

/// A program running inside a host. It is stopped when this is dropped.
#[derive(Debug)]
pub struct Process {
    name: String,
    host: &'static str,
    child: Child,
    log: PathBuf,
    /// Files that the program would leave behind if it were killed.
    leftovers: Vec<PathBuf>,
}

impl Process {
    /// Starts `command` inside `host`; its output goes to `NAME.log` in `dir`.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start(host: &Host, name: &str, mut command: Command, dir: &Path) -> Result<Self> {
        let name = format!("{name} on host {}", host.name);
        let log = dir.join(format!("{}.log", name.replace(' ', "-")));
        let file = File::create(&log).doing(format!("create {}", log.display()))?;
        let other = file.try_clone().doing("duplicate the log's descriptor")?;
        // A process group of its own: Ctrl-C reaches only the lab, which stops its children in
        // order.
        command
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(other)
            .process_group(0);
        let child = host
            .spawn(&mut command)
            .doing(format!("start {}", command.get_program().to_string_lossy()))?;
        Ok(Self {
            name,
            host: host.name,
            child,
            log,
            leftovers: Vec::new(),
        })
    }

    /// Removes a file at the end that the program creates, and would not remove itself if it were
    /// killed.
    pub fn leaving(mut self, file: PathBuf) -> Self {
        // If the shell that cleans up is missing, the file is removed unless the lab is killed.
        let _ = remove_at_end(&file);
        self.leftovers.push(file);
        self
    }

    /// Name of the host it runs in.
    pub fn host(&self) -> &'static str {
        self.host
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Largest resident memory so far, in bytes.
    pub fn peak_rss(&self) -> Option<u64> {
        seikan_sys::process::memory(self.pid())
            .ok()
            .map(|memory| memory.peak)
    }

    /// An error with the end of its log if the program has ended.
    ///
    /// # Errors
    /// [`LabError::ChildExited`].
    pub fn check_alive(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(LabError::ChildExited {
                name: self.name.clone(),
                status: status.to_string(),
                log: self.last_words(),
            }),
            Err(e) => Err(LabError::io(format!("wait for {}", self.name))(e)),
        }
    }

    /// The last lines of the log.
    pub fn last_words(&self) -> String {
        let text = self.output();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(QUOTED_LINES)..].join("\n")
    }

    /// Asks the program to end, and waits. Returns all of its output.
    pub(crate) fn end(mut self) -> String {
        self.terminate();
        self.wait();
        self.output()
    }

    fn output(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Kills the program, as in a crash.
    pub fn kill(mut self) {
        // Fails only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks the program to end. [`Process::wait`] forces it if necessary.
    pub(crate) fn terminate(&mut self) {
        // Not after the program has been waited for: its id may belong to another process then.
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // This fails only if the process group no longer exists.
        let _ = killpg(Pid::from_raw(self.pid() as i32), Signal::SIGTERM);
    }

    /// Waits until the program has ended, and kills it after a time.
    fn wait(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                _ => return,
            }
        }
        let _ = killpg(Pid::from_raw(self.pid() as i32), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.terminate();
        self.wait();
        for file in &self.leftovers {
            // Usually the program has removed the file itself.
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Gives a program no standard streams.
pub(crate) fn silent(command: &mut Command) -> &mut Command {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
}

/// A program that is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Killed(pub(crate) Child);

impl Killed {
    /// Starts `command` inside `host`, with only the standard streams that were set for it.
    pub(crate) fn start(host: &Host, command: &mut Command) -> Result<Self> {
        let program = command.get_program().to_string_lossy().into_owned();
        let child = host.spawn(command);
        child.map(Self).doing(format!("start `{program}`"))
    }

    /// Waits until the program ends.
    pub(crate) fn wait(
        &mut self,
        name: &str,
        patience: Duration,
        interrupt: &Interrupt,
    ) -> Result<ExitStatus> {
        wait_for(name, patience, interrupt, || {
            self.0.try_wait().doing(format!("wait for {name}"))
        })
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Calls the function until it returns something.
pub(crate) fn wait_for<T>(
    event: &str,
    patience: Duration,
    interrupt: &Interrupt,
    mut attempt: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let started_at = Instant::now();
    loop {
        if let Some(found) = attempt()? {
            return Ok(found);
        }
        if started_at.elapsed() > patience {
            return Err(LabError::Timeout {
                event: event.to_owned(),
                seconds: patience.as_secs_f64(),
            });
        }
        interrupt.sleep(LOOK)?;
    }
}

/// Returns the threads of a process.
pub(crate) fn threads(pid: u32) -> io::Result<Vec<i32>> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
    let names = entries.map(|entry| entry.file_name());
    Ok(names
        .filter_map(|name| name.to_str()?.parse().ok())
        .collect())
}
