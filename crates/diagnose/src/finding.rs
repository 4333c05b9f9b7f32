//! Results of a rule.

use crate::Remedy;
use serde::{Deserialize, Serialize};

/// Findings lighter than this are not named.
pub(crate) const LEAST_WEIGHT: f64 = 0.1;

/// A figure of the evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Fact {
    /// Name with its unit: `drops at the queue of tun0, per second`.
    pub name: String,
    /// The value.
    pub value: f64,
    /// The normal range, in words: `0`, `below 5 %`.
    pub expected: String,
    /// Source: `rtnetlink tx_dropped of tun0`, `/proc/net/softnet_stat`.
    pub source: String,
}

impl Fact {
    /// Creates a fact.
    pub fn new(
        name: impl Into<String>,
        value: f64,
        expected: impl Into<String>,
        source: impl Into<String>,
    ) -> Self {
        Fact {
            name: name.into(),
            value,
            expected: expected.into(),
            source: source.into(),
        }
    }

    /// The result of a rule whose cause this fact excludes.
    pub(crate) fn excludes(self) -> Judgement {
        Err(Excluded::Absent(self))
    }
}

/// Evidence of a cause.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Share of the missing throughput that the cause accounts for, as far as the numbers tell: 0 to 1.
    pub weight: f64,
    /// Whether a wrong setting proves the cause, so that no other cause can be behind it: a buffer
    /// of a few packets overflows with any reader.
    pub settled: bool,
    /// Three to five figures, the most important one first.
    pub facts: Vec<Fact>,
    /// Remedies, the best first.
    pub remedies: Vec<Remedy>,
}

impl Finding {
    /// Creates a finding that no setting proves.
    pub fn new(weight: f64, facts: Vec<Fact>, remedies: Vec<Remedy>) -> Self {
        Finding {
            weight,
            settled: false,
            facts,
            remedies,
        }
    }
}

/// The reason why a rule has no finding.
#[derive(Clone, Debug, PartialEq)]
pub enum Excluded {
    /// This fact excludes the cause.
    Absent(Fact),
    /// The cause could not be examined, for this reason.
    Unseen(String),
}

impl From<String> for Excluded {
    fn from(reason: String) -> Self {
        Excluded::Unseen(reason)
    }
}

impl From<&str> for Excluded {
    fn from(reason: &str) -> Self {
        reason.to_owned().into()
    }
}

/// The result of a rule.
pub type Judgement = Result<Finding, Excluded>;
