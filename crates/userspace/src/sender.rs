//! The sending side of a connection: decides how much is sent, and what is sent again.
//!
//! On a path of 50 ms and 100 Mbit/s, smoltcp's own congestion control reaches 9 Mbit/s, this
//! module 93, and the kernel's CUBIC 92 (`measure_long` in tests/path.rs). smoltcp's congestion
//! control reads no selective acknowledgements, reduces its window once for each loss of a burst,
//! counts the acknowledgement of a super-packet as that of one segment, and has a minimum timeout
//! of one second. Therefore smoltcp runs without congestion control.
//!
//! This module reads the acknowledgements before smoltcp does, and controls smoltcp by three means:
//! the receive window that it sees; its retransmission timer, which makes it send again from the
//! first number that is not acknowledged; and the device, which leaves out everything that is not
//! lost.

use crate::congestion::Window;
use seikan_wire::tcp;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Window scale towards smoltcp: windows are multiples of 64 bytes up to 4 MiB, the largest send buffer.
pub(crate) const SCALE: u8 = 6;
/// Minimum timeout before everything is sent again, as in Linux; RFC 6298 requires one second.
const TIMEOUT_MIN: Duration = Duration::from_millis(200);
const TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// Timeout before a round trip has been measured.
const TIMEOUT_INITIAL: Duration = Duration::from_secs(1);
/// Number of consecutive timeouts after which a connection is closed: about ten minutes.
const GIVE_UP_AFTER: u32 = 15;
/// Number of segments acknowledged selectively above a hole, or of duplicate acknowledgements, that
/// indicates a loss (RFC 6675).
const DUPLICATES: u32 = 3;
/// Maximum number of ranges that are remembered, of each kind.
const MAX_RANGES: usize = 256;
/// Maximum number of packets whose times of sending are remembered.
const MAX_TIMES: usize = 1024;

/// A range of sequence numbers: the first number, and the number after the last.
pub(crate) type Range = (u32, u32);

/// An action that smoltcp must be made to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// None besides what smoltcp does by itself.
    None,
    /// Send again, starting with the first number that is not acknowledged.
    Rewind,
    /// Make the far end answer, because its window is closed.
    Probe,
    /// End the connection.
    GiveUp,
}

/// A segment that smoltcp has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    pub seq: u32,
    /// Length of the segment in sequence numbers: payload, SYN and FIN.
    pub length: u32,
    pub is_syn: bool,
}

/// The sending side of an established connection.
#[derive(Clone, Debug)]
pub(crate) struct Sender {
    mss: u32,
    window: Window,
    /// `una` is the first number that is not acknowledged, `next` the number after the last one
    /// sent.
    una: u32,
    next: u32,
    /// The number after the last one that smoltcp has sent since it last started to send again.
    position: u32,
    /// The window announced by the far end, in bytes.
    peer_window: usize,
    /// Whether the far end acknowledges selectively.
    selective: bool,
    /// Ranges acknowledged selectively, in order.
    ranges: Vec<Range>,
    /// Ranges sent again in this recovery, in order.
    repaired: Vec<Range>,
    duplicates: u32,
    recovery: Option<Recovery>,
    /// Times at which packets were sent, each with the sequence number after the packet.
    times: VecDeque<(u32, Instant)>,
    round_end: u32,
    /// Whether the congestion window has limited the sender, in this round and in the one before.
    limited: bool,
    was_limited: bool,
    rtt: Option<(Duration, Duration)>,
    /// Consecutive timeouts without an answer.
    timeouts: u32,
    /// Probes sent since the far end closed its window.
    probes: u32,
    timeout_at: Option<Instant>,
    sent_at: Option<Instant>,
}

/// A loss that is being repaired.
#[derive(Clone, Copy, Debug)]
struct Recovery {
    /// The recovery ends when this number is acknowledged.
    end: u32,
    /// Everything below this number that is not acknowledged counts as lost.
    lost: u32,
    /// The value of `next` when something was sent again for the first time.
    mark: u32,
    /// Whether one segment may be sent although the window is full.
    first: bool,
}

pub(crate) fn is_before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

