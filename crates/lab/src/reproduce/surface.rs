//! Questions that the source of [`batch`](super::batch) leaves open: the sizes of the program's
//! buffer, the interface's queue and the MTU of the NICs. Bulk transfers need large values,
//! interactive traffic needs short queues.

use std::path::Path;
use std::time::Duration;

use seikan_load::{Direction, Ends, LoadedLatency, TcpOptions, loaded_latency, paced};

use super::batch::{ONE, frames, frames_in_words, tunnel_of};
use super::forwarding::{Forwarding, PerCall, Setting};
use super::{Bench, Experiment, Layer, Surface, set_both};
use crate::cleanup::private_directory;
use crate::error::{LabError, Result};
use crate::site::Link;
use crate::tunnel::Running;

/// Frames for each crossing, packets in the queue, MTU of the NICs in bytes.
const SIZES: [u32; 4] = [1, 4, 16, 64];
const QUEUES: [u32; 3] = [10, 100, 1_000];
const NICS: [u32; 2] = [1_500, 9_000];
/// Bytes that Seikan's interface reserves for its own headers and the UDP and IPv6 headers.
const OVERHEAD: u32 = 80;
/// Interval between datagrams of the flow that waits for answers.
const PACE: Duration = Duration::from_millis(10);
/// Time for streams to find their rate.
const WARMUP: Duration = Duration::from_millis(400);
/// Share of a load's usual time that each measurement takes, because there are many.
const SHARE: f64 = 0.25;
/// Quantities of each point: title, unit, whether more is better.
const QUANTITIES: [(&str, &str, bool); 4] = [
    ("throughput", "Mbit/s", true),
    ("half answered within", "ms", false),
    ("99 % within", "ms", false),
    ("answered", "%", true),
];
/// A value for each of the [`QUANTITIES`]; `None` if there is none.
type Values = [Option<f64>; QUANTITIES.len()];

/// Percentage of datagrams that must be answered for the delay to count as short.
const ANSWERED: f64 = 99.0;

/// The tunnel that is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Subject {
    /// The program of the source, which only passes packets on.
    Program,
    Seikan,
}

impl Subject {
    /// Returns the name for file names, and the name for texts.
    fn names(self) -> [&'static str; 2] {
        match self {
            Self::Program => ["program", "the program that only passes packets on"],
            Self::Seikan => ["seikan", "Seikan"],
        }
    }
}

/// A point of the surface.
#[derive(Clone, Copy)]
struct Point {
    nic: u32,
    queue: u32,
    size: u32,
}

/// The best of all points so far: throughput divided by round trip, quantities, and the point.
type Best = Option<(f64, Values, Point)>;

/// Throughput of bulk TCP and, at the same time, round trips of a flow of small datagrams, over
/// frames, queue and MTU of the NICs.
pub(super) fn surface(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    for subject in [Subject::Program, Subject::Seikan] {
        let mut best = None;
        for nic in NICS {
            found.attempt(|found| map(bench, subject, nic, (found, &mut best)))?;
        }
        let [_, name] = subject.names();
        if let Some((_, [Some(rate), Some(half), ..], at)) = best {
            found.notes.push(format!(
                "Throughput over round trip (Kleinrock's power; the best of each MTU is marked, of those where {ANSWERED} % of the \
                 datagrams are answered) of {name} is largest with {}, a queue of {} and NICs with an MTU of {}: {rate:.0} Mbit/s, half \
                 of the answers within {half:.2} ms.",
                frames_in_words(at.size),
                at.queue,
                at.nic
            ));
        }
    }
    Ok(())
}

