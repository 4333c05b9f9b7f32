//! Health of a direction, measured by its receiver and reported to its sender.
//!
//! Counter, batch position and send stamp of every authenticated datagram are enough to tell: how
//! many were lost and where in their GSO batch, how far they were reordered, and whether the
//! one-way delay grows. [`Receiver`] watches; a [`Report`] goes back in a HEALTH frame once a
//! second while data arrives; the sender keeps the latest.

use crate::time::Instant;
use seikan_wire::message::DataHeader;
use std::time::Duration;

/// How often a report is sent while data arrives.
pub const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Reordering further than this is counted as loss.
const HORIZON: u64 = 1024;

/// What the far end saw since its previous report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Datagrams received.
    pub received: u32,
    /// Datagrams whose counter was passed over and did not come within the horizon.
    pub lost: u32,
    /// Of those lost, how many were the first of their GSO batch.
    pub lost_first: u32,
    /// The largest distance, in counters, by which a datagram came late.
    pub reordering: u16,
    /// Datagrams that arrived marked CE.
    pub congestion_marks: u32,
    /// One-way delay above the lowest seen in this session, in microseconds (median-free mean).
    pub queueing_delay: u32,
}

impl Report {
    /// Length of the encoded report.
    pub const LEN: usize = 22;

    /// Parses a HEALTH frame's body; longer ones are from later versions and are read as far as
    /// known.
    pub fn read(body: &[u8]) -> Option<Report> {
        let b: &[u8; Report::LEN] = body.first_chunk()?;
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        Some(Report {
            received: u32_at(0),
            lost: u32_at(4),
            lost_first: u32_at(8),
            congestion_marks: u32_at(12),
            queueing_delay: u32_at(16),
            reordering: u16::from_le_bytes([b[20], b[21]]),
        })
    }

    /// The report as bytes.
    pub fn to_bytes(&self) -> [u8; Report::LEN] {
        let mut b = [0; Report::LEN];
        b[0..4].copy_from_slice(&self.received.to_le_bytes());
        b[4..8].copy_from_slice(&self.lost.to_le_bytes());
        b[8..12].copy_from_slice(&self.lost_first.to_le_bytes());
        b[12..16].copy_from_slice(&self.congestion_marks.to_le_bytes());
        b[16..20].copy_from_slice(&self.queueing_delay.to_le_bytes());
        b[20..22].copy_from_slice(&self.reordering.to_le_bytes());
        b
    }

    /// GSO is mangled on this path: batches arrive with their first datagram only.
    ///
    /// True when much is lost although hardly any first-of-batch is: a path that drops at random
    /// loses firsts like all others.
    pub fn gso_is_mangled(&self) -> bool {
        self.lost >= 64 && self.lost > self.received / 2 && self.lost_first * 50 < self.lost
    }
}

/// Watches the datagrams of one session.
#[derive(Debug)]
pub struct Receiver {
    report: Report,
    since: Option<Instant>,
    /// Next counter expected: one above the highest seen.
    next: u64,
    /// Bit `i` is counter `next - 1 - i`: seen. Those that leave the window unseen are lost.
    window: [u64; (HORIZON / 64) as usize],
    delay_base: Option<i64>,
    delay_sum: u64,
    last_transit: u16,
    transit: i64,
}

impl Default for Receiver {
    fn default() -> Self {
        Receiver {
            report: Report::default(),
            since: None,
            next: 0,
            // Before the first datagram nothing is missing.
            window: [u64::MAX; (HORIZON / 64) as usize],
            delay_base: None,
            delay_sum: 0,
            last_transit: 0,
            transit: 0,
        }
    }
}

impl Receiver {
    /// Notes an authenticated, fresh datagram.
    pub fn datagram(&mut self, header: &DataHeader, ce: bool, now: Instant) {
        self.since.get_or_insert(now);
        self.report.received = self.report.received.saturating_add(1);
        self.report.congestion_marks = self.report.congestion_marks.saturating_add(u32::from(ce));
        if header.counter >= self.next {
            self.advance(header);
        } else {
            let late = self.next - 1 - header.counter;
            self.report.reordering = self.report.reordering.max(late.min(65_535) as u16);
            if late < HORIZON {
                self.window[(header.counter % HORIZON / 64) as usize] |= 1 << (header.counter % 64);
            }
        }
        self.delay(header.stamp, now);
    }

