//! The protocol without I/O: handshake, sessions, batches, paths.
//!
//! Nothing here reads a clock, a socket or a random source that was not passed in.
//! [`tunnel::Tunnel`] ties the modules together; its module documents the drive contract.
//!
//! - Outbound, in the order that a packet passes them: [`batch`] and [`segment`] (reads of the TUN
//!   device), [`tunnel`] (routing), [`session`] (keys), [`native`] (frames in records), [`outbox`]
//!   (datagrams for the socket).
//! - Inbound: [`filter`] (services that a peer may use), [`inbox`] (packets for the TUN device).
//! - Ethernet mode: [`mode`] (where the IP header of a frame begins), [`mac_table`].
//! - Handshakes: [`noise`], [`cookie`], [`timers`].
//! - Messages between hosts and their coordinator: [`mesh`].
#![forbid(unsafe_code)]

// Unencrypted traffic is for measurements only and must never run by mistake.
#[cfg(all(feature = "null-cipher", not(debug_assertions)))]
compile_error!(
    "the null cipher encrypts nothing: it is for measuring, with `--profile lab`, and no release build may have it"
);

pub mod allowed_ips;
pub mod batch;
pub mod birthday;
pub mod capabilities;
pub mod codel;
pub mod constants;
pub mod cookie;
mod fields;
pub mod filter;
pub mod gateway;
pub mod inbox;
pub mod indices;
pub mod keys;
pub mod mac;
pub mod mac_table;
pub mod mesh;
pub mod mode;
pub mod native;
pub mod noise;
pub mod outbox;
pub mod paths;
pub mod peer;
pub mod ping;
pub mod protocol;
pub mod proxied;
pub mod rate_limiter;
pub mod replay;
pub mod rng;
pub mod segment;
pub mod session;
pub mod tai64n;
pub mod time;
pub mod timers;
mod token_bucket;
pub mod tunnel;
