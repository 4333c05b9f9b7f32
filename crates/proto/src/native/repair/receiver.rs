//! The receiver's side of loss repair: keeps records until their block is complete, restores lost
//! ones, and holds back TCP segments behind a gap.
//!
//! For each frame of a record, the tunnel calls [`Receiver::selects`] to decide whether to process
//! it now, and after the last one [`Receiver::processed`].

use super::flows::{Flows, Segment};
use super::gf256;
use super::parity::{self, Head, MAX_PARITIES, MAX_RECORDS};
use super::verdict::Verdict;
use crate::native::reassembly::Record;
use crate::time::Instant;
use seikan_wire::ip::ECN_CE;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

/// Maximum time for which a segment is held back.
pub const HOLD: Duration = Duration::from_millis(60);
/// Maximum time for which a missing record is still waited for after its parity has arrived without
/// sufficing, or is lost: the record may only be late.
const REORDERING: Duration = Duration::from_millis(3);
/// That time is at most the least round trip divided by this. TCP waits up to as long for a segment
/// that may be late (RACK, RFC 8985, section 6.2 step 4). On a short path, 3 ms would be several
/// round trips in which it does not learn of a loss.
const REORDERINGS_PER_ROUND_TRIP: u32 = 4;
/// Records are kept for this time after a parity record, and while the counter is below
/// [`FIRST_RECORDS`] in the first session of a path.
const KEEP: Duration = Duration::from_secs(2);
const FIRST_RECORDS: u64 = 4200;
/// Maximum gap in the counters that is waited for. In a longer gap, a whole block and its parity
/// are lost.
const MAX_GAP: u64 = (MAX_RECORDS + MAX_PARITIES) as u64;
/// Maximum number of records kept.
pub const MAX_KEPT: usize = 1024;
/// Maximum number of bytes in the records kept.
pub const MAX_BYTES: usize = 2 << 20;
/// Maximum number of unused buffers that are kept, and their maximum size in bytes: that of a
/// record on most paths.
const MAX_SPARE: usize = 64;
const SPARE_BYTES: usize = 2048;
/// Maximum number of blocks that wait for records or parity.
const MAX_BLOCKS: usize = 4;

/// The frames of a record to process now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All.
    All,
    /// All frames except TCP segments behind a gap in their flow, which are held back.
    Unordered,
    /// The TCP segments that were held back.
    Ordered,
}

/// The frames of one record, while they are processed.
#[derive(Clone, Copy, Debug)]
pub struct Selection {
    /// The part to process.
    pub part: Part,
    /// Number of the next frame.
    number: u32,
    /// Segments that were passed on ahead of earlier records: bit n for frame n.
    passed: u64,
    /// A segment is held back.
    waits: bool,
}

impl Selection {
    /// Starts at the first frame of a record. `part` is to be processed; `passed` are the segments
    /// that were passed on earlier, bit n for frame n.
    pub fn new(part: Part, passed: u64) -> Selection {
        Selection {
            part,
            number: 0,
            passed,
            waits: false,
        }
    }
}

/// Loss repair of the newest session.
#[derive(Debug)]
pub struct Receiver {
    /// Local index and [number](crate::session::Session::number) of the session.
    session: Option<(u32, u64)>,
    /// One above the highest counter received.
    next: u64,
    /// When the last parity arrived.
    parity_at: Option<Instant>,
    /// When the last record was kept.
    kept_at: Instant,
    /// The counters before `next`; the last one is `next - 1`.
    slots: VecDeque<Slot>,
    /// Bytes in `slots`.
    bytes: usize,
    /// The lowest counter that is missing and waited for, or `next`.
    edge: u64,
    /// Records before this counter are waited for no longer than reordering takes.
    hurried: u64,
    blocks: VecDeque<Block>,
    /// See [`REORDERING`].
    reordering: Duration,
    /// The newest block, which no other may overlap.
    newest: Range<u64>,
    flows: Flows,
    /// Unused buffers of records that are no longer kept.
    spare: Vec<Vec<u8>>,
    /// Records to process, in order.
    ready: VecDeque<Ready>,
    /// See [`Self::take_restored`].
    new_counters: Vec<u64>,
    /// The session is the first one of the path.
    started: bool,
    /// Nothing is kept any more.
    ended: bool,
    /// Records that were restored.
    pub restored: u64,
    /// Lost records of blocks whose parity did not suffice.
    pub not_restored: u64,
    /// Records that were held back.
    pub held: u64,
    /// Longest time for which a record was held back.
    pub longest: Duration,
    work: u64,
    visited: u64,
}

/// State of one counter.
#[derive(Debug)]
struct Slot {
    state: SlotState,
    /// The frames, if the record is here.
    frames: Vec<u8>,
    /// See [`Selection`].
    passed: u64,
    ecn: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    /// Not here.
    Missing {
        /// Until when the record is waited for.
        until: Instant,
        /// The record was lost in a full queue.
        congestion: bool,
    },
    /// A parity record, or a missing record that is in no block and not waited for.
    Absent,
    /// Here and passed on.
    Passed,
    /// Here, and its segments have been held back since this time.
    Held(Instant),
}

impl Slot {
    fn missing(&self) -> bool {
        matches!(self.state, SlotState::Missing { .. })
    }
}

/// A block with lost records, and its parity so far.
#[derive(Debug)]
struct Block {
    counters: Range<u64>,
    count: u8,
    numbers: Vec<u8>,
    parities: Vec<Vec<u8>>,
}

