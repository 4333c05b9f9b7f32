//! Reacts to changes of the host's network while a tunnel runs.
//!
//! - After a change of an address or a route, or when a link comes up: the kernel chooses source addresses for
//!   peers anew; a peer with a keepalive, and a member of the mesh with a session, gets a datagram from the new
//!   address at once.
//! - After the removal of an address, a route or a rule of the tunnel: it is restored ([`restore`]).
//! - When a peer that is configured by name does not answer handshakes: its name is resolved again, one name at
//!   a time, in a thread of its own, since a resolver may take half a minute.
//!
//! Changes come in bursts, an address before its routes. The tunnel reacts once a burst has settled, so a busy
//! routing table costs next to nothing.
//!
//! [`NetworkMonitor`] is a [`Service`] of the worker's loop; the thread wakes the loop through a socket pair.

mod lan;
mod restore;

pub use lan::LanMonitor;
pub use restore::Settings;

use crate::network::restore::Restorer;
use crate::node::{Node, resolve};
use crate::system::now;
use crate::worker::{ControlFlow, Service};
use seikan_config::{Config, Endpoint, Host};
use seikan_observe::Handshakes;
use seikan_proto::keys::PublicKey;
use seikan_sys::netlink::{Event, Group, Netlink, NetlinkError, Subscription};
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::timer::Timer;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// Tokens, distinct from those of the control sockets, which count up.
const TOKEN_NETWORK: u64 = 1 << 62;
const TOKEN_NAMES: u64 = TOKEN_NETWORK + 1;
const TOKEN_SETTLED: u64 = TOKEN_NETWORK + 2;
/// Time from the first event of a burst until the tunnel reacts.
const SETTLE: Duration = Duration::from_millis(200);
/// Events read before packets get their turn.
const MAX_EVENTS: usize = 64;
/// Interval between two checks of peers with names: about one handshake retry (`REKEY_TIMEOUT`, 5 s).
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Unanswered initiations after which a name is resolved again.
const UNANSWERED: u64 = 2;

/// Monitors the network for one node.
pub struct NetworkMonitor {
    network: Subscription,
    /// The tunnel's own interface, if it has one, whose changes do not affect the underlay.
    own: Option<u32>,
    /// Runs until a burst has settled.
    settled: Timer,
    settling: bool,
    /// Changes of the current burst.
    burst: Burst,
    /// Absent if the tunnel has no interface.
    restorer: Option<Restorer>,
    names: Vec<NamedPeer>,
    resolver: Option<Resolver>,
}

/// Changes since the last reaction.
#[derive(Clone, Copy, Default)]
struct Burst {
    /// A path to a peer may have changed.
    paths: bool,
    /// A link, and so perhaps an MTU, has changed.
    links: bool,
    /// A setting of the tunnel may have been removed.
    settings: bool,
}

/// A peer that is configured by name.
struct NamedPeer {
    key: PublicKey,
    endpoint: Endpoint,
    /// Handshakes of the peer when its name was last resolved, or when one was last completed.
    seen: Handshakes,
    /// The last result.
    resolved: Option<SocketAddr>,
    /// Resolve it although the peer may be reachable.
    wanted: bool,
    /// The peer did not answer when its name was last resolved.
    lost: bool,
}

/// The thread that resolves names.
struct Resolver {
    wake: UnixStream,
    queries: SyncSender<Query>,
    answers: Receiver<Answer>,
    /// Whether the thread is resolving a name.
    busy: bool,
}

type Query = (PublicKey, Endpoint);
type Answer = (PublicKey, Option<SocketAddr>);

impl NetworkMonitor {
    /// Starts monitoring. `settings` are the addresses, routes and rules that the tunnel has set
    /// up. Must be called after privileges were dropped, since it may start a thread.
    pub fn new(
        config: &Config,
        settings: Settings,
        node: &mut Node,
    ) -> Result<NetworkMonitor, NetworkMonitorError> {
        // Links may have changed since the sockets were opened, for instance by a hook.
        node.follow_tap();
        node.follow_mtu();
        node.limit_datagrams();
        let node = &*node;
        let at = |key: &PublicKey| {
            let peer = node.tunnel.peer(node.tunnel.peer_by_key(key)?)?;
            peer.path.endpoint
        };
        let network =
            Netlink::subscribe(&[Group::Link, Group::Address, Group::Route, Group::Rule])?;
        let named = config.peers.iter().filter_map(|peer| {
            let endpoint = peer.endpoint.as_ref()?;
            matches!(endpoint.host, Host::Name(_)).then(|| NamedPeer {
                key: peer.public_key,
                endpoint: endpoint.clone(),
                seen: Handshakes::default(),
                resolved: at(&peer.public_key),
                wanted: false,
                lost: false,
            })
        });
        let names: Vec<NamedPeer> = named.collect();
        let resolver = if names.is_empty() {
            None
        } else {
            Some(Resolver::start().map_err(NetworkMonitorError::Thread)?)
        };
        Ok(NetworkMonitor {
            network,
            own: node.tun.index(),
            settled: Timer::new().map_err(NetworkMonitorError::Timer)?,
            settling: false,
            burst: Burst::default(),
            restorer: node.tun.index().map(|index| Restorer::new(settings, index)),
            names,
            resolver,
        })
    }

