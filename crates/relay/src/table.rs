//! Who shares a port with whom, and for how long; and the sockets of it.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};

use seikan_proto::mesh::RelaySecret;
use seikan_proto::mesh::relay::{PortRequest, RelayRefusal};
use seikan_proto::time::Instant;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::udp::{UdpOptions, UdpSocket};
use slab::Slab;

use crate::Counters;
use crate::pair::{Bound, Holder, Keys, LIFE, Pair, Place, Side};
use crate::relay::{FIRST_PAIR_TOKEN, Limits, Now};
use crate::streams::{Run, Streams};

/// Ports that are tried for a new pair: others may have some of ours.
const TRIES: usize = 128;
/// Buffers of a pair's socket in bytes; there may be thousands.
const PAIR_BUFFER: usize = 1 << 20;

const V4: usize = 0;
const V6: usize = 1;

/// Pairs and members, and their sockets.
#[derive(Debug)]
pub(crate) struct Table {
    pub main: [Option<UdpSocket>; 2],
    pub streams: Streams,
    /// What has come by a connection, for a moment.
    pub run: Run,
    pub secret: RelaySecret,
    pub limits: Limits,
    pub pairs: Slab<Pair>,
    pub holders: Slab<Holder>,
    by_keys: HashMap<Keys, usize>,
    /// By the numbers in tickets: a member that changes its key stays the same one.
    by_number: HashMap<u64, usize>,
    /// Those that pairs have.
    ports: BTreeMap<u16, usize>,
    /// Where the search for a free one goes on, so that one is not used again soon.
    next_port: u16,
    pub counters: Counters,
}

impl Table {
    /// With these main sockets and what takes connections, and nobody in it.
    pub fn new(
        main: [Option<UdpSocket>; 2],
        streams: Streams,
        secret: RelaySecret,
        limits: Limits,
    ) -> Table {
        Table {
            main,
            streams,
            run: Run::default(),
            secret,
            next_port: *limits.ports.start(),
            limits,
            pairs: Slab::new(),
            holders: Slab::new(),
            by_keys: HashMap::new(),
            by_number: HashMap::new(),
            ports: BTreeMap::new(),
            counters: Counters::default(),
        }
    }

    /// The port of a pair, which is made if there is none, with a socket of the family by which one of the two asks; and
    /// whether the other is bound.
    pub fn port_for(
        &mut self,
        asked: &PortRequest,
        family: usize,
        epoll: &Epoll,
        now: Now,
    ) -> Result<(u16, bool), RelayRefusal> {
        let (keys, side) = Keys::of(asked.member, asked.peer);
        let known = self.by_keys.get(&keys).copied();
        let own = self.by_number.get(&asked.holder).copied();
        let has_asked = known
            .and_then(|slot| self.pairs.get(slot))
            .is_some_and(|pair| pair.sides[side].asked && pair.sides[side].holder == own);
        if !has_asked && self.share_of(asked.holder) >= self.limits.pairs_per_member {
            return Err(RelayRefusal::Quota);
        }
        let slot = match known {
            Some(slot) => slot,
            None => self.make(keys, family, epoll)?,
        };
        let home = self.home(family).ok_or(RelayRefusal::Full)?;
        let pair = self.pairs.get_mut(slot).ok_or(RelayRefusal::Full)?;
        let taken = &mut pair.sides[side];
        hold(taken, asked.holder, &mut self.holders, &mut self.by_number);
        if !taken.asked {
            taken.asked = true;
            if let Some(holder) = taken.holder.and_then(|at| self.holders.get_mut(at)) {
                holder.asked += 1;
            }
        }
        if pair.sockets[family].is_none() {
            pair.sockets[family] = open(home, pair.port, slot, epoll);
        }
        if pair.sockets[family].is_none() {
            return Err(RelayRefusal::Full);
        }
        let this = &mut pair.sides[side];
        if this.bound.is_none() {
            this.until = now.mono + LIFE;
        }
        Ok((pair.port, pair.sides[1 - side].bound.is_some()))
    }

