//! The packet socket: frames of one Ethernet interface, super-packets whole, without the stack's
//! leave.
//!
//! [`PacketSocket::open`] makes the socket deaf, sets it up with its filter, and only then binds it,
//! so that nothing unfiltered comes in. [`PacketSocket::receive`] gives one frame behind a
//! virtio-net header (`PACKET_VNET_HDR`): what GRO or the sender's TSO joined stays joined, and
//! checksums not yet filled in are said to be so. [`PacketSocket::send_vectored`] takes the same
//! framing and leaves segmentation and checksums to the interface. The header is in the byte order
//! of the host (packet(7) has no `TUNSETVNETLE`), and `csum_start` counts from the Ethernet header.
//!
//! One recvmsg(2) per frame measures best among the ways that do not delay (`benches/packet`):
//! recvmmsg(2) saves a little on small frames only; a ring of version 2 saves up to a third on
//! super-packets and loses small frames, its slots being few; one of version 3 halves the cost of
//! all, but shows a frame only when its block is full or at least a millisecond has passed.
//!
//! The host's own stack sees the same frames, and answers them if it thinks they are for it.

mod auxiliary;
mod filter;
mod option;
#[cfg(test)]
mod tests;

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libc::{c_int, sockaddr_ll};
use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType};

use self::auxiliary::{Auxiliary, CONTROL_LEN, Control};
use crate::ability::Ability;
use crate::udp::{set_receive_buffer, set_send_buffer};

/// Bytes of the virtio-net header in front of every frame.
pub const VNET_HEADER_LEN: usize = 10;

/// A receive buffer of this length takes what any interface with default limits receives: the
/// header, an Ethernet header, and a super-packet of `gro_max_size` 65,536 bytes.
pub const RECEIVE_BUFFER_LEN: usize = VNET_HEADER_LEN + 14 + 65_536;

/// Which received frames the kernel hands over. What this host sends is never among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accept {
    /// Those to this address, those to any group (broadcast, multicast), and ARP to anybody.
    Station([u8; 6]),
    /// All, for discovery; of each only the first `snap_length` bytes (at least 1), Ethernet header
    /// included.
    Everything {
        /// In bytes; 128 shows every header that names a device.
        snap_length: u32,
    },
}

/// How to set up a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketOptions {
    /// What to receive.
    pub accept: Accept,
    /// Receive buffer in bytes. The kernel charges a frame with the memory it occupies, twice the
    /// option's value is available, and a burst of super-packets comes in between two reads: 8 MiB
    /// hold some 200 of them, or 13 ms at 10 Gbit/s; the default of Linux (208 KiB) holds 6.
    pub receive_buffer: usize,
    /// Send buffer in bytes: frames count until the interface has sent them, so it covers the
    /// interface's queue, too.
    pub send_buffer: usize,
}

impl PacketOptions {
    /// With buffers of 8 MiB.
    pub fn new(accept: Accept) -> Self {
        Self {
            accept,
            receive_buffer: 8 << 20,
            send_buffer: 8 << 20,
        }
    }
}

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum PacketError {
    /// The process lacks CAP_NET_RAW.
    #[error(
        "not permitted to open a packet socket: it takes CAP_NET_RAW; run as root, or \
         `setcap cap_net_raw,cap_net_admin+ep` on the binary"
    )]
    NotPermitted,
    /// The kernel was built without packet sockets.
    #[error("this kernel has no packet sockets: load the module (`modprobe af_packet`)")]
    NoFamily,
    /// No interface has the index, in the calling thread's network namespace.
    #[error("there is no interface with index {index}; `ip link` lists those there are")]
    NoSuchInterface {
        /// The index asked for.
        index: u32,
    },
    /// The interface does not carry Ethernet frames.
    #[error(
        "interface {index} is not Ethernet (hardware type {hardware_type}); choose the physical \
         interface, bridge or VLAN that leads to the devices"
    )]
    NotEthernet {
        /// The index asked for.
        index: u32,
        /// `ARPHRD_*` of include/uapi/linux/if_arp.h.
        hardware_type: u16,
    },
    /// Anything else.
    #[error("cannot open a packet socket on interface {index}: {operation}: {source}")]
    System {
        /// The index asked for.
        index: u32,
        /// What was being done.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What [`PacketSocket::receive`] put into the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes in the buffer: the virtio-net header and the frame, or as much of it as fitted.
    pub length: usize,
    /// Bytes of the frame as it came, Ethernet header included, VLAN tag and virtio-net header not;
    /// more than is in the buffer if it was truncated or snapped.
    pub frame_length: usize,
    /// TCI (priority and VLAN identifier) of the outermost VLAN tag, which the kernel has taken out
    /// of the frame.
    pub vlan: Option<u16>,
    /// TPID of that tag: 0x8100, or 0x88a8 for a service tag; 0 without one.
    pub vlan_protocol: u16,
    /// The buffer was too small. A frame cut by [`Accept::Everything`] does not count.
    pub truncated: bool,
}

