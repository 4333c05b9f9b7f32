//! Threads that forward between the tunnel and a server that it does not reach by its own socket: a relay of ours by TLS, a TURN
//! server. What is beyond the server is [`legs`](super::legs) to the tunnel.
//!
//! A [`Forwarder`] knows its server; the thread waits for it, and the [`Hub`] has what all of them need: the legs, what the agent wants,
//! and what it is told.

use super::legs::{Counters, Legs};
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

/// Longest time without a look at anything.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Bytes of one datagram or message, at most.
pub(super) const MAX_MESSAGE: usize = 1 << 16;
/// Receive calls before others have their turn.
pub(super) const TURNS: usize = 8;
/// How often is told how much was forwarded, while there is something.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// What a thread says that waits, at most.
const MAX_EVENTS: usize = 64;

const WAKE: u64 = 0;
/// What is sent to the server, among what is sent to legs.
pub(super) const SERVER: u64 = 1;
const FIRST_LEG: u64 = 2;

/// What knows a server.
pub(super) trait Forwarder: Sized + 'static {
    /// What the agent wants of it.
    type Wanted: Clone + Default + PartialEq + Send + 'static;
    /// What is told when it serves.
    type Serves: Send + 'static;
    /// Why it does not (any more).
    type Ended: From<Over> + Send + 'static;

    fn hub(&mut self) -> &mut Hub<Self>;

    /// Does what is wanted and not done.
    fn apply(&mut self) -> Result<(), Self::Ended>;

    /// Does what is due; when there is something next.
    fn drive(&mut self) -> Result<Instant, Self::Ended>;

    /// Takes what the server has sent to the tunnel.
    fn read_server(&mut self, batch: &mut ReceiveBatch) -> Result<(), Self::Ended>;

    /// Takes what the tunnel has sent to a leg.
    fn read_leg(&mut self, token: u64, batch: &mut ReceiveBatch) -> Result<(), Self::Ended>;

    /// Says goodbye.
    fn leave(&mut self) {}
}

/// What a thread has to say.
pub(super) enum Event<F: Forwarder> {
    /// The server serves.
    Serves(F::Serves),
    /// What the tunnel sends to `local` goes to `peer`, and the other way.
    Leg { peer: SocketAddr, local: SocketAddr },
    /// Nothing does any more.
    LegClosed { peer: SocketAddr, local: SocketAddr },
    /// How much was forwarded.
    Counted(Box<Counters>),
    /// It is over: the last that it says.
    Ended(F::Ended),
}

/// Where it is heard.
pub(super) type Heard<F> = mpsc::Receiver<Event<F>>;

/// Why any thread ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum Over {
    #[error("a system call: {0}")]
    System(#[from] io::Error),
    /// Nobody wants it.
    #[error("it is not needed")]
    Unwanted,
}

/// The agent's hold on a thread, which ends when it is dropped.
pub(super) struct Handle<W> {
    wanted: Arc<Mutex<W>>,
    wake: UnixStream,
}

impl<W: PartialEq> Handle<W> {
    /// What is wanted from now on.
    pub(super) fn set(&self, wanted: W) {
        let mut now = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        if *now != wanted {
            *now = wanted;
            // A full pair wakes the thread anyway.
            let _ = (&self.wake).write(&[0]);
        }
    }
}

/// The agent's ends of a thread.
pub(super) type Ends<F> = (Handle<<F as Forwarder>::Wanted>, Heard<F>);

/// Starts a thread of this name for what `make` makes in it. `port` is the tunnel's.
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
            // Who is to hear it may be gone.
            let _ = events.blocking_send(Event::Ended(ended));
        })?;
    Ok(ends)
}

/// Goes on until there is a reason not to.
fn run<F: Forwarder>(mut forwarder: F) -> F::Ended {
    let mut batch = ReceiveBatch::new(16, MAX_MESSAGE);
    let mut outcome = forwarder.apply();
    loop {
        match outcome {
            Ok(()) => outcome = turn(&mut forwarder, &mut batch),
            Err(ended) => {
                forwarder.leave();
                return ended;
            }
        }
    }
}

