//! A histogram with power-of-two buckets: cheap enough for every batch.

use serde::Serialize;

const BUCKETS: usize = 17;

/// Counts of values by their magnitude: bucket `i` holds values in `[2^i, 2^(i+1))`, bucket 0 also
/// zero, the last one everything above 65,535.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Histogram {
    buckets: [u64; BUCKETS],
    count: u64,
    sum: u64,
}

impl Histogram {
    /// Adds one value.
    pub fn record(&mut self, value: u64) {
        let bucket = (63 - (value | 1).leading_zeros()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)] += 1;
        self.count += 1;
        self.sum += value;
    }

    /// Returns the number of values added.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The sum of all values.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The arithmetic mean, or zero without values.
    pub fn mean(&self) -> f64 {
        if self.count == 0 {
            0.0
        } else {
            self.sum as f64 / self.count as f64
        }
    }

    /// Counts by bucket, with the inclusive lower bound of each.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        self.buckets
            .iter()
            .enumerate()
            .map(|(i, n)| (if i == 0 { 0 } else { 1 << i }, *n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_land_in_the_bucket_of_their_highest_bit() {
        let mut h = Histogram::default();
        for v in [0, 1, 2, 3, 4, 64, 65_535, 65_536, u64::from(u32::MAX)] {
            h.record(v);
        }
        let at = |low: u64| h.buckets().find(|(l, _)| *l == low).unwrap().1;
        assert_eq!((at(0), at(2), at(4), at(64)), (2, 2, 1, 1));
        assert_eq!((at(32_768), at(65_536)), (1, 2));
        assert_eq!(h.count(), 9);
    }
}
