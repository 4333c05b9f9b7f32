//! A member: a tunnel, and what drives it in the daemon's place. What is done when is as in `node::mesh` and `node::doors`.

use super::internet::{Lost, at};
use super::world::{Event, Load, World};
use crate::sim::{MILLISECOND, SECOND, Seeded};
use seikan_proto::birthday::{Mapping, NatMappings, PORTS};
use seikan_proto::capabilities::Cipher;
use seikan_proto::filter::Destinations;
use seikan_proto::indices::PeerId;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::mesh::relay::{Answer, ClientRequest};
use seikan_proto::mesh::{Change, Changes, Member as Row, Membership, Name, RelayKind, in_turn};
use seikan_proto::noise::Protocol;
use seikan_proto::tunnel::{Reachability, Tunnel, TunnelConfig};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The tunnel's port on every host.
pub const PORT: u16 = 51_820;
/// Time that a direct way has before a relay is asked.
const HEAD_START: u64 = 200 * MILLISECOND;
/// Time that UDP has before TLS is tried.
const TLS_HEAD_START: u64 = 300 * MILLISECOND;
/// Relays that serve one pair.
const RELAYS_OF_A_PAIR: usize = 2;
const BIND_EVERY: u64 = 20 * SECOND;
const MEETINGS: u32 = 4;
const MEET_EVERY: u64 = 550 * MILLISECOND;
const SOUGHT_LATELY: u64 = 30 * SECOND;
/// How often STUN servers are asked, and how soon again when a way has died.
pub const REFLECT_EVERY: u64 = 25 * SECOND;
const REFLECT_LEAST: u64 = 5 * SECOND;
const MAX_MISSES: u32 = 5;
/// A question is sent so often, and waited for so long the first time.
const ATTEMPTS: u32 = 3;
const FIRST_PATIENCE: u64 = 500 * MILLISECOND;
const CALL_EVERY: u64 = SECOND;
/// Doors: how often they are looked after, kept open, and given up.
const LOOK_EVERY: u64 = SECOND;
const KEEP_ALIVE: u64 = 20 * SECOND;
const FADES: u64 = 5 * SECOND;
/// A STUN indication: what is sent to open a port.
const OPENER: [u8; 20] = [
    0, 0x11, 0, 0, 0x21, 0x12, 0xa4, 0x42, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// Where a host is.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub realm: usize,
    pub ip: IpAddr,
    /// What is before it.
    pub nat: Option<usize>,
}

pub struct Member {
    pub name: Name,
    pub tags: Vec<Name>,
    /// In the mesh.
    pub address: Ipv4Addr,
    pub key: PublicKey,
    pub tunnel: Tunnel,
    pub place: Place,
    /// It runs.
    pub is_on: bool,
    pub membership: Membership,
    /// When it is woken for its tunnel.
    pub wake: Option<u64>,
    /// It hears of changes soon.
    pub news_due: bool,
    pub agent: Agent,
    pub doors: Doors,
}

/// What the daemon's other thread does.
#[derive(Default)]
pub struct Agent {
    /// What each STUN server last saw, and how often it has not answered since.
    views: Vec<(Option<SocketAddr>, u32)>,
    /// The round of questions that is under way or was last: its number, when it began, and what is not answered.
    round: u64,
    begun: u64,
    open: BTreeSet<usize>,
    moved: bool,
    /// A way has died.
    lost: bool,
    pub told: Vec<SocketAddr>,
    asks: Vec<Asked>,
    stamp: u64,
    called: BTreeMap<PublicKey, u64>,
    pub pairs: BTreeMap<PublicKey, Pair>,
}

/// A question that waits for its answer.
struct Asked {
    id: [u8; 12],
    what: What,
    to: SocketAddr,
    bytes: Vec<u8>,
    left: u32,
    patience: u64,
}

#[derive(Clone, Copy)]
enum What {
    /// Where this host is seen, by the server with this number.
    Stun(usize),
    /// The port of a pair, of this relay.
    Port(PublicKey, usize),
    /// A seat at it.
    Seat(PublicKey, usize),
}

