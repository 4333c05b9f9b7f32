//! The page: the verdict in words, and the pictures. It is self-contained.

use anyhow::Context;
use askama::Template;
use seikan_diagnose::{Recording, Verdict};
use seikan_ui::PAGE_STYLE;
use seikan_ui::palette::style_rules;
use seikan_ui::time::utc;

use super::{Absent, Picture};
use crate::screen::{joined, plain, printable, rounded};
use crate::verbs::doctor::text::Page as Paper;
use crate::verbs::doctor::{drawing, view};

/// Maximum number of characters in a line of the path.
const PATH_WIDTH: usize = 110;

struct Fact {
    name: String,
    value: String,
    expected: String,
    source: String,
}

#[derive(Template)]
#[template(path = "report.html")]
struct Page<'a> {
    verdict: &'a Verdict,
    is_bad: bool,
    inner: String,
    sureness: &'static str,
    throughput: String,
    recorded: String,
    facts: Vec<Fact>,
    chain: String,
    alternatives: String,
    remedies: Vec<(String, String)>,
    lists: [(&'static str, Vec<(String, String)>); 3],
    path: String,
    pictures: &'a [Picture],
    absent: &'a [Absent],
    plot_style: String,
}

/// Returns the page as HTML.
pub fn page(
    recording: &Recording,
    verdict: &Verdict,
    pictures: &[Picture],
    absent: &[Absent],
) -> anyhow::Result<String> {
    let is_named = verdict.cause.is_fault();
    let inner = printable(verdict.path.inner.as_deref().unwrap_or("the tunnel"));
    let expected = verdict
        .expected
        .map(|bits| format!(", of {} expected", rounded(bits / 1e6)));
    let megabits = rounded(verdict.throughput / 1e6);
    let facts = verdict.evidence.iter().map(|fact| Fact {
        name: printable(&fact.name),
        value: rounded(fact.value),
        expected: printable(&fact.expected),
        source: printable(&fact.source),
    });
    let remedies = verdict.remedies.iter().map(|remedy| {
        let commands = remedy.commands.iter().map(|text| printable(text));
        (
            printable(&view::remedy_in_words(remedy)),
            joined(commands, "\n"),
        )
    });
    let out = |is_seen: bool| {
        let of = verdict.ruled_out.iter();
        let of = of.filter(|out| out.unseen.is_none() == is_seen);
        of.map(|out| (out.cause.to_string(), printable(&view::why(out))))
            .collect()
    };
    let unseen = verdict.path.unseen.iter();
    let unseen = unseen.map(|unseen| (printable(&unseen.what), printable(&unseen.why)));
    let paper = Paper {
        width: PATH_WIDTH,
        unicode: true,
    };
    let page = Page {
        verdict,
        is_bad: is_named,
        throughput: format!(
            "{megabits} Mbit/s through {inner}{}",
            expected.unwrap_or_default()
        ),
        inner,
        sureness: if is_named {
            view::sureness(verdict)
        } else {
            ""
        },
        recorded: recorded(recording),
        facts: facts.collect(),
        chain: match verdict.chain.len() {
            0 | 1 => String::new(),
            _ => joined(&verdict.chain, " → "),
        },
        alternatives: joined(&verdict.alternatives, ", "),
        remedies: remedies.collect(),
        lists: [
            ("Excluded causes", out(true)),
            ("Causes not examined", out(false)),
            ("Unavailable data", unseen.collect()),
        ],
        path: plain(&drawing::draw(&verdict.path, Some(verdict), &paper)),
        pictures,
        absent,
        plot_style: style_rules(),
    };
    page.render().context("cannot write the page")
}

/// Returns start, duration and cost of the recording.
fn recorded(recording: &Recording) -> String {
    let cost = &recording.cost;
    let started = recording.started_at.duration_since(std::time::UNIX_EPOCH);
    let started = started.map_or(0, |since| since.as_secs());
    format!(
        "Recorded on {} UTC, {:.1} s, {} samples, {:.2} CPU s",
        utc(started),
        recording.evidence.series.length().as_secs_f64(),
        crate::screen::number(recording.evidence.series.times.len() as u64),
        cost.cpu_seconds
    )
}
