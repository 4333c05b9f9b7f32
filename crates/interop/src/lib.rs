//! Two hosts, a WireGuard implementation on each, and traffic that is checked byte by byte.
//!
//! ```text
//!  host a                          host b                 each a network namespace
//!  a tunnel 10.67.0.1, fd67::1     10.67.0.2, fd67::2     overlay
//!  uplink   10.66.0.1, fd66::1 --- 10.66.0.2, fd66::2     underlay: one veth pair
//! ```
//!
//! The flow of a test: say what runs where ([`Setup`]), bring it up ([`Tunnel::up`]), send through it
//! ([`Stream`], [`Tunnel::ping`], [`Tunnel::time_to_answer`]), and disturb it ([`Side::kill`], [`Side::roam`]).
//! Everything made is gone when [`Tunnel`] is dropped, however the test ends: namespaces live as
//! long as their descriptors, daemons die with this process.
#![forbid(unsafe_code)]

mod side;
mod stream;
mod tunnel;

pub use side::{Implementation, Side};
pub use stream::{Report, Stream};
pub use tunnel::{Knows, Setup, Tunnel, Underlay};

use std::path::PathBuf;

/// Says that a test cannot run and why; where everything is required (`SEIKAN_REQUIRE_ALL=1`) that is a failure.
pub fn skip(reason: &str) {
    assert!(
        std::env::var("SEIKAN_REQUIRE_ALL").as_deref() != Ok("1"),
        "may not be skipped here: {reason}"
    );
    eprintln!("SKIPPED: {reason}");
}

/// A program from the folder of other people's tunnels (`SEIKAN_PEERS`) or from `PATH`.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let peers = std::env::var_os("SEIKAN_PEERS").unwrap_or_default();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&peers)
        .chain(std::env::split_paths(&path))
        .collect();
    folders
        .into_iter()
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}
