//! Packets are so small that the work per packet, which does not depend on size, is the limit.

use super::prelude::*;
use super::scheduling::limited_by_work;

/// Mean bytes per packet in the main direction below which the work per packet exceeds that per
/// byte: at 600, the same bytes need two and a half times the packets of an MTU of 1500.
const SMALL: f64 = 600.0;
/// Inner MTU below which packets are small for any application, bytes.
const SMALL_MTU: u32 = 1000;
/// Smallest relevant limit by the program's work.
const LIMITED: f64 = 0.1;
/// Busy share of all processors at which they are fully used, by any program: small packets cost every one.
const FULL: Ramp = Ramp::new(0.95, 0.99);
/// Packets per second below which a busy program has another reason.
const MANY: f64 = 1_000.0;
/// Largest overhead of a tunnel, bytes.
const OVERHEAD: u32 = 100;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::PacketsTooSmall,
    PathStep::InnerLink,
    "The packets in the tunnel are so small that the work per packet is the limit.",
    evaluate,
)
.effects(effects::PACKETS)
.counted(
    Source::Inner,
    &[metric::TX_PACKETS, metric::RX_PACKETS],
    Per::Byte,
    1.5 / FULL_PACKET,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let mean = evidence
        .bytes_per_packet()
        .ok_or("the inner interface carried no packets")?;
    let link = evidence.map.inner_link();
    let mtu = link.map_or(1500, |link| link.mtu);
    // A super-packet counts as its segments.
    let mean = mean.min(f64::from(mtu));
    let fact = Fact::new(
        "mean bytes per packet in the tunnel",
        mean,
        "above 600, near the MTU in a transfer",
        "rtnetlink bytes over packets of the inner interface",
    );
    let small_mtu = mtu < SMALL_MTU;
    if mean
        >= if small_mtu {
            f64::from(SMALL_MTU)
        } else {
            SMALL
        }
    {
        return fact.excludes();
    }
    let (busiest, by_work) = evidence
        .busy()
        .zip(limited_by_work(evidence))
        .ok_or("the load of the processors is not readable")?;
    let limited = by_work.max(if small_mtu {
        FULL.at(evidence.busy_share())
    } else {
        0.0
    });
    let busy = Fact::new(
        "share of the time in which the busiest thread ran or waited for a processor",
        busiest,
        "below 0.7",
        "schedstat; /proc/stat",
    );
    let per_second = evidence.packets();
    if limited < LIMITED || per_second < MANY {
        return busy.excludes();
    }
    // Share of the throughput that small packets cost for the same work.
    let lost = 1.0 - mean / 1400.0;
    let facts = vec![fact, busy]
        .and(
            "packets per second",
            per_second,
            "fewer and larger",
            "rtnetlink packets of the inner interface",
        )
        .and(
            "MTU of the inner interface, bytes",
            f64::from(mtu),
            "1300 or more",
            "rtnetlink",
        );
    Ok(Finding::new(
        (lost * 1.2).min(0.95) * limited,
        facts,
        remedies(evidence, small_mtu),
    ))
}

fn remedies(evidence: &Evidence, small_mtu: bool) -> Vec<Remedy> {
    let mut remedies = Vec::new();
    let links = evidence.map.inner_link().zip(evidence.map.egress_link());
    if let Some((inner, egress)) = links.filter(|_| small_mtu) {
        let larger = egress.mtu.saturating_sub(OVERHEAD);
        if larger > inner.mtu {
            remedies.push(Remedy::here(
                "enlarge the MTU of the tunnel's interface",
                vec![Action::Mtu {
                    link: inner.name.clone(),
                    bytes: larger,
                }],
                format!(
                    "a factor of up to {:.1}, if the far end has the same",
                    f64::from(larger) / f64::from(inner.mtu.max(1))
                ),
            ));
            remedies.push(Remedy::ask(
                Location::FarEnd,
                format!("set the MTU of the tunnel's interface there to {larger}"),
                vec![],
                "both ends need it: the smaller MTU limits the segments",
            ));
        }
    }
    if small_mtu {
        return remedies;
    }
    let segment = evidence
        .main_flow()
        .and_then(|flow| evidence.tcp_mean(flow, metric::TCP_MSS));
    if segment.is_some_and(|segment| segment < SMALL) {
        remedies.push(Remedy::ask(
            Location::FarEnd,
            "allow larger segments: look for a rule that clamps the segment size (MSS), or a small MTU on the path",
            vec!["nft list ruleset | grep maxseg".into()],
            "in proportion to the segment size",
        ));
    }
    remedies.push(Remedy::ask(
        Location::Application,
        "send larger messages, or several at once (no TCP_NODELAY with small writes; UDP_SEGMENT)",
        vec![],
        "in proportion to the packet size",
    ));
    remedies
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn packets(mean: u64, mtu: u32, busy_percent: u64) -> Evidence {
        let mut evidence = tunnel();
        evidence.map.links[0].mtu = mtu;
        count(&mut evidence, inner(), metric::TX_PACKETS, 500_000);
        count(&mut evidence, inner(), metric::TX_BYTES, 500_000 * mean);
        let thread = Subject::Thread { pid: 100, tid: 101 };
        let run = busy_percent * 100_000_000;
        count(&mut evidence, thread, metric::RUN_NS, run);
        evidence
    }

    #[test]
    fn small_packets_and_a_full_thread_are_it() {
        assert_eq!(present(evaluate(&packets(100, 1500, 98))).weight, 0.95);
    }

    #[test]
    fn a_small_mtu_can_be_raised() {
        let finding = present(evaluate(&packets(560, 576, 98)));
        assert_eq!(
            finding.remedies[0].commands,
            ["ip link set dev tun0 mtu 1400"]
        );
    }

    #[test]
    fn a_small_mtu_costs_everybody_where_processors_are_full() {
        // The program gets a third of its demand.
        let contended = |mtu| {
            let mut evidence = packets(560, mtu, 0);
            thread(&mut evidence, 100, 0.3, 0.6);
            processor(&mut evidence, 0, 1.0, 0.0);
            processor(&mut evidence, 1, 1.0, 0.0);
            evidence
        };
        let verdict = crate::diagnose(&contended(576));
        assert_eq!(verdict.cause, Cause::PacketsTooSmall);
        assert_eq!(verdict.chain, [verdict.cause, Cause::CpuContention]);
        // Small messages of an application do not explain a lack of processors.
        let verdict = crate::diagnose(&contended(1500));
        assert_eq!(verdict.chain, [Cause::CpuContention]);
    }

    #[test]
    fn full_packets_and_a_full_thread_are_not() {
        assert!(absent(evaluate(&packets(1_450, 1500, 98))));
    }

    #[test]
    fn small_packets_and_an_idle_thread_are_not() {
        assert!(absent(evaluate(&packets(100, 1500, 20))));
    }
}
