//! The plaintext of a native record: a stamp, then frames.
//!
//! The stamp is the record's position in its GSO batch (`u8`) and the fraction of the second at
//! which it was sealed (`u16` in 1/65536 s). A record without frames is a keepalive.
//!
//! Every frame starts with a byte: kind in the low four bits, flags in the high four. All kinds
//! except padding continue with a `u16` length of the rest. Integers are little endian.
//!
//! ```text
//! PADDING   0x00, to the end of the record
//! PACKET    kind 1 | length | packet                                      flags PARTIAL, DF, LAST
//! SLICE     kind 2 | length | id u16 | offset u16 | gso u16 | headers up to TCP | chunk
//!                                                                         flags END, ECN, DF, LAST
//! FRAGMENT  kind 3 | length | id u16 | offset u16 | total u16 | chunk     flag PARTIAL
//! HEALTH    kind 4 | length | see native/health.rs
//! PROBE     kind 5 | length | id u16, then padding up to the probed size
//! PROBE_ACK kind 6 | length | id u16 | size u16
//! PORTS     kind 7 | length | ports u16 | addresses of 16 bytes, IPv4 as IPv4-mapped
//! PARITY    kind 8, alone in its record: see native/repair/parity.rs
//! ```
//!
//! A PACKET or SLICE with the flag LAST has no length: it extends to the end of the record, and its
//! headers are [folded](crate::native::fold).
//!
//! A packet is an IP packet or, in [Ethernet mode](crate::mode), an Ethernet frame.
//!
//! Unknown kinds are skipped by their length, so new kinds need no new version.
//!
//! Work and output are bounded by the bytes received. A chunk that is not the last of its packet,
//! and a segment of a super-packet, has at least [`MIN_CHUNK`] bytes. A record has at most one each
//! of HEALTH, PROBE, PROBE_ACK and PORTS.

use crate::inbox::{MAX_HEADER, Packet, Slice};
use crate::mode::Carried;
use crate::native::fold::{self, Fold};
use crate::native::health::Report;
use crate::native::probe_request::ProbeRequest;
use seikan_observe::DropReason;
use seikan_wire::ip::{self, IpPacket, PROTO_TCP, PROTO_UDP};
use seikan_wire::{tcp, udp};
use std::marker::PhantomData;
use std::ops::Range;

/// Bytes before the packet in a PACKET.
pub const PACKET_OVERHEAD: usize = 3;
/// Bytes before the headers in a SLICE.
pub const SLICE_OVERHEAD: usize = 3 + 6;
/// Number of bytes by which the flag LAST makes a PACKET or SLICE shorter, besides the bytes left
/// out of its headers.
pub const LAST_SAVES: usize = 2;
/// Bytes before the chunk in a FRAGMENT.
pub const FRAGMENT_OVERHEAD: usize = 3 + 6;
/// Bytes of a PROBE before its padding.
pub const PROBE_LEN: usize = 3 + 2;
/// Bytes of a PROBE_ACK.
pub const PROBE_ACK_LEN: usize = 3 + 4;

/// Minimum payload of a fragment or slice that is not the last of its packet, and minimum segment
/// size of a super-packet. Smaller ones would turn one datagram into hundreds of pieces to
/// reassemble, or of packets on the next link. Even a path of 576 bytes can carry such a chunk.
/// Super-packets of smaller segments are sent as one PACKET each.
pub const MIN_CHUNK: usize = 256;

/// Bytes between the length and the headers in a SLICE.
const SLICE_FIELDS: usize = 6;

const PADDING: u8 = 0;
const PACKET: u8 = 1;
const SLICE: u8 = 2;
const FRAGMENT: u8 = 3;
const HEALTH: u8 = 4;
/// The kind of a probe, the only frame of its record.
pub(crate) const PROBE: u8 = 5;
const PROBE_ACK: u8 = 6;
const PORTS: u8 = 7;
/// The transport checksum covers the pseudo-header only (PACKET, FRAGMENT).
const FLAG_PARTIAL: u8 = 0x10;
/// The chunk ends where the super-packet ends (SLICE).
const FLAG_END: u8 = 0x10;
/// The super-packet has CWR set (SLICE).
const FLAG_ECN: u8 = 0x20;
/// The flags and the fragment offset of the IPv4 header are folded: DF (PACKET, SLICE with LAST).
const FLAG_DF: u8 = 0x40;
/// Flag of a PACKET or SLICE that is the last frame of its record: it has no length, and its
/// headers are folded.
const FLAG_LAST: u8 = 0x80;

