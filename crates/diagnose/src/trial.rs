//! Tests of a change: the same path with and without it, alternating, in one run.
//!
//! Blocks alternate: without, with, with, without, and again, so that a drift affects both. The
//! gain is computed from the means of neighbouring blocks, with a confidence interval by
//! resampling. A change is kept if the lower end of the interval is large enough, or if the delay
//! under load is much shorter at the same throughput, and neither delay nor loss nor processor time
//! got worse.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::stats::{Interval, paired_gain};
use crate::{Cause, Remedy};

/// Time after a switch that is not measured: connections have to find their new rate.
pub const WARM_UP: Duration = Duration::from_millis(1000);
/// Measured time of a block.
pub const BLOCK: Duration = Duration::from_millis(2000);
/// Maximum time to wait for stalled connections after the change: a TCP connection that has been
/// stalled for ten seconds retransmits within this time (RFC 6298: the timeout doubles each time).
pub const STANDSTILL: Duration = Duration::from_secs(13);
/// Throughput below which connections are stalled, bits per second: a connection without
/// acknowledgements repeats a segment now and then.
const STILL: f64 = 100e3;
/// Throughput that counts for a stall, as a share of that with the change: a gain over zero would
/// be infinite.
const NOTHING: f64 = 0.01;
/// Pairs of blocks: with four the interval is of 35 different resamples.
pub const PAIRS: usize = 4;
/// Gain from which a change is kept, as a share.
pub const LEAST_GAIN: f64 = 0.05;
/// Margin from which a longer delay under load is worse.
const WORSE_DELAY: Margin = Margin {
    ratio: 1.5,
    us: 5_000.0,
};
/// Margin from which a shorter delay under load justifies a change that costs no throughput.
const BETTER_DELAY: Margin = Margin {
    ratio: 2.0,
    us: 5_000.0,
};
/// Additional retransmitted segments that are worse, as a share of those sent.
const WORSE_LOSS: f64 = 0.005;
/// Ratio of processor time per bit that is worse; a certain gain of the same size justifies it.
const WORSE_CPU: f64 = 1.5;
const MUCH: f64 = 0.5;

/// Smallest relevant difference of two delays.
struct Margin {
    ratio: f64,
    us: f64,
}

impl Margin {
    /// Whether one delay is longer than another by ratio and difference, microseconds.
    fn is_exceeded(&self, longer: f64, shorter: f64) -> bool {
        longer > shorter * self.ratio && longer > shorter + self.us
    }
}

/// Measurements of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Block {
    /// Throughput of the tunnel, bits per second.
    pub throughput: f64,
    /// Round-trip time of connections, microseconds.
    pub rtt_us: Option<f64>,
    /// Share of segments retransmitted, 0 to 1.
    pub loss: Option<f64>,
    /// Number of processors that the machine used.
    pub busy: f64,
}

/// Result of measuring a block.
#[derive(Clone, Debug, PartialEq)]
pub enum Look {
    /// The block is complete.
    Block(Block),
    /// The change must be reverted at once, for this reason.
    CutOff(String),
}

/// Decision about a change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", tag = "decision", content = "why")]
pub enum Decision {
    /// The change is kept.
    Keep,
    /// The change is reverted, for this reason.
    TakeBack(String),
    /// The change was not made, because this host does not allow it.
    NotPossible(String),
}

/// Result of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Trial {
    /// Pairs of blocks without and with the change.
    pub pairs: Vec<(Block, Block)>,
    /// Throughput with the change over that without, minus 1; `None` if it is not known.
    pub gain: Option<Interval>,
    /// The decision.
    #[serde(flatten)]
    pub decision: Decision,
}

impl Trial {
    /// Returns the trial of a change that cannot be made.
    pub fn not_possible(why: String) -> Self {
        Trial {
            pairs: Vec::new(),
            gain: None,
            decision: Decision::NotPossible(why),
        }
    }

    /// Whether the gain is certain, which confirms the cause.
    pub fn helps(&self) -> bool {
        self.gain.is_some_and(|gain| gain.low > 0.0)
    }
}

/// Test of a remedy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Attempt {
    /// The cause that the remedy is for.
    pub cause: Cause,
    /// The remedy.
    pub remedy: Remedy,
    /// The comparison and the decision.
    pub trial: Trial,
}

