//! The largest TCP connection of a capture, segment by segment, from headers only.
//!
//! The file is read twice: to find the connection, and to follow it. It is untrusted: the numbers
//! of packets, connections and segments are bounded, and unknown content is skipped.

use std::collections::HashMap;
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use anyhow::{Context, bail};
use etherparse::{EtherType, LaxNetSlice, LaxSlicedPacket};
use pcap_parser::pcapng::Block;
use pcap_parser::{Linktype, PcapBlockOwned, PcapError, create_reader};
use seikan_wire::tcp;

/// Maximum number of packets to read.
const MAX_PACKETS: u64 = 20_000_000;
/// Maximum number of connections among which the largest is searched.
const MAX_CONNECTIONS: usize = 10_000;
/// Maximum number of segments and acknowledgements.
const MAX_EVENTS: usize = 1_000_000;
/// Maximum number of interfaces of one section of a pcapng file.
const MAX_INTERFACES: usize = 1_000;
/// Size of the read buffer, twice the largest packet that tcpdump captures.
const BUFFER: usize = 1 << 19;
/// Maximum number of reads without a complete packet.
const MAX_EMPTY_READS: u32 = 1_000;
/// Linux cooked capture, version 2, which pcap-parser does not define.
const LINUX_SLL2: Linktype = Linktype(276);
/// Raw IP in files of systems with another number for it.
const RAW_BSD: Linktype = Linktype(12);

/// A segment with data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Segment {
    /// Seconds since the first packet of the connection.
    pub at: f64,
    /// Position of the first byte, from the start of the connection.
    pub begin: i64,
    /// Position after the last byte.
    pub end: i64,
    /// Whether all of it had been sent before.
    pub is_retransmission: bool,
}

/// An acknowledgement of the receiver.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Acknowledgement {
    /// Seconds since the first packet of the connection.
    pub at: f64,
    /// Position of the first missing byte.
    pub number: i64,
    /// Position after the receive window; `None` without the handshake, because the scale is
    /// unknown then.
    pub window: Option<i64>,
}

/// One direction of a connection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Capture {
    /// Addresses of sender and receiver.
    pub name: String,
    /// Sent segments, in order.
    pub segments: Vec<Segment>,
    /// Received acknowledgements, in order.
    pub acknowledgements: Vec<Acknowledgement>,
    /// Whether the capture has more than the maximum.
    pub is_cut: bool,
}

/// A packet with a TCP header.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Packet {
    nanoseconds: i128,
    from: SocketAddr,
    to: SocketAddr,
    sequence: u32,
    acknowledged: u32,
    flags: u8,
    window: u16,
    scale: Option<u8>,
    /// Bytes of data.
    length: usize,
}

/// Reads the largest TCP connection of a capture, in the direction with more data.
pub fn read(path: &Path) -> anyhow::Result<Capture> {
    let open = || File::open(path);
    let context = || format!("cannot read {}", path.display());
    let (from, to) = largest(open().with_context(context)?).with_context(context)?;
    follow(open().with_context(context)?, from, to).with_context(context)
}

/// Returns the direction with most bytes of data.
fn largest(file: File) -> anyhow::Result<(SocketAddr, SocketAddr)> {
    let mut sizes: HashMap<(SocketAddr, SocketAddr), u64> = HashMap::new();
    each(file, |packet| {
        let direction = (packet.from, packet.to);
        let is_known = sizes.contains_key(&direction) || sizes.len() < MAX_CONNECTIONS;
        if is_known {
            *sizes.entry(direction).or_default() += packet.length as u64;
        }
        true
    })?;
    // The addresses break ties, so that the same file gives the same picture.
    let largest = sizes
        .into_iter()
        .max_by_key(|(direction, size)| (*size, *direction));
    match largest {
        Some((direction, size)) if size > 0 => Ok(direction),
        _ => bail!("it contains no TCP connection with data"),
    }
}

