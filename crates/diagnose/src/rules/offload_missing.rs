//! Offloads that merge, segment or checksum packets are off, so every packet passes the kernel by
//! itself, and the processor is the limit.

use seikan_observe::path::LinkFacts;

use super::calls::per_packet;
use super::prelude::*;
use super::scheduling::limited_by_work;

/// Features by the kernel's names, and by the names for `ethtool -K`; on by default if the driver has them.
const FEATURES: &[(&str, &str, Direction)] = &[
    ("rx-gro", "gro", Direction::In),
    ("tx-generic-segmentation", "gso", Direction::Out),
    ("tx-tcp-segmentation", "tso", Direction::Out),
    ("tx-checksum-ip-generic", "tx", Direction::Out),
    ("tx-checksum-ipv4", "tx", Direction::Out),
    ("tx-udp-segmentation", "tx-udp-segmentation", Direction::Out),
];
/// Ratio of packet length to MTU above which packets are merged: no offload is missing.
const MERGED: f64 = 1.1;
/// Ratio below which packets cannot be merged.
const FULL_SIZE: f64 = 0.5;
/// Ratio of received to sent bytes below which packets are acknowledgements: for 1,400 bytes, 100
/// come back for every other packet.
const RETURNING: f64 = 0.1;
/// Smallest relevant limit of the processor.
const LIMITED: f64 = 0.1;
/// Share of one processor's time in softirqs from which it has little left, and from which it is full.
const SOFTIRQ: Ramp = Ramp::new(0.5, 0.9);
/// Share of busy time of all processors together from which they have little time left, and none.
const MACHINE: Ramp = Ramp::new(0.8, 0.97);
/// Kernel share of the busy time (system and softirq) from which its work per packet matters; a
/// program limited by its own work has less.
const KERNEL: f64 = 0.4;
/// Number of figures by counted calls: the other figures are needed, too.
const COUNTED: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    In,
    Out,
}

pub(super) const SPEC: Spec = Spec::fault(
    Cause::OffloadMissing,
    PathStep::OuterLink,
    "Packets pass the kernel one by one, because offloads that merge or segment them are off.",
    evaluate,
)
.effects(effects::PACKETS)
.counted(
    Source::Cpus,
    &[metric::SOFTNET_PROCESSED],
    Per::Byte,
    4.0 / FULL_PACKET,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    if evidence
        .map
        .links
        .iter()
        .all(|link| link.features.is_empty())
    {
        return Err("the offloads of the interfaces are not readable".into());
    }
    let links = evidence.map.links.iter();
    let mut missing: Vec<(&LinkFacts, &str, f64)> =
        links.flat_map(|link| missing(evidence, link)).collect();
    missing.dedup_by_key(|(link, word, _)| (link.name.clone(), *word));
    let fact = Fact::new(
        "offloads that are off but would help",
        missing.len() as f64,
        "0",
        "ethtool features",
    );
    if missing.is_empty() {
        return fact.excludes();
    }
    if evidence.busy().is_none() && evidence.idle().is_empty() {
        return Err("the load of the processors is not readable".into());
    }
    let (limited, busy) = limited(evidence);
    if limited < LIMITED {
        return busy.excludes();
    }
    let kernel = kernel_share(evidence);
    let mut facts = vec![fact, busy]
        .and(
            "share of the busy time in the kernel",
            kernel,
            "below 0.4, if the program's own work were the limit",
            "/proc/stat system and softirq",
        )
        .and(
            format!("mean bytes per packet of {}", missing[0].0.name),
            missing[0].2,
            "several times the MTU with the offload",
            "rtnetlink bytes over packets",
        );
    facts.extend(counted(evidence, &missing));
    let many = (0.55 + 0.1 * missing.len() as f64).min(0.85);
    let in_kernel = kernel.map_or(0.7, |kernel| (kernel / KERNEL).min(1.0));
    Ok(Finding::new(
        many * limited * in_kernel,
        facts,
        remedies(evidence, &missing),
    ))
}

/// Returns the work that offloads would have saved, if its calls were counted: only for sending,
/// because merging has no such calls.
fn counted(evidence: &Evidence, missing: &[(&LinkFacts, &str, f64)]) -> Vec<Fact> {
    let facts = missing.iter().filter_map(|(link, word, _)| {
        let (name, function) = match *word {
            "tx" => ("packets checksummed in software", "skb_checksum_help"),
            "tso" | "tx-udp-segmentation" => ("packets segmented in software", "__skb_gso_segment"),
            _ => return None,
        };
        let name = format!("{name}, per packet of {}", link.name);
        let packets = evidence.link(&link.name, metric::TX_PACKETS);
        per_packet(evidence, name, &[function], packets, "0")
    });
    let mut facts: Vec<Fact> = facts.collect();
    facts.truncate(COUNTED);
    facts
}

