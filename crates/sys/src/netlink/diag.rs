//! sock_diag(7): the TCP connections and UDP sockets of a network namespace.
//!
//! [`tcp_connections`] and [`udp_sockets`] list once. A [`Diag`] keeps its socket and buffer for
//! repeated listing, and queries single connections ([`Diag::connection`]) without walking the
//! whole table. No privilege is needed.
//!
//! `struct tcp_info` (include/uapi/linux/tcp.h) grows with the kernel: [`TcpInfo`] returns `None`
//! for fields that the running kernel does not have.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NlasIterator};
use netlink_sys::{Socket, protocols::NETLINK_SOCK_DIAG};
use nix::errno::Errno;

use super::error::Fault;
use super::{BUFFER_SIZE, DUMP_TRIES, Family, HEADER_SIZE, NetlinkError, connected, converse};

/// `SOCK_DIAG_BY_FAMILY` (include/uapi/linux/sock_diag.h).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `INET_DIAG_INFO`, `INET_DIAG_CONG`, `INET_DIAG_SKMEMINFO` (include/uapi/linux/inet_diag.h).
const INFO: u16 = 2;
const CONG: u16 = 4;
const SKMEMINFO: u16 = 7;
/// `TCP_ESTABLISHED`, `TCP_FIN_WAIT1`, `TCP_FIN_WAIT2`, `TCP_CLOSE_WAIT`, `TCP_LAST_ACK`,
/// `TCP_CLOSING` (include/net/tcp_states.h): connections that may still carry data. Not
/// `TCP_TIME_WAIT`, which has no socket.
const CONNECTED: u32 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;
/// `struct inet_diag_req_v2`, `struct inet_diag_msg`.
const REQUEST_SIZE: usize = 56;
const MESSAGE_SIZE: usize = 72;
/// `struct inet_diag_sockid`: its offset in the message, and its length.
const ID: usize = 4;
const ID_SIZE: usize = 48;
/// `PACKET_SHOW_INFO`, `PACKET_DIAG_INFO`, `PDI_VNETHDR` (include/uapi/linux/packet_diag.h).
const PACKET_SHOW_INFO: u32 = 1;
const PACKET_INFO: u16 = 0;
const PACKET_VNET_HDR: u32 = 0x8;
/// `struct packet_diag_req`, `struct packet_diag_msg`; offset of the flags in `struct
/// packet_diag_info`.
const PACKET_REQUEST_SIZE: usize = 20;
const PACKET_MESSAGE_SIZE: usize = 16;
const PACKET_FLAGS: usize = 20;
/// `TCP_CA_NAME_MAX`.
const CONGESTION_MAX: usize = 16;

/// Returns every TCP connection of the calling thread's network namespace, IPv4 and IPv6.
pub fn tcp_connections() -> Result<Vec<TcpConnection>, NetlinkError> {
    let mut found = Vec::new();
    Diag::open()?.tcp(|connection| found.push(connection))?;
    Ok(found)
}

/// Returns every UDP socket of the calling thread's network namespace, IPv4 and IPv6.
pub fn udp_sockets() -> Result<Vec<UdpSocket>, NetlinkError> {
    let mut found = Vec::new();
    Diag::open()?.udp(|socket| found.push(socket))?;
    Ok(found)
}

/// A TCP connection. IPv4-mapped addresses are converted to IPv4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConnection {
    /// Local address and port.
    pub local: SocketAddr,
    /// Remote address and port.
    pub remote: SocketAddr,
    /// Inode of the socket, as in `/proc/PID/fd`; 0 if no process holds it any more.
    pub inode: u64,
    /// User id of the owner.
    pub uid: u32,
    /// The congestion control, such as `cubic`.
    pub congestion: Option<String>,
    /// Sizes of its buffers.
    pub memory: Option<SocketMemory>,
    /// Its state, as far as this kernel reports it.
    pub info: TcpInfo,
    /// Identifies the connection in [`Diag::connection`].
    pub id: SocketId,
}

/// A UDP socket. IPv4-mapped addresses are converted to IPv4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdpSocket {
    /// Local address and port; the unspecified address if it is bound to all.
    pub local: SocketAddr,
    /// Remote address and port, if it is connected.
    pub remote: Option<SocketAddr>,
    /// Inode of the socket, as in `/proc/PID/fd`; 0 if no process holds it.
    pub inode: u64,
    /// User id of the owner.
    pub uid: u32,
    /// Sizes of its buffers, and packets dropped.
    pub memory: Option<SocketMemory>,
}

