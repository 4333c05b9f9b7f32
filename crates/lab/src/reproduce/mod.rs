//! `seikan lab reproduce`: published experiments on slow tunnels, repeated on one machine.
//!
//! Each [`Source`] has a slow and a fast setup in interleaved rounds, and its published figures.
//! [`Claim`]s state the faster setup and whether that holds in every round. The doctor diagnoses
//! the slow setup without any hint. Figures of another machine are compared as ratios only.

mod batch;
mod bench;
mod counters;
mod crossings;
mod delay;
mod figures;
mod forwarding;
mod functions;
mod guests;
mod library;
mod limit;
mod look;
mod mtu_cipher;
mod noise;
mod null;
mod offload;
mod pages;
mod patterns;
mod profile;
mod queue;
mod reordering;
mod segments;
mod source;
mod steering;
mod steps;
mod surface;
#[cfg(test)]
mod testing;
mod tracepoints;

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use seikan_ui::time::utc_now;
use seikan_ui::{Interrupt, Progress};
use serde::{Deserialize, Serialize};

use crate::arguments::{defaults, whole};
use crate::error::{LabError, Result, usage};
use crate::machine::Machine;
use crate::site::Congestion;

pub(crate) use figures::cell;
pub use figures::{Bars, Claim, Curve, Curves, Figures, Grid, Layer, List, Part, Row, Surface};
pub use look::Look;
pub use source::Source;

use bench::{Bench, Desk, plain, set_both, titled};
use source::GIGABIT;

/// Length and number of measurements.
#[derive(Clone, Debug, Serialize, Deserialize, Args)]
pub struct ReproduceOptions {
    /// Length of a load; some loads take a part or a multiple of it
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    pub seconds: f64,
    /// Repetitions of each measurement
    #[arg(long, value_name = "ROUNDS", default_value_t = 3, value_parser = whole(1..=100))]
    pub rounds: u32,
    /// Congestion control of all hosts, whatever this machine's default is
    #[arg(long, value_name = "NAME", default_value_t, value_enum)]
    pub congestion: Congestion,
    /// Directory for the doctor's recordings; `None`: they are not kept.
    #[arg(skip)]
    pub recordings: Option<PathBuf>,
}

impl Default for ReproduceOptions {
    fn default() -> Self {
        defaults()
    }
}

/// Results of an experiment so far.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Experiment {
    /// Source of the experiment.
    pub source: Source,
    /// Time at which the experiment ended, UTC.
    pub date: String,
    /// The machine on which it ran.
    pub machine: Machine,
    /// Options of the experiment.
    pub options: ReproduceOptions,
    /// Duration of the experiment, in seconds.
    pub took: f64,
    /// Measured and published figures.
    pub figures: Vec<Figures>,
    /// Figures of many setups, as tables.
    pub grids: Vec<Grid>,
    /// Other results.
    pub lists: Vec<List>,
    /// One quantity over another.
    pub curves: Vec<Curves>,
    /// Quantities by kind.
    pub bars: Vec<Bars>,
    /// Several quantities over two others.
    pub surfaces: Vec<Surface>,
    /// Claims of higher speed.
    pub claims: Vec<Claim>,
    /// Verdicts of the doctor.
    pub looks: Vec<Look>,
    /// Notes.
    pub notes: Vec<String>,
    /// Measurements that failed, with the reason.
    pub problems: Vec<String>,
}

impl Experiment {
    /// Returns whether every claim holds and every diagnosis was correct.
    pub fn reproduced(&self) -> bool {
        let claims = !self.claims.is_empty() && self.claims.iter().all(Claim::holds);
        let right = self.looks.iter().filter(|look| look.is_right()).count();
        claims && right == self.source.looks()
    }
}

/// A part of an experiment.
type Step = fn(&mut Bench<'_>, &mut Experiment) -> Result<()>;

impl Experiment {
    /// Runs a part. A failure is noted, and the other parts run; only an interruption ends the
    /// experiment.
    fn attempt(&mut self, part: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        match part(self) {
            Err(LabError::Interrupted) => Err(LabError::Interrupted),
            Err(error) => {
                self.problems.push(error.to_string());
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Returns the value, or notes its failure with this context.
    fn unless_failed<T>(&mut self, context: &str, value: Result<T>) -> Result<Option<T>> {
        match value {
            Err(LabError::Interrupted) => Err(LabError::Interrupted),
            Err(error) => {
                self.problems.push(format!("{context}: {error}"));
                Ok(None)
            }
            Ok(value) => Ok(Some(value)),
        }
    }

    /// Runs parts one after the other.
    fn attempt_all(&mut self, bench: &mut Bench<'_>, parts: &[Step]) -> Result<()> {
        let mut parts = parts.iter();
        parts.try_for_each(|part| self.attempt(|found| part(bench, found)))
    }
}

impl Source {
    const fn run(self) -> Step {
        match self {
            Self::Queue => queue::run,
            Self::Offload => offload::run,
            Self::Batch => batch::run,
            Self::Profile => profile::run,
            Self::MtuCipher => mtu_cipher::run,
        }
    }
}

/// Runs an experiment; calls `progress` before every step.
///
/// # Errors
/// Options without meaning; [`LabError::Interrupted`]; hosts that cannot be made. The result has
/// the failures of single rows.
pub fn reproduce(
    source: Source,
    options: &ReproduceOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<Experiment> {
    if options.rounds == 0 || !(0.1..=600.0).contains(&options.seconds) {
        return Err(usage(
            "cannot measure: use at least one round, and 0.1 to 600 s for each load",
        ));
    }
    let begin = Instant::now();
    let desk = Desk {
        options,
        interrupt,
        source,
    };
    let [each, besides] = source.steps();
    let mut bench = Bench {
        desk,
        progress,
        steps: (0.0, each * f64::from(options.rounds) + besides),
    };
    let mut found = Experiment {
        source,
        machine: Machine::this(),
        options: options.clone(),
        ..Experiment::default()
    };
    source.run()(&mut bench, &mut found)?;
    found.date = utc_now();
    found.took = begin.elapsed().as_secs_f64();
    Ok(found)
}
