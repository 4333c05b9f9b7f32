//! Tells losses in a full queue from other losses, by the datagrams around them.
//!
//! A queue drops datagrams when it is full. The delay is then near its highest; or, if the queue is
//! shorter than the bursts, the end of each burst is lost. A radio link or a damaged cable loses
//! datagrams at any delay and any position. Hence losses at high delay are attributed to a queue if
//! they are more frequent than at low delay. Many losses in a row are attributed to a queue as
//! well: parity could not restore them in any case.

use super::parity::{MAX_PARITIES, MAX_RECORDS};
use crate::time::Instant;
use std::time::Duration;

/// Minimum time for which delays are remembered: one period of CUBIC (RFC 9438) at 300 Mbit/s and
/// 40 ms.
const MEMORY: Duration = Duration::from_secs(10);
/// Delay above the minimum, in microseconds, below which no queue is assumed: clocks, schedulers
/// and receive batches vary as much.
const NOISE: u64 = 500;
/// Number of delay classes in an octave.
const PER_OCTAVE: usize = 8;
/// A delay is high if its class is at most this many classes below the highest: from about 80 % of
/// the highest delay on.
const NEAR_FULL: usize = 2;
/// One in this many datagrams may exceed the highest delay: single outliers have other reasons than
/// a queue.
const OUTLIERS: u64 = 200;
/// A queue fills fast if the delay rises by more than an eighth of the round trip within two round
/// trips. TCP in slow start doubles its window in each; later, CUBIC adds about a percent.
const FAST: u32 = 8;
/// Number of datagrams after which the highest delay is determined again.
const LOOK: u32 = 16;
/// Losses that the cumulative sum at high delay subtracts for each datagram, as a multiple of the
/// loss rate at low delay: (5 - 1) / ln 5. With this value, losses at high delay are attributed to
/// a queue if they are about five times as frequent as at low delay (E. S. Page, Continuous
/// Inspection Schemes, 1954).
const SUBTRACTED: f64 = 2.485;
/// Cumulative sum above which losses are attributed to a queue, if the rate at low delay is known.
/// Random losses reach it about once in 5^4 times their mean distance.
const ALARM: f64 = 4.0;
/// Number of losses at low delay from which their rate counts as known.
const KNOWN: f64 = 3.0;
/// Number of datagrams without a loss after which a path hardly has random losses.
const CLEAN: f64 = 1000.0;
/// Number of datagrams at low delay at which the counts at low delay are halved.
const LOW_DATAGRAMS: u32 = 1 << 16;
/// Number of datagrams at one position at which the counts of all positions are halved.
const POSITIONS: u32 = 4096;
/// Position of the last received datagram of a burst from which the burst counts as longer, if the
/// next datagram is missing.
const SHORT_BURST: u8 = 3;
/// Weight of a gap in the mean rank of the positions.
const WEIGHT: f64 = 1.0 / 8.0;
/// Random losses within this time before an overflow belong to it.
const OVERFLOW: Duration = Duration::from_millis(20);
/// Round trip of the path while none has been measured.
const USUAL_ROUND_TRIP: Duration = Duration::from_millis(20);
/// Maximum round trip: the peer can feign any.
const LONGEST_ROUND_TRIP: Duration = Duration::from_millis(500);
/// Number of losses that parity can restore for each datagram that arrives.
const RESTORABLE: f64 = MAX_PARITIES as f64 / MAX_RECORDS as f64;
/// Mean rank above which losses are at the ends of bursts. For random losses it is 0.5, with a
/// standard deviation of 0.29 x sqrt(1/15) = 0.075, and exceeds 0.82 once in five million losses
/// (0.75: in 11,000, or every 40 s at 300 Mbit/s and 1 % of loss).
const LATE_IN_BURST: f64 = 0.82;

/// The probable cause of a gap in the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Loss in a full queue.
    Congestion,
    /// Loss in a full queue, as for `Congestion`. Earlier losses of the same overflow, which were
    /// classified as random, belong to it as well: all together are more than parity can restore.
    Overflow {
        /// Number of these earlier losses.
        earlier: u32,
    },
    /// Any other loss.
    Random,
    /// No loss: the missing datagrams are probes.
    Probes,
}

