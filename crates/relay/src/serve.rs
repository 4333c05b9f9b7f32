//! Handling of received datagrams: requests are answered, all others are forwarded.
//!
//! The main port accepts requests only. At the port of a pair, a request may arrive between datagrams of the tunnel, also
//! within a batch that GRO has joined. A TLS connection carries datagrams for all ports. Datagrams for which a send buffer or
//! a connection has no space are dropped, so no pair delays another.

use std::net::SocketAddr;

use seikan_observe::DropReason;
use seikan_proto::mesh::RelayPassword;
use seikan_proto::mesh::framing::MAIN_PORT;
use seikan_proto::mesh::relay::{
    Answer, PortRequest, RelayRefusal, RequestError, ServerRequest, TransactionId, is_request,
};
use seikan_sys::poll::Epoll;
use seikan_sys::udp::{ReceiveBatch, ReceiveMeta, Transmit, UdpSocket};

use crate::Now;
use crate::pair::{Binding, Transport};
use crate::streams::{Pushed, Run};
use crate::table::{Table, family_of};

/// Maximum number of reads of one connection in one poll.
const READS: usize = 16;
/// Minimum length in bytes of a datagram of a tunnel: a native record without content. Over TLS, a shorter one would cost the sender
/// less than the relay.
const MIN_DATAGRAM: usize = 27;

/// The port that a request was sent to.
#[derive(Clone, Copy)]
enum Port {
    Main,
    /// The port of the pair in this slot.
    Pair(usize),
    /// A port without a pair. Only a TLS connection can name one.
    Unknown,
}

/// The origin of a datagram.
#[derive(Clone, Copy)]
struct Origin {
    binding: Binding,
    /// The source address, for the answer.
    address: SocketAddr,
    /// DSCP and ECN.
    traffic_class: u8,
}

impl Origin {
    fn of(meta: &ReceiveMeta) -> Origin {
        Origin {
            binding: Binding {
                transport: Transport::Udp(meta.source),
                source: meta.destination,
            },
            address: meta.source,
            traffic_class: meta.traffic_class,
        }
    }
}

impl Table {
    /// Answers the requests at the main port.
    pub fn serve_main(&mut self, family: usize, batch: &mut ReceiveBatch, epoll: &Epoll, now: Now) {
        let Some(socket) = &self.main[family] else {
            return;
        };
        // An error belongs to an earlier answer.
        if socket.receive(batch).is_err() {
            return;
        }
        let (metas, arena) = batch.parts_mut();
        for meta in metas {
            if self.drop_broken(meta) {
                continue;
            }
            for segment in meta.segments() {
                let origin = Origin::of(meta);
                let answer = self.answer(Port::Main, origin, &arena[segment], epoll, now);
                if let (Some(answer), Some(socket)) = (answer, &self.main[family]) {
                    reply(socket, meta, &answer);
                }
            }
        }
    }

    /// Forwards the datagrams at the port of a pair, and answers the requests between them.
    pub fn serve_pair(
        &mut self,
        slot: usize,
        family: usize,
        batch: &mut ReceiveBatch,
        epoll: &Epoll,
        now: Now,
    ) {
        let Some(pair) = self.pairs.get_mut(slot) else {
            return;
        };
        pair.busy = true;
        let Some(socket) = &pair.sockets[family] else {
            return;
        };
        // An error belongs to an earlier send and was counted then.
        if socket.receive(batch).is_err() {
            return;
        }
        let (metas, arena) = batch.parts_mut();
        for meta in metas {
            if self.drop_broken(meta) {
                continue;
            }
            let (origin, size) = (Origin::of(meta), meta.segment_size);
            let mut unsent = meta.offset;
            for segment in meta.segments() {
                let bytes = &arena[segment.clone()];
                if !is_request(bytes) {
                    continue;
                }
                self.forward(slot, origin, &arena[unsent..segment.start], size, now);
                unsent = segment.end;
                let answer = self.answer(Port::Pair(slot), origin, bytes, epoll, now);
                let pair = self.pairs.get(slot);
                let socket = pair.and_then(|pair| pair.sockets[family].as_ref());
                if let (Some(answer), Some(socket)) = (answer, socket) {
                    reply(socket, meta, &answer);
                }
            }
            let rest = &arena[unsent..meta.offset + meta.length];
            self.forward(slot, origin, rest, size, now);
        }
    }

