//! A simulated mesh of a thousand members in a virtual internet. They connect, a tenth of them
//! changes each minute, a relay dies, the network splits and heals, and finally all are silent.

mod internet;
mod member;
mod nat;
mod outage;
mod relay;
mod scenario;
mod theory;
mod world;

use crate::sim::SECOND;
use scenario::Mesh;
use seikan_proto::peer::Peer;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// One simulation at a time: a thousand members know a million.
static ONE: Mutex<()> = Mutex::new(());

/// Runs a whole simulation. Returns the hash of all events.
fn play(seed: u64, members: usize, minutes: u64) -> u64 {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    #[expect(clippy::disallowed_methods, reason = "the duration is printed")]
    let mut last = Instant::now();
    let (mut time, mut events) = (0, 0);
    let mut mesh = Mesh::new(seed, members);
    let mut takes = |mesh: &Mesh, kind: &str| {
        #[expect(clippy::disallowed_methods, reason = "likewise")]
        let now = Instant::now();
        let (took, world) = (now - std::mem::replace(&mut last, now), &mesh.world);
        let virtually = (world.time - std::mem::replace(&mut time, world.time)) / SECOND;
        let happened = world.events - std::mem::replace(&mut events, world.events);
        println!("seed {seed}, {members} {kind}: {virtually} s in {took:.1?}, {happened} events");
    };
    mesh.know_each_other();
    takes(&mesh, "know each other");
    mesh.check_connectivity();
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
        play(seed, 100, 3);
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let first = play(9, 100, 1);
    assert_eq!(play(9, 100, 1), first);
    assert_ne!(play(10, 100, 1), first);
}

#[test]
fn a_thousand_members_reach_the_expected_paths() {
    play(1, 1000, 1);
}

/// A member stores a thousand others in a few megabytes: each in a slot of a table that doubles as
/// it grows, with its addresses, and in the membership.
#[test]
fn known_peers_take_little_memory() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let members = 200;
    let before = resident();
    let mut mesh = Mesh::new(1, members);
    mesh.know_each_other();
    let known = resident();
    mesh.check_connectivity();
    let (talks, resident_active) = (mesh.world.talks.len(), resident());
    let each = (known - before) / (members * (members - 1));
    let active = (resident_active - known) / (2 * talks);
    let location = size_of::<Peer>();
    println!(
        "bytes a known peer: {each}, of which {location} its place; an active one: {active} more"
    );
    assert!(each < 2 * location + 2048, "{each}");
}

/// Resident memory of this process in bytes.
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
        play(seed, 1000, 10);
    }
}
