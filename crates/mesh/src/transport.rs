//! Proxied transports: connections to servers that forward between the tunnel and peers that its
//! own sockets do not reach. The server is a relay, over TLS, or a TURN server with an allocation.
//!
//! The agent opens a [`Transport`], keeps a handle to set its requirements, and follows the
//! transport's state. The worker owns all [`Transports`] in its event loop: no call blocks, and no
//! thread is involved. The tunnel knows each peer behind a server by an address of
//! [`seikan_proto::proxied`].

pub(crate) mod allocation;
mod ended;
pub(crate) mod link;
mod proxied;
pub(crate) mod stream;

pub(crate) use ended::Ended;
use link::Link;
pub use proxied::Counters;
use proxied::Peers;
use seikan_observe::DropReason;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::Datagram;
use seikan_sys::clock;
use seikan_sys::poll::Epoll;
use seikan_sys::udp::ReceiveBatch;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::Chunks;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Maximum time between two polls of a transport.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Lowest token of a transport in the event loop; tokens are below twice this value.
const FIRST_TOKEN: u64 = 1 << 60;

/// Returns the time of the clock that the worker passes to [`Transports`].
pub(crate) fn now() -> Instant {
    Instant::from_nanos(clock::monotonic().as_nanos() as u64)
}

/// The agent's requirements for a transport.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Addresses behind the server that the tunnel sends to first.
    pub peers: BTreeSet<SocketAddr>,
    /// Hosts that may send to the allocation at a TURN server.
    pub permitted: BTreeSet<IpAddr>,
}

/// State of a transport as the agent sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// Address of the relay, or relayed address of the allocation; `None` until the server has
    /// answered.
    pub serves: Option<SocketAddr>,
    /// Addresses of peers behind the server, each with the tunnel's address for it.
    pub peers: BTreeMap<SocketAddr, SocketAddr>,
    /// Why the transport has ended, as a text for the user.
    pub ended: Option<String>,
}

/// The agent's handle of a transport. Dropping it ends the transport.
pub(crate) struct Handle {
    // Dropped before `waker`, so that the woken loop finds the channel closed.
    wanted: watch::Sender<Wanted>,
    waker: Waker,
}

/// Wakes the worker's loop, also when dropped.
#[derive(Clone)]
pub(crate) struct Waker(pub Arc<UnixStream>);

impl Waker {
    pub(crate) fn wake(&self) {
        // If the buffer of the socket pair is full, the loop has been woken already.
        let _ = (&*self.0).write(&[0]);
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        self.wake();
    }
}

impl Handle {
    /// Sets the requirements.
    pub(crate) fn set(&self, wanted: Wanted) {
        let changed = self.wanted.send_if_modified(|now| {
            let changed = *now != wanted;
            *now = wanted;
            changed
        });
        if changed {
            self.waker.wake();
        }
    }
}

/// The protocol of a server.
trait Server: fmt::Debug + Send {
    /// Name of the transport protocol to a TURN server; `None` for a relay.
    fn turn(&self) -> Option<&'static str>;

    /// Applies the requirements and handles timers. Returns the time of the next timer.
    fn poll(&mut self, core: &mut Core, now: Instant) -> Result<Instant, Ended>;

    /// Handles a message of the server, and adds the datagram in it, if any, for the tunnel.
    fn receive(&mut self, core: &mut Core, now: Instant, message: &mut Message<'_>);

    /// Queues datagrams from the tunnel to a peer.
    fn send(&mut self, core: &mut Core, now: Instant, to: SocketAddr, datagrams: Chunks<'_, u8>);

    /// Returns the reason to report when the connection is lost with this error.
    fn lost(&self, error: std::io::Error) -> Ended;

    /// Tells the server that this end leaves.
    fn leave(&mut self, _: &mut Core, _: Instant) {}
}

/// A received message.
struct Message<'a> {
    arena: &'a mut [u8],
    range: Range<usize>,
    arrived: &'a mut Vec<Datagram>,
}

impl Message<'_> {
    fn bytes(&self) -> &[u8] {
        self.arena.get(self.range.clone()).unwrap_or_default()
    }

    /// Passes a part of the arena to the tunnel, as a datagram from `source`.
    fn deliver(&mut self, core: &mut Core, source: SocketAddr, range: Range<usize>) {
        core.counters.received += 1;
        self.arrived.push(Datagram {
            source,
            destination: None,
            traffic_class: 0,
            segment_size: range.len(),
            range,
            truncated: false,
        });
    }
}

/// State that all servers share.
#[derive(Debug)]
struct Core {
    link: Link,
    peers: Peers,
    counters: Counters,
    wanted: watch::Receiver<Wanted>,
    state: watch::Sender<State>,
}

impl Core {
    /// Returns the requirements if they have changed.
    fn changed(&mut self) -> Result<Option<Wanted>, Ended> {
        match self.wanted.has_changed() {
            Ok(true) => Ok(Some(self.wanted.borrow_and_update().clone())),
            Ok(false) => Ok(None),
            Err(_) => Err(Ended::Unwanted),
        }
    }

