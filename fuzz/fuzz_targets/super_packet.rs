//! Any bytes as a read of the TUN device, and of a TAP device: an accepted super-packet can be
//! segmented, and the segments add up to it.
use seikan_proto::mode::Mode;
use seikan_proto::segment::{self, SuperPacket};
use seikan_wire::{IpPacket, VNET_HDR_LEN};

/// One input.
pub fn run(read: &[u8]) {
    let packet = read.get(VNET_HDR_LEN..).unwrap_or_default();
    for mode in [Mode::Ip, Mode::Ethernet] {
        match mode.ip_at(packet) {
            Ok(Some(ip_at)) => segments(read, ip_at),
            Ok(None) => {
                let _ = segment::complete_any_checksum(&mut read.to_vec());
            }
            Err(_) => {}
        }
    }
}

fn segments(read: &[u8], ip_at: usize) {
    let Ok(packet) = SuperPacket::parse_at(read, ip_at) else {
        return;
    };
    assert_eq!(packet.ip_at, ip_at);
    assert!(segment::packets_in(read) >= packet.segments() as u64);
    assert!(packet.header_len <= packet.bytes.len());
    let segments = packet.segments();
    let mut payload = 0;
    for i in 0..segments {
        let length = packet.segment_len(i);
        let mut out = vec![0; length];
        packet.segment(i, i % 2 == 0, &mut out);
        assert_eq!(out[..ip_at], packet.bytes[..ip_at]);
        let parsed = IpPacket::parse(&out[ip_at..]).expect("a segment is a packet");
        if packet.kind.is_some() {
            assert!(ip_at + parsed.total_len == length, "{parsed:?} of {length}");
            assert!(length > packet.header_len, "a segment carries something");
        }
        payload += length - packet.header_len.min(length);
    }
    if packet.kind.is_some() {
        assert_eq!(payload, packet.payload().len());
    }
}