    /// The report that is due, if one is.
    pub fn due(&mut self, now: Instant) -> Option<Report> {
        let since = self.since?;
        if now.duration_since(since) < REPORT_INTERVAL {
            return None;
        }
        self.since = None;
        let mut report = std::mem::take(&mut self.report);
        let mean = std::mem::take(&mut self.delay_sum) / u64::from(report.received.max(1));
        report.queueing_delay = mean.min(u64::from(u32::MAX)) as u32;
        Some(report)
    }

    /// When [`Self::due`] will have a report.
    pub fn next_report(&self) -> Option<Instant> {
        Some(self.since? + REPORT_INTERVAL)
    }

    /// Moves the window's upper end to `header.counter`; what leaves it unseen was lost.
    fn advance(&mut self, header: &DataHeader) {
        let counter = header.counter;
        let steps = counter + 1 - self.next;
        if steps > HORIZON {
            // The whole window leaves, and what lies between never entered it.
            let unseen: u32 = self.window.iter().map(|w| w.count_zeros()).sum();
            let skipped = (steps - HORIZON).min(u64::from(u32::MAX)) as u32;
            self.report.lost = self
                .report
                .lost
                .saturating_add(unseen)
                .saturating_add(skipped);
            self.window = [0; (HORIZON / 64) as usize];
        } else {
            for c in self.next..=counter {
                let (word, bit) = ((c % HORIZON / 64) as usize, 1 << (c % 64));
                if self.window[word] & bit == 0 {
                    // Counter c - HORIZON leaves, unseen.
                    self.report.lost = self.report.lost.saturating_add(1);
                }
                self.window[word] &= !bit;
            }
        }
        // The first of this datagram's batch was passed over for good once later ones are here;
        // counted when the batch is first seen.
        let first = counter - u64::from(header.position).min(counter);
        if header.position > 0 && first >= self.next {
            self.report.lost_first = self.report.lost_first.saturating_add(1);
        }
        self.window[(counter % HORIZON / 64) as usize] |= 1 << (counter % 64);
        self.next = counter + 1;
    }

    /// One-way delay by unwrapped 16-bit stamps: only its change means anything, since the two
    /// clocks share no epoch.
    fn delay(&mut self, stamp: u16, now: Instant) {
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
        // 1/65536 s = 15.26 microseconds.
        self.delay_sum += ((self.transit - base) as u64 * 15_259) / 1000;
    }
}

/// The fraction of the second at `now`, in 1/65536 s.
pub fn stamp_of(now: Instant) -> u16 {
    let nanos = now.as_nanos() % 1_000_000_000;
    ((nanos << 16) / 1_000_000_000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(counter: u64, position: u8, stamp: u16) -> DataHeader {
        DataHeader {
            kind: 0x14,
            position,
            stamp,
            receiver: 1,
            counter,
        }
    }

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn a_passed_over_counter_is_lost_once_it_leaves_the_horizon() {
        let mut r = Receiver::default();
        for c in (0..3000).filter(|c| c % 100 != 50) {
            r.datagram(&header(c, 0, 0), false, at(0));
        }
        let report = r.due(at(1000)).unwrap();
        // 50, 150, ... 1950 have left a horizon of 1,024 below 3,000.
        assert_eq!((report.received, report.lost), (2970, 20));
    }

    #[test]
    fn a_late_datagram_is_reordering_and_not_loss() {
        let mut r = Receiver::default();
        for c in (0..10).chain(11..40).chain([10]).chain(40..4000) {
            r.datagram(&header(c, 0, 0), false, at(0));
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
            r.datagram(&header(i, 0, sent), false, at(i * 11));
        }
        let report = r.due(at(2000)).unwrap();
        assert!(
            (4_900..5_100).contains(&report.queueing_delay),
            "{report:?}"
        ); // mean of 0..=10 ms
    }

    #[test]
    fn losing_all_but_the_first_of_each_batch_is_mangled_gso() {
        let mut r = Receiver::default();
        for batch in 0..200u64 {
            r.datagram(&header(batch * 40, 0, 0), false, at(0));
        }
        assert!(r.due(at(1000)).unwrap().gso_is_mangled());
        let mut r = Receiver::default();
        // A random-like path: every third datagram goes, wherever it stands.
        for c in (0..8000u64).filter(|c| c % 3 == 0) {
            r.datagram(&header(c, (c % 40) as u8, 0), false, at(0));
        }
        assert!(!r.due(at(1000)).unwrap().gso_is_mangled());
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
        };
        assert_eq!(Report::read(&r.to_bytes()), Some(r));
        assert_eq!(Report::read(&[0; 21]), None);
    }
}
