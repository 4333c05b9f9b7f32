//! A report as text: aligned columns, bars of eighth blocks, colours only where they are wanted.

use console::{Alignment, Style as Ink, measure_text_width, pad_str};
use seikan_ui::screen::Style;

use crate::report::{Bar, Kind, Panel, Report, Row, Table};

/// Minimum length of the longest bar, in columns.
const MIN_BAR: usize = 10;
const INDENT: &str = "  ";
const GAP: &str = "  ";

fn ink(style: Style) -> Ink {
    Ink::new().force_styling(style.color)
}

fn ink_of(style: Style, kind: Kind) -> Ink {
    match kind {
        Kind::Own => ink(style).cyan().bold(),
        Kind::Raw => ink(style).dim(),
        Kind::Other => ink(style),
    }
}

/// Draws the report, ending with a line feed.
pub fn terminal(report: &Report, style: Style) -> String {
    let mut lines = vec![
        ink(style).bold().apply_to(&report.title).to_string(),
        ink(style).dim().apply_to(&report.subtitle).to_string(),
    ];
    let columns = Columns::of(&report.panels, style.width);
    for panel in &report.panels {
        lines.push(String::new());
        draw_panel(panel, &columns, style, &mut lines);
    }
    for table in &report.tables {
        lines.push(String::new());
        draw_table(table, style, &mut lines);
    }
    if !report.headlines.is_empty() {
        lines.push(String::new());
        for headline in &report.headlines {
            lines.extend(
                wrap(headline, style.width, "")
                    .iter()
                    .map(|l| ink(style).bold().apply_to(l).to_string()),
            );
        }
    }
    if !report.problems.is_empty() {
        lines.push(String::new());
        lines.push(ink(style).red().bold().apply_to("Problems").to_string());
        for problem in &report.problems {
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

/// Widths of columns, the same in all panels of a report, so that figures align.
struct Columns {
    label: usize,
    bar: usize,
    value: usize,
    cells: Vec<usize>,
}

impl Columns {
    fn of(panels: &[Panel], width: usize) -> Self {
        let bars = || {
            panels
                .iter()
                .flat_map(|p| p.bars.iter().map(move |b| (p, b)))
        };
        let label = widest(bars().map(|(_, b)| b.label.as_str()));
        let values: Vec<String> = bars().map(|(p, b)| p.text(b)).collect();
        let units = panels.iter().map(|p| p.unit.as_str());
        let value = widest(values.iter().map(String::as_str).chain(units));
        let count = panels.iter().map(|p| p.columns.len()).max().unwrap_or(0);
        let cells: Vec<usize> = (0..count)
            .map(|i| {
                let names = panels.iter().filter_map(|p| p.columns.get(i));
                widest(
                    bars()
                        .filter_map(|(_, b)| b.cells.get(i))
                        .chain(names)
                        .map(String::as_str),
                )
            })
            .collect();
        let figures = value + cells.iter().map(|w| GAP.len() + w).sum::<usize>();
        let fixed = INDENT.len() + label + GAP.len() * 2 + figures;
        Self {
            label,
            bar: width.saturating_sub(fixed).max(MIN_BAR),
            value,
            cells,
        }
    }

    /// The right-hand columns of a line.
    fn figures(&self, value: &str, cells: &[String]) -> String {
        cells
            .iter()
            .zip(&self.cells)
            .fold(right(value, self.value), |text, (cell, width)| {
                text + GAP + &right(cell, *width)
            })
    }
}

fn draw_panel(panel: &Panel, columns: &Columns, style: Style, lines: &mut Vec<String>) {
    let before = INDENT.len() + columns.label + GAP.len() + columns.bar + GAP.len();
    let title = ink(style).bold().apply_to(left(&panel.title, before));
    let names = columns.figures(&panel.unit, &panel.columns);
    let names = ink(style).dim().apply_to(names);
    if widest([panel.title.as_str()].into_iter()) + GAP.len() > before {
        lines.push(title.to_string());
        lines.push(format!("{}{names}", left("", before)));
    } else {
        lines.push(format!("{title}{names}"));
    }
    for bar in &panel.bars {
        let ink = ink_of(style, bar.kind);
        lines.push(format!(
            "{INDENT}{}{GAP}{}{GAP}{}",
            ink.apply_to(left(&bar.label, columns.label)),
            ink.apply_to(left(
                &blocks(bar, panel.longest(), columns.bar),
                columns.bar
            )),
            ink.apply_to(columns.figures(&panel.text(bar), &bar.cells)),
        ));
    }
}

/// A bar of `room` columns for the panel's largest value, in eighths of a column.
fn blocks(bar: &Bar, max: f64, room: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let Some(value) = bar.value.filter(|_| max > 0.0) else {
        return String::new();
    };
    // A value above zero has a visible bar.
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
    lines.push(ink(style).bold().apply_to(&table.title).to_string());
    if !prose {
        lines.push(ink(style).dim().apply_to(line(&table.columns)).to_string());
    }
    for Row { kind, cells } in &table.rows {
        let ink = if prose {
            ink(style).dim()
        } else {
            ink_of(style, *kind)
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