    /// Reads events. The first of a burst starts the timer.
    fn network_changed(&mut self) {
        let own = self.own;
        let is_own = |index: u32| Some(index) == own;
        for _ in 0..MAX_EVENTS {
            // An error of the socket is no event; read the next one.
            let Ok(Some(event)) = self.network.next_event() else {
                break;
            };
            self.burst.links |=
                matches!(event, Event::Link(_) | Event::LinkRemoved(_) | Event::Lost);
            self.burst.paths |= match &event {
                Event::Link(link) => !is_own(link.index) && link.up,
                Event::LinkRemoved(link) => !is_own(link.index),
                Event::Address(address) | Event::AddressRemoved(address) => !is_own(address.index),
                Event::Route(route) | Event::RouteRemoved(route) => {
                    !route.device.is_some_and(is_own)
                }
                Event::RuleRemoved => false,
                Event::Lost => true,
            };
            self.burst.settings |= match &event {
                Event::Link(link) => is_own(link.index),
                Event::AddressRemoved(address) => is_own(address.index),
                Event::RouteRemoved(route) => route.device.is_some_and(is_own),
                Event::RuleRemoved | Event::Lost => true,
                Event::LinkRemoved(_) | Event::Address(_) | Event::Route(_) => false,
            };
        }
        let Burst {
            paths,
            links,
            settings,
        } = self.burst;
        if (paths || links || settings) && !self.settling {
            self.settling = self.settled.set(SETTLE).is_ok();
        }
    }

    /// Reacts to a burst. Links are listed once for all of it: a host with containers has hundreds, each with
    /// several events.
    fn react(&mut self, node: &mut Node) {
        self.settling = false;
        let _ = self.settled.stop();
        let burst = std::mem::take(&mut self.burst);
        if burst.links {
            node.follow_tap();
            node.follow_mtu();
            node.limit_datagrams();
        }
        if let Some(restorer) = &mut self.restorer {
            if burst.settings {
                restorer.check(now().mono);
                node.restorations = restorer.restorations();
            }
            if let Some(at) = restorer.next_check() {
                // Any burst sets the timer anew, and comes here again.
                self.burst.settings = true;
                let _ = self.settled.set(at.duration_since(now().mono));
            }
        }
        if burst.paths {
            forget_sources(node);
            announce_to_members(node);
            self.names.iter_mut().for_each(|named| named.wanted = true);
            self.poll_names(node);
        }
    }

    /// Requests the address of the first peer that does not answer or is marked.
    fn poll_names(&mut self, node: &Node) {
        let Some(resolver) = &mut self.resolver else {
            return;
        };
        for named in &mut self.names {
            let peer = node.tunnel.peer_by_key(&named.key);
            let Some(peer) = peer.and_then(|id| node.tunnel.peer(id)) else {
                continue;
            };
            let handshakes = &peer.counters.handshakes;
            if handshakes.completed > named.seen.completed {
                named.seen = handshakes.clone();
            }
            let unanswered = handshakes.initiations_sent - named.seen.initiations_sent;
            let lost = peer.path.endpoint.is_none() || unanswered >= UNANSWERED;
            if (lost || named.wanted) && !resolver.busy {
                let query = (named.key, named.endpoint.clone());
                resolver.busy = resolver.queries.try_send(query).is_ok();
                named.seen = handshakes.clone();
                (named.wanted, named.lost) = (false, lost);
            }
        }
    }

