//! Health of one direction of a path, measured by its receiver and reported to its sender.
//!
//! The counter, batch position and send timestamp of every authenticated datagram show how many
//! were lost and where in their GSO batch, how far they were reordered, and whether the one-way
//! delay grows. The [`Receiver`] measures; a [`Report`] is sent back in a HEALTH frame once a
//! second while packets arrive. Reports alone trigger no report, or two idle peers would report on
//! each other's reports forever. The sender keeps the latest report.

use crate::native::reassembly::Record;
use crate::native::repair::verdict::{LossClassifier, Verdict};
use crate::native::stamp::{Stamp, stamp_of};
use crate::time::Instant;
use seikan_wire::ip;
use std::net::SocketAddr;
use std::time::Duration;

/// Interval between reports while data arrives.
pub const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// With loss repair, least time after which a missing datagram of a random gap is reported: it may only be late.
const LATE: Duration = Duration::from_millis(10);
/// With loss repair, delay of the report after a random loss. It is short so that the sender reacts
/// soon.
const EARLY: Duration = Duration::from_millis(20);
/// Minimum interval between two such early reports.
const EARLY_INTERVAL: Duration = Duration::from_millis(100);
/// A datagram that is later than this many counters counts as lost, unless it arrives before the
/// report.
const HORIZON: u64 = 1024;
/// Maximum number of consecutive probes that do not count as losses: the search for an MTU sends up
/// to eleven in a row.
const MOST_PROBES: u64 = 32;
/// Minimum number of datagrams sent after the first of their batch for their absence to be
/// significant.
const MANGLED_SAMPLE: u32 = 32;

/// Statistics of received datagrams since the previous report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Datagrams received.
    pub received: u32,
    /// Datagrams that were skipped and did not arrive: within the horizon or, if a faster path
    /// overtook them, within a second.
    pub lost: u32,
    /// Lost datagrams that were the first of their GSO batch.
    pub lost_first: u32,
    /// Largest distance, in counters, of a late datagram.
    pub reordering: u16,
    /// Datagrams that arrived marked CE.
    pub congestion_marks: u32,
    /// Mean one-way delay above the minimum of this session and path, in microseconds.
    pub queueing_delay: u32,
    /// Received datagrams that were not the first of their GSO batch.
    pub received_later: u32,
    /// Missing datagrams that were not lost in a full queue ([`LossClassifier`]), less those that
    /// arrived late. Zero without loss repair, like the following fields.
    pub random_losses: u32,
    /// Datagrams that are missing, and were lost in a full queue.
    pub congestion_losses: u32,
    /// Lost records that loss repair restored.
    pub restored: u32,
    /// Lost records that it did not.
    pub not_restored: u32,
}

impl Report {
    /// Length of the encoded report without loss repair.
    pub const LEN: usize = 26;
    /// Length of the encoded report.
    pub const LONG: usize = 42;

    /// Length of the encoded report in bytes.
    pub fn length(with_repair: bool) -> usize {
        if with_repair {
            Report::LONG
        } else {
            Report::LEN
        }
    }

    /// Parses the body of a HEALTH frame. Longer ones are from later versions; the unknown part is
    /// ignored.
    pub fn read(body: &[u8]) -> Option<Report> {
        // The fields of loss repair are zero if they are missing.
        let mut b = [0; Report::LONG];
        let known = match body.len() {
            Report::LONG.. => Report::LONG,
            Report::LEN.. => Report::LEN,
            _ => return None,
        };
        b[..known].copy_from_slice(&body[..known]);
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        Some(Report {
            received: u32_at(0),
            lost: u32_at(4),
            lost_first: u32_at(8),
            congestion_marks: u32_at(12),
            queueing_delay: u32_at(16),
            reordering: u16::from_le_bytes([b[20], b[21]]),
            received_later: u32_at(22),
            random_losses: u32_at(26),
            congestion_losses: u32_at(30),
            restored: u32_at(34),
            not_restored: u32_at(38),
        })
    }

    /// Encodes the report.
    pub fn to_bytes(&self) -> [u8; Report::LONG] {
        let mut b = [0; Report::LONG];
        b[0..4].copy_from_slice(&self.received.to_le_bytes());
        b[4..8].copy_from_slice(&self.lost.to_le_bytes());
        b[8..12].copy_from_slice(&self.lost_first.to_le_bytes());
        b[12..16].copy_from_slice(&self.congestion_marks.to_le_bytes());
        b[16..20].copy_from_slice(&self.queueing_delay.to_le_bytes());
        b[20..22].copy_from_slice(&self.reordering.to_le_bytes());
        b[22..26].copy_from_slice(&self.received_later.to_le_bytes());
        b[26..30].copy_from_slice(&self.random_losses.to_le_bytes());
        b[30..34].copy_from_slice(&self.congestion_losses.to_le_bytes());
        b[34..38].copy_from_slice(&self.restored.to_le_bytes());
        b[38..42].copy_from_slice(&self.not_restored.to_le_bytes());
        b
    }

