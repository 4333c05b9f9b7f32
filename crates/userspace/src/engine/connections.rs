//! TCP connections: requests of clients, connections to the inside and from it.

use super::{CONNECTION, Engine, Id, net};
use crate::host_stream::{HostStream, OwnStream};
use crate::http;
use crate::inside::{Inside, Next};
use crate::options::Exposed;
use crate::packet::FlowKey;
use crate::service::Service;
use crate::sockets::{self, Answer, Ends, Stream};
use crate::socks::{self, Parsed};
use crate::splice::Splice;
use crate::target::{Failure, Target};
use seikan_observe::DropReason;
use seikan_sys::poll::{Epoll, Event, Interest};
use smoltcp::socket::tcp::State;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Timeout of a client's request.
const REQUEST_WITHIN: Duration = Duration::from_secs(10);
/// Timeout of an attempt to connect.
const CONNECT_WITHIN: Duration = Duration::from_secs(30);
/// Maximum time in which the resets of a stack that ends must be read.
const RESETS_WITHIN: Duration = Duration::from_millis(500);
/// Maximum number of connections that are accepted from one socket at a time.
const ACCEPTS: usize = 64;
/// Sizes of each of a new connection's two buffers, in bytes. A size is used while the buffers of
/// all connections take at most this many quarters of [`crate::Limits::buffer_bytes`]. 4 MiB carry
/// 2 Gbit/s over 16 ms.
const BUFFERS: [(usize, usize); 3] = [(1, 4 << 20), (3, 512 << 10), (4, 64 << 10)];

/// Maximum share of the buffers that exposed ports may use, in quarters, so that peers cannot use
/// up the memory for the host's own connections.
const EXPOSED_QUARTERS: usize = 3;

/// A TCP connection of the host and its continuation inside the tunnel.
#[derive(Debug)]
pub(super) struct Connection {
    pub service: Service,
    pub generation: u32,
    /// Whether it is in the queue of connections to advance.
    pub queued: bool,
    /// Time of its entry among the timers.
    pub timer: Option<Instant>,
    pub inside: Option<Inside>,
    pub splice: Splice,
    /// Number of bytes that the far end had not acknowledged when bytes were last moved.
    pub waiting: usize,
    pub stage: Stage,
    /// When the current stage times out.
    pub deadline: Option<Instant>,
    /// The answer for a socket of this process that waits for the far end.
    pub answer: Option<Answer<Ends>>,
}

/// Stages of a connection.
#[derive(Debug)]
pub(super) enum Stage {
    /// The client's request is being read.
    Request(Dialogue, Vec<u8>),
    /// The connection to the far end is being opened. Bytes that the client has sent after its
    /// request wait.
    Opening(Dialogue, Vec<u8>),
    /// The host's socket is connecting to an exposed port's target, on behalf of the far end.
    Accepting,
    /// The far end is completing its handshake with a listening socket of this process, which then
    /// gets the stream.
    Arriving(Arrival),
    /// Bytes are moved.
    Open,
    /// The client holds a UDP association, which ends with the connection.
    Associated,
}

/// A connection for a listening socket of this process.
#[derive(Debug)]
pub(super) struct Arrival {
    stream: Stream,
    queue: mpsc::Sender<Stream>,
}

/// The protocol of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialogue {
    /// SOCKS5, before its greeting.
    Greeting,
    /// SOCKS5, after its greeting.
    Socks,
    /// HTTP.
    Http,
    /// No protocol: a forwarded port, or a socket of this process.
    None,
}