    /// Pairs for which the member of this number asked.
    fn share_of(&self, number: u64) -> usize {
        let holder = self.by_number.get(&number);
        holder.map_or(0, |place| self.holders.get(*place).map_or(0, |h| h.asked))
    }

    /// Binds one of two to where it asks from; the port, and whether the other is bound.
    pub fn bind(
        &mut self,
        slot: usize,
        asked: &PortRequest,
        from: Bound,
        now: Now,
    ) -> Result<(u16, bool), RelayRefusal> {
        let (keys, side) = Keys::of(asked.member, asked.peer);
        let (own, share) = (
            self.by_number.get(&asked.holder).copied(),
            self.share_of(asked.holder),
        );
        let pair = self.pairs.get_mut(slot).filter(|pair| pair.keys == keys);
        let pair = pair.ok_or(RelayRefusal::Malformed)?;
        // With forged addresses, datagrams could go round from pair to pair.
        if let Place::Udp(at) = from.place
            && from.source == Some(at.ip())
            && self.ports.contains_key(&at.port())
        {
            return Err(RelayRefusal::Malformed);
        }
        let this = &mut pair.sides[side];
        // The same once more: its answer was lost, and who asks is still there.
        let again = this.bound.is_some_and(|bound| bound.place == from.place);
        if asked.stamp < this.stamp || (asked.stamp == this.stamp && !again) {
            return Err(RelayRefusal::Stale);
        }
        // The same key under another number takes the other's share with the pair.
        if this.asked && this.holder != own && share >= self.limits.pairs_per_member {
            return Err(RelayRefusal::Quota);
        }
        hold(this, asked.holder, &mut self.holders, &mut self.by_number);
        let newer = asked.stamp > this.stamp;
        this.stamp = asked.stamp;
        this.until = now.mono + LIFE;
        let by_stream = |bound: &Bound| matches!(bound.place, Place::Stream(_));
        if let Some(before) = this.bound.replace(from)
            && before.place != from.place
        {
            this.former = Some(before).filter(|before| by_stream(before) != by_stream(&from));
        } else if newer {
            // It has been here for a while: so has its tunnel.
            this.former = None;
        }
        Ok((pair.port, pair.sides[1 - side].bound.is_some()))
    }

    /// A new pair, with a port that no other has and a socket of this family.
    fn make(&mut self, keys: Keys, family: usize, epoll: &Epoll) -> Result<usize, RelayRefusal> {
        if self.pairs.len() >= self.limits.pairs {
            return Err(RelayRefusal::Full);
        }
        let home = self.home(family).ok_or(RelayRefusal::Full)?;
        let slot = self.pairs.vacant_key();
        let size = self.limits.ports.len();
        let found = (0..size.min(TRIES + self.ports.len())).find_map(|_| {
            let port = self.next_port;
            self.next_port = match port >= *self.limits.ports.end() {
                true => *self.limits.ports.start(),
                false => port + 1,
            };
            let free = !self.ports.contains_key(&port);
            Some((port, free.then(|| open(home, port, slot, epoll))??))
        });
        let (port, socket) = found.ok_or(RelayRefusal::Full)?;
        let mut sockets = [None, None];
        sockets[family] = Some(socket);
        self.ports.insert(port, slot);
        self.by_keys.insert(keys, slot);
        Ok(self.pairs.insert(Pair {
            keys,
            port,
            sides: Default::default(),
            sockets,
            receive_queue_drops: 0,
            busy: false,
        }))
    }

    /// The pair that has a port.
    pub fn pair_at(&self, port: u16) -> Option<usize> {
        self.ports.get(&port).copied()
    }

    /// Hands over what was put into connections; who does not take it any more is ended.
    pub fn flush_streams(&mut self, epoll: &Epoll) {
        for id in self.streams.flush(epoll) {
            self.end_stream(id);
        }
    }