    /// Whether send calls arrive with their first datagram only: hardly any of the others in `sent`
    /// arrived.
    ///
    /// A path with random loss, or one that drops the tails of bursts, lets more of them through.
    /// Datagrams in flight at the time of the report were sent but not received, so only two such
    /// reports in a row show that the path breaks GSO. If most calls sent few datagrams, nothing
    /// shows.
    pub fn misses_batches(&self, sent: SentBatches) -> bool {
        sent.later >= MANGLED_SAMPLE.max(sent.first_of_rest.saturating_mul(4))
            && u64::from(self.arrived_later(sent)) * 50 < u64::from(sent.later)
    }

    /// At least so many datagrams behind the first of their send call arrived.
    pub fn arrived_later(&self, sent: SentBatches) -> u32 {
        self.received_later.saturating_sub(sent.first_of_rest)
    }
}

/// Numbers of datagrams sent by send calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentBatches {
    /// Datagrams behind the first of their send call.
    pub later: u32,
    /// Datagrams that were the first of their send call, but not of their batch. Their stamps have
    /// a position like those of `later`.
    pub first_of_rest: u32,
}

impl SentBatches {
    /// Counts a call that sent `sent` datagrams of a batch, behind its first `before`.
    pub fn add(&mut self, before: usize, sent: u64) {
        let is_rest = u32::from(before > 0 && sent > 0);
        self.first_of_rest = self.first_of_rest.saturating_add(is_rest);
        self.later = self.later.saturating_add(sent.saturating_sub(1) as u32);
    }
}

/// Measures the datagrams of the newest session.
#[derive(Debug)]
pub struct Receiver {
    report: Report,
    /// When the first packet arrived that no report covers.
    since: Option<Instant>,
    /// The session whose counters are tracked: its local index and [number](crate::session::Session::number).
    session: Option<(u32, u64)>,
    /// Next counter expected: one above the highest received.
    next: u64,
    /// Bit `i` is set if counter `next - 1 - i` was received. Counters that leave the window unset
    /// are lost.
    window: [u64; (HORIZON / 64) as usize],
    /// Source address of the newest datagram.
    from: Option<SocketAddr>,
    /// Datagrams that a faster path has overtaken and that have not arrived yet.
    overtaken: u64,
    /// When datagrams were last overtaken.
    overtook: Instant,
    /// Missing probes since the last report, less those that arrived late.
    probes: u64,
    delay_base: Option<i64>,
    delay_sum: u64,
    last_transit: u16,
    transit: i64,
    /// Present if both ends repair losses. Boxed, so that peers without loss repair take less
    /// memory.
    classifier: Option<Box<LossClassifier>>,
    /// Least round trip of the path, if it was measured.
    round_trip: Option<Duration>,
    /// Random losses that are too recent for the report.
    recent: RecentLosses,
    /// When to report a random loss.
    early: Option<Instant>,
    /// When the last report was due.
    reported: Instant,
}

/// Random losses of the last [`LATE`] to twice that time, of which late datagrams may still arrive.
#[derive(Debug, Default)]
struct RecentLosses {
    /// Begin of the current interval of [`LATE`].
    since: Instant,
    /// Losses of the current interval, and the lowest counter that can be one.
    newer: (u32, u64),
    /// The same of the interval before.
    older: (u32, u64),
}

impl RecentLosses {
    /// Returns the losses that are no longer recent. Later ones have the counter `next` or a higher one.
    fn take_old(&mut self, next: u64, now: Instant) -> u32 {
        let passed = now.duration_since(self.since);
        if passed < LATE {
            return 0;
        }
        let (old, _) = self.older;
        self.older = std::mem::replace(&mut self.newer, (0, next));
        if passed < 2 * LATE {
            self.since += LATE;
            return old;
        }
        self.since = now;
        old.saturating_add(std::mem::take(&mut self.older.0))
    }

    /// Takes back up to `count` of the losses, the newest first. Returns how many.
    fn take_back_newest(&mut self, count: u32) -> u32 {
        let newer = count.min(self.newer.0);
        let older = (count - newer).min(self.older.0);
        self.newer.0 -= newer;
        self.older.0 -= older;
        newer + older
    }

    /// Takes back the loss of a counter. Returns whether it was a recent one.
    fn take_back(&mut self, counter: u64) -> bool {
        let losses = if counter >= self.newer.1 {
            &mut self.newer.0
        } else if counter >= self.older.1 {
            &mut self.older.0
        } else {
            return false;
        };
        let is_recent = *losses > 0;
        *losses = losses.saturating_sub(1);
        is_recent
    }

