//! Pages of a column: decompressed and decoded without trust in their numbers.
//!
//! Encodings: <https://parquet.apache.org/docs/file-format/data-pages/encodings/>. The decoders of
//! the library panic on malformed pages and reserve as much memory as a header asks for.

use parquet::basic::{Compression, Encoding};
use parquet::column::page::Page;

use super::MAX_TEXT;

/// Largest expansion of a byte by Snappy: its longest copy is 64 bytes and takes 3.
const SNAPPY_RATIO: usize = 32;
/// Largest block of deltas; writers use 128 or 256.
const MAX_BLOCK: u64 = 1 << 16;

/// Values of a column.
pub(super) trait Value: Sized {
    /// Decodes a dictionary or plain values: exactly `count`, and no bytes behind them.
    fn plain(bytes: &[u8], count: usize) -> Option<Vec<Self>>;

    /// Decodes differences, if the type allows them.
    fn deltas(bytes: &[u8], count: usize) -> Option<Vec<Self>>;
}

/// A column of a row group: for each row, the index of its value in the dictionary.
#[derive(Debug, Default)]
pub(super) struct Texts {
    pub dictionary: Vec<String>,
    pub rows: Vec<u32>,
}

/// Values of the pages of a column.
#[derive(Debug)]
pub(super) struct Pages<T> {
    compression: Compression,
    dictionary: Option<Vec<T>>,
    /// Remaining rows.
    left: usize,
}

/// Content of a data page.
pub(super) enum Rows<T> {
    /// Indexes into the dictionary.
    Indices(Vec<u32>),
    /// Values.
    Values(Vec<T>),
}

impl<T: Value> Pages<T> {
    pub fn new(compression: Compression, rows: usize) -> Self {
        Pages {
            compression,
            dictionary: None,
            left: rows,
        }
    }

    /// Returns the rows of the next page, `None` for a dictionary.
    pub fn take(&mut self, page: &Page) -> Result<Option<Rows<T>>, &'static str> {
        let buffer: &[u8] = page.buffer();
        let compressed = match page {
            Page::DataPageV2 {
                num_nulls,
                def_levels_byte_len,
                rep_levels_byte_len,
                is_compressed,
                ..
            } => {
                if (*num_nulls, *def_levels_byte_len, *rep_levels_byte_len) != (0, 0, 0) {
                    return Err("a page has nulls, or lists");
                }
                *is_compressed
            }
            _ => true,
        };
        let bytes = match (compressed, self.compression) {
            (true, Compression::SNAPPY) => decompressed(buffer)?,
            (false, _) | (_, Compression::UNCOMPRESSED) => buffer.to_vec(),
            _ => return Err("it is not compressed by Snappy"),
        };
        let count = page.num_values() as usize;
        if let Page::DictionaryPage { encoding, .. } = page {
            let plain = matches!(encoding, Encoding::PLAIN | Encoding::PLAIN_DICTIONARY);
            if !plain || self.dictionary.is_some() {
                return Err("there is more than one dictionary, or it is not plain");
            }
            self.dictionary = Some(T::plain(&bytes, count).ok_or("a dictionary is damaged")?);
            return Ok(None);
        }
        self.left = self
            .left
            .checked_sub(count)
            .ok_or("it has more rows than were announced")?;
        let rows = match page.encoding() {
            Encoding::PLAIN => T::plain(&bytes, count).map(Rows::Values),
            Encoding::DELTA_BINARY_PACKED => T::deltas(&bytes, count).map(Rows::Values),
            Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY => {
                let dictionary = self.dictionary_length();
                let indices = indices(&bytes, count);
                let known = |of: &Vec<u32>| of.iter().all(|index| (*index as usize) < dictionary);
                indices.filter(known).map(Rows::Indices)
            }
            _ => return Err("an encoding is not used by recordings"),
        };
        rows.ok_or("a page is damaged").map(Some)
    }

    /// Returns the dictionary, and whether the column is complete.
    pub fn finish(self) -> Result<Vec<T>, &'static str> {
        match self.left {
            0 => Ok(self.dictionary.unwrap_or_default()),
            _ => Err("it has fewer rows than were announced"),
        }
    }

    /// Number of values in the dictionary.
    pub fn dictionary_length(&self) -> usize {
        self.dictionary.as_ref().map_or(0, Vec::len)
    }

    /// Returns the values of these indexes of the dictionary.
    pub fn look_up(&self, indices: &[u32]) -> Vec<T>
    where
        T: Clone,
    {
        let dictionary = self.dictionary.as_deref().unwrap_or_default();
        let values = indices.iter().map(|index| dictionary.get(*index as usize));
        values.flatten().cloned().collect()
    }
}

impl Value for i64 {
    fn plain(bytes: &[u8], count: usize) -> Option<Vec<i64>> {
        let (words, rest) = bytes.as_chunks::<8>();
        let whole = rest.is_empty() && words.len() == count;
        whole.then(|| words.iter().map(|word| i64::from_le_bytes(*word)).collect())
    }

