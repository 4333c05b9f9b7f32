//! One direction of an emulated link: the fate of each frame, and its time of arrival.
//!
//! [`Direction::offer`] splits a (super-)packet into frames, decides the fate of each, and keeps
//! the frames that will arrive. The NIC's faults and rate apply first, then the path's: black hole,
//! loss, rate, delay, holding back, duplication. [`Direction::due`] returns the frames that have
//! arrived. Successive frames of one super-packet that arrive together are merged again, as receive
//! offload does with the frames that a NIC collects before an interrupt. There is no clock and no
//! socket: time is an argument.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use seikan_load::Pattern;
use seikan_wire::ethernet::HEADER_LEN;

use super::frame::Frames;
use super::{DirectionCounts, Faults, LATE};

/// Maximum number of bytes in transit: 200 ms at 10 Gbit/s.
const MEMORY: usize = 256 << 20;

/// Maximum time by which a packet arrives early: not more than the 50 microseconds or more for
/// which NICs collect packets before an interrupt.
const EARLY: Duration = Duration::from_micros(50);
/// Bits of a byte times nanoseconds of a second.
const BYTE_SECOND: u128 = 8_000_000_000;

/// Returns the time that `length` bytes take at a rate in bit/s; zero without a rate.
fn time_on_wire(length: usize, rate: u64) -> Duration {
    let time = (length as u128 * BYTE_SECOND).checked_div(u128::from(rate));
    Duration::from_nanos(time.unwrap_or(0) as u64)
}

/// Uniform random numbers.
#[derive(Debug)]
struct Random {
    numbers: Pattern,
    drawn: u64,
}

impl Random {
    /// Returns a number from 0 (inclusive) to 1 (exclusive).
    fn share(&mut self) -> f64 {
        self.drawn += 1;
        self.numbers.share(self.drawn - 1)
    }

    /// Returns true in `share` of all cases. Draws no number if the result is certain.
    fn hits(&mut self, share: f64) -> bool {
        share > 0.0 && self.share() < share
    }
}

/// Frames in transit, ordered by time and then by the order in which they were offered.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Pending {
    at: Duration,
    number: u64,
    /// Index of the first frame in the sender's packet.
    start: usize,
    /// Index after the last frame.
    end: usize,
    complete: bool,
    /// Bytes of the frames.
    bytes: usize,
    packet: Rc<[u8]>,
}

impl Pending {
    fn frames(&self) -> u64 {
        (self.end - self.start) as u64
    }

    /// Whether `next` continues these frames.
    fn is_continued_by(&self, next: &Self) -> bool {
        let same = Rc::ptr_eq(&self.packet, &next.packet) && next.start == self.end;
        same && self.complete && next.complete
    }
}

/// Fate of a frame that is not dropped.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Fate {
    at: Duration,
    twice: bool,
    complete: bool,
}

/// One direction of a link.
#[derive(Debug)]
pub(super) struct Direction {
    faults: Faults,
    random: Random,
    pending: BinaryHeap<Reverse<Pending>>,
    pending_bytes: usize,
    number: u64,
    /// Whether the loss model was in its bad state at the last frame.
    bad: bool,
    /// When the sending NIC will have sent all its frames.
    emitted: Duration,
    /// When the rate limiter will have sent all accepted frames.
    sent: Duration,
    /// When each frame in the queue is sent; used if the number of frames is limited.
    queue: VecDeque<Duration>,
    /// The latest arrival of a frame that was not held back.
    last: Duration,
    counts: DirectionCounts,
}

