//! The PARITY frame, and the symbols that it is computed from.
//!
//! ```text
//! PARITY  kind 8, number in the upper four bits | count u8 | records u8 | symbol, to the end of the record
//! ```
//! A record with a PARITY frame has no other frames. The `count` parity records of a block follow
//! its last record. The parity record with number n and counter c covers the `records` records
//! before counter c - n.
//!
//! The symbol of a record is the length of its frames as a little-endian `u16`, the frames, then
//! zeros. The symbol of a record with a PROBE is empty, because such a record may be longer than a
//! parity record.

use super::gf256;
use std::ops::Range;

/// The kind of the frame.
pub const PARITY: u8 = 8;
/// Bytes before the symbol in a PARITY frame.
pub const OVERHEAD: usize = 3;
/// Bytes before the frames in a symbol.
pub const LENGTH: usize = 2;
/// Minimum difference in bytes between the largest datagram that the path carries and a covered
/// record, so that the parity record fits as well.
pub const ROOM: usize = OVERHEAD + LENGTH;
/// Maximum number of records in a block.
pub const MAX_RECORDS: usize = 128;
/// Maximum number of parity records of a block.
pub const MAX_PARITIES: usize = 16;

/// Position of a parity record in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Number of the parity record, below `count`.
    pub number: u8,
    /// Number of parity records of the block, from 1 to [`MAX_PARITIES`].
    pub count: u8,
    /// Number of records in the block, from 1 to [`MAX_RECORDS`].
    pub records: u8,
}

impl Head {
    /// Splits the frames of a record into the head and the symbol of a PARITY. Returns `None` if
    /// they are malformed.
    pub fn read(frames: &[u8]) -> Option<(Head, &[u8])> {
        let (&[kind, count, records], symbol) = frames.split_first_chunk()?;
        let head = Head {
            number: kind >> 4,
            count,
            records,
        };
        let valid = kind & 0x0f == PARITY
            && usize::from(count) <= MAX_PARITIES
            && head.number < count
            && (1..=MAX_RECORDS).contains(&usize::from(records))
            && symbol.len() >= LENGTH;
        valid.then_some((head, symbol))
    }

    /// Encodes the head.
    pub fn to_bytes(self) -> [u8; OVERHEAD] {
        [PARITY | self.number << 4, self.count, self.records]
    }

    /// Returns the counters of the block's records, for a parity record with this counter; `None`
    /// if they would be negative.
    pub fn block(self, counter: u64) -> Option<Range<u64>> {
        let end = counter.checked_sub(self.number.into())?;
        let start = end.checked_sub(self.records.into())?;
        Some(start..end)
    }
}

/// Whether the frames of a record are a PARITY.
pub fn is_parity(frames: &[u8]) -> bool {
    frames.first().is_some_and(|first| first & 0x0f == PARITY)
}

/// Adds the symbol of record `index` of a block to the block's parities. Row `k` is the parity with
/// number `numbers[k]`. Rows are extended as needed.
pub fn add_symbol(rows: &mut [Vec<u8>], numbers: &[u8], index: u8, frames: &[u8]) {
    let Ok(length) = u16::try_from(frames.len()) else {
        return;
    };
    if length == 0 {
        return;
    }
    for row in rows.iter_mut() {
        if row.len() < LENGTH + frames.len() {
            row.resize(LENGTH + frames.len(), 0);
        }
    }
    let factors: Vec<u8> = numbers
        .iter()
        .map(|number| gf256::factor(*number, index))
        .collect();
    let mut add = |at: usize, bytes: &[u8]| {
        let rows = rows.iter_mut().map(|row| &mut row[..]);
        gf256::add_multiples(rows, &factors, at, bytes);
    };
    add(0, &length.to_le_bytes());
    add(LENGTH, frames);
}

/// Returns the frames in a symbol; `None` if its length is wrong.
pub fn frames_of(symbol: &[u8]) -> Option<&[u8]> {
    let (length, rest) = symbol.split_first_chunk()?;
    rest.get(..usize::from(u16::from_le_bytes(*length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_survive_the_wire_and_wrong_ones_are_refused() {
        let head = Head {
            number: 15,
            count: 16,
            records: 128,
        };
        let frame = [&head.to_bytes()[..], &[7, 0, 1]].concat();
        assert_eq!(Head::read(&frame), Some((head, &[7, 0, 1][..])));
        assert_eq!(head.block(1000), Some(857..985));
        assert_eq!(head.block(142), None);
        let wrong: [&[u8]; 7] = [
            &[0x08, 1, 1, 0],      // no length
            &[0x18, 1, 1, 0, 0],   // number 1 of 1
            &[0x08, 17, 1, 0, 0],  // 17 parities
            &[0x08, 0, 1, 0, 0],   // none
            &[0x08, 1, 0, 0, 0],   // of no record
            &[0x08, 1, 129, 0, 0], // of too many
            &[0x07, 1, 1, 0, 0],   // another kind
        ];
        for frames in wrong {
            assert_eq!(Head::read(frames), None, "{frames:?}");
        }
    }

    #[test]
    fn a_parity_of_records_of_all_lengths_restores_one() {
        let records: [&[u8]; 4] = [b"longest of all", b"", b"short", b"x"];
        let mut rows = vec![Vec::new(); 2];
        for (index, frames) in records.iter().enumerate() {
            add_symbol(&mut rows, &[0, 1], index as u8, frames);
        }
        for (number, row) in rows.iter().enumerate() {
            for lost in 0..records.len() {
                let mut row = vec![row.clone()];
                for (index, frames) in records.iter().enumerate().filter(|(i, _)| *i != lost) {
                    add_symbol(&mut row, &[number as u8], index as u8, frames);
                }
                gf256::solve(&mut row, &[number as u8], &[lost as u8]);
                assert_eq!(frames_of(&row[0]), Some(records[lost]));
            }
        }
    }

    #[test]
    fn a_symbol_that_claims_too_much_holds_no_frames() {
        assert_eq!(frames_of(&[3, 0, 1, 2]), None);
        assert_eq!(frames_of(&[2, 0, 1, 2, 9]), Some(&[1, 2][..]));
        assert_eq!(frames_of(&[1]), None);
    }
}
