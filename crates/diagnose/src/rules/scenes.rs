//! Verdicts about whole machines made by hand.
//!
//! Each scene differs in one thing, so that similar causes are told apart by it.

use seikan_observe::path::Transport;
use seikan_observe::{Subject, metric};

use super::testing::*;
use crate::{Cause, Evidence, Stage, diagnose};

/// A tunnel with one thread and one frame per call that sends 1,450-byte packets: 200 Mbit/s where
/// 400 are expected, with a few losses at its ring. The far end and the load use the rest of the
/// machine's time.
fn gateway(running: f64, waiting: f64) -> Evidence {
    let mut evidence = tunnel();
    evidence.expected = Some(400e6);
    evidence.map.host.cpu_features = vec!["aes".into()];
    thread(&mut evidence, 100, running, waiting);
    thread(&mut evidence, 101, 0.0, 0.0);
    in_kernel(&mut evidence, 0.7);
    processor(&mut evidence, 0, 0.98, 0.2);
    processor(&mut evidence, 1, 0.95, 0.2);
    let packets = 172_000;
    for (subject, name, value) in [
        (inner(), metric::TX_PACKETS, packets),
        (inner(), metric::TX_BYTES, packets * 1450),
        (inner(), metric::TX_DROPPED, packets / 400),
        (Subject::Process(100), metric::IO_READS, packets),
        (Subject::Process(100), metric::IO_READ_BYTES, packets * 1450),
        (Subject::Host, "Udp.OutDatagrams", packets),
        (Subject::Host, "Udp.InDatagrams", packets / 2),
        (Subject::Host, "Udp.RcvbufErrors", 0),
        (Subject::Host, "Udp.SndbufErrors", 0),
        (Subject::Cpu(0), metric::SOFTNET_PROCESSED, 2 * packets),
        (Subject::Cpu(1), metric::SOFTNET_PROCESSED, 2 * packets),
        (Subject::Cpu(0), metric::SOFTNET_DROPPED, 0),
        (Subject::Cpu(0), metric::SOFTNET_TIME_SQUEEZE, 20),
        (Subject::Cpu(0), metric::NET_RX, packets),
    ] {
        count(&mut evidence, subject, name, value);
    }
    evidence
}

fn in_kernel(evidence: &mut Evidence, share: f64) {
    let subject = || Subject::Thread { pid: 100, tid: 100 };
    let ns = |share: f64| (share * 1e10) as u64;
    count(evidence, subject(), metric::THREAD_SYSTEM_NS, ns(share));
    count(evidence, subject(), metric::THREAD_USER_NS, ns(1.0 - share));
}

/// Makes the tunnel use super-packets.
fn batching(evidence: &mut Evidence) {
    let process = Subject::Process(100);
    count(evidence, process, metric::IO_READS, 5_000);
    count(evidence, inner(), metric::TX_PACKETS, 5_000);
    count(evidence, inner(), metric::TX_DROPPED, 0);
}

fn stopped(evidence: &mut Evidence, stopped_us: u64) {
    let program = evidence.map.program.as_mut().expect("program");
    program.group = Some("/g".into());
    let group = || Subject::Group("/g".into());
    count(evidence, group(), metric::GROUP_PERIODS, 100);
    count(evidence, group(), metric::GROUP_THROTTLED, 98);
    count(evidence, group(), metric::GROUP_THROTTLED_US, stopped_us);
}

#[track_caller]
fn named(evidence: &Evidence, cause: Cause) {
    let verdict = diagnose(evidence);
    let (chain, rivals) = (&verdict.chain, &verdict.alternatives);
    assert_eq!(verdict.cause, cause, "{chain:?}, beside {rivals:?}");
}

#[test]
fn a_full_thread_with_a_frame_a_call() {
    named(&gateway(0.96, 0.03), Cause::FramePerSyscall);
    // On two processors that the other end and the load use as well.
    named(&gateway(0.8, 0.17), Cause::FramePerSyscall);
}

#[test]
fn the_same_with_competing_programs() {
    named(&gateway(0.55, 0.42), Cause::CpuContention);
    named(&gateway(0.4, 0.55), Cause::CpuContention);
}

#[test]
fn the_same_with_a_limit() {
    let mut half = gateway(0.5, 0.48);
    stopped(&mut half, 4_700_000);
    named(&half, Cause::CpuQuota);
    let mut little = gateway(0.85, 0.13);
    stopped(&mut little, 1_200_000);
    named(&little, Cause::CpuQuota);
    // A kernel that does not count throttled time as waiting.
    let mut uncounted = gateway(0.5, 0.01);
    stopped(&mut uncounted, 4_700_000);
    named(&uncounted, Cause::CpuQuota);
}

#[test]
fn the_same_with_a_short_ring_has_time_left() {
    let mut evidence = gateway(0.5, 0.05);
    evidence.map.links[0].queue_length = 4;
    count(&mut evidence, inner(), metric::TX_DROPPED, 3_000);
    named(&evidence, Cause::TunQueueOverflow);
}

#[test]
fn a_full_thread_that_batches() {
    let mut evidence = gateway(0.96, 0.03);
    batching(&mut evidence);
    named(&evidence, Cause::SingleThreadSaturated);
    let shares = [(Stage::Crypto, 0.7), (Stage::Network, 0.2)];
    profile(&mut evidence, &shares);
    named(&evidence, Cause::CipherBound);
    let shares = [(Stage::Copy, 0.5), (Stage::Network, 0.2)];
    profile(&mut evidence, &shares);
    named(&evidence, Cause::CopyOrChecksumBound);
    // With competing programs, neither cause applies.
    thread(&mut evidence, 100, 0.55, 0.42);
    named(&evidence, Cause::CpuContention);
}

