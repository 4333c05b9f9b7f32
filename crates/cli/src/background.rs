//! Processes in the background: the same program again, with a socket to the starting process as
//! standard input.
//!
//! [`start`] prints the messages from the socket, and returns once the process has started or
//! failed. The background process calls [`detach`] and reports by a [`Starter`]. A message is a
//! line: kind, space, text as a JSON string.

use std::ffi::{CStr, OsStr, OsString};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::Context;
use nix::sys::prctl;
use seikan_config::{Diagnostic, Diagnostics};

use crate::output;

/// Kinds of messages.
const UP: &str = "up";
const WARNING: &str = "warning";
const ERROR: &str = "error";
/// Name of the background process. Otherwise it would be `exe`, like the file that it is started
/// from.
const NAME: &CStr = c"seikan";

/// Starts the background process with these arguments, and prints its messages until it is up or has ended.
/// Returns its message that it is up; `None` after its errors have been printed.
pub fn start(words: Vec<OsString>, stdout: Stdio, stderr: Stdio) -> anyhow::Result<Option<String>> {
    let (ours, theirs) = UnixStream::pair().context("cannot make a socket pair")?;
    let mut child = Command::new("/proc/self/exe")
        .arg0(OsStr::from_bytes(NAME.to_bytes()))
        .args(words)
        .stdin(OwnedFd::from(theirs))
        .stdout(stdout)
        .stderr(stderr)
        .spawn()
        .context("cannot start the background process")?;
    for line in BufReader::new(ours).lines() {
        let line = line.context("cannot read from the background process")?;
        let (kind, text) = line.split_once(' ').unwrap_or_default();
        let text: String = serde_json::from_str(text).unwrap_or_default();
        match kind {
            UP => return Ok(Some(text)),
            WARNING => {
                let _ = writeln!(io::stderr(), "{text}");
            }
            _ => output::error(&anyhow::anyhow!(text)),
        }
    }
    let status = child
        .wait()
        .context("cannot wait for the background process")?;
    if status.code().is_none() {
        anyhow::bail!(
            "the background process was killed ({status}); run it in the foreground to see why"
        );
    }
    Ok(None)
}

/// Detaches this process, which [`start`] has started, from the terminal.
pub fn detach() -> anyhow::Result<()> {
    // The name is cosmetic.
    let _ = prctl::set_name(NAME);
    seikan_sys::process::new_session().context("cannot detach from the terminal")
}

/// The starting process, as the background process sees it. Sending fails once the starting process
/// is gone.
pub struct Starter(Option<UnixStream>);

impl Starter {
    /// Returns the starting process, by the socket on standard input.
    pub fn connect() -> Starter {
        let socket = io::stdin().as_fd().try_clone_to_owned();
        Starter(socket.ok().map(UnixStream::from))
    }

    /// Reports that this process has started.
    pub fn is_up(&mut self, line: &str) -> io::Result<()> {
        self.send(UP, line)
    }

    /// Reports a warning.
    pub fn warn(&mut self, warning: Diagnostic) -> io::Result<()> {
        let mut warnings = Diagnostics::default();
        warnings.push(warning);
        self.send(WARNING, &warnings.render(false))
    }

    /// Reports that this process cannot start.
    pub fn fail(&mut self, error: &anyhow::Error) -> io::Result<()> {
        self.send(ERROR, &format!("{error:#}"))
    }

    fn send(&mut self, kind: &str, text: &str) -> io::Result<()> {
        match &mut self.0 {
            Some(socket) => {
                let text = serde_json::to_string(text)?;
                socket.write_all(format!("{kind} {text}\n").as_bytes())
            }
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}
