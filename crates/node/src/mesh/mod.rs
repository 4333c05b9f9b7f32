//! Membership in a mesh: whom a coordinator tells of become peers, beside those of the file.
//!
//! [`agent`] is a thread of its own, which talks to the coordinator ([`client`]), tells it where this
//! host may be reached ([`endpoints`]), and remembers the others ([`cache`]); [`Mesh`] is its end in
//! the worker's loop, which makes peers of what it says ([`members`]). Nothing of it is in a packet's
//! way: without a coordinator, peers stay as they are.

mod agent;
mod cache;
pub mod client;
mod endpoints;
mod forward;
mod known;
mod legs;
pub mod mapping;
mod members;
pub mod names;
pub mod nat;
mod relay;
mod resolve;
pub(crate) mod stun;
mod turn;

use crate::node::{Node, now};
use crate::setup::names::{Found, Names};
use crate::worker::{Service, Verdict};
use agent::{Agent, News};
pub use agent::{Answers, LegTo, View};
pub use cache::KnownError;
pub(crate) use endpoints::is_routable;
pub use known::{Changed, Doubts};
pub use legs::Counters as LegCounters;
use mapping::Mapping;
use members::{Rules, filter, remove, rotate, set};
use seikan_config::{Config, Diagnostic, MeshSettings, Severity};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Access, Change, MAX_RELAYS, Member, Membership, Name};
use seikan_proto::tunnel::Reachability;
use seikan_sys::poll::{Epoll, Interest};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Token of the descriptor through which the thread wakes the loop; near none of others.
const TOKEN: u64 = 1 << 61;
/// What waits for the thread, at most.
const MAX_HEARD: usize = 64;
/// Servers whose answers are taken, at most: two relays for each of the pairs that [`relay`] keeps, and some more.
const MAX_ASKED: usize = 2048;
/// For how long the answers of one are taken that was asked once.
const ASKED_LATELY: Duration = Duration::from_secs(60);
/// Oddities about members' keys that are logged, at most; all are shown by `status`.
const MAX_SAID: usize = 1024;
/// Members that become peers before packets get their turn.
const CHANGES_PER_TURN: usize = 64;

/// What a node knows of its mesh.
#[derive(Clone, Debug)]
pub struct MeshState {
    /// This host's identity, as the others are to know it: not one that only `wg` was told of.
    pub own_key: PublicKey,
    /// Where the coordinator is that is asked, or was last.
    pub coordinator: String,
    /// How it stands with it.
    pub contact: Contact,
    /// The revision up to which the members are known.
    pub revision: u64,
    /// Members that are peers.
    pub members: BTreeMap<PublicKey, Member>,
    /// What they may begin here.
    pub access: Access,
    /// Members that are no peers, with the reason.
    pub refused: BTreeMap<PublicKey, &'static str>,
    /// What is odd about members' keys: others that are no peers, and those that are all the same.
    pub doubts: Doubts,
    /// What this host looks like from outside.
    pub reflexive: Vec<SocketAddr>,
    /// To each STUN server, as of the last time.
    pub views: Vec<View>,
    /// A port of the router before this host, or why there is none; `None` if none is needed.
    pub mapped: Option<Result<Mapping, String>>,
    /// The mesh's relays that were asked for something, and how it stands with each: how it answers, or why it does not.
    pub relays: BTreeMap<String, Result<Answers, String>>,
    /// Relays of ours to which there is a connection by TLS, and what was forwarded by it.
    pub streams: BTreeMap<String, LegCounters>,
    /// Allocations at TURN servers, by their names as above.
    pub turn: BTreeMap<String, Allocation>,
    /// Loopback addresses at which this host forwards, and where to.
    pub legs: BTreeMap<SocketAddr, LegTo>,
    /// STUN servers and relays that were asked lately, and when: nobody else's answers are taken.
    pub(crate) asked: BTreeMap<SocketAddr, Instant>,
    /// How members are found by their names.
    pub names: Found,
    /// The way to the thread.
    pub(crate) to_agent: mpsc::Sender<Heard>,
}

/// An allocation at a TURN server.
#[derive(Clone, Debug)]
pub struct Allocation {
    /// Where others send.
    pub relayed: SocketAddr,
    /// UDP, TCP or TLS: how the server is spoken to.
    pub transport: &'static str,
    /// What was forwarded.
    pub counters: LegCounters,
}

/// What the worker has for the thread. Never waited for: what finds no room comes again.
#[derive(Debug)]
pub(crate) enum Heard {
    /// An answer of a STUN server.
    Stun(Box<[u8]>),
    /// A member does not answer yet, or not any more: the way to it is `lost`.
    Sought { key: PublicKey, lost: bool },
    /// How a member is reached, as was asked.
    Reached(PublicKey, Reachability),
}

