//! Quantities by kind, as bars: side by side, or one on the other.

use seikan_lab::reproduce::Bars;
use seikan_ui::axis::{Frame, Scale, format_number};
use seikan_ui::palette::{BAD, Colour, FAINT, KINDS, OTHER, OWN, SECOND};
use seikan_ui::svg::{Anchor, Svg};

use super::legend;

/// Height of the frame.
const HEIGHT: f64 = 300.0;
/// Part of a group's place that its bars fill.
const FILLED: f64 = 0.76;
const COLOURS: [Colour; 8] = [
    OWN, SECOND, KINDS[0], KINDS[1], KINDS[2], KINDS[3], KINDS[4], BAD,
];

/// Draws bars.
pub fn draw(bars: &Bars) -> String {
    let mut svg = Svg::default();
    let names = bars.parts.iter().map(|part| &part.name);
    let top = legend(&mut svg, names, 14.0, |svg, number, (x, y)| {
        svg.rectangle([x, y - 11.0, 14.0, 12.0], colour(bars, number), 1.0, "");
    });
    let groups = bars.groups.len().max(1) as f64;
    let highest = (0..bars.groups.len()).map(|group| highest(bars, group));
    let y = Scale::from_zero(highest.fold(0.0, f64::max), 5);
    let frame = Frame::wide(top, HEIGHT, Scale::new(0.0, groups), y);
    frame.title(&mut svg, &bars.title, &bars.unit);
    frame.y_axis(&mut svg, 5);
    for (group, name) in bars.groups.iter().enumerate() {
        let place = [group as f64 + 0.5 - FILLED / 2.0, FILLED];
        draw_group(&mut svg, &frame, bars, (group, place));
        let (x, _) = frame.at(group as f64 + 0.5, 0.0);
        svg.text((x, frame.bottom + 20.0), Anchor::Middle, FAINT, name);
    }
    svg.finish(frame.bottom + 34.0, &bars.title)
}

/// The bars of one group, from `begin` on the horizontal axis on, `wide` together.
fn draw_group(
    svg: &mut Svg,
    frame: &Frame,
    bars: &Bars,
    (group, [begin, wide]): (usize, [f64; 2]),
) {
    let count = bars.parts.len().max(1) as f64;
    let mut floor = 0.0;
    for (number, part) in bars.parts.iter().enumerate() {
        let Some(value) = part.values.get(group).copied().flatten() else {
            continue;
        };
        let [left, right] = if bars.stacked {
            [begin, begin + wide]
        } else {
            floor = 0.0;
            let one = wide / count;
            [
                begin + one * number as f64,
                begin + one * (number as f64 + 0.9),
            ]
        };
        let (left, low) = frame.at(left, floor);
        let (right, high) = frame.at(right, floor + value);
        let name = &bars.groups[group];
        let text = format!("{name}, {}: {}", part.name, format_number(value));
        let at = [left, high, right - left, low - high];
        svg.rectangle(at, colour(bars, number), 1.0, &text);
        floor += value;
    }
}

/// The colour of a kind. The last one of a stack is the rest.
fn colour(bars: &Bars, number: usize) -> Colour {
    if bars.stacked && number + 1 == bars.parts.len() {
        OTHER
    } else {
        COLOURS[number % COLOURS.len()]
    }
}

/// Returns the height of a group.
fn highest(bars: &Bars, group: usize) -> f64 {
    let values = bars
        .parts
        .iter()
        .filter_map(|part| *part.values.get(group)?);
    if bars.stacked {
        values.sum()
    } else {
        values.fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_lab::reproduce::Part;

    fn bars(stacked: bool) -> Bars {
        let part = |name: &str, values: [Option<f64>; 2]| Part {
            name: name.into(),
            values: values.to_vec(),
        };
        Bars {
            name: "n".into(),
            title: "t".into(),
            unit: "%".into(),
            groups: vec!["A".into(), "B".into()],
            parts: vec![
                part("one", [Some(30.0), Some(10.0)]),
                part("two", [Some(50.0), None]),
            ],
            stacked,
        }
    }

    #[test]
    fn stacked_bars_are_as_high_as_their_sum() {
        assert_eq!(highest(&bars(true), 0), 80.0);
        assert_eq!(highest(&bars(false), 0), 50.0);
    }

    #[test]
    fn each_value_is_a_bar_and_a_missing_one_is_none() {
        for stacked in [false, true] {
            let svg = draw(&bars(stacked));
            // Three bars, and two samples in the legend.
            assert_eq!(svg.matches("<rect").count(), 5);
            assert!(svg.contains("A, two: 50") && !svg.contains("B, two"));
        }
    }

    #[test]
    fn nothing_can_be_drawn_too() {
        let empty = Bars {
            groups: Vec::new(),
            parts: Vec::new(),
            ..bars(true)
        };
        assert!(!draw(&empty).contains("NaN"));
    }
}