/// Returns the inode of every packet socket of the calling thread's network namespace, and whether
/// it receives super-packets with a header (`PACKET_VNET_HDR`, packet(7)). A kernel without
/// `packet_diag` returns [`NetlinkError::is_not_found`].
pub fn packet_sockets() -> Result<Vec<(u64, bool)>, NetlinkError> {
    let mut found = Vec::new();
    Diag::open()?.packets(|inode, vnet_hdr| found.push((inode, vnet_hdr)))?;
    Ok(found)
}

/// Identifies a socket: family and `struct inet_diag_sockid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SocketId {
    family: u8,
    id: [u8; ID_SIZE],
}

/// The memory of a socket in bytes, with the kernel's overhead (`SK_MEMINFO_*`, include/uapi/linux/sock_diag.h).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SocketMemory {
    /// Size of the receive buffer (`SO_RCVBUF` as read back).
    pub receive_buffer: u32,
    /// Size of the send buffer (`SO_SNDBUF` as read back).
    pub send_buffer: u32,
    /// Packets dropped at the socket since its creation; `None` on kernels before 4.7.
    pub drops: Option<u32>,
}

/// `struct tcp_info`, as far as this kernel has it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    bytes: [u8; TcpInfo::SIZE],
    length: u16,
}

/// A socket for requests, with a buffer for replies. It belongs to the network namespace in which
/// it was opened.
#[derive(Debug)]
pub struct Diag {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Diag {
    /// Opens it in the calling thread's network namespace.
    pub fn open() -> Result<Self, NetlinkError> {
        let socket =
            connected(NETLINK_SOCK_DIAG).map_err(|source| NetlinkError::Open { source })?;
        Ok(Diag {
            socket,
            sequence: 0,
            buffer: vec![0; BUFFER_SIZE],
        })
    }

    /// Calls `each` for each TCP connection that is established or being closed.
    pub fn tcp(&mut self, mut each: impl FnMut(TcpConnection)) -> Result<(), NetlinkError> {
        let extensions = extension(INFO) | extension(CONG) | extension(SKMEMINFO);
        for family in [Family::V4, Family::V6] {
            let request = request(family, libc::IPPROTO_TCP, extensions, CONNECTED, None);
            self.dump(&request, &mut |payload| {
                if let Some(connection) = parse_tcp(payload) {
                    each(connection);
                }
            })
            .map_err(|fault| fault.into_error(format!("list TCP connections over {family}")))?;
        }
        Ok(())
    }

    /// Calls `each` for each UDP socket. A kernel without `udp_diag` returns
    /// [`NetlinkError::is_not_found`].
    pub fn udp(&mut self, mut each: impl FnMut(UdpSocket)) -> Result<(), NetlinkError> {
        for family in [Family::V4, Family::V6] {
            let request = request(family, libc::IPPROTO_UDP, extension(SKMEMINFO), !0, None);
            self.dump(&request, &mut |payload| {
                if let Some(socket) = parse_udp(payload) {
                    each(socket);
                }
            })
            .map_err(|fault| fault.into_error(format!("list UDP sockets over {family}")))?;
        }
        Ok(())
    }

    fn packets(&mut self, mut each: impl FnMut(u64, bool)) -> Result<(), NetlinkError> {
        let mut request = [0; PACKET_REQUEST_SIZE];
        request[0] = libc::AF_PACKET as u8;
        request[8..12].copy_from_slice(&PACKET_SHOW_INFO.to_ne_bytes());
        self.dump(&request, &mut |payload| {
            if let Some((inode, vnet_hdr)) = parse_packet(payload) {
                each(inode, vnet_hdr);
            }
        })
        .map_err(|fault| fault.into_error("list packet sockets".into()))
    }

