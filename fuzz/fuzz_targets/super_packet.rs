//! Any bytes as a read of the TUN device: an accepted super-packet can be segmented, and the
//! segments add up to it.
use seikan_proto::segment::SuperPacket;
use seikan_wire::IpPacket;

/// One input.
pub fn run(read: &[u8]) {
    let Ok(packet) = SuperPacket::parse(read) else {
        return;
    };
    assert!(packet.header_len <= packet.bytes.len());
    let segments = packet.segments();
    let mut payload = 0;
    for i in 0..segments {
        let length = packet.segment_len(i);
        let mut out = vec![0; length];
        packet.segment(i, i % 2 == 0, &mut out);
        let parsed = IpPacket::parse(&out).expect("a segment is a packet");
        if packet.kind.is_some() {
            assert!(parsed.total_len == length, "{parsed:?} of {length}");
            assert!(length > packet.header_len, "a segment carries something");
        }
        payload += length - packet.header_len.min(length);
    }
    if packet.kind.is_some() {
        assert_eq!(payload, packet.payload().len());
    }
}
