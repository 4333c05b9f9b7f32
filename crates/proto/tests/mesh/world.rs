//! The members of a mesh, the internet between them, its relays, STUN servers and coordinator:
//! seeded, without clocks and sockets.
//!
//! Events are processed in the order of their times. A datagram passes its outbound NATs at once,
//! crosses the network, and passes the inbound NATs when it arrives.

use super::internet::{At, AtRelay, Internet, Lost, WORLD, at};
use super::member::{
    Agent, Location, Member, PORT, PunchSockets, new_tunnel, proxy_address, relay_of_proxy,
};
use super::nat::{Behaviour, By};
use super::relay::{self, Outcome, Relay};
use crate::sim::network::{Link, Parcel, Path};
use crate::sim::{self, EPOCH, MILLISECOND, SECOND, Seeded};
use rand::{Rng as _, RngCore as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use seikan_proto::batch::PacketBatch;
use seikan_proto::inbox::Inbox;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::mesh::{
    Changes, Member as Row, Membership, Policy, Relay as RelayRow, RelayKind, RelaySecret, Ticket,
};
use seikan_proto::outbox::{Destination, Outbox};
use seikan_proto::time::Instant;
use seikan_proto::tunnel::Now;
use seikan_wire::VNET_HDR_LEN;
use seikan_wire::ip::{self, IpPacket, PROTO_UDP};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::hash::{DefaultHasher, Hasher};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

/// The wall clock at the beginning, in seconds since 1970.
const WALL: u64 = 1_800_000_000;
/// Maximum delay of a change at the coordinator, to collect others.
const GATHERS: u64 = 500 * MILLISECOND;
/// When members first query the coordinator.
const OPENS: u64 = 3 * SECOND;
/// Delay of a local network; NATs add none.
const LOCAL: u64 = 500_000;
/// Members with the same tag may use all services, and there is one more rule.
pub const POLICY: &str = "allow tag:t0 -> tag:t0 *
    allow tag:t1 -> tag:t1 *
    allow tag:t2 -> tag:t2 *
    allow tag:t3 -> tag:t3 *
    allow tag:t0 -> tag:t1 udp/7000";
/// A port that policy opens, and one that it does not.
pub const OPEN_PORT: u16 = 7000;
pub const CLOSED_PORT: u16 = 7001;

/// The NATs in front of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Before {
    Open,
    FullCone,
    Restricted,
    PortRestricted,
    /// The same, but an unsolicited packet takes the port that it arrives at.
    Tracking,
    AddressDependent,
    Symmetric,
    NoUdp,
    /// A home's NAT behind a carrier's NAT of this number, which does not hairpin.
    Carrier(usize),
    /// The same, with hairpinning.
    Hairpin(usize),
}

impl Before {
    pub fn behaviour(self) -> Behaviour {
        let (mapping, filtering) = match self {
            Before::Open | Before::FullCone => (By::Nothing, By::Nothing),
            Before::Restricted => (By::Nothing, By::Address),
            Before::AddressDependent => (By::Address, By::AddressAndPort),
            Before::Symmetric => (By::AddressAndPort, By::AddressAndPort),
            _ => (By::Nothing, By::AddressAndPort),
        };
        Behaviour {
            mapping,
            filtering,
            hairpin: matches!(self, Before::Hairpin(_)),
            udp: self != Before::NoUdp,
            tracks: self == Before::Tracking,
            // RFC 4787, REQ-5: at least two minutes.
            forgets: 120 * SECOND,
        }
    }
}

/// Accounting of a datagram: its sender, its talk and direction, and its number of packets.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub member: usize,
    pub talk: Option<(usize, usize)>,
    pub packets: u64,
}

impl Load {
    pub fn outside_tunnel(member: usize) -> Load {
        Load {
            member,
            talk: None,
            packets: 0,
        }
    }
}

/// A datagram that a host sends.
pub struct Datagram {
    /// Local port.
    pub port: u16,
    pub destination: Destination,
    pub bytes: Vec<u8>,
}

/// Two members that exchange packets. The first initiates, the other answers.
pub struct Talk {
    pub ends: [usize; 2],
    pub port: u16,
    /// Whether policy lets the first initiate it.
    pub is_allowed: bool,
    /// Nanoseconds between two packets; 0 if it is over.
    pub every: u64,
    pub began: u64,
    pub sent: [u32; 2],
    pub got: [u32; 2],
    pub seen: [Vec<bool>; 2],
    /// When the first packet arrived.
    pub first: [Option<u64>; 2],
    /// When the last packet arrived.
    pub last: [u64; 2],
    /// The longest time between two arrivals.
    pub silence: [u64; 2],
    /// Packets that the network lost.
    pub lost: [u64; 2],
    /// Packets that arrived at the far host and that its tunnel dropped.
    pub refused: [u64; 2],
}

