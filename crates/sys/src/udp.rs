//! UDP sockets that move batches: UDP_SEGMENT and sendmmsg(2) out, UDP_GRO and recvmmsg(2) in.
//!
//! [`UdpSocket::bind`] sets the socket up for a tunnel's outer side: never blocking, never
//! fragmented, with the local address and traffic class of every datagram. [`UdpSocket::send`] puts
//! whole batches out and replays them datagram by datagram where segmentation offload is refused.
//! [`UdpSocket::receive`] fills one contiguous arena. What was granted is in [`UdpCapabilities`].
//!
//! A node binds one socket for IPv4 and one for IPv6 to the same port: the IPv6 one is `V6ONLY`.

mod control;
mod filter;
mod receive;
mod send;
#[cfg(test)]
mod tests;

pub use filter::{DatagramFilter, Filtered};
pub use receive::{ReceiveBatch, ReceiveMeta};
pub use send::{Envelope, MAX_GSO_BYTES, MAX_GSO_SEGMENTS, SendError, Transmit};

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, GetSockOpt, SetSockOpt, SockFlag, SockType, SockaddrStorage, sockopt,
};

use crate::ability::{Ability, write_table};

/// Destinations that refuse GSO beyond this number turn it off for the whole socket.
const MAX_REFUSED: usize = 64;

/// How to set up a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdpOptions {
    /// Receive buffer in bytes; the default of Linux (208 KiB) drops bursts.
    pub receive_buffer: usize,
    /// Send buffer in bytes; the default of Linux drops on the sender's own host.
    pub send_buffer: usize,
    /// Firewall mark of everything sent, which policy routing may look at.
    pub fwmark: Option<u32>,
    /// Whether to use UDP_SEGMENT.
    pub gso: bool,
    /// Whether to use UDP_GRO.
    pub gro: bool,
    /// Which datagrams are too long to be received, or why nothing says so.
    pub datagram_filter: Result<Arc<DatagramFilter>, String>,
}

impl Default for UdpOptions {
    fn default() -> Self {
        UdpOptions {
            receive_buffer: 7 << 20,
            send_buffer: 7 << 20,
            fwmark: None,
            gso: true,
            gro: true,
            datagram_filter: Err("not asked for".to_owned()),
        }
    }
}

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum UdpError {
    /// Another socket has the port.
    #[error(
        "UDP port {} is in use ({address}): another program or another tunnel listens there; \
         choose another port, or find it with `ss -ulpn`",
        address.port()
    )]
    PortInUse {
        /// Where we wanted to listen.
        address: SocketAddr,
    },
    /// The address is not one of this host.
    #[error("{} is not an address of this host", address.ip())]
    AddressNotAvailable {
        /// Where we wanted to listen.
        address: SocketAddr,
    },
    /// The kernel runs without this address family (IPv6 turned off at boot, say).
    #[error("this host has no sockets of the family of {address}: {source}")]
    NoFamily {
        /// Where we wanted to listen.
        address: SocketAddr,
        /// What socket(2) said.
        source: io::Error,
    },
    /// The firewall mark was refused; without it, packets could loop into the tunnel.
    #[error("cannot set firewall mark {mark:#x}: {source}; it takes CAP_NET_ADMIN")]
    Mark {
        /// The mark asked for.
        mark: u32,
        /// What setsockopt(2) said.
        source: io::Error,
    },
    /// Anything else.
    #[error("cannot open a UDP socket on {address}: {operation}: {source}")]
    System {
        /// Where we wanted to listen.
        address: SocketAddr,
        /// What was being done.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What this kernel grants a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdpCapabilities {
    /// UDP_SEGMENT: one call sends many datagrams. A route may refuse it all the same.
    pub gso: Ability,
    /// UDP_GRO: one buffer receives many datagrams.
    pub gro: Ability,
    /// The receive buffer has the size asked for.
    pub receive_buffer: Ability,
    /// The send buffer has the size asked for.
    pub send_buffer: Ability,
    /// SO_RXQ_OVFL: datagrams dropped at a full receive buffer are counted.
    pub receive_queue_drops: Ability,
    /// Datagrams that are too long are refused before they take room in the receive buffer.
    pub datagram_filter: Ability,
}