    fn is_empty(&self) -> bool {
        self.newer.0 == 0 && self.older.0 == 0
    }
}

impl Default for Receiver {
    fn default() -> Self {
        Receiver {
            report: Report::default(),
            since: None,
            session: None,
            next: 0,
            // Before the first datagram nothing is missing.
            window: [u64::MAX; (HORIZON / 64) as usize],
            from: None,
            overtaken: 0,
            overtook: Instant::BOOT,
            probes: 0,
            delay_base: None,
            delay_sum: 0,
            last_transit: 0,
            transit: 0,
            classifier: None,
            round_trip: None,
            recent: RecentLosses::default(),
            early: None,
            reported: Instant::BOOT,
        }
    }
}

impl Receiver {
    /// Sets whether both ends repair losses: then random ones are counted and reported soon.
    pub fn set_repairs(&mut self, repairs: bool) {
        self.classifier = repairs.then(|| self.classifier.take().unwrap_or_default());
        self.set_round_trip(self.round_trip);
    }

    /// Sets the least round trip of the path, if it was measured.
    pub fn set_round_trip(&mut self, round_trip: Option<Duration>) {
        self.round_trip = round_trip;
        if let (Some(classifier), Some(round_trip)) = (&mut self.classifier, round_trip) {
            classifier.set_round_trip(round_trip);
        }
    }

    /// Records an authenticated record from `from` that is no replay. `number` is the
    /// [number](crate::session::Session::number) of its session. A new source address means that a faster path has overtaken
    /// datagrams in flight: they are late, and count as lost only if they do not arrive within
    /// [`REPORT_INTERVAL`]. Missing probes do not count as lost.
    ///
    /// With loss repair, returns a verdict on the datagrams missing before it, if there are any.
    pub fn datagram(
        &mut self,
        record: &Record,
        stamp: Stamp,
        (number, from): (u64, SocketAddr),
        now: Instant,
    ) -> Option<Verdict> {
        let ce = record.ecn == ip::ECN_CE;
        let report = &mut self.report;
        report.received = report.received.saturating_add(1);
        report.congestion_marks = report.congestion_marks.saturating_add(u32::from(ce));
        let later = u32::from(stamp.position > 0);
        report.received_later = report.received_later.saturating_add(later);
        match self.session {
            Some((index, _)) if index == record.session => {}
            // A late datagram of a session that has been replaced; its counters are unrelated.
            Some((_, newest)) if number <= newest => return None,
            _ => {
                let moved = self.from.is_some_and(|before| before != from);
                // Their counters mean nothing any more.
                let recent = self.recent.take_back_newest(u32::MAX);
                let random_losses = self.report.random_losses.saturating_add(recent);
                *self = Receiver {
                    report: Report {
                        random_losses,
                        ..self.report
                    },
                    since: self.since,
                    session: Some((record.session, number)),
                    delay_sum: self.delay_sum,
                    classifier: self.classifier.take(),
                    round_trip: self.round_trip,
                    early: self.early,
                    reported: self.reported,
                    ..Receiver::default()
                };
                if moved {
                    self.forget_delays();
                }
            }
        }
        let counter = record.counter;
        let elsewhere = self.from.is_some_and(|before| before != from);
        let moved = elsewhere && counter >= self.next;
        if moved {
            self.forget_delays();
        }
        // A late datagram of another path has another path's delay.
        let delay = if elsewhere && !moved {
            0
        } else {
            self.delay(stamp.time, now)
        };
        if counter < self.next {
            self.late(counter);
            if stamp.follows_probe && counter > 0 && self.is_awaited(counter - 1) {
                // Nor is the probe lost.
                self.excuse(counter - 1);
            }
            return None;
        }
        self.from = Some(from);
        let missing = counter - self.next;
        let probes = stamp.follows_probe && !moved && (1..=MOST_PROBES).contains(&missing);
        if moved && missing > 0 {
            let probe = u64::from(stamp.follows_probe);
            self.probes += probe;
            self.overtaken = self.overtaken.saturating_add(missing - probe);
            self.overtook = now;
            self.skip_to(counter);
        } else if probes {
            self.probes += missing;
            self.skip_to(counter);
        }
        let missing = counter - self.next;
        self.advance(counter, stamp.position);
        let classifier = self.classifier.as_mut()?;
        let verdict = classifier.datagram(stamp.position, delay, missing, now);
        if probes {
            return Some(Verdict::Probes);
        }
        let lost = missing.min(u32::MAX.into()) as u32;
        let report = &mut self.report;
        match verdict {
            None | Some(Verdict::Probes) => {}
            Some(Verdict::Congestion) => {
                report.congestion_losses = report.congestion_losses.saturating_add(lost);
            }
            Some(Verdict::Overflow { earlier }) => {
                // The others are reported already, or arrived late.
                let recent = self.recent.take_back_newest(earlier);
                let counted = (earlier - recent).min(report.random_losses);
                report.random_losses -= counted;
                let earlier = recent + counted;
                let lost = lost.saturating_add(earlier);
                report.congestion_losses = report.congestion_losses.saturating_add(lost);
            }
            Some(Verdict::Random) => {
                let old = self.recent.take_old(counter - missing, now);
                report.random_losses = report.random_losses.saturating_add(old);
                let newer = &mut self.recent.newer.0;
                *newer = newer.saturating_add(lost);
                self.early
                    .get_or_insert((now + EARLY).max(self.reported + EARLY_INTERVAL));
            }
        }
        verdict
    }

