//! Runs the doctor as any user would, in a host of which it knows only an interface and the
//! expected rate.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use seikan_diagnose::trial::Attempt;
use seikan_diagnose::{Cause, Fact, Verdict};
use seikan_ui::Interrupt;
use serde::{Deserialize, Serialize};

use crate::error::{Doing, Result, setup};
use crate::process::Killed;
use crate::site::Host;
use crate::tunnel::seikan::RUN_DIR;

/// Maximum time for the doctor, in addition to twice its measurement.
const PATIENCE: Duration = Duration::from_secs(30);
/// Further time if the doctor tries remedies: 24 s for each of two remedies.
const TRIALS: Duration = Duration::from_secs(60);
/// Number of characters of the doctor's error output that an error quotes.
const QUOTED: usize = 400;

/// Diagnosis of the doctor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// The cause.
    pub cause: Cause,
    /// Confidence: `consistent`, `supported` or `confirmed`.
    pub level: String,
    /// Other causes, the heaviest first.
    #[serde(default)]
    pub alternatives: Vec<Cause>,
    /// Chain from the cause to its visible effect.
    #[serde(default)]
    pub chain: Vec<Cause>,
    /// Time until the diagnosis in seconds, measured here and not by the doctor.
    #[serde(default)]
    pub seconds: f64,
}

impl From<&Verdict> for Diagnosis {
    /// Returns the diagnosis of a verdict that took no time.
    fn from(verdict: &Verdict) -> Self {
        Self {
            cause: verdict.cause,
            level: format!("{:?}", verdict.level).to_lowercase(),
            alternatives: verdict.alternatives.clone(),
            chain: verdict.chain.clone(),
            seconds: 0.0,
        }
    }
}

/// Arguments of the doctor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DoctorArguments<'a> {
    /// The host on which the doctor runs.
    pub host: &'a Host,
    /// The interface to diagnose.
    pub interface: &'a str,
    /// Expected rate in Mbit/s, if the doctor gets it.
    pub expected: Option<f64>,
    /// Duration of the measurement, in seconds.
    pub seconds: f64,
    /// Level of the doctor; `None`: its own choice.
    pub level: Option<u32>,
    /// Whether the doctor tries remedies.
    pub fix: bool,
    /// File for its recording.
    pub record: &'a Path,
    /// Directory for its journal, separate from the machine's own doctor.
    pub run_dir: &'a Path,
}

/// Output of the doctor.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Answer {
    #[serde(flatten)]
    pub diagnosis: Diagnosis,
    /// The cause in a sentence.
    #[serde(default)]
    pub sentence: String,
    /// Figures of the diagnosis, the most significant one first.
    #[serde(default)]
    pub evidence: Vec<Fact>,
    /// Changes that the doctor tried.
    #[serde(default)]
    pub fixes: Vec<Attempt>,
    cost: Cost,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Cost {
    seconds: f64,
}

/// Runs the doctor.
///
/// # Errors
/// There is no program, it fails or takes too long, or its output is no diagnosis;
/// [`Interrupted`](crate::error::LabError::Interrupted).
pub(crate) fn ask(arguments: &DoctorArguments<'_>, interrupt: &Interrupt) -> Result<Answer> {
    let mut command = command()?;
    command
        .env(RUN_DIR, arguments.run_dir)
        .args(["--iface", arguments.interface, "--json"])
        .args(["--seconds", &format!("{:.0}", arguments.seconds)])
        .arg("--record")
        .arg(arguments.record);
    if let Some(expected) = arguments.expected {
        command.args(["--expect", &format!("{expected:.1}")]);
    }
    if let Some(level) = arguments.level {
        command.args(["--level", &level.to_string()]);
    }
    if arguments.fix {
        command.args(["--fix", "--yes"]);
    }
    // Evaluation takes longer for longer measurements, and much longer on an emulated machine.
    let patience = Duration::from_secs_f64(2.0 * arguments.seconds) + PATIENCE;
    let patience = patience
        + if arguments.fix {
            TRIALS
        } else {
            Duration::ZERO
        };
    let start = Instant::now();
    let said = answered(arguments.host, command, patience, interrupt)?;
    let elapsed = start.elapsed().as_secs_f64();
    let mut answer: Answer = serde_json::from_str(&said)
        .map_err(|e| setup(format!("cannot parse the output of `seikan doctor`: {e}")))?;
    answer.diagnosis.seconds = if arguments.fix {
        // The time of the verdict, after which the doctor continued.
        answer.cost.seconds
    } else {
        elapsed
    };
    Ok(answer)
}

/// Makes the doctor revert the changes that it kept in `host`, by the journal in `run_dir`.
///
/// # Errors
/// As [`ask`].
pub(crate) fn undo(host: &Host, run_dir: &Path, interrupt: &Interrupt) -> Result<()> {
    let mut command = command()?;
    command.env(RUN_DIR, run_dir).arg("--undo");
    answered(host, command, PATIENCE, interrupt).map(drop)
}

/// Returns the command `seikan doctor`, without arguments.
pub(super) fn command() -> Result<Command> {
    let mut command = crate::program::seikan_command()?;
    command.arg("doctor");
    Ok(command)
}

/// Runs the doctor to its end, and returns its output.
fn answered(
    host: &Host,
    mut command: Command,
    patience: Duration,
    interrupt: &Interrupt,
) -> Result<String> {
    // Use files for the output, because nothing has to read them meanwhile.
    let file = || tempfile::tempfile().doing("make a file for the doctor");
    let [mut said, mut complaint] = [file()?, file()?];
    let copy = |file: &File| {
        let copy = file.try_clone();
        copy.doing("duplicate a descriptor")
    };
    command
        .stdin(Stdio::null())
        .stdout(copy(&said)?)
        .stderr(copy(&complaint)?);
    let mut doctor = Killed::start(host, &mut command)?;
    match doctor.wait("`seikan doctor`", patience, interrupt)? {
        status if status.success() => Ok(text_of(&mut said)),
        _ => Err(setup(format!(
            "`seikan doctor` failed: {}",
            text_of(&mut complaint)
                .chars()
                .take(QUOTED)
                .collect::<String>()
                .trim()
        ))),
    }
}

/// Returns everything that a program wrote to a file.
fn text_of(file: &mut File) -> String {
    let mut bytes = Vec::new();
    // A partial read is enough.
    let _ = file.rewind().and_then(|()| file.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}
