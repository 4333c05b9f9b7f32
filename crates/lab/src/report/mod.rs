//! Reports of results: for a terminal, as SVG, as one HTML page.
//!
//! The result of a comparison, an experiment or the demo becomes a
//! [`Report`] (headlines, bar panels, tables, the machine, the method); [`mod@terminal`], [`svg`] and
//! [`mod@html`] draw any report. JSON is the result itself, by serde.

mod bench;
mod demo;
mod gateway;
mod html;
mod matrix;
mod path;
mod plot;
mod reproduce;
mod terminal;

pub use html::html;
pub use matrix::{matrix_html, matrix_svg};
pub use plot::svg;
pub use terminal::terminal;

use crate::bench::{self as figures, Absent, Comparison, Load, LoadSummary};
use crate::machine::Machine;
use crate::reproduce::cell as or_none;
use seikan_load::stats::Spread;

/// A result, ready to be drawn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The experiment.
    pub title: String,
    /// When and where, one line.
    pub subtitle: String,
    /// The answer in a sentence or two.
    pub headlines: Vec<String>,
    /// Bars.
    pub panels: Vec<Panel>,
    /// Figures that are not bars.
    pub tables: Vec<Table>,
    /// Errors.
    pub problems: Vec<String>,
    /// The machine and the versions.
    pub facts: Vec<(String, String)>,
    /// Description of the measurement, one item for each line.
    pub method: Vec<String>,
}

/// Horizontal bars of one quantity, one per tunnel.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// The quantity.
    pub title: String,
    /// Its unit.
    pub unit: String,
    /// Headings of [`Bar::cells`].
    pub columns: Vec<String>,
    /// The bars, in order.
    pub bars: Vec<Bar>,
}

/// One bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// The tunnel.
    pub label: String,
    /// Owner of the tunnel.
    pub kind: Kind,
    /// Its length and range; `None` when it failed.
    pub value: Option<Spread>,
    /// Further figures of the same tunnel.
    pub cells: Vec<String>,
}

/// Emphasis of a bar or row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The raw link, to which ratios refer.
    Raw,
    /// Ours.
    Own,
    /// Somebody else's.
    Other,
}

impl Kind {
    fn of(name: &str, own: bool) -> Self {
        match name {
            _ if own => Self::Own,
            "raw" | "raw-no-offload" => Self::Raw,
            _ => Self::Other,
        }
    }
}

/// A table of a report.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Title of the table.
    pub title: String,
    /// Column headings; the first column is text, the others are numbers.
    pub columns: Vec<String>,
    /// Its rows.
    pub rows: Vec<Row>,
}

/// A row of a [`Table`].
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Owner of the row.
    pub kind: Kind,
    /// Cells, one for each column.
    pub cells: Vec<String>,
}

impl Table {
    fn new(
        title: impl Into<String>,
        columns: impl IntoIterator<Item = impl Into<String>>,
        rows: impl IntoIterator<Item = Row>,
    ) -> Self {
        Self {
            title: title.into(),
            columns: columns.into_iter().map(Into::into).collect(),
            rows: rows.into_iter().collect(),
        }
    }

    /// Returns a table of the rows that could not be measured, with the reasons. `what` is the
    /// heading of the names.
    fn not_measured(what: &str, absent: &[Absent]) -> Option<Self> {
        let rows = absent
            .iter()
            .map(|a| Row::new(Kind::Other, [a.name.clone(), a.reason.clone()]));
        Self::new("Not measured", [what, "why"], rows).if_any()
    }

    /// The table, if it has rows.
    fn if_any(self) -> Option<Self> {
        (!self.rows.is_empty()).then_some(self)
    }
}

impl Row {
    fn new(kind: Kind, cells: impl IntoIterator<Item = String>) -> Self {
        let cells = cells.into_iter().collect();
        Self { kind, cells }
    }
}