/// The delays and positions of recent datagrams.
#[derive(Debug)]
pub struct LossClassifier {
    /// Number of datagrams by class of delay.
    delays: [u32; 64],
    /// When `delays` were last halved.
    since: Instant,
    /// Number of datagrams so far.
    counted: u32,
    /// Class of the highest delay.
    highest: usize,
    /// Highest delay in this round trip, in the last one and in the one before, in microseconds.
    peaks: [u64; 3],
    /// Begin of this round trip.
    began: Instant,
    /// Lowest class of delay at which a queue was seen to be full, within [`MEMORY`]. It may be
    /// below the highest delay, because a busy host delays some datagrams longer.
    full: usize,
    low: Counts,
    /// Cumulative sum of the losses at high delay in excess of the expected ones.
    excess: f64,
    /// Number of recent datagrams by position in their burst.
    positions: [u32; 64],
    /// Mean rank of the lost datagrams' positions among `positions`, 0 to 1.
    rank: f64,
    /// Position of the newest datagram.
    position: u8,
    /// Class of the newest datagram's delay.
    class: usize,
    /// Least round trip of the path.
    round_trip: Duration,
    /// End of the overflow that was found last: datagrams from then on were sent after TCP could
    /// react to it.
    reaction: Option<Instant>,
    /// Cumulative sum of the losses in excess of [`RESTORABLE`].
    unrestorable: f64,
    recent: Recent,
}

/// Recent losses that were classified as random, within [`OVERFLOW`] of `since`.
#[derive(Clone, Copy, Debug)]
struct Recent {
    since: Instant,
    random: u32,
    /// Number of these losses that were counted at low delay.
    low: u32,
}

/// Numbers of datagrams that arrived, and of those lost before them.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    datagrams: u32,
    lost: u32,
}

impl Default for LossClassifier {
    fn default() -> Self {
        LossClassifier {
            delays: [0; 64],
            since: Instant::BOOT,
            counted: 0,
            highest: 0,
            peaks: [0; 3],
            began: Instant::BOOT,
            full: usize::MAX,
            low: Counts::default(),
            excess: 0.0,
            positions: [0; 64],
            rank: 0.5,
            position: 0,
            class: 0,
            round_trip: USUAL_ROUND_TRIP,
            reaction: None,
            unrestorable: 0.0,
            recent: Recent {
                since: Instant::BOOT,
                random: 0,
                low: 0,
            },
        }
    }
}

impl LossClassifier {
    /// Sets the least round trip of the path.
    pub fn set_round_trip(&mut self, round_trip: Duration) {
        self.round_trip = round_trip.min(LONGEST_ROUND_TRIP);
    }

    /// Records the newest datagram: its position in its burst, and its delay above the minimum in
    /// microseconds. Returns a verdict on the `missing` datagrams before it, if there are any.
    pub fn datagram(
        &mut self,
        position: u8,
        delay: u64,
        missing: u64,
        now: Instant,
    ) -> Option<Verdict> {
        let class = class_of(delay);
        self.count_delay(class, now);
        let around = class.max(self.class);
        let high = self.highest.min(self.full).saturating_sub(NEAR_FULL);
        let is_high = self.highest > 0 && around >= high.max(1);
        if now.duration_since(self.began) >= self.round_trip_with(delay) {
            self.peaks = [0, self.peaks[0], self.peaks[1]];
            self.began = now;
        }
        self.peaks[0] = self.peaks[0].max(delay);
        let risen = Duration::from_micros(delay.saturating_sub(self.peaks[2]));
        let alarm = self.alarm(risen * FAST > self.round_trip_with(delay));
        let lost = missing.min(u64::from(LOW_DATAGRAMS)) as u32;
        if self.reaction.take_if(|at| now >= *at).is_some() {
            // The queue is still high until TCP's reaction has emptied it. A second reaction needs
            // evidence of its own.
            self.excess = 0.0;
        }
        let overflows = self.reaction.is_some();
        if is_high {
            let expected = SUBTRACTED * self.usual();
            self.excess = (self.excess + f64::from(lost) - expected).clamp(0.0, alarm + 1.0);
        }
        let sum = self.unrestorable + f64::from(lost) - RESTORABLE;
        self.unrestorable = sum.clamp(0.0, MAX_PARITIES as f64 + 1.0);
        let verdict = (missing > 0).then(|| {
            let verdict = self.classify(position, missing, is_high && self.excess > alarm);
            self.classify_overflow(verdict, lost, delay, now)
        });
        let is_overflow = matches!(verdict, Some(Verdict::Overflow { .. }));
        // So many losses at a low delay are those of an outage, not of a queue.
        if is_overflow && around > 0 && around + PER_OCTAVE >= self.highest {
            self.full = self.full.min(around);
        }
        if !is_high && !overflows {
            self.low.datagrams += 1;
            if !is_overflow {
                self.low.lost = self.low.lost.saturating_add(lost);
                self.recent.low = self.recent.low.saturating_add(lost);
            }
        }
        if self.low.datagrams >= LOW_DATAGRAMS {
            self.low.datagrams /= 2;
            self.low.lost /= 2;
        }
        let count = &mut self.positions[usize::from(position.min(63))];
        *count += 1;
        if *count >= POSITIONS {
            self.positions.iter_mut().for_each(|count| *count /= 2);
        }
        (self.position, self.class) = (position, class);
        verdict
    }

