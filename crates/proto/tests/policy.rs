//! The packet filter between two tunnels: packets whole, merged, in slices and in fragments.

use crate::sim::network::Path;
use crate::sim::packets::{Flow, raw};
use crate::sim::{Setup, World};
use seikan_observe::DropReason;
use seikan_proto::filter::{Destinations, Filter, Filters, Open};
use seikan_proto::noise::Protocol;
use seikan_wire::ip::{ECN_NOT_ECT, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};
use seikan_wire::tcp;
use std::slice;
use std::time::Duration;

const NATIVE: Protocol = Protocol::Native;
const BOTH: [Protocol; 2] = [Protocol::WireGuard, NATIVE];
const FAMILIES: [bool; 2] = [false, true];

/// Two sides with a session. Side 1 has `open` services for side 0.
fn world(protocol: Protocol, open: Open) -> World {
    let mut world = World::new(protocol, 1);
    world.establish();
    let side = &mut world.sides[1];
    side.tunnel.set_filter(
        side.peer,
        Filters::Same(Filter::Only(open), Destinations::Any),
    );
    world
}

fn tcp_80() -> Open {
    Open {
        tcp: std::iter::once(80..=80).collect(),
        ..Open::default()
    }
}

/// Sends reads. Returns the numbers of packets delivered at the other side and denied by policy
/// there.
fn sent(world: &mut World, from: usize, reads: &[Vec<u8>]) -> (u64, u64) {
    let to = 1 - from;
    let count = |world: &World| {
        let inbound = world.totals(to).inbound;
        (
            inbound.packets_out,
            inbound.drops.get(DropReason::PolicyDenied),
        )
    };
    let before = count(world);
    world.send(from, reads);
    world.run(Duration::from_millis(200));
    world.check();
    let after = count(world);
    (after.0 - before.0, after.1 - before.1)
}

fn segment(from: usize, v6: bool, ports: [u16; 2], flags: u8) -> Vec<u8> {
    let mut header = ports.map(u16::to_be_bytes).concat();
    header.resize(20, 0);
    (header[12], header[13]) = (0x50, flags);
    raw(from, v6, PROTO_TCP, header)
}

fn datagram(from: usize, v6: bool, ports: [u16; 2]) -> Vec<u8> {
    let header = ports.map(u16::to_be_bytes).concat();
    raw(
        from,
        v6,
        PROTO_UDP,
        [header, vec![0, 12, 0, 0, 1, 2, 3, 4]].concat(),
    )
}

#[test]
fn connections_start_at_open_ports_and_replies_pass_everywhere() {
    for protocol in BOTH {
        for v6 in FAMILIES {
            let mut world = world(protocol, tcp_80());
            for (ports, flags, fate) in [
                ([1000, 80], tcp::SYN, (1, 0)),
                ([1000, 81], tcp::SYN, (0, 1)),
                ([1000, 81], tcp::SYN | tcp::ACK, (1, 0)),
                ([1000, 81], tcp::ACK, (1, 0)),
                ([1000, 81], tcp::RST, (1, 0)),
            ] {
                let read = segment(0, v6, ports, flags);
                assert_eq!(sent(&mut world, 0, &[read]), fate, "{ports:?} {flags:#x}");
            }
            // The other side has no policy.
            let read = segment(1, v6, [1000, 81], tcp::SYN);
            assert_eq!(sent(&mut world, 1, &[read]), (1, 0));
        }
    }
}

#[test]
fn datagrams_pass_once_they_are_answers() {
    for protocol in BOTH {
        for v6 in FAMILIES {
            let mut world = world(protocol, tcp_80());
            let answer = datagram(0, v6, [53, 1999]);
            assert_eq!(sent(&mut world, 0, slice::from_ref(&answer)), (0, 1));
            assert_eq!(sent(&mut world, 1, &[datagram(1, v6, [1999, 53])]), (1, 0));
            assert_eq!(sent(&mut world, 0, &[answer]), (1, 0));
        }
    }
}

#[test]
fn replies_to_staged_packets_pass() {
    let mut world = World::new(NATIVE, 1);
    let side = &mut world.sides[1];
    side.tunnel.set_filter(
        side.peer,
        Filters::Same(Filter::Only(Open::default()), Destinations::Any),
    );
    assert_eq!(
        sent(&mut world, 1, &[datagram(1, false, [1999, 53])]),
        (1, 0)
    );
    assert_eq!(
        sent(&mut world, 0, &[datagram(0, false, [53, 1999])]),
        (1, 0)
    );
}

#[test]
fn errors_that_quote_sent_packets_pass() {
    for protocol in BOTH {
        for v6 in FAMILIES {
            let mut world = world(protocol, Open::default());
            let [sent_before, other] = [1999, 1998].map(|port| datagram(1, v6, [port, 53]));
            assert_eq!(sent(&mut world, 1, slice::from_ref(&sent_before)), (1, 0));
            for (about, fate) in [(sent_before, (1, 0)), (other, (0, 1))] {
                let (number, kind) = if v6 {
                    (PROTO_ICMPV6, 1)
                } else {
                    (PROTO_ICMP, 3)
                };
                let packet = &about[seikan_wire::VNET_HDR_LEN..];
                let message = [&[kind, 0, 0, 0, 0, 0, 0, 0], packet].concat();
                let error = raw(0, v6, number, message);
                assert_eq!(sent(&mut world, 0, &[error]), fate, "{protocol:?} {v6}");
            }
        }
    }
}

/// A TCP super-packet is sent in slices, and each is filtered by its own header.
#[test]
fn super_packets_are_filtered_and_counted_by_their_segments() {
    for protocol in BOTH {
        for v6 in FAMILIES {
            let flow = Flow { v6, ..Flow::tcp(0) };
            let read = |flags| flow.segments_with(0, 13_000, 1300, flags, ECN_NOT_ECT, true);
            let mut open = world(protocol, tcp_80());
            assert_eq!(sent(&mut open, 0, &[read(tcp::SYN)]), (10, 0));
            let mut closed = world(protocol, Open::default());
            assert_eq!(sent(&mut closed, 0, &[read(tcp::SYN)]), (0, 10));
            assert_eq!(sent(&mut closed, 0, &[read(tcp::ACK)]), (10, 0));
        }
    }
}

/// A packet that fits no record is sent in fragments and filtered after reassembly.
#[test]
fn fragmented_packets_are_filtered_after_reassembly() {
    for (port, fate) in [(53, (1, 0)), (54, (0, 1))] {
        let narrow = Path {
            mtu: 1280,
            ..Path::default()
        };
        let setups = [Setup::new(NATIVE), Setup::new(NATIVE)];
        let mut world = World::with(setups, [narrow.clone(), narrow], 1);
        world.establish();
        let side = &mut world.sides[1];
        let open = Open {
            udp: std::iter::once(port..=port).collect(),
            ..Open::default()
        };
        side.tunnel.set_filter(
            side.peer,
            Filters::Same(Filter::Only(open), Destinations::Any),
        );
        // A packet of this length does not get through unfragmented.
        let read = Flow::udp(0).datagram(1, 1380);
        assert_eq!(sent(&mut world, 0, &[read]), fate);
    }
}

#[test]
fn without_a_filter_everything_passes_again() {
    let mut world = world(NATIVE, Open::default());
    let read = datagram(0, false, [1999, 1998]);
    assert_eq!(sent(&mut world, 0, slice::from_ref(&read)), (0, 1));
    let side = &mut world.sides[1];
    side.tunnel
        .set_filter(side.peer, Filters::Same(Filter::All, Destinations::Any));
    assert_eq!(sent(&mut world, 0, &[read]), (1, 0));
}
