//! A verdict for people, on one screen: the cause, its numbers, the path, what helps, and how sure all that is.

use std::fmt::Write;

use seikan_diagnose::{Cause, End, Fact, Far, Level, Moves, Place, Remedy, RuledOut, Verdict};
use seikan_observe::path::Unseen;

use super::drawing;
use super::text::{Page, paragraph, wrap};
use crate::screen::{BOLD, DIM, GREEN, RED, RESET, YELLOW, printable, rounded, width};

/// Things that could not be seen, before "and 3 more".
const MANY: usize = 3;
const INDENT: &str = "  ";

/// The screen; `verbose`: nothing is left out.
pub fn render(verdict: &Verdict, verbose: bool, page: &Page) -> String {
    let mut out = title(verdict, page);
    numbers(verdict, page, &mut out);
    paths(verdict, page, &mut out);
    remedies(&verdict.remedies, page, &mut out);
    heading("how sure", &mut out);
    sure(verdict, page, &mut out);
    ruled_out(&verdict.ruled_out, verbose, page, &mut out);
    let label = "what could not be seen";
    unseen(label, &verdict.path.unseen, verbose, page, &mut out);
    if let Some(far) = verdict.far.as_ref().filter(|_| verbose) {
        let label = "what could not be seen at the far end";
        unseen(label, &far.path.unseen, verbose, page, &mut out);
    }
    let cost = &verdict.cost;
    let _ = writeln!(
        out,
        "\n{DIM}{:.1} s, {} samples, {:.2} CPU s{RESET}",
        cost.seconds, cost.samples, cost.cpu_seconds
    );
    out
}

/// The path, and below it the far end's, with the bad spot marked at the end where it is.
fn paths(verdict: &Verdict, page: &Page, out: &mut String) {
    let Some(far) = &verdict.far else {
        heading("the path", out);
        *out += &drawing::draw(&verdict.path, Some(verdict), page);
        return;
    };
    let there = far.at == Some(End::FarEnd);
    heading("the path on this host", out);
    *out += &drawing::draw(&verdict.path, Some(verdict).filter(|_| !there), page);
    heading("and at the far end, from the network inwards", out);
    *out += &drawing::draw_far(&far.path, Some(verdict).filter(|_| there), page);
}

fn heading(text: &str, out: &mut String) {
    let _ = writeln!(out, "\n{BOLD}{text}{RESET}");
}

/// The cause in a sentence, its name with how sure it is, and what goes through.
fn title(verdict: &Verdict, page: &Page) -> String {
    let colour = match verdict.cause {
        Cause::Healthy => GREEN,
        Cause::Idle | Cause::Unknown => YELLOW,
        _ => RED,
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
        Some(bits) => format!(", of {} expected", rounded(bits / 1e6)),
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
        let hint = "Nobody said how much should go through: with `--expect MBIT`, too little of it shows as well.";
        out += &paragraph("", "", hint, page.width);
    }
    out
}

/// How sure a verdict is, in a few words.
pub fn sureness(verdict: &Verdict) -> &'static str {
    match verdict.level {
        Level::Consistent if verdict.alternatives.is_empty() => "possible: it accounts for a part",
        Level::Consistent => "possible: others fit as well",
        Level::Supported if verdict.alternatives.is_empty() => "likely: nothing else fits",
        Level::Supported => "likely: it fits best",
        Level::Confirmed => "proven by a change",
    }
}

/// At which end it is, and what the counters of both say.
fn ends(far: &Far) -> String {
    let mut text = match far.at {
        Some(End::Here) => "The bad spot is on this host.",
        Some(End::FarEnd) => "The bad spot is at the far end.",
        Some(End::Between) => "The bad spot is between the two ends.",
        None => "Neither end shows a cause.",
    }
    .to_owned();
    let (through, inner) = (rounded(far.throughput / 1e6), far.path.inner.as_deref());
    let inner = printable(inner.unwrap_or("the tunnel"));
    let _ = write!(text, " {through} Mbit/s through {inner} there");
    if let Some(crossing) = &far.crossing {
        let lost = match crossing.lost() > crossing.doubt() {
            true => rounded(crossing.lost() * 100.0),
            false => format!("at most {}", rounded(crossing.doubt() * 100.0)),
        };
        let _ = write!(text, "; {lost} % of the tunnel's own packets lost between");
    }
    text + "."
}

/// What was measured, its value, and what would be normal.
fn numbers(verdict: &Verdict, page: &Page, out: &mut String) {
    if verdict.evidence.is_empty() {
        return;
    }
    out.push('\n');
    let values: Vec<_> = verdict
        .evidence
        .iter()
        .map(|fact| rounded(fact.value))
        .collect();
    let widest = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0);
    let value = widest(&mut values.iter().map(|text| width(text))).max(5);
    let of_normal = |fact: &Fact| width(&fact.expected);
    let normal = widest(&mut verdict.evidence.iter().map(of_normal)).clamp(6, page.width / 3);
    let of_name = |fact: &Fact| width(&fact.name);
    let room = page.width - value - normal - 6;
    let name = widest(&mut verdict.evidence.iter().map(of_name)).clamp(8, room);
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
    for (fact, number) in verdict.evidence.iter().zip(&values) {
        let cells = [&*printable(&fact.name), number, &*printable(&fact.expected)];
        row(["", BOLD], cells);
    }
}

