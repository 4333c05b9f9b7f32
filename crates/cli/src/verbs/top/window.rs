//! The latest samples of a path.

use std::collections::VecDeque;
use std::time::Duration;

use seikan_diagnose::Evidence;
use seikan_observe::path::{PathMap, Unseen};
use seikan_observe::{Sample, Series, metric};
use seikan_sys::sample::Sampler;

/// Age at which samples are removed.
const MAX_AGE: Duration = Duration::from_secs(12);

/// Samples, and a longer history of the throughput.
#[derive(Debug)]
pub struct Window {
    map: PathMap,
    expected: Option<f64>,
    samples: VecDeque<Sample>,
    unseen: Vec<Unseen>,
    /// Bits per second out of this host and in, the newest last.
    history: VecDeque<(f64, f64)>,
    history_max: usize,
}

impl Window {
    /// Creates an empty window of a path with `expected` bits per second.
    pub fn new(map: PathMap, expected: Option<f64>, history_max: usize) -> Self {
        Window {
            unseen: map.unseen.clone(),
            map,
            expected,
            samples: VecDeque::new(),
            history: VecDeque::new(),
            history_max,
        }
    }

    /// Takes the next sample.
    pub fn push(&mut self, sampler: &mut Sampler) {
        self.add(sampler.sample());
        self.map.flows = sampler.flows();
        if let Some(program) = &mut self.map.program {
            program.threads = sampler.threads();
        }
        self.map.unseen.clone_from(&self.unseen);
        self.map.unseen.extend_from_slice(sampler.missing());
    }

    fn add(&mut self, sample: Sample) {
        let begin = sample.at.saturating_sub(MAX_AGE);
        self.samples.push_back(sample);
        while self.samples.front().is_some_and(|first| first.at < begin) {
            self.samples.pop_front();
        }
    }

    /// Adds the throughput of the last `length` to the history.
    pub fn remember(&mut self, length: Duration) {
        let evidence = self.evidence(length);
        let bits = |name| evidence.inner(name).unwrap_or(0.0) * 8.0 / evidence.seconds();
        let both = (bits(metric::TX_BYTES), bits(metric::RX_BYTES));
        self.history.push_back(both);
        if self.history.len() > self.history_max {
            self.history.pop_front();
        }
    }

    /// Returns the history; see [`Window::remember`].
    pub fn history(&self) -> Vec<(f64, f64)> {
        self.history.iter().copied().collect()
    }

    /// Returns the evidence of the last `length`. It has at least two samples, if the window has
    /// two.
    pub fn evidence(&self, length: Duration) -> Evidence {
        let last = self.samples.back().map_or(Duration::ZERO, |last| last.at);
        let begin = last.saturating_sub(length);
        let within = self.samples.iter().filter(|sample| sample.at >= begin);
        let count = within.count().max(2).min(self.samples.len());
        let mut series = Series::default();
        for sample in self.samples.range(self.samples.len() - count..) {
            series.push(sample.clone());
        }
        Evidence {
            map: self.map.clone(),
            series,
            expected: self.expected,
            ..Evidence::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_observe::{Key, Kind, Subject};

    fn sample(tenths: u64, bytes: u64) -> Sample {
        let key = Key::new(Subject::Link("tun0".into()), metric::TX_BYTES);
        Sample {
            at: Duration::from_millis(tenths * 100),
            values: vec![(key, Kind::Counter, bytes)],
        }
    }

    #[test]
    fn only_the_latest_samples_are_kept_and_used() {
        let map = PathMap {
            inner: Some("tun0".into()),
            ..PathMap::default()
        };
        let mut window = Window::new(map, None, 2);
        // 1,000 bytes per tenth of a second: 80 kbit/s; ten times that from second 20 on.
        for tenth in 0..=210 {
            let fast = tenth_over(tenth);
            window.add(sample(tenth, tenth * 1_000 + fast * 9_000));
        }
        assert_eq!(window.samples.len(), 121);
        let now = window.evidence(Duration::from_secs(1));
        assert!(
            (now.throughput() - 800e3).abs() < 1.0,
            "{}",
            now.throughput()
        );
        let long = window.evidence(Duration::from_secs(10));
        assert!(
            (long.throughput() - 152e3).abs() < 1.0,
            "{}",
            long.throughput()
        );
        for _ in 0..3 {
            window.remember(Duration::from_secs(1));
        }
        assert_eq!(window.history(), [(800e3, 0.0); 2]);
    }

    /// Returns the tenths of seconds after second 20.
    fn tenth_over(tenth: u64) -> u64 {
        tenth.saturating_sub(200)
    }
}