/// How it stands with the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contact {
    /// Not asked yet.
    Starting,
    /// It answers.
    Connected,
    /// It does not, for this reason; the members are those that it told of last.
    Lost(String),
    /// It does not know this host as a member any more.
    Revoked,
}

/// The worker's end.
pub struct Mesh<'a> {
    wake: UnixStream,
    /// The other end of it: something is left to do.
    again: UnixStream,
    news: Receiver<News>,
    thread: JoinHandle<()>,
    /// The port that peers are to send to, which may change.
    port: Arc<AtomicU16>,
    /// This host's identity, which may, too.
    own_key: OwnKey,
    /// Still to be done.
    pending: VecDeque<Change>,
    /// Members that are peers, under a filter that is not of the newest policy.
    unfiltered: VecDeque<PublicKey>,
    log: Log<'a>,
    rules: Rules,
}

/// Says what is odd about members' keys, each thing once, and no more than a coordinator could have it say for ever.
struct Log<'a> {
    warn: Box<dyn FnMut(Diagnostic) + 'a>,
    interface: String,
    said: BTreeSet<(Name, PublicKey)>,
}

impl Log<'_> {
    fn say(&mut self, doubts: &Doubts) {
        if self.said.len() >= MAX_SAID {
            return;
        }
        let refused = doubts.refused.iter().map(|(key, refused)| {
            let message = format!(
                "rejected member {key} (`{}`): {}",
                refused.name, refused.reason
            );
            let help = format!(
                "if its owner changed the key, write `pins = [\"{} {key}\"]`; otherwise the \
                                coordinator may be compromised",
                refused.name
            );
            ((&refused.name, key), message, help)
        });
        let changed = doubts.changed.iter().map(|(name, changed)| {
            let message = format!("`{name}` has a new key: {}, formerly {}", changed.now, changed.was);
            let help = "if its owner did not change it, the coordinator may be compromised; `pins` and \
                        `pin-first-use` keep a key";
            ((name, &changed.now), message, help.to_owned())
        });
        for ((name, key), message, help) in refused.chain(changed) {
            if self.said.len() < MAX_SAID && self.said.insert((name.clone(), *key)) {
                let warning = Diagnostic::new(Severity::Warning, &self.interface, message);
                (self.warn)(warning.with_help(help));
            }
        }
    }
}

/// The identity of this host, for the thread to see.
#[derive(Clone, Debug)]
struct OwnKey(Arc<Mutex<PublicKey>>);

impl OwnKey {
    fn new(key: PublicKey) -> OwnKey {
        OwnKey(Arc::new(Mutex::new(key)))
    }

    fn get(&self) -> PublicKey {
        // A key is written whole or not at all.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, key: PublicKey) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = key;
    }
}