impl Panel {
    fn new(
        title: impl Into<String>,
        unit: &str,
        columns: impl IntoIterator<Item = impl Into<String>>,
        bars: impl IntoIterator<Item = Bar>,
    ) -> Self {
        Self {
            title: title.into(),
            unit: unit.to_owned(),
            columns: columns.into_iter().map(Into::into).collect(),
            bars: bars.into_iter().collect(),
        }
    }

    /// The panel, if it has a bar.
    fn if_any(self) -> Option<Self> {
        let measured = self.bars.iter().any(|bar| bar.value.is_some());
        measured.then_some(self)
    }

    /// The longest bar.
    fn longest(&self) -> f64 {
        self.bars
            .iter()
            .filter_map(|b| b.value)
            .map(|v| v.median)
            .fold(0.0, f64::max)
    }

    /// The far end of the bars and their ranges.
    fn end(&self) -> f64 {
        self.bars
            .iter()
            .filter_map(|b| b.value)
            .map(|v| v.max)
            .fold(0.0, f64::max)
    }

    /// Returns the number of digits after the point: more if all values are below one, none from a
    /// thousand on.
    fn decimals(&self) -> usize {
        match self.longest() {
            longest if longest < 1.0 => 3,
            longest if longest < 1_000.0 => 2,
            _ => 0,
        }
    }

    /// A value of this panel as text.
    fn number(&self, value: Option<f64>) -> String {
        value.map_or_else(
            || "failed".to_owned(),
            |v| format!("{v:.*}", self.decimals()),
        )
    }

    /// The value of one of its bars as text.
    fn text(&self, bar: &Bar) -> String {
        self.number(bar.value.map(|v| v.median))
    }
}

/// Panels, problems and facts of a comparison.
fn compared<O>(
    report: &Comparison<O>,
    loads: &[Load],
    panel: impl Fn(Load) -> Option<Panel>,
) -> Report {
    let rows = || report.rows.iter();
    let mut facts = machine_facts(&report.machine);
    facts.extend(rows().filter_map(|row| Some((row.name.clone(), row.version.clone()?))));
    Report {
        panels: loads.iter().copied().filter_map(panel).collect(),
        problems: rows()
            .flat_map(|row| row.errors.iter().map(move |e| format!("{}: {e}", row.name)))
            .collect(),
        facts,
        ..Report::default()
    }
}

/// The row with the highest rate of a load.
fn fastest<'a>(
    rows: impl Iterator<Item = &'a figures::Row>,
    load: Load,
) -> Option<(&'a figures::Row, &'a LoadSummary)> {
    let measured = rows.filter_map(|row| Some((row, row.load(load)?)));
    let median = |row: &(_, &LoadSummary)| row.1.gbit_per_second.median;
    measured.max_by(|a, b| median(a).total_cmp(&median(b)))
}

/// Mark of a missing figure.
const NONE: &str = "–";

/// The smallest and the largest.
fn range(spread: Option<Spread>, number: impl Fn(f64) -> String) -> String {
    spread.map_or_else(
        || NONE.to_owned(),
        |s| format!("{}–{}", number(s.min), number(s.max)),
    )
}

/// A number with two digits after the point.
fn hundredths(value: f64) -> String {
    format!("{value:.2}")
}

fn mebibytes(bytes: Option<u64>) -> String {
    or_none(bytes.map(|b| b as f64 / 1024.0 / 1024.0), 1)
}

/// The machine as name and value.
fn machine_facts(machine: &Machine) -> Vec<(String, String)> {
    let cores = if machine.cores == 1 {
        "1 core".to_owned()
    } else {
        format!("{} cores", machine.cores)
    };
    let mut facts = vec![
        (
            "CPU".to_owned(),
            format!("{}, {cores} for both hosts, tunnels and load", machine.cpu),
        ),
        (
            "Kernel".to_owned(),
            format!("Linux {} {}", machine.kernel, machine.arch),
        ),
        (
            "Memory".to_owned(),
            format!("{:.1} GiB", machine.memory as f64 / f64::from(1 << 30)),
        ),
    ];
    if !machine.features.is_empty() {
        facts.push(("Instructions".to_owned(), machine.features.join(" ")));
    }
    facts
}

#[cfg(test)]
mod tests;
