//! The sender's side of loss repair: decides how many parity records a block gets, and when the
//! block ends.

use super::parity::{self, Head, MAX_PARITIES, MAX_RECORDS};
use crate::native::health::Report;
use crate::time::Instant;
use std::time::Duration;

/// Number of records at the start of a path that are covered before the receiver has reported
/// losses: TCP is most sensitive to losses then.
const FIRST_RECORDS: u32 = 4000;
/// Loss rate that is assumed for [`FIRST_RECORDS`].
const FIRST_LOSS: f64 = 0.01;
/// Target probability that a record is lost and not restored. With this loss rate, CUBIC fills 1
/// Gbit/s at a round-trip time of 100 ms (RFC 9438, section 5.2).
const FAILURE: f64 = 1.5e-6;
/// Loss rate below which no parity is sent: TCP tolerates it, and one parity record for each block
/// would cost more.
const LEAST_LOSS: f64 = 1e-5;
/// Loss rate above which repair ends after [`PATIENCE`]: it would take too large a share of the
/// path from other traffic.
const MOST_LOSS: f64 = 0.08;
/// Repair ends if less than this share of the losses has been random for [`PATIENCE`].
const RANDOM_SHARE: f64 = 0.25;
const PATIENCE: Duration = Duration::from_secs(3);
/// Time constant of the mean loss rate, in seconds.
const LOSS_MEMORY: f64 = 5.0;
/// Number of records without loss that are added to those of a report before its loss rate raises
/// the estimate at once.
const CAUTION: f64 = 50.0;
/// Pause in sending after which a block ends while there is credit for small blocks, which only
/// [`BASE_RATE`] fills. It is short because slow start ends early where segments are delayed by 4
/// ms or more (HyStart, RFC 9406).
const PROMPT: Duration = Duration::from_millis(1);
/// Pause in sending, and age of the block, after which it ends if the credit suffices for its
/// parity.
const IDLE: Duration = Duration::from_millis(5);
const SOON: Duration = Duration::from_millis(20);
/// Age at which a block ends in any case.
const LATE: Duration = Duration::from_millis(40);
/// Parity bytes per second that are allowed in addition to the ceiling, for flows so slow that each
/// packet is a block.
const BASE_RATE: f64 = 25_000.0;
/// Maximum credit in parity bytes: enough for a slow start in small blocks.
const MAX_CREDIT: f64 = 512_000.0;

/// Loss repair of one path.
#[derive(Debug)]
pub struct Sender {
    /// Maximum parity bytes, in percent of all other bytes; `None` without repair.
    ceiling: Option<u8>,
    /// Number of [`FIRST_RECORDS`] that are still to come.
    first: u32,
    /// Mean share of records lost at random; `None` before the first report.
    loss: Option<f64>,
    /// Since when most losses have been congestion.
    congested_since: Option<Instant>,
    /// When losses were last reported.
    lost_at: Instant,
    /// Since when the loss has been above [`MOST_LOSS`].
    lossy_since: Option<Instant>,
    /// When the latest report arrived.
    reported: Instant,
    block: Option<Block>,
    /// Credit: parity bytes that may be sent.
    credit: f64,
    /// Credit for blocks that end early, in parity bytes.
    prompt: f64,
    credited: Instant,
    /// Parity records sent, on all paths.
    pub sent: u64,
}

/// The records since the last parity.
#[derive(Debug)]
struct Block {
    /// Local index of the records' session.
    session: u32,
    /// Counter of the first record.
    start: u64,
    opened: Instant,
    /// When the last record was covered.
    last: Instant,
    /// Number of covered records.
    records: usize,
    parities: Vec<Vec<u8>>,
    /// Number of the parity record to send next, once the block has ended.
    next: u8,
    /// Number of parity records to send; 0 until the block has ended.
    count: u8,
}

/// Whether loss repair is active on a path, and if not, why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// One end does not repair.
    Off,
    /// The first records of a path are covered, before the receiver has reported losses.
    Starting,
    /// There is hardly any random loss.
    NotNeeded,
    /// Parity is sent.
    Repairing,
    /// Most losses happen in full queues.
    Congested,
    /// The loss is above 8 %.
    TooMuchLoss,
}

impl Default for Sender {
    fn default() -> Self {
        Sender::new(None)
    }
}

impl Sender {
    /// Creates the state of a new path. `ceiling` is the maximum of parity bytes in percent of all
    /// other bytes; `None` disables repair.
    pub fn new(ceiling: Option<u8>) -> Sender {
        Sender {
            ceiling,
            first: FIRST_RECORDS,
            loss: None,
            congested_since: None,
            lost_at: Instant::BOOT,
            lossy_since: None,
            reported: Instant::BOOT,
            block: None,
            credit: MAX_CREDIT,
            prompt: MAX_CREDIT,
            credited: Instant::BOOT,
            sent: 0,
        }
    }

