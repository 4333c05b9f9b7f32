//! State shared by the agent's tasks.

use crate::event::{AgentEvent, Gone, Worker};
use crate::mapping::{Lease, Mapping};
use crate::stun::PendingRequests;
use ipnet::IpNet;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::Membership;
use seikan_proto::tunnel::Reachability;
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// First pause after a failure; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Parameters of the tunnel.
#[derive(Clone)]
pub(crate) struct Tunnel {
    /// Addresses of the mesh's interface with the mesh's networks.
    pub networks: Vec<IpNet>,
    /// The UDP port.
    pub port: Arc<AtomicU16>,
    /// The firewall mark of its datagrams.
    pub fwmark: Option<u32>,
    /// This host's public key.
    pub own_key: OwnKey,
}

/// State shared by the tasks.
pub(crate) struct Shared {
    pub worker: Worker,
    pub tunnel: Tunnel,
    /// Reflexive addresses of this host.
    pub reflexive: RefCell<Vec<SocketAddr>>,
    /// Relayed addresses of this host at TURN servers.
    pub relayed: RefCell<Vec<SocketAddr>>,
    /// Signals that the endpoints to report have changed.
    pub endpoints_changed: Notify,
    /// Signals that the reflexive addresses have changed.
    pub reflexive_changed: Notify,
    /// The port mapping at the router.
    pub lease: RefCell<Option<Lease>>,
    /// Its reported state.
    pub mapped: RefCell<Option<Result<Mapping, String>>>,
    /// Signals that this host's own addresses or its relays have changed.
    pub moved: Notify,
    /// Signals that requests sent from former addresses may never be answered.
    pub connections_stale: Notify,
    /// Signals that a path to a member was lost.
    pub path_lost: Notify,
    /// Everything has to be reported again.
    pub report_again: Cell<bool>,
    /// STUN requests that wait for an answer.
    pub stun_requests: PendingRequests,
    /// The members, and the mesh's relays with this host's tickets.
    pub membership: RefCell<Membership>,
    relay_events: mpsc::Sender<RelayEvent>,
}

/// Event for the task of relays.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RelayEvent {
    /// A member does not answer, or tries to reach this host.
    Sought(PublicKey),
    /// A member's relayed addresses may have changed.
    Moved(PublicKey),
    /// How a member is reached: the answer to a request.
    Reached(PublicKey, Reachability),
}

impl Shared {
    pub fn new(worker: Worker, tunnel: Tunnel, relay_events: mpsc::Sender<RelayEvent>) -> Shared {
        Shared {
            worker,
            tunnel,
            reflexive: RefCell::default(),
            relayed: RefCell::default(),
            endpoints_changed: Notify::new(),
            reflexive_changed: Notify::new(),
            lease: RefCell::default(),
            mapped: RefCell::default(),
            moved: Notify::new(),
            connections_stale: Notify::new(),
            path_lost: Notify::new(),
            report_again: Cell::new(false),
            stun_requests: PendingRequests::default(),
            membership: RefCell::default(),
            relay_events,
        }
    }

    /// Sends an event to the worker.
    pub fn send(&self, event: AgentEvent) -> Result<(), Gone> {
        self.worker.send(event)
    }

    /// Stores new reflexive addresses.
    pub fn set_reflexive(&self, seen: Vec<SocketAddr>) {
        if *self.reflexive.borrow() != seen {
            self.reflexive.replace(seen);
            self.endpoints_changed.notify_one();
            self.reflexive_changed.notify_one();
        }
    }

    /// Passes an event to the task of relays. One that does not fit into the queue is repeated by its source.
    pub fn notify_relays(&self, event: RelayEvent) {
        let _ = self.relay_events.try_send(event);
    }
}

impl Tunnel {
    /// Returns the current UDP port.
    pub fn current_port(&self) -> u16 {
        self.port.load(Ordering::Relaxed)
    }

    /// Whether an address is inside the mesh: it is reached through the tunnel, and cannot carry it.
    pub fn has_inside(&self, at: &SocketAddr) -> bool {
        let ip = at.ip().to_canonical();
        self.networks.iter().any(|net| net.contains(&ip))
    }
}

/// This host's public key, shared by the worker and the agent.
#[derive(Clone, Debug)]
pub(crate) struct OwnKey(Arc<Mutex<PublicKey>>);

impl OwnKey {
    pub fn new(key: PublicKey) -> OwnKey {
        OwnKey(Arc::new(Mutex::new(key)))
    }

    pub fn get(&self) -> PublicKey {
        // A key is written in one piece.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set(&self, key: PublicKey) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = key;
    }
}

/// Growing pauses with up to 50 % random extension, so that members that lose a coordinator together do not return
/// together.
#[derive(Default)]
pub(crate) struct Pause(u32);

impl Pause {
    pub async fn wait(&mut self) {
        let pause = (FIRST_PAUSE * (1 << self.0)).min(LONGEST_PAUSE);
        self.0 = (self.0 + 1).min(7);
        let mut chance = [0];
        // Without randomness the pauses only lack the extension.
        let _ = seikan_sys::random::fill(&mut chance);
        tokio::time::sleep(pause + pause * u32::from(chance[0]) / 512).await;
    }
}
