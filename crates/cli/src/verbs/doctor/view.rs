//! A verdict as text: a summary that fits a screen, or with `--verbose` everything that is known.

use std::fmt::Write;

use seikan_diagnose::{
    Cause, End, Fact, Far, Level, Location, Moves, Remedy, RuledOut, Severity, Verdict,
};
use seikan_observe::path::Unseen;

use super::drawing;
use super::text::{Page, paragraph, wrap};
use crate::output::counted;
use crate::screen::{BOLD, DIM, GREEN, RED, RESET, YELLOW, joined, printable, rounded, width};

/// Maximum number of figures in a summary.
const SUMMARY_FIGURES: usize = 3;
/// Maximum number of lines of commands in a summary; the first command is always shown in full.
const SUMMARY_COMMAND_LINES: usize = 4;
const INDENT: &str = "  ";

/// Returns [`brief`] and hints, within a screen of 24 lines. `offers_fix`: names the options that
/// test the remedy and revert it.
pub fn summary(verdict: &Verdict, offers_fix: bool, page: &Page) -> String {
    let mut out = brief(verdict, SUMMARY_FIGURES, page);
    let first = verdict.remedies.first();
    out.push('\n');
    if offers_fix && first.is_some_and(|remedy| !remedy.actions.is_empty()) {
        let hint = "`--fix` tests this change and keeps it if it helps; `--undo` reverts it.";
        out += &paragraph("", "", hint, page.width);
    }
    let unavailable = match verdict.path.unseen.len() {
        0 => String::new(),
        count => format!(" {} unavailable.", counted(count, "data source")),
    };
    let more = format!("`--verbose` shows the path and all findings.{unavailable}");
    out += &paragraph("", "", &more, page.width);
    out
}

/// Returns the cause, some figures that prove it and the first remedy.
pub fn brief(verdict: &Verdict, figures: usize, page: &Page) -> String {
    let mut out = title(verdict, page);
    let figures = verdict.evidence.iter().take(figures);
    table(&figures.collect::<Vec<_>>(), page, &mut out);
    if let Some(remedy) = verdict.remedies.first() {
        out.push('\n');
        let text = format!("{BOLD}Fix:{RESET} {}", with_location(remedy));
        out += &paragraph("", "", &text, page.width);
        let mut lines = 0;
        for (index, command) in remedy.commands.iter().enumerate() {
            let text = command_lines(command, remedy, INDENT, page);
            lines += text.lines().count();
            if index > 0 && lines > SUMMARY_COMMAND_LINES {
                let more = counted(remedy.commands.len() - index, "more command");
                let _ = writeln!(out, "{INDENT}{DIM}and {more}{RESET}");
                break;
            }
            out += &text;
        }
    }
    out
}

/// Returns everything that is known, with the path.
pub fn details(verdict: &Verdict, page: &Page) -> String {
    let mut out = title(verdict, page);
    table(&verdict.evidence.iter().collect::<Vec<_>>(), page, &mut out);
    paths(verdict, page, &mut out);
    remedies(&verdict.remedies, page, &mut out);
    heading("confidence", &mut out);
    confidence(verdict, page, &mut out);
    let excluded = |out: &&RuledOut| out.unseen.is_none();
    let (excluded, unknown) = verdict.ruled_out.iter().partition(excluded);
    causes("excluded", excluded, page, &mut out);
    causes("not examined", unknown, page, &mut out);
    unseen("unavailable data", &verdict.path.unseen, page, &mut out);
    if let Some(far) = &verdict.far {
        let label = "unavailable data at the far end";
        unseen(label, &far.path.unseen, page, &mut out);
    }
    let cost = &verdict.cost;
    let _ = writeln!(
        out,
        "\n{DIM}{:.1} s, {} samples, {:.2} CPU s{RESET}",
        cost.seconds, cost.samples, cost.cpu_seconds
    );
    out
}

/// Draws the path of this host, and the far host's path below it. The cause is marked on the path
/// of the host that has it.
fn paths(verdict: &Verdict, page: &Page, out: &mut String) {
    let Some(far) = &verdict.far else {
        heading("the path", out);
        *out += &drawing::draw(&verdict.path, Some(verdict), page);
        return;
    };
    let there = far.at == Some(End::FarEnd);
    heading("the path on this host", out);
    *out += &drawing::draw(&verdict.path, Some(verdict).filter(|_| !there), page);
    heading("the path on the far host, from the network inwards", out);
    *out += &drawing::draw_far(&far.path, Some(verdict).filter(|_| there), page);
}

fn heading(text: &str, out: &mut String) {
    let _ = writeln!(out, "\n{BOLD}{text}{RESET}");
}