    /// Forgets the delays of a path that the peer has left.
    fn forget_delays(&mut self) {
        self.delay_base = None;
        if let Some(classifier) = &mut self.classifier {
            **classifier = LossClassifier::default();
        }
        self.set_round_trip(self.round_trip);
    }

    /// Packets arrived, so a report is useful.
    pub fn packets(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// Returns the report if one is due.
    pub fn due(&mut self, now: Instant) -> Option<Report> {
        if self.next_report().is_none_or(|at| now < at) {
            return None;
        }
        let mut report = std::mem::take(&mut self.report);
        let old = self.recent.take_old(self.next, now);
        report.random_losses = report.random_losses.saturating_add(old);
        self.since = None;
        self.early = (!self.recent.is_empty()).then_some(now + EARLY_INTERVAL);
        self.reported = now;
        self.probes = 0;
        if now.duration_since(self.overtook) >= REPORT_INTERVAL {
            let lost = std::mem::take(&mut self.overtaken).min(u64::from(u32::MAX)) as u32;
            report.lost = report.lost.saturating_add(lost);
        }
        let mean = std::mem::take(&mut self.delay_sum) / u64::from(report.received.max(1));
        report.queueing_delay = mean.min(u64::from(u32::MAX)) as u32;
        Some(report)
    }

    /// Returns when [`Self::due`] will have a report.
    pub fn next_report(&self) -> Option<Instant> {
        let regular = self.since.map(|since| since + REPORT_INTERVAL);
        regular.into_iter().chain(self.early).min()
    }

    /// Treats the counters between the highest one and `counter` as received.
    fn skip_to(&mut self, counter: u64) {
        // If there are more than fit the window, only the newest of them.
        if counter - self.next >= HORIZON {
            self.next = counter;
            self.window = [u64::MAX; (HORIZON / 64) as usize];
        }
        self.enter(counter, true);
        self.next = counter;
    }

    /// Moves the counters up to `end` (exclusive) into the window. Counters that leave it unset are
    /// lost. Works by words, because the sender of the counters chooses the distance.
    fn enter(&mut self, end: u64, seen: bool) {
        let mut at = self.next;
        while at < end {
            let (word, from) = ((at % HORIZON / 64) as usize, at % 64);
            let count = (64 - from).min(end - at);
            let mask = (u64::MAX >> (64 - count)) << from;
            // The counters that leave the window.
            let unseen = (mask & !self.window[word]).count_ones();
            self.report.lost = self.report.lost.saturating_add(unseen);
            if seen {
                self.window[word] |= mask;
            } else {
                self.window[word] &= !mask;
            }
            at += count;
        }
    }

    /// Whether a record of the newest session, within [`HORIZON`], has not arrived. It may have been restored.
    pub fn misses(&self, session: u32, counter: u64) -> bool {
        let is_newest = self.session.is_some_and(|(index, _)| index == session);
        is_newest && counter < self.next && self.is_recent_and_missing(counter)
    }

    /// Records that the original of a restored record has arrived, so that it was not lost. [`Self::misses`] must have
    /// returned true for it.
    pub fn original(&mut self, counter: u64) {
        self.late(counter);
    }

    fn is_recent_and_missing(&self, counter: u64) -> bool {
        let is_recent = self.next - 1 - counter < HORIZON;
        is_recent && self.window[(counter % HORIZON / 64) as usize] & 1 << (counter % 64) == 0
    }

    /// Whether a counter below the highest one may still count as lost.
    fn is_awaited(&self, counter: u64) -> bool {
        self.overtaken > 0 || self.is_recent_and_missing(counter)
    }

    /// Handles a datagram with a lower counter than the highest one.
    fn late(&mut self, counter: u64) {
        let late = self.next - 1 - counter;
        self.report.reordering = self.report.reordering.max(late.min(65_535) as u16);
        if let Some(classifier) = &mut self.classifier {
            classifier.late();
        }
        self.excuse(counter);
    }

    /// A counter below the highest one is not lost.
    fn excuse(&mut self, counter: u64) {
        let late = self.next - 1 - counter;
        let (word, bit) = ((counter % HORIZON / 64) as usize, 1 << (counter % 64));
        if late < HORIZON && self.window[word] & bit == 0 {
            self.window[word] |= bit;
            self.take_back_loss(counter);
        } else if self.overtaken > 0 {
            // A counter does not arrive twice, so a set bit means that it was skipped.
            self.overtaken -= 1;
        } else if self.probes > 0 {
            self.probes -= 1;
        } else {
            self.report.lost = self.report.lost.saturating_sub(1);
            self.take_back_loss(counter);
        }
    }

    /// A missing datagram was no loss. Most late ones are of random gaps.
    fn take_back_loss(&mut self, counter: u64) {
        let report = &mut self.report;
        if !self.recent.take_back(counter) {
            if report.random_losses > 0 {
                report.random_losses -= 1;
            } else {
                report.congestion_losses = report.congestion_losses.saturating_sub(1);
            }
        }
        if report.random_losses == 0 && self.recent.is_empty() {
            self.early = None;
        }
    }

    /// Moves the upper end of the window to `counter`. Counters that leave it unset are lost.
    fn advance(&mut self, counter: u64, position: u8) {
        let steps = counter + 1 - self.next;
        if steps > HORIZON {
            // The whole window leaves, and the counters in between never entered it.
            let unseen: u32 = self.window.iter().map(|w| w.count_zeros()).sum();
            let skipped = (steps - HORIZON).min(u64::from(u32::MAX)) as u32;
            self.report.lost = self
                .report
                .lost
                .saturating_add(unseen)
                .saturating_add(skipped);
            self.window = [0; (HORIZON / 64) as usize];
        } else {
            self.enter(counter + 1, false);
        }
        // The first datagram of a batch counts as lost once later datagrams of the batch have
        // arrived. It is counted when the batch is first seen.
        let first = counter - u64::from(position).min(counter);
        if position > 0 && first >= self.next {
            self.report.lost_first = self.report.lost_first.saturating_add(1);
        }
        self.window[(counter % HORIZON / 64) as usize] |= 1 << (counter % 64);
        self.next = counter + 1;
    }

    /// Returns the one-way delay above its minimum in microseconds, by unwrapped 16-bit timestamps.
    /// Only its change is meaningful, since the clocks have no common epoch.
    fn delay(&mut self, stamp: u16, now: Instant) -> u64 {
        let arrival = stamp_of(now);
        let transit = arrival.wrapping_sub(stamp);
        self.transit = match self.delay_base {
            None => 0,
            Some(_) => self.transit + i64::from(transit.wrapping_sub(self.last_transit) as i16),
        };
        self.last_transit = transit;
        let base = self
            .delay_base
            .map_or(self.transit, |b| b.min(self.transit));
        self.delay_base = Some(base);
        // 1/65536 s = 15.26 microseconds. A report has 32 bits for the mean, and stamps may be false.
        let above = (self.transit - base) as u64;
        let delay = (above.saturating_mul(15_259) / 1000).min(u64::from(u32::MAX));
        self.delay_sum = self.delay_sum.saturating_add(delay);
        delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(counter: u64) -> Record {
        Record {
            session: 1,
            counter,
            ecn: 0,
        }
    }

    fn stamp(position: u8, time: u16) -> Stamp {
        Stamp {
            position,
            follows_probe: false,
            time,
        }
    }

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    const HERE: SocketAddr = SocketAddr::new(
        std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)),
        7,
    );

