//! IPv4 (RFC 791) and IPv6 (RFC 8200) headers: parsing and in-place changes.

use crate::checksum;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// IANA protocol number of TCP.
pub const PROTO_TCP: u8 = 6;
/// IANA protocol number of UDP.
pub const PROTO_UDP: u8 = 17;
/// IANA protocol number of ICMP.
pub const PROTO_ICMP: u8 = 1;
/// IANA protocol number of ICMPv6.
pub const PROTO_ICMPV6: u8 = 58;

/// Not-ECT (RFC 3168 section 5).
pub const ECN_NOT_ECT: u8 = 0;
/// ECT(1).
pub const ECN_ECT1: u8 = 1;
/// ECT(0).
pub const ECN_ECT0: u8 = 2;
/// Congestion experienced.
pub const ECN_CE: u8 = 3;

/// Maximum bytes of IPv6 extension headers that are parsed. A longer chain is treated as having an
/// unknown transport. The limit bounds the work that a sender can cause.
const MAX_EXTENSION_BYTES: usize = 256;

/// Why bytes are not an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Too short for the header it claims.
    #[error("packet truncated")]
    Truncated,
    /// Neither version 4 nor 6.
    #[error("IP version {0}, neither 4 nor 6")]
    Version(u8),
    /// A length field that contradicts itself or the buffer.
    #[error("IP length field smaller than the header, or larger than the packet")]
    Length,
}

/// The facts about one IP packet that routing, segmentation and coalescing need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpPacket {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Transport protocol, after IPv6 extension headers.
    pub protocol: u8,
    /// Length of everything before the transport header, including IPv4 options and IPv6 extension
    /// headers.
    pub header_len: usize,
    /// Total length of the packet by its header, at most the buffer's.
    pub total_len: usize,
    /// Whether the packet is a fragment: its transport header may be missing, and its length is not
    /// that of the whole datagram.
    pub fragment: bool,
    /// Whether it has IPv4 options or IPv6 extension headers.
    pub extended: bool,
}

impl IpPacket {
    /// Parses the packet at the start of `bytes`. Bytes after its total length are ignored
    /// (WireGuard pads packets).
    pub fn parse(bytes: &[u8]) -> Result<IpPacket, ParseError> {
        let packet = IpPacket::parse_headers(bytes)?;
        if packet.total_len > bytes.len() {
            return Err(ParseError::Truncated);
        }
        Ok(packet)
    }

    /// Parses a packet of which only the headers need to be present, as ICMP errors quote it:
    /// [`IpPacket::total_len`] may exceed the length of `bytes`.
    pub fn parse_headers(bytes: &[u8]) -> Result<IpPacket, ParseError> {
        match bytes.first().map(|b| b >> 4) {
            Some(4) => parse4(bytes),
            Some(6) => parse6(bytes),
            Some(other) => Err(ParseError::Version(other)),
            None => Err(ParseError::Truncated),
        }
    }

    /// Offset in bytes of this fragment in its datagram; 0 if the packet is no fragment.
    ///
    /// `packet` is the packet that `self` was parsed from, here and in the functions below; only
    /// its headers need to be present.
    pub fn fragment_offset(&self, packet: &[u8]) -> usize {
        if !self.fragment {
            return 0;
        }
        // Parsing of IPv6 extension headers ends after the fragment header.
        let (at, mask, unit) = match self.src {
            IpAddr::V4(_) => (6, 0x1fff, 8),
            IpAddr::V6(_) => (self.header_len - 6, 0xfff8, 1),
        };
        let field = packet.get(at..at + 2);
        field.map_or(0, |field| {
            usize::from(u16::from_be_bytes([field[0], field[1]]) & mask) * unit
        })
    }

    /// Protocol and offset of the transport header; `None` in a fragment that is not the first.
    ///
    /// Unlike `protocol` and `header_len`, these are also correct for a first IPv6 fragment with
    /// extension headers after its fragment header.
    ///
    /// # Errors
    /// [`ParseError::Truncated`] if the extension headers do not end within the packet or within
    /// the maximum that is parsed.
    pub fn transport(&self, packet: &[u8]) -> Result<Option<(u8, usize)>, ParseError> {
        if self.fragment_offset(packet) != 0 {
            return Ok(None);
        }
        let (mut protocol, mut at) = (self.protocol, self.header_len);
        if self.is_v6() {
            let end = self.total_len.min(packet.len());
            while matches!(protocol, 0 | 43 | 44 | 60) {
                let header = packet[..end].get(at..).ok_or(ParseError::Truncated)?;
                let &[next, length, ..] = header else {
                    return Err(ParseError::Truncated);
                };
                // No sender uses two fragment headers.
                if protocol == 44 || at > 40 + MAX_EXTENSION_BYTES {
                    return Err(ParseError::Truncated);
                }
                protocol = next;
                at += (usize::from(length) + 1) * 8;
            }
            if at > end {
                return Err(ParseError::Truncated);
            }
        }
        Ok(Some((protocol, at)))
    }

