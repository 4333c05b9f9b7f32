//! The mesh in the worker's loop: members that a coordinator reports become peers, in addition to those of the
//! configuration file.
//!
//! [`Mesh`] handles the events of the [`agent`], and updates peers ([`members`]) and the addresses of the devices
//! behind this host ([`devices`]).

mod devices;
mod members;

use crate::node::Node;
use crate::setup::names::Names;
use crate::system::now;
use crate::worker::{ControlFlow, Service};
use members::{Rules, filter, refuse, remove, rotate, set};
use seikan_config::{Config, Diagnostic, MeshSettings, Severity};
use seikan_mesh::agent::{self, AgentError, Handle};
use seikan_mesh::event::{AgentEvent, Contact, WorkerEvent};
use seikan_mesh::names::{Found, Names as MemberNames};
use seikan_mesh::nat::nat_mappings;
use seikan_mesh::trust::KeyConflicts;
use seikan_mesh::web_proxy::WebProxies;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Change, Name};
use seikan_proto::tunnel::Reachability;
use seikan_sys::poll::{Epoll, Interest};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc::TryRecvError;

/// Token of the socket by which the agent wakes the loop; distinct from all others.
const TOKEN: u64 = 1 << 61;
/// Maximum number of logged key conflicts; `status` shows all.
const MAX_LOGGED: usize = 1024;
/// Maximum number of changes applied before packets are handled again.
const CHANGES_AT_A_TIME: usize = 64;

/// The agent's counterpart in the worker's loop.
pub struct Mesh<'a> {
    agent: Handle,
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