/// Why a host does not take part in its mesh.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    /// The thread that talks to the coordinator.
    #[error("cannot start the mesh agent: {0}")]
    Thread(#[from] io::Error),
    /// Without what it remembers this host would trust whoever comes next.
    #[error(transparent)]
    Known(#[from] KnownError),
}

/// Forgets what is kept of an interface's mesh in `state`: the interface's folder there.
pub fn forget(state: &Path, interface: &str) {
    // Nothing there is as good.
    let _ = fs::remove_dir_all(state.join(interface));
}

/// What is kept of an interface's mesh in `state`, a few seconds old at most while its tunnel hears from a coordinator.
///
/// # Errors
/// Nothing is kept, or it cannot be read.
pub fn kept(state: &Path, interface: &str) -> io::Result<Membership> {
    cache::read(&cache::file(&state.join(interface)))
}

impl<'a> Mesh<'a> {
    /// Starts the thread. Call it after privileges were dropped. `state` is the interface's folder of what is kept over restarts;
    /// `names` is what was set up to find members by their names; `warn` is told of members whose keys are odd.
    ///
    /// # Errors
    /// No thread, or no pair of sockets; what is remembered of the members cannot be read.
    pub fn start(
        config: &Config,
        settings: &MeshSettings,
        state: &Path,
        node: &mut Node,
        names: Option<&mut Names>,
        warn: Box<dyn FnMut(Diagnostic) + 'a>,
    ) -> Result<Mesh<'a>, MeshError> {
        let known = cache::known_file(state);
        let remembered = cache::load_known(&known)?;
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let again = theirs.try_clone()?;
        let port = Arc::new(AtomicU16::new(node.sockets.port()));
        let own_key = OwnKey::new(*node.tunnel.identity().public());
        let (to_agent, heard) = mpsc::channel(MAX_HEARD);
        let (found, server) = match names {
            Some(names) => (names.found.clone(), names.server.take()),
            None => (Found::Off("names were not set up".to_owned()), None),
        };
        let agent = Agent {
            settings: settings.clone(),
            own_interface: node.tun.index(),
            networks: config.addresses.clone(),
            port: port.clone(),
            fwmark: node.sockets.fwmark(),
            cache: cache::file(state),
            known,
            remembered: Cell::new(remembered),
            own_key: own_key.clone(),
            names: names::Names::new(config.addresses.clone()),
            name_server: server,
        };
        node.mesh = Some(MeshState {
            own_key: own_key.get(),
            coordinator: settings.coordinator.to_string(),
            contact: Contact::Starting,
            revision: 0,
            members: BTreeMap::new(),
            access: Access::default(),
            refused: BTreeMap::new(),
            doubts: Doubts::default(),
            reflexive: Vec::new(),
            views: Vec::new(),
            mapped: None,
            relays: BTreeMap::new(),
            streams: BTreeMap::new(),
            turn: BTreeMap::new(),
            legs: BTreeMap::new(),
            asked: BTreeMap::new(),
            names: found,
            to_agent,
        });
        let (news, thread) = agent.start(theirs, heard)?;
        Ok(Mesh {
            wake: ours,
            again,
            news,
            thread,
            port,
            own_key,
            pending: VecDeque::new(),
            unfiltered: VecDeque::new(),
            log: Log {
                warn,
                interface: config.name.to_string(),
                said: BTreeSet::new(),
            },
            rules: Rules {
                own: config.addresses.clone(),
                configured: config.peers.iter().map(|peer| peer.public_key).collect(),
                taken: config
                    .peers
                    .iter()
                    .flat_map(|peer| peer.allowed_ips.iter().copied())
                    // A default route leaves members what is theirs: the longest prefix counts.
                    .filter(|prefix| config.addresses.iter().any(|own| own.contains(prefix)))
                    .collect(),
            },
        })
    }

    /// Ends it, with a moment for what is to be said to others at the end.
    pub fn end(self, node: &mut Node) {
        // Whoever has something to say, or waits for something, finds that nobody is there.
        node.mesh = None;
        drop(self.news);
        let deadline = Instant::now() + agent::LAST_WORDS + Duration::from_millis(100);
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether an event is for this service.
    pub fn owns(token: u64) -> bool {
        token == TOKEN
    }

    /// Takes what the thread has to say, as much as has its turn.
    fn turn(&mut self, node: &mut Node) {
        let mut drain = [0; 64];
        while matches!(self.wake.read(&mut drain), Ok(n) if n > 0) {}
        self.port.store(node.sockets.port(), Ordering::Relaxed);
        if let Some(mesh) = &node.mesh {
            self.own_key.set(mesh.own_key);
        }
        while self.pending.len() < CHANGES_PER_TURN {
            let Some(mesh) = &mut node.mesh else { return };
            let news = match self.news.try_recv() {
                Ok(news) => news,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    mesh.contact = Contact::Lost("the mesh agent has ended".to_owned());
                    break;
                }
            };
            match news {
                News::Contact(contact) => mesh.contact = contact,
                News::Coordinator(url) => mesh.coordinator = url,
                News::Changes { revision, changes } => {
                    mesh.revision = revision;
                    self.pending.extend(changes);
                }
                News::Doubts(doubts) => {
                    self.log.say(&doubts);
                    mesh.doubts = doubts;
                }
                News::Reflexive { addresses, views } => {
                    node.tunnel
                        .set_nat_mappings(nat::outside(&views), now().mono);
                    mesh.reflexive = addresses;
                    mesh.views = views;
                }
                News::Mapped(standing) => mesh.mapped = standing,
                // Who gives servers their names cannot have this host send just anywhere; unanswered, it is asked elsewhere.
                News::Send { to, .. }
                    if !mesh.legs.contains_key(&to)
                        && !self.rules.may_serve(to, node.sockets.port()) => {}
                News::Send { bytes, to } => {
                    mesh.note_asked(to);
                    node.send_beside(&bytes, to);
                }
                News::Called(keys) => approach(node, &keys),
                News::Relays {
                    key,
                    addresses,
                    legs,
                    present,
                } => {
                    let usable = addresses.into_iter().filter(|at| self.rules.may_be_at(*at));
                    // Legs are this host's own.
                    let all: Vec<_> = usable.chain(legs).collect();
                    take_relays(node, &key, &all, present);
                }
                News::Reached(key) => {
                    let reached = reached(node, &key);
                    if let Some(mesh) = &node.mesh {
                        // Who gets no answer asks again.
                        let _ = mesh.to_agent.try_send(Heard::Reached(key, reached));
                    }
                }
                News::Relay { address, standing } => {
                    if mesh.relays.len() >= MAX_RELAYS && !mesh.relays.contains_key(&address) {
                        mesh.relays.clear();
                    }
                    mesh.relays.insert(address, standing);
                }
                News::Leg { local, to } => match to {
                    Some(to) => drop(mesh.legs.insert(local, to)),
                    None => drop(mesh.legs.remove(&local)),
                },
                News::Stream(address) => drop(mesh.streams.insert(address, LegCounters::default())),
                News::Streamed { address, counters } => {
                    if let Some(known) = mesh.streams.get_mut(&address) {
                        *known = *counters;
                    }
                }
                News::StreamEnded(address) => drop(mesh.streams.remove(&address)),
                News::Turn {
                    address,
                    relayed,
                    transport,
                } => {
                    let counters = LegCounters::default();
                    let allocation = Allocation {
                        relayed,
                        transport,
                        counters,
                    };
                    mesh.turn.insert(address, allocation);
                }
                News::Turned { address, counters } => {
                    if let Some(allocation) = mesh.turn.get_mut(&address) {
                        allocation.counters = *counters;
                    }
                }
                News::TurnEnded(address) => drop(mesh.turn.remove(&address)),
                News::Tick => {}
            }
        }
        let turn = self.pending.len().min(CHANGES_PER_TURN);
        for change in self.pending.drain(..turn) {
            match change {
                Change::Access(access) => {
                    if let Some(mesh) = &mut node.mesh {
                        self.unfiltered = mesh.members.keys().copied().collect();
                        mesh.access = access;
                    }
                }
                Change::Set(member) => set(node, member, &self.rules),
                Change::Rotated(former, member) => rotate(node, &former, member, &self.rules),
                Change::Removed(key) => remove(node, &key, &self.rules),
            }
        }
        let some = self.unfiltered.len().min(CHANGES_PER_TURN);
        for key in self.unfiltered.drain(..some) {
            filter(node, &key, &self.rules);
        }
        if turn == CHANGES_PER_TURN || !self.unfiltered.is_empty() {
            // A full pair wakes the loop anyway.
            let _ = (&self.again).write(&[0]);
        }
    }
}

