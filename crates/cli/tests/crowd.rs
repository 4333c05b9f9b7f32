//! Ten thousand configured peers that never connect: their memory, and service for the
//! one that does. `seikan lab bench --idle-peers` measures their cost in throughput.

use std::fmt::Write;
use std::time::Instant;

use crate::common::{PATIENCE, in_world, unaccounted};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use seikan_load::Pattern;

const IDLE: u32 = 10_000;
/// Maximum memory of the program with all these peers, in bytes.
const MEMORY: u64 = 256 << 20;

fn sections() -> String {
    let mut sections = String::new();
    for n in 0..IDLE {
        let mut key = [0; 32];
        Pattern::new(u64::from(n)).fill(0, &mut key);
        let (key, [_, a, b, c]) = (STANDARD.encode(key), n.to_be_bytes());
        writeln!(
            sections,
            "[Peer]\nPublicKey = {key}\nAllowedIPs = 10.{}.{b}.{c}/32\nEndpoint = 198.51.100.1:{}",
            128 + a,
            n + 1,
        )
        .expect("memory");
    }
    sections
}

fn serves_one_of_many(protocol: &str) {
    in_world(["", ""], |world| {
        let one = std::fs::read_to_string(&world.right.config).expect("read");
        world.right.write(&(one + "\n" + &sections()));
        let begin = Instant::now();
        let right = world.up_with(&world.right, &["--protocol", protocol]);
        let started = begin.elapsed();
        assert!(started < PATIENCE, "up after {started:?}");
        let _left = world.up_with(&world.left, &["--protocol", protocol]);
        assert!(world.answers_within(PATIENCE), "no echo");
        let status = world.status(&world.right);
        assert_eq!(
            status["peers"].as_array().expect("peers").len() as u32,
            IDLE + 1
        );
        assert_eq!(unaccounted(&status), [0, 0]);
        let memory = seikan_sys::process::memory(right.child.id()).expect("memory");
        assert!(memory.peak <= MEMORY, "{} bytes", memory.peak);
        eprintln!(
            "{protocol}: up after {started:?}, {} KiB at most",
            memory.peak >> 10
        );
        // After a status, with memory at its peak, everything still works.
        assert!(world.answers_within(PATIENCE), "no echo");
    });
}

#[test]
fn wireguard_mode_serves_one_of_ten_thousand() {
    serves_one_of_many("wireguard");
}

#[test]
fn native_mode_serves_one_of_ten_thousand() {
    serves_one_of_many("native");
}