/// With whom this host meets at relays.
#[derive(Default)]
pub struct Pair {
    sought: u64,
    /// The step that is waited for.
    step: u64,
    stage: Stage,
    /// Relays from which an answer is waited for.
    open: BTreeSet<usize>,
    /// Where this side is bound, by relay.
    seats: BTreeMap<usize, SocketAddr>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// A direct way has its head start.
    #[default]
    Waiting,
    Seating,
    Meeting(u32),
    Resting,
}

/// Sockets beside the tunnel's.
#[derive(Default)]
pub struct Doors {
    /// By their ports.
    waiting: BTreeMap<u16, (PeerId, SocketAddr)>,
    doors: BTreeMap<SocketAddr, Door>,
    looks: bool,
    next: u16,
    pub openers: u64,
    pub met: u64,
}

struct Door {
    port: u16,
    peer: PeerId,
    heard: u64,
    kept: u64,
}

impl Doors {
    /// Whence to send to an address.
    pub fn port_to(&self, address: SocketAddr, peer: Option<PeerId>) -> u16 {
        let door = self.doors.get(&address);
        door.filter(|door| Some(door.peer) == peer)
            .map_or(PORT, |door| door.port)
    }

    /// Whether there is a socket.
    pub fn has(&self, port: u16) -> bool {
        self.waiting.contains_key(&port) || self.doors.values().any(|door| door.port == port)
    }

    /// For whom a socket is, and where that one is.
    pub fn of(&self, port: u16) -> Option<(PeerId, SocketAddr)> {
        let waiting = self.waiting.get(&port).copied();
        let door = self.doors.iter().find(|(_, door)| door.port == port);
        waiting.or_else(|| door.map(|(towards, door)| (door.peer, *towards)))
    }
}

/// A loopback address at which a relay's port is reached by TLS.
pub fn leg(relay: usize, port: u16) -> SocketAddr {
    at([127, 0, 1, relay as u8].into(), port)
}

/// Which relay's that is.
pub fn relay_of(leg: SocketAddr) -> Option<usize> {
    match leg.ip() {
        IpAddr::V4(ip) if ip.is_loopback() => Some(ip.octets()[3].into()),
        _ => None,
    }
}

/// Whether it is a STUN response: nothing of the tunnel's begins so.
fn is_answer(bytes: &[u8]) -> bool {
    let responses = [[0x01, 0x01], [0x01, 0x11]];
    responses.iter().any(|kind| bytes.starts_with(kind)) && bytes.get(4..8) == Some(&OPENER[4..8])
}

pub fn new_tunnel(private: [u8; 32], seed: u64) -> Tunnel {
    Tunnel::new(TunnelConfig {
        protocol: Protocol::Native,
        private_key: PrivateKey::from_bytes(private),
        inner_mtu: 1420,
        offload: false,
        ciphers: vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305],
        copy_dscp: false,
        rng: Box::new(Seeded::new(seed)),
    })
}

