//! Pings to a peer.

use crate::sim::network::Path;
use crate::sim::{Setup, World, address};
use seikan_proto::keys::PrivateKey;
use seikan_proto::noise::Protocol;
use seikan_proto::ping::Ping;
use std::time::Duration;

const DELAY: Duration = Duration::from_millis(30);

/// Two configured peers, 30 ms apart.
fn world() -> World {
    let path = Path {
        latency: DELAY,
        ..Path::default()
    };
    let setups = [0, 1].map(|_| Setup::new(Protocol::Native));
    World::with(setups, [path.clone(), path], 1)
}

/// Sends a ping. Returns its number.
fn ask(world: &mut World) -> u64 {
    let now = world.now(0);
    let side = &mut world.sides[0];
    let number = side.tunnel.ping(now, side.peer, &mut side.outbox);
    world.flush(0, &[]);
    number
}

fn answer(world: &World, ping: u64) -> Option<Ping> {
    world.peer(0).pings.get(ping)
}

#[test]
fn a_ping_takes_one_round_trip() {
    let mut world = world();
    world.establish();
    for _ in 0..3 {
        let ping = ask(&mut world);
        world.run(3 * DELAY);
        let answered = Ping::Answered {
            to: address(1, false),
            rtt: 2 * DELAY,
        };
        assert_eq!(answer(&world, ping), Some(answered));
    }
    world.check();
}

#[test]
fn without_a_session_a_ping_starts_one_that_is_not_measured() {
    let mut world = world();
    let ping = ask(&mut world);
    assert_eq!(answer(&world, ping), Some(Ping::Queued));
    // The handshake, and then the ping.
    world.run(4 * DELAY + DELAY / 2);
    let rtt = 2 * DELAY;
    assert!(
        matches!(answer(&world, ping), Some(Ping::Answered { rtt: r, .. }) if r == rtt),
        "{:?}",
        answer(&world, ping)
    );
}

#[test]
fn concurrent_pings_are_answered_independently() {
    let mut world = world();
    world.establish();
    let first = ask(&mut world);
    world.run(DELAY);
    let second = ask(&mut world);
    world.run(DELAY);
    let answered = Some(Ping::Answered {
        to: address(1, false),
        rtt: 2 * DELAY,
    });
    assert_eq!(answer(&world, first), answered);
    assert!(matches!(answer(&world, second), Some(Ping::Sent { .. })));
    world.run(DELAY);
    assert_eq!(answer(&world, second), answered);
}

#[test]
fn one_datagram_serves_all_pings_that_wait_for_a_session() {
    let mut world = world();
    let questions = [0; 3].map(|_| ask(&mut world));
    world.run(4 * DELAY + DELAY / 2);
    for ping in questions {
        let answered = answer(&world, ping);
        assert!(
            matches!(answered, Some(Ping::Answered { .. })),
            "{answered:?}"
        );
    }
}

#[test]
fn a_ping_is_answered_across_a_key_rotation() {
    let mut world = world();
    world.establish();
    let ping = ask(&mut world);
    world.run(DELAY / 2);
    let side = &mut world.sides[0];
    let key = PrivateKey::from_bytes([7; 32]).public();
    assert!(side.tunnel.rotate_peer_key(side.peer, key));
    world.run(2 * DELAY);
    let answered = answer(&world, ping);
    assert!(
        matches!(answered, Some(Ping::Answered { .. })),
        "{answered:?}"
    );
}

#[test]
fn a_peer_that_has_forgotten_the_session_answers_after_a_new_handshake() {
    let mut world = world();
    world.establish();
    world.restart(1);
    for second in 0.. {
        let ping = ask(&mut world);
        world.run(Duration::from_secs(1));
        if matches!(answer(&world, ping), Some(Ping::Answered { .. })) {
            break;
        }
        // KEEPALIVE_TIMEOUT and REKEY_TIMEOUT, 15 s, after the first lost one.
        assert!(second < 16);
    }
}
