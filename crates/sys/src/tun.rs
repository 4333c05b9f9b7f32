//! TUN devices, which exchange whole super-packets with the kernel's IP stack.
//!
//! [`Tun::create`] creates the interface, requests every offload, and keeps the granted ones in
//! [`TunCapabilities`]. Then each [`TunQueue`] reads and writes one packet per call: a virtio-net
//! header of [`VNET_HEADER_LEN`] bytes (little-endian, `linux/virtio_net.h`), then the IP packet,
//! which may be a TCP or UDP super-packet of up to 64 KiB. The header is always present, also
//! without offload and on kernels without it, so callers see one framing.
//!
//! [`Tun::adopt`] does the same with a device that another program has opened. [`Tun::pair`] makes a device without the
//! kernel's IP stack, for a process without privileges: the same packets pass over a pair of sockets.
//!
//! Creating needs CAP_NET_ADMIN in the user namespace that owns the network namespace. The interface
//! belongs to the network namespace of the thread that creates it, and is deleted with its last
//! queue.

mod capabilities;
pub(crate) mod ioctl;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::ability::Ability;
use crate::packet_pair::packet_pair;
use capabilities::{feature, negotiate_offload, with_offload, without_offload};

pub use capabilities::TunCapabilities;

/// Bytes of `struct virtio_net_hdr` before every packet; all little-endian.
pub const VNET_HEADER_LEN: usize = 10;

/// A read buffer of this size is always large enough: for the header and the largest super-packet
/// (`GSO_LEGACY_MAX_SIZE`, 65536). The kernel silently truncates packets that exceed a buffer.
pub const READ_BUFFER_LEN: usize = VNET_HEADER_LEN + 65536;

