//! The program moves one packet for each read or write of the tun device, and is busy with that.
//!
//! Every simple tunnel does so. It is a cause only if the program has no time left, spends much of
//! its time in the kernel, and could move more of such packets at once.

use seikan_observe::Subject;
use seikan_observe::path::{LinkFacts, ProgramFacts};

use super::calls::per_packet;
use super::prelude::*;
use super::scheduling::limited_by_work;
use crate::Stage;

/// Calls per packet that move single packets. Fewer calls move several.
const ONE_EACH: std::ops::RangeInclusive<f64> = 0.7..=3.0;
/// Bytes per packet below which the application, not the tunnel, has to use larger units.
const SMALL: Ramp = Ramp::new(300.0, 900.0);
/// Bytes per call from which the cost of calls is small: four packets, and a dozen.
const LARGE: Ramp = Ramp::new(4_000.0, 16_000.0);
/// Share of its time in the kernel; below, the program's own work (cipher) takes the time.
const IN_KERNEL: Ramp = Ramp::new(0.2, 0.55);
/// Share of its time in encryption from which encryption costs more than the calls.
const CRYPTO: Ramp = Ramp::new(0.3, 0.5);
/// Weight if that share is not known.
const KERNEL_UNKNOWN: f64 = 0.6;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::FramePerSyscall,
    PathStep::Program,
    "The tunnel's program moves one packet per system call and spends its time on the calls.",
    evaluate,
)
.effects(effects::WORK)
.counted(
    Source::Program,
    &[metric::IO_READS, metric::IO_WRITES],
    Per::Packet,
    1.0,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let (program, link) = evidence
        .map
        .program
        .as_ref()
        .zip(evidence.map.inner_link())
        .ok_or("no program carries this tunnel, or it was not found")?;
    let (calls, bytes, packets, verb) = if evidence.sends() {
        (
            metric::IO_READS,
            metric::IO_READ_BYTES,
            metric::TX_PACKETS,
            "read",
        )
    } else {
        (
            metric::IO_WRITES,
            metric::IO_WRITTEN_BYTES,
            metric::RX_PACKETS,
            "write",
        )
    };
    let of = |name| evidence.growth(&Subject::Process(program.pid), name);
    let (calls, bytes) = of(calls).zip(of(bytes)).ok_or_else(|| {
        format!(
            "/proc/{}/io is not readable: needs root or the user of {}",
            program.pid, program.name
        )
    })?;
    let (packets, busy) = evidence
        .inner(packets)
        .zip(evidence.busy())
        .ok_or_else(|| format!("the counters of {} are not readable", link.name))?;
    let calls = Calls {
        verb,
        per_packet: calls / packets.max(1.0),
        bytes: bytes / calls.max(1.0),
    };
    let in_kernel = evidence.in_kernel();
    let facts = facts(evidence, program, link, &calls, busy);
    let limited = limited_by_work(evidence).unwrap_or(0.0);
    let one_each = f64::from(ONE_EACH.contains(&calls.per_packet));
    let weight = one_each
        * SMALL.at(calls.bytes)
        * (1.0 - LARGE.at(calls.bytes))
        * limited
        * in_kernel.map_or(KERNEL_UNKNOWN, |share| IN_KERNEL.at(share))
        * (1.0 - CRYPTO.at(evidence.work(Stage::Crypto).unwrap_or(0.0)));
    weighted(
        0.95 * weight,
        facts,
        vec![Remedy::ask(
            Location::Tunnel,
            "use a tunnel that reads super-packets of 64 KiB (IFF_VNET_HDR) or reads and writes in batches, or a \
             larger inner MTU at both ends",
            Vec::new(),
            "a factor of 2 to 10, until the cipher is the limit",
        )],
    )
}

/// System calls of the program.
struct Calls {
    /// `read` or `write`.
    verb: &'static str,
    /// Calls per packet.
    per_packet: f64,
    /// Bytes per call.
    bytes: f64,
}