/// Returns the sentence of the cause, its name with the confidence, and the throughput.
fn title(verdict: &Verdict, page: &Page) -> String {
    let colour = match verdict.cause.spec().severity {
        Severity::Healthy => GREEN,
        Severity::Notice | Severity::Warning => YELLOW,
        Severity::Fault => RED,
    };
    let mut out = String::new();
    for line in wrap(&printable(&verdict.sentence), page.width) {
        let _ = writeln!(out, "{colour}{line}{RESET}");
    }
    let level = sureness(verdict);
    let _ = match verdict.cause {
        cause if !cause.is_fault() => writeln!(out, "{BOLD}{cause}{RESET}"),
        cause => writeln!(out, "{BOLD}{cause}{RESET}, {level}"),
    };
    let inner = verdict.path.inner.as_deref().unwrap_or("the tunnel");
    let expected = match verdict.expected {
        Some(bits) => format!(", {} expected", rounded(bits / 1e6)),
        None => String::new(),
    };
    let through = rounded(verdict.throughput / 1e6);
    let _ = writeln!(
        out,
        "{through} Mbit/s through {}{expected}",
        printable(inner)
    );
    if let Some(far) = &verdict.far {
        out += &paragraph("", "", &ends(far), page.width);
    }
    if verdict.cause == Cause::Healthy && verdict.expected.is_none() {
        let hint = "With `--expect MBIT`, a throughput below that is reported as slow.";
        out += &paragraph("", "", hint, page.width);
    }
    out
}

/// Returns the confidence in a few words.
pub fn sureness(verdict: &Verdict) -> &'static str {
    match verdict.level {
        Level::Consistent if verdict.alternatives.is_empty() => "possible: it explains only a part",
        Level::Consistent => "possible: other causes fit as well",
        Level::Supported if verdict.alternatives.is_empty() => "likely: no other cause fits",
        Level::Supported => "likely: it fits best",
        Level::Confirmed => "confirmed by a change",
    }
}

/// Returns which of the two hosts has the cause, and the comparison of their counters.
fn ends(far: &Far) -> String {
    let location = match far.at {
        Some(End::Here) => "The cause is on this host.",
        Some(End::FarEnd) => "The cause is at the far end.",
        Some(End::Between) => "The cause is between the two ends.",
        None => "Neither end shows a cause.",
    };
    let (through, inner) = (rounded(far.throughput / 1e6), far.path.inner.as_deref());
    let inner = printable(inner.unwrap_or("the tunnel"));
    let mut text = format!("{location} The far end has {through} Mbit/s through {inner}");
    if let Some(crossing) = &far.crossing {
        let lost = if crossing.lost() > crossing.uncertainty() {
            rounded(crossing.lost() * 100.0)
        } else {
            format!("at most {}", rounded(crossing.uncertainty() * 100.0))
        };
        let _ = write!(text, "; {lost} % of the tunnel's packets were lost between");
    }
    text + "."
}

/// Writes a table of figures: name, value, and the normal range.
fn table(figures: &[&Fact], page: &Page, out: &mut String) {
    if figures.is_empty() {
        return;
    }
    out.push('\n');
    let values: Vec<_> = figures.iter().map(|fact| rounded(fact.value)).collect();
    let widest = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0);
    let value = widest(&mut values.iter().map(|text| width(text))).max(5);
    let normal = widest(&mut figures.iter().map(|fact| width(&fact.expected)));
    let normal = normal.clamp(6, page.width / 3);
    let available = page.width - value - normal - 6;
    let name = widest(&mut figures.iter().map(|fact| width(&fact.name))).clamp(8, available);
    let mut row = |colours: [&str; 2], cells: [&str; 3]| {
        let [names, normals] = [wrap(cells[0], name), wrap(cells[2], normal)];
        let [usual, strong] = colours;
        for i in 0..names.len().max(normals.len()) {
            let number = if i == 0 { cells[1] } else { "" };
            let columns = [
                (usual, names.get(i).map_or("", String::as_str), 0),
                (strong, number, name + 2 + value - width(number)),
                (
                    usual,
                    normals.get(i).map_or("", String::as_str),
                    name + value + 4,
                ),
            ];
            let mut line = String::new();
            for (colour, text, column) in columns.iter().filter(|(_, text, _)| !text.is_empty()) {
                let space = " ".repeat(column.saturating_sub(width(&line)));
                let _ = write!(line, "{space}{colour}{text}{RESET}");
            }
            let _ = writeln!(out, "{INDENT}{line}");
        }
    };
    row([DIM, DIM], ["measured", "value", "normal"]);
    for (fact, number) in figures.iter().zip(&values) {
        let cells = [&*printable(&fact.name), number, &*printable(&fact.expected)];
        row(["", BOLD], cells);
    }
}

