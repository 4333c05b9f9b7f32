//! Quantities over another one, on logarithmic scales or plain ones.

use seikan_lab::reproduce::{Curve, Curves};
use seikan_ui::axis::{Frame, Scale, format_number};
use seikan_ui::palette::{BAD, Colour, FAINT, KINDS, LINE, OTHER, OWN, SECOND};
use seikan_ui::svg::{Anchor, SIZE, Svg, width};

use super::legend;

/// Height of the frame.
const HEIGHT: f64 = 320.0;
/// Points of a line up to which each has a dot.
const DOTS: usize = 30;
/// Steps of a decade that have a grid line, the fewest first, and the number of lines that
/// suffices.
const STEPS: [&[f64]; 3] = [
    &[1.0, 2.0, 5.0],
    &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    &[
        1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6, 2.8, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0,
        8.0, 9.0,
    ],
];
const ENOUGH: usize = 3;
const COLOURS: [Colour; 8] = [
    SECOND, KINDS[0], KINDS[1], KINDS[2], KINDS[3], KINDS[4], OTHER, BAD,
];

/// Draws curves.
pub fn draw(curves: &Curves) -> String {
    let x = scale(curves, 0);
    let y = scale(curves, 1);
    let mut svg = Svg::default();
    let styles = styles(&curves.curves);
    let names = curves.curves.iter().map(|curve| &curve.name);
    let top = legend(&mut svg, names, 24.0, |svg, number, (x, y)| {
        let (colour, dash) = styles[number];
        svg.path(&[(x, y - 5.0), (x + 24.0, y - 5.0)], colour, 2.4, dash);
    });
    let frame = Frame::wide(top, HEIGHT, x, y);
    frame.title(&mut svg, &curves.title, &curves.y);
    if curves.logarithmic[1] {
        across(&mut svg, &frame)
    } else {
        frame.y_axis(&mut svg, 5)
    }
    if curves.logarithmic[0] {
        below(&mut svg, &frame, &curves.curves);
        let at = (frame.right, frame.bottom + 40.0);
        svg.text(at, Anchor::End, FAINT, &curves.x);
    } else {
        frame.x_axis(&mut svg, Some(&curves.x))
    }
    for (curve, (colour, dash)) in curves.curves.iter().zip(styles) {
        let shown: Vec<&[f64; 2]> = curve
            .points
            .iter()
            .filter(|p| is_shown(curves, p))
            .collect();
        let line: Vec<(f64, f64)> = shown
            .iter()
            .map(|p| (position(curves, 0, p[0]), position(curves, 1, p[1])))
            .collect();
        let wide = if curve.own { 2.8 } else { 1.8 };
        svg.path(&frame.positions(&line), colour, wide, dash);
        // Many points form a line.
        if shown.len() <= DOTS {
            for (point, (x, y)) in shown.iter().zip(&line) {
                let text = format!(
                    "{}: {} at {}",
                    curve.name,
                    format_number(point[1]),
                    format_number(point[0])
                );
                svg.dot(frame.at(*x, *y), 3.0, colour, &text);
            }
        }
    }
    svg.finish(frame.bottom + 50.0, &curves.title)
}

/// Returns the position of a value on an axis; axis 0 is horizontal, 1 vertical.
fn position(curves: &Curves, axis: usize, value: f64) -> f64 {
    if curves.logarithmic[axis] {
        value.log10()
    } else {
        value
    }
}

/// Zero has no logarithm, so such points are not drawn on a logarithmic scale.
fn is_shown(curves: &Curves, point: &[f64; 2]) -> bool {
    let fits =
        |axis: usize| point[axis].is_finite() && (point[axis] > 0.0 || !curves.logarithmic[axis]);
    fits(0) && fits(1)
}

fn scale(curves: &Curves, axis: usize) -> Scale {
    let points = curves.curves.iter().flat_map(|curve| &curve.points);
    let values = points
        .filter(|point| is_shown(curves, point))
        .map(|point| position(curves, axis, point[axis]));
    if curves.logarithmic[axis] {
        between(values)
    } else {
        Scale::from_zero(values.fold(0.0, f64::max), 5)
    }
}

/// Returns a colour for each line. Our lines after the first are dashed, and published ones are
/// dotted.
fn styles(curves: &[Curve]) -> Vec<(Colour, &'static str)> {
    const OWN_DASHES: [&str; 3] = [
        "",
        " stroke-dasharray=\"6 4\"",
        " stroke-dasharray=\"12 3 2 3\"",
    ];
    const DOTTED: &str = " stroke-dasharray=\"2 4\"";
    let (mut own, mut others) = (0, 0);
    let mut styles: Vec<(Colour, &'static str)> = Vec::new();
    for curve in curves {
        let style = if curve.published {
            // Use the colour of the measured curve with the same name.
            let of = curve.name.split(',').next().unwrap_or_default();
            let same = curves
                .iter()
                .position(|other| !other.published && other.name == of);
            let colour = same
                .and_then(|index| styles.get(index))
                .map_or(OTHER, |s| s.0);
            (colour, DOTTED)
        } else if curve.own {
            own += 1;
            (OWN, OWN_DASHES[(own - 1) % OWN_DASHES.len()])
        } else {
            others += 1;
            (COLOURS[(others - 1) % COLOURS.len()], "")
        };
        styles.push(style);
    }
    styles
}

/// Returns a scale from a little below the smallest value to a little above the largest.
fn between(values: impl Iterator<Item = f64>) -> Scale {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| {
        (l.min(v), h.max(v))
    });
    let margin = ((high - low) * 0.04).max(0.02);
    Scale::new(low - margin, high + margin)
}

