//! The program has no time left, and much of its time is copying packets or computing checksums.

use seikan_observe::path::LinkFacts;

use super::prelude::*;
use super::scheduling::{largest, limit_of_work};
use crate::Stage;

/// Share of the time in copies and checksums: one copy in and one out is an eighth to a fifth of a
/// fast tunnel's time; from 45 % on no other stage takes as much.
const COPY: Ramp = Ramp::new(0.22, 0.45);
/// Weight if another stage takes more.
const SECOND: f64 = 0.4;
/// The kernel's name for checksums of sent packets, and the name for ethtool.
const TX_CHECKSUM: &[&str] = &["tx-checksum-ip-generic", "tx-checksum-ipv4"];

pub(super) const SPEC: Spec = Spec::fault(
    Cause::CopyOrChecksumBound,
    PathStep::Program,
    "The processor spends its time on copying packets or computing checksums.",
    evaluate,
)
.effects(effects::WORK)
.counted(
    Source::Threads,
    &[metric::THREAD_SYSTEM_NS],
    Per::Second,
    0.6e9,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let (limited, busy) = limit_of_work(evidence)?;
    let (copy, checksum) = evidence
        .work(Stage::Copy)
        .zip(evidence.work(Stage::Checksum))
        .ok_or("processor time by function was not sampled: needs root or CAP_PERFMON")?;
    let rivals = [
        Stage::Crypto,
        Stage::Syscall,
        Stage::Schedule,
        Stage::Network,
    ];
    let rival = largest(evidence, &rivals);
    let both = copy + checksum;
    let leading = evidence.leading_function(&[Stage::Copy, Stage::Checksum]);
    let facts = vec![
        Fact::new(
            match leading {
                Some(symbol) => {
                    format!("share of its time in copies and checksums, mostly {symbol}")
                }
                None => "share of its time in copies and checksums".to_owned(),
            },
            both,
            "below 0.22",
            "processor profile",
        ),
        Fact::new(
            "share of its time in checksums",
            checksum,
            "below 0.03",
            "processor profile",
        ),
        busy,
        Fact::new(
            "share of its time in the next largest stage",
            rival,
            "larger, if these were not the limit",
            "processor profile",
        ),
    ];
    let leads = if rival > both { SECOND } else { 1.0 };
    let weight = 0.95 * COPY.at(both) * limited * leads;
    weighted(weight, facts, remedies(evidence))
}

fn remedies(evidence: &Evidence) -> Vec<Remedy> {
    let links = [evidence.map.inner_link(), evidence.map.egress_link()];
    let without = links.into_iter().flatten().filter(|link| sums_itself(link));
    let mut remedies: Vec<Remedy> = without
        .map(|link| {
            Remedy::here(
                format!("let {} compute the checksums of sent packets", link.name),
                vec![Action::Offload {
                    link: link.name.clone(),
                    feature: "tx".into(),
                    on: true,
                }],
                "the time of checksums",
            )
        })
        .collect();
    remedies.push(Remedy::ask(
        Location::Tunnel,
        "use a tunnel that accepts super-packets without checksums (IFF_VNET_HDR with TUN_F_CSUM) and encrypts in place",
        Vec::new(),
        "most of the time of copies and checksums",
    ));
    remedies
}

/// Whether the kernel has to compute checksums of packets sent on this interface although the
/// interface could.
fn sums_itself(link: &LinkFacts) -> bool {
    TX_CHECKSUM.iter().any(|name| can_turn(link, name, true))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;

    fn working(running: f64, shares: &[(Stage, f64)]) -> Evidence {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, running, 0.02);
        profile(&mut evidence, shares);
        evidence
    }

    #[test]
    fn copies_that_lead_are_it() {
        let evidence = working(
            0.97,
            &[
                (Stage::Copy, 0.4),
                (Stage::Checksum, 0.1),
                (Stage::Network, 0.3),
            ],
        );
        assert!(present(evaluate(&evidence)).weight > 0.9);
    }

    #[test]
    fn they_weigh_little_if_the_cipher_leads() {
        let evidence = working(0.97, &[(Stage::Copy, 0.3), (Stage::Crypto, 0.6)]);
        assert!(absent(evaluate(&evidence)) || present(evaluate(&evidence)).weight < 0.3);
    }

    #[test]
    fn a_program_that_has_time_is_not_bound() {
        assert!(absent(evaluate(&working(0.4, &[(Stage::Copy, 0.8)]))));
    }

    #[test]
    fn without_a_profile_nothing_is_said_of_a_full_one() {
        let mut evidence = working(0.97, &[]);
        evidence.profile = None;
        assert!(unseen(evaluate(&evidence)));
    }

    #[test]
    fn an_offload_that_is_off_is_turned_on() {
        let mut evidence = working(0.97, &[(Stage::Checksum, 0.5)]);
        let link = &mut evidence.map.links[1];
        link.features.insert("tx-checksum-ip-generic".into(), false);
        link.changeable.push("tx-checksum-ip-generic".into());
        let finding = present(evaluate(&evidence));
        assert_eq!(finding.remedies[0].commands, ["ethtool -K eth0 tx on"]);
    }
}