    /// Corrects the count of losses: a missing datagram was only late.
    pub fn late(&mut self) {
        self.unrestorable = (self.unrestorable - 1.0 - RESTORABLE).max(0.0);
    }

    /// Counts a delay, and finds the highest that is no outlier.
    fn count_delay(&mut self, class: usize, now: Instant) {
        if now.duration_since(self.since) >= MEMORY {
            self.since = now;
            self.delays.iter_mut().for_each(|count| *count /= 2);
            self.full = usize::MAX;
        }
        self.delays[class] += 1;
        self.counted = self.counted.wrapping_add(1);
        if self.counted.is_multiple_of(LOOK) {
            let all: u64 = self.delays.iter().map(|count| u64::from(*count)).sum();
            let mut above = 0;
            let classes = self.delays.iter().enumerate().skip(1).rev();
            let mut reached = classes.filter(|(_, count)| {
                above += u64::from(**count);
                above * OUTLIERS > all
            });
            self.highest = reached.next().map_or(0, |(class, _)| class);
        }
    }

    fn classify(&mut self, position: u8, missing: u64, is_frequent: bool) -> Verdict {
        let rank = self.rank_of_lost(position, missing);
        self.rank += WEIGHT * (rank - self.rank);
        if is_frequent || self.rank > LATE_IN_BURST {
            Verdict::Congestion
        } else {
            Verdict::Random
        }
    }

    /// Gives all losses of one overflow the same verdict. `verdict` is the verdict on the newest
    /// `lost` datagrams taken alone.
    fn classify_overflow(
        &mut self,
        verdict: Verdict,
        lost: u32,
        delay: u64,
        now: Instant,
    ) -> Verdict {
        if now.duration_since(self.recent.since) >= OVERFLOW {
            self.recent = Recent {
                since: now,
                random: 0,
                low: 0,
            };
        }
        if self.unrestorable > MAX_PARITIES as f64 {
            let earlier = std::mem::take(&mut self.recent.random);
            let low = std::mem::take(&mut self.recent.low);
            self.low.lost = self.low.lost.saturating_sub(low);
            self.overflows(delay, now);
            return Verdict::Overflow { earlier };
        }
        if verdict == Verdict::Random && self.reaction.is_none() {
            self.recent.random = self.recent.random.saturating_add(lost);
            return Verdict::Random;
        }
        self.overflows(delay, now);
        Verdict::Congestion
    }

    /// Begins an overflow, unless one lasts. TCP slows down once for all losses of a round trip, so
    /// all of them get one verdict, and those behind it another: they may be random.
    fn overflows(&mut self, delay: u64, now: Instant) {
        let time = self.round_trip_with(delay);
        self.reaction.get_or_insert(now + time);
    }

    /// Round trip with a delay above the minimum, in microseconds.
    fn round_trip_with(&self, delay: u64) -> Duration {
        self.round_trip + Duration::from_micros(delay).min(LONGEST_ROUND_TRIP)
    }

    /// Loss rate at low delay; 1 % before there is evidence.
    fn usual(&self) -> f64 {
        (f64::from(self.low.lost) + 0.5) / (f64::from(self.low.datagrams) + 50.0)
    }

