//! The thread that keeps one allocation at a TURN server (RFC 8656) and forwards between it and the tunnel.
//!
//! The protocol is the library's, which knows no sockets; those are here. For each address that the server receives from or sends to
//! there is a *leg*: a UDP socket of a loopback address, which is where that peer is to the tunnel. What one datagram after another
//! has of the same length and for the same place is sent at once (GSO), as it was received (GRO).

use super::stream::Stream;
use crate::mesh::endpoints::is_routable;
use crate::mesh::stun::Question;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use seikan_observe::{DropCounts, DropReason};
use seikan_proto::mesh::Ticket;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::udp::{
    MAX_GSO_SEGMENTS, ReceiveBatch, SendError, Transmit, UdpError, UdpOptions, UdpSocket,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use stun_types::attribute::ErrorCode;
use stun_types::message::{Message, MessageClass};
use tokio::sync::mpsc;
use turn_client_proto::api::{
    BindChannelError, Transmit as TurnTransmit, TurnConfig, TurnEvent, TurnPollRet, TurnRecvRet,
};
use turn_client_proto::client::TurnClient;
use turn_client_proto::prelude::{DelayedTransmitBuild as _, TurnClientApi as _};
use turn_client_proto::stun::Instant as TurnInstant;
use turn_client_proto::tcp::TurnClientTcp;
use turn_client_proto::types::{AddressFamily, TransportType, TurnCredentials};
use turn_client_proto::udp::TurnClientUdp;

/// Legs at a time, at most: a server has 16,384 channels, this host has better uses for its sockets.
const MAX_LEGS: usize = 128;
/// Of those, to one address, that the tunnel has not answered yet: who is let in is not to have all.
const MAX_UNANSWERED: usize = 16;
/// Addresses that may send to one allocation, at most. The library keeps each for as long as the allocation.
pub(super) const MAX_PERMITTED: usize = 1024;
/// How long a server may take to give an allocation.
const ALLOCATE_WITHIN: Duration = Duration::from_secs(4);
/// How often the server is asked whether it is there, if nothing comes from it: within the shortest that a NAT remembers.
const ASK_EVERY: Duration = Duration::from_secs(20);
/// How soon after a question that is not answered the next one comes, and how many there are.
const ASK_AGAIN: Duration = Duration::from_secs(1);
const MAX_QUESTIONS: u32 = 6;
/// A leg that nobody asked for is closed when the tunnel has sent nothing there for so long, or never has in the shorter time: whoever
/// is let in can have one opened.
const IDLE: Duration = Duration::from_secs(600);
const UNANSWERED: Duration = Duration::from_secs(30);
/// How often is looked for such legs, and for what was refused and may be granted now.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// How often is told how much was forwarded, while there is something.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// Bytes that are sent at once, at most, and of one message.
const MAX_RUN: usize = 60_000;
const MAX_MESSAGE: usize = 1 << 16;
/// Receive calls before others have their turn.
const TURNS: usize = 8;
/// `EMSGSIZE` and `ENOBUFS` of Linux.
const EMSGSIZE: i32 = 90;
const ENOBUFS: i32 = 105;

const WAKE: u64 = 0;
const SERVER: u64 = 1;
const FIRST_LEG: u64 = 2;

/// How the server is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Udp,
    Tcp,
    Tls,
}

impl Transport {
    pub(super) fn name(self) -> &'static str {
        match self {
            Transport::Udp => "UDP",
            Transport::Tcp => "TCP",
            Transport::Tls => "TLS",
        }
    }
}

/// Where to allocate, and with what.
pub(super) struct Target {
    pub server: SocketAddr,
    pub transport: Transport,
    /// What its certificate is to say, for TLS.
    pub host: String,
    pub tls: Arc<ClientConfig>,
    pub ticket: Ticket,
    /// The firewall mark of what the tunnel sends.
    pub fwmark: Option<u32>,
}

/// What an allocation is to be good for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Who may send to the relayed address.
    pub permitted: BTreeSet<IpAddr>,
    /// Whom the tunnel sends to by it without having heard from there.
    pub legs: BTreeSet<SocketAddr>,
}

/// What the thread has to say.
#[derive(Debug)]
pub(super) enum Event {
    /// There is an allocation, at this relayed address.
    Allocated(SocketAddr),
    /// What the tunnel sends to `local` goes to `peer`, and the other way.
    Leg { peer: SocketAddr, local: SocketAddr },
    /// Nothing does any more.
    LegClosed { peer: SocketAddr, local: SocketAddr },
    /// How much was forwarded.
    Counted(Box<Counters>),
    /// It is over: the last that it says.
    Ended(Ended),
}

