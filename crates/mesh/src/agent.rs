//! The agent: the thread that talks to the coordinator, STUN servers, relays and the router.
//!
//! Its tasks: long-poll the coordinator for changes (`follow`); learn this host's reflexive addresses by STUN
//! (`reflect`); report this host's endpoints, key and devices (`report`); keep a port mapping at the router (`map`); ask the
//! coordinator to call members that do not answer (`call`); bind relay ports for members without a direct path
//! (`relay`), and allocate at TURN servers (`turn`); answer DNS queries for members' names ([`names`]). A gateway on
//! standby does the last only. All of them
//! retry forever: if a coordinator does not answer, another one of the mesh is used at once; if none does, with growing
//! pauses.

mod follow;
mod reflexive;
mod report;

use crate::cache::{self, KnownError};
use crate::client::Client;
use crate::event::{AgentEvent, Contact, Worker, WorkerEvent};
use crate::names::{self, Found};
use crate::relay::{Relays, Streams};
use crate::shared::{OwnKey, RelayEvent, Shared, Tunnel};
use crate::state::{MeshState, Notifier};
use crate::transport::Waker;
use crate::trust::TrustStore;
use crate::turn::TurnAllocations;
use crate::web_proxy::WebProxies;
use ipnet::IpNet;
use seikan_config::MeshSettings;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::Devices;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Maximum number of events that wait for the worker.
const MAX_AGENT_EVENTS: usize = 16;
/// Maximum number of events that wait for the agent.
const MAX_WORKER_EVENTS: usize = 64;
/// Time that the router has at the end to delete the port mapping.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of unreachable members that wait to be handled.
const MAX_SOUGHT: usize = 64;

/// Parameters of the agent.
pub struct Options<'a> {
    /// The mesh in the configuration.
    pub settings: &'a MeshSettings,
    /// Index of the mesh's interface, if it has one.
    pub interface: Option<u32>,
    /// Addresses of the interface with the mesh's networks.
    pub networks: &'a [IpNet],
    /// Devices behind this host, to be reported; `None` if it is no gateway.
    pub devices: Option<Devices>,
    /// The tunnel's UDP port.
    pub port: u16,
    /// The firewall mark of the tunnel's datagrams.
    pub fwmark: Option<u32>,
    /// This host's public key.
    pub own_key: PublicKey,
    /// The interface's directory of persistent state.
    pub state: &'a Path,
    /// How members are found by name.
    pub names: Found,
    /// Sockets of the name server, if names are on.
    pub name_server: Option<names::Server>,
    /// Whether this host is the member now: no gateway on standby for another one with the same key.
    pub is_active: bool,
    /// The web proxy to coordinators and relays.
    pub web_proxies: WebProxies,
}

/// The worker's handle of the agent.
pub struct Handle {
    wake: UnixStream,
    /// The agent's end, to wake the loop for remaining work.
    wake_again: UnixStream,
    events: Receiver<AgentEvent>,
    thread: JoinHandle<()>,
    port: Arc<AtomicU16>,
    own_key: OwnKey,
    names: names::Names,
}

