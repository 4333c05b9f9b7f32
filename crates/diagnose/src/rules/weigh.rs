//! Weights of findings.

use crate::finding::LEAST_WEIGHT;
use crate::{Fact, Finding, Judgement, Remedy};

/// A weight that rises with a value: 0 up to `from`, 1 above `to`, linear between them.
#[derive(Clone, Copy)]
pub(super) struct Ramp {
    pub from: f64,
    pub to: f64,
}

impl Ramp {
    pub const fn new(from: f64, to: f64) -> Self {
        Ramp { from, to }
    }

    /// Returns the weight of a value, 0 to 1.
    pub fn at(self, value: f64) -> f64 {
        ((value - self.from) / (self.to - self.from)).clamp(0.0, 1.0)
    }
}

/// Returns the finding; if it is too light to be named, its first fact excludes the cause.
pub(super) fn judged(weight: f64, mut facts: Vec<Fact>, remedies: Vec<Remedy>) -> Judgement {
    if weight < LEAST_WEIGHT && !facts.is_empty() {
        return Judgement::Absent(facts.swap_remove(0));
    }
    Judgement::Present(Finding {
        weight,
        settled: false,
        facts,
        remedies,
    })
}

/// A finding that a setting alone explains: see [`Finding::settled`].
pub(super) fn settled(judgement: Judgement, settled: bool) -> Judgement {
    match judgement {
        Judgement::Present(finding) => Judgement::Present(Finding { settled, ..finding }),
        other => other,
    }
}
