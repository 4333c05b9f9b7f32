//! `seikan lab run` and `seikan lab score`: tunnels that were made slow, and whether the doctor finds out why.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};
use seikan_lab::report::ProgressBar;
use seikan_lab::scenario::{
    Draw, Interval, Outcome, Progressed, RunOptions, Scenario, ScoreOptions, Split, Tally, run,
    score,
};
use seikan_lab::{Interrupt, LabError, Progress};

use super::wrong_usage;

/// What `lab run` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab run tun-queue-overflow --seed 7\n  \
    sudo seikan lab run shaper --severity 100 --tunnel wireguard-go --keep\n  \
    seikan lab run --list")]
pub struct RunArguments {
    /// Name of the scenario
    #[arg(value_name = "SCENARIO", required_unless_present = "list")]
    pub scenario: Option<String>,
    /// Say which scenarios there are
    #[arg(long)]
    pub list: bool,
    /// What tunnel and severity are drawn from
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
    /// How bad the fault is, in its unit, instead of drawing it
    #[arg(long, value_name = "NUMBER")]
    pub severity: Option<f64>,
    /// The tunnel, instead of drawing it
    #[arg(long, value_name = "NAME")]
    pub tunnel: Option<String>,
    /// How long the doctor looks; 0: do not ask it
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=600))]
    pub seconds: u32,
    /// Leave tunnel, fault and load until Ctrl-C
    #[arg(long)]
    pub keep: bool,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
}

/// What `lab score` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab score --cases 2 --out cases.jsonl\n  \
    sudo seikan lab score --classes shaper,healthy --split held-out --minutes 10")]
pub struct ScoreArguments {
    /// Only these causes or scenarios; all if left out
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub classes: Vec<String>,
    /// Cases of each scenario
    #[arg(long, value_name = "CASES", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub cases: u32,
    /// Begin no new case after this time
    #[arg(long, value_name = "MINUTES")]
    pub minutes: Option<f64>,
    /// What tunnels and severities are drawn from
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
    /// Which half of the severities and tunnels
    #[arg(long, value_enum, default_value = "train")]
    pub split: SplitName,
    /// Keep every case in this file, and do not play those again that it has
    #[arg(long, value_name = "FILE.jsonl", value_hint = ValueHint::FilePath)]
    pub out: Option<PathBuf>,
    /// How long the doctor looks at each case
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// Print the count as JSON
    #[arg(long)]
    pub json: bool,
}

/// Which half of the cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SplitName {
    /// Rules may be tuned on these
    Train,
    /// Severities and a tunnel that rules were never tuned on
    HeldOut,
}

impl From<SplitName> for Split {
    fn from(split: SplitName) -> Self {
        match split {
            SplitName::Train => Self::Train,
            SplitName::HeldOut => Self::HeldOut,
        }
    }
}

