//! Threads that forward between the tunnel and a server that it does not reach by its own socket: a relay over
//! TLS, a TURN server. To the tunnel, each address behind the server is a proxy socket ([`crate::proxy`]).
//!
//! A [`Forwarder`] implements the protocol of its server. The [`Hub`] holds what all of them share: proxy
//! sockets, the agent's requirements, and the events for it.

use crate::proxy::{Counters, ProxySockets};
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::udp::ReceiveBatch;
use seikan_tls::Stream;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Maximum time between two checks.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Maximum bytes of one datagram or message.
pub(super) const MAX_MESSAGE: usize = 1 << 16;
/// Maximum number of receive calls in a row.
pub(super) const MAX_RECEIVES: usize = 8;
/// Interval between two reports of changed counters.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of events of a thread that wait for the agent.
const MAX_EVENTS: usize = 64;

const WAKE: u64 = 0;
/// Token of the server's socket, before those of proxy sockets.
pub(super) const SERVER: u64 = 1;
const FIRST_PROXY: u64 = 2;

/// The protocol of a server.
pub(super) trait Forwarder: Sized + 'static {
    /// Requirements of the agent.
    type Wanted: Clone + Default + PartialEq + Send + 'static;
    /// Payload of the event that the server is ready.
    type Serves: Send + 'static;
    /// Why the server is no longer available.
    type Ended: From<Over> + Send + 'static;

    fn hub(&mut self) -> &mut Hub<Self>;

    /// Applies the requirements that are not met yet.
    fn apply(&mut self) -> Result<(), Self::Ended>;

    /// Handles timers; returns the time of the next one.
    fn drive(&mut self) -> Result<Instant, Self::Ended>;

    /// Forwards messages of the server to the tunnel.
    fn read_server(&mut self, batch: &mut ReceiveBatch) -> Result<(), Self::Ended>;

    /// Forwards datagrams of the tunnel from a proxy socket to the server.
    fn read_proxy(&mut self, token: u64, batch: &mut ReceiveBatch) -> Result<(), Self::Ended>;

    /// Tells the server that this end leaves.
    fn leave(&mut self) {}
}

/// Event of a thread.
pub(super) enum Event<F: Forwarder> {
    /// The server is ready.
    Serves(F::Serves),
    /// Datagrams of the tunnel to `local` are forwarded to `peer`, and back.
    ProxyOpened { peer: SocketAddr, local: SocketAddr },
    /// They no longer are.
    ProxyClosed { peer: SocketAddr, local: SocketAddr },
    /// Changed counters.
    Counted(Box<Counters>),
    /// The thread has ended; the last event.
    Ended(F::Ended),
}

/// Receiver of a thread's events.
pub(super) type Events<F> = mpsc::Receiver<Event<F>>;

/// Why any thread ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum Over {
    #[error("a system call: {0}")]
    System(#[from] io::Error),
    /// The agent no longer needs it.
    #[error("it is not needed")]
    Unwanted,
}

/// The agent's handle of a thread, which ends when it is dropped.
pub(super) struct Handle<W> {
    wanted: Arc<Mutex<W>>,
    wake: UnixStream,
}

impl<W: PartialEq> Handle<W> {
    /// Sets the requirements.
    pub(super) fn set(&self, wanted: W) {
        let mut now = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        if *now != wanted {
            *now = wanted;
            // If the socket pair is full, the thread wakes anyway.
            let _ = (&self.wake).write(&[0]);
        }
    }
}

/// The agent's handle and receiver.
pub(super) type Ends<F> = (Handle<<F as Forwarder>::Wanted>, Events<F>);

/// Starts a thread for the forwarder that `make` creates in it. `port` is the tunnel's port.
pub(super) fn start<F: Forwarder>(
    name: &str,
    port: Arc<AtomicU16>,
    make: impl FnOnce(Hub<F>) -> Result<F, F::Ended> + Send + 'static,
) -> io::Result<Ends<F>> {
    let (hub, ends) = Hub::new(port)?;
    std::thread::Builder::new()
        .name(name.into())
        .spawn(move || {
            let events = hub.events.clone();
            let ended = make(hub).map_or_else(|ended| ended, run);
            // The receiver may be gone.
            let _ = events.blocking_send(Event::Ended(ended));
        })?;
    Ok(ends)
}

/// Runs until an error ends it.
fn run<F: Forwarder>(mut forwarder: F) -> F::Ended {
    let mut batch = ReceiveBatch::new(16, MAX_MESSAGE);
    let mut outcome = forwarder.apply();
    loop {
        match outcome {
            Ok(()) => outcome = run_once(&mut forwarder, &mut batch),
            Err(ended) => {
                forwarder.leave();
                return ended;
            }
        }
    }
}

