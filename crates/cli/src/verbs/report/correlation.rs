//! Correlation of changes of throughput with changes of related counters, at every lag.

use seikan_diagnose::stats::{Correlation, Interval, correlate, differences, shifted};
use seikan_ui::axis::{Frame, Scale};
use seikan_ui::palette::{BAD, INK, KINDS, LINE, OWN, SECOND};
use seikan_ui::svg::Svg;

use super::suspects::suspects;
use super::trace::throughput;
use super::{Drawing, Scene};
use crate::screen::joined;

/// Number of counters shown: the strongest.
const SHOWN: usize = 3;
/// Maximum lag in both directions, and intervals per block of the bootstrap. A block must be longer
/// than the autocorrelation of neighbours.
const LAGS: usize = 8;
const BLOCK: usize = 5;
/// Maximum number of intervals; further ones are merged, because every lag takes two thousand
/// resamples.
const INTERVALS: usize = 400;
const HEIGHT: f64 = 120.0;
const GAP: f64 = 46.0;

/// A counter with its correlation at every lag.
struct Curve {
    title: String,
    best: Correlation,
    /// Each lag in intervals, with the correlation r at that lag.
    at: Vec<(i32, Interval)>,
}

/// Draws the picture.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let evidence = &scene.recording.evidence;
    let main =
        throughput(evidence).ok_or("the bytes of the tunnel's interface were not counted")?;
    let mut all = suspects(evidence);
    all.retain(|trace| !trace.is_work && covers(&trace.points, &main.points));
    let (length, main, others) = aligned(
        &main.points,
        &all.iter().map(|t| &*t.points).collect::<Vec<_>>(),
    );
    let main = differences(&main);
    let others = all.into_iter().zip(others);
    let mut found: Vec<_> = others
        .filter_map(|(trace, values)| {
            let values = differences(&values);
            let best = correlate(&main, &values, LAGS, BLOCK)?;
            Some((trace, values, best))
        })
        .collect();
    if found.is_empty() {
        return Err(format!(
            "at least {} intervals with changes of throughput and of another counter are needed; the recording has {}",
            4 * BLOCK + LAGS,
            main.len()
        ));
    }
    found.sort_by(|a, b| b.2.r.value.abs().total_cmp(&a.2.r.value.abs()));
    found.truncate(SHOWN);
    let curves: Vec<_> = found
        .into_iter()
        .map(|(trace, values, best)| Curve {
            title: trace.title,
            best,
            at: by_lag(&main, &values),
        })
        .collect();
    let mut svg = Svg::default();
    let mut top = 30.0;
    let mut bottom = top;
    let x = Scale::new(-(LAGS as f64) * length, LAGS as f64 * length);
    for (number, (curve, colour)) in curves.iter().zip([OWN, SECOND, KINDS[0]]).enumerate() {
        let frame = Frame::wide(top, HEIGHT, x, Scale::new(-1.0, 1.0));
        frame.title(&mut svg, &curve.title, "r");
        frame.y_axis(&mut svg, 4);
        svg.line(frame.at(x.low, 0.0), frame.at(x.high, 0.0), INK, 0.8);
        svg.line(frame.at(0.0, -1.0), frame.at(0.0, 1.0), LINE, 1.0);
        let at = |lag: i32, r: f64| frame.at(f64::from(lag) * length, r);
        let upper = curve.at.iter().map(|(lag, r)| at(*lag, r.high));
        let lower = curve.at.iter().rev().map(|(lag, r)| at(*lag, r.low));
        svg.filled(&upper.chain(lower).collect::<Vec<_>>(), colour, 0.16);
        let line: Vec<_> = curve.at.iter().map(|(lag, r)| at(*lag, r.value)).collect();
        svg.path(&line, colour, 1.8, "");
        let Correlation { lag, r } = curve.best;
        svg.line(at(lag, r.low), at(lag, r.high), BAD, 2.0);
        let label = format!("lag {:.1} s: {}", f64::from(lag) * length, written(&r));
        svg.dot(at(lag, r.value), 4.5, BAD, &label);
        let is_last = number + 1 == curves.len();
        frame.x_axis(&mut svg, is_last.then_some("lag of the counter, seconds"));
        bottom = frame.bottom;
        top = bottom + GAP;
    }
    let label = curves.iter().map(|curve| {
        let lag = f64::from(curve.best.lag) * length;
        format!("{}: {} at {lag:+.1} s", curve.title, written(&curve.best.r))
    });
    Ok(Drawing {
        svg: svg.finish(bottom + 46.0, "correlation by lag"),
        caption: format!(
            "Pearson's r between changes of throughput and of a counter, at each lag. Bands are 95 % intervals of a block bootstrap, dots \
             the strongest lags. A band that contains 0 shows no correlation, and correlation is no proof: both may have a common cause. {}.",
            joined(label, "; ")
        ),
    })
}