/// A parsed frame. Ranges are positions in the arena.
#[derive(Clone, Debug)]
pub enum Frame {
    /// A whole IP packet, with its Ethernet header if there is one.
    Packet(Packet),
    /// A whole Ethernet frame that carries no IP.
    NotIp {
        /// Its position.
        range: Range<usize>,
    },
    /// A slice of a TCP super-packet.
    Slice(Slice),
    /// A part of a packet that is too large for a record.
    Fragment(Fragment),
    /// The peer's statistics of datagrams from this host.
    Health(Report),
    /// A probe, to be answered with a [`Frame::ProbeAck`].
    Probe {
        /// Probe number.
        id: u16,
    },
    /// A probe arrived.
    ProbeAck {
        /// Probe number.
        id: u16,
        /// UDP payload bytes of the probe.
        size: u16,
    },
    /// A request to probe open ports of the peer.
    Ports(ProbeRequest),
}

/// A part of a packet that is too large for a record.
#[derive(Clone, Debug)]
pub struct Fragment {
    /// Number of the packet, chosen by the peer.
    pub id: u16,
    /// Offset of the chunk in the packet.
    pub offset: usize,
    /// Length of the packet.
    pub total: usize,
    /// The packet's transport checksum covers the pseudo-header only.
    pub partial: bool,
    /// Position of the chunk in the arena.
    pub chunk: Range<usize>,
}

/// Iterates over the frames of a plaintext in the arena, in mode `C`.
#[derive(Debug)]
pub struct Frames<C> {
    rest: Range<usize>,
    ecn: u8,
    /// Kinds that may not occur again in this record: bit `kind`. [`SLICE`] stands for a chunk, of
    /// a slice or a fragment, that continues a packet of an earlier record.
    seen: u8,
    mode: PhantomData<C>,
}

impl<C: Carried> Frames<C> {
    /// The frames at `plaintext`, after the stamp. The bytes of the tag behind it are overwritten
    /// if its last frame is [folded](crate::native::fold). `ecn` is the ECN field of the datagram; it is
    /// applied to each inner packet before the packet is parsed ([`decapsulate_ecn`]).
    pub fn new(plaintext: Range<usize>, ecn: u8) -> Frames<C> {
        Frames {
            rest: plaintext,
            ecn,
            seen: 0,
            mode: PhantomData,
        }
    }

    /// Returns the next frame, or `None` at the end. A malformed frame ends the record: no correct
    /// sender produces one, and hundreds in a record would each cost some work.
    pub fn next(&mut self, arena: &mut [u8]) -> Option<Result<Frame, DropReason>> {
        loop {
            if self.rest.is_empty() || arena[self.rest.start] & 0x0f == PADDING {
                return None;
            }
            let frame = self.take(arena);
            match frame {
                Ok(None) => {}
                Ok(Some(frame)) => return Some(Ok(frame)),
                // The network marked the datagram; the following packets may be ECN-capable.
                Err(DropReason::EcnNotCapable) => return Some(Err(DropReason::EcnNotCapable)),
                Err(reason) => {
                    self.rest.start = self.rest.end;
                    return Some(Err(reason));
                }
            }
        }
    }

    /// Takes one frame off the front. Returns `Ok(None)` for an unknown kind.
    fn take(&mut self, arena: &mut [u8]) -> Result<Option<Frame>, DropReason> {
        let start = self.rest.start;
        let first = arena[start];
        if first & FLAG_LAST != 0 && matches!(first & 0x0f, PACKET | SLICE) {
            let body = start + 1..self.rest.end;
            self.rest.start = self.rest.end;
            return self.last(arena, first, body).map(Some);
        }
        let Some(&[first, l0, l1]) = arena[self.rest.clone()].first_chunk() else {
            return Err(DropReason::BadFrame);
        };
        let body = start + 3..start + 3 + usize::from(u16::from_le_bytes([l0, l1]));
        if body.end > self.rest.end {
            return Err(DropReason::BadFrame);
        }
        self.rest.start = body.end;
        let partial = first & FLAG_PARTIAL != 0;
        match first & 0x0f {
            PACKET => self.packet(arena, body, partial).map(Some),
            SLICE => self.slice(arena, body, first).map(Some),
            FRAGMENT => {
                let fragment = fragment(arena, body, partial)?;
                self.continues(fragment.offset)?;
                Ok(Some(Frame::Fragment(fragment)))
            }
            kind @ HEALTH..=PORTS => self.control(kind, &arena[body]).map(Some),
            _ => Ok(None),
        }
    }

