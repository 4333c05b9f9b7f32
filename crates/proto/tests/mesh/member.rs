//! A member: a tunnel and its driver in place of the daemon. The timing is that of `node::mesh` and
//! the daemon's punch sockets.

use super::internet::{Lost, at};
use super::world::{Datagram, Event, Load, World};
use crate::sim::{MILLISECOND, SECOND, Seeded};
use seikan_proto::birthday::{Mapping, NatMappings, PORTS};
use seikan_proto::capabilities::Cipher;
use seikan_proto::indices::PeerId;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::mesh::relay::{Answer, ClientRequest};
use seikan_proto::mesh::{Change, Changes, Member as Row, Membership, Name, RelayKind, in_turn};
use seikan_proto::noise::Protocol;
use seikan_proto::outbox::Destination;
use seikan_proto::tunnel::{Reachability, Tunnel, TunnelConfig};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The tunnel's port on every host.
pub const PORT: u16 = 51_820;
/// Time that a direct path has before a relay is requested.
const HEAD_START: u64 = 200 * MILLISECOND;
/// Time that UDP has before TLS is tried.
const TLS_HEAD_START: u64 = 300 * MILLISECOND;
/// Number of relays that serve one pair.
const RELAYS_OF_A_PAIR: usize = 2;
const BIND_EVERY: u64 = 20 * SECOND;
const CALLS: u32 = 4;
const CALL_INTERVAL: u64 = 550 * MILLISECOND;
const SOUGHT_RECENTLY: u64 = 30 * SECOND;
/// Interval of STUN requests, and the shorter one after a path was lost.
pub const REFLECT_EVERY: u64 = 25 * SECOND;
const REFLECT_LEAST: u64 = 5 * SECOND;
const MAX_MISSES: u32 = 5;
/// Number of attempts of a request, and the first timeout.
const ATTEMPTS: u32 = 3;
const FIRST_PATIENCE: u64 = 500 * MILLISECOND;
const CALL_EVERY: u64 = SECOND;
/// Punch sockets: interval of maintenance and of keepalives, and lifetime.
const LOOK_EVERY: u64 = SECOND;
const KEEP_ALIVE: u64 = 20 * SECOND;
const FADES: u64 = 5 * SECOND;
/// A STUN indication, sent to open a port.
const OPENER: [u8; 20] = [
    0, 0x11, 0, 0, 0x21, 0x12, 0xa4, 0x42, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// The location of a host.
#[derive(Clone, Copy, Debug)]
pub struct Location {
    pub realm: usize,
    pub ip: IpAddr,
    /// The NAT in front of it.
    pub nat: Option<usize>,
}

pub struct Member {
    pub name: Name,
    pub tags: Vec<Name>,
    /// In the mesh.
    pub address: Ipv4Addr,
    pub key: PublicKey,
    pub tunnel: Tunnel,
    pub location: Location,
    /// Whether it is running.
    pub is_on: bool,
    pub membership: Membership,
    /// When its tunnel is polled.
    pub wake: Option<u64>,
    /// It polls for changes soon.
    pub changes_due: bool,
    pub agent: Agent,
    pub punch_sockets: PunchSockets,
}

/// State of the daemon's mesh agent.
#[derive(Default)]
pub struct Agent {
    /// The address last seen by each STUN server, and its failures since.
    views: Vec<(Option<SocketAddr>, u32)>,
    /// The current or last round of STUN requests: its number, its start, and the servers that have
    /// not answered.
    round: u64,
    started_at: u64,
    open: BTreeSet<usize>,
    moved: bool,
    /// A path was lost.
    lost: bool,
    pub published: Vec<SocketAddr>,
    requests: Vec<Request>,
    stamp: u64,
    on_call: BTreeMap<PublicKey, u64>,
    pub pairs: BTreeMap<PublicKey, Pair>,
}

/// A request without an answer yet.
struct Request {
    id: [u8; 12],
    kind: RequestKind,
    to: SocketAddr,
    bytes: Vec<u8>,
    left: u32,
    patience: u64,
}

#[derive(Clone, Copy)]
enum RequestKind {
    /// A STUN request to the server with this number.
    Stun(usize),
    /// A request for the pair's port at this relay.
    Port(PublicKey, usize),
    /// A binding at this relay.
    Binding(PublicKey, usize),
}

/// A pair that uses relays.
#[derive(Default)]
pub struct Pair {
    sought: u64,
    /// The step that is waited for.
    step: u64,
    stage: Stage,
    /// Relays that have not answered.
    open: BTreeSet<usize>,
    /// Where this side is bound, by relay.
    bindings: BTreeMap<usize, SocketAddr>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// The direct path has its head start.
    #[default]
    Waiting,
    Binding,
    Calling(u32),
    Resting,
}

/// Sockets for port probing, besides the tunnel's.
#[derive(Default)]
pub struct PunchSockets {
    /// By port.
    waiting: BTreeMap<u16, (PeerId, SocketAddr)>,
    punch_sockets: BTreeMap<SocketAddr, PunchSocket>,
    looks: bool,
    next: u16,
    pub openers: u64,
    pub succeeded: u64,
}

struct PunchSocket {
    port: u16,
    peer: PeerId,
    last_received: u64,
    kept: u64,
}

impl PunchSockets {
    /// The local port for sending to an address.
    pub fn port_to(&self, address: SocketAddr, peer: Option<PeerId>) -> u16 {
        let socket = self.punch_sockets.get(&address);
        socket
            .filter(|socket| Some(socket.peer) == peer)
            .map_or(PORT, |socket| socket.port)
    }

    /// Whether a socket has this port.
    pub fn has(&self, port: u16) -> bool {
        self.waiting.contains_key(&port)
            || self
                .punch_sockets
                .values()
                .any(|socket| socket.port == port)
    }

    /// The peer and remote address of a socket.
    pub fn of(&self, port: u16) -> Option<(PeerId, SocketAddr)> {
        let waiting = self.waiting.get(&port).copied();
        let socket = self
            .punch_sockets
            .iter()
            .find(|(_, socket)| socket.port == port);
        waiting.or_else(|| socket.map(|(towards, socket)| (socket.peer, *towards)))
    }
}

/// The loopback address of the proxy to a relay's port over TLS.
pub fn proxy_address(relay: usize, port: u16) -> SocketAddr {
    at([127, 0, 1, relay as u8].into(), port)
}

/// The relay of such an address.
pub fn relay_of_proxy(proxy_address: SocketAddr) -> Option<usize> {
    match proxy_address.ip() {
        IpAddr::V4(ip) if ip.is_loopback() => Some(ip.octets()[3].into()),
        _ => None,
    }
}

/// Whether this is a STUN response. Tunnel messages never begin like one.
fn is_answer(bytes: &[u8]) -> bool {
    let responses = [[0x01, 0x01], [0x01, 0x11]];
    responses.iter().any(|kind| bytes.starts_with(kind)) && bytes.get(4..8) == Some(&OPENER[4..8])
}

pub fn new_tunnel(private: [u8; 32], seed: u64) -> Tunnel {
    Tunnel::new(TunnelConfig {
        protocol: Protocol::Native,
        mode: seikan_proto::mode::Mode::Ip,
        private_key: PrivateKey::from_bytes(private),
        inner_mtu: 1420,
        offload: false,
        ciphers: vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305],
        copy_dscp: false,
        repair: None,
        rng: Box::new(Seeded::new(seed)),
    })
}