    /// Creates the state of another path to the same peer.
    pub fn moved(&self) -> Sender {
        Sender {
            sent: self.sent,
            ..Sender::new(self.ceiling)
        }
    }

    /// The ceiling, see [`Self::new`].
    pub fn ceiling(&self) -> Option<u8> {
        self.ceiling
    }

    /// Changes the ceiling. `None` ends repair: one end does not support or allow it.
    pub fn set_ceiling(&mut self, ceiling: Option<u8>) {
        self.ceiling = ceiling;
        if ceiling.is_none() {
            self.block = None;
        }
    }

    /// Mean share of the records that were lost at random, from 0 to 1.
    pub fn loss(&self) -> Option<f64> {
        self.loss
    }

    /// Whether the path is repaired.
    pub fn state(&self, now: Instant) -> State {
        let Some(_) = self.ceiling else {
            return State::Off;
        };
        match self.loss {
            _ if lasts(self.lossy_since, now) => State::TooMuchLoss,
            _ if lasts(self.congested_since, now) => State::Congested,
            Some(loss) if loss >= LEAST_LOSS => State::Repairing,
            _ if self.first > 0 => State::Starting,
            _ => State::NotNeeded,
        }
    }

    /// Returns the loss rate to protect against; `None` if records are not covered.
    fn protects(&self, now: Instant) -> Option<f64> {
        match self.state(now) {
            State::Repairing => self.loss,
            State::Starting => Some(FIRST_LOSS),
            _ => None,
        }
    }

    /// Whether records are covered at this time. Covered records must be shorter by
    /// [`parity::ROOM`].
    pub fn covers(&self, now: Instant) -> bool {
        self.ceiling.is_some() && (self.block.is_some() || self.protects(now).is_some())
    }

    /// Processes a report of the receiver.
    pub fn reported(&mut self, report: &Report, now: Instant) {
        let random = f64::from(report.random_losses);
        let lost = random + f64::from(report.congestion_losses);
        let all = f64::from(report.received) + lost;
        if all == 0.0 {
            return;
        }
        let passed = now.duration_since(self.reported).as_secs_f64();
        self.reported = now;
        // A report on few records says little, so its weight is reduced below that of the elapsed
        // time.
        let weight = (1.0 - (-passed / LOSS_MEMORY).exp())
            .min(all / 200.0)
            .max(1e-3);
        let loss = self.loss.unwrap_or(0.0);
        let mean = loss + (random / all - loss) * weight;
        // Far more losses than expected raise the estimate at once. A few losses among a few
        // records do not.
        let cautious = random / (all + CAUTION);
        let soon = if random >= 2.0 && cautious > 2.0 * loss {
            loss + (cautious - loss) * 0.5
        } else {
            0.0
        };
        // The limit lets the estimate return sooner after a burst.
        let loss = mean.max(soon).min(MOST_LOSS * 1.5);
        self.loss = Some(loss);
        if loss > MOST_LOSS {
            self.lossy_since.get_or_insert(now);
        } else {
            self.lossy_since = None;
        }
        if lost > 0.0 {
            self.lost_at = now;
        }
        if lost > 0.0 && random < RANDOM_SHARE * lost {
            self.congested_since.get_or_insert(now);
        } else if lost > 0.0 || now.duration_since(self.lost_at) >= PATIENCE {
            self.congested_since = None;
        }
    }

    /// Adds a record to the open block. Returns true if the block is full with it.
    pub fn record(&mut self, session: u32, counter: u64, frames: &[u8], now: Instant) -> bool {
        if self.ceiling.is_none() {
            return false;
        }
        self.earn(frames.len(), now);
        self.first = self.first.saturating_sub(1);
        let follows = |block: &Block| {
            block.session == session
                && block.count == 0
                && counter
                    .checked_sub(block.start)
                    .is_some_and(|i| i < MAX_RECORDS as u64)
        };
        if !self.block.as_ref().is_some_and(follows) {
            self.block = None;
            let Some(loss) = self.protects(now) else {
                return false;
            };
            let rows = needed(MAX_RECORDS, loss);
            self.block = Some(Block {
                session,
                start: counter,
                opened: now,
                last: now,
                records: 0,
                parities: vec![Vec::new(); rows],
                next: 0,
                count: 0,
            });
        }
        let Some(block) = &mut self.block else {
            return false;
        };
        let index = counter - block.start;
        let numbers: [u8; MAX_PARITIES] = std::array::from_fn(|n| n as u8);
        let rows = block.parities.len();
        parity::add_symbol(&mut block.parities, &numbers[..rows], index as u8, frames);
        block.records += 1;
        block.last = now;
        index + 1 == MAX_RECORDS as u64
    }

