//! A thousand members as tunnels in one virtual internet: they meet, a tenth of them changes each minute, a relay dies, the network falls
//! apart and heals, and in the end nobody has anything to say.

mod internet;
mod member;
mod nat;
mod relay;
mod scenario;
mod theory;
mod world;

use crate::sim::SECOND;
use scenario::Mesh;
use seikan_proto::peer::Peer;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// One life at a time: a thousand members know a million.
static ONE: Mutex<()> = Mutex::new(());

/// A whole life of a mesh; the hash of all that happened.
fn life(seed: u64, members: usize, minutes: u64) -> u64 {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    #[expect(clippy::disallowed_methods, reason = "what it takes is printed")]
    let mut last = Instant::now();
    let (mut time, mut events) = (0, 0);
    let mut mesh = Mesh::new(seed, members);
    let mut takes = |mesh: &Mesh, what: &str| {
        #[expect(clippy::disallowed_methods, reason = "likewise")]
        let now = Instant::now();
        let (took, world) = (now - std::mem::replace(&mut last, now), &mesh.world);
        let virtually = (world.time - std::mem::replace(&mut time, world.time)) / SECOND;
        let happened = world.events - std::mem::replace(&mut events, world.events);
        println!("seed {seed}, {members} {what}: {virtually} s in {took:.1?}, {happened} events");
    };
    mesh.know_each_other();
    takes(&mesh, "know each other");
    mesh.meets();
    takes(&mesh, "meet");
    mesh.changes(minutes);
    takes(&mesh, "change");
    mesh.a_relay_dies();
    takes(&mesh, "lose a relay");
    mesh.falls_apart();
    takes(&mesh, "fall apart and meet again");
    mesh.falls_silent();
    takes(&mesh, "fall silent");
    mesh.world.hash()
}

#[test]
fn members_reach_the_expected_paths_for_any_seed() {
    for seed in 1..3 {
        life(seed, 100, 3);
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let first = life(9, 100, 1);
    assert_eq!(life(9, 100, 1), first);
    assert_ne!(life(10, 100, 1), first);
}

#[test]
fn a_thousand_members_reach_the_expected_paths() {
    life(1, 1000, 1);
}

/// A member keeps a thousand others in a few megabytes: each in one place of a table that doubles as it grows, with its addresses, and in its
/// book.
#[test]
fn known_peers_take_little_memory() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let members = 200;
    let before = resident();
    let mut mesh = Mesh::new(1, members);
    mesh.know_each_other();
    let known = resident();
    mesh.meets();
    let (talks, met) = (mesh.world.talks.len(), resident());
    let each = (known - before) / (members * (members - 1));
    let active = (met - known) / (2 * talks);
    let place = size_of::<Peer>();
    println!(
        "bytes a known peer: {each}, of which {place} its place; an active one: {active} more"
    );
    assert!(each < 2 * place + 2048, "{each}");
}

/// Bytes of memory that this process has.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<usize>().ok()).expect("kB") * 1024
}

/// `make soak-mesh`.
#[test]
#[ignore = "takes an hour"]
fn many_seeds_for_ten_minutes_of_changes() {
    for seed in 100..110 {
        life(seed, 1000, 10);
    }
}
