//! Socket addresses and control messages in the kernel's layout (cmsg(3), ip(7), ipv6(7)).

use std::mem::{self, offset_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::num::NonZeroU8;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{c_int, cmsghdr, in_pktinfo, in6_pktinfo, msghdr, sockaddr_in, sockaddr_in6, socklen_t};
use nix::errno::Errno;

/// A socket address of either family; `family` distinguishes them.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union RawAddress {
    family: libc::sa_family_t,
    v4: sockaddr_in,
    v6: sockaddr_in6,
}

/// Size of an address of either family.
pub(super) const ADDRESS_LEN: socklen_t = size_of::<RawAddress>() as socklen_t;

impl RawAddress {
    pub(super) const EMPTY: RawAddress = RawAddress {
        v6: sockaddr_in6 {
            sin6_family: libc::AF_UNSPEC as libc::sa_family_t,
            sin6_port: 0,
            sin6_flowinfo: 0,
            sin6_addr: libc::in6_addr { s6_addr: [0; 16] },
            sin6_scope_id: 0,
        },
    };

    /// Returns the address, and the length of its family.
    #[inline]
    pub(super) fn new(address: SocketAddr) -> (RawAddress, socklen_t) {
        let mut raw = RawAddress::EMPTY;
        match address {
            SocketAddr::V4(address) => {
                raw.v4 = sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: address.port().to_be(),
                    sin_addr: raw_v4(*address.ip()),
                    sin_zero: [0; 8],
                };
                (raw, size_of::<sockaddr_in>() as socklen_t)
            }
            SocketAddr::V6(address) => {
                raw.v6 = sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: address.port().to_be(),
                    sin6_flowinfo: address.flowinfo().to_be(),
                    sin6_addr: raw_v6(*address.ip()),
                    sin6_scope_id: address.scope_id(),
                };
                (raw, size_of::<sockaddr_in6>() as socklen_t)
            }
        }
    }

    /// Returns the address; `None` for a family that an Internet socket does not have.
    #[inline]
    pub(super) fn socket_addr(&self) -> Option<SocketAddr> {
        // SAFETY: every variant is integers, and all bytes of the union are initialised from
        // `EMPTY` on, so that each variant can be read whichever was written.
        let (family, v4, v6) = unsafe { (self.family, self.v4, self.v6) };
        match c_int::from(family) {
            libc::AF_INET => {
                let ip = address_v4(v4.sin_addr);
                Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                let flow = u32::from_be(v6.sin6_flowinfo);
                let port = u16::from_be(v6.sin6_port);
                Some(SocketAddrV6::new(ip, port, flow, v6.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// Control messages of one outgoing datagram or super-datagram.
#[repr(C, align(8))]
pub(super) struct SendControl {
    bytes: [u8; SEND_CONTROL],
    used: usize,
}

/// UDP_SEGMENT, the traffic class, the hop limit, and the larger of the two packet infos.
const SEND_CONTROL: usize = space::<u16>() + 2 * space::<c_int>() + space::<in6_pktinfo>();

impl SendControl {
    #[inline]
    pub(super) fn new() -> Self {
        SendControl {
            bytes: [0; SEND_CONTROL],
            used: 0,
        }
    }

    /// Returns start and length for the kernel; no start if it is empty.
    #[inline]
    pub(super) fn raw(&mut self) -> (*mut libc::c_void, usize) {
        match self.used {
            0 => (std::ptr::null_mut(), 0),
            used => (self.bytes.as_mut_ptr().cast(), used),
        }
    }

    #[inline]
    pub(super) fn push_segment_size(&mut self, size: u16) {
        self.push(libc::SOL_UDP, libc::UDP_SEGMENT, size);
    }

    #[inline]
    pub(super) fn push_traffic_class(&mut self, destination: &SocketAddr, class: u8) {
        match destination {
            SocketAddr::V4(_) => self.push(libc::IPPROTO_IP, libc::IP_TOS, c_int::from(class)),
            SocketAddr::V6(_) => {
                self.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, c_int::from(class))
            }
        }
    }

    #[inline]
    pub(super) fn push_hop_limit(&mut self, destination: &SocketAddr, hops: NonZeroU8) {
        let hops = c_int::from(hops.get());
        match destination {
            SocketAddr::V4(_) => self.push(libc::IPPROTO_IP, libc::IP_TTL, hops),
            SocketAddr::V6(_) => self.push(libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, hops),
        }
    }

    #[inline]
    pub(super) fn push_source(&mut self, source: IpAddr) {
        match source {
            IpAddr::V4(source) => {
                let ipi_addr = raw_v4(Ipv4Addr::UNSPECIFIED);
                let info = in_pktinfo {
                    ipi_ifindex: 0,
                    ipi_spec_dst: raw_v4(source),
                    ipi_addr,
                };
                self.push(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
            }
            IpAddr::V6(source) => {
                let info = in6_pktinfo {
                    ipi6_addr: raw_v6(source),
                    ipi6_ifindex: 0,
                };
                self.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
            }
        }
    }

    #[inline]
    fn push<T: Copy>(&mut self, level: c_int, kind: c_int, value: T) {
        let end = self.used + space::<T>();
        let space = &mut self.bytes[self.used..end];
        // SAFETY: cmsghdr is integers, for which zero bytes are valid.
        let mut header: cmsghdr = unsafe { mem::zeroed() };
        header.cmsg_len = (data_offset() + size_of::<T>()) as _;
        header.cmsg_level = level;
        header.cmsg_type = kind;
        // SAFETY: `space` has CMSG_SPACE(size of T) bytes, of which the header takes the first, and
        // the value those behind the header's padding; unaligned writes need no alignment.
        unsafe {
            space.as_mut_ptr().cast::<cmsghdr>().write_unaligned(header);
            space
                .as_mut_ptr()
                .add(data_offset())
                .cast::<T>()
                .write_unaligned(value);
        }
        self.used = end;
    }
}

/// Space for the control messages of one received buffer: UDP_GRO, traffic class, packet info and
/// SO_RXQ_OVFL, and the same again for messages of socket options that an administrator sets.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct ReceiveControl(pub(super) [u8; RECEIVE_CONTROL]);

/// Bytes of [`ReceiveControl`].
pub(super) const RECEIVE_CONTROL: usize =
    2 * (space::<c_int>() + space::<c_int>() + space::<in6_pktinfo>() + space::<u32>());

/// The control messages of one received buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Received {
    pub(super) segment_size: Option<usize>,
    pub(super) traffic_class: u8,
    pub(super) destination: Option<IpAddr>,
    pub(super) interface: u32,
    pub(super) drops: Option<u32>,
}

impl Received {
    /// Reads the control messages of `header`.
    ///
    /// # Safety
    /// `header` must be as recvmsg(2) left it: `msg_control` points to `msg_controllen` bytes,
    /// aligned for cmsghdr, that nobody writes during the call.
    #[inline]
    pub(super) unsafe fn parse(header: &msghdr) -> Received {
        let mut received = Received::default();
        // SAFETY: the caller vouches for the control buffer; null ends the loop.
        let mut message = unsafe { libc::CMSG_FIRSTHDR(header) };
        while !message.is_null() {
            // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR give only headers inside the buffer.
            let head = unsafe { message.read() };
            // SAFETY: as above; the data follow the header.
            let data = unsafe { libc::CMSG_DATA(message) };
            let length = (head.cmsg_len as usize).saturating_sub(data_offset());
            // SAFETY: the kernel wrote `length` bytes of data at `data`.
            unsafe { received.take(head.cmsg_level, head.cmsg_type, data, length) };
            // SAFETY: `message` lies in the control buffer of `header`.
            message = unsafe { libc::CMSG_NXTHDR(header, message) };
        }
        received
    }

    /// Processes one message. Unknown and short messages are ignored.
    ///
    /// # Safety
    /// `length` bytes at `data` are readable.
    #[inline]
    unsafe fn take(&mut self, level: c_int, kind: c_int, data: *const u8, length: usize) {
        // SAFETY: the caller vouches for `length` bytes at `data`, here and in each arm below.
        let bytes = unsafe { std::slice::from_raw_parts(data, length) };
        match (level, kind) {
            (libc::SOL_UDP, libc::UDP_GRO) => {
                let size = first(bytes).map(c_int::from_ne_bytes);
                self.segment_size = size.and_then(|size| usize::try_from(size).ok());
            }
            // One byte for IPv4, an int for IPv6 (ip_cmsg_recv_tos, ip6_datagram_recv_common_ctl).
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                self.traffic_class = bytes.first().copied().unwrap_or(0);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                self.traffic_class =
                    first(bytes).map_or(0, |class| c_int::from_ne_bytes(class) as u8);
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                let address = bytes
                    .get(offset_of!(in_pktinfo, ipi_addr)..)
                    .and_then(first::<4>);
                self.destination = address.map(IpAddr::from);
                self.interface = first(bytes).map_or(0, u32::from_ne_bytes);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                self.destination = first::<16>(bytes).map(IpAddr::from);
                let index = bytes
                    .get(offset_of!(in6_pktinfo, ipi6_ifindex)..)
                    .and_then(first);
                self.interface = index.map_or(0, u32::from_ne_bytes);
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                self.drops = first(bytes).map(u32::from_ne_bytes);
            }
            _ => {}
        }
    }
}

/// setsockopt(2) with an int, for options that `nix` does not have.
pub(super) fn set_int(
    fd: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: c_int,
) -> nix::Result<()> {
    let length = size_of::<c_int>() as socklen_t;
    let value = (&raw const value).cast();
    // SAFETY: `value` points to `length` bytes that outlive the call.
    let outcome = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value, length) };
    Errno::result(outcome).map(drop)
}

/// Returns the current drop counter of the socket, without waiting for a datagram that carries it:
/// SO_MEMINFO (`SK_MEMINFO_DROPS` of `linux/sock_diag.h`), Linux 4.12.
pub(super) fn queue_drops(fd: BorrowedFd<'_>) -> nix::Result<u32> {
    const SK_MEMINFO_DROPS: usize = 8;
    let mut info = [0u32; SK_MEMINFO_DROPS + 1];
    let mut length = size_of_val(&info) as socklen_t;
    // SAFETY: `info` has `length` bytes, and both outlive the call.
    let outcome = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    Errno::result(outcome)?;
    if length as usize == size_of_val(&info) {
        Ok(info[SK_MEMINFO_DROPS])
    } else {
        Err(Errno::ENOPROTOOPT)
    }
}

/// CMSG_SPACE of a `T`.
const fn space<T>() -> usize {
    // SAFETY: plain arithmetic.
    unsafe { libc::CMSG_SPACE(size_of::<T>() as libc::c_uint) as usize }
}

/// Offset of the data in a control message.
const fn data_offset() -> usize {
    // SAFETY: plain arithmetic.
    unsafe { libc::CMSG_LEN(0) as usize }
}

fn first<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
    bytes.first_chunk().copied()
}

fn raw_v4(address: Ipv4Addr) -> libc::in_addr {
    libc::in_addr {
        s_addr: u32::from(address).to_be(),
    }
}

fn address_v4(raw: libc::in_addr) -> Ipv4Addr {
    Ipv4Addr::from(u32::from_be(raw.s_addr))
}

fn raw_v6(address: Ipv6Addr) -> libc::in6_addr {
    libc::in6_addr {
        s6_addr: address.octets(),
    }
}