    /// Reports that the server is ready.
    fn serve(&self, at: SocketAddr) {
        self.state.send_modify(|state| state.serves = Some(at));
    }

    /// Reports the tunnel's address for a peer to the agent, once.
    fn report(&mut self, local: SocketAddr) {
        if let Some(peer) = self.peers.get_mut(local).filter(|peer| !peer.reported) {
            peer.reported = true;
            let to = peer.to;
            self.state.send_modify(|state| {
                state.peers.insert(to, local);
            });
        }
    }

    fn close(&mut self, local: SocketAddr) {
        if let Some(peer) = self.peers.close(local).filter(|peer| peer.reported) {
            self.state.send_modify(|state| {
                state.peers.remove(&peer.to);
            });
        }
    }

    fn drop(&mut self, reason: DropReason, datagrams: u64) {
        self.counters.drops.add(reason, datagrams);
    }
}

/// A connection to a relay over TLS, or an allocation at a TURN server.
#[derive(Debug)]
pub struct Transport {
    name: String,
    core: Core,
    server: Box<dyn Server>,
    /// Time of the next work besides received messages.
    due: Instant,
    /// There may be something to receive.
    is_readable: bool,
}

/// A new transport, with the agent's handle and view of its state.
pub(crate) struct Opened {
    pub transport: Box<Transport>,
    pub handle: Handle,
    pub state: watch::Receiver<State>,
}

/// Target of a proxied address.
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
        /// IP address of the relay, unspecified if only a web proxy knows it, and the port.
        to: SocketAddr,
    },
}

impl Transport {
    /// Makes a transport for the worker's loop. `name` is the server's address as configured.
    fn open(name: String, link: Link, server: Box<dyn Server>, waker: Waker) -> Opened {
        let (wanted, wanted_now) = watch::channel(Wanted::default());
        let (report, state) = watch::channel(State::default());
        let transport = Box::new(Transport {
            name,
            core: Core {
                link,
                peers: Peers::default(),
                counters: Counters::default(),
                wanted: wanted_now,
                state: report,
            },
            server,
            due: Instant::BOOT,
            is_readable: false,
        });
        let handle = Handle { wanted, waker };
        Opened {
            transport,
            handle,
            state,
        }
    }

    /// Returns the server's address as configured.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the relayed address of an allocation, or the relay's address; `None` until the
    /// server has answered.
    pub fn serves(&self) -> Option<SocketAddr> {
        self.core.state.borrow().serves
    }

    /// Returns the transport protocol to a TURN server: "UDP", "TCP" or "TLS"; `None` for a relay.
    pub fn turn(&self) -> Option<&'static str> {
        self.server.turn()
    }

    /// Returns the counters of forwarded datagrams.
    pub fn counters(&self) -> Counters {
        let mut counters = self.core.counters.clone();
        let full = self.core.link.receive_queue_drops();
        counters.drops.add(DropReason::ReceiveQueueFull, full);
        counters
    }

    fn flush(&mut self) -> Result<(), Ended> {
        let flushed = self.core.link.flush();
        flushed.map_err(|error| self.server.lost(error))
    }

    fn poll(&mut self, now: Instant) -> Result<(), Ended> {
        self.due = now + LOOK_EVERY;
        let next = self.server.poll(&mut self.core, now)?;
        // Wait at least a millisecond. A late timer does no harm.
        self.due = next.clamp(now + Duration::from_millis(1), self.due);
        self.flush()
    }

    fn receive(
        &mut self,
        now: Instant,
        batch: &mut ReceiveBatch,
        arrived: &mut Vec<Datagram>,
    ) -> Result<(), Ended> {
        let mut messages = Vec::new();
        let drops = &mut self.core.counters.drops;
        let received = self.core.link.receive(batch, &mut messages, drops);
        self.is_readable = *received.as_ref().unwrap_or(&false);
        self.due = now;
        let arena = batch.parts_mut().1;
        for range in messages {
            let mut message = Message {
                arena: &mut *arena,
                range,
                arrived: &mut *arrived,
            };
            self.server.receive(&mut self.core, now, &mut message);
        }
        received.map_err(|error| self.server.lost(error))?;
        Ok(())
    }

    fn end(mut self, now: Instant, ended: &Ended) {
        // The transport ends even if this fails.
        let _ = guard(|| {
            self.server.leave(&mut self.core, now);
            self.flush()
        });
        let state = &self.core.state;
        state.send_modify(|state| state.ended = Some(ended.to_string()));
    }
}

/// Runs a part of a transport and catches panics: an error in the libraries that implement TURN and
/// TLS must not end the tunnel.
fn guard(work: impl FnOnce() -> Result<(), Ended>) -> Result<(), Ended> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(Ended::Failed))
}

