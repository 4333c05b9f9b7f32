//! A NAT as a pure state machine, after RFC 4787: mapping (section 4.1), filtering (section 5),
//! hairpinning (section 6), and expiry (section 4.3).

use crate::sim::SECOND;
use rand::Rng as _;
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Outer ports for inner ports above 1023 (section 4.2.2).
const PORTS: std::ops::RangeInclusive<u16> = 1024..=u16::MAX;

/// Lifetime of an entry without an answer where unsolicited packets leave one too: Linux,
/// `nf_conntrack_udp_timeout`.
const TRACKED: u64 = 30 * SECOND;

/// The part of the remote endpoint that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum By {
    /// Nothing: endpoint-independent.
    Nothing,
    /// Address-dependent.
    Address,
    /// Address and port-dependent.
    AddressAndPort,
}

impl By {
    /// The same value for all remote endpoints that it does not distinguish.
    fn of(self, remote: SocketAddr) -> SocketAddr {
        match self {
            By::Nothing => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            By::Address => SocketAddr::new(remote.ip(), 0),
            By::AddressAndPort => remote,
        }
    }
}

/// Behaviour of a NAT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behaviour {
    pub mapping: By,
    pub filtering: By,
    /// Hosts inside reach each other by their outer addresses.
    pub hairpin: bool,
    /// Whether UDP passes at all.
    pub udp: bool,
    /// Whether an unsolicited packet takes the port from the host that sends to its source later,
    /// for [`TRACKED`]: Linux without a rule that drops it. The other port that the host is mapped to
    /// stays in use for as long as it sends.
    pub tracks: bool,
    /// Lifetime of a mapping in nanoseconds after its last outbound packet. Inbound packets do not
    /// extend it (section 4.3).
    pub forgets: u64,
}

/// Why a packet is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refused {
    /// No UDP passes.
    NoUdp,
    /// No mapping has this outer port.
    NoMapping,
    /// The mapping has not sent to this source.
    Filtered,
    /// The packet would go back inside.
    NoHairpin,
}

/// One NAT.
#[derive(Debug)]
pub struct Nat {
    pub behaviour: Behaviour,
    /// Its outer address.
    pub outer: IpAddr,
    /// Outer ports by inner endpoint and the relevant part of the remote endpoint.
    ports: HashMap<(SocketAddr, SocketAddr), u16>,
    mappings: HashMap<u16, Mapping>,
    /// Outer ports and remote endpoints that unsolicited packets have taken, and until when.
    taken: HashMap<(u16, SocketAddr), u64>,
}

#[derive(Debug)]
struct Mapping {
    inner: SocketAddr,
    /// The relevant part of the remote endpoint.
    of: SocketAddr,
    until: u64,
    /// Admitted sources.
    lets_in: HashMap<SocketAddr, Admitted>,
}

#[derive(Clone, Copy, Debug)]
struct Admitted {
    until: u64,
    /// Whether something has arrived from there.
    has_answered: bool,
}

impl Nat {
    pub fn new(behaviour: Behaviour, outer: IpAddr) -> Nat {
        Nat {
            behaviour,
            outer,
            ports: HashMap::new(),
            mappings: HashMap::new(),
            taken: HashMap::new(),
        }
    }

