//! The sending side of a connection: how much is sent, and what is sent again.
//!
//! smoltcp's own congestion control leaves a path of 50 ms and 100 Mbit/s at 9 Mbit/s: it reads no selective
//! acknowledgements, reduces its window once for each loss of a burst, counts an acknowledgement of a super-packet as one of
//! a segment, and waits for a second at least. So smoltcp runs without one. This module reads the acknowledgements before
//! smoltcp does, and steers it: by the receive window that it sees, by duplicate acknowledgements, of which three make it
//! send the first segment again, and by its retransmission timer, which makes it send everything again.

use crate::congestion::Window;
use seikan_wire::tcp;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Window scale towards smoltcp: windows are multiples of 64 bytes up to 4 MiB, the largest send buffer.
pub(crate) const SCALE: u8 = 6;
/// Least timeout before everything is sent again, as in Linux; RFC 6298 has a second.
const TIMEOUT_MIN: Duration = Duration::from_millis(200);
const TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// Timeout before a round trip has been measured.
const TIMEOUT_INITIAL: Duration = Duration::from_secs(1);
/// Timeouts in a row after which a connection is given up: about ten minutes.
const GIVE_UP_AFTER: u32 = 15;
/// Bytes acknowledged selectively, in segments, or duplicate acknowledgements, that mean a loss (RFC 6675).
const DUPLICATES: u32 = 3;
/// Holes above which everything is sent again. One hole is closed per round trip, while new data flows.
const MANY_HOLES: usize = 4;
/// Most ranges that are remembered as acknowledged selectively.
const MAX_RANGES: usize = 64;
/// Most packets whose times are remembered.
const MAX_TIMES: usize = 1024;

/// What smoltcp has to be made to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Nothing but what it does by itself.
    None,
    /// Send the first segment that is not acknowledged.
    First,
    /// Send everything that is not acknowledged.
    Everything,
    /// End the connection.
    GiveUp,
}

/// A segment that smoltcp has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    pub seq: u32,
    /// Its length in sequence numbers: payload, SYN and FIN.
    pub length: u32,
    pub is_syn: bool,
}

/// The sending side of an established connection.
#[derive(Clone, Debug)]
pub(crate) struct Sender {
    mss: u32,
    window: Window,
    /// First number that is not acknowledged; the number after the last one sent.
    una: u32,
    next: u32,
    /// The window that the far end has told, in bytes.
    peer_window: usize,
    /// Ranges acknowledged selectively, in order, relative to no number: they are pruned by `una`.
    ranges: Vec<(u32, u32)>,
    duplicates: u32,
    recovery: Option<Recovery>,
    /// Times of packets: the number after them.
    times: VecDeque<(u32, Instant)>,
    round_end: u32,
    /// Whether the congestion window has limited the sender, in this round and in the one before.
    limited: bool,
    was_limited: bool,
    rtt: Option<(Duration, Duration)>,
    timeouts: u32,
    timeout_at: Option<Instant>,
    sent_at: Option<Instant>,
}

/// A loss that is being repaired.
#[derive(Clone, Copy, Debug)]
struct Recovery {
    /// Ends when this number is acknowledged.
    end: u32,
    /// Whether everything is sent again.
    everything: bool,
    /// The number after the last one sent when the first segment was sent again.
    mark: u32,
}

fn is_before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

impl Sender {
    /// Begins when the far end's SYN has told its MSS; `first` is the number of the first byte to send.
    pub fn new(mss: u16, first: u32) -> Sender {
        Sender {
            mss: mss.into(),
            window: Window::new(mss),
            una: first,
            next: first,
            peer_window: 0,
            ranges: Vec::new(),
            duplicates: 0,
            recovery: None,
            times: VecDeque::new(),
            round_end: first,
            limited: false,
            was_limited: false,
            rtt: None,
            timeouts: 0,
            timeout_at: None,
            sent_at: None,
        }
    }

    /// First number that is not acknowledged.
    pub fn una(&self) -> u32 {
        self.una
    }

    /// When [`Sender::on_time`] has something to do.
    pub fn wakeup(&self) -> Option<Instant> {
        self.timeout_at
    }

    fn flight(&self) -> u32 {
        self.next.wrapping_sub(self.una)
    }

