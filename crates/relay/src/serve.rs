//! What is done with what has come: requests are answered, the rest is sent on.
//!
//! At the main port there are requests only. At a pair's port a request may lie between datagrams of the tunnel, also
//! within what GRO has joined. By a connection come datagrams for all ports. What a send buffer or a connection does not take is
//! dropped: no pair waits for another.

use std::net::SocketAddr;

use seikan_observe::DropReason;
use seikan_proto::mesh::RelayPassword;
use seikan_proto::mesh::framing::MAIN_PORT;
use seikan_proto::mesh::relay::{
    Answer, PortRequest, RelayRefusal, RequestError, ServerRequest, TransactionId, is_request,
};
use seikan_sys::poll::Epoll;
use seikan_sys::udp::{ReceiveBatch, ReceiveMeta, Transmit, UdpSocket};

use crate::pair::{Bound, Place};
use crate::relay::Now;
use crate::streams::{Pushed, Run};
use crate::table::{Table, family_of};

/// Reads of a connection before others have their turn.
const TURNS: usize = 16;
/// Bytes of the shortest message of a tunnel: a record without content. At a connection a shorter one would take less than it costs.
const SHORTEST: usize = 32;

/// Where a request came to.
#[derive(Clone, Copy)]
enum At {
    Main,
    Pair(usize),
    /// A port that no pair has, or has any more: so it is only by a stream.
    Nowhere,
}

/// Where something came from, and how.
#[derive(Clone, Copy)]
struct Origin {
    bound: Bound,
    /// Its address, as it is told.
    address: SocketAddr,
    /// DSCP and ECN.
    traffic_class: u8,
}

impl Origin {
    fn of(meta: &ReceiveMeta) -> Origin {
        Origin {
            bound: Bound {
                place: Place::Udp(meta.source),
                source: meta.destination,
            },
            address: meta.source,
            traffic_class: meta.traffic_class,
        }
    }
}

