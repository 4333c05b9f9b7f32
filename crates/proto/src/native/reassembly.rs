//! Reassembly of packets that are too large for one record.
//!
//! Only a few packets can be incomplete for each peer; the oldest is dropped for a new one, and
//! counted. Every fragment is inserted once, because the replay window has already refused replayed
//! records. Identifiers wrap within a second at high rates and restart with the peer, so the
//! fragments of a packet must also arrive in records of one session and close to each other (RFC
//! 4963 describes the alternative).
//!
//! Memory and work are bounded by the bytes received, whatever a peer claims. Chunks are stored in
//! the order of arrival, in a limited number of pieces, and are sorted once, when the packet is
//! complete.

use crate::native::frame::{self, Fragment};
use crate::time::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Maximum number of incomplete packets for each peer.
const MAX_OPEN: usize = 8;
/// Time for which a packet waits for its missing fragments.
pub const TIMEOUT: Duration = Duration::from_secs(1);

/// The incomplete packets of one peer.
#[derive(Debug, Default)]
pub struct Reassembly {
    open: VecDeque<Open>,
}

/// Maximum number of pieces of one packet. A piece is a run of chunks that arrived in order. 64 KiB
/// in records of the minimum size of a path ([`BASE`](crate::native::path_mtu::BASE)) are 57
/// fragments, which may arrive in any order.
const MAX_PIECES: usize = 64;

/// Maximum distance in records between the fragments of one packet: 64 KiB take 60 of the smallest.
const MAX_DISTANCE: u64 = 256;

/// The record that contained a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Local index of its session.
    pub session: u32,
    /// Its counter.
    pub counter: u64,
    /// The ECN field of its datagram.
    pub ecn: u8,
}

/// A reassembled packet.
#[derive(Debug, PartialEq, Eq)]
pub struct Reassembled {
    /// Its bytes.
    pub packet: Vec<u8>,
    /// The flag [`Fragment::partial`].
    pub partial: bool,
    /// The most severe ECN field of its datagrams ([`frame::most_severe`]).
    pub ecn: u8,
}

#[derive(Debug)]
struct Open {
    id: u16,
    total: usize,
    first: Record,
    since: Instant,
    partial: bool,
    ecn: u8,
    /// All chunks, in the order of arrival.
    bytes: Vec<u8>,
    /// The chunks by offset, without overlaps; at most [`MAX_PIECES`].
    pieces: Vec<Piece>,
}

/// Contiguous bytes that arrived in order.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Offset in the packet.
    offset: usize,
    /// Offset in [`Open::bytes`].
    at: usize,
    length: usize,
}

impl Piece {
    fn end(&self) -> usize {
        self.offset + self.length
    }
}

impl Open {
    fn new(fragment: &Fragment, record: Record, now: Instant) -> Open {
        Open {
            id: fragment.id,
            total: fragment.total,
            first: record,
            since: now,
            partial: fragment.partial,
            ecn: 0,
            // Do not allocate `total` bytes: that number is only a claim of the peer.
            bytes: Vec::with_capacity(fragment.total.min(4 * fragment.chunk.len())),
            pieces: Vec::new(),
        }
    }

    /// Inserts a chunk. Returns false if it overlaps another or would need too many pieces.
    fn insert(&mut self, offset: usize, chunk: &[u8]) -> bool {
        let next = self.pieces.partition_point(|piece| piece.offset < offset);
        let is_free = |next: &Piece| offset + chunk.len() <= next.offset;
        if !self.pieces.get(next).is_none_or(is_free) {
            return false;
        }
        let (at, full) = (self.bytes.len(), self.pieces.len() == MAX_PIECES);
        let before = self.pieces[..next].last_mut();
        match before {
            Some(before) if before.end() > offset => return false,
            Some(before) if before.end() == offset && before.at + before.length == at => {
                before.length += chunk.len();
            }
            _ if full => return false,
            _ => self.pieces.insert(
                next,
                Piece {
                    offset,
                    at,
                    length: chunk.len(),
                },
            ),
        }
        self.bytes.extend_from_slice(chunk);
        true
    }

