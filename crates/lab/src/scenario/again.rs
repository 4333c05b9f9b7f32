//! Diagnoses stored recordings again by the current rules. It takes seconds and needs neither root
//! nor a tunnel, and shows the effect of a changed rule on the score.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use seikan_diagnose::recording::MAX_BYTES;
use seikan_diagnose::{Cause, Recording, baseline, diagnose};
use serde::{Deserialize, Serialize};

use super::{Case, Diagnosis, Outcome};
use crate::error::{LabError, Result, usage};

/// Causes that naive tools name on the same samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Guesses {
    /// The cause whose counter correlates most with the throughput.
    pub correlation: Cause,
    /// The cause whose counter is the largest multiple of its normal value.
    pub jump: Cause,
}

impl Guesses {
    /// Returns the causes that naive tools would name, from a recording.
    pub fn of(recording: &Recording) -> Self {
        Self {
            correlation: baseline::highest_correlation(&recording.evidence),
            jump: baseline::largest_jump(&recording.evidence),
        }
    }
}

/// Returns the path of a case's recording.
pub fn recording_file(directory: &Path, id: &str) -> PathBuf {
    directory.join(format!("{}.parquet", id.replace('/', "-")))
}

/// Reads a recording.
///
/// # Errors
/// The file cannot be read, or is not a recording.
pub(crate) fn load(file: &Path) -> Result<Recording> {
    let read = || LabError::io(format!("read {}", file.display()));
    let source = File::open(file).map_err(read())?;
    let mut bytes = Vec::new();
    // One byte more than the maximum: the parser reports that it is too large.
    source
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(read())?;
    Recording::parse(&bytes).map_err(|e| usage(format!("{}: {e}", file.display())))
}

/// Replaces the diagnosis by the one of the current rules. Returns whether the cause differs.
/// Invalid cases have no recording, because the doctor did not run. With a level, only measurements
/// up to that level are used.
pub(super) fn rediagnose(case: &mut Case, directory: &Path, level: Option<u32>) -> Result<bool> {
    let Some(outcome) = &mut case.outcome else {
        return Ok(false);
    };
    if outcome.diagnosis.is_none() {
        return Ok(false);
    }
    let mut recording = load(&recording_file(directory, &case.id))?;
    if let Some(level) = level {
        recording.evidence.limit(level);
    }
    let before = outcome.diagnosis.as_ref().map(|d| (d.cause, d.seconds));
    outcome.guesses = Some(Guesses::of(&recording));
    let diagnosis = Diagnosis {
        seconds: before.map_or(0.0, |(_, seconds)| seconds),
        ..Diagnosis::from(&diagnose(&recording.evidence))
    };
    let changed = before.map(|(cause, _)| cause) != Some(diagnosis.cause);
    outcome.diagnosis = Some(diagnosis);
    Ok(changed)
}

/// Adds the guesses of naive tools on a recording that was just made.
pub(super) fn note_guesses(outcome: &mut Outcome, file: &Path) -> Result<()> {
    outcome.guesses = Some(Guesses::of(&load(file)?));
    Ok(())
}
