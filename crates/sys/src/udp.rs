//! UDP sockets that transfer batches: UDP_SEGMENT and sendmmsg(2) to send, UDP_GRO and recvmmsg(2)
//! to receive.
//!
//! [`UdpSocket::bind`] configures the socket for the outer side of a tunnel: non-blocking, without
//! fragmentation, and with the local address and traffic class of every datagram.
//! [`UdpSocket::send`] sends whole batches, and replays them datagram by datagram where
//! segmentation offload is refused. [`UdpSocket::receive`] fills one contiguous arena. The granted
//! abilities are in [`UdpCapabilities`].
//!
//! A node binds one socket for IPv4 and one for IPv6 to the same port, so the IPv6 one is `V6ONLY`.

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

/// If more destinations than this refuse GSO, it is turned off for the whole socket.
const MAX_REFUSED: usize = 64;

/// Options of a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdpOptions {
    /// Receive buffer in bytes; the default of Linux (208 KiB) drops bursts.
    pub receive_buffer: usize,
    /// Send buffer in bytes. With the default of Linux, the sending host itself drops packets.
    pub send_buffer: usize,
    /// Firewall mark of all sent packets, for policy routing.
    pub fwmark: Option<u32>,
    /// Whether to use UDP_SEGMENT.
    pub gso: bool,
    /// Whether to use UDP_GRO.
    pub gro: bool,
    /// The filter of unwanted datagrams, or the reason why there is none.
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

/// Why the socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum UdpError {
    /// Another socket uses the port.
    #[error(
        "UDP port {} is in use ({address}): another program or another tunnel listens there; \
         choose another port, or find the program with `ss -ulpn`",
        address.port()
    )]
    PortInUse {
        /// The local address.
        address: SocketAddr,
    },
    /// This host does not have the address.
    #[error("{} is not an address of this host", address.ip())]
    AddressNotAvailable {
        /// The local address.
        address: SocketAddr,
    },
    /// The kernel runs without this address family (for example, IPv6 is turned off at boot).
    #[error("this host has no sockets of the family of {address}: {source}")]
    NoFamily {
        /// The local address.
        address: SocketAddr,
        /// The error of socket(2).
        source: io::Error,
    },
    /// The firewall mark was refused. Without it, packets could loop into the tunnel.
    #[error("cannot set firewall mark {mark:#x}: {source}; it needs CAP_NET_ADMIN")]
    Mark {
        /// The given mark.
        mark: u32,
        /// The error of setsockopt(2).
        source: io::Error,
    },
    /// Another system call failed.
    #[error("cannot open a UDP socket on {address}: {operation}: {source}")]
    System {
        /// The local address.
        address: SocketAddr,
        /// The failed system call.
        operation: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// The capabilities of a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdpCapabilities {
    /// UDP_SEGMENT: one call sends many datagrams. A route may still refuse it.
    pub gso: Ability,
    /// UDP_GRO: one buffer receives many datagrams.
    pub gro: Ability,
    /// The receive buffer has the requested size.
    pub receive_buffer: Ability,
    /// The send buffer has the requested size.
    pub send_buffer: Ability,
    /// SO_RXQ_OVFL: datagrams dropped at a full receive buffer are counted.
    pub receive_queue_drops: Ability,
    /// Datagrams that are too long or too short are refused before they use space in the receive
    /// buffer.
    pub datagram_filter: Ability,
}