pub enum Event {
    Arrives(At, Parcel, Load),
    /// A frame to or from a relay's port over TLS.
    ToRelay(usize, u16, usize, Vec<u8>, Load),
    FromRelay(usize, SocketAddr, Vec<u8>, Load),
    Wake(usize),
    RetryRequest(usize, [u8; 12]),
    Reflect(usize, u64),
    Pair(usize, PublicKey, u64),
    Tls(usize, PublicKey, usize),
    PunchSockets(usize),
    Poll(usize),
    /// The coordinator receives a member's addresses, new key, or call.
    Row(usize),
    Key(usize, PublicKey),
    Call(usize, PublicKey),
    CallReceived(usize, PublicKey),
    /// A host with new addresses notices, and announces itself to its sessions.
    Announce(usize),
    LookAround(usize),
    Talk(usize),
    Reply(usize),
    Sweep,
}

struct Entry {
    at: (u64, u64),
    event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.at == other.at
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

/// Counts of datagrams by result.
#[derive(Default)]
pub struct Ledger {
    pub datagrams: u64,
    pub arrived: u64,
    /// Datagrams and the packets in them.
    pub lost: BTreeMap<Lost, (u64, u64)>,
    /// Datagrams forwarded by relays, each counted once more.
    pub forwarded: u64,
    /// Packets passed to tunnels, delivered, and dropped by the far tunnel.
    pub packets: u64,
    pub delivered: u64,
    pub refused: u64,
}

/// Datagrams sent by a member.
#[derive(Clone, Debug, Default)]
pub struct Sent {
    /// To STUN servers and relays.
    pub outside_tunnel: u64,
    /// Tunnel datagrams, by the number of the peer.
    pub to: BTreeMap<usize, u64>,
}

#[derive(Default)]
struct Coordinator {
    rows: BTreeMap<usize, Row>,
    /// Changes, one revision each.
    log: Vec<Changed>,
}

enum Changed {
    Set(usize),
    Removed(PublicKey),
}

pub struct World {
    pub seed: u64,
    pub time: u64,
    pub events: u64,
    pub trace: DefaultHasher,
    pub members: Vec<Member>,
    pub talks: Vec<Talk>,
    pub relays: Vec<Relay>,
    /// Addresses of STUN servers: the coordinator, then the relays.
    pub stun: Vec<SocketAddr>,
    pub ledger: Ledger,
    pub sent: Vec<Sent>,
    /// Number of polls of tunnels.
    pub wakes: u64,
    /// Members of a separated part of the network.
    pub apart: BTreeSet<usize>,
    /// Members without a connection to the coordinator. Calls by and to them are lost: the daemon
    /// does not repeat them.
    pub uncontacted: BTreeSet<usize>,
    /// Whether nobody asks for packets by datagram: many may wait for a session.
    pub is_not_counted: bool,
    /// Members whose router has no uplink.
    pub without_uplink: BTreeSet<usize>,
    /// Delay to the coordinator.
    pub to_coordinator: u64,
    pub outbox: Outbox,
    pub inbox: Inbox,
    pub internet: Internet,
    pub core: Link,
    pub rng: ChaCha8Rng,
    policy: Policy,
    coordinator: Coordinator,
    by_key: BTreeMap<PublicKey, usize>,
    talk_of: BTreeMap<(usize, usize), usize>,
    homes: BTreeMap<usize, Before>,
    queue: BinaryHeap<Reverse<Entry>>,
    order: u64,
    batch: PacketBatch,
}

impl World {
    pub fn new(seed: u64, loss: f64) -> World {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut internet = Internet::new();
        let mut stun = Vec::new();
        let mut relays = Vec::new();
        for number in 0..4 {
            let ip: IpAddr = [192, 0, 2, number as u8 + 1].into();
            internet.add_at(WORLD, ip, At::Server(number));
            if number == 0 {
                stun.push(at(ip, 7443));
            } else {
                let secret = RelaySecret::generate(&mut Seeded::new(rng.random()));
                stun.push(at(ip, 3478));
                relays.push(Relay::new(at(ip, 3478), secret));
            }
        }
        let path = Path {
            latency: Duration::ZERO,
            jitter: Duration::from_millis(1),
            loss,
            ..Path::default()
        };
        let mut world = World {
            seed,
            time: 0,
            events: 0,
            trace: DefaultHasher::new(),
            members: Vec::new(),
            talks: Vec::new(),
            relays,
            stun,
            ledger: Ledger::default(),
            sent: Vec::new(),
            wakes: 0,
            apart: BTreeSet::new(),
            uncontacted: BTreeSet::new(),
            is_not_counted: false,
            without_uplink: BTreeSet::new(),
            to_coordinator: 20 * MILLISECOND,
            outbox: Outbox::new(4 << 20),
            inbox: Inbox::new(false, false),
            internet,
            core: Link::new(path),
            rng,
            policy: Policy::parse(POLICY).expect("a policy"),
            coordinator: Coordinator::default(),
            by_key: BTreeMap::new(),
            talk_of: BTreeMap::new(),
            homes: BTreeMap::new(),
            queue: BinaryHeap::new(),
            order: 0,
            batch: PacketBatch::new(1 << 18, 4),
        };
        world.after(60 * SECOND, Event::Sweep);
        world
    }