fn remedies(remedies: &[Remedy], page: &Page, out: &mut String) {
    if remedies.is_empty() {
        return;
    }
    heading("remedies", out);
    for (number, remedy) in (1..).zip(remedies) {
        let first = format!("{INDENT}{number}. ");
        let indent = " ".repeat(first.len());
        *out += &paragraph(&first, &indent, &remedy_in_words(remedy), page.width);
        let indent = " ".repeat(first.len() + 2);
        for command in &remedy.commands {
            *out += &command_lines(command, remedy, &indent, page);
        }
    }
}

/// Breaks a command into lines. A command that can be pasted into a shell stays one command: a
/// broken line ends in a backslash.
fn command_lines(command: &str, remedy: &Remedy, indent: &str, page: &Page) -> String {
    let end = if remedy.actions.is_empty() { "" } else { " \\" };
    let lines = wrap(&printable(command), page.width - indent.len() - end.len());
    let last = lines.len() - 1;
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        let end = if i < last { end } else { "" };
        let _ = writeln!(out, "{indent}{GREEN}{line}{RESET}{end}");
    }
    out
}

/// Returns the remedy, where it has to be applied, and the expected gain.
pub fn remedy_in_words(remedy: &Remedy) -> String {
    if remedy.expected_gain.is_empty() {
        with_location(remedy)
    } else {
        with_location(remedy) + ": " + &printable(&remedy.expected_gain)
    }
}

fn with_location(remedy: &Remedy) -> String {
    let location = match remedy.location {
        Location::Here => "on this host",
        Location::Tunnel => "in the tunnel's settings",
        Location::FarEnd => "on the far host",
        Location::Provider => "by the operator of the network or machine",
        Location::Application => "in the application",
    };
    format!("{} ({location})", printable(&remedy.what))
}

fn confidence(verdict: &Verdict, page: &Page, out: &mut String) {
    let mut say = |text: &str| *out += &paragraph(INDENT, INDENT, text, page.width);
    say(match (verdict.cause, verdict.level) {
        (Cause::Healthy, _) => "No known cause shows in the measurements.",
        (Cause::Idle, _) => {
            "An idle tunnel has no cause: a finding on this machine may come from other traffic. The doctor's own packets \
             are not counted."
        }
        (Cause::Unknown, _) => "The tunnel is slower than expected, and no known cause shows.",
        (_, Level::Consistent) => {
            "consistent: the signature of the cause is present, but it explains only a part, or another cause shows as \
             well."
        }
        (_, Level::Supported) => {
            "supported: the signature of the cause is present; those of its rivals are absent or far weaker."
        }
        (_, Level::Confirmed) => "confirmed: a change moved the throughput as predicted.",
    });
    if verdict.chain.len() > 1 {
        let arrow = page.either(" → ", " -> ");
        say(&format!(
            "Chain from cause to symptom: {}.",
            joined(&verdict.chain, arrow)
        ));
    }
    if let Some(Moves { counter, lag, r }) = &verdict.moves {
        let when = match lag {
            lag if *lag > 0.0 => format!(", {} s before it", rounded(*lag)),
            lag if *lag < 0.0 => format!(", {} s after it", rounded(-*lag)),
            _ => String::new(),
        };
        say(&format!(
            "`{}` correlates with the throughput{when}: r {} ({} to {}). That is no proof.",
            printable(counter),
            rounded(r.value),
            rounded(r.low),
            rounded(r.high)
        ));
    }
    if !verdict.alternatives.is_empty() {
        let label = match verdict.cause {
            Cause::Healthy => "Weak findings",
            _ => "Other possible causes",
        };
        say(&format!(
            "{label}: {}.",
            joined(&verdict.alternatives, ", ")
        ));
    }
}

fn causes(label: &str, causes: Vec<&RuledOut>, page: &Page, out: &mut String) {
    if !causes.is_empty() {
        heading(label, out);
    }
    for cause in causes {
        let text = printable(&why(cause));
        let text = format!("{BOLD}{}{RESET}: {text}", cause.cause);
        *out += &paragraph(INDENT, "    ", &text, page.width);
    }
}

/// Returns why a cause was excluded or not examined.
pub fn why(cause: &RuledOut) -> String {
    match (&cause.fact, &cause.unseen) {
        (_, Some(why)) => why.clone(),
        (Some(fact), None) => {
            let value = rounded(fact.value);
            format!(
                "{} {value} (normal: {}; {})",
                fact.name, fact.expected, fact.source
            )
        }
        (None, None) => "no evidence".into(),
    }
}

fn unseen(label: &str, all: &[Unseen], page: &Page, out: &mut String) {
    if !all.is_empty() {
        heading(label, out);
    }
    for unseen in all {
        let text = printable(&format!("{}: {}", unseen.what, unseen.why));
        *out += &paragraph(INDENT, "    ", &text, page.width);
    }
}

#[cfg(test)]
mod tests;
