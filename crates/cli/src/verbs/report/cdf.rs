//! Distribution of throughput over the intervals between samples.

use seikan_ui::axis::{Frame, Scale, format_number};
use seikan_ui::palette::{FAINT, INK, OWN, SECOND};
use seikan_ui::svg::{Anchor, Svg};

use super::trace::throughput;
use super::{Drawing, Scene};

/// Minimum number of intervals.
const LEAST: usize = 5;

/// Draws the picture.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let evidence = &scene.recording.evidence;
    let trace =
        throughput(evidence).ok_or("the bytes of the tunnel's interface were not recorded")?;
    let mut rates: Vec<f64> = trace.points.iter().map(|(_, rate)| *rate).collect();
    rates.sort_by(f64::total_cmp);
    if rates.len() < LEAST {
        return Err(format!(
            "at least {LEAST} intervals are needed; the recording has {}",
            rates.len()
        ));
    }
    let expected = evidence.expected.map(|bits| bits / 1e6);
    let max = trace.max().max(expected.unwrap_or(0.0));
    let x = Scale::from_zero(max, 8);
    let frame = Frame::wide(34.0, 260.0, x, Scale::new(0.0, 100.0));
    let mut svg = Svg::default();
    frame.title(&mut svg, "share of intervals up to this throughput", "%");
    frame.y_axis(&mut svg, 4);
    frame.x_axis(&mut svg, Some(&format!("{}, Mbit/s", trace.title)));
    if let Some(expected) = expected {
        let (foot, head) = (frame.at(expected, 0.0), frame.at(expected, 100.0));
        svg.path(&[foot, head], INK, 1.4, " stroke-dasharray=\"6 4\"");
        let anchor = if x.share(expected) > 0.5 {
            (-6.0, Anchor::End)
        } else {
            (6.0, Anchor::Start)
        };
        let at = (head.0 + anchor.0, head.1 + 32.0);
        svg.text(
            at,
            anchor.1,
            FAINT,
            &format!("expected: {}", format_number(expected)),
        );
    }
    svg.path(&frame.positions(&steps(&rates)), OWN, 2.0, "");
    for share in [0.05, 0.5, 0.95] {
        let value = quantile(&rates, share);
        let percent = share * 100.0;
        let text = format!(
            "{percent:.0} % of the intervals: {} Mbit/s or less",
            format_number(value)
        );
        svg.dot(frame.at(value, percent), 4.0, SECOND, &text);
    }
    let [low, middle, high] = [0.05, 0.5, 0.95].map(|share| format_number(quantile(&rates, share)));
    Ok(Drawing {
        svg: svg.finish(frame.bottom + 46.0, "distribution of throughput"),
        caption: format!(
            "A steep line is a steady tunnel, a flat one a tunnel that stops and goes. Half of the {} intervals had {middle} Mbit/s or \
             more; dots mark 5 %, 50 % and 95 % ({low}, {middle} and {high} Mbit/s).",
            crate::screen::number(rates.len() as u64)
        ),
    })
}

/// Returns the corners of the empirical distribution: at each value it rises by its share, in per
/// cent.
fn steps(sorted: &[f64]) -> Vec<(f64, f64)> {
    let share = |i: usize| 100.0 * i as f64 / sorted.len() as f64;
    let corners = sorted.iter().enumerate();
    let corners = corners.flat_map(|(i, value)| [(*value, share(i)), (*value, share(i + 1))]);
    [(0.0, 0.0)].into_iter().chain(corners).collect()
}

/// Returns the smallest value that this share does not exceed.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distribution_of_four_values_rises_by_a_quarter_at_each() {
        let corners = steps(&[1.0, 2.0, 2.0, 8.0]);
        let expected = [
            (0.0, 0.0),
            (1.0, 0.0),
            (1.0, 25.0),
            (2.0, 25.0),
            (2.0, 50.0),
            (2.0, 50.0),
            (2.0, 75.0),
            (8.0, 75.0),
            (8.0, 100.0),
        ];
        assert_eq!(corners, expected);
    }

    #[test]
    fn half_of_the_values_are_not_above_the_median() {
        let values = [1.0, 2.0, 3.0, 4.0, 100.0];
        assert_eq!(quantile(&values, 0.5), 3.0);
        assert_eq!(quantile(&values, 0.95), 100.0);
        assert_eq!(quantile(&values, 0.0), 1.0);
    }
}