impl Engine {
    /// Accepts connections to a listening socket of the host.
    pub(super) fn accept(&mut self, index: usize) {
        for _ in 0..ACCEPTS {
            let Some(entrance) = self.parts.entrances.get(index) else {
                return;
            };
            // Connections that are not accepted now are reported again.
            let Ok((socket, _)) = entrance.socket.accept() else {
                return;
            };
            let (service, target) = (entrance.service, entrance.target.clone());
            if self.is_full() {
                self.service(service).refused += 1;
                continue;
            }
            let _ = socket.set_nonblocking(true);
            let _ = socket.set_nodelay(true);
            let options = SockRef::from(&socket);
            // A client that has vanished is noticed.
            let _ = options.set_keepalive(true);
            // The urgent byte is carried as an ordinary one.
            let _ = options.set_out_of_band_inline(true);
            let dialogue = match service {
                Service::Socks => Dialogue::Greeting,
                Service::Http => Dialogue::Http,
                Service::Forward | Service::Exposed | Service::Own => Dialogue::None,
            };
            let stage = Stage::Request(dialogue, Vec::new());
            let Ok(index) = self.insert(service, HostStream::Tcp(socket), stage) else {
                continue;
            };
            self.connections[index].deadline = Some(self.now + REQUEST_WITHIN);
            if let Some(target) = target {
                self.open(index, &target, Vec::new());
            }
            self.enqueue(index);
        }
    }

    fn insert(&mut self, service: Service, host: HostStream, stage: Stage) -> io::Result<usize> {
        let generation = self.generation();
        let entry = self.connections.vacant_entry();
        let index = entry.key();
        let id = Id {
            index: index as u32,
            generation,
        };
        self.epoll.add_edge(&host, id.token(CONNECTION))?;
        entry.insert(Connection {
            service,
            generation,
            queued: false,
            timer: None,
            inside: None,
            splice: Splice::new(host),
            waiting: 0,
            stage,
            deadline: None,
            answer: None,
        });
        self.service(service).open += 1;
        Ok(index)
    }

    /// Opens a connection to the host for a SYN to an exposed port. The SYN must be passed to the
    /// connection next.
    pub(super) fn open_exposed(
        &mut self,
        flow: FlowKey,
        exposed: Exposed,
    ) -> Result<usize, DropReason> {
        let buffer = self.buffer(EXPOSED_QUARTERS);
        let buffer = buffer.filter(|_| !self.is_full_for_inside());
        let buffer = buffer.ok_or(DropReason::FlowLimit)?;
        let socket = connect_host(exposed.target).map_err(|_| DropReason::HostRefused)?;
        let inside = Inside::pending(flow, buffer).ok_or(DropReason::NoService)?;
        let index = self
            .insert(Service::Exposed, HostStream::Tcp(socket), Stage::Accepting)
            .map_err(|_| DropReason::FlowLimit)?;
        let connection = &mut self.connections[index];
        // An event reports the socket as writable as soon as the host has answered.
        connection.splice.writable = false;
        connection.deadline = Some(self.now + CONNECT_WITHIN);
        self.attach(index, inside);
        Ok(index)
    }

    /// Connects a stream of this process.
    pub(super) fn open_own(&mut self, target: &Target, stream: OwnStream, answer: Answer<Ends>) {
        let stage = Stage::Request(Dialogue::None, Vec::new());
        let inserted = if self.is_full() {
            self.service(Service::Own).refused += 1;
            None
        } else {
            self.insert(Service::Own, HostStream::Own(stream), stage)
                .ok()
        };
        let Some(index) = inserted else {
            let _ = answer.send(Err(Failure::Limit.into()));
            return;
        };
        self.connections[index].answer = Some(answer);
        self.open(index, target, Vec::new());
        self.enqueue(index);
    }

    /// Opens a connection to a listening socket of this process for a SYN. The SYN must be passed
    /// to the connection next.
    pub(super) fn open_listening(
        &mut self,
        flow: FlowKey,
        queue: mpsc::Sender<Stream>,
    ) -> Result<usize, DropReason> {
        let buffer = self.buffer(EXPOSED_QUARTERS);
        let buffer = buffer.filter(|_| !self.is_full_for_inside());
        let buffer = buffer.ok_or(DropReason::FlowLimit)?;
        let mut inside = Inside::pending(flow, buffer).ok_or(DropReason::NoService)?;
        inside.accept();
        let (socket, own) = sockets::pair().map_err(|_| DropReason::FlowLimit)?;
        let stream = Stream {
            socket,
            end: own.end.clone(),
            ends: Ends {
                local: flow.local,
                remote: flow.remote,
            },
        };
        let stage = Stage::Arriving(Arrival { stream, queue });
        let index = self
            .insert(Service::Exposed, HostStream::Own(own), stage)
            .map_err(|_| DropReason::FlowLimit)?;
        self.connections[index].deadline = Some(self.now + CONNECT_WITHIN);
        self.attach(index, inside);
        Ok(index)
    }