/// The mesh: `set`, `rotate` and `remove` of `node::mesh`.
impl World {
    /// Applies an answer of the coordinator.
    pub fn apply_changes(&mut self, m: usize, changes: Changes) {
        let now = self.now();
        let calls = changes.calls.clone();
        let member = &mut self.members[m];
        let mut renewed = Vec::new();
        let mut moved = Vec::new();
        let mut access = false;
        for change in member.membership.take(changes) {
            match change {
                Change::Access(_) => access = true,
                Change::Removed(key) | Change::Refused(key, _) => {
                    if let Some(id) = member.tunnel.peer_by_key(&key) {
                        member.tunnel.remove_peer(id);
                    }
                }
                Change::Set(row) => member.set(&row, now.mono),
                Change::Rotated(former, row) => {
                    let peer = member.tunnel.peer_by_key(&former);
                    if let Some(id) = peer
                        && member.tunnel.rotate_peer_key(id, row.public_key)
                    {
                        if member.tunnel.reached(id, now.mono) == Reachability::Relayed {
                            moved.push(row.public_key);
                        }
                        renewed.push(id);
                    }
                    member.set(&row, now.mono);
                }
            }
        }
        if access {
            let rows: Vec<Row> = member.membership.members().values().cloned().collect();
            for row in rows {
                member.filter(&row);
            }
        }
        for id in renewed {
            self.members[m].tunnel.renew(now, id, &mut self.outbox);
            self.flush(m, &[]);
        }
        for key in moved {
            self.want_relay(m, key);
        }
        for key in calls {
            self.on_call(m, key);
        }
        self.flush(m, &[]);
    }

