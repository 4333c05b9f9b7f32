//! Any packet with any address mapping: a valid checksum stays valid and an invalid one invalid; a
//! refused packet is unchanged.
//!
//! Input: a byte that selects the mapping, 64 bytes of new addresses, the packet.
use seikan_proto::gateway::translate::translate;
use seikan_wire::ip::{PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};
use seikan_wire::{IpPacket, checksum, icmp};
use std::net::IpAddr;

/// DCCP and UDP-Lite, whose checksums may omit payload but never the pseudo-header.
const OTHERS: [u8; 2] = [33, 136];

/// One input.
pub fn run(input: &[u8]) {
    let Some((&[choice], rest)) = input.split_first_chunk() else {
        return;
    };
    let Some((new, original)) = rest.split_first_chunk::<64>() else {
        return;
    };
    let Ok(ip) = IpPacket::parse(original) else {
        return;
    };
    let partial = choice & 0x10 != 0;
    let mapping = mapping(choice, new, &ip, original);
    let mut packet = original.to_vec();
    if translate(&mut packet, &ip, &mapping, partial).is_err() {
        assert_eq!(packet, original, "changed though refused");
        return;
    }

    let after = IpPacket::parse(&packet).expect("still a packet");
    let moved = |address: IpAddr| {
        let pair = mapping.iter().find(|(from, _)| *from == address);
        pair.filter(|(_, to)| to.is_ipv4() == address.is_ipv4())
            .map_or(address, |(_, to)| *to)
    };
    let expected = IpPacket {
        src: moved(ip.src),
        dst: moved(ip.dst),
        ..ip
    };
    assert_eq!(after, expected);
    assert_eq!(packet[ip.total_len..], original[ip.total_len..]);
    same_sums(original, &packet, partial);

    // A packet that an ICMP error quotes completely is checked, too.
    let Some(quote) = icmp::quote(&ip, original).filter(|at| *at < ip.total_len) else {
        return;
    };
    let [before, after] = [original, &packet].map(|packet| &packet[quote..ip.total_len]);
    if IpPacket::parse(before).is_ok_and(|quoted| quoted.is_v6() == ip.is_v6()) {
        same_sums(before, after, false);
    }
}

/// Returns mappings for the addresses of the packet and of the quoted one, as selected by `choice`.
fn mapping(choice: u8, new: &[u8; 64], ip: &IpPacket, packet: &[u8]) -> Vec<(IpAddr, IpAddr)> {
    let mut old = vec![ip.src, ip.dst];
    let quoted = icmp::quote(ip, packet)
        .and_then(|at| packet.get(at..))
        .and_then(|quote| IpPacket::parse_headers(quote).ok());
    old.extend(quoted.iter().flat_map(|quoted| [quoted.src, quoted.dst]));
    let v6 = ip.is_v6() != (choice & 0x20 != 0);
    let pairs = old.into_iter().zip(new.chunks_exact(16)).enumerate();
    pairs
        .filter(|(i, _)| choice >> i & 1 != 0)
        .map(|(_, (old, new))| {
            let six: [u8; 16] = new.try_into().expect("16 bytes");
            let [four @ .., _, _, _, _, _, _, _, _, _, _, _, _] = six;
            (
                old,
                if v6 {
                    six.into()
                } else {
                    IpAddr::from(four as [u8; 4])
                },
            )
        })
        .collect()
}

/// The sums of the IPv4 header and of the transport are unchanged, except for one's complement's
/// two zeros.
fn same_sums(before: &[u8], after: &[u8], partial: bool) {
    let header =
        |packet: &[u8]| checksum::sum(&packet[..usize::from(packet[0] & 0x0f) * 4]) % 0xffff;
    if before[0] >> 4 == 4 {
        assert_eq!(header(before), header(after), "header");
    }
    if let Some(sum) = transport_sum(before, partial) {
        assert_eq!(Some(sum), transport_sum(after, partial), "transport");
    }
}

/// Returns the receiver's sum over the transport's part; `None` without a checksum.
fn transport_sum(packet: &[u8], partial: bool) -> Option<u64> {
    let ip = IpPacket::parse(packet).ok()?;
    let (protocol, at) = ip.transport(packet).ok()??;
    if ip.source_routed(packet) {
        return None;
    }
    let bytes = &packet[at..ip.total_len];
    let field_at = match protocol {
        PROTO_TCP => 16,
        PROTO_ICMP if !ip.is_v6() => 2,
        PROTO_ICMPV6 if ip.is_v6() => 2,
        PROTO_UDP => 6,
        protocol if OTHERS.contains(&protocol) => 6,
        _ => return None,
    };
    let field = bytes.get(field_at..field_at + 2)?;
    if matches!(protocol, PROTO_UDP | 136) && field == [0, 0] && !partial {
        return None;
    }
    let pseudo = match protocol {
        PROTO_ICMP => 0,
        _ => checksum::pseudo_header(ip.src, ip.dst, protocol, bytes.len()),
    };
    if partial {
        // The field is the pseudo-header's sum.
        let complement = u64::from(!u16::from_be_bytes([field[0], field[1]]));
        return Some((pseudo + complement) % 0xffff);
    }
    Some((pseudo + checksum::sum(bytes)) % 0xffff)
}