/// Measures one MTU of the NICs.
fn map(
    bench: &mut Bench<'_>,
    subject: Subject,
    nic: u32,
    (found, best): (&mut Experiment, &mut Best),
) -> Result<()> {
    let [slug, name] = subject.names();
    let dir = private_directory()?;
    let mut site = Site::start(subject, nic, dir.path(), bench)?;
    let mut layers = QUANTITIES.map(|(title, unit, wanted)| Layer {
        title: title.to_owned(),
        unit: unit.to_owned(),
        wanted,
        values: Vec::new(),
    });
    let mut mark: Option<(f64, [usize; 2])> = None;
    for (row, queue) in QUEUES.into_iter().enumerate() {
        layers.iter_mut().for_each(|l| l.values.push(Vec::new()));
        for (column, size) in SIZES.into_iter().enumerate() {
            let point = Point { nic, queue, size };
            let words = frames_in_words(size);
            let setting = format!("{name}, NICs with an MTU of {nic}, {words}, queue of {queue}");
            bench.step(&setting)?;
            let values = found.unless_failed(&setting, site.measure(point, bench))?;
            let values = values.unwrap_or_default();
            for (layer, value) in layers.iter_mut().zip(values) {
                if let Some(row) = layer.values.last_mut() {
                    row.push(value);
                }
            }
            let Some(power) = power(values) else {
                continue;
            };
            if mark.is_none_or(|(most, _)| power > most) {
                mark = Some((power, [column, row]));
            }
            if best.is_none_or(|(most, ..)| power > most) {
                *best = Some((power, values, point));
            }
        }
    }
    found.surfaces.push(Surface {
        name: format!("batch-{slug}-nic-{nic}"),
        title: format!("{name}, NICs with an MTU of {nic}"),
        x: "frames for each crossing, at most".to_owned(),
        y: "packets in the queue, at most".to_owned(),
        columns: SIZES.map(|size| size.to_string()).to_vec(),
        rows: QUEUES.map(|queue| queue.to_string()).to_vec(),
        layers: layers.into(),
        best: mark.map(|(_, at)| at),
    });
    Ok(())
}

/// A tunnel that runs.
enum Site {
    Program(Box<Forwarding>),
    Seikan(Box<Running>),
}

impl Site {
    fn start(subject: Subject, nic: u32, dir: &Path, bench: &Bench<'_>) -> Result<Self> {
        match subject {
            Subject::Program => {
                let setting = Setting {
                    per_call: Some(PerCall::both(1)),
                    rate: None,
                    mtu: nic,
                };
                let site = Forwarding::start(setting, dir, bench)?;
                Ok(Self::Program(Box::new(site)))
            }
            Subject::Seikan => {
                let link = Link {
                    mtu: nic,
                    ..bench.link(None)
                };
                let running = bench.start_over(&tunnel_of(ONE)?, link)?;
                set_both(&running, &format!("mtu {}", nic - OVERHEAD))?;
                Ok(Self::Seikan(Box::new(running)))
            }
        }
    }

    /// Measures a point.
    fn measure(&mut self, point: Point, bench: &Bench<'_>) -> Result<Values> {
        let Point { queue, size, .. } = point;
        let options = TcpOptions {
            warmup: WARMUP,
            duration: bench.time().mul_f64(SHARE),
            ..TcpOptions::default()
        };
        let load = |ends: &Ends<'_>, options: &TcpOptions| {
            let loaded = loaded_latency(ends, options, paced, PACE, bench.interrupt)?;
            Ok::<_, LabError>(values(&loaded))
        };
        match self {
            Self::Program(site) => {
                site.set_frames(size)?;
                site.set_queue(queue)?;
                let options = TcpOptions {
                    direction: Direction::Reverse,
                    ..options
                };
                Ok(site.counting(|ends| load(ends, &options))?.0)
            }
            Self::Seikan(running) => {
                set_both(running, &format!("txqueuelen {queue}"))?;
                frames(running, size)?;
                let values = load(&running.ends(), &options)?;
                running.check_alive()?;
                Ok(values)
            }
        }
    }
}

fn values(loaded: &LoadedLatency) -> Values {
    let answers = loaded.latency;
    let ms = |us: f64| (answers.received > 0).then_some(us / 1e3);
    [
        Some(loaded.gbit_per_second * 1e3),
        ms(answers.p50_us),
        ms(answers.p99_us),
        Some(100.0 * f64::from(answers.received) / f64::from(answers.sent.max(1))),
    ]
}

/// Returns throughput divided by round trip; `None` if datagrams are lost rather than late.
fn power(values: Values) -> Option<f64> {
    let [Some(rate), Some(half), _, Some(answered)] = values else {
        return None;
    };
    (answered >= ANSWERED).then_some(rate / half.max(1e-3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lossy_setup_has_no_power() {
        let values = |answered| [Some(1_000.0), Some(2.0), Some(9.0), Some(answered)];
        assert_eq!(power(values(100.0)), Some(500.0));
        assert_eq!(power(values(98.0)), None);
        assert_eq!(power([Some(1_000.0), None, None, Some(0.0)]), None);
    }
}
