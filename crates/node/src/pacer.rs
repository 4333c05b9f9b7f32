//! Paces the datagrams of a tunnel: spreads bursts and delays streams a little, or limits the rate.
//!
//! *Bursts.* A TCP sender sends at once what an acknowledgement allows, and at first doubles that in each round trip.
//! A short queue on the path drops the end of such a burst, and the sender stays far below the rate of the path. So
//! datagrams to a peer leave at most [`GAIN`] times as fast as they came during a part of the round trip. An even
//! stream of small batches is not spread, and a burst takes that part. This needs no estimate of the path's rate.
//! Linux paces TCP alike, but only on hosts with `fq` or BBR (`tcp_update_pacing_rate` in net/ipv4/tcp_input.c).
//!
//! *Fairness.* A full queue has room for one packet each time that it sends one. An acknowledgement causes the next
//! packet of a stream, which therefore comes to the queue one round trip after another left it. Suppose that two streams
//! share the queue, and that the packets of one come later than those of the other by about one packet's time. Then the
//! later packets find room, and the queue drops packets of the other stream. A tunnel delays packets by about that time
//! on paths of 20 to 200 Mbit/s. So, while the path has a queue and a steady stream, datagrams to a peer wait for the
//! time of [`HELD_PACKETS`] packets at the rate of the last second. The queue then treats both streams alike.
//!
//! *Limit.* A bottleneck behind this host, such as a DSL modem, has a queue: a long one delays every packet behind a
//! bulk transfer, a short one or a policer drops the end of each burst. If this host sends a little slower than the
//! bottleneck, that queue stays empty. While datagrams wait for the limit, the worker reads no packets, so they wait in
//! the TUN device's queue, whose delay it limits ([`BatchReader`](crate::batch_reader::BatchReader)). The limit spaces
//! datagrams evenly, so bursts are not spread as well.

mod queue;

use queue::Queue;
use seikan_observe::{DropReason, Stopped};
use seikan_proto::indices::PeerId;
use seikan_proto::outbox::Run;
use seikan_proto::time::Instant;
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

/// Maximum ratio of the rate at which datagrams leave to that at which they came. Linux's `tcp_pacing_ca_ratio` has the
/// same value.
const GAIN: f64 = 1.2;
/// Datagrams are counted over this part of the round trip. TCP's HyStart takes a burst of half of it or more for a full
/// path, and ends slow start (`hystart_update` in net/ipv4/tcp_cubic.c).
const WINDOWS_PER_ROUND_TRIP: u32 = 4;
/// Shortest round trip with spread bursts. In a shorter one, delays of the scheduler are as long as the bursts.
const SHORTEST_ROUND_TRIP: Duration = Duration::from_millis(4);
/// Maximum time over which datagrams are counted, and a burst is spread. The peer can feign any round trip.
const LONGEST_WINDOW: Duration = Duration::from_millis(50);
/// Bytes that may leave at once after a pause: less than a short queue holds, and more than TCP sends at first.
const FREE: f64 = 16.0 * 1500.0;
/// Maximum time that a burst makes up for after a late wakeup, until it has waited for a window. Timers may have a
/// resolution of a millisecond.
const LATE: Duration = Duration::from_millis(2);
/// Maximum bytes of all bursts that wait. More leave at once.
const MOST_SPREAD: usize = 8 << 20;

/// Number of packets whose time each datagram to a peer waits, at the rate of all datagrams to it. If two streams share
/// the path, these are eight packets' times of the path. A test of the lab's emulator shows that a full queue is fair
/// then. Three did not suffice at 100 Mbit/s, where receive offload makes acknowledgements rarer.
const HELD_PACKETS: f64 = 4.0;
/// Bytes of a packet on the path.
const PACKET: f64 = 1500.0;
/// Time over which that rate is averaged. Datagrams wait from the second after the next one on: TCP's slow start is
/// usually over then. There, a wait that falls while the rate rises would hide the path's queue from TCP.
const STEADY: Duration = Duration::from_secs(1);
/// Least share of the windows of a second in which a steady stream sends at least a quarter of its mean. Web pages send in
/// some of them only. They fill no queue for long, and a wait would delay each of their round trips.
const STEADY_SHARE: f64 = 0.75;
/// Shortest such wait. A tunnel under load delays packets by as much.
const SHORTEST_HOLD: Duration = Duration::from_micros(250);
/// Mean delay above the least one from which on the path counts as having a queue. Schedulers alone cause almost as much.
const LEAST_QUEUEING: Duration = Duration::from_micros(500);
/// Longest such wait; it is also at most an eighth of the round trip. Streams for which that is shorter than the time of
/// two packets do not wait at all: it would be as short as the delay that makes a queue unfair.
const LONGEST_HOLD: Duration = Duration::from_millis(5);