    fn note(r: &mut Receiver, record: &Record, stamp: Stamp, now: Instant) {
        r.datagram(record, stamp, (1, HERE), now);
        r.packets(now);
    }

    #[test]
    fn a_skipped_counter_is_lost_once_it_leaves_the_horizon() {
        let mut r = Receiver::default();
        for c in (0..3000).filter(|c| c % 100 != 50) {
            note(&mut r, &record(c), stamp(0, 0), at(0));
        }
        let report = r.due(at(1000)).unwrap();
        // 50, 150, ... 1950 have left a horizon of 1,024 below 3,000.
        assert_eq!((report.received, report.lost), (2970, 20));
    }

    #[test]
    fn a_late_datagram_is_reordering_and_not_loss() {
        let mut r = Receiver::default();
        for c in (0..10).chain(11..40).chain([10]).chain(40..4000) {
            note(&mut r, &record(c), stamp(0, 0), at(0));
        }
        let report = r.due(at(1000)).unwrap();
        assert_eq!((report.lost, report.reordering), (0, 29));
    }

    #[test]
    fn growing_transit_is_queueing_delay() {
        let mut r = Receiver::default();
        // Sent every 10 ms, arriving 0, 1, 2, ... 10 ms later than before; another clock's epoch.
        for i in 0..11u64 {
            let sent = stamp_of(at(700 + i * 10));
            note(&mut r, &record(i), stamp(0, sent), at(i * 11));
        }
        let report = r.due(at(2000)).unwrap();
        assert!(
            (4_900..5_100).contains(&report.queueing_delay),
            "{report:?}"
        ); // mean of 0..=10 ms
    }