/// Waits for something to do, and does it.
fn turn<F: Forwarder>(forwarder: &mut F, batch: &mut ReceiveBatch) -> Result<(), F::Ended> {
    let due = forwarder.drive()?;
    for token in forwarder.hub().wait(due)? {
        match token {
            WAKE => {
                forwarder.hub().woken()?;
                forwarder.apply()?;
            }
            SERVER => forwarder.read_server(batch)?,
            leg => forwarder.read_leg(leg, batch)?,
        }
    }
    Ok(())
}

/// Where all of a thread meets.
pub(super) struct Hub<F: Forwarder> {
    pub legs: Legs,
    epoll: Epoll,
    /// Of the server's stream.
    interest: Interest,
    wake: UnixStream,
    wanted: Arc<Mutex<F::Wanted>>,
    events: mpsc::Sender<Event<F>>,
    told: Counters,
    next_count: Instant,
}

impl<F: Forwarder> Hub<F> {
    /// With the agent's ends of it.
    pub(super) fn new(port: Arc<AtomicU16>) -> io::Result<(Hub<F>, Ends<F>)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let epoll = Epoll::new(64)?;
        epoll.add(&theirs, WAKE, Interest::Read)?;
        let wanted = Arc::new(Mutex::new(F::Wanted::default()));
        let (events, heard) = mpsc::channel(MAX_EVENTS);
        let hub = Hub {
            legs: Legs::new(FIRST_LEG, port),
            epoll,
            interest: Interest::Read,
            wake: theirs,
            wanted: Arc::clone(&wanted),
            events,
            told: Counters::default(),
            next_count: Instant::now() + COUNT_EVERY,
        };
        let wake = ours;
        Ok((hub, (Handle { wanted, wake }, heard)))
    }

    /// Waits for what the server sends, too.
    pub(super) fn watch(&self, server: impl AsFd) -> Result<(), Over> {
        Ok(self.epoll.add(server, SERVER, Interest::Read)?)
    }

    /// What is ready, by its tokens: nothing when something is due.
    fn wait(&mut self, due: Instant) -> Result<Vec<u64>, Over> {
        let now = Instant::now();
        let due = self.count(now)?.map_or(due, |count| count.min(due));
        // A little time at least: what is late is not lost.
        let wait = due.saturating_duration_since(now);
        let wait = wait.max(Duration::from_millis(1));
        let events = self.epoll.wait(Some(wait))?;
        Ok(events.map(|event| event.token).collect())
    }

    /// Tells how much was forwarded, if it is time; otherwise when it will be, if there is something.
    fn count(&mut self, now: Instant) -> Result<Option<Instant>, Over> {
        if self.legs.counters == self.told {
            return Ok(None);
        }
        if now < self.next_count {
            return Ok(Some(self.next_count));
        }
        self.next_count = now + COUNT_EVERY;
        self.told = self.legs.counters.clone();
        self.tell(Event::Counted(Box::new(self.told.clone())))?;
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

    /// What the agent wants.
    pub(super) fn wanted(&self) -> MutexGuard<'_, F::Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self, event: Event<F>) -> Result<(), Over> {
        let told = self.events.blocking_send(event);
        told.map_err(|_| Over::Unwanted)
    }

    /// Opens a leg; `None`: the system has no room for it.
    pub(super) fn open(&mut self, peer: SocketAddr) -> Option<u64> {
        self.legs.open(peer, &self.epoll)
    }

    /// Tells of a leg, once.
    pub(super) fn tell_of(&mut self, token: u64) -> Result<(), Over> {
        let Some(leg) = self.legs.get_mut(token).filter(|leg| !leg.told) else {
            return Ok(());
        };
        leg.told = true;
        let (peer, local) = (leg.peer, leg.local);
        self.tell(Event::Leg { peer, local })
    }

    pub(super) fn close(&mut self, token: u64) -> Result<(), Over> {
        let Some(leg) = self.legs.close(token) else {
            return Ok(());
        };
        let (peer, local) = (leg.peer, leg.local);
        self.tell(Event::LegClosed { peer, local })
    }

    /// Hands the bytes for the server to the kernel, and waits for room if it does not take them all.
    pub(super) fn flush(&mut self, stream: &mut Stream) -> io::Result<()> {
        let interest = match stream.flush()? {
            true => Interest::ReadWrite,
            false => Interest::Read,
        };
        if interest != self.interest {
            self.epoll.modify(&*stream, SERVER, interest)?;
            self.interest = interest;
        }
        Ok(())
    }
}