/// A packet socket on one interface, never blocking.
///
/// When the interface is set down, [`PacketSocket::receive`] fails once with
/// [`io::ErrorKind::NetworkDown`] (and poll says error) and sending fails so until it is up again;
/// the same socket then goes on. When the interface is deleted, receiving says the same once, and
/// sending fails with ENXIO for good.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
    index: u32,
    receive_buffer: Ability,
    send_buffer: Ability,
    promiscuous: AtomicBool,
    drops: AtomicU64,
}

impl PacketSocket {
    /// Opens a socket on an interface of the calling thread's network namespace, up or down. Closing
    /// it undoes all memberships.
    ///
    /// # Errors
    /// See [`PacketError`]. Smaller buffers than asked for are no error, see
    /// [`PacketSocket::buffers`].
    pub fn open(interface_index: u32, options: &PacketOptions) -> Result<Self, PacketError> {
        let index = interface_index;
        let system = |operation| {
            move |errno: Errno| PacketError::System {
                index,
                operation,
                source: errno.into(),
            }
        };
        // Protocol 0: nothing comes in before bind says otherwise.
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let fd =
            socket::socket(AddressFamily::Packet, SockType::Raw, flags, None).map_err(|errno| {
                match errno {
                    Errno::EPERM | Errno::EACCES => PacketError::NotPermitted,
                    Errno::EAFNOSUPPORT => PacketError::NoFamily,
                    errno => system("socket")(errno),
                }
            })?;
        option::set_int(fd.as_fd(), libc::PACKET_VNET_HDR, 1).map_err(system("PACKET_VNET_HDR"))?;
        option::set_int(fd.as_fd(), libc::PACKET_AUXDATA, 1).map_err(system("PACKET_AUXDATA"))?;
        // Only spares work: the filter refuses what this host sends in any case.
        let _ = option::set_int(fd.as_fd(), libc::PACKET_IGNORE_OUTGOING, 1);
        let receive_buffer = set_receive_buffer(&fd, options.receive_buffer);
        let send_buffer = set_send_buffer(&fd, options.send_buffer);
        option::attach_filter(fd.as_fd(), &mut filter::program(options.accept))
            .map_err(system("SO_ATTACH_FILTER"))?;
        // Index 0 would be every interface.
        let bound = match index {
            0 => Err(Errno::ENODEV),
            _ => option::bind(fd.as_fd(), index, libc::ETH_P_ALL),
        };
        bound.map_err(|errno| match errno {
            Errno::ENODEV => PacketError::NoSuchInterface { index },
            errno => system("bind")(errno),
        })?;
        let hardware_type = option::hardware_type(fd.as_fd()).map_err(system("getsockname"))?;
        if hardware_type != libc::ARPHRD_ETHER {
            return Err(PacketError::NotEthernet {
                index,
                hardware_type,
            });
        }
        Ok(Self {
            fd,
            index,
            receive_buffer,
            send_buffer,
            promiscuous: AtomicBool::new(false),
            drops: AtomicU64::new(0),
        })
    }

    /// The interface it is bound to.
    pub fn interface_index(&self) -> u32 {
        self.index
    }

    /// Whether the receive and the send buffer have the size asked for.
    pub fn buffers(&self) -> (&Ability, &Ability) {
        (&self.receive_buffer, &self.send_buffer)
    }