    pub fn now(&self) -> Now {
        Now {
            mono: Instant::from_nanos(EPOCH + self.time),
            wall: Duration::from_secs(WALL) + Duration::from_nanos(self.time),
        }
    }

    pub fn at(&mut self, time: u64, event: Event) {
        self.order += 1;
        let at = (time, self.order);
        self.queue.push(Reverse(Entry { at, event }));
    }

    pub fn after(&mut self, time: u64, event: Event) {
        self.at(self.time + time, event);
    }

    pub fn random<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.rng.fill_bytes(&mut bytes);
        bytes
    }

    /// Advances time by `by` and processes everything due.
    pub fn run(&mut self, by: u64) {
        let end = self.time + by;
        while let Some(Reverse(first)) = self.queue.peek()
            && first.at.0 <= end
        {
            let Some(Reverse(Entry { at, event })) = self.queue.pop() else {
                break;
            };
            self.time = at.0;
            self.events += 1;
            self.trace.write_u64(at.0);
            self.happens(event);
        }
        self.time = end;
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Arrives(at, parcel, load) => self.arrives(at, parcel, load),
            Event::ToRelay(relay, port, m, bytes, load) => {
                let from = (relay::Location::Stream(m), at([127, 0, 0, 1].into(), PORT));
                self.at_relay(relay, port, from, bytes, load);
            }
            Event::FromRelay(m, from, bytes, load) => {
                let ip = self.members[m].location.ip;
                let parcel = Parcel {
                    from,
                    to: at(ip, PORT),
                    traffic_class: 0,
                    is_opener: false,
                    bytes,
                };
                self.receive(m, parcel, load);
            }
            Event::Wake(m) => self.wake(m),
            Event::RetryRequest(m, id) => self.retry_request(m, id),
            Event::Reflect(m, round) if self.members[m].is_on => self.reflect(m, round),
            Event::Reflect(..) => {}
            Event::Pair(m, key, step) => self.pair(m, key, step),
            Event::Tls(m, key, relay) => self.bind_by_tls(m, key, relay),
            Event::PunchSockets(m) => self.tend_punch_sockets(m),
            Event::Poll(m) => self.poll_changes(m),
            Event::Call(m, _) | Event::CallReceived(m, _) if self.uncontacted.contains(&m) => {}
            Event::Row(m) | Event::Key(m, _) | Event::Call(m, _) if !self.has_contact(m) => {
                // Retried until it gets through.
                self.after(2 * SECOND, event);
            }
            Event::Row(m) => self.row(m),
            Event::Key(m, former) => {
                self.coordinator.log.push(Changed::Removed(former));
                self.row(m);
            }
            Event::Call(m, key) => {
                if let Some(to) = self.member_of(&key) {
                    let key = self.members[m].key;
                    self.after(self.to_coordinator, Event::CallReceived(to, key));
                }
            }
            Event::CallReceived(m, _) if !self.members[m].is_on || self.apart.contains(&m) => {}
            Event::CallReceived(m, key) => self.on_call(m, key),
            Event::Announce(m) => self.announce(m),
            Event::LookAround(m) => self.on_network_change(m),
            Event::Talk(talk) => {
                let Talk { every, .. } = self.talks[talk];
                if every > 0 {
                    self.say(talk, 0);
                    self.after(every, Event::Talk(talk));
                }
            }
            Event::Reply(talk) => self.say(talk, 1),
            Event::Sweep => {
                self.internet.sweep(self.time);
                self.after(60 * SECOND, Event::Sweep);
            }
        }
    }
}

