//! Port probing between two members: one behind a symmetric NAT, the other behind a filtering one.

use crate::sim::network::Path;
use crate::sim::packets::Flow;
use crate::sim::{MILLISECOND, Nats, Setup, World, address};
use seikan_proto::birthday::{Mapping, NatMappings, PROBES, PunchState};
use seikan_proto::noise::Protocol;
use std::net::SocketAddr;
use std::time::Duration;

fn relay() -> SocketAddr {
    "198.51.100.1:50000".parse().expect("an address")
}

/// Two members with a relay. The first is behind a symmetric NAT; `second` is the mapping of the
/// second.
fn members(second: Mapping, seed: u64) -> World {
    let setup = Setup {
        knows_endpoint: false,
        ..Setup::new(Protocol::Native)
    };
    let path = Path::default;
    let mut world = World::with([setup.clone(), setup], [path(), path()], seed);
    world.relay = Some(relay());
    world.nats = Some(Nats::default());
    let first = Mapping::AddressAndPortDependent(vec![address(0, false).ip()]);
    for (i, v4) in [(0, first), (1, second)] {
        let now = world.now(i).mono;
        let side = &mut world.sides[i];
        let other = [address(1 - i, false)];
        side.tunnel.set_candidates(side.peer, &other, now);
        side.tunnel.set_relays(side.peer, &[relay()]);
        let v6 = Mapping::Unknown;
        side.tunnel.set_nat_mappings(
            NatMappings {
                v4,
                v6,
                outer: Vec::new(),
            },
            now,
        );
    }
    world
}

/// A datagram in each direction every 50 ms. Returns the next number.
fn talk(world: &mut World, mut seq: u32, time: Duration) -> u32 {
    let end = world.time + time.as_nanos() as u64;
    while world.time < end {
        for i in 0..2 {
            world.send(i, &[Flow::udp(i).datagram(seq, 100)]);
        }
        seq += 1;
        world.run(Duration::from_millis(50));
    }
    seq
}

fn endpoints(world: &World) -> [Option<SocketAddr>; 2] {
    [0, 1].map(|i| world.peer(i).path.endpoint)
}

/// Endpoints of both ends after a hit.
fn hit(world: &World) -> Option<[Option<SocketAddr>; 2]> {
    let port = world.nats.as_ref().expect("NATs").kept_port?;
    let outer = SocketAddr::new(address(0, false).ip(), port);
    Some([Some(address(1, false)), Some(outer)])
}

#[test]
fn both_ends_leave_the_relay_for_a_hit_port_without_loss() {
    let mut world = members(Mapping::EndpointIndependent, 1);
    let mut sent = 0;
    for second in 0..30 {
        sent = talk(&mut world, sent, Duration::from_secs(1));
        for i in 0..2 {
            let lost = world.peer(i).path.report.map_or(0, |report| report.lost);
            assert_eq!(lost, 0, "side {i}, second {second}: probes are no losses");
        }
    }
    world.run(Duration::from_secs(1));
    assert_eq!(Some(endpoints(&world)), hit(&world));
    for i in 0..2 {
        let arrived = world.checkers[1 - i].datagrams(Flow::udp(i));
        assert_eq!(arrived, sent as usize, "side {i}");
    }
    // Nothing goes on after a hit.
    assert_eq!(world.peer(0).birthday.punch_state(), PunchState::Idle(None));
    assert!(!world.peer(1).birthday.is_probing(world.now(1).mono));
}

#[test]
fn forty_of_forty_pairs_succeed_in_the_first_attempt() {
    // By the closed form each attempt fails with a probability of 1 in 3,400.
    let mut probes = Vec::new();
    for seed in 0..40 {
        let mut world = members(Mapping::EndpointIndependent, seed);
        talk(&mut world, 0, Duration::from_secs(18));
        assert_eq!(Some(endpoints(&world)), hit(&world), "seed {seed}");
        probes.push(world.peer(1).birthday.probes());
    }
    probes.sort_unstable();
    // The median of a geometric distribution: ln 2 / (256 / 64512) = 175 probes, and what is sent
    // in two round trips. Of 40, 20 are below the median, give or take four standard deviations
    // (13): between the quantiles 0.18 and 0.82.
    let two_round_trips = 25;
    let quantile = |p: f64| (-(1.0 - p).ln() * 64_512.0 / 256.0) as u64;
    let median = probes[20];
    assert!(
        (quantile(0.18)..quantile(0.82) + two_round_trips).contains(&median),
        "{probes:?}"
    );
}

/// Checks shortly before a hit do not delay it.
#[test]
fn both_ends_switch_within_two_round_trips_of_the_first_hit() {
    for seed in 0..20 {
        let mut world = members(Mapping::EndpointIndependent, seed);
        let mut seq = 0;
        while hit(&world).is_none() && seq < 400 {
            seq = talk(&mut world, seq, Duration::from_millis(50));
        }
        talk(&mut world, seq, Duration::from_millis(50));
        assert_eq!(Some(endpoints(&world)), hit(&world), "seed {seed}");
    }
}

#[test]
fn probes_overtaken_by_relayed_packets_count_as_well() {
    let mut world = members(Mapping::EndpointIndependent, 3);
    world.nats.as_mut().expect("NATs").detour = 75 * MILLISECOND;
    let mut seq = 0;
    while hit(&world).is_none() && seq < 400 {
        seq = talk(&mut world, seq, Duration::from_millis(50));
    }
    // The probe, and a check with its acknowledgement from each end: checks by the clock are
    // further apart.
    talk(&mut world, seq, Duration::from_secs(1));
    assert_eq!(Some(endpoints(&world)), hit(&world));
}