    /// Returns the packet. All its bytes must be present.
    fn whole(self) -> Reassembled {
        let packet = match self.pieces[..] {
            [_] => self.bytes,
            _ => self
                .pieces
                .iter()
                .flat_map(|piece| &self.bytes[piece.at..piece.at + piece.length])
                .copied()
                .collect(),
        };
        Reassembled {
            packet,
            partial: self.partial,
            ecn: self.ecn,
        }
    }
}

/// Result of inserting a fragment.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The fragment is the first of its packet to arrive. The packet is incomplete now.
    Opened {
        /// Incomplete packets that were dropped for it.
        evicted: u64,
    },
    /// The fragment belongs to a packet that is still incomplete.
    Joined,
    /// The fragment completed its packet.
    Complete(Reassembled),
    /// The fragment contradicts the other fragments of its packet, or its counter is too far from
    /// theirs.
    Contradiction,
}

impl Reassembly {
    /// Inserts a fragment that arrived in `record`; its bytes are `chunk`.
    pub fn fragment(
        &mut self,
        fragment: &Fragment,
        record: Record,
        chunk: &[u8],
        now: Instant,
    ) -> Outcome {
        let found = self.open.iter().position(|o| {
            o.id == fragment.id
                && o.total == fragment.total
                && o.first.session == record.session
                && o.first.counter.abs_diff(record.counter) <= MAX_DISTANCE
        });
        let (at, opened) = match found {
            Some(at) => (at, None),
            None => {
                let evicted =
                    u64::from(self.open.len() == MAX_OPEN && self.open.pop_front().is_some());
                self.open.push_back(Open::new(fragment, record, now));
                (self.open.len() - 1, Some(evicted))
            }
        };
        let open = &mut self.open[at];
        if open.partial != fragment.partial || !open.insert(fragment.offset, chunk) {
            return Outcome::Contradiction;
        }
        open.ecn = frame::most_severe(open.ecn, record.ecn);
        if open.bytes.len() == open.total
            && let Some(whole) = self.open.remove(at)
        {
            return Outcome::Complete(whole.whole());
        }
        match opened {
            Some(evicted) => Outcome::Opened { evicted },
            None => Outcome::Joined,
        }
    }

    /// Drops packets that have waited too long. Returns their number.
    pub fn expire(&mut self, now: Instant) -> u64 {
        let before = self.open.len();
        self.open.retain(|o| now.duration_since(o.since) < TIMEOUT);
        (before - self.open.len()) as u64
    }