    /// Excess of losses from which they are congestion. On a path without random losses, the first
    /// loss suffices, unless the queue fills fast: TCP is then probably in slow start, where most
    /// losses are at a high delay, and a queue that becomes full drops many.
    fn alarm(&self, fills_fast: bool) -> f64 {
        if fills_fast {
            return ALARM;
        }
        let unknown = CLEAN / (CLEAN + f64::from(self.low.datagrams));
        ALARM * ((f64::from(self.low.lost) + unknown) / KNOWN).min(1.0)
    }

    /// Returns the rank of the first lost datagram, if `missing` are missing before one at this
    /// position.
    fn rank_of_lost(&self, position: u8, missing: u64) -> f64 {
        if u64::from(position) >= missing {
            return self.rank_of(position - missing as u8);
        }
        // The lost datagram was in the previous burst, or was a burst of its own.
        let next = self.position.saturating_add(1);
        let longer = if self.position < SHORT_BURST {
            let of = |position: u8| f64::from(self.positions[usize::from(position.min(63))]);
            of(next) / of(self.position).max(1.0)
        } else {
            1.0
        };
        longer * self.rank_of(next) + (1.0 - longer).max(0.0) * self.rank_of(0)
    }

    /// Returns the share of the recent datagrams whose position is lower; those at the same
    /// position count half.
    fn rank_of(&self, position: u8) -> f64 {
        let at = usize::from(position.min(63));
        let before: u32 = self.positions[..at].iter().sum();
        let all: u32 = self.positions.iter().sum();
        (f64::from(before) + f64::from(self.positions[at]) / 2.0) / f64::from(all.max(1))
    }
}

