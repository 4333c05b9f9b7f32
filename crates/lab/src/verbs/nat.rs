//! `seikan lab nat`: pairs of hosts behind NATs, the paths that theory predicts, and the paths that
//! they found.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, ValueHint};
use seikan_lab::nat::{
    EventReport, NatOptions, NatReport, NatRow, PLAN, PathKind, Plan, events, nat,
};
use seikan_ui::screen::{BOLD, DIM, GREEN, RED, RESET, YELLOW, width};

use super::{JsonFile, exit_code, with_progress};

/// Options of `lab nat`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab nat                             all pairs, a few minutes\n  \
    sudo seikan lab nat --only symmetric --jobs 1   those with a symmetric NAT, one by one\n  \
    sudo seikan lab nat --events --jobs 4           restarted NATs, outages, killed relays, wrong clocks\n\n\
    Exit code 1 if any pair has another path than predicted, or has it late: a direct one more than 3 s after the start of \
    the second daemon (or the file's limit), the first answer through a relay more than 1 s after it. Also if any event \
    interrupts a pair for longer than the file allows.")]
pub struct NatArguments {
    /// Play events on connected pairs instead of connecting them
    #[arg(long)]
    pub events: bool,
    #[command(flatten)]
    options: NatOptions,
    /// NATs and pairs of this file instead of the built-in ones
    #[arg(long, value_name = "FILE.toml", value_hint = ValueHint::FilePath)]
    pub file: Option<PathBuf>,
    #[command(flatten)]
    json: JsonFile,
}

/// Plays the plan, prints the results, and writes the files.
pub fn run(arguments: &NatArguments) -> anyhow::Result<ExitCode> {
    let text = match &arguments.file {
        Some(file) => std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?,
        None => PLAN.to_owned(),
    };
    let (plan, options) = (Plan::parse(&text)?, &arguments.options);
    let json = &arguments.json;
    let (text, failed) = if arguments.events {
        let report =
            with_progress(|interrupt, progress| events(&plan, options, interrupt, progress))?;
        json.write(&report)?;
        (shown_events(&report), report.failed())
    } else {
        let report = with_progress(|interrupt, progress| nat(&plan, options, interrupt, progress))?;
        json.write(&report)?;
        (shown(&report, &plan), report.failed())
    };
    write!(anstream::stdout(), "{text}")?;
    Ok(exit_code(failed))
}

/// Returns the matrix, the results outside of it, and the deviations.
fn shown(report: &NatReport, plan: &Plan) -> String {
    let mut text = format!(
        "{BOLD}The path of each pair, and seconds from the second daemon's start until it was in use{RESET}\n\
         {DIM}down: before A, which was there; across: before B, which starts and sends; a round trip is {} ms{RESET}\n\n",
        2.0 * report.delay_ms
    );
    let names: Vec<&str> = plan.nats.iter().map(|nat| nat.name.as_str()).collect();
    let cell = |a: &str, b: &str| {
        let here = |row: &&NatRow| row.nats == [a, b] && row.cell == format!("{a}, {b}");
        report.rows.iter().find(here).map(brief).unwrap_or_default()
    };
    let mut line = |first: &str, cells: Vec<String>| {
        let padded =
            |text: &String| format!("{text}{}", " ".repeat(13_usize.saturating_sub(width(text))));
        let cells: String = cells.iter().map(padded).collect();
        let _ = writeln!(text, "{first:<12}{}", cells.trim_end());
    };
    line("", names.iter().map(|name| (*name).to_owned()).collect());
    for a in &names {
        line(a, names.iter().map(|b| cell(a, b)).collect());
    }
    text.push('\n');
    let outside_matrix = |row: &&NatRow| {
        row.cell.contains(" behind ") || row.nats.iter().any(|nat| !names.contains(&nat.as_str()))
    };
    for row in report.rows.iter().filter(outside_matrix) {
        let _ = writeln!(text, "{}: {}", row.cell, brief(row));
    }
    let wrong: Vec<&NatRow> = report
        .rows
        .iter()
        .filter(|row| !row.wrong.is_empty())
        .collect();
    let good = report.rows.len() - wrong.len();
    let _ = writeln!(
        text,
        "\n{BOLD}{good} of {} as theory says, in time{RESET}",
        report.rows.len()
    );
    for row in wrong {
        let _ = writeln!(
            text,
            "{RED}{}{RESET}: {}; expected {}, found {} at A and {} at B\n  {DIM}{}{RESET}",
            row.cell,
            row.wrong.join(", "),
            name(row.expected),
            name(row.found[0]),
            name(row.found[1]),
            row.why
        );
    }
    text
}

/// Returns a line for each event, and the differences of unexpected results.
fn shown_events(report: &EventReport) -> String {
    let mut text = format!(
        "{BOLD}{:<24}{:<18}{:>14}{:>18}{:>12}{RESET}\n",
        "what happens", "path", "silence, s", "settled after, s", "TCP, s"
    );
    for row in &report.rows {
        let path = |paths: [PathKind; 2]| name(paths[0].max(paths[1]));
        let (before, after) = (path(row.before), path(row.found));
        let path = if before == after {
            before.to_owned()
        } else {
            format!("{before}, then {after}")
        };
        let [gap, most] = row.gap;
        let time = |time: Option<f64>| time.map_or("-".to_owned(), |time| format!("{time:.1}"));
        let colour = if row.wrong.is_empty() { GREEN } else { RED };
        let _ = writeln!(
            text,
            "{colour}{:<24}{RESET}{path:<18}{:>14}{:>18}{:>12}",
            row.event,
            format!("{gap:.1} of {most}"),
            format!("{} of {}", time(row.settled), row.settled_within),
            time(row.tcp),
        );
        if !row.wrong.is_empty() {
            let _ = writeln!(
                text,
                "  {}\n  {DIM}{}{RESET}",
                row.wrong.join(", "),
                row.about
            );
        }
    }
    text
}

/// `direct 0.31`, coloured by whether that is right.
fn brief(row: &NatRow) -> String {
    let (path, time) = match row.first_answer {
        None => (PathKind::None, None),
        Some(_) if row.direct.is_some() => (PathKind::Direct, row.direct),
        Some(first) => (PathKind::Relay, Some(first)),
    };
    let colour = match row.wrong.as_slice() {
        [] => GREEN,
        [only] if only == "late" => YELLOW,
        _ => RED,
    };
    let time = time.map_or(String::new(), |time| format!(" {time:.2}"));
    format!("{colour}{}{RESET}{time}", name(path))
}

fn name(path: PathKind) -> &'static str {
    match path {
        PathKind::Direct => "direct",
        PathKind::Relay => "relay",
        PathKind::None => "none",
    }
}