impl UdpCapabilities {
    /// Name and ability.
    pub fn table(&self) -> [(&'static str, &Ability); 6] {
        [
            ("gso", &self.gso),
            ("gro", &self.gro),
            ("receive_buffer", &self.receive_buffer),
            ("send_buffer", &self.send_buffer),
            ("receive_queue_drops", &self.receive_queue_drops),
            ("datagram_filter", &self.datagram_filter),
        ]
    }
}

impl fmt::Display for UdpCapabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_table(f, &self.table())
    }
}

/// A bound, unconnected, non-blocking UDP socket.
///
/// One thread sends and one (the same or another) receives; a second receiver would only take
/// datagrams away from the first.
#[derive(Debug)]
pub struct UdpSocket {
    socket: std::net::UdpSocket,
    capabilities: UdpCapabilities,
    gso: GsoState,
    /// Datagrams dropped at the full receive buffer: SO_RXQ_OVFL, extended to 64 bits.
    drops: AtomicU64,
}

/// Where segmentation offload may be used.
#[derive(Debug)]
struct GsoState {
    on: AtomicBool,
    /// Destinations whose route refused it. Offload is a matter of the egress device, so other
    /// destinations keep it.
    refused: Mutex<Vec<IpAddr>>,
    /// Length of `refused`, so that the lock is taken only when it is not empty.
    refused_count: AtomicUsize,
    fallbacks: AtomicU64,
}

impl UdpSocket {
    /// Opens a socket and binds it to `address` (port 0: any free one).
    ///
    /// # Errors
    /// See [`UdpError`]. Missing abilities are no errors, they are in [`UdpSocket::capabilities`].
    pub fn bind(address: SocketAddr, options: &UdpOptions) -> Result<UdpSocket, UdpError> {
        let system = |operation| {
            move |errno: Errno| UdpError::System {
                address,
                operation,
                source: errno.into(),
            }
        };
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::Inet,
            SocketAddr::V6(_) => AddressFamily::Inet6,
        };
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let fd =
            socket::socket(family, SockType::Datagram, flags, None).map_err(
                |errno| match errno {
                    Errno::EAFNOSUPPORT => UdpError::NoFamily {
                        address,
                        source: errno.into(),
                    },
                    errno => system("socket")(errno),
                },
            )?;

