//! Decrypted packets for the TUN device, merged so that one write carries many.
//!
//! Packets stay where they were decrypted, in the receive arena. A [`Write`] is a virtio-net
//! header, sometimes a rewritten packet header, and pieces of the arena. Three kinds are merged:
//! slices of one native super-packet ([`Inbox::slice`]), consecutive TCP segments of one flow, and
//! equal-sized UDP datagrams of one flow ([`Inbox::packet`]). The rules are those of the kernel's
//! `tcp_gro_receive` and `udp_gro_receive`.
//!
//! Order within a flow never changes: a packet joins the newest write of its flow or starts a new
//! one after it. The one exception is a bare ACK, which does not close its flow's write. Later data
//! may overtake it, because acknowledgement is cumulative.

use crate::indices::PeerId;
use crate::segment::{self, SegmentPosition, Transport};
use seikan_wire::ip::{self, IpPacket, PROTO_TCP, PROTO_UDP};
use seikan_wire::{GsoType, VNET_HDR_LEN, VnetHdr, checksum, tcp, udp};
use std::io::IoSlice;
use std::ops::Range;

/// Maximum number of pieces in one write: the limit of `UDP_MAX_SEGMENTS`, and enough slices for 64
/// KiB.
pub const MAX_PIECES: usize = 64;
/// Maximum length of the headers of a merged packet: IPv6 or IPv4 with options, TCP with options.
pub const MAX_HEADER: usize = 128;
/// Number of newest writes that are searched for a packet's flow.
const SEARCH: usize = 16;
/// Number of writes whose memory is kept between batches.
const KEPT: usize = 1024;
/// Maximum length of an IP packet.
const MAX_PACKET: usize = 65_535;

/// The identity of a flow; merging compares the other fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flow {
    ip: IpPacket,
    peer: PeerId,
    ports: [u8; 4],
}

impl Flow {
    fn same(&self, other: &Flow) -> bool {
        self.ports == other.ports
            && self.peer == other.peer
            && self.ip.protocol == other.ip.protocol
            && self.ip.src == other.ip.src
            && self.ip.dst == other.ip.dst
    }
}

/// How a write may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growth {
    /// The write does not grow. It is kept only for its flow.
    Closed,
    /// The write grows by segments or datagrams of `flow`.
    Segments(Transport),
    /// The write grows by the slice of super-packet `id` that starts at `next`, unless the
    /// super-packet has `ended` there.
    Slices { id: u16, next: usize, ended: bool },
}

/// One packet or super-packet for the TUN device.
#[derive(Debug)]
pub struct Write {
    /// The sending peer.
    pub peer: PeerId,
    /// Number of packets in it.
    pub packets: u64,
    /// Bytes of these packets.
    pub bytes: u64,
    flow: Option<Flow>,
    growth: Growth,
    partial: bool,
    /// Length of the Ethernet header; 0 in IP mode.
    ip_at: usize,
    /// Length of all headers.
    header_len: usize,
    gso_size: usize,
    /// Offset of the first byte in the payload of the super-packet (slices).
    offset: usize,
    ecn: bool,
    payload: usize,
    push: bool,
    pieces: Vec<Range<usize>>,
    owned: Vec<u8>,
    head: [u8; VNET_HDR_LEN + MAX_HEADER],
    head_len: usize,
}

impl Write {
    fn empty() -> Write {
        Write {
            peer: PeerId(0),
            packets: 0,
            bytes: 0,
            flow: None,
            growth: Growth::Closed,
            partial: false,
            ip_at: 0,
            header_len: 0,
            gso_size: 0,
            offset: 0,
            ecn: false,
            payload: 0,
            push: false,
            pieces: Vec::new(),
            owned: Vec::new(),
            head: [0; VNET_HDR_LEN + MAX_HEADER],
            head_len: VNET_HDR_LEN,
        }
    }