#[test]
fn without_packets_no_ports_are_opened() {
    let mut world = members(Mapping::EndpointIndependent, 4);
    let outside = |first| NatMappings {
        v4: first,
        v6: Mapping::Unknown,
        outer: Vec::new(),
    };
    let set = |world: &mut World, first| {
        let now = world.now(0).mono;
        world.sides[0].tunnel.set_nat_mappings(outside(first), now);
    };
    set(&mut world, Mapping::Unknown);
    let seq = talk(&mut world, 0, Duration::from_secs(5));
    world.run(Duration::from_secs(60));
    set(
        &mut world,
        Mapping::AddressAndPortDependent(vec![address(0, false).ip()]),
    );
    world.run(Duration::from_secs(60));
    assert_eq!(world.nats.as_ref().expect("NATs").punches, 0);
    talk(&mut world, seq, Duration::from_secs(18));
    assert_eq!(Some(endpoints(&world)), hit(&world));
}

#[test]
fn two_symmetric_ends_stay_at_the_relay_and_do_not_probe() {
    let own = vec![address(1, false).ip()];
    let mut world = members(Mapping::AddressAndPortDependent(own), 5);
    talk(&mut world, 0, Duration::from_secs(120));
    assert_eq!(endpoints(&world), [Some(relay()); 2]);
    for i in 0..2 {
        assert_eq!(world.peer(i).birthday.probes(), 0);
        assert!(world.peer(i).birthday.is_both_symmetric(), "side {i}");
    }
    assert_eq!(world.nats.as_ref().expect("NATs").punches, 1);
}

#[test]
fn failed_probing_stays_within_its_limits() {
    let mut world = members(Mapping::EndpointIndependent, 6);
    // No probe gets through directly; the request is repeated every 5 s while ports are open.
    world.direct_down = [true; 2];
    talk(&mut world, 0, Duration::from_secs(60));
    assert_eq!(endpoints(&world), [Some(relay()); 2]);
    assert_eq!(world.peer(1).birthday.probes(), u64::from(PROBES));
    let lost = world.peer(1).path.report.map_or(0, |report| report.lost);
    assert_eq!(lost, 0, "probes are no losses");
}

#[test]
fn a_restarted_symmetric_nat_is_traversed_again_without_a_minute_at_the_relay() {
    let mut world = members(Mapping::EndpointIndependent, 7);
    let seq = talk(&mut world, 0, Duration::from_secs(18));
    assert_eq!(Some(endpoints(&world)), hit(&world));
    // The NATs have forgotten all ports.
    world.nats = Some(Nats::default());
    // 3 s of silence, half a second at the relay, and the rest of the probes: at most 4 s.
    talk(&mut world, seq, Duration::from_secs(18));
    assert_eq!(Some(endpoints(&world)), hit(&world));
    let all = [0, 1].map(|i| world.peer(i).birthday.probes());
    assert!(all[0] == 0 && all[1] <= u64::from(PROBES), "{all:?}");
}

/// Neither end sends for `time`. The driver of side 0 keeps its port open, once per `every`
/// seconds.
fn idle(world: &mut World, time: Duration, every: Duration) {
    let end = world.time + time.as_nanos() as u64;
    while world.time < end {
        world.run(every);
        let now = world.now(0);
        let side = &mut world.sides[0];
        let far = address(1, false);
        side.tunnel
            .keep_alive(now, side.peer, far, &mut side.outbox);
        world.flush(0, &[]);
    }
}

#[test]
fn a_hit_port_is_kept_open_for_the_length_of_the_session() {
    // Also with a late driver, and whichever end initiated the session.
    for (every, first) in [(20, 0), (20, 1), (23, 0), (23, 1)] {
        let every = Duration::from_secs(every);
        let mut world = members(Mapping::EndpointIndependent, 8);
        world.send(first, &[Flow::udp(first).datagram(0, 100)]);
        world.run(Duration::from_millis(50));
        let seq = talk(&mut world, 1, Duration::from_secs(18));
        assert_eq!(Some(endpoints(&world)), hit(&world));
        // Paths are probed and reported on for some seconds more.
        idle(&mut world, Duration::from_secs(20), every);
        world.take_sent(0);
        idle(&mut world, Duration::from_secs(115), every);
        let kept = world.take_sent(0).len();
        assert!((5..=8).contains(&kept), "{kept} kept it open");
        idle(&mut world, Duration::from_secs(90), every);
        let handshakes = |world: &World, i| world.peer(i).counters.handshakes.completed;
        let before = [0, 1].map(|i| (handshakes(&world, i), world.take_sent(i)));
        idle(&mut world, Duration::from_secs(1200), every);
        for (i, (completed, _)) in before.into_iter().enumerate() {
            assert_eq!(handshakes(&world, i), completed, "side {i}, {every:?}");
            assert_eq!(world.take_sent(i).len(), 0, "side {i}, {every:?}");
        }
        // The NATs have forgotten it by then. The relay carries the next packets, and the search
        // succeeds again.
        world.nats = Some(Nats::default());
        let flow = Flow::udp(first);
        let arrived = world.checkers[1 - first].datagrams(flow);
        world.send(first, &[flow.datagram(seq, 100)]);
        world.run(Duration::from_millis(500));
        assert_eq!(world.checkers[1 - first].datagrams(flow), arrived + 1);
        talk(&mut world, seq + 1, Duration::from_secs(18));
        assert_eq!(Some(endpoints(&world)), hit(&world));
    }
}
