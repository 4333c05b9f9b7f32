//! `seikan lab score`: plays many faults and counts correct diagnoses.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};
use seikan_lab::report::{matrix_html, matrix_svg};
use seikan_lab::scenario::{Counts, Interval, Progressed, ScoreOptions, score, score_again};
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
    #[command(flatten)]
    options: ScoreOptions,
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
    let options = &arguments.options;
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
        if options.again {
            score_again(options, &mut report)
        } else {
            score(options, interrupt, &mut report)
        }
    })?;
    if let Some(file) = &arguments.svg {
        output::write_file(file, &matrix_svg(&counts))?;
    }
    if let Some(file) = &arguments.html {
        output::write_file(file, &matrix_html(&counts)?)?;
    }
    if arguments.json {
        output::print_json(&counts)?;
    } else {
        write!(io::stdout(), "{}", shown(&counts))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the counts as text.
fn shown(counts: &Counts) -> String {
    let mut text = format!(
        "{} cases count ({} did not lose enough, or a control lost some; the doctor said nothing in {})\n",
        counts.cases, counts.discarded, counts.silent
    );
    let [named, special] = counts.of_doctor();
    for (what, interval) in named {
        text += &format!("  {what:<36}{}\n", percent(interval));
    }
    text += &format!("  {:<36}{:>6.2}\n", "macro-F1", counts.macro_f1);
    let baselines = counts.baselines.iter().map(|b| (b.name.as_str(), b.top_1));
    // Baselines without cases were not requested.
    for (what, interval) in baselines.chain(special) {
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