fn follow(file: File, from: SocketAddr, to: SocketAddr) -> anyhow::Result<Capture> {
    let mut capture = Capture {
        name: format!("{from} to {to}"),
        ..Capture::default()
    };
    let mut start = None;
    let mut sequence = tcp::Positions::default();
    // Window scales of both sides; they apply only if both announce one (RFC 7323, 2.2).
    let (mut own, mut theirs) = (None, None);
    let mut sent = i64::MIN;
    each(file, |packet| {
        let is_syn = packet.flags & tcp::SYN != 0;
        let start = *start.get_or_insert(packet.nanoseconds);
        let at = (packet.nanoseconds - start) as f64 / 1e9;
        if capture.segments.len() + capture.acknowledgements.len() >= MAX_EVENTS {
            capture.is_cut = true;
            return false;
        }
        if (packet.from, packet.to) == (from, to) {
            if is_syn {
                own = Some(packet.scale);
            }
            // A SYN occupies a sequence number.
            let begin = sequence.of(packet.sequence.wrapping_add(u32::from(is_syn)));
            let end = begin + packet.length as i64;
            if packet.length > 0 {
                let is_retransmission = end <= sent;
                sent = sent.max(end);
                capture.segments.push(Segment {
                    at,
                    begin,
                    end,
                    is_retransmission,
                });
            }
        } else if (packet.to, packet.from) == (from, to) {
            if is_syn {
                theirs = Some(packet.scale);
            }
            if packet.flags & tcp::ACK != 0 && packet.flags & tcp::RST == 0 {
                let number = sequence.of(packet.acknowledged);
                let factor = match (own, theirs) {
                    // The window of a SYN is never scaled.
                    _ if is_syn => Some(0),
                    (Some(own), Some(theirs)) => Some(own.and(theirs).unwrap_or(0)),
                    _ => None,
                };
                let bytes = |scale: u8| i64::from(packet.window) << scale.min(14);
                capture.acknowledgements.push(Acknowledgement {
                    at,
                    number,
                    window: factor.map(|scale| number + bytes(scale)),
                });
            }
        }
        true
    })?;
    Ok(capture)
}

/// Calls `take` with every packet that has a TCP header, until it returns false or the maximum is
/// reached.
fn each(file: File, mut take: impl FnMut(Packet) -> bool) -> anyhow::Result<()> {
    let unknown = "it is not a pcap or pcapng file";
    let Ok(mut reader) = create_reader(BUFFER, file) else {
        bail!(unknown);
    };
    let mut interfaces: Vec<Interface> = Vec::new();
    let (mut packets, mut empty_reads) = (0, 0);
    while packets < MAX_PACKETS && empty_reads < MAX_EMPTY_READS {
        let used = match reader.next() {
            Ok((used, block)) => {
                let packet = match &block {
                    PcapBlockOwned::LegacyHeader(header) => {
                        let per_second = if header.is_nanosecond_precision() {
                            1_000_000_000
                        } else {
                            1_000_000
                        };
                        interfaces = vec![Interface {
                            kind: header.network,
                            per_second,
                            offset: 0,
                        }];
                        None
                    }
                    PcapBlockOwned::Legacy(block) => interfaces.first().and_then(|interface| {
                        let fraction = i128::from(block.ts_usec) * 1_000_000_000;
                        let at = i128::from(block.ts_sec) * 1_000_000_000
                            + fraction / i128::from(interface.per_second);
                        packet(at, interface.kind, block.data, block.origlen)
                    }),
                    PcapBlockOwned::NG(block) => of_section(block, &mut interfaces),
                };
                packets += 1;
                empty_reads = 0;
                if packet.is_some_and(|packet| !take(packet)) {
                    return Ok(());
                }
                used
            }
            Err(PcapError::Eof | PcapError::UnexpectedEof) => return Ok(()),
            Err(PcapError::Incomplete(_)) => {
                empty_reads += 1;
                if reader.refill().is_err() {
                    bail!("it cannot be read beyond packet {packets}");
                }
                continue;
            }
            // The packets before the fault are still valid.
            Err(_) if packets > 1 => return Ok(()),
            Err(_) => bail!(unknown),
        };
        if used == 0 {
            return Ok(());
        }
        reader.consume(used);
    }
    Ok(())
}

