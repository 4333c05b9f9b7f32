//! The thread that keeps one allocation at a TURN server (RFC 8656) and forwards between it and the tunnel.
//!
//! The protocol is the library's, which knows no sockets; those are here. For each address that the server receives from or sends to
//! there is one of the [`legs`](crate::mesh::legs).

use crate::mesh::endpoints::is_routable;
use crate::mesh::legs::{Counters, Legs, Overflow, Run, whole};
use crate::mesh::stun::Question;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use seikan_observe::DropReason;
use seikan_proto::mesh::Ticket;
use seikan_proto::mesh::framing::Framing;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::udp::{ReceiveBatch, UdpError, UdpOptions, UdpSocket};
use seikan_tls::Stream;
use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU16;
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
/// How long a server may take to accept a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// How long it may take then to give an allocation, TLS included.
const ALLOCATE_WITHIN: Duration = Duration::from_secs(4);
/// How often the server is asked whether it is there, if nothing comes from it: within the shortest that a NAT remembers.
const ASK_EVERY: Duration = Duration::from_secs(20);
/// How soon after a question that is not answered the next one comes, and how many there are.
const ASK_AGAIN: Duration = Duration::from_secs(1);
const MAX_QUESTIONS: u32 = 6;
/// How often is looked for legs that are over, and for what was refused and may be granted now.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// How often is told how much was forwarded, while there is something.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// Bytes of one message, at most.
const MAX_MESSAGE: usize = 1 << 16;
/// Receive calls before others have their turn.
const TURNS: usize = 8;
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

struct Forwarder {
    transport: Transport,
    server: SocketAddr,
    /// What the library takes this end's address to be: it compares, and sends nothing there.
    own: SocketAddr,
    client: TurnClient,
    link: Link,
    /// Before the server's socket.
    overflow: Overflow,
    epoll: Epoll,
    wake: UnixStream,
    wanted: Arc<Mutex<Wanted>>,
    /// Who may send to the relayed address, or was asked for.
    permitted: BTreeSet<IpAddr>,
    legs: Legs,
    events: mpsc::Sender<Event>,
    relayed: Option<SocketAddr>,
    /// The last error that the server answered with.
    code: u16,
    told: Counters,
    begun: Instant,
    heard: Instant,
    questions: u32,
    next_question: Instant,
    next_look: Instant,
    next_count: Instant,
    /// To the server.
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
                let tls = tls.transpose()?.map(Into::into);
                let stream = TcpStream::connect_timeout(&server, CONNECT_WITHIN)
                    .and_then(|socket| Stream::new(socket, tls, Framing::Turn));
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
            overflow: Overflow::default(),
            epoll,
            wake,
            wanted,
            permitted: BTreeSet::new(),
            legs: Legs::new(FIRST_LEG, port),
            events,
            relayed: None,
            code: 0,
            told: Counters::default(),
            begun: now,
            heard: now,
            questions: 0,
            next_question: now + ASK_EVERY,
            next_look: now + LOOK_EVERY,
            next_count: now + COUNT_EVERY,
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
        if self.legs.counters != self.told {
            if now >= self.next_count {
                self.next_count = now + COUNT_EVERY;
                self.legs.count_overflow();
                if let Link::Udp(socket) = &self.link {
                    self.overflow.count(socket, &mut self.legs.counters.drops);
                }
                self.told = self.legs.counters.clone();
                self.tell(Event::Counted(Box::new(self.told.clone())))?;
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
                let _ = stream.push_request(&[message]);
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
            TurnEvent::ChannelCreated(_, peer) => match self.legs.at(&peer) {
                Some(token) => self.tell_of(token),
                None => Ok(()),
            },
            TurnEvent::ChannelCreateFailed(_, peer) => match self.legs.at(&peer) {
                Some(token) => self.close(token),
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
            if !other || self.legs.at(&peer).is_some() {
                continue;
            }
            let Some(token) = self.open(peer) else {
                continue;
            };
            match self.bind(token) {
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
        let room = self.legs.len() < MAX_LEGS;
        room.then(|| self.legs.open(peer, &self.epoll))?
    }

    /// Whether one may be opened to a peer because it sends.
    fn may_call(&self, peer: SocketAddr) -> bool {
        let ip = peer.ip().to_canonical();
        is_routable(ip) && self.legs.unanswered(ip) < MAX_UNANSWERED
    }

    /// Asks for a channel, once for each leg. Until there is one, what is sent has a longer header.
    fn bind(&mut self, token: u64) -> Result<(), BindChannelError> {
        let now = self.now();
        match self.legs.get_mut(token).filter(|leg| !leg.bound) {
            Some(leg) => {
                leg.bound = true;
                let peer = leg.peer;
                self.client.bind_channel(TransportType::Udp, peer, now)
            }
            None => Ok(()),
        }
    }

    fn tell_of(&mut self, token: u64) -> Result<(), Ended> {
        let Some(leg) = self.legs.get_mut(token).filter(|leg| !leg.told) else {
            return Ok(());
        };
        leg.told = true;
        let (peer, local) = (leg.peer, leg.local);
        self.tell(Event::Leg { peer, local })
    }

    fn close(&mut self, token: u64) -> Result<(), Ended> {
        let Some(leg) = self.legs.close(token) else {
            return Ok(());
        };
        let (peer, local) = (leg.peer, leg.local);
        self.tell(Event::LegClosed { peer, local })
    }

    fn close_idle(&mut self, now: Instant) -> Result<(), Ended> {
        let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = self.legs.idle(now, |peer| wanted.legs.contains(peer));
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
        self.legs.flush();
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
                self.legs.counters.drops.add(DropReason::Stranger, count);
            } else if meta.truncated {
                self.legs.counters.drops.add(DropReason::Truncated, count);
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
            Err(error) => return Err(self.lost(error)),
        }
        let mut message = Vec::new();
        while let Link::Stream(stream) = &mut self.link {
            let wrong = |error| Ended::Lost(io::Error::new(io::ErrorKind::InvalidData, error));
            let Some(next) = stream.peek().map_err(wrong)? else {
                break;
            };
            message.clear();
            message.extend_from_slice(next);
            stream.take();
            self.take(&message)?;
        }
        Ok(true)
    }

    /// What it is that a connection is no more.
    fn lost(&self, source: io::Error) -> Ended {
        let transport = self.transport;
        match self.relayed {
            Some(_) => Ended::Lost(source),
            None => Ended::Unconnected { transport, source },
        }
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
                self.legs.counters.drops.add(DropReason::UnknownType, 1);
                Ok(())
            }
            TurnRecvRet::Handled | TurnRecvRet::PeerIcmp { .. } => Ok(()),
        }
    }