    /// When the open block ends; `None` if there is none.
    pub fn ends_at(&self) -> Option<Instant> {
        let block = self.block.as_ref()?;
        let loss = self.loss.unwrap_or(FIRST_LOSS);
        let cost = needed(block.records, loss) * block.parities.first().map_or(0, Vec::len);
        let (pause, age) = if self.prompt > 0.0 && cost as f64 <= self.credit {
            (PROMPT, SOON)
        } else if cost as f64 <= self.credit {
            (IDLE, SOON)
        } else {
            (LATE, LATE)
        };
        Some((block.last + pause).min(block.opened + age))
    }

    /// Returns the next parity of a block that has ended, to be sent in a record with this counter.
    /// First ends the open block of `session` if it is `full` or its time has come.
    pub fn parity(
        &mut self,
        session: u32,
        counter: u64,
        full: bool,
        now: Instant,
    ) -> Option<(Head, &[u8])> {
        let ends = full || self.ends_at().is_some_and(|at| at <= now);
        let loss = self.loss.unwrap_or(FIRST_LOSS);
        let block = self.block.as_mut()?;
        if block.session != session {
            self.block = None;
            return None;
        }
        if block.count == 0 {
            if !ends {
                return None;
            }
            let size = block.parities.first().map_or(0, Vec::len);
            // The size is 0 if all records are empty.
            let affordable = (self.credit as usize).checked_div(size).unwrap_or(0);
            block.count = needed(block.records, loss)
                .min(affordable)
                .min(block.parities.len()) as u8;
            // Records that were not covered count as empty.
            let records = counter - block.start;
            if records > MAX_RECORDS as u64 || block.count == 0 {
                self.block = None;
                return None;
            }
            block.records = records as usize;
        }
        if block.next == block.count
            || counter != block.start + block.records as u64 + u64::from(block.next)
        {
            self.block = None;
            return None;
        }
        let head = Head {
            number: block.next,
            count: block.count,
            records: block.records as u8,
        };
        block.next += 1;
        let block = self.block.as_ref()?;
        let symbol = &block.parities[usize::from(head.number)];
        self.credit -= symbol.len() as f64;
        if now < block.opened + SOON && block.records < MAX_RECORDS {
            self.prompt -= symbol.len() as f64;
        }
        self.sent += 1;
        Some((head, symbol))
    }

    /// Adds the credit for this many bytes and for the time since the last call.
    fn earn(&mut self, bytes: usize, now: Instant) {
        let passed = now.duration_since(self.credited).as_secs_f64();
        self.credited = now;
        let share = f64::from(self.ceiling.unwrap_or(0)) / 100.0;
        let earned = passed * BASE_RATE;
        self.prompt = (self.prompt + earned).min(MAX_CREDIT);
        self.credit = (self.credit + earned + bytes as f64 * share).min(MAX_CREDIT);
    }
}

/// Whether a condition has held for [`PATIENCE`].
fn lasts(since: Option<Instant>, now: Instant) -> bool {
    since.is_some_and(|since| now.duration_since(since) >= PATIENCE)
}

