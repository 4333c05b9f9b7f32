//! What is done with what has come: requests are answered, the rest is sent on.
//!
//! At the main port there are requests only. At a pair's port a request may lie between datagrams of the tunnel, also
//! within what GRO has joined. What a send buffer does not take is dropped: no pair waits for another.

use std::io;

use seikan_observe::DropReason;
use seikan_proto::mesh::RelayPassword;
use seikan_proto::mesh::relay::{
    Answer, Asked, AskedError, PortRequest, RelayRefusal, TransactionId, is_request,
};
use seikan_sys::poll::Epoll;
use seikan_sys::udp::{ReceiveBatch, ReceiveMeta, SendError, Transmit, UdpSocket};

use crate::relay::Now;
use crate::table::{Table, family_of};

/// `EMSGSIZE` of Linux.
const EMSGSIZE: i32 = 90;
/// `ENOBUFS` of Linux.
const ENOBUFS: i32 = 105;

/// Where a request came to.
#[derive(Clone, Copy)]
enum Place {
    Main,
    Pair(usize),
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
                let answer = self.answer(Place::Main, meta, &arena[segment], epoll, now);
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
            let mut unsent = meta.offset;
            for segment in meta.segments() {
                let bytes = &arena[segment.clone()];
                if !is_request(bytes) {
                    continue;
                }
                self.forward(slot, meta, &arena[unsent..segment.start], now);
                unsent = segment.end;
                let answer = self.answer(Place::Pair(slot), meta, bytes, epoll, now);
                let pair = self.pairs.get(slot);
                let socket = pair.and_then(|pair| pair.sockets[family].as_ref());
                if let (Some(answer), Some(socket)) = (answer, socket) {
                    reply(socket, meta, &answer);
                }
            }
            self.forward(slot, meta, &arena[unsent..meta.offset + meta.length], now);
        }
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

    /// Sends datagrams of one length (the last may be shorter) from who sent them to the other side.
    fn forward(&mut self, slot: usize, meta: &ReceiveMeta, bytes: &[u8], now: Now) {
        let size = meta.segment_size.max(1);
        let mut drop = |reason, bytes| self.counters.drops.add(reason, datagrams(bytes, size));
        let Some(pair) = self.pairs.get(slot).filter(|_| !bytes.is_empty()) else {
            return;
        };
        let Some(side) = pair.side_at(meta.source) else {
            return drop(DropReason::Stranger, bytes.len());
        };
        let Some(to) = pair.sides[1 - side].bound else {
            return drop(DropReason::NotBound, bytes.len());
        };
        let (Some(member), Some(socket)) = (
            self.members.get_mut(pair.members[side]),
            &pair.sockets[family_of(to.address)],
        ) else {
            return drop(DropReason::SendRefused, bytes.len());
        };
        let admitted = member
            .policer
            .admit(bytes.len(), size, self.limits.rate, now.mono);
        drop(DropReason::OverRate, bytes.len() - admitted);
        let mut rest = &bytes[..admitted];
        let mut sent = 0;
        while !rest.is_empty() {
            let transmit = Transmit {
                destination: to.address,
                source: to.source,
                // As a router would: the members' tunnel looks at what becomes of ECN on the way.
                traffic_class: meta.traffic_class,
                segment_size: u16::try_from(size).ok().filter(|_| rest.len() > size),
                payload: rest,
            };
            let Err(SendError { bytes, error, .. }) = socket.send(&transmit) else {
                sent += rest.len();
                break;
            };
            sent += bytes;
            rest = &rest[bytes..];
            let (reason, lost) = match error.raw_os_error() {
                // A probe for the path's MTU is not to take along what comes behind it.
                Some(EMSGSIZE) => (DropReason::SendTooLarge, size.min(rest.len())),
                Some(ENOBUFS) => (DropReason::SendNoBuffers, rest.len()),
                _ if error.kind() == io::ErrorKind::WouldBlock => {
                    (DropReason::SendNoBuffers, rest.len())
                }
                _ => (DropReason::SendRefused, rest.len()),
            };
            drop(reason, lost);
            rest = &rest[lost..];
        }
        self.counters.datagrams += datagrams(sent, size);
        self.counters.bytes += sent as u64;
    }

    /// The answer to a request, if it gets one; counts it, or what is none.
    fn answer(
        &mut self,
        place: Place,
        meta: &ReceiveMeta,
        bytes: &[u8],
        epoll: &Epoll,
        now: Now,
    ) -> Option<Vec<u8>> {
        let (id, outcome, password) = match (self.hear(bytes, now), place) {
            (Heard::Member(asked, password), Place::Main) => {
                let port = self.port_for(&asked, family_of(meta.source), epoll, now);
                (asked.id, port, Some(password))
            }
            (Heard::Member(asked, password), Place::Pair(slot)) => {
                (asked.id, self.bind(slot, &asked, meta, now), Some(password))
            }
            (Heard::Address(id), Place::Main) => {
                self.counters.answered += 1;
                return Some(Answer::address(meta.source).write(id, None));
            }
            (Heard::Refused(id, refusal), _) => (id, Err(refusal), None),
            (Heard::Address(_), Place::Pair(_)) | (Heard::Nothing, _) => {
                self.counters.drops.add(DropReason::UnknownType, 1);
                return None;
            }
        };
        match outcome {
            Ok((port, present)) => {
                self.counters.answered += 1;
                let answer = Answer {
                    mapped: meta.source,
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

    /// Who asks, if he has a good ticket.
    fn hear(&self, bytes: &[u8], now: Now) -> Heard {
        match Asked::parse(bytes) {
            Ok(Asked::Address(id)) => Heard::Address(id),
            Ok(Asked::Port(asked)) => {
                let password = self.secret.password(&asked.username);
                match now.unix < asked.expires && asked.verify(&password) {
                    true => Heard::Member(asked, password),
                    false => Heard::Refused(asked.id, RelayRefusal::Unauthorized),
                }
            }
            Err(AskedError::Refused(id, refusal)) => Heard::Refused(id, refusal),
            Err(AskedError::NotARequest) => Heard::Nothing,
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
