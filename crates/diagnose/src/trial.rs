//! Whether a change helps: the same path with and without it, in turns, in one run.
//!
//! Blocks go without, with, with, without, and again: what drifts meanwhile strikes both alike. The gain is that of the
//! means of neighbouring blocks, with an interval by resampling. It counts only if its lower end is worth it, or if the
//! delay under load is much shorter for the same throughput, and neither delay, nor loss, nor processor time has become worse.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::stats::{Interval, paired_gain};
use crate::{Cause, Remedy};

/// Time after a switch that is not measured: connections have to find their new rate.
pub const WARM_UP: Duration = Duration::from_millis(1000);
/// Time that is measured.
pub const BLOCK: Duration = Duration::from_millis(2000);
/// How long connections that stand still are waited for once the change is made: TCP that sent nothing for ten seconds tries
/// again within so many (RFC 6298: the time-out doubles each time).
pub const STANDSTILL: Duration = Duration::from_secs(13);
/// Less than this is standing still, bits per second: a connection of which nothing arrives repeats a segment now and then.
const STILL: f64 = 100e3;
/// What standing still counts as, of the throughput with the change: a gain over nothing would be without end.
const NOTHING: f64 = 0.01;
/// Pairs of blocks: with four the interval is of 35 different resamples.
pub const PAIRS: usize = 4;
/// Gain that is worth a change, as a share.
pub const LEAST_GAIN: f64 = 0.05;
/// A delay under load that many times as long is worse, if it is longer by this too, microseconds.
const WORSE_DELAY: (f64, f64) = (1.5, 5_000.0);
/// A delay under load that is that many times as short, and shorter by this too, microseconds, is worth a change that costs no
/// throughput.
const BETTER_DELAY: (f64, f64) = (2.0, 5_000.0);
/// Retransmitted segments more, as a share of those sent.
const WORSE_LOSS: f64 = 0.005;
/// Processor time per bit more, as a ratio; a gain of so much for sure is worth it.
const WORSE_CPU: f64 = 1.5;
const MUCH: f64 = 0.5;

/// What one block showed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// Bits per second through the tunnel.
    pub throughput: f64,
    /// Round-trip time that connections see, microseconds.
    pub rtt_us: Option<f64>,
    /// Retransmitted segments, of those sent.
    pub loss: Option<f64>,
    /// Processors' worth of time that the machine used.
    pub busy: f64,
}

/// What came of looking on for a block.
#[derive(Clone, Debug, PartialEq)]
pub enum Look {
    /// It went as it should.
    Block(Block),
    /// The change must go at once, for this reason.
    CutOff(String),
}

/// What is to be done with the change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "decision", content = "why")]
pub enum Decision {
    /// It stays.
    Keep,
    /// It is taken back, for this reason.
    TakeBack(String),
    /// It was never made, for it cannot be on this host.
    NotPossible(String),
}

/// How the comparison went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// Blocks without and with, in pairs.
    pub pairs: Vec<(Block, Block)>,
    /// Throughput with over without, minus 1; `None` if it could not be told.
    pub gain: Option<Interval>,
    /// What follows.
    #[serde(flatten)]
    pub decision: Decision,
}

impl Trial {
    /// Of a change that cannot be made.
    pub fn not_possible(why: String) -> Self {
        Trial {
            pairs: Vec::new(),
            gain: None,
            decision: Decision::NotPossible(why),
        }
    }

    /// Whether the gain is surely one: that confirms what the change is for.
    pub fn helps(&self) -> bool {
        self.gain.is_some_and(|gain| gain.low > 0.0)
    }
}

/// A remedy that was tried, or that was to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// The cause that it would help if it were the one.
    pub cause: Cause,
    /// What was done.
    pub remedy: Remedy,
    /// How it compared, and what followed.
    pub trial: Trial,
}

/// Compares. `switch` turns the change on or off, `measure` waits and looks. Ends early, with the change to be taken
/// back, when nothing goes through with it, or when `measure` says so.
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
    // Without the change, so far: whether anything went through at all; whether more than stands still did ever, and the
    // last time.
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
                let why = "nothing went through the tunnel any more".to_owned();
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
        return Decision::TakeBack("there was too little traffic to tell".to_owned());
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
    let is_quicker = delay.is_some_and(|(before, now)| {
        before > now * BETTER_DELAY.0 && before > now + BETTER_DELAY.1 && gain.low > -least
    });
    if gain.low < least && !is_quicker {
        return Decision::TakeBack(format!(
            "the gain is {:+.0} % ({:+.0} to {:+.0}), which is not surely {:+.0} %",
            gain.value * 100.0,
            gain.low * 100.0,
            gain.high * 100.0,
            least * 100.0
        ));
    }
    if let Some((before, now)) = delay
        && now > before * WORSE_DELAY.0
        && now > before + WORSE_DELAY.1
    {
        return Decision::TakeBack(format!(
            "the round trip under load went from {:.1} to {:.1} ms",
            before / 1e3,
            now / 1e3
        ));
    }
    if let Some((before, now)) = both(&|block| block.loss)
        && now > before + WORSE_LOSS
    {
        return Decision::TakeBack(format!(
            "retransmissions went from {:.1} to {:.1} %",
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
            "a bit takes {:.1} times as much processor time",
            now / before
        ));
    }
    Decision::Keep
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A path whose blocks are `without` and `with`, and how the change was left.
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
    fn what_helps_is_kept() {
        let (trial, _) = trial(block(1e8), block(2e8));
        assert_eq!(trial.decision, Decision::Keep);
        assert_eq!(trial.gain.expect("gain").value, 1.0);
        assert_eq!(trial.pairs.len(), PAIRS);
    }

    #[test]
    fn what_does_not_help_enough_is_taken_back() {
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
    fn who_carries_far_more_may_take_more_time_for_it() {
        let dear = Block {
            busy: 1.0,
            ..block(3e8)
        };
        let (trial, _) = trial(block(1e8), dear);
        assert_eq!(trial.decision, Decision::Keep);
    }

    /// Connections that stood still go on five seconds after the change is made.
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
            // A segment again and again, of which nothing arrives.
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
    fn what_stood_still_and_still_does_is_not_helped() {
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
            Ok(match on.get() {
                true => Look::CutOff("gone".to_owned()),
                false => Look::Block(block(1e8)),
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
