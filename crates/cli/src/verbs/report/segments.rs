//! TCP time-sequence graph from a capture: every segment, the acknowledgements, and the receiver's
//! window.

use std::collections::HashSet;
use std::ops::Range;

use seikan_ui::axis::{Frame, LEFT, Scale};
use seikan_ui::palette::{BAD, KINDS, OWN, SECOND};
use seikan_ui::svg::Svg;

use super::capture::{Acknowledgement, Capture, Segment};
use super::{Drawing, Scene};
use crate::screen::number;

/// Number of segments in the detailed part, and at the beginning: some round trips of slow start.
const DETAIL: usize = 300;
const BEGINNING: usize = 60;
/// Distance between two parts.
const GAP: f64 = 84.0;
/// Maximum number of drawn segments of one colour.
const LINES: usize = 20_000;

/// Draws the picture.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let capture = scene
        .capture
        .ok_or("no capture was given (`--pcap FILE`, headers are enough: `tcpdump -s 96`)")?;
    let mut svg = Svg::default();
    let knows_window = capture
        .acknowledgements
        .iter()
        .any(|ack| ack.window.is_some());
    let mut entries = vec![
        (OWN, "segments"),
        (BAD, "retransmitted"),
        (SECOND, "acknowledged"),
    ];
    if knows_window {
        entries.push((KINDS[2], "end of the receiver's window"));
    }
    svg.legend((LEFT, 18.0), &entries);
    let mut bottom = 62.0 - GAP;
    for (title, range) in parts(&capture.segments) {
        bottom = panel(&mut svg, bottom + GAP, title, capture, range);
    }
    let retransmissions = capture
        .segments
        .iter()
        .filter(|segment| segment.is_retransmission)
        .count();
    let mut caption = format!(
        "{}: {} segments, {} of them retransmitted (red). Segments lie between the acknowledged position and the end of the window. A \
         horizontal gap means that the sender waited.",
        capture.name,
        number(capture.segments.len() as u64),
        number(retransmissions as u64)
    );
    if !knows_window {
        caption += " Without the handshake the unit of the window is unknown, so it is not drawn.";
    }
    if capture.is_cut {
        caption += " Only the beginning of the capture is shown.";
    }
    Ok(Drawing {
        svg: svg.finish(bottom + 46.0, "TCP segments over time"),
        caption,
    })
}

/// Returns the parts to draw: the whole connection, and enlargements of its beginning and of the
/// part with most retransmissions, unless they are the whole.
fn parts(segments: &[Segment]) -> Vec<(&'static str, Range<usize>)> {
    let mut parts = vec![("the whole connection", 0..segments.len())];
    if segments.len() > BEGINNING {
        parts.push(("the beginning: slow start", 0..BEGINNING));
    }
    let detail = detail(segments);
    let has_retransmission = segments[detail.clone()]
        .iter()
        .any(|segment| segment.is_retransmission);
    if detail.len() < segments.len() && has_retransmission {
        parts.push(("the part with most retransmissions", detail));
    }
    parts
}

/// Returns the range of segments with most retransmissions; the beginning if there are none.
fn detail(segments: &[Segment]) -> Range<usize> {
    let length = DETAIL.min(segments.len());
    let count = |range: &[Segment]| {
        range
            .iter()
            .filter(|segment| segment.is_retransmission)
            .count()
    };
    let mut retransmissions = count(&segments[..length]);
    let (mut best, mut most) = (0, retransmissions);
    for start in 1..=segments.len() - length {
        retransmissions += usize::from(segments[start + length - 1].is_retransmission);
        retransmissions -= usize::from(segments[start - 1].is_retransmission);
        if retransmissions > most {
            (best, most) = (start, retransmissions);
        }
    }
    best..best + length
}

