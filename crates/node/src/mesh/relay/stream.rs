//! The thread that keeps a connection by TLS to a relay of ours and forwards between it and the tunnel: each port of the relay's that
//! this host uses, the main one among them, is one of the [`legs`](crate::mesh::legs).

use crate::mesh::legs::{Counters, Legs};
use rustls::ClientConnection;
use seikan_observe::DropReason;
use seikan_proto::mesh::framing::{Framing, MAIN_PORT, split_port};
use seikan_proto::mesh::relay::is_request;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::udp::ReceiveBatch;
use seikan_tls::Stream;
use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU16;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How long a relay may take to answer for the first time, TLS included.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How often is told how much was forwarded, while there is something.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// Longest time without a look at anything.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Bytes of one receive from the tunnel.
const MAX_BATCH: usize = 1 << 16;
/// Reads before others have their turn.
const TURNS: usize = 8;

const WAKE: u64 = 0;
const RELAY: u64 = 1;
const FIRST_LEG: u64 = 2;

/// What the thread has to say.
#[derive(Debug)]
pub(super) enum Event {
    /// What the tunnel sends to `local` goes to a port of the relay's, and the other way.
    Leg { port: u16, local: SocketAddr },
    /// Nothing does any more.
    LegClosed { port: u16, local: SocketAddr },
    /// It answers: TLS stands.
    Answers,
    /// How much was forwarded.
    Counted(Box<Counters>),
    /// It is over: the last that it says.
    Ended(Ended),
}

/// Why there is no connection any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("no answer")]
    NoAnswer,
    #[error("{0}")]
    Lost(io::Error),
    #[error("a system call: {0}")]
    System(io::Error),
    /// Nobody wants it.
    #[error("it is not needed")]
    Unwanted,
}

/// The agent's hold on the thread, which ends when it is dropped.
pub(super) struct Handle {
    ports: Arc<Mutex<BTreeSet<u16>>>,
    wake: UnixStream,
}

impl Handle {
    /// The relay's ports that there are to be legs for, beside the main one.
    pub(super) fn set(&self, ports: BTreeSet<u16>) {
        let mut now = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
        if *now != ports {
            *now = ports;
            // A full pair wakes the thread anyway.
            let _ = (&self.wake).write(&[0]);
        }
    }
}

/// Starts the thread, over a connection that stands; TLS has not shaken hands yet. `port` is the tunnel's.
pub(super) fn start(
    socket: TcpStream,
    tls: ClientConnection,
    port: Arc<AtomicU16>,
    events: mpsc::Sender<Event>,
) -> io::Result<Handle> {
    let relay = socket.peer_addr()?.ip();
    let stream = Stream::new(socket, Some(tls.into()), Framing::Relay)?;
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    let epoll = Epoll::new(64)?;
    epoll.add(&stream, RELAY, Interest::Read)?;
    epoll.add(&theirs, WAKE, Interest::Read)?;
    let ports = Arc::new(Mutex::new(BTreeSet::new()));
    let now = Instant::now();
    let forwarder = Forwarder {
        relay,
        stream,
        epoll,
        wake: theirs,
        ports: ports.clone(),
        legs: Legs::new(FIRST_LEG, port),
        legs_of: BTreeSet::new(),
        events: events.clone(),
        told: Counters::default(),
        begun: now,
        answers: false,
        next_count: now + COUNT_EVERY,
    };
    std::thread::Builder::new()
        .name("relay".into())
        .spawn(move || {
            let ended = forwarder.run();
            // Who is to hear it may be gone.
            let _ = events.blocking_send(Event::Ended(ended));
        })?;
    Ok(Handle { ports, wake: ours })
}

struct Forwarder {
    relay: IpAddr,
    stream: Stream,
    epoll: Epoll,
    wake: UnixStream,
    ports: Arc<Mutex<BTreeSet<u16>>>,
    legs: Legs,
    /// The ports that they stand for.
    legs_of: BTreeSet<u16>,
    events: mpsc::Sender<Event>,
    told: Counters,
    begun: Instant,
    answers: bool,
    next_count: Instant,
}

impl Forwarder {
    /// Goes on until there is a reason not to.
    fn run(mut self) -> Ended {
        let mut batch = ReceiveBatch::new(16, MAX_BATCH);
        if let Err(ended) = self.apply() {
            return ended;
        }
        loop {
            if let Err(ended) = self.turn(&mut batch) {
                return ended;
            }
        }
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self, batch: &mut ReceiveBatch) -> Result<(), Ended> {
        self.flush()?;
        let wait = self.drive()?;
        let events = self.epoll.wait(Some(wait)).map_err(Ended::System)?;
        let ready: Vec<u64> = events.map(|event| event.token).collect();
        for token in ready {
            match token {
                WAKE => self.woken()?,
                RELAY => self.read_relay()?,
                leg => self.read_leg(leg, batch),
            }
        }
        Ok(())
    }

