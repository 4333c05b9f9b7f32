//! The table of pairs: the members, ports, sockets and lifetimes of each.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};

use seikan_proto::mesh::RelaySecret;
use seikan_proto::mesh::relay::{PortRequest, RelayRefusal};
use seikan_proto::time::Instant;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::udp::{UdpOptions, UdpSocket};
use slab::Slab;
use tracing::debug;

use crate::pair::{Binding, Holder, Keys, LIFETIME, Pair, Side, Transport};
use crate::streams::{Run, Streams};
use crate::{Counters, Limits, Now, token};

/// Number of ports tried for a new pair, besides those that pairs already have. Other programs may use some of the range.
const TRIES: usize = 128;
/// Size in bytes of the buffers of a pair's socket. There may be thousands of them.
const PAIR_BUFFER: usize = 1 << 20;

const V4: usize = 0;
const V6: usize = 1;

/// Pairs, members and their sockets.
#[derive(Debug)]
pub(crate) struct Table {
    pub main: [Option<UdpSocket>; 2],
    pub streams: Streams,
    /// Scratch memory for the run that is handled.
    pub run: Run,
    pub secret: RelaySecret,
    pub limits: Limits,
    pub pairs: Slab<Pair>,
    pub holders: Slab<Holder>,
    by_keys: HashMap<Keys, usize>,
    /// Holders by the number in their tickets. A member that changes its key keeps its number.
    by_number: HashMap<u64, usize>,
    /// Slots of the pairs, by port.
    ports: BTreeMap<u16, usize>,
    /// Port at which the next search for a free port starts, so that a port is not reused soon.
    next_port: u16,
    pub counters: Counters,
}

impl Table {
    /// Creates an empty table.
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

    /// Returns the port of a pair, open for `family`, and whether the other side is bound. Creates the pair if necessary.
    ///
    /// # Errors
    /// The member has reached its quota, or the relay is full.
    pub fn port_for(
        &mut self,
        request: &PortRequest,
        family: usize,
        epoll: &Epoll,
        now: Now,
    ) -> Result<(u16, bool), RelayRefusal> {
        let (keys, side) = Keys::of(request.member, request.peer);
        let known = self.by_keys.get(&keys).copied();
        let holder = self.by_number.get(&request.holder).copied();
        let has_requested = known
            .and_then(|slot| self.pairs.get(slot))
            .is_some_and(|pair| pair.sides[side].requested && pair.sides[side].holder == holder);
        if !has_requested && self.requested_by(request.holder) >= self.limits.pairs_per_member {
            return Err(RelayRefusal::Quota);
        }
        let slot = match known {
            Some(slot) => slot,
            None => self.create(keys, family, epoll)?,
        };
        let ip = self.local_ip(family).ok_or(RelayRefusal::Full)?;
        let pair = self.pairs.get_mut(slot).ok_or(RelayRefusal::Full)?;
        let this = &mut pair.sides[side];
        hold(this, request.holder, &mut self.holders, &mut self.by_number);
        if !this.requested {
            this.requested = true;
            if let Some(holder) = this.holder.and_then(|index| self.holders.get_mut(index)) {
                holder.requested += 1;
            }
        }
        if pair.sockets[family].is_none() {
            pair.sockets[family] = open(ip, pair.port, slot, epoll);
        }
        if pair.sockets[family].is_none() {
            return Err(RelayRefusal::Full);
        }
        let this = &mut pair.sides[side];
        if this.binding.is_none() {
            this.until = now.mono + LIFETIME;
        }
        Ok((pair.port, pair.sides[1 - side].binding.is_some()))
    }

    /// Number of pairs that the holder with this number has requested.
    fn requested_by(&self, number: u64) -> usize {
        let index = self.by_number.get(&number);
        let holder = index.and_then(|index| self.holders.get(*index));
        holder.map_or(0, |holder| holder.requested)
    }

