//! The stamp at the start of a native record's plaintext.

use crate::time::Instant;
use seikan_wire::message::{RECORD_HEADER_LEN, TAG_LEN};

/// Length in bytes of the stamp at the start of every record.
pub const STAMP_LEN: usize = 3;
/// Bytes of a record's header, stamp and tag.
pub const RECORD_OVERHEAD: usize = RECORD_HEADER_LEN + STAMP_LEN + TAG_LEN;

/// The bit of the first byte that says [`Stamp::follows_probe`].
const FOLLOWS_PROBE: u8 = 0x80;

/// The time of a record, and its position in its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Position in the sender's GSO batch, from 0 to 127.
    pub position: u8,
    /// The record before this one is a PROBE, and so are those before it back to the last other
    /// record. Missing ones are no losses: they may have been too large, or sent elsewhere.
    pub follows_probe: bool,
    /// Fraction of the second at which the record was sealed, or will leave if it waits. In 1/65536 s.
    pub time: u16,
}

impl Stamp {
    /// Reads the stamp at the start of a record's plaintext.
    pub fn read(plaintext: &[u8]) -> Option<Stamp> {
        let &[first, t0, t1] = plaintext.first_chunk()?;
        Some(Stamp {
            position: first & !FOLLOWS_PROBE,
            follows_probe: first & FOLLOWS_PROBE != 0,
            time: u16::from_le_bytes([t0, t1]),
        })
    }

    /// Encodes the stamp.
    pub fn to_bytes(self) -> [u8; STAMP_LEN] {
        let [t0, t1] = self.time.to_le_bytes();
        let mark = if self.follows_probe { FOLLOWS_PROBE } else { 0 };
        [self.position | mark, t0, t1]
    }
}

/// The fraction of the second at `now`, in 1/65536 s.
pub fn stamp_of(now: Instant) -> u16 {
    let nanos = now.as_nanos() % 1_000_000_000;
    ((nanos << 16) / 1_000_000_000) as u16
}