impl MeshState {
    /// Answers from there are taken for a while.
    fn note_asked(&mut self, server: SocketAddr) {
        if self.asked.len() >= MAX_ASKED {
            self.asked.retain(|_, at| at.elapsed() < ASKED_LATELY);
        }
        if self.asked.len() < MAX_ASKED {
            self.asked.insert(server, Instant::now());
        }
    }
}

/// How a member is reached.
fn reached(node: &Node, key: &PublicKey) -> Reachability {
    match node.tunnel.peer_by_key(key) {
        Some(id) => node.tunnel.reached(id, now().mono),
        None => Reachability::Unreachable,
    }
}

/// Where a member is reached by relays; if it is there already, and does not answer otherwise, it is met there.
fn take_relays(node: &mut Node, key: &PublicKey, addresses: &[SocketAddr], present: bool) {
    let known = node.mesh.as_ref();
    if !known.is_some_and(|mesh| mesh.members.contains_key(key)) {
        return;
    }
    let Some(id) = node.tunnel.peer_by_key(key) else {
        return;
    };
    node.tunnel.set_relays(id, addresses);
    if present && node.tunnel.reached(id, now().mono) == Reachability::Unreachable {
        approach(node, &[*key]);
    }
}

/// Members try to reach this host, and are met on the way.
fn approach(node: &mut Node, keys: &[PublicKey]) {
    for key in keys {
        let known = node
            .mesh
            .as_ref()
            .is_some_and(|mesh| mesh.members.contains_key(key));
        if let Some(id) = node.tunnel.peer_by_key(key).filter(|_| known) {
            node.tunnel.on_call_me_maybe(now(), id, &mut node.outbox);
            node.transmit();
        }
    }
}

impl Service for Mesh<'_> {
    fn start(&mut self, epoll: &Epoll) -> io::Result<()> {
        epoll.add(&self.wake, TOKEN, Interest::Read)
    }

    fn ready(&mut self, _: u64, _: &Epoll, node: &mut Node) -> Verdict {
        self.turn(node);
        Verdict::Continue
    }
}