/// [`READ_BUFFER_LEN`] for Ethernet frames: with a header of 14 bytes and a VLAN tag of 4.
pub const TAP_READ_BUFFER_LEN: usize = READ_BUFFER_LEN + 18;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`.
const NEEDS_CSUM: u8 = 1;

/// Options of a new interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunOptions {
    /// Name of the interface: 1 to 15 bytes, no `/`, `:`, `%` or white space.
    pub name: String,
    /// MTU in bytes, 68 to 65535.
    pub mtu: u32,
    /// Number of queues, 1 to 256. The kernel keeps a flow on the queue that last wrote to it.
    pub queues: usize,
    /// Whether to request checksum and segmentation offload.
    pub offload: bool,
}

/// Why the TUN device could not be created.
#[derive(Debug, thiserror::Error)]
pub enum TunError {
    /// /dev/net/tun does not exist, or its driver is missing.
    #[error(
        "no TUN driver: cannot open /dev/net/tun: {source}; load it with `modprobe tun`, \
         or pass the device into the container (--device /dev/net/tun)"
    )]
    NoDriver {
        /// The error of open(2).
        source: io::Error,
    },
    /// /dev/net/tun exists but may not be opened.
    #[error(
        "no access to /dev/net/tun: {source}; run as root, or give this user read and write \
         access to the device"
    )]
    NoAccess {
        /// The error of open(2).
        source: io::Error,
    },
    /// The process lacks CAP_NET_ADMIN.
    #[error(
        "not permitted to create interface {name}: it needs CAP_NET_ADMIN; run as root, or \
         `setcap cap_net_admin+ep` on the binary"
    )]
    NotPermitted {
        /// The interface.
        name: String,
    },
    /// An interface with this name exists.
    #[error(
        "interface {name} exists already; choose another name, or stop the program that created it (`ip link delete {name}` if nothing uses it)"
    )]
    Exists {
        /// The interface.
        name: String,
    },
    /// The kernel refuses this name.
    #[error("{name:?} cannot name an interface: {reason}")]
    Name {
        /// The given name.
        name: String,
        /// The rule that it breaks.
        reason: &'static str,
    },
    /// The MTU was refused.
    #[error("interface {name} cannot have MTU {mtu}: {source}; use 68 to 65535")]
    Mtu {
        /// The interface.
        name: String,
        /// The given MTU.
        mtu: u32,
        /// The cause.
        source: io::Error,
    },
    /// A number of queues outside 1 to 256.
    #[error("a TUN interface cannot have {queues} queues; use 1 to 256")]
    Queues {
        /// The given number.
        queues: usize,
    },
    /// The given descriptor is no TUN device, or one with a framing that [`TunQueue`] does not read.
    #[error(
        "cannot use the given descriptor as a TUN device: {reason}; open /dev/net/tun, and attach it with IFF_TUN \
         and IFF_NO_PI"
    )]
    Unusable {
        /// Its fault.
        reason: String,
    },
    /// Another system call failed.
    #[error("cannot set up interface {name}: {operation}: {source}")]
    System {
        /// The interface.
        name: String,
        /// The failed system call.
        operation: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// A TUN interface and its queues. Dropping it deletes the interface.
#[derive(Debug)]
pub struct Tun {
    queues: Vec<TunQueue>,
    name: String,
    index: Option<u32>,
    capabilities: TunCapabilities,
}

impl Tun {
    /// Creates the interface, down and without addresses.
    ///
    /// # Errors
    /// See [`TunError`]. On an error, nothing is left behind.
    pub fn create(options: &TunOptions) -> Result<Tun, TunError> {
        Tun::create_on(options, !0)
    }

    /// Like [`Tun::create`], for Ethernet frames (a TAP device, `IFF_TAP`). Offsets in the
    /// virtio-net header count from the Ethernet header, and a read needs [`TAP_READ_BUFFER_LEN`].
    /// The kernel chooses the hardware address.
    ///
    /// # Errors
    /// See [`TunError`]. On an error, nothing is left behind.
    pub fn create_tap(options: &TunOptions) -> Result<Tun, TunError> {
        Tun::create_kind(options, libc::IFF_TAP, !0)
    }

    /// Like [`Tun::create`], as used by programs without offloads: the kernel adds no virtio-net
    /// header (callers still see one, of zeros), and no packet exceeds the MTU.
    ///
    /// # Errors
    /// See [`TunError`]. On an error, nothing is left behind.
    pub fn create_without_header(options: &TunOptions) -> Result<Tun, TunError> {
        Tun::create_on(options, !libc::IFF_VNET_HDR.cast_unsigned())
    }

    /// [`Tun::create`] on a kernel that supports only `features` (`IFF_*` of TUNGETFEATURES).
    fn create_on(options: &TunOptions, features: u32) -> Result<Tun, TunError> {
        Tun::create_kind(options, libc::IFF_TUN, features)
    }

    /// Creates an interface of `kind`, which is `IFF_TUN` or `IFF_TAP`.
    fn create_kind(
        options: &TunOptions,
        kind: libc::c_int,
        features: u32,
    ) -> Result<Tun, TunError> {
        let name = options.name.as_str();
        check_name(name)?;
        if !(1..=256).contains(&options.queues) {
            return Err(TunError::Queues {
                queues: options.queues,
            });
        }
        let system = |operation| {
            let name = name.to_owned();
            move |errno: Errno| TunError::System {
                name,
                operation,
                source: errno.into(),
            }
        };

        let first = ioctl::open().map_err(open_error)?;
        let features = features & ioctl::features(&first).map_err(system("TUNGETFEATURES"))?;
        let vnet_header = feature(features, libc::IFF_VNET_HDR, "IFF_VNET_HDR");
        let multi_queue = match options.queues {
            1 => Ability::Absent("one queue was requested".into()),
            _ => feature(features, libc::IFF_MULTI_QUEUE, "IFF_MULTI_QUEUE"),
        };
        let mut flags = kind | libc::IFF_NO_PI;
        if vnet_header.is_present() {
            flags |= libc::IFF_VNET_HDR;
        }
        if multi_queue.is_present() {
            flags |= libc::IFF_MULTI_QUEUE;
        }

        let count = if multi_queue.is_present() {
            options.queues
        } else {
            1
        };
        let queues = attach_queues(first, name, flags, count)?;
        Tun::set_up(queues, options, vnet_header, multi_queue)
    }

    /// Takes over a TUN device that another program has opened and attached to an interface, whose
    /// name it keeps; `options.name` and `options.queues` are ignored. The header of a device
    /// without the kernel's virtio-net header is emulated. The interface is deleted with the last
    /// descriptor of it, unless it is persistent.
    ///
    /// # Errors
    /// [`TunError::Unusable`], [`TunError::Mtu`] and [`TunError::System`].
    pub fn adopt(device: OwnedFd, options: &TunOptions) -> Result<Tun, TunError> {
        let unusable = |reason: String| TunError::Unusable { reason };
        let file = File::from(device);
        let (name, flags) = ioctl::interface(&file).map_err(|errno| match errno {
            Errno::EBADFD => unusable("it belongs to no interface".to_owned()),
            errno => unusable(format!("TUNGETIFF: {errno}")),
        })?;
        if flags & libc::IFF_TUN == 0 {
            return Err(unusable(format!("{name} is a TAP device")));
        }
        if flags & libc::IFF_NO_PI == 0 {
            return Err(unusable(format!("{name} was opened without IFF_NO_PI")));
        }
        let system = |errno: Errno| TunError::System {
            name: name.clone(),
            operation: "O_NONBLOCK",
            source: errno.into(),
        };
        let status = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL).map_err(system)?);
        fcntl(&file, FcntlArg::F_SETFL(status | OFlag::O_NONBLOCK)).map_err(system)?;
        let vnet_header = match flags & libc::IFF_VNET_HDR {
            0 => Ability::Absent("the given device was opened without IFF_VNET_HDR".into()),
            _ => Ability::Present,
        };
        let framing = framing(flags);
        let options = TunOptions {
            name,
            ..options.clone()
        };
        Tun::set_up(
            vec![TunQueue { file, framing }],
            &options,
            vnet_header,
            Ability::Absent("one queue was given".into()),
        )
    }

    /// Creates a device without an interface from a [`packet_pair`]. Returns the device, and the end for a TCP/IP stack in
    /// user space, which reads and writes the same messages as a [`TunQueue`]: a virtio-net header and a packet.
    /// Both ends may send super-packets and partial checksums. Needs no privilege.
    ///
    /// # Errors
    /// [`TunError::System`].
    pub fn pair(name: &str) -> Result<(Tun, OwnedFd), TunError> {
        let (ours, theirs) = packet_pair().map_err(|source| TunError::System {
            name: name.to_owned(),
            operation: "a pair of sockets",
            source,
        })?;
        let multi_queue = Ability::Absent("a stack in user space has one queue".into());
        let device = Tun {
            queues: vec![TunQueue {
                file: File::from(ours),
                framing: Framing::Socket,
            }],
            name: name.to_owned(),
            index: None,
            capabilities: with_offload(multi_queue),
        };
        Ok((device, theirs))
    }

    /// Sets header, offloads and MTU of an interface with these queues.
    fn set_up(
        queues: Vec<TunQueue>,
        options: &TunOptions,
        vnet_header: Ability,
        multi_queue: Ability,
    ) -> Result<Tun, TunError> {
        let name = options.name.as_str();
        let system = |operation| {
            move |errno: Errno| TunError::System {
                name: name.to_owned(),
                operation,
                source: errno.into(),
            }
        };
        let file = &queues[0].file;
        if vnet_header.is_present() {
            ioctl::set_header(file, VNET_HEADER_LEN).map_err(system("TUNSETVNETHDRSZ"))?;
        }
        let capabilities = match (&vnet_header, options.offload) {
            (Ability::Absent(reason), _) => without_offload(
                vnet_header.clone(),
                multi_queue,
                &Ability::Absent(reason.clone()),
            ),
            (Ability::Present, false) => {
                ioctl::set_offload(file, 0).map_err(system("TUNSETOFFLOAD"))?;
                without_offload(vnet_header, multi_queue, &Ability::turned_off())
            }
            (Ability::Present, true) => negotiate_offload(vnet_header, multi_queue, |bits| {
                ioctl::set_offload(file, bits)
            }),
        };
        ioctl::set_mtu(name, options.mtu).map_err(|errno| TunError::Mtu {
            name: name.to_owned(),
            mtu: options.mtu,
            source: errno.into(),
        })?;
        let index = nix::net::if_::if_nametoindex(name).map_err(system("its index"))?;
        Ok(Tun {
            queues,
            name: name.to_owned(),
            index: Some(index),
            capabilities,
        })
    }

    /// Returns the queues: as many as requested, or one if the kernel does not support more.
    pub fn queues(&self) -> &[TunQueue] {
        &self.queues
    }

    /// Returns the name of the interface at creation; an administrator may rename it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the index of the interface, which does not change when it is renamed; `None` for [`Tun::pair`].
    pub fn index(&self) -> Option<u32> {
        self.index
    }

    /// Returns the granted offloads, and the reasons why others are missing.
    pub fn capabilities(&self) -> &TunCapabilities {
        &self.capabilities
    }
}

/// One queue of a TUN interface. A call transfers one packet, never blocks, and does not allocate.
///
/// Errors common to reads and writes: EIO while the interface is down (writes), EBADFD once it was
/// deleted, or the other end of a pair was closed (reads).
#[derive(Debug)]
pub struct TunQueue {
    file: File,
    framing: Framing,
}

/// Where the virtio-net header of a packet comes from and goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Framing {
    /// The kernel's IP stack.
    Kernel,
    /// The kernel has no such header: one of zeros is added on reading and removed on writing.
    Emulated,
    /// The other end of a pair of sockets.
    Socket,
}

impl TunQueue {
    /// Reads header and packet. Returns their total length.
    ///
    /// A packet that exceeds `buf` is silently truncated: use [`READ_BUFFER_LEN`]. The kernel's
    /// queue before this one (`txqueuelen`, 500 packets by default) also drops silently;
    /// `tx_dropped` of the interface counts that.
    ///
    /// # Errors
    /// `WouldBlock` if no packet waits; `InvalidInput` if `buf` cannot hold a header.
    #[inline]
    pub fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        match self.framing {
            Framing::Kernel => Ok(nix::unistd::read(&self.file, buf)?),
            Framing::Socket => match nix::unistd::read(&self.file, buf)? {
                0 => Err(Errno::EBADFD.into()),
                length => Ok(length),
            },
            Framing::Emulated => self.read_emulated(buf),
        }
    }

    #[cold]
    fn read_emulated(&self, buf: &mut [u8]) -> io::Result<usize> {
        let Some((header, packet)) = buf.split_at_mut_checked(VNET_HEADER_LEN) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let length = nix::unistd::read(&self.file, packet)?;
        header.fill(0);
        Ok(VNET_HEADER_LEN + length)
    }

    /// Writes one packet, header first, gathered from `bufs` (at most 1024). Returns the length
    /// written, which is always everything.
    ///
    /// The kernel's receive path, up to the socket's queue, runs inside this call.
    ///
    /// # Errors
    /// `InvalidInput` (EINVAL) if the kernel rejects the header or the packet: Linux 6.6.44 and
    /// 6.10.3 do so for correct super-packets, so segment the packet and write it again before
    /// counting it as dropped. ENOBUFS or ENOMEM under memory pressure. `WouldBlock` if the stack at the other end of a pair
    /// has not yet read what waits there.
    #[inline]
    pub fn write_vectored(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.framing == Framing::Emulated {
            return self.write_vectored_emulated(bufs);
        }
        Ok(nix::sys::uio::writev(&self.file, bufs)?)
    }

    #[cold]
    fn write_vectored_emulated(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut header = [0; VNET_HEADER_LEN];
        let mut found = 0;
        let mut packet: Vec<IoSlice<'_>> = Vec::with_capacity(bufs.len());
        for buf in bufs {
            let (head, rest) = buf.split_at((VNET_HEADER_LEN - found).min(buf.len()));
            header[found..found + head.len()].copy_from_slice(head);
            found += head.len();
            packet.push(IoSlice::new(rest));
        }
        // The kernel would not fulfil the request: the checksum would be wrong, or the packet
        // oversized.
        let [flags, gso_type, ..] = header;
        if found < VNET_HEADER_LEN || flags & NEEDS_CSUM != 0 || gso_type != 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(VNET_HEADER_LEN + nix::sys::uio::writev(&self.file, &packet)?)
    }
}

impl AsFd for TunQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Makes `first`, and further descriptors up to `count`, the queues of a new interface.
fn attach_queues(
    first: File,
    name: &str,
    flags: libc::c_int,
    count: usize,
) -> Result<Vec<TunQueue>, TunError> {
    let name = || name.to_owned();
    let refused = |operation| {
        move |errno| match errno {
            Errno::EBUSY | Errno::EEXIST => TunError::Exists { name: name() },
            Errno::EPERM => TunError::NotPermitted { name: name() },
            errno => TunError::System {
                name: name(),
                operation,
                source: errno.into(),
            },
        }
    };
    let framing = framing(flags);
    // Exclusive for the first queue only: the others must find the interface.
    ioctl::attach(&first, &name(), flags | libc::IFF_TUN_EXCL).map_err(refused("TUNSETIFF"))?;
    let mut queues = vec![TunQueue {
        file: first,
        framing,
    }];
    while queues.len() < count {
        let file = ioctl::open().map_err(open_error)?;
        ioctl::attach(&file, &name(), flags).map_err(refused("TUNSETIFF of a further queue"))?;
        queues.push(TunQueue { file, framing });
    }
    Ok(queues)
}

/// Returns the framing of an interface with these flags.
fn framing(flags: libc::c_int) -> Framing {
    if flags & libc::IFF_VNET_HDR == 0 {
        Framing::Emulated
    } else {
        Framing::Kernel
    }
}

/// The rules of `dev_valid_name` (net/core/dev.c), and no `%`, which would be a template.
fn check_name(name: &str) -> Result<(), TunError> {
    let forbidden = |c: char| matches!(c, '/' | ':' | '%' | '\0') || c.is_whitespace();
    let reason = match name {
        "" => "it is empty",
        "." | ".." => "it is a directory in /sys",
        _ if name.len() >= libc::IFNAMSIZ => "it is longer than 15 bytes",
        _ if name.contains(forbidden) => "it contains '/', ':', '%', NUL or white space",
        _ => return Ok(()),
    };
    Err(TunError::Name {
        name: name.to_owned(),
        reason,
    })
}

fn open_error(errno: Errno) -> TunError {
    let source = errno.into();
    match errno {
        Errno::EACCES | Errno::EPERM => TunError::NoAccess { source },
        _ => TunError::NoDriver { source },
    }
}
