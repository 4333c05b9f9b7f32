//! A queue of runs that leave at a rate.

use seikan_proto::indices::PeerId;
use seikan_proto::outbox::{Payload, Run};
use seikan_proto::time::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Time that datagrams sent together take at the rate. The shorter, the more send calls.
const BURST: Duration = Duration::from_micros(250);
/// Bytes of the headers of IPv4 and UDP. They count, since the path carries them.
const HEADERS_V4: usize = 28;
/// Bytes of the headers of IPv6 and UDP.
const HEADERS_V6: usize = 48;

/// Runs that wait, and a token bucket that says when they may leave.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: VecDeque<Waiting>,
    /// Bytes in `waiting`.
    bytes: usize,
    /// Bytes on the path that may be sent. Negative after a send of more.
    credit: f64,
    /// When credit was last earned.
    updated: Instant,
}

/// A run of which `sent` datagrams were sent.
#[derive(Debug)]
struct Waiting {
    run: Run,
    bytes: Vec<u8>,
    sent: usize,
    /// When it came.
    since: Instant,
    /// From when on it may leave.
    due: Instant,
}

impl Queue {
    /// Creates a queue of which `credit` bytes may be sent at once.
    pub fn with_credit(credit: f64) -> Queue {
        Queue {
            credit,
            ..Queue::default()
        }
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// When the oldest datagram that waits may be sent, or could have been.
    pub fn due_since(&self) -> Option<Instant> {
        self.waiting.front().map(|waiting| waiting.due)
    }

    /// Bytes that wait.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// When credit was last earned.
    pub fn updated(&self) -> Instant {
        self.updated
    }

    /// Earns the credit of the time since the last call, at `rate` bytes per second and up to `most` bytes.
    pub fn earn(&mut self, rate: f64, most: f64, now: Instant) {
        let elapsed = now.duration_since(self.updated).as_secs_f64();
        self.credit = (self.credit + rate * elapsed).min(most);
        self.updated = now;
    }

    /// Takes the credit for a run of `length` bytes, if there is enough.
    pub fn take(&mut self, run: &Run, length: usize) -> bool {
        let cost = bytes_on_path(run, length) as f64;
        let is_enough = cost <= self.credit;
        if is_enough {
            self.credit -= cost;
        }
        is_enough
    }

    /// Adds a run that waits for `hold`, and leaves after all runs that were added before.
    pub fn push(&mut self, run: &Run, bytes: &[u8], now: Instant, hold: Duration) {
        self.bytes += bytes.len();
        let due = now + hold;
        let before = self.waiting.back().map(|waiting| waiting.due);
        self.waiting.push_back(Waiting {
            run: run.clone(),
            bytes: bytes.to_vec(),
            sent: 0,
            since: now,
            due: before.map_or(due, |before| before.max(due)),
        });
    }

    /// Returns when there is credit again at `rate`, if anything waits.
    pub fn next(&self, rate: f64) -> Option<Instant> {
        let missing = (-self.credit).max(0.0) / rate * 1e9;
        let front = self.waiting.front()?;
        let earned = self.updated + Duration::from_nanos(missing.ceil() as u64);
        Some(earned.max(front.due))
    }

    /// Passes datagrams to `send`, oldest first, while there is credit. Returns the number of those that have waited.
    pub fn send(&mut self, rate: f64, now: Instant, mut send: impl FnMut(&Run, &[u8])) -> u64 {
        let burst = rate * BURST.as_secs_f64();
        let mut delayed = 0;
        while self.credit >= 0.0
            && let Some(front) = self.waiting.front_mut()
            && front.due <= now
        {
            let datagram = front.run.segment_size + headers(&front.run);
            let most = (self.credit.max(burst) / datagram as f64) as usize;
            let (part, bytes) = front.take(most.max(1));
            self.credit -= bytes_on_path(&part, bytes.len()) as f64;
            self.bytes -= bytes.len();
            send(&part, bytes);
            if front.since < now {
                delayed += part.segments as u64;
            }
            if front.is_sent() {
                self.waiting.pop_front();
            }
        }
        delayed
    }

    /// Passes all datagrams to `take`, oldest first.
    pub fn take_all(&mut self, mut take: impl FnMut(&Run, &[u8])) {
        self.bytes = 0;
        for mut waiting in self.waiting.drain(..) {
            let (part, bytes) = waiting.take(usize::MAX);
            take(&part, bytes);
        }
    }

    /// Discards the datagrams to a peer.
    pub fn remove(&mut self, id: PeerId) {
        self.waiting.retain(|waiting| waiting.run.peer != Some(id));
        let left = self.waiting.iter().map(Waiting::length);
        self.bytes = left.sum();
    }
}

impl Waiting {
    /// Bytes that are not sent yet.
    fn length(&self) -> usize {
        self.bytes.len() - self.sent * self.run.segment_size
    }

    fn is_sent(&self) -> bool {
        self.sent == self.run.segments
    }

    /// Returns the next `most` datagrams as a run of their own, with their part of the inner packets.
    fn take(&mut self, most: usize) -> (Run, &[u8]) {
        let Waiting { run, sent, .. } = self;
        let (first, all) = (*sent, run.segments);
        let end = first.saturating_add(most).min(all);
        *sent = end;
        // A run does not know which of its datagrams carry which packets.
        let part = |count: u64| count * end as u64 / all as u64 - count * first as u64 / all as u64;
        let range = first * run.segment_size..(end * run.segment_size).min(self.bytes.len());
        let payload = Payload {
            packets: part(run.payload.packets),
            bytes: part(run.payload.bytes),
        };
        let part = Run {
            segments: end - first,
            first,
            payload,
            range: 0..range.len(),
            ..run.clone()
        };
        (part, &self.bytes[range])
    }
}

/// Bytes of IP packets that a run of `length` bytes, or a part of it, takes on the path.
pub(super) fn bytes_on_path(run: &Run, length: usize) -> usize {
    length + run.segments * headers(run)
}

fn headers(run: &Run) -> usize {
    if run.destination.address.is_ipv4() {
        HEADERS_V4
    } else {
        HEADERS_V6
    }
}