    #[test]
    fn a_longer_path_is_no_queueing_delay() {
        let elsewhere = SocketAddr::new(HERE.ip(), 8);
        let mut r = Receiver::default();
        r.set_repairs(true);
        // Sent every 10 ms. The new path is longer by 40 ms; some datagrams of the old one are late.
        for i in 0..200u64 {
            let (from, transit) = if i < 100 { (HERE, 20) } else { (elsewhere, 60) };
            let stamp = stamp(0, stamp_of(at(700 + i * 10)));
            if !(95..98).contains(&i) {
                r.datagram(&record(i), stamp, (1, from), at(i * 10 + transit));
            }
            if i == 110 {
                for late in 95..98 {
                    let stamp = self::stamp(0, stamp_of(at(700 + late * 10)));
                    r.datagram(&record(late), stamp, (1, HERE), at(i * 10 + 1));
                }
            }
        }
        r.packets(at(2000));
        let report = r.due(at(4000)).unwrap();
        assert_eq!((report.received, report.lost), (200, 0));
        assert!(report.queueing_delay < 100, "{report:?}");
    }

    #[test]
    fn losses_of_another_path_are_no_evidence() {
        let elsewhere = SocketAddr::new(HERE.ip(), 8);
        for session in [1, 2] {
            let mut r = Receiver::default();
            r.set_repairs(true);
            // Bursts of ten: the path loses the last datagram of each, the next path one in the middle.
            let mut burst = |number: u64, session: u64, from, lost: u64| {
                let arrive = (0..10).filter(|position| *position != lost);
                let verdicts = arrive.filter_map(|position| {
                    let record = Record {
                        session: session as u32,
                        ..record(number * 10 + position)
                    };
                    let stamp = stamp(position as u8, 0);
                    r.datagram(&record, stamp, (session, from), at(0))
                });
                verdicts.collect::<Vec<_>>()
            };
            let before: Vec<_> = (0..100).map(|n| burst(n, 1, HERE, 9)).collect();
            assert_eq!(before.last(), Some(&vec![Verdict::Congestion]));
            let next = if session == 1 { 100 } else { 0 };
            burst(next, session, elsewhere, 10);
            let verdict = burst(next + 1, session, elsewhere, 4);
            assert_eq!(verdict, [Verdict::Random], "session {session}");
        }
    }

    /// Counts of `calls` that each sent `datagrams` behind the first `before` of their batch.
    fn sent(calls: u32, before: usize, datagrams: u64) -> SentBatches {
        let mut sent = SentBatches::default();
        (0..calls).for_each(|_| sent.add(before, datagrams));
        sent
    }

    #[test]
    fn losing_all_but_the_first_of_each_part_of_a_batch_is_broken_gso() {
        // Each batch of 40 is sent in parts of 8.
        let mut counts = sent(200, 0, 8);
        let rest = sent(200 * 4, 8, 8);
        counts.later += rest.later;
        counts.first_of_rest += rest.first_of_rest;
        let report = |arrives: fn(u64) -> bool| {
            let mut r = Receiver::default();
            for c in (0..8000u64).filter(|c| arrives(c % 40)) {
                note(&mut r, &record(c), stamp((c % 40) as u8, 0), at(0));
            }
            r.due(at(1000)).expect("a report")
        };
        assert!(report(|position| position % 8 == 0).misses_batches(counts));
        assert!(!report(|position| position % 4 == 0).misses_batches(counts));
        assert!(!report(|_| true).misses_batches(counts));
    }

    #[test]
    fn datagrams_that_were_sent_alone_show_nothing_about_batches() {
        let report = Report {
            received_later: 900,
            ..Report::default()
        };
        let counts = SentBatches {
            later: 100,
            first_of_rest: 900,
        };
        assert!(!report.misses_batches(counts));
    }

    #[test]
    fn losing_all_but_the_first_of_each_batch_is_broken_gso() {
        let mut r = Receiver::default();
        for batch in 0..200u64 {
            note(&mut r, &record(batch * 40), stamp(0, 0), at(0));
        }
        assert!(r.due(at(1000)).unwrap().misses_batches(sent(200, 0, 40)));
        let mut r = Receiver::default();
        // A random-like path: every third datagram comes, wherever it stands.
        for c in (0..8000u64).filter(|c| c % 3 == 0) {
            note(&mut r, &record(c), stamp((c % 40) as u8, 0), at(0));
        }
        assert!(!r.due(at(1000)).unwrap().misses_batches(sent(200, 0, 40)));
        // A short queue takes the first three of every batch and drops the rest.
        let mut r = Receiver::default();
        for c in (0..8000u64).filter(|c| c % 40 < 3) {
            note(&mut r, &record(c), stamp((c % 40) as u8, 0), at(0));
        }
        assert!(!r.due(at(1000)).unwrap().misses_batches(sent(200, 0, 40)));
    }

