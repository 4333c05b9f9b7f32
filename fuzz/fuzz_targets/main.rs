//! All targets in one binary, which is linked once; `SEIKAN_FUZZ_TARGET` selects one
//! (`scripts/fuzz.sh`).
#![no_main]
#![forbid(unsafe_code)]

mod capabilities;
mod config;
mod doctor_message;
#[cfg(fuzzing)]
mod etcd_messages;
#[cfg(fuzzing)]
mod etcd_rows;
mod frames;
mod framing;
mod handshake;
mod lan_frame;
mod mesh;
mod names;
mod policy;
#[cfg(fuzzing)]
mod proxy_requests;
mod recording;
mod relay;
mod super_packet;
mod translate;
mod tunnel_inbound;
mod uapi;
#[cfg(fuzzing)]
mod userspace_packets;
mod wire_header;
mod wire_packet;

use std::sync::OnceLock;

/// One input of one target. Violations panic.
type Target = fn(&[u8]);

const TARGETS: &[(&str, Target)] = &[
    ("capabilities", capabilities::run),
    ("config", config::run),
    ("doctor_message", doctor_message::run),
    #[cfg(fuzzing)]
    ("etcd_messages", etcd_messages::run),
    #[cfg(fuzzing)]
    ("etcd_rows", etcd_rows::run),
    ("frames", frames::run),
    ("framing", framing::run),
    ("handshake", handshake::run),
    ("lan_frame", lan_frame::run),
    ("mesh", mesh::run),
    ("names", names::run),
    ("policy", policy::run),
    #[cfg(fuzzing)]
    ("proxy_requests", proxy_requests::run),
    ("recording", recording::run),
    ("relay", relay::run),
    ("super_packet", super_packet::run),
    ("translate", translate::run),
    ("tunnel_inbound", tunnel_inbound::run),
    ("uapi", uapi::run),
    #[cfg(fuzzing)]
    ("userspace_packets", userspace_packets::run),
    ("wire_header", wire_header::run),
    ("wire_packet", wire_packet::run),
];
static CHOSEN: OnceLock<Target> = OnceLock::new();

fn choose() {
    let name = std::env::var("SEIKAN_FUZZ_TARGET").unwrap_or_default();
    let Some((_, target)) = TARGETS.iter().find(|(known, _)| *known == name) else {
        let names: Vec<_> = TARGETS.iter().map(|(name, _)| *name).collect();
        eprintln!(
            "SEIKAN_FUZZ_TARGET is {name:?}; it must be one of: {}",
            names.join(" ")
        );
        std::process::exit(2);
    };
    CHOSEN.get_or_init(|| *target);
}

libfuzzer_sys::fuzz_target!(init: choose(), |input: &[u8]| {
    if let Some(target) = CHOSEN.get() {
        target(input);
    }
});