/// Of the mesh: `set`, `rotate` and `remove` of `node::mesh`.
impl World {
    /// An answer of the coordinator.
    pub fn take_news(&mut self, m: usize, changes: Changes) {
        let now = self.now();
        let calls = changes.calls.clone();
        let member = &mut self.members[m];
        let mut renewed = Vec::new();
        let mut moved = Vec::new();
        let mut access = false;
        for change in member.membership.take(changes) {
            match change {
                Change::Access(_) => access = true,
                Change::Removed(key) => {
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
            self.wish(m, key);
        }
        for key in calls {
            self.called(m, key);
        }
        self.flush(m, &[]);
    }

    /// The coordinator says that a member tries to reach this one.
    pub fn called(&mut self, m: usize, key: PublicKey) {
        self.wish(m, key);
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
            let to = Destinations::Only(vec![self.address.into()]);
            self.tunnel
                .set_filter(id, self.membership.access().filter(row), to);
        }
    }

    /// What the coordinator is to know.
    pub fn row(&self) -> Row {
        Row {
            name: self.name.clone(),
            public_key: self.key,
            addresses: vec![self.address.into()],
            endpoints: self.agent.told.clone(),
            relayed: Vec::new(),
            tags: self.tags.clone(),
        }
    }
}

/// STUN: `reflect` and `tell` of `node::mesh::agent`.
impl World {
    /// Asks all servers what this host looks like from outside.
    pub fn reflect(&mut self, m: usize, round: u64) {
        let agent = &mut self.members[m].agent;
        if round != agent.round {
            return;
        }
        let servers = self.stun.clone();
        agent.round += 1;
        agent.begun = self.time;
        agent.open = (0..servers.len()).collect();
        agent.views.resize(servers.len(), (None, 0));
        (agent.moved, agent.lost) = (false, false);
        self.tell(m);
        for (number, server) in servers.into_iter().enumerate() {
            let mut bytes = vec![0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42];
            bytes.extend(self.random::<12>());
            self.ask(m, What::Stun(number), server, bytes);
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
        self.tell(m);
        if !over {
            return;
        }
        let now = self.now();
        let member = &mut self.members[m];
        let outside = NatMappings {
            v4: mapping(&member.agent.views),
            v6: Mapping::Unknown,
        };
        member.tunnel.set_nat_mappings(outside, now.mono);
        let next = match member.agent.lost {
            true => member.agent.begun + REFLECT_LEAST,
            false => self.time + REFLECT_EVERY,
        };
        let round = member.agent.round;
        self.at(next, Event::Reflect(m, round));
        self.flush(m, &[]);
    }

    /// Tells the coordinator where this host may be reached, if that is different.
    fn tell(&mut self, m: usize) {
        let member = &mut self.members[m];
        let first = member.agent.views.iter().find_map(|(seen, _)| *seen);
        let local = at(member.place.ip, PORT);
        let mut all: Vec<SocketAddr> = first.into_iter().collect();
        if !all.contains(&local) {
            all.push(local);
        }
        if all != member.agent.told {
            member.agent.told = all;
            self.after(self.to_coordinator, Event::Row(m));
        }
    }

    /// It has noticed that its addresses are others.
    pub fn look_around(&mut self, m: usize) {
        let agent = &mut self.members[m].agent;
        agent.round += 1;
        agent.open.clear();
        agent
            .asks
            .retain(|asked| !matches!(asked.what, What::Stun(_)));
        let round = agent.round;
        self.reflect(m, round);
    }

    /// A way has died: servers are asked soon.
    fn reflect_soon(&mut self, m: usize) {
        let agent = &mut self.members[m].agent;
        if agent.lost {
            return;
        }
        agent.lost = true;
        // While a round is under way, its end sees to it.
        if agent.open.is_empty() {
            let at = (agent.begun + REFLECT_LEAST).max(self.time);
            let round = agent.round;
            self.at(at, Event::Reflect(m, round));
        }
    }
}

/// What servers saw, in the tunnel's words.
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

/// Questions: `Questions` of `node::mesh::stun`.
impl World {
    fn ask(&mut self, m: usize, what: What, to: SocketAddr, bytes: Vec<u8>) {
        let id = bytes[8..20].try_into().expect("a transaction");
        self.members[m].agent.asks.push(Asked {
            id,
            what,
            to,
            bytes,
            left: ATTEMPTS,
            patience: FIRST_PATIENCE,
        });
        self.ask_again(m, id);
    }

    /// Sends a question, if it is not answered; or gives it up.
    pub fn ask_again(&mut self, m: usize, id: [u8; 12]) {
        let asks = &mut self.members[m].agent.asks;
        let Some(place) = asks.iter().position(|asked| asked.id == id) else {
            return;
        };
        let asked = &mut asks[place];
        if asked.left == 0 {
            let what = asked.what;
            asks.swap_remove(place);
            return match what {
                What::Stun(server) => self.seen(m, server, None),
                What::Port(key, relay) | What::Seat(key, relay) => self.unseated(m, key, relay),
            };
        }
        asked.left -= 1;
        let (to, bytes, patience) = (asked.to, asked.bytes.clone(), asked.patience);
        asked.patience *= 2;
        self.after(patience, Event::AskAgain(m, id));
        self.send_beside(m, PORT, to, bytes);
    }