impl Sender {
    /// Creates the state when the far end's SYN has announced its MSS. `first` is the sequence
    /// number of the first byte to send.
    pub fn new(mss: u16, first: u32, selective: bool) -> Sender {
        Sender {
            mss: mss.into(),
            window: Window::new(mss),
            una: first,
            next: first,
            position: first,
            peer_window: 0,
            selective,
            ranges: Vec::new(),
            repaired: Vec::new(),
            duplicates: 0,
            recovery: None,
            times: VecDeque::new(),
            round_end: first,
            limited: false,
            was_limited: false,
            rtt: None,
            timeouts: 0,
            probes: 0,
            timeout_at: None,
            sent_at: None,
        }
    }

    /// Returns the first number that is not acknowledged.
    pub fn una(&self) -> u32 {
        self.una
    }

    /// When [`Sender::on_time`] has something to do.
    pub fn wakeup(&self) -> Option<Instant> {
        self.timeout_at
    }

    /// The far end's window in bytes.
    pub fn peer_window(&self) -> usize {
        self.peer_window
    }

    /// Whether the far end has closed its window.
    pub fn is_closed(&self) -> bool {
        self.peer_window == 0
    }

    fn flight(&self) -> u32 {
        self.next.wrapping_sub(self.una)
    }

    /// Returns the receive window for smoltcp, in bytes from [`Sender::una`] on. The window field
    /// can express only multiples of `unit` bytes.
    pub fn allowed(&self, unit: usize) -> usize {
        let allowed = match &self.recovery {
            // Round up: the bytes after a hole have arrived, so nothing is sent there.
            Some(recovery) => self.allowed_in(recovery).next_multiple_of(unit),
            None => self.whole(self.window.bytes()),
        };
        // With a window of 0, smoltcp would probe with the next byte instead of sending again what
        // was lost (RFC 6582 always permits the first segment).
        allowed.max(self.mss as usize).min(self.peer_window)
    }

    /// Rounds down to whole segments: a window that is a few bytes larger would cause a segment of
    /// only these bytes.
    fn whole(&self, bytes: usize) -> usize {
        bytes / self.mss as usize * self.mss as usize
    }

    /// Returns the window during a recovery, in bytes: holes first, then new data, as the pipe of
    /// RFC 6675 permits.
    fn allowed_in(&self, recovery: &Recovery) -> usize {
        let above = self.next.wrapping_sub(recovery.lost);
        let arrived = bytes_above(&self.ranges, recovery.lost);
        let pipe = above.saturating_sub(arrived) + bytes(&self.repaired);
        let mut room = self.whole(self.window.bytes().saturating_sub(pipe as usize)) as u32;
        if recovery.first {
            room = room.max(self.mss);
        }
        for (start, end) in self.holes(recovery.lost) {
            let length = end.wrapping_sub(start);
            if length > room {
                return start.wrapping_add(room).wrapping_sub(self.una) as usize;
            }
            room -= length;
        }
        self.flight() as usize + room as usize
    }

    /// Returns the lost ranges that have not been sent again.
    fn holes(&self, lost: u32) -> Vec<Range> {
        subtract(
            (self.una, lost),
            &merged(self.una, &self.ranges, &self.repaired),
        )
    }

    /// Returns the ranges that the device leaves out when smoltcp sends them again.
    pub fn not_lost(&self) -> Vec<Range> {
        match &self.recovery {
            Some(recovery) if self.position != self.next => {
                let known = merged(self.una, &self.ranges, &self.repaired);
                merged(self.una, &known, &[(recovery.lost, self.next)])
            }
            _ => Vec::new(),
        }
    }

    /// Returns the window field for smoltcp in the far end's SYN, whose window is not scaled.
    pub fn allowed_first(&mut self, peer_window: u16) -> u16 {
        self.peer_window = peer_window.into();
        u16::try_from(self.allowed(1)).unwrap_or(u16::MAX)
    }

    /// Records how far smoltcp has sent, whether or not the device left something out.
    pub fn on_position(&mut self, position: u32) {
        self.position = position;
    }