/// Why the agent cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The thread or its sockets cannot be created.
    #[error("cannot start the mesh agent: {0}")]
    Start(#[from] io::Error),
    /// The known keys cannot be read; without them this host would trust any key.
    #[error(transparent)]
    Known(#[from] KnownError),
}

/// State of the agent in its thread.
struct Agent {
    settings: MeshSettings,
    interface: Option<u32>,
    tunnel: Tunnel,
    /// Devices behind this host; `None` if it is no gateway.
    devices: Option<Devices>,
    /// File of the stored membership.
    cache: PathBuf,
    /// File of the known keys.
    known_file: PathBuf,
    /// The known keys, and the conflicts with them.
    trust_store: tokio::sync::Mutex<TrustStore>,
    /// Names of the members.
    names: names::Names,
    /// The web proxy to coordinators and relays.
    web_proxies: WebProxies,
}

/// Starts the agent; to be called after privileges were dropped. It ends when the handle is dropped.
///
/// # Errors
/// See [`AgentError`].
pub fn start(options: Options<'_>) -> Result<(Handle, MeshState), AgentError> {
    let known_file = cache::known_file(options.state);
    let known = cache::load_known(&known_file)?;
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    let (to_agent, worker_events) = mpsc::channel(MAX_WORKER_EVENTS);
    let (to_activate, active) = watch::channel(options.is_active);
    let (to_worker, events) = sync_channel(MAX_AGENT_EVENTS);
    let port = Arc::new(AtomicU16::new(options.port));
    let own_key = OwnKey::new(options.own_key);
    let coordinator = options.settings.coordinator.to_string();
    let notify = Notifier {
        events: to_agent,
        active: to_activate,
    };
    let state = MeshState::new(
        options.own_key,
        coordinator,
        options.names,
        options.web_proxies.clone(),
        notify,
    );
    let names = names::Names::new(options.networks.to_vec());
    let agent = Agent {
        settings: options.settings.clone(),
        interface: options.interface,
        devices: options.devices,
        tunnel: Tunnel {
            networks: options.networks.to_vec(),
            port: Arc::clone(&port),
            fwmark: options.fwmark,
            own_key: own_key.clone(),
        },
        cache: cache::file(options.state),
        known_file,
        trust_store: tokio::sync::Mutex::new(TrustStore::new(
            options.settings.trust.clone(),
            known,
        )),
        names: names.clone(),
        web_proxies: options.web_proxies,
    };
    let wake_again = theirs.try_clone()?;
    let worker = Worker {
        waker: Waker(Arc::new(theirs)),
        events: to_worker,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let name_server = options.name_server;
    let for_agent = ForAgent {
        worker_events,
        active,
    };
    let thread = std::thread::Builder::new()
        .name("mesh".into())
        .spawn(move || runtime.block_on(agent.run(worker, for_agent, name_server)))?;
    let handle = Handle {
        wake: ours,
        wake_again,
        events,
        thread,
        port,
        own_key,
        names,
    };
    Ok((handle, state))
}

impl Handle {
    /// Publishes the tunnel's current port and key to the agent.
    pub fn publish(&self, port: u16, own_key: PublicKey) {
        self.port.store(port, Ordering::Relaxed);
        self.own_key.set(own_key);
    }

    /// Returns the names of the members, which follow the membership.
    pub fn names(&self) -> names::Names {
        self.names.clone()
    }

    /// Consumes wakeups; to be called before the events are read.
    pub fn clear_wakeups(&mut self) {
        let mut drain = [0; 64];
        while matches!(self.wake.read(&mut drain), Ok(n) if n > 0) {}
    }

    /// Wakes the loop again, for remaining work.
    pub fn wake_again(&self) {
        // If the socket pair is full, the loop wakes anyway.
        let _ = (&self.wake_again).write(&[0]);
    }

    /// Returns the next event.
    ///
    /// # Errors
    /// There is none now, or the agent has ended.
    pub fn next_event(&self) -> Result<AgentEvent, TryRecvError> {
        self.events.try_recv()
    }

    /// Stops the agent, which gets a moment to delete its port mapping. The [`MeshState`] must be dropped before.
    pub fn stop(self) {
        drop(self.events);
        let deadline = Instant::now() + SHUTDOWN_PATIENCE + Duration::from_millis(100);
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Input of the agent from the worker.
struct ForAgent {
    worker_events: mpsc::Receiver<WorkerEvent>,
    /// Whether this host is the member now.
    active: watch::Receiver<bool>,
}

impl Agent {
    async fn run(self, worker: Worker, events: ForAgent, name_server: Option<names::Server>) {
        let ForAgent {
            mut worker_events,
            mut active,
        } = events;
        let (relay_events, mut for_relays) = mpsc::channel(MAX_SOUGHT);
        let shared = Shared::new(worker, self.tunnel.clone(), relay_events);
        let client = match Client::new(
            &self.settings.coordinator,
            self.settings.pin,
            Some(self.settings.credential.clone()),
            self.web_proxies.clone(),
        ) {
            Ok(client) => client,
            Err(error) => {
                let _ = shared.send(AgentEvent::Contact(Contact::Lost(error.to_string())));
                // This host's other names may depend on the name server.
                return names::serve(name_server, self.names).await;
            }
        };
        shared.membership.replace(cache::load(&self.cache));
        client.set_others(shared.membership.borrow().coordinators());
        let work = async {
            // The active gateway of two has the same key and credential: only one of them is the member.
            while active.wait_for(|active| *active).await.is_ok() {
                tokio::select! {
                    () = self.work(&client, &shared, (&mut worker_events, &mut for_relays)) => return,
                    // The guard must not last: the worker would wait for it.
                    () = async { drop(active.wait_for(|active| !*active).await) } => give_back(&shared).await,
                }
            }
        };
        tokio::select! {
            () = work => {}
            () = names::serve(name_server, self.names.clone()) => {}
        }
        give_back(&shared).await;
    }

    /// Is the member, until the worker ends.
    async fn work(
        &self,
        client: &Client,
        shared: &Shared,
        (worker_events, for_relays): (
            &mut mpsc::Receiver<WorkerEvent>,
            &mut mpsc::Receiver<RelayEvent>,
        ),
    ) {
        let (sought, to_call) = mpsc::channel(MAX_SOUGHT);
        let turn = TurnAllocations::new(shared);
        let streams = Streams::new(shared, &self.web_proxies);
        let relays = Relays::new(shared, &turn, &streams);
        let dispatch = async {
            // An event that does not fit into the queue is repeated by its source.
            while let Some(event) = worker_events.recv().await {
                match event {
                    WorkerEvent::Stun(bytes) => shared.stun_requests.answered(bytes),
                    WorkerEvent::Sought { key, lost, calls } => {
                        if calls {
                            let _ = sought.try_send(key);
                        }
                        shared.notify_relays(RelayEvent::Sought(key));
                        if lost {
                            shared.path_lost.notify_one();
                        }
                    }
                    WorkerEvent::Reached(key, reached) => {
                        shared.notify_relays(RelayEvent::Reached(key, reached));
                    }
                }
            }
        };
        // The first task that ends has found that the worker has ended.
        tokio::select! {
            _ = self.follow(client, shared) => {}
            _ = self.report(client, shared) => {}
            _ = self.reflect(shared) => {}
            _ = self.map(shared) => {}
            _ = relays.run(for_relays) => {}
            _ = turn.run() => {}
            _ = streams.run() => {}
            _ = self.call(client, to_call) => {}
            () = dispatch => {}
        }
    }
}

/// Deletes the port mapping at the router.
async fn give_back(shared: &Shared) {
    let lease = shared.lease.take();
    if let Some(lease) = lease {
        let _ = tokio::time::timeout(SHUTDOWN_PATIENCE, lease.give_back()).await;
    }
}
