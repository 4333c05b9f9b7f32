//! Two hosts with a WireGuard implementation each, and traffic that is verified byte by byte.
//!
//! ```text
//!  host a                          host b                 each a network namespace
//!  a tunnel 10.67.0.1, fd67::1     10.67.0.2, fd67::2     overlay
//!  uplink   10.66.0.1, fd66::1 --- 10.66.0.2, fd66::2     underlay: one veth pair
//! ```
//!
//! A test describes the implementations ([`Setup`]), starts them ([`Tunnel::up`]), sends traffic
//! ([`Stream`], [`Tunnel::ping`], [`Tunnel::time_to_answer`]), and disturbs it ([`Side::kill`],
//! [`Side::roam`]). Dropping [`Tunnel`] removes everything, however the test ends: namespaces last
//! as long as their descriptors, and daemons die with this process.
#![forbid(unsafe_code)]

mod side;
mod stream;
mod tunnel;

pub use side::{Implementation, Side};
pub use stream::{Report, Stream};
pub use tunnel::{Knows, Setup, Tunnel, Underlay};

use std::path::PathBuf;

/// Reports that a test cannot run and why; with `SEIKAN_REQUIRE_ALL=1` that is a failure.
pub fn skip(reason: &str) {
    assert!(
        std::env::var("SEIKAN_REQUIRE_ALL").as_deref() != Ok("1"),
        "may not be skipped here: {reason}"
    );
    eprintln!("SKIPPED: {reason}");
}

/// Finds a program in the folder of other implementations (`SEIKAN_PEERS`) or on `PATH`.
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