/// Draws horizontal grid lines at round values, with the fewest steps that give enough lines.
fn across(svg: &mut Svg, frame: &Frame) {
    let ticks = STEPS.iter().map(|steps| ticks(frame.y, steps));
    let ticks: Vec<Vec<f64>> = ticks.collect();
    let enough = ticks.iter().find(|ticks| ticks.len() >= ENOUGH);
    for value in enough.or(ticks.last()).into_iter().flatten() {
        let (_, y) = frame.at(frame.x.low, value.log10());
        svg.line((frame.left, y), (frame.right, y), LINE, 1.0);
        svg.text(
            (frame.left - 8.0, y + 5.0),
            Anchor::End,
            FAINT,
            &format_number(*value),
        );
    }
}

/// Steps of every decade that lie on the scale.
fn ticks(scale: Scale, steps: &[f64]) -> Vec<f64> {
    let (first, last) = (scale.low.floor() as i32, scale.high.ceil() as i32);
    let all = (first.max(-9)..=last.min(15))
        .flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)));
    all.filter(|value| (scale.low..=scale.high).contains(&value.log10()))
        .collect()
}

/// A mark for each value that was measured, with its number where there is room.
fn below(svg: &mut Svg, frame: &Frame, curves: &[Curve]) {
    let mut values: Vec<f64> = curves
        .iter()
        .flat_map(|c| c.points.iter().map(|p| p[0]))
        .collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    let mut free = f64::NEG_INFINITY;
    for value in values.into_iter().filter(|value| *value > 0.0) {
        let (x, _) = frame.at(value.log10(), frame.y.low);
        svg.line((x, frame.bottom - 4.0), (x, frame.bottom + 5.0), LINE, 1.0);
        let text = format_number(value);
        let half = width(&text, SIZE) / 2.0;
        if x - half > free {
            svg.text((x, frame.bottom + 20.0), Anchor::Middle, FAINT, &text);
            free = x + half + 6.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(name: &str, own: bool, published: bool, points: &[[f64; 2]]) -> Curve {
        Curve {
            name: name.into(),
            own,
            published,
            points: points.to_vec(),
        }
    }

    #[test]
    fn published_lines_are_dotted_in_the_colour_of_the_measured_ones() {
        let curves = [
            curve("none", false, false, &[]),
            curve("BF-CBC", false, false, &[]),
            curve("ours", true, false, &[]),
            curve("BF-CBC, published", false, true, &[]),
        ];
        let styles = styles(&curves);
        assert_eq!(styles[3].0, styles[1].0);
        assert_ne!(styles[3].1, styles[1].1);
        assert_ne!(styles[0].0, styles[1].0);
        assert_eq!(styles[2].0, OWN);
    }

    #[test]
    fn equal_ratios_are_equally_far_apart() {
        let curves = Curves {
            name: "n".into(),
            title: "t".into(),
            x: "x".into(),
            y: "y".into(),
            logarithmic: [true, true],
            curves: vec![curve(
                "a",
                false,
                false,
                &[[1.0, 1.0], [10.0, 10.0], [100.0, 100.0]],
            )],
        };
        let svg = draw(&curves);
        let numbers = |name: &str| -> Vec<f64> {
            svg.split("<circle ")
                .skip(1)
                .filter_map(|dot| {
                    dot.split(&format!("{name}=\""))
                        .nth(1)?
                        .split('"')
                        .next()?
                        .parse()
                        .ok()
                })
                .collect()
        };
        for name in ["cx", "cy"] {
            let [a, b, c] = numbers(name)[..] else {
                panic!("three dots: {svg}");
            };
            assert!(((b - a) - (c - b)).abs() < 0.3, "{name}: {a} {b} {c}");
        }
    }

    #[test]
    fn a_short_scale_has_lines_across_too() {
        let values = ticks(Scale::new(260f64.log10(), 450f64.log10()), STEPS[0]);
        assert!(values.is_empty());
        let values = ticks(Scale::new(260f64.log10(), 450f64.log10()), STEPS[2]);
        assert_eq!(values.len(), 6, "{values:?}");
    }

    #[test]
    fn nothing_can_be_drawn_too() {
        let empty = Curves {
            name: "n".into(),
            title: "t".into(),
            x: "x".into(),
            y: "y".into(),
            logarithmic: [true, true],
            curves: vec![curve("a", false, false, &[[0.0, -1.0]])],
        };
        assert!(!draw(&empty).contains("NaN"));
    }
}
