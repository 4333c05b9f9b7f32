//! A NAT as a pure state machine, after RFC 4787: how it maps (section 4.1), whom it lets in (section 5), whether it turns packets around
//! (section 6), and when it forgets (section 4.3).

use rand::Rng as _;
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Ports to which what comes from ports above 1023 is mapped (section 4.2.2).
const PORTS: std::ops::RangeInclusive<u16> = 1024..=u16::MAX;

/// What of the other end counts.
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
    /// The same for all others between which it makes no difference.
    fn of(self, remote: SocketAddr) -> SocketAddr {
        match self {
            By::Nothing => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            By::Address => SocketAddr::new(remote.ip(), 0),
            By::AddressAndPort => remote,
        }
    }
}

/// What a NAT does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behaviour {
    pub mapping: By,
    pub filtering: By,
    /// Hosts inside reach each other by their outer addresses.
    pub hairpin: bool,
    /// UDP passes at all.
    pub udp: bool,
    /// Nanoseconds from what was last sent out by a mapping until it is forgotten; what comes in does not keep it (section 4.3).
    pub forgets: u64,
}

/// Why a packet ends here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refused {
    /// No UDP passes.
    NoUdp,
    /// Nobody inside has that outer port.
    NoMapping,
    /// Somebody has, and has sent nothing to where this comes from.
    Filtered,
    /// It would go back inside.
    NoHairpin,
}

/// One NAT.
#[derive(Debug)]
pub struct Nat {
    pub behaviour: Behaviour,
    /// Its outer address.
    pub outer: IpAddr,
    /// Outer ports by inner endpoint and what counts of the other.
    ports: HashMap<(SocketAddr, SocketAddr), u16>,
    mappings: HashMap<u16, Mapping>,
}

#[derive(Debug)]
struct Mapping {
    inner: SocketAddr,
    /// What counts of the other end.
    of: SocketAddr,
    until: u64,
    /// Who is let in, and until when.
    lets_in: HashMap<SocketAddr, u64>,
}

impl Nat {
    pub fn new(behaviour: Behaviour, outer: IpAddr) -> Nat {
        Nat {
            behaviour,
            outer,
            ports: HashMap::new(),
            mappings: HashMap::new(),
        }
    }

    /// Something goes out from an inner endpoint: where it comes from outside.
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
        let of = mapping.of(to);
        let until = now + self.behaviour.forgets;
        let known = self.ports.get(&(from, of)).copied();
        let known = known.filter(|port| self.mappings[port].until > now);
        let port = known.unwrap_or_else(|| self.free_port(now, from.port(), rng));
        if known.is_none() {
            self.ports.insert((from, of), port);
            let new = Mapping {
                inner: from,
                of,
                until,
                lets_in: HashMap::new(),
            };
            // It was forgotten, and its port is another's from now on.
            if let Some(old) = self.mappings.insert(port, new) {
                let key = (old.inner, old.of);
                if key != (from, of) && self.ports.get(&key) == Some(&port) {
                    self.ports.remove(&key);
                }
            }
        }
        let mapping = self.mappings.get_mut(&port).expect("just looked up");
        mapping.until = until;
        mapping.lets_in.insert(filtering.of(to), until);
        Ok(SocketAddr::new(self.outer, port))
    }

    /// One that maps alike for everybody keeps the port if nobody has it (section 4.2.1); any other draws one.
    fn free_port(&self, now: u64, inner: u16, rng: &mut ChaCha8Rng) -> u16 {
        let free = |port: &u16| self.mappings.get(port).is_none_or(|m| m.until <= now);
        let keeps = self.behaviour.mapping == By::Nothing && free(&inner);
        if keeps {
            return inner;
        }
        loop {
            let port = rng.random_range(PORTS);
            if free(&port) {
                return port;
            }
        }
    }

    /// Something comes to an outer port: for whom inside.
    pub fn enter(&mut self, now: u64, from: SocketAddr, port: u16) -> Result<SocketAddr, Refused> {
        let mapping = self.mappings.get(&port).filter(|m| m.until > now);
        let mapping = mapping.ok_or(Refused::NoMapping)?;
        let lets_in = mapping.lets_in.get(&self.behaviour.filtering.of(from));
        match lets_in.is_some_and(|until| *until > now) {
            true => Ok(mapping.inner),
            false => Err(Refused::Filtered),
        }
    }

    /// Drops what is forgotten: memory only.
    pub fn sweep(&mut self, now: u64) {
        self.mappings.retain(|_, mapping| {
            mapping.lets_in.retain(|_, until| *until > now);
            mapping.until > now
        });
        let mappings = &self.mappings;
        self.ports.retain(|_, port| mappings.contains_key(port));
    }

    /// It starts anew, with another outer address.
    pub fn restart(&mut self, outer: IpAddr) {
        *self = Nat::new(self.behaviour, outer);
    }
}
