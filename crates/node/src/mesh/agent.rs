//! The agent: the thread that talks to the coordinator, STUN servers, relays and the router.
//!
//! Its tasks: long-poll the coordinator for changes ([`Agent::follow`]); learn this host's reflexive addresses
//! by STUN ([`Agent::reflect`]); report this host's endpoints and key ([`Agent::report`]); keep a port mapping
//! at the router ([`Agent::map`]); ask the coordinator to call members that do not answer ([`Agent::call`]);
//! bind relay ports for members without a direct path ([`super::relay`]), and allocate at TURN servers
//! ([`super::turn`]); answer DNS queries for members' names ([`names::serve`]). All of them retry forever: if a
//! coordinator does not answer, another one of the mesh is used at once; if none does, with growing pauses.

mod follow;
mod outside;
mod tell;

use super::client::Client;
use super::known::{KeyConflicts, Known};
use super::proxies::Counters;
use super::mapping::{Held, Mapping};
use super::relay::{Relays, Streams, RelayEvent};
use super::stun::PendingRequests;
use super::turn::TurnAllocations;
use super::{Contact, WorkerEvent, OwnKey, names};
use ipnet::IpNet;
use seikan_config::MeshSettings;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Change, Membership};
use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// First pause after a failure; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Maximum number of events that wait for the worker.
const MAX_EVENTS: usize = 16;
/// Time that the router has at the end to delete the port mapping.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);
/// Maximum number of unreachable members that wait to be handled.
const MAX_SOUGHT: usize = 64;

/// Event of the agent for the worker.
#[derive(Debug)]
pub(super) enum AgentEvent {
    /// State of the coordinator.
    Contact(Contact),
    /// URL of the coordinator that answers.
    Coordinator(String),
    /// Changed members or allowances.
    Changes {
        /// Revision after these changes.
        revision: u64,
        /// To be applied in this order.
        changes: Vec<Change>,
    },
    /// Changed conflicts of members' keys.
    KeyConflicts(KeyConflicts),
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
        /// Proxy sockets of this host that lead to it.
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
        /// How it answers, or why it does not.
        state: Result<Answers, String>,
    },
    /// A proxy socket was opened or closed.
    Leg {
        /// Its loopback address.
        local: SocketAddr,
        /// Its target; `None` if it was closed.
        to: Option<ProxyTarget>,
    },
    /// A relay is connected over TLS.
    Stream(String),
    /// Counters of that connection.
    Streamed {
        /// Address of the relay.
        address: String,
        /// Totals of the connection.
        counters: Box<Counters>,
    },
    /// The connection was closed.
    StreamEnded(String),
    /// There is an allocation at a TURN server.
    Turn {
        /// Address of the server.
        address: String,
        /// The relayed address.
        relayed: SocketAddr,
        /// Transport to the server.
        transport: &'static str,
    },
    /// Counters of the allocation.
    Turned {
        /// Address of the server.
        address: String,
        /// Totals of the allocation.
        counters: Box<Counters>,
    },
    /// The allocation has ended.
    TurnEnded(String),
    /// The worker must publish its current port and key.
    Tick,
}

/// Answer of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answers {
    /// Time until the answer.
    pub rtt: Duration,
    /// Over TLS, because it does not answer over UDP.
    pub by_tls: bool,
}

impl Answers {
    /// Over UDP, or of a TURN server.
    pub(super) fn after(rtt: Duration) -> Answers {
        let by_tls = false;
        Answers { rtt, by_tls }
    }
}

/// Target of a proxy socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProxyTarget {
    /// A peer of an allocation at a TURN server.
    Turn {
        /// Address of the server.
        server: String,
        /// Address of the peer.
        to: SocketAddr,
    },
    /// A port of a relay, over TLS; 0 is its main port.
    Relay {
        /// Address of the relay as configured.
        relay: String,
        /// IP address of the relay, and the port.
        to: SocketAddr,
    },
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

impl View {
    fn none(name: String, server: SocketAddr) -> View {
        View {
            name,
            server,
            seen: None,
            rtt: None,
        }
    }
}

/// Parameters and state of the agent.
pub(super) struct Agent {
    pub settings: MeshSettings,
    /// The mesh's interface.
    pub own_interface: u32,
    /// Addresses of the interface with the mesh's networks.
    pub networks: Vec<IpNet>,
    /// The tunnel's UDP port.
    pub port: Arc<AtomicU16>,
    /// The firewall mark of the tunnel's datagrams.
    pub fwmark: Option<u32>,
    /// File of the stored membership.
    pub cache: PathBuf,
    /// File of the known keys.
    pub known: PathBuf,
    /// The known keys as loaded; taken once.
    pub remembered: Cell<Known>,
    /// This host's public key.
    pub own_key: OwnKey,
    /// Names of the members.
    pub names: names::Names,
    /// Sockets of the name server, if names are on.
    pub name_server: Option<names::Server>,
}

/// Sender of events to the worker. After an error, the sending task ends.
pub(super) struct Worker {
    wake: UnixStream,
    events: SyncSender<AgentEvent>,
}

/// The worker has ended.
#[derive(Debug)]
pub(super) struct Gone;

impl Worker {
    pub(super) fn tell(&self, events: AgentEvent) -> Result<(), Gone> {
        self.events.send(events).map_err(|_| Gone)?;
        // If the socket pair is full, the loop wakes anyway.
        let _ = (&self.wake).write(&[0]);
        Ok(())
    }
}

