//! Two tunnels back to back, without a network between them: the first packets of a life.

mod sim;

use seikan_proto::noise::Construction;
use sim::{Pair, tcp_super_packet, udp_packet};

#[test]
fn packets_cross_in_both_protocols_and_both_directions() {
    for construction in [Construction::WireGuard, Construction::Native] {
        let mut pair = Pair::new(construction, 1);
        pair.send(0, &[udp_packet(0, 1, 100, 7)]);
        pair.settle();
        let at_b = pair.take_delivered(1);
        assert_eq!(
            at_b,
            [udp_packet(0, 1, 100, 7)[10..].to_vec()],
            "{construction:?}"
        );
        pair.send(1, &[udp_packet(1, 0, 100, 8)]);
        pair.settle();
        assert_eq!(
            pair.take_delivered(0),
            [udp_packet(1, 0, 100, 8)[10..].to_vec()],
            "{construction:?}"
        );
        pair.assert_ledgers_close();
    }
}

#[test]
fn a_tcp_super_packet_arrives_as_one_write_with_the_same_payload() {
    for construction in [Construction::WireGuard, Construction::Native] {
        let mut pair = Pair::new(construction, 2);
        pair.send(0, &[udp_packet(0, 1, 10, 0)]);
        pair.settle();
        pair.take_delivered(1);
        let read = tcp_super_packet(0, 1, 40_000, 1368, 1000);
        pair.send(0, &[read.clone()]);
        pair.settle();
        let delivered = pair.take_delivered(1);
        let payload: Vec<u8> = delivered.iter().flat_map(|p| p[40..].to_vec()).collect();
        assert!(payload == read[50..], "{construction:?}");
        assert_eq!(delivered.len(), 1, "{construction:?}");
        pair.assert_ledgers_close();
    }
}