    /// Whether the packet is routed to another address than its destination field: an IPv4 source
    /// route that is not exhausted (RFC 791), or an IPv6 routing header with segments left (RFC
    /// 8200 section 4.4). Its transport checksum covers the last address of the route.
    pub fn source_routed(&self, packet: &[u8]) -> bool {
        if !self.extended {
            return false;
        }
        match self.src {
            IpAddr::V4(_) => {
                let options = packet.get(20..self.header_len.min(packet.len()));
                source_routed4(options.unwrap_or_default())
            }
            IpAddr::V6(_) => source_routed6(&packet[..self.total_len.min(packet.len())]),
        }
    }

    /// Whether this is IPv6.
    pub fn is_v6(&self) -> bool {
        self.src.is_ipv6()
    }
}

fn parse4(bytes: &[u8]) -> Result<IpPacket, ParseError> {
    let header: &[u8; 20] = bytes.first_chunk().ok_or(ParseError::Truncated)?;
    let header_len = usize::from(header[0] & 0x0f) * 4;
    let total_len = usize::from(u16::from_be_bytes([header[2], header[3]]));
    if header_len < 20 || total_len < header_len {
        return Err(ParseError::Length);
    }
    if header_len > bytes.len() {
        return Err(ParseError::Truncated);
    }
    let fragment_field = u16::from_be_bytes([header[6], header[7]]);
    Ok(IpPacket {
        src: Ipv4Addr::new(header[12], header[13], header[14], header[15]).into(),
        dst: Ipv4Addr::new(header[16], header[17], header[18], header[19]).into(),
        protocol: header[9],
        header_len,
        total_len,
        fragment: fragment_field & 0x3fff != 0,
        extended: header_len > 20,
    })
}

fn parse6(bytes: &[u8]) -> Result<IpPacket, ParseError> {
    let header: &[u8; 40] = bytes.first_chunk().ok_or(ParseError::Truncated)?;
    let total_len = 40 + usize::from(u16::from_be_bytes([header[4], header[5]]));
    let end = total_len.min(bytes.len());
    let address = |at: usize| {
        let mut octets = [0; 16];
        octets.copy_from_slice(&header[at..at + 16]);
        IpAddr::V6(Ipv6Addr::from(octets))
    };
    let mut packet = IpPacket {
        src: address(8),
        dst: address(24),
        protocol: header[6],
        header_len: 40,
        total_len,
        fragment: false,
        extended: false,
    };
    // Hop-by-hop 0, routing 43, fragment 44, destination options 60 (RFC 8200 section 4).
    while matches!(packet.protocol, 0 | 43 | 44 | 60) {
        packet.extended = true;
        let at = packet.header_len;
        let Some(&[next, length, ..]) = bytes[..end].get(at..at + 8) else {
            return Err(ParseError::Truncated);
        };
        let size = if packet.protocol == 44 {
            packet.fragment = true;
            8
        } else {
            (usize::from(length) + 1) * 8
        };
        packet.protocol = next;
        packet.header_len += size;
        if packet.header_len > end {
            return Err(ParseError::Truncated);
        }
        if packet.fragment || packet.header_len > 40 + MAX_EXTENSION_BYTES {
            break;
        }
    }
    Ok(packet)
}

fn source_routed4(mut options: &[u8]) -> bool {
    loop {
        match options {
            [1, rest @ ..] => options = rest, // no-operation
            // Loose (131) and strict (137): exhausted once the pointer is behind the option.
            [131 | 137, length, pointer, ..] if pointer <= length => return true,
            // Anything but end of options (0).
            [kind, length, ..] if *kind != 0 && *length >= 2 => {
                let Some(rest) = options.get(usize::from(*length)..) else {
                    return false;
                };
                options = rest;
            }
            _ => return false,
        }
    }
}

fn source_routed6(packet: &[u8]) -> bool {
    let (mut next, mut at) = (packet.get(6).copied(), 40);
    while let (Some(protocol @ (0 | 43 | 44 | 60)), true) = (next, at <= 40 + MAX_EXTENSION_BYTES) {
        let Some(&[following, length, third, fourth]) =
            packet.get(at..).and_then(<[u8]>::first_chunk)
        else {
            return false;
        };
        at += match protocol {
            43 if fourth > 0 => return true,
            // A later fragment has payload after its header.
            44 if u16::from_be_bytes([third, fourth]) & 0xfff8 != 0 => return false,
            44 => 8,
            _ => (usize::from(length) + 1) * 8,
        };
        next = Some(following);
    }
    false
}

