//! A peer with several candidates: initiations go to all of them until one answers.

use crate::sim::network::Path;
use crate::sim::packets::Flow;
use crate::sim::{Setup, World, address};
use seikan_observe::DropReason;
use seikan_proto::birthday::{Mapping, NatMappings};
use seikan_proto::constants::MAX_CANDIDATES;
use seikan_proto::noise::Protocol;
use std::net::SocketAddr;
use std::time::Duration;

/// Two sides that do not know each other's address.
fn unknown_sources(protocol: Protocol) -> World {
    let setup = Setup {
        knows_endpoint: false,
        ..Setup::new(protocol)
    };
    World::with(
        [setup.clone(), setup],
        [Path::default(), Path::default()],
        1,
    )
}

fn set_candidates(world: &mut World, side: usize, candidates: &[SocketAddr]) {
    let now = world.now(side).mono;
    let side = &mut world.sides[side];
    side.tunnel.set_candidates(side.peer, candidates, now);
}

/// An address without a host.
fn nowhere(n: u8) -> SocketAddr {
    SocketAddr::from(([198, 51, 100, n], 7))
}

#[test]
fn the_first_packet_takes_two_round_trips_wherever_the_peer_is() {
    for protocol in [Protocol::Native, Protocol::WireGuard] {
        let mut world = unknown_sources(protocol);
        set_candidates(&mut world, 0, &[nowhere(1), nowhere(2), address(1, false)]);
        world.send(0, &[Flow::udp(0).datagram(0, 100)]);
        // 10 ms in each direction: initiation, response, packet.
        world.run(Duration::from_millis(29));
        assert_eq!(world.sides[1].delivered.len(), 0);
        world.run(Duration::from_millis(2));
        assert_eq!(world.sides[1].delivered.len(), 1, "{protocol:?}");
        assert_eq!(world.peer(0).path.endpoint, Some(address(1, false)));
        assert_eq!(world.peer(1).path.endpoint, Some(address(0, false)));
    }
}

#[test]
fn a_duplicate_candidate_is_tried_once() {
    let mut world = unknown_sources(Protocol::Native);
    let there = address(1, false);
    set_candidates(&mut world, 0, &[there, there]);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    assert_eq!(world.take_sent(0).len(), 1);
    world.run(Duration::from_millis(100));
    let drops = world.totals(1).inbound.drops;
    assert_eq!(drops.get(DropReason::ReplayedHandshake), 0);
    assert_eq!(world.sides[1].delivered.len(), 1);
}

#[test]
fn an_answering_peer_is_not_sent_further_initiations() {
    let mut world = unknown_sources(Protocol::Native);
    set_candidates(&mut world, 0, &[nowhere(1), address(1, false)]);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    world.run(Duration::from_secs(1));
    world.take_sent(0);
    // Beyond the age at which the session is renewed.
    for seq in 1..140 {
        world.send(0, &[Flow::udp(0).datagram(seq, 100)]);
        world.run(Duration::from_secs(1));
    }
    assert!(world.totals(0).handshakes.completed >= 2);
    let elsewhere = world.take_sent(0);
    let elsewhere = elsewhere
        .iter()
        .filter(|parcel| parcel.to != address(1, false));
    assert_eq!(elsewhere.count(), 0);
}

#[test]
fn a_peer_that_moved_silently_is_found_among_its_candidates() {
    let mut world = unknown_sources(Protocol::Native);
    set_candidates(&mut world, 0, &[address(1, false)]);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    world.run(Duration::from_secs(1));
    let new: SocketAddr = "203.0.113.9:99".parse().expect("an address");
    world.sides[1].address = new;
    set_candidates(&mut world, 0, &[address(1, false), new]);
    // Data without an answer for 15 s leads to a new handshake. Its first initiation goes to the
    // endpoint, the second, 5 s later, to all candidates.
    for seq in 1..22 {
        world.send(0, &[Flow::udp(0).datagram(seq, 100)]);
        world.run(Duration::from_secs(1));
    }
    assert_eq!(world.peer(0).path.endpoint, Some(new));
}

#[test]
fn without_candidates_a_packet_is_dropped_with_its_reason() {
    let mut world = unknown_sources(Protocol::Native);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    let drops = world.totals(0).outbound.drops;
    assert_eq!(drops.get(DropReason::NoEndpoint), 1);
}

#[test]
fn undeliverable_packets_do_not_delay_others() {
    let mut world = unknown_sources(Protocol::Native);
    let now = world.now(0).mono;
    let side = &mut world.sides[0];
    // A keepalive is due at once, and there is no address for a handshake.
    let interval = Duration::from_secs(25);
    side.tunnel
        .set_persistent_keepalive(side.peer, interval, now);
    world.run(Duration::from_millis(100));
    assert_eq!(world.take_sent(0).len(), 0);
    set_candidates(&mut world, 0, &[address(1, false)]);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    world.run(Duration::from_millis(100));
    assert_eq!(world.sides[1].delivered.len(), 1);
}