    /// Handles a PACKET or SLICE that extends to the end of the record.
    fn last(
        &mut self,
        arena: &mut [u8],
        first: u8,
        mut body: Range<usize>,
    ) -> Result<Frame, DropReason> {
        let is_packet = first & 0x0f == PACKET;
        let df = first & FLAG_DF != 0;
        let start = body.start + if is_packet { 0 } else { SLICE_FIELDS };
        let packet = arena.get(start..body.end).ok_or(DropReason::BadFrame)?;
        if let Some(ip_at) = C::ip_at(packet)? {
            let end = body.end - start;
            let bytes = &mut arena[start..];
            let end = if is_packet {
                fold::unfold_packet(bytes, end, ip_at, df)
            } else {
                fold::unfold_slice(bytes, end, ip_at, df)
            }?;
            body.end = start + end;
        }
        if is_packet {
            self.packet(arena, body, first & FLAG_PARTIAL != 0)
        } else {
            self.slice(arena, body, first)
        }
    }

    /// Returns an error from the second call for a kind on.
    fn once(&mut self, kind: u8) -> Result<(), DropReason> {
        let bit = 1 << kind;
        if self.seen & bit != 0 {
            return Err(DropReason::BadFrame);
        }
        self.seen |= bit;
        Ok(())
    }

    /// A sender fills a record before it continues a packet in the next one, so a record continues
    /// one packet at most. More would make the receiver reassemble a packet for a few bytes each.
    fn continues(&mut self, offset: usize) -> Result<(), DropReason> {
        if offset == 0 {
            Ok(())
        } else {
            self.once(SLICE)
        }
    }

    /// Each costs work, and a PROBE an answer, so a record may have one of each kind.
    fn control(&mut self, kind: u8, body: &[u8]) -> Result<Frame, DropReason> {
        self.once(kind)?;
        match (kind, body) {
            (HEALTH, body) => Report::read(body).map(Frame::Health),
            (PROBE, &[a, b, ..]) => Some(Frame::Probe {
                id: u16::from_le_bytes([a, b]),
            }),
            (PROBE_ACK, &[a, b, c, d, ..]) => Some(Frame::ProbeAck {
                id: u16::from_le_bytes([a, b]),
                size: u16::from_le_bytes([c, d]),
            }),
            (PORTS, body) => ProbeRequest::read(body).map(Frame::Ports),
            _ => None,
        }
        .ok_or(DropReason::BadFrame)
    }

    fn packet(
        &self,
        arena: &mut [u8],
        range: Range<usize>,
        partial: bool,
    ) -> Result<Frame, DropReason> {
        let Some(ip_at) = C::ip_at(&arena[range.clone()])? else {
            if partial {
                return Err(DropReason::BadFrame);
            }
            return match self.ecn {
                ip::ECN_CE => Err(DropReason::EcnNotCapable),
                _ => Ok(Frame::NotIp { range }),
            };
        };
        let packet = range.start + ip_at..range.end;
        decapsulate_ecn(&mut arena[packet.clone()], self.ecn)?;
        let ip = IpPacket::parse(&arena[packet]).map_err(|_| DropReason::NotIp)?;
        if partial && !has_checksum(&ip) {
            return Err(DropReason::BadFrame);
        }
        Ok(Frame::Packet(Packet {
            range,
            ip_at,
            ip,
            partial,
        }))
    }

    fn slice(
        &mut self,
        arena: &mut [u8],
        body: Range<usize>,
        first: u8,
    ) -> Result<Frame, DropReason> {
        let Some(&[i0, i1, o0, o1, g0, g1]) = arena[body.clone()].first_chunk::<SLICE_FIELDS>()
        else {
            return Err(DropReason::BadFrame);
        };
        let id = u16::from_le_bytes([i0, i1]);
        let offset = usize::from(u16::from_le_bytes([o0, o1]));
        let gso_size = usize::from(u16::from_le_bytes([g0, g1]));
        let ends = first & FLAG_END != 0;
        let start = body.start + SLICE_FIELDS;
        let ip_at = C::ip_at(&arena[start..body.end])?.ok_or(DropReason::BadFrame)?;
        let packet = start + ip_at..body.end;
        decapsulate_ecn(&mut arena[packet.clone()], self.ecn)?;
        let ip = slice_ip(&arena[packet.clone()])?;
        let transport = &arena[packet.start + ip.header_len..packet.end];
        let tcp_len = tcp::header_len(transport).ok_or(DropReason::BadFrame)?;
        let header_len = ip.header_len + tcp_len;
        let header = start..packet.start + header_len;
        let chunk = header.end..packet.end;
        let valid = ip.protocol == PROTO_TCP
            && !ip.fragment
            && header.len() <= MAX_HEADER
            && gso_size >= MIN_CHUNK
            && chunk.len() >= if ends { 1 } else { MIN_CHUNK }
            && header_len + offset + chunk.len() <= 65_535;
        if !valid {
            return Err(DropReason::BadFrame);
        }
        self.continues(offset)?;
        Ok(Frame::Slice(Slice {
            id,
            offset,
            ends,
            gso_size,
            ecn: first & FLAG_ECN != 0,
            ip_at,
            ip,
            header,
            chunk,
        }))
    }
}

