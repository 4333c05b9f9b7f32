//! Axes: scales with round ticks, and the frame in which lines are drawn.

use crate::palette::{Colour, FAINT, INK, LINE};

use crate::screen::rounded;
use crate::svg::{Anchor, Svg, WIDTH, cut, width};

/// Left edge of frames, which leaves space for the numbers.
pub const LEFT: f64 = 84.0;
/// Right edge of frames; half of the last number below extends beyond it.
pub const RIGHT: f64 = WIDTH - 24.0;

/// A quantity along an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Value at its beginning.
    pub low: f64,
    /// Value at its end, above `low`.
    pub high: f64,
}

impl Scale {
    /// Creates a scale from one value to another. If the second is not above the first, the scale
    /// is extended.
    pub fn new(low: f64, high: f64) -> Self {
        let sane = low.is_finite() && high.is_finite() && high > low;
        if sane {
            Scale { low, high }
        } else {
            Scale {
                low: if low.is_finite() { low } else { 0.0 },
                high: if low.is_finite() { low + 1.0 } else { 1.0 },
            }
        }
    }

    /// Creates a scale from 0 to a round value not below `max`, with about `ticks` round ticks.
    pub fn from_zero(max: f64, ticks: usize) -> Self {
        let plain = Scale::new(0.0, max);
        let step = plain.step(ticks);
        Scale::new(0.0, (plain.high / step - 1e-9).ceil() * step)
    }

    /// Returns the position of a value on the scale, 0 to 1 from beginning to end.
    pub fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    /// Returns 1, 2 or 5 times a power of ten, for about `ticks` intervals.
    fn step(&self, ticks: usize) -> f64 {
        let raw = (self.high - self.low) / ticks.max(1) as f64;
        let power = 10f64.powf(raw.log10().floor());
        let round = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
        let fits = round.into_iter().find(|step| *step >= raw * (1.0 - 1e-9));
        fits.unwrap_or(raw)
    }

    /// Round values, and how they are written.
    pub fn ticks(&self, about: usize) -> Vec<(f64, String)> {
        let step = self.step(about);
        let first = (self.low / step - 1e-9).ceil();
        let last = (self.high / step + 1e-9).floor();
        let count = (last - first).clamp(0.0, 50.0) as usize;
        let tick = |i: usize| {
            let value = (first + i as f64) * step;
            (value, written(value, step))
        };
        (0..=count).map(tick).collect()
    }
}

/// Formats a value with as many digits as the step needs, and with thousands separators.
fn written(value: f64, step: f64) -> String {
    let decimals = (-(step.log10() + 1e-9).floor()).clamp(0.0, 6.0) as usize;
    let value = if value.abs() < step * 1e-6 {
        0.0
    } else {
        value
    };
    if value.abs() >= 1e12 {
        return format!("{value:.1e}");
    }
    let text = format!("{:.decimals$}", value.abs());
    let (whole, part) = text.split_once('.').unwrap_or((&text, ""));
    let whole = crate::screen::number(whole.parse().unwrap_or(0));
    let sign = if value < 0.0 { "−" } else { "" };
    match part {
        "" => format!("{sign}{whole}"),
        part => format!("{sign}{whole}.{part}"),
    }
}

/// A plane with two axes.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Left edge, in pixels.
    pub left: f64,
    /// Right edge.
    pub right: f64,
    /// Upper edge.
    pub top: f64,
    /// Lower edge.
    pub bottom: f64,
    /// Horizontal axis.
    pub x: Scale,
    /// Vertical axis.
    pub y: Scale,
}

impl Frame {
    /// Creates a frame as wide as the picture.
    pub fn wide(top: f64, height: f64, x: Scale, y: Scale) -> Self {
        Frame {
            left: LEFT,
            right: RIGHT,
            top,
            bottom: top + height,
            x,
            y,
        }
    }

