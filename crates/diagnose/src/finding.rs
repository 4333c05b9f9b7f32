//! Results of a rule.

use crate::Remedy;
use serde::{Deserialize, Serialize};

/// Findings lighter than this are not named.
pub(crate) const LEAST_WEIGHT: f64 = 0.1;

/// One number of the evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fact {
    /// What was measured, in words with its unit: `drops at the queue of tun0, per second`.
    pub name: String,
    /// The value.
    pub value: f64,
    /// What would be normal, in words: `0`, `below 5 %`.
    pub expected: String,
    /// Where it comes from: `rtnetlink tx_dropped of tun0`, `/proc/net/softnet_stat`.
    pub source: String,
}

impl Fact {
    /// A number, what would be normal, and where it comes from.
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
}

/// A cause whose signature is there.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// How much of what is missing it accounts for, as far as the numbers tell: 0 to 1. Below 0.1 it is not worth
    /// naming.
    pub weight: f64,
    /// Whether a setting that is plainly wrong shows it, so that nothing deeper has to be to blame: a buffer of a few
    /// packets overflows whoever reads it.
    pub settled: bool,
    /// The numbers, the telling one first; three to five.
    pub facts: Vec<Fact>,
    /// What helps, the best first.
    pub remedies: Vec<Remedy>,
}

/// What a rule says about its cause.
#[derive(Clone, Debug, PartialEq)]
pub enum Judgement {
    /// Its signature is there.
    Present(Finding),
    /// It is not, and this number says so.
    Absent(Fact),
    /// It cannot be told, for this reason.
    Unseen(String),
}