    /// DELTA_BINARY_PACKED.
    fn deltas(bytes: &[u8], count: usize) -> Option<Vec<i64>> {
        let mut bytes = Bytes(bytes);
        let (block, parts) = (bytes.varint()?, bytes.varint()?);
        let (total, first) = (bytes.varint()?, bytes.zigzag()?);
        let fits = block <= MAX_BLOCK && block.is_multiple_of(128) && parts > 0;
        if !fits || !block.is_multiple_of(parts) || total != count as u64 {
            return None;
        }
        let part = (block / parts) as usize;
        if !part.is_multiple_of(32) {
            return None;
        }
        let mut values = Vec::new();
        values.extend((count > 0).then_some(first));
        let mut last = first;
        while values.len() < count {
            let least = bytes.zigzag()?;
            for width in bytes.take(parts as usize)? {
                let left = count - values.len();
                if left == 0 {
                    break;
                }
                if *width > 64 {
                    return None;
                }
                let packed = bytes.take(part * usize::from(*width) / 8)?;
                values.extend((0..part.min(left)).map(|at| {
                    let delta = unpack(packed, *width, at).cast_signed();
                    last = last.wrapping_add(least).wrapping_add(delta);
                    last
                }));
            }
        }
        Some(values)
    }
}

impl Value for String {
    fn plain(bytes: &[u8], count: usize) -> Option<Vec<String>> {
        let mut bytes = Bytes(bytes);
        let mut texts = Vec::new();
        while !bytes.0.is_empty() {
            let length: [u8; 4] = bytes.take(4)?.try_into().ok()?;
            let length = u32::from_le_bytes(length) as usize;
            let text = bytes.take(length)?;
            if length > MAX_TEXT {
                return None;
            }
            texts.push(String::from_utf8(text.to_vec()).ok()?);
        }
        (texts.len() == count).then_some(texts)
    }

    fn deltas(_bytes: &[u8], _count: usize) -> Option<Vec<String>> {
        None
    }
}

/// RLE_DICTIONARY: a byte for the width, then runs of equal and of packed numbers.
fn indices(bytes: &[u8], count: usize) -> Option<Vec<u32>> {
    let mut bytes = Bytes(bytes);
    let width = bytes.take(1)?[0];
    if width > 32 {
        return None;
    }
    let mut indices = Vec::new();
    while indices.len() < count {
        let left = count - indices.len();
        let header = bytes.varint()?;
        let length = usize::try_from(header >> 1).ok()?;
        if header & 1 == 0 {
            let mut word = [0; 4];
            let value = bytes.take(usize::from(width).div_ceil(8))?;
            word[..value.len()].copy_from_slice(value);
            let run = std::iter::repeat_n(u32::from_le_bytes(word), length.min(left));
            indices.extend(run);
        } else {
            let packed = bytes.take(length.checked_mul(usize::from(width))?)?;
            let values = length.saturating_mul(8).min(left);
            indices.extend((0..values).map(|at| unpack(packed, width, at) as u32));
        }
    }
    Some(indices)
}

/// Returns the number at an index of numbers packed with this width, 64 bits at most, lowest bit first.
fn unpack(packed: &[u8], width: u8, at: usize) -> u64 {
    let bit = at * usize::from(width);
    let mut word = [0; 16];
    let rest = packed.get(bit / 8..).unwrap_or_default();
    let length = rest.len().min(9);
    word[..length].copy_from_slice(&rest[..length]);
    let mask = (1_u128 << width) - 1;
    ((u128::from_le_bytes(word) >> (bit % 8)) & mask) as u64
}

fn decompressed(bytes: &[u8]) -> Result<Vec<u8>, &'static str> {
    const DAMAGED: &str = "a page cannot be decompressed";
    let length = snap::raw::decompress_len(bytes).map_err(|_| DAMAGED)?;
    if length > bytes.len().saturating_mul(SNAPPY_RATIO) {
        return Err(DAMAGED);
    }
    let mut decoder = snap::raw::Decoder::new();
    decoder.decompress_vec(bytes).map_err(|_| DAMAGED)
}

/// Remaining bytes.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// ULEB128.
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return None;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn zigzag(&mut self) -> Option<i64> {
        let value = self.varint()?;
        Some((value >> 1).cast_signed() ^ -((value & 1).cast_signed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_numbers_begin_with_the_lowest_bit() {
        // The example of the specification: 0 to 7 with 3 bits, in one group of eight.
        let packed = [3, 0b11, 0b1000_1000, 0b1100_0110, 0b1111_1010];
        assert_eq!(indices(&packed, 8), Some((0..8).collect()));
        assert_eq!(indices(&packed[..4], 8), None);
    }

    #[test]
    fn runs_end_where_the_page_does() {
        // 1000 times 5, of which the page has 3.
        assert_eq!(indices(&[3, 0xd0, 0x0f, 5], 3), Some(vec![5; 3]));
        assert_eq!(indices(&[33, 0xd0, 0x0f, 5], 3), None);
    }

    #[test]
    fn deltas_are_of_as_many_values_as_the_page_says() {
        // Blocks of 128 in 4 parts, 3 values from 7 on; least difference -2, one part of 1 bit: 0, 1.
        let page = [0x80, 1, 4, 3, 14, 3, 1, 0, 0, 0, 0b10, 0, 0, 0];
        assert_eq!(i64::deltas(&page, 3), Some(vec![7, 5, 4]));
        assert_eq!(i64::deltas(&page, 4), None);
        assert_eq!(i64::deltas(&page[..13], 3), None);
    }

    #[test]
    fn a_page_does_not_grow_beyond_the_limit_of_snappy() {
        let zeros = snap::raw::Encoder::new()
            .compress_vec(&[0; 60_000])
            .expect("compressed");
        assert_eq!(decompressed(&zeros).map(|bytes| bytes.len()), Ok(60_000));
        // A length of 2^32 - 1 as a varint, with hardly any data.
        assert!(decompressed(&[0xff, 0xff, 0xff, 0xff, 0x0f, 0, 0]).is_err());
    }
}