/// Membership.
impl World {
    /// A host joins the mesh.
    pub fn join(&mut self, before: Before, home: Option<usize>, tag: &str) -> usize {
        let number = self.members.len();
        let location = match home {
            Some(mate) => self.same_network_as(number, mate),
            None => self.settle(number, before),
        };
        let private = self.random();
        let key = *seikan_proto::keys::Identity::new(PrivateKey::from_bytes(private)).public();
        let seed = self.rng.random();
        let mesh = Ipv4Addr::new(100, 80, 0, 0).to_bits();
        let member = Member {
            name: format!("m-{number}").parse().expect("a name"),
            tags: vec![tag.parse().expect("a tag")],
            address: Ipv4Addr::from_bits(mesh + 2 + number as u32),
            key,
            tunnel: new_tunnel(private, seed),
            location,
            is_on: true,
            membership: Membership::default(),
            wake: None,
            changes_due: true,
            agent: Agent::default(),
            punch_sockets: PunchSockets::default(),
        };
        self.members.push(member);
        self.sent.push(Sent::default());
        self.homes.insert(number, before);
        self.by_key.insert(key, number);
        let reflects = self.rng.random_range(0..SECOND);
        self.after(reflects, Event::Reflect(number, 0));
        let first_request = OPENS.max(self.time) + self.rng.random_range(0..SECOND);
        self.at(first_request, Event::Poll(number));
        number
    }

    pub fn before(&self, m: usize) -> Before {
        self.homes[&m]
    }

    /// Whether a member may initiate this to another: [`POLICY`] restated.
    pub fn may_begin(&self, from: usize, to: usize, port: u16) -> bool {
        let [from, to] = [from, to].map(|m| self.members[m].tags[0].as_str());
        from == to || (from == "t0" && to == "t1" && port == OPEN_PORT)
    }

    /// The member that has or had this key.
    pub fn member_of(&self, key: &PublicKey) -> Option<usize> {
        self.by_key.get(key).copied()
    }

    fn settle(&mut self, number: usize, before: Before) -> Location {
        let outside = match before {
            Before::Open => {
                let ip = self.internet.add(WORLD, At::Host(number));
                return Location {
                    realm: WORLD,
                    ip,
                    nat: None,
                };
            }
            Before::Carrier(n) | Before::Hairpin(n) => self.internet.carrier(n, before.behaviour()),
            _ => WORLD,
        };
        let home = Behaviour {
            hairpin: false,
            ..before.behaviour()
        };
        let (realm, nat) = self.internet.add_nat(outside, home);
        let ip = self.internet.add(realm, At::Host(number));
        Location {
            realm,
            ip,
            nat: Some(nat),
        }
    }

    /// A location in the same home.
    fn same_network_as(&mut self, number: usize, mate: usize) -> Location {
        let Location { realm, nat, .. } = self.members[mate].location;
        let ip = self.internet.add(realm, At::Host(number));
        Location { realm, ip, nat }
    }

    /// A host moves to another location of the same kind.
    pub fn moves(&mut self, m: usize) {
        let Location { realm, ip, .. } = self.members[m].location;
        self.internet.remove(realm, ip);
        self.members[m].location = self.settle(m, self.homes[&m]);
        self.after(200 * MILLISECOND, Event::Announce(m));
        let notices = self.rng.random_range(0..2 * SECOND);
        self.after(notices, Event::LookAround(m));
    }

    /// The NAT of a host restarts with another outer address, which the host does not notice. A
    /// host without its own NAT moves.
    pub fn loses_its_nat(&mut self, m: usize) {
        let Location { realm, nat, .. } = self.members[m].location;
        let here = self
            .members
            .iter()
            .filter(|other| other.location.realm == realm);
        match nat.filter(|_| here.count() == 1) {
            Some(nat) => self.internet.restart_nat(nat),
            None => self.moves(m),
        }
    }

    /// As the daemon's announcement to members.
    fn announce(&mut self, m: usize) {
        let now = self.now();
        let member = &mut self.members[m];
        let peers: Vec<_> = member.tunnel.peers().map(|peer| peer.id).collect();
        for id in peers {
            self.members[m].tunnel.announce(now, id, &mut self.outbox);
        }
        self.flush(m, &[]);
    }

    /// A member changes its key.
    pub fn rotates(&mut self, m: usize) {
        let private = self.random();
        let now = self.now().mono;
        let member = &mut self.members[m];
        let former = member.key;
        let private = PrivateKey::from_bytes(private);
        member.tunnel.rotate_private_key(private, now);
        member.key = *member.tunnel.identity().public();
        self.by_key.insert(member.key, m);
        self.after(self.to_coordinator, Event::Key(m, former));
    }