    /// The virtio-net header, and the packet from its first byte on: all headers of a merged
    /// packet, or the whole of any other. `arena` must be that of the call that created the write.
    pub fn headers_mut<'a>(&'a mut self, arena: &'a mut [u8]) -> (VnetHdr, &'a mut [u8]) {
        let vnet = VnetHdr::read(&self.head).unwrap_or_default();
        let packet = if self.head_len > VNET_HDR_LEN {
            &mut self.head[VNET_HDR_LEN..self.head_len]
        } else if !self.owned.is_empty() {
            &mut self.owned[..]
        } else {
            &mut arena[self.pieces[0].clone()]
        };
        (vnet, packet)
    }

    /// The parts to hand to one vectored write, first to last; returns how many there are.
    pub fn parts<'a>(
        &'a self,
        arena: &'a [u8],
        parts: &mut [IoSlice<'a>; MAX_PIECES + 2],
    ) -> usize {
        parts[0] = IoSlice::new(&self.head[..self.head_len]);
        let mut n = 1;
        if !self.owned.is_empty() {
            parts[n] = IoSlice::new(&self.owned);
            n += 1;
        }
        for piece in &self.pieces {
            parts[n] = IoSlice::new(&arena[piece.clone()]);
            n += 1;
        }
        n
    }
}

/// A packet in the arena, parsed and checked.
#[derive(Clone, Debug)]
pub struct Packet {
    /// Its position, with the Ethernet header if there is one.
    pub range: Range<usize>,
    /// Offset of the IP header in it: 0, or the length of the Ethernet header.
    pub ip_at: usize,
    /// Its IP header.
    pub ip: IpPacket,
    /// Its transport checksum covers the pseudo-header only.
    pub partial: bool,
}

/// A slice of a native TCP super-packet, parsed and checked.
#[derive(Clone, Debug)]
pub struct Slice {
    /// Number of the super-packet, chosen by the peer.
    pub id: u16,
    /// Payload bytes before this slice.
    pub offset: usize,
    /// The super-packet ends with this slice.
    pub ends: bool,
    /// Payload bytes per segment.
    pub gso_size: usize,
    /// The super-packet has CWR set (`VIRTIO_NET_HDR_GSO_ECN`).
    pub ecn: bool,
    /// Offset of the IP header in `header`: 0, or the length of the Ethernet header.
    pub ip_at: usize,
    /// The inner packet's header, as parsed from this slice.
    pub ip: IpPacket,
    /// Position in the arena of all headers, up to the TCP header.
    pub header: Range<usize>,
    /// Position of the payload in the arena.
    pub chunk: Range<usize>,
}

impl Slice {
    /// Segments of the super-packet whose last byte is in this slice. Over all slices they add up
    /// to the segments of the whole.
    pub fn segments(&self) -> u64 {
        let end = self.offset + self.chunk.len();
        let tail = self.ends && !end.is_multiple_of(self.gso_size);
        (end / self.gso_size - self.offset / self.gso_size + usize::from(tail)) as u64
    }
}

/// The batch of writes.
#[derive(Debug, Default)]
pub struct Inbox {
    /// Kept between batches to avoid allocations; the first `live` are in use.
    writes: Vec<Write>,
    live: usize,
    /// Writes before this one have their headers and are complete.
    finished: usize,
    udp_gso: bool,
    tcp_gso: bool,
}

impl Inbox {
    /// Creates an empty batch. TCP and UDP super-packets are built only if the device accepts them.
    pub fn new(tcp_gso: bool, udp_gso: bool) -> Inbox {
        Inbox {
            writes: Vec::new(),
            live: 0,
            finished: 0,
            tcp_gso,
            udp_gso,
        }
    }

    /// Adds a packet of the arena.
    pub fn packet(&mut self, arena: &[u8], packet: &Packet, peer: PeerId) {
        let Packet {
            ref range,
            ip_at,
            ref ip,
            partial,
        } = *packet;
        let range = range.start..range.start + ip_at + ip.total_len;
        let bytes = &arena[range.clone()];
        let Some((flow, kind, header_len)) = flow_of(bytes, ip_at, ip, peer) else {
            return self.single(range, packet, peer, None);
        };
        let transport = &bytes[ip_at + ip.header_len..];
        let payload = bytes.len() - header_len;
        let mergeable = payload > 0
            && !ip.extended
            && match kind {
                Transport::Tcp => {
                    self.tcp_gso && tcp::flags(transport) & !(tcp::PSH | tcp::ACK) == 0
                }
                Transport::Udp => self.udp_gso,
            }
            && (partial || checksum_ok(transport, ip, kind));
        if !mergeable {
            // A bare ACK leaves its flow's write open, see the module documentation.
            let bare_ack =
                kind == Transport::Tcp && payload == 0 && tcp::flags(transport) == tcp::ACK;
            return self.single(range, packet, peer, (!bare_ack).then_some(flow));
        }
        if let Some(write) = self.newest_of(&flow)
            && write.growth == Growth::Segments(kind)
            && write.partial == partial
            && write.ip_at == ip_at
            && write.accepts(arena, bytes, kind, header_len)
        {
            let push = kind == Transport::Tcp && tcp::flags(transport) & tcp::PSH != 0;
            write.push |= push;
            if push || payload < write.gso_size {
                write.growth = Growth::Closed;
            }
            write.payload += payload;
            write.packets += 1;
            write.bytes += bytes.len() as u64;
            write.pieces.push(range.start + header_len..range.end);
            return;
        }
        let push = kind == Transport::Tcp && tcp::flags(transport) & tcp::PSH != 0;
        let write = self.open(peer, 1, bytes.len() as u64);
        write.flow = Some(flow);
        write.growth = if push {
            Growth::Closed
        } else {
            Growth::Segments(kind)
        };
        write.partial = partial;
        write.ip_at = ip_at;
        write.header_len = header_len;
        write.gso_size = payload;
        write.payload = payload;
        write.set_plain_head(ip);
        write.pieces.push(range);
    }