/// Compares. `switch` turns the change on or off, `measure` waits and measures. Ends early, with
/// the change to be reverted, if nothing passes with it, or if `measure` says so.
///
/// # Errors
/// Those of `switch` and `measure`.
pub fn run<E>(
    mut switch: impl FnMut(bool) -> Result<(), E>,
    mut measure: impl FnMut(Duration) -> Result<Look, E>,
    least_gain: f64,
) -> Result<Trial, E> {
    let mut pairs: Vec<(Block, Block)> = Vec::new();
    let mut is_on = false;
    // About the blocks without the change so far: whether anything passed, whether more than a
    // stall ever passed, and whether it did in the last block.
    let (mut any, mut ever, mut last) = (false, false, true);
    for pair in 0..PAIRS {
        let mut blocks = [Block::default(); 2];
        let order = if pair % 2 == 0 {
            [false, true]
        } else {
            [true, false]
        };
        for on in order {
            if on != is_on {
                switch(on)?;
                is_on = on;
                let mut waited = Duration::ZERO;
                while on && !last && waited < STANDSTILL {
                    match measure(WARM_UP)? {
                        Look::Block(block) if block.throughput > STILL => break,
                        Look::Block(_) => waited += WARM_UP,
                        Look::CutOff(why) => return Ok(ended(pairs, why)),
                    }
                }
            }
            for length in [WARM_UP, BLOCK] {
                match measure(length)? {
                    Look::Block(block) => blocks[usize::from(on)] = block,
                    Look::CutOff(why) => return Ok(ended(pairs, why)),
                }
            }
            let [without, with] = blocks;
            if !on {
                last = without.throughput > STILL;
                ever |= last;
                any |= without.throughput > 0.0;
            }
            if on && with.throughput == 0.0 && any {
                pairs.push((without, with));
                let why = "no traffic passed the tunnel".to_owned();
                return Ok(ended(pairs, why));
            }
        }
        pairs.push((blocks[0], blocks[1]));
    }
    let rates: Vec<(f64, f64)> = pairs
        .iter()
        .map(|(without, with)| (without.throughput, with.throughput))
        .collect();
    let most = rates.iter().map(|(_, with)| *with).fold(0.0, f64::max);
    let least = if ever { 0.0 } else { NOTHING * most };
    let rates: Vec<(f64, f64)> = rates.into_iter().map(|(a, b)| (a.max(least), b)).collect();
    let gain = paired_gain(&rates);
    let decision = decide(&pairs, gain, least_gain);
    Ok(Trial {
        pairs,
        gain,
        decision,
    })
}

fn ended(pairs: Vec<(Block, Block)>, why: String) -> Trial {
    Trial {
        pairs,
        gain: None,
        decision: Decision::TakeBack(why),
    }
}