/// Whether the packet has a transport checksum that may be partial.
pub fn has_checksum(ip: &IpPacket) -> bool {
    let at = match ip.protocol {
        PROTO_TCP => tcp::CHECKSUM_AT,
        PROTO_UDP => udp::CHECKSUM_AT,
        _ => return false,
    };
    !ip.fragment && ip.total_len >= ip.header_len + at + 2
}

/// Parses the IP header of a slice, whose length field is that of the whole super-packet.
fn slice_ip(bytes: &[u8]) -> Result<IpPacket, DropReason> {
    let mut head = [0u8; MAX_HEADER];
    let n = bytes.len().min(MAX_HEADER);
    head[..n].copy_from_slice(&bytes[..n]);
    match head[0] >> 4 {
        4 => head[2..4].copy_from_slice(&(n as u16).to_be_bytes()),
        6 if n >= 40 => head[4..6].copy_from_slice(&(n as u16 - 40).to_be_bytes()),
        _ => return Err(DropReason::BadFrame),
    }
    IpPacket::parse(&head[..n]).map_err(|_| DropReason::BadFrame)
}

fn fragment(arena: &[u8], body: Range<usize>, partial: bool) -> Result<Fragment, DropReason> {
    let Some(&[i0, i1, o0, o1, t0, t1]) = arena[body.clone()].first_chunk() else {
        return Err(DropReason::BadFrame);
    };
    let fragment = Fragment {
        id: u16::from_le_bytes([i0, i1]),
        offset: usize::from(u16::from_le_bytes([o0, o1])),
        total: usize::from(u16::from_le_bytes([t0, t1])),
        partial,
        chunk: body.start + 6..body.end,
    };
    let length = fragment.chunk.len();
    let end = fragment.offset + length;
    let fits = end == fragment.total && length > 0 || end < fragment.total && length >= MIN_CHUNK;
    if length == fragment.total || !fits {
        return Err(DropReason::BadFrame);
    }
    Ok(fragment)
}

/// Applies the outer ECN field to an inner packet on decapsulation: the more severe of the two, or
/// an error if the packet has to be dropped (RFC 6040 section 4.2, figure 4).
#[inline]
pub fn decapsulate_ecn(packet: &mut [u8], outer: u8) -> Result<(), DropReason> {
    if !changes_inner(outer) {
        return Ok(());
    }
    match (ip::ecn(packet), outer) {
        (ip::ECN_NOT_ECT, ip::ECN_CE) => return Err(DropReason::EcnNotCapable),
        (ip::ECN_ECT0 | ip::ECN_ECT1, ip::ECN_CE) => ip::set_ecn(packet, ip::ECN_CE),
        (ip::ECN_ECT0, ip::ECN_ECT1) => ip::set_ecn(packet, ip::ECN_ECT1),
        _ => {}
    }
    Ok(())
}

/// The outer ECN field that represents two fragments of one packet. RFC 3168 section 5.3: no mark
/// is lost; RFC 6040 section 4.2: ECT(1) is more severe than ECT(0) and less than CE. Not-ECT and
/// ECT(0) change nothing inside, so either represents both.
pub fn most_severe(a: u8, b: u8) -> u8 {
    let severity = |outer| if changes_inner(outer) { outer } else { 0 };
    severity(a).max(severity(b))
}

/// Only ECT(1) and CE can change the inner field; both have the low bit.
fn changes_inner(outer: u8) -> bool {
    outer & ip::ECN_ECT1 != 0
}

/// Writes a PACKET: its head, and the packet of `length` bytes that `write` writes. With a fold it is
/// the last frame of its record; `out` then has space for the whole packet. Returns the length of
/// the frame.
pub fn write_packet(
    out: &mut [u8],
    length: usize,
    partial: bool,
    last: Option<&Fold>,
    write: impl FnOnce(&mut [u8]),
) -> usize {
    let first = PACKET | if partial { FLAG_PARTIAL } else { 0 };
    let at = extent_head(out, first, length, last);
    let packet = &mut out[at..at + length];
    write(packet);
    at + folded(packet, last)
}