impl UdpCapabilities {
    /// Returns names and abilities.
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

/// A bound, non-blocking UDP socket.
///
/// One thread sends, and one thread (the same or another) receives. A second receiver would take
/// datagrams away from the first.
#[derive(Debug)]
pub struct UdpSocket {
    socket: std::net::UdpSocket,
    capabilities: UdpCapabilities,
    gso: GsoState,
    is_connected: bool,
    /// Datagrams dropped at the full receive buffer: SO_RXQ_OVFL, extended to 64 bits.
    drops: AtomicU64,
}

/// Where segmentation offload may be used.
#[derive(Debug)]
struct GsoState {
    on: AtomicBool,
    /// Destinations whose route refused it. Offload depends on the egress device, so other
    /// destinations keep it.
    refused: Mutex<Vec<IpAddr>>,
    /// Length of `refused`, so that the lock is taken only when it is not empty.
    refused_count: AtomicUsize,
    fallbacks: AtomicU64,
}

impl UdpSocket {
    /// Opens a socket and binds it to `address` (port 0: any free port).
    ///
    /// # Errors
    /// See [`UdpError`]. Missing abilities are no errors, see [`UdpSocket::capabilities`].
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
            gso: if options.gso {
                Ability::from_outcome("UDP_SEGMENT", sockopt::UdpGsoSegment.set(&fd, &0))
            } else {
                Ability::turned_off()
            },
            gro: if options.gro {
                Ability::from_outcome("UDP_GRO", sockopt::UdpGroSegment.set(&fd, &true))
            } else {
                Ability::turned_off()
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
        // Last, so that no datagram arrives before the options apply.
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
            is_connected: false,
            drops,
        })
    }

    /// Receives only from `peer` from now on, besides what has arrived already: the kernel refuses
    /// and counts other datagrams (`UdpNoPorts`) before they reach the socket.
    ///
    /// The socket keeps the local address that the route to `peer` has now. If that changes, open
    /// another socket.
    ///
    /// # Errors
    /// Those of connect(2), such as ENETUNREACH.
    pub fn connect(&mut self, peer: SocketAddr) -> io::Result<()> {
        self.socket.connect(peer)?;
        self.is_connected = true;
        Ok(())
    }

    /// Returns the local address, with the chosen port.
    ///
    /// # Errors
    /// Those of getsockname(2).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns the abilities of the socket.
    pub fn capabilities(&self) -> &UdpCapabilities {
        &self.capabilities
    }

    /// Returns the sizes of the receive and the send buffer in bytes, in the unit of
    /// [`UdpOptions`]: half of the kernel's values (socket(7)).
    ///
    /// # Errors
    /// Those of getsockopt(2).
    pub fn buffers(&self) -> io::Result<(usize, usize)> {
        let receive = sockopt::RcvBuf.get(&self.socket)?;
        let send = sockopt::SndBuf.get(&self.socket)?;
        Ok((receive / 2, send / 2))
    }

    /// Sets the firewall mark of all packets sent from now on; 0 means none.
    ///
    /// # Errors
    /// [`UdpError::Mark`] without CAP_NET_ADMIN.
    pub fn set_fwmark(&self, mark: u32) -> Result<(), UdpError> {
        set_mark(&self.socket, mark)
    }

    /// Whether segmentation offload is in use, except for destinations that refused it.
    pub fn gso(&self) -> bool {
        self.gso.on.load(Ordering::Relaxed)
    }

    /// Turns segmentation offload off, or on again if the kernel has it. Either way, forgets the
    /// destinations that refused it.
    ///
    /// The caller decides when to try again, and when to turn it off for a path whose losses depend
    /// on the position in the batch: Linux 7.0 to 7.1.4 mangle the headers of segments on some
    /// drivers, and only the far end can detect that.
    pub fn set_gso(&self, on: bool) {
        let on = on && self.capabilities.gso.is_present();
        self.gso.on.store(on, Ordering::Relaxed);
        self.gso.refused().clear();
        self.gso.refused_count.store(0, Ordering::Relaxed);
    }

    /// Returns the number of sends that were refused with segmentation offload and replayed
    /// without.
    pub fn gso_fallbacks(&self) -> u64 {
        self.gso.fallbacks.load(Ordering::Relaxed)
    }

    /// Returns the number of datagrams dropped because the receive buffer was full, the checksum
    /// was wrong, or [`DatagramFilter`] refused them. A batch joined by GRO counts once.
    pub fn receive_queue_drops(&self) -> u64 {
        if let Ok(drops) = control::queue_drops(self.socket.as_fd()) {
            self.note_drops(drops);
        }
        self.drops.load(Ordering::Relaxed)
    }

    /// Processes the kernel's 32-bit counter, which wraps. The counter in a waiting datagram may be
    /// older than the last one read: a step of more than half the range counts as a step back.
    fn note_drops(&self, counter: u32) {
        let extend = |total: u64| match counter.wrapping_sub(total as u32) {
            step @ 1..0x8000_0000 => Some(total + u64::from(step)),
            _ => None,
        };
        // An unchanged or older counter is no error.
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
    /// For polling only: UDP_GRO changes the result of every receive on this descriptor, and a
    /// plain recv(2) would return several datagrams as one. Use [`UdpSocket::receive`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sets the options that differ between IPv4 and IPv6.
///
/// PMTUDISC_PROBE always sets DF and uses the MTU of the device only. It ignores the path MTU that
/// the kernel learned from ICMP, which anybody can forge (ip(7), net/ipv4/ip_output.c).
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

/// Sets the receive buffer, above `net.core.rmem_max` if permitted.
pub(crate) fn set_receive_buffer(fd: &OwnedFd, wanted: usize) -> Ability {
    if sockopt::RcvBufForce.set(fd, &wanted).is_err() {
        // The actual size is checked below.
        let _ = sockopt::RcvBuf.set(fd, &wanted);
    }
    reached(sockopt::RcvBuf.get(fd), wanted, "net.core.rmem_max")
}

/// Sets the send buffer, above `net.core.wmem_max` if permitted.
pub(crate) fn set_send_buffer(fd: &OwnedFd, wanted: usize) -> Ability {
    if sockopt::SndBufForce.set(fd, &wanted).is_err() {
        let _ = sockopt::SndBuf.set(fd, &wanted);
    }
    reached(sockopt::SndBuf.get(fd), wanted, "net.core.wmem_max")
}

/// Compares with the requested size. The kernel doubles it for its own overhead (socket(7)).
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