impl Direction {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            faults: Faults::default(),
            random: Random {
                numbers: Pattern::new(seed),
                drawn: 0,
            },
            pending: BinaryHeap::new(),
            pending_bytes: 0,
            number: 0,
            bad: false,
            emitted: Duration::ZERO,
            sent: Duration::ZERO,
            queue: VecDeque::new(),
            last: Duration::ZERO,
            counts: DirectionCounts::default(),
        }
    }

    /// Changes the faults. Frames in transit keep their fate and their order.
    pub(super) fn set(&mut self, faults: Faults) {
        self.faults = faults;
    }

    pub(super) fn counts(&self) -> DirectionCounts {
        DirectionCounts {
            under_way: self.pending.iter().map(|pending| pending.0.frames()).sum(),
            ..self.counts
        }
    }

    /// Whether a packet offered now would arrive immediately and as a whole.
    pub(super) fn is_open(&self) -> bool {
        self.pending.is_empty() && self.faults.is_none()
    }

    /// Counts a packet that is passed straight to the far end; `done`: the far end accepted it.
    pub(super) fn count_passing(&mut self, packet: &[u8], done: bool) {
        let frames = self.count_offered(&Frames::parse(packet));
        self.count_arrived(frames, done);
    }

    /// Counts frames that reached the far end; `done`: the far end accepted them.
    pub(super) fn count_arrived(&mut self, frames: u64, done: bool) {
        if done {
            self.counts.delivered += frames;
        } else {
            self.counts.refused += frames;
        }
    }

    fn count_offered(&mut self, frames: &Frames<'_>) -> u64 {
        let count = frames.count() as u64;
        self.counts.frames += count;
        self.counts.bytes += frames.total_length() as u64;
        count
    }

    /// Accepts a packet, which follows its virtio-net header.
    pub(super) fn offer(&mut self, now: Duration, packet: &[u8]) {
        let frames = Frames::parse(packet);
        let count = self.count_offered(&frames);
        if frames.is_super_packet() && self.random.hits(self.faults.broken_segmentation) {
            self.counts.unsegmented += count;
            return;
        }
        let now = match self.faults.nic_jitter_us {
            0 => now,
            most => now + Duration::from_micros(most).mul_f64(self.random.share()),
        };
        let packet = Rc::from(packet);
        let mut run: Option<(usize, Fate)> = None;
        for index in 0..frames.count() {
            let fate = self.fate(now, frames.length(index), frames.needs_checksum());
            let goes_on = run.is_some_and(|(_, first)| Some(first) == fate)
                && fate.is_some_and(|f| f.complete && !f.twice);
            if !goes_on {
                self.keep(&packet, &frames, run, index);
                run = fate.map(|fate| (index, fate));
            }
        }
        self.keep(&packet, &frames, run, frames.count());
    }

    /// Keeps the run of frames that ends before `end`.
    fn keep(
        &mut self,
        packet: &Rc<[u8]>,
        frames: &Frames<'_>,
        run: Option<(usize, Fate)>,
        end: usize,
    ) {
        let Some((start, fate)) = run else { return };
        let count = (end - start) as u64;
        let bytes = (start..end).map(|index| frames.length(index)).sum();
        if self.pending_bytes + bytes > MEMORY {
            self.counts.shed += count;
            return;
        }
        if !fate.complete {
            self.counts.unfilled += count;
        }
        if fate.twice {
            self.counts.duplicated += count;
        }
        for _ in 0..=usize::from(fate.twice) {
            self.pending_bytes += bytes;
            self.number += 1;
            self.pending.push(Reverse(Pending {
                at: fate.at,
                number: self.number,
                start,
                end,
                complete: fate.complete,
                bytes,
                packet: Rc::clone(packet),
            }));
        }
    }

    /// Returns the fate of a frame; `None`: the frame is dropped and counted.
    fn fate(&mut self, now: Duration, length: usize, needs_checksum: bool) -> Option<Fate> {
        let faults = self.faults;
        let now = self.emit(now, length);
        let complete = !(needs_checksum && self.random.hits(faults.broken_checksum));
        if faults
            .black_hole_bytes
            .is_some_and(|most| length > HEADER_LEN + most as usize)
        {
            self.counts.black_holed += 1;
            return None;
        }
        if self.loses() {
            self.counts.lost += 1;
            return None;
        }
        let sent = self.send(now, length)?;
        let jitter = match faults.jitter_us {
            0 => 0.0,
            most => self.random.share() * most as f64,
        };
        let delay = Duration::from_micros(faults.delay_us) + Duration::from_secs_f64(jitter / 1e6);
        // A frame with jitter, or sent before the delay shrank, is not overtaken.
        let mut at = (sent + delay).max(self.last);
        self.last = at;
        if self.random.hits(faults.reorder) {
            self.counts.held_back += 1;
            at += Duration::from_micros(faults.reorder_us);
        }
        let twice = self.random.hits(faults.duplicate);
        Some(Fate {
            at,
            twice,
            complete,
        })
    }

    /// Returns when the sending NIC will have sent a frame that is offered now.
    fn emit(&mut self, now: Duration, length: usize) -> Duration {
        self.emitted = self.emitted.max(now) + time_on_wire(length, self.faults.nic_bits);
        self.emitted
    }

    /// Whether the path loses the next frame.
    fn loses(&mut self) -> bool {
        let Faults {
            loss, loss_burst, ..
        } = self.faults;
        if loss_burst <= 1.0 || loss <= 0.0 {
            return self.random.hits(loss);
        }
        // The bad state lasts `loss_burst` frames on average, the good one so long that the share
        // of bad frames is `loss`.
        let change = if self.bad {
            1.0 / loss_burst
        } else {
            loss / (loss_burst * (1.0 - loss))
        };
        self.bad ^= self.random.hits(change);
        self.bad
    }

    /// Returns when the rate limiter will have sent a frame that arrives now; `None` if its queue
    /// is full.
    fn send(&mut self, now: Duration, length: usize) -> Option<Duration> {
        let Faults {
            rate_bits,
            queue_bytes,
            queue_frames,
            policed,
            ..
        } = self.faults;
        if rate_bits == 0 {
            self.sent = now;
            return Some(now);
        }
        let start = self.sent.max(now);
        let waiting = (start - now).as_nanos() * u128::from(rate_bits) / BYTE_SECOND;
        let is_long = waiting > 0 && waiting + length as u128 > u128::from(queue_bytes);
        if is_long || !self.has_place(now, queue_frames) {
            self.counts.overflowed += 1;
            return None;
        }
        self.sent = start + time_on_wire(length, rate_bits);
        if queue_frames > 0 {
            self.queue.push_back(self.sent);
        }
        Some(if policed { now } else { self.sent })
    }

    /// Whether fewer than `frames` frames wait for the rate; 0: any number may wait.
    fn has_place(&mut self, now: Duration, frames: u32) -> bool {
        while self.queue.front().is_some_and(|sent| *sent <= now) {
            self.queue.pop_front();
        }
        // The frame that is being sent does not wait.
        frames == 0 || self.queue.len() <= frames as usize
    }

    /// Returns when the next packet arrives.
    pub(super) fn next_due(&self) -> Option<Duration> {
        self.pending.peek().map(|pending| pending.0.at)
    }

    /// Returns a packet that is due, and its number of frames. A packet is also due if the
    /// remaining time is less than both 1 % of the path's delay and [`EARLY`], so that a fast flow
    /// does not wake the program for each of its frames. The first packet after a pause is exact.
    pub(super) fn due(&mut self, now: Duration) -> Option<(Vec<u8>, u64)> {
        let early = Duration::from_micros(self.faults.delay_us / 100).min(EARLY);
        let until = now + early;
        let mut run = self.pop(now, until, |_| true)?;
        while let Some(next) = self.pop(now, until, |next| run.is_continued_by(next)) {
            run.end = next.end;
        }
        let frames = Frames::parse(&run.packet);
        let packet = frames.cut(run.start, run.end, run.complete);
        Some((packet, run.frames()))
    }

    /// Takes the next packet if it is due and wanted.
    fn pop(
        &mut self,
        now: Duration,
        until: Duration,
        wanted: impl FnOnce(&Pending) -> bool,
    ) -> Option<Pending> {
        let Reverse(next) = self.pending.peek()?;
        if next.at > until || !wanted(next) {
            return None;
        }
        let Reverse(pending) = self.pending.pop()?;
        self.pending_bytes -= pending.bytes;
        let late = now.saturating_sub(pending.at);
        if late > LATE {
            self.counts.late += pending.frames();
        }
        self.counts.late_us = self.counts.late_us.max(late.as_micros() as u64);
        Some(pending)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::frame::tests::{SIZE, super_packet};
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    fn with_faults(faults: Faults) -> Direction {
        let mut direction = Direction::new(7);
        direction.set(faults);
        direction
    }

    /// Offers `count` frames of one kilobyte of payload; when they arrive, in order.
    fn arrivals(direction: &mut Direction, count: usize) -> Vec<Duration> {
        for _ in 0..count {
            direction.offer(NOW, &super_packet(SIZE));
        }
        drain(direction)
    }

    fn drain(direction: &mut Direction) -> Vec<Duration> {
        let mut times = Vec::new();
        while let Some(at) = direction.next_due() {
            let (_, frames) = direction.due(at).expect("due");
            direction.count_arrived(frames, true);
            times.push(at);
        }
        times
    }

    fn check_all_accounted(direction: &Direction) {
        let c = direction.counts();
        let dropped = c.lost + c.overflowed + c.black_holed + c.unsegmented + c.refused + c.shed;
        assert_eq!(
            c.frames + c.duplicated,
            c.delivered + dropped + c.under_way,
            "{c:?}"
        );
    }

    #[test]
    fn a_delay_is_exact() {
        let faults = Faults {
            delay_us: 1234,
            ..Faults::default()
        };
        let times = arrivals(&mut with_faults(faults), 3);
        assert_eq!(times, [NOW + Duration::from_micros(1234); 3]);
    }

    #[test]
    fn packets_close_together_arrive_together() {
        let faults = Faults {
            delay_us: 1000,
            rate_bits: 8_432_000_000,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        for _ in 0..30 {
            direction.offer(NOW, &super_packet(SIZE));
        }
        // A frame each microsecond, and 1 % of the delay are ten.
        let first = NOW + Duration::from_micros(1001);
        assert!(direction.due(first - Duration::from_micros(11)).is_none());
        let together = std::iter::from_fn(|| direction.due(first)).count();
        assert_eq!(together, 11);
        assert_eq!(
            direction.next_due(),
            Some(first + Duration::from_micros(11))
        );
    }

    #[test]
    fn successive_frames_that_arrive_together_are_one_packet() {
        let faults = Faults {
            delay_us: 1000,
            rate_bits: 8_432_000_000,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        direction.offer(NOW, &super_packet(30 * SIZE));
        let first = NOW + Duration::from_micros(1001);
        let (packet, frames) = direction.due(first).expect("due");
        assert_eq!((frames, Frames::parse(&packet).count()), (11, 11));
        assert_eq!(direction.due(first), None);
        assert_eq!(direction.counts().under_way, 19);
    }

    #[test]
    fn lost_frames_stay_lost_between_those_that_arrive_together() {
        let mut direction = with_faults(Faults {
            rate_bits: 8_432_000_000,
            loss: 0.3,
            ..Faults::default()
        });
        direction.offer(NOW, &super_packet(40 * SIZE));
        // The sequence number says where a frame was: they begin at 5000.
        let mut next_free = 0;
        let mut arrived = 0;
        while let Some((packet, frames)) = direction.due(2 * NOW) {
            let sequence = u32::from_be_bytes(packet[48..52].try_into().expect("four bytes"));
            let start = u64::from(sequence - 5000) / SIZE as u64;
            assert!(start >= next_free, "{start} after {next_free}");
            // At least one is lost between two packets.
            next_free = start + frames + 1;
            arrived += frames;
        }
        let lost = direction.counts().lost;
        assert!(lost > 0 && arrived + lost == 40, "{arrived} and {lost}");
    }

    #[test]
    fn jitter_stays_in_its_range_and_keeps_order() {
        let faults = Faults {
            delay_us: 1000,
            jitter_us: 500,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        for _ in 0..100 {
            direction.offer(NOW, &super_packet(SIZE));
        }
        let mut numbers = Vec::new();
        while let Some(Reverse(pending)) = direction.pending.pop() {
            let after = pending.at - NOW;
            assert!(after >= Duration::from_micros(1000) && after <= Duration::from_micros(1500));
            numbers.push(pending.number);
        }
        assert!(numbers.is_sorted());
    }

    #[test]
    fn loss_is_the_requested_share() {
        let faults = Faults {
            loss: 0.1,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        let left = arrivals(&mut direction, 20_000).len() as f64;
        // Five standard deviations of a binomial: sqrt(20000 * 0.1 * 0.9) = 42.
        assert!((left - 18_000.0).abs() < 212.0, "{left}");
        check_all_accounted(&direction);
    }

    #[test]
    fn loss_takes_frames_of_super_packets_one_by_one() {
        let faults = Faults {
            loss: 0.1,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        for _ in 0..500 {
            direction.offer(NOW, &super_packet(40 * SIZE));
        }
        drain(&mut direction);
        let lost = direction.counts().lost as f64;
        assert!((lost - 2_000.0).abs() < 212.0, "{lost}");
        check_all_accounted(&direction);
    }

    #[test]
    fn a_rate_spaces_frames() {
        // A frame is 1054 bytes = 8432 bits.
        let faults = Faults {
            rate_bits: 8_432_000,
            queue_bytes: 1 << 20,
            ..Faults::default()
        };
        let times = arrivals(&mut with_faults(faults), 3);
        let expected = [1, 2, 3].map(|n| NOW + Duration::from_millis(n));
        assert_eq!(times, expected);
    }

    #[test]
    fn frames_beyond_the_queue_are_dropped() {
        let faults = Faults {
            rate_bits: 8_432_000,
            queue_bytes: 10 * 1054,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        assert_eq!(arrivals(&mut direction, 15).len(), 10);
        assert_eq!(direction.counts().overflowed, 5);
        check_all_accounted(&direction);
    }

    #[test]
    fn a_queue_of_frames_counts_short_ones_as_one() {
        let faults = Faults {
            rate_bits: 8_432_000,
            queue_bytes: 1 << 30,
            queue_frames: 4,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        for _ in 0..5 {
            direction.offer(NOW, &super_packet(10));
            direction.offer(NOW, &super_packet(SIZE));
        }
        // One is being sent, and four wait.
        assert_eq!(drain(&mut direction).len(), 5);
        // Later there is room again.
        direction.offer(2 * NOW, &super_packet(SIZE));
        assert_eq!(drain(&mut direction).len(), 1);
        assert_eq!(direction.counts().overflowed, 5);
        check_all_accounted(&direction);
    }

    #[test]
    fn a_policer_drops_beyond_its_bucket_and_delays_nothing() {
        let faults = Faults {
            rate_bits: 8_432_000,
            queue_bytes: 10 * 1054,
            policed: true,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        assert_eq!(arrivals(&mut direction, 15), [NOW; 10]);
        assert_eq!(direction.counts().overflowed, 5);
        // After five milliseconds the bucket has five frames more.
        let later = NOW + Duration::from_millis(5);
        for _ in 0..15 {
            direction.offer(later, &super_packet(SIZE));
        }
        assert_eq!(drain(&mut direction), [later; 5]);
        check_all_accounted(&direction);
    }

    #[test]
    fn a_burst_comes_to_the_queue_at_the_rate_of_the_nic() {
        // A frame each millisecond out of the NIC, and two of them out of the queue in three.
        let faults = Faults {
            nic_bits: 8_432_000,
            rate_bits: 8_432_000 * 2 / 3,
            queue_frames: 1,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        direction.offer(NOW, &super_packet(6 * SIZE));
        let times = drain(&mut direction);
        // The first comes at 1 ms, takes 1.5, and so on; when the fifth comes, at 5 ms, the third
        // is being sent and the fourth waits.
        let expected = [2.5, 4.0, 5.5, 7.0].map(|n| NOW + Duration::from_secs_f64(n / 1e3));
        assert_eq!(times[..4], expected);
        assert_eq!(direction.counts().overflowed, 1);
        check_all_accounted(&direction);
    }

    #[test]
    fn the_nic_holds_packets_back_for_any_time_and_keeps_their_order() {
        let faults = Faults {
            nic_jitter_us: 500,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        let sent = |n| NOW + Duration::from_millis(n);
        let delays: Vec<f64> = (0..1000)
            .map(|n| {
                direction.offer(sent(n), &super_packet(SIZE));
                (drain(&mut direction)[0] - sent(n)).as_secs_f64() * 1e6
            })
            .collect();
        assert!(delays.iter().all(|delay| (0.0..500.0).contains(delay)));
        // The mean of a uniform distribution, and five standard deviations of it: 500 / sqrt(12,000).
        let mean = delays.iter().sum::<f64>() / 1000.0;
        assert!((mean - 250.0).abs() < 23.0, "{mean}");
        // Both at once: the second does not overtake the first.
        for n in 2000..3000 {
            direction.offer(sent(n), &super_packet(2 * SIZE));
            direction.offer(sent(n), &super_packet(SIZE));
            let arrived: Vec<_> = std::iter::from_fn(|| direction.due(sent(n + 1))).collect();
            assert_eq!(arrived.len(), 2);
            assert!(arrived[0].0.len() > arrived[1].0.len());
            arrived
                .iter()
                .for_each(|(_, frames)| direction.count_arrived(*frames, true));
        }
        check_all_accounted(&direction);
    }

    /// A TCP sender: it learns of two segments at once, adds half a segment to its window in each
    /// round trip, and reduces the window to 0.7 once for all losses of a round trip, like CUBIC in
    /// its Reno-friendly region (RFC 9438, section 4.3).
    struct Sender {
        window: f64,
        in_flight: u64,
        /// Time of the last reduction.
        reduced: Duration,
        /// Segments that arrived.
        arrived: u64,
    }

    /// News of some segments of a sender.
    struct News {
        sender: usize,
        arrived: u64,
        lost: u64,
        sent: Duration,
    }

    /// Returns the shares of two TCP streams in a queue of 32 packets, at 50 Mbit/s and a round trip
    /// of 40 ms, which is longer by `extra` for the second one.
    fn shares(extra: Duration) -> [f64; 2] {
        const ROUND_TRIP: Duration = Duration::from_millis(40);
        const END: Duration = Duration::from_secs(60);
        let packet_time = time_on_wire(SIZE + 54, 50_000_000);
        let mut direction = with_faults(Faults {
            delay_us: ROUND_TRIP.as_micros() as u64,
            nic_bits: 10_000_000_000,
            nic_jitter_us: packet_time.as_micros() as u64,
            rate_bits: 50_000_000,
            queue_bytes: u64::MAX,
            queue_frames: 32,
            ..Faults::default()
        });
        let mut senders = [0, 1].map(|_| Sender {
            window: 50.0,
            in_flight: 0,
            reduced: NOW,
            arrived: 0,
        });
        // Senders of the segments on the path, in their order.
        let mut on_path: VecDeque<usize> = VecDeque::new();
        let mut news: BTreeMap<(Duration, u64), News> = BTreeMap::new();
        let mut number = 0;
        let mut tell = |news: &mut BTreeMap<_, _>, at: Duration, content: News| {
            number += 1;
            let later = if content.sender == 1 {
                extra
            } else {
                Duration::ZERO
            };
            news.insert((at + later, number), content);
        };
        for sender in [0, 1] {
            let content = News {
                sender,
                arrived: 0,
                lost: 0,
                sent: NOW,
            };
            tell(&mut news, NOW, content);
        }
        loop {
            let next = news.first_key_value().map(|((at, _), _)| *at);
            let due = direction.next_due();
            let now = next
                .into_iter()
                .chain(due)
                .min()
                .expect("segments on the path");
            if now > END {
                break;
            }
            if due == Some(now) {
                let (_, frames) = direction.due(now).expect("due");
                for sender in on_path.drain(..frames as usize) {
                    senders[sender].arrived += 1;
                    if senders[sender].arrived % 2 == 0 {
                        tell(
                            &mut news,
                            now,
                            News {
                                sender,
                                arrived: 2,
                                lost: 0,
                                sent: now,
                            },
                        );
                    }
                }
                continue;
            }
            let (_, content) = news.pop_first().expect("news");
            let sender = &mut senders[content.sender];
            sender.in_flight -= content.arrived + content.lost;
            sender.window += 0.5 * content.arrived as f64 / sender.window;
            if content.lost > 0 && content.sent >= sender.reduced {
                sender.window *= 0.7;
                sender.reduced = now;
            }
            let count = (sender.window as u64).saturating_sub(sender.in_flight);
            if count == 0 {
                continue;
            }
            sender.in_flight += count;
            let before = direction.counts.overflowed;
            let frames = direction.counts.frames;
            direction.offer(now, &super_packet(count as usize * SIZE));
            assert_eq!(direction.counts.frames - frames, count);
            let lost = direction.counts.overflowed - before;
            on_path.extend(std::iter::repeat_n(content.sender, (count - lost) as usize));
            if lost > 0 {
                // After the 32 packets that wait and the one that is being sent.
                let at = now + 33 * packet_time + ROUND_TRIP;
                tell(
                    &mut news,
                    at,
                    News {
                        sender: content.sender,
                        arrived: 0,
                        lost,
                        sent: now,
                    },
                );
            }
        }
        let all: u64 = senders.iter().map(|sender| sender.arrived).sum();
        senders.map(|sender| sender.arrived as f64 / all as f64)
    }

    #[test]
    fn a_full_queue_prefers_the_stream_with_the_slightly_longer_round_trip() {
        let equal = shares(Duration::ZERO);
        let unequal = shares(Duration::from_micros(300));
        assert!((0.35..0.65).contains(&equal[0]), "{equal:?}");
        assert!(unequal[0] < 0.7 * equal[0], "{unequal:?}, {equal:?}");
    }

    #[test]
    fn a_full_queue_does_not_prefer_the_stream_with_the_longer_round_trip() {
        // Eight packets' times: four at half of the rate, as a tunnel in native mode waits.
        let unequal = shares(Duration::from_micros(1930));
        // Runs of a minute with other seeds differ by 0.04 (one standard deviation).
        assert!((0.4..0.6).contains(&unequal[0]), "{unequal:?}");
    }

    #[test]
    fn losses_come_in_bursts_of_the_requested_length() {
        let faults = Faults {
            loss: 0.02,
            loss_burst: 5.0,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        let fates: Vec<bool> = (0..500_000).map(|_| direction.loses()).collect();
        let lost = fates.iter().filter(|lost| **lost).count() as f64;
        let first = fates.windows(2).filter(|pair| !pair[0] && pair[1]).count() as f64;
        // 2,000 bursts of five frames with a standard deviation of sqrt(20): five standard
        // deviations of their mean are 0.5. Their number varies by one in sqrt(2000) as well, which
        // makes 15 % of the share.
        assert!((lost / first - 5.0).abs() < 0.5, "{}", lost / first);
        assert!((lost / 500_000.0 - 0.02).abs() < 0.0035, "{lost}");
    }

    #[test]
    fn a_frame_that_waited_for_this_machine_is_late() {
        let faults = Faults {
            delay_us: 1000,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        for _ in 0..2 {
            direction.offer(NOW, &super_packet(SIZE));
        }
        let time = NOW + Duration::from_micros(1000);
        direction.due(time + LATE).expect("due");
        assert_eq!(direction.counts().late, 0);
        direction.due(time + 2 * LATE).expect("due");
        let counts = direction.counts();
        assert_eq!((counts.late, counts.late_us), (1, 400));
    }

    #[test]
    fn only_longer_frames_vanish_in_a_black_hole() {
        let faults = Faults {
            // An IP packet of exactly this size: 20 + 20 + SIZE.
            black_hole_bytes: Some(1040),
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        direction.offer(NOW, &super_packet(SIZE));
        assert_eq!(drain(&mut direction).len(), 1);
        direction.set(Faults {
            black_hole_bytes: Some(1039),
            ..faults
        });
        direction.offer(NOW, &super_packet(2 * SIZE + 500));
        assert_eq!(drain(&mut direction).len(), 1);
        assert_eq!(direction.counts().black_holed, 2);
        check_all_accounted(&direction);
    }

    #[test]
    fn a_delayed_frame_is_overtaken() {
        let faults = Faults {
            reorder: 0.5,
            reorder_us: 3000,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        let times = arrivals(&mut direction, 100);
        let late = times
            .iter()
            .filter(|t| **t == NOW + Duration::from_millis(3));
        assert_eq!(late.count() as u64, direction.counts().held_back);
        assert!((20..80).contains(&direction.counts().held_back));
    }

    #[test]
    fn duplicates_arrive_twice() {
        let faults = Faults {
            duplicate: 1.0,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        assert_eq!(arrivals(&mut direction, 4).len(), 8);
        assert_eq!(direction.counts().duplicated, 4);
        check_all_accounted(&direction);
    }

    #[test]
    fn super_packets_vanish_and_single_frames_do_not() {
        let faults = Faults {
            broken_segmentation: 1.0,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        direction.offer(NOW, &super_packet(3 * SIZE));
        direction.offer(NOW, &super_packet(SIZE));
        assert_eq!(drain(&mut direction).len(), 1);
        assert_eq!(direction.counts().unsegmented, 3);
        check_all_accounted(&direction);
    }

    #[test]
    fn unfilled_checksums_are_counted_by_frame() {
        let faults = Faults {
            broken_checksum: 1.0,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        direction.offer(NOW, &super_packet(3 * SIZE));
        assert_eq!(drain(&mut direction).len(), 3);
        assert_eq!(direction.counts().unfilled, 3);
    }

    #[test]
    fn frames_that_share_a_fate_stay_one_packet() {
        let faults = Faults {
            delay_us: 10,
            ..Faults::default()
        };
        let mut direction = with_faults(faults);
        direction.offer(NOW, &super_packet(40 * SIZE));
        assert_eq!(drain(&mut direction).len(), 1);
        assert_eq!(direction.counts().delivered, 40);
    }

    #[test]
    fn a_seed_repeats_itself() {
        let faults = Faults {
            loss: 0.3,
            ..Faults::default()
        };
        let lost = |seed| {
            let mut direction = Direction::new(seed);
            direction.set(faults);
            arrivals(&mut direction, 1000);
            direction.counts().lost
        };
        assert_eq!(lost(3), lost(3));
        assert_ne!(lost(3), lost(4));
    }
}
