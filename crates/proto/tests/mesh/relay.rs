//! A relay that speaks the messages of `proto::mesh::relay`, and a STUN server; without sockets.

use super::internet::AtRelay;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::RelaySecret;
use seikan_proto::mesh::relay::{
    Answer, PortRequest, RelayRefusal, RequestError, ServerRequest, is_request,
};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Nanoseconds after which a binding that was not renewed expires (60 s).
const BINDING_LIFETIME: u64 = 60_000_000_000;
/// The first port of pairs.
const FIRST: u16 = 49_152;

/// The location of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    Udp(SocketAddr),
    /// A member connected by TLS.
    Stream(usize),
}

/// Result for a datagram.
#[derive(Debug)]
pub enum Outcome {
    /// Send this back to the source.
    Answer(Vec<u8>),
    /// Forward it to this location, from the port at which it arrived.
    Forward(Location),
    Dropped(AtRelay),
}

#[derive(Clone, Copy, Debug)]
struct Side {
    location: Location,
    stamp: u64,
    until: u64,
}

#[derive(Debug)]
struct Pair {
    keys: [PublicKey; 2],
    sides: [Option<Side>; 2],
}

#[derive(Debug)]
pub struct Relay {
    /// Its main port.
    pub address: SocketAddr,
    pub secret: RelaySecret,
    pub is_on: bool,
    ports: BTreeMap<[PublicKey; 2], u16>,
    pairs: BTreeMap<u16, Pair>,
}

impl Relay {
    pub fn new(address: SocketAddr, secret: RelaySecret) -> Relay {
        Relay {
            address,
            secret,
            is_on: true,
            ports: BTreeMap::new(),
            pairs: BTreeMap::new(),
        }
    }

    /// Stops the relay and drops its state.
    pub fn stop(&mut self) {
        self.is_on = false;
        self.ports.clear();
        self.pairs.clear();
    }

    pub fn pairs(&self) -> usize {
        self.pairs.len()
    }

    /// A datagram arrives at a port. `seen` is its source; `unix` is in seconds since 1970.
    pub fn receive(
        &mut self,
        now: u64,
        unix: u64,
        port: u16,
        (from, seen): (Location, SocketAddr),
        bytes: &[u8],
    ) -> Outcome {
        if !self.is_on {
            return Outcome::Dropped(AtRelay::Off);
        }
        if !is_request(bytes) {
            return self.forward(now, port, from);
        }
        match ServerRequest::parse(bytes) {
            Ok(ServerRequest::Address(id)) => {
                Outcome::Answer(Answer::address(seen).write(id, None))
            }
            Ok(ServerRequest::Port(request)) => {
                let password = self.secret.password(&request.username);
                if !request.verify(&password) || request.expires <= unix {
                    return Outcome::Answer(RelayRefusal::Unauthorized.write(request.id, None));
                }
                let granted = if port == self.address.port() {
                    Ok(self.port_for(&request))
                } else {
                    self.bind(now, port, from, &request)
                };
                Outcome::Answer(match granted {
                    Ok((port, present)) => {
                        let answer = Answer {
                            port: Some(port),
                            present,
                            ..Answer::address(seen)
                        };
                        answer.write(request.id, Some(&password))
                    }
                    Err(refusal) => refusal.write(request.id, Some(&password)),
                })
            }
            Err(RequestError::Refused(id, refusal)) => Outcome::Answer(refusal.write(id, None)),
            Err(RequestError::NotARequest) => Outcome::Dropped(AtRelay::UnknownSource),
        }
    }

    fn forward(&mut self, now: u64, port: u16, from: Location) -> Outcome {
        let Some(pair) = self.pairs.get(&port) else {
            return Outcome::Dropped(AtRelay::UnknownSource);
        };
        let there = |side: &Option<Side>| side.filter(|side| side.until > now);
        let sides = [0, 1].map(|i| there(&pair.sides[i]));
        let is_from = |side: &Option<Side>| side.is_some_and(|side| side.location == from);
        match sides.iter().position(is_from).map(|i| sides[1 - i]) {
            None => Outcome::Dropped(AtRelay::UnknownSource),
            Some(None) => Outcome::Dropped(AtRelay::NotBound),
            Some(Some(other)) => Outcome::Forward(other.location),
        }
    }

    fn port_for(&mut self, request: &PortRequest) -> (u16, bool) {
        let (keys, side) = keys_of(request);
        let (ports, pairs) = (&mut self.ports, &mut self.pairs);
        let port = *ports.entry(keys).or_insert_with(|| {
            let port = pairs.last_key_value().map_or(FIRST, |(port, _)| port + 1);
            let sides = [None; 2];
            pairs.insert(port, Pair { keys, sides });
            port
        });
        (port, self.pairs[&port].sides[1 - side].is_some())
    }

    fn bind(
        &mut self,
        now: u64,
        port: u16,
        location: Location,
        request: &PortRequest,
    ) -> Result<(u16, bool), RelayRefusal> {
        let (keys, side) = keys_of(request);
        let pair = self.pairs.get_mut(&port).filter(|pair| pair.keys == keys);
        let pair = pair.ok_or(RelayRefusal::Malformed)?;
        let before = pair.sides[side];
        let again = |side: Side| side.stamp == request.stamp && side.location == location;
        if before.is_some_and(|before| request.stamp <= before.stamp && !again(before)) {
            return Err(RelayRefusal::Stale);
        }
        pair.sides[side] = Some(Side {
            location,
            stamp: request.stamp,
            until: now + BINDING_LIFETIME,
        });
        let other = pair.sides[1 - side];
        Ok((port, other.is_some_and(|other| other.until > now)))
    }
}

/// The two keys, the lesser first, and the index of the requester.
fn keys_of(request: &PortRequest) -> ([PublicKey; 2], usize) {
    let keys = [
        request.member.min(request.peer),
        request.member.max(request.peer),
    ];
    (keys, usize::from(request.member != keys[0]))
}
