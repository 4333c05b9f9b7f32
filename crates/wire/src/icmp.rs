//! The one kind of ICMP message that a tunnel originates: "packet too big" (RFC 1191, RFC 8201).

use crate::checksum;
use crate::ip::{IpPacket, PROTO_ICMP, PROTO_ICMPV6};
use std::net::IpAddr;

/// Bytes of the offending packet quoted in an ICMPv4 error (RFC 1812: as much as fits 576).
const QUOTE_V4: usize = 576 - 28;
/// Bytes of the offending packet quoted in an ICMPv6 error (RFC 4443 section 3.2: up to 1280).
const QUOTE_V6: usize = 1280 - 48;

/// Builds the answer "this packet exceeds `mtu`" to `packet`, from its destination to its source.
///
/// `None` when no error may be sent: `packet` is itself an ICMP message, a fragment that is not the
/// first is asked about, or it is not IP (RFC 1122 section 3.2.2).
pub fn too_big(packet: &[u8], mtu: u32) -> Option<Vec<u8>> {
    let parsed = IpPacket::parse(packet).ok()?;
    if matches!(parsed.protocol, PROTO_ICMP | PROTO_ICMPV6) || parsed.fragment {
        return None;
    }
    let packet = &packet[..parsed.total_len];
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

    #[test]
    fn no_error_about_an_error() {
        let mut p = vec![0; 100];
        p[0] = 0x45;
        p[9] = PROTO_ICMP;
        crate::ip::set_length(&mut p, 20, 100, None);
        assert_eq!(too_big(&p, 90), None);
    }
}