/// The two ECN bits of the packet; `packet` must be one that [`IpPacket::parse`] accepted.
pub fn ecn(packet: &[u8]) -> u8 {
    traffic_class(packet) & 3
}

/// The DSCP and ECN byte (IPv4 TOS, IPv6 traffic class); 0 for bytes that are not an IP packet.
pub fn traffic_class(packet: &[u8]) -> u8 {
    match packet {
        [first, second, ..] if first >> 4 == 4 => *second,
        [first, second, ..] if first >> 4 == 6 => first << 4 | second >> 4,
        _ => 0,
    }
}

/// Sets the two ECN bits, and updates an IPv4 header checksum (RFC 1624).
pub fn set_ecn(packet: &mut [u8], ecn: u8) {
    let ecn = ecn & 3;
    match packet.first().map(|b| b >> 4) {
        Some(4) if packet.len() >= 20 => {
            let old = u16::from_be_bytes([packet[0], packet[1]]);
            packet[1] = packet[1] & !3 | ecn;
            let new = u16::from_be_bytes([packet[0], packet[1]]);
            let check = u16::from_be_bytes([packet[10], packet[11]]);
            let check = checksum::update(check, old, new);
            packet[10..12].copy_from_slice(&check.to_be_bytes());
        }
        Some(6) if packet.len() >= 40 => packet[1] = packet[1] & 0xcf | ecn << 4,
        _ => {}
    }
}

