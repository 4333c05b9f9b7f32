//! Packets of one flow on several processors arrive out of order, which the source names as the
//! reason why a kernel keeps them on one.
//!
//! The naive encapsulator runs at two hosts, without a gateway. Receive packet steering (RPS)
//! chooses a processor by the addresses and ports of a packet, so the packets of a connection stay
//! on one. Then the encapsulator sends each packet from the next one of many ports: the processor
//! changes from packet to packet, as if each interrupt went to any of them. That moves packets by a
//! few places only, which TCP of today tolerates (RACK, RFC 8985). So a last row spreads packets
//! over paths of different length, and the doctor looks at it.

use std::time::Duration;

use seikan_diagnose::Cause;
use seikan_load::counters::{retransmitted_segments, segments_out_of_order};
use seikan_load::{LiveKind, LiveOptions};
use seikan_sys::ethtool::Feature;

use super::look::Looker;
use super::{Bench, Experiment, Figures, Row, plain};
use crate::error::Result;
use crate::load::live;
use crate::site::{Link, LinkKind, all_cpus};
use crate::tunnel::Running;
use crate::tunnel::middle::{NAIVE_HOSTS, NAIVE_SPREAD};
use crate::wire::{Faults, WireFaults};

/// Rows.
const BY_FLOW: &str = "one port: RPS keeps the flow on one processor";
const BY_TURNS: &str = "ports by turns: RPS spreads the flow";
const PATHS: &str = "one port, one packet in five over a longer path";
const ROWS: [&str; 3] = [BY_FLOW, BY_TURNS, PATHS];
/// Share of the packets that take the longer path, and how much longer it is.
const LONGER: f64 = 0.2;
const LONGER_US: u64 = 30_000;
/// Delay of the link, each way: without any, a connection loses no speed by a smaller window.
const DELAY_US: u64 = 5_000;
/// A rate that neither the encapsulator nor its queue limits, in Mbit/s.
const LOAD: LiveOptions = LiveOptions {
    kind: LiveKind::Tcp,
    streams: 1,
    rate: Some(100.0),
    size: 1_400,
    burst: None,
    reader_rate: None,
    receive_buffer: None,
};
/// Time for the connection to find its rate.
const WARMUP: Duration = Duration::from_secs(1);

/// Measures one connection with each way of sending, and lets the doctor diagnose the second way.
pub(super) fn reordering(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    let measured = bench.rounds(
        &ROWS,
        |name| *name,
        found,
        |bench, name| {
            let mut running = start(bench, name)?;
            let hosts = &running.hosts;
            let counts = || -> Result<[u64; 2]> {
                let late = hosts.b.run(segments_out_of_order)?;
                Ok([late, hosts.a.run(retransmitted_segments)?])
            };
            let (rate, grown) = live(&running.ends(), &LOAD, bench.interrupt, |meter| {
                bench.interrupt.sleep(WARMUP)?;
                let before = counts()?;
                let rate = meter.rate_over(bench.time(), bench.interrupt)?;
                let after = counts()?;
                Ok((rate, [0, 1].map(|i| after[i].saturating_sub(before[i]))))
            })?;
            running.check_alive()?;
            let gbit = rate * 1e-3 * bench.options.seconds;
            let [late, again] = grown.map(|count| count as f64 / gbit.max(1e-6));
            Ok([rate, late, again])
        },
    )?;
    let quantity = |title: &str, unit: &str, index: usize| {
        let rows = measured.rows(|name| Row::new(*name, None), |values| Some(values[index]));
        Figures::new(
            format!("naive, host to host, 1 connection: {title}"),
            unit,
            rows,
        )
    };
    let rate = quantity("throughput", "Mbit/s", 0);
    let late = quantity("segments that arrive out of order", "per Gbit", 1);
    let again = quantity("segments sent again", "per Gbit", 2);
    found.claims.extend([
        late.claim_of_counts(BY_TURNS, BY_FLOW),
        late.claim_of_counts(PATHS, BY_FLOW),
        rate.claim(BY_FLOW, PATHS),
    ]);
    let expected = rate.median(BY_FLOW);
    found.figures.extend([rate, late, again]);

    bench.step("the doctor on a connection out of order")?;
    let running = start(bench, PATHS)?;
    let looker = Looker {
        expected,
        ..Looker::at(PATHS, &running, &running.hosts.a, Cause::Reordering)
    };
    looker.note(&LOAD, &running, bench.desk, found)
}

/// Starts a row's encapsulator between two hosts; RPS steers the packets that host B receives.
fn start(bench: &Bench<'_>, name: &str) -> Result<Running> {
    let tunnel = plain(if name == BY_TURNS {
        NAIVE_SPREAD
    } else {
        NAIVE_HOSTS
    })?;
    let delay = Faults {
        delay_us: DELAY_US,
        ..Faults::default()
    };
    let spread = Faults {
        reorder: if name == PATHS { LONGER } else { 0.0 },
        reorder_us: LONGER_US,
        ..delay
    };
    let link = Link {
        kind: LinkKind::Wire(WireFaults {
            a_to_b: spread,
            b_to_a: delay,
            ..WireFaults::default()
        }),
        ..bench.link(None)
    };
    let running = bench.start_over(&tunnel, link)?;
    let host = &running.hosts.b;
    // Packets are steered as they arrive.
    host.set_features(&host.device, &[(Feature::Gro, false)])?;
    host.steer(&host.device, &all_cpus())?;
    Ok(running)
}
