//! Random sources, passed in by the caller.

use std::time::Duration;

/// A cryptographically strong random source.
///
/// The daemon passes the system's generator, the simulation a seeded one; `proto` has none.
pub trait Rng {
    /// Fills `destination` with random bytes. A source that cannot do so must not return.
    fn fill(&mut self, destination: &mut [u8]);

    /// A random 32-bit number.
    fn next_u32(&mut self) -> u32 {
        let mut bytes = [0; 4];
        self.fill(&mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// A random 64-bit number.
    fn next_u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// A random duration in `[0, bound)`; zero if `bound` is zero.
    ///
    /// Suitable for jitter, not for keys: the multiplication is biased by at most `bound` / 2^64.
    fn duration_below(&mut self, bound: Duration) -> Duration {
        let bound = bound.as_nanos().min(u128::from(u64::MAX));
        // Lossless: (2^64 - 1) * bound / 2^64 < bound <= 2^64 - 1.
        Duration::from_nanos(((u128::from(self.next_u64()) * bound) >> 64) as u64)
    }
}

/// Random bytes drawn in advance, so that frequent small draws do not cost a system call each.
///
/// Suitable for jitter, not for keys: the bytes stay in memory before and after use.
#[derive(Debug)]
pub struct BufferedRng {
    bytes: [u8; 256],
    used: usize,
}

impl Default for BufferedRng {
    fn default() -> BufferedRng {
        BufferedRng {
            bytes: [0; 256],
            used: 256,
        }
    }
}

impl BufferedRng {
    /// Returns a source that uses the buffer and refills it from `source`.
    pub fn of<'a>(&'a mut self, source: &'a mut dyn Rng) -> impl Rng + 'a {
        Replenished {
            ahead: self,
            source,
        }
    }
}

struct Replenished<'a> {
    ahead: &'a mut BufferedRng,
    source: &'a mut dyn Rng,
}

impl Rng for Replenished<'_> {
    fn fill(&mut self, destination: &mut [u8]) {
        let BufferedRng { bytes, used } = &mut *self.ahead;
        for part in destination.chunks_mut(bytes.len()) {
            if part.len() > bytes.len() - *used {
                self.source.fill(bytes);
                *used = 0;
            }
            part.copy_from_slice(&bytes[*used..*used + part.len()]);
            *used += part.len();
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! A seeded source for the tests of this crate.
    use super::Rng;
    use rand::{RngCore, SeedableRng};

    pub struct Seeded(rand_chacha::ChaCha8Rng);

    impl Seeded {
        pub fn new(seed: u64) -> Self {
            Seeded(rand_chacha::ChaCha8Rng::seed_from_u64(seed))
        }
    }

    impl Rng for Seeded {
        fn fill(&mut self, destination: &mut [u8]) {
            self.0.fill_bytes(destination);
        }
    }

    /// Returns the given bytes once, in order; for published test vectors.
    pub struct Scripted(pub Vec<u8>);

    impl Rng for Scripted {
        fn fill(&mut self, destination: &mut [u8]) {
            let rest = self.0.split_off(destination.len());
            destination.copy_from_slice(&self.0);
            self.0 = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Constant(u8);
    impl Rng for Constant {
        fn fill(&mut self, destination: &mut [u8]) {
            destination.fill(self.0);
        }
    }

    #[test]
    fn buffered_bytes_are_drawn_rarely_and_returned_once() {
        /// Every byte is the number of the fill.
        struct Fills(u8);
        impl Rng for Fills {
            fn fill(&mut self, destination: &mut [u8]) {
                self.0 += 1;
                destination.fill(self.0);
            }
        }
        let (mut ahead, mut source) = (BufferedRng::default(), Fills(0));
        let drawn: Vec<u64> = (0..65).map(|_| ahead.of(&mut source).next_u64()).collect();
        assert_eq!(drawn[..32], [0x0101_0101_0101_0101; 32]);
        assert_eq!(drawn[32..64], [0x0202_0202_0202_0202; 32]);
        assert_eq!(source.0, 3);
        let mut much = [0; 600];
        ahead.of(&mut source).fill(&mut much);
        assert!(much.iter().all(|b| *b > 3));
    }

    #[test]
    fn duration_stays_below_its_bound() {
        let bound = Duration::from_millis(333);
        assert_eq!(Constant(0).duration_below(bound), Duration::ZERO);
        assert_eq!(
            Constant(0xff).duration_below(bound),
            bound - Duration::from_nanos(1)
        );
        assert_eq!(
            Constant(0xff).duration_below(Duration::ZERO),
            Duration::ZERO
        );
    }
}