    /// When [`Self::expire`] has work to do.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.open.iter().map(|o| o.since + TIMEOUT).min()
    }

    /// Number of incomplete packets.
    pub fn pending(&self) -> usize {
        self.open.len()
    }

    /// Bytes of incomplete packets, and number of pieces.
    pub fn pending_bytes(&self) -> (usize, usize) {
        let each = self.open.iter().map(|o| (o.bytes.len(), o.pieces.len()));
        each.fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragment(id: u16, offset: usize, total: usize, length: usize) -> Fragment {
        Fragment {
            id,
            offset,
            total,
            partial: false,
            chunk: 0..length,
        }
    }

    #[test]
    fn fragments_in_any_order_make_the_packet() {
        let whole: Vec<u8> = (0..3000u32).map(|i| i as u8).collect();
        let mut r = Reassembly::default();
        assert_eq!(
            r.fragment(
                &fragment(7, 2000, 3000, 1000),
                record(3),
                &whole[2000..],
                Instant::BOOT
            ),
            Outcome::Opened { evicted: 0 }
        );
        assert_eq!(
            r.fragment(
                &fragment(7, 0, 3000, 1000),
                record(1),
                &whole[..1000],
                Instant::BOOT
            ),
            Outcome::Joined
        );
        assert_eq!(
            r.fragment(
                &fragment(7, 1000, 3000, 1000),
                Record {
                    ecn: 3,
                    ..record(2)
                },
                &whole[1000..2000],
                Instant::BOOT
            ),
            Outcome::Complete(Reassembled {
                packet: whole,
                partial: false,
                ecn: 3
            })
        );
        assert_eq!(r.pending(), 0);
    }

    fn record(counter: u64) -> Record {
        Record {
            session: 1,
            counter,
            ecn: 0,
        }
    }

    /// The identifier has wrapped, or the peer has restarted: these are different packets.
    #[test]
    fn fragments_from_far_apart_or_another_session_do_not_mix() {
        for other in [
            record(65_536),
            Record {
                session: 2,
                ..record(1)
            },
        ] {
            let mut r = Reassembly::default();
            let first = fragment(1, 0, 2000, 1000);
            let last = fragment(1, 1000, 2000, 1000);
            r.fragment(&first, record(0), &[1; 1000], Instant::BOOT);
            let outcome = r.fragment(&last, other, &[2; 1000], Instant::BOOT);
            assert_eq!(outcome, Outcome::Opened { evicted: 0 });
        }
    }

    #[test]
    fn overlapping_fragments_are_refused() {
        let mut r = Reassembly::default();
        r.fragment(
            &fragment(1, 0, 3000, 1000),
            record(0),
            &[1; 1000],
            Instant::BOOT,
        );
        assert_eq!(
            r.fragment(
                &fragment(1, 999, 3000, 1000),
                record(1),
                &[2; 1000],
                Instant::BOOT
            ),
            Outcome::Contradiction
        );
    }

    #[test]
    fn incomplete_packets_are_few_and_expire() {
        let mut r = Reassembly::default();
        let mut evicted_in_all = 0;
        for id in 0..20 {
            if let Outcome::Opened { evicted } = r.fragment(
                &fragment(id, 0, 60_000, 10),
                record(u64::from(id)),
                &[0; 10],
                Instant::BOOT,
            ) {
                evicted_in_all += evicted;
            }
        }
        assert_eq!((r.pending(), evicted_in_all), (8, 12));
        assert_eq!(r.expire(Instant::BOOT + TIMEOUT), 8);
    }

    #[test]
    fn a_claim_of_a_large_packet_takes_no_memory() {
        let mut r = Reassembly::default();
        for id in 0..8 {
            let last = fragment(id, 65_534, 65_535, 1);
            r.fragment(&last, record(u64::from(id)), &[0; 1], Instant::BOOT);
        }
        assert_eq!(r.pending_bytes(), (8, 8));
        assert!(r.open.iter().all(|open| open.bytes.capacity() < 64));
    }

    #[test]
    fn the_largest_packet_arrives_backwards_in_records_of_the_least_size() {
        let whole: Vec<u8> = (0..65_535u32).map(|i| (i * 7) as u8).collect();
        let mut r = Reassembly::default();
        let mut got = None;
        // The rest of a record of BASE bytes after its overhead and the frame's.
        for (n, chunk) in whole.chunks(1188).enumerate().rev() {
            let part = fragment(1, n * 1188, whole.len(), chunk.len());
            got = Some(r.fragment(&part, record(100 - n as u64), chunk, Instant::BOOT));
        }
        let Some(Outcome::Complete(got)) = got else {
            panic!("{got:?}");
        };
        assert_eq!(got.packet, whole);
    }

    #[test]
    fn chunks_that_lie_apart_are_few() {
        let mut r = Reassembly::default();
        let mut refused = 0;
        for n in 0..127 {
            let part = fragment(1, n * 512, 65_535, 256);
            let outcome = r.fragment(&part, record(n as u64), &[0; 256], Instant::BOOT);
            refused += u64::from(outcome == Outcome::Contradiction);
        }
        assert_eq!((r.pending_bytes(), refused), ((64 * 256, 64), 63));
        // A chunk that continues the last one is no further piece.
        let on = fragment(1, 63 * 512 + 256, 65_535, 256);
        let outcome = r.fragment(&on, record(200), &[0; 256], Instant::BOOT);
        assert_eq!((outcome, r.pending_bytes().1), (Outcome::Joined, 64));
    }

    /// The reference: for each packet, the map of its known bytes.
    #[derive(Default)]
    struct Naive(Vec<(u16, usize, std::collections::BTreeMap<usize, u8>)>);

    impl Naive {
        fn fragment(&mut self, part: &Fragment, chunk: &[u8]) -> Outcome {
            let of = |open: &(u16, usize, _)| open.0 == part.id && open.1 == part.total;
            let found = self.0.iter().position(of);
            let at = found.unwrap_or_else(|| {
                self.0.push((part.id, part.total, Default::default()));
                self.0.len() - 1
            });
            let (_, total, known) = &mut self.0[at];
            let span = part.offset..part.offset + chunk.len();
            if known.range(span.clone()).next().is_some() {
                return Outcome::Contradiction;
            }
            known.extend(span.zip(chunk.iter().copied()));
            if known.len() == *total {
                let packet = self.0.remove(at).2.into_values().collect();
                return Outcome::Complete(Reassembled {
                    packet,
                    partial: false,
                    ecn: 0,
                });
            }
            match found {
                None => Outcome::Opened { evicted: 0 },
                Some(_) => Outcome::Joined,
            }
        }
    }

    /// The chunks of a packet of `total` bytes, cut at these offsets. All except the last have at
    /// least 256 bytes.
    fn cut(id: u16, total: usize, cuts: &[usize]) -> Vec<Fragment> {
        let mut parts = Vec::new();
        let mut offset = 0;
        for cut in cuts.iter().chain([&total]) {
            let length = (*cut).min(total - offset);
            if length > 0 {
                parts.push(fragment(id, offset, total, length));
            }
            offset += length;
        }
        parts
    }

    proptest::proptest! {
        #[test]
        fn any_fragments_in_any_order_are_put_together_as_a_byte_map_does(
            packets in proptest::collection::vec(
                (257_usize..16_000, proptest::collection::vec(256_usize..3000, 1..60)), 1..5),
            // Cut elsewhere, so that they overlap with the correct ones.
            strays in proptest::collection::vec((0_u16..5, 0_usize..15_000, 256_usize..900), 0..4),
            order in proptest::collection::vec(proptest::num::u32::ANY, 300),
        ) {
            let totals: Vec<usize> = packets.iter().map(|(total, _)| *total).collect();
            let mut parts = Vec::new();
            for (id, (total, cuts)) in packets.iter().enumerate() {
                parts.extend(cut(id as u16, *total, cuts));
            }
            for (id, offset, length) in strays {
                if let Some(total) = totals.get(usize::from(id))
                    && offset + length < *total
                {
                    parts.push(fragment(id, offset, *total, length));
                }
            }
            let mut keyed: Vec<_> = order.iter().cycle().zip(parts).collect();
            keyed.sort_by_key(|(key, _)| **key);
            let (mut r, mut naive) = (Reassembly::default(), Naive::default());
            let mut received = 0;
            for (n, (key, part)) in keyed.iter().enumerate() {
                let chunk: Vec<u8> = part.chunk.clone().map(|i| (i as u8) ^ (**key as u8)).collect();
                received += chunk.len();
                let outcome = r.fragment(part, record(n as u64 % 200), &chunk, Instant::BOOT);
                proptest::prop_assert_eq!(outcome, naive.fragment(part, &chunk));
                let (bytes, pieces) = r.pending_bytes();
                proptest::prop_assert!(bytes <= received && pieces <= 8 * MAX_PIECES);
            }
        }
    }
}