    #[test]
    fn false_stamps_do_not_overflow_the_delay() {
        let mut r = Receiver::default();
        note(&mut r, &record(0), stamp(0, 0), at(0));
        // As after very many that each claim to be half a second later than the last.
        r.transit = i64::MAX / 2;
        r.delay_sum = u64::MAX;
        note(&mut r, &record(1), stamp(0, 0), at(0));
        let report = r.due(at(2000)).unwrap();
        assert_eq!(report.queueing_delay, u32::MAX);
    }

    #[test]
    fn a_late_datagram_of_the_previous_session_is_no_loss_in_the_new_one() {
        let mut r = Receiver::default();
        let old = Record {
            session: 9,
            ..record(0)
        };
        r.datagram(&old, stamp(0, 0), (1, HERE), at(0));
        for c in 0..10 {
            r.datagram(&record(c), stamp(0, 0), (2, HERE), at(5));
        }
        let late = Record {
            counter: 90_000,
            ..old
        };
        r.datagram(&late, stamp(0, 0), (1, HERE), at(6));
        for c in 10..3000 {
            r.datagram(&record(c), stamp(0, 0), (2, HERE), at(7));
        }
        r.packets(at(7));
        let report = r.due(at(2000)).unwrap();
        assert_eq!(
            (report.received, report.lost, report.reordering),
            (3002, 0, 0)
        );
    }

    #[test]
    fn datagrams_overtaken_by_a_faster_path_are_late_and_not_lost() {
        let elsewhere = SocketAddr::new(HERE.ip(), 8);
        // In flight over the old path when the new one starts: within the horizon, and beyond it.
        for overtaken in [500, 5000] {
            let mut r = Receiver::default();
            for c in 0..2000 {
                note(&mut r, &record(c), stamp(0, 0), at(0));
            }
            let old = 2000..2000 + overtaken;
            let new = old.end..old.end + 8000;
            // Alternating; the new path loses one datagram of its own.
            let mut old = old.into_iter();
            for c in new.filter(|c| c % 8000 != 7999) {
                r.datagram(&record(c), stamp(0, 0), (1, elsewhere), at(1));
                if let Some(late) = old.next() {
                    note(&mut r, &record(late), stamp(0, 0), at(1));
                }
            }
            let report = r.due(at(2000)).unwrap();
            assert_eq!(report.lost, 1, "{overtaken} overtaken");
        }
    }

    #[test]
    fn overtaken_datagrams_that_never_arrive_are_lost_after_a_second() {
        let elsewhere = SocketAddr::new(HERE.ip(), 8);
        for (overtaken, late) in [(500, 100), (5000, 4000)] {
            let mut r = Receiver::default();
            note(&mut r, &record(0), stamp(0, 0), at(0));
            let mut new = 1 + overtaken..;
            let mut receive = |r: &mut Receiver, ms| {
                let counter = record(new.next().expect("one"));
                r.datagram(&counter, stamp(0, 0), (1, elsewhere), at(ms));
                r.packets(at(ms));
            };
            receive(&mut r, 900);
            for c in 1..=late {
                note(&mut r, &record(c), stamp(0, 0), at(950));
            }
            let early = r.due(at(1000)).expect("a report");
            receive(&mut r, 1001);
            let report = r.due(at(2001)).expect("a report");
            let missing = (overtaken - late) as u32;
            assert_eq!((early.lost, report.lost), (0, missing), "{overtaken}");
        }
    }

    #[test]
    fn a_datagram_that_arrives_beyond_the_horizon_is_no_longer_lost() {
        let mut r = Receiver::default();
        for c in (0..3000).filter(|c| *c != 100).chain([100]) {
            note(&mut r, &record(c), stamp(0, 0), at(0));
        }
        let report = r.due(at(1000)).expect("a report");
        assert_eq!((report.lost, report.reordering), (0, 2899));
    }

    #[test]
    fn missing_probes_are_no_losses() {
        let mut r = Receiver::default();
        r.set_repairs(true);
        let mut verdicts = Vec::new();
        // One of the probes is only late.
        for c in (0..20).chain(30..40).chain([25]).chain(40..3000) {
            let stamp = Stamp {
                follows_probe: c == 30,
                ..stamp(0, 0)
            };
            verdicts.extend(r.datagram(&record(c), stamp, (1, HERE), at(0)));
        }
        r.packets(at(0));
        let report = r.due(at(1000)).expect("a report");
        assert_eq!(verdicts, [Verdict::Probes]);
        assert_eq!((report.lost, report.random_losses), (0, 0));
        assert_eq!(report.reordering, 14);
    }