/// What was forwarded, in datagrams of the tunnel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// From the server to the tunnel.
    pub received: u64,
    /// From the tunnel to the server.
    pub sent: u64,
    /// What went no further.
    pub drops: DropCounts,
}

/// Why there is no allocation (any more).
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("no answer by {name}", name = .0.name())]
    NoAnswer(Transport),
    #[error("no connection by {}: {source}", .transport.name())]
    Unconnected {
        transport: Transport,
        source: io::Error,
    },
    #[error("its certificate would have to be for {0}, which is neither a name nor an address")]
    Name(String),
    #[error("it refuses, by {}: {}", .transport.name(), describe(*.code))]
    Refused { transport: Transport, code: u16 },
    #[error("what speaks to it here has failed")]
    Failed,
    #[error("it does not answer any more")]
    Silent,
    #[error("the connection to it is lost: {0}")]
    Lost(io::Error),
    #[error("it has taken the allocation back: {why}", why = describe(*.0))]
    TakenBack(u16),
    #[error("more hosts were let in than one allocation bears; there is a new one soon")]
    Full,
    #[error("{0}")]
    Socket(#[from] UdpError),
    #[error("a system call: {0}")]
    System(io::Error),
    /// Nobody wants it.
    #[error("it is not needed")]
    Unwanted,
}

/// The error codes of RFC 8656, section 19, and RFC 8489, section 14.8, for people; what the server itself says is not shown.
fn describe(code: u16) -> String {
    let text = match code {
        0 => return "without a reason".to_owned(),
        401 | 441 => {
            "it does not take the ticket: another secret, or its clock is not the coordinator's"
        }
        403 => "forbidden",
        420 => "it does not know an attribute",
        437 | 438 => "it knows nothing of the allocation",
        440 => "it has no addresses of this family to give",
        442 => "it does not relay UDP",
        486 => "this member's share is used",
        508 => "it has no more to give",
        _ => return format!("error {code}"),
    };
    format!("{text} ({code})")
}

/// The agent's hold on the thread, which ends when it is dropped.
pub(super) struct Handle {
    wanted: Arc<Mutex<Wanted>>,
    wake: UnixStream,
}

impl Handle {
    /// What the allocation is to be good for, from now on.
    pub(super) fn set(&self, wanted: Wanted) {
        let mut now = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        if *now != wanted {
            *now = wanted;
            // A full pair wakes the thread anyway.
            let _ = (&self.wake).write(&[0]);
        }
    }
}

/// Starts the thread. `port` is the tunnel's.
pub(super) fn start(
    target: Target,
    port: Arc<AtomicU16>,
    events: mpsc::Sender<Event>,
) -> io::Result<Handle> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    let wanted = Arc::new(Mutex::new(Wanted::default()));
    let shared = wanted.clone();
    std::thread::Builder::new()
        .name("turn".into())
        .spawn(move || {
            let forwarder = Forwarder::new(target, port, events.clone(), shared, theirs);
            let ended = forwarder.map_or_else(|ended| ended, Forwarder::run);
            // Who is to hear it may be gone.
            let _ = events.blocking_send(Event::Ended(ended));
        })?;
    Ok(Handle { wanted, wake: ours })
}

/// The way to the server.
enum Link {
    Udp(UdpSocket),
    Stream(Stream),
}

/// Where one peer is to the tunnel.
struct Leg {
    peer: SocketAddr,
    local: SocketAddr,
    socket: UdpSocket,
    /// The agent knows of it.
    told: bool,
    opened: Instant,
    /// When the tunnel last sent there, if it has.
    answered: Option<Instant>,
}

struct Forwarder {
    transport: Transport,
    server: SocketAddr,
    /// What the library takes this end's address to be: it compares, and sends nothing there.
    own: SocketAddr,
    client: TurnClient,
    link: Link,
    epoll: Epoll,
    wake: UnixStream,
    wanted: Arc<Mutex<Wanted>>,
    /// Who may send to the relayed address, or was asked for.
    permitted: BTreeSet<IpAddr>,
    legs: BTreeMap<u64, Leg>,
    by_peer: HashMap<SocketAddr, u64>,
    next_leg: u64,
    port: Arc<AtomicU16>,
    events: mpsc::Sender<Event>,
    relayed: Option<SocketAddr>,
    /// The last error that the server answered with.
    code: u16,
    counters: Counters,
    told: Counters,
    begun: Instant,
    heard: Instant,
    questions: u32,
    next_question: Instant,
    next_look: Instant,
    next_count: Instant,
    /// To the tunnel, and to the server.
    inward: Run,
    outward: Run,
}