    /// The coordinator forwards a call of a member.
    pub fn on_call(&mut self, m: usize, key: PublicKey) {
        self.want_relay(m, key);
        self.on_call_me_maybe(m, key);
    }

    fn on_call_me_maybe(&mut self, m: usize, key: PublicKey) {
        let now = self.now();
        let tunnel = &mut self.members[m].tunnel;
        if let Some(id) = tunnel.peer_by_key(&key) {
            tunnel.on_call_me_maybe(now, id, &mut self.outbox);
            self.flush(m, &[]);
        }
    }
}

impl Member {
    fn set(&mut self, row: &Row, now: seikan_proto::time::Instant) {
        let Some(id) = self.tunnel.add_peer(row.public_key) else {
            return;
        };
        self.tunnel.clear_allowed_ips(id);
        for address in &row.addresses {
            self.tunnel.add_allowed_ip(id, (*address).into());
        }
        self.tunnel.set_candidates(id, &row.endpoints, now);
        self.filter(row);
    }

    fn filter(&mut self, row: &Row) {
        if let Some(id) = self.tunnel.peer_by_key(&row.public_key) {
            let own = [self.address.into()];
            let access = self.membership.access();
            let filters = access.filters(&access.receivers(&own), row);
            self.tunnel.set_filter(id, filters);
        }
    }

    /// The member's entry at the coordinator.
    pub fn row(&self) -> Row {
        Row {
            name: self.name.clone(),
            public_key: self.key,
            addresses: vec![self.address.into()],
            endpoints: self.agent.published.clone(),
            relayed: Vec::new(),
            tags: self.tags.clone(),
            devices: Vec::new(),
        }
    }
}

/// STUN: discovery and publication of addresses in the agent (`seikan_mesh::agent`).
impl World {
    /// Sends a STUN request to all servers.
    pub fn reflect(&mut self, m: usize, round: u64) {
        let agent = &mut self.members[m].agent;
        if round != agent.round {
            return;
        }
        let servers = self.stun.clone();
        agent.round += 1;
        agent.started_at = self.time;
        agent.open = (0..servers.len()).collect();
        agent.views.resize(servers.len(), (None, 0));
        (agent.moved, agent.lost) = (false, false);
        self.publish(m);
        for (number, server) in servers.into_iter().enumerate() {
            let mut bytes = vec![0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42];
            bytes.extend(self.random::<12>());
            self.send_request(m, RequestKind::Stun(number), server, bytes);
        }
    }

    fn seen(&mut self, m: usize, server: usize, seen: Option<SocketAddr>) {
        let agent = &mut self.members[m].agent;
        if !agent.open.remove(&server) {
            return;
        }
        let (view, misses) = &mut agent.views[server];
        agent.moved |= seen.is_some() && view.is_some() && seen != *view;
        if seen.is_some() || *misses + 1 >= MAX_MISSES {
            (*view, *misses) = (seen, 0);
        } else {
            *misses += 1;
        }
        let over = agent.open.is_empty();
        if over && agent.moved {
            for (view, misses) in &mut agent.views {
                if *misses > 0 {
                    (*view, *misses) = (None, 0);
                }
            }
        }
        self.publish(m);
        if !over {
            return;
        }
        let now = self.now();
        let member = &mut self.members[m];
        let outside = NatMappings {
            v4: mapping(&member.agent.views),
            v6: Mapping::Unknown,
            outer: outer_addresses(&member.agent.views),
        };
        member.tunnel.set_nat_mappings(outside, now.mono);
        let next = if member.agent.lost {
            member.agent.started_at + REFLECT_LEAST
        } else {
            self.time + REFLECT_EVERY
        };
        let round = member.agent.round;
        self.at(next, Event::Reflect(m, round));
        self.flush(m, &[]);
    }

