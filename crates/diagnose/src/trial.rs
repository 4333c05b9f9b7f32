//! Whether a change helps: the same path with and without it, in turns, in one run.
//!
//! Blocks go without, with, with, without, and again: what drifts meanwhile strikes both alike. The gain is that of the
//! means of neighbouring blocks, with an interval by resampling. It counts only if its lower end is worth it, or if the
//! delay under load is much shorter for the same throughput, and neither delay, nor loss, nor processor time has become worse.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Remedy;
use crate::stats::{Interval, paired_gain};

/// Time after a switch that is not measured: connections have to find their new rate.
pub const WARM_UP: Duration = Duration::from_millis(1000);
/// Time that is measured.
pub const BLOCK: Duration = Duration::from_millis(2000);
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
/// Processor time per bit more, as a ratio.
const WORSE_CPU: f64 = 1.5;

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

/// What is to be done with the change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "decision", content = "why")]
pub enum Decision {
    /// It stays.
    Keep,
    /// It is taken back, for this reason.
    TakeBack(String),
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
    /// Whether the gain is surely one: that confirms what the change is for.
    pub fn helps(&self) -> bool {
        self.gain.is_some_and(|gain| gain.low > 0.0)
    }
}

/// A remedy that was tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    /// What was done.
    pub remedy: Remedy,
    /// How it compared, and what followed.
    pub trial: Trial,
}

/// Compares. `switch` turns the change on or off, `measure` waits and looks. Ends early, with the change to be taken
/// back, when nothing goes through with it.
///
/// # Errors
/// Those of `switch` and `measure`.
pub fn run<E>(
    mut switch: impl FnMut(bool) -> Result<(), E>,
    mut measure: impl FnMut(Duration) -> Result<Block, E>,
    least_gain: f64,
) -> Result<Trial, E> {
    let mut pairs = Vec::new();
    let mut is_on = false;
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
            }
            measure(WARM_UP)?;
            blocks[usize::from(on)] = measure(BLOCK)?;
            let [without, with] = blocks;
            if on && with.throughput == 0.0 && (pair > 0 || without.throughput > 0.0) {
                pairs.push((without, with));
                let why = "nothing went through the tunnel any more".to_owned();
                return Ok(Trial {
                    pairs,
                    gain: None,
                    decision: Decision::TakeBack(why),
                });
            }
        }
        pairs.push((blocks[0], blocks[1]));
    }
    let rates: Vec<(f64, f64)> = pairs
        .iter()
        .map(|(without, with)| (without.throughput, with.throughput))
        .collect();
    let gain = paired_gain(&rates);
    let decision = decide(&pairs, gain, least_gain);
    Ok(Trial {
        pairs,
        gain,
        decision,
    })
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
            |_| Ok(if on.get() { with } else { without }),
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
        let fast = block(2e8);
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
    fn a_dead_tunnel_ends_it_at_once() {
        let (trial, _) = trial(block(1e8), block(0.0));
        assert_eq!(trial.pairs.len(), 1);
        assert_eq!(trial.gain, None);
    }
}