    /// Something came that begins like a STUN message.
    pub fn answered(&mut self, m: usize, bytes: &[u8]) {
        let Some(id) = bytes.get(8..20) else { return };
        let asks = &mut self.members[m].agent.asks;
        let Some(place) = asks.iter().position(|asked| asked.id == id) else {
            return;
        };
        let asked = asks.swap_remove(place);
        let id = id
            .iter()
            .fold(0u128, |id, byte| id << 8 | u128::from(*byte));
        let relays = self.members[m].membership.relays();
        // Who is no member has no ticket: an ordinary answer needs none.
        let (What::Port(_, relay) | What::Seat(_, relay)) = asked.what else {
            let any = self.relays[0].secret.password("nobody's");
            let answer = Answer::parse(bytes, id.into(), &any).expect("a STUN answer");
            let What::Stun(server) = asked.what else {
                unreachable!()
            };
            return self.seen(m, server, Some(answer.mapped));
        };
        let Some(ticket) = relays.get(relay) else {
            return;
        };
        match (
            asked.what,
            Answer::parse(bytes, id.into(), &ticket.ticket.password),
        ) {
            (
                What::Port(key, relay),
                Ok(Answer {
                    port: Some(port), ..
                }),
            ) => {
                let by_tls = relay_of(asked.to).is_some();
                let seat = match by_tls {
                    true => leg(relay, port),
                    false => at(self.relays[relay].address.ip(), port),
                };
                self.ask_relay(m, key, relay, seat, What::Seat(key, relay));
            }
            (What::Seat(key, relay), Ok(answer)) => {
                self.seated(m, key, relay, asked.to, answer.present);
            }
            (What::Port(key, relay) | What::Seat(key, relay), _) => {
                // The pair's port may be another's now.
                let pair = self.members[m].agent.pairs.get_mut(&key);
                if let Some(pair) = pair
                    && pair.seats.remove(&relay).is_some()
                {
                    return self.sit_down(m, key, relay);
                }
                self.unseated(m, key, relay);
            }
            (What::Stun(_), _) => {}
        }
    }
}

/// Relays: `node::mesh::relay`.
impl World {
    /// A member does not answer, or tries to reach this one.
    pub fn wish(&mut self, m: usize, key: PublicKey) {
        let time = self.time;
        let pairs = &mut self.members[m].agent.pairs;
        match pairs.get_mut(&key) {
            Some(pair) => {
                pair.sought = time;
                if pair.stage == Stage::Resting {
                    self.go_round(m, key, true);
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

    /// What a pair has waited for has come.
    pub fn pair(&mut self, m: usize, key: PublicKey, step: u64) {
        let pair = self.members[m].agent.pairs.get(&key);
        let Some(stage) = pair.filter(|pair| pair.step == step).map(|pair| pair.stage) else {
            return;
        };
        match stage {
            Stage::Waiting | Stage::Resting => self.go_round(m, key, false),
            Stage::Seating => {}
            Stage::Meeting(times) => {
                if self.reached(m, &key) != Reachability::Unreachable || times >= MEETINGS {
                    self.stage(m, key, Stage::Resting);
                    return self.pair_after(BIND_EVERY, m, key);
                }
                self.tell_seats(m, key, true);
                self.stage(m, key, Stage::Meeting(times + 1));
                self.pair_after(MEET_EVERY, m, key);
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

    /// Binds this side at the pair's relays, if that is needed, or ends it.
    fn go_round(&mut self, m: usize, key: PublicKey, anew: bool) {
        let reached = self.reached(m, &key);
        let time = self.time;
        let member = &mut self.members[m];
        let Some(pair) = member.agent.pairs.get_mut(&key) else {
            return;
        };
        let needed = match reached {
            Reachability::Direct => false,
            Reachability::Unreachable => time - pair.sought < SOUGHT_LATELY,
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
        pair.stage = Stage::Seating;
        pair.step += 1;
        pair.open = ours.iter().copied().collect();
        if anew {
            pair.seats.clear();
        }
        for relay in ours {
            let pair = &self.members[m].agent.pairs[&key];
            match pair.seats.get(&relay).copied() {
                Some(seat) => self.ask_relay(m, key, relay, seat, What::Seat(key, relay)),
                None => self.sit_down(m, key, relay),
            }
        }
    }

    fn sit_down(&mut self, m: usize, key: PublicKey, relay: usize) {
        let main = self.relays[relay].address;
        self.ask_relay(m, key, relay, main, What::Port(key, relay));
        self.after(TLS_HEAD_START, Event::Tls(m, key, relay));
    }

    /// UDP has had its time: a relay without an answer by it is asked by TLS.
    pub fn sit_by_tls(&mut self, m: usize, key: PublicKey, relay: usize) {
        let asks = &self.members[m].agent.asks;
        let waits = asks.iter().any(|asked| {
            matches!(asked.what, What::Port(k, r) if (k, r) == (key, relay))
                && asked.left + 1 == ATTEMPTS
        });
        if waits {
            let main = leg(relay, self.relays[relay].address.port());
            self.ask_relay(m, key, relay, main, What::Port(key, relay));
        }
    }

    fn ask_relay(&mut self, m: usize, key: PublicKey, relay: usize, to: SocketAddr, what: What) {
        let wall = self.now().wall.as_nanos() as u64;
        let mut rng = Seeded::new(u64::from_le_bytes(self.random()));
        let member = &mut self.members[m];
        let Some(relay) = member.membership.relays().get(relay) else {
            return;
        };
        member.agent.stamp = wall.max(member.agent.stamp + 1);
        let ask = ClientRequest {
            ticket: &relay.ticket,
            peer: key,
            stamp: member.agent.stamp,
        };
        let bytes = ask.write(&mut rng).1;
        self.ask(m, what, to, bytes);
    }

    fn seated(&mut self, m: usize, key: PublicKey, relay: usize, seat: SocketAddr, present: bool) {
        let agent = &mut self.members[m].agent;
        let Some(pair) = agent.pairs.get_mut(&key) else {
            return;
        };
        pair.seats.insert(relay, seat);
        pair.open.remove(&relay);
        let same = |what: What| matches!(what, What::Port(k, r) | What::Seat(k, r) if (k, r) == (key, relay));
        agent.asks.retain(|asked| !same(asked.what));
        self.tell_seats(m, key, present);
        self.is_seated(m, key);
    }

    fn unseated(&mut self, m: usize, key: PublicKey, relay: usize) {
        let agent = &mut self.members[m].agent;
        let same = |what: What| matches!(what, What::Port(k, r) | What::Seat(k, r) if (k, r) == (key, relay));
        // It is asked in another way as well.
        if agent.asks.iter().any(|asked| same(asked.what)) {
            return;
        }
        if let Some(pair) = agent.pairs.get_mut(&key) {
            if pair.seats.remove(&relay).is_some() {
                return self.sit_down(m, key, relay);
            }
            pair.open.remove(&relay);
            self.is_seated(m, key);
        }
    }

    /// Goes on when all relays have answered, or will not.
    fn is_seated(&mut self, m: usize, key: PublicKey) {
        let Some(pair) = self.members[m].agent.pairs.get(&key) else {
            return;
        };
        if pair.stage != Stage::Seating || !pair.open.is_empty() {
            return;
        }
        let (stage, pause) = match pair.seats.is_empty() {
            true => (Stage::Resting, BIND_EVERY),
            false => (Stage::Meeting(0), MEET_EVERY),
        };
        self.stage(m, key, stage);
        self.pair_after(pause, m, key);
    }

    /// Tells the tunnel where a member is met; `present`: the other side is there.
    fn tell_seats(&mut self, m: usize, key: PublicKey, present: bool) {
        let member = &mut self.members[m];
        let (Some(pair), Some(id)) = (
            member.agent.pairs.get(&key),
            member.tunnel.peer_by_key(&key),
        ) else {
            return;
        };
        let seats: Vec<SocketAddr> = pair.seats.values().copied().collect();
        member.tunnel.set_relays(id, &seats);
        if present && self.reached(m, &key) == Reachability::Unreachable {
            self.on_call_me_maybe(m, key);
        }
        self.flush(m, &[]);
    }
}

/// After every turn of the tunnel: `tell_sought` and `tend_doors` of the worker.
impl World {
    pub fn tend(&mut self, m: usize) {
        for id in self.members[m].tunnel.take_peers_to_call() {
            let Some(peer) = self.members[m].tunnel.peer(id) else {
                continue;
            };
            let (key, lost) = (peer.public_key, peer.paths.is_lost());
            let time = self.time;
            let called = &mut self.members[m].agent.called;
            if called.get(&key).is_none_or(|at| time - at >= CALL_EVERY) {
                called.insert(key, time);
                self.after(self.to_coordinator, Event::Call(m, key));
            }
            self.wish(m, key);
            if lost {
                self.reflect_soon(m);
            }
        }
        for punch in self.members[m].tunnel.take_punches() {
            let doors = &mut self.members[m].doors;
            let stays = |id, to| id != punch.peer || punch.destinations.contains(&to);
            doors.waiting.retain(|_, (id, to)| stays(*id, *to));
            let open = doors.waiting.values().filter(|(id, _)| *id == punch.peer);
            for i in open.count()..usize::from(PORTS) {
                let mut port = 0;
                while port == 0 || doors.has(port) {
                    doors.next = doors.next.wrapping_add(1) % 30_000;
                    port = 20_000 + doors.next;
                }
                let towards = punch.destinations[i % punch.destinations.len()];
                doors.waiting.insert(port, (punch.peer, towards));
            }
            let all = doors.waiting.iter();
            let all: Vec<(u16, SocketAddr)> = all
                .filter(|(_, (id, _))| *id == punch.peer)
                .map(|(port, (_, towards))| (*port, *towards))
                .collect();
            doors.openers += all.len() as u64;
            if !std::mem::replace(&mut doors.looks, true) {
                self.after(LOOK_EVERY, Event::Doors(m));
            }
            for (port, towards) in all {
                self.send_beside(m, port, towards, OPENER.to_vec());
            }
            let now = self.now().mono;
            self.members[m].tunnel.on_punched(punch.peer, PORTS, now);
        }
    }

    /// Something authentic came in by a socket beside the tunnel's, from where it sends to.
    pub fn heard_at_door(&mut self, m: usize, port: u16) {
        let (time, now) = (self.time, self.now().mono);
        let member = &mut self.members[m];
        let doors = &mut member.doors;
        if let Some(door) = doors.doors.values_mut().find(|door| door.port == port) {
            door.heard = time;
            return;
        }
        let Some((peer, towards)) = doors.waiting.remove(&port) else {
            return;
        };
        doors.waiting.retain(|_, (id, _)| *id != peer);
        let door = Door {
            port,
            peer,
            heard: time,
            kept: time,
        };
        doors.doors.insert(towards, door);
        doors.met += 1;
        member.tunnel.on_punch_succeeded(peer, now);
    }

    /// Closes those that are of no more use, and keeps the others open.
    pub fn look_after_doors(&mut self, m: usize) {
        let (time, now) = (self.time, self.now());
        let member = &mut self.members[m];
        let tunnel = &mut member.tunnel;
        let doors = &mut member.doors;
        doors
            .waiting
            .retain(|_, (id, _)| tunnel.is_open(*id, now.mono));
        let mut kept = Vec::new();
        doors.doors.retain(|address, door| {
            let peer = tunnel.peer(door.peer);
            let used = peer.is_some_and(|peer| {
                peer.path.endpoint == Some(*address) && peer.has_session(now.mono)
            });
            if used && time - door.kept >= KEEP_ALIVE {
                door.kept = time;
                kept.push((door.peer, *address));
            }
            used || time - door.heard < FADES
        });
        for (peer, address) in kept {
            tunnel.keep_alive(now, peer, address, &mut self.outbox);
        }
        doors.looks = !(doors.waiting.is_empty() && doors.doors.is_empty());
        if doors.looks {
            self.after(LOOK_EVERY, Event::Doors(m));
        }
        self.flush(m, &[]);
    }

    /// Sends something that is not the tunnel's.
    pub fn send_beside(&mut self, m: usize, port: u16, to: SocketAddr, bytes: Vec<u8>) {
        let load = Load::beside(m);
        self.sent[m].beside += 1;
        self.send(m, port, to, 0, bytes, load);
    }

    /// A datagram has come to a host.
    pub fn receive(&mut self, m: usize, parcel: crate::sim::network::Parcel, load: Load) {
        let now = self.now();
        let member = &mut self.members[m];
        if !member.is_on {
            return self.lost(Lost::Off, load);
        }
        let port = parcel.to.port();
        let door = (port != PORT).then(|| member.doors.of(port));
        if door == Some(None) {
            return self.lost(Lost::NoSocket, load);
        }
        self.ledger.arrived += 1;
        if is_answer(&parcel.bytes) {
            return self.answered(m, &parcel.bytes);
        }
        let from_there = door
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
            self.heard_at_door(m, port);
        }
        let delivered = self.flush(m, &arena);
        self.opened(m, load, delivered);
    }
}