    /// Publishes the addresses of this host at the coordinator, if they have changed.
    fn publish(&mut self, m: usize) {
        let member = &mut self.members[m];
        let first = member.agent.views.iter().find_map(|(seen, _)| *seen);
        let local = at(member.location.ip, PORT);
        let mut all: Vec<SocketAddr> = first.into_iter().collect();
        if !all.contains(&local) {
            all.push(local);
        }
        if all != member.agent.published {
            member.agent.published = all;
            self.after(self.to_coordinator, Event::Row(m));
        }
    }

    /// The host has noticed that its addresses changed.
    pub fn on_network_change(&mut self, m: usize) {
        let agent = &mut self.members[m].agent;
        agent.round += 1;
        agent.open.clear();
        agent
            .requests
            .retain(|request| !matches!(request.kind, RequestKind::Stun(_)));
        let round = agent.round;
        self.reflect(m, round);
    }

    /// A path was lost: starts a round of STUN requests soon.
    fn reflect_soon(&mut self, m: usize) {
        let agent = &mut self.members[m].agent;
        if agent.lost {
            return;
        }
        agent.lost = true;
        // The end of the running round starts it.
        if agent.open.is_empty() {
            let at = (agent.started_at + REFLECT_LEAST).max(self.time);
            let round = agent.round;
            self.at(at, Event::Reflect(m, round));
        }
    }
}

/// The mapping behaviour that the servers' answers show.
fn mapping(views: &[(Option<SocketAddr>, u32)]) -> Mapping {
    let seen: Vec<SocketAddr> = views.iter().filter_map(|(seen, _)| *seen).collect();
    match seen.split_first() {
        None => Mapping::Unknown,
        Some((first, others)) if others.iter().all(|other| other == first) => {
            Mapping::EndpointIndependent
        }
        Some(_) => {
            let mut ips: Vec<IpAddr> = seen.iter().map(SocketAddr::ip).collect();
            ips.dedup();
            Mapping::AddressAndPortDependent(ips)
        }
    }
}

fn outer_addresses(views: &[(Option<SocketAddr>, u32)]) -> Vec<IpAddr> {
    let seen = views.iter().find_map(|(seen, _)| *seen);
    match mapping(views) {
        Mapping::EndpointIndependent => seen.map(|seen| seen.ip()).into_iter().collect(),
        Mapping::AddressAndPortDependent(_) | Mapping::Unknown => Vec::new(),
    }
}

/// Requests, as in `seikan_mesh::stun`.
impl World {
    fn send_request(&mut self, m: usize, kind: RequestKind, to: SocketAddr, bytes: Vec<u8>) {
        let id = bytes[8..20].try_into().expect("a transaction");
        self.members[m].agent.requests.push(Request {
            id,
            kind,
            to,
            bytes,
            left: ATTEMPTS,
            patience: FIRST_PATIENCE,
        });
        self.retry_request(m, id);
    }

    /// Repeats a request that is not answered, or gives it up.
    pub fn retry_request(&mut self, m: usize, id: [u8; 12]) {
        let requests = &mut self.members[m].agent.requests;
        let Some(index) = requests.iter().position(|request| request.id == id) else {
            return;
        };
        let request = &mut requests[index];
        if request.left == 0 {
            let kind = request.kind;
            requests.swap_remove(index);
            return match kind {
                RequestKind::Stun(server) => self.seen(m, server, None),
                RequestKind::Port(key, relay) | RequestKind::Binding(key, relay) => {
                    self.on_binding_failed(m, key, relay)
                }
            };
        }
        request.left -= 1;
        let (to, bytes, patience) = (request.to, request.bytes.clone(), request.patience);
        request.patience *= 2;
        self.after(patience, Event::RetryRequest(m, id));
        self.send_outside_tunnel(m, PORT, to, bytes);
    }

