//! Errors of the lab.

use std::io;

use seikan_load::LoadError;
use seikan_sys::ethtool::EthtoolError;
use seikan_sys::netlink::NetlinkError;
use seikan_sys::netns::NetNsError;
use seikan_sys::process::ProcessError;
use seikan_sys::tun::TunError;
use seikan_ui::Interrupted;

/// Short form of `Result` with [`LabError`].
pub type Result<T> = std::result::Result<T, LabError>;

/// Errors of the lab. Each says what happened, to what, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// SIGINT, SIGTERM or SIGHUP arrived; everything made so far is removed on the way out.
    #[error("{}", seikan_ui::Interrupted)]
    Interrupted,
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// The action that failed, as a verb phrase.
        action: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel refused something the lab is built on.
    #[error("{0}")]
    Setup(String),
    /// A namespace cannot be made or entered.
    #[error(transparent)]
    Namespace(#[from] NetNsError),
    /// The kernel refused a change of a network interface, an address or a route.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// The offloads of an interface cannot be read or changed.
    #[error(transparent)]
    Ethtool(#[from] EthtoolError),
    /// A tunnel device cannot be made.
    #[error(transparent)]
    Tun(#[from] TunError),
    /// The use of memory and processor time cannot be read.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// An event took too long.
    #[error("{event} took longer than {seconds} s")]
    Timeout {
        /// Event that did not happen.
        event: String,
        /// Maximum time, in seconds.
        seconds: f64,
    },
    /// A tunnel's process ended although it should still be running.
    #[error("{name} ended ({status}); the end of its log:\n{log}")]
    ChildExited {
        /// The program and its role.
        name: String,
        /// Exit status as the kernel reports it.
        status: String,
        /// The end of its log.
        log: String,
    },
    /// A load failed.
    #[error(transparent)]
    Load(LoadError),
    /// An option has no meaning.
    #[error("{0}")]
    Usage(String),
    /// A report could not be drawn.
    #[error("cannot draw the report: {0}")]
    Render(String),
}

impl LabError {
    /// Wraps an [`io::Error`] with the action that failed; for `map_err`.
    pub fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

/// The kernel or another program refused something; says what, and why.
pub fn setup(why: impl ToString) -> LabError {
    LabError::Setup(why.to_string())
}

/// An option has no meaning; says which, and what is possible.
pub fn usage(why: impl ToString) -> LabError {
    LabError::Usage(why.to_string())
}

/// Adds the action that failed to an [`io::Error`].
pub(crate) trait Doing<T> {
    /// Names the action that failed, as a verb phrase.
    fn doing(self, action: impl Into<String>) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, action: impl Into<String>) -> Result<T> {
        self.map_err(LabError::io(action))
    }
}

/// Turns an error into its text; only an interruption stays an error.
pub(crate) fn in_words<T>(outcome: Result<T>) -> Result<std::result::Result<T, String>> {
    match outcome {
        Err(LabError::Interrupted) => Err(LabError::Interrupted),
        outcome => Ok(outcome.map_err(|error| error.to_string())),
    }
}

impl From<Interrupted> for LabError {
    fn from(_: Interrupted) -> Self {
        Self::Interrupted
    }
}

impl From<LoadError> for LabError {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Interrupted(_) => Self::Interrupted,
            LoadError::Timeout { event, seconds } => Self::Timeout { event, seconds },
            LoadError::Usage(text) => Self::Usage(text),
            error => Self::Load(error),
        }
    }
}