    /// Takes a datagram of a peer to the tunnel.
    fn forward_inward(&mut self, peer: SocketAddr, data: &[u8]) -> Result<(), Ended> {
        let leg = match self.legs.at(&peer) {
            Some(token) => Some(token),
            None if self.may_call(peer) => self.open(peer),
            None => None,
        };
        let Some(token) = leg.filter(|_| !data.is_empty()) else {
            self.legs.counters.drops.add(DropReason::NoChannel, 1);
            return Ok(());
        };
        self.tell_of(token)?;
        self.legs.deliver(token, data);
        Ok(())
    }

    /// Takes what the tunnel has sent to a leg.
    fn read_leg(&mut self, token: u64, batch: &mut ReceiveBatch) -> Result<(), Ended> {
        let Some(peer) = self.legs.get_mut(token).map(|leg| leg.peer) else {
            return Ok(());
        };
        for _ in 0..TURNS {
            if !self.legs.receive(token, batch) {
                break;
            }
            // Not before: whom the tunnel does not answer needs none. Without one it goes as well.
            let _ = self.bind(token);
            let (metas, arena) = batch.parts_mut();
            for meta in metas {
                if self.legs.is_whole(meta) {
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
            return self.legs.counters.drops.add(DropReason::NoChannel, 1);
        };
        let length = message.data.len();
        if length > MAX_MESSAGE {
            return self.legs.counters.drops.add(DropReason::SendTooLarge, 1);
        }
        if !self.outward.has_room(SERVER, length) {
            self.flush_outward();
        }
        message.data.write_into(self.outward.room(SERVER, length));
    }

    fn flush_outward(&mut self) {
        let drops = &mut self.legs.counters.drops;
        let sent = match &mut self.link {
            Link::Udp(socket) => self.outward.send(socket, self.server, drops),
            Link::Stream(stream) => {
                let mut sent = 0;
                for message in self.outward.bytes.chunks(self.outward.size.max(1)) {
                    match stream.push(&[message]) {
                        true => sent += 1,
                        false => drops.add(DropReason::SendNoBuffers, 1),
                    }
                }
                sent
            }
        };
        self.legs.counters.sent += sent;
        self.outward.clear();
    }

    /// Hands the stream's bytes to the kernel, and waits for room if it does not take them all.
    fn flush_stream(&mut self) -> Result<(), Ended> {
        let Link::Stream(stream) = &mut self.link else {
            return Ok(());
        };
        let interest = match stream.flush() {
            Ok(true) => Interest::ReadWrite,
            Ok(false) => Interest::Read,
            Err(error) => return Err(self.lost(error)),
        };
        self.epoll
            .modify(&*stream, SERVER, interest)
            .map_err(Ended::System)
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

    fn target() -> Target {
        let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
        let tls = client::tls(None, rustls::ALL_VERSIONS).expect("TLS");
        Target {
            server: (Ipv4Addr::LOCALHOST, 9).into(),
            transport: Transport::Udp,
            host: "localhost".to_owned(),
            tls: Arc::new(tls),
            ticket: Ticket::new(&secret, &PublicKey::from_bytes([1; 32]), 7),
            fwmark: None,
        }
    }

    /// One that speaks to nobody; the others are what it ends without.
    fn forwarder() -> (Forwarder, UnixStream, mpsc::Receiver<Event>) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (events, heard) = mpsc::channel(1000);
        let forwarder = Forwarder::new(target(), Arc::default(), events, Arc::default(), theirs);
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
        let dropped = forwarder.legs.counters.drops.get(DropReason::NoChannel);
        assert_eq!(dropped, 100 - MAX_UNANSWERED as u64);
        let another = hear(&mut forwarder, [192, 0, 2, 2], 1);
        assert_eq!(another, MAX_UNANSWERED + 1);
        for token in FIRST_LEG..FIRST_LEG + another as u64 {
            let leg = forwarder.legs.get_mut(token).expect("a leg");
            leg.answered = Some(Instant::now());
        }
        let more = hear(&mut forwarder, [192, 0, 2, 1], 101);
        assert_eq!(more, MAX_UNANSWERED + 2);
    }

    #[test]
    fn what_the_kernel_drops_before_the_servers_socket_is_counted() {
        let (mut forwarder, _wake, mut heard) = forwarder();
        let Link::Udp(socket) = &forwarder.link else {
            panic!("it is by UDP");
        };
        let port = socket.local_addr().expect("an address").port();
        let sender = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        // More than the largest buffer holds, with what the kernel keeps of each.
        for _ in 0..20_000 {
            let sent = sender.send_to(&[4; 1000], (Ipv4Addr::LOCALHOST, port));
            sent.expect("sent");
        }
        let mut batch = ReceiveBatch::new(16, MAX_MESSAGE);
        while forwarder.datagrams(&mut batch).expect("it goes on") {}
        forwarder.next_count = Instant::now();
        forwarder.drive().expect("it goes on");
        let Some(Event::Counted(counters)) = heard.blocking_recv() else {
            panic!("it does not say how much");
        };
        let [came, dropped] = [DropReason::Stranger, DropReason::ReceiveQueueFull]
            .map(|reason| counters.drops.get(reason));
        assert!(dropped > 0, "nothing overflowed");
        assert_eq!(came + dropped, 20_000);
    }

    #[test]
    fn no_leg_leads_to_this_host_itself() {
        let (mut forwarder, _wake, _heard) = forwarder();
        for peer in ["127.0.0.1:7", "[::1]:7", "[::ffff:127.0.0.1]:7"] {
            let taken = forwarder.forward_inward(peer.parse().expect(peer), &[0]);
            taken.expect("it goes on");
            assert_eq!(forwarder.legs.len(), 0, "{peer}");
        }
    }

    /// The last that a thread says that is to have an allocation by TLS, and how long it took to say so.
    fn ended_by_tls(server: SocketAddr) -> (Ended, Duration) {
        let begun = Instant::now();
        let (events, mut heard) = mpsc::channel(1000);
        let target = Target {
            transport: Transport::Tls,
            server,
            ..target()
        };
        let _handle = start(target, Arc::default(), events).expect("started");
        while let Some(event) = heard.blocking_recv() {
            if let Event::Ended(ended) = event {
                return (ended, begun.elapsed());
            }
        }
        panic!("it did not end in order");
    }

    #[test]
    fn a_server_has_four_seconds_for_tls_and_the_allocation_whatever_it_sends_meanwhile() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let server = listener.local_addr().expect("an address");
        let slowly = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().expect("accepted");
            // RFC 8446, section 5.1: a record of 16 KiB, of which a byte comes now and then, until nobody is there.
            let mut bytes = [22, 3, 3, 0x40, 0, 2].into_iter();
            while socket.write_all(&[bytes.next().unwrap_or(0)]).is_ok() {
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let (ended, took) = ended_by_tls(server);
        assert!(matches!(ended, Ended::NoAnswer(Transport::Tls)), "{ended}");
        assert!(
            (ALLOCATE_WITHIN..ALLOCATE_WITHIN * 2).contains(&took),
            "{took:?}"
        );
        slowly.join().expect("it has ended");
    }

    #[test]
    fn what_is_no_tls_is_no_connection() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let server = listener.local_addr().expect("an address");
        let other = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().expect("accepted");
            socket
                .write_all(b"220 mail.example.org\r\n")
                .expect("written");
            let _ = socket.read(&mut [0; 4096]);
        });
        let (ended, _) = ended_by_tls(server);
        assert!(
            ended.to_string().starts_with("no connection by TLS"),
            "{ended}"
        );
        other.join().expect("it has ended");
    }

    #[test]
    fn the_server_is_asked_for_one_channel_for_each_leg() {
        let (mut forwarder, _wake, _heard) = forwarder();
        let peer = SocketAddr::from(([192, 0, 2, 1], 7));
        let token = forwarder.open(peer).expect("a leg");
        assert!(forwarder.bind(token).is_err(), "there is no allocation");
        // Once more, and the library is not asked: it would say the same.
        assert!(forwarder.bind(token).is_ok());
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
