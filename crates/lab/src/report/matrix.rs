//! Confusion matrix of causes as SVG: a row for each true cause, a column for each diagnosed one.
//!
//! A cell's colour is the share of its row: one colour for correct diagnoses, another for wrong
//! ones. Cells contain their counts, so that nothing depends on colour alone. Each row ends with
//! the share of correct diagnoses and its 95 % interval.

use seikan_diagnose::Cause;
use seikan_ui::palette::{BAD, FAINT, INK, LINE, OWN};
use seikan_ui::svg::{Anchor, SIZE, Svg, standalone};
use seikan_ui::time::utc_now;

use super::{Kind, Report, Row, Table, html, machine_facts};
use crate::error::Result;
use crate::machine::Machine;
use crate::scenario::{Counts, Interval, PerClass};

/// Room for the names of rows.
const LEFT: f64 = 230.0;
/// Room for the names of columns, which stand upright.
const TOP: f64 = 236.0;
/// Side of a cell.
const CELL: f64 = 26.0;
/// Distance of the intervals from the last cell, and the width of 0 to 100 %.
const GAP: f64 = 20.0;
const SCALE: f64 = 130.0;
/// Room for an interval's numbers.
const RIGHT: f64 = 160.0;
const BOTTOM: f64 = 12.0;
/// Darkest shade of a cell, on which text is still readable.
const DARKEST: f64 = 0.7;
/// Shade of a cell with one case among many.
const LIGHTEST: f64 = 0.15;

/// Draws the matrix of the counts.
pub fn matrix_svg(counts: &Counts) -> String {
    let columns = columns(counts);
    let right = LEFT + CELL * columns.len() as f64;
    let bottom = TOP + CELL * counts.classes.len() as f64;
    let mut svg = Svg::default();
    let heads = [
        ("columns: named first", LEFT - 12.0, TOP - 40.0, Anchor::End),
        ("rows: the true cause", LEFT - 12.0, TOP - 14.0, Anchor::End),
        ("95 % interval", right + GAP, TOP - 14.0, Anchor::Start),
    ];
    for (text, x, y, anchor) in heads {
        svg.text((x, y + SIZE / 3.0), anchor, FAINT, text);
    }
    for (number, cause) in columns.iter().enumerate() {
        let x = LEFT + CELL * (number as f64 + 0.5);
        svg.upright((x + SIZE / 3.0, TOP - 8.0), INK, cause.name());
    }
    draw_grid(
        &mut svg,
        [counts.classes.len(), columns.len()],
        [right, bottom],
    );
    for (number, class) in counts.classes.iter().enumerate() {
        draw_row(
            &mut svg,
            counts,
            class,
            &columns,
            TOP + CELL * number as f64,
        );
    }
    let (width, height) = (right + GAP + SCALE + RIGHT, bottom + BOTTOM);
    let title = "Causes that were named first, by the true cause";
    standalone(&svg.finish_wide(width, height, title), title, "")
}

/// Returns a self-contained page with the matrix and the figures.
///
/// # Errors
/// [`Render`](crate::error::LabError::Render)(crate::LabError::Render).
pub fn matrix_html(counts: &Counts) -> Result<String> {
    html::with_plot(&to_report(counts), matrix_svg(counts))
}

/// Returns the causes that had cases or were named, in the order of the catalogue.
fn columns(counts: &Counts) -> Vec<Cause> {
    let is_there = |cause: &Cause| {
        let named = counts.confusion.iter().any(|(_, said, _)| said == cause);
        named || counts.classes.iter().any(|class| class.cause == *cause)
    };
    Cause::ALL.iter().copied().filter(is_there).collect()
}

fn draw_grid(svg: &mut Svg, [rows, columns]: [usize; 2], [right, bottom]: [f64; 2]) {
    let across = (0..=rows).map(|row| {
        let y = TOP + CELL * row as f64;
        [(LEFT, y), (right + GAP + SCALE, y)]
    });
    let columns = (0..=columns).map(|column| LEFT + CELL * column as f64);
    let down = columns.chain([right + GAP, right + GAP + SCALE]);
    let down = down.map(|x| [(x, TOP), (x, bottom)]);
    svg.strokes(&across.chain(down).collect::<Vec<_>>(), LINE, 1.0);
}

