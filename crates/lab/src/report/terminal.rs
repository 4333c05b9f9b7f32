//! A sheet as text: aligned columns, bars of eighth blocks, colours only where they are wanted.

use console::{Alignment, Style as Ink, Term, measure_text_width, pad_str};

use crate::report::{Bar, Kind, Panel, Row, Sheet, Table};

/// Widest output; longer bars say no more.
const MAX_WIDTH: usize = 100;
/// Bars are never shorter than this.
const MIN_BAR: usize = 10;
const INDENT: &str = "  ";
const GAP: &str = "  ";

/// How to write to a terminal, or to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Columns to use.
    pub width: usize,
    /// Whether to colour.
    pub color: bool,
}

impl Style {
    /// What standard output is: its width, and colours unless it is piped or `NO_COLOR` is set.
    #[must_use]
    pub fn of_stdout() -> Self {
        let term = Term::stdout();
        let width = term
            .size_checked()
            .map_or(MAX_WIDTH, |(_, columns)| usize::from(columns));
        let silent = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        Self {
            width: width.clamp(60, MAX_WIDTH),
            color: term.is_term() && !silent,
        }
    }

    fn ink(self) -> Ink {
        Ink::new().force_styling(self.color)
    }

    fn of(self, kind: Kind) -> Ink {
        match kind {
            Kind::Own => self.ink().cyan().bold(),
            Kind::Raw => self.ink().dim(),
            Kind::Other => self.ink(),
        }
    }
}

/// Draws the sheet, ending with a line feed.
#[must_use]
pub fn terminal(sheet: &Sheet, style: Style) -> String {
    let mut lines = vec![
        style.ink().bold().apply_to(&sheet.title).to_string(),
        style.ink().dim().apply_to(&sheet.subtitle).to_string(),
    ];
    for panel in &sheet.panels {
        lines.push(String::new());
        draw_panel(panel, style, &mut lines);
    }
    for table in &sheet.tables {
        lines.push(String::new());
        draw_table(table, style, &mut lines);
    }
    if !sheet.headlines.is_empty() {
        lines.push(String::new());
        for headline in &sheet.headlines {
            lines.extend(
                wrap(headline, style.width, "")
                    .iter()
                    .map(|l| style.ink().bold().apply_to(l).to_string()),
            );
        }
    }
    if !sheet.problems.is_empty() {
        lines.push(String::new());
        lines.push(style.ink().red().bold().apply_to("Problems").to_string());
        for problem in &sheet.problems {
            lines.extend(wrap(problem, style.width, INDENT));
        }
    }
    let mut text = String::new();
    for line in lines {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Width of the widest of `texts`.
fn widest<'a>(texts: impl Iterator<Item = &'a str>) -> usize {
    texts.map(measure_text_width).max().unwrap_or(0)
}

fn right(text: &str, width: usize) -> String {
    pad_str(text, width, Alignment::Right, None).into_owned()
}

fn left(text: &str, width: usize) -> String {
    pad_str(text, width, Alignment::Left, None).into_owned()
}

fn draw_panel(panel: &Panel, style: Style, lines: &mut Vec<String>) {
    let labels = widest(panel.bars.iter().map(|b| b.label.as_str()));
    let numbers: Vec<String> = panel
        .bars
        .iter()
        .map(|b| panel.number(b.value.map(|v| v.median)))
        .collect();
    let number = widest(
        numbers
            .iter()
            .map(String::as_str)
            .chain([panel.unit.as_str()]),
    );
    let cells: Vec<usize> = panel
        .columns
        .iter()
        .enumerate()
        .map(|(i, name)| {
            widest(
                panel
                    .bars
                    .iter()
                    .map(|b| b.cells[i].as_str())
                    .chain([name.as_str()]),
            )
        })
        .collect();
    let fixed = INDENT.len()
        + labels
        + GAP.len() * 2
        + number
        + cells.iter().map(|w| GAP.len() + w).sum::<usize>();
    let room = style.width.saturating_sub(fixed).max(MIN_BAR);
    let columns = |first: &str, rest: &[String]| {
        let mut text = right(first, number);
        for (cell, width) in rest.iter().zip(&cells) {
            text = text + GAP + &right(cell, *width);
        }
        text
    };
    let title = style.ink().bold().apply_to(left(
        &panel.title,
        INDENT.len() + labels + GAP.len() + room + GAP.len(),
    ));
    lines.push(format!(
        "{title}{}",
        style
            .ink()
            .dim()
            .apply_to(columns(&panel.unit, &panel.columns))
    ));
    for (bar, value) in panel.bars.iter().zip(&numbers) {
        let ink = style.of(bar.kind);
        lines.push(format!(
            "{INDENT}{}{GAP}{}{GAP}{}",
            ink.apply_to(left(&bar.label, labels)),
            ink.apply_to(left(&blocks(bar, panel.longest(), room), room)),
            ink.apply_to(columns(value, &bar.cells)),
        ));
    }
}

/// A bar of `room` columns for the panel's largest value, in eighths of a column.
fn blocks(bar: &Bar, max: f64, room: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let Some(value) = bar.value.filter(|_| max > 0.0) else {
        return String::new();
    };
    // Something that is not nothing stays visible.
    let eighths = ((value.median / max * room as f64 * 8.0).round() as usize).clamp(1, room * 8);
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

fn draw_table(table: &Table, style: Style, lines: &mut Vec<String>) {
    let widths: Vec<usize> = table
        .columns
        .iter()
        .enumerate()
        .map(|(i, name)| {
            widest(
                table
                    .rows
                    .iter()
                    .map(|r| r.cells[i].as_str())
                    .chain([name.as_str()]),
            )
        })
        .collect();
    // A text column at the end is not a number: it is left-aligned, and wraps.
    let prose = table.columns.len() == 2;
    let line = |cells: &[String]| {
        let mut text = INDENT.to_owned() + &left(&cells[0], widths[0]);
        for (cell, width) in cells.iter().zip(&widths).skip(1) {
            text = text
                + GAP
                + &if prose {
                    cell.clone()
                } else {
                    right(cell, *width)
                };
        }
        text
    };
    lines.push(style.ink().bold().apply_to(&table.title).to_string());
    if !prose {
        lines.push(style.ink().dim().apply_to(line(&table.columns)).to_string());
    }
    for Row { kind, cells } in &table.rows {
        let ink = if prose {
            style.ink().dim()
        } else {
            style.of(*kind)
        };
        let hang = " ".repeat(INDENT.len() + widths[0] + GAP.len());
        let text = line(cells);
        let wrapped = if prose {
            wrap_hanging(&text, style.width, &hang)
        } else {
            vec![text]
        };
        lines.extend(wrapped.iter().map(|l| ink.apply_to(l).to_string()));
    }
}

/// Breaks `text` into lines of at most `width` columns that begin with `indent`.
fn wrap(text: &str, width: usize, indent: &str) -> Vec<String> {
    text.lines()
        .flat_map(|line| wrap_hanging(&format!("{indent}{line}"), width, indent))
        .collect()
}

/// Breaks one line between words; the lines after the first begin with `hang`.
fn wrap_hanging(line: &str, width: usize, hang: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut current = String::new();
    // Keeps runs of blanks within a line: they align columns.
    for word in line.split_inclusive(' ') {
        let fits = measure_text_width(&current) + measure_text_width(word.trim_end()) <= width;
        if !fits && !current.trim().is_empty() {
            lines.push(std::mem::replace(&mut current, hang.to_owned()));
        }
        current.push_str(word);
    }
    lines.push(current);
    lines
}