/// A record that [`Receiver::take_ready`] returns.
#[derive(Debug)]
pub struct Ready {
    /// Session and counter of the record, and the ECN field to apply.
    pub record: Record,
    /// The frames to process.
    pub part: Part,
    /// The segments that were passed on earlier: see [`Selection::new`].
    pub passed: u64,
    /// All frames of the record.
    pub frames: Vec<u8>,
}

impl Default for Receiver {
    fn default() -> Self {
        Receiver {
            session: None,
            next: 0,
            parity_at: None,
            kept_at: Instant::BOOT,
            slots: VecDeque::new(),
            bytes: 0,
            edge: 0,
            hurried: 0,
            reordering: REORDERING,
            blocks: VecDeque::new(),
            newest: 0..0,
            flows: Flows::default(),
            spare: Vec::new(),
            ready: VecDeque::new(),
            new_counters: Vec::new(),
            started: false,
            ended: false,
            restored: 0,
            not_restored: 0,
            held: 0,
            longest: Duration::ZERO,
            work: 0,
            visited: 0,
        }
    }
}

impl Receiver {
    /// Sets the least round trip of the path, if it was measured.
    pub fn set_round_trip(&mut self, round_trip: Option<Duration>) {
        self.reordering = round_trip.map_or(REORDERING, |time| {
            REORDERING.min(time / REORDERINGS_PER_ROUND_TRIP)
        });
    }

    /// Handles a received record that is no replay, and returns the part of it to process now.
    /// `number` is the [number](crate::session::Session::number) of its session, `verdict` the
    /// verdict on the records missing before it. PARITY frames are processed here.
    pub fn record(
        &mut self,
        record: Record,
        number: u64,
        frames: &[u8],
        verdict: Option<Verdict>,
        now: Instant,
    ) -> Part {
        if self.ended {
            return self.behind_ready(record, frames);
        }
        match self.session {
            Some((index, _)) if index == record.session => {}
            // A late record of an earlier session.
            Some((_, newest)) if number <= newest => return Part::All,
            _ => self.start(record, number, now),
        }
        if record.counter >= self.next {
            let keeps = (self.started && record.counter < FIRST_RECORDS)
                || self
                    .parity_at
                    .is_some_and(|at| now.duration_since(at) < KEEP)
                || parity::is_parity(frames);
            if !keeps || record.counter - self.next > MAX_GAP {
                self.flush(now);
                self.next = record.counter + 1;
                self.edge = self.next;
                if !keeps && self.ready.is_empty() {
                    self.free();
                }
                return self.behind_ready(record, frames);
            }
            self.kept_at = now;
            self.extend(record.counter, verdict, now);
            self.push(record, frames, now);
        } else if !self.fill(record, frames, now) {
            return Part::All;
        }
        if parity::is_parity(frames) {
            self.on_parity(record, frames, now);
            return Part::All;
        }
        if record.counter < self.edge {
            // The record is no longer waited for: it arrived late.
            self.solve_with(record.counter, now);
            return Part::All;
        }
        if self.edge == record.counter && self.next == record.counter + 1 && self.ready.is_empty() {
            self.edge = self.next;
            return Part::All;
        }
        let Some(slot) = self.slot(record.counter) else {
            return Part::All;
        };
        slot.state = SlotState::Held(now);
        self.solve_with(record.counter, now);
        self.advance(now);
        self.held += u64::from(self.edge <= record.counter);
        Part::Unordered
    }

    /// Ends repair: all that is held back is ready now. Returns whether anything is.
    pub fn end(&mut self, now: Instant) -> bool {
        self.ended = true;
        self.flush(now);
        !self.ready.is_empty()
    }

    /// Begins anew if repair had ended.
    pub fn resume(&mut self) {
        if std::mem::take(&mut self.ended) {
            self.session = None;
        }
    }

    /// Whether repair has ended and everything has been taken.
    pub fn is_over(&self) -> bool {
        self.ended && self.ready.is_empty()
    }

    /// Whether [`Self::take_ready`] has a record at once.
    pub fn has_ready(&self) -> bool {
        self.next_release() == Some(Instant::BOOT)
    }

    /// Whether any records are kept, so that segments may have to wait.
    pub fn keeps(&self) -> bool {
        !self.slots.is_empty() || !self.ready.is_empty()
    }

    /// Returns whether to process the next frame of a record now. `segment` is the TCP segment in
    /// the frame, if it may have to wait.
    pub fn selects(
        &mut self,
        selection: &mut Selection,
        record: Record,
        segment: Option<Segment>,
    ) -> bool {
        let bit = 1u64.checked_shl(selection.number).unwrap_or(0);
        selection.number += 1;
        let now = match (selection.part, segment) {
            (Part::All, _) | (Part::Unordered, None) => true,
            (Part::Ordered, segment) => segment.is_some() && selection.passed & bit == 0,
            // Segments behind records that are ready must not overtake them.
            (Part::Unordered, Some(segment)) => {
                let due =
                    bit != 0 && self.is_held(record) && self.flows.is_due(&segment, self.edge);
                if due {
                    selection.passed |= bit;
                } else {
                    selection.waits = true;
                    self.flows.held(&segment, record.counter);
                }
                due
            }
        };
        if let Some(segment) = segment
            && now
        {
            self.flows.delivered(&segment);
        }
        now
    }

