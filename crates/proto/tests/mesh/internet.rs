//! Networks and the NATs between them: hosts, addresses, and the path of a datagram.
//!
//! A *realm* is a network with its own addresses: the Internet, a carrier's network, a home. Each
//! except the Internet has a NAT to an outer realm. Homes use the same private addresses, so a
//! datagram to one of them may reach another host.

use super::nat::{Behaviour, Nat, Refused};
use crate::sim::network::Parcel;
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The realm of the outer addresses.
pub const WORLD: usize = 0;

/// The owner of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    Host(usize),
    Nat(usize),
    Server(usize),
}

/// Why a datagram does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lost {
    /// The network lost it.
    InTransit,
    /// Its hop limit ended behind the first router.
    HopLimit,
    /// A NAT dropped it.
    AtNat(Refused),
    /// Nobody has the address; private addresses are not routed.
    Nobody,
    /// The two are in separate parts of the network.
    Apart,
    /// No socket has the port.
    NoSocket,
    /// The host is off.
    Off,
    /// A relay is off, or does not forward it.
    AtRelay(AtRelay),
}

/// Why a relay does not forward a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AtRelay {
    Off,
    /// It is from neither side, or no pair has the port.
    UnknownSource,
    /// The other side is not bound.
    NotBound,
}

#[derive(Debug, Default)]
struct Realm {
    nat: Option<usize>,
    at: HashMap<IpAddr, At>,
    hosts: u32,
}

#[derive(Debug)]
struct Border {
    nat: Nat,
    inside: usize,
    outside: usize,
}

/// All networks.
#[derive(Debug)]
pub struct Internet {
    realms: Vec<Realm>,
    borders: Vec<Border>,
    carriers: HashMap<usize, usize>,
    /// Number of outer addresses assigned.
    given: u32,
}

impl Internet {
    pub fn new() -> Internet {
        Internet {
            realms: vec![Realm::default()],
            borders: Vec::new(),
            carriers: HashMap::new(),
            given: 0,
        }
    }

    /// Adds a NAT and the realm inside it. Returns the inner realm and the NAT.
    pub fn add_nat(&mut self, outside: usize, behaviour: Behaviour) -> (usize, usize) {
        let (border, inside) = (self.borders.len(), self.realms.len());
        let outer = self.add(outside, At::Nat(border));
        let nat = Nat::new(behaviour, outer);
        self.borders.push(Border {
            nat,
            inside,
            outside,
        });
        self.realms.push(Realm {
            nat: Some(border),
            ..Realm::default()
        });
        (inside, border)
    }

    /// The realm behind the carrier's NAT of this number; created if necessary.
    pub fn carrier(&mut self, number: usize, behaviour: Behaviour) -> usize {
        if let Some(realm) = self.carriers.get(&number) {
            return *realm;
        }
        let (realm, _) = self.add_nat(WORLD, behaviour);
        self.carriers.insert(number, realm);
        realm
    }

    /// Whether an address is in use in a realm.
    pub fn is_in(&self, realm: usize, ip: IpAddr) -> bool {
        self.realms[realm].at.contains_key(&ip)
    }

    /// Assigns a new address in a realm.
    pub fn add(&mut self, realm: usize, who: At) -> IpAddr {
        let address = match realm {
            // RFC 2544's range, which is not treated as private.
            WORLD => {
                self.given += 1;
                Ipv4Addr::from_bits(Ipv4Addr::new(198, 18, 0, 0).to_bits() + self.given)
            }
            _ => {
                let here = &mut self.realms[realm];
                here.hosts += 1;
                let network = match who {
                    At::Nat(_) => Ipv4Addr::new(10, 0, 0, 1),
                    _ => Ipv4Addr::new(192, 168, 1, 1),
                };
                Ipv4Addr::from_bits(network.to_bits() + here.hosts)
            }
        };
        self.add_at(realm, address.into(), who);
        address.into()
    }

    /// Assigns this address.
    pub fn add_at(&mut self, realm: usize, address: IpAddr, who: At) {
        let before = self.realms[realm].at.insert(address, who);
        assert_eq!(before, None, "{address} is somebody's");
    }

    /// Releases the address.
    pub fn remove(&mut self, realm: usize, address: IpAddr) {
        self.realms[realm].at.remove(&address);
    }

    /// A datagram leaves a realm outwards. Returns where it enters, and its source address. It
    /// stays in a realm that contains its destination. An opener passes one NAT, and no router of
    /// the Internet.
    pub fn leave(
        &mut self,
        now: u64,
        mut realm: usize,
        parcel: &mut Parcel,
        rng: &mut ChaCha8Rng,
    ) -> Result<At, Lost> {
        let mut last = None;
        loop {
            if parcel.is_opener && (last.is_some() || realm == WORLD) {
                return Err(Lost::HopLimit);
            }
            let here = &self.realms[realm];
            if let Some(at) = here.at.get(&parcel.to.ip()) {
                let back = last.filter(|nat| *at == At::Nat(*nat));
                return match back.map(|nat| self.borders[nat].nat.behaviour.hairpin) {
                    Some(false) => Err(Lost::AtNat(Refused::NoHairpin)),
                    _ => Ok(*at),
                };
            }
            let nat = here.nat.ok_or(Lost::Nobody)?;
            let border = &mut self.borders[nat];
            let outer = border.nat.out(now, parcel.from, parcel.to, rng);
            parcel.from = outer.map_err(Lost::AtNat)?;
            (realm, last) = (border.outside, Some(nat));
        }
    }

    /// A datagram enters and is delivered to a host or a server.
    pub fn enter(&mut self, now: u64, mut at: At, parcel: &mut Parcel) -> Result<At, Lost> {
        while let At::Nat(border) = at {
            let Border { nat, inside, .. } = &mut self.borders[border];
            // The address may have changed by now.
            if nat.outer != parcel.to.ip() {
                return Err(Lost::Nobody);
            }
            let inner = nat.enter(now, parcel.from, parcel.to.port());
            parcel.to = inner.map_err(Lost::AtNat)?;
            let here = &self.realms[*inside];
            at = *here.at.get(&parcel.to.ip()).ok_or(Lost::Nobody)?;
        }
        Ok(at)
    }

    /// A NAT loses its state and changes its address.
    pub fn restart_nat(&mut self, border: usize) {
        let outside = self.borders[border].outside;
        let former = self.borders[border].nat.outer;
        self.remove(outside, former);
        let outer = self.add(outside, At::Nat(border));
        self.borders[border].nat.restart(outer);
    }

    /// A NAT loses its state and keeps its address.
    pub fn forget(&mut self, border: usize) {
        let nat = &mut self.borders[border].nat;
        nat.restart(nat.outer);
    }

    /// Drops expired mappings, to save memory.
    pub fn sweep(&mut self, now: u64) {
        for border in &mut self.borders {
            border.nat.sweep(now);
        }
    }
}

/// The tunnel's port of a member.
pub fn at(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip, port)
}