impl Forwarder {
    fn new(
        target: Target,
        port: Arc<AtomicU16>,
        events: mpsc::Sender<Event>,
        wanted: Arc<Mutex<Wanted>>,
        wake: UnixStream,
    ) -> Result<Forwarder, Ended> {
        let (server, transport) = (target.server, target.transport);
        let any = match server {
            SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
        };
        let own = SocketAddr::new(any, 0);
        let link = match transport {
            Transport::Udp => {
                let options = UdpOptions {
                    fwmark: target.fwmark,
                    ..UdpOptions::default()
                };
                Link::Udp(UdpSocket::bind(own, &options)?)
            }
            Transport::Tcp | Transport::Tls => {
                let tls = (transport == Transport::Tls).then(|| tls(&target));
                let stream = Stream::connect(server, tls.transpose()?);
                Link::Stream(stream.map_err(|source| Ended::Unconnected { transport, source })?)
            }
        };
        let epoll = Epoll::new(64).map_err(Ended::System)?;
        let added = match &link {
            Link::Udp(socket) => epoll.add(socket, SERVER, Interest::Read),
            Link::Stream(stream) => epoll.add(stream, SERVER, Interest::Read),
        };
        added
            .and_then(|()| epoll.add(&wake, WAKE, Interest::Read))
            .map_err(Ended::System)?;
        let ticket = &target.ticket;
        let credentials = TurnCredentials::new(&ticket.username, ticket.password.reveal());
        let mut config = TurnConfig::new(credentials);
        config.set_address_family(match server {
            SocketAddr::V4(_) => AddressFamily::IPV4,
            SocketAddr::V6(_) => AddressFamily::IPV6,
        });
        let client = match transport {
            Transport::Udp => TurnClientUdp::allocate(own, server, config).into(),
            Transport::Tcp | Transport::Tls => TurnClientTcp::allocate(own, server, config).into(),
        };
        let now = Instant::now();
        Ok(Forwarder {
            transport,
            server,
            own,
            client,
            link,
            epoll,
            wake,
            wanted,
            permitted: BTreeSet::new(),
            legs: BTreeMap::new(),
            by_peer: HashMap::new(),
            next_leg: FIRST_LEG,
            port,
            events,
            relayed: None,
            code: 0,
            counters: Counters::default(),
            told: Counters::default(),
            begun: now,
            heard: now,
            questions: 0,
            next_question: now + ASK_EVERY,
            next_look: now + LOOK_EVERY,
            next_count: now + COUNT_EVERY,
            inward: Run::default(),
            outward: Run::default(),
        })
    }

    /// Goes on until there is a reason not to.
    fn run(mut self) -> Ended {
        let mut batch = ReceiveBatch::new(16, MAX_MESSAGE);
        loop {
            let ended = match self.turn(&mut batch) {
                Ok(()) => continue,
                Err(ended) => ended,
            };
            if self.client.delete(self.now()).is_ok() {
                self.transmit();
            }
            return ended;
        }
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self, batch: &mut ReceiveBatch) -> Result<(), Ended> {
        let wait = self.drive()?;
        let events = self.epoll.wait(Some(wait)).map_err(Ended::System)?;
        let ready: Vec<u64> = events.map(|event| event.token).collect();
        for token in ready {
            match token {
                WAKE => self.woken()?,
                SERVER => self.read_server(batch)?,
                leg => self.read_leg(leg, batch)?,
            }
        }
        Ok(())
    }

    fn now(&self) -> TurnInstant {
        TurnInstant::from_std(self.begun)
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

    fn tell(&self, event: Event) -> Result<(), Ended> {
        self.events
            .blocking_send(event)
            .map_err(|_| Ended::Unwanted)
    }
}

/// The allocation.
impl Forwarder {
    /// Does what is due; how long there is nothing more.
    fn drive(&mut self) -> Result<Duration, Ended> {
        let now = self.now();
        let mut wait = LOOK_EVERY;
        // As much as there may be to say at once; the rest has its turn soon.
        for _ in 0..MAX_LEGS {
            self.transmit();
            while let Some(event) = self.client.poll_event() {
                self.note(event)?;
            }
            wait = match self.client.poll(now) {
                TurnPollRet::WaitUntil(at) => at.saturating_duration_since(now),
                TurnPollRet::Closed => return Err(self.closed()),
                // Of allocations of TCP, which nobody makes here.
                TurnPollRet::AllocateTcpSocket { .. } | TurnPollRet::TcpClose { .. } => continue,
            };
            if !wait.is_zero() {
                break;
            }
        }
        self.flush_stream()?;
        let now = Instant::now();
        let mut next = self.next_look;
        if self.relayed.is_none() {
            let deadline = self.begun + ALLOCATE_WITHIN;
            if now >= deadline {
                return Err(self.closed());
            }
            next = next.min(deadline);
        } else {
            self.ask(now)?;
            next = next.min(self.next_question);
        }
        if self.counters != self.told {
            if now >= self.next_count {
                self.next_count = now + COUNT_EVERY;
                self.told = self.counters.clone();
                self.tell(Event::Counted(Box::new(self.counters.clone())))?;
            }
            next = next.min(self.next_count);
        }
        if now >= self.next_look {
            self.next_look = now + LOOK_EVERY;
            self.close_idle(now)?;
            self.apply()?;
        }
        // A little time at least: what is late is not lost.
        let wait = wait.min(next.saturating_duration_since(now));
        Ok(wait.max(Duration::from_millis(1)))
    }

