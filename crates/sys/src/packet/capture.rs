//! Recording of an interface's packets, in both directions, with the times that the kernel gives
//! them: the headers that a time-sequence graph needs.
//!
//! Packets begin with their network header, whatever the interface puts before it. Packets that
//! this host sends are seen where they are handed to the driver, so also those that the driver
//! drops.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::sys::socket::{
    self, AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockType, sockopt,
};
use nix::sys::time::TimeSpec;

use super::option;
use crate::udp::set_receive_buffer;

/// Receive buffer in bytes: some thousand packets, as the kernel counts their memory.
const RECEIVE_BUFFER: usize = 16 << 20;

/// The beginning of a packet, in the buffer of [`CaptureSocket::receive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Captured {
    /// Time since the epoch.
    pub at: Duration,
    /// Bytes in the buffer.
    pub length: usize,
    /// Bytes of the packet, from its network header on.
    pub packet_length: usize,
}

/// A non-blocking packet socket that only listens.
#[derive(Debug)]
pub struct CaptureSocket {
    fd: OwnedFd,
    lost: u64,
}

impl CaptureSocket {
    /// Listens on an interface of the calling thread's network namespace. It needs `CAP_NET_RAW`.
    ///
    /// # Errors
    /// Those of socket(2), setsockopt(2) and bind(2); `InvalidInput` for index 0, which would mean
    /// every interface.
    pub fn open(interface_index: u32) -> io::Result<Self> {
        if interface_index == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // With protocol 0, nothing is received before bind.
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let fd = socket::socket(AddressFamily::Packet, SockType::Datagram, flags, None)?;
        socket::setsockopt(&fd, sockopt::ReceiveTimestampns, &true)?;
        // A smaller buffer loses packets, which are counted.
        let _ = set_receive_buffer(&fd, RECEIVE_BUFFER);
        option::bind(fd.as_fd(), interface_index, libc::ETH_P_ALL)?;
        Ok(Self { fd, lost: 0 })
    }

    /// Receives the beginning of one packet.
    ///
    /// # Errors
    /// `WouldBlock` if no packet waits; `NetworkDown` once after the interface was set down.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Captured> {
        let room = buffer.len();
        let mut control = nix::cmsg_space!(TimeSpec);
        let mut parts = [IoSliceMut::new(buffer)];
        // Returns the length of the packet, however much of it fits.
        let whole = MsgFlags::MSG_TRUNC;
        let fd = self.fd.as_raw_fd();
        let message = socket::recvmsg::<()>(fd, &mut parts, Some(&mut control), whole)?;
        let time = message.cmsgs()?.find_map(|part| match part {
            ControlMessageOwned::ScmTimestampns(time) => Some(Duration::from(time)),
            _ => None,
        });
        Ok(Captured {
            at: time.ok_or(io::ErrorKind::InvalidData)?,
            length: message.bytes.min(room),
            packet_length: message.bytes,
        })
    }

    /// Returns the number of packets that found the receive buffer full.
    pub fn lost(&mut self) -> u64 {
        // Reading resets the kernel's counter.
        self.lost += u64::from(option::take_drops(self.fd.as_fd()).unwrap_or(0));
        self.lost
    }
}

impl AsFd for CaptureSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::testing::in_namespace;

    #[test]
    fn packets_are_seen_in_both_directions_with_their_lengths() {
        in_namespace(|| {
            // Loopback is the first interface of a namespace.
            let mut capture = CaptureSocket::open(1).unwrap();
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let to = socket.local_addr().unwrap();
            for length in [10, 1_000] {
                socket.send_to(&vec![7; length], to).unwrap();
            }
            let (mut buffer, mut seen, mut before) = ([0; 24], Vec::new(), Duration::ZERO);
            while let Ok(captured) = capture.receive(&mut buffer) {
                assert!(captured.at >= before);
                before = captured.at;
                // Headers of IPv4 and UDP (RFC 791, RFC 768): 20 and 8 bytes.
                assert_eq!((captured.length, buffer[0]), (24, 0x45));
                let port = u16::from_be_bytes([buffer[22], buffer[23]]);
                assert_eq!(port, to.port());
                seen.push(captured.packet_length - 28);
            }
            // Sent, and received.
            assert_eq!(seen, [10, 10, 1_000, 1_000]);
            assert_eq!(capture.lost(), 0);
        });
    }

    #[test]
    fn every_interface_at_once_is_refused() {
        let error = CaptureSocket::open(0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