fn facts(
    evidence: &Evidence,
    program: &ProgramFacts,
    link: &LinkFacts,
    calls: &Calls,
    busy: f64,
) -> Vec<Fact> {
    let mut facts = Vec::new()
        .and(
            format!("bytes per {} call of {}", calls.verb, program.name),
            calls.bytes,
            "tens of thousands under load",
            format!("/proc/{}/io", program.pid),
        )
        .and(
            format!("{} calls per packet of {}", calls.verb, link.name),
            calls.per_packet,
            "below 0.7 for single frames; 1 for super-packets",
            format!("/proc/{}/io and rtnetlink", program.pid),
        )
        .and(
            "share of the time in which the program ran or was ready to run",
            busy,
            "below 0.7",
            "schedstat",
        );
    // /proc/PID/io does not count calls of recv and send.
    if !evidence.outer_tcp() {
        let (name, functions, packets) = if evidence.sends() {
            ("sent", ["udp_sendmsg", "udpv6_sendmsg"], metric::TX_PACKETS)
        } else {
            (
                "received",
                ["udp_recvmsg", "udpv6_recvmsg"],
                metric::RX_PACKETS,
            )
        };
        facts.extend(per_packet(
            evidence,
            format!("UDP messages {name} per packet of {}", link.name),
            &functions,
            evidence.inner(packets),
            "far below 1 if a message holds many datagrams",
        ));
    }
    facts = facts
        .and(
            "share of its time in the kernel",
            evidence.in_kernel(),
            "below 0.2, if its own work were the limit",
            "/proc/PID/task/*/stat",
        )
        .and(
            format!("super-packets enabled on {} (1: yes)", link.name),
            link.vnet_hdr.map(f64::from),
            "1",
            "flags of the tun device",
        );
    facts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;

    fn reads(calls: u64, bytes: u64, packets: u64, running: f64) -> Evidence {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, running, 0.02);
        let process = || Subject::Process(100);
        count(&mut evidence, process(), metric::IO_READS, calls);
        count(&mut evidence, process(), metric::IO_READ_BYTES, bytes);
        count(&mut evidence, inner(), metric::TX_PACKETS, packets);
        count(&mut evidence, inner(), metric::TX_BYTES, bytes);
        evidence
    }

    fn kernel_share(evidence: &mut Evidence, share: f64) {
        let subject = || Subject::Thread { pid: 100, tid: 100 };
        let system = (share * 1e10) as u64;
        count(evidence, subject(), metric::THREAD_SYSTEM_NS, system);
        let user = 10_000_000_000 - system;
        count(evidence, subject(), metric::THREAD_USER_NS, user);
    }

    #[test]
    fn a_busy_program_with_a_packet_a_call_has_it() {
        let mut evidence = reads(100_000, 145_000_000, 100_000, 0.97);
        kernel_share(&mut evidence, 0.7);
        assert!(present(evaluate(&evidence)).weight > 0.9);
    }

    #[test]
    fn one_that_sleeps_has_not() {
        assert!(absent(evaluate(&reads(100_000, 145_000_000, 100_000, 0.5))));
    }

    #[test]
    fn super_packets_are_not_it() {
        let evidence = reads(100_000, 6_000_000_000, 100_000, 0.97);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn several_packets_a_call_are_not_it() {
        let evidence = reads(20_000, 60_000_000, 60_000, 0.97);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn a_program_busy_with_its_cipher_has_another_cause() {
        let mut evidence = reads(100_000, 145_000_000, 100_000, 0.97);
        kernel_share(&mut evidence, 0.15);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn small_packets_are_another_cause() {
        assert!(absent(evaluate(&reads(100_000, 10_000_000, 100_000, 0.97))));
    }

    #[test]
    fn messages_are_shown_if_their_calls_were_counted() {
        let mut evidence = reads(100_000, 145_000_000, 100_000, 0.97);
        kernel_share(&mut evidence, 0.7);
        let messages = |evidence: &Evidence| {
            let facts = present(evaluate(evidence)).facts;
            let of = |fact: &Fact| fact.name == "UDP messages sent per packet of tun0";
            facts.into_iter().find(of).map(|fact| fact.value)
        };
        assert_eq!(messages(&evidence), None);
        count(&mut evidence, Subject::Host, "call.udp_sendmsg", 98_000);
        assert_eq!(messages(&evidence), Some(0.98));
        // Over TCP, the calls belong to other programs.
        evidence.map.sockets = vec![socket(3, seikan_observe::path::Transport::Tcp)];
        assert_eq!(messages(&evidence), None);
    }

    #[test]
    fn a_receiver_is_examined_by_its_writes() {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, 0.97, 0.02);
        let process = || Subject::Process(100);
        for (name, value) in [
            (metric::IO_READS, 10),
            (metric::IO_READ_BYTES, 80),
            (metric::IO_WRITES, 100_000),
            (metric::IO_WRITTEN_BYTES, 145_000_000),
        ] {
            count(&mut evidence, process(), name, value);
        }
        count(&mut evidence, inner(), metric::RX_PACKETS, 100_000);
        count(&mut evidence, inner(), metric::RX_BYTES, 145_000_000);
        kernel_share(&mut evidence, 0.7);
        assert!(present(evaluate(&evidence)).weight > 0.9);
    }
}
