//! UDP ports inside a tunnel.

use crate::error::Error;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, sendmsg};
use nix::sys::uio::readv;
use seikan_userspace::{ADDRESS_LEN, Datagrams, read_address, write_address};
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::runtime::Handle;

/// Length of the IP and UDP headers in bytes.
const HEADERS_V4: usize = 20 + 8;
const HEADERS_V6: usize = 40 + 8;

/// A UDP port on the addresses of this host inside the tunnel. Dropping it closes the port.
#[derive(Debug)]
pub struct UdpSocket {
    /// A SOCK_SEQPACKET socket. tokio has no type that preserves message boundaries, so this type
    /// only waits for readiness; this module reads and writes itself.
    socket: UnixStream,
    port: u16,
    addresses: Vec<IpAddr>,
    mtu: usize,
}

impl UdpSocket {
    pub(crate) fn new(
        datagrams: Datagrams,
        addresses: Vec<IpAddr>,
        mtu: u32,
    ) -> Result<UdpSocket, Error> {
        Handle::try_current().map_err(|_| Error::NoRuntime)?;
        let socket = StdUnixStream::from(datagrams.socket);
        Ok(UdpSocket {
            port: datagrams.port,
            socket: UnixStream::from_std(socket)?,
            addresses,
            mtu: mtu as usize,
        })
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sends a datagram to an address inside the tunnel. Waits while the tunnel is behind. As with
    /// any UDP, a datagram may be lost on the path. [`Tunnel::lookup`](crate::Tunnel::lookup)
    /// returns the addresses of a name.
    ///
    /// # Errors
    /// `InvalidInput`: the datagram exceeds the MTU (it is not fragmented), or this host has no
    /// address of that family. `NotConnected`: the tunnel has ended.
    pub async fn send_to(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        // An IPv4 address in the form of IPv6.
        let to = SocketAddr::new(to.ip().to_canonical(), to.port());
        let headers = if to.is_ipv4() { HEADERS_V4 } else { HEADERS_V6 };
        let most = self.mtu.saturating_sub(headers);
        if datagram.len() > most {
            let length = datagram.len();
            return Err(invalid(format!(
                "cannot send a datagram of {length} bytes: the tunnel carries {most}"
            )));
        }
        if !self
            .addresses
            .iter()
            .any(|own| own.is_ipv4() == to.is_ipv4())
        {
            return Err(invalid(format!(
                "cannot send to {to}: this host has no address of its family in the tunnel"
            )));
        }
        let address = write_address(to);
        let parts = [IoSlice::new(&address), IoSlice::new(datagram)];
        let send = || {
            let flags = MsgFlags::MSG_NOSIGNAL;
            match sendmsg::<()>(self.socket.as_raw_fd(), &parts, &[], flags, None) {
                Ok(_) => Ok(()),
                Err(Errno::EPIPE | Errno::ECONNRESET) => Err(ended()),
                Err(error) => Err(error.into()),
            }
        };
        self.socket.async_io(Interest::WRITABLE, send).await
    }

    /// Receives a datagram, and returns its length and its source. Bytes beyond the length of `buf`
    /// are lost.
    ///
    /// # Errors
    /// `NotConnected`: the tunnel has ended.
    pub async fn recv_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let receive = || {
            let mut address = [0; ADDRESS_LEN];
            let mut parts = [IoSliceMut::new(&mut address), IoSliceMut::new(buf)];
            match readv(&self.socket, &mut parts) {
                Ok(length) if length >= ADDRESS_LEN => {
                    Ok((length - ADDRESS_LEN, read_address(&address)))
                }
                Ok(_) | Err(Errno::ECONNRESET) => Err(ended()),
                Err(error) => Err(error.into()),
            }
        };
        self.socket.async_io(Interest::READABLE, receive).await
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

fn ended() -> io::Error {
    Error::Ended.into()
}
