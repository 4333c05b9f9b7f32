//! Whether a limited link carries its rate and no more: TCP and UDP without a tunnel.

use std::time::Duration;

use seikan_load::{TcpOptions, UdpOptions, tcp_bulk, udp_flood};

use super::{Bench, Experiment, Figures, GIGABIT, Row};
use crate::error::Result;

const TCP: &str = "TCP, 1 stream";
const UDP: &str = "UDP, datagrams of 1,472 bytes";
const LARGE_UDP: &str = "UDP, datagrams of 64 KB in fragments";
const LIMIT: &str = "the limit";
/// Payload of a datagram that fills a packet of 1,500 bytes, and of the largest datagram that fills
/// whole fragments of 1,480 bytes.
const DATAGRAM: usize = 1_472;
const LARGE_DATAGRAM: usize = 44 * 1_480 - 8;
/// Share of a load's usual time that each measurement takes.
const SHARE: f64 = 1.0 / 3.0;
/// Time for a stream to find its rate.
const WARMUP: Duration = Duration::from_millis(300);

/// Measures the payload that a link of this rate carries. The limit itself counts frames with their
/// Ethernet header of 14 bytes.
pub(super) fn check(bench: &mut Bench<'_>, rate: u64, found: &mut Experiment) -> Result<()> {
    let names = [TCP, UDP, LARGE_UDP];
    let measured = bench.rounds(
        &names,
        |name| *name,
        found,
        |bench, name| {
            let running = bench.start("raw", Some(rate))?;
            let ends = running.ends();
            let duration = bench.time().mul_f64(SHARE);
            let report = if *name == TCP {
                let options = TcpOptions {
                    warmup: WARMUP,
                    duration,
                    ..TcpOptions::default()
                };
                tcp_bulk(&ends, &options, bench.interrupt)?.gbit_per_second
            } else {
                let options = UdpOptions {
                    datagram: if *name == UDP {
                        DATAGRAM
                    } else {
                        LARGE_DATAGRAM
                    },
                    warmup: WARMUP,
                    duration,
                    ..UdpOptions::default()
                };
                udp_flood(&ends, &options, bench.interrupt)?.gbit_per_second
            };
            Ok(report * 1e3)
        },
    )?;
    let limit = vec![Some(rate as f64 / 1e6); bench.options.rounds as usize];
    let rows = measured.rows(|name| Row::new(*name, None), |rate| Some(*rate));
    found.figures.push(Figures::new(
        format!("payload over a link of {} Gbit/s", rate / GIGABIT),
        "Mbit/s",
        [Row::new(LIMIT, None).with(limit)].into_iter().chain(rows),
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::{Source, testing};

    /// Payload is less than frames, however busy the machine is.
    #[test]
    fn a_limited_link_carries_no_more_than_its_rate() {
        const RATE: u64 = GIGABIT / 10;
        testing::short(Source::Batch, |bench| {
            let mut found = Experiment::default();
            check(bench, RATE, &mut found)?;
            assert!(found.problems.is_empty(), "{:?}", found.problems);
            let [limit, rows @ ..] = &found.figures[0].rows[..] else {
                panic!("no rows");
            };
            assert_eq!((limit.rounds[0], rows.len()), (Some(100.0), 3));
            for row in rows {
                let rate = row.rounds[0].expect("measured");
                assert!(rate > 0.0 && rate < 100.0, "{}: {rate}", row.name);
            }
            Ok(())
        });
    }
}
