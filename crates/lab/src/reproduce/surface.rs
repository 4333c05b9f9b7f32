//! What the source of [`batch`](super::batch) leaves open: how large should the program's buffer be, how long the queue of the
//! interface and how large its MTU? Bulk wants all of them large, who waits for an answer wants short queues.

use std::time::Duration;

use super::batch::{ONE, frames, frames_in_words, tunnel_of};
use super::{Bench, Found, Layer, Surface};
use crate::error::Result;
use crate::link::Link;
use crate::load::{TcpOptions, loaded_latency, paced};
use crate::scenario::tool;
use crate::tunnel::{self, inner_device};

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
/// What each point gives: title and unit.
const QUANTITIES: [(&str, &str); 3] = [
    ("throughput", "Mbit/s"),
    ("half of the answers within", "ms"),
    ("99 of 100 answers within", "ms"),
];

/// A point of the surface.
#[derive(Clone, Copy)]
struct Point {
    mtu: u32,
    queue: u32,
    size: u32,
}

/// Throughput of bulk TCP and, at the same time, round trips of a flow of small datagrams, over frames, queue and MTU.
pub(super) fn surface(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let tunnel = tunnel_of(ONE)?;
    let mut running = tunnel::start(tunnel.as_ref(), Link::default(), bench.interrupt)?;
    let mut best: Option<(f64, [f64; 2], Point)> = None;
    for mtu in MTUS {
        let mut layers = QUANTITIES.map(|(title, unit)| Layer {
            title: title.to_owned(),
            unit: unit.to_owned(),
            values: Vec::new(),
        });
        let mut mark: Option<(f64, [usize; 2])> = None;
        for (row, queue) in QUEUES.into_iter().enumerate() {
            layers.iter_mut().for_each(|l| l.values.push(Vec::new()));
            for (column, size) in SIZES.into_iter().enumerate() {
                let point = Point { mtu, queue, size };
                let words = frames_in_words(size);
                bench.step(format!("MTU {mtu}, {words}, queue of {queue}"))?;
                for host in [&running.hosts.a, &running.hosts.b] {
                    let device = inner_device(tunnel.name(), host);
                    let link = format!("ip link set dev {device} mtu {mtu} txqueuelen {queue}");
                    tool(host, &link)?;
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
                let rate = loaded.gbit_per_second * 1e3;
                let answers = loaded.latency;
                let ms = |us: f64| (answers.received > 0).then_some(us / 1e3);
                let half = ms(answers.p50_us);
                for (layer, value) in layers
                    .iter_mut()
                    .zip([Some(rate), half, ms(answers.p99_us)])
                {
                    if let Some(row) = layer.values.last_mut() {
                        row.push(value);
                    }
                }
                // Without an answer there is no power either.
                let power = half.map_or(0.0, |half| rate / half.max(1e-3));
                if mark.is_none_or(|(most, _)| power > most) {
                    mark = Some((power, [column, row]));
                }
                if best.is_none_or(|(most, ..)| power > most) {
                    best = Some((power, [rate, half.unwrap_or(0.0)], point));
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
    if let Some((_, [rate, half], at)) = best {
        found.notes.push(format!(
            "Throughput over round trip (Kleinrock's power; the best of each MTU is marked) is largest with {}, a queue of {} and an MTU of {}: {rate:.0} Mbit/s, \
             half of the answers within {half:.2} ms. Its own defaults are 64 frames, as many as fit in a super-packet, and a queue of 500: packets do not wait for \
             a batch to fill, they gather while the one before is sealed.",
            frames_in_words(at.size),
            at.queue,
            at.mtu
        ));
    }
    Ok(())
}