    /// Ends a connection; sides that were there are nowhere.
    pub fn end_stream(&mut self, id: u64) {
        if !self.streams.end(id) {
            return;
        }
        let there = Place::Stream(id);
        for side in self.pairs.iter_mut().flat_map(|(_, pair)| &mut pair.sides) {
            side.bound = side.bound.filter(|bound| bound.place != there);
            side.former = side.former.filter(|bound| bound.place != there);
        }
    }

    /// Our address of this family.
    fn home(&self, family: usize) -> Option<IpAddr> {
        let address = self.main[family].as_ref()?.local_addr();
        address.ok().map(|address| address.ip())
    }

    /// Ends sides that have not bound themselves anew, and pairs without sides.
    pub fn sweep(&mut self, now: Instant) {
        let Table {
            pairs,
            holders,
            by_number,
            counters,
            ..
        } = self;
        pairs.retain(|_, pair| {
            if std::mem::take(&mut pair.busy) {
                let dropped = pair.sockets.iter().flatten();
                let dropped = dropped.map(UdpSocket::receive_queue_drops).sum();
                counters.receive_queue_drops += dropped - pair.receive_queue_drops;
                pair.receive_queue_drops = dropped;
            }
            for side in &mut pair.sides {
                if side.is_there() && side.until <= now {
                    release(side, holders, by_number);
                    (side.bound, side.former) = (None, None);
                }
            }
            if pair.sides.iter().any(Side::is_there) {
                return true;
            }
            self.ports.remove(&pair.port);
            self.by_keys.remove(&pair.keys);
            for side in &mut pair.sides {
                release(side, holders, by_number);
            }
            false
        });
    }

    /// The counters, with what there is now.
    pub fn told(&mut self) -> &Counters {
        self.counters.pairs = self.pairs.len();
        self.counters.members = self.holders.len();
        self.counters.streams = self.streams.members;
        self.counters.turned_away = self.streams.turned_away;
        &self.counters
    }
}

/// Makes a side that of the member of this number. If it was another's, under the same key at another time, it is that one's no more.
fn hold(
    side: &mut Side,
    number: u64,
    holders: &mut Slab<Holder>,
    by_number: &mut HashMap<u64, usize>,
) {
    let own = by_number.get(&number);
    if side.holder.is_some() && side.holder == own.copied() {
        return;
    }
    // Who asked for it is the same host, whatever its number is now: it goes on to count.
    let asked = side.asked;
    release(side, holders, by_number);
    let place = *by_number.entry(number).or_insert_with(|| {
        holders.insert(Holder {
            number,
            sides: 0,
            asked: 0,
            policer: Default::default(),
        })
    });
    if let Some(holder) = holders.get_mut(place) {
        holder.sides += 1;
        holder.asked += usize::from(asked);
        side.asked = asked;
    }
    side.holder = Some(place);
}

/// Makes a side nobody's; who is no side any more is forgotten.
fn release(side: &mut Side, holders: &mut Slab<Holder>, by_number: &mut HashMap<u64, usize>) {
    let asked = std::mem::take(&mut side.asked);
    let Some(place) = side.holder.take() else {
        return;
    };
    let Some(holder) = holders.get_mut(place) else {
        return;
    };
    holder.asked -= usize::from(asked);
    holder.sides -= 1;
    if holder.sides == 0 {
        by_number.remove(&holder.number);
        holders.remove(place);
    }
}

/// A pair's socket, watched; none if the port is somebody's, or there is nothing left to open it with.
fn open(home: IpAddr, port: u16, slot: usize, epoll: &Epoll) -> Option<UdpSocket> {
    let options = UdpOptions {
        receive_buffer: PAIR_BUFFER,
        send_buffer: PAIR_BUFFER,
        ..UdpOptions::default()
    };
    let socket = UdpSocket::bind((home, port).into(), &options).ok()?;
    let family = if home.is_ipv4() { V4 } else { V6 };
    let token = FIRST_PAIR_TOKEN + 2 * slot as u64 + family as u64;
    epoll.add(&socket, token, Interest::Read).ok()?;
    Some(socket)
}

