//! Limits the rate of a tunnel's datagrams, and spaces them evenly.
//!
//! A bottleneck behind this host, such as a DSL modem, has a queue: a long one delays every packet behind a bulk
//! transfer, a short one or a policer drops the end of each burst. If this host sends a little slower than the
//! bottleneck, that queue stays empty. While datagrams wait here, the worker reads no packets, so they wait in the TUN
//! device's queue, whose delay it limits ([`BatchReader`](crate::batch_reader::BatchReader)).

use seikan_observe::{DropReason, Stopped};
use seikan_proto::outbox::{Payload, Run};
use seikan_proto::time::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Time that datagrams sent together take at the limit. The shorter, the more send calls.
const BURST: Duration = Duration::from_micros(250);
/// Maximum time that is made up for after a late wakeup: more would be a burst.
const CATCH_UP: Duration = Duration::from_micros(500);
/// Time at the limit that packets read at once take: the delay of a packet that arrives behind them.
const READ: Duration = Duration::from_millis(1);
/// Maximum time at the limit of the datagrams that wait, for all but the last [`LEAST_QUEUE`] bytes.
const QUEUE: Duration = Duration::from_millis(100);
/// Bytes that may wait at any rate: a super-packet, its parity and answers.
const LEAST_QUEUE: usize = 128 << 10;
/// Bytes of the headers of IPv4 and UDP. They count, since the path carries them.
const HEADERS_V4: usize = 28;
/// Bytes of the headers of IPv6 and UDP.
const HEADERS_V6: usize = 48;

/// A limit of the sending rate and the datagrams that wait for it.
#[derive(Debug, Default)]
pub struct Pacer {
    /// Bits per second.
    rate: Option<u64>,
    /// When the next datagram may be sent.
    next: Instant,
    waiting: VecDeque<Waiting>,
    /// Bytes in `waiting`.
    bytes: usize,
    /// Datagrams that have waited.
    pub waited: u64,
}

/// A run that waits since a time, and of which `sent` datagrams were sent.
#[derive(Debug)]
struct Waiting {
    run: Run,
    bytes: Vec<u8>,
    sent: usize,
    since: Instant,
}

impl Pacer {
    /// Creates a pacer with a limit in bits per second, or without a limit.
    pub fn new(rate: Option<u64>) -> Pacer {
        Pacer {
            rate,
            ..Pacer::default()
        }
    }

    /// The limit in bits per second.
    pub fn rate(&self) -> Option<u64> {
        self.rate
    }

    /// Whether datagrams wait, so that no packets should be read.
    pub fn is_behind(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns when the next waiting datagrams may be sent.
    pub fn wakeup(&self) -> Option<Instant> {
        self.is_behind().then_some(self.next)
    }

    /// Maximum bytes of packets to read at once; a longer packet is read alone.
    pub fn read_limit(&self) -> usize {
        self.rate.map_or(usize::MAX, |rate| bytes_in(READ, rate))
    }

    /// Adds a run, or returns why it is dropped: too many bytes wait already.
    pub fn push(&mut self, run: &Run, bytes: &[u8], now: Instant) -> Result<(), Stopped> {
        let most = self.rate.map_or(0, |rate| bytes_in(QUEUE, rate));
        if self.bytes + bytes.len() > most + LEAST_QUEUE {
            return Err(DropReason::SendNoBuffers.into());
        }
        self.bytes += bytes.len();
        self.waiting.push_back(Waiting {
            run: run.clone(),
            bytes: bytes.to_vec(),
            sent: 0,
            since: now,
        });
        Ok(())
    }

    /// Passes the datagrams that may be sent by `now` to `send`, oldest first.
    pub fn send(&mut self, now: Instant, mut send: impl FnMut(&Run, &[u8])) {
        let Some(rate) = self.rate else { return };
        let earliest = now.as_nanos().saturating_sub(CATCH_UP.as_nanos() as u64);
        while self.next <= now
            && let Some(front) = self.waiting.front_mut()
        {
            let headers = if front.run.destination.address.is_ipv4() {
                HEADERS_V4
            } else {
                HEADERS_V6
            };
            let most = bytes_in(BURST, rate) / (front.run.segment_size + headers);
            let (part, bytes) = front.take(most.max(1));
            let on_path = (bytes.len() + part.segments * headers) as u64;
            let time = Duration::from_nanos(on_path * 8_000_000_000 / rate);
            self.next = self.next.max(Instant::from_nanos(earliest)) + time;
            send(&part, bytes);
            if front.since < now {
                self.waited += part.segments as u64;
            }
            if front.sent == front.run.segments {
                self.bytes -= front.bytes.len();
                self.waiting.pop_front();
            }
        }
    }

    /// Passes all datagrams that wait to `take`, oldest first.
    pub fn take_all(&mut self, mut take: impl FnMut(&Run, &[u8])) {
        self.bytes = 0;
        for mut waiting in self.waiting.drain(..) {
            let (part, bytes) = waiting.take(usize::MAX);
            take(&part, bytes);
        }
    }
}

impl Waiting {
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
            payload,
            range: 0..range.len(),
            ..run.clone()
        };
        (part, &self.bytes[range])
    }
}