    /// Records a segment that was sent.
    pub fn on_sent(&mut self, sent: &Sent, now: Instant) {
        if sent.length == 0 {
            return;
        }
        let end = sent.seq.wrapping_add(sent.length);
        let paused = |at: Instant| now.saturating_duration_since(at) > self.timeout();
        if self.flight() == 0 && self.sent_at.is_some_and(paused) {
            self.window.on_idle();
        }
        self.sent_at = Some(now);
        if is_before(self.next, end) {
            self.next = end;
            if self.times.len() < MAX_TIMES && self.recovery.is_none() {
                self.times.push_back((end, now));
            }
        } else {
            // The acknowledgement could belong to either transmission (Karn's algorithm).
            self.times.clear();
            // Probes of a closed window send again without a recovery.
            if let Some(recovery) = &mut self.recovery {
                recovery.first = false;
                self.repaired = merged(self.una, &self.repaired, &[(sent.seq, end)]);
            }
        }
        // The window limits the sender if one more segment would not fit.
        self.limited |= self.flight() as usize + 2 * self.mss as usize > self.window.bytes();
        if self.timeout_at.is_none() {
            self.timeout_at = Some(now + self.timeout());
        }
    }

    /// Reads an acknowledgement; `header` is a TCP header with its options, of a segment with `payload` bytes, and
    /// `peer_window` its window in bytes.
    pub fn on_ack(
        &mut self,
        header: &[u8],
        payload: usize,
        peer_window: usize,
        now: Instant,
    ) -> Action {
        let ack = tcp::acknowledged(header);
        if is_before(ack, self.una) || is_before(self.next, ack) {
            return Action::None;
        }
        let same_window = peer_window == self.peer_window;
        let opens = self.is_closed() && peer_window > 0;
        self.peer_window = peer_window;
        let acked = ack.wrapping_sub(self.una);
        self.una = ack;
        if opens || self.is_closed() {
            // A far end may keep its window closed as long as it answers (RFC 9293 section 3.8.6.1).
            self.timeouts = 0;
        }
        if !self.is_closed() {
            self.probes = 0;
        }
        let news = self.read_ranges(header.get(20..).unwrap_or_default());
        if acked > 0 {
            return self.on_progress(acked, now);
        }
        if self.flight() == 0 {
            self.timeout_at = None;
            return Action::None;
        }
        if opens || self.timeout_at.is_none() {
            self.timeout_at = Some(now + self.timeout());
        }
        // An acknowledgement that reports nothing new was caused by data that arrived twice.
        if news || payload == 0 && same_window && !self.selective {
            self.duplicates += 1;
            return self.on_duplicate();
        }
        Action::None
    }

    fn on_progress(&mut self, acked: u32, now: Instant) -> Action {
        self.duplicates = 0;
        self.timeouts = 0;
        let mut sent_at = None;
        while let Some((end, at)) = self.times.front().copied()
            && !is_before(self.una, end)
        {
            sent_at = Some(at);
            self.times.pop_front();
        }
        if let Some(at) = sent_at {
            self.sample(now.saturating_duration_since(at));
        }
        if !is_before(self.una, self.round_end) {
            self.window.on_round();
            self.round_end = self.next;
            self.was_limited = std::mem::take(&mut self.limited);
        }
        let in_flight = self.flight() > 0;
        self.timeout_at = in_flight.then(|| now + self.timeout());
        let srtt = self.rtt.map_or(TIMEOUT_INITIAL, |(srtt, _)| srtt);
        let limited = self.limited || self.was_limited;
        match self.recovery {
            Some(recovery) if is_before(self.una, recovery.end) => {
                if self.window.is_slow_start() {
                    self.window.on_ack(acked as usize, true, srtt, now);
                }
                let una = self.una;
                self.repaired.retain_mut(|range| keep_above(range, una));
                if !self.selective {
                    self.extend(self.una.wrapping_add(self.mss));
                }
                self.repair()
            }
            Some(_) => {
                self.recovery = None;
                self.repaired.clear();
                Action::None
            }
            None => {
                self.window.on_ack(acked as usize, limited, srtt, now);
                Action::None
            }
        }
    }

