//! A relay that speaks the messages of `proto::mesh::relay`, and a STUN server; without sockets.

use super::internet::AtRelay;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::RelaySecret;
use seikan_proto::mesh::relay::{
    Answer, PortRequest, RelayRefusal, RequestError, ServerRequest, is_request,
};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Nanoseconds after which a side that has not bound itself anew is gone (60 s).
const LIFE: u64 = 60_000_000_000;
/// The first port of pairs.
const FIRST: u16 = 49_152;

/// Where a side is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Udp(SocketAddr),
    /// A member that comes by TLS.
    Stream(usize),
}

/// What becomes of a datagram.
#[derive(Debug)]
pub enum Outcome {
    /// This goes back to where it came from.
    Answer(Vec<u8>),
    /// It goes on to there, from the port at which it came.
    Forward(Place),
    Dropped(AtRelay),
}

#[derive(Clone, Copy, Debug)]
struct Side {
    place: Place,
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

    /// It is gone, with all that it knew.
    pub fn stop(&mut self) {
        self.is_on = false;
        self.ports.clear();
        self.pairs.clear();
    }

    pub fn pairs(&self) -> usize {
        self.pairs.len()
    }

    /// A datagram comes to a port, `seen` as that; `unix` is in seconds since 1970.
    pub fn receive(
        &mut self,
        now: u64,
        unix: u64,
        port: u16,
        (from, seen): (Place, SocketAddr),
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
            Ok(ServerRequest::Port(asked)) => {
                let password = self.secret.password(&asked.username);
                if !asked.verify(&password) || asked.expires <= unix {
                    return Outcome::Answer(RelayRefusal::Unauthorized.write(asked.id, None));
                }
                let granted = match port == self.address.port() {
                    true => Ok(self.port_for(&asked)),
                    false => self.bind(now, port, from, &asked),
                };
                Outcome::Answer(match granted {
                    Ok((port, present)) => {
                        let answer = Answer {
                            port: Some(port),
                            present,
                            ..Answer::address(seen)
                        };
                        answer.write(asked.id, Some(&password))
                    }
                    Err(refusal) => refusal.write(asked.id, Some(&password)),
                })
            }
            Err(RequestError::Refused(id, refusal)) => Outcome::Answer(refusal.write(id, None)),
            Err(RequestError::NotARequest) => Outcome::Dropped(AtRelay::Stranger),
        }
    }

    fn forward(&mut self, now: u64, port: u16, from: Place) -> Outcome {
        let Some(pair) = self.pairs.get(&port) else {
            return Outcome::Dropped(AtRelay::Stranger);
        };
        let there = |side: &Option<Side>| side.filter(|side| side.until > now);
        let sides = [0, 1].map(|i| there(&pair.sides[i]));
        let is_from = |side: &Option<Side>| side.is_some_and(|side| side.place == from);
        match sides.iter().position(is_from).map(|i| sides[1 - i]) {
            None => Outcome::Dropped(AtRelay::Stranger),
            Some(None) => Outcome::Dropped(AtRelay::NotBound),
            Some(Some(other)) => Outcome::Forward(other.place),
        }
    }

    fn port_for(&mut self, asked: &PortRequest) -> (u16, bool) {
        let (keys, side) = keys_of(asked);
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
        place: Place,
        asked: &PortRequest,
    ) -> Result<(u16, bool), RelayRefusal> {
        let (keys, side) = keys_of(asked);
        let pair = self.pairs.get_mut(&port).filter(|pair| pair.keys == keys);
        let pair = pair.ok_or(RelayRefusal::Malformed)?;
        let before = pair.sides[side];
        let again = |side: Side| side.stamp == asked.stamp && side.place == place;
        if before.is_some_and(|before| asked.stamp <= before.stamp && !again(before)) {
            return Err(RelayRefusal::Stale);
        }
        pair.sides[side] = Some(Side {
            place,
            stamp: asked.stamp,
            until: now + LIFE,
        });
        let other = pair.sides[1 - side];
        Ok((port, other.is_some_and(|other| other.until > now)))
    }
}

/// The two, the lesser first, and which of them asks.
fn keys_of(asked: &PortRequest) -> ([PublicKey; 2], usize) {
    let keys = [asked.member.min(asked.peer), asked.member.max(asked.peer)];
    (keys, usize::from(asked.member != keys[0]))
}
