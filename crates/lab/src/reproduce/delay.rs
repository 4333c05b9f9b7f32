//! Delay as N frames for each crossing grow, which the source of [`batch`](super::batch) only
//! supposes: the round-trip time that TCP measures, and the answers to a flow of UDP beside it.

use std::time::Duration;

use seikan_load::{Direction, LatencyOptions, TcpOptions, loaded_latency, paced};

use super::crossings::Crossings;
use super::figures::interleaved;
use super::forwarding::{Forwarding, MTU, PerCall, Setting};
use super::pages::CONNECTIONS;
use super::{Bench, Curve, Curves, Figures, Found, Grid, Row, titled};
use crate::cleanup::private_directory;
use crate::error::Result;

/// Frames for each crossing; none is without the program.
const SIZES: [u32; 5] = [1, 2, 4, 16, 64];
/// Those that are measured over links with a limit.
const LIMITED: [u32; 3] = [1, 4, 64];
const BARE: &str = "no program";
/// A datagram of the flow that waits for answers is sent so often.
const PACE: Duration = Duration::from_millis(10);
/// Of the time of a load: there are many.
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
/// See [`QUANTITIES`].
type Values = [Option<f64>; QUANTITIES.len()];

fn sizes(rate: Option<u64>) -> &'static [u32] {
    match rate {
        Some(_) => &LIMITED,
        None => &SIZES,
    }
}

/// Number of rows over links of this rate.
pub(super) fn row_count(rate: Option<u64>) -> usize {
    sizes(rate).len() + 1
}

/// Delay over frames for each crossing, over links of this rate.
pub(super) fn rows(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Found) -> Result<()> {
    let sizes = sizes(rate);
    let mut names = vec![BARE.to_owned()];
    names.extend(sizes.iter().map(u32::to_string));
    let words: Vec<&str> = names.iter().map(String::as_str).collect();
    let measured = interleaved(bench, &words, &mut found.problems, &mut |bench, name| {
        let size = name.parse().ok();
        let setting = Setting {
            per_call: size.map(|size| PerCall {
                read: size,
                write: size,
            }),
            rate,
            mtu: MTU,
        };
        measure(bench, setting)
    })?;
    let columns: Vec<Figures> = QUANTITIES
        .iter()
        .enumerate()
        .map(|(index, title)| Figures {
            title: (*title).to_owned(),
            unit: String::new(),
            base: BARE.to_owned(),
            rows: names
                .iter()
                .zip(&measured)
                .map(|(name, rounds)| Row {
                    rounds: rounds
                        .iter()
                        .map(|values| values.as_ref()?[index])
                        .collect(),
                    ..Row::new(name.clone(), None)
                })
                .collect(),
        })
        .collect();
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
        // As the pages: from S2.
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
    let idle = site
        .counting(|ends| Ok(paced(ends, &idle, bench.interrupt)?))?
        .0;
    let (loaded, crossings) = site.counting(|ends| {
        Ok(loaded_latency(
            ends,
            &options,
            paced,
            PACE,
            bench.interrupt,
        )?)
    })?;
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
        let at = |size: &u32| {
            let row = column.row(&size.to_string())?;
            Some([f64::from(*size), row.spread()?.median])
        };
        Curve {
            name: column.title.trim_end_matches(", ms").to_owned(),
            own: false,
            published: false,
            points: sizes.iter().filter_map(at).collect(),
        }
    });
    Curves {
        name: match rate {
            Some(_) => "batch-delay-limited".to_owned(),
            None => "batch-delay".to_owned(),
        },
        title: titled("delay through S1 under load", rate),
        x: "frames for each crossing, at most".to_owned(),
        y: "ms".to_owned(),
        logarithmic: [true, true],
        curves: curves.into(),
    }
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
            let [one, many] = [1, 64].map(|size| {
                let per_call = PerCall {
                    read: size,
                    write: size,
                };
                of(bench, Some(per_call))
            });
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