    /// Handles a datagram that begins like a STUN message.
    pub fn answered(&mut self, m: usize, bytes: &[u8]) {
        let Some(id) = bytes.get(8..20) else { return };
        let requests = &mut self.members[m].agent.requests;
        let Some(index) = requests.iter().position(|request| request.id == id) else {
            return;
        };
        let request = requests.swap_remove(index);
        let id = id
            .iter()
            .fold(0u128, |id, byte| id << 8 | u128::from(*byte));
        let relays = self.members[m].membership.relays();
        // An ordinary answer needs no ticket.
        let (RequestKind::Port(_, relay) | RequestKind::Binding(_, relay)) = request.kind else {
            let any = self.relays[0].secret.password("nobody's");
            let answer = Answer::parse(bytes, id.into(), &any).expect("a STUN answer");
            let RequestKind::Stun(server) = request.kind else {
                unreachable!()
            };
            return self.seen(m, server, Some(answer.mapped));
        };
        let Some(ticket) = relays.get(relay) else {
            return;
        };
        match (
            request.kind,
            Answer::parse(bytes, id.into(), &ticket.ticket.password),
        ) {
            (
                RequestKind::Port(key, relay),
                Ok(Answer {
                    port: Some(port), ..
                }),
            ) => {
                let by_tls = relay_of_proxy(request.to).is_some();
                let binding = if by_tls {
                    proxy_address(relay, port)
                } else {
                    at(self.relays[relay].address.ip(), port)
                };
                self.request_relay(m, key, relay, binding, RequestKind::Binding(key, relay));
            }
            (RequestKind::Binding(key, relay), Ok(answer)) => {
                self.on_bound(m, key, relay, request.to, answer.present);
            }
            (RequestKind::Port(key, relay) | RequestKind::Binding(key, relay), _) => {
                // The pair's port may belong to another pair now.
                let pair = self.members[m].agent.pairs.get_mut(&key);
                if let Some(pair) = pair
                    && pair.bindings.remove(&relay).is_some()
                {
                    return self.bind_relay(m, key, relay);
                }
                self.on_binding_failed(m, key, relay);
            }
            (RequestKind::Stun(_), _) => {}
        }
    }
}

/// Relays: `seikan_mesh::relay`.
impl World {
    /// A member does not answer, or tries to reach this one.
    pub fn want_relay(&mut self, m: usize, key: PublicKey) {
        let time = self.time;
        let pairs = &mut self.members[m].agent.pairs;
        match pairs.get_mut(&key) {
            Some(pair) => {
                pair.sought = time;
                if pair.stage == Stage::Resting {
                    self.rebind(m, key, true);
                }
            }
            None => {
                let pair = Pair {
                    sought: time,
                    ..Pair::default()
                };
                pairs.insert(key, pair);
                self.pair_after(HEAD_START, m, key);
            }
        }
    }

    fn pair_after(&mut self, time: u64, m: usize, key: PublicKey) {
        if let Some(pair) = self.members[m].agent.pairs.get_mut(&key) {
            pair.step += 1;
            let step = pair.step;
            self.after(time, Event::Pair(m, key, step));
        }
    }

    /// A step of a pair is due.
    pub fn pair(&mut self, m: usize, key: PublicKey, step: u64) {
        let pair = self.members[m].agent.pairs.get(&key);
        let Some(stage) = pair.filter(|pair| pair.step == step).map(|pair| pair.stage) else {
            return;
        };
        match stage {
            Stage::Waiting | Stage::Resting => self.rebind(m, key, false),
            Stage::Binding => {}
            Stage::Calling(times) => {
                if self.reached(m, &key) != Reachability::Unreachable || times >= CALLS {
                    self.stage(m, key, Stage::Resting);
                    return self.pair_after(BIND_EVERY, m, key);
                }
                self.update_relays(m, key, true);
                self.stage(m, key, Stage::Calling(times + 1));
                self.pair_after(CALL_INTERVAL, m, key);
            }
        }
    }

    fn stage(&mut self, m: usize, key: PublicKey, stage: Stage) {
        if let Some(pair) = self.members[m].agent.pairs.get_mut(&key) {
            pair.stage = stage;
        }
    }