    /// Binds a side of the pair in `slot` to the origin of its request. Returns the port, and whether the other side is bound.
    ///
    /// # Errors
    /// The request is for another pair, is a replay, comes from one of the relay's own ports, or exceeds a quota.
    pub fn bind(
        &mut self,
        slot: usize,
        request: &PortRequest,
        from: Binding,
        now: Now,
    ) -> Result<(u16, bool), RelayRefusal> {
        let (keys, side) = Keys::of(request.member, request.peer);
        let holder = self.by_number.get(&request.holder).copied();
        let requested = self.requested_by(request.holder);
        let pair = self.pairs.get_mut(slot).filter(|pair| pair.keys == keys);
        let pair = pair.ok_or(RelayRefusal::Malformed)?;
        // A binding to another port of the relay, which takes a forged source, would create a loop.
        if let Transport::Udp(address) = from.transport
            && from.source == Some(address.ip())
            && self.ports.contains_key(&address.port())
        {
            return Err(RelayRefusal::Malformed);
        }
        let this = &mut pair.sides[side];
        // A request that is repeated because its answer was lost has the same stamp and origin.
        let repeated = this
            .binding
            .is_some_and(|binding| binding.transport == from.transport);
        if request.stamp < this.stamp || (request.stamp == this.stamp && !repeated) {
            return Err(RelayRefusal::Stale);
        }
        // If the same key has another number now, the pair counts against the quota of that number.
        if this.requested && this.holder != holder && requested >= self.limits.pairs_per_member {
            return Err(RelayRefusal::Quota);
        }
        hold(this, request.holder, &mut self.holders, &mut self.by_number);
        let newer = request.stamp > this.stamp;
        this.stamp = request.stamp;
        this.until = now.mono + LIFETIME;
        let by_stream = |binding: &Binding| matches!(binding.transport, Transport::Stream(_));
        if let Some(before) = this.binding.replace(from)
            && before.transport != from.transport
        {
            this.former = Some(before).filter(|before| by_stream(before) != by_stream(&from));
        } else if newer {
            // The second request from the new origin: the tunnel has changed to it too.
            this.former = None;
        }
        Ok((pair.port, pair.sides[1 - side].binding.is_some()))
    }

    /// Creates a pair with a free port and a socket of this family.
    fn create(&mut self, keys: Keys, family: usize, epoll: &Epoll) -> Result<usize, RelayRefusal> {
        if self.pairs.len() >= self.limits.pairs {
            return Err(RelayRefusal::Full);
        }
        let ip = self.local_ip(family).ok_or(RelayRefusal::Full)?;
        let slot = self.pairs.vacant_key();
        let size = self.limits.ports.len();
        let found = (0..size.min(TRIES + self.ports.len())).find_map(|_| {
            let port = self.next_port;
            self.next_port = if port >= *self.limits.ports.end() {
                *self.limits.ports.start()
            } else {
                port + 1
            };
            let free = !self.ports.contains_key(&port);
            Some((port, free.then(|| open(ip, port, slot, epoll))??))
        });
        let (port, socket) = found.ok_or(RelayRefusal::Full)?;
        let mut sockets = [None, None];
        sockets[family] = Some(socket);
        debug!(target: "relay", port, "port opened for a pair of members");
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

    /// Returns the slot of the pair with this port.
    pub fn pair_at(&self, port: u16) -> Option<usize> {
        self.ports.get(&port).copied()
    }

    /// Sends the queued data of all connections, and ends those that failed.
    pub fn flush_streams(&mut self, epoll: &Epoll) {
        for id in self.streams.flush(epoll) {
            self.end_stream(id);
        }
    }

    /// Ends a connection. Sides that were bound to it are no longer bound.
    pub fn end_stream(&mut self, id: u64) {
        if !self.streams.end(id) {
            return;
        }
        let ended = Transport::Stream(id);
        for side in self.pairs.iter_mut().flat_map(|(_, pair)| &mut pair.sides) {
            side.binding = side.binding.filter(|binding| binding.transport != ended);
            side.former = side.former.filter(|binding| binding.transport != ended);
        }
    }

    /// The local IP address of the main socket of this family.
    fn local_ip(&self, family: usize) -> Option<IpAddr> {
        let address = self.main[family].as_ref()?.local_addr();
        address.ok().map(|address| address.ip())
    }

    /// Removes sides that have expired, and pairs without sides.
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
                if side.until <= now {
                    release(side, holders, by_number);
                    // Its stamp goes as well. Otherwise a host whose clock was ahead would keep the side after its
                    // clock was corrected, and so would a stamp of the future.
                    *side = Side::default();
                }
            }
            if pair.sides.iter().any(Side::is_present) {
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

    /// Updates the gauges and returns all counters.
    pub fn counters(&mut self) -> &Counters {
        self.counters.pairs = self.pairs.len();
        self.counters.members = self.holders.len();
        self.counters.streams = self.streams.members;
        self.counters.turned_away = self.streams.turned_away;
        &self.counters
    }
}

/// Assigns a side to the holder with this number. If the same key had another number before, the side leaves that holder.
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
    // The same host requested the port, so the port still counts, now against this number.
    let requested = side.requested;
    release(side, holders, by_number);
    let index = *by_number.entry(number).or_insert_with(|| {
        holders.insert(Holder {
            number,
            sides: 0,
            requested: 0,
            policer: Default::default(),
        })
    });
    if let Some(holder) = holders.get_mut(index) {
        holder.sides += 1;
        holder.requested += usize::from(requested);
        side.requested = requested;
    }
    side.holder = Some(index);
}

