//! Transport to a TURN server: UDP, TCP or TLS.

use super::ended::Ended;
use crate::proxy::{Overflow, Run, whole};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use seikan_observe::{DropCounts, DropReason};
use seikan_proto::mesh::Ticket;
use seikan_proto::mesh::framing::Framing;
use seikan_sys::udp::{UdpOptions, UdpSocket};
use seikan_tls::Stream;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Timeout of a TCP connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// Transport to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Udp,
    Tcp,
    Tls,
}

impl Transport {
    pub(super) fn name(self) -> &'static str {
        match self {
            Transport::Udp => "UDP",
            Transport::Tcp => "TCP",
            Transport::Tls => "TLS",
        }
    }
}

/// A server and the parameters of an allocation.
pub(super) struct Target {
    pub server: SocketAddr,
    pub transport: Transport,
    /// Name for which the server's certificate must be valid, for TLS.
    pub host: String,
    pub tls: Arc<ClientConfig>,
    pub ticket: Ticket,
    /// The firewall mark of the tunnel's datagrams.
    pub fwmark: Option<u32>,
}

impl Target {
    fn tls(&self) -> Result<ClientConnection, Ended> {
        let name = ServerName::try_from(self.host.clone());
        let name = name.map_err(|_| Ended::Name(self.host.clone()))?;
        let connection = ClientConnection::new(self.tls.clone(), name);
        connection.map_err(|error| Ended::Unconnected {
            transport: Transport::Tls,
            source: io::Error::other(error),
        })
    }
}

/// An open transport.
pub(super) enum Link {
    Udp(UdpSocket, Overflow),
    Stream(Stream),
}

impl Link {
    /// Connects to a server; `own` is the local address for UDP.
    pub(super) fn open(target: &Target, own: SocketAddr) -> Result<Link, Ended> {
        let transport = target.transport;
        let tls = match transport {
            Transport::Udp => {
                let options = UdpOptions {
                    fwmark: target.fwmark,
                    ..UdpOptions::default()
                };
                let socket = UdpSocket::bind(own, &options)?;
                return Ok(Link::Udp(socket, Overflow::default()));
            }
            Transport::Tcp => None,
            Transport::Tls => Some(target.tls()?.into()),
        };
        TcpStream::connect_timeout(&target.server, CONNECT_WITHIN)
            .and_then(|socket| Stream::new(socket, tls, Framing::Turn))
            .map(Link::Stream)
            .map_err(|source| Ended::Unconnected { transport, source })
    }

    /// Sends a request or an indication. The library repeats a lost one.
    pub(super) fn say(&mut self, server: SocketAddr, message: &[u8]) {
        match self {
            Link::Udp(socket, _) => drop(socket.send(&whole(server, message))),
            Link::Stream(stream) => {
                let _ = stream.push_request(&[message]);
            }
        }
    }

    /// Sends datagrams and returns how many were sent; counts the others as dropped.
    pub(super) fn send(&mut self, server: SocketAddr, run: &Run, drops: &mut DropCounts) -> u64 {
        let stream = match self {
            Link::Udp(socket, _) => return run.send(socket, server, drops),
            Link::Stream(stream) => stream,
        };
        let mut sent = 0;
        for message in run.bytes.chunks(run.size.max(1)) {
            if stream.push(&[message]) {
                sent += 1
            } else {
                drops.add(DropReason::SendNoBuffers, 1)
            }
        }
        sent
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Link::Udp(socket, _) => socket.as_fd(),
            Link::Stream(stream) => stream.as_fd(),
        }
    }
}