    /// Adds a slice, merging it into the newest write if it continues there.
    pub fn slice(&mut self, arena: &[u8], slice: &Slice, peer: PeerId) {
        let length = slice.chunk.len();
        if let Some(write) = self.writes[self.finished..self.live].last_mut()
            && write.growth == (Growth::Slices { id: slice.id, next: slice.offset, ended: false })
            && write.peer == peer
            && write.pieces.len() < MAX_PIECES
            && write.header_len == slice.header.len()
            // ECN marks may differ between slices: congestion on the path (RFC 6040).
            && ip::traffic_class(&write.head[VNET_HDR_LEN + write.ip_at..])
                == ip::traffic_class(&arena[slice.header.start + slice.ip_at..slice.header.end])
        {
            write.growth = Growth::Slices {
                id: slice.id,
                next: slice.offset + length,
                ended: slice.ends,
            };
            write.payload += length;
            write.packets += slice.segments();
            write.pieces.push(slice.chunk.clone());
            return;
        }
        let transport = slice.header.start + slice.ip_at + slice.ip.header_len;
        let ports = arena[transport..].first_chunk();
        let write = self.open(peer, slice.segments(), 0);
        write.flow = Some(Flow {
            ip: slice.ip,
            peer,
            ports: ports.copied().unwrap_or_default(),
        });
        write.growth = Growth::Slices {
            id: slice.id,
            next: slice.offset + length,
            ended: slice.ends,
        };
        write.ip_at = slice.ip_at;
        write.header_len = slice.header.len();
        write.gso_size = slice.gso_size;
        write.offset = slice.offset;
        write.ecn = slice.ecn;
        write.partial = true;
        write.payload = length;
        write.head[VNET_HDR_LEN..VNET_HDR_LEN + slice.header.len()]
            .copy_from_slice(&arena[slice.header.clone()]);
        write.pieces.push(slice.chunk.clone());
    }

    /// Adds a packet outside the arena: an ICMP error or a reassembled packet. Its IP header is at
    /// `ip_at`.
    pub fn owned(
        &mut self,
        packet: Vec<u8>,
        ip_at: usize,
        ip: &IpPacket,
        peer: PeerId,
        partial: bool,
    ) {
        let flow = flow_of(&packet, ip_at, ip, peer).map(|(flow, _, _)| flow);
        let write = self.open(peer, 1, packet.len() as u64);
        // Later packets of its flow must not join an earlier write.
        write.flow = flow;
        write.owned = packet;
        write.partial = partial;
        write.ip_at = ip_at;
        write.set_plain_head(ip);
    }

    /// Adds a frame of the arena that carries no IP.
    pub fn frame(&mut self, range: Range<usize>, peer: PeerId) {
        let write = self.open(peer, 1, range.len() as u64);
        write.pieces.push(range);
    }

    /// The same for a reassembled frame.
    pub fn owned_frame(&mut self, frame: Vec<u8>, peer: PeerId) {
        let write = self.open(peer, 1, frame.len() as u64);
        write.owned = frame;
    }

    /// Builds the headers of merged packets; call before [`Self::writes`].
    pub fn finish(&mut self, arena: &[u8]) {
        for write in &mut self.writes[self.finished..self.live] {
            match write.growth {
                Growth::Slices { ended, .. } => write.finish_slices(ended),
                _ if write.packets > 1 => write.finish_segments(arena),
                _ => {}
            }
        }
        self.finished = self.live;
    }