    fn reached(&self, m: usize, key: &PublicKey) -> Reachability {
        let tunnel = &self.members[m].tunnel;
        match tunnel.peer_by_key(key) {
            Some(id) => tunnel.reached(id, self.now().mono),
            None => Reachability::Unreachable,
        }
    }

    /// Binds this side at the pair's relays if necessary, or removes the pair.
    fn rebind(&mut self, m: usize, key: PublicKey, restart: bool) {
        let reached = self.reached(m, &key);
        let time = self.time;
        let member = &mut self.members[m];
        let Some(pair) = member.agent.pairs.get_mut(&key) else {
            return;
        };
        let needed = match reached {
            Reachability::Direct => false,
            Reachability::Unreachable => time - pair.sought < SOUGHT_RECENTLY,
            Reachability::Relayed => true,
        };
        if !needed {
            member.agent.pairs.remove(&key);
            return;
        }
        let relays = member.membership.relays();
        let own = &member.key;
        let ours = in_turn(relays, [own, &key], |kind| kind == RelayKind::Seikan);
        let ours: Vec<usize> = ours
            .into_iter()
            .take(RELAYS_OF_A_PAIR)
            .filter_map(|relay| relays.iter().position(|known| known == relay))
            .collect();
        pair.stage = Stage::Binding;
        pair.step += 1;
        pair.open = ours.iter().copied().collect();
        if restart {
            pair.bindings.clear();
        }
        for relay in ours {
            let pair = &self.members[m].agent.pairs[&key];
            match pair.bindings.get(&relay).copied() {
                Some(binding) => {
                    self.request_relay(m, key, relay, binding, RequestKind::Binding(key, relay))
                }
                None => self.bind_relay(m, key, relay),
            }
        }
    }

    fn bind_relay(&mut self, m: usize, key: PublicKey, relay: usize) {
        let main = self.relays[relay].address;
        self.request_relay(m, key, relay, main, RequestKind::Port(key, relay));
        self.after(TLS_HEAD_START, Event::Tls(m, key, relay));
    }

    /// A relay that has not answered over UDP is tried over TLS.
    pub fn bind_by_tls(&mut self, m: usize, key: PublicKey, relay: usize) {
        let requests = &self.members[m].agent.requests;
        let waits = requests.iter().any(|request| {
            matches!(request.kind, RequestKind::Port(k, r) if (k, r) == (key, relay))
                && request.left + 1 == ATTEMPTS
        });
        if waits {
            let main = proxy_address(relay, self.relays[relay].address.port());
            self.request_relay(m, key, relay, main, RequestKind::Port(key, relay));
        }
    }

    fn request_relay(
        &mut self,
        m: usize,
        key: PublicKey,
        relay: usize,
        to: SocketAddr,
        kind: RequestKind,
    ) {
        let wall = self.now().wall.as_nanos() as u64;
        let mut rng = Seeded::new(u64::from_le_bytes(self.random()));
        let member = &mut self.members[m];
        let Some(relay) = member.membership.relays().get(relay) else {
            return;
        };
        member.agent.stamp = wall.max(member.agent.stamp + 1);
        let send_request = ClientRequest {
            ticket: &relay.ticket,
            peer: key,
            stamp: member.agent.stamp,
        };
        let bytes = send_request.write(&mut rng).1;
        self.send_request(m, kind, to, bytes);
    }

    fn on_bound(
        &mut self,
        m: usize,
        key: PublicKey,
        relay: usize,
        binding: SocketAddr,
        present: bool,
    ) {
        let agent = &mut self.members[m].agent;
        let Some(pair) = agent.pairs.get_mut(&key) else {
            return;
        };
        pair.bindings.insert(relay, binding);
        pair.open.remove(&relay);
        let same = |kind: RequestKind| matches!(kind, RequestKind::Port(k, r) | RequestKind::Binding(k, r) if (k, r) == (key, relay));
        agent.requests.retain(|request| !same(request.kind));
        self.update_relays(m, key, present);
        self.check_bindings(m, key);
    }

