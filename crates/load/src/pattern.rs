//! The bytes of a stream: a function of a seed and the position, so that a receiver can detect
//! every wrong, missing, duplicated or misplaced byte without keeping a copy.
//!
//! Word `i` (8 bytes, little endian) of a stream is SplitMix64's output number `i` (Steele, Lea,
//! Flood: "Fast Splittable Pseudorandom Number Generators", 2014).

/// SplitMix64's increment, the odd integer nearest to 2^64 divided by the golden ratio.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A stream's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    seed: u64,
}

impl Pattern {
    /// The stream that belongs to `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Word number `index` of the stream.
    pub const fn word(self, index: u64) -> u64 {
        let mut z = self
            .seed
            .wrapping_add(index.wrapping_add(1).wrapping_mul(GAMMA));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns the number `index` of uniform random ones, from 0 (inclusive) to 1 (exclusive).
    #[must_use]
    pub fn share(self, index: u64) -> f64 {
        (self.word(index) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Writes the stream's bytes from `offset` on into `buf`.
    pub fn fill(self, offset: u64, buf: &mut [u8]) {
        let (mut index, head) = (offset / 8, (offset % 8) as usize);
        let mut rest = buf;
        if head != 0 {
            let bytes = self.word(index).to_le_bytes();
            let n = rest.len().min(8 - head);
            let (now, later) = rest.split_at_mut(n);
            now.copy_from_slice(&bytes[head..head + n]);
            rest = later;
            index += 1;
        }
        let (words, tail) = rest.as_chunks_mut::<8>();
        for word in words {
            *word = self.word(index).to_le_bytes();
            index += 1;
        }
        let bytes = self.word(index).to_le_bytes();
        tail.copy_from_slice(&bytes[..tail.len()]);
    }

    /// Position in `buf` of the first byte that is not the stream's byte at `offset` plus that
    /// position.
    #[must_use]
    pub fn first_mismatch(self, offset: u64, buf: &[u8]) -> Option<usize> {
        let mut expected = [0_u8; 4096];
        let mut done = 0;
        for part in buf.chunks(expected.len()) {
            let expected = &mut expected[..part.len()];
            self.fill(offset + done as u64, expected);
            if part != expected {
                let at = part.iter().zip(expected.iter()).position(|(a, b)| a != b)?;
                return Some(done + at);
            }
            done += part.len();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First outputs for seed 1234567, as published with the algorithm's public-domain C version by
    /// S. Vigna.
    #[test]
    fn words_are_splitmix64() {
        let p = Pattern::new(1_234_567);
        let words: Vec<u64> = (0..5).map(|i| p.word(i)).collect();
        assert_eq!(
            words,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821,
            ]
        );
    }

    #[test]
    fn any_window_equals_the_whole() {
        let p = Pattern::new(7);
        let mut whole = [0_u8; 100];
        p.fill(0, &mut whole);
        for from in 0..40 {
            for to in from..100 {
                let mut window = vec![0; to - from];
                p.fill(from as u64, &mut window);
                assert_eq!(window, whole[from..to], "{from}..{to}");
            }
        }
    }

    #[test]
    fn one_wrong_byte_is_found_where_it_is() {
        let p = Pattern::new(9);
        let mut buf = vec![0; 20_000];
        p.fill(13, &mut buf);
        assert_eq!(p.first_mismatch(13, &buf), None);
        buf[17_001] ^= 0x80;
        assert_eq!(p.first_mismatch(13, &buf), Some(17_001));
    }

    #[test]
    fn a_shifted_stream_is_wrong() {
        let p = Pattern::new(9);
        let mut buf = vec![0; 64];
        p.fill(0, &mut buf);
        assert!(p.first_mismatch(8, &buf).is_some());
    }
}