    /// The writes, in the order of delivery.
    pub fn writes(&self) -> &[Write] {
        &self.writes[..self.live]
    }

    /// Returns one write, for changing addresses in its headers.
    pub fn write_mut(&mut self, i: usize) -> Option<&mut Write> {
        self.writes[..self.live].get_mut(i)
    }

    /// Removes all writes. Their memory is kept for the next batch, except after a flood of tiny
    /// packets.
    pub fn clear(&mut self) {
        self.writes.truncate(KEPT);
        self.live = 0;
        self.finished = 0;
    }

    fn open(&mut self, peer: PeerId, packets: u64, bytes: u64) -> &mut Write {
        if self.live == self.writes.len() {
            self.writes.push(Write::empty());
        }
        let write = &mut self.writes[self.live];
        self.live += 1;
        write.pieces.clear();
        write.owned = Vec::new();
        write.peer = peer;
        write.packets = packets;
        write.bytes = bytes;
        write.flow = None;
        write.growth = Growth::Closed;
        write.head_len = VNET_HDR_LEN;
        write.head[..VNET_HDR_LEN].fill(0);
        write.push = false;
        write.offset = 0;
        write.ecn = false;
        write
    }

    fn single(&mut self, range: Range<usize>, packet: &Packet, peer: PeerId, flow: Option<Flow>) {
        let write = self.open(peer, 1, range.len() as u64);
        write.flow = flow;
        write.partial = packet.partial;
        write.ip_at = packet.ip_at;
        write.set_plain_head(&packet.ip);
        write.pieces.push(range);
    }

    fn newest_of(&mut self, flow: &Flow) -> Option<&mut Write> {
        let from = self.live.saturating_sub(SEARCH).max(self.finished);
        self.writes[from..self.live]
            .iter_mut()
            .rev()
            .find(|w| w.flow.as_ref().is_some_and(|f| f.same(flow)))
    }
}

impl Write {
    fn set_plain_head(&mut self, ip: &IpPacket) {
        let at = match ip.protocol {
            PROTO_TCP => tcp::CHECKSUM_AT,
            PROTO_UDP => udp::CHECKSUM_AT,
            _ => return,
        };
        if self.partial {
            let vnet = VnetHdr {
                needs_csum: true,
                csum_start: (self.ip_at + ip.header_len) as u16,
                csum_offset: at as u16,
                ..VnetHdr::default()
            };
            self.head[..VNET_HDR_LEN].copy_from_slice(&vnet.to_bytes());
        }
    }

    /// Whether `bytes` continues this write. All header fields are compared except those that must
    /// differ.
    fn accepts(&self, arena: &[u8], bytes: &[u8], kind: Transport, header_len: usize) -> bool {
        let Some(flow) = self.flow else { return false };
        let payload = bytes.len() - header_len;
        if self.pieces.len() >= MAX_PIECES
            || payload > self.gso_size
            || self.header_len != header_len
            || self.payload + payload + header_len > MAX_PACKET
        {
            return false;
        }
        let first = &arena[self.pieces[0].clone()];
        let (our_link, ours) = first[..header_len].split_at(self.ip_at);
        let (their_link, theirs) = bytes[..header_len].split_at(self.ip_at);
        let ip_len = flow.ip.header_len;
        // IPv4: version, TOS; flags and offset, TTL. IPv6: all but the length.
        let ip_same = if flow.ip.is_v6() {
            ours[..4] == theirs[..4] && ours[7] == theirs[7]
        } else {
            ours[..2] == theirs[..2] && ours[6..9] == theirs[6..9] && self.next_id(ours, theirs)
        };
        let (ours, theirs) = (&ours[ip_len..], &theirs[ip_len..]);
        ip_same
            && our_link == their_link
            && match kind {
                Transport::Udp => (udp::checksum(ours) == 0) == (udp::checksum(theirs) == 0),
                Transport::Tcp => {
                    tcp::seq(theirs) == tcp::seq(ours).wrapping_add(self.payload as u32)
                        && ours[8..13] == theirs[8..13]
                        && (ours[13] | tcp::PSH) == (theirs[13] | tcp::PSH)
                        && ours[14..16] == theirs[14..16]
                        && ours[18..] == theirs[18..]
                }
            }
    }

    /// The IPv4 identification is consecutive, or is meaningless because DF is set (RFC 6864).
    fn next_id(&self, ours: &[u8], theirs: &[u8]) -> bool {
        let id = |h: &[u8]| u16::from_be_bytes([h[4], h[5]]);
        ours[6] & 0x40 != 0 || id(theirs) == id(ours).wrapping_add(self.packets as u16)
    }

