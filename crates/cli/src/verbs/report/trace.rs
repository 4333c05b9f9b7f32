//! Quantities over time, from the columns of a recording.

use seikan_diagnose::{Cause, Evidence};
use seikan_observe::{Column, Subject, metric};

/// A quantity over time.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Name of the quantity.
    pub title: String,
    /// Unit, as printed at the axis.
    pub unit: &'static str,
    /// Seconds since the beginning, and the value there; ascending.
    pub points: Vec<(f64, f64)>,
    /// Causes that it indicates.
    pub causes: &'static [Cause],
    /// Whether it measures work, which correlates with throughput in any case.
    pub is_work: bool,
}

impl Trace {
    /// Returns the maximum.
    pub fn max(&self) -> f64 {
        let values = self.points.iter().map(|(_, value)| *value);
        values.fold(0.0, f64::max)
    }
}

/// Returns the bits per second through the inner interface in the direction with more traffic, in
/// Mbit/s.
pub fn throughput(evidence: &Evidence) -> Option<Trace> {
    let inner = evidence.map.inner.clone()?;
    let (name, direction) = if evidence.sends() {
        (metric::TX_BYTES, "into")
    } else {
        (metric::RX_BYTES, "out of")
    };
    let column = evidence.column(&Subject::Link(inner.clone()), name)?;
    let points = rate(evidence, &[column], 8e-6);
    (!points.is_empty()).then(|| Trace {
        title: format!("throughput {direction} {inner}"),
        unit: "Mbit/s",
        points,
        causes: &[],
        is_work: true,
    })
}

/// Returns the growth per second of the sum of counters, times `scale`, in the middle of every
/// interval between samples. Growth over an interval without a sample is distributed evenly.
pub fn rate(evidence: &Evidence, columns: &[&Column], scale: f64) -> Vec<(f64, f64)> {
    let times = seconds(evidence);
    let mut grown = vec![0.0; times.len().saturating_sub(1)];
    let mut is_seen = vec![false; grown.len()];
    for column in columns {
        for pair in column.points.windows(2) {
            let ((from, before), (to, now)) = (pair[0], pair[1]);
            let (from, to) = (from as usize, to as usize);
            if to >= times.len() || from >= to || times[to] <= times[from] {
                continue;
            }
            let growth = now.saturating_sub(before) as f64 / (times[to] - times[from]);
            for i in from..to {
                grown[i] += growth;
                is_seen[i] = true;
            }
        }
    }
    let middle = |i: usize| (times[i] + times[i + 1]) / 2.0;
    let seen = (0..grown.len()).filter(|i| is_seen[*i] && times[i + 1] > times[*i]);
    seen.map(|i| (middle(i), grown[i] * scale)).collect()
}

/// Returns the sum of gauges, times `scale`, at every sample that has one of them.
pub fn gauge(evidence: &Evidence, columns: &[&Column], scale: f64) -> Vec<(f64, f64)> {
    let times = seconds(evidence);
    let mut sums: Vec<Option<f64>> = vec![None; times.len()];
    for column in columns {
        for (index, value) in &column.points {
            if let Some(sum) = sums.get_mut(*index as usize) {
                *sum = Some(sum.unwrap_or(0.0) + *value as f64 * scale);
            }
        }
    }
    let both = times.into_iter().zip(sums);
    both.filter_map(|(time, sum)| Some((time, sum?))).collect()
}

/// Returns the times of the samples, in seconds.
pub fn seconds(evidence: &Evidence) -> Vec<f64> {
    let times = evidence.series.times.iter();
    times.map(|time| time.as_secs_f64()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::report::testing::*;

    #[test]
    fn a_rate_is_growth_over_time_in_the_middle_of_an_interval() {
        let mut evidence = sampled(&[0.0, 0.5, 1.5]);
        count(&mut evidence, Subject::Host, "x", &[10, 20, 50]);
        let column = evidence.column(&Subject::Host, "x").expect("column");
        assert_eq!(
            rate(&evidence, &[column, column], 1.0),
            [(0.25, 40.0), (1.0, 60.0)]
        );
    }

    #[test]
    fn unsampled_growth_is_distributed_and_invalid_points_are_skipped() {
        let evidence = sampled(&[0.0, 1.0, 2.0]);
        let column = Column {
            kind: seikan_observe::Kind::Counter,
            points: vec![(0, 0), (2, 10), (9, 1000)],
        };
        assert_eq!(rate(&evidence, &[&column], 1.0), [(0.5, 5.0), (1.5, 5.0)]);
        assert_eq!(gauge(&evidence, &[&column], 2.0), [(0.0, 0.0), (2.0, 20.0)]);
    }
}