    fn on_binding_failed(&mut self, m: usize, key: PublicKey, relay: usize) {
        let agent = &mut self.members[m].agent;
        let same = |kind: RequestKind| matches!(kind, RequestKind::Port(k, r) | RequestKind::Binding(k, r) if (k, r) == (key, relay));
        // Another request for the same binding is running.
        if agent.requests.iter().any(|request| same(request.kind)) {
            return;
        }
        if let Some(pair) = agent.pairs.get_mut(&key) {
            if pair.bindings.remove(&relay).is_some() {
                return self.bind_relay(m, key, relay);
            }
            pair.open.remove(&relay);
            self.check_bindings(m, key);
        }
    }

    /// Continues once all relays have answered or failed.
    fn check_bindings(&mut self, m: usize, key: PublicKey) {
        let Some(pair) = self.members[m].agent.pairs.get(&key) else {
            return;
        };
        if pair.stage != Stage::Binding || !pair.open.is_empty() {
            return;
        }
        let (stage, pause) = if pair.bindings.is_empty() {
            (Stage::Resting, BIND_EVERY)
        } else {
            (Stage::Calling(0), CALL_INTERVAL)
        };
        self.stage(m, key, stage);
        self.pair_after(pause, m, key);
    }

    /// Sets the relays of a peer. `present`: the other side is bound.
    fn update_relays(&mut self, m: usize, key: PublicKey, present: bool) {
        let member = &mut self.members[m];
        let (Some(pair), Some(id)) = (
            member.agent.pairs.get(&key),
            member.tunnel.peer_by_key(&key),
        ) else {
            return;
        };
        let bindings: Vec<SocketAddr> = pair.bindings.values().copied().collect();
        member.tunnel.set_relays(id, &bindings);
        if present && self.reached(m, &key) == Reachability::Unreachable {
            self.on_call_me_maybe(m, key);
        }
        self.flush(m, &[]);
    }
}

/// After every call of the tunnel: the worker's handling of calls and punch sockets.
impl World {
    pub fn tend(&mut self, m: usize) {
        for id in self.members[m].tunnel.take_peers_to_call() {
            let Some(peer) = self.members[m].tunnel.peer(id) else {
                continue;
            };
            let (key, lost) = (peer.public_key, peer.paths.is_lost());
            let (time, calls) = (self.time, !peer.paths.is_pausing(self.now().mono));
            let on_call = &mut self.members[m].agent.on_call;
            if calls && on_call.get(&key).is_none_or(|at| time - at >= CALL_EVERY) {
                on_call.insert(key, time);
                self.after(self.to_coordinator, Event::Call(m, key));
            }
            self.want_relay(m, key);
            if lost {
                self.reflect_soon(m);
            }
        }
        for punch in self.members[m].tunnel.take_punches() {
            let punch_sockets = &mut self.members[m].punch_sockets;
            let stays = |id, to| id != punch.peer || punch.destinations.contains(&to);
            punch_sockets.waiting.retain(|_, (id, to)| stays(*id, *to));
            let open = punch_sockets
                .waiting
                .values()
                .filter(|(id, _)| *id == punch.peer);
            for i in open.count()..usize::from(PORTS) {
                let mut port = 0;
                while port == 0 || punch_sockets.has(port) {
                    punch_sockets.next = punch_sockets.next.wrapping_add(1) % 30_000;
                    port = 20_000 + punch_sockets.next;
                }
                let towards = punch.destinations[i % punch.destinations.len()];
                punch_sockets.waiting.insert(port, (punch.peer, towards));
            }
            let all = punch_sockets.waiting.iter();
            let all: Vec<(u16, SocketAddr)> = all
                .filter(|(_, (id, _))| *id == punch.peer)
                .map(|(port, (_, towards))| (*port, *towards))
                .collect();
            punch_sockets.openers += all.len() as u64;
            if !std::mem::replace(&mut punch_sockets.looks, true) {
                self.after(LOOK_EVERY, Event::PunchSockets(m));
            }
            for (port, towards) in all {
                let destination = Destination {
                    address: towards,
                    source: None,
                    traffic_class: 0,
                    hop_limit: punch.hop_limit,
                };
                self.send_datagram(m, port, destination, OPENER.to_vec());
            }
            let now = self.now().mono;
            self.members[m].tunnel.on_punched(punch.peer, PORTS, now);
        }
    }

