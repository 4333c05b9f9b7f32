//! What can go wrong in the lab, and what to do about it.

use std::io;

/// Short form of `Result` with [`LabError`].
pub type Result<T> = std::result::Result<T, LabError>;

/// Errors of the lab. Each says what happened, to what, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// SIGINT, SIGTERM or SIGHUP arrived; everything made so far is removed on the way out.
    #[error("interrupted; everything that was set up has been removed")]
    Interrupted,
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// The action that failed, as a verb phrase.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel refused something the lab is built on.
    #[error("{0}")]
    Setup(String),
    /// Nothing happened for too long.
    #[error("{what} took longer than {seconds} s")]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long, in seconds.
        seconds: f64,
    },
    /// A tunnel's process ended although it should still be running.
    #[error("{name} ended ({status}); its last words:\n{log}")]
    ChildExited {
        /// The program and its role.
        name: String,
        /// Exit status as the kernel reports it.
        status: String,
        /// The end of its log.
        log: String,
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
    /// A report could not be drawn.
    #[error("cannot draw the report: {0}")]
    Render(String),
}

impl LabError {
    /// Wraps an [`io::Error`] with the action that failed; for `map_err`.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