#[test]
fn tried_candidates_are_bounded() {
    let mut world = unknown_sources(Protocol::Native);
    let many: Vec<SocketAddr> = (0..100).map(nowhere).collect();
    set_candidates(&mut world, 0, &many);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    assert_eq!(world.take_sent(0).len(), MAX_CANDIDATES);
}

#[test]
fn a_peer_that_announces_a_new_address_is_answered_there_at_once() {
    let mut world = unknown_sources(Protocol::Native);
    set_candidates(&mut world, 0, &[address(1, false)]);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    world.run(Duration::from_secs(1));
    let new: SocketAddr = "203.0.113.9:99".parse().expect("an address");
    world.sides[1].address = new;
    let now = world.now(1);
    let side = &mut world.sides[1];
    side.tunnel.announce(now, side.peer, &mut side.outbox);
    world.flush(1, &[]);
    world.run(Duration::from_millis(20));
    assert_eq!(world.peer(0).path.endpoint, Some(new));
}

#[test]
fn a_call_is_answered_at_most_twice_a_second() {
    let mut world = unknown_sources(Protocol::Native);
    set_candidates(&mut world, 1, &[nowhere(1), nowhere(2)]);
    let call = |world: &mut World| {
        let now = world.now(1);
        let side = &mut world.sides[1];
        side.tunnel
            .on_call_me_maybe(now, side.peer, &mut side.outbox);
        world.flush(1, &[]);
        world.take_sent(1).len()
    };
    assert_eq!(call(&mut world), 2);
    world.run(Duration::from_millis(400));
    assert_eq!(call(&mut world), 0);
    world.run(Duration::from_millis(200));
    assert_eq!(call(&mut world), 2);
    // It has nothing to send, so nothing is repeated and the other side is not called.
    world.run(Duration::from_secs(60));
    assert_eq!(world.take_sent(1).len(), 0);
    assert!(world.sides[1].tunnel.take_peers_to_call().is_empty());
}

#[test]
fn a_candidate_added_during_a_handshake_is_sent_the_same_initiation_at_once() {
    for protocol in [Protocol::Native, Protocol::WireGuard] {
        let mut world = unknown_sources(protocol);
        set_candidates(&mut world, 0, &[nowhere(1)]);
        world.send(0, &[Flow::udp(0).datagram(0, 100)]);
        world.run(Duration::from_millis(100));
        set_candidates(&mut world, 0, &[nowhere(1), address(1, false)]);
        // 10 ms in each direction: initiation, response, packet.
        world.run(Duration::from_millis(31));
        assert_eq!(world.sides[1].delivered.len(), 1, "{protocol:?}");
        let sent = world.take_sent(0);
        assert_eq!(sent[0].bytes, sent[1].bytes);
        assert_eq!([sent[0].to, sent[1].to], [nowhere(1), address(1, false)]);
    }
}

/// Side 1 has answered a call with an initiation to addresses without a host; the other side does
/// not know it.
fn after_call(candidates: &[SocketAddr]) -> World {
    let mut world = unknown_sources(Protocol::Native);
    set_candidates(&mut world, 1, candidates);
    let now = world.now(1);
    let side = &mut world.sides[1];
    side.tunnel
        .on_call_me_maybe(now, side.peer, &mut side.outbox);
    world.flush(1, &[]);
    assert_eq!(world.take_sent(1).len(), candidates.len());
    world
}

#[test]
fn an_initiation_goes_to_each_new_candidate_once_up_to_the_maximum() {
    let mut world = after_call(&[nowhere(0)]);
    let mut signal = |candidates: std::ops::Range<u8>| {
        let candidates: Vec<SocketAddr> = candidates.map(nowhere).collect();
        set_candidates(&mut world, 1, &candidates);
        world.run(Duration::from_millis(1));
        world.take_sent(1).len()
    };
    assert_eq!(signal(1..11), 10);
    assert_eq!([signal(0..1), signal(1..11)], [0, 0], "once");
    assert_eq!([signal(11..21), signal(21..31), signal(31..41)], [10, 3, 0]);
}

#[test]
fn an_expired_initiation_is_not_sent_to_new_candidates() {
    let mut late = after_call(&[nowhere(1)]);
    late.run(Duration::from_secs(5));
    // It answers the other side's initiation while its own still waits.
    let mut hit = after_call(&[nowhere(1)]);
    set_candidates(&mut hit, 0, &[address(1, false)]);
    hit.send(0, &[Flow::udp(0).datagram(0, 100)]);
    hit.run(Duration::from_secs(1));
    assert_eq!(hit.sides[1].delivered.len(), 1);
    for mut world in [late, hit] {
        world.take_sent(1);
        set_candidates(&mut world, 1, &[nowhere(2)]);
        world.run(Duration::from_millis(100));
        let sent = world.take_sent(1);
        assert!(sent.iter().all(|parcel| parcel.to != nowhere(2)));
    }
}