    fn on_duplicate(&mut self) -> Action {
        if self.recovery.is_some() {
            return self.repair();
        }
        if self.duplicates < DUPLICATES && bytes(&self.ranges) < DUPLICATES * self.mss {
            return Action::None;
        }
        self.window.on_loss();
        self.begin(self.una.wrapping_add(self.mss));
        self.repair()
    }

    fn begin(&mut self, lost: u32) {
        self.repaired.clear();
        self.times.clear();
        let lost = if is_before(self.next, lost) {
            self.next
        } else {
            lost
        };
        self.recovery = Some(Recovery {
            end: self.next,
            lost,
            mark: self.next,
            first: true,
        });
    }

    fn extend(&mut self, lost: u32) {
        let next = self.next;
        if let Some(recovery) = &mut self.recovery
            && is_before(recovery.lost, lost)
        {
            recovery.lost = if is_before(next, lost) { next } else { lost };
        }
    }

    /// Determines what is lost now. Returns [`Action::Rewind`] if smoltcp has already passed a part
    /// of it.
    fn repair(&mut self) -> Action {
        // A hole below three segments that have arrived is lost.
        let mut arrived = 0;
        for (start, end) in self.ranges.clone().iter().rev() {
            arrived += end.wrapping_sub(*start);
            if arrived >= DUPLICATES * self.mss {
                self.extend(*start);
                break;
            }
        }
        let highest = self.ranges.last().map(|(_, end)| *end);
        let Some(recovery) = &mut self.recovery else {
            return Action::None;
        };
        // Bytes that were sent after the repairs have arrived, but the repairs have not.
        let margin = recovery.mark.wrapping_add(DUPLICATES * self.mss);
        if highest.is_some_and(|end| is_before(margin, end)) {
            recovery.mark = self.next;
            recovery.first = true;
            self.repaired.clear();
        }
        let lost = recovery.lost;
        match self.holes(lost).first() {
            Some((start, _)) if is_before(*start, self.position) => Action::Rewind,
            _ => Action::None,
        }
    }

    /// Handles the timer.
    pub fn on_time(&mut self, now: Instant) -> Action {
        if self.timeout_at.is_none_or(|at| at > now) {
            return Action::None;
        }
        if self.flight() == 0 {
            self.timeout_at = None;
            return Action::None;
        }
        self.timeouts += 1;
        if self.timeouts >= GIVE_UP_AFTER {
            self.timeout_at = None;
            return Action::GiveUp;
        }
        if self.is_closed() {
            self.probes += 1;
            self.timeout_at = Some(now + self.timeout());
            return Action::Probe;
        }
        self.window.on_timeout(self.timeouts == 1);
        self.duplicates = 0;
        // The far end may have discarded what it had acknowledged selectively (RFC 2018 section 8).
        self.ranges.clear();
        self.begin(self.next);
        self.timeout_at = Some(now + self.timeout());
        Action::Rewind
    }

    /// Updates the round-trip estimate (RFC 6298 section 2).
    fn sample(&mut self, rtt: Duration) {
        self.rtt = Some(match self.rtt {
            None => (rtt, rtt / 2),
            Some((srtt, variance)) => (
                (srtt * 7 + rtt) / 8,
                (variance * 3 + srtt.abs_diff(rtt)) / 4,
            ),
        });
        self.window.on_sample(rtt);
    }

    fn timeout(&self) -> Duration {
        let timeout = match self.rtt {
            None => TIMEOUT_INITIAL,
            Some((srtt, variance)) => srtt + (variance * 4).max(TIMEOUT_MIN),
        };
        (timeout * (1 << self.timeouts.max(self.probes).min(10))).min(TIMEOUT_MAX)
    }

    /// Reads the SACK option (RFC 2018). Returns whether it reports something new.
    fn read_ranges(&mut self, options: &[u8]) -> bool {
        let una = self.una;
        let before = bytes(&self.ranges);
        self.ranges.retain_mut(|range| keep_above(range, una));
        for block in sack_blocks(options) {
            // Ignore blocks of what is acknowledged already (RFC 2883), and of what was not sent.
            let (start, end) = (block.0.wrapping_sub(una), block.1.wrapping_sub(una));
            let is_valid = start < end && end <= self.flight();
            if is_valid && self.ranges.len() < MAX_RANGES {
                self.ranges = merged(una, &self.ranges, &[block]);
            }
        }
        bytes(&self.ranges) > before
    }
}