/// Plays one scenario and shows what was expected and what was found.
pub fn play(arguments: &RunArguments) -> anyhow::Result<ExitCode> {
    let name = match &arguments.scenario {
        Some(name) if !arguments.list => name,
        _ => return list(),
    };
    let scenario = match Scenario::find(name) {
        Err(error @ LabError::Usage(_)) => return wrong_usage(error),
        other => other?,
    };
    let draw = match drawn(&scenario, arguments) {
        Ok(draw) => draw,
        Err(error) => return wrong_usage(error),
    };
    let options = RunOptions {
        doctor: (arguments.seconds > 0).then_some(f64::from(arguments.seconds)),
        always: true,
        keep: arguments.keep,
        ..RunOptions::default()
    };
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let bar = ProgressBar::new();
    let mut step = |what: &str| match what.starts_with("kept") {
        // Nothing to be written over by the next step.
        true => eprintln!("{what}"),
        false => bar.show(Progress {
            fraction: 0.0,
            what: what.to_owned(),
        }),
    };
    let outcome = run(&scenario, &draw, &options, &interrupt, &mut step);
    drop(bar);
    let outcome = match outcome {
        Err(error @ LabError::Usage(_)) => return wrong_usage(error),
        outcome => outcome?,
    };
    let mut out = io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&outcome)?)?;
    } else {
        write!(out, "{}\n{}", scenario.about, described(&outcome))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Tunnel and severity: what was asked for, or what chance says.
fn drawn(scenario: &Scenario, arguments: &RunArguments) -> Result<Draw, LabError> {
    let drawn = Draw::new(scenario, Split::Train, arguments.seed, 0)
        .or_else(|| Draw::new(scenario, Split::HeldOut, arguments.seed, 0));
    let tunnel = arguments
        .tunnel
        .clone()
        .or_else(|| drawn.as_ref().map(|draw| draw.tunnel.clone()))
        .ok_or_else(|| {
            LabError::Setup(format!(
                "none of the tunnels of {} can run here: {}",
                scenario.name,
                scenario.tunnels.join(", ")
            ))
        })?;
    if !scenario.fault.can_be_in(&tunnel) {
        return Err(LabError::Usage(format!(
            "the fault of {} cannot be made in {tunnel}",
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
        return Err(LabError::Usage(format!(
            "severity {asked}: possible is {possible}"
        )));
    }
    Ok(Draw {
        tunnel,
        severity: arguments.severity.or(drawn.and_then(|draw| draw.severity)),
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

fn described(outcome: &Outcome) -> String {
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
            let right = match outcome.found() == Some(outcome.cause) {
                true => "right",
                false => "wrong",
            };
            let others: Vec<&str> = d.alternatives.iter().map(|c| c.name()).collect();
            format!(
                "expected {}, found {} ({}, {:.0} s): {right}{}\n",
                outcome.cause,
                d.cause,
                d.level,
                d.seconds,
                match others.is_empty() {
                    true => String::new(),
                    false => format!("; then {}", others.join(", ")),
                }
            )
        }
        (None, Some(problem)) => format!("expected {}, nothing found: {problem}\n", outcome.cause),
        (None, None) => format!("expected {}; the doctor was not asked\n", outcome.cause),
    };
    text
}

/// Plays many cases and shows the count.
pub fn count(arguments: &ScoreArguments) -> anyhow::Result<ExitCode> {
    let limit = match arguments
        .minutes
        .map(|m| Duration::try_from_secs_f64(m * 60.0))
    {
        None => None,
        Some(Ok(limit)) => Some(limit),
        Some(Err(_)) => {
            return wrong_usage(LabError::Usage("--minutes: more than nothing".into()));
        }
    };
    let options = ScoreOptions {
        classes: arguments.classes.clone(),
        cases: arguments.cases,
        limit,
        seed: arguments.seed,
        split: arguments.split.into(),
        out: arguments.out.clone(),
        run: RunOptions {
            doctor: Some(f64::from(arguments.seconds)),
            ..RunOptions::default()
        },
    };
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let bar = ProgressBar::new();
    let tally = score(&options, &interrupt, &mut |progressed| match progressed {
        Progressed::Step(step) => bar.show(step),
        Progressed::Done(case) => {
            let text = match (&case.outcome, &case.error) {
                (Some(outcome), _) => described(outcome),
                (None, error) => format!("{}\n", error.as_deref().unwrap_or("failed")),
            };
            eprint!("{}: {text}", case.id);
        }
    });
    drop(bar);
    let tally = match tally {
        Err(error @ LabError::Usage(_)) => return wrong_usage(error),
        tally => tally?,
    };
    if arguments.json {
        writeln!(io::stdout(), "{}", serde_json::to_string_pretty(&tally)?)?;
    } else {
        write!(io::stdout(), "{}", shown(&tally))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The count for people.
fn shown(tally: &Tally) -> String {
    let mut text = format!(
        "{} cases count ({} did not lose enough, or a control lost some; the doctor said nothing in {})\n",
        tally.cases, tally.discarded, tally.silent
    );
    for (what, interval) in [
        ("named first", tally.top_1),
        ("among the first two", tally.top_2),
        ("unknown where there was something", tally.abstained),
        ("false alarms on healthy controls", tally.false_alarms),
    ] {
        text += &format!("  {what:<36}{}\n", percent(interval));
    }
    text += &format!("  {:<36}{:>6.2}\n", "macro-F1", tally.macro_f1);
    if let Some(seconds) = tally.seconds {
        text += &format!(
            "  {:<36}{:>6.1} s\n",
            "time to the verdict, median", seconds.median
        );
    }
    if tally.classes.is_empty() {
        return text;
    }
    text += &format!(
        "\n{:<28}{:<32}{:<20}{:>6}\n",
        "cause", "named first (95 % interval)", "rightly named", "F1"
    );
    for class in &tally.classes {
        text += &format!(
            "{:<28}{:<32}{:<20}{:>6.2}\n",
            class.cause.name(),
            percent(class.recall),
            format!("{}/{}", class.precision.hits, class.precision.of),
            class.f1
        );
        let wrong = tally
            .confusion
            .iter()
            .filter(|(is, said, _)| *is == class.cause && said != is);
        for (_, said, count) in wrong {
            text += &format!("    taken for {said}: {count}\n");
        }
    }
    text
}

fn percent(interval: Interval) -> String {
    match interval.share() {
        None => "no cases".into(),
        Some(share) => format!(
            "{:>5.1} % ({}/{}, {:.0} to {:.0} %)",
            100.0 * share,
            interval.hits,
            interval.of,
            100.0 * interval.low,
            100.0 * interval.high
        ),
    }
}