    /// Takes one frame: `buffer` gets the virtio-net header and the frame. With
    /// [`RECEIVE_BUFFER_LEN`] bytes it is never truncated, unless `gro_max_size` was raised.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is waiting; `NetworkDown` once after the interface was set down or
    /// deleted; `InvalidInput` when a super-packet came of a kind that the header cannot express
    /// (SCTP, or a tunnel whose inner packets were joined): it is lost, count it and go on. Also
    /// `InvalidInput` if `buffer` cannot hold a header.
    #[inline]
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut address = option::no_address();
        let mut control = Control([0; CONTROL_LEN]);
        let mut part = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        // SAFETY: msghdr is integers and pointers, for which zero bytes are valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = (&raw mut address).cast();
        message.msg_namelen = size_of::<sockaddr_ll>() as libc::socklen_t;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = CONTROL_LEN as _;
        // SAFETY: the address, control and data buffers have the stated lengths, outlive the call,
        // and nobody else uses them.
        let length = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, 0) };
        let length = Errno::result(length)? as usize;
        // SAFETY: recvmsg filled `message`, whose control buffer is alive and aligned.
        let auxiliary = unsafe { Auxiliary::parse(&message) };
        Ok(received(
            length.min(buffer.len()),
            message.msg_flags & libc::MSG_TRUNC != 0,
            &auxiliary,
        ))
    }

    /// Sends one frame gathered from `parts` (at most 1024): the virtio-net header, then the frame,
    /// a VLAN tag included if it is to have one. The length sent, which is always all. A super-packet
    /// (`gso_type`) may be longer than the MTU; it is segmented at the latest where it leaves.
    ///
    /// # Errors
    /// `WouldBlock` when the send buffer is full; ENOBUFS when the interface's queue is: the frame
    /// was dropped there. EMSGSIZE for a frame over the MTU that is no super-packet. `InvalidInput`
    /// (EINVAL) when the kernel rejects header or frame. `NetworkDown` while the interface is down,
    /// ENXIO after it was deleted.
    #[inline]
    pub fn send_vectored(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(nix::sys::uio::writev(&self.fd, parts)?)
    }

    /// Makes the interface receive frames to a further unicast address. A card whose address table
    /// is full becomes promiscuous instead; that is the kernel's matter.
    ///
    /// # Errors
    /// `NetworkDown` or ENODEV when the interface was deleted.
    pub fn join_unicast(&self, address: [u8; 6]) -> io::Result<()> {
        self.join(libc::PACKET_MR_UNICAST, address)
    }

    /// Receives frames to every group (`IFF_ALLMULTI`), for as long as the socket is open.
    ///
    /// # Errors
    /// What the kernel says: the interface is gone.
    pub fn join_all_multicast(&self) -> io::Result<()> {
        self.join(libc::PACKET_MR_ALLMULTI, [0; 6])
    }

    /// Whether the interface is to receive frames to any address on this socket's behalf. It ends
    /// with the socket. The filter still holds.
    ///
    /// # Errors
    /// What setsockopt(2) says.
    pub fn set_promiscuous(&self, on: bool) -> io::Result<()> {
        // The kernel counts memberships: ask only for what changes.
        if self.promiscuous.swap(on, Ordering::Relaxed) == on {
            return Ok(());
        }
        let operation = match on {
            true => libc::PACKET_ADD_MEMBERSHIP,
            false => libc::PACKET_DROP_MEMBERSHIP,
        };
        let kind = libc::PACKET_MR_PROMISC;
        let outcome = option::membership(self.fd.as_fd(), operation, self.index, kind, None);
        if outcome.is_err() {
            self.promiscuous.store(!on, Ordering::Relaxed);
        }
        Ok(outcome?)
    }

    /// Frames that found the receive buffer full, since the socket was opened.
    pub fn drops(&self) -> u64 {
        // Reading resets the kernel's counter, so the sum is kept here.
        let fresh = option::take_drops(self.fd.as_fd()).unwrap_or(0);
        self.drops.fetch_add(fresh.into(), Ordering::Relaxed) + u64::from(fresh)
    }

    /// Adds a membership, which ends with the socket.
    fn join(&self, kind: c_int, address: [u8; 6]) -> io::Result<()> {
        let operation = libc::PACKET_ADD_MEMBERSHIP;
        let fd = self.fd.as_fd();
        let outcome = option::membership(fd, operation, self.index, kind, Some(address));
        Ok(outcome?)
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for PacketSocket {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.fd.as_raw_fd()
    }
}

#[inline]
fn received(length: usize, truncated: bool, auxiliary: &Auxiliary) -> Received {
    let tagged = auxiliary.status & libc::TP_STATUS_VLAN_VALID != 0;
    Received {
        length,
        frame_length: auxiliary.frame_length as usize,
        vlan: tagged.then_some(auxiliary.vlan),
        vlan_protocol: if tagged { auxiliary.vlan_protocol } else { 0 },
        truncated,
    }
}