    /// The coordinator removes a member without its knowledge.
    pub fn revoked(&mut self, m: usize) {
        self.coordinator.rows.remove(&m);
        let key = self.members[m].key;
        self.coordinator.log.push(Changed::Removed(key));
        self.members[m].changes_due = true;
        self.spread();
    }

    /// A member leaves and says so.
    pub fn leaves(&mut self, m: usize) {
        self.revoked(m);
        self.members[m].is_on = false;
    }
}

/// The coordinator.
impl World {
    fn row(&mut self, m: usize) {
        let row = self.members[m].row();
        let first = self.coordinator.rows.insert(m, row).is_none();
        self.coordinator.log.push(Changed::Set(m));
        if !first || self.time > OPENS {
            self.spread();
        }
    }

    /// Everybody polls for a change, if they do not soon anyway.
    fn spread(&mut self) {
        for m in 0..self.members.len() {
            if !self.members[m].changes_due {
                self.members[m].changes_due = true;
                let waits = self.rng.random_range(0..GATHERS);
                self.after(waits + self.to_coordinator, Event::Poll(m));
            }
        }
    }

    /// Whether a member reaches the coordinator.
    fn has_contact(&self, m: usize) -> bool {
        !self.apart.contains(&m) && !self.uncontacted.contains(&m)
    }

    /// A member polls for changes.
    fn poll_changes(&mut self, m: usize) {
        if !self.has_contact(m) {
            return self.after(2 * SECOND, Event::Poll(m));
        }
        let member = &mut self.members[m];
        if !member.is_on {
            return;
        }
        member.changes_due = false;
        let Coordinator { rows, log } = &self.coordinator;
        let since = member.membership.revision as usize;
        let whole = since == 0;
        let mut set = BTreeSet::new();
        let mut removed = Vec::new();
        for changed in &log[since..] {
            match changed {
                Changed::Set(other) => drop(set.insert(*other)),
                Changed::Removed(key) => removed.push(*key),
            }
        }
        let others = set.into_iter().filter(|other| *other != m);
        let members: Vec<Row> = others
            .filter_map(|other| rows.get(&other))
            .cloned()
            .collect();
        let own = member.row().party();
        let tickets = self.relays.iter().map(|relay| RelayRow {
            address: relay.address.to_string().parse().expect("an address"),
            kind: RelayKind::Seikan,
            tls: None,
            ticket: Ticket::new(&relay.secret, m as u64, &member.key, WALL + 86_400),
        });
        let changes = Changes {
            revision: log.len() as u64,
            whole,
            members,
            removed,
            policy: whole.then(|| self.policy.clone()),
            own: whole.then_some(own),
            relays: tickets.collect(),
            ..Changes::default()
        };
        self.apply_changes(m, changes);
    }

    /// Whether all members know all changes.
    pub fn is_known(&self) -> bool {
        let latest = self.coordinator.log.len() as u64;
        let all = self.members.iter().enumerate();
        all.filter(|(m, _)| self.is_member(*m))
            .all(|(_, member)| member.membership.revision == latest)
    }
}

/// Status.
impl World {
    /// Whether a host is on, and the coordinator knows it.
    pub fn is_member(&self, m: usize) -> bool {
        self.members[m].is_on && self.coordinator.rows.contains_key(&m)
    }

    /// When something last arrived from a member in this talk.
    pub fn last_from(&self, m: usize, talk: usize) -> Option<u64> {
        let talk = &self.talks[talk];
        let direction = usize::from(talk.ends[0] != m);
        talk.first[direction].map(|_| talk.last[direction])
    }

    /// A hash of all events so far.
    pub fn hash(&self) -> u64 {
        self.trace.finish()
    }

    /// Datagrams in flight, and packets in them.
    pub fn flying(&self) -> (u64, u64) {
        let flying = self
            .queue
            .iter()
            .filter_map(|Reverse(entry)| match &entry.event {
                Event::Arrives(_, _, load)
                | Event::ToRelay(_, _, _, _, load)
                | Event::FromRelay(_, _, _, load) => Some(load.packets),
                _ => None,
            });
        flying.fold((0, 0), |(datagrams, sum), packets| {
            (datagrams + 1, sum + packets)
        })
    }
}

/// The network.
impl World {
    /// Delay to and from a host or server.
    fn access(at: At) -> u64 {
        match at {
            At::Server(_) => 2 * MILLISECOND,
            At::Host(n) | At::Nat(n) => (2 + (n as u64 * 7919) % 18) * MILLISECOND,
        }
    }