fn bytes(ranges: &[Range]) -> u32 {
    ranges.iter().map(|(a, b)| b.wrapping_sub(*a)).sum()
}

fn bytes_above(ranges: &[Range], from: u32) -> u32 {
    let above = ranges.iter().filter(|(start, _)| !is_before(*start, from));
    above.map(|(a, b)| b.wrapping_sub(*a)).sum()
}

/// Removes the part of a range below `from`. Returns whether anything is left.
fn keep_above(range: &mut Range, from: u32) -> bool {
    if is_before(range.0, from) {
        range.0 = from;
    }
    is_before(range.0, range.1)
}

/// Joins two lists of ranges, in order of their distance from `una`.
fn merged(una: u32, a: &[Range], b: &[Range]) -> Vec<Range> {
    let mut all: Vec<Range> = a.iter().chain(b).filter(|(a, b)| a != b).copied().collect();
    // Numbers wrap, so comparing them with each other would be no total order.
    all.sort_by_key(|(start, _)| start.wrapping_sub(una) as i32);
    all.dedup_by(|next, range| {
        let joined = !is_before(range.1, next.0);
        if joined && is_before(range.1, next.1) {
            range.1 = next.1;
        }
        joined
    });
    all
}

/// Returns a range without others, which are in order.
pub(crate) fn subtract(range: Range, others: &[Range]) -> Vec<Range> {
    let (mut at, end) = range;
    let mut left = Vec::new();
    for (start, stop) in others {
        if !is_before(*start, end) {
            break;
        }
        if is_before(at, *start) {
            left.push((at, *start));
        }
        if is_before(at, *stop) {
            at = *stop;
        }
    }
    if is_before(at, end) {
        left.push((at, end));
    }
    left
}

/// Blocks of the SACK option, at most four.
fn sack_blocks(options: &[u8]) -> impl Iterator<Item = (u32, u32)> {
    let blocks = option(options, 5).unwrap_or_default();
    blocks.chunks_exact(8).map(|block| {
        let number = |at: usize| {
            u32::from_be_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        };
        (number(0), number(4))
    })
}

/// The content of a TCP option, without its kind and length.
fn option(options: &[u8], kind: u8) -> Option<&[u8]> {
    let at = option_at(options, kind)?;
    options.get(at + 2..at + usize::from(options[at + 1]))
}

/// Where a TCP option with a length of at least 2 begins.
fn option_at(options: &[u8], kind: u8) -> Option<usize> {
    let mut at = 0;
    loop {
        match (*options.get(at)?, options.get(at + 1)) {
            (0, _) => return None,
            (1, _) => at += 1,
            (found, Some(length)) if *length >= 2 => {
                if found == kind {
                    return Some(at);
                }
                at += usize::from(*length);
            }
            _ => return None,
        }
    }
}

/// Whether a SYN permits selective acknowledgements.
pub(crate) fn is_selective(options: &[u8]) -> bool {
    option_at(options, 4).is_some()
}

