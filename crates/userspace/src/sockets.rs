//! Sockets inside the tunnel, for the process that runs the stack.
//!
//! [`Sockets`] sends commands to the thread of the stack over a bounded channel. The bytes of each
//! connection pass through a pair of sockets: its buffers are bounded, its ends can be used in any
//! thread, and a slow reader stops the writer.

use crate::host_stream::{OwnStream, StreamEnd};
use crate::target::{Failure, Host, Target};
use crate::waker::Waker;
use seikan_sys::packet_pair::packet_pair;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Maximum number of commands that wait for the thread of the stack.
pub(crate) const MAX_COMMANDS: usize = 64;
/// Maximum number of connections of one listener that wait to be accepted.
const BACKLOG: usize = 128;
/// Length in bytes of the address before each datagram: an IPv6 address (IPv4 addresses are mapped)
/// and a port.
pub const ADDRESS_LEN: usize = 18;

/// Why a socket inside the tunnel cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The text is neither a name nor an address.
    #[error("it is neither a name nor an IP address")]
    NotAHost,
    /// Port 0 is not a destination.
    #[error("0 is not a port to connect to")]
    NotAPort,
    /// The name is unknown, or none of its addresses is of a family of this host.
    #[error("nothing in the tunnel has this name")]
    UnknownName,
    /// The far end refused the connection.
    #[error("connection refused")]
    Refused,
    /// There is no path to the host.
    #[error("no path leads there")]
    Unreachable,
    /// The far end did not answer.
    #[error("no answer")]
    TimedOut,
    /// The stack has reached its limit of connections.
    #[error("too many connections")]
    Limit,
    /// Another socket has the port.
    #[error("the port is in use")]
    PortInUse,
    /// The stack has ended.
    #[error("the tunnel has ended")]
    Ended,
    /// A system call failed.
    #[error("cannot create a pair of sockets: {0}")]
    System(#[from] io::Error),
}

impl From<Failure> for SocketError {
    fn from(failure: Failure) -> SocketError {
        match failure {
            Failure::Refused => SocketError::Refused,
            Failure::Unreachable => SocketError::Unreachable,
            Failure::UnknownName => SocketError::UnknownName,
            Failure::TimedOut => SocketError::TimedOut,
            Failure::Limit => SocketError::Limit,
        }
    }
}

/// Addresses of both ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// Address and port of this host inside the tunnel.
    pub local: SocketAddr,
    /// Address and port of the far end.
    pub remote: SocketAddr,
}

/// A connection inside the tunnel.
#[derive(Debug)]
pub struct Stream {
    /// The bytes of the connection. The socket is non-blocking.
    pub socket: UnixStream,
    /// How the connection ends.
    pub end: Arc<StreamEnd>,
    /// Addresses of both ends.
    pub ends: Ends,
}

/// Connections that hosts inside the tunnel open to a port. Dropping it closes the port and resets
/// the connections that wait.
#[derive(Debug)]
pub struct Incoming {
    /// The port.
    pub port: u16,
    queue: mpsc::Receiver<Stream>,
}

impl Incoming {
    /// Returns the next connection; `None` after the stack has ended.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Stream>> {
        self.queue.poll_recv(context)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.queue.close();
        while let Ok(stream) = self.queue.try_recv() {
            stream.end.reset();
        }
    }
}

/// Datagrams of a port. Dropping it closes the port.
#[derive(Debug)]
pub struct Datagrams {
    /// The port.
    pub port: u16,
    /// A non-blocking SOCK_SEQPACKET socket. Each message is an [address](write_address) and a
    /// datagram. The stack closes its end when it ends.
    pub socket: OwnedFd,
}

/// Encodes the address of a datagram.
pub fn write_address(address: SocketAddr) -> [u8; ADDRESS_LEN] {
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let mut bytes = [0; ADDRESS_LEN];
    bytes[..16].copy_from_slice(&ip.octets());
    bytes[16..].copy_from_slice(&address.port().to_be_bytes());
    bytes
}

/// Decodes the address of a datagram.
pub fn read_address(bytes: &[u8; ADDRESS_LEN]) -> SocketAddr {
    let [ip @ .., p0, p1] = *bytes;
    let ip = IpAddr::from(ip).to_canonical();
    SocketAddr::new(ip, u16::from_be_bytes([p0, p1]))
}

/// The answer to a command.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, SocketError>>;