    /// A host sends a datagram.
    pub fn send(&mut self, m: usize, datagram: Datagram, load: Load) {
        let Datagram {
            port,
            destination,
            bytes,
        } = datagram;
        let to = destination.address;
        self.ledger.datagrams += 1;
        self.trace.write(&bytes);
        if let Some(relay) = relay_of_proxy(to) {
            // A TLS frame in flight arrives.
            let is_there = self.relays[relay].is_on && !self.apart.contains(&m);
            return if is_there {
                let event = Event::ToRelay(relay, to.port(), m, bytes, load);
                self.after(20 * MILLISECOND, event);
            } else {
                self.lost(Lost::AtRelay(AtRelay::Off), load)
            };
        }
        let Location { realm, ip, .. } = self.members[m].location;
        let mut parcel = Parcel {
            from: at(ip, port),
            to,
            traffic_class: destination.traffic_class,
            is_opener: destination.hop_limit.is_some(),
            bytes,
        };
        let inside = realm != WORLD && self.internet.is_in(realm, to.ip());
        if !inside && self.without_uplink.contains(&m) {
            return self.lost(Lost::Apart, load);
        }
        match self
            .internet
            .leave(self.time, realm, &mut parcel, &mut self.rng)
        {
            Ok(at) if inside => self.after(LOCAL, Event::Arrives(at, parcel, load)),
            Ok(At::Server(_)) if self.apart.contains(&m) => self.lost(Lost::Apart, load),
            Ok(at) => self.cross(Self::access(At::Host(m)), at, parcel, load),
            Err(lost) => self.lost(lost, load),
        }
    }

    /// A datagram crosses the network.
    fn cross(&mut self, access: u64, to: At, parcel: Parcel, load: Load) {
        let takes = access + Self::access(to);
        let crossed = self.core.send(self.time, 0, parcel, &mut self.rng);
        if crossed.is_empty() {
            self.lost(Lost::InTransit, load);
        }
        for (time, parcel) in crossed {
            self.at(time + takes, Event::Arrives(to, parcel, load));
        }
    }

    /// Whether a datagram arrives at a router without an uplink.
    fn is_cut_off(&self, at: At) -> bool {
        let mut cut_off = self.without_uplink.iter();
        cut_off.any(|m| self.members[*m].location.nat.map(At::Nat) == Some(at))
    }

    fn arrives(&mut self, at: At, mut parcel: Parcel, load: Load) {
        if self.is_cut_off(at) {
            return self.lost(Lost::Apart, load);
        }
        match self.internet.enter(self.time, at, &mut parcel) {
            Ok(At::Host(m)) if self.apart.contains(&m) != self.apart.contains(&load.member) => {
                self.lost(Lost::Apart, load)
            }
            Ok(At::Host(m)) => self.receive(m, parcel, load),
            Ok(At::Server(0)) => {
                let answer = self.answer(&parcel);
                self.ledger.arrived += 1;
                self.send_from_server(
                    0,
                    parcel.to.port(),
                    parcel.from,
                    answer,
                    Load::outside_tunnel(load.member),
                );
            }
            Ok(At::Server(number)) => {
                let from = (relay::Location::Udp(parcel.from), parcel.from);
                self.at_relay(number - 1, parcel.to.port(), from, parcel.bytes, load);
            }
            Ok(At::Nat(_)) => unreachable!("it goes on inside"),
            Err(lost) => self.lost(lost, load),
        }
    }

    /// The coordinator's answer over UDP.
    fn answer(&self, parcel: &Parcel) -> Vec<u8> {
        use seikan_proto::mesh::relay::{Answer, request_id};
        let id = request_id(&parcel.bytes).expect("members ask nothing else");
        Answer::address(parcel.from).write(id, None)
    }

    fn at_relay(
        &mut self,
        number: usize,
        port: u16,
        from: (relay::Location, SocketAddr),
        bytes: Vec<u8>,
        load: Load,
    ) {
        let unix = WALL + self.time / SECOND;
        let relay = &mut self.relays[number];
        match relay.receive(self.time, unix, port, from, &bytes) {
            Outcome::Answer(answer) => {
                self.ledger.arrived += 1;
                let load = Load::outside_tunnel(load.member);
                self.send_from_relay(number, port, from.0, answer, load);
            }
            Outcome::Forward(to) => {
                self.ledger.arrived += 1;
                self.ledger.forwarded += 1;
                self.send_from_relay(number, port, to, bytes, load);
            }
            Outcome::Dropped(why) => self.lost(Lost::AtRelay(why), load),
        }
    }