/// Maximum time of the limit that is made up for after a late wakeup: more would be a burst.
const CATCH_UP: Duration = Duration::from_micros(500);
/// Time at the limit that packets read at once take: the delay of a packet that arrives behind them.
const READ: Duration = Duration::from_millis(1);
/// Maximum time at the limit of the datagrams that wait, for all but the last [`LEAST_QUEUE`] bytes.
const QUEUE: Duration = Duration::from_millis(100);
/// Bytes that may wait at any rate: a super-packet, its parity and answers.
const LEAST_QUEUE: usize = 128 << 10;

/// Delays of the path to a peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Delays {
    /// The least round trip, if it is known.
    pub round_trip: Option<Duration>,
    /// Mean one-way delay above the least one, as the peer has reported it last.
    pub queueing: Duration,
}

/// The fate of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Send it.
    Now,
    /// Nothing: [`Pacer::send`] passes it on when its time has come.
    Later,
}

/// The datagrams that wait.
#[derive(Debug, Default)]
pub struct Pacer {
    limit: Option<Limit>,
    flows: HashMap<PeerId, Flow>,
    /// Flows with datagrams that wait, by the time of the next ones.
    due: BTreeSet<(Instant, PeerId)>,
    /// Bytes that wait in flows.
    bytes: usize,
    /// Datagrams that have waited.
    pub delayed: u64,
}

/// The limit of the rate, in bytes per second, and what waits for it.
#[derive(Debug)]
struct Limit {
    rate: f64,
    queue: Queue,
}

/// The datagrams to a peer.
#[derive(Debug)]
struct Flow {
    queue: Queue,
    /// Time over which datagrams are counted.
    window: Duration,
    /// Begin of the current window.
    since: Instant,
    /// Bytes that came in the current window.
    current: usize,
    /// Bytes that came in the window before.
    previous: usize,
    hold: Hold,
    /// Its entry in [`Pacer::due`].
    due: Option<Instant>,
}

impl Pacer {
    /// Creates a pacer with a limit in bits per second for all datagrams together, or without a limit.
    pub fn new(limit: Option<u64>) -> Pacer {
        let limit = limit.map(|bits| Limit {
            rate: bits as f64 / 8.0,
            queue: Queue::default(),
        });
        Pacer {
            limit,
            ..Pacer::default()
        }
    }

    /// The limit in bits per second.
    pub fn limit(&self) -> Option<u64> {
        self.limit.as_ref().map(|limit| (limit.rate * 8.0) as u64)
    }

    /// Whether datagrams wait for the limit, so that no packets should be read.
    pub fn is_at_limit(&self) -> bool {
        let limit = self.limit.as_ref();
        limit.is_some_and(|limit| !limit.queue.is_empty())
    }

    /// Maximum bytes of packets to read at once; a longer packet is read alone.
    pub fn read_limit(&self) -> usize {
        let limit = self.limit.as_ref();
        limit.map_or(usize::MAX, |limit| limit.bytes_in(READ))
    }

    /// The time for which the next datagrams to a peer wait, apart from bursts. Their records must state it.
    pub fn hold(&self, id: PeerId) -> Duration {
        let flow = self.flows.get(&id);
        flow.map_or(Duration::ZERO, |flow| flow.hold.time)
    }

    /// Returns when the next waiting datagrams may be sent.
    pub fn wakeup(&self) -> Option<Instant> {
        let limit = self.limit.as_ref();
        let limited = limit.and_then(|limit| limit.queue.next(limit.rate));
        let spread = self.due.first().map(|(at, _)| *at);
        limited.into_iter().chain(spread).min()
    }

