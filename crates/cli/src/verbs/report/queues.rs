//! Backlogs of the queues on the path, and their delays.

use seikan_diagnose::Evidence;
use seikan_diagnose::stats::queueing_delay;
use seikan_observe::path::Transport;
use seikan_observe::{Column, Subject, metric};
use seikan_ui::axis::{Frame, LEFT, RIGHT, Scale, format_number};
use seikan_ui::palette::{KINDS, OWN};
use seikan_ui::svg::Svg;

use super::trace::{gauge, rate, seconds};
use super::{Drawing, Scene};

/// Number of queues shown: those with the longest delays.
const SHOWN: usize = 6;
/// Maximum number of interfaces and of sockets to examine.
const MANY: usize = 32;
const HEIGHT: f64 = 90.0;
const GAP: f64 = 44.0;
/// Gap between the pictures of backlog and delay.
const BETWEEN: f64 = 84.0;

/// A queue.
#[derive(Clone, Debug, PartialEq)]
struct Queue {
    name: String,
    /// Seconds, and backlog in kilobytes.
    backlog: Vec<(f64, f64)>,
    /// Seconds, and delay in milliseconds of a packet that arrives then.
    delay: Vec<(f64, f64)>,
}

impl Queue {
    /// Returns the median delay in milliseconds: single moments with hardly any departures do not
    /// count.
    fn typical(&self) -> f64 {
        let mut delays: Vec<f64> = self.delay.iter().map(|(_, wait)| *wait).collect();
        delays.sort_by(f64::total_cmp);
        delays.get(delays.len() / 2).copied().unwrap_or(0.0)
    }
}

/// Draws the picture.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let evidence = &scene.recording.evidence;
    let mut queues = queues(evidence);
    queues.retain(|queue| queue.backlog.iter().any(|(_, bytes)| *bytes > 0.0));
    if queues.is_empty() {
        return Err("no visible queue had a backlog".into());
    }
    queues.sort_by(|a, b| b.typical().total_cmp(&a.typical()));
    let more = queues.len().saturating_sub(SHOWN);
    queues.truncate(SHOWN);
    let x = Scale::new(0.0, seconds(evidence).last().copied().unwrap_or(1.0));
    let middle = (LEFT + RIGHT - BETWEEN) / 2.0;
    let mut svg = Svg::default();
    let mut top = 30.0;
    let mut bottom = top;
    for (number, queue) in queues.iter().enumerate() {
        let is_last = number + 1 == queues.len();
        for (points, title, unit, colour, left, right) in [
            (&queue.backlog, &*queue.name, "kB", OWN, LEFT, middle),
            (
                &queue.delay,
                "delay",
                "ms",
                KINDS[1],
                middle + BETWEEN,
                RIGHT,
            ),
        ] {
            let max = points.iter().map(|(_, value)| *value).fold(0.0, f64::max);
            let frame = Frame {
                left,
                right,
                ..Frame::wide(top, HEIGHT, x, Scale::from_zero(max, 3))
            };
            frame.title(&mut svg, title, unit);
            frame.y_axis(&mut svg, 3);
            let positions = frame.positions(points);
            svg.area(&positions, frame.bottom, colour, 0.18);
            svg.path(&positions, colour, 1.8, "");
            frame.x_axis(&mut svg, is_last.then_some("seconds"));
            bottom = frame.bottom;
        }
        top = bottom + GAP;
    }
    let longest = &queues[0];
    let left_out = match more {
        0 => String::new(),
        _ => format!(" {more} queues with shorter delays are omitted."),
    };
    Ok(Drawing {
        svg: svg.finish(bottom + 46.0, "queues over time"),
        caption: format!(
            "The backlog of each queue (left) and its delay at the rate of that moment (right, by Little's law). The longest median delay: \
             {}, {} ms. Backlogs of sockets include the kernel's overhead, so delays there are upper bounds.{left_out}",
            longest.name,
            format_number(longest.typical())
        ),
    })
}