    fn attach(&mut self, index: usize, inside: Inside) {
        self.buffer_bytes += inside.buffer_bytes;
        self.flows.insert(inside.flow, index);
        self.connections[index].inside = Some(inside);
    }

    /// Returns the size of each buffer of a new connection; `None` if there is no space. `most` is
    /// the maximum share of all buffers in use, in quarters.
    fn buffer(&self, most: usize) -> Option<usize> {
        let limit = self.parts.limits.buffer_bytes;
        BUFFERS.into_iter().find_map(|(quarters, size)| {
            let fits = self.buffer_bytes + 2 * size <= limit / 4 * quarters.min(most);
            fits.then_some(size)
        })
    }

    /// Starts to connect to a destination inside.
    fn open(&mut self, index: usize, target: &Target, early: Vec<u8>) {
        let dialogue = match &self.connections[index].stage {
            Stage::Request(dialogue, _) => *dialogue,
            _ => return,
        };
        let opened = self.connect_inside(target);
        let connection = &mut self.connections[index];
        connection.stage = Stage::Opening(dialogue, early);
        connection.deadline = Some(self.now + CONNECT_WITHIN);
        match opened {
            Ok(inside) => self.attach(index, inside),
            Err(failure) => self.fail(index, failure),
        }
    }

    fn connect_inside(&mut self, target: &Target) -> Result<Inside, Failure> {
        let (own, remote) = self.resolve(target)?;
        let buffer = self.buffer(4).ok_or(Failure::Limit)?;
        let is_used = |engine: &Engine, flow: &FlowKey| engine.flows.contains_key(flow);
        let flow = self.free_flow(own, remote, is_used).ok_or(Failure::Limit)?;
        Inside::connect(&mut self.interface, flow, buffer).map_err(|_| Failure::Unreachable)
    }

    /// Records an epoll event of a host's socket.
    pub(super) fn on_host_event(&mut self, id: Id, event: &Event) {
        let index = id.index as usize;
        let Some(connection) = self.connections.get_mut(index) else {
            return;
        };
        if connection.generation == id.generation {
            connection.splice.readable |= event.readable || event.failed;
            connection.splice.writable |= event.writable || event.failed;
            connection.splice.closed |= event.failed;
            connection.splice.ended |= event.ended;
            self.enqueue(index);
        }
    }

    /// Handles an ICMP error about the segment with this sequence number. It ends only an attempt to
    /// connect, and only if the segment is its SYN (RFC 5927, sections 4.1 and 5.2). Returns whether it did.
    pub(super) fn on_unreachable(&mut self, index: usize, seq: u32, is_port: bool) -> bool {
        let connection = &self.connections[index];
        let opening = matches!(connection.stage, Stage::Opening(..));
        let syn = connection.inside.as_ref().and_then(|inside| inside.syn);
        let ends = opening && syn == Some(seq);
        if ends {
            let failure = if is_port {
                Failure::Refused
            } else {
                Failure::Unreachable
            };
            self.fail(index, failure);
        }
        ends
    }