#[test]
fn a_call_without_candidates_is_answered_at_the_first_one() {
    let mut world = after_call(&[]);
    world.run(Duration::from_millis(10));
    set_candidates(&mut world, 1, &[address(0, false)]);
    let now = world.now(1);
    let side = &mut world.sides[1];
    side.tunnel
        .on_call_me_maybe(now, side.peer, &mut side.outbox);
    world.flush(1, &[]);
    world.run(Duration::from_millis(20));
    assert_eq!(world.totals(1).handshakes.completed, 1);
}

/// A peer behind a NAT, without a host: its outer and its own address.
const BEHIND_NAT: [&str; 2] = ["198.51.100.9:7", "10.0.0.5:7"];

fn behind_nat() -> [SocketAddr; 2] {
    BEHIND_NAT.map(|address| address.parse().expect("an address"))
}

/// Destinations of the datagrams of a side, and whether each is an opener.
fn destinations(world: &mut World, side: usize) -> Vec<(SocketAddr, bool)> {
    let sent = world.take_sent(side).into_iter();
    sent.map(|parcel| (parcel.to, parcel.is_opener)).collect()
}

#[test]
fn the_nat_of_a_peer_gets_an_opener_and_the_initiation_a_second_later() {
    let mut world = unknown_sources(Protocol::Native);
    let [outer, own] = behind_nat();
    set_candidates(&mut world, 0, &[outer, own]);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    assert_eq!(
        destinations(&mut world, 0),
        [(outer, true), (own, false)],
        "no datagram reaches the NAT before the peer is called"
    );
    assert_eq!(world.sides[0].tunnel.take_peers_to_call().len(), 1);
    world.run(Duration::from_millis(999));
    assert_eq!(destinations(&mut world, 0), []);
    world.run(Duration::from_millis(2));
    assert_eq!(destinations(&mut world, 0), [(outer, false)]);
    world.run(Duration::from_secs(3));
    assert_eq!(destinations(&mut world, 0), []);
    world.run(Duration::from_secs(1));
    assert_eq!(world.peer(0).paths.direct_tries(), 1);
}

#[test]
fn a_called_peer_sends_no_opener() {
    let mut world = unknown_sources(Protocol::Native);
    let [outer, own] = behind_nat();
    set_candidates(&mut world, 1, &[outer, own]);
    let now = world.now(1);
    let side = &mut world.sides[1];
    side.tunnel
        .on_call_me_maybe(now, side.peer, &mut side.outbox);
    world.flush(1, &[]);
    assert_eq!(destinations(&mut world, 1), [(outer, false), (own, false)]);
}

#[test]
fn handshakes_do_not_pause_where_this_host_has_no_nat() {
    let mut world = unknown_sources(Protocol::Native);
    let [outer, own] = behind_nat();
    set_candidates(&mut world, 0, &[outer, own]);
    let now = world.now(0).mono;
    let open = NatMappings {
        v4: Mapping::EndpointIndependent,
        ..NatMappings::default()
    };
    world.sides[0].tunnel.set_nat_mappings(open, now);
    let mut last = 0;
    for second in 0..120 {
        world.send(0, &[Flow::udp(0).datagram(second, 100)]);
        world.run(Duration::from_secs(1));
        let sent = destinations(&mut world, 0);
        if sent.iter().any(|(to, _)| *to == outer) {
            assert!(second - last <= 7, "at {second} s");
            last = second;
        }
    }
    assert!(last > 110, "{last}");
}

#[test]
fn handshakes_with_a_silent_peer_pause_for_its_nat_alone() {
    let mut world = unknown_sources(Protocol::Native);
    let [outer, own] = behind_nat();
    set_candidates(&mut world, 0, &[outer, own]);
    let mut last = (0, 0);
    let mut longest = 0;
    for second in 0..200 {
        world.send(0, &[Flow::udp(0).datagram(second, 100)]);
        world.run(Duration::from_secs(1));
        let sent = destinations(&mut world, 0);
        if sent.iter().any(|(to, _)| *to == outer) {
            longest = longest.max(second - last.0);
            last.0 = second;
        }
        if sent.iter().any(|(to, _)| *to == own) {
            assert!(second - last.1 <= 6, "at {second} s");
            last.1 = second;
        }
    }
    // Longer than a NAT remembers an unanswered datagram.
    assert!((31..115).contains(&longest), "{longest}");
}
