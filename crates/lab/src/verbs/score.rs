//! `seikan lab score`: plays many faults and counts correct diagnoses.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueHint};
use seikan_lab::LabError;
use seikan_lab::report::{matrix_html, matrix_svg};
use seikan_lab::scenario::{
    Counts, Interval, Progressed, RunOptions, ScoreOptions, Split, score, score_again,
};
use seikan_ui::output;

use super::scenario::described;
use super::with_progress;

/// Options of `lab score`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab score --cases 2 --out cases.jsonl --recordings cases\n  \
    seikan lab score --again --out cases.jsonl --recordings cases --html score.html\n  \
    seikan lab score --again --level 0 --out cases.jsonl --recordings cases\n  \
    sudo seikan lab score --level 0 --out level0.jsonl\n  \
    sudo seikan lab score --classes shaper,healthy --split held-out --minutes 10")]
pub struct ScoreArguments {
    /// Causes or scenarios to run [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub classes: Vec<String>,
    /// Number of valid cases of each cause
    #[arg(long, value_name = "CASES", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
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
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u32).range(0..=2))]
    pub level: Option<u32>,
    /// Let the doctor try its remedies, and check their effect and their reversal; a minute more
    /// per case
    #[arg(long, conflicts_with = "again")]
    pub fix: bool,
    /// Duration of the doctor's measurement of each case
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// Print the count as JSON
    #[arg(long)]
    pub json: bool,
    /// Draw the confusion matrix of causes
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    pub svg: Option<PathBuf>,
    /// Write one self-contained page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
}

/// Plays many cases and shows the count.
pub fn count(arguments: &ScoreArguments) -> anyhow::Result<ExitCode> {
    let limit = arguments
        .minutes
        .map(|m| Duration::try_from_secs_f64(m * 60.0));
    let limit = limit
        .transpose()
        .map_err(|_| LabError::Usage("--minutes: must be positive".into()))?;
    let options = ScoreOptions {
        classes: arguments.classes.clone(),
        cases: arguments.cases,
        limit,
        seed: arguments.seed,
        split: arguments.split,
        out: arguments.out.clone(),
        recordings: arguments.recordings.clone(),
        run: RunOptions {
            doctor: Some(f64::from(arguments.seconds)),
            level: arguments.level,
            fix: arguments.fix,
            ..RunOptions::default()
        },
    };
    let counts = with_progress(|interrupt, progress| {
        let mut report = |progressed: Progressed<'_>| match progressed {
            Progressed::Step(step) => progress(step),
            Progressed::Done(case) => {
                let text = match (&case.outcome, &case.error) {
                    (Some(outcome), _) => described(outcome),
                    (None, error) => format!("{}\n", error.as_deref().unwrap_or("failed")),
                };
                eprint!("{}: {text}", case.id);
            }
        };
        if arguments.again {
            score_again(&options, &mut report)
        } else {
            score(&options, interrupt, &mut report)
        }
    })?;
    if let Some(file) = &arguments.svg {
        output::write_file(file, &matrix_svg(&counts))?;
    }
    if let Some(file) = &arguments.html {
        output::write_file(file, &matrix_html(&counts)?)?;
    }
    if arguments.json {
        writeln!(io::stdout(), "{}", serde_json::to_string_pretty(&counts)?)?;
    } else {
        write!(io::stdout(), "{}", shown(&counts))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The count for people.
fn shown(counts: &Counts) -> String {
    let mut text = format!(
        "{} cases count ({} did not lose enough, or a control lost some; the doctor said nothing in {})\n",
        counts.cases, counts.discarded, counts.silent
    );
    for (what, interval) in [
        ("named first", counts.top_1),
        ("the same, aliases not counted", counts.strict),
        ("among the first two", counts.top_2),
        ("unknown where there was something", counts.abstained),
        ("false alarms on healthy controls", counts.false_alarms),
    ] {
        text += &format!("  {what:<36}{}\n", percent(interval));
    }
    text += &format!("  {:<36}{:>6.2}\n", "macro-F1", counts.macro_f1);
    let baselines = counts.baselines.iter().map(|b| (b.name.as_str(), b.top_1));
    let doubles = [
        ("double faults: one named first", counts.doubles.one_first),
        (
            "double faults: both among first two",
            counts.doubles.both_in_two,
        ),
    ];
    let fixes = [
        ("fixes: 90 % of healthy restored", counts.fixes.restored),
        ("fixes: kept", counts.fixes.kept),
        ("fixes: rolled back correctly", counts.fixes.rolled_back),
        ("fixes: kept and undone correctly", counts.fixes.undone),
    ];
    // Baselines without cases were not requested.
    for (what, interval) in baselines.chain(doubles).chain(fixes) {
        if interval.of > 0 {
            text += &format!("  {what:<36}{}\n", percent(interval));
        }
    }
    for left in &counts.fixes.left {
        text += &format!("    not as before: {left}\n");
    }
    if let Some(seconds) = counts.seconds {
        text += &format!(
            "  {:<36}{:>6.1} s\n",
            "time to the verdict, median", seconds.median
        );
    }
    if counts.classes.is_empty() {
        return text;
    }
    text += &format!(
        "\n{:<28}{:<32}{:<20}{:>6}\n",
        "cause", "named first (95 % interval)", "rightly named", "F1"
    );
    for class in &counts.classes {
        text += &format!(
            "{:<28}{:<32}{:<20}{:>6.2}\n",
            class.cause.name(),
            percent(class.recall),
            format!("{}/{}", class.precision.hits, class.precision.of),
            class.f1
        );
        let wrong = counts
            .confusion
            .iter()
            .filter(|(is, said, _)| *is == class.cause && said != is);
        for (_, said, count) in wrong {
            text += &format!("    diagnosed as {said}: {count}\n");
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
