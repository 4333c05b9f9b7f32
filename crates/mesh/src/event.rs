//! Events between the agent and the worker, and the values in them.

use crate::mapping::Mapping;
use crate::transport::{Transport, Waker};
use crate::trust::KeyConflicts;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::Change;
use seikan_proto::tunnel::Reachability;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

/// Event of the agent for the worker.
#[derive(Debug)]
pub enum AgentEvent {
    /// State of the coordinator.
    Contact(Contact),
    /// URL of the coordinator that answers.
    Coordinator(String),
    /// Changed members or allowances.
    Changes {
        /// Revision after these changes.
        revision: u64,
        /// Changes of the membership, to be applied in this order.
        changes: Vec<Change>,
    },
    /// Changed conflicts of members' keys.
    KeyConflicts(KeyConflicts),
    /// The coordinator has received the names of the devices behind this host.
    DevicesReported {
        /// Why it has refused them; `None` if it has not.
        refusal: Option<String>,
    },
    /// Reflexive addresses of this host.
    Reflexive {
        /// Addresses reported to others.
        addresses: Vec<SocketAddr>,
        /// Result of each STUN server.
        views: Vec<View>,
    },
    /// State of the port mapping: the mapping, or why there is none; `None` if none is needed.
    Mapped(Option<Result<Mapping, String>>),
    /// Send a datagram from the tunnel's socket.
    Send {
        /// Its payload.
        bytes: Vec<u8>,
        /// Its destination.
        to: SocketAddr,
    },
    /// These members try to reach this host.
    CallRequests(Vec<PublicKey>),
    /// Relayed addresses of a member.
    Relays {
        /// The member.
        key: PublicKey,
        /// Ports of relays that the member shares with this host, and its addresses at TURN servers.
        addresses: Vec<SocketAddr>,
        /// Proxied addresses that lead to it.
        proxies: Vec<SocketAddr>,
        /// The member is bound at one of them already: start punching.
        present: bool,
    },
    /// Report how a member is reached.
    Reached(PublicKey),
    /// State of a relay.
    Relay {
        /// Its address.
        address: String,
        /// How the relay answers, or why it does not.
        state: Result<RelayAnswer, String>,
    },
    /// A new transport for the worker's loop.
    Opened(Box<Transport>),
    /// The worker must publish its current port and key.
    Tick,
}

/// Event of the worker for the agent. The worker never waits: an event that does not fit into the queue is repeated.
#[derive(Debug)]
pub enum WorkerEvent {
    /// An answer of a STUN server or relay.
    Stun(Box<[u8]>),
    /// A member does not answer.
    Sought {
        /// The member.
        key: PublicKey,
        /// Whether the member was reached before, so that its path is lost.
        lost: bool,
        /// Whether to have the coordinator call it.
        calls: bool,
    },
    /// How a member is reached: the answer to a request.
    Reached(PublicKey, Reachability),
}

/// State of the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Contact {
    /// The coordinator was not contacted yet.
    Starting,
    /// The coordinator answers.
    Connected,
    /// The coordinator does not answer, for this reason. The last known members are used.
    Lost(String),
    /// The coordinator no longer knows this host as a member.
    Revoked,
}

/// Answer of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayAnswer {
    /// Time until the answer.
    pub rtt: Duration,
    /// Whether the relay answered over TLS, because it does not answer over UDP.
    pub by_tls: bool,
}

/// Result of one STUN server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Its name in the configuration or at the coordinator.
    pub name: String,
    /// The address that was queried.
    pub server: SocketAddr,
    /// Reflexive address of this host; `None` if the server does not answer.
    pub seen: Option<SocketAddr>,
    /// Round trip of the request.
    pub rtt: Option<Duration>,
}

/// Sender of events to the worker. After an error, the sending task ends.
pub(crate) struct Worker {
    pub waker: Waker,
    pub events: SyncSender<AgentEvent>,
}

/// The worker has ended.
#[derive(Debug)]
pub(crate) struct Gone;

impl Worker {
    pub fn send(&self, event: AgentEvent) -> Result<(), Gone> {
        self.events.send(event).map_err(|_| Gone)?;
        self.waker.wake();
        Ok(())
    }
}