/// Returns the queues with both a backlog and a counter of departures.
fn queues(evidence: &Evidence) -> Vec<Queue> {
    let map = &evidence.map;
    let mut all = Vec::new();
    let mut add = |name: String, backlog: Option<&Column>, departures: Option<&Column>| {
        if let (Some(backlog), Some(departures)) = (backlog, departures) {
            all.push(queue(evidence, name, backlog, departures));
        }
    };
    for link in map.links.iter().take(MANY) {
        let of = |name| evidence.column(&Subject::Qdisc(link.name.clone()), name);
        let name = format!("queueing discipline of {}", link.name);
        add(
            name,
            of(metric::QDISC_BACKLOG_BYTES),
            of(metric::QDISC_BYTES),
        );
    }
    let inner = |name| {
        let inner = map.inner.clone().map(Subject::Link)?;
        evidence.column(&inner, name)
    };
    for socket in map.sockets.iter().take(MANY) {
        let name = |direction: &str| format!("socket {}, {direction}", socket.local);
        match socket.transport {
            Transport::Udp => {
                let of = |name| evidence.column(&Subject::Udp(socket.inode), name);
                add(
                    name("received"),
                    of(metric::UDP_RX_QUEUE),
                    inner(metric::RX_BYTES),
                );
                add(
                    name("to be sent"),
                    of(metric::UDP_TX_QUEUE),
                    inner(metric::TX_BYTES),
                );
            }
            Transport::Tcp => {
                let of = |name| evidence.column(&Subject::Tcp(socket.inode), name);
                add(
                    name("to be sent"),
                    of(metric::TCP_NOTSENT_BYTES),
                    of(metric::TCP_BYTES_ACKED),
                );
            }
            Transport::Raw => {}
        }
    }
    if let Some(flow) = evidence.main_flow() {
        let of = |name| evidence.column(&Subject::Tcp(flow.inode), name);
        let name = "main connection, unsent".to_owned();
        add(
            name,
            of(metric::TCP_NOTSENT_BYTES),
            of(metric::TCP_BYTES_ACKED),
        );
    }
    all
}

fn queue(evidence: &Evidence, name: String, backlog: &Column, departures: &Column) -> Queue {
    let backlog = gauge(evidence, &[backlog], 1.0);
    let departures = rate(evidence, &[departures], 1.0);
    let delay = departures.iter().filter_map(|(at, per_second)| {
        // The sample at the end of the interval of the departures.
        let next = backlog.partition_point(|(time, _)| time < at);
        let (time, bytes) = backlog.get(next)?;
        Some((*time, queueing_delay(*bytes, *per_second)? * 1e3))
    });
    Queue {
        name,
        delay: delay.collect(),
        backlog: backlog
            .iter()
            .map(|(at, bytes)| (*at, bytes / 1e3))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::report::testing::*;

    #[test]
    fn a_delay_is_the_backlog_over_the_rate() {
        let mut evidence = sampled(&[0.0, 0.5, 1.0]);
        let qdisc = || Subject::Qdisc("eth0".into());
        evidence.map.links = vec![link("eth0")];
        measure(
            &mut evidence,
            qdisc(),
            metric::QDISC_BACKLOG_BYTES,
            &[0, 50_000, 30_000],
        );
        count(
            &mut evidence,
            qdisc(),
            metric::QDISC_BYTES,
            &[0, 1_000_000, 1_000_000],
        );
        let queues = queues(&evidence);
        assert_eq!(queues.len(), 1);
        // 2 MB leave per second: 50 kB take 25 ms. Nothing leaves afterwards: the delay is unknown.
        assert_eq!(queues[0].delay, [(0.5, 25.0)]);
        assert_eq!(queues[0].backlog, [(0.0, 0.0), (0.5, 50.0), (1.0, 30.0)]);
    }
}
