//! The rules, one file for each cause.
//!
//! A rule is a pure function from [`Evidence`] to a [`Judgement`]. It asks for its cause's signature and for what sets
//! it apart from the causes that look like it; it does not look at other rules. Its thresholds are named at its top,
//! with the reason for their values. A rule whose cause makes itself felt through another one names that in
//! [`Rule::makes`].

use crate::{Cause, Evidence, Judgement};

mod shaper;
#[cfg(test)]
pub(crate) mod testing;
mod tun_queue_overflow;

/// A rule.
#[derive(Debug)]
pub struct Rule {
    /// The cause it looks for.
    pub cause: Cause,
    /// Causes whose signature this one brings about when it is the deeper one: a reader without a processor makes queues
    /// overflow. Where both are present, this one is named and the others are the chain.
    pub makes: &'static [Cause],
    /// The rule.
    pub judge: fn(&Evidence) -> Judgement,
}

/// All of them.
pub const ALL: &[Rule] = &[
    Rule {
        cause: Cause::TunQueueOverflow,
        makes: &[],
        judge: tun_queue_overflow::judge,
    },
    Rule {
        cause: Cause::Shaper,
        makes: &[Cause::TunQueueOverflow, Cause::Bufferbloat],
        judge: shaper::judge,
    },
];
