//! Which cause was taken for which, as SVG: a row for each cause that there were cases of, a column for each that was named.
//!
//! A cell's colour is the share of its row: one for the right cause, another for a wrong one; the count stands in it, so that
//! nothing rests on colour alone. At the end of the row stands how often it was named first, with the 95 % interval.

use plotters::backend::SVGBackend;
use plotters::drawing::IntoDrawingArea;
use plotters::element::{PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontTransform, IntoFont, RGBColor, TextStyle};
use seikan_diagnose::Cause;

use super::palette::{BAD, FAINT, INK, LINE, OWN};
use super::plot::{Area, FONT, render, rgb, with_style_sheet};
use super::{Kind, Row, Sheet, Table, html, machine_facts};
use crate::error::Result;
use crate::machine::{Machine, utc_now};
use crate::scenario::{Interval, PerClass, Tally};

/// Room for the names of rows.
const LEFT: i32 = 230;
/// Room for the names of columns, which stand upright.
const TOP: i32 = 236;
/// Side of a cell.
const CELL: i32 = 26;
/// Where intervals begin after the last cell, and how wide 0 to 100 % are.
const GAP: i32 = 20;
const SCALE: i32 = 130;
/// Room for an interval's numbers.
const RIGHT: i32 = 160;
const BOTTOM: i32 = 12;
const SIZE: i32 = 17;
/// How dark a cell gets: ink must stay readable on it.
const DARKEST: f64 = 0.7;
/// How dark one case among many is.
const LIGHTEST: f64 = 0.15;

/// Draws the matrix of a count.
///
/// # Errors
/// [`LabError::Render`](crate::LabError::Render).
pub fn matrix_svg(tally: &Tally) -> Result<String> {
    let columns = columns(tally);
    let grid = Grid {
        rows: tally.classes.len() as i32,
        columns: columns.len() as i32,
    };
    let (width, height) = (grid.right() + GAP + SCALE + RIGHT, grid.bottom() + BOTTOM);
    let mut text = String::new();
    {
        let root =
            SVGBackend::with_string(&mut text, (width as u32, height as u32)).into_drawing_area();
        let heads = [
            ("columns: named first", LEFT - 12, TOP - 40, HPos::Right),
            ("rows: the true cause", LEFT - 12, TOP - 14, HPos::Right),
            ("95 % interval", grid.right() + GAP, TOP - 14, HPos::Left),
        ];
        for (text, x, y, side) in heads {
            label(&root, text, (x, y), side, rgb(FAINT))?;
        }
        for (number, cause) in (0..).zip(&columns) {
            let at = (grid.x(number) + CELL / 2, TOP - 8);
            upright(&root, cause.name(), at)?;
        }
        grid.draw(&root)?;
        for (number, class) in (0..).zip(&tally.classes) {
            row(&root, tally, class, &columns, &grid, number)?;
        }
        root.present().map_err(render)?;
    }
    Ok(with_style_sheet(&text))
}

/// The same on one page that needs nothing from anywhere else, with the figures.
///
/// # Errors
/// [`LabError::Render`](crate::LabError::Render).
pub fn matrix_html(tally: &Tally) -> Result<String> {
    html::with_plot(&sheet(tally), matrix_svg(tally)?)
}

/// Causes that there were cases of or that were named, in the order of the catalogue.
fn columns(tally: &Tally) -> Vec<Cause> {
    let is_there = |cause: &Cause| {
        let named = tally.confusion.iter().any(|(_, said, _)| said == cause);
        named || tally.classes.iter().any(|class| class.cause == *cause)
    };
    Cause::ALL.iter().copied().filter(is_there).collect()
}

/// Where cells are.
struct Grid {
    rows: i32,
    columns: i32,
}

impl Grid {
    fn x(&self, column: i32) -> i32 {
        LEFT + column * CELL
    }

    fn y(&self, row: i32) -> i32 {
        TOP + row * CELL
    }

    fn right(&self) -> i32 {
        self.x(self.columns)
    }

