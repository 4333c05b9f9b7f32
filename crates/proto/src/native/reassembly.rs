//! Packets too large for one record, put together from their fragments.
//!
//! Only a few can be open for each peer; the oldest gives way, with its fragments counted. Every
//! fragment is placed once: the replay window has already refused repeated records. Identifiers
//! wrap within a second at high rates and start over with the peer, so fragments must also come in
//! records of one session and close to each other (RFC 4963 tells what happens otherwise).

use crate::native::frame::{self, Fragment};
use crate::time::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Packets open at a time for each peer.
const MAX_OPEN: usize = 8;
/// How long a packet may wait for its missing fragments.
pub const TIMEOUT: Duration = Duration::from_secs(1);

/// The open packets of one peer.
#[derive(Debug, Default)]
pub struct Reassembly {
    open: VecDeque<Open>,
}

/// Records between the fragments of one packet, at most: 64 KiB take 60 of the smallest.
const MAX_DISTANCE: u64 = 256;

/// The record that a fragment came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Our index of its session.
    pub session: u32,
    /// Its counter.
    pub counter: u64,
    /// The ECN field that its datagram arrived with.
    pub ecn: u8,
}

/// A packet put together.
#[derive(Debug, PartialEq, Eq)]
pub struct Reassembled {
    /// Its bytes.
    pub packet: Vec<u8>,
    /// The flag [`Fragment::partial`].
    pub partial: bool,
    /// The most severe ECN field that a fragment's datagram arrived with ([`frame::most_severe`]).
    pub ecn: u8,
}

#[derive(Debug)]
struct Open {
    id: u16,
    first: Record,
    since: Instant,
    partial: bool,
    ecn: u8,
    packet: Vec<u8>,
    received: Vec<(usize, usize)>,
}

/// What became of a fragment.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is the first of a packet, which is held now; so many older packets were given up.
    Opened {
        /// Packets given up to make room.
        evicted: u64,
    },
    /// It joined a packet that is held.
    Joined,
    /// It completed the packet.
    Complete(Reassembled),
    /// It contradicts the packet's other fragments.
    Contradiction,
}

impl Reassembly {
    /// Places the fragment, which came in `record` and whose bytes are `chunk`.
    pub fn fragment(
        &mut self,
        fragment: &Fragment,
        record: Record,
        chunk: &[u8],
        now: Instant,
    ) -> Outcome {
        let found = self.open.iter().position(|o| {
            o.id == fragment.id
                && o.packet.len() == fragment.total
                && o.first.session == record.session
                && o.first.counter.abs_diff(record.counter) <= MAX_DISTANCE
        });
        let (at, opened) = match found {
            Some(at) => (at, None),
            None => {
                let evicted =
                    u64::from(self.open.len() == MAX_OPEN && self.open.pop_front().is_some());
                self.open.push_back(Open {
                    id: fragment.id,
                    first: record,
                    since: now,
                    partial: fragment.partial,
                    ecn: 0,
                    packet: vec![0; fragment.total],
                    received: Vec::new(),
                });
                (self.open.len() - 1, Some(evicted))
            }
        };
        let open = &mut self.open[at];
        let span = (fragment.offset, fragment.offset + chunk.len());
        let overlaps = open
            .received
            .iter()
            .any(|(from, to)| span.0 < *to && *from < span.1);
        if overlaps || open.partial != fragment.partial {
            return Outcome::Contradiction;
        }
        open.packet[span.0..span.1].copy_from_slice(chunk);
        open.received.push(span);
        open.ecn = frame::most_severe(open.ecn, record.ecn);
        let received: usize = open.received.iter().map(|(from, to)| to - from).sum();
        if received == open.packet.len()
            && let Some(whole) = self.open.remove(at)
        {
            return Outcome::Complete(Reassembled {
                packet: whole.packet,
                partial: whole.partial,
                ecn: whole.ecn,
            });
        }
        match opened {
            Some(evicted) => Outcome::Opened { evicted },
            None => Outcome::Joined,
        }
    }

    /// Gives up packets that have waited too long; returns how many.
    pub fn expire(&mut self, now: Instant) -> u64 {
        let before = self.open.len();
        self.open.retain(|o| now.duration_since(o.since) < TIMEOUT);
        (before - self.open.len()) as u64
    }

    /// When [`Self::expire`] will have something to do.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.open.iter().map(|o| o.since + TIMEOUT).min()
    }

    /// Packets held.
    pub fn held(&self) -> usize {
        self.open.len()
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
        assert_eq!(r.held(), 0);
    }

    fn record(counter: u64) -> Record {
        Record {
            session: 1,
            counter,
            ecn: 0,
        }
    }

    /// The identifier has come round, or the peer has restarted: other packets.
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
    fn few_are_held_and_not_for_long() {
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
        assert_eq!((r.held(), evicted_in_all), (8, 12));
        assert_eq!(r.expire(Instant::BOOT + TIMEOUT), 8);
    }
}