    /// Takes a run to a peer. Returns what to do with it, or why it is dropped: too many bytes wait for the limit.
    pub fn push(
        &mut self,
        run: &Run,
        bytes: &[u8],
        delays: Delays,
        now: Instant,
    ) -> Result<Pace, Stopped> {
        if let Some(limit) = &mut self.limit {
            limit.push(run, bytes, now)?;
            return Ok(Pace::Later);
        }
        let Some(id) = run.peer else {
            return Ok(Pace::Now);
        };
        let window = delays
            .round_trip
            .filter(|time| *time >= SHORTEST_ROUND_TRIP)
            .map(|time| (time / WINDOWS_PER_ROUND_TRIP).min(LONGEST_WINDOW));
        let flow = match (window, self.flows.get_mut(&id)) {
            (Some(window), _) => {
                let flow = self.flows.entry(id).or_default();
                flow.window = window;
                flow
            }
            // The path has become short. Earlier datagrams may still wait, and go first.
            (None, Some(flow)) if !flow.queue.is_empty() => flow,
            (None, Some(flow)) => {
                flow.hold = Hold::default();
                return Ok(Pace::Now);
            }
            (None, None) => return Ok(Pace::Now),
        };
        let length = queue::bytes_on_path(run, bytes.len());
        flow.arrived(length, now);
        let hold = flow
            .hold
            .of_datagrams(length, delays.queueing, flow.window, now);
        if hold.is_zero() && flow.queue.is_empty() && flow.queue.take(run, bytes.len()) {
            return Ok(Pace::Now);
        }
        self.bytes += bytes.len();
        flow.queue.push(run, bytes, now, hold);
        self.schedule(id);
        Ok(Pace::Later)
    }

    /// Enters the time of the next datagrams to a peer.
    fn schedule(&mut self, id: PeerId) {
        let Some(flow) = self.flows.get_mut(&id) else {
            return;
        };
        let next = flow.next();
        if let Some(at) = std::mem::replace(&mut flow.due, next) {
            self.due.remove(&(at, id));
        }
        self.due.extend(next.map(|at| (at, id)));
    }

    /// Passes the datagrams that may be sent by `now` to `send`, in the order of each peer.
    pub fn send(&mut self, now: Instant, mut send: impl FnMut(&Run, &[u8])) {
        if let Some(Limit { rate, queue }) = &mut self.limit {
            queue.earn(*rate, *rate * CATCH_UP.as_secs_f64(), now);
            self.delayed += queue.send(*rate, now, &mut send);
        }
        if self.bytes > MOST_SPREAD {
            let mut datagrams = 0;
            self.take_all(|run, bytes| {
                datagrams += run.segments as u64;
                send(run, bytes);
            });
            self.delayed += datagrams;
        }
        while let Some((at, id)) = self.due.first().copied()
            && at <= now
            && let Some(flow) = self.flows.get_mut(&id)
        {
            let before = flow.queue.bytes();
            flow.earn(now);
            self.delayed += flow.queue.send(flow.rate(now), now, &mut send);
            self.bytes -= before - flow.queue.bytes();
            self.schedule(id);
        }
    }

    /// Passes all datagrams that wait to `take`, in the order of each peer.
    pub fn take_all(&mut self, mut take: impl FnMut(&Run, &[u8])) {
        if let Some(limit) = &mut self.limit {
            limit.queue.take_all(&mut take);
        }
        // Flows keep their rates: without them, an even stream would look like a burst again.
        for flow in self.flows.values_mut() {
            flow.queue.take_all(&mut take);
            flow.due = None;
        }
        self.due.clear();
        self.bytes = 0;
    }

    /// Discards the datagrams to a peer.
    pub fn remove(&mut self, id: PeerId) {
        if let Some(limit) = &mut self.limit {
            limit.queue.remove(id);
        }
        if let Some(flow) = self.flows.remove(&id) {
            self.bytes -= flow.queue.bytes();
            if let Some(at) = flow.due {
                self.due.remove(&(at, id));
            }
        }
    }
}

