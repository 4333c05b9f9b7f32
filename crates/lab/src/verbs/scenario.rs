//! `seikan lab run`: a tunnel that was made slow, and whether the doctor finds out why.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};
use seikan_lab::arguments::whole;
use seikan_lab::scenario::{Draw, Outcome, RunOptions, Scenario, Split, run};
use seikan_lab::{LabError, setup, usage};
use seikan_ui::Progress;
use seikan_ui::output::print_json;

use super::with_progress;

/// Options of `lab run`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab run tun-queue-overflow --seed 7\n  \
    sudo seikan lab run shaper --severity 100 --tunnel wireguard-go --keep\n  \
    seikan lab run --list")]
pub struct RunArguments {
    /// Name of the scenario
    #[arg(value_name = "SCENARIO", required_unless_present = "list")]
    pub scenario: Option<String>,
    /// List the scenarios
    #[arg(long)]
    pub list: bool,
    /// Seed of the choice of tunnel and severity
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
    /// Severity of the fault, in its unit [default: random]
    #[arg(long, value_name = "NUMBER")]
    pub severity: Option<f64>,
    /// Tunnel [default: random]
    #[arg(long, value_name = "NAME")]
    pub tunnel: Option<String>,
    /// Duration of the doctor's measurement; 0 disables it
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = whole(0..=600))]
    pub seconds: u32,
    /// Level of the doctor [default: its own choice]
    #[arg(long, value_name = "LEVEL", value_parser = whole(0..=2))]
    pub level: Option<u32>,
    /// Let the doctor try its remedies, check the result, and revert them
    #[arg(long)]
    pub fix: bool,
    /// Record the doctor's measurements in this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub record: Option<PathBuf>,
    /// Leave tunnel, fault and load until Ctrl-C
    #[arg(long)]
    pub keep: bool,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
}

/// Plays one scenario and prints the expected and the actual diagnosis.
pub fn play(arguments: &RunArguments) -> anyhow::Result<ExitCode> {
    let name = match &arguments.scenario {
        Some(name) if !arguments.list => name,
        _ => return list(),
    };
    let scenario = Scenario::find(name)?;
    let draw = drawn(&scenario, arguments)?;
    let options = RunOptions {
        doctor: (arguments.seconds > 0).then_some(f64::from(arguments.seconds)),
        level: arguments.level,
        fix: arguments.fix,
        recording: arguments.record.clone(),
        always: true,
        keep: arguments.keep,
        ..RunOptions::default()
    };
    let outcome = with_progress(|interrupt, progress| {
        let mut step = |what: &str| {
            if what.starts_with("kept") {
                // The line stays: a progress bar would overwrite it.
                eprintln!("{what}")
            } else {
                progress(Progress {
                    fraction: 0.0,
                    step: what.to_owned(),
                })
            }
        };
        run(&scenario, &draw, &options, interrupt, &mut step)
    })?;
    if arguments.json {
        print_json(&outcome)?;
    } else {
        write!(io::stdout(), "{}\n{}", scenario.about, described(&outcome))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns tunnel and severity: as requested, or drawn at random.
fn drawn(scenario: &Scenario, arguments: &RunArguments) -> Result<Draw, LabError> {
    let drawn = Draw::new(scenario, Split::Train, arguments.seed, 0)
        .or_else(|| Draw::new(scenario, Split::HeldOut, arguments.seed, 0));
    let tunnel = arguments
        .tunnel
        .clone()
        .or_else(|| drawn.as_ref().map(|draw| draw.tunnel.clone()))
        .ok_or_else(|| {
            setup(format!(
                "none of the tunnels of {} can run here: {}",
                scenario.name,
                scenario.tunnels.join(", ")
            ))
        })?;
    if !scenario.fault.can_be_in(&tunnel) {
        return Err(usage(format!(
            "the fault of {} is impossible in {tunnel}",
            scenario.name
        )));
    }
    let limits = scenario.fault.kind.limits();
    if let Some(asked) = arguments.severity
        && !limits.is_some_and(|limits| limits.contains(asked))
    {
        let possible = limits.map_or("none".to_owned(), |l| {
            format!("{} to {} {}", l.min, l.max, l.unit)
        });
        return Err(usage(format!(
            "invalid severity {asked}; possible: {possible}"
        )));
    }
    let (first, second) = drawn.map_or((None, None), |draw| (draw.severity, draw.second));
    Ok(Draw {
        tunnel,
        severity: arguments.severity.or(first),
        second,
    })
}

fn list() -> anyhow::Result<ExitCode> {
    let mut out = io::stdout().lock();
    for scenario in Scenario::all()? {
        let range = match (scenario.fault.severity, scenario.fault.kind.unit()) {
            (Some([from, to]), unit) => format!(" ({from} to {to} {unit})"),
            (None, _) => String::new(),
        };
        writeln!(
            out,
            "{:<28}{}{range}\n{:<28}{}",
            scenario.name,
            scenario.about,
            "",
            scenario.tunnels.join(", ")
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// An outcome in two lines, or three.
pub(super) fn described(outcome: &Outcome) -> String {
    let severity = outcome
        .severity
        .map(|s| format!(", severity {s:.3} {}", outcome.unit))
        .unwrap_or_default();
    let mut text = format!(
        "{}{severity}: {:.0} Mbit/s healthy, {:.0} expected, {:.0} with the fault ({:+.0} %){}\n",
        outcome.tunnel,
        outcome.healthy,
        outcome.expected,
        outcome.faulty,
        -100.0 * outcome.loss,
        if outcome.counts {
            ""
        } else {
            "; it does not count"
        }
    );
    text += &match (&outcome.diagnosis, &outcome.problem) {
        (Some(d), _) => {
            let is_right = match outcome.of_both() {
                Some([one, _]) => one,
                None => outcome.found() == Some(outcome.cause),
            };
            let right = if is_right { "right" } else { "wrong" };
            let and = outcome
                .second
                .map_or(String::new(), |c| format!(" and {c}"));
            let others: Vec<&str> = d.alternatives.iter().map(|c| c.name()).collect();
            format!(
                "expected {}{and}, found {} ({}, {:.0} s): {right}{}\n",
                outcome.cause,
                d.cause,
                d.level,
                d.seconds,
                if others.is_empty() {
                    String::new()
                } else {
                    format!("; then {}", others.join(", "))
                }
            )
        }
        (None, Some(problem)) => format!("expected {}, nothing found: {problem}\n", outcome.cause),
        (None, None) => format!("expected {}; the doctor did not run\n", outcome.cause),
    };
    if let Some(guesses) = outcome.guesses {
        text += &format!(
            "highest correlation: {}; largest jump: {}\n",
            guesses.correlation, guesses.jump
        );
    }
    if let Some(repair) = &outcome.repair {
        text += &format!(
            "{}, then {:.0} Mbit/s{}{}\n",
            if repair.kept {
                "a change was kept"
            } else {
                "all changes were reverted"
            },
            repair.throughput,
            repair
                .why
                .as_ref()
                .map_or(String::new(), |why| format!(": {why}")),
            if repair.left.is_empty() {
                "; afterwards everything is as before".to_owned()
            } else {
                format!("; NOT AS BEFORE: {}", repair.left.join(", "))
            }
        );
    }
    text
}