/// Returns how far processors are the limit, by the program's work, one processor's softirqs or all
/// processors; with the figure.
fn limited(evidence: &Evidence) -> (f64, Fact) {
    let program = limited_by_work(evidence).unwrap_or(0.0);
    let cpus = evidence.map.host.cpus.iter();
    let softirq = cpus.filter_map(|cpu| evidence.cpu_share(*cpu, &[metric::SOFTIRQ_NS]));
    let softirq = softirq.fold(0.0, f64::max);
    let all = evidence.busy_share();
    let limited = [program, SOFTIRQ.at(softirq), MACHINE.at(all)];
    let fact = Fact::new(
        "share of the time in which the processors were busy",
        all,
        "below 0.8",
        "/proc/stat",
    );
    (limited.into_iter().fold(0.0, f64::max), fact)
}

/// Returns the offloads that are off at an interface, with the mean packet length in their direction.
fn missing<'a>(
    evidence: &Evidence,
    link: &'a LinkFacts,
) -> Vec<(&'a LinkFacts, &'static str, f64)> {
    // A tun device without headers for super-packets has a program without support: another cause.
    let tun = matches!(&*link.kind, "tun" | "tap");
    if tun && link.vnet_hdr != Some(true) {
        return Vec::new();
    }
    let outside = Some(&*link.name) == evidence.map.egress.as_deref();
    let datagrams = outside && !evidence.outer_tcp() && evidence.map.program.is_some();
    let returning = returning(evidence, link);
    let features = FEATURES.iter().filter_map(|(name, word, direction)| {
        // These offloads do not segment datagrams, which the program's own traffic consists of.
        // Acknowledgements are not merged, and merged packets break a program that reads a raw
        // socket.
        let useless = match *word {
            "gro" => returning || evidence.raw_sockets() > 0,
            "tso" | "gso" => datagrams,
            "tx-udp-segmentation" => !datagrams,
            _ => false,
        };
        if !can_turn(link, name, true) || useless {
            return None;
        }
        let mean = mean(evidence, link, *direction)?;
        let share = mean / f64::from(link.mtu.max(1));
        // Checksums cost per byte, at any packet size.
        let single = *word == "tx" || (FULL_SIZE..MERGED).contains(&share);
        single.then_some((link, *word, mean))
    });
    features.collect()
}

/// Whether an interface receives hardly more than acknowledgements of its sent packets.
fn returning(evidence: &Evidence, link: &LinkFacts) -> bool {
    let bytes = |name| evidence.link(&link.name, name);
    let both = bytes(metric::RX_BYTES).zip(bytes(metric::TX_BYTES));
    both.is_some_and(|(received, sent)| received < RETURNING * sent)
}

fn mean(evidence: &Evidence, link: &LinkFacts, direction: Direction) -> Option<f64> {
    let (bytes, packets) = match direction {
        Direction::In => (metric::RX_BYTES, metric::RX_PACKETS),
        Direction::Out => (metric::TX_BYTES, metric::TX_PACKETS),
    };
    let packets = evidence.link(&link.name, packets).filter(|n| *n > 0.0)?;
    Some(evidence.link(&link.name, bytes)? / packets)
}

/// Returns the kernel's share of the busy time of all processors.
fn kernel_share(evidence: &Evidence) -> Option<f64> {
    let sum = |name| evidence.all_cpus(name);
    let kernel = sum(metric::SYSTEM_NS)? + sum(metric::SOFTIRQ_NS).unwrap_or(0.0);
    let busy = kernel + sum(metric::USER_NS)?;
    (busy > 0.0).then(|| kernel / busy)
}