impl Limit {
    fn push(&mut self, run: &Run, bytes: &[u8], now: Instant) -> Result<(), Stopped> {
        if self.queue.bytes() + bytes.len() > self.bytes_in(QUEUE) + LEAST_QUEUE {
            return Err(DropReason::SendNoBuffers.into());
        }
        self.queue.push(run, bytes, now, Duration::ZERO);
        Ok(())
    }

    /// Bytes that the limit allows in a time.
    fn bytes_in(&self, time: Duration) -> usize {
        (time.as_secs_f64() * self.rate) as usize
    }
}

impl Default for Flow {
    fn default() -> Flow {
        Flow {
            queue: Queue::with_credit(FREE),
            window: Duration::ZERO,
            since: Instant::BOOT,
            current: 0,
            previous: 0,
            hold: Hold::default(),
            due: None,
        }
    }
}

impl Flow {
    /// Counts bytes that came.
    fn arrived(&mut self, bytes: usize, now: Instant) {
        // A burst leaves a debt. It is earned at the rate of the burst, not at that of the bytes behind it.
        self.earn(now);
        let elapsed = now.duration_since(self.since);
        if elapsed >= self.window {
            let windows = elapsed.as_nanos() / self.window.as_nanos().max(1);
            self.hold.windows_ended(windows as u32, self.current);
        }
        if elapsed >= 2 * self.window {
            self.previous = 0;
            self.current = 0;
            self.since = now;
        } else if elapsed >= self.window {
            self.previous = std::mem::take(&mut self.current);
            self.since += self.window;
        }
        self.current += bytes;
    }

    fn earn(&mut self, now: Instant) {
        let rate = self.rate(now);
        let most = match self.queue.due_since() {
            // Each wakeup is late: without all of the credit, the queue would grow.
            Some(since) if now.duration_since(since) > self.window => f64::INFINITY,
            Some(since) if now > since => FREE.max(rate * LATE.as_secs_f64()),
            Some(_) | None => FREE,
        };
        self.queue.earn(rate, most, now);
    }

    /// Bytes per second at which datagrams may leave.
    fn rate(&self, now: Instant) -> f64 {
        let window = self.window.as_secs_f64();
        let elapsed = now.duration_since(self.since).as_secs_f64() / window;
        let previous = self.previous as f64 * (1.0 - elapsed).max(0.0);
        // If wakeups are not late, nothing waits for longer than a window, and its hold.
        let bytes = (self.current as f64 + previous).max(self.queue.bytes() as f64);
        GAIN * bytes / window
    }

    /// When the next waiting datagrams may be sent.
    fn next(&self) -> Option<Instant> {
        self.queue.next(self.rate(self.queue.updated()))
    }
}

/// The time for which each datagram to a peer waits, so that a full queue treats all streams alike.
#[derive(Debug, Default)]
struct Hold {
    /// Begin of this second.
    since: Instant,
    /// Bytes that came in it.
    bytes: usize,
    /// Windows of this second that have ended.
    windows: u32,
    /// Those of them in which at least `least` bytes came.
    busy: u32,
    /// A quarter of the mean bytes of a window in the last second.
    least: usize,
    /// Whether this second follows another one, so that the peer has reported the delay of this stream.
    is_reported: bool,
    /// The wait in this second, which follows from the rate of the last one.
    time: Duration,
}

impl Hold {
    /// Counts windows that have ended. `bytes` came in the first of them, none in the others.
    fn windows_ended(&mut self, windows: u32, bytes: usize) {
        self.windows = self.windows.saturating_add(windows);
        self.busy += u32::from(bytes > 0 && bytes >= self.least);
    }