    /// Advances a connection as far as possible now.
    pub(super) fn advance(&mut self, index: usize) {
        let Some(connection) = self.connections.get_mut(index) else {
            return;
        };
        connection.queued = false;
        let expired = connection.deadline.is_some_and(|at| at <= self.now);
        match connection.stage {
            Stage::Request(..) if expired => {
                let service = connection.service;
                self.service(service).refused += 1;
                return self.remove(index);
            }
            Stage::Opening(..) if expired => return self.fail(index, Failure::TimedOut),
            // The caller that waited for the connection has given up.
            Stage::Opening(..) if connection.splice.closed && connection.splice.host.is_own() => {
                let service = connection.service;
                self.service(service).refused += 1;
                self.finish(index);
            }
            Stage::Request(..) => self.read_request(index),
            Stage::Opening(..) => self.follow_opening(index),
            Stage::Arriving(_) => self.follow_arriving(index, expired),
            Stage::Accepting => self.follow_accepting(index, expired),
            Stage::Open => self.pump(index, expired),
            Stage::Associated => self.follow_association(index),
        }
        self.egress(index);
    }

    fn egress(&mut self, index: usize) {
        let Some(connection) = self.connections.get_mut(index) else {
            return;
        };
        let mut net = net(&mut self.interface, &mut self.parts, self.epoch, self.now);
        let next = match &mut connection.inside {
            Some(inside) => inside.egress(&mut net),
            None => Next::At(None),
        };
        // smoltcp would report a SYN that is not answered yet as due.
        let waits = matches!(connection.stage, Stage::Accepting);
        let next = match next {
            Next::Blocked => {
                self.blocked.push(index);
                None
            }
            Next::At(_) if waits => None,
            // Never immediately: everything that is due has been done.
            Next::At(at) => at.map(|at| at.max(self.now + Duration::from_millis(1))),
        };
        let connection = &mut self.connections[index];
        let next = [next, connection.deadline].into_iter().flatten().min();
        if connection.timer != next {
            if let Some(at) = connection.timer {
                self.timers.remove(&(at, index));
            }
            connection.timer = next;
            self.timers.extend(next.map(|at| (at, index)));
        }
    }

    /// Reads and answers the request of a client.
    fn read_request(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        let Stage::Request(_, head) = &mut connection.stage else {
            return;
        };
        let mut chunk = [0; 2048];
        let ended = loop {
            if !connection.splice.readable || head.len() > http::MAX_HEAD {
                break false;
            }
            match connection.splice.host.read(&mut chunk) {
                Ok(0) => break true,
                Ok(length) => head.extend(&chunk[..length]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    connection.splice.readable = false;
                }
                Err(_) => break true,
            }
        };
        loop {
            let Some(Connection {
                stage: Stage::Request(dialogue, head),
                ..
            }) = self.connections.get_mut(index)
            else {
                return;
            };
            let advanced = match dialogue {
                Dialogue::Greeting => {
                    let parsed = socks::greeting(head);
                    self.on_greeting(index, parsed)
                }
                Dialogue::Socks => {
                    let parsed = socks::request(head);
                    self.on_socks_request(index, parsed)
                }
                Dialogue::Http => {
                    let parsed = http::request(head);
                    let too_long = head.len() > http::MAX_HEAD;
                    self.on_http_request(index, parsed, too_long)
                }
                Dialogue::None => false,
            };
            if !advanced {
                break;
            }
        }
        let waits = |c: &Connection| matches!(c.stage, Stage::Request(..));
        if ended && self.connections.get(index).is_some_and(waits) {
            self.refuse(index, &[]);
        }
    }

    fn on_greeting(&mut self, index: usize, parsed: Parsed<bool>) -> bool {
        match parsed {
            Parsed::Partial => false,
            Parsed::Complete(true, length) => {
                let connection = &mut self.connections[index];
                if let Stage::Request(dialogue, head) = &mut connection.stage {
                    head.drain(..length);
                    *dialogue = Dialogue::Socks;
                }
                self.answer(index, &socks::METHOD_NONE)
            }
            Parsed::Complete(false, _) => self.refuse(index, &socks::METHOD_UNACCEPTABLE),
            Parsed::Invalid => self.refuse(index, &[]),
        }
    }

