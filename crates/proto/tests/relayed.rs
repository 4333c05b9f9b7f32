//! A peer that is reached over a relay, directly, or alternately.

use crate::sim::network::Path;
use crate::sim::packets::Flow;
use crate::sim::{Setup, World, address};
use seikan_observe::DropReason;
use seikan_proto::noise::Protocol;
use seikan_proto::tunnel::Reachability;
use std::net::SocketAddr;
use std::time::Duration;

const NATIVE: Protocol = Protocol::Native;

fn relay() -> SocketAddr {
    "198.51.100.1:50000".parse().expect("an address")
}

/// Two members that know each other's addresses and have a relay.
fn members(protocol: Protocol) -> World {
    let setup = Setup {
        knows_endpoint: false,
        ..Setup::new(protocol)
    };
    let path = Path::default;
    let mut world = World::with([setup.clone(), setup], [path(), path()], 1);
    world.relay = Some(relay());
    for i in 0..2 {
        let now = world.now(i).mono;
        let side = &mut world.sides[i];
        let other = [address(1 - i, false)];
        side.tunnel.set_candidates(side.peer, &other, now);
        side.tunnel.set_relays(side.peer, &[relay()]);
    }
    world
}

#[test]
fn a_call_is_answered_over_a_new_relay_at_once() {
    let mut world = members(NATIVE);
    world.direct_down = [true; 2];
    let now = world.now(1);
    let side = &mut world.sides[1];
    side.tunnel.set_relays(side.peer, &[]);
    side.tunnel
        .on_call_me_maybe(now, side.peer, &mut side.outbox);
    world.flush(1, &[]);
    world.run(Duration::from_millis(100));
    let now = world.now(1);
    let side = &mut world.sides[1];
    side.tunnel.set_relays(side.peer, &[relay()]);
    side.tunnel
        .on_call_me_maybe(now, side.peer, &mut side.outbox);
    world.flush(1, &[]);
    world.run(Duration::from_millis(100));
    assert_eq!(world.totals(1).handshakes.completed, 1);
}

#[test]
fn two_new_relays_at_once_do_not_delay_the_first() {
    let mut world = members(NATIVE);
    world.direct_down = [true; 2];
    let other: SocketAddr = "198.51.100.2:50000".parse().expect("an address");
    let now = world.now(1);
    let side = &mut world.sides[1];
    // Packets to the second relay are lost.
    for relays in [vec![relay()], vec![relay(), other]] {
        side.tunnel.set_relays(side.peer, &relays);
        side.tunnel
            .on_call_me_maybe(now, side.peer, &mut side.outbox);
    }
    world.flush(1, &[]);
    world.run(Duration::from_millis(100));
    assert_eq!(world.totals(1).handshakes.completed, 1);
}

#[test]
fn a_dead_first_relay_is_replaced_by_the_second_in_a_round_trip() {
    let mut world = members(NATIVE);
    world.direct_down = [true; 2];
    let dead: SocketAddr = "198.51.100.2:50000".parse().expect("an address");
    let now = world.now(1);
    let side = &mut world.sides[1];
    side.tunnel.set_relays(side.peer, &[dead]);
    side.tunnel
        .on_call_me_maybe(now, side.peer, &mut side.outbox);
    world.flush(1, &[]);
    world.run(Duration::from_millis(20));
    let side = &mut world.sides[1];
    side.tunnel.set_relays(side.peer, &[dead, relay()]);
    // 10 ms in each direction.
    world.run(Duration::from_millis(20));
    assert_eq!(world.totals(1).handshakes.completed, 1);
    assert_eq!(world.totals(1).handshakes.initiations_sent, 1);
}

