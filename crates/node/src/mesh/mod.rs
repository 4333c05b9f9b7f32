//! Membership in a mesh: members that a coordinator reports become peers, in addition to those of the
//! configuration file.
//!
//! [`agent`] is a thread that talks to the coordinator ([`client`]), reports this host's endpoints
//! ([`endpoints`]) and stores the membership ([`cache`]). [`Mesh`] handles its events in the worker's loop and
//! updates peers ([`members`]). The data path does not depend on it: without a coordinator, peers stay as they
//! are.

mod agent;
mod cache;
pub mod client;
mod endpoints;
mod forward;
mod known;
mod proxies;
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
use crate::worker::{Service, ControlFlow};
use agent::{Agent, AgentEvent};
pub use agent::{Answers, ProxyTarget, View};
pub use cache::KnownError;
pub(crate) use endpoints::is_routable;
pub use known::{Changed, KeyConflicts};
pub use proxies::Counters as ProxyCounters;
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

/// Token of the socket by which the agent wakes the loop; distinct from all others.
const TOKEN: u64 = 1 << 61;
/// Maximum number of events that wait for the agent.
const MAX_WORKER_EVENTS: usize = 64;
/// Maximum number of servers whose STUN answers are accepted: two relays for each pair that [`relay`] keeps,
/// and some more.
const MAX_QUERIED: usize = 2048;
/// How long answers of a server are accepted after a request.
const QUERIED_LATELY: Duration = Duration::from_secs(60);
/// Maximum number of logged key conflicts; `status` shows all.
const MAX_LOGGED: usize = 1024;
/// Maximum number of changes applied before packets are handled again.
const CHANGES_PER_TURN: usize = 64;

/// State of the mesh as known to the node.
#[derive(Clone, Debug)]
pub struct MeshState {
    /// This host's public key in the mesh, also after a client of `wg`'s protocol has set another one.
    pub own_key: PublicKey,
    /// URL of the coordinator in use, or last used.
    pub coordinator: String,
    /// State of the coordinator.
    pub contact: Contact,
    /// Revision of the known membership.
    pub revision: u64,
    /// Members that are peers.
    pub members: BTreeMap<PublicKey, Member>,
    /// Connections that members may open to this host.
    pub access: Access,
    /// Members that cannot be peers, with the reason.
    pub refused: BTreeMap<PublicKey, &'static str>,
    /// Members that were refused because of their keys, and those accepted with changed keys.
    pub key_conflicts: KeyConflicts,
    /// Reflexive addresses of this host.
    pub reflexive: Vec<SocketAddr>,
    /// Latest result of each STUN server.
    pub views: Vec<View>,
    /// State of the port mapping: the mapping, or why there is none; `None` if none is needed.
    pub mapped: Option<Result<Mapping, String>>,
    /// Relays in use by address: how each answers, or why it does not.
    pub relays: BTreeMap<String, Result<Answers, String>>,
    /// Counters of connections to relays over TLS, by relay.
    pub streams: BTreeMap<String, ProxyCounters>,
    /// Allocations at TURN servers, by server.
    pub turn: BTreeMap<String, Allocation>,
    /// Targets of the proxy sockets, by loopback address.
    pub proxies: BTreeMap<SocketAddr, ProxyTarget>,
    /// STUN servers and relays with the time of the last request; answers of others are not accepted.
    pub(crate) queried: BTreeMap<SocketAddr, Instant>,
    /// How members are found by name.
    pub names: Found,
    /// Sender of events to the agent.
    pub(crate) to_agent: mpsc::Sender<WorkerEvent>,
}

/// An allocation at a TURN server.
#[derive(Clone, Debug)]
pub struct Allocation {
    /// The relayed address.
    pub relayed: SocketAddr,
    /// Transport to the server: UDP, TCP or TLS.
    pub transport: &'static str,
    /// Forwarded datagrams.
    pub counters: ProxyCounters,
}

/// Event of the worker for the agent. The worker never waits: an event that does not fit into the queue is
/// repeated.
#[derive(Debug)]
pub(crate) enum WorkerEvent {
    /// An answer of a STUN server or relay.
    Stun(Box<[u8]>),
    /// A member does not answer, or no longer; its path is `lost`.
    Sought { key: PublicKey, lost: bool },
    /// How a member is reached, as requested.
    Reached(PublicKey, Reachability),
}

/// State of the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contact {
    /// Not contacted yet.
    Starting,
    /// It answers.
    Connected,
    /// It does not answer, for this reason; the members are the last known ones.
    Lost(String),
    /// It does not know this host as a member any more.
    Revoked,
}

/// The agent's counterpart in the worker's loop.
pub struct Mesh<'a> {
    wake: UnixStream,
    /// The agent's end, to wake the loop for remaining work.
    again: UnixStream,
    events: Receiver<AgentEvent>,
    thread: JoinHandle<()>,
    /// The tunnel's port, which may change.
    port: Arc<AtomicU16>,
    /// This host's public key, which may change too.
    own_key: OwnKey,
    /// Changes still to be applied.
    pending: VecDeque<Change>,
    /// Peers whose packet filter is older than the policy.
    unfiltered: VecDeque<PublicKey>,
    log: Log<'a>,
    rules: Rules,
}

