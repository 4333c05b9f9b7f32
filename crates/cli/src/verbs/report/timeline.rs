//! Throughput over time, and below it the related counters, on one time axis.

use seikan_diagnose::Cause;
use seikan_ui::axis::{Frame, Scale};
use seikan_ui::palette::{BAD, INK, OTHER, OWN};
use seikan_ui::svg::Svg;

use super::suspects::suspects;
use super::trace::{Trace, seconds, throughput};
use super::{Drawing, Scene};

/// Number of counters shown.
const PANELS: usize = 9;
/// Number of further counters named in the caption.
const NAMED: usize = 8;
const FIRST: f64 = 130.0;
const HEIGHT: f64 = 62.0;
const GAP: f64 = 40.0;

/// Draws the picture.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let evidence = &scene.recording.evidence;
    let main =
        throughput(evidence).ok_or("the bytes of the tunnel's interface were not recorded")?;
    let chain = &scene.verdict.chain;
    let all = ordered(suspects(evidence), chain);
    let end = seconds(evidence).last().copied().unwrap_or(1.0);
    let x = Scale::new(0.0, end);
    let mut svg = Svg::default();
    let mut top = 30.0;
    let mut last = top;
    let shown = all.iter().take(PANELS);
    for (number, (trace, is_evidence)) in [(&main, false)]
        .into_iter()
        .chain(shown.map(|(trace, is_evidence)| (trace, *is_evidence)))
        .enumerate()
    {
        let height = if number == 0 { FIRST } else { HEIGHT };
        let ticks = if number == 0 { 4 } else { 2 };
        let expected = evidence
            .expected
            .filter(|_| number == 0)
            .map(|bits| bits / 1e6);
        let max = trace.max().max(expected.unwrap_or(0.0));
        let frame = Frame::wide(top, height, x, Scale::from_zero(max, ticks));
        let colour = match (number, is_evidence) {
            (0, _) => OWN,
            (_, true) => BAD,
            _ => OTHER,
        };
        frame.coloured_title(
            &mut svg,
            if is_evidence { BAD } else { INK },
            &trace.title,
            trace.unit,
        );
        frame.y_axis(&mut svg, ticks);
        let points = frame.positions(&trace.points);
        svg.area(&points, frame.bottom, colour, 0.18);
        svg.path(&points, colour, 1.8, "");
        if let Some(expected) = expected {
            let (from, to) = (frame.at(0.0, expected), frame.at(end, expected));
            svg.path(&[from, to], INK, 1.4, " stroke-dasharray=\"6 4\"");
        }
        last = frame.bottom;
        let is_last = number == all.len().min(PANELS);
        frame.x_axis(
            &mut svg,
            is_last.then_some("seconds since the recording began"),
        );
        top = last + GAP;
    }
    Ok(Drawing {
        svg: svg.finish(last + 46.0, "throughput and counters over time"),
        caption: caption(&all, evidence.expected.is_some()),
    })
}

/// Orders counters: first the counters of the verdict's chain, in the order of the chain. Returns
/// for each whether it belongs to the chain.
fn ordered(all: Vec<Trace>, chain: &[Cause]) -> Vec<(Trace, bool)> {
    let rank = |trace: &Trace| {
        let of = |cause: &Cause| chain.iter().position(|link| link == cause);
        trace.causes.iter().filter_map(of).min()
    };
    let mut ranked: Vec<_> = all.into_iter().map(|trace| (rank(&trace), trace)).collect();
    ranked.sort_by_key(|(rank, _)| rank.unwrap_or(usize::MAX));
    let ordered_titles = ranked.into_iter();
    ordered_titles
        .map(|(rank, trace)| (trace, rank.is_some()))
        .collect()
}

fn caption(all: &[(Trace, bool)], has_expected: bool) -> String {
    let mut text =
        "All pictures share one time axis: look for counters that rise where throughput falls."
            .to_owned();
    if all.iter().any(|(_, is_evidence)| *is_evidence) {
        text += " The verdict is based on the red ones.";
    }
    if has_expected {
        text += " The dashed line is the expected throughput.";
    }
    if all.is_empty() {
        text += " No related counter changed.";
    }
    let more: Vec<_> = all
        .iter()
        .skip(PANELS)
        .map(|(trace, _)| &*trace.title)
        .collect();
    if !more.is_empty() {
        let rest = more.len().saturating_sub(NAMED);
        text += &format!(" Also changed: {}", more[..more.len() - rest].join("; "));
        text += &match rest {
            0 => ".".to_owned(),
            _ => format!("; and {rest} more."),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdicts_counters_come_first_in_the_order_of_its_chain() {
        let trace = |title: &str, causes| Trace {
            title: title.into(),
            unit: "",
            points: vec![],
            causes,
            is_work: false,
        };
        let all = vec![
            trace("other", &[]),
            trace("felt", &[Cause::TunQueueOverflow]),
            trace("deep", &[Cause::CpuSteal, Cause::CpuContention]),
        ];
        let chain = [Cause::CpuContention, Cause::TunQueueOverflow];
        let ordered_titles: Vec<_> = ordered(all, &chain)
            .into_iter()
            .map(|(trace, is_evidence)| (trace.title, is_evidence))
            .collect();
        let expected = [("deep", true), ("felt", true), ("other", false)];
        assert_eq!(
            ordered_titles,
            expected.map(|(title, is)| (title.to_owned(), is))
        );
    }
}
