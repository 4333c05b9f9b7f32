//! Any bytes as a frame from the LAN: decoding and encoding returns the same bytes, and generated
//! responses can be decoded.
use seikan_wire::arp::{ARP_LEN, Arp, Operation};
use seikan_wire::ethernet::{ETHERTYPE_ARP, ETHERTYPE_IPV6, TAGGED_HEADER_LEN};
use seikan_wire::ip::PROTO_ICMPV6;
use seikan_wire::neighbour::Neighbour;
use seikan_wire::{Ethernet, IpPacket, Mac, checksum};

const US: Mac = Mac([2, 0, 0x5e, 0x10, 0, 1]);

/// One input.
pub fn run(frame: &[u8]) {
    let Ok(header) = Ethernet::parse(frame) else {
        return;
    };
    let mut written = [0; TAGGED_HEADER_LEN];
    let length = header.write(&mut written);
    assert_eq!(length, header.header_len);
    assert_eq!(written[..length], frame[..length]);
    assert!(header.vlan_id().is_none_or(|id| (1..4096).contains(&id)));
    for mac in [header.dst, header.src] {
        assert_eq!(mac.to_string().parse(), Ok(mac));
    }

    let payload = &frame[length..];
    match header.ethertype {
        ETHERTYPE_ARP => arp(payload),
        ETHERTYPE_IPV6 => {
            neighbour(payload);
            let mut corrected = payload.to_vec();
            correct_checksum(&mut corrected);
            neighbour(&corrected);
        }
        _ => {}
    }
}

fn arp(payload: &[u8]) {
    let Ok(arp) = Arp::parse(payload) else {
        return;
    };
    assert_eq!(arp.to_bytes(), payload[..ARP_LEN]);
    let answer = arp.reply(US);
    assert_eq!(Arp::parse(&answer.to_bytes()), Ok(answer));
    assert_eq!(
        (answer.operation, answer.sender),
        (Operation::Reply, arp.target)
    );
    assert!(!(arp.is_probe() && arp.is_announcement()));
}

fn neighbour(payload: &[u8]) {
    let packet = match Neighbour::parse(payload) {
        Err(_) => return,
        Ok(Neighbour::Advertisement(reply)) => reply.to_packet(),
        Ok(Neighbour::Solicitation(asked)) => {
            let answer = asked.answer(US);
            let answered = Neighbour::parse(&answer.to_packet());
            assert_eq!(answered, Ok(Neighbour::Advertisement(answer)));
            asked.to_packet()
        }
    };
    assert_eq!(Neighbour::parse(&packet), Neighbour::parse(payload));
}

/// A fuzzer cannot find a checksum.
fn correct_checksum(packet: &mut [u8]) {
    let Ok(ip) = IpPacket::parse(packet) else {
        return;
    };
    let message = &mut packet[ip.header_len..ip.total_len];
    if ip.protocol == PROTO_ICMPV6 && message.len() >= 4 {
        message[2..4].fill(0);
        let pseudo = checksum::pseudo_header(ip.src, ip.dst, PROTO_ICMPV6, message.len());
        let check = checksum::fold(pseudo + checksum::sum(message));
        message[2..4].copy_from_slice(&check.to_be_bytes());
    }
}