/// Returns the number of parity records for a block of `records` records, from 1 to
/// [`MAX_PARITIES`]. With this number, the probability that more records of the block are lost than
/// there are parity records is at most [`FAILURE`] times `records`.
pub fn needed(records: usize, loss: f64) -> usize {
    // A margin, because the loss rate is an estimate and varies.
    let loss = (loss * 1.1 + 1e-4).min(0.5);
    for parities in 1..MAX_PARITIES {
        let all = records + parities;
        // The probability of 0 to `parities` losses among all.
        let mut term = (1.0 - loss).powi(all as i32);
        let mut sum = term;
        for k in 1..=parities {
            term *= (all + 1 - k) as f64 / k as f64 * loss / (1.0 - loss);
            sum += term;
        }
        if 1.0 - sum <= FAILURE * records as f64 {
            return parities;
        }
    }
    MAX_PARITIES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(1_000_000_000 + ms * 1_000_000)
    }

    fn report(received: u32, random: u32, lost: u32) -> Report {
        Report {
            received,
            random_losses: random,
            congestion_losses: lost - random,
            ..Report::default()
        }
    }

    /// A sender that has sent its first records.
    fn started() -> Sender {
        let mut sender = Sender::new(Some(10));
        for counter in 0..u64::from(FIRST_RECORDS) {
            sender.record(1, counter, &[0; 100], at(0));
            sender.block = None;
        }
        sender
    }

    /// The parities that a sender sends for records at these times.
    fn parities(sender: &mut Sender, times: impl Iterator<Item = u64>) -> (usize, usize) {
        let (mut counter, mut records, mut sent) = (10_000, 0, 0);
        for ms in times {
            let full = sender.record(1, counter, &[7; 1000], at(ms));
            counter += 1;
            records += 1;
            while sender.parity(1, counter, full, at(ms)).is_some() {
                counter += 1;
                sent += 1;
            }
        }
        (records, sent)
    }

    /// The expected numbers follow from the closed form of the tail.
    #[test]
    fn parities_needed_are_those_of_the_binomial_distribution() {
        // 1 - pbinom(k, n + k, p) <= 2e-4 with p = 1.1 x loss + 1e-4.
        for (records, loss, expected) in [(1, 0.03, 3), (128, 0.001, 3), (128, 0.01, 7)] {
            let least = (1..=MAX_PARITIES)
                .find(|k| tail(records + k, *k, loss * 1.1 + 1e-4) <= FAILURE * records as f64)
                .unwrap();
            assert_eq!((needed(records, loss), least), (expected, expected));
        }
        assert_eq!(needed(128, 0.08), MAX_PARITIES);
    }

    /// Probability of more than `k` of `n`, by another formula: the sum of the terms above, by
    /// logarithms.
    fn tail(n: usize, k: usize, p: f64) -> f64 {
        let ln = |n: usize| (1..=n).map(|i| (i as f64).ln()).sum::<f64>();
        let term = |i| {
            let (i, rest) = (i, n - i);
            (ln(n) - ln(i) - ln(rest) + i as f64 * p.ln() + rest as f64 * (1.0 - p).ln()).exp()
        };
        (k + 1..=n).map(term).sum()
    }

    #[test]
    fn a_path_without_loss_has_no_parity_after_its_first_records() {
        let mut sender = started();
        sender.reported(&report(4000, 0, 0), at(1000));
        assert_eq!(sender.state(at(1000)), State::NotNeeded);
        assert_eq!(
            parities(&mut sender, (1000..4000).map(|n| n / 10)),
            (3000, 0)
        );
        assert!(!sender.covers(at(4000)));
    }

    #[test]
    fn random_loss_is_answered_with_parity_and_congestion_is_not() {
        for (random, lost, expected) in [
            (40, 40, State::Repairing),
            (5, 40, State::Congested),
            (400, 400, State::TooMuchLoss),
            (0, 0, State::NotNeeded),
        ] {
            let mut sender = started();
            for second in 1..=12 {
                sender.reported(&report(4000, random, lost), at(second * 1000));
            }
            assert_eq!(sender.state(at(12_000)), expected);
            let (_, sent) = parities(&mut sender, (0..1280).map(|n| 12_000 + n / 10));
            assert_eq!(
                sent > 0,
                expected == State::Repairing,
                "{sent} of {expected:?}"
            );
        }
    }

    #[test]
    fn parity_stays_below_its_ceiling() {
        let mut sender = started();
        sender.set_ceiling(Some(3));
        sender.reported(&report(1000, 50, 50), at(1000));
        // 40,000 records of 1,000 bytes in 4 s.
        let (records, sent) = parities(&mut sender, (0..40_000).map(|n| 1000 + n / 10));
        let limit = records * 1000 * 3 / 100 + 100_000 + 512_000;
        assert!(sent * 1002 <= limit && sent * 1002 > limit / 2, "{sent}");
    }

    #[test]
    fn a_single_record_gets_its_parity_after_a_pause() {
        let mut sender = started();
        sender.reported(&report(1000, 30, 30), at(1000));
        assert!(!sender.record(1, 500, &[7; 200], at(2000)));
        assert_eq!(sender.ends_at(), Some(at(2001)));
        assert_eq!(sender.parity(1, 501, false, at(2000)), None);
        let (head, symbol) = sender.parity(1, 501, false, at(2001)).expect("a parity");
        assert_eq!((head.number, head.count, head.records), (0, 3, 1));
        // The factor of the first record is one.
        assert_eq!(parity::frames_of(symbol), Some(&[7; 200][..]));
        assert!(sender.parity(1, 502, false, at(2001)).is_some());
        assert!(sender.parity(1, 503, false, at(2001)).is_some());
        assert_eq!(sender.parity(1, 504, false, at(2001)), None);
        assert_eq!(sender.ends_at(), None);
    }

    #[test]
    fn a_block_ends_with_its_session() {
        let mut sender = started();
        sender.reported(&report(1000, 30, 30), at(1000));
        sender.record(1, 500, &[7; 200], at(2000));
        assert_eq!(sender.parity(2, 0, false, at(2100)), None);
        assert_eq!(sender.ends_at(), None);
    }
}