    /// An authenticated datagram arrived on a punch socket, from the address that it sends to.
    pub fn on_punch_socket(&mut self, m: usize, port: u16) {
        let (time, now) = (self.time, self.now().mono);
        let member = &mut self.members[m];
        let punch_sockets = &mut member.punch_sockets;
        if let Some(socket) = punch_sockets
            .punch_sockets
            .values_mut()
            .find(|socket| socket.port == port)
        {
            socket.last_received = time;
            return;
        }
        let Some((peer, towards)) = punch_sockets.waiting.remove(&port) else {
            return;
        };
        punch_sockets.waiting.retain(|_, (id, _)| *id != peer);
        let socket = PunchSocket {
            port,
            peer,
            last_received: time,
            kept: time,
        };
        punch_sockets.punch_sockets.insert(towards, socket);
        punch_sockets.succeeded += 1;
        member.tunnel.on_punch_succeeded(peer, now);
    }

    /// Closes unused punch sockets, and keeps the others open.
    pub fn tend_punch_sockets(&mut self, m: usize) {
        let (time, now) = (self.time, self.now());
        let member = &mut self.members[m];
        let tunnel = &mut member.tunnel;
        let punch_sockets = &mut member.punch_sockets;
        punch_sockets
            .waiting
            .retain(|_, (id, _)| tunnel.is_open(*id, now.mono));
        let mut kept = Vec::new();
        punch_sockets.punch_sockets.retain(|address, socket| {
            let peer = tunnel.peer(socket.peer);
            let used = peer.is_some_and(|peer| {
                peer.path.endpoint == Some(*address) && peer.has_session(now.mono)
            });
            if used && time - socket.kept >= KEEP_ALIVE {
                socket.kept = time;
                kept.push((socket.peer, *address));
            }
            used || time - socket.last_received < FADES
        });
        for (peer, address) in kept {
            tunnel.keep_alive(now, peer, address, &mut self.outbox);
        }
        punch_sockets.looks =
            !(punch_sockets.waiting.is_empty() && punch_sockets.punch_sockets.is_empty());
        if punch_sockets.looks {
            self.after(LOOK_EVERY, Event::PunchSockets(m));
        }
        self.flush(m, &[]);
    }

    /// Sends a datagram that is not the tunnel's.
    pub fn send_outside_tunnel(&mut self, m: usize, port: u16, to: SocketAddr, bytes: Vec<u8>) {
        let destination = Destination {
            address: to,
            source: None,
            traffic_class: 0,
            hop_limit: None,
        };
        self.send_datagram(m, port, destination, bytes);
    }

    fn send_datagram(&mut self, m: usize, port: u16, destination: Destination, bytes: Vec<u8>) {
        let load = Load::outside_tunnel(m);
        self.sent[m].outside_tunnel += 1;
        let datagram = Datagram {
            port,
            destination,
            bytes,
        };
        self.send(m, datagram, load);
    }

    /// A datagram arrives at a host.
    pub fn receive(&mut self, m: usize, parcel: crate::sim::network::Parcel, load: Load) {
        let now = self.now();
        let member = &mut self.members[m];
        if !member.is_on {
            return self.lost(Lost::Off, load);
        }
        let port = parcel.to.port();
        let socket = (port != PORT).then(|| member.punch_sockets.of(port));
        if socket == Some(None) {
            return self.lost(Lost::NoSocket, load);
        }
        self.ledger.arrived += 1;
        if is_answer(&parcel.bytes) {
            return self.answered(m, &parcel.bytes);
        }
        let from_there = socket
            .flatten()
            .filter(|(_, towards)| *towards == parcel.from);
        let authentic = |member: &Member, id: PeerId| {
            let peer = member.tunnel.peer(id);
            peer.map_or(0, |peer| peer.counters.received_bytes)
        };
        let before = from_there.map(|(id, _)| authentic(member, id));
        let (mut arena, datagrams) = crate::sim::gather(&[parcel], false);
        member.tunnel.inbound(
            now,
            datagrams.into_iter(),
            &mut arena,
            &mut self.inbox,
            &mut self.outbox,
        );
        if let (Some((id, _)), Some(before)) = (from_there, before)
            && authentic(&self.members[m], id) > before
        {
            self.on_punch_socket(m, port);
        }
        let delivered = self.flush(m, &arena);
        self.opened(m, load, delivered);
    }
}
