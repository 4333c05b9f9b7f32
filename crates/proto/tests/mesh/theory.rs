//! The expected path between two hosts, by their NATs: from RFC 4787 and RFC 5128, not from
//! observation.

use super::nat::By;
use super::world::Before;
use seikan_proto::birthday::{PORTS, PROBES, RANGE};

/// The path by which two hosts finally reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathKind {
    Direct,
    /// Directly once a port of the symmetric NAT is hit, and over a relay until then.
    Port,
    Relay,
}

/// RFC 5128, section 3.3: a host with one outer port for all destinations can publish it, and hosts
/// that it has sent to reach it there. The result depends on whether the packets of each pass the
/// other's filter:
///
/// | | one port, admits everybody or an address | one port, admits an address and port | a port for each destination |
/// |---|---|---|---|
/// | one port, admits everybody or an address | direct | direct | direct: the reply goes to the source address |
/// | one port, admits an address and port | direct | direct: both send | only when the port is guessed |
/// | a port for each destination | direct | only when the port is guessed | relay: no known address |
pub fn expected_path(a: Before, b: Before, same_home: bool) -> PathKind {
    match (a, b) {
        // They connect inside, by their own addresses.
        _ if same_home => return PathKind::Direct,
        (Before::NoUdp, _) | (_, Before::NoUdp) => return PathKind::Relay,
        // Each knows an outer address of the carrier's NAT, which does not hairpin.
        (Before::Carrier(a), Before::Carrier(b)) if a == b => return PathKind::Relay,
        _ => {}
    }
    let [a, b] = [a, b].map(Before::behaviour);
    match (a.mapping, b.mapping) {
        (By::Nothing, By::Nothing) => PathKind::Direct,
        (By::Nothing, _) if a.filtering != By::AddressAndPort => PathKind::Direct,
        (_, By::Nothing) if b.filtering != By::AddressAndPort => PathKind::Direct,
        (By::Nothing, _) | (_, By::Nothing) => PathKind::Port,
        _ => PathKind::Relay,
    }
}

/// The maximum number of failures in `attempts` attempts to hit a port and in as many as `tracking`
/// towards a NAT that tracks unsolicited packets: each fails with (1 - PORTS / RANGE)^probes; plus
/// four standard deviations. Before such a NAT only the probes of the first 2 s count.
pub fn failures(attempts: usize, tracking: usize) -> usize {
    let one = |probes: i32| (1.0 - f64::from(PORTS) / f64::from(RANGE)).powi(probes);
    let mean = attempts as f64 * one(PROBES as i32) + tracking as f64 * one(1000);
    (mean + 4.0 * mean.sqrt()).ceil() as usize
}