fn remedies(remedies: &[Remedy], page: &Page, out: &mut String) {
    if remedies.is_empty() {
        return;
    }
    heading("what helps", out);
    for (number, remedy) in (1..).zip(remedies) {
        let text = remedy_in_words(remedy);
        let first = format!("{INDENT}{number}. ");
        let indent = " ".repeat(first.len());
        *out += &paragraph(&first, &indent, &printable(&text), page.width);
        // What can be pasted must stay so: a shell takes a line that ends in a backslash together with the next.
        let end = if remedy.actions.is_empty() { "" } else { " \\" };
        for command in &remedy.commands {
            let indent = " ".repeat(first.len() + 2);
            let lines = wrap(&printable(command), page.width - indent.len() - end.len());
            let last = lines.len() - 1;
            for (i, line) in lines.iter().enumerate() {
                let end = if i < last { end } else { "" };
                let _ = writeln!(out, "{indent}{GREEN}{line}{RESET}{end}");
            }
        }
    }
}

/// What a remedy is, where it has to be done, and what may be hoped for.
pub fn remedy_in_words(remedy: &Remedy) -> String {
    let place = match remedy.place {
        Place::Here => "on this host",
        Place::Tunnel => "in the tunnel's settings",
        Place::FarEnd => "on the host at the far end",
        Place::Provider => "ask whoever runs the network or the machine",
        Place::Application => "in the application",
    };
    match remedy.expected_gain.is_empty() {
        true => format!("{} ({place})", remedy.what),
        false => format!("{} ({place}): {}", remedy.what, remedy.expected_gain),
    }
}

fn sure(verdict: &Verdict, page: &Page, out: &mut String) {
    let mut say = |text: &str| *out += &paragraph(INDENT, INDENT, text, page.width);
    match (verdict.cause, verdict.level) {
        (Cause::Healthy, _) => say("No known cause shows in what could be measured."),
        (Cause::Idle, _) => say(
            "No cause is named of an idle tunnel: what shows on this machine may be of other traffic. The doctor's own \
             packets are not counted.",
        ),
        (Cause::Unknown, _) => say(
            "It is slower than it should be, and no known cause shows. Look longer (`--seconds 30`), as root, \
             and at the other end as well.",
        ),
        (_, Level::Consistent) => say(
            "consistent: its signature is there, but it accounts for a part only, or another cause shows as well.",
        ),
        (_, Level::Supported) => {
            say("supported: its signature is there, and its rivals' are not, or far weaker.")
        }
        (_, Level::Confirmed) => {
            say("confirmed: an intervention moved the throughput as predicted.")
        }
    }
    if verdict.chain.len() > 1 {
        let arrow = page.either(" → ", " -> ");
        let chain: Vec<_> = verdict.chain.iter().map(|cause| cause.name()).collect();
        say(&format!(
            "It brings about what is felt: {}.",
            chain.join(arrow)
        ));
    }
    if let Some(moves) = &verdict.moves {
        let Moves { counter, lag, r } = moves;
        let when = match lag {
            lag if *lag > 0.0 => format!(", {} s before it", rounded(*lag)),
            lag if *lag < 0.0 => format!(", {} s after it", rounded(-*lag)),
            _ => String::new(),
        };
        say(&format!(
            "`{}` moves with the throughput{when}: r {} ({} to {}), which is no proof.",
            printable(counter),
            rounded(r.value),
            rounded(r.low),
            rounded(r.high)
        ));
    }
    if !verdict.alternatives.is_empty() {
        let names: Vec<_> = verdict
            .alternatives
            .iter()
            .map(|cause| cause.name())
            .collect();
        let names = names.join(", ");
        say(&match verdict.cause {
            Cause::Healthy => format!("Shows as well, faintly: {names}."),
            _ => format!("Other causes that show: {names}."),
        });
    }
}

fn ruled_out(all: &[RuledOut], verbose: bool, page: &Page, out: &mut String) {
    let (seen, hidden): (Vec<_>, Vec<_>) = all.iter().partition(|out| out.unseen.is_none());
    if verbose {
        for (label, causes) in [("ruled out", &seen), ("could not be judged", &hidden)] {
            if !causes.is_empty() {
                heading(label, out);
            }
            for cause in causes {
                let text = printable(&why(cause));
                let text = format!("{BOLD}{}{RESET}: {text}", cause.cause);
                *out += &paragraph(INDENT, "    ", &text, page.width);
            }
        }
        return;
    }
    for (label, causes) in [("Ruled out", seen), ("Could not be judged", hidden)] {
        let names: Vec<_> = causes.iter().map(|cause| cause.cause.name()).collect();
        if !names.is_empty() {
            let text = format!("{label}: {}.", names.join(", "));
            *out += &paragraph(INDENT, "    ", &text, page.width);
        }
    }
}

/// Why a cause was ruled out, or could not be judged.
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
        (None, None) => "it does not show".into(),
    }
}

fn unseen(label: &str, all: &[Unseen], verbose: bool, page: &Page, out: &mut String) {
    if all.is_empty() {
        return;
    }
    heading(label, out);
    let shown = if verbose { all.len() } else { MANY };
    for unseen in all.iter().take(shown) {
        let text = printable(&format!("{}: {}", unseen.what, unseen.why));
        *out += &paragraph(INDENT, "    ", &text, page.width);
    }
    if all.len() > shown {
        let more = all.len() - shown;
        let _ = writeln!(out, "{INDENT}{DIM}and {more} more (`--verbose`){RESET}");
    }
}

#[cfg(test)]
mod tests;
