//! From numbers to a weight.

use crate::verdict::LEAST_WEIGHT;
use crate::{Cause, Fact, Finding, Judgement, Remedy};

/// 0 up to `from`, 1 from `to` on, a straight line between them.
pub(super) fn ramp(value: f64, from: f64, to: f64) -> f64 {
    ((value - from) / (to - from)).clamp(0.0, 1.0)
}

/// The finding, or, where it is too light to be named, its first fact as what rules the cause out.
pub(super) fn judged(
    cause: Cause,
    weight: f64,
    mut facts: Vec<Fact>,
    remedies: Vec<Remedy>,
) -> Judgement {
    if weight < LEAST_WEIGHT && !facts.is_empty() {
        return Judgement::Absent(facts.swap_remove(0));
    }
    Judgement::Present(Finding {
        cause,
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