/// Bytes that a rate in bits per second carries in a time.
fn bytes_in(time: Duration, rate: u64) -> usize {
    (time.as_secs_f64() * rate as f64 / 8.0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_proto::outbox::Destination;

    const RATE: u64 = 8_000_000;

    fn run(segments: usize, segment_size: usize) -> (Run, Vec<u8>) {
        let bytes: Vec<u8> = (0..segments * segment_size)
            .map(|i| (i / segment_size) as u8)
            .collect();
        let run = Run {
            destination: Destination {
                address: ([192, 0, 2, 1], 7).into(),
                source: None,
                traffic_class: 0,
                hop_limit: None,
            },
            peer: None,
            segment_size,
            segments,
            payload: Payload {
                packets: 7,
                bytes: 1001,
            },
            range: 0..bytes.len(),
        };
        (run, bytes)
    }

    fn at(us: u64) -> Instant {
        Instant::from_nanos(1 << 40) + Duration::from_micros(us)
    }

    /// Returns the time, number, first byte and inner packets of each part that is sent until nothing waits.
    fn drain(pacer: &mut Pacer, from: Instant) -> Vec<(Instant, usize, u8, u64)> {
        let (mut now, mut sent) = (from, Vec::new());
        loop {
            pacer.send(now, |run, bytes| {
                assert_eq!(bytes.len(), run.segments * run.segment_size);
                sent.push((now, run.segments, bytes[0], run.payload.packets));
            });
            match pacer.wakeup() {
                Some(at) => now = at,
                None => return sent,
            }
        }
    }

    #[test]
    fn datagrams_leave_at_the_rate_with_their_headers() {
        // 1000 bytes with headers take 1 ms.
        let mut pacer = Pacer::new(Some(RATE));
        let (run, bytes) = run(5, 972);
        pacer.push(&run, &bytes, at(0)).expect("space");
        let sent = drain(&mut pacer, at(0));
        // The first makes up for half a millisecond before.
        let times = [0, 500, 1500, 2500, 3500].map(at);
        assert_eq!(sent.iter().map(|part| part.0).collect::<Vec<_>>(), times);
        assert_eq!(
            sent.iter().map(|part| part.2).collect::<Vec<_>>(),
            [0, 1, 2, 3, 4]
        );
        assert_eq!(sent.iter().map(|part| part.3).sum::<u64>(), 7);
        assert_eq!(pacer.waited, 4);
    }

    #[test]
    fn a_fast_path_gets_several_datagrams_at_once() {
        // 0.25 ms are five datagrams.
        let mut pacer = Pacer::new(Some(20 * RATE));
        let (run, bytes) = run(44, 972);
        pacer.push(&run, &bytes, at(0)).expect("space");
        let sent = drain(&mut pacer, at(0));
        let sizes: Vec<usize> = sent.iter().map(|part| part.1).collect();
        assert_eq!(sizes, [5, 5, 5, 5, 5, 5, 5, 5, 4]);
        assert_eq!(sent.last().map(|part| part.0), Some(at(1500)));
    }

    #[test]
    fn time_without_datagrams_is_not_saved_up() {
        let mut pacer = Pacer::new(Some(RATE));
        let (run, bytes) = run(1, 972);
        pacer.push(&run, &bytes, at(0)).expect("space");
        drain(&mut pacer, at(0));
        let (run, bytes) = self::run(4, 972);
        pacer.push(&run, &bytes, at(1_000_000)).expect("space");
        let sent = drain(&mut pacer, at(1_000_000));
        assert_eq!(sent.last().map(|part| part.0), Some(at(1_002_500)));
    }

    #[test]
    fn what_waits_is_bounded_and_the_rest_is_refused() {
        let mut pacer = Pacer::new(Some(RATE));
        let (run, bytes) = run(60, 1000);
        let pushed = std::iter::repeat_with(|| pacer.push(&run, &bytes, at(0)));
        let pushed = pushed.take_while(Result::is_ok).count();
        // 100 ms are 100,000 bytes.
        assert_eq!(pushed, (100_000 + LEAST_QUEUE) / 60_000);
        drain(&mut pacer, at(0));
        assert!(pacer.push(&run, &bytes, at(0)).is_ok());
    }
}
