//! Share of each processor's time in softirqs over time, as a heat map.

use std::collections::BTreeSet;

use seikan_diagnose::Evidence;
use seikan_observe::{Column, Subject, metric};
use seikan_ui::axis::{Frame, LEFT, RIGHT, Scale, format_number};
use seikan_ui::palette::{BAD, FAINT, INK, LINE, OWN};
use seikan_ui::svg::{Anchor, SIZE, Svg};

use super::trace::seconds;
use super::{Drawing, Scene};

/// Maximum number of columns. Processor time is counted in ticks of 1 to 10 ms, so short columns
/// would be coarse.
const COLUMNS: usize = 60;
const SHORTEST: f64 = 0.2;
/// Maximum number of processors: those with most softirqs.
const ROWS: usize = 64;

/// One processor in one column.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cell {
    softirq: f64,
    all: f64,
    runs: f64,
}

/// Draws the picture.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let evidence = &scene.recording.evidence;
    let end = seconds(evidence).last().copied().unwrap_or(0.0);
    let columns = ((end / SHORTEST) as usize).clamp(1, COLUMNS);
    let mut rows = cells(evidence, end, columns);
    if rows.is_empty() {
        return Err("processor time was not recorded".into());
    }
    let count = rows.len();
    rows.sort_by(|a, b| total(&b.1).total_cmp(&total(&a.1)));
    rows.truncate(ROWS);
    rows.sort_by_key(|(cpu, _)| *cpu);
    let height = (260.0 / rows.len() as f64).clamp(9.0, 30.0);
    let mut svg = Svg::default();
    let length = end / columns as f64;
    let most_runs = rows.iter().flat_map(|(_, row)| row).map(|cell| cell.runs);
    let most_runs = most_runs.fold(0.0, f64::max) / length.max(1e-9);
    let shares = |cell: &Cell| (cell.all > 0.0).then(|| (cell.softirq / cell.all).min(1.0));
    let rates = |cell: &Cell| (most_runs > 0.0).then(|| cell.runs / length / most_runs);
    let title = "softirqs, of each processor's time";
    let x = Scale::new(0.0, end);
    let mut top = 34.0;
    scale(&mut svg, top, "100 %", true);
    map(&mut svg, (top, height, x), title, &rows, &shares, true);
    top += height * rows.len() as f64 + 84.0;
    let most = format!("{} per second", format_number(most_runs));
    scale(&mut svg, top, &most, false);
    let title = "runs of the receive softirq (NET_RX)";
    map(&mut svg, (top, height, x), title, &rows, &rates, false);
    let bottom = top + height * rows.len() as f64;
    let left_out = if count > rows.len() {
        format!(
            " {} processors with fewer softirqs are omitted.",
            count - rows.len()
        )
    } else {
        String::new()
    };
    Ok(Drawing {
        svg: svg.finish(bottom + 46.0, "softirqs by processor over time"),
        caption: format!(
            "One row for each processor, time to the right. One strong row among faint ones: one processor receives for all. A cell is \
             {:.1} s long; rest the pointer on it for its numbers.{left_out}",
            length
        ),
    })
}

fn total(row: &[Cell]) -> f64 {
    row.iter().map(|cell| cell.softirq).sum()
}

/// Draws the colour scale at the right end of a title, from 0 to `most`.
fn scale(svg: &mut Svg, top: f64, most: &str, is_share: bool) {
    let width = 100.0;
    let left = RIGHT - super::svg::width(most, SIZE) - 8.0 - width;
    for step in 0..10 {
        let share = f64::from(step) / 9.0;
        let (colour, opacity) = shade(share, is_share);
        let at = [
            left + width / 10.0 * f64::from(step),
            top - 20.0,
            width / 10.0,
            12.0,
        ];
        svg.rectangle(at, colour, opacity, "");
    }
    svg.text((left - 8.0, top - 9.0), Anchor::End, FAINT, "0");
    svg.text((RIGHT, top - 9.0), Anchor::End, FAINT, most);
}

/// Returns the colour of a share: stronger is more, and a processor without other work is red.
fn shade(share: f64, is_share: bool) -> (seikan_ui::palette::Colour, f64) {
    let colour = if is_share && share > 0.9 { BAD } else { OWN };
    (colour, 0.04 + 0.96 * share.clamp(0.0, 1.0))
}