    fn on_socks_request(&mut self, index: usize, parsed: Parsed<socks::Request>) -> bool {
        match parsed {
            Parsed::Partial => false,
            Parsed::Complete(socks::Request::Connect(target), length) => {
                self.open_request(index, &target, length)
            }
            Parsed::Complete(socks::Request::Associate, _) => {
                match self.associate(index) {
                    Ok(bound) => {
                        let connection = &mut self.connections[index];
                        connection.stage = Stage::Associated;
                        connection.deadline = None;
                        self.service(Service::Socks).accepted += 1;
                        self.answer(index, &socks::success(bound));
                    }
                    Err(failure) => {
                        self.refuse(index, &socks::failure(failure));
                    }
                }
                false
            }
            Parsed::Complete(socks::Request::UnknownCommand, _) => {
                self.refuse(index, &socks::unknown_command())
            }
            Parsed::Complete(socks::Request::UnknownAddress, _) => {
                self.refuse(index, &socks::unknown_address())
            }
            Parsed::Invalid => self.refuse(index, &[]),
        }
    }

    fn on_http_request(
        &mut self,
        index: usize,
        parsed: Parsed<http::Request>,
        too_long: bool,
    ) -> bool {
        match parsed {
            Parsed::Partial if too_long => self.refuse(index, http::TOO_LONG.as_bytes()),
            Parsed::Complete(http::Request::TooManyFields, _) => {
                self.refuse(index, http::TOO_LONG.as_bytes())
            }
            Parsed::Partial => false,
            Parsed::Complete(http::Request::Connect(target), length) => {
                self.open_request(index, &target, length)
            }
            Parsed::Complete(http::Request::OtherMethod, _) => {
                self.refuse(index, http::OTHER_METHOD.as_bytes())
            }
            Parsed::Complete(http::Request::BadTarget, _) | Parsed::Invalid => {
                self.refuse(index, http::BAD_REQUEST.as_bytes())
            }
        }
    }

    fn open_request(&mut self, index: usize, target: &Target, length: usize) -> bool {
        let connection = &mut self.connections[index];
        let early = match &mut connection.stage {
            Stage::Request(_, head) => head.split_off(length.min(head.len())),
            _ => Vec::new(),
        };
        self.open(index, target, early);
        false
    }

    /// Checks whether the far end has answered.
    fn follow_opening(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        let Some(inside) = &mut connection.inside else {
            return;
        };
        match inside.state() {
            State::SynSent | State::SynReceived => return,
            State::Closed | State::Listen => return self.fail(index, Failure::Refused),
            _ => {}
        }
        let bound = inside.flow.local;
        let Stage::Opening(dialogue, early) = std::mem::replace(&mut connection.stage, Stage::Open)
        else {
            return;
        };
        connection.deadline = None;
        let service = connection.service;
        if let Some(answer) = connection.answer.take() {
            let FlowKey { local, remote } = inside.flow;
            // If nobody waits for the answer any more, the stream has ended, and its event follows.
            let _ = answer.send(Ok(Ends { local, remote }));
        }
        // These bytes always fit: they are at most as long as the head of a request, and the buffer
        // is empty.
        let sent = inside.socket().send_slice(&early).unwrap_or(0) as u64;
        let counters = self.service(service);
        counters.accepted += 1;
        counters.bytes_out += sent;
        let answered = match dialogue {
            Dialogue::Greeting | Dialogue::Socks => self.answer(index, &socks::success(bound)),
            Dialogue::Http => self.answer(index, http::SUCCESS.as_bytes()),
            Dialogue::None => true,
        };
        if answered {
            self.pump(index, false);
        }
    }

    /// Checks whether the host has accepted a connection of the far end.
    fn follow_accepting(&mut self, index: usize, expired: bool) {
        let connection = &mut self.connections[index];
        let Some(inside) = &mut connection.inside else {
            return;
        };
        if inside.state() != State::SynReceived {
            // The far end has given up.
            self.service(Service::Exposed).refused += 1;
            return self.remove(index);
        }
        if !connection.splice.writable && !expired {
            return;
        }
        let refused = expired || connection.splice.host.has_failed();
        if refused {
            inside.accept();
            inside.socket().abort();
            self.service(Service::Exposed).refused += 1;
            return self.finish(index);
        }
        inside.accept();
        connection.stage = Stage::Open;
        self.service(Service::Exposed).accepted += 1;
    }