fn draw_row(svg: &mut Svg, counts: &Counts, class: &PerClass, columns: &[Cause], top: f64) {
    let foot = top + CELL / 2.0 + SIZE / 3.0;
    svg.text((LEFT - 12.0, foot), Anchor::End, INK, class.cause.name());
    for (column, said) in columns.iter().enumerate() {
        let cell = counts
            .confusion
            .iter()
            .find(|(is, other, _)| *is == class.cause && other == said);
        let Some((.., count)) = cell else {
            continue;
        };
        let share = f64::from(*count) / f64::from(class.recall.of.max(1));
        let colour = if *said == class.cause { OWN } else { BAD };
        let x = LEFT + CELL * column as f64;
        let strength = LIGHTEST + (DARKEST - LIGHTEST) * share;
        let at = [x + 1.0, top + 1.0, CELL - 1.0, CELL - 1.0];
        svg.rectangle(at, colour, strength, "");
        svg.text(
            (x + CELL / 2.0, foot),
            Anchor::Middle,
            INK,
            &count.to_string(),
        );
    }
    let left = LEFT + CELL * columns.len() as f64 + GAP;
    draw_interval(svg, class.recall, left, top + CELL / 2.0);
}

/// A share on a scale of 0 to 100 %, its interval as a bar.
fn draw_interval(svg: &mut Svg, interval: Interval, left: f64, middle: f64) {
    let x = |share: f64| (left + share * SCALE).round();
    let Some(share) = interval.share() else {
        return;
    };
    let (low, high) = (x(interval.low), x(interval.high));
    svg.rectangle([low, middle - 4.0, high - low, 9.0], OWN, 0.35, "");
    svg.rectangle([x(share) - 1.0, middle - 8.0, 3.0, 17.0], OWN, 1.0, "");
    let text = format!(
        "{}/{}  {:.0}–{:.0} %",
        interval.hits,
        interval.of,
        100.0 * interval.low,
        100.0 * interval.high
    );
    let at = (left + SCALE + 10.0, middle + SIZE / 3.0);
    svg.text(at, Anchor::Start, INK, &text);
}

fn to_report(counts: &Counts) -> Report {
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
    let [named, special] = counts.of_doctor();
    let own = named.into_iter().chain(special);
    let own = own.map(|(name, interval)| (Kind::Own, name, interval));
    let naive = counts.baselines.iter();
    let naive = naive.map(|b| (Kind::Other, b.name.as_str(), b.top_1));
    let rows = own.chain(naive).filter(|(.., interval)| interval.of > 0);
    let rows = rows.map(|(kind, name, interval)| Row::new(kind, cells(name, interval)));
    Report {
        title: "How right the doctor is".to_owned(),
        subtitle: format!("{} UTC, {} cases", utc_now(), counts.cases),
        headlines: vec![format!(
            "The cause was named first in {} of {} cases, macro-F1 {:.2}.",
            counts.top_1.hits, counts.top_1.of, counts.macro_f1
        )],
        tables: vec![Table::new(
            "Shares, with 95 % intervals",
            ["", "share", "cases", "interval"],
            rows,
        )],
        facts: machine_facts(&Machine::this()),
        method: vec![
            "Known faults make tunnels between two network namespaces slow. The doctor gets only the interface and the expected rate. A case is valid if at least a tenth of the throughput was lost.".to_owned(),
            "Rows of the picture are true causes, columns diagnosed ones; numbers are cases. Intervals are Wilson's.".to_owned(),
        ],
        ..Report::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts() -> Counts {
        let class = |cause, hits, of| PerClass {
            cause,
            recall: Interval::wilson(hits, of),
            precision: Interval::wilson(hits, of),
            first_two: Interval::wilson(hits, of),
            f1: 0.5,
        };
        Counts {
            classes: vec![class(Cause::Shaper, 3, 4), class(Cause::PathLoss, 5, 5)],
            confusion: vec![
                (Cause::Shaper, Cause::Shaper, 3),
                (Cause::Shaper, Cause::Bufferbloat, 1),
                (Cause::PathLoss, Cause::PathLoss, 5),
            ],
            ..Counts::default()
        }
    }

    #[test]
    fn every_cause_is_named_and_every_count_is_drawn() {
        let svg = matrix_svg(&counts());
        for text in ["shaper", "bufferbloat", "path-loss", "3/4", "5/5"] {
            assert!(svg.contains(text), "{text}");
        }
        assert_eq!(columns(&counts()).len(), 3);
        // Two right cells and one wrong, and two parts of each interval.
        assert_eq!(svg.matches("<rect ").count(), 3 + 2 * 2);
        assert_eq!(svg.matches("<rect x=\"283\"").count(), 1);
    }

    #[test]
    fn nothing_counted_is_a_picture_too() {
        assert!(!matrix_svg(&Counts::default()).contains("NaN"));
        matrix_html(&Counts::default()).expect("html");
    }
}