fn map(
    svg: &mut Svg,
    (top, height, x): (f64, f64, Scale),
    title: &str,
    rows: &[(u32, Vec<Cell>)],
    of: &dyn Fn(&Cell) -> Option<f64>,
    is_share: bool,
) {
    let frame = Frame::wide(top, height * rows.len() as f64, x, Scale::new(0.0, 1.0));
    svg.bold((LEFT, top - 9.0), Anchor::Start, INK, title);
    // Rows with a name, so that names do not overlap.
    let every = (SIZE / height).ceil() as usize;
    for (number, (cpu, row)) in rows.iter().enumerate() {
        let y = top + height * number as f64;
        if number.is_multiple_of(every) {
            let at = (LEFT - 8.0, y + height / 2.0 + 5.0);
            svg.text(at, Anchor::End, FAINT, &format!("CPU {cpu}"));
        }
        let width = (RIGHT - LEFT) / row.len() as f64;
        let length = (x.high - x.low) / row.len() as f64;
        for (column, cell) in row.iter().enumerate() {
            let left = LEFT + width * column as f64;
            let Some(share) = of(cell) else {
                continue;
            };
            let begin = x.low + length * column as f64;
            let label = format!(
                "processor {cpu}, {begin:.1} to {:.1} s: {:.0} % of its time in softirqs, NET_RX {} per second",
                begin + length,
                100.0 * cell.softirq / cell.all.max(1.0),
                format_number(cell.runs / length)
            );
            let (colour, opacity) = shade(share, is_share);
            svg.rectangle(
                [left, y, width - 0.6, height - 1.0],
                colour,
                opacity,
                &label,
            );
        }
    }
    svg.line((LEFT, frame.bottom), (RIGHT, frame.bottom), LINE, 1.0);
    frame.x_axis(svg, Some("seconds since the recording began"));
}

/// Returns the growth of processor time, softirq time and NET_RX in columns of equal length, for
/// each processor.
fn cells(evidence: &Evidence, end: f64, columns: usize) -> Vec<(u32, Vec<Cell>)> {
    let times = seconds(evidence);
    let mut rows = Vec::new();
    let states = [
        metric::USER_NS,
        metric::SYSTEM_NS,
        metric::IDLE_NS,
        metric::SOFTIRQ_NS,
        metric::STEAL_NS,
    ];
    let cpus: BTreeSet<&u32> = evidence.map.host.cpus.iter().collect();
    for cpu in cpus {
        let mut row = vec![Cell::default(); columns];
        let of = |name: &str| evidence.column(&Subject::Cpu(*cpu), name);
        if of(metric::SOFTIRQ_NS).is_none() {
            continue;
        }
        for name in states {
            let is_softirq = name == metric::SOFTIRQ_NS;
            spread(of(name), &times, end, columns, |column, growth| {
                row[column].all += growth;
                if is_softirq {
                    row[column].softirq += growth;
                }
            });
        }
        spread(
            of(metric::NET_RX),
            &times,
            end,
            columns,
            |column, growth| {
                row[column].runs += growth;
            },
        );
        rows.push((*cpu, row));
    }
    rows
}

/// Adds the growth of a counter to the column of its middle.
fn spread(
    column: Option<&Column>,
    times: &[f64],
    end: f64,
    columns: usize,
    mut add: impl FnMut(usize, f64),
) {
    let points = column.map_or(&[][..], |column| &column.points);
    for pair in points.windows(2) {
        let ((from, before), (to, now)) = (pair[0], pair[1]);
        let at = |index: u32| times.get(index as usize).copied();
        let (Some(from), Some(to)) = (at(from), at(to)) else {
            continue;
        };
        let middle = (from + to) / 2.0 / end.max(1e-9) * columns as f64;
        let growth = now.saturating_sub(before) as f64;
        add((middle as usize).min(columns - 1), growth);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::report::testing::*;

    #[test]
    fn each_column_has_the_share_of_its_own_time() {
        let mut evidence = sampled(&[0.0, 1.0, 2.0]);
        let cpu = || Subject::Cpu(0);
        evidence.map.host.cpus = vec![0];
        count(&mut evidence, cpu(), metric::SOFTIRQ_NS, &[0, 250, 1000]);
        count(&mut evidence, cpu(), metric::IDLE_NS, &[0, 750, 1000]);
        count(&mut evidence, cpu(), metric::NET_RX, &[7, 8, 10]);
        let cell = |softirq, all, runs| Cell { softirq, all, runs };
        assert_eq!(
            cells(&evidence, 2.0, 2),
            [(0, vec![cell(250.0, 1000.0, 1.0), cell(750.0, 1000.0, 2.0)])]
        );
    }
}
