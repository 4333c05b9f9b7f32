//! The host's end of a connection: a TCP connection of a program, or a stream of this process.

use socket2::SockRef;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How a stream of this process ends. A pair of sockets cannot signal a reset, so these flags tell
/// a reset from a regular end.
#[derive(Debug, Default)]
pub struct StreamEnd {
    finished: AtomicBool,
    shut_down: AtomicBool,
    resets: AtomicBool,
}

impl StreamEnd {
    /// Whether the far end has sent everything. If not, the end of the bytes is a reset.
    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    /// Makes the stream end with a reset for the far end.
    pub fn reset(&self) {
        self.resets.store(true, Ordering::Release);
    }

    /// Records that this program writes nothing more. [`Sockets::finish`](crate::Sockets::finish)
    /// waits until the written bytes are delivered.
    pub fn shut_down(&self) {
        self.shut_down.store(true, Ordering::Release);
    }

    pub(crate) fn is_shut_down(&self) -> bool {
        self.shut_down.load(Ordering::Acquire)
    }

    pub(crate) fn finish(&self) {
        self.finished.store(true, Ordering::Release);
    }

    pub(crate) fn resets(&self) -> bool {
        self.resets.load(Ordering::Acquire)
    }
}

/// The stack's end of a stream of this process.
#[derive(Debug)]
pub(crate) struct OwnStream {
    pub socket: UnixStream,
    pub end: Arc<StreamEnd>,
}

/// The host's end of a connection.
#[derive(Debug)]
pub(crate) enum HostStream {
    Tcp(TcpStream),
    Own(OwnStream),
}

impl HostStream {
    /// Ends the direction to the host after all bytes from the far end have been written.
    pub fn finish(&self) {
        // An error means that the host's end is gone. The next read reports it.
        let _ = match self {
            HostStream::Tcp(socket) => socket.shutdown(Shutdown::Write),
            HostStream::Own(stream) => {
                stream.end.finish();
                stream.socket.shutdown(Shutdown::Write)
            }
        };
    }

    /// Ends the direction to the host after a last answer.
    pub fn shut_down(&self) {
        let _ = match self {
            HostStream::Tcp(socket) => socket.shutdown(Shutdown::Write),
            HostStream::Own(stream) => stream.socket.shutdown(Shutdown::Write),
        };
    }

    /// Makes the connection end with a reset for the host.
    pub fn reset(&self) {
        if let HostStream::Tcp(socket) = self {
            let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
        }
    }

    /// Whether the host's end must be passed on as a reset.
    pub fn is_reset(&self) -> bool {
        match self {
            HostStream::Tcp(_) => false,
            HostStream::Own(stream) => stream.end.resets(),
        }
    }

    /// Whether a program has ended its sending direction; bytes before the end may be unread.
    pub fn is_shut_down(&self) -> bool {
        match self {
            HostStream::Tcp(_) => false,
            HostStream::Own(stream) => stream.end.is_shut_down(),
        }
    }

    /// Whether the connection is a stream of this process.
    pub fn is_own(&self) -> bool {
        matches!(self, HostStream::Own(_))
    }

    /// Whether an attempt to connect has failed.
    pub fn has_failed(&self) -> bool {
        match self {
            HostStream::Tcp(socket) => !matches!(socket.take_error(), Ok(None)),
            HostStream::Own(_) => false,
        }
    }

    /// Returns the two addresses of a client's connection: the address that the client connected
    /// to, and the client's own.
    ///
    /// # Errors
    /// The connection is gone, or it is a stream of this process.
    pub fn client(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        match self {
            HostStream::Tcp(socket) => Ok((socket.local_addr()?, socket.peer_addr()?)),
            HostStream::Own(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl Read for HostStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            HostStream::Tcp(socket) => socket.read(bytes),
            HostStream::Own(stream) => stream.socket.read(bytes),
        }
    }
}

impl Write for HostStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            HostStream::Tcp(socket) => socket.write(bytes),
            HostStream::Own(stream) => stream.socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for HostStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            HostStream::Tcp(socket) => socket.as_fd(),
            HostStream::Own(stream) => stream.socket.as_fd(),
        }
    }
}