        set_up_family(&fd, &address).map_err(|(operation, errno)| system(operation)(errno))?;
        if let Some(mark) = options.fwmark {
            set_mark(&fd, mark)?;
        }
        let capabilities = UdpCapabilities {
            gso: match options.gso {
                true => Ability::from_outcome("UDP_SEGMENT", sockopt::UdpGsoSegment.set(&fd, &0)),
                false => Ability::turned_off(),
            },
            gro: match options.gro {
                true => Ability::from_outcome("UDP_GRO", sockopt::UdpGroSegment.set(&fd, &true)),
                false => Ability::turned_off(),
            },
            receive_buffer: set_receive_buffer(&fd, options.receive_buffer),
            send_buffer: set_send_buffer(&fd, options.send_buffer),
            receive_queue_drops: Ability::from_outcome(
                "SO_RXQ_OVFL",
                sockopt::RxqOvfl.set(&fd, &1),
            ),
            datagram_filter: match &options.datagram_filter {
                Ok(limit) => Ability::from_outcome("SO_ATTACH_BPF", limit.attach(fd.as_fd())),
                Err(reason) => Ability::Absent(reason.clone()),
            },
        };
        // Last, so that no datagram comes in before the options hold.
        socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(address)).map_err(
            |errno| match errno {
                Errno::EADDRINUSE => UdpError::PortInUse { address },
                Errno::EADDRNOTAVAIL => UdpError::AddressNotAvailable { address },
                errno => system("bind")(errno),
            },
        )?;
        let gso = GsoState {
            on: AtomicBool::new(capabilities.gso.is_present()),
            refused: Mutex::new(Vec::new()),
            refused_count: AtomicUsize::new(0),
            fallbacks: AtomicU64::new(0),
        };
        let drops = AtomicU64::new(0);
        Ok(UdpSocket {
            socket: fd.into(),
            capabilities,
            gso,
            drops,
        })
    }

    /// The address it is bound to, with the port that was chosen.
    ///
    /// # Errors
    /// What getsockname(2) says.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// What was granted.
    pub fn capabilities(&self) -> &UdpCapabilities {
        &self.capabilities
    }

    /// Sizes of the receive and the send buffer in bytes, in the unit of [`UdpOptions`]: half of
    /// what the kernel accounts with (socket(7)).
    ///
    /// # Errors
    /// What getsockopt(2) says.
    pub fn buffers(&self) -> io::Result<(usize, usize)> {
        let receive = sockopt::RcvBuf.get(&self.socket)?;
        let send = sockopt::SndBuf.get(&self.socket)?;
        Ok((receive / 2, send / 2))
    }

    /// Sets the firewall mark of everything sent from now on; 0 is none.
    ///
    /// # Errors
    /// [`UdpError::Mark`] without CAP_NET_ADMIN.
    pub fn set_fwmark(&self, mark: u32) -> Result<(), UdpError> {
        set_mark(&self.socket, mark)
    }

    /// Whether segmentation offload is in use, apart from single destinations that refused it.
    pub fn gso(&self) -> bool {
        self.gso.on.load(Ordering::Relaxed)
    }

    /// Turns segmentation offload off, or on again where the kernel has it; either way, forgets
    /// which destinations refused it.
    ///
    /// When to try again is the caller's decision, and so is turning it off for a path that loses
    /// by position in the batch: Linux 7.0 to 7.1.4 mangle the headers of segments on some drivers,
    /// which only the far end can see.
    pub fn set_gso(&self, on: bool) {
        let on = on && self.capabilities.gso.is_present();
        self.gso.on.store(on, Ordering::Relaxed);
        self.gso.refused().clear();
        self.gso.refused_count.store(0, Ordering::Relaxed);
    }

    /// How many sends were refused with segmentation offload and replayed without.
    pub fn gso_fallbacks(&self) -> u64 {
        self.gso.fallbacks.load(Ordering::Relaxed)
    }

    /// How many datagrams were dropped because the receive buffer was full, their checksum was wrong, or they were
    /// longer than [`DatagramFilter`] lets pass. What GRO had joined counts once.
    pub fn receive_queue_drops(&self) -> u64 {
        if let Ok(drops) = control::queue_drops(self.socket.as_fd()) {
            self.note_drops(drops);
        }
        self.drops.load(Ordering::Relaxed)
    }

    /// Takes over the kernel's 32-bit counter, which wraps. Stamps of waiting datagrams are older
    /// than what was asked for in between: a step of more than half the range is one back.
    fn note_drops(&self, counter: u32) {
        let extend = |total: u64| match counter.wrapping_sub(total as u32) {
            step @ 1..0x8000_0000 => Some(total + u64::from(step)),
            _ => None,
        };
        // An unchanged or older counter is no failure.
        let _ = self
            .drops
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, extend);
    }
}

impl GsoState {
    fn allowed(&self, destination: IpAddr) -> bool {
        if !self.on.load(Ordering::Relaxed) {
            return false;
        }
        if self.refused_count.load(Ordering::Relaxed) == 0 {
            return true;
        }
        !self.refused().contains(&destination)
    }