    /// Why the client has nothing more to do.
    fn closed(&self) -> Ended {
        match (self.relayed, self.code) {
            (None, 0) => Ended::NoAnswer(self.transport),
            (None, code) => Ended::Refused {
                transport: self.transport,
                code,
            },
            (Some(_), code) => Ended::TakenBack(code),
        }
    }

    /// Sends what the client has to say to the server.
    fn transmit(&mut self) {
        let now = self.now();
        while let Some(transmit) = self.client.poll_transmit(now) {
            self.say(&transmit.data);
        }
    }

    /// Sends a request or an indication. One that is lost is repeated by its own timer.
    fn say(&mut self, message: &[u8]) {
        match &mut self.link {
            Link::Udp(socket) => {
                let _ = socket.send(&whole(self.server, message));
            }
            Link::Stream(stream) => {
                let _ = stream.push_request(message);
            }
        }
    }

    fn note(&mut self, event: TurnEvent) -> Result<(), Ended> {
        match event {
            TurnEvent::AllocationCreated(_, relayed) => {
                self.relayed = Some(relayed);
                // What was refused on the way there was a question for the ticket.
                self.code = 0;
                self.tell(Event::Allocated(relayed))?;
                self.apply()
            }
            TurnEvent::AllocationCreateFailed(_) => Err(self.closed()),
            TurnEvent::PermissionCreateFailed(_, ip) => {
                // Asked for again when there is time.
                self.permitted.remove(&ip);
                Ok(())
            }
            TurnEvent::ChannelCreated(_, peer) => match self.by_peer.get(&peer) {
                Some(&token) => self.tell_of(token),
                None => Ok(()),
            },
            TurnEvent::ChannelCreateFailed(_, peer) => match self.by_peer.get(&peer) {
                Some(&token) => self.close(token),
                None => Ok(()),
            },
            TurnEvent::PermissionCreated(..)
            | TurnEvent::TcpConnected(_)
            | TurnEvent::TcpConnectFailed(_) => Ok(()),
        }
    }

    /// Asks the server for what is wanted and not there.
    fn apply(&mut self) -> Result<(), Ended> {
        let Some(relayed) = self.relayed else {
            return Ok(());
        };
        let wanted = self.wanted.lock();
        let wanted = wanted.unwrap_or_else(PoisonError::into_inner).clone();
        let now = self.now();
        for ip in wanted.permitted {
            if ip.is_ipv4() != relayed.is_ipv4() || self.permitted.contains(&ip) {
                continue;
            }
            if self.permitted.len() >= MAX_PERMITTED {
                return Err(Ended::Full);
            }
            // Refused is only what is there already.
            let _ = self.client.create_permission(TransportType::Udp, ip, now);
            self.permitted.insert(ip);
        }
        for peer in wanted.legs {
            let other = peer.is_ipv4() == relayed.is_ipv4() && peer != relayed;
            if !other || self.by_peer.contains_key(&peer) {
                continue;
            }
            let Some(token) = self.open(peer) else {
                continue;
            };
            match self.bind(peer) {
                Ok(()) => {}
                // Of a leg that was closed: there is nothing more to wait for.
                Err(BindChannelError::AlreadyExists) => self.tell_of(token)?,
                // The next look tries again.
                Err(_) => self.close(token)?,
            }
        }
        Ok(())
    }

    /// Asks whether the server is there, if it has said nothing for a while: that keeps what a NAT remembers, too.
    fn ask(&mut self, now: Instant) -> Result<(), Ended> {
        if now < self.next_question {
            return Ok(());
        }
        if now.duration_since(self.heard) < ASK_EVERY / 2 {
            self.questions = 0;
            self.next_question = now + ASK_EVERY;
            return Ok(());
        }
        if self.questions >= MAX_QUESTIONS {
            return Err(Ended::Silent);
        }
        self.questions += 1;
        self.next_question = now + ASK_AGAIN;
        self.say(&Question::new().bytes);
        self.flush_stream()
    }
}

/// Legs.
impl Forwarder {
    /// Opens one; `None`: there is no room for it, here or in the system.
    fn open(&mut self, peer: SocketAddr) -> Option<u64> {
        if self.legs.len() >= MAX_LEGS {
            return None;
        }
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let socket = UdpSocket::bind(any, &UdpOptions::default()).ok()?;
        let local = socket.local_addr().ok()?;
        let token = self.next_leg;
        self.next_leg += 1;
        self.epoll.add(&socket, token, Interest::Read).ok()?;
        let leg = Leg {
            peer,
            local,
            socket,
            told: false,
            opened: Instant::now(),
            answered: None,
        };
        self.legs.insert(token, leg);
        self.by_peer.insert(peer, token);
        Some(token)
    }