#[test]
fn a_small_buffer_behind_a_program_that_has_time() {
    let mut evidence = gateway(0.4, 0.03);
    evidence.map.sockets[0].receive_buffer = 8192;
    count(&mut evidence, inner(), metric::TX_DROPPED, 0);
    count(&mut evidence, Subject::Udp(1), metric::UDP_DROPS, 4_000);
    count(&mut evidence, Subject::Host, "Udp.RcvbufErrors", 4_000);
    named(&evidence, Cause::UdpReceiveBuffer);
    // The same losses at a buffer of the usual size, with a reader that has to wait.
    evidence.map.sockets[0].receive_buffer = 212_992;
    thread(&mut evidence, 100, 0.4, 0.5);
    named(&evidence, Cause::CpuContention);
}

#[test]
fn a_shaper_fills_the_queues_before_it() {
    let mut evidence = gateway(0.3, 0.03);
    evidence.map.links[1].qdisc = "tbf".into();
    let qdisc = || Subject::Qdisc("eth0".into());
    count(&mut evidence, qdisc(), metric::QDISC_PACKETS, 170_000);
    count(&mut evidence, qdisc(), metric::QDISC_BYTES, 250_000_000);
    count(&mut evidence, qdisc(), metric::QDISC_OVERLIMITS, 150_000);
    count(&mut evidence, qdisc(), metric::QDISC_DROPS, 0);
    gauge(
        &mut evidence,
        Subject::Udp(1),
        metric::UDP_TX_QUEUE,
        210_000,
    );
    evidence.probes.idle_rtt_us = Some(500.0);
    evidence.probes.loaded_rtt_us = Some(400_000.0);
    named(&evidence, Cause::Shaper);
}

#[test]
fn busy_and_delivering_is_healthy() {
    let mut evidence = gateway(0.6, 0.35);
    evidence.expected = Some(205e6);
    named(&evidence, Cause::Healthy);
}

#[test]
fn a_trace_of_waiting_does_not_explain_a_short_ring() {
    let mut evidence = gateway(0.6, 0.2);
    evidence.map.links[0].queue_length = 4;
    count(&mut evidence, inner(), metric::TX_DROPPED, 3_000);
    named(&evidence, Cause::TunQueueOverflow);
}

/// Adds a connection that sends 172,000 segments through the tunnel, with `again` retransmissions.
fn sending(evidence: &mut Evidence, again: u64) {
    let flow = || Subject::Tcp(2);
    for (name, value) in [
        (metric::TCP_SEGS_OUT, 172_000),
        (metric::TCP_RETRANS, again),
        (metric::TCP_DSACK_DUPS, 0),
        (metric::TCP_BYTES_SENT, 240_000_000),
        (metric::TCP_BYTES_ACKED, 238_000_000),
        (metric::TCP_BYTES_RECEIVED, 0),
        (metric::TCP_BUSY_US, 10_000_000),
    ] {
        count(evidence, flow(), name, value);
    }
    gauge(evidence, flow(), metric::TCP_APP_LIMITED, 0);
}

#[test]
fn path_loss_with_a_program_that_has_time() {
    let mut evidence = gateway(0.4, 0.03);
    count(&mut evidence, inner(), metric::TX_DROPPED, 0);
    sending(&mut evidence, 2_000);
    named(&evidence, Cause::PathLoss);
    // The same, dropped at a short ring.
    evidence.map.links[0].queue_length = 4;
    count(&mut evidence, inner(), metric::TX_DROPPED, 2_000);
    named(&evidence, Cause::TunQueueOverflow);
}

#[test]
fn small_packets_through_a_full_thread() {
    let mut evidence = gateway(0.96, 0.03);
    count(&mut evidence, inner(), metric::TX_BYTES, 172_000 * 200);
    named(&evidence, Cause::PacketsTooSmall);
    // With competing programs, the thread lacks a processor.
    thread(&mut evidence, 100, 0.5, 0.45);
    named(&evidence, Cause::CpuContention);
}

#[test]
fn merging_off_makes_a_frame_a_call() {
    let mut evidence = gateway(0.96, 0.03);
    let tso = "tx-tcp-segmentation";
    let tun = &mut evidence.map.links[0];
    tun.vnet_hdr = Some(true);
    tun.features.insert(tso.into(), false);
    tun.changeable = vec![tso.into()];
    named(&evidence, Cause::OffloadMissing);
}

#[test]
fn a_tunnel_over_tcp_that_repairs_late() {
    let mut evidence = gateway(0.4, 0.03);
    sending(&mut evidence, 1_500);
    count(&mut evidence, Subject::Tcp(2), metric::TCP_TIMEOUTS, 6);
    count(&mut evidence, inner(), metric::TX_DROPPED, 1_500);
    evidence.map.sockets = vec![socket(3, Transport::Tcp)];
    let outer = || Subject::Tcp(3);
    count(&mut evidence, outer(), metric::TCP_SEGS_OUT, 172_000);
    count(&mut evidence, outer(), metric::TCP_RETRANS, 1_700);
    named(&evidence, Cause::TcpOverTcp);
}