    fn send_from_relay(
        &mut self,
        number: usize,
        port: u16,
        to: relay::Location,
        bytes: Vec<u8>,
        load: Load,
    ) {
        match to {
            relay::Location::Udp(to) => self.send_from_server(number + 1, port, to, bytes, load),
            relay::Location::Stream(m) => {
                self.ledger.datagrams += 1;
                if self.apart.contains(&m) {
                    self.lost(Lost::Apart, load)
                } else {
                    let from = proxy_address(number, port);
                    self.after(20 * MILLISECOND, Event::FromRelay(m, from, bytes, load));
                }
            }
        }
    }

    fn send_from_server(
        &mut self,
        number: usize,
        port: u16,
        to: SocketAddr,
        bytes: Vec<u8>,
        load: Load,
    ) {
        self.ledger.datagrams += 1;
        let from = at([192, 0, 2, number as u8 + 1].into(), port);
        let mut parcel = Parcel {
            from,
            to,
            traffic_class: 0,
            is_opener: false,
            bytes,
        };
        match self
            .internet
            .leave(self.time, WORLD, &mut parcel, &mut self.rng)
        {
            Ok(at) => self.cross(Self::access(At::Server(number)), at, parcel, load),
            Err(lost) => self.lost(lost, load),
        }
    }

    pub fn lost(&mut self, why: Lost, load: Load) {
        let (datagrams, packets) = self.ledger.lost.entry(why).or_default();
        *datagrams += 1;
        *packets += load.packets;
        if let Some((talk, direction)) = load.talk {
            self.talks[talk].lost[direction] += load.packets;
        }
    }

    /// A datagram was opened, and yielded `delivered` packets.
    pub fn opened(&mut self, _: usize, load: Load, delivered: u64) {
        let refused = load.packets.saturating_sub(delivered);
        self.ledger.refused += refused;
        if let Some((talk, direction)) = load.talk {
            self.talks[talk].refused[direction] += refused;
        }
    }
}

/// Tunnels.
impl World {
    fn wake(&mut self, m: usize) {
        if self.members[m].wake != Some(self.time) {
            return;
        }
        self.members[m].wake = None;
        self.wakes += 1;
        let now = self.now();
        for _ in 0..100 {
            let tunnel = &mut self.members[m].tunnel;
            let more = tunnel.poll(now, &mut self.outbox, &mut self.inbox);
            let next = tunnel.next_wakeup();
            self.flush(m, &[]);
            if !more {
                assert!(
                    next.is_none_or(|(at, _)| at > now.mono),
                    "nothing came of it"
                );
                return;
            }
        }
        panic!("seed {}: poll has no end", self.seed);
    }

    /// Sends a tunnel's datagrams, takes its writes, and performs its requests. Returns the number
    /// of packets written.
    pub fn flush(&mut self, m: usize, arena: &[u8]) -> u64 {
        let mut outbox = std::mem::replace(&mut self.outbox, Outbox::new(0));
        for run in outbox.runs() {
            let tunnel = &mut self.members[m].tunnel;
            tunnel.sent(run, Ok(()));
            if !self.members[m].is_on {
                continue;
            }
            let peer = run.peer.and_then(|id| self.members[m].tunnel.peer(id));
            let other = peer.and_then(|peer| self.member_of(&peer.public_key));
            if let Some(other) = other {
                *self.sent[m].to.entry(other).or_default() += run.segments as u64;
            }
            assert!(
                run.segments == 1 || run.payload.packets == 0 || self.is_not_counted,
                "packets are small"
            );
            let talk = other.and_then(|other| self.talk_between(m, other));
            let port = self.members[m]
                .punch_sockets
                .port_to(run.destination.address, run.peer);
            for datagram in outbox.bytes(run).chunks(run.segment_size) {
                let load = Load {
                    member: m,
                    talk,
                    packets: run.payload.packets,
                };
                let datagram = Datagram {
                    port,
                    destination: run.destination,
                    bytes: datagram.to_vec(),
                };
                self.send(m, datagram, load);
            }
        }
        outbox.clear();
        self.outbox = outbox;
        let mut inbox = std::mem::replace(&mut self.inbox, Inbox::new(false, false));
        let mut packets = 0;
        for write in inbox.writes() {
            packets += write.packets;
            let bytes = sim::written(write, arena);
            self.members[m].tunnel.delivered(write, Ok(()));
            self.delivered(m, &bytes);
        }
        inbox.clear();
        self.inbox = inbox;
        self.tend(m);
        self.sleep(m);
        packets
    }