/// Class of a delay in microseconds, on a logarithmic scale: 0 below [`NOISE`], at most 63.
fn class_of(delay: u64) -> usize {
    if delay < NOISE {
        return 0;
    }
    // In 1024ths, so that the bits below the highest one tell the part of an octave.
    let scaled = delay.min(NOISE << 10) * 1024 / NOISE;
    let octave = scaled.ilog2() - 10;
    let part = (scaled >> (octave + 10 - PER_OCTAVE.ilog2())) as usize % PER_OCTAVE;
    (1 + octave as usize * PER_OCTAVE + part).min(63)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};

    /// Share of congestion among the verdicts for a sequence of datagrams: position, delay in
    /// microseconds, and whether it is lost.
    fn congestion(datagrams: impl Iterator<Item = (u8, u64, bool)>) -> f64 {
        let mut classifier = LossClassifier::default();
        let (mut missing, mut gaps, mut congested) = (0, 0, 0);
        for (n, (position, delay, lost)) in datagrams.enumerate() {
            // 10,000 in a second.
            let now = Instant::from_nanos(n as u64 * 100_000);
            if lost {
                missing += 1;
                continue;
            }
            if let Some(verdict) = classifier.datagram(position, delay, missing, now) {
                gaps += 1;
                congested += u32::from(verdict != Verdict::Random);
            }
            missing = 0;
        }
        assert!(gaps > 20, "{gaps} gaps");
        f64::from(congested) / f64::from(gaps)
    }

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    fn rng() -> rand_chacha::ChaCha8Rng {
        rand_chacha::ChaCha8Rng::seed_from_u64(7)
    }

    #[test]
    fn random_losses_of_bursts_are_random() {
        for burst in [1u64, 2, 10, 45] {
            let mut rng = rng();
            let all = (0..40_000u64).map(|n| {
                let noise = rng.random_range(0..1000);
                ((n % burst) as u8, noise, rng.random_bool(0.01))
            });
            let share = congestion(all);
            assert!(share < 0.02, "bursts of {burst}: {share}");
        }
    }

    #[test]
    fn random_losses_of_bursts_of_all_lengths_are_mostly_random() {
        // A slow flow with its parity, and bursts of any length up to 12.
        for most in [2u8, 3, 4, 12] {
            let mut rng = rng();
            let (mut position, mut length) = (0, 1);
            let all = (0..100_000u64).map(|_| {
                position += 1;
                if position >= length {
                    (position, length) = (0, rng.random_range(1..=most));
                }
                (position, 0, rng.random_bool(0.02))
            });
            let share = congestion(all);
            assert!(share < 0.1, "up to {most}: {share}");
        }
    }

    #[test]
    fn losses_of_a_full_queue_are_congestion() {
        // The queue of 20 ms fills within 5,000 datagrams, then a few are lost and it shrinks.
        let all = (0..100_000u64).map(|n| {
            let fill = n % 5000;
            (
                (n % 4) as u8,
                6_000 + fill * 14_000 / 5000,
                fill >= 4990 && n % 2 == 0,
            )
        });
        // Nothing is known while the queue fills for the first time.
        let share = congestion(all);
        assert!(share > 0.9, "{share}");
    }

    /// Two seconds without a delay and a loss, and then a delay that rises to `highest` microseconds
    /// within two round trips, as in slow start. Returns the end in milliseconds, too.
    fn after_slow_start(round_trip: u64, highest: u64) -> (LossClassifier, u64) {
        let mut classifier = LossClassifier::default();
        classifier.set_round_trip(Duration::from_millis(round_trip));
        let rise = 2 * (round_trip + highest / 1000);
        for ms in 0..2000 + rise {
            let delay = highest * u64::saturating_sub(ms, 2000) / rise;
            (0..20).for_each(|_| assert_eq!(classifier.datagram(0, delay, 0, at(ms)), None));
        }
        (classifier, 2000 + rise)
    }

    #[test]
    fn one_loss_in_slow_start_is_random() {
        for (round_trip, highest) in [(40, 20_000), (5, 60_000)] {
            let (mut classifier, now) = after_slow_start(round_trip, highest);
            let verdict = classifier.datagram(0, highest, 1, at(now));
            assert_eq!(verdict, Some(Verdict::Random), "{round_trip}");
            // It is not at a delay that has been the highest for three round trips.
            let end = now + 3 * (round_trip + highest / 1000);
            for ms in now + 1..end {
                (0..20).for_each(|_| assert_eq!(classifier.datagram(0, highest, 0, at(ms)), None));
            }
            let verdict = classifier.datagram(0, highest, 1, at(end));
            assert_eq!(verdict, Some(Verdict::Congestion), "{round_trip}");
        }
    }

    #[test]
    fn the_fifth_loss_of_a_queue_that_slow_start_fills_is_congestion() {
        let (mut classifier, now) = after_slow_start(40, 20_000);
        let verdicts = (0..20).filter_map(|_| {
            classifier.datagram(0, 20_000, 0, at(now));
            classifier.datagram(0, 20_000, 1, at(now))
        });
        let first = { verdicts }.position(|verdict| verdict != Verdict::Random);
        assert_eq!(first, Some(4));
    }

    #[test]
    fn all_losses_of_one_overflow_are_congestion() {
        // Slow start: bursts first wait longer than the queue is, and then much is lost at the delay
        // of the full queue, a little of which is seen as high.
        let all = (0..5400u64).map(|n| match n {
            0..4000 => ((n % 4) as u8, n * 2, false),
            4000..4400 => ((n % 4) as u8, 12_600, n % 2 == 0),
            _ => (0, if n % 5 == 0 { 10_100 } else { 9_900 }, n % 3 == 0),
        });
        let share = congestion(all);
        assert!(share > 0.95, "{share}");
    }

    #[test]
    fn a_queue_that_was_seen_to_be_full_is_full_at_the_same_delay() {
        let mut classifier = LossClassifier::default();
        for n in 0..3000 {
            let delay = if n % 20 == 0 { 14_000 } else { 2_000 };
            classifier.datagram(0, delay, 0, at(n));
        }
        assert_eq!(
            classifier.datagram(0, 10_000, 2, at(3000)),
            Some(Verdict::Random)
        );
        classifier.datagram(0, 10_000, 40, at(3050));
        (0..200).for_each(|_| assert_eq!(classifier.datagram(0, 2_000, 0, at(3100)), None));
        let later = classifier.datagram(0, 10_000, 4, at(3100));
        assert_eq!(later, Some(Verdict::Congestion));
    }

    #[test]
    fn an_outage_without_delay_shows_no_full_queue() {
        let mut classifier = LossClassifier::default();
        for n in 0..3000 {
            classifier.datagram(0, if n % 20 == 0 { 900 } else { 100 }, 0, at(n));
        }
        let outage = classifier.datagram(0, 100, 40, at(3000));
        assert_eq!(outage, Some(Verdict::Overflow { earlier: 0 }));
        (0..400).for_each(|_| assert_eq!(classifier.datagram(0, 100, 0, at(3050)), None));
        for ms in 3100..3120 {
            (0..100).for_each(|_| assert_eq!(classifier.datagram(0, 100, 0, at(ms)), None));
            let later = classifier.datagram(0, 100, 1, at(ms));
            assert_eq!(later, Some(Verdict::Random));
        }
    }

    #[test]
    fn datagrams_that_are_late_overflow_no_queue() {
        let mut classifier = LossClassifier::default();
        for n in 0..1000 {
            // Ten are overtaken by one, and arrive behind it.
            let gap = classifier.datagram(0, 0, 10, at(n));
            assert_eq!(gap, Some(Verdict::Random));
            (0..10).for_each(|_| classifier.late());
        }
    }

    #[test]
    fn losses_that_parity_cannot_restore_are_congestion_with_those_just_before() {
        let mut classifier = LossClassifier::default();
        // Delays above that of the full queue, as of a host that was busy.
        for n in 0..3000 {
            let delay = if n % 20 == 0 { 14_000 } else { 2_000 };
            classifier.datagram(0, delay, 0, at(n));
        }
        let mut missing = |missing, ms| classifier.datagram(0, 10_000, missing, at(ms));
        assert_eq!(missing(1, 3000), Some(Verdict::Random));
        assert_eq!(missing(7, 3030), Some(Verdict::Random));
        assert_eq!(missing(8, 3031), Some(Verdict::Random));
        assert_eq!(missing(9, 3032), Some(Verdict::Overflow { earlier: 15 }));
        assert_eq!(missing(1, 3033), Some(Verdict::Overflow { earlier: 0 }));
        assert_eq!(missing(0, 3034), None);
        (0..100).for_each(|_| assert_eq!(missing(0, 3035), None));
        assert_eq!(missing(1, 3036), Some(Verdict::Congestion));
        // 20 ms of round trip and 10 ms of queue later.
        classifier.datagram(0, 2_000, 0, at(3062));
        let later = classifier.datagram(0, 2_000, 1, at(3062));
        assert_eq!(later, Some(Verdict::Random));
        assert_eq!(classifier.low.lost, 2);
    }

    #[test]
    fn losses_at_high_delay_are_not_taken_off_those_at_low_delay() {
        let mut classifier = LossClassifier::default();
        for n in 0..3000 {
            let delay = if n % 20 == 0 { 14_000 } else { 2_000 };
            classifier.datagram(0, delay, 0, at(n));
        }
        let mut missing = |delay, missing, ms| classifier.datagram(0, delay, missing, at(ms));
        for ms in [3000, 3100, 3200] {
            assert_eq!(missing(2_000, 1, ms), Some(Verdict::Random));
        }
        assert_eq!(missing(14_000, 3, 3300), Some(Verdict::Random));
        let overflow = missing(14_000, 17, 3305);
        assert_eq!(overflow, Some(Verdict::Overflow { earlier: 3 }));
        assert_eq!(classifier.low.lost, 3);
    }

    #[test]
    fn the_lost_ends_of_bursts_are_congestion() {
        let all = (0..100_000u64).map(|n| ((n % 45) as u8, 0, n % 45 >= 40 && n / 45 % 7 == 0));
        let share = congestion(all);
        assert!(share > 0.9, "{share}");
    }

    #[test]
    fn classes_of_delay_are_a_logarithmic_scale() {
        assert_eq!([0, 499, 500, 562, 563].map(class_of), [0, 0, 1, 1, 2]);
        assert_eq!([1000, 2000, 1_000_000].map(class_of), [9, 17, 63]);
        assert!((0..500_000).is_sorted_by_key(class_of));
    }

    #[test]
    fn random_losses_of_a_flow_that_speeds_up_are_random() {
        // Each round's bursts wait longer than those of any before.
        let mut rng = rng();
        let all = (0..3000u64).map(|n| {
            let delay = 500 + n % 100 * n / 10;
            ((n % 10) as u8, delay, rng.random_bool(0.01))
        });
        let share = congestion(all);
        assert!(share < 0.15, "{share}");
    }

    #[test]
    fn random_losses_while_the_queue_rises_and_falls_are_mostly_random() {
        let mut rng = rng();
        let all = (0..200_000u64).map(|n| {
            let delay = 4_000 + (n % 20_000) * 16_000 / 20_000;
            ((n % 10) as u8, delay, rng.random_bool(0.005))
        });
        let share = congestion(all);
        assert!(share < 0.35, "{share}");
    }
}