    /// Returns the current state of a known TCP connection; `None` if it no longer exists.
    pub fn connection(&mut self, id: &SocketId) -> Result<Option<TcpConnection>, NetlinkError> {
        let extensions = extension(INFO) | extension(CONG) | extension(SKMEMINFO);
        let family = match i32::from(id.family) {
            libc::AF_INET => Family::V4,
            _ => Family::V6,
        };
        let request = request(family, libc::IPPROTO_TCP, extensions, CONNECTED, Some(id));
        let mut found = None;
        let outcome = self.converse(&request, NLM_F_ACK, &mut |payload| {
            found = parse_tcp(payload);
        });
        match outcome.map_err(|fault| fault.into_error("look up a TCP connection".into())) {
            Ok(()) => Ok(found),
            Err(error) if error.is_not_found() => Ok(None),
            // Another connection has these addresses now.
            Err(NetlinkError::Refused {
                errno: Errno::ESTALE,
                ..
            }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn dump(&mut self, request: &[u8], each: &mut dyn FnMut(&[u8])) -> Result<(), Fault> {
        let mut given = 0;
        for _ in 0..DUMP_TRIES {
            let mut seen = 0;
            let outcome = self.converse(request, NLM_F_DUMP, &mut |payload| {
                seen += 1;
                if seen > given {
                    each(payload);
                }
            });
            match outcome {
                Err(Fault::Interrupted) => given = given.max(seen),
                other => return other,
            }
        }
        Err(Fault::Interrupted)
    }

    fn converse(
        &mut self,
        request: &[u8],
        flags: u16,
        each: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Fault> {
        self.sequence = self.sequence.wrapping_add(1).max(1);
        let mut message = Vec::with_capacity(HEADER_SIZE + REQUEST_SIZE);
        let length = (HEADER_SIZE + request.len()) as u32;
        message.extend(length.to_ne_bytes());
        message.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        message.extend((NLM_F_REQUEST | flags).to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend([0; 4]);
        message.extend(request);
        let mut reply = |kind, payload: &[u8]| {
            if kind == SOCK_DIAG_BY_FAMILY {
                each(payload);
            }
        };
        converse(
            &self.socket,
            &message,
            self.sequence,
            &mut self.buffer,
            &mut reply,
        )
    }
}

/// The bit that requests an attribute.
fn extension(attribute: u16) -> u8 {
    1 << (attribute - 1)
}

/// `struct inet_diag_req_v2`.
fn request(
    family: Family,
    protocol: i32,
    extensions: u8,
    states: u32,
    id: Option<&SocketId>,
) -> [u8; REQUEST_SIZE] {
    let mut request = [0; REQUEST_SIZE];
    request[0] = match family {
        Family::V4 => libc::AF_INET as u8,
        Family::V6 => libc::AF_INET6 as u8,
    };
    request[1] = protocol as u8;
    request[2] = extensions;
    request[4..8].copy_from_slice(&states.to_ne_bytes());
    if let Some(id) = id {
        request[8..].copy_from_slice(&id.id);
    }
    request
}

/// The fields of every `struct inet_diag_msg`.
struct Message {
    id: SocketId,
    local: SocketAddr,
    remote: SocketAddr,
    uid: u32,
    inode: u64,
}

impl Message {
    fn parse(payload: &[u8]) -> Option<Self> {
        let bytes = payload.first_chunk::<MESSAGE_SIZE>()?;
        let family = bytes[0];
        let id: [u8; ID_SIZE] = bytes[ID..ID + ID_SIZE].try_into().ok()?;
        let address = |at: usize| -> Option<IpAddr> {
            let octets = *id[at..].first_chunk::<16>()?;
            match i32::from(family) {
                libc::AF_INET => Some(Ipv4Addr::from(*octets.first_chunk::<4>()?).into()),
                libc::AF_INET6 => Some(IpAddr::from(Ipv6Addr::from(octets)).to_canonical()),
                _ => None,
            }
        };
        let port = |at: usize| u16::from_be_bytes([id[at], id[at + 1]]);
        Some(Message {
            local: SocketAddr::new(address(4)?, port(0)),
            remote: SocketAddr::new(address(20)?, port(2)),
            uid: u32_at(bytes, 64)?,
            inode: u32_at(bytes, 68)?.into(),
            id: SocketId { family, id },
        })
    }
}

fn parse_tcp(payload: &[u8]) -> Option<TcpConnection> {
    let message = Message::parse(payload)?;
    let mut connection = TcpConnection {
        local: message.local,
        remote: message.remote,
        inode: message.inode,
        uid: message.uid,
        congestion: None,
        memory: None,
        info: TcpInfo::default(),
        id: message.id,
    };
    for nla in NlasIterator::new(&payload[MESSAGE_SIZE..]).map_while(Result::ok) {
        match nla.kind() {
            INFO => connection.info = TcpInfo::new(nla.value()),
            CONG => connection.congestion = parse_congestion(nla.value()),
            SKMEMINFO => connection.memory = SocketMemory::parse(nla.value()),
            _ => {}
        }
    }
    Some(connection)
}

fn parse_udp(payload: &[u8]) -> Option<UdpSocket> {
    let message = Message::parse(payload)?;
    let mut attributes = NlasIterator::new(&payload[MESSAGE_SIZE..]).map_while(Result::ok);
    let memory = attributes.find(|nla| nla.kind() == SKMEMINFO);
    let connected = message.remote.port() != 0;
    Some(UdpSocket {
        local: message.local,
        remote: connected.then_some(message.remote),
        inode: message.inode,
        uid: message.uid,
        memory: memory.and_then(|nla| SocketMemory::parse(nla.value())),
    })
}

fn parse_packet(payload: &[u8]) -> Option<(u64, bool)> {
    let bytes = payload.first_chunk::<PACKET_MESSAGE_SIZE>()?;
    let inode = u32_at(bytes, 4)?;
    let attributes = NlasIterator::new(&payload[PACKET_MESSAGE_SIZE..]);
    let mut attributes = attributes.map_while(Result::ok);
    let info = attributes.find(|nla| nla.kind() == PACKET_INFO)?;
    let flags = u32_at(info.value(), PACKET_FLAGS)?;
    Some((inode.into(), flags & PACKET_VNET_HDR != 0))
}

fn parse_congestion(value: &[u8]) -> Option<String> {
    let name = value.split(|byte| *byte == 0).next()?;
    let name = std::str::from_utf8(name).ok()?;
    (!name.is_empty() && name.len() < CONGESTION_MAX).then(|| name.to_owned())
}

impl SocketMemory {
    fn parse(value: &[u8]) -> Option<Self> {
        Some(SocketMemory {
            receive_buffer: u32_at(value, 4)?,
            send_buffer: u32_at(value, 12)?,
            drops: u32_at(value, 32),
        })
    }
}

macro_rules! tcp_info {
    ($($(#[$doc:meta])* $name:ident: $kind:ident at $offset:literal;)*) => {
        impl TcpInfo {
            $($(#[$doc])* pub fn $name(&self) -> Option<$kind> {
                const SIZE: usize = size_of::<$kind>();
                let bytes = self.known().get($offset..)?.first_chunk::<SIZE>()?;
                Some($kind::from_ne_bytes(*bytes))
            })*
        }
    };
}

// Offsets in struct tcp_info (include/uapi/linux/tcp.h); fields are only ever added at its end.
tcp_info! {
    /// Segment size towards the remote end, in bytes.
    snd_mss: u32 at 16;
    /// Segments in flight.
    unacked: u32 at 24;
    /// Path MTU in bytes.
    pmtu: u32 at 60;
    /// Smoothed round-trip time in microseconds.
    rtt: u32 at 68;
    /// Congestion window in segments.
    snd_cwnd: u32 at 80;
    /// Segments retransmitted since the start.
    total_retrans: u32 at 100;
    /// Bytes acknowledged by the remote end since the start.
    bytes_acked: u64 at 120;
    /// Bytes received since the start.
    bytes_received: u64 at 128;
    /// Segments sent since the start.
    segs_out: u32 at 136;
    /// Segments received since the start.
    segs_in: u32 at 140;
    /// Bytes written by the application and not sent yet.
    notsent_bytes: u32 at 144;
    /// Minimum recent round-trip time in microseconds; `u32::MAX` if there is none yet.
    min_rtt: u32 at 148;
    /// Recent delivery rate in bytes per second.
    delivery_rate: u64 at 160;
    /// Time with data to send, in microseconds.
    busy_time: u64 at 168;
    /// The part of it limited by the receiver's window.
    rwnd_limited: u64 at 176;
    /// The part of it limited by the send buffer.
    sndbuf_limited: u64 at 184;
    /// Bytes sent, including retransmissions.
    bytes_sent: u64 at 200;
    /// Duplicates reported by the receiver (DSACK, RFC 2883).
    dsack_dups: u32 at 216;
    /// Number of detected reorderings.
    reord_seen: u32 at 220;
    /// Window offered by the remote end, in bytes.
    snd_wnd: u32 at 228;
    /// Retransmission timeouts since the start.
    total_rto: u16 at 240;
}

impl TcpInfo {
    /// `struct tcp_info` of Linux 6.7, the longest one that has a field used here.
    const SIZE: usize = 248;

    /// Copies the kernel's bytes. Bytes after the known fields are ignored.
    fn new(value: &[u8]) -> Self {
        let mut info = TcpInfo::default();
        let length = value.len().min(TcpInfo::SIZE);
        info.bytes[..length].copy_from_slice(&value[..length]);
        info.length = length as u16;
        info
    }

    fn known(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// Whether the application limited [`Self::delivery_rate`]; `None` on kernels before 4.9, which
    /// have neither.
    pub fn delivery_rate_app_limited(&self) -> Option<bool> {
        self.delivery_rate()?;
        // The first bit of a bit field is the lowest on little-endian machines and the highest on others.
        let bit = if cfg!(target_endian = "little") {
            0x01
        } else {
            0x80
        };
        Some(self.bytes[7] & bit != 0)
    }
}

impl Default for TcpInfo {
    fn default() -> Self {
        TcpInfo {
            bytes: [0; TcpInfo::SIZE],
            length: 0,
        }
    }
}

impl std::fmt::Debug for TcpInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("TcpInfo");
        shown.field("length", &self.length);
        shown.field("rtt", &self.rtt());
        shown.field("snd_cwnd", &self.snd_cwnd());
        shown.field("bytes_acked", &self.bytes_acked());
        shown.finish_non_exhaustive()
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk::<4>()?;
    Some(u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
#[path = "diag/tests.rs"]
mod tests;