    fn finish_segments(&mut self, arena: &[u8]) {
        let Some(flow) = self.flow else { return };
        let kind = if flow.ip.protocol == PROTO_TCP {
            Transport::Tcp
        } else {
            Transport::Udp
        };
        let first = self.pieces[0].clone();
        let header = &mut self.head[VNET_HDR_LEN..VNET_HDR_LEN + self.header_len];
        header.copy_from_slice(&arena[first.start..first.start + self.header_len]);
        let length = self.header_len + self.payload - self.ip_at;
        let header = &mut header[self.ip_at..];
        segment::rewrite_header(
            header,
            &flow.ip,
            kind,
            SegmentPosition {
                offset: 0,
                index: 0,
                length,
                last: true,
            },
        );
        if self.push {
            header[flow.ip.header_len + 13] |= tcp::PSH;
        }
        self.pieces[0].start += self.header_len;
        self.set_gso_head(&flow.ip, kind);
    }

    /// Builds the headers for the contiguous slices: the whole super-packet, or a run of it.
    fn finish_slices(&mut self, to_the_end: bool) {
        let Some(flow) = self.flow else { return };
        self.bytes = (self.payload + self.packets as usize * self.header_len) as u64;
        let header = &mut self.head[VNET_HDR_LEN..VNET_HDR_LEN + self.header_len];
        let position = SegmentPosition {
            offset: self.offset,
            index: (self.offset / self.gso_size) as u16,
            length: self.header_len + self.payload - self.ip_at,
            last: to_the_end,
        };
        segment::rewrite_header(
            &mut header[self.ip_at..],
            &flow.ip,
            Transport::Tcp,
            position,
        );
        self.set_gso_head(&flow.ip, Transport::Tcp);
    }

    fn set_gso_head(&mut self, ip: &IpPacket, kind: Transport) {
        let gso = self.payload > self.gso_size;
        let vnet = VnetHdr {
            needs_csum: true,
            gso_type: match kind {
                _ if !gso => GsoType::None,
                Transport::Udp => GsoType::UdpL4,
                Transport::Tcp if ip.is_v6() => GsoType::Tcp6,
                Transport::Tcp => GsoType::Tcp4,
            },
            gso_ecn: gso && self.ecn && self.offset == 0,
            // Must be correct: the kernel sizes the linear part of its buffer by it.
            hdr_len: self.header_len as u16,
            gso_size: if gso { self.gso_size as u16 } else { 0 },
            csum_start: (self.ip_at + ip.header_len) as u16,
            csum_offset: kind.checksum_at() as u16,
        };
        self.head[..VNET_HDR_LEN].copy_from_slice(&vnet.to_bytes());
        self.head_len = VNET_HDR_LEN + self.header_len;
    }
}

/// Returns the flow of a TCP or UDP packet, the transport, and the length of all its headers;
/// `None` for everything else.
fn flow_of(
    bytes: &[u8],
    ip_at: usize,
    ip: &IpPacket,
    peer: PeerId,
) -> Option<(Flow, Transport, usize)> {
    if ip.fragment {
        return None;
    }
    let transport = &bytes[ip_at + ip.header_len..];
    let (kind, length) = match ip.protocol {
        PROTO_TCP => (Transport::Tcp, tcp::header_len(transport)?),
        PROTO_UDP
            if transport.len() >= udp::HEADER_LEN && udp::length(transport) == transport.len() =>
        {
            (Transport::Udp, udp::HEADER_LEN)
        }
        _ => return None,
    };
    let header_len = ip_at + ip.header_len + length;
    if header_len > MAX_HEADER {
        return None;
    }
    let ports = *transport.first_chunk()?;
    Some((
        Flow {
            ip: *ip,
            peer,
            ports,
        },
        kind,
        header_len,
    ))
}

/// A complete checksum is verified before merging replaces it. An absent one (UDP over IPv4, zero)
/// cannot be verified and must stay absent.
fn checksum_ok(transport: &[u8], ip: &IpPacket, kind: Transport) -> bool {
    if kind == Transport::Udp && udp::checksum(transport) == 0 {
        return false;
    }
    let pseudo = checksum::pseudo_header(ip.src, ip.dst, ip.protocol, transport.len());
    checksum::fold(pseudo + checksum::sum(transport)) == 0
}