    /// Checks whether the far end has completed its handshake with a listening socket.
    fn follow_arriving(&mut self, index: usize, expired: bool) {
        let connection = &mut self.connections[index];
        let state = connection.inside.as_ref().map(Inside::state);
        match state {
            Some(State::SynReceived) if !expired => return,
            None | Some(State::SynReceived | State::Listen | State::Closed) => {
                self.service(Service::Exposed).refused += 1;
                return self.finish(index);
            }
            Some(_) => {}
        }
        let Stage::Arriving(arrival) = std::mem::replace(&mut connection.stage, Stage::Open) else {
            return;
        };
        connection.deadline = None;
        if arrival.queue.try_send(arrival.stream).is_err() {
            self.service(Service::Exposed).refused += 1;
            return self.finish(index);
        }
        self.service(Service::Exposed).accepted += 1;
        self.pump(index, false);
    }

    /// Moves bytes between both sides.
    fn pump(&mut self, index: usize, expired: bool) {
        let connection = &mut self.connections[index];
        let Some(inside) = &mut connection.inside else {
            return;
        };
        match inside.state() {
            // The far end has not confirmed the connection to an exposed port yet. If the far end
            // resets it, the state returns to `Listen`.
            State::SynReceived if !expired => return,
            State::SynReceived | State::Listen => {
                connection.splice.host.reset();
                return self.finish(index);
            }
            _ => {}
        }
        let moved = connection.splice.pump(inside.socket());
        inside.on_taken(moved.bytes_in);
        let waiting = inside.socket().send_queue();
        let delivers = waiting < std::mem::replace(&mut connection.waiting, waiting);
        let idle = moved.bytes_in + moved.bytes_out == 0 && !delivers;
        if !connection.splice.is_ending() {
            connection.deadline = None;
        } else if connection.deadline.is_none() || !idle {
            connection.deadline = Some(self.now + self.parts.limits.half_closed_for);
        }
        let over = moved.over || expired && idle && connection.splice.is_ending();
        let service = connection.service;
        let counters = self.service(service);
        counters.bytes_in += moved.bytes_in;
        counters.bytes_out += moved.bytes_out;
        if over {
            self.finish(index);
        } else if moved.more {
            self.enqueue(index);
        }
    }

    /// Probes silent far ends that have opened a connection, and ends the connections of those that
    /// do not answer. Others last as long as the program on this host wants, as with the kernel's TCP.
    pub(super) fn sweep_silent(&mut self) {
        let limit = self.parts.limits.silent_for;
        let mut vanished = Vec::new();
        for (index, connection) in &mut self.connections {
            let is_open = matches!(connection.stage, Stage::Open);
            let Some(inside) = &mut connection.inside else {
                continue;
            };
            if !is_open || connection.service != Service::Exposed {
                continue;
            }
            let silence = inside.silence(self.now);
            if silence >= limit {
                connection.splice.host.reset();
                vanished.push(index);
            } else if silence >= limit / 2 {
                let mut net = net(&mut self.interface, &mut self.parts, self.epoch, self.now);
                inside.probe(&mut net, limit / 20);
            }
        }
        for index in vanished {
            self.finish(index);
        }
    }

    /// Whether any connection whose stream is dropped or shut down still has bytes to deliver.
    pub(super) fn is_delivering(&self) -> bool {
        self.connections.iter().any(|(_, connection)| {
            let delivered = |inside: &Inside| {
                matches!(
                    inside.state(),
                    State::FinWait2 | State::TimeWait | State::Closed
                )
            };
            let inside = connection.inside.as_ref();
            connection.splice.has_ended() && !inside.is_none_or(delivered)
        })
    }

