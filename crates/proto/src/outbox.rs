//! Sealed datagrams for the socket, grouped so that one GSO call sends many.
//!
//! A sender reserves a [`Slot`], writes and seals in it, and commits its length. A slot that is
//! dropped instead leaves no trace. Committed datagrams with the same destination and traffic class
//! form a [`Run`] as long as `UDP_SEGMENT` can carry them: all of one size, only the last one
//! shorter.

use crate::indices::PeerId;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU8;
use std::ops::Range;

/// `UDP_MAX_SEGMENTS` of kernels before 6.9; later ones allow 128.
pub const MAX_SEGMENTS: usize = 64;
/// Maximum bytes of one GSO send: an IP packet less the largest headers.
pub const MAX_RUN_BYTES: usize = 65_535 - 8 - 40;

/// Destination of a datagram, and its marking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The address to send to.
    pub address: SocketAddr,
    /// The local address to send from, once a datagram from the peer has arrived there.
    pub source: Option<IpAddr>,
    /// DSCP and ECN byte of the outer IP header.
    pub traffic_class: u8,
    /// TTL or hop limit of the outer IP header; `None`: the kernel's default.
    pub hop_limit: Option<NonZeroU8>,
}

/// Inner packets in datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// Number of packets.
    pub packets: u64,
    /// Their length in bytes.
    pub bytes: u64,
}

/// Datagrams that one send call carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Destination and marking.
    pub destination: Destination,
    /// The peer whose counters record a refused run.
    pub peer: Option<PeerId>,
    /// Size in bytes of every datagram except the last, which may be shorter.
    pub segment_size: usize,
    /// Number of datagrams.
    pub segments: usize,
    /// Number of datagrams of the same batch that are sent before it, if a driver cuts batches.
    pub first: usize,
    /// The inner packets in all of them.
    pub payload: Payload,
    /// Position in [`Outbox::bytes`].
    pub range: Range<usize>,
}

impl Run {
    fn accepts(&self, to: &Destination, peer: Option<PeerId>, length: usize) -> bool {
        self.destination == *to
            && self.peer == peer
            && self.segments < MAX_SEGMENTS
            && length <= self.segment_size
            && self.range.len() == self.segments * self.segment_size
            && self.range.len() + length <= MAX_RUN_BYTES
    }
}

/// The send batch: one contiguous buffer and the runs in it.
#[derive(Debug)]
pub struct Outbox {
    buffer: Box<[u8]>,
    used: usize,
    runs: Vec<Run>,
    gso: bool,
}

impl Outbox {
    /// Creates an empty batch with a capacity of `capacity` bytes.
    pub fn new(capacity: usize) -> Outbox {
        Outbox {
            buffer: vec![0; capacity].into(),
            used: 0,
            runs: Vec::with_capacity(64),
            gso: true,
        }
    }

    /// Sets whether the socket can segment. If not, every datagram is a run of its own.
    pub fn set_gso(&mut self, gso: bool) {
        self.gso = gso;
    }

    /// Free capacity in bytes.
    pub fn remaining(&self) -> usize {
        self.buffer.len() - self.used
    }

    /// Reserves `length` bytes. Returns `None` if they do not fit.
    pub fn reserve(&mut self, length: usize) -> Option<Slot<'_>> {
        if self.remaining() < length {
            return None;
        }
        Some(Slot {
            start: self.used,
            length,
            outbox: self,
        })
    }

    /// Returns `length` free bytes at the end, to be written before they are reserved.
    pub fn tail(&mut self, length: usize) -> Option<&mut [u8]> {
        self.buffer.get_mut(self.used..self.used + length)
    }

    /// The datagram size of the newest run, if the run can be extended.
    pub fn run_size(&self, to: &Destination, peer: Option<PeerId>) -> Option<usize> {
        let run = self.runs.last()?;
        (self.gso && run.accepts(to, peer, run.segment_size)).then_some(run.segment_size)
    }

    /// Whether the newest run to this destination has space for `datagrams` more of its size. True
    /// if there is no run to extend, since a new one has space.
    pub fn run_takes(&self, to: &Destination, peer: Option<PeerId>, datagrams: usize) -> bool {
        match self.runs.last() {
            Some(run) if self.gso && run.accepts(to, peer, run.segment_size) => {
                run.segments + datagrams <= MAX_SEGMENTS
                    && run.range.len() + datagrams * run.segment_size <= MAX_RUN_BYTES
            }
            _ => true,
        }
    }

    /// Position in its GSO batch of the next datagram of `length` bytes to this destination.
    pub fn next_position(&self, to: &Destination, peer: Option<PeerId>, length: usize) -> u8 {
        match self.runs.last() {
            Some(run) if self.gso && run.accepts(to, peer, length) => run.segments as u8,
            _ => 0,
        }
    }

    /// Sends the newest run, which must be a single datagram, to another address as well.
    pub fn repeat(&mut self, to: SocketAddr) {
        let Some(run) = self.runs.last() else { return };
        let mut run = run.clone();
        run.destination.address = to;
        run.payload = Payload::default();
        self.runs.push(run);
    }

    /// The runs to send, oldest first.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The bytes of a run.
    pub fn bytes(&self, run: &Run) -> &[u8] {
        &self.buffer[run.range.clone()]
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Removes all runs.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.used = 0;
    }
}