/// A command for the thread of the stack.
#[derive(Debug)]
pub(crate) enum Command {
    Connect {
        target: Target,
        stream: OwnStream,
        answer: Answer<Ends>,
    },
    /// Port 0: a free one.
    Listen {
        port: u16,
        queue: mpsc::Sender<Stream>,
        answer: Answer<u16>,
    },
    /// Port 0: a free one.
    Bind {
        port: u16,
        socket: OwnedFd,
        answer: Answer<u16>,
    },
    Find {
        host: Host,
        answer: Answer<Vec<IpAddr>>,
    },
    /// End as soon as connections whose streams are dropped or shut down have delivered everything,
    /// at the latest after `within`. Dropping `answer` reports the end.
    Finish {
        within: Duration,
        answer: oneshot::Sender<()>,
    },
}

/// Opens sockets inside the tunnel. The futures may be dropped: a socket that was being opened is
/// closed.
#[derive(Clone, Debug)]
pub struct Sockets {
    commands: mpsc::Sender<Command>,
    waker: Arc<Waker>,
}

impl Sockets {
    pub(crate) fn new(waker: Arc<Waker>) -> (Sockets, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel(MAX_COMMANDS);
        (Sockets { commands, waker }, receiver)
    }

    /// Connects to a port of a name or an address inside the tunnel.
    ///
    /// # Errors
    /// See [`SocketError`].
    pub async fn connect(&self, host: &str, port: u16) -> Result<Stream, SocketError> {
        if port == 0 {
            return Err(SocketError::NotAPort);
        }
        let host = Host::parse(host).ok_or(SocketError::NotAHost)?;
        let target = Target { host, port };
        let (socket, own) = pair()?;
        let end = Arc::clone(&own.end);
        let command = |answer| Command::Connect {
            target,
            stream: own,
            answer,
        };
        let ends = self.ask(command).await?;
        Ok(Stream { socket, end, ends })
    }

    /// Accepts connections to a port of this host's addresses inside the tunnel; port 0 chooses a
    /// free port. At most 128 connections wait to be accepted. When as many wait, a new attempt is
    /// not answered, so its far end tries again; an attempt that was answered earlier is reset when
    /// its handshake is complete.
    ///
    /// # Errors
    /// [`SocketError::PortInUse`], [`SocketError::Ended`].
    pub async fn listen(&self, port: u16) -> Result<Incoming, SocketError> {
        let (sender, queue) = mpsc::channel(BACKLOG);
        let command = |answer| Command::Listen {
            port,
            queue: sender,
            answer,
        };
        let port = self.ask(command).await?;
        Ok(Incoming { port, queue })
    }

    /// Opens a port for datagrams on this host's addresses inside the tunnel; port 0 chooses a free
    /// port.
    ///
    /// # Errors
    /// [`SocketError::PortInUse`], [`SocketError::Limit`], [`SocketError::Ended`], [`SocketError::System`].
    pub async fn bind(&self, port: u16) -> Result<Datagrams, SocketError> {
        let (socket, own) = packet_pair()?;
        let command = |answer| Command::Bind {
            port,
            socket: own,
            answer,
        };
        let port = self.ask(command).await?;
        Ok(Datagrams { port, socket })
    }

    /// Looks up a name inside the tunnel. For an IP address, returns that address.
    ///
    /// # Errors
    /// [`SocketError::NotAHost`], [`SocketError::UnknownName`], [`SocketError::Ended`].
    pub async fn find(&self, name: &str) -> Result<Vec<IpAddr>, SocketError> {
        let host = Host::parse(name).ok_or(SocketError::NotAHost)?;
        self.ask(|answer| Command::Find { host, answer }).await
    }

    /// Ends the stack as soon as connections whose streams are dropped or shut down have delivered
    /// everything, at the latest after `within`. All other connections are reset.
    pub async fn finish(&self, within: Duration) {
        let (answer, ended) = oneshot::channel();
        if self.send(Command::Finish { within, answer }).await.is_ok() {
            let _ = ended.await;
        }
    }

    /// Ends the stack at once, without waiting for it. Connections are reset.
    pub fn end(&self) {
        self.waker.end();
    }

    async fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, SocketError> {
        let (answer, answered) = oneshot::channel();
        self.send(command(answer)).await?;
        answered.await.unwrap_or(Err(SocketError::Ended))
    }

    async fn send(&self, command: Command) -> Result<(), SocketError> {
        let sent = self.commands.send(command).await;
        sent.map_err(|_| SocketError::Ended)?;
        self.waker.wake();
        Ok(())
    }
}

/// Makes a pair of sockets for a stream.
pub(crate) fn pair() -> io::Result<(UnixStream, OwnStream)> {
    let (ours, socket) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    socket.set_nonblocking(true)?;
    let end = Arc::default();
    Ok((ours, OwnStream { socket, end }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_datagrams_are_read_as_they_were_written() {
        for text in ["10.0.0.1:53", "[fd00::1]:65535"] {
            let address = text.parse().unwrap();
            assert_eq!(read_address(&write_address(address)), address);
        }
    }
}