    /// Whether one may be opened to a peer because it sends.
    fn may_call(&self, peer: SocketAddr) -> bool {
        let ip = peer.ip().to_canonical();
        let same = |leg: &&Leg| leg.answered.is_none() && leg.peer.ip().to_canonical() == ip;
        is_routable(ip) && self.legs.values().filter(same).count() < MAX_UNANSWERED
    }

    /// Asks for a channel. Until there is one, what is sent has a longer header.
    fn bind(&mut self, peer: SocketAddr) -> Result<(), BindChannelError> {
        let now = self.now();
        self.client.bind_channel(TransportType::Udp, peer, now)
    }

    fn tell_of(&mut self, token: u64) -> Result<(), Ended> {
        let Some(leg) = self.legs.get_mut(&token).filter(|leg| !leg.told) else {
            return Ok(());
        };
        leg.told = true;
        let (peer, local) = (leg.peer, leg.local);
        self.tell(Event::Leg { peer, local })
    }

    fn close(&mut self, token: u64) -> Result<(), Ended> {
        let Some(leg) = self.legs.remove(&token) else {
            return Ok(());
        };
        self.by_peer.remove(&leg.peer);
        let (peer, local) = (leg.peer, leg.local);
        self.tell(Event::LegClosed { peer, local })
    }

    fn close_idle(&mut self, now: Instant) -> Result<(), Ended> {
        let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = |leg: &Leg| {
            let over = match leg.answered {
                Some(at) => now.duration_since(at) >= IDLE,
                None => now.duration_since(leg.opened) >= UNANSWERED,
            };
            over && !wanted.legs.contains(&leg.peer)
        };
        let legs = self.legs.iter().filter(|(_, leg)| idle(leg));
        let idle: Vec<u64> = legs.map(|(token, _)| *token).collect();
        drop(wanted);
        idle.into_iter().try_for_each(|token| self.close(token))
    }
}

/// Datagrams.
impl Forwarder {
    /// Takes what the server has sent.
    fn read_server(&mut self, batch: &mut ReceiveBatch) -> Result<(), Ended> {
        for _ in 0..TURNS {
            let more = match &mut self.link {
                Link::Udp(_) => self.datagrams(batch)?,
                Link::Stream(_) => self.messages()?,
            };
            if !more {
                break;
            }
        }
        self.flush_inward();
        self.flush_stream()
    }

    /// One batch from the server; whether there may be more.
    fn datagrams(&mut self, batch: &mut ReceiveBatch) -> Result<bool, Ended> {
        let Link::Udp(socket) = &self.link else {
            return Ok(false);
        };
        // An error belongs to something that was sent, and is repeated or found missing.
        let full = match socket.receive(batch) {
            Ok(filled) => filled > 0,
            Err(_) => return Ok(false),
        };
        let (metas, arena) = batch.parts_mut();
        for meta in metas {
            let count = meta.length.div_ceil(meta.segment_size.max(1)).max(1) as u64;
            if meta.source != self.server {
                self.counters.drops.add(DropReason::Stranger, count);
            } else if meta.truncated {
                self.counters.drops.add(DropReason::Truncated, count);
            } else {
                for segment in meta.segments() {
                    self.take(arena.get(segment).unwrap_or_default())?;
                }
            }
        }
        Ok(full)
    }

    /// What is there of the stream; whether there may be more.
    fn messages(&mut self) -> Result<bool, Ended> {
        let Link::Stream(stream) = &mut self.link else {
            return Ok(false);
        };
        match stream.receive() {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(Ended::Lost(error)),
        }
        while let Link::Stream(stream) = &mut self.link {
            let wrong = |error| Ended::Lost(io::Error::new(io::ErrorKind::InvalidData, error));
            let Some(message) = stream.next().map_err(wrong)? else {
                break;
            };
            self.take(&message)?;
        }
        Ok(true)
    }

