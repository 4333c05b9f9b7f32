//! Weights of findings.

use seikan_observe::path::{LinkFacts, ProgramFacts};

use crate::finding::LEAST_WEIGHT;
use crate::{Evidence, Excluded, Fact, Finding, Judgement, Remedy};

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

/// A list of figures, to which those that were measured are added.
pub(super) trait Facts: Sized {
    /// Adds a figure, or nothing if its value is `None`.
    fn and(
        self,
        name: impl Into<String>,
        value: impl Into<Option<f64>>,
        expected: impl Into<String>,
        source: impl Into<String>,
    ) -> Self;
}

impl Facts for Vec<Fact> {
    fn and(
        mut self,
        name: impl Into<String>,
        value: impl Into<Option<f64>>,
        expected: impl Into<String>,
        source: impl Into<String>,
    ) -> Self {
        let value = value.into();
        self.extend(value.map(|value| Fact::new(name, value, expected, source)));
        self
    }
}

/// Returns the finding; if it is too light to be named, its first fact excludes the cause.
pub(super) fn weighted(weight: f64, mut facts: Vec<Fact>, remedies: Vec<Remedy>) -> Judgement {
    if weight < LEAST_WEIGHT && !facts.is_empty() {
        return facts.swap_remove(0).excludes();
    }
    Ok(Finding::new(weight, facts, remedies))
}

/// Marks a finding that a setting alone explains: see [`Finding::settled`].
pub(super) fn settled(judgement: Judgement, settled: bool) -> Judgement {
    judgement.map(|finding| Finding { settled, ..finding })
}

/// Returns the tunnel's program.
pub(super) fn program(evidence: &Evidence) -> Result<&ProgramFacts, Excluded> {
    let program = evidence.map.program.as_ref();
    program.ok_or_else(|| "no program carries this tunnel, or it was not found".into())
}

/// Whether a feature of an interface is the opposite of `on`, and can be changed to that.
pub(super) fn can_turn(link: &LinkFacts, feature: &str, on: bool) -> bool {
    let is_changeable = link.changeable.iter().any(|name| name == feature);
    is_changeable && link.features.get(feature) == Some(&!on)
}