impl Table {
    /// Answers what has come to the main port.
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
                let answer = self.answer(At::Main, Origin::of(meta), &arena[segment], epoll, now);
                if let (Some(answer), Some(socket)) = (answer, &self.main[family]) {
                    reply(socket, meta, &answer);
                }
            }
        }
    }

    /// Sends on what has come to a pair's port, and answers the requests in between.
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
        // An error belongs to an earlier send, and was counted there.
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
                let answer = self.answer(At::Pair(slot), origin, bytes, epoll, now);
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

    /// Sends on what has come by a connection, and answers the requests in it. A stranger's ends with the first thing that does not show a
    /// good ticket.
    pub fn serve_stream(&mut self, id: u64, epoll: &Epoll, now: Now) {
        let mut run = std::mem::take(&mut self.run);
        for _ in 0..TURNS {
            let more = self.streams.receive(id);
            // What came before the end counts.
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
                    // An answer that says why goes first.
                    self.flush_streams(epoll);
                    self.end_stream(id);
                    break;
                }
            }
        }
        self.run = run;
    }

    /// Whether a connection goes on after that.
    fn take_run(&mut self, id: u64, run: &Run, epoll: &Epoll, now: Now) -> bool {
        let Some(address) = self.streams.from(id) else {
            return false;
        };
        let origin = Origin {
            bound: Bound {
                place: Place::Stream(id),
                source: None,
            },
            address,
            traffic_class: 0,
        };
        if !self.streams.may_bring(id, run, now.mono) {
            let count = datagrams(run.bytes.len(), run.size).max(1);
            self.counters.drops.add(DropReason::OverRate, count);
            return self.streams.is_member(id);
        }
        let at = match run.port {
            MAIN_PORT => At::Main,
            port => self.pair_at(port).map_or(At::Nowhere, At::Pair),
        };
        match at {
            at if run.port == MAIN_PORT || is_request(&run.bytes) => {
                if let Some(answer) = self.answer(at, origin, &run.bytes, epoll, now) {
                    self.streams.answer(id, run.port, &answer);
                }
            }
            _ if !self.streams.is_member(id) => {}
            At::Pair(slot) if run.size >= SHORTEST => {
                self.forward(slot, origin, &run.bytes, run.size, now);
            }
            _ => {
                let reason = match run.size < SHORTEST {
                    true => DropReason::Truncated,
                    false => DropReason::UnknownSource,
                };
                let count = datagrams(run.bytes.len(), run.size).max(1);
                self.counters.drops.add(reason, count);
            }
        }
        self.streams.is_member(id)
    }

    /// What was cut off by the buffer, and what is empty, is nobody's.
    fn drop_broken(&mut self, meta: &ReceiveMeta) -> bool {
        let broken = meta.truncated || meta.length == 0;
        if broken {
            let count = datagrams(meta.length, meta.segment_size).max(1);
            self.counters.drops.add(DropReason::Truncated, count);
        }
        broken
    }

    /// Sends datagrams of `size` bytes (the last may be shorter) from who sent them to the other side.
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
        let Some(side) = pair.side_at(origin.bound.place) else {
            return drop(DropReason::UnknownSource, bytes.len());
        };
        let Some(to) = pair.sides[1 - side].bound else {
            return drop(DropReason::NotBound, bytes.len());
        };
        let holder = pair.sides[side].holder;
        let Some(holder) = holder.and_then(|place| holders.get_mut(place)) else {
            return drop(DropReason::SendRefused, bytes.len());
        };
        let admitted = holder
            .policer
            .admit(bytes.len(), size, limits.rate, now.mono);
        drop(DropReason::OverRate, bytes.len() - admitted);
        let bytes = &bytes[..admitted];
        let sent = match to.place {
            Place::Stream(id) => {
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
            Place::Udp(destination) => match &pair.sockets[family_of(destination)] {
                Some(socket) => {
                    // ECN and DSCP as a router would: the members' tunnel looks at what becomes of ECN on the way.
                    let transmit = Transmit {
                        destination,
                        source: to.source,
                        traffic_class: origin.traffic_class,
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
        // Of one length but the last, so as many as bytes say; at a connection shorter by what was dropped.
        counters.datagrams += datagrams(sent, size);
        counters.bytes += sent as u64;
    }

    /// The answer to a request, if it gets one; counts it, or what is none.
    fn answer(
        &mut self,
        at: At,
        origin: Origin,
        bytes: &[u8],
        epoll: &Epoll,
        now: Now,
    ) -> Option<Vec<u8>> {
        let heard = self.hear(bytes, now);
        if let (Heard::Member(..), Place::Stream(id)) = (&heard, origin.bound.place) {
            self.streams.prove(id, now.mono);
        }
        let (id, outcome, password) = match (heard, at) {
            (Heard::Member(asked, password), At::Main) => {
                let family = self.family_for(&origin);
                let port = self.port_for(&asked, family, epoll, now);
                (asked.id, port, Some(password))
            }
            (Heard::Member(asked, password), At::Pair(slot)) => {
                let bound = self.bind(slot, &asked, origin.bound, now);
                (asked.id, bound, Some(password))
            }
            (Heard::Member(asked, password), At::Nowhere) => {
                (asked.id, Err(RelayRefusal::Malformed), Some(password))
            }
            (Heard::Address(id), At::Main) => {
                self.counters.answered += 1;
                return Some(Answer::address(origin.address).write(id, None));
            }
            (Heard::Refused(id, refusal), _) => (id, Err(refusal), None),
            (Heard::Address(_), At::Pair(_) | At::Nowhere) | (Heard::Nothing, _) => {
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
                // Who forges addresses gains nothing.
                (answer.len() <= bytes.len()).then_some(answer)
            }
        }
    }

    /// By which family a pair's port is to be open for who asks: to a connection any is good that there is.
    fn family_for(&self, origin: &Origin) -> usize {
        match origin.bound.place {
            Place::Udp(address) => family_of(address),
            Place::Stream(_) => self.main.iter().position(Option::is_some).unwrap_or(0),
        }
    }

    /// Who asks, if he has a good ticket.
    fn hear(&self, bytes: &[u8], now: Now) -> Heard {
        match ServerRequest::parse(bytes) {
            Ok(ServerRequest::Address(id)) => Heard::Address(id),
            Ok(ServerRequest::Port(asked)) => {
                let password = self.secret.password(&asked.username);
                match now.unix < asked.expires && asked.verify(&password) {
                    true => Heard::Member(asked, password),
                    false => Heard::Refused(asked.id, RelayRefusal::Unauthorized),
                }
            }
            Err(RequestError::Refused(id, refusal)) => Heard::Refused(id, refusal),
            Err(RequestError::NotARequest) => Heard::Nothing,
        }
    }
}

/// Who a request is by.
enum Heard {
    /// A member, whose answer is proven with this.
    Member(PortRequest, RelayPassword),
    /// Anybody.
    Address(TransactionId),
    /// Somebody who wants a port, and has no good ticket or makes no sense.
    Refused(TransactionId, RelayRefusal),
    /// It is none.
    Nothing,
}

/// Sends an answer from where the request came to. One that is lost is asked for again.
fn reply(socket: &UdpSocket, meta: &ReceiveMeta, answer: &[u8]) {
    let _ = socket.send(&Transmit {
        destination: meta.source,
        source: meta.destination,
        traffic_class: 0,
        segment_size: None,
        payload: answer,
    });
}

/// How many datagrams of `size` bytes, the last perhaps shorter, so many bytes are.
fn datagrams(bytes: usize, size: usize) -> u64 {
    bytes.div_ceil(size.max(1)) as u64
}