    /// Schedules the next poll of a member's tunnel.
    fn sleep(&mut self, m: usize) {
        let member = &mut self.members[m];
        let Some((at, _)) = member.tunnel.next_wakeup() else {
            return;
        };
        let at = at.as_nanos().saturating_sub(EPOCH).max(self.time);
        if member.is_on && member.wake.is_none_or(|wake| at < wake) {
            member.wake = Some(at);
            self.at(at, Event::Wake(m));
        }
    }
}

/// Packets.
impl World {
    /// Two members start to talk, the first to this port of the second.
    pub fn add_talk(&mut self, ends: [usize; 2], port: u16, every: u64, begins: u64) -> usize {
        let number = self.talks.len();
        let [a, b] = ends;
        let is_allowed = self.may_begin(a, b, port);
        self.talk_of.insert((a.min(b), a.max(b)), number);
        self.talks.push(Talk {
            ends,
            port,
            is_allowed,
            every,
            began: begins,
            sent: [0; 2],
            got: [0; 2],
            seen: Default::default(),
            first: [None; 2],
            last: [begins; 2],
            silence: [0; 2],
            lost: [0; 2],
            refused: [0; 2],
        });
        self.at(begins, Event::Talk(number));
        number
    }

    /// The talk of two members, and the direction of the first one's packets.
    pub fn talk_between(&self, from: usize, to: usize) -> Option<(usize, usize)> {
        let talk = *self.talk_of.get(&(from.min(to), from.max(to)))?;
        let direction = usize::from(self.talks[talk].ends[0] != from);
        Some((talk, direction))
    }

    /// An end of a talk sends its next packet.
    fn say(&mut self, number: usize, direction: usize) {
        let talk = &mut self.talks[number];
        let (from, to) = (talk.ends[direction], talk.ends[1 - direction]);
        if !self.members[from].is_on {
            return;
        }
        let seq = talk.sent[direction];
        talk.sent[direction] += 1;
        talk.seen[direction].push(false);
        let ports = match direction {
            0 => [40_000, talk.port],
            _ => [talk.port, 40_000],
        };
        let addresses = [self.members[from].address, self.members[to].address];
        let read = packet(addresses, ports, number as u32, seq);
        self.ledger.packets += 1;
        self.batch.clear();
        self.batch.space().expect("room")[..read.len()].copy_from_slice(&read);
        self.batch.commit(read.len());
        let now = self.now();
        let tunnel = &mut self.members[from].tunnel;
        tunnel.outbound(now, &mut self.batch, &mut self.outbox, &mut self.inbox);
        self.flush(from, &[]);
    }

    /// A tunnel delivers a packet.
    fn delivered(&mut self, m: usize, write: &[u8]) {
        self.trace.write(write);
        self.ledger.delivered += 1;
        let packet = IpPacket::parse(&write[VNET_HDR_LEN..]).expect("IP");
        let payload = &write[VNET_HDR_LEN + 28..];
        let word = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().expect("4"));
        let (number, seq) = (word(0) as usize, word(4));
        let talk = &mut self.talks[number];
        let direction = usize::from(talk.ends[1] != m);
        let address = |m: usize| IpAddr::from(self.members[m].address);
        assert_eq!(talk.ends[1 - direction], m, "delivered to the wrong member");
        assert_eq!(packet.dst, address(m));
        assert_eq!(packet.src, address(talk.ends[direction]));
        assert!(talk.is_allowed, "policy lets nothing else in");
        let seen = &mut talk.seen[direction][seq as usize];
        assert!(!std::mem::replace(seen, true), "delivered once");
        talk.got[direction] += 1;
        talk.first[direction].get_or_insert(self.time);
        let silence = self.time - talk.last[direction];
        talk.silence[direction] = talk.silence[direction].max(silence);
        talk.last[direction] = self.time;
        if direction == 0 {
            self.after(0, Event::Reply(number));
        }
    }
}

/// A read of the TUN device: a UDP packet over IPv4 without a checksum (optional by RFC 768).
fn packet(addresses: [Ipv4Addr; 2], ports: [u16; 2], talk: u32, seq: u32) -> Vec<u8> {
    let payload = [talk.to_be_bytes(), seq.to_be_bytes()].concat();
    let mut bytes = vec![0; VNET_HDR_LEN + 20];
    let header = &mut bytes[VNET_HDR_LEN..];
    (header[0], header[6], header[8], header[9]) = (0x45, 0x40, 64, PROTO_UDP);
    header[12..16].copy_from_slice(&addresses[0].octets());
    header[16..20].copy_from_slice(&addresses[1].octets());
    ip::set_length(header, 20, 28 + payload.len(), None);
    for port in ports {
        bytes.extend(port.to_be_bytes());
    }
    bytes.extend((8 + payload.len() as u16).to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(payload);
    bytes
}