/// Waits for events and handles them.
fn run_once<F: Forwarder>(forwarder: &mut F, batch: &mut ReceiveBatch) -> Result<(), F::Ended> {
    let due = forwarder.drive()?;
    for token in forwarder.hub().wait(due)? {
        match token {
            WAKE => {
                forwarder.hub().woken()?;
                forwarder.apply()?;
            }
            SERVER => forwarder.read_server(batch)?,
            proxy => forwarder.read_proxy(proxy, batch)?,
        }
    }
    Ok(())
}

/// State that all forwarders share.
pub(super) struct Hub<F: Forwarder> {
    pub proxies: ProxySockets,
    epoll: Epoll,
    /// Events to wait for on the server's stream.
    interest: Interest,
    wake: UnixStream,
    wanted: Arc<Mutex<F::Wanted>>,
    events: mpsc::Sender<Event<F>>,
    reported: Counters,
    next_count: Instant,
}

impl<F: Forwarder> Hub<F> {
    /// Returns a hub, with the agent's handle and receiver.
    pub(super) fn new(port: Arc<AtomicU16>) -> io::Result<(Hub<F>, Ends<F>)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let epoll = Epoll::new(64)?;
        epoll.add(&theirs, WAKE, Interest::Read)?;
        let wanted = Arc::new(Mutex::new(F::Wanted::default()));
        let (events, receiver) = mpsc::channel(MAX_EVENTS);
        let hub = Hub {
            proxies: ProxySockets::new(FIRST_PROXY, port),
            epoll,
            interest: Interest::Read,
            wake: theirs,
            wanted: Arc::clone(&wanted),
            events,
            reported: Counters::default(),
            next_count: Instant::now() + COUNT_EVERY,
        };
        let wake = ours;
        Ok((hub, (Handle { wanted, wake }, receiver)))
    }

    /// Watches the server's socket.
    pub(super) fn watch(&self, server: impl AsFd) -> Result<(), Over> {
        Ok(self.epoll.add(server, SERVER, Interest::Read)?)
    }

    /// Waits and returns the tokens of ready descriptors; none if a timer is due.
    fn wait(&mut self, due: Instant) -> Result<Vec<u64>, Over> {
        let now = Instant::now();
        let due = self.count(now)?.map_or(due, |count| count.min(due));
        // At least a millisecond; a late timer loses nothing.
        let wait = due.saturating_duration_since(now);
        let wait = wait.max(Duration::from_millis(1));
        let events = self.epoll.wait(Some(wait))?;
        Ok(events.map(|event| event.token).collect())
    }

    /// Reports changed counters if it is time; otherwise returns when it will be.
    fn count(&mut self, now: Instant) -> Result<Option<Instant>, Over> {
        if self.proxies.counters == self.reported {
            return Ok(None);
        }
        if now < self.next_count {
            return Ok(Some(self.next_count));
        }
        self.next_count = now + COUNT_EVERY;
        self.reported = self.proxies.counters.clone();
        self.send(Event::Counted(Box::new(self.reported.clone())))?;
        Ok(None)
    }

    fn woken(&mut self) -> Result<(), Over> {
        let mut drain = [0; 64];
        loop {
            match self.wake.read(&mut drain) {
                Ok(0) => return Err(Over::Unwanted),
                Ok(_) => {}
                Err(_) => return Ok(()),
            }
        }
    }

    /// Returns the agent's requirements.
    pub(super) fn wanted(&self) -> MutexGuard<'_, F::Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn send(&self, event: Event<F>) -> Result<(), Over> {
        let reported = self.events.blocking_send(event);
        reported.map_err(|_| Over::Unwanted)
    }

    /// Opens a proxy socket; `None` if the system lacks resources.
    pub(super) fn open(&mut self, peer: SocketAddr) -> Option<u64> {
        self.proxies.open(peer, &self.epoll)
    }

    /// Reports a proxy socket to the agent, once.
    pub(super) fn report_proxy(&mut self, token: u64) -> Result<(), Over> {
        let Some(proxy) = self.proxies.get_mut(token).filter(|proxy| !proxy.reported) else {
            return Ok(());
        };
        proxy.reported = true;
        let (peer, local) = (proxy.peer, proxy.local);
        self.send(Event::ProxyOpened { peer, local })
    }

    pub(super) fn close(&mut self, token: u64) -> Result<(), Over> {
        let Some(proxy) = self.proxies.close(token) else {
            return Ok(());
        };
        let (peer, local) = (proxy.peer, proxy.local);
        self.send(Event::ProxyClosed { peer, local })
    }

    /// Sends pending bytes to the server, and waits for writability if the kernel does not take all of them.
    pub(super) fn flush(&mut self, stream: &mut Stream) -> io::Result<()> {
        let interest = if stream.flush()? {
            Interest::ReadWrite
        } else {
            Interest::Read
        };
        if interest != self.interest {
            self.epoll.modify(&*stream, SERVER, interest)?;
            self.interest = interest;
        }
        Ok(())
    }
}
