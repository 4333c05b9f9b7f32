//! Errors of this crate.

use crate::destination::{Destination, NotADestination};
use seikan_userspace::SocketError;
use std::io;
use std::path::PathBuf;

/// Why a tunnel cannot start, or a socket cannot be opened in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration has errors; the text lists all of them.
    #[error("cannot use the configuration: {0}")]
    Config(String),
    /// No directory is set for the state of a member of a mesh (known keys and the list of
    /// members), and the configuration does not come from a file.
    #[error("cannot start a member of a mesh without a directory for its state: call `state_dir`")]
    NoStateDir,
    /// A file or directory cannot be used.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The coordinator did not admit this host.
    #[error("cannot join the mesh: {0}")]
    Join(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The tunnel cannot start.
    #[error("cannot start the tunnel: {0}")]
    Start(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The text is not a destination.
    #[error(transparent)]
    Destination(#[from] NotADestination),
    /// No peer with an address of its own and no member has this name.
    #[error(
        "cannot find `{0}` in the tunnel: no peer with an address of its own and no member has this name"
    )]
    UnknownName(String),
    /// The far end refused the connection.
    #[error("cannot connect to {0}: connection refused")]
    Refused(Destination),
    /// No path leads to the destination.
    #[error("cannot connect to {0}: no path leads there")]
    Unreachable(Destination),
    /// The far end did not answer within 30 seconds.
    #[error("cannot connect to {0}: no answer")]
    TimedOut(Destination),
    /// The tunnel has reached its maximum number of sockets.
    #[error(
        "cannot open a socket: the tunnel has too many; close others, or raise the limit of open files"
    )]
    Limit,
    /// Another socket of the tunnel uses the port.
    #[error("cannot use port {0}: another socket of this tunnel has it")]
    PortInUse(u16),
    /// The tunnel has ended.
    #[error("the tunnel has ended")]
    Ended,
    /// The call was made outside of a tokio runtime.
    #[error("cannot open a socket outside of a tokio runtime")]
    NoRuntime,
    /// A system call failed.
    #[error("cannot open a socket: {0}")]
    System(#[from] io::Error),
}

impl Error {
    /// Converts an error of a socket, with the destination that the caller gave.
    pub(crate) fn of_socket(error: SocketError, destination: &Destination) -> Error {
        let destination = || destination.clone();
        match error {
            SocketError::NotAHost | SocketError::NotAPort => {
                NotADestination(destination().to_string()).into()
            }
            SocketError::UnknownName => Error::UnknownName(destination().host),
            SocketError::Refused => Error::Refused(destination()),
            SocketError::Unreachable => Error::Unreachable(destination()),
            SocketError::TimedOut => Error::TimedOut(destination()),
            SocketError::Limit => Error::Limit,
            SocketError::PortInUse => Error::PortInUse(destination().port),
            SocketError::Ended => Error::Ended,
            SocketError::System(error) => Error::System(error),
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        let kind = match &error {
            Error::Config(_) | Error::NoStateDir | Error::Destination(_) => {
                io::ErrorKind::InvalidInput
            }
            Error::File { source, .. } => source.kind(),
            Error::UnknownName(_) => io::ErrorKind::NotFound,
            Error::Refused(_) => io::ErrorKind::ConnectionRefused,
            Error::Unreachable(_) => io::ErrorKind::HostUnreachable,
            Error::TimedOut(_) => io::ErrorKind::TimedOut,
            Error::PortInUse(_) => io::ErrorKind::AddrInUse,
            Error::Ended => io::ErrorKind::NotConnected,
            Error::System(source) => source.kind(),
            Error::Join(_) | Error::Start(_) | Error::Limit | Error::NoRuntime => {
                io::ErrorKind::Other
            }
        };
        io::Error::new(kind, error)
    }
}