/// Draws a range of segments and the acknowledgements meanwhile; returns the bottom of the panel.
fn panel(svg: &mut Svg, top: f64, title: &str, capture: &Capture, range: Range<usize>) -> f64 {
    let segments = &capture.segments[range];
    let (Some(first), Some(last)) = (segments.first(), segments.last()) else {
        return top;
    };
    let x = Scale::new(first.at, last.at);
    let meanwhile: Vec<&Acknowledgement> = capture
        .acknowledgements
        .iter()
        .filter(|ack| (x.low..=x.high).contains(&ack.at))
        .collect();
    let low = segments.iter().map(|segment| segment.begin);
    let low = low.chain(meanwhile.iter().map(|ack| ack.number)).min();
    let high = segments.iter().map(|segment| segment.end).max();
    let (low, high) = (low.unwrap_or(0), high.unwrap_or(1));
    // A distant window is cut off a quarter above the sent range, or in a part as far above as the
    // range is high.
    let windows = meanwhile.iter().filter_map(|ack| ack.window);
    let margin = if segments.len() < capture.segments.len() {
        high - low
    } else {
        (high - low) / 4
    };
    let above = windows
        .max()
        .map_or(0, |window| (window - high).clamp(0, margin));
    let (unit, factor) = match high - low {
        0..10_000_000 => ("kB", 1e-3),
        _ => ("MB", 1e-6),
    };
    let scaled = |position: i64| position as f64 * factor;
    let frame = Frame::wide(top, 300.0, x, Scale::new(scaled(low), scaled(high + above)));
    frame.title(svg, title, unit);
    frame.y_axis(svg, 6);
    let window = steps(&meanwhile, |ack| ack.window.map(scaled));
    let inside: Vec<_> = window
        .into_iter()
        .filter(|(_, y)| *y <= frame.y.high)
        .collect();
    svg.path(&frame.positions(&inside), KINDS[2], 1.4, "");
    let acknowledged = steps(&meanwhile, |ack| Some(scaled(ack.number)));
    svg.path(&frame.positions(&acknowledged), SECOND, 1.4, "");
    for (is_retransmission, colour, width) in [(false, OWN, 1.8), (true, BAD, 2.0)] {
        let of = segments
            .iter()
            .filter(|segment| segment.is_retransmission == is_retransmission);
        let mut lines: Vec<_> = of.map(|segment| bar(&frame, segment, scaled)).collect();
        // Lines on the same pixels are merged.
        let mut seen = HashSet::new();
        lines.retain(|[(x, from), (_, to)]| {
            seen.insert([*x, *from, *to].map(|value| (value * 2.0).round() as i64))
        });
        lines.truncate(LINES);
        svg.strokes(&lines, colour, width);
    }
    frame.x_axis(svg, Some("seconds since the connection's first packet"));
    frame.bottom
}

/// Returns a segment as a vertical line of visible length.
fn bar(frame: &Frame, segment: &Segment, scaled: impl Fn(i64) -> f64) -> [(f64, f64); 2] {
    let (x, from) = frame.at(segment.at, scaled(segment.begin));
    let (_, to) = frame.at(segment.at, scaled(segment.end));
    [(x, from), (x, to.min(from - 2.0))]
}

/// A line that keeps its height until the next value.
fn steps(
    acks: &[&Acknowledgement],
    of: impl Fn(&Acknowledgement) -> Option<f64>,
) -> Vec<(f64, f64)> {
    let mut corners: Vec<(f64, f64)> = Vec::new();
    for ack in acks {
        let Some(value) = of(ack) else { continue };
        if let Some((_, before)) = corners.last() {
            corners.push((ack.at, *before));
        }
        corners.push((ack.at, value));
    }
    corners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_detail_has_most_retransmissions() {
        let segment = |is_retransmission| Segment {
            at: 0.0,
            begin: 0,
            end: 1,
            is_retransmission,
        };
        let mut segments = vec![segment(false); 1000];
        assert_eq!(detail(&segments), 0..300);
        segments[10] = segment(true);
        segments[700] = segment(true);
        segments[900] = segment(true);
        assert_eq!(detail(&segments), 601..901);
        assert_eq!(detail(&segments[..50]), 0..50);
    }

    #[test]
    fn the_beginning_is_enlarged_where_it_is_a_part() {
        let segment = Segment {
            at: 0.0,
            begin: 0,
            end: 1,
            is_retransmission: false,
        };
        let mut segments = vec![segment; 400];
        let ranges = |segments: &[Segment]| -> Vec<(usize, usize)> {
            let parts = parts(segments).into_iter();
            parts.map(|(_, range)| (range.start, range.end)).collect()
        };
        assert_eq!(ranges(&segments[..60]), [(0, 60)]);
        assert_eq!(ranges(&segments), [(0, 400), (0, 60)]);
        segments[399].is_retransmission = true;
        assert_eq!(ranges(&segments), [(0, 400), (0, 60), (100, 400)]);
    }

    #[test]
    fn an_acknowledgement_holds_until_the_next() {
        let ack = |at, number| Acknowledgement {
            at,
            number,
            window: None,
        };
        let (a, b) = (ack(1.0, 10), ack(2.0, 30));
        let corners = steps(&[&a, &b], |ack| Some(ack.number as f64));
        assert_eq!(corners, [(1.0, 10.0), (2.0, 10.0), (2.0, 30.0)]);
    }
}