    /// Does what is due; how long there is nothing more.
    fn drive(&mut self) -> Result<Duration, Ended> {
        let now = Instant::now();
        let mut next = now + LOOK_EVERY;
        if !self.answers {
            next = self.begun + ANSWER_WITHIN;
            if now >= next {
                return Err(Ended::NoAnswer);
            }
        }
        if self.legs.counters != self.told {
            if now >= self.next_count {
                self.next_count = now + COUNT_EVERY;
                self.legs.count_overflow();
                self.told = self.legs.counters.clone();
                self.tell(Event::Counted(Box::new(self.told.clone())))?;
            }
            next = next.min(self.next_count);
        }
        let wait = next.saturating_duration_since(now);
        Ok(wait.max(Duration::from_millis(1)))
    }

    fn woken(&mut self) -> Result<(), Ended> {
        let mut drain = [0; 64];
        loop {
            match self.wake.read(&mut drain) {
                Ok(0) => return Err(Ended::Unwanted),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        self.apply()
    }

    /// Opens legs that are wanted and not there, and closes the others.
    fn apply(&mut self) -> Result<(), Ended> {
        let wanted = self.ports.lock();
        let mut wanted = wanted.unwrap_or_else(PoisonError::into_inner).clone();
        wanted.insert(MAIN_PORT);
        let unwanted: Vec<u16> = self.legs_of.difference(&wanted).copied().collect();
        for port in unwanted {
            self.legs_of.remove(&port);
            let leg = self.legs.at(&self.at(port));
            if let Some(leg) = leg.and_then(|token| self.legs.close(token)) {
                let local = leg.local;
                self.tell(Event::LegClosed { port, local })?;
            }
        }
        for port in wanted {
            if self.legs_of.contains(&port) {
                continue;
            }
            // Without room in the system whoever waits for it gives up.
            let Some(token) = self.legs.open(self.at(port), &self.epoll) else {
                continue;
            };
            self.legs_of.insert(port);
            if let Some(local) = self.legs.get_mut(token).map(|leg| leg.local) {
                self.tell(Event::Leg { port, local })?;
            }
        }
        Ok(())
    }

    /// What stands for a port of the relay's among the legs.
    fn at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.relay, port)
    }

    /// Takes what the relay has sent to the tunnel.
    fn read_relay(&mut self) -> Result<(), Ended> {
        for _ in 0..TURNS {
            match self.stream.receive() {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(Ended::Lost(error)),
            }
            let wrong = |error| Ended::Lost(io::Error::new(io::ErrorKind::InvalidData, error));
            let mut came = false;
            while let Some(frame) = self.stream.peek().map_err(wrong)? {
                came = true;
                let leg = split_port(frame).and_then(|(port, datagram)| {
                    let token = self.legs.at(&SocketAddr::new(self.relay, port))?;
                    (!datagram.is_empty()).then_some((token, datagram))
                });
                match leg {
                    Some((token, datagram)) => self.legs.deliver(token, datagram),
                    None => self.legs.counters.drops.add(DropReason::NoChannel, 1),
                }
                self.stream.take();
            }
            if came && !self.answers {
                self.answers = true;
                self.tell(Event::Answers)?;
            }
        }
        self.legs.flush();
        Ok(())
    }

    /// Takes what the tunnel has sent to a leg.
    fn read_leg(&mut self, token: u64, batch: &mut ReceiveBatch) {
        let Some(port) = self.legs.get_mut(token).map(|leg| leg.peer.port()) else {
            return;
        };
        for _ in 0..TURNS {
            if !self.legs.receive(token, batch) {
                break;
            }
            let (metas, arena) = batch.parts_mut();
            for meta in metas {
                if !self.legs.is_whole(meta) {
                    continue;
                }
                for segment in meta.segments() {
                    let datagram = arena.get(segment).unwrap_or_default();
                    let parts = [&port.to_be_bytes()[..], datagram];
                    let pushed = match is_request(datagram) {
                        true => self.stream.push_request(&parts),
                        false => self.stream.push(&parts),
                    };
                    match pushed {
                        true => self.legs.counters.sent += 1,
                        false => self.legs.counters.drops.add(DropReason::SendNoBuffers, 1),
                    }
                }
            }
        }
    }

    /// Hands the stream's bytes to the kernel, and waits for room if it does not take them all.
    fn flush(&mut self) -> Result<(), Ended> {
        let interest = match self.stream.flush().map_err(Ended::Lost)? {
            true => Interest::ReadWrite,
            false => Interest::Read,
        };
        self.epoll
            .modify(&self.stream, RELAY, interest)
            .map_err(Ended::System)
    }

    fn tell(&self, event: Event) -> Result<(), Ended> {
        self.events
            .blocking_send(event)
            .map_err(|_| Ended::Unwanted)
    }
}
