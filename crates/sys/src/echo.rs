//! ICMP echo through one interface (RFC 792, RFC 4443): round-trip times, and sizes that pass.
//!
//! [`Echo::open`] binds a socket to the interface and connects it to the target. [`Echo::ping`]
//! sends one packet that may not be fragmented and waits for the reply. The kernel's ping socket is
//! used where `net.ipv4.ping_group_range` allows it, a raw socket elsewhere. Only headers are read
//! from replies.

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    self, AddressFamily, MsgFlags, SetSockOpt, SockFlag, SockProtocol, SockType, SockaddrStorage,
    sockopt,
};
use seikan_wire::checksum;

/// Type, code, checksum, identifier, sequence number.
const HEADER: usize = 8;
/// An IPv4 header with all options, and an ICMP header. No more of a reply is read.
const READ: usize = 60 + HEADER;

/// Result of an echo request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A reply arrived after this time.
    Answered(Duration),
    /// No reply arrived in time.
    Silent,
    /// The packet is larger than the path MTU that this host knows or was told.
    TooBig,
}

/// A socket for echo requests to one host through one interface.
#[derive(Debug)]
pub struct Echo {
    socket: OwnedFd,
    target: IpAddr,
    /// Identifier of the requests; `None` for a ping socket, which has its own and receives only
    /// replies to it.
    id: Option<u16>,
}