    /// Applies resolved addresses. A peer that answers from another address has roamed there and keeps it,
    /// unless its name's address has changed.
    fn take_answers(&mut self, node: &mut Node) {
        let Some(resolver) = &mut self.resolver else {
            return;
        };
        let mut drain = [0; 64];
        while matches!(resolver.wake.read(&mut drain), Ok(n) if n > 0) {}
        while let Ok((key, address)) = resolver.answers.try_recv() {
            resolver.busy = false;
            let id = node.tunnel.peer_by_key(&key);
            let named = self.names.iter_mut().find(|named| named.key == key);
            let (Some(id), Some(named), Some(address)) = (id, named, address) else {
                continue;
            };
            let changed = named.resolved.replace(address) != Some(address);
            let before = node.tunnel.peer(id).and_then(|peer| peer.path.endpoint);
            if before != Some(address) && (changed || named.lost) {
                node.tunnel.set_endpoint(id, address);
                announce(node, id);
            }
        }
    }
}

/// Forgets source addresses, so that the kernel chooses one for every peer again.
fn forget_sources(node: &mut Node) {
    let peers = node.tunnel.peers();
    let known: Vec<_> = peers
        .filter_map(|peer| Some((peer.id, peer.path.endpoint?)))
        .collect();
    for (id, endpoint) in known {
        node.tunnel.set_endpoint(id, endpoint);
        announce(node, id);
    }
}

/// Sends members of the mesh a datagram from the new address. They learn the address fastest this
/// way.
fn announce_to_members(node: &mut Node) {
    let Some(mesh) = &node.mesh else { return };
    let members: Vec<_> = mesh.members.keys().copied().collect();
    for key in members {
        if let Some(id) = node.tunnel.peer_by_key(&key) {
            node.tunnel.announce(now(), id, &mut node.outbox);
            node.transmit();
        }
    }
}

/// Sends a keepalive now, if the peer has a persistent keepalive.
fn announce(node: &mut Node, id: seikan_proto::indices::PeerId) {
    let interval = node.tunnel.peer(id).and_then(|p| p.persistent_keepalive());
    if let Some(interval) = interval.filter(|interval| !interval.is_zero()) {
        let now = now().mono;
        node.tunnel
            .set_persistent_keepalive(id, Duration::ZERO, now);
        node.tunnel.set_persistent_keepalive(id, interval, now);
    }
}

impl Service for NetworkMonitor {
    fn start(&mut self, epoll: &Epoll) -> io::Result<()> {
        epoll.add(&self.network, TOKEN_NETWORK, Interest::Read)?;
        epoll.add(&self.settled, TOKEN_SETTLED, Interest::Read)?;
        match &self.resolver {
            Some(resolver) => epoll.add(&resolver.wake, TOKEN_NAMES, Interest::Read),
            None => Ok(()),
        }
    }

    fn ready(&mut self, token: u64, _: &Epoll, node: &mut Node) -> ControlFlow {
        match token {
            TOKEN_NETWORK => self.network_changed(),
            TOKEN_SETTLED => self.react(node),
            TOKEN_NAMES => {
                self.take_answers(node);
                self.poll_names(node);
            }
            _ => {}
        }
        ControlFlow::Continue
    }
}

impl NetworkMonitor {
    /// Whether an event is for this service.
    pub fn owns(token: u64) -> bool {
        matches!(token, TOKEN_NETWORK | TOKEN_NAMES | TOKEN_SETTLED)
    }
}

impl Resolver {
    fn start() -> io::Result<Resolver> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let (queries, received) = sync_channel(1);
        let (answer, answers) = sync_channel(1);
        std::thread::Builder::new()
            .name("names".into())
            .spawn(move || serve(theirs, &received, &answer))?;
        Ok(Resolver {
            wake: ours,
            queries,
            answers,
            busy: false,
        })
    }
}

/// The thread's loop: resolves names, and wakes the worker's loop after each and at every interval. Ends when
/// the other side is dropped.
fn serve(mut wake: UnixStream, queries: &Receiver<Query>, answer: &SyncSender<Answer>) {
    loop {
        match queries.recv_timeout(LOOK_EVERY) {
            Ok((key, endpoint)) => {
                let address = resolve(&endpoint.host, endpoint.port).ok();
                if answer.send((key, address)).is_err() {
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        // If the socket pair is full, the loop wakes anyway.
        let _ = wake.write(&[0]);
    }
}

/// Why the network cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum NetworkMonitorError {
    /// No subscription.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// No timer.
    #[error("cannot create a timer: {0}")]
    Timer(io::Error),
    /// No thread.
    #[error("cannot start the thread that resolves names: {0}")]
    Thread(io::Error),
}