impl<'a> Mesh<'a> {
    /// Starts the agent; to be called after privileges were dropped. `state` is the interface's directory of
    /// persistent state, `names` the result of setting names up, `web_proxies` the environment's; `warn` gets
    /// unexpected keys of members.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub fn start(
        config: &Config,
        settings: &MeshSettings,
        state: &Path,
        node: &mut Node,
        names: Option<&mut Names>,
        web_proxies: WebProxies,
        warn: Box<dyn FnMut(Diagnostic) + 'a>,
    ) -> Result<Mesh<'a>, AgentError> {
        let (names, name_server) = match names {
            Some(names) => (names.found.clone(), names.server.take()),
            None => (Found::Off("names were not set up".to_owned()), None),
        };
        let (agent, mut mesh) = agent::start(agent::Options {
            settings,
            interface: node.tun.index(),
            networks: &config.addresses,
            devices: config.gateway.is_some().then(|| config.mesh_devices()),
            port: node.sockets.port(),
            fwmark: node.sockets.fwmark(),
            own_key: *node.tunnel.identity().public(),
            state,
            names,
            name_server,
            is_active: !node.is_standby(),
            web_proxies,
        })?;
        let rules = Rules {
            own: config.addresses.clone(),
            configured: config.peers.iter().map(|peer| peer.public_key).collect(),
            taken: config
                .peers
                .iter()
                .flat_map(|peer| peer.allowed_ips.iter().copied())
                // A default route does not cover members' addresses: the longest prefix wins.
                .filter(|prefix| config.addresses.iter().any(|own| own.contains(prefix)))
                .collect(),
        };
        mesh.receivers = mesh.access.receivers(&rules.own_addresses());
        node.mesh = Some(mesh);
        Ok(Mesh {
            agent,
            pending: VecDeque::new(),
            unfiltered: VecDeque::new(),
            log: Log {
                warn,
                interface: config.name.to_string(),
                logged: BTreeSet::new(),
            },
            rules,
        })
    }

    /// Returns the names of the members, which follow the membership.
    pub fn names(&self) -> MemberNames {
        self.agent.names()
    }

    /// Stops the agent, which gets a moment to return its port mapping.
    pub fn end(self, node: &mut Node) {
        // The agent's channels are closed, which ends its tasks.
        node.mesh = None;
        node.transports.end(now().mono);
        self.agent.stop();
    }

    /// Whether an event is for this service.
    pub fn owns(token: u64) -> bool {
        token == TOKEN
    }

    /// Handles the agent's events, a bounded number at a time.
    fn handle_events(&mut self, epoll: &Epoll, node: &mut Node) {
        self.agent.clear_wakeups();
        node.transports.woken();
        if let Some(mesh) = &node.mesh {
            self.agent.publish(node.sockets.port(), mesh.own_key);
        }
        while self.pending.len() < CHANGES_AT_A_TIME {
            let Some(mesh) = &mut node.mesh else { return };
            match self.agent.next_event() {
                Ok(event) => self.handle(event, epoll, node),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    mesh.contact = Contact::Lost("the mesh agent has ended".to_owned());
                    break;
                }
            }
        }
        let changes = self.pending.len().min(CHANGES_AT_A_TIME);
        for change in self.pending.drain(..changes) {
            match change {
                Change::Access(mut access) => {
                    devices::assign(node, &mut access, &self.rules);
                    if let Some(mesh) = &mut node.mesh {
                        self.unfiltered = mesh.members.keys().copied().collect();
                        mesh.receivers = access.receivers(&self.rules.own_addresses());
                        mesh.access = access;
                    }
                }
                Change::Set(member) => set(node, member, &self.rules),
                Change::Rotated(former, member) => rotate(node, &former, member, &self.rules),
                Change::Removed(key) => remove(node, &key, &self.rules),
                Change::Refused(key, reason) => refuse(node, &key, reason, &self.rules),
            }
        }
        let filters = self.unfiltered.len().min(CHANGES_AT_A_TIME);
        for key in self.unfiltered.drain(..filters) {
            filter(node, &key);
        }
        if changes == CHANGES_AT_A_TIME || !self.unfiltered.is_empty() {
            self.agent.wake_again();
        }
    }

    fn handle(&mut self, event: AgentEvent, epoll: &Epoll, node: &mut Node) {
        let Some(mesh) = &mut node.mesh else { return };
        match &event {
            AgentEvent::KeyConflicts(conflicts) => self.log.warn_of(conflicts),
            AgentEvent::Reflexive { views, .. } => {
                let mappings = nat_mappings(views);
                node.tunnel.set_nat_mappings(mappings, now().mono);
            }
            _ => {}
        }
        match mesh.apply(event) {
            Some(AgentEvent::Changes { revision, changes }) => {
                mesh.revision = revision;
                self.pending.extend(changes);
            }
            // A source of servers' names cannot direct datagrams to arbitrary addresses; the agent gets no
            // answer and tries another server.
            Some(AgentEvent::Send { bytes, to })
                if node.transports.target(to).is_some()
                    || self.rules.may_serve(to, node.sockets.port()) =>
            {
                mesh.note_queried(to);
                node.send_from_port(&bytes, to);
            }
            Some(AgentEvent::Opened(transport)) => node.transports.add(*transport, epoll),
            Some(AgentEvent::CallRequests(keys)) => punch_towards(node, &keys),
            Some(AgentEvent::Relays {
                key,
                addresses,
                proxies,
                present,
            }) => {
                let usable = addresses.into_iter().filter(|at| self.rules.may_be_at(*at));
                // Proxied addresses belong to this host's transports, so the rules do not apply to
                // them.
                let all: Vec<_> = usable.chain(proxies).collect();
                take_relays(node, &key, &all, present);
            }
            Some(AgentEvent::Reached(key)) => {
                let reached = reached(node, &key);
                if let Some(mesh) = &node.mesh {
                    // A request without an answer is repeated.
                    mesh.notify_agent(WorkerEvent::Reached(key, reached));
                }
            }
            _ => {}
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
        epoll.add(&self.agent, TOKEN, Interest::Read)
    }

    fn ready(&mut self, _: u64, epoll: &Epoll, node: &mut Node) -> ControlFlow {
        self.handle_events(epoll, node);
        ControlFlow::Continue
    }
}