impl Echo {
    /// Opens a socket for echo requests to `target` that leave through `link` only.
    ///
    /// # Errors
    /// `EPERM` or `EACCES` without CAP_NET_RAW where ping sockets are not allowed; `ENODEV` without
    /// the interface; the errors of connect(2) without a route.
    pub fn open(target: IpAddr, link: &str) -> io::Result<Self> {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let (family, protocol) = match target {
            IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
            IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
        };
        let open = |kind| socket::socket(family, kind, SockFlag::SOCK_CLOEXEC, protocol);
        let (socket, raw) = match open(SockType::Datagram) {
            Ok(socket) => (socket, false),
            Err(_) => (open(SockType::Raw)?, true),
        };
        sockopt::BindToDevice.set(&socket, &OsString::from(link))?;
        let (level, option, value) = match target {
            IpAddr::V4(_) => (
                libc::IPPROTO_IP,
                libc::IP_MTU_DISCOVER,
                libc::IP_PMTUDISC_DO,
            ),
            IpAddr::V6(_) => (
                libc::IPPROTO_IPV6,
                libc::IPV6_MTU_DISCOVER,
                libc::IPV6_PMTUDISC_DO,
            ),
        };
        set_int(&socket, level, option, value)?;
        let address = SockaddrStorage::from(SocketAddr::new(target, 0));
        socket::connect(socket.as_raw_fd(), &address)?;
        // Distinguishes several sockets of one process.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            socket,
            target,
            id: raw.then(|| std::process::id() as u16 ^ number.rotate_left(8)),
        })
    }

    /// Returns the size in bytes of the smallest packet: an IP header and a message without
    /// payload.
    pub fn smallest(&self) -> usize {
        match self.target {
            IpAddr::V4(_) => 20 + HEADER,
            IpAddr::V6(_) => 40 + HEADER,
        }
    }

    /// Sends an IP packet of `size` bytes, including headers, and waits up to `timeout` for the
    /// reply.
    ///
    /// # Errors
    /// `EPERM` if a filter forbids the packet. No route, a full queue and an interface that is down
    /// count as no reply: these are symptoms of a tunnel in trouble.
    pub fn ping(&self, sequence: u16, size: usize, timeout: Duration) -> io::Result<Outcome> {
        let message = self.request(sequence, size.saturating_sub(self.smallest()));
        let sent = Instant::now();
        match socket::send(self.socket.as_raw_fd(), &message, MsgFlags::empty()) {
            Ok(_) => {}
            Err(Errno::EMSGSIZE) => return Ok(Outcome::TooBig),
            Err(errno @ (Errno::EPERM | Errno::EACCES)) => return Err(errno.into()),
            Err(_) => {}
        }
        let mut buffer = [0; READ];
        loop {
            let left = timeout.saturating_sub(sent.elapsed());
            if left.is_zero() {
                return Ok(Outcome::Silent);
            }
            // Rounded up, or the last millisecond would be spent in a busy loop.
            let left =
                PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            let mut ready = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            match poll(&mut ready, left) {
                Ok(0) | Err(Errno::EINTR) => continue,
                Ok(_) => {}
                Err(errno) => return Err(errno.into()),
            }
            match socket::recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(length) if self.is_answer(&buffer[..length], sequence) => {
                    return Ok(Outcome::Answered(sent.elapsed()));
                }
                // A router has reported it (RFC 1191, RFC 8201).
                Err(Errno::EMSGSIZE) => return Ok(Outcome::TooBig),
                // A reply to another request, or an unreachable error that may be temporary.
                Ok(_) | Err(_) => {}
            }
        }
    }

    fn request(&self, sequence: u16, payload: usize) -> Vec<u8> {
        let mut message = vec![0x55; HEADER + payload];
        message[0] = if self.target.is_ipv4() { 8 } else { 128 };
        message[1..4].fill(0);
        message[4..6].copy_from_slice(&self.id.unwrap_or(0).to_be_bytes());
        message[6..8].copy_from_slice(&sequence.to_be_bytes());
        // The kernel fills in the checksum of ICMPv6 (RFC 3542, section 3.1) and of ping sockets,
        // but not of raw ICMPv4 sockets.
        if self.target.is_ipv4() {
            let sum = checksum::fold(checksum::sum(&message));
            message[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        message
    }

    /// Whether a packet is the reply. A raw IPv4 socket includes the IP header; the others start
    /// with the ICMP message.
    fn is_answer(&self, packet: &[u8], sequence: u16) -> bool {
        let (message, kind) = match self.target {
            IpAddr::V4(_) if self.id.is_some() => {
                let header = packet.first().map_or(0, |byte| usize::from(byte & 15) * 4);
                (packet.get(header..), 0)
            }
            IpAddr::V4(_) => (Some(packet), 0),
            IpAddr::V6(_) => (Some(packet), 129),
        };
        let Some([found, 0, _, _, id0, id1, high, low, ..]) = message else {
            return false;
        };
        *found == kind
            && self.id.is_none_or(|id| [*id0, *id1] == id.to_be_bytes())
            && [*high, *low] == sequence.to_be_bytes()
    }
}

/// Calls setsockopt(2) with an int, for options that `nix` does not have.
fn set_int(
    fd: &OwnedFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let length = size_of::<libc::c_int>() as libc::socklen_t;
    let value = (&raw const value).cast();
    // SAFETY: `value` points to `length` bytes that outlive the call.
    let outcome = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value, length) };
    Errno::result(outcome).map(drop).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_namespace;

    const PATIENCE: Duration = Duration::from_millis(300);

    #[test]
    fn loopback_answers_every_size_it_takes() {
        in_namespace(|| {
            for target in ["127.0.0.1", "::1"] {
                let echo = Echo::open(target.parse().expect("address"), "lo").expect("open");
                for (sequence, size) in [echo.smallest(), 84, 1500, 60_000].into_iter().enumerate()
                {
                    let outcome = echo.ping(sequence as u16, size, PATIENCE).expect("ask");
                    assert!(
                        matches!(outcome, Outcome::Answered(_)),
                        "{target} {size} {outcome:?}"
                    );
                }
            }
        });
    }

    #[test]
    fn a_packet_above_the_mtu_is_too_big() {
        in_namespace(|| {
            let netlink = crate::netlink::Netlink::open().expect("netlink");
            let lo = netlink.link("lo").expect("lo").index;
            netlink.set_mtu(lo, 1400).expect("mtu");
            let echo = Echo::open("127.0.0.1".parse().expect("address"), "lo").expect("open");
            let answered = echo.ping(1, 1400, PATIENCE).expect("ask");
            assert!(matches!(answered, Outcome::Answered(_)), "{answered:?}");
            assert_eq!(echo.ping(2, 1401, PATIENCE).expect("ask"), Outcome::TooBig);
        });
    }

    #[test]
    fn nobody_is_silence() {
        in_namespace(|| {
            let echo = Echo::open("127.0.0.1".parse().expect("address"), "lo").expect("open");
            let all = "/proc/sys/net/ipv4/icmp_echo_ignore_all";
            if std::fs::write(all, "1").is_err() {
                return crate::testing::skip("icmp_echo_ignore_all cannot be set");
            }
            assert_eq!(echo.ping(1, 84, PATIENCE).expect("ask"), Outcome::Silent);
        });
    }
}
