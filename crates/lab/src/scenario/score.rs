//! Plays many randomly drawn cases one after the other, and counts the results.
//!
//! Cases cycle through the scenarios, so that an early end has covered them equally, until each
//! class has the requested number of valid cases. Each case is appended to a file as a line of JSON
//! at once; cases in the file are not played again, but counted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueHint};
use seikan_diagnose::Cause;
use seikan_ui::{Interrupt, Progress};
use serde::{Deserialize, Serialize};

use super::again::{recording_file, rediagnose};
use super::{Counts, Draw, Outcome, RunOptions, Scenario, Split, run};
use crate::arguments::whole;
use crate::error::{Doing, LabError, Result, usage};

/// Maximum number of times that a scenario is played for each requested case: a fault that is too
/// weak to count is drawn again.
const DRAWS: u32 = 3;

/// Options of the score.
#[derive(Clone, Debug, Default, Args)]
pub struct ScoreOptions {
    /// Causes or scenarios to run [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub classes: Vec<String>,
    /// Number of valid cases of each cause
    #[arg(long, value_name = "CASES", default_value_t = 8, value_parser = whole(1..=10_000))]
    pub cases: u32,
    /// Start no new case after this time
    #[arg(long, value_name = "MINUTES")]
    pub minutes: Option<f64>,
    /// Seed of the choice of tunnels and severities
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
    /// Half of the severities and tunnels
    #[arg(long, value_enum, default_value = "train")]
    pub split: Split,
    /// File for the cases; cases in it are not run again
    #[arg(long, value_name = "FILE.jsonl", value_hint = ValueHint::FilePath)]
    pub out: Option<PathBuf>,
    /// Record the doctor's measurements of each case in this directory
    #[arg(long, value_name = "DIRECTORY", value_hint = ValueHint::DirPath)]
    pub recordings: Option<PathBuf>,
    /// Diagnose the recorded cases again with the rules of this program; needs no root
    #[arg(long, requires = "out", requires = "recordings")]
    pub again: bool,
    /// Level of the doctor [default: its own choice]; 0 uses counters only
    #[arg(long, value_name = "LEVEL", value_parser = whole(0..=2))]
    pub level: Option<u32>,
    /// Let the doctor try its remedies, and check their effect and their reversal; adds a minute
    /// per case
    #[arg(long, conflicts_with = "again")]
    pub fix: bool,
    /// Duration of the doctor's measurement of each case
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = whole(1..=600))]
    pub seconds: u32,
}

/// One case, as a line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Identifier: split, scenario, seed and number.
    pub id: String,
    /// Result; `None` if the case could not be played.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// Why it could not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Events during the score.
#[derive(Clone, Debug)]
pub enum Progressed<'a> {
    /// A step of a case begins.
    Step(Progress),
    /// A case is done.
    Done(&'a Case),
}