fn decide(pairs: &[(Block, Block)], gain: Option<Interval>, least: f64) -> Decision {
    let Some(gain) = gain else {
        return Decision::TakeBack("too little traffic to compare".to_owned());
    };
    let mean = |of: &dyn Fn(&Block) -> Option<f64>, with: bool| {
        let values = pairs
            .iter()
            .filter_map(|(a, b)| of(if with { b } else { a }));
        let (sum, n) = values.fold((0.0, 0), |(sum, n), value| (sum + value, n + 1));
        (n > 0).then(|| sum / f64::from(n))
    };
    let both = |of: &dyn Fn(&Block) -> Option<f64>| Some((mean(of, false)?, mean(of, true)?));
    let delay = both(&|block| block.rtt_us);
    let is_quicker = delay
        .is_some_and(|(before, now)| BETTER_DELAY.is_exceeded(before, now) && gain.low > -least);
    if gain.low < least && !is_quicker {
        return Decision::TakeBack(format!(
            "the gain is {:+.0} % ({:+.0} to {:+.0}), not certainly {:+.0} %",
            gain.value * 100.0,
            gain.low * 100.0,
            gain.high * 100.0,
            least * 100.0
        ));
    }
    if let Some((before, now)) = delay
        && WORSE_DELAY.is_exceeded(now, before)
    {
        return Decision::TakeBack(format!(
            "the round-trip time under load rose from {:.1} to {:.1} ms",
            before / 1e3,
            now / 1e3
        ));
    }
    if let Some((before, now)) = both(&|block| block.loss)
        && now > before + WORSE_LOSS
    {
        return Decision::TakeBack(format!(
            "retransmissions rose from {:.1} to {:.1} %",
            before * 100.0,
            now * 100.0
        ));
    }
    let cost = |block: &Block| (block.throughput > 0.0).then(|| block.busy / block.throughput);
    if let Some((before, now)) = both(&cost)
        && before > 0.0
        && now > before * WORSE_CPU
        && gain.low < MUCH
    {
        return Decision::TakeBack(format!(
            "processor time per bit rose by a factor of {:.1}",
            now / before
        ));
    }
    Decision::Keep
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A path whose blocks are `without` and `with`, and the final state of the change.
    fn trial(without: Block, with: Block) -> (Trial, bool) {
        let on = Cell::new(false);
        let trial = run(
            |now| {
                on.set(now);
                Ok::<(), std::convert::Infallible>(())
            },
            |_| Ok(Look::Block(if on.get() { with } else { without })),
            LEAST_GAIN,
        );
        (trial.expect("trial"), on.get())
    }

    fn block(throughput: f64) -> Block {
        Block {
            throughput,
            rtt_us: Some(1000.0),
            loss: Some(0.0),
            busy: throughput / 1e9,
        }
    }

    #[test]
    fn a_change_that_helps_is_kept() {
        let (trial, _) = trial(block(1e8), block(2e8));
        assert_eq!(trial.decision, Decision::Keep);
        assert_eq!(trial.gain.expect("gain").value, 1.0);
        assert_eq!(trial.pairs.len(), PAIRS);
    }

    #[test]
    fn a_change_that_helps_too_little_is_reverted() {
        let (trial, _) = trial(block(1e8), block(1.04e8));
        assert!(matches!(trial.decision, Decision::TakeBack(_)), "{trial:?}");
    }

    #[test]
    fn throughput_is_not_bought_with_delay_loss_or_processors() {
        let fast = block(1.4e8);
        for bad in [
            Block {
                rtt_us: Some(50_000.0),
                ..fast
            },
            Block {
                loss: Some(0.01),
                ..fast
            },
            Block { busy: 1.0, ..fast },
        ] {
            let (trial, _) = trial(block(1e8), bad);
            assert!(matches!(trial.decision, Decision::TakeBack(_)), "{trial:?}");
        }
    }

    #[test]
    fn much_less_delay_at_the_same_throughput_is_kept() {
        let slow = Block {
            rtt_us: Some(40_000.0),
            ..block(1e8)
        };
        let (kept, _) = trial(slow, block(1e8));
        assert_eq!(kept.decision, Decision::Keep);
        let (paid, _) = trial(slow, block(0.9e8));
        assert!(matches!(paid.decision, Decision::TakeBack(_)), "{paid:?}");
    }

    #[test]
    fn far_more_throughput_may_take_more_processor_time() {
        let dear = Block {
            busy: 1.0,
            ..block(3e8)
        };
        let (trial, _) = trial(block(1e8), dear);
        assert_eq!(trial.decision, Decision::Keep);
    }

    /// Stalled connections continue five seconds after the change.
    #[test]
    fn connections_that_stand_still_are_waited_for() {
        let (on, since) = (Cell::new(false), Cell::new(Duration::ZERO));
        let switch = |now| {
            on.set(now);
            since.set(Duration::ZERO);
            Ok::<(), std::convert::Infallible>(())
        };
        let measure = |length| {
            since.set(since.get() + length);
            let goes = on.get() && since.get() > Duration::from_secs(5);
            // A connection repeats a segment without an acknowledgement.
            Ok(Look::Block(block(if goes { 1e8 } else { 6e3 })))
        };
        let trial = run(switch, measure, LEAST_GAIN).expect("trial");
        assert_eq!(trial.decision, Decision::Keep, "{trial:?}");
        assert!(trial.gain.is_some_and(|gain| gain.low > 90.0));
    }

    #[test]
    fn a_tunnel_that_carries_little_and_then_nothing_ends_it_too() {
        let (trial, _) = trial(block(5e4), block(0.0));
        assert_eq!((trial.pairs.len(), trial.gain), (1, None));
    }

    #[test]
    fn a_lasting_stall_is_not_helped() {
        let (trial, _) = trial(block(0.0), block(0.0));
        assert_eq!((trial.pairs.len(), trial.gain), (PAIRS, None));
        assert!(matches!(trial.decision, Decision::TakeBack(_)));
    }

    #[test]
    fn a_host_that_is_cut_off_ends_it_at_once() {
        let on = Cell::new(false);
        let switch = |now| {
            on.set(now);
            Ok::<(), std::convert::Infallible>(())
        };
        let measure = |_| {
            Ok(if on.get() {
                Look::CutOff("gone".to_owned())
            } else {
                Look::Block(block(1e8))
            })
        };
        let trial = run(switch, measure, LEAST_GAIN).expect("trial");
        assert_eq!(trial.decision, Decision::TakeBack("gone".to_owned()));
        assert_eq!(trial.pairs, []);
    }

    #[test]
    fn a_dead_tunnel_ends_it_at_once() {
        let (trial, _) = trial(block(1e8), block(0.0));
        assert_eq!(trial.pairs.len(), 1);
        assert_eq!(trial.gain, None);
    }
}
