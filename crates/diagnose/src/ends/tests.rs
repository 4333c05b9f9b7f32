//! Verdicts about two hosts made by hand.

use seikan_observe::{Subject, metric};

use super::*;
use crate::losses::made::{flow, receiver, sender};
use crate::rules::testing::*;

/// Sends 10,000 segments, of which so many are lost outside of its host.
fn losing(lost: u64) -> Evidence {
    sender(10_000, lost, 0)
}

/// Receives 10,000 segments after its socket dropped so many.
fn dropping(dropped: u64) -> Evidence {
    let mut evidence = receiver(10_000, 10 * dropped, 0);
    evidence.map.sockets[0].receive_buffer = 8192;
    count(&mut evidence, Subject::Udp(1), metric::UDP_DROPS, dropped);
    count(&mut evidence, Subject::Host, "Udp.InDatagrams", 10_000);
    evidence
}

/// Sets packets of 1,500 bytes over the outer interface in ten seconds.
fn outside(evidence: &mut Evidence, packets: &'static str, bytes: &'static str, number: u64) {
    count(evidence, egress(), packets, number);
    count(evidence, egress(), bytes, 1500 * number);
}

fn far(verdict: &Verdict) -> &Far {
    verdict.far.as_ref().expect("the far end")
}

#[test]
fn loss_here_is_the_far_ends_full_buffer() {
    let (near, there) = (losing(300), dropping(300));
    assert_eq!(diagnose(&near).cause, Cause::PathLoss);
    let verdict = both(&near, &there);
    assert_eq!(verdict.chain, [Cause::UdpReceiveBuffer, Cause::PathLoss]);
    assert_eq!(far(&verdict).at, Some(End::FarEnd));
    assert_eq!(verdict.level, Level::Supported);
    assert!(verdict.evidence[0].name.starts_with("far end: "));
    let locations = verdict.remedies.iter().map(|remedy| remedy.location);
    assert!(locations.eq([Location::FarEnd]), "{:?}", verdict.remedies);
}

#[test]
fn remedies_of_the_far_end_are_not_applied_here() {
    let mut there = receiver(10_000, 0, 0);
    there
        .map
        .host
        .sysctls
        .insert("net.core.netdev_max_backlog".into(), "10".into());
    let program = there.map.program.as_mut().expect("program");
    program.group = Some("/sys/fs/cgroup/vpn".into());
    thread(&mut there, 100, 0.5, 0.48);
    let group = || Subject::Group("/sys/fs/cgroup/vpn".into());
    count(&mut there, group(), metric::GROUP_PERIODS, 100);
    count(&mut there, group(), metric::GROUP_THROTTLED, 99);
    count(&mut there, group(), metric::GROUP_THROTTLED_US, 4_800_000);
    let verdict = both(&losing(0), &there);
    assert_eq!(verdict.cause, Cause::CpuQuota);
    assert!(
        verdict
            .remedies
            .iter()
            .all(|remedy| remedy.actions.is_empty())
    );
    assert_eq!(verdict.remedies[0].location, Location::FarEnd);
    assert_eq!(far(&verdict).cause, Cause::CpuQuota);
}

#[test]
fn loss_that_neither_end_explains_is_on_the_path() {
    let verdict = both(&losing(300), &receiver(10_000, 3_000, 0));
    assert_eq!(verdict.cause, Cause::PathLoss);
    assert_eq!(far(&verdict).at, Some(End::Between));
}

#[test]
fn counters_of_both_ends_prove_loss_of_datagrams_on_the_path() {
    let mut near = tunnel();
    count(&mut near, inner(), metric::TX_PACKETS, 10_000);
    count(&mut near, inner(), metric::TX_BYTES, 14_000_000);
    outside(&mut near, metric::TX_PACKETS, metric::TX_BYTES, 10_000);
    let mut there = tunnel();
    outside(&mut there, metric::RX_PACKETS, metric::RX_BYTES, 9_000);
    count(&mut there, inner(), metric::RX_PACKETS, 9_000);
    count(&mut there, inner(), metric::RX_BYTES, 12_600_000);
    assert_eq!(diagnose(&near).cause, Cause::Healthy);
    let verdict = both(&near, &there);
    assert_eq!(verdict.chain, [Cause::PathLoss]);
    let crossing = far(&verdict).crossing.expect("crossing");
    assert!((crossing.lost() - 0.1).abs() < 1e-9 && crossing.packets);
    assert!((verdict.throughput - 12_600_000.0 * 0.8).abs() < 1.0);
}

#[test]
fn counters_of_both_ends_exclude_loss_on_the_path() {
    let mut near = losing(1_000);
    outside(&mut near, metric::TX_PACKETS, metric::TX_BYTES, 10_000);
    let mut there = receiver(10_000, 0, 0);
    outside(&mut there, metric::RX_PACKETS, metric::RX_BYTES, 10_000);
    // The packets are lost nevertheless, at the receiving host.
    let verdict = both(&near, &there);
    assert_eq!(verdict.cause, Cause::PathLoss);
    assert_eq!(far(&verdict).at, Some(End::FarEnd));
    // A cause that shows there is the better explanation.
    let program = there.map.program.as_mut().expect("program");
    program.group = Some("/sys/fs/cgroup/vpn".into());
    let group = || Subject::Group("/sys/fs/cgroup/vpn".into());
    count(&mut there, group(), metric::GROUP_PERIODS, 100);
    count(&mut there, group(), metric::GROUP_THROTTLED, 40);
    count(&mut there, group(), metric::GROUP_THROTTLED_US, 4_800_000);
    let verdict = both(&near, &there);
    assert_eq!(verdict.cause, Cause::CpuQuota);
    let mut out = verdict.ruled_out.iter();
    let out = out.find(|out| out.cause == Cause::PathLoss);
    assert!(out.is_some_and(|out| out.fact.is_some()));
}