    /// All frames of the selected part of a record were processed.
    pub fn processed(&mut self, selection: Selection, record: Record) {
        if selection.part != Part::Unordered || !self.is_held(record) {
            return;
        }
        if let Some(slot) = self.slot(record.counter) {
            slot.passed = selection.passed;
            if !selection.waits {
                slot.state = SlotState::Passed;
            }
        }
    }

    /// Whether segments of a record are held back. The session is compared because records of an
    /// earlier session may still be ready when a record with the same counter is held back in the
    /// newest session.
    fn is_held(&self, record: Record) -> bool {
        let is_newest = self
            .session
            .is_some_and(|(index, _)| index == record.session);
        let slot = self.index(record.counter).map(|index| &self.slots[index]);
        is_newest && slot.is_some_and(|slot| matches!(slot.state, SlotState::Held(_)))
    }

    /// Returns the part to process now of a record that is not kept. If records are ready, its
    /// segments are queued behind them.
    fn behind_ready(&mut self, record: Record, frames: &[u8]) -> Part {
        if self.ready.is_empty() || parity::is_parity(frames) {
            return Part::All;
        }
        self.ready.push_back(Ready {
            record,
            part: Part::Ordered,
            passed: 0,
            frames: frames.to_vec(),
        });
        Part::Unordered
    }

