//! State of the mesh as the daemon knows it from the agent's events.

use crate::event::{AgentEvent, Contact, RelayAnswer, View, WorkerEvent};
use crate::mapping::Mapping;
use crate::names::Found;
use crate::trust::KeyConflicts;
use crate::web_proxy::WebProxies;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Access, MAX_RELAYS, Member, Receivers};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;
use tokio::sync::watch;
use tracing::{info, warn};

/// Target of log events of the mesh.
pub const LOG: &str = "mesh";
/// Maximum number of servers whose STUN answers are accepted: two relays for each pair, and some more.
const MAX_QUERIED: usize = 2048;
/// Time after a request for which answers of the server are accepted.
const ANSWERS_ACCEPTED_FOR: Duration = Duration::from_secs(60);

/// State of the mesh.
#[derive(Debug)]
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
    /// This host and the devices behind it, grouped by `access`.
    pub receivers: Receivers,
    /// Members that cannot be peers, with the reason.
    pub refused: BTreeMap<PublicKey, &'static str>,
    /// Members that were refused because of their keys, and those accepted with changed keys.
    pub key_conflicts: KeyConflicts,
    /// Why the coordinator has refused the devices behind this host; `None` if it has not.
    pub devices_refused: Option<String>,
    /// Reflexive addresses of this host.
    pub reflexive: Vec<SocketAddr>,
    /// Latest result of each STUN server.
    pub views: Vec<View>,
    /// State of the port mapping: the mapping, or why there is none; `None` if none is needed.
    pub mapped: Option<Result<Mapping, String>>,
    /// Relays in use by address: how each answers, or why it does not.
    pub relays: BTreeMap<String, Result<RelayAnswer, String>>,
    /// How members are found by name.
    pub names: Found,
    /// The web proxy to coordinators and relays.
    pub web_proxies: WebProxies,
    /// STUN servers and relays with the time of the last request; answers of others are not accepted.
    queried: BTreeMap<SocketAddr, Instant>,
    agent: Notifier,
}

/// Notifies the agent.
#[derive(Clone, Debug)]
pub(crate) struct Notifier {
    pub events: Sender<WorkerEvent>,
    pub active: watch::Sender<bool>,
}

impl MeshState {
    /// The state before the first event of the agent, which receives events by `agent`.
    pub(crate) fn new(
        own_key: PublicKey,
        coordinator: String,
        names: Found,
        web_proxies: WebProxies,
        agent: Notifier,
    ) -> MeshState {
        MeshState {
            own_key,
            coordinator,
            contact: Contact::Starting,
            revision: 0,
            members: BTreeMap::new(),
            access: Access::default(),
            receivers: Receivers::default(),
            refused: BTreeMap::new(),
            key_conflicts: KeyConflicts::default(),
            devices_refused: None,
            reflexive: Vec::new(),
            views: Vec::new(),
            mapped: None,
            relays: BTreeMap::new(),
            names,
            web_proxies,
            queried: BTreeMap::new(),
            agent,
        }
    }

    /// Passes an event to the agent. One that does not fit into the queue is lost, and repeated by its source.
    pub fn notify_agent(&self, event: WorkerEvent) {
        let _ = self.agent.events.try_send(event);
    }

    /// Makes this host the member, or leaves that to the other one of two gateways.
    pub fn set_active(&self, is_active: bool) {
        self.agent.active.send_replace(is_active);
    }

    /// Whether answers of a STUN server or relay are accepted.
    pub fn is_queried(&self, server: &SocketAddr) -> bool {
        self.queried.contains_key(server)
    }

    /// Returns the servers whose answers are accepted.
    pub fn queried(&self) -> impl Iterator<Item = SocketAddr> {
        self.queried.keys().copied()
    }

    /// Accepts answers of a server for a while.
    pub fn note_queried(&mut self, server: SocketAddr) {
        if self.queried.len() >= MAX_QUERIED {
            self.queried
                .retain(|_, at| at.elapsed() < ANSWERS_ACCEPTED_FOR);
        }
        if self.queried.len() < MAX_QUERIED {
            self.queried.insert(server, Instant::now());
        }
    }

    /// Applies an event to the state. Returns it if the tunnel is concerned as well.
    pub fn apply(&mut self, event: AgentEvent) -> Option<AgentEvent> {
        self.log_changes(&event);
        match event {
            AgentEvent::Contact(contact) => self.contact = contact,
            AgentEvent::Coordinator(url) => self.coordinator = url,
            AgentEvent::KeyConflicts(conflicts) => self.key_conflicts = conflicts,
            AgentEvent::DevicesReported { refusal } => self.devices_refused = refusal,
            AgentEvent::Reflexive { addresses, views } => {
                self.reflexive = addresses;
                self.views = views;
            }
            AgentEvent::Mapped(state) => self.mapped = state,
            AgentEvent::Relay { address, state } => {
                if self.relays.len() >= MAX_RELAYS && !self.relays.contains_key(&address) {
                    self.relays.clear();
                }
                self.relays.insert(address, state);
            }
            AgentEvent::Tick => {}
            other => return Some(other),
        }
        None
    }

    /// Logs the parts of an event that change the state.
    fn log_changes(&self, event: &AgentEvent) {
        match event {
            AgentEvent::Contact(contact) if *contact != self.contact => match contact {
                Contact::Starting => {}
                Contact::Connected => info!(target: LOG, "coordinator answers"),
                Contact::Lost(reason) => warn!(target: LOG, ?reason, "coordinator does not answer"),
                Contact::Revoked => warn!(target: LOG, "this host was removed from the mesh"),
            },
            AgentEvent::Coordinator(url) if *url != self.coordinator => {
                info!(target: LOG, ?url, "switched to another coordinator");
            }
            AgentEvent::DevicesReported {
                refusal: Some(reason),
            } if self.devices_refused.as_ref() != Some(reason) => {
                warn!(target: LOG, ?reason, "coordinator refused the devices of this host");
            }
            AgentEvent::Reflexive { addresses, .. } if *addresses != self.reflexive => {
                info!(target: LOG, ?addresses, "public addresses of this host changed");
            }
            AgentEvent::Mapped(state) if *state != self.mapped => match state {
                Some(Ok(mapping)) => {
                    info!(target: LOG, address = %mapping.address, "router maps a port to this host");
                }
                Some(Err(reason)) => info!(target: LOG, ?reason, "router maps no port"),
                None => {}
            },
            AgentEvent::Relay { address, state } => {
                let before = self.relays.get(address).map(Result::is_ok);
                match state {
                    Ok(answer) if before != Some(true) => {
                        info!(target: LOG, ?address, by_tls = answer.by_tls, "relay answers");
                    }
                    Err(reason) if before != Some(false) => {
                        warn!(target: LOG, ?address, ?reason, "relay does not answer");
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
}