    fn bottom(&self) -> i32 {
        self.y(self.rows)
    }

    fn draw(&self, root: &Area<'_>) -> Result<()> {
        let across = (0..=self.rows).map(|row| {
            let y = self.y(row);
            [(LEFT, y), (self.right() + GAP + SCALE, y)]
        });
        let down = (0..=self.columns).map(|column| {
            let x = self.x(column);
            [(x, TOP), (x, self.bottom())]
        });
        let ends = [0, SCALE].map(|x| {
            let x = self.right() + GAP + x;
            [(x, TOP), (x, self.bottom())]
        });
        across.chain(down).chain(ends).try_for_each(|line| {
            root.draw(&PathElement::new(line, rgb(LINE)))
                .map_err(render)
        })
    }
}

fn row(
    root: &Area<'_>,
    tally: &Tally,
    class: &PerClass,
    columns: &[Cause],
    grid: &Grid,
    number: i32,
) -> Result<()> {
    let middle = grid.y(number) + CELL / 2;
    let name = class.cause.name();
    label(root, name, (LEFT - 12, middle), HPos::Right, rgb(INK))?;
    for (column, said) in (0..).zip(columns) {
        let cell = tally
            .confusion
            .iter()
            .find(|(is, other, _)| *is == class.cause && other == said);
        let Some((.., count)) = cell else {
            continue;
        };
        let share = f64::from(*count) / f64::from(class.recall.of.max(1));
        let color = if *said == class.cause {
            rgb(OWN)
        } else {
            rgb(BAD)
        };
        let (x, y) = (grid.x(column), grid.y(number));
        let corners = [(x + 1, y + 1), (x + CELL, y + CELL)];
        let fill = color.mix(LIGHTEST + (DARKEST - LIGHTEST) * share);
        root.draw(&Rectangle::new(corners, fill.filled()))
            .map_err(render)?;
        let at = (x + CELL / 2, middle);
        label(root, &count.to_string(), at, HPos::Center, rgb(INK))?;
    }
    interval(root, class.recall, grid.right() + GAP, middle)
}

/// A share on a scale of 0 to 100 %, its interval as a bar.
fn interval(root: &Area<'_>, interval: Interval, left: i32, middle: i32) -> Result<()> {
    let x = |share: f64| left + (share * f64::from(SCALE)).round() as i32;
    let Some(share) = interval.share() else {
        return Ok(());
    };
    let bar = [
        (x(interval.low), middle - 4),
        (x(interval.high), middle + 5),
    ];
    let point = [(x(share) - 1, middle - 8), (x(share) + 2, middle + 9)];
    root.draw(&Rectangle::new(bar, rgb(OWN).mix(0.35).filled()))
        .map_err(render)?;
    root.draw(&Rectangle::new(point, rgb(OWN).filled()))
        .map_err(render)?;
    let text = format!(
        "{}/{}  {:.0}–{:.0} %",
        interval.hits,
        interval.of,
        100.0 * interval.low,
        100.0 * interval.high
    );
    label(
        root,
        &text,
        (left + SCALE + 10, middle),
        HPos::Left,
        rgb(INK),
    )
}

fn label(root: &Area<'_>, text: &str, at: (i32, i32), h: HPos, color: RGBColor) -> Result<()> {
    let style = TextStyle::from((FONT, SIZE).into_font())
        .color(&color)
        .pos(Pos::new(h, VPos::Center));
    root.draw(&Text::new(text.to_owned(), at, style))
        .map_err(render)
}

/// Text that is read from below, and ends at a place.
fn upright(root: &Area<'_>, text: &str, at: (i32, i32)) -> Result<()> {
    let font = (FONT, SIZE).into_font().transform(FontTransform::Rotate270);
    let ink = rgb(INK);
    let style = TextStyle::from(font)
        .color(&ink)
        .pos(Pos::new(HPos::Left, VPos::Center));
    root.draw(&Text::new(text.to_owned(), at, style))
        .map_err(render)
}