/// A reserved part of an [`Outbox`]; released unless committed.
#[derive(Debug)]
pub struct Slot<'a> {
    outbox: &'a mut Outbox,
    start: usize,
    length: usize,
}

impl Slot<'_> {
    /// The reserved bytes, with leftovers of an earlier batch.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.outbox.buffer[self.start..self.start + self.length]
    }

    /// Keeps the first `length` bytes as one datagram that carries `packets` inner packets of
    /// `bytes` in all.
    pub fn commit(self, length: usize, to: &Destination, peer: Option<PeerId>, payload: Payload) {
        let gso = self.outbox.gso;
        self.commit_to_run(length, to, peer, payload, gso);
    }

    /// Like [`Self::commit`]; starts a new run unless `gso`.
    pub fn commit_to_run(
        self,
        length: usize,
        to: &Destination,
        peer: Option<PeerId>,
        payload: Payload,
        gso: bool,
    ) {
        debug_assert!(length <= self.length);
        let outbox = self.outbox;
        let end = self.start + length;
        outbox.used = end;
        match outbox.runs.last_mut() {
            Some(run)
                if gso
                    && outbox.gso
                    && run.range.end == self.start
                    && run.accepts(to, peer, length) =>
            {
                run.range.end = end;
                run.segments += 1;
                run.payload.packets += payload.packets;
                run.payload.bytes += payload.bytes;
            }
            _ => outbox.runs.push(Run {
                destination: *to,
                peer,
                segment_size: length,
                segments: 1,
                first: 0,
                payload,
                range: self.start..end,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(port: u16, ecn: u8) -> Destination {
        Destination {
            address: ([192, 0, 2, 1], port).into(),
            source: None,
            traffic_class: ecn,
            hop_limit: None,
        }
    }

    fn put(outbox: &mut Outbox, to: &Destination, length: usize) {
        outbox.reserve(2000).unwrap().commit(
            length,
            to,
            None,
            Payload {
                packets: 1,
                bytes: 1,
            },
        );
    }

    #[test]
    fn a_run_ends_behind_a_short_datagram() {
        let mut o = Outbox::new(100_000);
        for length in [1000, 1000, 400, 400, 1000] {
            put(&mut o, &to(1, 0), length);
        }
        let sizes: Vec<_> = o
            .runs()
            .iter()
            .map(|r| (r.segment_size, r.segments, r.range.len()))
            .collect();
        assert_eq!(sizes, [(1000, 3, 2400), (400, 1, 400), (1000, 1, 1000)]);
    }

    #[test]
    fn a_run_has_one_destination_and_one_marking() {
        let mut o = Outbox::new(100_000);
        for d in [to(1, 0), to(2, 0), to(2, 2)] {
            put(&mut o, &d, 100);
        }
        assert_eq!(o.runs().len(), 3);
    }

    #[test]
    fn a_run_stays_within_the_limits_of_a_gso_call() {
        let mut o = Outbox::new(400_000);
        (0..130).for_each(|_| put(&mut o, &to(1, 0), 100));
        (0..130).for_each(|_| put(&mut o, &to(2, 0), 1472));
        assert!(
            o.runs()
                .iter()
                .all(|r| r.segments <= 64 && r.range.len() <= MAX_RUN_BYTES)
        );
        assert_eq!(o.runs()[0].segments, 64);
        assert_eq!(o.runs()[3].segments, 65_487 / 1472);
    }

    #[test]
    fn a_dropped_slot_leaves_no_trace() {
        let mut o = Outbox::new(3000);
        o.reserve(2000).unwrap().bytes().fill(7);
        assert!(o.is_empty() && o.remaining() == 3000);
        assert!(o.reserve(3001).is_none());
    }

    #[test]
    fn without_gso_every_datagram_is_sent_alone() {
        let mut o = Outbox::new(10_000);
        o.set_gso(false);
        (0..3).for_each(|_| put(&mut o, &to(1, 0), 100));
        assert_eq!(o.runs().len(), 3);
    }
}