    #[test]
    fn more_is_missing_than_probes_are_sent_in_a_row() {
        let mut r = Receiver::default();
        r.set_repairs(true);
        note(&mut r, &record(0), stamp(0, 0), at(0));
        let stamp = Stamp {
            follows_probe: true,
            ..stamp(0, 0)
        };
        let verdict = r.datagram(&record(34), stamp, (1, HERE), at(0));
        assert_eq!(verdict, Some(Verdict::Overflow { earlier: 0 }));
        assert_eq!(r.due(at(1000)).expect("a report").congestion_losses, 33);
    }

    #[test]
    fn a_gap_whose_datagrams_arrive_late_is_no_loss_in_a_full_queue() {
        let mut r = Receiver::default();
        r.set_repairs(true);
        note(&mut r, &record(0), stamp(0, 0), at(0));
        let mut receive = |counter, ms| {
            let stamp = stamp(0, 0);
            r.datagram(&record(counter), stamp, (1, HERE), at(ms))
        };
        let overflow = Some(Verdict::Overflow { earlier: 0 });
        assert_eq!(receive(31, 1), overflow);
        (1..31).for_each(|counter| assert_eq!(receive(counter, 2), None));
        // It is over.
        assert_eq!(receive(37, 50), Some(Verdict::Random));
        let report = r.due(at(1000)).expect("a report");
        assert_eq!((report.random_losses, report.congestion_losses), (5, 0));
    }

    #[test]
    fn datagrams_that_others_overtake_are_no_losses() {
        let mut r = Receiver::default();
        r.set_repairs(true);
        // 25 datagrams in a millisecond; one in a hundred overtakes eight others, also at the end of each report.
        let order = (0..125_000).map(|c| match c % 100 {
            0 => c + 8,
            1..=8 => c - 1,
            _ => c,
        });
        let mut reports = Vec::new();
        for (n, counter) in order.enumerate() {
            let now = at(n as u64 / 25);
            let stamp = stamp(0, crate::native::stamp::stamp_of(now));
            r.datagram(&record(counter), stamp, (1, HERE), now);
            r.packets(now);
            reports.extend(r.due(now));
        }
        let lost: Vec<u32> = reports.iter().map(|r| r.random_losses).collect();
        assert_eq!(lost, [0, 0, 0, 0]);
        assert_eq!(reports[3].reordering, 8);
    }

    #[test]
    fn a_path_on_which_datagrams_are_always_late_loses_none() {
        let mut r = Receiver::default();
        r.set_repairs(true);
        // One datagram in a millisecond. Each fourth is 9 ms late, so that there are always two that may be lost.
        let mut order: Vec<(u64, u64)> = (0..4000)
            .map(|c| (if c % 4 == 3 { c + 9 } else { c }, c))
            .collect();
        order.sort_unstable();
        let mut lost = 0;
        for (ms, counter) in order {
            let now = at(ms);
            let stamp = stamp(0, crate::native::stamp::stamp_of(now));
            r.datagram(&record(counter), stamp, (1, HERE), now);
            r.packets(now);
            let report = r.due(now).unwrap_or_default();
            lost += report.random_losses + report.congestion_losses;
        }
        assert_eq!(lost, 0);
    }

    #[test]
    fn random_losses_shortly_before_many_others_are_those_of_the_same_queue() {
        let mut r = Receiver::default();
        r.set_repairs(true);
        let missing_before = [0, 3, 40];
        let mut counter = 0;
        for missing in missing_before {
            counter += missing;
            note(&mut r, &record(counter), stamp(0, 0), at(0));
            counter += 1;
        }
        let report = r.due(at(1000)).expect("a report");
        assert_eq!((report.random_losses, report.congestion_losses), (0, 43));
    }

    #[test]
    fn reports_and_keepalives_alone_are_not_reported_on() {
        let mut r = Receiver::default();
        r.datagram(&record(0), stamp(0, 0), (1, HERE), at(0));
        assert_eq!((r.next_report(), r.due(at(5000))), (None, None));
    }

    #[test]
    fn reports_survive_the_wire() {
        let r = Report {
            received: 1,
            lost: 2,
            lost_first: 3,
            reordering: 4,
            congestion_marks: 5,
            queueing_delay: 6,
            received_later: 7,
            random_losses: 8,
            congestion_losses: 9,
            restored: 10,
            not_restored: 11,
        };
        assert_eq!(Report::read(&r.to_bytes()), Some(r));
        let short = Report {
            random_losses: 0,
            congestion_losses: 0,
            restored: 0,
            not_restored: 0,
            ..r
        };
        assert_eq!(Report::read(&r.to_bytes()[..30]), Some(short));
        assert_eq!(Report::read(&[0; 25]), None);
    }
}