    /// The receive window for smoltcp, in bytes: what may be sent from [`Sender::una`] on.
    pub fn allowed(&self) -> usize {
        let mut allowed = self.window.bytes();
        match (&self.recovery, self.ranges.last()) {
            // What was acknowledged selectively, and the holes below, have left the path (RFC 6675).
            (Some(recovery), Some((_, end))) if !recovery.everything => {
                allowed += end.wrapping_sub(self.una) as usize;
            }
            _ => {}
        }
        // Whole segments: a window of a few more bytes would have a segment of these bytes sent.
        let mss = self.mss as usize;
        let whole = (allowed / mss).max(1) * mss;
        whole.min(self.peer_window)
    }

    /// The window for smoltcp when the far end's SYN, whose window is not scaled, is read.
    pub fn allowed_first(&mut self, peer_window: u16) -> u16 {
        self.peer_window = peer_window.into();
        u16::try_from(self.allowed()).unwrap_or(u16::MAX)
    }

    /// Notes a segment that smoltcp has sent.
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
            // The acknowledgement could be that of either (Karn).
            self.times.clear();
        }
        // A segment more would not have fit.
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
        self.peer_window = peer_window;
        let acked = ack.wrapping_sub(self.una);
        self.una = ack;
        let news = self.read_ranges(header.get(20..).unwrap_or_default());
        if acked > 0 {
            return self.on_progress(acked, now);
        }
        if self.flight() == 0 {
            self.timeout_at = None;
            return Action::None;
        }
        if peer_window == 0 {
            // smoltcp probes the window.
            self.timeout_at = None;
        } else if self.timeout_at.is_none() {
            self.timeout_at = Some(now + self.timeout());
        }
        if payload == 0 && (same_window || news) {
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
                if recovery.everything {
                    if self.window.is_slow_start() {
                        self.window.on_ack(acked as usize, limited, srtt, now);
                    }
                    return Action::None;
                }
                self.repair()
            }
            Some(_) => {
                self.recovery = None;
                Action::None
            }
            None => {
                self.window.on_ack(acked as usize, limited, srtt, now);
                Action::None
            }
        }
    }

    fn on_duplicate(&mut self) -> Action {
        let selective: u32 = self.ranges.iter().map(|(a, b)| b.wrapping_sub(*a)).sum();
        match self.recovery {
            None => {
                if self.duplicates < DUPLICATES && selective < DUPLICATES * self.mss {
                    return Action::None;
                }
                self.window.on_loss();
                self.recovery = Some(Recovery {
                    end: self.next,
                    everything: false,
                    mark: self.next,
                });
                self.repair()
            }
            // Bytes that were sent after the repair have arrived, and the repair has not.
            Some(recovery) if !recovery.everything => {
                let margin = recovery.mark.wrapping_add(DUPLICATES * self.mss);
                let highest = self.ranges.last().map(|(_, end)| *end);
                if highest.is_some_and(|end| is_before(margin, end)) {
                    self.repair()
                } else {
                    Action::None
                }
            }
            Some(_) => Action::None,
        }
    }

    /// Repairs the first hole, or all of them if there are many.
    fn repair(&mut self) -> Action {
        let next = self.next;
        let Some(recovery) = &mut self.recovery else {
            return Action::None;
        };
        recovery.mark = next;
        self.times.clear();
        if self.ranges.len() > MANY_HOLES {
            recovery.everything = true;
            recovery.end = next;
            self.window.on_burst();
            return Action::Everything;
        }
        Action::First
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
        self.window.on_timeout(self.timeouts == 0);
        self.timeouts += 1;
        if self.timeouts >= GIVE_UP_AFTER {
            return Action::GiveUp;
        }
        self.duplicates = 0;
        // The far end may have discarded what it had acknowledged selectively (RFC 2018 section 8).
        self.ranges.clear();
        self.times.clear();
        self.recovery = Some(Recovery {
            end: self.next,
            everything: true,
            mark: self.next,
        });
        self.timeout_at = Some(now + self.timeout());
        Action::Everything
    }

    /// RFC 6298 section 2.
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
        (timeout * (1 << self.timeouts.min(10))).min(TIMEOUT_MAX)
    }

    /// Reads the SACK option (RFC 2018); returns whether it told something new.
    fn read_ranges(&mut self, options: &[u8]) -> bool {
        let una = self.una;
        let before: u32 = self.ranges.iter().map(|(a, b)| b.wrapping_sub(*a)).sum();
        for block in sack_blocks(options) {
            let (start, end) = block;
            // Not of what is acknowledged already (RFC 2883), nor of what was not sent.
            let valid =
                is_before(start, end) && !is_before(start, una) && !is_before(self.next, end);
            if valid && self.ranges.len() < MAX_RANGES {
                self.ranges.push(block);
            }
        }
        self.ranges.retain_mut(|(start, end)| {
            if is_before(*start, una) {
                *start = una;
            }
            is_before(*start, *end)
        });
        self.ranges
            .sort_by_key(|(start, _)| start.wrapping_sub(una));
        self.ranges.dedup_by(|next, range| {
            let joined = !is_before(range.1, next.0);
            if joined && is_before(range.1, next.1) {
                range.1 = next.1;
            }
            joined
        });
        let after: u32 = self.ranges.iter().map(|(a, b)| b.wrapping_sub(*a)).sum();
        after > before
    }
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
    }

    impl Test {
        fn new() -> Test {
            // The numbers wrap on the way.
            let mut sender = Sender::new(MSS as u16, START);
            sender.peer_window = 1 << 20;
            Test {
                sender,
                now: Instant::now(),
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
            }
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
            self.sender.on_ack(&header, 0, 1 << 20, self.now)
        }
    }

    const START: u32 = u32::MAX - 5 * MSS;

    #[test]
    fn three_segments_behind_a_hole_make_a_loss() {
        let mut test = Test::new();
        test.send(10);
        test.now += RTT;
        assert_eq!(test.ack(1, &[(2, 3)]), Action::None);
        assert_eq!(test.ack(1, &[(2, 4)]), Action::None);
        assert_eq!(test.ack(1, &[(2, 5)]), Action::First);
        assert_eq!(test.ack(1, &[(2, 6)]), Action::None);
        // 0.7 of the window, which was 11 segments, and what has left the path: number 1 to 5.
        assert_eq!(test.sender.allowed() as u32, (7 + 5) * MSS);
        assert_eq!(test.ack(10, &[]), Action::None);
        assert_eq!(test.sender.allowed() as u32, 7 * MSS);
    }

    #[test]
    fn one_acknowledgement_of_a_merged_packet_is_enough() {
        let mut test = Test::new();
        test.send(10);
        assert_eq!(test.ack(0, &[(1, 10)]), Action::First);
    }

    #[test]
    fn every_partial_acknowledgement_repairs_the_next_hole() {
        let mut test = Test::new();
        test.send(10);
        assert_eq!(test.ack(0, &[(3, 6), (1, 2)]), Action::First);
        let allowed = test.sender.window.bytes();
        assert_eq!(test.ack(2, &[(3, 6)]), Action::First);
        assert_eq!(
            test.sender.window.bytes(),
            allowed,
            "one reduction for a burst"
        );
        assert_eq!(test.ack(10, &[]), Action::None);
        assert!(test.sender.recovery.is_none());
    }

    #[test]
    fn many_holes_are_closed_by_sending_everything() {
        let mut test = Test::new();
        test.send(20);
        for hole in 0..5 {
            test.ack(0, &[(2 * hole + 1, 2 * hole + 2)]);
        }
        assert_eq!(test.ack(1, &[(11, 12)]), Action::Everything);
        assert_eq!(test.ack(2, &[(11, 12)]), Action::None);
    }

    #[test]
    fn a_lost_repair_is_sent_again() {
        let mut test = Test::new();
        test.send(10);
        assert_eq!(test.ack(0, &[(1, 5)]), Action::First);
        test.send(8);
        assert_eq!(test.ack(0, &[(1, 13)]), Action::None);
        assert_eq!(test.ack(0, &[(1, 14)]), Action::First);
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
                Action::Everything => assert_eq!(test.sender.allowed() as u32, MSS),
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
        /// Whatever the far end says, the numbers stay in order and the work bounded.
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
