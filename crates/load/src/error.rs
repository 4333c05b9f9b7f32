//! Errors of the load generator.

use std::io;

use seikan_sys::netns::NetNsError;
use seikan_ui::Interrupted;

/// Short form of `Result` with [`LoadError`].
pub type Result<T> = std::result::Result<T, LoadError>;

/// Errors of a load. Each says which action failed on which object.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A signal ended the run.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// The action that failed, as a verb phrase.
        action: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The namespace of a host cannot be entered.
    #[error(transparent)]
    Namespace(#[from] NetNsError),
    /// The two ends of a flow did not find each other, or a thread failed.
    #[error("{0}")]
    Setup(String),
    /// An event took too long.
    #[error("{event} took longer than {seconds} s")]
    Timeout {
        /// Event that did not happen.
        event: String,
        /// Maximum time, in seconds.
        seconds: f64,
    },
    /// A byte arrived that was not sent.
    #[error(
        "stream {stream}: byte {offset} arrived different from what was sent; the path corrupts data"
    )]
    Corrupt {
        /// Number of the stream, from 0.
        stream: usize,
        /// Offset in the stream, in bytes.
        offset: u64,
    },
    /// A stream ended with fewer bytes than were sent into it.
    #[error("stream {stream}: {received} of {sent} bytes arrived before its end")]
    Truncated {
        /// Number of the stream, from 0.
        stream: usize,
        /// Bytes written by the sender.
        sent: u64,
        /// Bytes seen by the receiver.
        received: u64,
    },
    /// An option has no meaning.
    #[error("{0}")]
    Usage(String),
}

/// Adds the action that failed to an [`io::Error`].
pub(crate) trait Doing<T> {
    /// Names the action that failed, as a verb phrase.
    fn doing(self, action: impl Into<String>) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, action: impl Into<String>) -> Result<T> {
        self.map_err(LoadError::io(action))
    }
}

impl LoadError {
    /// Wraps an [`io::Error`] with the action that failed; for `map_err`.
    pub fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}