    /// A packet leaves from an inner endpoint. Returns its outer source.
    pub fn out(
        &mut self,
        now: u64,
        from: SocketAddr,
        to: SocketAddr,
        rng: &mut ChaCha8Rng,
    ) -> Result<SocketAddr, Refused> {
        let Behaviour {
            mapping, filtering, ..
        } = self.behaviour;
        if !self.behaviour.udp {
            return Err(Refused::NoUdp);
        }
        let of_use = |port: &u16| self.mappings[port].until > now;
        let port_for = |of| self.ports.get(&(from, of)).copied().filter(of_use);
        let mut of = mapping.of(to);
        let mut known = port_for(of);
        if port_for(to).is_some() || self.is_taken(now, known.unwrap_or(from.port()), to) {
            // Another port, for this destination alone.
            of = to;
            known = port_for(of);
        }
        let taken = |port| self.is_taken(now, port, to);
        let port = known.unwrap_or_else(|| {
            if taken(from.port()) {
                self.random_port(now, rng)
            } else {
                self.free_port(now, from.port(), rng)
            }
        });
        if known.is_none() {
            self.ports.insert((from, of), port);
            let new = Mapping {
                inner: from,
                of,
                until: now,
                lets_in: HashMap::new(),
            };
            // The mapping had expired, and its port is reused.
            if let Some(old) = self.mappings.insert(port, new) {
                let key = (old.inner, old.of);
                if key != (from, of) && self.ports.get(&key) == Some(&port) {
                    self.ports.remove(&key);
                }
            }
        }
        let Behaviour {
            tracks, forgets, ..
        } = self.behaviour;
        let is_alone = of == to;
        let mapping = self.mappings.get_mut(&port).expect("just looked up");
        let admitted = mapping.lets_in.get(&filtering.of(to));
        let has_answered =
            admitted.is_some_and(|admitted| admitted.has_answered && admitted.until > now);
        let lifetime = if tracks && !has_answered {
            TRACKED
        } else {
            forgets
        };
        let admitted = Admitted {
            until: now + lifetime,
            has_answered,
        };
        mapping.until = now + if is_alone { lifetime } else { forgets };
        mapping.lets_in.insert(filtering.of(to), admitted);
        Ok(SocketAddr::new(self.outer, port))
    }

    /// A NAT with endpoint-independent mapping keeps the port if it is free (section 4.2.1); any
    /// other draws one.
    fn free_port(&self, now: u64, inner: u16, rng: &mut ChaCha8Rng) -> u16 {
        if self.behaviour.mapping == By::Nothing && self.is_free(now, inner) {
            return inner;
        }
        self.random_port(now, rng)
    }

    fn random_port(&self, now: u64, rng: &mut ChaCha8Rng) -> u16 {
        loop {
            let port = rng.random_range(PORTS);
            if self.is_free(now, port) {
                return port;
            }
        }
    }

    fn is_free(&self, now: u64, port: u16) -> bool {
        self.mappings.get(&port).is_none_or(|m| m.until <= now)
    }

    /// Whether an unsolicited packet from `remote` has taken the port. It does not take one by
    /// which something was sent there.
    fn is_taken(&self, now: u64, port: u16, remote: SocketAddr) -> bool {
        self.taken
            .get(&(port, remote))
            .is_some_and(|until| *until > now)
    }

    /// A packet arrives at an outer port. Returns its inner endpoint.
    pub fn enter(&mut self, now: u64, from: SocketAddr, port: u16) -> Result<SocketAddr, Refused> {
        let outcome = self.admit(now, from, port);
        if outcome.is_err() && self.behaviour.tracks {
            self.taken.insert((port, from), now + TRACKED);
        }
        outcome
    }

    fn admit(&mut self, now: u64, from: SocketAddr, port: u16) -> Result<SocketAddr, Refused> {
        let mapping = self.mappings.get_mut(&port).filter(|m| m.until > now);
        let mapping = mapping.ok_or(Refused::NoMapping)?;
        let admitted = mapping.lets_in.get_mut(&self.behaviour.filtering.of(from));
        match admitted.filter(|admitted| admitted.until > now) {
            Some(admitted) => {
                admitted.has_answered = true;
                Ok(mapping.inner)
            }
            None => Err(Refused::Filtered),
        }
    }

    /// Drops expired mappings, to save memory.
    pub fn sweep(&mut self, now: u64) {
        self.taken.retain(|_, until| *until > now);
        self.mappings.retain(|_, mapping| {
            mapping.lets_in.retain(|_, admitted| admitted.until > now);
            mapping.until > now
        });
        let mappings = &self.mappings;
        self.ports.retain(|_, port| mappings.contains_key(port));
    }

    /// Restarts with another outer address.
    pub fn restart(&mut self, outer: IpAddr) {
        *self = Nat::new(self.behaviour, outer);
    }
}