/// Takes a side from its holder. A holder without sides is removed.
fn release(side: &mut Side, holders: &mut Slab<Holder>, by_number: &mut HashMap<u64, usize>) {
    let requested = std::mem::take(&mut side.requested);
    let Some(index) = side.holder.take() else {
        return;
    };
    let Some(holder) = holders.get_mut(index) else {
        return;
    };
    holder.requested -= usize::from(requested);
    holder.sides -= 1;
    if holder.sides == 0 {
        by_number.remove(&holder.number);
        holders.remove(index);
    }
}

/// Opens and watches a socket of a pair. Returns `None` if the port is in use or there are no descriptors left.
fn open(ip: IpAddr, port: u16, slot: usize, epoll: &Epoll) -> Option<UdpSocket> {
    let options = UdpOptions {
        receive_buffer: PAIR_BUFFER,
        send_buffer: PAIR_BUFFER,
        ..UdpOptions::default()
    };
    let socket = UdpSocket::bind((ip, port).into(), &options).ok()?;
    let family = if ip.is_ipv4() { V4 } else { V6 };
    let token = token::FIRST_PAIR + 2 * slot as u64 + family as u64;
    epoll.add(&socket, token, Interest::Read).ok()?;
    Some(socket)
}

/// Index of the socket for the family of this address.
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
            Ok(ServerRequest::Port(request)) => request,
            other => panic!("{other:?}"),
        }
    }

    /// A member that leaves and joins again gets another number, while its former ticket is still valid for hours.
    #[test]
    fn the_quota_moves_with_the_pair_to_the_new_number_of_a_key() {
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
            let first = request(1, peer);
            if table.port_for(&first, V4, &epoll, now).is_err() {
                continue;
            }
            granted += 1;
            let mut rejoined = request(1, peer);
            rejoined.holder = 2;
            let slot = table.by_keys[&Keys::of(first.member, first.peer).0];
            let from = Binding {
                transport: Transport::Udp(([127, 0, 0, 1], 4000 + u16::from(peer)).into()),
                source: Some([127, 0, 0, 1].into()),
            };
            let _ = table.bind(slot, &rejoined, from, now);
        }
        // One quota for each of the two numbers.
        assert_eq!(granted, 4);
    }

    /// A stamp of the future, by a host whose clock was wrong, or by another mesh that has the relay's secret.
    #[test]
    fn a_side_that_expired_is_bound_with_any_stamp() {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let main = UdpSocket::bind(listen, &UdpOptions::default()).expect("a socket");
        let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
        let mut table = Table::new(
            [Some(main), None],
            Streams::default(),
            secret,
            Limits::default(),
        );
        let epoll = Epoll::new(1).expect("an epoll instance");
        let at = |seconds| Now {
            mono: Instant::BOOT + Duration::from_secs(seconds),
            unix: 0,
        };
        let from = |port| Binding {
            transport: Transport::Udp(([127, 0, 0, 1], port).into()),
            source: Some([127, 0, 0, 1].into()),
        };
        // The other side stays, and keeps the pair.
        for member in [1, 2] {
            let requested = table.port_for(&request(member, 3 - member), V4, &epoll, at(1));
            assert!(requested.is_ok());
        }
        let slot = table.by_keys[&Keys::of(request(1, 2).member, request(1, 2).peer).0];
        let mut future = request(1, 2);
        future.stamp = u64::MAX;
        assert!(table.bind(slot, &future, from(4001), at(1)).is_ok());
        let bound = table.bind(slot, &request(1, 2), from(4002), at(2));
        assert_eq!(bound, Err(RelayRefusal::Stale));
        let other = table.bind(slot, &request(2, 1), from(4003), at(60));
        assert_eq!(other.map(|(_, present)| present), Ok(true));
        table.sweep(at(61).mono);
        let bound = table.bind(slot, &request(1, 2), from(4002), at(61));
        assert_eq!(bound.map(|(_, present)| present), Ok(true));
    }

    /// With forged sources, two pairs could be bound to each other's ports, which would be a loop.
    #[test]
    fn a_side_cannot_bind_a_port_of_the_relay() {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let main = UdpSocket::bind(listen, &UdpOptions::default()).expect("a socket");
        let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
        let mut table = Table::new(
            [Some(main), None],
            Streams::default(),
            secret,
            Limits::default(),
        );
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
        let from = |port| Binding {
            transport: Transport::Udp(([127, 0, 0, 1], port).into()),
            source: Some([127, 0, 0, 1].into()),
        };
        for looped in [own, other] {
            let bound = table.bind(slot, &request(1, 2), from(looped), now);
            assert_eq!(bound, Err(RelayRefusal::Malformed));
        }
        // A member on the relay's own host.
        let bound = table.bind(slot, &request(1, 2), from(1), now);
        assert_eq!(bound, Ok((own, false)));
    }
}
