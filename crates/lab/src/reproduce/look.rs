//! The doctor's verdict on a slow setup; it knows only the interface and the expected rate.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use seikan_diagnose::{Cause, Recording};
use seikan_load::{Ends, LiveOptions};
use serde::{Deserialize, Serialize};

use super::{Desk, Experiment, Source};
use crate::cleanup::private_directory;
use crate::error::{Doing, LabError, Result};
use crate::load::live;
use crate::scenario::doctor::{DoctorArguments, ask};
use crate::scenario::{Diagnosis, load_recording};
use crate::site::Host;
use crate::tunnel::Running;

/// Duration of the doctor's measurement, in seconds.
pub(super) const LOOK: f64 = 6.0;
/// Time for streams to find their rate.
const WARMUP: Duration = Duration::from_secs(2);

/// The doctor's verdict on one setup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Look {
    /// Name of the row with this setup.
    pub of: String,
    /// Causes that count as correct.
    pub right: Vec<Cause>,
    /// The doctor's diagnosis.
    pub said: Option<Diagnosis>,
    /// Why the doctor gave no verdict.
    pub problem: Option<String>,
    /// Name of the recording's file, where recordings are kept.
    pub recording: Option<String>,
    /// Published quantities in the same recording: name, value.
    pub facts: Vec<(String, f64)>,
}

impl Look {
    /// Returns whether the doctor named a correct cause.
    pub fn is_right(&self) -> bool {
        self.said
            .as_ref()
            .is_some_and(|said| self.right.contains(&said.cause))
    }
}

/// A setup to diagnose.
pub(super) struct Looker<'a> {
    /// Name of the row.
    pub of: &'a str,
    /// The host on which the doctor runs.
    pub host: &'a Host,
    /// Interface to diagnose.
    pub interface: String,
    /// Expected throughput, in Mbit/s, if it is known.
    pub expected: Option<f64>,
    /// The correct cause.
    pub right: Option<Cause>,
    /// Duration of the doctor's measurement, in seconds.
    pub seconds: f64,
    /// Level of the doctor; `None`: its own choice.
    pub level: Option<u32>,
    /// Reads published quantities from the doctor's measurements.
    pub facts: fn(&Recording) -> Vec<(String, f64)>,
}

impl<'a> Looker<'a> {
    /// Creates a setup with the usual duration, for the tunnel's interface of a host and this
    /// correct cause.
    pub fn at(of: &'a str, running: &Running, host: &'a Host, right: Cause) -> Self {
        Self {
            right: Some(right),
            ..Self::new(of, host, &running.device(host))
        }
    }

    /// Creates a setup with the usual duration.
    pub fn new(of: &'a str, host: &'a Host, interface: &str) -> Self {
        Self {
            of,
            host,
            interface: interface.to_owned(),
            expected: None,
            right: None,
            seconds: LOOK,
            level: None,
            facts: |_| Vec::new(),
        }
    }

    /// Runs the doctor now, and returns its verdict and its recording.
    ///
    /// # Errors
    /// There is no scratch directory, or a file is not a recording; [`LabError::Interrupted`].
    /// Errors of the doctor itself are in the result.
    pub fn look(&self, desk: Desk<'_>) -> Result<(Look, Option<Recording>)> {
        let scratch = private_directory()?;
        let file = format!("{}.parquet", file_stem(desk.source, self.of));
        let record = desk.directory(scratch.path())?.join(&file);
        let arguments = DoctorArguments {
            host: self.host,
            interface: &self.interface,
            expected: Some(self.expected.unwrap_or(1e3)),
            seconds: self.seconds,
            level: self.level,
            fix: false,
            record: &record,
            run_dir: scratch.path(),
        };
        let mut look = Look {
            of: self.of.to_owned(),
            right: self.right.into_iter().collect(),
            said: None,
            problem: None,
            recording: desk.options.recordings.as_ref().map(|_| file),
            facts: Vec::new(),
        };
        match ask(&arguments, desk.interrupt) {
            Ok(answer) => {
                look.said = Some(answer.diagnosis);
                let recording = load_recording(&record)?;
                look.facts = (self.facts)(&recording);
                Ok((look, Some(recording)))
            }
            Err(LabError::Interrupted) => Err(LabError::Interrupted),
            Err(problem) => {
                look.problem = Some(problem.to_string());
                Ok((look, None))
            }
        }
    }

    /// Runs the doctor during a load through a tunnel, and notes its verdict.
    ///
    /// # Errors
    /// As [`Looker::look_under`].
    pub fn note(
        &self,
        load: &LiveOptions,
        running: &Running,
        desk: Desk<'_>,
        found: &mut Experiment,
    ) -> Result<()> {
        let verdict = self.look_under(load, &running.ends(), desk)?;
        found.looks.push(verdict);
        Ok(())
    }

    /// Returns the verdict during a load.
    ///
    /// # Errors
    /// The load cannot start; the errors of [`Looker::look`].
    pub fn look_under(&self, load: &LiveOptions, ends: &Ends<'_>, desk: Desk<'_>) -> Result<Look> {
        live(ends, load, desk.interrupt, |_| {
            desk.interrupt.sleep(WARMUP)?;
            Ok(self.look(desk)?.0)
        })
    }
}

impl Desk<'_> {
    /// Returns the directory for recordings, and creates it; without one, returns `scratch`.
    pub(super) fn directory<'a>(&'a self, scratch: &'a Path) -> Result<&'a Path> {
        let directory = self.options.recordings.as_deref().unwrap_or(scratch);
        std::fs::create_dir_all(directory).doing(format!("make {}", directory.display()))?;
        Ok(directory)
    }
}

/// Returns the name of a row's files, without extension.
pub(super) fn file_stem(source: Source, row: &str) -> String {
    format!("{source}-{}", slug(row))
}

/// Returns a row's name as a part of a file name.
fn slug(name: &str) -> String {
    let letters = name.chars().map(|c| match c {
        c if c.is_ascii_alphanumeric() => c.to_ascii_lowercase(),
        _ => '-',
    });
    let all: String = letters.collect();
    let words: Vec<&str> = all.split('-').filter(|word| !word.is_empty()).collect();
    words.join("-")
}

impl fmt::Display for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.said, &self.problem) {
            (Some(said), _) => write!(f, "{}, {}", said.cause, said.level),
            (None, Some(problem)) => f.write_str(problem),
            (None, None) => f.write_str("nothing"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_have_letters_digits_and_single_hyphens() {
        assert_eq!(slug("OpenVPN, queue of 3"), "openvpn-queue-of-3");
        assert_eq!(slug("../../etc"), "etc");
    }
}