    /// Returns the counters that were restored since the last call.
    pub fn take_restored(&mut self) -> std::vec::Drain<'_, u64> {
        self.new_counters.drain(..)
    }

    /// Returns the next record to process, in order: restored ones, and those whose segments are no
    /// longer held back.
    pub fn take_ready(&mut self, now: Instant) -> Option<Ready> {
        if self.ready.is_empty() && !self.slots.is_empty() {
            self.advance(now);
            if now.duration_since(self.kept_at) >= KEEP {
                self.flush(now);
            }
        }
        let ready = self.ready.pop_front();
        if ready.is_none() && self.slots.is_empty() {
            self.free();
        }
        ready
    }

    /// Frees the memory of records. Nothing is kept or ready.
    fn free(&mut self) {
        // Nothing was allocated since the last call. This runs for every record of a path that needs
        // no repair.
        if self.slots.capacity() == 0 {
            return;
        }
        self.slots = VecDeque::new();
        self.ready = VecDeque::new();
        self.spare = Vec::new();
        self.new_counters = Vec::new();
        self.flows.clear();
    }

    /// Returns the buffer of a record from [`Self::take_ready`].
    pub fn give_back(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < MAX_SPARE && (1..=SPARE_BYTES).contains(&buffer.capacity()) {
            self.spare.push(buffer);
        }
    }

    /// When to call [`Self::take_ready`]: a record becomes ready then, or the kept records expire.
    pub fn next_release(&self) -> Option<Instant> {
        if !self.ready.is_empty() {
            return Some(Instant::BOOT);
        }
        let edge = self.index(self.edge).map(|index| self.slots[index].state);
        match edge {
            Some(SlotState::Missing { until, .. }) => Some(until),
            Some(_) => Some(Instant::BOOT),
            None => (!self.slots.is_empty()).then(|| self.kept_at + KEEP),
        }
    }

    /// Records and bytes kept, and bytes of parity kept.
    pub fn kept(&self) -> (usize, usize, usize) {
        let parities = self.blocks.iter().flat_map(|block| &block.parities);
        (self.slots.len(), self.bytes, parities.map(Vec::len).sum())
    }

    /// Number of bytes multiplied so far, a measure of processor time.
    pub fn work(&self) -> u64 {
        self.work
    }

    /// Counters added or examined so far because of a gap or of parity alone.
    pub fn visited(&self) -> u64 {
        self.visited
    }

    fn start(&mut self, record: Record, number: u64, now: Instant) {
        self.flush(now);
        self.flows.release();
        self.started = self.session.is_none();
        self.session = Some((record.session, number));
        // The first record of a session may be missing, but a peer may also start anywhere.
        self.next = if record.counter < MAX_KEPT as u64 {
            0
        } else {
            record.counter
        };
        self.edge = self.next;
        self.hurried = self.next;
        self.newest = self.next..self.next;
        // The path is the same, so records are kept for [`KEEP`] as after a parity; then the parity
        // of this session decides.
        self.parity_at = self.parity_at.map(|_| now);
    }

    /// Passes on everything that is held back, and forgets all records.
    fn flush(&mut self, now: Instant) {
        while !self.slots.is_empty() {
            self.forget_oldest(now);
        }
        while !self.blocks.is_empty() {
            self.forget_block();
        }
        self.edge = self.next;
    }

    fn index(&self, counter: u64) -> Option<usize> {
        let first = self.next - self.slots.len() as u64;
        counter
            .checked_sub(first)
            .map(|index| index as usize)
            .filter(|index| *index < self.slots.len())
    }

    fn slot(&mut self, counter: u64) -> Option<&mut Slot> {
        let index = self.index(counter)?;
        self.slots.get_mut(index)
    }

    /// Adds missing slots up to `counter`, fewer than [`MAX_KEPT`].
    fn extend(&mut self, counter: u64, verdict: Option<Verdict>, now: Instant) {
        // Segments do not wait long for a record that a full queue dropped: TCP has to see that
        // loss as soon as without repair. They do not wait long for a probe either. A short wait
        // remains, because the missing record may only be late.
        let congestion = matches!(
            verdict,
            Some(Verdict::Congestion | Verdict::Overflow { .. })
        );
        let patience = if congestion || verdict == Some(Verdict::Probes) {
            self.reordering
        } else {
            HOLD
        };
        if let Some(Verdict::Overflow { earlier }) = verdict {
            self.lose_in_queue(earlier, now);
        }
        if congestion {
            // Nor for a random loss just before: TCP slows down anyway. All that is held would be
            // released at once, with more gaps than its acknowledgements can report (three or four
            // SACK blocks, RFC 2018), and TCP would send again what has arrived.
            self.hurry(self.next, now);
        }
        while self.next < counter {
            self.make_space(0, now);
            self.slots.push_back(Slot {
                state: SlotState::Missing {
                    until: now + patience,
                    congestion,
                },
                frames: Vec::new(),
                passed: 0,
                ecn: 0,
            });
            self.next += 1;
            self.visited += 1;
        }
    }

    /// Marks the newest `count` missing records that are waited for as lost in a full queue.
    fn lose_in_queue(&mut self, count: u32, now: Instant) {
        let states = self.slots.iter_mut().rev().map(|slot| &mut slot.state);
        let waited_for = states.filter_map(|state| match state {
            SlotState::Missing { until, congestion } if *until > now && !*congestion => {
                Some(congestion)
            }
            _ => None,
        });
        for congestion in waited_for.take(count as usize) {
            *congestion = true;
        }
    }

    fn push(&mut self, record: Record, frames: &[u8], now: Instant) {
        let kept = self.keep(frames);
        self.make_space(kept.len(), now);
        self.bytes += kept.len();
        self.slots.push_back(Slot {
            state: SlotState::Passed,
            frames: kept,
            passed: 0,
            ecn: record.ecn,
        });
        self.next += 1;
    }

    /// Fills the slot of a late record. Returns false if there is no slot that waits for it.
    fn fill(&mut self, record: Record, frames: &[u8], now: Instant) -> bool {
        let waits = |slot: &Slot| {
            slot.missing() || slot.state == SlotState::Absent && parity::is_parity(frames)
        };
        if !self.slot(record.counter).is_some_and(|slot| waits(slot)) {
            return false;
        }
        let kept = self.keep(frames);
        self.make_space(kept.len(), now);
        let Some(index) = self.index(record.counter) else {
            return false;
        };
        self.bytes += kept.len();
        self.slots[index] = Slot {
            state: SlotState::Passed,
            frames: kept,
            passed: 0,
            ecn: record.ecn,
        };
        true
    }

    fn keep(&mut self, frames: &[u8]) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        // Parity records and probes count as empty.
        if !parity::is_parity(frames) && !is_probe(frames) {
            buffer.extend_from_slice(frames);
        }
        buffer
    }

    fn make_space(&mut self, bytes: usize, now: Instant) {
        while self.slots.len() >= MAX_KEPT
            || (self.bytes + bytes > MAX_BYTES && !self.slots.is_empty())
        {
            self.forget_oldest(now);
        }
    }

    fn forget_oldest(&mut self, now: Instant) {
        let counter = self.next - self.slots.len() as u64;
        while self
            .blocks
            .front()
            .is_some_and(|block| block.counters.start <= counter)
        {
            self.forget_block();
        }
        if self.edge <= counter {
            self.edge = counter + 1;
            self.pass(counter, now);
        }
        let Some(slot) = self.slots.pop_front() else {
            return;
        };
        self.bytes -= slot.frames.len();
        self.give_back(slot.frames);
    }

    /// Passes on all records up to the next missing one that is worth waiting for.
    fn advance(&mut self, now: Instant) {
        while let Some(index) = self.index(self.edge) {
            match self.slots[index].state {
                SlotState::Missing { until, .. } if now < until => return,
                // The record is no longer waited for, though it may still be restored.
                SlotState::Missing { .. } => {}
                _ => self.pass(self.edge, now),
            }
            self.edge += 1;
        }
    }

    /// Removes the oldest block, and counts its records that are still missing as not restored.
    fn forget_block(&mut self) {
        let Some(block) = self.blocks.pop_front() else {
            return;
        };
        let of = block.counters.filter_map(|counter| self.index(counter));
        let missing = of.filter(|index| self.slots[*index].missing());
        self.not_restored += missing.count() as u64;
    }

    /// Passes on the segments of a record that were held back.
    fn pass(&mut self, counter: u64, now: Instant) {
        let Some(session) = self.session else { return };
        let Some(index) = self.index(counter) else {
            return;
        };
        let SlotState::Held(since) = self.slots[index].state else {
            return;
        };
        self.longest = self.longest.max(now.duration_since(since));
        self.slots[index].state = SlotState::Passed;
        let mut frames = self.spare.pop().unwrap_or_default();
        frames.clear();
        frames.extend_from_slice(&self.slots[index].frames);
        self.ready.push_back(Ready {
            record: Record {
                session: session.0,
                counter,
                ecn: self.slots[index].ecn,
            },
            part: Part::Ordered,
            passed: self.slots[index].passed,
            frames,
        });
    }

    fn on_parity(&mut self, record: Record, frames: &[u8], now: Instant) {
        self.parity_at = Some(now);
        self.parity(record, frames, now);
        self.advance(now);
    }

    fn parity(&mut self, record: Record, frames: &[u8], now: Instant) {
        let Some((head, symbol)) = Head::read(frames) else {
            return;
        };
        let Some(counters) = head.block(record.counter) else {
            return;
        };
        self.mark_absent(counters.end, counters.end + u64::from(head.count));
        if counters.start >= self.newest.end {
            // Records between two blocks cannot be restored. They are, for example, parity records
            // of the earlier block.
            self.mark_absent(self.newest.end, counters.start);
            self.hurry(self.newest.end, now);
            self.newest = counters.clone();
        } else if self.newest != counters
            && !self.blocks.iter().any(|block| block.counters == counters)
        {
            // Blocks do not overlap, so that each record is multiplied for one block only.
            return;
        }
        self.join(head, counters.clone(), symbol);
        self.solve_with(counters.start, now);
        // After the last parity record of the block, a record that is still missing is late or
        // cannot be restored.
        if record.counter + 1 >= counters.end + u64::from(head.count) {
            self.hurry(counters.end, now);
        }
    }

    /// Marks missing counters from `from` to `to` (exclusive) as absent: they belong to no block,
    /// so nothing waits for them.
    fn mark_absent(&mut self, from: u64, to: u64) {
        let first = self.next - self.slots.len() as u64;
        for counter in from.max(first)..to.min(self.next) {
            self.visited += 1;
            if let Some(slot) = self.slot(counter)
                && slot.missing()
            {
                slot.state = SlotState::Absent;
            }
        }
    }

    /// Limits the remaining wait for missing records before `end` to that for late ones. Visits each only
    /// once.
    fn hurry(&mut self, end: u64, now: Instant) {
        let latest = now + self.reordering;
        let from = self.edge.max(self.hurried);
        self.hurried = self.hurried.max(end);
        for counter in from..end {
            self.visited += 1;
            let Some(slot) = self.slot(counter) else {
                return;
            };
            if let SlotState::Missing { until, .. } = &mut slot.state {
                *until = (*until).min(latest);
            }
        }
    }

    /// Adds a parity to its block, if a record of the block is missing and the block's records are
    /// still kept.
    fn join(&mut self, head: Head, counters: Range<u64>, symbol: &[u8]) {
        let Some(first) = self.index(counters.start) else {
            return;
        };
        let length = (counters.end - counters.start) as usize;
        let any = self.slots.range(first..).take(length).any(Slot::missing);
        let at = self
            .blocks
            .iter()
            .position(|block| block.counters == counters);
        if !any {
            if let Some(at) = at {
                self.blocks.remove(at);
            }
            return;
        }
        let at = at.unwrap_or_else(|| {
            if self.blocks.len() == MAX_BLOCKS {
                self.forget_block();
            }
            self.blocks.push_back(Block {
                counters,
                count: head.count,
                numbers: Vec::new(),
                parities: Vec::new(),
            });
            self.blocks.len() - 1
        });
        let block = &mut self.blocks[at];
        // All parities of a block have the same length, that of its longest record.
        let fits = block
            .parities
            .first()
            .is_none_or(|first| first.len() == symbol.len());
        if fits && block.count == head.count && !block.numbers.contains(&head.number) {
            block.numbers.push(head.number);
            block.parities.push(symbol.to_vec());
        }
    }

    /// Restores the missing records of the block that contains this counter, if there is enough
    /// parity.
    fn solve_with(&mut self, counter: u64, now: Instant) {
        let Some(at) = self
            .blocks
            .iter()
            .position(|block| block.counters.contains(&counter))
        else {
            return;
        };
        let block = &self.blocks[at];
        let start = block.counters.start;
        let Some(first) = self.index(start) else {
            self.blocks.remove(at);
            return;
        };
        let length = (block.counters.end - start) as usize;
        debug_assert!(length <= MAX_RECORDS && block.parities.len() <= MAX_PARITIES);
        let missing: Vec<u8> = (0..length)
            .filter(|i| self.slots[first + i].missing())
            .map(|i| i as u8)
            .collect();
        if missing.len() > block.parities.len() {
            return;
        }
        let Some(mut block) = self.blocks.remove(at) else {
            return;
        };
        if missing.is_empty() {
            return;
        }
        block.numbers.truncate(missing.len());
        block.parities.truncate(missing.len());
        let size = block.parities[0].len();
        for i in (0..length).filter(|i| !missing.contains(&(*i as u8))) {
            let frames = &self.slots[first + i].frames;
            if parity::LENGTH + frames.len() > size {
                // The parity does not belong to these records.
                return;
            }
        }
        for i in (0..length).filter(|i| !missing.contains(&(*i as u8))) {
            let frames = &self.slots[first + i].frames;
            parity::add_symbol(&mut block.parities, &block.numbers, i as u8, frames);
            self.work += (frames.len() * missing.len()) as u64;
        }
        gf256::solve(&mut block.parities, &block.numbers, &missing);
        self.work += (size * missing.len() * missing.len()) as u64;
        for (symbol, i) in block.parities.iter().zip(&missing) {
            self.restore(start + u64::from(*i), symbol, now);
        }
    }

    /// Stores a restored record, and makes it ready.
    fn restore(&mut self, counter: u64, symbol: &[u8], now: Instant) {
        let Some(session) = self.session else { return };
        let Some(index) = self.index(counter) else {
            return;
        };
        let SlotState::Missing { congestion, .. } = self.slots[index].state else {
            return;
        };
        let Some(frames) = parity::frames_of(symbol) else {
            self.slots[index].state = SlotState::Absent;
            return;
        };
        // The symbol of a probe is empty: the probe itself still counts if it arrives, by a slower
        // path.
        if !frames.is_empty() {
            self.new_counters.push(counter);
        }
        // A record lost in a full queue counts as marked: the queue dropped it instead of marking
        // it.
        let ecn = if congestion { ECN_CE } else { 0 };
        let kept = self.keep(frames);
        self.make_space(kept.len(), now);
        let Some(index) = self.index(counter) else {
            return;
        };
        let waits = counter >= self.edge;
        let part = if waits { Part::Unordered } else { Part::All };
        self.bytes += kept.len();
        self.ready.push_back(Ready {
            record: Record {
                session: session.0,
                counter,
                ecn,
            },
            part,
            passed: 0,
            frames: kept.clone(),
        });
        // A probe or a keepalive has nothing to restore.
        self.restored += u64::from(!kept.is_empty());
        self.slots[index] = Slot {
            state: if waits {
                SlotState::Held(now)
            } else {
                SlotState::Passed
            },
            frames: kept,
            passed: 0,
            ecn,
        };
    }
}

