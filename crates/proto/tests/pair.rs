//! Two tunnels on a good path: their first packets.

use crate::sim::World;
use crate::sim::packets::Flow;
use seikan_proto::noise::Protocol;
use std::time::Duration;

const BOTH: [Protocol; 2] = [Protocol::WireGuard, Protocol::Native];

#[test]
fn packets_cross_in_both_protocols_and_both_directions() {
    for protocol in BOTH {
        for from in [0, 1] {
            let mut world = World::new(protocol, 1);
            for flow in [Flow::udp(from), Flow::udp(from).v6()] {
                world.send(from, &[flow.datagram(1, 100)]);
                world.run(Duration::from_secs(1));
                assert_eq!(world.take_delivered(1 - from), [flow.datagram(1, 100)]);
            }
            world.check_nothing_pending();
        }
    }
}

#[test]
fn a_tcp_super_packet_arrives_as_one_write_with_the_same_payload() {
    for protocol in BOTH {
        for flow in [Flow::tcp(0), Flow::tcp(0).v6()] {
            let mut world = World::new(protocol, 2);
            world.establish();
            let read = flow.segments(0, 40_000, 1348);
            world.send(0, std::slice::from_ref(&read));
            world.run(Duration::from_secs(1));
            assert_eq!(world.take_delivered(1), [read], "{protocol:?} {flow:?}");
            world.check_nothing_pending();
        }
    }
}
