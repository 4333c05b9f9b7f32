//! ICMP errors: creating "packet too big" (RFC 1191, RFC 8201), and finding the packet that an
//! error quotes.

use crate::checksum;
use crate::ip::{IpPacket, PROTO_ICMP, PROTO_ICMPV6};
use std::net::IpAddr;

/// Length of the header before the quoted packet, or before the data of an echo.
pub const HEADER_LEN: usize = 8;

/// Bytes of the offending packet quoted in an ICMPv4 error (RFC 1812: as much as fits 576).
const QUOTE_V4: usize = 576 - 28;
/// Bytes of the offending packet quoted in an ICMPv6 error (RFC 4443 section 3.2: up to 1280).
const QUOTE_V6: usize = 1280 - 48;

/// Builds the error "this packet exceeds `mtu`" for `packet`, from its destination to its source.
///
/// `None` if no error may be sent: `packet` is an ICMP error, a fragment that is not the first, not
/// from a single host's address, or not IP (RFC 1122 section 3.2.2, RFC 4443 section 2.4).
pub fn too_big(packet: &[u8], mtu: u32) -> Option<Vec<u8>> {
    let parsed = IpPacket::parse(packet).ok()?;
    let packet = &packet[..parsed.total_len];
    let nobody = match parsed.src {
        IpAddr::V4(src) => src.is_unspecified() || src.is_multicast() || src.is_broadcast(),
        IpAddr::V6(src) => src.is_unspecified() || src.is_multicast(),
    };
    if nobody || is_error(&parsed, packet) || parsed.fragment_offset(packet) != 0 {
        return None;
    }
    match (parsed.src, parsed.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let quote = &packet[..packet.len().min(QUOTE_V4)];
            let mut m = vec![0; 28];
            m[0] = 0x45;
            m[8] = 64;
            m[9] = PROTO_ICMP;
            m[12..16].copy_from_slice(&dst.octets());
            m[16..20].copy_from_slice(&src.octets());
            m[20] = 3; // destination unreachable
            m[21] = 4; // fragmentation needed
            m[26..28].copy_from_slice(&(mtu.min(0xffff) as u16).to_be_bytes());
            m.extend(quote);
            let total = m.len();
            crate::ip::set_length(&mut m, 20, total, None);
            let check = checksum::fold(checksum::sum(&m[20..]));
            m[22..24].copy_from_slice(&check.to_be_bytes());
            Some(m)
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let quote = &packet[..packet.len().min(QUOTE_V6)];
            let mut m = vec![0; 48];
            m[0] = 0x60;
            m[6] = PROTO_ICMPV6;
            m[7] = 64;
            m[8..24].copy_from_slice(&dst.octets());
            m[24..40].copy_from_slice(&src.octets());
            m[40] = 2; // packet too big
            m[44..48].copy_from_slice(&mtu.to_be_bytes());
            m.extend(quote);
            let total = m.len();
            crate::ip::set_length(&mut m, 40, total, None);
            let pseudo = checksum::pseudo_header(parsed.dst, parsed.src, PROTO_ICMPV6, total - 40);
            let check = checksum::fold(pseudo + checksum::sum(&m[40..]));
            m[42..44].copy_from_slice(&check.to_be_bytes());
            Some(m)
        }
        _ => None,
    }
}

/// Offset of the quoted packet in an ICMP error; `None` if `packet` is no error.
///
/// The errors are those of RFC 792 except redirects, and of RFC 4443. Extensions after the quote
/// (RFC 4884) are part of the rest.
pub fn quote(ip: &IpPacket, packet: &[u8]) -> Option<usize> {
    let (protocol, at) = ip.transport(packet).ok()??;
    let kind = *packet.get(at)?;
    let error = match protocol {
        PROTO_ICMP if !ip.is_v6() => matches!(kind, 3 | 4 | 11 | 12),
        PROTO_ICMPV6 if ip.is_v6() => matches!(kind, 1..=4),
        _ => false,
    };
    error.then_some(at + HEADER_LEN)
}

/// Whether this is an ICMP error, or may be one.
fn is_error(ip: &IpPacket, packet: &[u8]) -> bool {
    let Ok(Some((protocol, at))) = ip.transport(packet) else {
        return true;
    };
    match (protocol, packet.get(at)) {
        (PROTO_ICMP, kind) => !matches!(kind, Some(0 | 8 | 13..=18)),
        (PROTO_ICMPV6, kind) => !matches!(kind, Some(128..=255)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn v4_answer_goes_back_to_the_source_with_the_mtu() {
        let mut p = vec![0; 1500];
        p[0] = 0x45;
        p[9] = 17;
        p[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        crate::ip::set_length(&mut p, 20, 1500, None);
        let m = too_big(&p, 1400).unwrap();
        assert_eq!(m.len(), 576);
        let parsed = IpPacket::parse(&m).unwrap();
        assert_eq!(parsed.dst, "10.0.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(m[20..22], [3, 4]);
        assert_eq!(m[26..28], 1400u16.to_be_bytes());
        assert_eq!(checksum::fold(checksum::sum(&m[..20])), 0);
        assert_eq!(checksum::fold(checksum::sum(&m[20..])), 0);
        assert_eq!(m[28..], p[..548]);
    }

    fn ping(kind: u8, src: [u8; 4]) -> Vec<u8> {
        let mut p = vec![0; 100];
        p[0] = 0x45;
        p[9] = PROTO_ICMP;
        p[12..16].copy_from_slice(&src);
        p[20] = kind;
        crate::ip::set_length(&mut p, 20, 100, None);
        p
    }

    #[test]
    fn an_error_is_not_answered_with_an_error() {
        for kind in [3, 4, 5, 11, 12, 1, 255] {
            assert_eq!(too_big(&ping(kind, [10, 0, 0, 1]), 90), None, "type {kind}");
        }
    }

    #[test]
    fn an_echo_learns_the_mtu() {
        for kind in [0, 8] {
            assert!(too_big(&ping(kind, [10, 0, 0, 1]), 90).is_some());
        }
    }

    #[test]
    fn a_packet_without_a_single_source_is_not_answered_with_an_error() {
        for src in [[0; 4], [255; 4], [224, 0, 0, 1]] {
            assert_eq!(too_big(&ping(8, src), 90), None, "{src:?}");
        }
    }

    #[test]
    fn the_quote_of_an_error_is_located() {
        for (kind, at) in [(3, Some(28)), (11, Some(28)), (5, None), (8, None)] {
            let p = ping(kind, [10, 0, 0, 1]);
            let ip = IpPacket::parse(&p).unwrap();
            assert_eq!(quote(&ip, &p), at, "type {kind}");
        }
    }
}