/// Writes the head of a PACKET or SLICE whose body has this length. Returns its own length.
fn extent_head(out: &mut [u8], first: u8, length: usize, last: Option<&Fold>) -> usize {
    match last {
        None => {
            head(out, first, length);
            3
        }
        Some(fold) => {
            out[0] = first | FLAG_LAST | if fold.df { FLAG_DF } else { 0 };
            1
        }
    }
}

/// Folds a packet if it is in the last frame, and returns its length on the wire.
fn folded(packet: &mut [u8], last: Option<&Fold>) -> usize {
    match last {
        None => packet.len(),
        Some(fold) => {
            fold.apply(packet);
            packet.len() - fold.saved()
        }
    }
}

/// The fields of a SLICE before its headers and chunk.
#[derive(Clone, Copy, Debug)]
pub struct SliceHead {
    /// Number of the super-packet.
    pub id: u16,
    /// Payload bytes before the slice.
    pub offset: usize,
    /// The chunk ends where the super-packet ends.
    pub ends: bool,
    /// Payload bytes per segment.
    pub gso_size: usize,
    /// The super-packet has CWR set.
    pub ecn: bool,
}

/// Writes a SLICE with these headers and this chunk. With a fold it is the last frame of its record;
/// `out` then has space for all bytes. Returns the length of the frame.
pub fn write_slice(
    out: &mut [u8],
    slice: &SliceHead,
    header: &[u8],
    chunk: &[u8],
    last: Option<&Fold>,
) -> usize {
    let first =
        SLICE | if slice.ends { FLAG_END } else { 0 } | if slice.ecn { FLAG_ECN } else { 0 };
    let length = header.len() + chunk.len();
    let at = extent_head(out, first, SLICE_FIELDS + length, last);
    let (fields, packet) = out[at..].split_at_mut(SLICE_FIELDS);
    fields[..2].copy_from_slice(&slice.id.to_le_bytes());
    fields[2..4].copy_from_slice(&(slice.offset as u16).to_le_bytes());
    fields[4..].copy_from_slice(&(slice.gso_size as u16).to_le_bytes());
    packet[..header.len()].copy_from_slice(header);
    packet[header.len()..length].copy_from_slice(chunk);
    at + SLICE_FIELDS + folded(&mut packet[..length], last)
}

/// Writes the head of a FRAGMENT.
pub fn write_fragment(
    out: &mut [u8],
    id: u16,
    offset: usize,
    total: usize,
    length: usize,
    partial: bool,
) {
    head(
        out,
        FRAGMENT | if partial { FLAG_PARTIAL } else { 0 },
        6 + length,
    );
    out[3..5].copy_from_slice(&id.to_le_bytes());
    out[5..7].copy_from_slice(&(offset as u16).to_le_bytes());
    out[7..9].copy_from_slice(&(total as u16).to_le_bytes());
}

/// Writes a HEALTH frame and returns its length. The fields of loss repair are left out unless
/// `with_repair`.
pub fn write_health(out: &mut [u8], report: &Report, with_repair: bool) -> usize {
    let body = report.to_bytes();
    let length = Report::length(with_repair);
    head(out, HEALTH, length);
    out[3..3 + length].copy_from_slice(&body[..length]);
    3 + length
}

/// Writes a PROBE; the caller pads the record.
pub fn write_probe(out: &mut [u8], id: u16) {
    head(out, PROBE, 2);
    out[3..5].copy_from_slice(&id.to_le_bytes());
}

/// Writes a PROBE_ACK.
pub fn write_probe_ack(out: &mut [u8], id: u16, size: u16) {
    head(out, PROBE_ACK, 4);
    out[3..5].copy_from_slice(&id.to_le_bytes());
    out[5..7].copy_from_slice(&size.to_le_bytes());
}

/// Writes a PORTS frame and returns its length.
pub fn write_ports(out: &mut [u8], request: &ProbeRequest) -> usize {
    let body = request.to_bytes();
    head(out, PORTS, body.len());
    out[3..3 + body.len()].copy_from_slice(&body);
    3 + body.len()
}

fn head(out: &mut [u8], first: u8, length: usize) {
    out[0] = first;
    out[1..3].copy_from_slice(&(length as u16).to_le_bytes());
}
