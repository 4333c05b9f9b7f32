//! Statistics for series of one machine: neighbours in time are not independent, and noise is not normal.
//!
//! Intervals come from resampling with a seeded generator: the same data has the same result.

use serde::{Deserialize, Serialize};

/// Number of resamples: of 2,000, the 2.5 % ends are 50 values from the edge.
const RESAMPLES: usize = 2_000;

/// An estimate with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Interval {
    /// The estimate.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Correlation of two series at the lag at which it is largest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Correlation {
    /// Lag of the second series behind the first, in values; negative: it comes first.
    pub lag: i32,
    /// Pearson's r at that lag, with the interval of a moving-block bootstrap (Künsch 1989).
    pub r: Interval,
}

/// Returns the mean gain of the second kind of block over the first, as a ratio minus 1, of pairs
/// (without, with) close in time. `None` for fewer than two pairs, or without throughput in the
/// first kind.
pub fn paired_gain(pairs: &[(f64, f64)]) -> Option<Interval> {
    let sane = |(a, b): &(f64, f64)| a.is_finite() && b.is_finite() && *a >= 0.0 && *b >= 0.0;
    if pairs.len() < 2 || !pairs.iter().all(sane) {
        return None;
    }
    let gain = |pairs: &[(f64, f64)]| {
        let (a, b) = pairs
            .iter()
            .fold((0.0, 0.0), |(a, b), pair| (a + pair.0, b + pair.1));
        (a > 0.0).then(|| b / a - 1.0)
    };
    let value = gain(pairs)?;
    let mut random = Random(pairs.len() as u64);
    let drawn = (0..RESAMPLES).filter_map(|_| {
        let again: Vec<(f64, f64)> = (0..pairs.len())
            .map(|_| pairs[random.below(pairs.len())])
            .collect();
        gain(&again)
    });
    Some(interval(value, drawn.collect()))
}

/// Correlates `a` with `b` at every lag up to `max_lag` values in either direction. `None` if one
/// of them is constant or shorter than four blocks.
pub fn correlate(a: &[f64], b: &[f64], max_lag: usize, block: usize) -> Option<Correlation> {
    let (n, block) = (a.len().min(b.len()), block.max(1));
    if n < 4 * block + max_lag {
        return None;
    }
    let (lag, r) = strongest(&a[..n], &b[..n], max_lag)?;
    let (a, b) = shifted(&a[..n], &b[..n], lag);
    let mut random = Random(n as u64);
    let blocks = a.len() / block;
    let drawn = (0..RESAMPLES).filter_map(|_| {
        let starts: Vec<usize> = (0..blocks)
            .map(|_| random.below(a.len() - block + 1))
            .collect();
        let pairs = starts
            .iter()
            .flat_map(|start| (*start..start + block).map(|i| (a[i], b[i])));
        pearson(pairs)
    });
    Some(Correlation {
        lag,
        r: interval(r, drawn.collect()),
    })
}

/// Returns the lag up to `max_lag` in either direction at which `a` correlates most with `b`, and
/// Pearson's r there without an interval. `None` if one of them is constant.
pub fn strongest(a: &[f64], b: &[f64], max_lag: usize) -> Option<(i32, f64)> {
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let most = max_lag.min(n.saturating_sub(1)) as i32;
    // Of equal lags, as of periodic series, take the nearest.
    let lags = (0..=most).flat_map(|lag| [lag, -lag].into_iter().take(1 + (lag > 0) as usize));
    lags.filter_map(|lag| {
        let (a, b) = shifted(a, b, lag);
        Some((lag, pearson(a.iter().copied().zip(b.iter().copied()))?))
    })
    .reduce(|best, next| {
        if next.1.abs() > best.1.abs() + 1e-9 {
            next
        } else {
            best
        }
    })
}

/// Returns both with the same length, the second shifted by `lag`.
pub fn shifted<'a>(a: &'a [f64], b: &'a [f64], lag: i32) -> (&'a [f64], &'a [f64]) {
    let (n, shift) = (a.len(), lag.unsigned_abs() as usize);
    if lag >= 0 {
        (&a[..n - shift], &b[shift..])
    } else {
        (&a[shift..], &b[..n - shift])
    }
}

/// Returns the difference of each value from the previous one, which removes a common trend of two series.
pub fn differences(values: &[f64]) -> Vec<f64> {
    values.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// Returns the mean time in a queue in seconds, by Little's law: its mean length over the rate of
/// departures. `None` without departures.
pub fn queueing_delay(standing: f64, leaving_per_second: f64) -> Option<f64> {
    (leaving_per_second > 0.0).then(|| standing / leaving_per_second)
}

fn pearson(pairs: impl Iterator<Item = (f64, f64)> + Clone) -> Option<f64> {
    let n = pairs.clone().count() as f64;
    let (sa, sb) = pairs
        .clone()
        .fold((0.0, 0.0), |(sa, sb), (a, b)| (sa + a, sb + b));
    let (ma, mb) = (sa / n, sb / n);
    let (mut vab, mut va, mut vb) = (0.0, 0.0, 0.0);
    for (a, b) in pairs {
        vab += (a - ma) * (b - mb);
        va += (a - ma).powi(2);
        vb += (b - mb).powi(2);
    }
    (va > 0.0 && vb > 0.0).then(|| (vab / (va * vb).sqrt()).clamp(-1.0, 1.0))
}

fn interval(value: f64, mut drawn: Vec<f64>) -> Interval {
    drawn.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let index = (share * drawn.len() as f64) as usize;
        drawn
            .get(index.min(drawn.len().saturating_sub(1)))
            .copied()
            .unwrap_or(value)
    };
    Interval {
        value,
        low: at(0.025),
        high: at(0.975),
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014), sufficient for random indexes.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * n as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_is_seen_with_an_interval_that_holds_it() {
        let pairs: Vec<(f64, f64)> = (0..8).map(|i| (100.0 + f64::from(i), 150.0)).collect();
        let gain = paired_gain(&pairs).expect("gain");
        // 8 * 150 / (8 * 100 + 28) - 1.
        assert!((gain.value - (1200.0 / 828.0 - 1.0)).abs() < 1e-12);
        assert!(gain.low > 0.4 && gain.low <= gain.value && gain.value <= gain.high);
    }

    #[test]
    fn noise_is_no_gain() {
        let pairs = [
            (100.0, 60.0),
            (50.0, 90.0),
            (80.0, 85.0),
            (95.0, 70.0),
            (60.0, 80.0),
        ];
        let gain = paired_gain(&pairs).expect("gain");
        assert!(gain.low < 0.0 && gain.high > 0.0, "{gain:?}");
        assert_eq!(paired_gain(&pairs[..1]), None);
        assert_eq!(paired_gain(&[(0.0, 1.0), (0.0, 2.0)]), None);
    }

    #[test]
    fn the_lag_is_found() {
        let a: Vec<f64> = (0..200).map(|i| ((i * i) % 17) as f64).collect();
        let mut b = vec![0.0; 200];
        b[3..].copy_from_slice(&a[..197]);
        let found = correlate(&a, &b, 5, 5).expect("correlation");
        assert_eq!(found.lag, 3);
        assert!(found.r.value > 0.999 && found.r.low > 0.99, "{found:?}");
        assert_eq!(correlate(&a, &[1.0; 200], 5, 5), None);
    }

    #[test]
    fn a_packet_waits_for_those_before_it() {
        assert_eq!(queueing_delay(100.0, 1000.0), Some(0.1));
        assert_eq!(queueing_delay(100.0, 0.0), None);
    }
}
