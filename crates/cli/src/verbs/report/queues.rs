//! What stood in the queues on the way, and how long it had to wait there.

use seikan_diagnose::Evidence;
use seikan_diagnose::stats::queueing_delay;
use seikan_observe::path::Transport;
use seikan_observe::{Column, Subject, metric};
use seikan_ui::axis::{Frame, LEFT, RIGHT, Scale, format_number};
use seikan_ui::palette::{KINDS, OWN};
use seikan_ui::svg::Svg;

use super::trace::{gauge, rate, seconds};
use super::{Drawing, Scene};

/// Queues that are shown: those in which most waited.
const SHOWN: usize = 6;
/// Interfaces and sockets that are looked at.
const MANY: usize = 32;
const HEIGHT: f64 = 90.0;
const GAP: f64 = 44.0;
/// Between what stands and how long it waits.
const BETWEEN: f64 = 84.0;

/// A queue.
#[derive(Clone, Debug, PartialEq)]
struct Queue {
    name: String,
    /// Seconds, and kilobytes that stand in it.
    standing: Vec<(f64, f64)>,
    /// Seconds, and milliseconds that what comes then has to wait.
    delay: Vec<(f64, f64)>,
}

impl Queue {
    /// The median wait, milliseconds: some moments in which next to nothing leaves do not count for much.
    fn typical(&self) -> f64 {
        let mut waits: Vec<f64> = self.delay.iter().map(|(_, wait)| *wait).collect();
        waits.sort_by(f64::total_cmp);
        waits.get(waits.len() / 2).copied().unwrap_or(0.0)
    }
}

/// Draws it.
pub fn draw(scene: &Scene<'_>) -> Result<Drawing, String> {
    let evidence = &scene.recording.evidence;
    let mut queues = queues(evidence);
    queues.retain(|queue| queue.standing.iter().any(|(_, bytes)| *bytes > 0.0));
    if queues.is_empty() {
        return Err("nothing stood in any queue that can be seen".into());
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
            (&queue.standing, &*queue.name, "kB", OWN, LEFT, middle),
            (
                &queue.delay,
                "wait",
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
            let placed = frame.positions(points);
            svg.area(&placed, frame.bottom, colour, 0.18);
            svg.path(&placed, colour, 1.8, "");
            frame.x_axis(&mut svg, is_last.then_some("seconds"));
            bottom = frame.bottom;
        }
        top = bottom + GAP;
    }
    let longest = &queues[0];
    let left_out = match more {
        0 => String::new(),
        _ => format!(" {more} with shorter waits are left out."),
    };
    Ok(Drawing {
        svg: svg.finish(bottom + 46.0, "queues over time"),
        caption: format!(
            "What stands in a queue (left) and how long it takes to leave at the rate of that moment (right, by Little's law). The longest \
             median: {}, {} ms. The kernel counts its own overhead in sockets, so that waits there are upper bounds.{left_out}",
            longest.name,
            format_number(longest.typical())
        ),
    })
}

/// Those of which both is known: what stands and what leaves.
fn queues(evidence: &Evidence) -> Vec<Queue> {
    let map = &evidence.map;
    let mut all = Vec::new();
    let mut add = |name: String, standing: Option<&Column>, leaving: Option<&Column>| {
        if let (Some(standing), Some(leaving)) = (standing, leaving) {
            all.push(queue(evidence, name, standing, leaving));
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
        let name = |way: &str| format!("socket {}, {way}", socket.local);
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
        let name = "main connection, not sent yet".to_owned();
        add(
            name,
            of(metric::TCP_NOTSENT_BYTES),
            of(metric::TCP_BYTES_ACKED),
        );
    }
    all
}

fn queue(evidence: &Evidence, name: String, standing: &Column, leaving: &Column) -> Queue {
    let standing = gauge(evidence, &[standing], 1.0);
    let leaving = rate(evidence, &[leaving], 1.0);
    let delay = leaving.iter().filter_map(|(at, per_second)| {
        // The sample at the end of the interval in which so much left.
        let next = standing.partition_point(|(time, _)| time < at);
        let (time, bytes) = standing.get(next)?;
        Some((*time, queueing_delay(*bytes, *per_second)? * 1e3))
    });
    Queue {
        name,
        delay: delay.collect(),
        standing: standing
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
    fn a_wait_is_what_stands_over_what_leaves() {
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
        // 2 MB leave per second: 50 kB take 25 ms. Nothing leaves afterwards: the wait is not known.
        assert_eq!(queues[0].delay, [(0.5, 25.0)]);
        assert_eq!(queues[0].standing, [(0.0, 0.0), (0.5, 50.0), (1.0, 30.0)]);
    }
}