/// All transports of a tunnel.
#[derive(Debug, Default)]
pub struct Transports {
    all: BTreeMap<u64, Transport>,
    /// Number of transports added so far.
    opened: u64,
}

impl Transports {
    /// Whether an event of the loop with this token is for a transport.
    pub fn owns(token: u64) -> bool {
        (FIRST_TOKEN..FIRST_TOKEN * 2).contains(&token)
    }

    /// Adds a transport to the loop.
    pub fn add(&mut self, transport: Transport, epoll: &Epoll) {
        let token = FIRST_TOKEN + self.opened;
        self.opened += 1;
        match transport.core.link.watch(epoll, token) {
            Ok(()) => drop(self.all.insert(token, transport)),
            Err(error) => transport.core.state.send_modify(|state| {
                state.ended = Some(Ended::Unwatched(error).to_string());
            }),
        }
    }

    /// Returns the transports.
    pub fn iter(&self) -> impl Iterator<Item = &Transport> {
        self.all.values()
    }

    /// Returns the target of a proxied address.
    pub fn target(&self, local: SocketAddr) -> Option<ProxyTarget> {
        self.all.values().find_map(|transport| {
            let to = transport.core.peers.get(local)?.to;
            let name = transport.name.clone();
            Some(match transport.turn() {
                Some(_) => ProxyTarget::Turn { server: name, to },
                None => ProxyTarget::Relay { relay: name, to },
            })
        })
    }

    /// Returns the time of the next work.
    pub fn wakeup(&self) -> Option<Instant> {
        let due = |transport: &Transport| {
            let now = transport.is_readable.then_some(Instant::BOOT);
            now.unwrap_or(transport.due)
        };
        self.all.values().map(due).min()
    }

    /// Handles an event of the loop.
    pub fn ready(&mut self, token: u64) {
        if let Some(transport) = self.all.get_mut(&token) {
            transport.is_readable = true;
        }
    }

    /// Looks for changed requirements at the next [`Self::poll`].
    pub fn woken(&mut self) {
        for transport in self.all.values_mut() {
            transport.due = Instant::BOOT;
        }
    }

    /// Returns the transports that may have something to receive.
    pub fn readable(&self) -> Vec<u64> {
        let readable = self.all.iter().filter(|(_, one)| one.is_readable);
        readable.map(|(token, _)| *token).collect()
    }

    /// Receives once from a transport, and adds datagrams for the tunnel to `arrived`. Their bytes
    /// are in the arena of `batch`.
    pub fn receive(
        &mut self,
        token: u64,
        now: Instant,
        batch: &mut ReceiveBatch,
        arrived: &mut Vec<Datagram>,
    ) {
        if let Some(transport) = self.all.get_mut(&token) {
            let received = guard(|| transport.receive(now, batch, arrived));
            self.end_if(token, now, received);
        }
    }

    /// Sends datagrams to a proxied address, all of `size` bytes except the last, which may be
    /// shorter. Over TCP and TLS they are only queued, and [`Self::poll`] sends them. The transport
    /// counts drops.
    ///
    /// # Errors
    /// [`DropReason::SendRefused`]: no transport has this address any more, or its protocol failed.
    pub fn send(
        &mut self,
        now: Instant,
        to: SocketAddr,
        bytes: &[u8],
        size: usize,
    ) -> Result<(), DropReason> {
        let mut all = self.all.iter_mut();
        let found = all.find_map(|(token, transport)| {
            let peer = transport.core.peers.get_mut(to)?;
            peer.answered = Some(now);
            Some((*token, peer.to, transport))
        });
        let Some((token, peer, transport)) = found else {
            return Err(DropReason::SendRefused);
        };
        transport.due = now;
        let datagrams = bytes.chunks(size.max(1));
        let sent = guard(|| {
            let Transport { server, core, .. } = transport;
            server.send(core, now, peer, datagrams);
            Ok(())
        });
        let result = sent
            .as_ref()
            .map_or(Err(DropReason::SendRefused), |()| Ok(()));
        self.end_if(token, now, sent);
        result
    }

    /// Sends queued messages, and handles timers and changed requirements.
    pub fn poll(&mut self, now: Instant) {
        let due = self.all.iter_mut().filter(|(_, one)| one.due <= now);
        let ended = due.filter_map(|(token, one)| Some((*token, guard(|| one.poll(now)).err()?)));
        for (token, ended) in ended.collect::<Vec<_>>() {
            self.end_if(token, now, Err(ended));
        }
    }

    fn end_if(&mut self, token: u64, now: Instant, outcome: Result<(), Ended>) {
        if let Err(ended) = outcome
            && let Some(transport) = self.all.remove(&token)
        {
            transport.end(now, &ended);
        }
    }

    /// Leaves all servers.
    pub fn end(&mut self, now: Instant) {
        for transport in std::mem::take(&mut self.all).into_values() {
            transport.end(now, &Ended::Unwanted);
        }
    }
}

#[cfg(test)]
mod tests;