/// Replaces the window scale of a SYN by [`SCALE`]; returns the one that it had. Its checksum is not updated.
pub(crate) fn replace_scale(options: &mut [u8]) -> Option<u8> {
    let at = option_at(options, 3)?;
    let scale = options.get_mut(at + 2)?;
    // RFC 7323 section 2.3.
    Some(std::mem::replace(scale, SCALE).min(14))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1000;
    const RTT: Duration = Duration::from_millis(50);

    struct Test {
        sender: Sender,
        now: Instant,
        peer_window: usize,
    }

    impl Test {
        fn new() -> Test {
            // The numbers wrap on the way.
            let mut sender = Sender::new(MSS as u16, START, true);
            sender.peer_window = 1 << 20;
            Test {
                sender,
                now: Instant::now(),
                peer_window: 1 << 20,
            }
        }

        fn send(&mut self, segments: u32) {
            for _ in 0..segments {
                let sent = Sent {
                    seq: self.sender.next,
                    length: MSS,
                    is_syn: false,
                };
                self.sender.on_sent(&sent, self.now);
                self.sender.on_position(self.sender.next);
            }
        }

        /// Rewinds; returns the segments that are sent again.
        fn rewind(&mut self) -> Vec<(u32, u32)> {
            let allowed = self.sender.allowed(1) as u32;
            let una = self.sender.una;
            self.sender.on_position(una);
            let end = una.wrapping_add(allowed.min(self.sender.flight()));
            let pieces = subtract((una, end), &self.sender.not_lost());
            for (seq, end) in &pieces {
                let sent = Sent {
                    seq: *seq,
                    length: end.wrapping_sub(*seq),
                    is_syn: false,
                };
                self.sender.on_sent(&sent, self.now);
            }
            self.sender.on_position(end);
            let number = |n: u32| n.wrapping_sub(START) / MSS;
            pieces
                .iter()
                .map(|(a, b)| (number(*a), number(*b)))
                .collect()
        }

        /// An acknowledgement of that many segments, with ranges of segments.
        fn ack(&mut self, segments: u32, ranges: &[(u32, u32)]) -> Action {
            let number = |segment: u32| START.wrapping_add(segment * MSS).to_be_bytes();
            let mut header = vec![0; 20];
            header[8..12].copy_from_slice(&number(segments));
            if !ranges.is_empty() {
                header.extend([1, 1, 5, 2 + 8 * ranges.len() as u8]);
                for (start, end) in ranges {
                    header.extend(number(*start));
                    header.extend(number(*end));
                }
            }
            self.sender.on_ack(&header, 0, self.peer_window, self.now)
        }
    }

    const START: u32 = u32::MAX - 5 * MSS;

    #[test]
    fn ranges_that_were_not_sent_are_ignored() {
        let mut test = Test::new();
        test.send(10);
        for (start, end) in [(1, (1 << 31) + 1), (0, 1), (1 << 31, 1)] {
            let [start, end] = [start, end].map(|n: u32| test.sender.next.wrapping_add(n));
            let mut options = vec![1, 1, 5, 10];
            options.extend(start.to_be_bytes());
            options.extend(end.to_be_bytes());
            assert!(!test.sender.read_ranges(&options));
            assert_eq!(test.sender.ranges, []);
        }
    }

    #[test]
    fn probes_of_a_closed_window_are_no_repairs() {
        let mut test = Test::new();
        for _ in 0..3 {
            let seq = test.sender.una;
            let probe = Sent {
                seq,
                length: 1,
                is_syn: false,
            };
            for _ in 0..2 {
                test.sender.on_sent(&probe, test.now);
            }
            test.sender.on_position(test.sender.next);
            let mut header = [0; 20];
            header[8..12].copy_from_slice(&seq.wrapping_add(1).to_be_bytes());
            test.sender.on_ack(&header, 0, 1 << 20, test.now);
            assert_eq!(test.sender.repaired, []);
        }
    }

    #[test]
    fn ranges_all_around_the_numbers_have_one_order() {
        let range = |n: u32| {
            // Prime to 64, so that they come in no order.
            let start = START.wrapping_add((n * 37 % 64) << 26);
            (start, start.wrapping_add(1))
        };
        let (a, b): (Vec<_>, Vec<_>) = (0..64)
            .map(range)
            .partition(|(start, _)| start >> 26 & 1 == 0);
        let all = merged(START, &a, &b);
        assert_eq!(all, merged(START, &b, &a));
        let distances = all
            .iter()
            .map(|(start, _)| start.wrapping_sub(START) as i32);
        assert!(distances.is_sorted());
        assert_eq!(all.len(), 64);
    }

    #[test]
    fn three_segments_behind_a_hole_make_a_loss() {
        let mut test = Test::new();
        test.send(10);
        test.now += RTT;
        assert_eq!(test.ack(1, &[(2, 3)]), Action::None);
        assert_eq!(test.ack(1, &[(2, 4)]), Action::None);
        assert_eq!(test.ack(1, &[(2, 5)]), Action::Rewind);
        assert_eq!(test.rewind(), [(1, 2)]);
        assert_eq!(test.ack(1, &[(2, 6)]), Action::None);
        // 0.7 of the window, which was 11 segments. On the path are the repair and segments 6 to 9.
        assert_eq!(test.sender.allowed(1) as u32, (9 + 2) * MSS);
        assert_eq!(test.ack(10, &[]), Action::None);
        assert_eq!(test.sender.allowed(1) as u32, 7 * MSS);
    }

    #[test]
    fn one_acknowledgement_of_a_merged_packet_is_enough() {
        let mut test = Test::new();
        test.send(10);
        assert_eq!(test.ack(0, &[(1, 10)]), Action::Rewind);
    }

    #[test]
    fn all_holes_of_a_burst_are_sent_again_and_nothing_else() {
        let mut test = Test::new();
        test.send(20);
        test.ack(0, &[(1, 2)]);
        test.ack(0, &[(4, 5)]);
        assert_eq!(test.ack(0, &[(6, 9)]), Action::Rewind);
        // The first one at once, the others as acknowledgements say that packets have left the path.
        assert_eq!(test.rewind(), [(0, 1)]);
        for top in 10..=18 {
            assert_eq!(test.ack(0, &[(6, top)]), Action::None);
        }
        let reduced = test.sender.window.bytes();
        assert_eq!(test.rewind(), [(2, 4), (5, 6)]);
        assert_eq!(test.ack(4, &[(6, 18)]), Action::None);
        assert_eq!(
            test.sender.window.bytes(),
            reduced,
            "one reduction for a burst"
        );
        assert_eq!(test.ack(20, &[]), Action::None);
        assert!(test.sender.recovery.is_none());
    }

    #[test]
    fn packets_that_arrive_twice_are_no_loss() {
        let mut test = Test::new();
        test.send(10);
        for _ in 0..5 {
            // RFC 2883: the first block is of what arrived again.
            assert_eq!(test.ack(2, &[(0, 1)]), Action::None);
        }
    }

    #[test]
    fn a_far_end_without_selective_acknowledgements_repeats_itself() {
        let mut test = Test::new();
        test.sender.selective = false;
        test.send(10);
        let actions = [1, 1, 1, 1].map(|n| test.ack(n, &[]));
        assert_eq!(
            actions,
            [Action::None, Action::None, Action::None, Action::Rewind]
        );
        assert_eq!(test.rewind(), [(1, 2)]);
        // RFC 6582: a partial acknowledgement shows the next hole.
        assert_eq!(test.ack(4, &[]), Action::Rewind);
        assert_eq!(test.rewind(), [(4, 5)]);
    }

    #[test]
    fn a_lost_repair_is_sent_again() {
        let mut test = Test::new();
        test.send(10);
        assert_eq!(test.ack(0, &[(1, 5)]), Action::Rewind);
        assert_eq!(test.rewind(), [(0, 1)]);
        test.send(8);
        assert_eq!(test.ack(0, &[(1, 13)]), Action::None);
        assert_eq!(test.ack(0, &[(1, 14)]), Action::Rewind);
        assert_eq!(test.rewind(), [(0, 1)]);
    }

    #[test]
    fn silence_sends_everything_later_and_later() {
        let mut test = Test::new();
        test.send(10);
        test.now += RTT;
        test.ack(1, &[]);
        let mut waits = Vec::new();
        loop {
            let at = test.sender.wakeup().unwrap();
            waits.push(at - test.now);
            test.now = at;
            match test.sender.on_time(at) {
                Action::Rewind => assert_eq!(test.rewind(), [(1, 2)]),
                action => {
                    assert_eq!(action, Action::GiveUp);
                    break;
                }
            }
        }
        assert_eq!(waits[0], RTT + TIMEOUT_MIN);
        assert_eq!(waits[1], 2 * waits[0]);
        assert_eq!(waits.last(), Some(&TIMEOUT_MAX));
        assert_eq!(waits.len() as u32, GIVE_UP_AFTER);
        assert_eq!(test.sender.wakeup(), None, "nothing is left to do");
    }

    /// Bytes are lost, and the far end closes its window before they can be sent again.
    #[test]
    fn a_closed_window_is_probed_as_long_as_the_far_end_answers() {
        let mut test = Test::new();
        test.send(2);
        test.peer_window = 0;
        test.ack(1, &[]);
        let window = test.sender.window.bytes();
        let mut wait = Duration::ZERO;
        // Every second probe or its answer is lost.
        for i in 0..4 * GIVE_UP_AFTER {
            let at = test.sender.wakeup().expect("the next probe");
            wait = at - test.now;
            test.now = at;
            assert_eq!(test.sender.on_time(at), Action::Probe, "{i}");
            if i % 2 == 0 {
                assert_eq!(test.ack(1, &[]), Action::None);
            }
        }
        assert_eq!(wait, TIMEOUT_MAX);
        assert_eq!(test.sender.window.bytes(), window, "no congestion");
        test.peer_window = 1 << 20;
        test.ack(1, &[]);
        let at = test.sender.wakeup().unwrap();
        assert!(at - test.now < 2 * TIMEOUT_INITIAL);
        test.now = at;
        assert_eq!(test.sender.on_time(at), Action::Rewind);
        assert_eq!(test.rewind(), [(1, 2)]);
    }

    #[test]
    fn a_far_end_that_vanishes_behind_a_closed_window_is_given_up() {
        let mut test = Test::new();
        test.send(2);
        test.peer_window = 0;
        test.ack(1, &[]);
        for _ in 1..GIVE_UP_AFTER {
            let at = test.sender.wakeup().unwrap();
            assert_eq!(test.sender.on_time(at), Action::Probe);
        }
        let at = test.sender.wakeup().unwrap();
        assert_eq!(test.sender.on_time(at), Action::GiveUp);
    }

    #[test]
    fn everything_acknowledged_stops_the_timer() {
        let mut test = Test::new();
        test.send(2);
        assert!(test.sender.wakeup().is_some());
        test.ack(2, &[]);
        assert_eq!(test.sender.wakeup(), None);
    }

    #[test]
    fn acknowledgements_of_what_was_not_sent_change_nothing() {
        let mut test = Test::new();
        test.send(2);
        assert_eq!(test.ack(3, &[]), Action::None);
        assert_eq!(test.ack(0, &[(1, 9)]), Action::None);
        assert_eq!((test.sender.una(), test.sender.ranges.len()), (START, 0));
    }

    #[test]
    fn the_scale_of_a_syn_is_replaced() {
        let mut options = [2, 4, 5, 180, 1, 3, 3, 10];
        assert_eq!(replace_scale(&mut options), Some(10));
        assert_eq!(options[7], SCALE);
        for cut in [&mut [3, 3][..], &mut [3], &mut [2, 0], &mut [1, 1, 1]] {
            assert_eq!(replace_scale(cut), None);
        }
    }

    proptest::proptest! {
        /// Hostile acknowledgements leave the numbers in order and the work bounded.
        #[test]
        fn hostile_acknowledgements_keep_the_order(
            acks in proptest::collection::vec((proptest::prelude::any::<u32>(), proptest::collection::vec(proptest::prelude::any::<u8>(), 0..40)), 1..50)
        ) {
            let mut test = Test::new();
            for (i, (ack, options)) in acks.iter().enumerate() {
                test.send(i as u32 % 5);
                let mut header = vec![0; 20];
                let ack = START.wrapping_add(ack % (20 * MSS));
                header[8..12].copy_from_slice(&ack.to_be_bytes());
                header.extend(options);
                test.sender.on_ack(&header, 0, 1 << 20, test.now);
                let sender = &test.sender;
                assert!(!is_before(sender.next, sender.una));
                assert!(sender.ranges.len() <= MAX_RANGES);
                let mut last = sender.una;
                for (start, end) in &sender.ranges {
                    assert!(!is_before(*start, last) && is_before(*start, *end) && !is_before(sender.next, *end));
                    last = *end;
                }
            }
        }
    }
}
