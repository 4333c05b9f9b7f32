//! Packet sockets: the frames of one Ethernet interface, including whole super-packets, independent
//! of the kernel's IP stack.
//!
//! [`PacketSocket::open`] creates a socket that receives nothing, installs the filter, and only
//! then binds it, so that no unfiltered frame arrives. [`PacketSocket::receive`] returns one frame
//! with a virtio-net header (`PACKET_VNET_HDR`): packets joined by GRO or the sender's TSO stay
//! joined, and the header marks checksums that are not filled in. [`PacketSocket::send_vectored`]
//! takes the same framing and leaves segmentation and checksums to the interface. The header is in
//! host byte order (packet(7) has no `TUNSETVNETLE`), and `csum_start` counts from the Ethernet
//! header.
//!
//! One recvmsg(2) per frame measures best among the methods that do not delay frames
//! (`benches/packet`). recvmmsg(2) saves a little on small frames only. A ring of version 2 saves
//! up to a third on super-packets but loses small frames, because it has few slots. A ring of
//! version 3 halves the cost of all frames, but reports a frame only when its block is full or at
//! least a millisecond has passed.
//!
//! The host's own stack receives the same frames and answers those addressed to the host.

mod auxiliary;
pub mod capture;
mod filter;
mod option;
#[cfg(test)]
mod tests;

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libc::c_int;
use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType};

use self::auxiliary::{Auxiliary, CONTROL_LEN, Control};
use crate::ability::Ability;
use crate::udp::{set_receive_buffer, set_send_buffer};

/// Bytes of the virtio-net header in front of every frame.
pub const VNET_HEADER_LEN: usize = 10;

/// A receive buffer of this length holds any frame of an interface with default limits: the header,
/// an Ethernet header, and a super-packet of `gro_max_size` 65,536 bytes.
pub const RECEIVE_BUFFER_LEN: usize = VNET_HEADER_LEN + 14 + 65_536;

/// Selects the received frames that the kernel delivers. Frames sent by this host are never
/// delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accept {
    /// Frames to this address, to any group (broadcast, multicast), and ARP to any address.
    Host([u8; 6]),
    /// All frames, for discovery; of each only the first `snap_length` bytes (at least 1),
    /// including the Ethernet header.
    Everything {
        /// Maximum number of bytes kept of each frame; 128 include every header that identifies a
        /// device.
        snap_length: u32,
    },
}

/// Options of a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketOptions {
    /// The frames to receive.
    pub accept: Accept,
    /// Receive buffer in bytes. The kernel counts the memory that a frame occupies and allows twice
    /// this value. A burst of super-packets may arrive between two reads: 8 MiB hold some 200 of
    /// them, or 13 ms at 10 Gbit/s; the default of Linux (208 KiB) holds 6.
    pub receive_buffer: usize,
    /// Send buffer in bytes. Frames count until the interface has sent them, so it also covers the
    /// interface's queue.
    pub send_buffer: usize,
}

impl PacketOptions {
    /// Options with buffers of 8 MiB.
    pub fn new(accept: Accept) -> Self {
        Self {
            accept,
            receive_buffer: 8 << 20,
            send_buffer: 8 << 20,
        }
    }
}

/// Why the socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum PacketError {
    /// The process lacks CAP_NET_RAW.
    #[error(
        "not permitted to open a packet socket: it needs CAP_NET_RAW; run as root, or \
         `setcap cap_net_raw,cap_net_admin+ep` on the binary"
    )]
    NotPermitted,
    /// The kernel was built without packet sockets.
    #[error("this kernel has no packet sockets: load the module (`modprobe af_packet`)")]
    NoFamily,
    /// No interface in the calling thread's network namespace has this index.
    #[error("there is no interface with index {index}; `ip link` lists the interfaces")]
    NoSuchInterface {
        /// The given index.
        index: u32,
    },
    /// The interface does not carry Ethernet frames.
    #[error(
        "interface {index} is not Ethernet (hardware type {hardware_type}); choose the physical \
         interface, bridge or VLAN that leads to the devices"
    )]
    NotEthernet {
        /// The given index.
        index: u32,
        /// `ARPHRD_*` of include/uapi/linux/if_arp.h.
        hardware_type: u16,
    },
    /// Another system call failed.
    #[error("cannot open a packet socket on interface {index}: {operation}: {source}")]
    System {
        /// The given index.
        index: u32,
        /// The failed system call.
        operation: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// A received frame in the buffer of [`PacketSocket::receive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes in the buffer: the virtio-net header and the frame, as far as they fit.
    pub length: usize,
    /// Length of the frame in bytes, with the Ethernet header but without VLAN tag and virtio-net
    /// header. It is larger than the part in the buffer if the frame was truncated or snapped.
    pub frame_length: usize,
    /// TCI (priority and VLAN identifier) of the outermost VLAN tag, which the kernel has removed
    /// from the frame.
    pub vlan: Option<u16>,
    /// TPID of that tag: 0x8100, or 0x88a8 for a service tag; 0 without one.
    pub vlan_protocol: u16,
    /// The buffer was too small. A frame cut by [`Accept::Everything`] does not count.
    pub truncated: bool,
}