impl Agent {
    /// Starts the thread; it ends when the receiver is dropped.
    pub(super) fn start(
        self,
        wake: UnixStream,
        worker_events: mpsc::Receiver<WorkerEvent>,
    ) -> io::Result<(Receiver<AgentEvent>, JoinHandle<()>)> {
        let (events, receiver) = sync_channel(MAX_EVENTS);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let worker = Worker { wake, events };
        let thread = std::thread::Builder::new()
            .name("mesh".into())
            .spawn(move || runtime.block_on(self.live(worker, worker_events)))?;
        Ok((receiver, thread))
    }

    async fn live(mut self, worker: Worker, mut worker_events: mpsc::Receiver<WorkerEvent>) {
        let name_server = self.name_server.take();
        let client = match Client::new(
            &self.settings.coordinator,
            self.settings.pin,
            Some(self.settings.credential.clone()),
        ) {
            Ok(client) => client,
            Err(error) => {
                let _ = worker.tell(AgentEvent::Contact(Contact::Lost(error.to_string())));
                // This host's other names may depend on the name server.
                return names::serve(name_server, self.names).await;
            }
        };
        let (relay_events, relay_events_receiver) = mpsc::channel(MAX_SOUGHT);
        let shared = Shared::new(relay_events);
        let (sought, seeking) = mpsc::channel(MAX_SOUGHT);
        let networks = self.networks.clone();
        let own_key = self.own_key.clone();
        let turn_allocations = TurnAllocations::new(
            own_key.get(),
            &worker,
            &shared,
            &networks,
            self.port.clone(),
            self.fwmark,
        );
        let streams = Streams::new(&worker, &networks, self.port.clone());
        let relays = Relays::new(own_key, &worker, &shared, &turn_allocations, &streams);
        let sort = async {
            // An event that does not fit into the queue is repeated by its source.
            while let Some(worker_events) = worker_events.recv().await {
                match worker_events {
                    WorkerEvent::Stun(bytes) => shared.stun_requests.answered(bytes),
                    WorkerEvent::Sought { key, lost } => {
                        let _ = sought.try_send(key);
                        shared.notify_relays(RelayEvent::Sought(key));
                        if lost {
                            shared.lost.notify_one();
                        }
                    }
                    WorkerEvent::Reached(key, reached) => shared.notify_relays(RelayEvent::Reached(key, reached)),
                }
            }
        };
        // The first task that ends has found that the worker has ended.
        tokio::select! {
            _ = self.follow(&client, &worker, &shared) => {}
            _ = self.tell(&client, &worker, &shared) => {}
            _ = self.reflect(&worker, &shared) => {}
            _ = self.map(&worker, &shared) => {}
            _ = relays.keep(relay_events_receiver) => {}
            _ = turn_allocations.keep() => {}
            _ = streams.keep() => {}
            _ = self.call(&client, seeking) => {}
            () = sort => {}
            () = names::serve(name_server, self.names.clone()) => {}
        }
        let lease = shared.lease.take();
        if let Some(lease) = lease {
            let _ = tokio::time::timeout(LAST_WORDS, lease.give_back()).await;
        }
    }
}

/// State shared by the tasks.
pub(super) struct Shared {
    /// Reflexive addresses of this host.
    reflexive: RefCell<Vec<SocketAddr>>,
    /// Relayed addresses of this host at TURN servers.
    pub relayed: RefCell<Vec<SocketAddr>>,
    /// Signals that the endpoints to report have changed.
    pub different: Notify,
    /// Signals that the reflexive addresses have changed.
    outside: Notify,
    /// The port mapping at the router, and its reported state.
    lease: RefCell<Option<Held>>,
    mapped: RefCell<Option<Result<Mapping, String>>>,
    /// Signals that this host's own addresses or its relays have changed.
    moved: Notify,
    /// Signals that requests sent from former addresses may never be answered.
    elsewhere: Notify,
    /// Signals that a path to a member was lost.
    lost: Notify,
    /// Everything has to be reported again.
    report_again: Cell<bool>,
    /// STUN requests that wait for an answer.
    pub stun_requests: PendingRequests,
    /// The members, and the mesh's relays with this host's tickets.
    pub membership: RefCell<Membership>,
    relay_events: mpsc::Sender<RelayEvent>,
}

impl Shared {
    fn new(relay_events: mpsc::Sender<RelayEvent>) -> Shared {
        Shared {
            reflexive: RefCell::default(),
            relayed: RefCell::default(),
            different: Notify::new(),
            outside: Notify::new(),
            lease: RefCell::default(),
            mapped: RefCell::default(),
            moved: Notify::new(),
            elsewhere: Notify::new(),
            lost: Notify::new(),
            report_again: Cell::new(false),
            stun_requests: PendingRequests::default(),
            membership: RefCell::default(),
            relay_events,
        }
    }

    /// Stores new reflexive addresses.
    fn see(&self, seen: Vec<SocketAddr>) {
        if *self.reflexive.borrow() != seen {
            self.reflexive.replace(seen);
            self.different.notify_one();
            self.outside.notify_one();
        }
    }

    /// Passes an event to the task of relays. One that does not fit into the queue is repeated by its source.
    pub(super) fn notify_relays(&self, notify_relays: RelayEvent) {
        let _ = self.relay_events.try_send(notify_relays);
    }
}

/// Growing pauses with up to 50 % random extension, so that members that lose a coordinator together do not
/// return together.
#[derive(Default)]
pub(super) struct Pause(u32);

impl Pause {
    pub(super) async fn wait(&mut self) {
        let pause = (FIRST_PAUSE * (1 << self.0)).min(LONGEST_PAUSE);
        self.0 = (self.0 + 1).min(7);
        let mut chance = [0];
        // Without randomness the pauses only lack the extension.
        let _ = seikan_sys::random::fill(&mut chance);
        tokio::time::sleep(pause + pause * u32::from(chance[0]) / 512).await;
    }
}
