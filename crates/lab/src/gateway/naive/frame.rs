//! Format of the naive encapsulator: a virtual IP header, a protocol header with an HMAC, the packet.

use std::net::Ipv4Addr;
use std::sync::LazyLock;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::hmac::{Context, HMAC_SHA256, Key, Tag};
use seikan_proto::segment;
use seikan_wire::ip::{IpPacket, PROTO_TCP, PROTO_UDP};
use seikan_wire::{checksum, tcp, udp};

/// UDP port of both ends.
pub const PORT: u16 = 7777;
/// Bytes of the virtual IP header.
const VIRTUAL_IP: usize = 20;
/// Bytes of the protocol header: magic, length, number, fill, and the HMAC.
const PROTOCOL: usize = 64;
/// Bytes of the HMAC with SHA-256 (RFC 2104), the end of the protocol header.
const MAC: usize = 32;
/// Bytes before the packet.
pub(super) const HEADER: usize = VIRTUAL_IP + PROTOCOL;
const MAGIC: [u8; 4] = *b"nave";
static KEY: LazyLock<Key> =
    LazyLock::new(|| Key::new(HMAC_SHA256, b"a key that everybody knows, once"));

/// The destination of an IPv4 packet.
pub(super) fn destination(packet: &[u8]) -> Option<Ipv4Addr> {
    let header = packet.first_chunk::<20>()?;
    (header[0] >> 4 == 4).then(|| Ipv4Addr::new(header[16], header[17], header[18], header[19]))
}

/// Fills in the header before the packet, which starts at [`HEADER`]: a virtual IP header with the
/// packet's own addresses, then the protocol header, its HMAC over everything else.
pub(super) fn seal(datagram: &mut [u8], number: u64) {
    let (header, packet) = datagram.split_at_mut(HEADER);
    header.fill(0);
    header[0] = 0x45;
    header[2..4].copy_from_slice(&((HEADER + packet.len()) as u16).to_be_bytes());
    header[8..10].copy_from_slice(&[64, 253]);
    header[12..20].copy_from_slice(&packet[12..20]);
    header[20..24].copy_from_slice(&MAGIC);
    header[24..28].copy_from_slice(&(packet.len() as u32).to_be_bytes());
    header[28..36].copy_from_slice(&number.to_be_bytes());
    let (clear, tag) = header.split_at_mut(HEADER - MAC);
    tag.copy_from_slice(hmac(clear, packet).as_ref());
}

fn hmac(clear: &[u8], packet: &[u8]) -> Tag {
    let mut context = Context::with_key(&KEY);
    context.update(clear);
    context.update(packet);
    context.sign()
}

/// Kinds of IP packets from outside.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrival<'a> {
    /// Not a fragment, and not for this port.
    NotOurs,
    /// A fragment that does not begin with the header.
    Headless,
    /// The first fragment of something larger.
    Cut,
    /// A datagram without the HMAC of the other end.
    Foreign,
    /// The packet that the datagram contains.
    Packet(&'a mut [u8]),
}

/// Opens a received IP packet. Expects the header where it is in an unfragmented packet.
pub(super) fn open(packet: &mut [u8]) -> Arrival<'_> {
    let Some(&ip) = packet.first_chunk::<20>() else {
        return Arrival::NotOurs;
    };
    let start = usize::from(ip[0] & 15) * 4;
    let fragment = u16::from_be_bytes([ip[6], ip[7]]);
    if ip[0] >> 4 != 4 || ip[9] != PROTO_UDP {
        return Arrival::NotOurs;
    }
    if fragment & 0x1fff != 0 {
        return Arrival::Headless;
    }
    let ours = packet.get(start + 2..start + 4) == Some(&PORT.to_be_bytes());
    if !ours {
        return Arrival::NotOurs;
    }
    if fragment & 0x2000 != 0 {
        return Arrival::Cut;
    }
    let Some((header, inner)) = packet
        .get_mut(start + 8..)
        .and_then(|datagram| datagram.split_at_mut_checked(HEADER))
    else {
        return Arrival::Foreign;
    };
    let (clear, tag) = header.split_at(HEADER - MAC);
    let genuine =
        clear[20..24] == MAGIC && verify_slices_are_equal(hmac(clear, inner).as_ref(), tag).is_ok();
    if genuine {
        Arrival::Packet(inner)
    } else {
        Arrival::Foreign
    }
}

/// Fills in the TCP or UDP checksum. If it was left to the sender's NIC, the packet socket sees the
/// packet without it.
pub(super) fn complete_checksum(packet: &mut [u8]) {
    let Ok(ip) = IpPacket::parse(packet) else {
        return;
    };
    let field = ip.header_len
        + match ip.protocol {
            PROTO_TCP => tcp::CHECKSUM_AT,
            PROTO_UDP => udp::CHECKSUM_AT,
            _ => return,
        };
    let length = packet.len() - ip.header_len;
    let Some(field) = packet.get_mut(field..field + 2).filter(|_| !ip.fragment) else {
        return;
    };
    let pseudo = checksum::pseudo_header(ip.src, ip.dst, ip.protocol, length);
    field.copy_from_slice(&checksum::add_carries(pseudo).to_be_bytes());
    segment::complete_checksum(packet, &ip);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An IP packet around a datagram with our header on `inner`, cut to fragment `offset` (in
    /// units of 8 bytes).
    fn outside(inner: &[u8], fragment: u16) -> Vec<u8> {
        let mut datagram = vec![0; HEADER];
        datagram.extend(inner);
        seal(&mut datagram, 1);
        let mut packet = vec![0x45, 0, 0, 0, 0, 0];
        packet.extend(fragment.to_be_bytes());
        packet.extend([64, PROTO_UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        packet.extend([PORT, PORT, 0, 0].map(u16::to_be_bytes).concat());
        packet.extend(datagram);
        packet
    }

    fn inner() -> Vec<u8> {
        let mut packet = vec![
            0x45, 0, 0, 30, 0, 0, 0, 0, 64, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8,
        ];
        packet.extend([7; 10]);
        packet
    }

    #[test]
    fn a_whole_packet_comes_out_as_it_went_in() {
        assert_eq!(
            open(&mut outside(&inner(), 0x4000)),
            Arrival::Packet(&mut inner())
        );
    }

    #[test]
    fn fragments_are_lost() {
        assert_eq!(open(&mut outside(&inner(), 0x2000)), Arrival::Cut);
        assert_eq!(open(&mut outside(&inner(), 0x2001)), Arrival::Headless);
        assert_eq!(open(&mut outside(&inner(), 0x0001)), Arrival::Headless);
    }

    #[test]
    fn a_changed_packet_is_foreign() {
        let mut packet = outside(&inner(), 0);
        *packet.last_mut().expect("bytes") ^= 1;
        assert_eq!(open(&mut packet), Arrival::Foreign);
        assert_eq!(open(&mut outside(&inner(), 0)[..60]), Arrival::Foreign);
    }

    #[test]
    fn checksums_are_completed() {
        // UDP 10.0.0.1:1 to 10.0.0.2:2 without payload: the words 0a00 0001 0a00 0002 0011 0008,
        // 0001 0002 0008 add up to 1427.
        let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, PROTO_UDP, 0, 0];
        packet.extend([10, 0, 0, 1, 10, 0, 0, 2, 0, 1, 0, 2, 0, 8, 0xab, 0xcd]);
        complete_checksum(&mut packet);
        assert_eq!(packet[26..28], (!0x1427_u16).to_be_bytes());
    }
}