fn remedies(evidence: &Evidence, missing: &[(&LinkFacts, &str, f64)]) -> Vec<Remedy> {
    let mut actions = Vec::new();
    // Segmentation depends on checksums, which have to be on first.
    let (sums, others): (Vec<_>, Vec<_>) = missing.iter().partition(|(_, word, _)| *word == "tx");
    for (link, word, _) in sums.into_iter().chain(others) {
        actions.push(Action::Offload {
            link: link.name.clone(),
            feature: (*word).to_owned(),
            on: true,
        });
    }
    let mut remedies = vec![Remedy::here(
        "turn on these offloads",
        actions,
        "less work per byte, most of all with merging",
    )];
    let mut links = evidence.map.links.iter();
    let forwarding = links.find(|link| can_turn(link, "rx-udp-gro-forwarding", true));
    // The kernel merges forwarded datagrams of a tunnel only with this feature.
    if let Some(link) = forwarding.filter(|_| evidence.map.program.is_none()) {
        remedies.push(Remedy::here(
            "turn on merging of forwarded datagrams",
            vec![Action::Offload {
                link: link.name.clone(),
                feature: "rx-udp-gro-forwarding".into(),
                on: true,
            }],
            "less work per byte",
        ));
    }
    remedies.push(Remedy::ask(
        Location::Tunnel,
        "use a program that reads and writes merged packets (vnet_hdr, UDP_SEGMENT, UDP_GRO)",
        vec![],
        "several times the rate per processor",
    ));
    remedies
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;
    use seikan_observe::path::Transport;

    /// The outer interface receives packets of so many bytes without GRO.
    fn without_gro(mean: u64, idle_percent: u64) -> Evidence {
        let mut evidence = tunnel();
        let link = &mut evidence.map.links[1];
        link.features.insert("rx-gro".into(), false);
        link.features.insert("tx-tcp-segmentation".into(), false);
        link.changeable = vec!["rx-gro".into(), "tx-tcp-segmentation".into()];
        count(&mut evidence, egress(), metric::RX_PACKETS, 100_000);
        count(&mut evidence, egress(), metric::RX_BYTES, 100_000 * mean);
        count(&mut evidence, egress(), metric::TX_PACKETS, 100_000);
        count(&mut evidence, egress(), metric::TX_BYTES, 100_000 * mean);
        let time = |percent| percent * 100_000_000;
        for (name, percent) in [
            (metric::IDLE_NS, idle_percent),
            (metric::SOFTIRQ_NS, 100 - idle_percent),
            (metric::SYSTEM_NS, 0),
            (metric::USER_NS, 0),
        ] {
            count(&mut evidence, Subject::Cpu(0), name, time(percent));
        }
        evidence
    }

    #[test]
    fn merging_that_is_off_on_a_busy_host_is_it() {
        let finding = present(evaluate(&without_gro(1_450, 2)));
        assert!(finding.weight > 0.6);
        // TSO does not apply to datagrams.
        let commands = finding.remedies[0].commands.clone();
        assert_eq!(commands, ["ethtool -K eth0 gro on"]);
    }

    #[test]
    fn a_tunnel_over_tcp_misses_segmentation_as_well() {
        let mut evidence = without_gro(1_450, 2);
        evidence.map.sockets = vec![socket(3, Transport::Tcp)];
        let finding = present(evaluate(&evidence));
        assert_eq!(finding.remedies[0].commands.len(), 2);
    }

    #[test]
    fn segmentation_in_software_is_shown_if_it_was_counted() {
        let mut evidence = without_gro(1_450, 2);
        evidence.map.sockets = vec![socket(3, Transport::Tcp)];
        count(
            &mut evidence,
            Subject::Host,
            "call.__skb_gso_segment",
            20_000,
        );
        let facts = present(evaluate(&evidence)).facts;
        let cut = facts.iter().find(|fact| fact.name.contains("segmented"));
        assert_eq!(cut.map(|fact| fact.value), Some(0.2));
        assert!(cut.is_some_and(|fact| fact.source.contains("whole machine")));
    }

    #[test]
    fn acknowledgements_are_not_merged_anyway() {
        let mut evidence = without_gro(1_450, 2);
        // Half of the MTU, one for each twenty sent.
        count(&mut evidence, egress(), metric::RX_PACKETS, 10_000);
        count(&mut evidence, egress(), metric::RX_BYTES, 10_000 * 800);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn a_program_that_breaks_on_merged_packets_misses_no_merging() {
        let mut evidence = without_gro(1_450, 2);
        evidence.map.sockets = vec![socket(3, Transport::Raw)];
        assert!(absent(evaluate(&evidence)));
        evidence.map.sockets[0].vnet_hdr = Some(true);
        present(evaluate(&evidence));
    }

    #[test]
    fn on_an_idle_host_it_costs_nothing() {
        assert!(absent(evaluate(&without_gro(1_450, 80))));
    }

    #[test]
    fn packets_that_are_merged_already_miss_nothing() {
        assert!(absent(evaluate(&without_gro(9_000, 2))));
    }

    #[test]
    fn a_tun_device_without_support_of_its_program_is_another_cause() {
        let mut evidence = without_gro(1_450, 2);
        evidence.map.links[1].features.insert("rx-gro".into(), true);
        let tso = "tx-tcp-segmentation";
        let tun = &mut evidence.map.links[0];
        tun.features.insert(tso.into(), false);
        tun.changeable = vec![tso.into()];
        count(&mut evidence, inner(), metric::TX_PACKETS, 100_000);
        count(&mut evidence, inner(), metric::TX_BYTES, 140_000_000);
        assert!(absent(evaluate(&evidence)));
    }
}