/// Writes the length field for a packet of `total_len` bytes and, for IPv4, the header checksum.
///
/// `header` holds the IP header at its start; the IPv4 identification is set when given.
pub fn set_length(header: &mut [u8], header_len: usize, total_len: usize, id: Option<u16>) {
    if header[0] >> 4 == 4 {
        header[2..4].copy_from_slice(&(total_len as u16).to_be_bytes());
        if let Some(id) = id {
            header[4..6].copy_from_slice(&id.to_be_bytes());
        }
        header[10..12].fill(0);
        let check = checksum::fold(checksum::sum(&header[..header_len]));
        header[10..12].copy_from_slice(&check.to_be_bytes());
    } else {
        header[4..6].copy_from_slice(&((total_len - 40) as u16).to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header of the worked example in many texts, checksum b861 (e.g. RFC 1071 walk-throughs).
    const V4: [u8; 20] = [
        0x45, 0x00, 0x00, 0x14, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0xb9, 0xc0, 0xc0, 0xa8, 0x00,
        0x01, 0xc0, 0xa8, 0x00, 0xc7,
    ];

    #[test]
    fn an_ipv4_header_is_read_field_by_field() {
        let p = IpPacket::parse(&V4).unwrap();
        assert_eq!(p.src, "192.168.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(p.dst, "192.168.0.199".parse::<IpAddr>().unwrap());
        assert_eq!((p.protocol, p.header_len, p.total_len), (17, 20, 20));
        assert!(!p.fragment && !p.extended);
    }

    #[test]
    fn set_ecn_keeps_the_header_checksum_valid() {
        let mut header = V4;
        set_length(&mut header, 20, 20, None);
        assert_eq!(checksum::fold(checksum::sum(&header)), 0);
        set_ecn(&mut header, ECN_CE);
        assert_eq!(ecn(&header), ECN_CE);
        assert_eq!(checksum::fold(checksum::sum(&header)), 0);
    }

    #[test]
    fn ipv6_extension_headers_end_the_walk_at_the_transport() {
        let mut p = vec![0x60, 0, 0, 0, 0, 16 + 8, 0, 64];
        p.extend([0; 32]);
        p.extend([60, 0, 0, 0, 0, 0, 0, 0]); // hop-by-hop, 8 bytes, next: destination options
        p.extend([17, 0, 0, 0, 0, 0, 0, 0]); // destination options, next: UDP
        p.extend([0; 8]);
        let parsed = IpPacket::parse(&p).unwrap();
        assert_eq!((parsed.protocol, parsed.header_len), (17, 56));
        assert!(parsed.extended);
    }

    /// 32 hop-by-hop headers of 2,048 bytes would make a 16-bit counter wrap; parsing stops
    /// earlier.
    #[test]
    fn ipv6_extension_chains_are_bounded() {
        let mut p = vec![0x60, 0, 0, 0, 0xff, 0xff, 0, 64];
        p.resize(40 + 65_535, 0);
        for at in (40..p.len() - 2048).step_by(2048) {
            p[at] = 0;
            p[at + 1] = 255;
        }
        assert!(IpPacket::parse(&p).unwrap().header_len <= 40 + 2048);
    }

    /// Returns an IPv6 packet whose extension headers and payload are `rest`; `next` is the type of
    /// the first header in `rest`.
    fn v6(next: u8, rest: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, rest.len() as u8, next, 64];
        packet.extend([0; 32]);
        packet.extend(rest);
        packet
    }

    #[test]
    fn an_ipv4_fragment_has_its_offset_in_bytes() {
        // More fragments, offset 185 * 8: the second fragment of a datagram over Ethernet.
        for (field, offset) in [(0x2000u16, 0), (0x20b9, 1480), (0x00b9, 1480), (0x4000, 0)] {
            let mut header = V4;
            header[6..8].copy_from_slice(&field.to_be_bytes());
            let packet = IpPacket::parse(&header).unwrap();
            assert_eq!(packet.fragment_offset(&header), offset);
            let transport = (offset == 0).then_some((PROTO_UDP, 20));
            assert_eq!(packet.transport(&header), Ok(transport));
        }
    }

    #[test]
    fn an_ipv6_fragment_has_its_offset_in_bytes() {
        for (field, offset) in [(0x0001u16, 0), (0x05c9, 0x5c8), (0x05c8, 0x5c8)] {
            let [high, low] = field.to_be_bytes();
            let bytes = v6(44, &[17, 0, high, low, 0, 0, 0, 1, 0, 0, 0, 0, 0, 8, 0, 0]);
            let packet = IpPacket::parse(&bytes).unwrap();
            assert_eq!(packet.fragment_offset(&bytes), offset);
            let transport = (offset == 0).then_some((PROTO_UDP, 48));
            assert_eq!(packet.transport(&bytes), Ok(transport));
        }
    }

    #[test]
    fn the_transport_is_found_behind_a_fragment_header_and_options() {
        let mut rest = vec![60, 0, 0, 1, 0, 0, 0, 1];
        rest.extend([6, 0, 1, 4, 0, 0, 0, 0]);
        rest.extend([0; 20]);
        let bytes = v6(44, &rest);
        let packet = IpPacket::parse(&bytes).unwrap();
        assert_eq!(packet.transport(&bytes), Ok(Some((PROTO_TCP, 56))));
        let cut = v6(44, &rest[..12]);
        let packet = IpPacket::parse(&cut).unwrap();
        assert_eq!(packet.transport(&cut), Err(ParseError::Truncated));
    }

    #[test]
    fn source_routes_count_until_they_are_exhausted() {
        for (kind, pointer, routed) in [
            (131, 4, true),
            (137, 4, true),
            (131, 8, false),
            (7, 4, false),
        ] {
            let mut bytes = V4.to_vec();
            bytes.extend([1, kind, 7, pointer, 10, 0, 0, 1]);
            (bytes[0], bytes[3]) = (0x47, 28);
            let packet = IpPacket::parse(&bytes).unwrap();
            assert_eq!(packet.source_routed(&bytes), routed, "{kind} {pointer}");
        }
        for (segments_left, routed) in [(1, true), (0, false)] {
            let mut rest = vec![43, 0, 1, 4, 0, 0, 0, 0]; // hop-by-hop, next: routing
            rest.extend([17, 2, 0, segments_left]);
            rest.resize(8 + 24 + 8, 0);
            let bytes = v6(0, &rest);
            let packet = IpPacket::parse(&bytes).unwrap();
            assert_eq!(packet.transport(&bytes), Ok(Some((PROTO_UDP, 72))));
            assert_eq!(packet.source_routed(&bytes), routed);
        }
    }

    #[test]
    fn a_quoted_packet_may_be_longer_than_its_quote() {
        let mut bytes = V4.to_vec();
        bytes[2..4].copy_from_slice(&1500u16.to_be_bytes());
        bytes.extend([0; 8]);
        assert_eq!(IpPacket::parse(&bytes), Err(ParseError::Truncated));
        assert_eq!(IpPacket::parse_headers(&bytes).unwrap().total_len, 1500);
        let header = IpPacket::parse_headers(&bytes[..19]);
        assert_eq!(header, Err(ParseError::Truncated));
    }

    #[test]
    fn wrong_lengths_are_errors() {
        assert_eq!(IpPacket::parse(&[]), Err(ParseError::Truncated));
        assert_eq!(IpPacket::parse(&V4[..19]), Err(ParseError::Truncated));
        let mut long = V4;
        long[3] = 21;
        assert_eq!(IpPacket::parse(&long), Err(ParseError::Truncated));
        let mut small = V4;
        small[0] = 0x44;
        assert_eq!(IpPacket::parse(&small), Err(ParseError::Length));
        assert_eq!(IpPacket::parse(&[0x50; 40]), Err(ParseError::Version(5)));
    }
}