/// An interface of the capture.
#[derive(Clone, Copy, Debug)]
struct Interface {
    kind: Linktype,
    per_second: u64,
    /// Offset of the timestamps, in seconds.
    offset: i64,
}

fn of_section(block: &Block<'_>, interfaces: &mut Vec<Interface>) -> Option<Packet> {
    match block {
        Block::SectionHeader(_) => interfaces.clear(),
        Block::InterfaceDescription(block) if interfaces.len() < MAX_INTERFACES => {
            interfaces.push(Interface {
                kind: block.linktype,
                per_second: block.ts_resolution().unwrap_or(1_000_000).max(1),
                offset: block.ts_offset(),
            });
        }
        Block::EnhancedPacket(block) => {
            let interface = interfaces.get(block.if_id as usize)?;
            let units = i128::from(block.ts_high) << 32 | i128::from(block.ts_low);
            let at = units * 1_000_000_000 / i128::from(interface.per_second)
                + i128::from(interface.offset) * 1_000_000_000;
            let data = block.data.get(..block.caplen as usize)?;
            return packet(at, interface.kind, data, block.origlen);
        }
        _ => {}
    }
    None
}

/// Parses a packet with a TCP header, of which the capture may contain only the first twenty bytes.
fn packet(nanoseconds: i128, kind: Linktype, data: &[u8], original: u32) -> Option<Packet> {
    let cooked = |kind_at: usize, header: usize| {
        let kind = data.get(kind_at..kind_at + 2)?;
        let kind = EtherType(u16::from_be_bytes([kind[0], kind[1]]));
        Some(LaxSlicedPacket::from_ether_type(kind, data.get(header..)?))
    };
    let sliced = match kind {
        Linktype::ETHERNET => LaxSlicedPacket::from_ethernet(data).ok()?,
        Linktype::RAW | Linktype::IPV4 | Linktype::IPV6 | RAW_BSD => {
            LaxSlicedPacket::from_ip(data).ok()?
        }
        Linktype::LINUX_SLL => cooked(14, 16)?,
        LINUX_SLL2 => cooked(0, 20)?,
        _ => return None,
    };
    let (source, destination, header, total) = match sliced.net.as_ref()? {
        LaxNetSlice::Ipv4(ip) => {
            let header = ip.header();
            let (from, to) = (header.source_addr(), header.destination_addr());
            let total = usize::from(header.total_len());
            (
                IpAddr::V4(from),
                IpAddr::V4(to),
                header.slice().as_ptr(),
                total,
            )
        }
        LaxNetSlice::Ipv6(ip) => {
            let header = ip.header();
            let (from, to) = (header.source_addr(), header.destination_addr());
            let total = match header.payload_length() {
                0 => 0,
                behind => usize::from(behind) + header.slice().len(),
            };
            (
                IpAddr::V6(from),
                IpAddr::V6(to),
                header.slice().as_ptr(),
                total,
            )
        }
        LaxNetSlice::Arp(_) => return None,
    };
    let payload = sliced.ip_payload()?;
    if payload.fragmented || payload.ip_number != etherparse::IpNumber::TCP {
        return None;
    }
    let segment = payload.payload;
    if segment.len() < 20 {
        return None;
    }
    let header_len = usize::from(segment[12] >> 4) * 4;
    let offset = |pointer: *const u8| (pointer as usize).checked_sub(data.as_ptr() as usize);
    // Super-packets of more than 64 KiB have a length of 0 in their header.
    let end = match total {
        0 => original as usize,
        total => offset(header)? + total,
    };
    let length = end.checked_sub(offset(segment.as_ptr())? + header_len)?;
    let port = |at: usize| u16::from_be_bytes([segment[at], segment[at + 1]]);
    Some(Packet {
        nanoseconds,
        from: SocketAddr::new(source, port(0)),
        to: SocketAddr::new(destination, port(2)),
        sequence: tcp::seq(segment),
        acknowledged: tcp::acknowledged(segment),
        flags: tcp::flags(segment),
        window: tcp::window(segment),
        scale: tcp::window_scale(segment.get(20..header_len.min(segment.len()))?),
        length,
    })
}

#[cfg(test)]
mod tests;