/// Which of two sockets is for this address.
pub(crate) fn family_of(address: SocketAddr) -> usize {
    if address.is_ipv4() { V4 } else { V6 }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use seikan_proto::keys::PublicKey;
    use seikan_proto::mesh::relay::{ClientRequest, ServerRequest};
    use seikan_proto::mesh::{RelayKind, Ticket};
    use seikan_proto::rng::Rng;

    use super::*;

    struct Same(u8);

    impl Rng for Same {
        fn fill(&mut self, destination: &mut [u8]) {
            destination.fill(self.0);
        }
    }

    fn request(member: u8, peer: u8) -> PortRequest {
        let secret = RelaySecret::generate(&mut Same(7));
        let key = |n| PublicKey::from_bytes([n; 32]);
        let ask = ClientRequest {
            ticket: &Ticket::new(&secret, member.into(), &key(member), u64::MAX),
            peer: key(peer),
            stamp: 1,
        };
        match ServerRequest::parse(&ask.write(&mut Same(1)).1) {
            Ok(ServerRequest::Port(asked)) => asked,
            other => panic!("{other:?}"),
        }
    }

    /// A member that leaves and joins again has another number, and its former ticket is good for hours.
    #[test]
    fn a_share_goes_with_the_pair_to_the_same_key_under_another_number() {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let main = UdpSocket::bind(listen, &UdpOptions::default()).expect("a socket");
        let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
        let limits = Limits {
            pairs_per_member: 2,
            ..Limits::default()
        };
        let mut table = Table::new([Some(main), None], Streams::default(), secret, limits);
        let epoll = Epoll::new(1).expect("an epoll instance");
        let now = Now {
            mono: Instant::BOOT + Duration::from_secs(1),
            unix: 0,
        };
        let mut granted = 0;
        for peer in 10..20 {
            let asked = request(1, peer);
            if table.port_for(&asked, V4, &epoll, now).is_err() {
                continue;
            }
            granted += 1;
            let mut rejoined = request(1, peer);
            rejoined.holder = 2;
            let slot = table.by_keys[&Keys::of(asked.member, asked.peer).0];
            let from = Bound {
                place: Place::Udp(([127, 0, 0, 1], 4000 + u16::from(peer)).into()),
                source: Some([127, 0, 0, 1].into()),
            };
            let _ = table.bind(slot, &rejoined, from, now);
        }
        // A share for each of the two numbers.
        assert_eq!(granted, 4);
    }

    /// With a forged source a side could be another pair's port, and that one's this: a circle.
    #[test]
    fn a_side_is_never_one_of_the_relays_own_ports() {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let main = UdpSocket::bind(listen, &UdpOptions::default()).expect("a socket");
        let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
        let none = Streams::default();
        let mut table = Table::new([Some(main), None], none, secret, Limits::default());
        let epoll = Epoll::new(1).expect("an epoll instance");
        let now = Now {
            mono: Instant::BOOT + Duration::from_secs(1),
            unix: 0,
        };
        let mut port = |peer| {
            table
                .port_for(&request(1, peer), V4, &epoll, now)
                .expect("a port")
                .0
        };
        let (own, other) = (port(2), port(3));
        let slot = table.by_keys[&Keys::of(request(1, 2).member, request(1, 2).peer).0];
        let from = |port| Bound {
            place: Place::Udp(([127, 0, 0, 1], port).into()),
            source: Some([127, 0, 0, 1].into()),
        };
        for circle in [own, other] {
            let bound = table.bind(slot, &request(1, 2), from(circle), now);
            assert_eq!(bound, Err(RelayRefusal::Malformed));
        }
        // A member on the relay's own host.
        let bound = table.bind(slot, &request(1, 2), from(1), now);
        assert_eq!(bound, Ok((own, false)));
    }
}
