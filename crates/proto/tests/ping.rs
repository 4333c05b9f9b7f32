//! Asking a peer whether it answers.

mod sim;

use seikan_proto::noise::Construction;
use seikan_proto::ping::Ping;
use sim::network::Path;
use sim::{Setup, World, address};
use std::time::Duration;

const ONE_WAY: Duration = Duration::from_millis(30);

/// Two peers of a configuration, 30 ms apart.
fn world() -> World {
    let path = Path {
        latency: ONE_WAY,
        ..Path::default()
    };
    let setups = [0, 1].map(|_| Setup::new(Construction::Native));
    World::with(setups, [path.clone(), path], 1)
}

fn ask(world: &mut World) {
    let now = world.now(0);
    let side = &mut world.sides[0];
    side.tunnel.ping(now, side.peer, &mut side.outbox);
    world.flush(0, &[]);
}

#[test]
fn the_answer_takes_a_round_trip_and_comes_from_where_the_peer_is() {
    let mut world = world();
    world.establish();
    for _ in 0..3 {
        ask(&mut world);
        world.run(3 * ONE_WAY);
        let answered = Ping::Answered {
            to: address(1, false),
            rtt: 2 * ONE_WAY,
        };
        assert_eq!(world.peer(0).ping, Some(answered));
    }
    world.check();
}

#[test]
fn without_a_session_it_begins_one_and_is_no_part_of_the_time() {
    let mut world = world();
    ask(&mut world);
    assert_eq!(world.peer(0).ping, Some(Ping::Waits));
    // The handshake, and then the question.
    world.run(4 * ONE_WAY + ONE_WAY / 2);
    let rtt = 2 * ONE_WAY;
    assert!(
        matches!(world.peer(0).ping, Some(Ping::Answered { rtt: r, .. }) if r == rtt),
        "{:?}",
        world.peer(0).ping
    );
}

#[test]
fn one_that_was_lost_is_not_answered_by_the_answer_to_another() {
    let mut world = world();
    world.establish();
    ask(&mut world);
    world.run(ONE_WAY);
    ask(&mut world);
    // The answer to the first is here; that to the second is not.
    world.run(ONE_WAY + ONE_WAY / 2);
    assert!(matches!(world.peer(0).ping, Some(Ping::Sent { .. })));
    world.run(ONE_WAY);
    assert!(matches!(world.peer(0).ping, Some(Ping::Answered { .. })));
}

#[test]
fn a_peer_that_has_forgotten_the_session_is_met_again() {
    let mut world = world();
    world.establish();
    world.restart(1);
    for second in 0.. {
        ask(&mut world);
        world.run(Duration::from_secs(1));
        if matches!(world.peer(0).ping, Some(Ping::Answered { .. })) {
            break;
        }
        // KEEPALIVE_TIMEOUT and REKEY_TIMEOUT, 15 s, after the first that was lost.
        assert!(second < 16);
    }
}
