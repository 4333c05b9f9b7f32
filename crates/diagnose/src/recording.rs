//! What a diagnosis measured, kept for later: read again, it is as if it were live.

use std::time::SystemTime;

use seikan_observe::profile::Functions;

use crate::trial::Attempt;
use crate::{Cost, Evidence};

/// Everything that was measured at one time on one host.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// When the first sample was taken.
    pub begun: SystemTime,
    /// What the rules read.
    pub evidence: Evidence,
    /// Where processor time went by function, and call stacks if they were asked for.
    pub functions: Option<Functions>,
    /// Remedies that were tried afterwards, in order.
    pub attempts: Vec<Attempt>,
    /// What it cost.
    pub cost: Cost,
}