/// Whether the frames of a record are a PROBE.
fn is_probe(frames: &[u8]) -> bool {
    frames
        .first()
        .is_some_and(|first| first & 0x0f == crate::native::frame::PROBE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos((1 << 40) + ms * 1_000_000)
    }

    /// The frames of a record: a kind that is neither PARITY nor PROBE, and its counter.
    fn frames(counter: u64) -> Vec<u8> {
        vec![1, 0, counter as u8]
    }

    fn receive(receiver: &mut Receiver, counter: u64, frames: &[u8], ms: u64) -> Part {
        let record = Record {
            session: 7,
            counter,
            ecn: 0,
        };
        receiver.record(record, 1, frames, Some(Verdict::Random), at(ms))
    }

    /// The parity of the records in `counters`.
    fn parity_of(counters: Range<u64>, number: u8, count: u8) -> Vec<u8> {
        let mut rows = vec![Vec::new()];
        let records = (counters.end - counters.start) as u8;
        for (index, counter) in counters.enumerate() {
            parity::add_symbol(&mut rows, &[number], index as u8, &frames(counter));
        }
        let head = Head {
            number,
            count,
            records,
        };
        [&head.to_bytes()[..], &rows[0]].concat()
    }

    /// Counter and part of everything that is ready.
    fn ready(receiver: &mut Receiver, ms: u64) -> Vec<(u64, Part)> {
        let next = || receiver.take_ready(at(ms));
        std::iter::from_fn(next)
            .inspect(|ready| assert_eq!(ready.frames, frames(ready.record.counter)))
            .map(|ready| (ready.record.counter, ready.part))
            .collect()
    }

    /// Counters of everything that is ready.
    fn ready_counters(receiver: &mut Receiver, ms: u64) -> Vec<u64> {
        let ready = std::iter::from_fn(|| receiver.take_ready(at(ms)));
        let mut counters: Vec<u64> = ready.map(|ready| ready.record.counter).collect();
        counters.dedup();
        counters
    }

    #[test]
    fn a_lost_record_is_restored_and_those_behind_it_follow_in_order() {
        let mut receiver = Receiver::default();
        assert_eq!(receive(&mut receiver, 0, &frames(0), 0), Part::All);
        for counter in [2, 3] {
            assert_eq!(
                receive(&mut receiver, counter, &frames(counter), 1),
                Part::Unordered
            );
        }
        assert_eq!(ready(&mut receiver, 1), []);
        receive(&mut receiver, 4, &parity_of(0..4, 0, 1), 2);
        let (unordered, ordered) = (Part::Unordered, Part::Ordered);
        let expected = [(1, unordered), (1, ordered), (2, ordered), (3, ordered)];
        assert_eq!(receiver.take_restored().collect::<Vec<_>>(), [1]);
        assert_eq!(ready(&mut receiver, 2), expected);
        assert_eq!((receiver.restored, receiver.not_restored), (1, 0));
        assert_eq!(receive(&mut receiver, 5, &frames(5), 3), Part::All);
    }

    #[test]
    fn a_restored_probe_does_not_count_as_received() {
        let mut receiver = Receiver::default();
        receive(&mut receiver, 0, &frames(0), 0);
        receive(&mut receiver, 2, &frames(2), 1);
        let mut rows = vec![Vec::new()];
        for (index, counter) in [(0, 0), (2, 2)] {
            parity::add_symbol(&mut rows, &[0], index, &frames(counter));
        }
        // As the sender adds a probe, in place of its frames.
        parity::add_symbol(&mut rows, &[0], 1, &[]);
        let head = Head {
            number: 0,
            count: 1,
            records: 3,
        };
        receive(
            &mut receiver,
            3,
            &[&head.to_bytes()[..], &rows[0]].concat(),
            2,
        );
        assert_eq!(ready_counters(&mut receiver, 2), [1, 2]);
        assert_eq!(
            (receiver.take_restored().count(), receiver.restored),
            (0, 0)
        );
        // The probe, by a slower path.
        let probe = [crate::native::frame::PROBE, 2, 0, 7, 7];
        assert_eq!(receive(&mut receiver, 1, &probe, 30), Part::All);
    }

    #[test]
    fn repair_that_resumes_keeps_the_first_records_as_on_a_new_path() {
        let mut receiver = Receiver::default();
        receive(&mut receiver, 0, &frames(0), 0);
        receiver.end(at(1));
        receiver.resume();
        let of = |counter| Record {
            session: 8,
            counter,
            ecn: 0,
        };
        receiver.record(of(0), 2, &frames(0), None, at(2));
        receiver.record(of(1), 2, &frames(1), None, at(2));
        assert_eq!(receiver.kept().0, 2);
        // A session that continues repair does not.
        receiver.resume();
        receiver.record(of(0), 2, &frames(0), None, at(3));
        assert_eq!(receiver.kept().0, 2);
    }

    #[test]
    fn a_gap_without_enough_parity_is_left_open_for_reordering_only() {
        let mut receiver = Receiver::default();
        receive(&mut receiver, 0, &frames(0), 0);
        receive(&mut receiver, 3, &frames(3), 0);
        receive(&mut receiver, 4, &parity_of(0..4, 0, 1), 10);
        assert_eq!(ready(&mut receiver, 12), []);
        assert_eq!(ready(&mut receiver, 13), [(3, Part::Ordered)]);
        // One of both was late: it is not held back, and the other can be restored.
        assert_eq!(receive(&mut receiver, 2, &frames(2), 14), Part::All);
        assert_eq!(ready(&mut receiver, 14), [(1, Part::All)]);
        assert_eq!((receiver.restored, receiver.not_restored), (1, 0));
    }

    #[test]
    fn records_that_parity_does_not_suffice_for_are_counted_once() {
        let mut receiver = Receiver::default();
        receive(&mut receiver, 0, &frames(0), 0);
        receive(&mut receiver, 3, &frames(3), 0);
        receive(&mut receiver, 4, &parity_of(0..4, 0, 1), 10);
        assert_eq!(receiver.not_restored, 0, "both may be late");
        // A later session ends it.
        let record = Record {
            session: 8,
            counter: 0,
            ecn: 0,
        };
        receiver.record(record, 2, &frames(0), None, at(20));
        let expected = [(3, Part::Ordered), (0, Part::Ordered)];
        assert_eq!(ready(&mut receiver, 20), expected);
        assert_eq!((receiver.restored, receiver.not_restored), (0, 2));
    }

    #[test]
    fn a_gap_without_parity_is_left_open_for_its_bound() {
        let mut receiver = Receiver::default();
        receive(&mut receiver, 0, &frames(0), 0);
        receive(&mut receiver, 2, &frames(2), 5);
        assert_eq!(receiver.next_release(), Some(at(65)));
        assert_eq!(ready(&mut receiver, 64), []);
        assert_eq!(ready(&mut receiver, 65), [(2, Part::Ordered)]);
        // Then there is nothing to do but to forget what is kept.
        assert_eq!(receiver.next_release(), Some(at(2005)));
        assert_eq!(ready(&mut receiver, 2005), []);
        assert_eq!(
            (receiver.kept(), receiver.next_release()),
            ((0, 0, 0), None)
        );
    }

    #[test]
    fn segments_hardly_wait_for_a_probe_or_a_record_that_a_full_queue_dropped() {
        let of = |counter| Record {
            session: 7,
            counter,
            ecn: 0,
        };
        for verdict in [Verdict::Probes, Verdict::Congestion] {
            // A quarter of the round trip, but at most 3 ms.
            for (round_trip, wait) in [(None, 3), (Some(40), 3), (Some(4), 1)] {
                let mut receiver = Receiver::default();
                receiver.set_round_trip(round_trip.map(Duration::from_millis));
                receiver.record(of(0), 1, &frames(0), None, at(0));
                receiver.record(of(2), 1, &frames(2), Some(verdict), at(5));
                assert_eq!(receiver.next_release(), Some(at(5 + wait)), "{verdict:?}");
                assert_eq!(ready(&mut receiver, 5 + wait - 1), []);
                assert_eq!(ready(&mut receiver, 5 + wait), [(2, Part::Ordered)]);
            }
        }
    }

    #[test]
    fn a_record_that_a_full_queue_dropped_counts_as_marked() {
        for (verdict, ecn) in [(Verdict::Congestion, ECN_CE), (Verdict::Random, 0)] {
            let mut receiver = Receiver::default();
            let of = |counter| Record {
                session: 7,
                counter,
                ecn: 0,
            };
            receiver.record(of(0), 1, &frames(0), None, at(0));
            receiver.record(of(2), 1, &frames(2), Some(verdict), at(1));
            receiver.record(of(3), 1, &parity_of(0..3, 0, 1), None, at(1));
            let restored = std::iter::from_fn(|| receiver.take_ready(at(1)));
            let marks: Vec<_> = restored.map(|r| (r.record.counter, r.record.ecn)).collect();
            assert_eq!(marks, [(1, ecn), (1, ecn), (2, 0)], "{verdict:?}");
        }
    }

    #[test]
    fn records_that_turn_out_to_be_lost_in_a_full_queue_are_hardly_waited_for() {
        let mut receiver = Receiver::default();
        let mut receive = |counter, verdict, ms| {
            let record = Record {
                session: 7,
                counter,
                ecn: 0,
            };
            receiver.record(record, 1, &frames(counter), verdict, at(ms));
        };
        receive(0, None, 0);
        receive(2, Some(Verdict::Random), 5);
        receive(4, Some(Verdict::Congestion), 5);
        receive(7, Some(Verdict::Overflow { earlier: 1 }), 6);
        assert_eq!(ready(&mut receiver, 7), []);
        let expected = [2, 4].map(|counter| (counter, Part::Ordered));
        assert_eq!(ready(&mut receiver, 8), expected);
        assert_eq!(ready(&mut receiver, 9), [(7, Part::Ordered)]);
    }

    #[test]
    fn segments_follow_those_that_a_long_gap_releases() {
        let mut receiver = Receiver::default();
        receive(&mut receiver, 0, &frames(0), 0);
        receive(&mut receiver, 2, &frames(2), 1);
        assert_eq!(
            receive(&mut receiver, 200, &frames(200), 2),
            Part::Unordered
        );
        let expected = [(2, Part::Ordered), (200, Part::Ordered)];
        assert_eq!(ready(&mut receiver, 2), expected);
    }

    #[test]
    fn parity_in_any_order_restores() {
        let mut receiver = Receiver::default();
        receive(&mut receiver, 0, &frames(0), 0);
        receive(&mut receiver, 3, &frames(3), 1);
        receive(&mut receiver, 5, &parity_of(0..4, 1, 2), 2);
        receive(&mut receiver, 4, &parity_of(0..4, 0, 2), 3);
        assert_eq!(receiver.take_restored().collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn parity_of_another_length_than_the_first_of_its_block_is_ignored() {
        let mut receiver = Receiver::default();
        receive(&mut receiver, 0, &frames(0), 0);
        receive(&mut receiver, 3, &frames(3), 1);
        let longer = [parity_of(0..4, 0, 2), vec![0; 1000]].concat();
        receive(&mut receiver, 4, &longer, 2);
        receive(&mut receiver, 5, &parity_of(0..4, 1, 2), 2);
        assert_eq!((receiver.take_restored().count(), receiver.work()), (0, 0));
    }

    #[test]
    fn gaps_that_are_filled_late_keep_no_more() {
        let mut receiver = Receiver::default();
        let big = vec![1; 60_000];
        receive(&mut receiver, 0, &frames(0), 0);
        for start in [1, 145, 289] {
            receive(&mut receiver, start + 143, &frames(9), 0);
            for counter in (start..start + 143).rev() {
                receive(&mut receiver, counter, &big, 0);
                assert!(receiver.kept().1 <= MAX_BYTES, "{:?}", receiver.kept());
            }
        }
    }

    #[test]
    fn a_lost_parity_holds_nothing_back_once_the_next_block_is_known() {
        let mut receiver = Receiver::default();
        receive(&mut receiver, 0, &frames(0), 0);
        receive(&mut receiver, 1, &frames(1), 0);
        // Counter 2 was the parity of these.
        assert_eq!(receive(&mut receiver, 3, &frames(3), 1), Part::Unordered);
        receive(&mut receiver, 4, &parity_of(3..4, 0, 1), 2);
        assert_eq!(ready(&mut receiver, 2), [(3, Part::Ordered)]);
        assert_eq!((receiver.restored, receiver.not_restored), (0, 0));
    }

    #[test]
    fn a_ready_record_of_an_earlier_session_changes_no_held_one() {
        let mut receiver = Receiver::default();
        receive(&mut receiver, 0, &frames(0), 0);
        assert_eq!(receive(&mut receiver, 2, &frames(2), 1), Part::Unordered);
        let earlier = Record {
            session: 6,
            counter: 2,
            ecn: 0,
        };
        // All its frames were processed, and none waits.
        receiver.processed(Selection::new(Part::Unordered, 0), earlier);
        assert_eq!(ready(&mut receiver, 61), [(2, Part::Ordered)]);
    }

    #[test]
    fn a_receiver_that_keeps_nothing_has_no_memory() {
        let memory = |receiver: &Receiver| {
            let slots = receiver.slots.capacity() * size_of::<Slot>();
            let ready = receiver.ready.capacity() * size_of::<Ready>();
            let kept = receiver.slots.iter().map(|slot| &slot.frames);
            let buffers = kept.chain(&receiver.spare).map(Vec::capacity);
            slots + ready + receiver.spare.capacity() + buffers.sum::<usize>()
        };
        let mut receiver = Receiver::default();
        let mut round = |first: u64, ms: u64| {
            receive(&mut receiver, first, &[1; 1400], ms);
            for counter in first + 2..first + 100 {
                receive(&mut receiver, counter, &[1; 1400], ms);
            }
            assert!(memory(&receiver) > 100_000);
            if ms == 0 {
                // Nothing arrives for a while.
                while let Some(ready) = receiver.take_ready(at(2000)) {
                    receiver.give_back(ready.frames);
                }
            } else {
                // Records that need no repair follow.
                receive(&mut receiver, FIRST_RECORDS, &[1; 1400], ms + 100);
                while let Some(ready) = receiver.take_ready(at(ms + 100)) {
                    receiver.give_back(ready.frames);
                }
                assert_eq!(memory(&receiver), 0);
                receive(&mut receiver, FIRST_RECORDS + 1, &[1; 1400], ms + 100);
            }
            assert_eq!(memory(&receiver), 0);
        };
        round(0, 0);
        round(FIRST_RECORDS - 100, 3000);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut receiver = Receiver::default();
        let mut released = 0;
        for counter in (0..4000).filter(|counter| counter % 7 != 0) {
            receive(&mut receiver, counter, &[1; 3000], 0);
            let (records, bytes, _) = receiver.kept();
            assert!(records <= MAX_KEPT && bytes <= MAX_BYTES);
            while receiver.take_ready(at(0)).is_some() {
                released += 1;
            }
        }
        assert!(released > 2000, "{released}");
    }
}