    /// Returns the position of a point in the picture; points outside lie on the edge.
    pub fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let (x, y) = (
            self.x.share(x).clamp(0.0, 1.0),
            self.y.share(y).clamp(0.0, 1.0),
        );
        (
            self.left + x * (self.right - self.left),
            self.bottom - y * (self.bottom - self.top),
        )
    }

    /// Returns the positions of points. Points that would look the same in the picture are left
    /// out.
    pub fn positions(&self, points: &[(f64, f64)]) -> Vec<(f64, f64)> {
        let placed: Vec<_> = points.iter().map(|(x, y)| self.at(*x, *y)).collect();
        thinned(&placed)
    }

    /// Draws the title above the frame, with the unit at its end.
    pub fn title(&self, svg: &mut Svg, title: &str, unit: &str) {
        self.coloured_title(svg, INK, title, unit);
    }

    /// Draws the title in a colour.
    pub fn coloured_title(&self, svg: &mut Svg, colour: Colour, title: &str, unit: &str) {
        let end = width(unit, crate::svg::SIZE);
        let width_left = self.right - self.left - end - 12.0;
        let at = self.top - 8.0;
        let title = cut(title, width_left, crate::svg::SIZE * 1.06);
        svg.bold((self.left, at), Anchor::Start, colour, &title);
        svg.text((self.right, at), Anchor::End, FAINT, unit);
    }

    /// Draws the axis on the left, with horizontal grid lines.
    pub fn y_axis(&self, svg: &mut Svg, about: usize) {
        for (value, text) in self.y.ticks(about) {
            let (_, y) = self.at(self.x.low, value);
            svg.line((self.left, y), (self.right, y), LINE, 1.0);
            svg.text((self.left - 8.0, y + 5.0), Anchor::End, FAINT, &text);
        }
    }

    /// Draws the axis below, with numbers and an optional unit.
    pub fn x_axis(&self, svg: &mut Svg, unit: Option<&str>) {
        let about = ((self.right - self.left) / 90.0) as usize;
        for (value, text) in self.x.ticks(about) {
            let (x, _) = self.at(value, self.y.low);
            let to = self.bottom + if unit.is_some() { 5.0 } else { 0.0 };
            svg.line((x, self.bottom - 4.0), (x, to), LINE, 1.0);
            if unit.is_some() {
                svg.text((x, self.bottom + 20.0), Anchor::Middle, FAINT, &text);
            }
        }
        if let Some(unit) = unit {
            svg.text((self.right, self.bottom + 38.0), Anchor::End, FAINT, unit);
        }
    }
}

/// Returns the first, smallest, largest and last point of every column of pixels. The picture looks
/// the same, and the number of points is bounded.
pub fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() < 2 * WIDTH as usize {
        return points.to_vec();
    }
    let mut kept = Vec::new();
    for column in points.chunk_by(|a, b| a.0.floor() == b.0.floor()) {
        let by_height = |a: &usize, b: &usize| column[*a].1.total_cmp(&column[*b].1);
        let low = (0..column.len()).min_by(by_height).unwrap_or(0);
        let high = (0..column.len()).max_by(by_height).unwrap_or(0);
        let mut which = [0, low, high, column.len() - 1];
        which.sort_unstable();
        let mut last = None;
        for index in which {
            if last.replace(index) != Some(index) {
                kept.push(column[index]);
            }
        }
    }
    kept
}

/// Formats a number for a caption, or for the end of a bar.
pub fn format_number(value: f64) -> String {
    rounded(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: Scale, about: usize) -> Vec<String> {
        scale
            .ticks(about)
            .into_iter()
            .map(|(_, text)| text)
            .collect()
    }

    #[test]
    fn ticks_are_round_and_thousands_apart() {
        assert_eq!(
            labels(Scale::new(0.0, 10.0), 5),
            ["0", "2", "4", "6", "8", "10"]
        );
        assert_eq!(labels(Scale::new(0.0, 2500.0), 3), ["0", "1,000", "2,000"]);
        assert_eq!(
            labels(Scale::new(-0.5, 0.5), 5),
            ["−0.4", "−0.2", "0.0", "0.2", "0.4"]
        );
        assert_eq!(
            labels(Scale::new(0.0, 0.03), 3),
            ["0.00", "0.01", "0.02", "0.03"]
        );
    }

    #[test]
    fn an_axis_from_zero_ends_at_a_tick() {
        assert_eq!(Scale::from_zero(87.0, 2).high, 100.0);
        assert_eq!(Scale::from_zero(100.0, 2).high, 100.0);
        assert_eq!(Scale::from_zero(0.0, 2).high, 1.0);
        assert_eq!(Scale::from_zero(f64::NAN, 2).high, 1.0);
    }

    #[test]
    fn points_lie_where_they_should() {
        let (x, y) = (Scale::new(0.0, 10.0), Scale::new(0.0, 100.0));
        let frame = Frame {
            left: 100.0,
            right: 300.0,
            top: 50.0,
            bottom: 150.0,
            x,
            y,
        };
        assert_eq!(frame.at(0.0, 0.0), (100.0, 150.0));
        assert_eq!(frame.at(2.5, 75.0), (150.0, 75.0));
        assert_eq!(frame.at(20.0, -5.0), (300.0, 150.0));
    }

    #[test]
    fn a_spike_survives_the_thinning() {
        let mut points: Vec<_> = (0..100_000).map(|i| (f64::from(i) / 1000.0, 0.0)).collect();
        points[54_321].1 = 7.0;
        let kept = thinned(&points);
        assert!(kept.len() <= 400, "{}", kept.len());
        assert!(kept.contains(&points[54_321]));
    }
}
