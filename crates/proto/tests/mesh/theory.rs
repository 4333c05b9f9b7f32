//! What may come of a pair of hosts, by what lies before them: from RFC 4787 and RFC 5128, not from what was seen.

use super::nat::By;
use super::world::Before;
use seikan_proto::birthday::{PORTS, PROBES, RANGE};

/// By which way the two reach each other for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Candidate {
    Direct,
    /// Directly when one of many ports of a symmetric NAT is met, and by a relay until then.
    Port,
    Relay,
}

/// RFC 5128, section 3.3: who has one outer port for everybody can be told of, and is reached there by whom it has sent to. What counts is
/// then whether the packets of each get through the filter before the other:
///
/// | | one port, lets in everybody or an address | one port, lets in an address and port | a port for each destination |
/// |---|---|---|---|
/// | one port, lets in everybody or an address | direct | direct | direct: the answer goes to where it was seen to come from |
/// | one port, lets in an address and port | direct | direct: both send | only when the port is guessed |
/// | a port for each destination | direct | only when the port is guessed | relay: nobody knows where to send |
pub fn candidate(a: Before, b: Before, same_home: bool) -> Candidate {
    match (a, b) {
        // They meet inside, by their own addresses.
        _ if same_home => return Candidate::Direct,
        (Before::NoUdp, _) | (_, Before::NoUdp) => return Candidate::Relay,
        // Each knows the other by an outer address of the carrier's NAT, which lets nothing back in from inside.
        (Before::Carrier(a), Before::Carrier(b)) if a == b => return Candidate::Relay,
        _ => {}
    }
    let [a, b] = [a, b].map(Before::behaviour);
    match (a.mapping, b.mapping) {
        (By::Nothing, By::Nothing) => Candidate::Direct,
        (By::Nothing, _) if a.filtering != By::AddressAndPort => Candidate::Direct,
        (_, By::Nothing) if b.filtering != By::AddressAndPort => Candidate::Direct,
        (By::Nothing, _) | (_, By::Nothing) => Candidate::Port,
        _ => Candidate::Relay,
    }
}

/// Of so many attempts to meet a port, how many fail at most: each with (1 - PORTS / RANGE)^PROBES, and four standard deviations.
pub fn failures(attempts: usize) -> usize {
    let one = (1.0 - f64::from(PORTS) / f64::from(RANGE)).powi(PROBES as i32);
    let mean = attempts as f64 * one;
    (mean + 4.0 * mean.sqrt()).ceil() as usize
}