    /// Counts datagrams of `length` bytes. Returns how long they wait: as their records state, which were sealed before,
    /// also after a pause. If they left earlier, the peer would find delays in a queue until the next session. `window`
    /// is a quarter of the round trip.
    fn of_datagrams(
        &mut self,
        length: usize,
        queueing: Duration,
        window: Duration,
        now: Instant,
    ) -> Duration {
        let stated = self.time;
        let elapsed = now.duration_since(self.since);
        let longest = LONGEST_HOLD.min(window / 2);
        if elapsed >= 2 * STEADY {
            *self = Hold {
                since: now,
                ..Hold::default()
            };
        } else if elapsed >= STEADY {
            let packets = self.bytes as f64 / PACKET;
            let wanted = elapsed.mul_f64(HELD_PACKETS / packets.max(HELD_PACKETS));
            let time = wanted.min(longest);
            let is_steady = f64::from(self.busy) >= STEADY_SHARE * f64::from(self.windows);
            let is_used = self.is_reported
                && is_steady
                && queueing >= LEAST_QUEUEING
                && time >= SHORTEST_HOLD.max(wanted / 2);
            *self = Hold {
                since: now,
                least: self.bytes / (4 * self.windows.max(1) as usize),
                is_reported: true,
                time: if is_used { time } else { Duration::ZERO },
                ..Hold::default()
            };
        }
        self.bytes += length;
        stated
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_proto::outbox::{Destination, Payload};
    use std::collections::VecDeque;

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
            first: 0,
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

    /// A part that was sent.
    #[derive(Debug)]
    struct Sent {
        /// Microseconds.
        at: u64,
        peer: Option<PeerId>,
        datagrams: usize,
        first_byte: u8,
        packets: u64,
    }

    /// Sends from a time on until nothing waits or `until` has come.
    fn drain(pacer: &mut Pacer, from: u64, until: u64) -> Vec<Sent> {
        let (mut now, mut sent) = (at(from), Vec::new());
        while now < at(until) {
            pacer.send(now, |run, bytes| {
                assert_eq!(bytes.len(), run.segments * run.segment_size);
                sent.push(Sent {
                    at: (now - at(0)).as_micros() as u64,
                    peer: run.peer,
                    datagrams: run.segments,
                    first_byte: bytes[0],
                    packets: run.payload.packets,
                });
            });
            match pacer.wakeup() {
                Some(next) => now = next,
                None => break,
            }
        }
        sent
    }

    fn push_limited(pacer: &mut Pacer, run: &(Run, Vec<u8>), us: u64) -> Result<Pace, Stopped> {
        pacer.push(&run.0, &run.1, Delays::default(), at(us))
    }

    #[test]
    fn datagrams_leave_at_the_rate_with_their_headers() {
        // 1000 bytes with headers take 1 ms.
        let mut pacer = Pacer::new(Some(RATE));
        push_limited(&mut pacer, &run(5, 972), 0).expect("space");
        assert!(pacer.is_at_limit());
        let sent = drain(&mut pacer, 0, u64::MAX);
        // The first makes up for half a millisecond before.
        let times: Vec<u64> = sent.iter().map(|part| part.at).collect();
        assert_eq!(times, [0, 500, 1500, 2500, 3500]);
        let bytes: Vec<u8> = sent.iter().map(|part| part.first_byte).collect();
        assert_eq!(bytes, [0, 1, 2, 3, 4]);
        assert_eq!(sent.iter().map(|part| part.packets).sum::<u64>(), 7);
        assert_eq!(pacer.delayed, 4);
        assert!(!pacer.is_at_limit());
    }

    #[test]
    fn a_fast_path_gets_several_datagrams_at_once() {
        // 0.25 ms are five datagrams, and twice as many are made up for.
        let mut pacer = Pacer::new(Some(20 * RATE));
        push_limited(&mut pacer, &run(44, 972), 0).expect("space");
        let sent = drain(&mut pacer, 0, u64::MAX);
        let sizes: Vec<usize> = sent.iter().map(|part| part.datagrams).collect();
        assert_eq!(sizes, [10, 5, 5, 5, 5, 5, 5, 4]);
        assert_eq!(sent.last().map(|part| part.at), Some(1500));
    }

    #[test]
    fn time_without_datagrams_is_not_saved_up() {
        let mut pacer = Pacer::new(Some(RATE));
        push_limited(&mut pacer, &run(1, 972), 0).expect("space");
        drain(&mut pacer, 0, u64::MAX);
        push_limited(&mut pacer, &run(4, 972), 1_000_000).expect("space");
        let sent = drain(&mut pacer, 1_000_000, u64::MAX);
        assert_eq!(sent.last().map(|part| part.at), Some(1_002_500));
    }

    #[test]
    fn what_waits_for_the_limit_is_bounded_and_the_rest_is_refused() {
        let mut pacer = Pacer::new(Some(RATE));
        let run = run(60, 1000);
        let pushed = std::iter::repeat_with(|| push_limited(&mut pacer, &run, 0));
        let pushed = pushed.take_while(Result::is_ok).count();
        // 100 ms are 100,000 bytes.
        assert_eq!(pushed, (100_000 + LEAST_QUEUE) / 60_000);
        drain(&mut pacer, 0, u64::MAX);
        assert!(push_limited(&mut pacer, &run, 0).is_ok());
    }

    /// Pushes a run of `datagrams` of 1000 bytes on the path to a peer at 40 ms.
    fn push_to(pacer: &mut Pacer, peer: u32, datagrams: usize, us: u64) -> Pace {
        let (mut run, bytes) = run(datagrams, 972);
        run.peer = Some(PeerId(peer));
        push_with_queue(pacer, &(run, bytes), 0, us)
    }

    /// Pushes a run at 40 ms, with a mean delay in a queue of `queueing` us.
    fn push_with_queue(pacer: &mut Pacer, run: &(Run, Vec<u8>), queueing: u64, us: u64) -> Pace {
        let delays = Delays {
            round_trip: Some(Duration::from_millis(40)),
            queueing: Duration::from_micros(queueing),
        };
        let pace = pacer.push(&run.0, &run.1, delays, at(us));
        pace.expect("no limit")
    }

    #[test]
    fn an_even_stream_passes() {
        let mut pacer = Pacer::default();
        for ms in 0..200 {
            let pace = push_to(&mut pacer, 1, 20, ms * 1000);
            // Until its rate is known, it looks like a burst.
            assert!(pace == Pace::Now || ms < 60, "{ms}");
            drain(&mut pacer, ms * 1000, (ms + 1) * 1000);
        }
    }

    /// Sends a datagram of 1000 bytes each `interval` us for 6 s at a round trip of `round_trip` ms, in groups of `group`.
    /// The peer reports a queue of `queue` us. Returns the wait of the last group in us.
    fn wait(interval: u64, group: u64, round_trip: u64, queue: u64) -> u64 {
        let mut pacer = Pacer::default();
        let (mut run, bytes) = run(1, 972);
        run.peer = Some(PeerId(1));
        let (mut came, mut wait) = (VecDeque::new(), 0);
        for us in (0..6_000_000).step_by((interval * group) as usize) {
            let delays = Delays {
                round_trip: Some(Duration::from_millis(round_trip)),
                queueing: Duration::from_micros(queue),
            };
            for _ in 0..group {
                let pace = pacer.push(&run, &bytes, delays, at(us)).expect("no limit");
                match pace {
                    Pace::Now => wait = 0,
                    Pace::Later => came.push_back(us),
                }
            }
            for part in drain(&mut pacer, us, us + interval * group) {
                wait = part.at - came.drain(..part.datagrams).next().expect("came");
            }
        }
        wait
    }

    #[test]
    fn datagrams_wait_for_the_time_of_four_packets() {
        // 25 Mbit/s: four packets of 1500 bytes take 1.92 ms. A group of 15 takes 4.8 ms, longer than a window.
        for (group, round_trip) in [(1, 40), (8, 40), (15, 16)] {
            let wait = wait(320, group, round_trip, 600);
            assert!(
                (1_900..2_000).contains(&wait),
                "{wait} us, groups of {group}"
            );
        }
    }

    #[test]
    fn datagrams_do_not_wait_without_a_queue() {
        assert_eq!(wait(320, 1, 40, 400), 0);
    }

    #[test]
    fn datagrams_of_web_pages_do_not_wait() {
        // 25 Mbit/s as before. A page's datagrams of a round trip come at once: in one of its four windows.
        for (group, waits) in [(1, true), (125, false)] {
            let mut pacer = Pacer::default();
            let (mut run, bytes) = run(1, 972);
            run.peer = Some(PeerId(1));
            for us in (0..6_000_000).step_by(320 * group) {
                for _ in 0..group {
                    push_with_queue(&mut pacer, &(run.clone(), bytes.clone()), 600, us);
                }
                drain(&mut pacer, us, us + 320 * group as u64);
            }
            assert_eq!(!pacer.hold(PeerId(1)).is_zero(), waits, "groups of {group}");
        }
    }

    #[test]
    fn datagrams_do_not_wait_for_longer_than_an_eighth_of_the_round_trip() {
        let wait = wait(320, 1, 14, 600);
        assert!((1_750..1_800).contains(&wait), "{wait} us");
    }

    #[test]
    fn datagrams_do_not_wait_for_longer_than_5_ms() {
        // 8 Mbit/s: four packets of 1500 bytes take 6 ms.
        let wait = wait(1000, 1, 100, 10_000);
        assert!((5_000..5_100).contains(&wait), "{wait} us");
    }

    #[test]
    fn datagrams_of_slow_and_fast_streams_do_not_wait() {
        // Two packets of 1500 bytes take longer than an eighth of the round trip, or than 5 ms at 4 Mbit/s.
        assert_eq!(wait(320, 1, 7, 600), 0);
        assert_eq!(wait(2000, 1, 100, 10_000), 0);
        // 200 Mbit/s: four packets take 0.24 ms.
        assert_eq!(wait(40, 1, 100, 10_000), 0);
    }

    #[test]
    fn the_first_two_seconds_of_a_stream_do_not_wait() {
        let mut pacer = Pacer::default();
        let (mut run, bytes) = run(1, 972);
        run.peer = Some(PeerId(1));
        let run = (run, bytes);
        for start in [0, 6_000_000] {
            // 25 Mbit/s: four packets of 1500 bytes take 1.92 ms.
            for us in (0..3_000_000).step_by(320) {
                let pace = push_with_queue(&mut pacer, &run, 10_000, start + us);
                // After the pause, the first record was sealed with the wait of before, and others are behind it.
                if start == 0 || us > 2_500 {
                    assert_eq!(pace == Pace::Later, us > 2_000_000, "{us}");
                } else if us == 0 {
                    assert_eq!(pace, Pace::Later);
                }
                assert_eq!(pacer.hold(PeerId(1)).is_zero(), us < 2_000_000, "{us}");
                drain(&mut pacer, start + us, start + us + 320);
            }
            drain(&mut pacer, start + 3_000_000, u64::MAX);
        }
    }

    #[test]
    fn the_end_of_a_burst_fits_a_short_queue() {
        let mut pacer = Pacer::default();
        // 240 datagrams come within a millisecond. They leave in 35 us each.
        let mut sent = Vec::new();
        for part in 0..6 {
            let now = part * 200;
            assert_eq!(push_to(&mut pacer, 1, 40, now), Pace::Later);
            sent.extend(drain(&mut pacer, now, now + 200));
        }
        sent.extend(drain(&mut pacer, 1200, u64::MAX));
        assert_eq!(sent.iter().map(|part| part.datagrams).sum::<usize>(), 240);
        // The queue of a link that takes 20 us for each.
        let (mut queue, mut before) = (0.0_f64, 0);
        for part in &sent {
            queue = (queue - (part.at - before) as f64 / 20.0).max(0.0) + part.datagrams as f64;
            before = part.at;
            assert!(queue <= 32.0, "{queue} at {part:?}");
        }
        // A quarter of the round trip, at 1.2 times the rate.
        assert!((7_000..10_000).contains(&before), "{before}");
        assert_eq!((pacer.bytes, pacer.wakeup()), (0, None));
    }

    #[test]
    fn a_packet_after_a_burst_and_a_pause_does_not_wait() {
        let mut pacer = Pacer::default();
        for part in 0..6 {
            push_to(&mut pacer, 1, 40, part * 200);
        }
        drain(&mut pacer, 1000, u64::MAX);
        assert_eq!(push_to(&mut pacer, 1, 1, 30_000), Pace::Now);
    }

    #[test]
    fn a_worker_that_is_late_keeps_the_rate() {
        let mut pacer = Pacer::default();
        // 1 Gbit/s for half a second, and a send each millisecond.
        for ms in 0..500 {
            for _ in 0..2 {
                push_to(&mut pacer, 1, 60, ms * 1000);
            }
            pacer.send(at(ms * 1000), |_, _| {});
            assert!(
                pacer.bytes < 2_000_000,
                "{} wait after {ms} ms",
                pacer.bytes
            );
        }
    }

    /// 100 Mbit/s on the path, packets read at once, and a send each `interval` milliseconds.
    #[test]
    fn a_worker_that_is_always_late_delays_by_a_window_and_its_interval() {
        for interval in [3, 5, 10, 20] {
            let mut pacer = Pacer::default();
            let (mut came, mut left) = (Vec::new(), 0);
            for ms in (0..2000).step_by(interval as usize) {
                let datagrams = 12 * interval as usize;
                push_to(&mut pacer, 1, datagrams, ms * 1000);
                came.extend(std::iter::repeat_n(ms, datagrams));
                pacer.send(at(ms * 1000), |run, _| left += run.segments);
                let oldest = came.get(came.len() - pacer.bytes / 972);
                let wait = oldest.map_or(0, |since| ms - since);
                assert!(wait <= 10 + interval, "{wait} ms at {ms} of {interval}");
            }
        }
    }

    #[test]
    fn a_burst_to_one_peer_does_not_delay_another() {
        let mut pacer = Pacer::default();
        assert_eq!(push_to(&mut pacer, 1, 60, 0), Pace::Later);
        assert!(!pacer.is_at_limit());
        assert_eq!(push_to(&mut pacer, 2, 4, 10), Pace::Now);
        // Later ones to the first wait behind the burst.
        assert_eq!(push_to(&mut pacer, 1, 1, 20), Pace::Later);
    }

    #[test]
    fn bursts_to_a_near_peer_are_not_spread() {
        let mut pacer = Pacer::default();
        let (mut run, bytes) = run(60, 972);
        run.peer = Some(PeerId(1));
        for round_trip in [None, Some(Duration::from_micros(3999))] {
            let delays = Delays {
                round_trip,
                ..Delays::default()
            };
            let pace = pacer.push(&run, &bytes, delays, at(0));
            assert_eq!(pace.ok(), Some(Pace::Now));
        }
    }

    #[test]
    fn what_waits_for_a_peer_goes_with_it() {
        for mut pacer in [Pacer::default(), Pacer::new(Some(RATE))] {
            for peer in [1, 2] {
                assert_eq!(push_to(&mut pacer, peer, 60, 0), Pace::Later);
            }
            pacer.remove(PeerId(1));
            let sent = drain(&mut pacer, 0, u64::MAX);
            assert!(sent.iter().all(|part| part.peer == Some(PeerId(2))));
            assert_eq!(sent.iter().map(|part| part.datagrams).sum::<usize>(), 60);
            assert_eq!(pacer.bytes, 0);
        }
    }

    #[test]
    fn more_bursts_than_the_limit_of_memory_leave_at_once() {
        let mut pacer = Pacer::default();
        let runs = MOST_SPREAD / (60 * 972) + 1;
        for peer in 0..runs {
            push_to(&mut pacer, peer as u32, 60, 0);
        }
        let mut datagrams = 0;
        pacer.send(at(0), |run, _| datagrams += run.segments);
        assert_eq!(datagrams, runs * 60);
        assert_eq!(pacer.delayed, datagrams as u64);
        assert_eq!((pacer.bytes, pacer.wakeup()), (0, None));
    }

    /// 8 Gbit/s: half of what a window takes exceeds the memory.
    #[test]
    fn an_even_stream_above_the_limit_of_memory_becomes_even_again() {
        let mut pacer = Pacer::default();
        let (mut run, bytes) = run(60, 972);
        run.peer = Some(PeerId(1));
        let mut lumps = 0;
        for us in (0..1_000_000).step_by(60) {
            let delays = Delays {
                round_trip: Some(Duration::from_millis(200)),
                ..Delays::default()
            };
            pacer.push(&run, &bytes, delays, at(us)).expect("no limit");
            lumps += usize::from(pacer.bytes > MOST_SPREAD);
            pacer.send(at(us), |_, _| {});
        }
        assert!(lumps <= 3, "{lumps}");
    }
}