#[test]
fn loss_that_the_counters_are_too_coarse_for_stays_between() {
    let mut near = losing(100);
    outside(&mut near, metric::TX_PACKETS, metric::TX_BYTES, 10_000);
    let mut there = receiver(10_000, 0, 0);
    outside(&mut there, metric::RX_PACKETS, metric::RX_BYTES, 9_900);
    let verdict = both(&near, &there);
    assert_eq!(verdict.cause, Cause::PathLoss);
    assert_eq!(far(&verdict).at, Some(End::Between));
}

#[test]
fn other_traffic_on_the_outer_interface_proves_nothing() {
    let mut near = losing(0);
    outside(&mut near, metric::TX_PACKETS, metric::TX_BYTES, 30_000);
    let mut there = receiver(10_000, 0, 0);
    outside(&mut there, metric::RX_PACKETS, metric::RX_BYTES, 10_000);
    let verdict = both(&near, &there);
    assert_eq!(
        (verdict.cause, far(&verdict).crossing),
        (Cause::Healthy, None)
    );
}

#[test]
fn a_window_that_is_closed_is_the_receivers() {
    let mut near = losing(0);
    count(&mut near, flow(), metric::TCP_RWND_LIMITED_US, 9_500_000);
    gauge(&mut near, flow(), metric::TCP_SND_WND, 65_536);
    let there = receiver(10_000, 0, 0);
    let verdict = both(&near, &there);
    assert_eq!(verdict.cause, Cause::TcpReceiveWindow);
    assert_eq!(far(&verdict).at, Some(End::FarEnd));
    let verdict = both(&there, &near);
    assert_eq!(verdict.cause, Cause::TcpReceiveWindow);
    assert_eq!(far(&verdict).at, Some(End::Here));
}

#[test]
fn a_cause_here_stays_here() {
    let mut near = losing(500);
    near.map.links[0].queue_length = 3;
    count(&mut near, inner(), metric::TX_DROPPED, 500);
    let verdict = both(&near, &receiver(10_000, 3_000, 0));
    assert_eq!(verdict.cause, Cause::TunQueueOverflow);
    assert_eq!(far(&verdict).at, Some(End::Here));
    assert!(!verdict.remedies[0].actions.is_empty());
}

#[test]
fn a_senders_queue_is_named_from_the_receiving_end() {
    let mut there = losing(500);
    there.map.links[0].queue_length = 3;
    count(&mut there, inner(), metric::TX_DROPPED, 500);
    let near = receiver(10_000, 3_000, 0);
    assert_eq!(diagnose(&near).cause, Cause::PathLoss);
    let verdict = both(&near, &there);
    assert_eq!(verdict.cause, Cause::TunQueueOverflow);
    assert_eq!(far(&verdict).at, Some(End::FarEnd));
}

#[test]
fn data_that_does_not_arrive_is_slow() {
    let mut near = tunnel();
    near.expected = Some(100e6);
    count(&mut near, inner(), metric::TX_BYTES, 125_000_000);
    let mut there = tunnel();
    count(&mut there, inner(), metric::RX_BYTES, 62_500_000);
    assert_eq!(diagnose(&near).cause, Cause::Healthy);
    let verdict = both(&near, &there);
    assert_eq!((verdict.cause, verdict.throughput), (Cause::Unknown, 50e6));
    count(&mut there, inner(), metric::RX_BYTES, 125_000_000);
    assert_eq!(both(&near, &there).cause, Cause::Healthy);
}

#[test]
fn loss_that_the_receivers_host_counts_without_a_known_cause_is_there() {
    let mut there = receiver(10_000, 0, 0);
    count(&mut there, inner(), metric::RX_ERRORS, 290);
    let verdict = both(&losing(300), &there);
    assert_eq!(verdict.cause, Cause::PathLoss);
    assert_eq!(far(&verdict).at, Some(End::FarEnd));
    let verdict = both(&there, &losing(300));
    assert_eq!(far(&verdict).at, Some(End::Here));
}

#[test]
fn a_weak_finding_at_the_far_end_does_not_hide_the_path() {
    // Its connection loses segments on the path, and a tenth of that in its own queue.
    let mut there = losing(1_000);
    there.map.links[0].queue_length = 3;
    count(&mut there, inner(), metric::TX_DROPPED, 20);
    let verdict = both(&receiver(10_000, 0, 0), &there);
    assert_eq!(verdict.cause, Cause::PathLoss);
    assert_eq!(far(&verdict).at, Some(End::Between));
}

#[test]
fn the_receiver_explains_its_small_window() {
    let mut near = losing(0);
    count(&mut near, flow(), metric::TCP_RWND_LIMITED_US, 9_500_000);
    gauge(&mut near, flow(), metric::TCP_SND_WND, 65_536);
    let mut there = receiver(10_000, 0, 0);
    count(&mut there, Subject::Host, "TcpExt.TCPToZeroWindowAdv", 40);
    let verdict = both(&near, &there);
    assert_eq!(verdict.cause, Cause::TcpReceiveWindow);
    assert_eq!(far(&verdict).at, Some(End::FarEnd));
    assert!(verdict.evidence[0].name.starts_with("far end: "));
}