    /// Resets all connections.
    pub(super) fn reset_all(&mut self) {
        let all: Vec<usize> = self.connections.iter().map(|(index, _)| index).collect();
        let until = Instant::now() + RESETS_WITHIN;
        for index in all {
            self.flush_until(until);
            self.finish(index);
        }
        self.flush_until(until);
    }

    /// Waits until the worker has read what the device keeps, until this time, or until waiting fails.
    fn flush_until(&mut self, until: Instant) {
        let device = &mut self.parts.device;
        while !device.flush() {
            let left = until.saturating_duration_since(Instant::now());
            let waits = || -> io::Result<()> {
                let mut epoll = Epoll::new(1)?;
                epoll.add(&*device, 0, Interest::Write)?;
                epoll.wait(Some(left))?.for_each(drop);
                Ok(())
            };
            if left.is_zero() || waits().is_err() {
                break;
            }
        }
    }

    /// Ends a connection, with a reset if the inside is still open.
    fn finish(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        if let Some(inside) = &mut connection.inside {
            if inside.state() != State::TimeWait {
                inside.socket().abort();
            }
            let mut net = net(&mut self.interface, &mut self.parts, self.epoch, self.now);
            inside.egress_last(&mut net);
        }
        self.remove(index);
    }

    /// Answers that the connection failed, and ends it.
    fn fail(&mut self, index: usize, failure: Failure) {
        if let Some(answer) = self.connections[index].answer.take() {
            let _ = answer.send(Err(failure.into()));
        }
        let dialogue = match &self.connections[index].stage {
            Stage::Opening(dialogue, _) => *dialogue,
            _ => Dialogue::None,
        };
        match dialogue {
            Dialogue::Greeting | Dialogue::Socks => {
                self.refuse(index, &socks::failure(failure));
            }
            Dialogue::Http => {
                self.refuse(index, http::failure(failure).as_bytes());
            }
            Dialogue::None => {
                self.connections[index].splice.host.reset();
                self.refuse(index, &[]);
            }
        }
    }

    /// Sends a last answer and ends the connection. Returns false: nothing follows.
    fn refuse(&mut self, index: usize, answer: &[u8]) -> bool {
        let service = self.connections[index].service;
        self.service(service).refused += 1;
        if answer.is_empty() || self.answer(index, answer) {
            self.connections[index].splice.end_request();
            self.finish(index);
        }
        false
    }

    /// Sends an answer. It always fits the send buffer of a client that reads. If it does not fit,
    /// ends the connection and returns false.
    fn answer(&mut self, index: usize, answer: &[u8]) -> bool {
        let host = &mut self.connections[index].splice.host;
        let sent = matches!(host.write(answer), Ok(length) if length == answer.len());
        if !sent {
            self.finish(index);
        }
        sent
    }

    pub(super) fn remove(&mut self, index: usize) {
        let Some(connection) = self.connections.try_remove(index) else {
            return;
        };
        if let Some(inside) = &connection.inside {
            self.flows.remove(&inside.flow);
            self.buffer_bytes -= inside.buffer_bytes;
        }
        if let Some(at) = connection.timer {
            self.timers.remove(&(at, index));
        }
        if connection.queued {
            self.queue.retain(|queued| *queued != index);
        }
        self.blocked.retain(|blocked| *blocked != index);
        if matches!(connection.stage, Stage::Associated) {
            self.end_association(Id {
                index: index as u32,
                generation: connection.generation,
            });
        }
        self.service(connection.service).open -= 1;
    }
}

/// Starts to connect to a port of the host.
fn connect_host(target: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(
        Domain::for_address(target),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    socket.set_keepalive(true)?;
    socket.set_out_of_band_inline(true)?;
    match socket.connect(&target.into()) {
        Err(error) if error.raw_os_error() != Some(nix::errno::Errno::EINPROGRESS as i32) => {
            Err(error)
        }
        _ => Ok(socket.into()),
    }
}
