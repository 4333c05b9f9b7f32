//! Two members behind NATs that track unsolicited packets, without a relay, after an outage.

use super::world::{Before, Event, OPEN_PORT, World};
use crate::sim::SECOND;

/// Number of seeds for each kind of outage.
const SEEDS: u64 = 64;
/// Longer than a session lasts.
const OUTAGE: u64 = 200;
/// Maximum time in seconds until both members receive packets again.
const RECOVERS: u64 = 180;
/// Maximum time in seconds after an outage until an agent connects to its coordinator again: its
/// longest pause (`seikan_mesh::shared`).
const RECONNECTS: u64 = 30;

#[derive(Clone, Copy, Debug)]
enum Outage {
    /// The network between the routers, which keep sending. The members' STUN servers do not
    /// answer, but the coordinator does.
    Network,
    /// The same, and the coordinator does not answer either.
    NetworkAndCoordinator,
    /// The uplink of one router, whose NAT forgets everything.
    OneUplink,
    /// The uplinks of both.
    BothUplinks,
}

/// Both members send a packet each second.
fn run(world: &mut World, seconds: u64) {
    for _ in 0..seconds {
        world.after(0, Event::Reply(0));
        world.run(SECOND);
    }
}

/// Returns the time in seconds from the end of an outage until both members receive packets again.
fn recovery(outage: Outage, seed: u64) -> Option<u64> {
    let mut world = World::new(seed, 0.001);
    world.is_not_counted = true;
    for relay in &mut world.relays {
        relay.is_on = false;
    }
    for _ in 0..2 {
        world.join(Before::Tracking, None, "t0");
    }
    world.add_talk([0, 1], OPEN_PORT, SECOND, 0);
    let [begins, reconnects @ ..] = world.random::<3>().map(u64::from);
    run(&mut world, 60 + begins % 60);
    let is_reached = |world: &World, since| world.talks[0].last.iter().all(|last| *last > since);
    let before = world.time - 5 * SECOND;
    assert!(is_reached(&world, before), "{outage:?}, seed {seed}");

    let cut = match outage {
        Outage::Network | Outage::NetworkAndCoordinator => 0..0,
        Outage::OneUplink => 0..1,
        Outage::BothUplinks => 0..2,
    };
    world.core.path.down = cut.is_empty();
    for m in cut {
        let nat = world.members[m].location.nat.expect("a NAT");
        world.internet.forget(nat);
        world.without_uplink.insert(m);
    }
    let uncontacted = match outage {
        Outage::Network => 0..0,
        Outage::OneUplink => 0..1,
        Outage::NetworkAndCoordinator | Outage::BothUplinks => 0..2,
    };
    world.uncontacted.extend(uncontacted);
    run(&mut world, OUTAGE);

    world.core.path.down = false;
    world.without_uplink.clear();
    let healed = world.time;
    for second in 0..RECOVERS {
        for (m, reconnects) in reconnects.into_iter().enumerate() {
            if second >= reconnects % RECONNECTS {
                world.uncontacted.remove(&m);
            }
        }
        run(&mut world, 1);
        if is_reached(&world, healed) {
            return Some(second + 1);
        }
    }
    None
}

fn both_recover_from(outage: Outage) {
    let all: Vec<Option<u64>> = (0..SEEDS).map(|seed| recovery(outage, seed)).collect();
    let late: Vec<u64> = (0..SEEDS)
        .filter(|seed| all[*seed as usize].is_none())
        .collect();
    let slowest = all.iter().flatten().max();
    println!("{outage:?}: {slowest:?} s at most; later: seeds {late:?}");
    assert!(late.is_empty(), "{outage:?}: seeds {late:?}");
}

#[test]
fn both_recover_from_an_outage_of_the_network() {
    both_recover_from(Outage::Network);
}

#[test]
fn both_recover_from_an_outage_of_the_network_and_the_coordinator() {
    both_recover_from(Outage::NetworkAndCoordinator);
}

#[test]
fn both_recover_from_an_outage_of_one_uplink() {
    both_recover_from(Outage::OneUplink);
}

#[test]
fn both_recover_from_an_outage_of_both_uplinks() {
    both_recover_from(Outage::BothUplinks);
}
