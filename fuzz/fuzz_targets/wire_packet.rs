//! Any bytes as an IP packet: parsing never reads outside, and changes in place keep it consistent.
use seikan_wire::ip::{self, PROTO_TCP};
use seikan_wire::{IpPacket, checksum, icmp, tcp};

/// One input.
pub fn run(bytes: &[u8]) {
    let Ok(packet) = IpPacket::parse(bytes) else {
        return;
    };
    assert!(packet.header_len <= packet.total_len && packet.total_len <= bytes.len());
    assert_eq!(packet.is_v6(), bytes[0] >> 4 == 6);

    let mut changed = bytes.to_vec();
    for ecn in [ip::ECN_CE, ip::ECN_ECT0, ip::ecn(bytes)] {
        ip::set_ecn(&mut changed, ecn);
        assert_eq!(ip::ecn(&changed), ecn);
        assert_eq!(
            ip::traffic_class(&changed) >> 2,
            ip::traffic_class(bytes) >> 2
        );
        assert_eq!(IpPacket::parse(&changed), Ok(packet));
    }

    if let Some(answer) = icmp::too_big(bytes, 1280) {
        let answered = IpPacket::parse(&answer).expect("an ICMP error is an IP packet");
        assert_eq!((answered.src, answered.dst), (packet.dst, packet.src));
        assert!(answered.total_len == answer.len() && answer.len() <= 1280);
    }

    if packet.protocol == PROTO_TCP && !packet.fragment {
        let segment = &mut changed[packet.header_len..packet.total_len];
        if tcp::header_len(segment).is_some() {
            let total = |segment: &[u8]| checksum::fold(checksum::sum(segment));
            let before = total(segment);
            tcp::clamp_mss(segment, 1200, false);
            // One's complement has two zeros, which a checksum may exchange.
            let after = total(segment);
            assert!(before == after || (before ^ after == 0xffff && (before == 0 || after == 0)));
        }
    }
}
