//! Packets from a tunnel to the stack in user space: what it sends can be parsed and is bounded by what it received, and so are
//! its connections and their buffers.
//!
//! The input is a script: an operation, two bytes for it, a length of two bytes, and as many bytes.
use seikan_userspace::fuzzing::Machine;
use seikan_wire::ip::{PROTO_TCP, PROTO_UDP};
use seikan_wire::{IpPacket, VNET_HDR_LEN, VnetHdr, checksum};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const OWN_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const OWN_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
const PEER_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const PEER_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);
/// Ports of the stack: one that is exposed, one for datagrams, one that listens, and one that nothing has.
const PORTS: [u16; 4] = [22, 53, 80, 9];
/// Bytes of an answer that do not depend on the packet: headers, and the start of a packet in an ICMP error.
const ANSWER: usize = 600;

/// One input.
pub fn run(script: &[u8]) {
    let nets = ["10.0.0.1/24", "fd00::1/64"].map(|net| net.parse().expect(net));
    let mut machine = Machine::new(nets.to_vec());
    let mut last = Vec::new();
    let (mut delivered, mut bytes_in, mut sent, mut bytes_out) = (0, 0, 0, 0);
    let mut rest = script;
    while let Some((&[operation, a, b, l0, l1], tail)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([l0, l1])).min(tail.len());
        let (bytes, tail) = tail.split_at(length);
        rest = tail;
        let packet = match operation % 4 {
            // Any bytes, also as the header of the device.
            0 => bytes.to_vec(),
            // A protocol over either version, with a valid header.
            1 => packet(a & 1 == 1, b, bytes),
            // A transport header with ports of the stack, which a fuzzer finds too rarely.
            2 => transport(a, b, bytes),
            // A segment that continues what the stack has sent last.
            _ => following(&last, a, bytes),
        };
        let answers = machine.deliver(&packet);
        delivered += 1;
        bytes_in += packet.len();
        for answer in answers {
            let header = VnetHdr::read(&answer).expect("a header");
            let ip = IpPacket::parse(&answer[VNET_HDR_LEN..]).expect("a packet");
            assert_eq!(ip.total_len, answer.len() - VNET_HDR_LEN, "{header:?}");
            assert!([IpAddr::V4(OWN_V4), IpAddr::V6(OWN_V6)].contains(&ip.src));
            sent += 1;
            bytes_out += answer.len();
            last = answer;
        }
        let (connections, buffers) = machine.usage();
        assert!(
            connections <= 64 && buffers <= 64 << 20,
            "{connections}, {buffers}"
        );
    }
    // One answer each, and SYN-ACKs that are sent again.
    assert!(sent <= 2 * delivered + 64, "{sent} for {delivered}");
    let most = bytes_in + ANSWER * (2 * delivered + 64);
    assert!(bytes_out <= most, "{bytes_out} for {bytes_in}");
}

/// A packet to the stack. The checksum of its transport is partial, as a fuzzer finds none.
fn packet(is_v6: bool, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let length = payload.len().min(65_000);
    let payload = &payload[..length];
    let header = VnetHdr {
        needs_csum: true,
        csum_start: if is_v6 { 40 } else { 20 },
        csum_offset: if protocol == PROTO_UDP { 6 } else { 16 },
        ..VnetHdr::default()
    };
    let mut out = header.to_bytes().to_vec();
    if is_v6 {
        out.extend([0x60, 0, 0, 0]);
        out.extend((length as u16).to_be_bytes());
        out.extend([protocol, 64]);
        out.extend(PEER_V6.octets());
        out.extend(OWN_V6.octets());
    } else {
        let mut ip = vec![0x45, 0];
        ip.extend((20 + length as u16).to_be_bytes());
        ip.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
        ip.extend(PEER_V4.octets());
        ip.extend(OWN_V4.octets());
        let sum = checksum::fold(checksum::sum(&ip));
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        out.extend(ip);
    }
    out.extend(payload);
    out
}

fn transport(a: u8, b: u8, bytes: &[u8]) -> Vec<u8> {
    let port = PORTS[usize::from(a >> 1) % PORTS.len()];
    let protocol = if b & 1 == 0 { PROTO_TCP } else { PROTO_UDP };
    let mut segment = vec![0x80 | b & 7, 0];
    segment.extend(port.to_be_bytes());
    segment.extend(bytes);
    if protocol == PROTO_UDP && segment.len() >= 8 {
        let length = segment.len() as u16;
        segment[4..6].copy_from_slice(&length.to_be_bytes());
    }
    packet(a & 1 == 1, protocol, &segment)
}

/// A segment of the far end that acknowledges the last one of the stack; its flags are `flags`, and `bytes` its payload.
fn following(last: &[u8], flags: u8, bytes: &[u8]) -> Vec<u8> {
    let Some(sent) = last.get(VNET_HDR_LEN..) else {
        return Vec::new();
    };
    let Ok(ip) = IpPacket::parse(sent) else {
        return Vec::new();
    };
    let tcp = &sent[ip.header_len..];
    if ip.protocol != PROTO_TCP || tcp.len() < 20 {
        return packet(false, PROTO_TCP, bytes);
    }
    let mut segment = Vec::new();
    segment.extend(&tcp[2..4]);
    segment.extend(&tcp[..2]);
    // Its numbers are those that the stack expects.
    segment.extend(&tcp[8..12]);
    let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
    segment.extend(sequence.wrapping_add(1).to_be_bytes());
    segment.extend([5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
    segment.extend(bytes);
    packet(ip.is_v6(), PROTO_TCP, &segment)
}