#[test]
fn a_new_candidate_does_not_void_an_answer_in_flight() {
    let mut world = members(NATIVE);
    for link in &mut world.links {
        link.path.latency = Duration::from_millis(50);
    }
    world.detour = Duration::from_millis(20);
    let now = world.now(1);
    let side = &mut world.sides[1];
    side.tunnel.set_relays(side.peer, &[]);
    side.tunnel
        .on_call_me_maybe(now, side.peer, &mut side.outbox);
    world.flush(1, &[]);
    world.run(Duration::from_millis(60));
    let now = world.now(1);
    let side = &mut world.sides[1];
    side.tunnel.set_relays(side.peer, &[relay()]);
    side.tunnel
        .on_call_me_maybe(now, side.peer, &mut side.outbox);
    world.flush(1, &[]);
    world.run(Duration::from_millis(40));
    assert_eq!(world.totals(1).handshakes.completed, 1);
    // The copy over the relay arrives later.
    world.run(Duration::from_millis(100));
    let [answered, began] = [0, 1].map(|i| world.totals(i));
    assert_eq!(answered.handshakes.initiations_received, 1);
    assert_eq!(began.handshakes.initiations_sent, 1);
    let replayed = DropReason::ReplayedHandshake;
    assert_eq!(answered.inbound.drops.get(replayed), 1);
    assert_eq!(endpoints(&world), direct());
}

#[test]
fn a_call_over_a_dead_path_leads_to_a_new_handshake() {
    let mut world = members(NATIVE);
    world.sides[1].tunnel.set_relays(world.sides[1].peer, &[]);
    talk(&mut world, 0, Duration::from_secs(2));
    world.run(Duration::from_secs(2));
    let reached = |world: &World| {
        let side = &world.sides[1];
        side.tunnel.reached(side.peer, world.now(1).mono)
    };
    let call = |world: &mut World| {
        let now = world.now(1);
        let side = &mut world.sides[1];
        side.tunnel
            .on_call_me_maybe(now, side.peer, &mut side.outbox);
        world.flush(1, &[]);
        world.run(Duration::from_millis(100));
    };
    // It has sent nothing since, so it has not noticed.
    world.direct_down = [true; 2];
    world.run(Duration::from_secs(4));
    assert_eq!(reached(&world), Reachability::Direct);
    call(&mut world);
    assert_eq!(reached(&world), Reachability::Unreachable);
    world.direct_down = [false; 2];
    world.run(Duration::from_secs(1));
    assert_eq!(reached(&world), Reachability::Unreachable);
    call(&mut world);
    assert_eq!(reached(&world), Reachability::Direct);
}

/// A datagram in each direction every 20 ms. Returns the next number.
fn talk(world: &mut World, mut seq: u32, time: Duration) -> u32 {
    let end = world.time + time.as_nanos() as u64;
    while world.time < end {
        for i in 0..2 {
            world.send(i, &[Flow::udp(i).datagram(seq, 100)]);
        }
        seq += 1;
        world.run(Duration::from_millis(20));
    }
    seq
}

fn endpoints(world: &World) -> [Option<SocketAddr>; 2] {
    [0, 1].map(|i| world.peer(i).path.endpoint)
}

fn direct() -> [Option<SocketAddr>; 2] {
    [Some(address(1, false)), Some(address(0, false))]
}

fn arrived(world: &World) -> [usize; 2] {
    [0, 1].map(|i| world.checkers[1 - i].datagrams(Flow::udp(i)))
}

#[test]
fn without_a_direct_path_the_relay_carries_the_first_packet() {
    let mut world = members(NATIVE);
    world.direct_down = [true; 2];
    let sent = talk(&mut world, 0, Duration::from_secs(30));
    world.run(Duration::from_secs(1));
    assert_eq!(endpoints(&world), [Some(relay()); 2]);
    assert_eq!(arrived(&world), [sent as usize; 2]);
}