/// Returns whether a series covers the time of another one, except a tenth at each end, and has at
/// least half as many values.
fn covers(points: &[(f64, f64)], other: &[(f64, f64)]) -> bool {
    let ends = |points: &[(f64, f64)]| Some((points.first()?.0, points.last()?.0));
    let (Some((from, to)), Some((begin, end))) = (ends(points), ends(other)) else {
        return false;
    };
    let slack = (end - begin) / 10.0;
    from <= begin + slack && to >= end - slack && 2 * points.len() >= other.len()
}

fn written(r: &Interval) -> String {
    format!("{:+.2} ({:+.2} to {:+.2})", r.value, r.low, r.high)
}

/// Returns the correlation at every lag, with its interval.
fn by_lag(a: &[f64], b: &[f64]) -> Vec<(i32, Interval)> {
    let n = a.len().min(b.len());
    let lags = -(LAGS as i32)..=LAGS as i32;
    lags.filter_map(|lag| {
        let (a, b) = shifted(&a[..n], &b[..n], lag);
        Some((lag, correlate(a, b, 0, BLOCK)?.r))
    })
    .collect()
}

/// Returns means over intervals of equal length: the length in seconds, the main series, the
/// others. An interval without a value repeats the previous one.
fn aligned(main: &[(f64, f64)], others: &[&[(f64, f64)]]) -> (f64, Vec<f64>, Vec<Vec<f64>>) {
    let (Some(first), Some(last)) = (main.first(), main.last()) else {
        return (1.0, Vec::new(), Vec::new());
    };
    let count = main.len().min(INTERVALS);
    let length = ((last.0 - first.0) / (count.max(2) - 1) as f64).max(1e-6);
    let begin = first.0 - length / 2.0;
    let means = |points: &[(f64, f64)]| -> Vec<f64> {
        let mut sums = vec![(0.0, 0u32); count];
        for (at, value) in points {
            let index = ((at - begin) / length).floor();
            if index >= 0.0 && index < count as f64 {
                let sum = &mut sums[index as usize];
                *sum = (sum.0 + value, sum.1 + 1);
            }
        }
        let mut previous = 0.0;
        let filled = sums.into_iter().map(|(sum, n)| {
            if n > 0 {
                previous = sum / f64::from(n);
            }
            previous
        });
        filled.collect()
    };
    let others = others.iter().map(|points| means(points)).collect();
    (length, means(main), others)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_has_its_top_where_the_counter_follows() {
        let a: Vec<f64> = (0..100).map(|i| f64::from((i * i) % 17)).collect();
        let mut b = vec![0.0; 100];
        b[2..].copy_from_slice(&a[..98]);
        let curve = by_lag(&a, &b);
        assert_eq!(curve.len(), 2 * LAGS + 1);
        let best = curve.iter().max_by(|x, y| x.1.value.total_cmp(&y.1.value));
        let (lag, r) = best.expect("a curve");
        assert_eq!(*lag, 2);
        assert!(r.value > 0.999 && r.low > 0.99, "{r:?}");
    }

    #[test]
    fn series_of_a_part_are_omitted() {
        let main: Vec<_> = (0..20).map(|i| (f64::from(i), 1.0)).collect();
        assert!(covers(&main[1..19], &main));
        assert!(!covers(&main[..10], &main));
        assert!(!covers(&[main[0], main[19]], &main));
        assert!(!covers(&[], &main));
    }

    #[test]
    fn series_share_their_intervals() {
        let main: Vec<_> = (0..4).map(|i| (f64::from(i) + 0.5, f64::from(i))).collect();
        let other = [(1.0, 8.0), (1.4, 10.0), (3.6, 1.0), (99.0, 5.0)];
        let (length, main, others) = aligned(&main, &[&other]);
        assert_eq!(length, 1.0);
        assert_eq!(main, [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(others, [[0.0, 9.0, 9.0, 1.0]]);
    }
}
