//! Questions that the source of [`batch`](super::batch) leaves open: the sizes of the program's
//! buffer, the interface's queue and its MTU. Bulk transfers need large ones, interactive traffic
//! short queues.

use std::time::Duration;

use seikan_load::{TcpOptions, loaded_latency, paced};

use super::batch::{ONE, frames, frames_in_words, tunnel_of};
use super::{Bench, Found, Layer, Surface, set_link};
use crate::error::{LabError, Result};
use crate::tunnel::{self, Running, Tunnel};

/// Frames for each crossing, packets in the queue, bytes of the MTU.
const SIZES: [u32; 4] = [1, 4, 16, 64];
const QUEUES: [u32; 4] = [10, 100, 500, 1_000];
const MTUS: [u32; 3] = [1_420, 9_000, 60_000];
/// How many measurements that makes.
pub(super) const POINTS: usize = SIZES.len() * QUEUES.len() * MTUS.len();
/// A datagram of the flow that waits for answers is sent so often.
const PACE: Duration = Duration::from_millis(10);
/// Time for streams to find their rate.
const WARMUP: Duration = Duration::from_millis(500);
/// Quantities of each point: title, unit, whether more is better.
const QUANTITIES: [(&str, &str, bool); 4] = [
    ("throughput", "Mbit/s", true),
    ("half answered within", "ms", false),
    ("99 % within", "ms", false),
    ("answered", "%", true),
];
/// See [`QUANTITIES`].
type Values = [Option<f64>; QUANTITIES.len()];

/// Of datagrams, how many must be answered for the others' waiting to be called short.
const ANSWERED: f64 = 99.0;

/// A point of the surface.
#[derive(Clone, Copy)]
struct Point {
    mtu: u32,
    queue: u32,
    size: u32,
}

/// Throughput of bulk TCP and, at the same time, round trips of a flow of small datagrams, over
/// frames, queue and MTU.
pub(super) fn surface(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let tunnel = tunnel_of(ONE)?;
    let mut running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
    let mut best: Option<(f64, Values, Point)> = None;
    for mtu in MTUS {
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
                let point = Point { mtu, queue, size };
                let words = frames_in_words(size);
                let setting = format!("MTU {mtu}, {words}, queue of {queue}");
                bench.step(&setting)?;
                let values = match measure(bench, tunnel.as_ref(), &mut running, point) {
                    Err(LabError::Interrupted) => return Err(LabError::Interrupted),
                    Err(error) => {
                        found.problems.push(format!("{setting}: {error}"));
                        [None; QUANTITIES.len()]
                    }
                    Ok(values) => values,
                };
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
                    best = Some((power, values, point));
                }
            }
        }
        found.surfaces.push(Surface {
            name: format!("batch-mtu-{mtu}"),
            title: format!("an MTU of {mtu}"),
            x: "frames for each crossing, at most".to_owned(),
            y: "packets in the queue, at most".to_owned(),
            columns: SIZES.map(|size| size.to_string()).to_vec(),
            rows: QUEUES.map(|queue| queue.to_string()).to_vec(),
            layers: layers.into(),
            best: mark.map(|(_, at)| at),
        });
    }
    if let Some((_, [Some(rate), Some(half), ..], at)) = best {
        found.notes.push(format!(
            "Throughput over round trip (Kleinrock's power; the best of each MTU is marked, of those where {ANSWERED} % of the datagrams are answered) is largest with {}, a queue of {} and an MTU of {}: {rate:.0} Mbit/s, \
             half of the answers within {half:.2} ms. Its own defaults are super-packets as large as one send takes, 44 frames at an MTU of 1,420, and a queue of 1,000, which \
             a burst of small packets needs: they do not wait for a batch to fill, they gather while the one before is sealed.",
            frames_in_words(at.size),
            at.queue,
            at.mtu
        ));
    }
    Ok(())
}

/// Measures a point.
fn measure(
    bench: &Bench<'_>,
    tunnel: &dyn Tunnel,
    running: &mut Running,
    point: Point,
) -> Result<Values> {
    let Point { mtu, queue, size } = point;
    for host in [&running.hosts.a, &running.hosts.b] {
        let words = format!("mtu {mtu} txqueuelen {queue}");
        set_link(host, tunnel.name(), &words)?;
        frames(host, tunnel.name(), size)?;
    }
    let options = TcpOptions {
        warmup: WARMUP,
        duration: bench.time().mul_f64(0.5),
        ..TcpOptions::default()
    };
    let ends = tunnel.ends(&running.hosts);
    let loaded = loaded_latency(&ends, &options, paced, PACE, bench.interrupt)?;
    running.check_alive()?;
    let answers = loaded.latency;
    let ms = |us: f64| (answers.received > 0).then_some(us / 1e3);
    Ok([
        Some(loaded.gbit_per_second * 1e3),
        ms(answers.p50_us),
        ms(answers.p99_us),
        Some(100.0 * f64::from(answers.received) / f64::from(answers.sent.max(1))),
    ])
}

/// Throughput over round trip; none where datagrams are lost rather than late.
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