#[test]
fn the_relay_is_left_without_loss_when_direct_paths_open() {
    let mut world = members(NATIVE);
    world.direct_down = [true; 2];
    let seq = talk(&mut world, 0, Duration::from_secs(3));
    assert_eq!(endpoints(&world), [Some(relay()); 2]);
    world.direct_down = [false; 2];
    let mut sent = seq;
    for second in 0..60 {
        sent = talk(&mut world, sent, Duration::from_secs(1));
        for i in 0..2 {
            let lost = world.peer(i).path.report.map_or(0, |report| report.lost);
            assert_eq!(lost, 0, "side {i}, second {second}: checks are no losses");
        }
    }
    world.run(Duration::from_secs(1));
    assert_eq!(endpoints(&world), direct());
    assert_eq!(arrived(&world), [sent as usize; 2]);
}

#[test]
fn datagrams_overtaken_by_a_faster_path_arrive_and_are_not_reported_lost() {
    let mut world = members(NATIVE);
    world.detour = Duration::from_millis(300);
    world.checkers[1].in_order = false;
    world.direct_down = [true; 2];
    let flow = Flow::udp(0);
    let mut sent = talk(&mut world, 0, Duration::from_secs(1));
    let mut lost = Vec::new();
    let mut load = |world: &mut World, ms: usize| {
        for _ in 0..ms {
            let reads: Vec<_> = (sent..sent + 5).map(|n| flow.datagram(n, 1392)).collect();
            sent += 5;
            world.send(0, &reads);
            world.run(Duration::from_millis(1));
            lost.extend(world.peer(0).path.report.map(|report| report.lost));
        }
    };
    load(&mut world, 100);
    assert_eq!(world.peer(0).path.endpoint, Some(relay()));
    world.direct_down = [false; 2];
    while world.peer(0).path.endpoint == Some(relay()) {
        load(&mut world, 10);
    }
    // The first direct datagram overtakes more than the reports' horizon of 1,024: 300 ms at 5,000
    // a second.
    load(&mut world, 2100);
    world.run(Duration::from_secs(1));
    assert_eq!(world.checkers[1].datagrams(flow), sent as usize);
    assert_eq!(lost.iter().max(), Some(&0));
    let reordering = world.peer(0).path.report.expect("a report").reordering;
    assert_eq!(reordering, 0, "it has long been over");
}

#[test]
fn a_dead_direct_path_is_left_for_the_relay_within_five_seconds() {
    let mut world = members(NATIVE);
    let seq = talk(&mut world, 0, Duration::from_secs(2));
    assert_eq!(endpoints(&world), direct());
    world.direct_down = [true; 2];
    let seq = talk(&mut world, seq, Duration::from_millis(4500));
    assert_eq!(endpoints(&world), [Some(relay()); 2]);
    let before = arrived(&world);
    let sent = talk(&mut world, seq, Duration::from_secs(10));
    world.run(Duration::from_secs(1));
    let after = arrived(&world);
    for i in 0..2 {
        assert!(after[i] - before[i] >= (sent - seq) as usize);
    }
}

#[test]
fn a_path_that_dies_right_after_a_handshake_is_left_as_soon() {
    let mut world = members(NATIVE);
    let seq = talk(&mut world, 0, Duration::from_millis(500));
    world.direct_down = [true; 2];
    talk(&mut world, seq, Duration::from_millis(3500));
    assert_eq!(endpoints(&world), [Some(relay()); 2]);
}

#[test]
fn a_one_way_path_is_used_in_its_direction_only() {
    for dead in 0..2 {
        let mut world = members(NATIVE);
        let seq = talk(&mut world, 0, Duration::from_secs(2));
        world.direct_down[dead] = true;
        let seq = talk(&mut world, seq, Duration::from_secs(60));
        let mut expected = direct();
        expected[dead] = Some(relay());
        assert_eq!(endpoints(&world), expected, "dead from side {dead}");
        let before = arrived(&world);
        let sent = talk(&mut world, seq, Duration::from_secs(30));
        world.run(Duration::from_secs(1));
        let after = arrived(&world);
        for i in 0..2 {
            assert_eq!(after[i] - before[i], (sent - seq) as usize, "side {i}");
        }
    }
}