fn sheet(tally: &Tally) -> Sheet {
    let share = |interval: Interval| {
        interval
            .share()
            .map_or("–".to_owned(), |share| format!("{:.0} %", 100.0 * share))
    };
    let cells = |name: &str, interval: Interval| {
        vec![
            name.to_owned(),
            share(interval),
            format!("{}/{}", interval.hits, interval.of),
            format!("{:.0}–{:.0} %", 100.0 * interval.low, 100.0 * interval.high),
        ]
    };
    let doctor = [
        ("named first", tally.top_1),
        ("the same, aliases not counted", tally.strict),
        ("among the first two", tally.top_2),
        ("unknown where there was something", tally.abstained),
        ("false alarms on healthy controls", tally.false_alarms),
        ("double faults: one named first", tally.doubles.one_first),
        (
            "double faults: both among first two",
            tally.doubles.both_in_two,
        ),
        ("fixes: 90 % of healthy restored", tally.fixes.restored),
        ("fixes: kept", tally.fixes.kept),
        ("fixes: rolled back correctly", tally.fixes.rolled_back),
        ("fixes: kept and undone correctly", tally.fixes.undone),
    ];
    let own = doctor.map(|(name, interval)| (Kind::Own, name, interval));
    let naive = tally.baselines.iter();
    let naive = naive.map(|b| (Kind::Other, b.name.as_str(), b.top_1));
    let rows = own.into_iter().chain(naive);
    let rows = rows.filter(|(.., interval)| interval.of > 0);
    Sheet {
        title: "How right the doctor is".to_owned(),
        subtitle: format!("{} UTC, {} cases", utc_now(), tally.cases),
        headlines: vec![format!(
            "The cause was named first in {} of {} cases, macro-F1 {:.2}.",
            tally.top_1.hits, tally.top_1.of, tally.macro_f1
        )],
        tables: vec![Table {
            title: "Shares, with 95 % intervals".to_owned(),
            columns: ["", "share", "cases", "interval"].map(str::to_owned).to_vec(),
            rows: rows
                .map(|(kind, name, interval)| Row {
                    kind,
                    cells: cells(name, interval),
                })
                .collect(),
        }],
        facts: machine_facts(&Machine::this()),
        method: vec![
            "Tunnels between two network namespaces are made slow in a known way; the doctor is told the interface and the rate that should go through, and nothing else. A case counts if a tenth of the throughput or more was lost.".to_owned(),
            "Rows of the picture are the causes that there were, columns those that were named; numbers are cases. Intervals are Wilson's.".to_owned(),
        ],
        ..Sheet::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally() -> Tally {
        let class = |cause, hits, of| PerClass {
            cause,
            recall: Interval::wilson(hits, of),
            precision: Interval::wilson(hits, of),
            first_two: Interval::wilson(hits, of),
            f1: 0.5,
        };
        Tally {
            classes: vec![class(Cause::Shaper, 3, 4), class(Cause::PathLoss, 5, 5)],
            confusion: vec![
                (Cause::Shaper, Cause::Shaper, 3),
                (Cause::Shaper, Cause::Bufferbloat, 1),
                (Cause::PathLoss, Cause::PathLoss, 5),
            ],
            ..Tally::default()
        }
    }

    #[test]
    fn every_cause_is_named_and_every_count_is_drawn() {
        let svg = matrix_svg(&tally()).expect("svg");
        for text in ["shaper", "bufferbloat", "path-loss", "3/4", "5/5"] {
            assert!(svg.contains(text), "{text}");
        }
        assert_eq!(columns(&tally()).len(), 3);
        // Two right cells and one wrong, and two parts of each interval.
        assert_eq!(svg.matches("<rect ").count(), 3 + 2 * 2);
        assert_eq!(svg.matches("<rect x=\"283\"").count(), 1);
    }

    #[test]
    fn nothing_counted_is_a_picture_too() {
        matrix_svg(&Tally::default()).expect("svg");
        matrix_html(&Tally::default()).expect("html");
    }
}