    /// Forwards the datagrams of a TLS connection, and answers the requests among them. An unauthenticated connection ends
    /// with the first message that does not show a valid ticket.
    pub fn serve_stream(&mut self, id: u64, epoll: &Epoll, now: Now) {
        let mut run = std::mem::take(&mut self.run);
        for _ in 0..READS {
            let more = self.streams.receive(id);
            // Data before the end of the connection counts.
            let taken = loop {
                match self.streams.next_run(id, &mut run) {
                    Ok(true) if self.take_run(id, &run, epoll, now) => {}
                    Ok(false) => break true,
                    Ok(true) | Err(_) => break false,
                }
            };
            match more {
                Ok(true) if taken => {}
                Ok(false) if taken => break,
                _ => {
                    // The answer with the reason is sent first.
                    self.flush_streams(epoll);
                    self.end_stream(id);
                    break;
                }
            }
        }
        self.run = run;
    }

    /// Handles a run of datagrams. Returns whether the connection stays open.
    fn take_run(&mut self, id: u64, run: &Run, epoll: &Epoll, now: Now) -> bool {
        let Some(address) = self.streams.remote_address(id) else {
            return false;
        };
        let origin = Origin {
            binding: Binding {
                transport: Transport::Stream(id),
                source: None,
            },
            address,
            traffic_class: 0,
        };
        let count = datagrams(run.bytes.len(), run.size).max(1);
        if !self.streams.admit_run(id, run, now.mono) {
            self.counters.drops.add(DropReason::OverRate, count);
            return self.streams.is_member(id);
        }
        let port = match run.port {
            MAIN_PORT => Port::Main,
            port => self.pair_at(port).map_or(Port::Unknown, Port::Pair),
        };
        match port {
            port if is_request(&run.bytes) => {
                if let Some(answer) = self.answer(port, origin, &run.bytes, epoll, now) {
                    self.streams.answer(id, run.port, &answer);
                }
            }
            // Several datagrams may have been joined.
            Port::Main => self.counters.drops.add(DropReason::UnknownType, count),
            _ if !self.streams.is_member(id) => {}
            Port::Pair(slot) if run.size >= MIN_DATAGRAM => {
                self.forward(slot, origin, &run.bytes, run.size, now);
            }
            _ => {
                let reason = if run.size < MIN_DATAGRAM {
                    DropReason::Truncated
                } else {
                    DropReason::UnknownSource
                };
                self.counters.drops.add(reason, count);
            }
        }
        self.streams.is_member(id)
    }

    /// Counts datagrams that are empty or were truncated by the buffer. Returns whether they are.
    fn drop_broken(&mut self, meta: &ReceiveMeta) -> bool {
        let broken = meta.truncated || meta.length == 0;
        if broken {
            self.counters
                .drops
                .add(DropReason::Truncated, meta.datagrams());
        }
        broken
    }

    /// Forwards datagrams of `size` bytes (the last may be shorter) from one side to the other.
    fn forward(&mut self, slot: usize, origin: Origin, bytes: &[u8], size: usize, now: Now) {
        let size = size.max(1);
        let Table {
            pairs,
            holders,
            streams,
            counters,
            limits,
            ..
        } = self;
        let mut drop = |reason, bytes| counters.drops.add(reason, datagrams(bytes, size));
        let Some(pair) = pairs.get(slot).filter(|_| !bytes.is_empty()) else {
            return;
        };
        let Some(side) = pair.side_of(origin.binding.transport) else {
            return drop(DropReason::UnknownSource, bytes.len());
        };
        let Some(to) = pair.sides[1 - side].binding else {
            return drop(DropReason::NotBound, bytes.len());
        };
        let holder = pair.sides[side].holder;
        let Some(holder) = holder.and_then(|index| holders.get_mut(index)) else {
            return drop(DropReason::SendRefused, bytes.len());
        };
        let admitted = holder
            .policer
            .admit(bytes.len(), size, limits.rate, now.mono);
        drop(DropReason::OverRate, bytes.len() - admitted);
        let bytes = &bytes[..admitted];
        let sent = match to.transport {
            Transport::Stream(id) => {
                let mut sent = 0;
                for datagram in bytes.chunks(size) {
                    match streams.push(id, pair.port, datagram) {
                        Pushed::Sent => sent += datagram.len(),
                        Pushed::Full => drop(DropReason::SendNoBuffers, datagram.len()),
                        Pushed::Gone => drop(DropReason::NotBound, datagram.len()),
                    }
                }
                sent
            }
            Transport::Udp(destination) => match &pair.sockets[family_of(destination)] {
                Some(socket) => {
                    // DSCP and ECN are copied, as by a router: the tunnels of the members use the ECN of the path.
                    let transmit = Transmit {
                        destination,
                        source: to.source,
                        traffic_class: origin.traffic_class,
                        hop_limit: None,
                        segment_size: u16::try_from(size).ok(),
                        payload: bytes,
                    };
                    socket.send_or_drop(&transmit, drop)
                }
                None => {
                    drop(DropReason::SendRefused, bytes.len());
                    0
                }
            },
        };
        // All but the last have the same length, so bytes give the number. Over TLS, dropped ones reduce it.
        counters.datagrams += datagrams(sent, size);
        counters.bytes += sent as u64;
    }