    /// Takes one message of the server.
    fn take(&mut self, bytes: &[u8]) -> Result<(), Ended> {
        self.heard = Instant::now();
        self.questions = 0;
        if let Some(code) = error_code(bytes) {
            self.code = code;
        }
        let now = self.now();
        let transport = match self.link {
            Link::Udp(_) => TransportType::Udp,
            Link::Stream(_) => TransportType::Tcp,
        };
        let message = TurnTransmit::new(bytes, transport, self.server, self.own);
        match self.client.recv(message, now) {
            TurnRecvRet::PeerData(data) => self.forward_inward(data.peer, data.data()),
            // The answer to a question whether it is there.
            TurnRecvRet::Ignored(_) if bytes.starts_with(&[0x01, 0x01]) => Ok(()),
            TurnRecvRet::Ignored(_) => {
                self.counters.drops.add(DropReason::UnknownType, 1);
                Ok(())
            }
            TurnRecvRet::Handled | TurnRecvRet::PeerIcmp { .. } => Ok(()),
        }
    }

    /// Takes a datagram of a peer to the tunnel.
    fn forward_inward(&mut self, peer: SocketAddr, data: &[u8]) -> Result<(), Ended> {
        let known = self.by_peer.get(&peer).copied();
        let leg = match known {
            Some(token) => Some(token),
            None if self.may_call(peer) => self.open(peer),
            None => None,
        };
        let Some(token) = leg.filter(|_| !data.is_empty()) else {
            self.counters.drops.add(DropReason::NoChannel, 1);
            return Ok(());
        };
        self.tell_of(token)?;
        if !self.inward.has_room(token, data.len()) {
            self.flush_inward();
        }
        self.inward.room(token, data.len()).copy_from_slice(data);
        Ok(())
    }

    fn flush_inward(&mut self) {
        let port = self.port.load(Ordering::Relaxed);
        let tunnel = (Ipv4Addr::LOCALHOST, port).into();
        if let Some(leg) = self.legs.get(&self.inward.to) {
            let sent = self
                .inward
                .send(&leg.socket, tunnel, &mut self.counters.drops);
            self.counters.received += sent;
        }
        self.inward.clear();
    }

    /// Takes what the tunnel has sent to a leg.
    fn read_leg(&mut self, token: u64, batch: &mut ReceiveBatch) -> Result<(), Ended> {
        let tunnel = self.port.load(Ordering::Relaxed);
        let tunnel = SocketAddr::from((Ipv4Addr::LOCALHOST, tunnel));
        for _ in 0..TURNS {
            let Some(leg) = self.legs.get_mut(&token) else {
                break;
            };
            // An error belongs to something that was sent, and was counted there.
            if !leg.socket.receive(batch).is_ok_and(|filled| filled > 0) {
                break;
            }
            let peer = leg.peer;
            // Not before: whom the tunnel does not answer needs none.
            let first = leg.answered.replace(Instant::now()).is_none();
            if first {
                // Without one it goes as well.
                let _ = self.bind(peer);
            }
            let (metas, arena) = batch.parts_mut();
            for meta in metas {
                let count = meta.length.div_ceil(meta.segment_size.max(1)).max(1) as u64;
                if meta.source != tunnel {
                    self.counters.drops.add(DropReason::Stranger, count);
                } else if meta.truncated || meta.length == 0 {
                    self.counters.drops.add(DropReason::Truncated, count);
                } else {
                    for segment in meta.segments() {
                        self.forward_outward(peer, arena.get(segment).unwrap_or_default());
                    }
                }
            }
        }
        self.flush_outward();
        self.flush_stream()
    }

    /// Takes a datagram of the tunnel to a peer.
    fn forward_outward(&mut self, peer: SocketAddr, data: &[u8]) {
        let now = self.now();
        let Ok(Some(message)) = self.client.send_to(TransportType::Udp, peer, data, now) else {
            return self.counters.drops.add(DropReason::NoChannel, 1);
        };
        let length = message.data.len();
        if length > MAX_MESSAGE {
            return self.counters.drops.add(DropReason::SendTooLarge, 1);
        }
        if !self.outward.has_room(SERVER, length) {
            self.flush_outward();
        }
        message.data.write_into(self.outward.room(SERVER, length));
    }

    fn flush_outward(&mut self) {
        let drops = &mut self.counters.drops;
        let sent = match &mut self.link {
            Link::Udp(socket) => self.outward.send(socket, self.server, drops),
            Link::Stream(stream) => {
                let mut sent = 0;
                for message in self.outward.bytes.chunks(self.outward.size.max(1)) {
                    match stream.push(message) {
                        true => sent += 1,
                        false => drops.add(DropReason::SendNoBuffers, 1),
                    }
                }
                sent
            }
        };
        self.counters.sent += sent;
        self.outward.clear();
    }

