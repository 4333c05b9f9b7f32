//! Delay as N frames for each crossing grow, which the source of [`batch`](super::batch) only
//! supposes: the round-trip time that TCP measures, and the answers to a flow of UDP beside it.

use std::time::Duration;

use seikan_load::{Direction, Ends, LatencyOptions, TcpOptions, loaded_latency, paced};

use super::crossings::Crossings;
use super::forwarding::{Forwarding, MTU, PerCall, Setting};
use super::pages::CONNECTIONS;
use super::{Bench, Curve, Curves, Experiment, Figures, Grid, Row, titled};
use crate::cleanup::private_directory;
use crate::error::Result;

/// Numbers of frames for each crossing. The setup without the program is measured as well.
const SIZES: [u32; 5] = [1, 2, 4, 16, 64];
/// Numbers of frames that are measured over rate-limited links.
const LIMITED: [u32; 3] = [1, 4, 64];
const BARE: &str = "no program";
/// Interval between datagrams of the flow that waits for answers.
const PACE: Duration = Duration::from_millis(10);
/// Share of a load's usual time that each measurement takes, because there are many.
const SHARE: f64 = 0.5;
/// Time for streams to find their rate.
const WARMUP: Duration = Duration::from_millis(500);
/// Quantities of a row: title and unit.
const QUANTITIES: [&str; 8] = [
    "throughput, Mbit/s",
    "round trip of TCP, ms",
    "UDP, half answered within, ms",
    "UDP, 99 % answered within, ms",
    "UDP without load, half answered within, ms",
    "system calls per MB, both ends",
    "frames in a read",
    "frames in a write",
];
/// Indices in [`QUANTITIES`] of the lines that are drawn.
const DRAWN: [usize; 4] = [1, 2, 3, 4];
/// A value for each of the [`QUANTITIES`]; `None` if there is none.
type Values = [Option<f64>; QUANTITIES.len()];

fn sizes(rate: Option<u64>) -> &'static [u32] {
    match rate {
        Some(_) => &LIMITED,
        None => &SIZES,
    }
}

/// Measures delays over the number of frames for each crossing, on links of this rate in bit/s.
pub(super) fn rows(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Experiment) -> Result<()> {
    let sizes = sizes(rate);
    let rows: Vec<Option<u32>> = [None]
        .into_iter()
        .chain(sizes.iter().copied().map(Some))
        .collect();
    let name = |size: &Option<u32>| size.map_or_else(|| BARE.to_owned(), |size| size.to_string());
    let measured = bench.rounds(&rows, name, found, |bench, size| {
        let setting = Setting {
            per_call: size.map(PerCall::both),
            rate,
            mtu: MTU,
        };
        measure(bench, setting)
    })?;
    let columns = QUANTITIES.iter().enumerate().map(|(index, title)| {
        let rows = measured.rows(|size| Row::new(name(size), None), |values| values[index]);
        Figures::new(*title, "", rows)
    });
    let columns: Vec<Figures> = columns.collect();
    found.curves.push(curves(&columns, sizes, rate));
    found.grids.push(Grid {
        title: titled(
            &format!("delay through S1 beside {CONNECTIONS} connections"),
            rate,
        ),
        rows: "frames for each crossing, at most".to_owned(),
        columns,
    });
    Ok(())
}

fn measure(bench: &Bench<'_>, setting: Setting) -> Result<Values> {
    let dir = private_directory()?;
    let mut site = Forwarding::start(setting, dir.path(), bench)?;
    let time = bench.time().mul_f64(SHARE);
    let options = TcpOptions {
        streams: CONNECTIONS as usize,
        // The direction of the pages: from S2.
        direction: Direction::Reverse,
        warmup: WARMUP,
        duration: time,
        ..TcpOptions::default()
    };
    let idle = LatencyOptions {
        count: (time.as_secs_f64() / 3.0 / PACE.as_secs_f64()).ceil() as u32,
        interval: PACE,
        timeout: time.div_f64(4.0),
        ..LatencyOptions::default()
    };
    let (idle, _) = site.counting(|ends| Ok(paced(ends, &idle, bench.interrupt)?))?;
    let loaded = |ends: &Ends<'_>| {
        Ok(loaded_latency(
            ends,
            &options,
            paced,
            PACE,
            bench.interrupt,
        )?)
    };
    let (loaded, crossings) = site.counting(loaded)?;
    let ms = |received: u32, us: f64| (received > 0).then_some(us / 1e3);
    let answers = loaded.latency;
    let crossed = |of: fn(&Crossings) -> f64| crossings.as_ref().map(of);
    Ok([
        Some(loaded.gbit_per_second * 1e3),
        loaded.round_trip_us.map(|us| us / 1e3),
        ms(answers.received, answers.p50_us),
        ms(answers.received, answers.p99_us),
        ms(idle.received, idle.p50_us),
        crossed(|c| c.calls_per_megabyte),
        crossed(|c| c.frames[0]),
        crossed(|c| c.frames[1]),
    ])
}

/// Delays over the number of frames.
fn curves(columns: &[Figures], sizes: &[u32], rate: Option<u64>) -> Curves {
    let curves = DRAWN.map(|index| {
        let column = &columns[index];
        let at = |size: &u32| Some([f64::from(*size), column.median(&size.to_string())?]);
        let name = column.title.trim_end_matches(", ms");
        Curve::new(name, sizes.iter().filter_map(at))
    });
    let name = rate.map_or("batch-delay", |_| "batch-delay-limited");
    let title = titled("delay through S1 under load", rate);
    let axes = ["frames for each crossing, at most", "ms"];
    Curves::new(name, title, axes, curves).logarithmic([true; 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::{Source, testing};

    fn of(bench: &Bench<'_>, per_call: Option<PerCall>) -> Result<Values> {
        let setting = Setting {
            per_call,
            rate: None,
            mtu: MTU,
        };
        measure(bench, setting)
    }

    #[test]
    fn many_frames_for_each_crossing_take_fewer_system_calls() {
        testing::short(Source::Batch, |bench| {
            let [one, many] = [1, 64].map(|size| of(bench, Some(PerCall::both(size))));
            // On a busy machine no answer may arrive in time, and then there is no delay.
            let counted = |values: Values| [5, 6, 7].map(|index| values[index].expect("counted"));
            let (one, many) = (counted(one?), counted(many?));
            let [calls, reads, writes] = one;
            assert!(reads <= 1.0 && writes <= 1.0, "{one:?}");
            assert!(many[1] > 2.0 && many[2] > 2.0, "{many:?}");
            // Each frame is read, sent, received behind its length and written.
            assert!(calls > 4.0 * 1e6 / 1_500.0, "{one:?}");
            assert!(many[0] < calls / 2.0, "{one:?} {many:?}");
            Ok(())
        });
    }

    #[test]
    fn both_sides_of_the_device_are_chosen_apart() {
        testing::short(Source::Batch, |bench| {
            for (read, write) in [(16, 1), (1, 16)] {
                let measured = of(bench, Some(PerCall { read, write }))?;
                let frames = [6, 7].map(|index| measured[index].expect("counted"));
                for (most, frames) in [read, write].into_iter().zip(frames) {
                    let several = most > 1;
                    assert!((frames > 1.0) == several, "{read} {write}: {frames}");
                }
            }
            Ok(())
        });
    }

    #[test]
    fn without_the_program_there_is_delay_and_nothing_to_count() {
        testing::short(Source::Batch, |bench| {
            let measured = of(bench, None)?;
            assert_eq!(measured[5..], [None; 3]);
            assert!(measured[..5].iter().all(Option::is_some), "{measured:?}");
            Ok(())
        });
    }
}