    /// Returns the answer to a request, if it gets one. Counts the request, or the drop if it is none.
    fn answer(
        &mut self,
        port: Port,
        origin: Origin,
        bytes: &[u8],
        epoll: &Epoll,
        now: Now,
    ) -> Option<Vec<u8>> {
        let request = self.authenticate(bytes, now);
        if let (Request::Port(..), Transport::Stream(id)) = (&request, origin.binding.transport) {
            self.streams.set_member(id, now.mono);
        }
        let (id, outcome, password) = match (request, port) {
            (Request::Port(request, password), Port::Main) => {
                let family = self.family_for(&origin);
                let port = self.port_for(&request, family, epoll, now);
                (request.id, port, Some(password))
            }
            (Request::Port(request, password), Port::Pair(slot)) => {
                let bound = self.bind(slot, &request, origin.binding, now);
                (request.id, bound, Some(password))
            }
            (Request::Port(request, password), Port::Unknown) => {
                (request.id, Err(RelayRefusal::Malformed), Some(password))
            }
            (Request::Address(id), Port::Main) => {
                self.counters.answered += 1;
                return Some(Answer::address(origin.address).write(id, None));
            }
            (Request::Refused(id, refusal), _) => (id, Err(refusal), None),
            (Request::Address(_), Port::Pair(_) | Port::Unknown) | (Request::Invalid, _) => {
                self.counters.drops.add(DropReason::UnknownType, 1);
                return None;
            }
        };
        match outcome {
            Ok((port, present)) => {
                self.counters.answered += 1;
                let answer = Answer {
                    mapped: origin.address,
                    port: Some(port),
                    present,
                };
                Some(answer.write(id, password.as_ref()))
            }
            Err(refusal) => {
                self.counters.refuse(refusal);
                let answer = refusal.write(id, password.as_ref());
                // A refusal is never longer than the request, so a forged source address gains nothing.
                (answer.len() <= bytes.len()).then_some(answer)
            }
        }
    }

    /// Returns the family that the port of a pair must be open for. Over TLS, either is fine.
    fn family_for(&self, origin: &Origin) -> usize {
        match origin.binding.transport {
            Transport::Udp(address) => family_of(address),
            Transport::Stream(_) => self.main.iter().position(Option::is_some).unwrap_or(0),
        }
    }

    /// Parses a request and checks its ticket.
    fn authenticate(&self, bytes: &[u8], now: Now) -> Request {
        match ServerRequest::parse(bytes) {
            Ok(ServerRequest::Address(id)) => Request::Address(id),
            Ok(ServerRequest::Port(request)) => {
                let password = self.secret.password(&request.username);
                if now.unix < request.expires && request.verify(&password) {
                    Request::Port(request, password)
                } else {
                    Request::Refused(request.id, RelayRefusal::Unauthorized)
                }
            }
            Err(RequestError::Refused(id, refusal)) => Request::Refused(id, refusal),
            Err(RequestError::NotARequest) => Request::Invalid,
        }
    }
}

/// A received request.
enum Request {
    /// A request with a valid ticket, and the password that authenticates the answer.
    Port(PortRequest, RelayPassword),
    /// A binding request of ordinary STUN, which needs no ticket.
    Address(TransactionId),
    /// A request without a valid ticket, or a malformed one.
    Refused(TransactionId, RelayRefusal),
    /// Not a request.
    Invalid,
}

/// Sends an answer from the address that the request was sent to. If it is lost, the client repeats the request.
fn reply(socket: &UdpSocket, meta: &ReceiveMeta, answer: &[u8]) {
    let _ = socket.send(&Transmit {
        destination: meta.source,
        source: meta.destination,
        traffic_class: 0,
        hop_limit: None,
        segment_size: None,
        payload: answer,
    });
}

/// Number of datagrams of `size` bytes (the last may be shorter) in this many bytes.
fn datagrams(bytes: usize, size: usize) -> u64 {
    bytes.div_ceil(size.max(1)) as u64
}