    /// Hands the stream's bytes to the kernel, and waits for room if it does not take them all.
    fn flush_stream(&mut self) -> Result<(), Ended> {
        let Link::Stream(stream) = &mut self.link else {
            return Ok(());
        };
        let interest = match stream.flush().map_err(Ended::Lost)? {
            true => Interest::ReadWrite,
            false => Interest::Read,
        };
        self.epoll
            .modify(&*stream, SERVER, interest)
            .map_err(Ended::System)
    }
}

/// Datagrams for one place that are sent together: all of one length but the last, which may be shorter.
#[derive(Default)]
struct Run {
    to: u64,
    size: usize,
    bytes: Vec<u8>,
}

impl Run {
    /// Whether a datagram of this length can be added.
    fn has_room(&self, to: u64, length: usize) -> bool {
        self.bytes.is_empty()
            || (to == self.to
                && length <= self.size
                && self.bytes.len().is_multiple_of(self.size)
                && self.bytes.len() + length <= MAX_RUN
                && self.bytes.len() / self.size < MAX_GSO_SEGMENTS)
    }

    /// Where one is to be written that has room.
    fn room(&mut self, to: u64, length: usize) -> &mut [u8] {
        if self.bytes.is_empty() {
            (self.to, self.size) = (to, length.max(1));
        }
        let at = self.bytes.len();
        self.bytes.resize(at + length, 0);
        &mut self.bytes[at..]
    }

    /// Sends them; how many. What is not sent is counted.
    fn send(&self, socket: &UdpSocket, to: SocketAddr, drops: &mut DropCounts) -> u64 {
        let size = self.size.max(1);
        let count = |bytes: usize| bytes.div_ceil(size) as u64;
        let mut rest = self.bytes.as_slice();
        let mut sent = 0;
        while !rest.is_empty() {
            let transmit = Transmit {
                segment_size: u16::try_from(size).ok().filter(|_| rest.len() > size),
                ..whole(to, rest)
            };
            let Err(SendError { bytes, error, .. }) = socket.send(&transmit) else {
                return sent + count(rest.len());
            };
            sent += count(bytes);
            rest = rest.get(bytes..).unwrap_or_default();
            let (reason, lost) = match error.raw_os_error() {
                // A probe for the path's MTU is not to take along what comes behind it.
                Some(EMSGSIZE) => (DropReason::SendTooLarge, size.min(rest.len())),
                Some(ENOBUFS) => (DropReason::SendNoBuffers, rest.len()),
                _ if error.kind() == io::ErrorKind::WouldBlock => {
                    (DropReason::SendNoBuffers, rest.len())
                }
                _ => (DropReason::SendRefused, rest.len()),
            };
            drops.add(reason, count(lost));
            rest = rest.get(lost..).unwrap_or_default();
        }
        sent
    }

    fn clear(&mut self) {
        self.bytes.clear();
    }
}

fn whole(destination: SocketAddr, payload: &[u8]) -> Transmit<'_> {
    Transmit {
        destination,
        source: None,
        traffic_class: 0,
        segment_size: None,
        payload,
    }
}

fn tls(target: &Target) -> Result<ClientConnection, Ended> {
    let name = ServerName::try_from(target.host.clone());
    let name = name.map_err(|_| Ended::Name(target.host.clone()))?;
    let connection = ClientConnection::new(target.tls.clone(), name);
    connection.map_err(|error| Ended::Unconnected {
        transport: Transport::Tls,
        source: io::Error::other(error),
    })
}