/// Plays and counts. Ctrl-C ends early, and counts the cases so far.
///
/// # Errors
/// A class is unknown; a file cannot be read or written. A case that fails is in the file with its
/// reason.
pub fn score(
    options: &ScoreOptions,
    interrupt: &Interrupt,
    report: &mut dyn FnMut(Progressed<'_>),
) -> Result<Counts> {
    let limit = options
        .minutes
        .map(|m| Duration::try_from_secs_f64(m * 60.0))
        .transpose()
        .map_err(|_| usage("--minutes must be positive"))?;
    let scenarios = chosen(&options.classes)?;
    let mut cases = match &options.out {
        Some(file) => read(file)?,
        None => Vec::new(),
    };
    let rounds = options.cases.saturating_mul(DRAWS);
    let draws = (0..rounds).flat_map(|number| scenarios.iter().map(move |one| (one, number)));
    let mut missing = Missing::of(options, &scenarios, &cases);
    let all = missing.sum();
    let known: BTreeSet<String> = cases
        .iter()
        .filter(|case| case.outcome.is_some())
        .map(|case| case.id.clone())
        .collect();
    if let Some(directory) = &options.recordings {
        std::fs::create_dir_all(directory).doing(format!("make {}", directory.display()))?;
    }
    let start = Instant::now();
    for (scenario, number) in draws {
        let in_time = limit.is_none_or(|limit| start.elapsed() < limit);
        if !in_time || interrupt.is_raised() {
            break;
        }
        let id = id(options, scenario, number);
        if missing.is_complete(scenario) || known.contains(&id) {
            continue;
        }
        let Some(draw) = Draw::new(scenario, options.split, options.seed, number) else {
            continue;
        };
        let fraction = 1.0 - f64::from(missing.sum()) / f64::from(all);
        let mut step = |what: &str| {
            report(Progressed::Step(Progress {
                fraction,
                step: format!("{} over {}: {what}", scenario.name, draw.tunnel),
            }));
        };
        let how = RunOptions {
            recording: options
                .recordings
                .as_deref()
                .map(|dir| recording_file(dir, &id)),
            doctor: Some(f64::from(options.seconds)),
            level: options.level,
            fix: options.fix,
            ..RunOptions::default()
        };
        let case = match run(scenario, &draw, &how, interrupt, &mut step) {
            Ok(outcome) => Case {
                id: id.clone(),
                outcome: Some(outcome),
                error: None,
            },
            Err(LabError::Interrupted) => break,
            Err(error) => Case {
                id: id.clone(),
                outcome: None,
                error: Some(error.to_string()),
            },
        };
        if let Some(file) = &options.out {
            append(file, &case)?;
        }
        missing.count(&case);
        report(Progressed::Done(&case));
        cases.push(case);
    }
    Ok(counted(options, &scenarios, &cases))
}

/// Diagnoses earlier cases again from their recordings by the current rules, and counts. Plays
/// nothing and changes no file; cases with a different diagnosis are reported. `options.level`
/// limits the measurements in use.
///
/// # Errors
/// There are no cases; a class is unknown; a file or recording cannot be read.
pub fn score_again(
    options: &ScoreOptions,
    report: &mut dyn FnMut(Progressed<'_>),
) -> Result<Counts> {
    let (Some(file), Some(directory)) = (&options.out, &options.recordings) else {
        return Err(usage(
            "cannot diagnose again: name the cases and recordings with --out and --recordings",
        ));
    };
    let scenarios = chosen(&options.classes)?;
    let mut cases = read(file)?;
    if cases.is_empty() {
        return Err(usage(format!(
            "cannot diagnose again: {} has no cases",
            file.display()
        )));
    }
    let wanted = Wanted::of(options, &scenarios);
    let count = cases.len();
    for (index, case) in cases.iter_mut().enumerate() {
        if !wanted.takes(case) {
            continue;
        }
        report(Progressed::Step(Progress {
            fraction: index as f64 / count as f64,
            step: case.id.clone(),
        }));
        if rediagnose(case, directory, options.level)? {
            report(Progressed::Done(case));
        }
    }
    Ok(counted(options, &scenarios, &cases))
}

/// A cause, and whether there is a second fault: such cases are counted separately.
type Class = (Cause, bool);

/// Number of valid cases that each class still lacks.
struct Missing(BTreeMap<Class, u32>);

impl Missing {
    fn of(options: &ScoreOptions, scenarios: &[Scenario], cases: &[Case]) -> Self {
        let classes = scenarios.iter().map(|s| (s.cause, s.second.is_some()));
        let mut missing = Self(classes.map(|class| (class, options.cases)).collect());
        let wanted = Wanted::of(options, scenarios);
        let known = cases.iter().filter(|case| wanted.takes(case));
        known.for_each(|case| missing.count(case));
        missing
    }

    fn count(&mut self, case: &Case) {
        let outcome = case.outcome.as_ref().filter(|outcome| outcome.counts);
        let class = outcome.map(|outcome| (outcome.cause, outcome.second.is_some()));
        if let Some(missing) = class.and_then(|class| self.0.get_mut(&class)) {
            *missing = missing.saturating_sub(1);
        }
    }

    fn is_complete(&self, scenario: &Scenario) -> bool {
        let class = (scenario.cause, scenario.second.is_some());
        self.0.get(&class).is_none_or(|missing| *missing == 0)
    }

    fn sum(&self) -> u32 {
        self.0.values().sum()
    }
}

/// Selects the cases of a file that are counted.
struct Wanted<'a> {
    prefix: String,
    names: BTreeSet<&'a str>,
}

impl<'a> Wanted<'a> {
    fn of(options: &ScoreOptions, scenarios: &'a [Scenario]) -> Self {
        Self {
            prefix: format!("{}/", options.split),
            names: scenarios.iter().map(|s| s.name.as_str()).collect(),
        }
    }

    fn takes(&self, case: &Case) -> bool {
        let outcome = case.outcome.as_ref();
        case.id.starts_with(&self.prefix)
            && outcome.is_some_and(|o| self.names.contains(o.scenario.as_str()))
    }
}

fn counted(options: &ScoreOptions, scenarios: &[Scenario], cases: &[Case]) -> Counts {
    let wanted = Wanted::of(options, scenarios);
    let outcomes = cases.iter().filter(|case| wanted.takes(case));
    let outcomes = outcomes.filter_map(|case| case.outcome.as_ref());
    let prefix = format!("{}/", Split::Train);
    let training = cases.iter().filter(|case| case.id.starts_with(&prefix));
    Counts::of(outcomes, training.filter_map(|case| case.outcome.as_ref()))
}

fn id(options: &ScoreOptions, scenario: &Scenario, number: u32) -> String {
    format!(
        "{}/{}/{}/{number}",
        options.split, scenario.name, options.seed
    )
}

/// The scenarios of these causes or names.
fn chosen(classes: &[String]) -> Result<Vec<Scenario>> {
    let all = Scenario::all()?;
    let is = |scenario: &Scenario, class: &String| {
        scenario.name == *class || scenario.cause.name() == class
    };
    if let Some(none) = classes.iter().find(|c| !all.iter().any(|s| is(s, c))) {
        let names: BTreeSet<&str> = all
            .iter()
            .flat_map(|s| [s.cause.name(), s.name.as_str()])
            .collect();
        let names: Vec<&str> = names.into_iter().collect();
        return Err(usage(format!(
            "unknown scenario or cause `{none}`; known: {}",
            names.join(", ")
        )));
    }
    Ok(all
        .into_iter()
        .filter(|s| classes.is_empty() || classes.iter().any(|c| is(s, c)))
        .collect())
}

/// The cases of a file; none if there is no file yet.
fn read(file: &Path) -> Result<Vec<Case>> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(LabError::io(format!("read {}", file.display()))(e)),
    };
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| {
            serde_json::from_str(line).map_err(|e| {
                usage(format!(
                    "{}, line {}: not a case of this lab: {e}",
                    file.display(),
                    number + 1
                ))
            })
        })
        .collect()
}