    fn refuse(&self, destination: IpAddr) {
        self.fallbacks.fetch_add(1, Ordering::Relaxed);
        let mut refused = self.refused();
        if refused.contains(&destination) {
            return;
        }
        if refused.len() == MAX_REFUSED {
            self.on.store(false, Ordering::Relaxed);
            return;
        }
        refused.push(destination);
        self.refused_count.store(refused.len(), Ordering::Relaxed);
    }

    fn refused(&self) -> std::sync::MutexGuard<'_, Vec<IpAddr>> {
        self.refused
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl AsFd for UdpSocket {
    /// For polling only: UDP_GRO changes what every receive on this descriptor returns, and a plain
    /// recv(2) would see several datagrams as one. [`UdpSocket::receive`] is the way.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Options that differ between IPv4 and IPv6.
///
/// PMTUDISC_PROBE sets DF always and looks at the device's MTU only: the path MTU that the kernel
/// learnt from ICMP, which anybody can forge, is not believed (ip(7), net/ipv4/ip_output.c).
fn set_up_family(fd: &OwnedFd, address: &SocketAddr) -> Result<(), (&'static str, Errno)> {
    let on = &true;
    match address {
        SocketAddr::V4(_) => {
            sockopt::Ipv4PacketInfo
                .set(fd, on)
                .map_err(|errno| ("IP_PKTINFO", errno))?;
            sockopt::IpRecvTos
                .set(fd, on)
                .map_err(|errno| ("IP_RECVTOS", errno))?;
            let (option, probe) = (libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE);
            control::set_int(fd.as_fd(), libc::IPPROTO_IP, option, probe)
                .map_err(|errno| ("IP_MTU_DISCOVER", errno))
        }
        SocketAddr::V6(_) => {
            sockopt::Ipv6V6Only
                .set(fd, on)
                .map_err(|errno| ("IPV6_V6ONLY", errno))?;
            sockopt::Ipv6RecvPacketInfo
                .set(fd, on)
                .map_err(|errno| ("IPV6_RECVPKTINFO", errno))?;
            sockopt::Ipv6RecvTClass
                .set(fd, on)
                .map_err(|errno| ("IPV6_RECVTCLASS", errno))?;
            let (option, probe) = (libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE);
            control::set_int(fd.as_fd(), libc::IPPROTO_IPV6, option, probe)
                .map_err(|errno| ("IPV6_MTU_DISCOVER", errno))
        }
    }
}

fn set_mark<F: AsFd>(fd: &F, mark: u32) -> Result<(), UdpError> {
    let refused = |errno: Errno| UdpError::Mark {
        mark,
        source: errno.into(),
    };
    sockopt::Mark.set(fd, &mark).map_err(refused)
}

/// Sets the receive buffer, beyond `net.core.rmem_max` where that is permitted.
pub(crate) fn set_receive_buffer(fd: &OwnedFd, wanted: usize) -> Ability {
    if sockopt::RcvBufForce.set(fd, &wanted).is_err() {
        // What is reached is looked at below.
        let _ = sockopt::RcvBuf.set(fd, &wanted);
    }
    reached(sockopt::RcvBuf.get(fd), wanted, "net.core.rmem_max")
}

/// Sets the send buffer, beyond `net.core.wmem_max` where that is permitted.
pub(crate) fn set_send_buffer(fd: &OwnedFd, wanted: usize) -> Ability {
    if sockopt::SndBufForce.set(fd, &wanted).is_err() {
        let _ = sockopt::SndBuf.set(fd, &wanted);
    }
    reached(sockopt::SndBuf.get(fd), wanted, "net.core.wmem_max")
}

/// Compares with what was asked for; the kernel doubles it for its own overhead (socket(7)).
fn reached(size: nix::Result<usize>, wanted: usize, limit: &str) -> Ability {
    match size {
        Ok(size) if size / 2 >= wanted => Ability::Present,
        Ok(size) => Ability::Absent(format!(
            "{} of {wanted} bytes: raise {limit}, or run with CAP_NET_ADMIN",
            size / 2
        )),
        Err(errno) => Ability::refused("to tell its size", &errno.into()),
    }
}