/// The error that a response tells of (RFC 8489, section 14.8).
fn error_code(bytes: &[u8]) -> Option<u16> {
    // Class 0b11: quickly, as most of what comes is data.
    let [high, low] = *bytes.first_chunk()?;
    if high & 0xc1 != 0x01 || low & 0x10 == 0 {
        return None;
    }
    let message = Message::from_bytes(bytes).ok()?;
    if !message.has_class(MessageClass::Error) {
        return None;
    }
    message
        .attribute::<ErrorCode>()
        .ok()
        .map(|code| code.code())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::client;
    use seikan_proto::keys::PublicKey;
    use seikan_proto::mesh::{RelayKind, RelaySecret};
    use stun_types::message::{BINDING, MessageWrite as _, MessageWriteExt as _, MessageWriteVec};

    /// One that speaks to nobody; the others are what it ends without.
    fn forwarder() -> (Forwarder, UnixStream, mpsc::Receiver<Event>) {
        let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
        let tls = client::tls(None, rustls::ALL_VERSIONS).expect("TLS");
        let target = Target {
            server: (Ipv4Addr::LOCALHOST, 9).into(),
            transport: Transport::Udp,
            host: "localhost".to_owned(),
            tls: Arc::new(tls),
            ticket: Ticket::new(&secret, &PublicKey::from_bytes([1; 32]), 7),
            fwmark: None,
        };
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (events, heard) = mpsc::channel(1000);
        let forwarder = Forwarder::new(target, Arc::default(), events, Arc::default(), theirs);
        (forwarder.expect("a forwarder"), ours, heard)
    }

    #[test]
    fn who_sends_from_one_address_has_few_legs_until_the_tunnel_answers() {
        let (mut forwarder, _wake, _heard) = forwarder();
        let hear = |forwarder: &mut Forwarder, ip: [u8; 4], port: u16| {
            let taken = forwarder.forward_inward(SocketAddr::from((ip, port)), &[0]);
            taken.expect("it goes on");
            forwarder.legs.len()
        };
        for port in 1..=100 {
            hear(&mut forwarder, [192, 0, 2, 1], port);
        }
        assert_eq!(forwarder.legs.len(), MAX_UNANSWERED);
        let dropped = forwarder.counters.drops.get(DropReason::NoChannel);
        assert_eq!(dropped, 100 - MAX_UNANSWERED as u64);
        let another = hear(&mut forwarder, [192, 0, 2, 2], 1);
        assert_eq!(another, MAX_UNANSWERED + 1);
        for leg in forwarder.legs.values_mut() {
            leg.answered = Some(Instant::now());
        }
        let more = hear(&mut forwarder, [192, 0, 2, 1], 101);
        assert_eq!(more, MAX_UNANSWERED + 2);
    }

    #[test]
    fn no_leg_leads_to_this_host_itself() {
        let (mut forwarder, _wake, _heard) = forwarder();
        for peer in ["127.0.0.1:7", "[::1]:7", "[::ffff:127.0.0.1]:7"] {
            let taken = forwarder.forward_inward(peer.parse().expect(peer), &[0]);
            taken.expect("it goes on");
            assert!(forwarder.legs.is_empty(), "{peer}");
        }
    }

    fn run(datagrams: &[(u64, usize)]) -> (Run, usize) {
        let mut run = Run::default();
        for (n, (to, length)) in datagrams.iter().enumerate() {
            if !run.has_room(*to, *length) {
                return (run, n);
            }
            run.room(*to, *length).fill(n as u8);
        }
        (run, datagrams.len())
    }

    #[test]
    fn datagrams_of_one_length_for_one_place_are_sent_together() {
        let (run, all) = run(&[(5, 100), (5, 100), (5, 40)]);
        assert_eq!((run.to, run.size, run.bytes.len(), all), (5, 100, 240, 3));
        assert_eq!(run.bytes[99..101], [0, 1]);
    }

    #[test]
    fn another_place_a_longer_one_or_one_after_a_shorter_begins_anew() {
        for third in [(6, 100), (5, 101)] {
            assert_eq!(run(&[(5, 100), (5, 100), third]).1, 2, "{third:?}");
        }
        assert_eq!(run(&[(5, 100), (5, 40), (5, 40)]).1, 2);
    }

    #[test]
    fn no_more_are_joined_than_can_be_sent_at_once() {
        assert_eq!(run(&[(5, 100); 200]).1, MAX_GSO_SEGMENTS);
        assert_eq!(run(&[(5, 1400); 200]).1, MAX_RUN / 1400);
    }

    #[test]
    fn what_is_sent_together_arrives_one_by_one() {
        let bind = || {
            let any = (Ipv4Addr::LOCALHOST, 0).into();
            UdpSocket::bind(any, &UdpOptions::default()).expect("bind")
        };
        let from = bind();
        let to = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let (run, _) = run(&[(5, 100), (5, 100), (5, 40)]);
        let mut drops = DropCounts::default();
        let at = to.local_addr().expect("an address");
        assert_eq!(run.send(&from, at, &mut drops), 3);
        let mut buffer = [0; 1000];
        let lengths: Vec<usize> = (0..3)
            .map(|_| to.recv(&mut buffer).expect("received"))
            .collect();
        assert_eq!(lengths, [100, 100, 40]);
        assert_eq!(drops, DropCounts::default());
    }

    #[test]
    fn an_error_is_known_by_its_code_and_data_is_none() {
        let request = Message::builder_request(BINDING, MessageWriteVec::new()).finish();
        let request = Message::from_bytes(&request).expect("a request");
        let mut error = Message::builder_error(&request, MessageWriteVec::new());
        let code = ErrorCode::builder(486).build().expect("a code");
        error.add_attribute(&code).expect("room");
        assert_eq!(error_code(&error.finish()), Some(486));
        let success = Message::builder_success(&request, MessageWriteVec::new()).finish();
        assert_eq!(error_code(&success), None);
        // A ChannelData message; the beginning of an error.
        for other in [&[0x41, 0x11, 0, 1, 1][..], &[0x01, 0x11], &[]] {
            assert_eq!(error_code(other), None, "{other:?}");
        }
    }
}
