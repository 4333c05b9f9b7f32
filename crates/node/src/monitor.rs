//! The monitor: the process of a tunnel that stays privileged while the daemon handles network traffic.
//!
//! It is forked before anything is set up ([`Monitor::start`]). It runs the configuration's hooks, keeps the
//! journal of changes to the system ([`crate::journal`]), and undoes them when the daemon ends, in whatever
//! way.
//!
//! During set-up the daemon is as privileged as the monitor, and reports its changes. [`Monitor::seal`] ends
//! that phase: from then on the daemon is assumed to be compromised. The monitor then accepts three requests:
//! [`Request::Reload`], and once each [`Request::Leave`] with the state that `SaveConfig` writes and the sessions, and
//! [`Request::End`]. None contains a path, a command, an interface or a sysctl; these come from the configuration that
//! the monitor was forked with. After any other message it undoes everything and ends. It also works on its own: it
//! keeps the mesh's name server in resolv.conf, and sets up forwarding again when a gateway's interface is recreated.
//!
//! A message is its length (four bytes, little endian, at most [`MAX_MESSAGE`]), followed by JSON of that
//! length.

use crate::former::FormerSessions;
use crate::journal::change::Change;
use crate::journal::{Journal, Notes};
use crate::options::UpOptions;
use crate::save::Running;
use crate::setup::hooks::{Failure, HookError, Moment};
use keeper::Keeper;
use seikan_config::Config;
use seikan_sys::monitor as process;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use zeroize::Zeroizing;

pub use clean_up::{CleanUpError, clean_up, take_back};

mod clean_up;
mod keeper;
mod reload;
#[cfg(test)]
mod tests;

/// Longest message, in bytes: the state of some 50,000 peers.
pub const MAX_MESSAGE: u32 = 16 << 20;
/// Request of the daemon.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Record a change that is about to be made. Not after [`Request::Seal`].
    Note(Change),
    /// Run a hook of the start. Not after [`Request::Seal`].
    Run(Moment),
    /// The tunnel is set up: accept only [`Request::Reload`], [`Request::Leave`] and [`Request::End`] from now on.
    Seal(Sealed),
    /// Apply the changed file of the configuration. The reply does not wait for that.
    Reload,
    /// Run the hooks before the end, note the sessions, and save the state if the configuration says `SaveConfig`.
    Leave(Leaving),
    /// Undo everything, and run the hooks after the end.
    End,
}

/// State of a tunnel that ends.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leaving {
    /// The state that `SaveConfig` writes.
    pub running: Option<Box<Running>>,
    /// The sessions, for the next start.
    pub former: FormerSessions,
}

/// Result of the set-up.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sealed {
    /// Members of the mesh are found by name.
    pub names: bool,
    /// Whether there is a socket for `wg`.
    pub uapi: bool,
}

/// Reply of the monitor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// Done.
    Done,
    /// Refused: the daemon may not request it.
    Refused(String),
    /// A hook failed.
    Hook(Failure),
    /// Done, except for these failures.
    Failures(Vec<String>),
}

/// Why the monitor did not fulfil a request.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// The monitor could not be started.
    #[error("cannot start the monitor, which keeps the tunnel's privileges: {0}")]
    Start(io::Error),
    /// The monitor has ended.
    #[error(
        "the monitor, which keeps the tunnel's privileges, has ended: {0}; run `seikan down` to clean up"
    )]
    Gone(io::Error),
    /// The monitor refused the request.
    #[error("the monitor refused the request: {0}")]
    Refused(String),
    /// A hook failed.
    #[error(transparent)]
    Hook(#[from] HookError),
}

/// The daemon's handle of the monitor.
#[derive(Debug)]
pub struct Monitor {
    process: process::Monitor,
}

impl Monitor {
    /// Forks the monitor, which takes over the journal.
    ///
    /// # Errors
    /// [`MonitorError::Start`].
    pub fn start(
        config: &Config,
        options: &UpOptions,
        journal: Journal,
    ) -> Result<Monitor, MonitorError> {
        let file = journal.file();
        let mut journal = Some(journal);
        let process = process::Monitor::start(file.as_slice(), |socket| {
            if let Some(journal) = journal.take() {
                Keeper::new(config, options, journal).serve(&socket);
            }
        });
        if let Some(journal) = journal.take() {
            journal.leave_to_the_other();
        }
        let process = process.map_err(MonitorError::Start)?;
        Ok(Monitor { process })
    }

    /// Returns the stream to the monitor. It sends only replies, so an unexpected readable stream means that it
    /// has ended.
    pub fn socket(&self) -> &UnixStream {
        self.process.socket()
    }

    fn ask(&self, request: &Request) -> Result<Reply, MonitorError> {
        let asked = send(self.socket(), request).and_then(|()| receive(self.socket()));
        match asked.map_err(MonitorError::Gone)? {
            Some(Reply::Refused(reason)) => Err(MonitorError::Refused(reason)),
            Some(reply) => Ok(reply),
            None => Err(MonitorError::Gone(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Runs a hook of the start.
    ///
    /// # Errors
    /// [`MonitorError::Hook`], or the monitor has ended.
    pub fn run(&mut self, moment: Moment) -> Result<(), MonitorError> {
        match self.ask(&Request::Run(moment))? {
            Reply::Hook(failure) => Err(failure.of(moment).into()),
            _ => Ok(()),
        }
    }

    /// Seals the monitor: from now on it accepts only [`Self::reload`], [`Self::leave`] and
    /// [`Self::end`].
    ///
    /// # Errors
    /// The monitor has ended.
    pub fn seal(&mut self, sealed: Sealed) -> Result<(), MonitorError> {
        self.ask(&Request::Seal(sealed)).map(drop)
    }

    /// Begins to apply the changed file of the configuration. Returns the failures to begin, as texts for the user.
    pub fn reload(&self) -> Vec<String> {
        self.failures(&Request::Reload)
    }

    /// Runs the hooks before the end, and saves the state. Returns the failures, as texts for the user.
    pub fn leave(&mut self, leaving: Leaving) -> Vec<String> {
        self.failures(&Request::Leave(leaving))
    }

    /// Undoes everything and runs the hooks after the end. Returns the failures, as texts for the user.
    pub fn end(&mut self) -> Vec<String> {
        self.failures(&Request::End)
    }

    fn failures(&self, request: &Request) -> Vec<String> {
        match self.ask(request) {
            Ok(Reply::Failures(failures)) => failures,
            Ok(_) => Vec::new(),
            Err(error) => vec![error.to_string()],
        }
    }
}

impl Notes for Monitor {
    fn will_do(&mut self, change: Change) -> Result<(), String> {
        match self.ask(&Request::Note(change)) {
            Ok(Reply::Failures(failures)) => failures.into_iter().next().map_or(Ok(()), Err),
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}

fn send(mut socket: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut bytes = Zeroizing::new(vec![0; 4]);
    serde_json::to_writer(&mut *bytes, message)?;
    let length = u32::try_from(bytes.len() - 4).ok();
    let length = length.filter(|length| *length <= MAX_MESSAGE);
    let length = length.ok_or(io::ErrorKind::FileTooLarge)?;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    socket.write_all(&bytes)
}

/// Receives a message; `None` if it is invalid.
fn receive<T: DeserializeOwned>(mut socket: &UnixStream) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE {
        return Ok(None);
    }
    // Allocates only as many bytes as arrive.
    let mut bytes = Zeroizing::new(Vec::new());
    let read = socket.take(length.into()).read_to_end(&mut bytes)?;
    if read < length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&bytes).ok())
}