#[test]
fn a_silent_receiver_is_reached_directly_too() {
    let mut world = members(NATIVE);
    world.direct_down = [true; 2];
    for seq in 0..100 {
        world.send(0, &[Flow::udp(0).datagram(seq, 100)]);
        world.run(Duration::from_millis(20));
    }
    world.direct_down = [false; 2];
    for seq in 100..600 {
        world.send(0, &[Flow::udp(0).datagram(seq, 100)]);
        world.run(Duration::from_millis(20));
    }
    assert_eq!(endpoints(&world), direct());
}

#[test]
fn a_silent_receiver_is_not_woken_needlessly_by_another_path() {
    let mut world = members(NATIVE);
    world.direct_down = [true; 2];
    let speak = |world: &mut World, from: u32, to: u32| {
        for seq in from..to {
            world.send(0, &[Flow::udp(0).datagram(seq, 100)]);
            world.run(Duration::from_millis(100));
        }
    };
    // A silent end no longer probes by now.
    speak(&mut world, 0, 200);
    world.direct_down = [false; 2];
    speak(&mut world, 200, 600);
    assert_eq!(endpoints(&world), direct());
    world.run(Duration::from_millis(150));
    let (at, _) = world.sides[1].tunnel.next_wakeup().expect("a timer");
    let waits = at.duration_since(world.now(1).mono);
    assert!(waits > Duration::from_millis(10), "{waits:?}");
}

#[test]
fn a_dead_relay_is_left_for_the_direct_path() {
    let mut world = members(NATIVE);
    world.direct_down = [true; 2];
    let seq = talk(&mut world, 0, Duration::from_secs(40));
    world.relay = None;
    world.direct_down = [false; 2];
    // Checks are rare by now, so the silence is noticed.
    talk(&mut world, seq, Duration::from_millis(4500));
    assert_eq!(endpoints(&world), direct());
}

#[test]
fn wireguard_follows_every_datagram_and_checks_nothing() {
    let mut world = members(Protocol::WireGuard);
    world.direct_down = [true; 2];
    let sent = talk(&mut world, 0, Duration::from_secs(5));
    world.run(Duration::from_secs(1));
    assert_eq!(arrived(&world), [sent as usize; 2]);
    assert_eq!(endpoints(&world), [Some(relay()); 2]);
}

/// Two members that reach each other by a relay alone. The first, behind a NAT with the returned outer
/// address, has something to send.
fn behind_a_nat() -> (World, SocketAddr) {
    let mut world = members(NATIVE);
    let outer: SocketAddr = "203.0.113.9:7".parse().expect("an address");
    let own: SocketAddr = "10.0.0.5:7".parse().expect("an address");
    let now = world.now(1).mono;
    let side = &mut world.sides[1];
    side.tunnel.set_candidates(side.peer, &[outer, own], now);
    world.direct_down = [true; 2];
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    (world, outer)
}

#[test]
fn a_response_by_a_relay_opens_the_nat_towards_the_initiator() {
    let (mut world, outer) = behind_a_nat();
    world.take_sent(1);
    world.run(Duration::from_millis(15));
    let sent = world.take_sent(1).into_iter();
    let sent: Vec<_> = sent.map(|parcel| (parcel.to, parcel.is_opener)).collect();
    assert_eq!(sent, [(relay(), false), (outer, true)]);
}

#[test]
fn responses_open_nats_once_in_rekey_timeout() {
    let (mut world, _) = behind_a_nat();
    let mut opened = Vec::new();
    for _ in 0..10 {
        world.run(Duration::from_millis(600));
        let sent = world.take_sent(1).into_iter();
        opened.push(sent.filter(|parcel| parcel.is_opener).count());
        let now = world.now(0);
        let side = &mut world.sides[0];
        side.tunnel
            .on_call_me_maybe(now, side.peer, &mut side.outbox);
        world.flush(0, &[]);
    }
    assert_eq!(world.totals(1).handshakes.initiations_received, 10);
    // At once and after five seconds.
    assert_eq!(opened, [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
}
