//! Trials: throughput without and with each change, in the measured pairs.

use seikan_diagnose::trial::Decision;
use seikan_ui::axis::{Frame, LEFT, Scale, format_number};
use seikan_ui::palette::{BAD, FAINT, INK, OTHER, OWN};
use seikan_ui::svg::{Anchor, SIZE, Svg, WIDTH, cut};

use super::{Drawing, Scene};

/// Number of changes shown.
const SHOWN: usize = 4;
const HEIGHT: f64 = 220.0;
/// Width of the picture of pairs; the axis of the gain follows.
const WIDE: f64 = 360.0;

/// Draws the picture.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let attempts = &scene.recording.attempts;
    let attempts: Vec<_> = attempts
        .iter()
        .filter(|attempt| !attempt.trial.pairs.is_empty())
        .take(SHOWN)
        .collect();
    if attempts.is_empty() {
        return Err("no change was tried (`seikan doctor --fix` does)".into());
    }
    let mut svg = Svg::default();
    let mut top = 52.0;
    let mut bottom = top;
    for attempt in &attempts {
        let trial = &attempt.trial;
        let rates: Vec<_> = trial
            .pairs
            .iter()
            .map(|(a, b)| (a.throughput / 1e6, b.throughput / 1e6))
            .collect();
        let max = rates.iter().map(|(a, b)| a.max(*b)).fold(0.0, f64::max);
        let frame = Frame {
            right: LEFT + WIDE,
            ..Frame::wide(top, HEIGHT, Scale::new(0.0, 1.0), Scale::from_zero(max, 5))
        };
        let title = cut(&attempt.remedy.what, WIDTH - LEFT, SIZE * 1.06);
        svg.bold((LEFT, top - 30.0), Anchor::Start, INK, &title);
        svg.text((frame.right, top - 8.0), Anchor::End, FAINT, "Mbit/s");
        frame.y_axis(&mut svg, 5);
        for (share, name) in [(0.2, "without"), (0.8, "with")] {
            let (x, y) = frame.at(share, 0.0);
            svg.text((x, y + 20.0), Anchor::Middle, FAINT, name);
        }
        let lines: Vec<_> = rates
            .iter()
            .map(|(a, b)| [frame.at(0.2, *a), frame.at(0.8, *b)])
            .collect();
        svg.strokes(&lines, OTHER, 1.2);
        for (number, (without, with)) in (1..).zip(&rates) {
            let label = format!(
                "pair {number}: {} Mbit/s without, {} with",
                format_number(*without),
                format_number(*with)
            );
            svg.dot(frame.at(0.2, *without), 4.5, OTHER, &label);
            svg.dot(frame.at(0.8, *with), 4.5, OWN, &label);
        }
        let right = frame.right + 110.0;
        gain(&mut svg, &frame, right, trial.gain);
        let (decision, why) = match &trial.decision {
            Decision::Keep => ("kept", String::new()),
            Decision::TakeBack(why) => ("reverted", why.clone()),
            Decision::NotPossible(why) => ("not possible", why.clone()),
        };
        let colour = match trial.decision {
            Decision::Keep => OWN,
            Decision::TakeBack(_) => BAD,
            Decision::NotPossible(_) => FAINT,
        };
        svg.bold((right + 110.0, top + 20.0), Anchor::Start, colour, decision);
        let lines = crate::verbs::doctor::text::wrap(&why, 34);
        for (line, text) in lines.iter().take(6).enumerate() {
            let y = top + 44.0 + 20.0 * line as f64;
            svg.text((right + 110.0, y), Anchor::Start, FAINT, text);
        }
        bottom = frame.bottom + 30.0;
        top = bottom + 60.0;
    }
    Ok(Drawing {
        svg: svg.finish(bottom + 10.0, "throughput without and with each change"),
        caption: "Each line joins two consecutive measurements, without and with the change; the change helps if all lines rise. \
                  On the right the gain of the means with its 95 % interval: the gain is significant if the interval is above 0."
            .into(),
    })
}

/// Draws the gain with its interval on an axis of its own.
fn gain(
    svg: &mut Svg,
    neighbour: &Frame,
    left: f64,
    gain: Option<seikan_diagnose::stats::Interval>,
) {
    let Some(gain) = gain else {
        return;
    };
    let [low, value, high] = [gain.low, gain.value, gain.high].map(|share| share * 100.0);
    let margin = ((high - low).abs() * 0.2).max(2.0);
    let frame = Frame {
        left,
        right: left + 60.0,
        y: Scale::new(low.min(0.0) - margin, high.max(0.0) + margin),
        ..*neighbour
    };
    frame.y_axis(svg, 5);
    svg.text(
        (frame.right, frame.top - 8.0),
        Anchor::End,
        FAINT,
        "gain, %",
    );
    svg.line(frame.at(0.0, 0.0), frame.at(1.0, 0.0), INK, 1.2);
    svg.line(frame.at(0.5, low), frame.at(0.5, high), OWN, 2.0);
    for end in [low, high] {
        let (x, y) = frame.at(0.5, end);
        svg.line((x - 6.0, y), (x + 6.0, y), OWN, 2.0);
    }
    let text = format!("{value:+.0} % ({low:+.0} to {high:+.0})");
    svg.dot(frame.at(0.5, value), 5.0, OWN, &text);
    let at = ((frame.left + frame.right) / 2.0, frame.bottom + 20.0);
    svg.text(at, Anchor::Middle, INK, &text);
}