/// Logs unexpected keys, each once, and at most [`MAX_LOGGED`], so that a coordinator cannot fill the log.
struct Log<'a> {
    warn: Box<dyn FnMut(Diagnostic) + 'a>,
    interface: String,
    logged: BTreeSet<(Name, PublicKey)>,
}

impl Log<'_> {
    fn warn_of(&mut self, key_conflicts: &KeyConflicts) {
        if self.logged.len() >= MAX_LOGGED {
            return;
        }
        let refused = key_conflicts.refused.iter().map(|(key, refused)| {
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
        let changed = key_conflicts.changed.iter().map(|(name, changed)| {
            let message = format!("`{name}` has a new key: {}, formerly {}", changed.now, changed.was);
            let help = "if its owner did not change it, the coordinator may be compromised; `pins` and \
                        `pin-first-use` keep a key";
            ((name, &changed.now), message, help.to_owned())
        });
        for ((name, key), message, help) in refused.chain(changed) {
            if self.logged.len() < MAX_LOGGED && self.logged.insert((name.clone(), *key)) {
                let warning = Diagnostic::new(Severity::Warning, &self.interface, message);
                (self.warn)(warning.with_help(help));
            }
        }
    }
}

/// This host's public key, shared with the agent.
#[derive(Clone, Debug)]
struct OwnKey(Arc<Mutex<PublicKey>>);

impl OwnKey {
    fn new(key: PublicKey) -> OwnKey {
        OwnKey(Arc::new(Mutex::new(key)))
    }

    fn get(&self) -> PublicKey {
        // A key is written in one piece.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, key: PublicKey) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = key;
    }
}

/// Why a host cannot take part in its mesh.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    /// The agent cannot be started.
    #[error("cannot start the mesh agent: {0}")]
    Thread(#[from] io::Error),
    /// The known keys cannot be read; without them this host would trust any key.
    #[error(transparent)]
    Known(#[from] KnownError),
}

/// Removes the stored state of an interface's mesh: its directory in `state`.
pub fn forget(state: &Path, interface: &str) {
    // A missing directory is as good.
    let _ = fs::remove_dir_all(state.join(interface));
}

/// Returns the stored membership of an interface, a few seconds old at most while its tunnel is connected to a
/// coordinator.
///
/// # Errors
/// Nothing is stored, or it cannot be read.
pub fn stored_membership(state: &Path, interface: &str) -> io::Result<Membership> {
    cache::read(&cache::file(&state.join(interface)))
}

impl<'a> Mesh<'a> {
    /// Starts the agent; to be called after privileges were dropped. `state` is the interface's directory of
    /// persistent state, `names` the result of setting names up; `warn` gets unexpected keys of members.
    ///
    /// # Errors
    /// The thread or its socket pair cannot be created; the known keys cannot be read.
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
        let (to_agent, worker_events) = mpsc::channel(MAX_WORKER_EVENTS);
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
            key_conflicts: KeyConflicts::default(),
            reflexive: Vec::new(),
            views: Vec::new(),
            mapped: None,
            relays: BTreeMap::new(),
            streams: BTreeMap::new(),
            turn: BTreeMap::new(),
            proxies: BTreeMap::new(),
            queried: BTreeMap::new(),
            names: found,
            to_agent,
        });
        let (events, thread) = agent.start(theirs, worker_events)?;
        Ok(Mesh {
            wake: ours,
            again,
            events,
            thread,
            port,
            own_key,
            pending: VecDeque::new(),
            unfiltered: VecDeque::new(),
            log: Log {
                warn,
                interface: config.name.to_string(),
                logged: BTreeSet::new(),
            },
            rules: Rules {
                own: config.addresses.clone(),
                configured: config.peers.iter().map(|peer| peer.public_key).collect(),
                taken: config
                    .peers
                    .iter()
                    .flat_map(|peer| peer.allowed_ips.iter().copied())
                    // A default route does not cover members' addresses: the longest prefix wins.
                    .filter(|prefix| config.addresses.iter().any(|own| own.contains(prefix)))
                    .collect(),
            },
        })
    }

    /// Stops the agent, which gets a moment to return its port mapping.
    pub fn end(self, node: &mut Node) {
        // The agent's channels are closed, which ends its tasks.
        node.mesh = None;
        drop(self.events);
        let deadline = Instant::now() + agent::LAST_WORDS + Duration::from_millis(100);
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether an event is for this service.
    pub fn owns(token: u64) -> bool {
        token == TOKEN
    }

    /// Handles the agent's events, a bounded number at a time.
    fn turn(&mut self, node: &mut Node) {
        let mut drain = [0; 64];
        while matches!(self.wake.read(&mut drain), Ok(n) if n > 0) {}
        self.port.store(node.sockets.port(), Ordering::Relaxed);
        if let Some(mesh) = &node.mesh {
            self.own_key.set(mesh.own_key);
        }
        while self.pending.len() < CHANGES_PER_TURN {
            let Some(mesh) = &mut node.mesh else { return };
            let events = match self.events.try_recv() {
                Ok(events) => events,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    mesh.contact = Contact::Lost("the mesh agent has ended".to_owned());
                    break;
                }
            };
            match events {
                AgentEvent::Contact(contact) => mesh.contact = contact,
                AgentEvent::Coordinator(url) => mesh.coordinator = url,
                AgentEvent::Changes { revision, changes } => {
                    mesh.revision = revision;
                    self.pending.extend(changes);
                }
                AgentEvent::KeyConflicts(key_conflicts) => {
                    self.log.warn_of(&key_conflicts);
                    mesh.key_conflicts = key_conflicts;
                }
                AgentEvent::Reflexive { addresses, views } => {
                    node.tunnel
                        .set_nat_mappings(nat::nat_mappings(&views), now().mono);
                    mesh.reflexive = addresses;
                    mesh.views = views;
                }
                AgentEvent::Mapped(state) => mesh.mapped = state,
                // A source of servers' names cannot direct datagrams to arbitrary addresses; the agent gets no
                // answer and tries another server.
                AgentEvent::Send { to, .. }
                    if !mesh.proxies.contains_key(&to)
                        && !self.rules.may_serve(to, node.sockets.port()) => {}
                AgentEvent::Send { bytes, to } => {
                    mesh.note_queried(to);
                    node.send_from_port(&bytes, to);
                }
                AgentEvent::CallRequests(keys) => punch_towards(node, &keys),
                AgentEvent::Relays {
                    key,
                    addresses,
                    proxies,
                    present,
                } => {
                    let usable = addresses.into_iter().filter(|at| self.rules.may_be_at(*at));
                    // Proxy sockets are on this host.
                    let all: Vec<_> = usable.chain(proxies).collect();
                    take_relays(node, &key, &all, present);
                }
                AgentEvent::Reached(key) => {
                    let reached = reached(node, &key);
                    if let Some(mesh) = &node.mesh {
                        // A request without an answer is repeated.
                        let _ = mesh.to_agent.try_send(WorkerEvent::Reached(key, reached));
                    }
                }
                AgentEvent::Relay { address, state } => {
                    if mesh.relays.len() >= MAX_RELAYS && !mesh.relays.contains_key(&address) {
                        mesh.relays.clear();
                    }
                    mesh.relays.insert(address, state);
                }
                AgentEvent::Leg { local, to } => match to {
                    Some(to) => drop(mesh.proxies.insert(local, to)),
                    None => drop(mesh.proxies.remove(&local)),
                },
                AgentEvent::Stream(address) => drop(mesh.streams.insert(address, ProxyCounters::default())),
                AgentEvent::Streamed { address, counters } => {
                    if let Some(known) = mesh.streams.get_mut(&address) {
                        *known = *counters;
                    }
                }
                AgentEvent::StreamEnded(address) => drop(mesh.streams.remove(&address)),
                AgentEvent::Turn {
                    address,
                    relayed,
                    transport,
                } => {
                    let counters = ProxyCounters::default();
                    let allocation = Allocation {
                        relayed,
                        transport,
                        counters,
                    };
                    mesh.turn.insert(address, allocation);
                }
                AgentEvent::Turned { address, counters } => {
                    if let Some(allocation) = mesh.turn.get_mut(&address) {
                        allocation.counters = *counters;
                    }
                }
                AgentEvent::TurnEnded(address) => drop(mesh.turn.remove(&address)),
                AgentEvent::Tick => {}
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
            // If the socket pair is full, the loop wakes anyway.
            let _ = (&self.again).write(&[0]);
        }
    }
}

impl MeshState {
    /// Accepts answers of a server for a while.
    fn note_queried(&mut self, server: SocketAddr) {
        if self.queried.len() >= MAX_QUERIED {
            self.queried.retain(|_, at| at.elapsed() < QUERIED_LATELY);
        }
        if self.queried.len() < MAX_QUERIED {
            self.queried.insert(server, Instant::now());
        }
    }
}

/// Returns how a member is reached.
fn reached(node: &Node, key: &PublicKey) -> Reachability {
    match node.tunnel.peer_by_key(key) {
        Some(id) => node.tunnel.reached(id, now().mono),
        None => Reachability::Unreachable,
    }
}

/// Sets a member's relayed addresses; starts punching if the member is bound there already and is not reached
/// otherwise.
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
        punch_towards(node, &[*key]);
    }
}

/// Starts punching towards members that try to reach this host.
fn punch_towards(node: &mut Node, keys: &[PublicKey]) {
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

    fn ready(&mut self, _: u64, _: &Epoll, node: &mut Node) -> ControlFlow {
        self.turn(node);
        ControlFlow::Continue
    }
}