fn append(file: &Path, case: &Case) -> Result<()> {
    let line = serde_json::to_string(case).map_err(|e| LabError::Render(e.to_string()))?;
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(file)
        .and_then(|mut f| writeln!(f, "{line}"))
        .doing(format!("write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(scenario: &Scenario, number: u32, counts: bool) -> Case {
        let outcome = serde_json::json!({
            "scenario": scenario.name, "cause": scenario.cause, "also": [], "tunnel": "raw",
            "second": scenario.second.as_ref().map(|second| second.cause), "unit": "",
            "healthy": 1.0, "expected": 1.0, "faulty": 0.5, "examined": null, "loss": 0.5,
            "counts": counts, "diagnosis": null, "problem": null,
        });
        Case {
            id: format!("train/{}/1/{number}", scenario.name),
            outcome: Some(serde_json::from_value(outcome).expect("an outcome")),
            error: None,
        }
    }

    #[test]
    fn a_class_is_complete_when_enough_of_its_cases_count() {
        let scenarios =
            chosen(&["shaper-inner", "shaper-switch", "double-queue-loss"].map(Into::into))
                .expect("names");
        let options = ScoreOptions {
            cases: 2,
            ..ScoreOptions::default()
        };
        let [double, shapers] = [true, false].map(|two| {
            let of: Vec<&Scenario> = scenarios
                .iter()
                .filter(|scenario| scenario.second.is_some() == two)
                .collect();
            of
        });
        assert!(shapers.len() > 1 && double.len() == 1);
        let known = [case(shapers[0], 0, true), case(shapers[0], 1, false)];
        let mut missing = Missing::of(&options, &scenarios, &known);
        assert_eq!(missing.sum(), 1 + 2);
        assert!(!missing.is_complete(shapers[1]));
        // All scenarios of a cause are one class, and two faults at once are another.
        missing.count(&case(shapers[1], 0, true));
        assert!(missing.is_complete(shapers[0]) && missing.is_complete(shapers[1]));
        missing.count(&case(double[0], 0, true));
        assert!(!missing.is_complete(double[0]));
        assert_eq!(missing.sum(), 1);
    }
}