/// A non-blocking packet socket on one interface.
///
/// When the interface is set down, [`PacketSocket::receive`] fails once with
/// [`io::ErrorKind::NetworkDown`] (and poll reports an error), and sending fails so until it is up
/// again; the socket stays usable. When the interface is deleted, receiving also fails once, and
/// sending fails with ENXIO from then on.
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
    /// Opens a socket on an interface of the calling thread's network namespace, up or down.
    /// Closing it ends all memberships.
    ///
    /// # Errors
    /// See [`PacketError`]. Buffers smaller than requested are no error, see
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
        // With protocol 0, nothing is received before bind.
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
        // This only saves work: the filter refuses frames sent by this host in any case.
        let _ = option::set_int(fd.as_fd(), libc::PACKET_IGNORE_OUTGOING, 1);
        let receive_buffer = set_receive_buffer(&fd, options.receive_buffer);
        let send_buffer = set_send_buffer(&fd, options.send_buffer);
        option::attach_filter(fd.as_fd(), &mut filter::program(options.accept))
            .map_err(system("SO_ATTACH_FILTER"))?;
        // Index 0 would mean every interface.
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

    /// Returns the index of the interface.
    pub fn interface_index(&self) -> u32 {
        self.index
    }

    /// Returns whether the receive and the send buffer have the requested size.
    pub fn buffers(&self) -> (&Ability, &Ability) {
        (&self.receive_buffer, &self.send_buffer)
    }

    /// Receives one frame: writes the virtio-net header and the frame into `buffer`. A buffer of
    /// [`RECEIVE_BUFFER_LEN`] bytes never truncates a frame, unless `gro_max_size` was raised.
    ///
    /// # Errors
    /// `WouldBlock` if no frame waits; `NetworkDown` once after the interface was set down or
    /// deleted; `InvalidInput` for a super-packet that the header cannot express (SCTP, or a tunnel
    /// whose inner packets were joined): it is lost, so count it and continue. Also `InvalidInput`
    /// if `buffer` cannot hold a header.
    #[inline]
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut control = Control([0; CONTROL_LEN]);
        let mut part = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        // SAFETY: msghdr is integers and pointers, for which zero bytes are valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = CONTROL_LEN as _;
        // SAFETY: the control and data buffers have the stated lengths, outlive the call,
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

    /// Sends one frame gathered from `parts` (at most 1024): the virtio-net header, then the frame
    /// with its VLAN tag, if it has one. Returns the length sent, which is always everything. A
    /// super-packet (`gso_type`) may exceed the MTU; it is segmented at the latest where it leaves
    /// the host.
    ///
    /// # Errors
    /// `WouldBlock` if the send buffer is full. ENOBUFS if the queue of the interface is full: the
    /// frame was dropped. EMSGSIZE for a frame over the MTU that is no super-packet. `InvalidInput`
    /// (EINVAL) if the kernel rejects header or frame. `NetworkDown` while the interface is down,
    /// ENXIO after it was deleted.
    #[inline]
    pub fn send_vectored(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(nix::sys::uio::writev(&self.fd, parts)?)
    }

    /// Makes the interface receive frames to another unicast address. A NIC whose address table is
    /// full becomes promiscuous instead.
    ///
    /// # Errors
    /// `NetworkDown` or ENODEV when the interface was deleted.
    pub fn join_unicast(&self, address: [u8; 6]) -> io::Result<()> {
        self.join(libc::PACKET_MR_UNICAST, address)
    }

    /// Makes the interface receive frames to every group (`IFF_ALLMULTI`) while the socket is open.
    ///
    /// # Errors
    /// The interface was deleted.
    pub fn join_all_multicast(&self) -> io::Result<()> {
        self.join(libc::PACKET_MR_ALLMULTI, [0; 6])
    }

    /// Turns promiscuous mode of the interface on or off. It ends with the socket. The filter stays
    /// in effect.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_promiscuous(&self, on: bool) -> io::Result<()> {
        // The kernel counts memberships, so only changes are requested.
        if self.promiscuous.swap(on, Ordering::Relaxed) == on {
            return Ok(());
        }
        let operation = if on {
            libc::PACKET_ADD_MEMBERSHIP
        } else {
            libc::PACKET_DROP_MEMBERSHIP
        };
        let kind = libc::PACKET_MR_PROMISC;
        let outcome = option::membership(self.fd.as_fd(), operation, self.index, kind, None);
        if outcome.is_err() {
            self.promiscuous.store(!on, Ordering::Relaxed);
        }
        Ok(outcome?)
    }

    /// Returns the number of frames dropped at the full receive buffer since the socket was opened.
    pub fn drops(&self) -> u64 {
        // Reading resets the kernel's counter, so the total is kept here.
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
