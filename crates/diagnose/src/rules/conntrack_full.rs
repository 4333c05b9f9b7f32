//! The table of tracked connections is full: connections in it continue, but packets of new
//! connections are dropped.

use seikan_observe::Subject;

use super::prelude::*;

/// Largest fill level: the kernel drops at 1; between samples entries leave.
const FILL: Ramp = Ramp::new(0.9, 0.99);
/// Packets dropped per second from which users notice (a connection fails every few seconds), and
/// at which most connections fail.
const DROPS: Ramp = Ramp::new(0.2, 5.0);
/// Weight of a full table that has not dropped packets.
const NEAR: f64 = 0.2;
const SYSCTL: &str = "net.netfilter.nf_conntrack_max";

pub(super) const SPEC: Spec = Spec::fault(
    Cause::ConntrackFull,
    PathStep::Host,
    "The table of tracked connections is full, and packets of new connections are dropped.",
    evaluate,
)
.drops_packets()
.counted(
    Source::Host,
    &[metric::CONNTRACK_INSERT_FAILED, metric::CONNTRACK_DROP],
    Per::Packet,
    FEW,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let column = |name| evidence.column(&Subject::Host, name);
    let (Some(count), Some(max)) = (
        column(metric::CONNTRACK_COUNT),
        column(metric::CONNTRACK_MAX).and_then(|max| max.last()),
    ) else {
        if evidence.map.host.conntrack {
            return Err("the size of the table is not readable".into());
        }
        return Fact::new(
            "connection tracking tables in this namespace",
            0.0,
            "0",
            "/proc/sys/net/netfilter",
        )
        .excludes();
    };
    let fill = count.max() as f64 / (max as f64).max(1.0);
    let of = |name| evidence.host(name).unwrap_or(0.0);
    let lost = of(metric::CONNTRACK_DROP) + of(metric::CONNTRACK_INSERT_FAILED);
    let rate = lost / evidence.seconds();
    let facts = Vec::new()
        .and(
            "largest fill level of the connection table",
            fill,
            "below 0.9",
            "nf_conntrack_count, nf_conntrack_max",
        )
        .and(
            "packets dropped per second for lack of an entry",
            rate,
            "0",
            "conntrack statistics drop, insert_failed",
        )
        .and(
            "capacity of the table, connections",
            max as f64,
            "twice the present connections",
            SYSCTL,
        );
    let dropping = DROPS.at(rate);
    let weight = FILL.at(fill) * (NEAR + (0.95 - NEAR) * dropping);
    let port = evidence
        .map
        .sockets
        .first()
        .map_or("PORT".to_owned(), |socket| socket.local.port().to_string());
    let remedies = vec![
        Remedy::here(
            "enlarge the table",
            vec![Action::Sysctl {
                name: SYSCTL.into(),
                value: (2 * max.max(32_768)).to_string(),
            }],
            "new connections work again (320 bytes of memory each)",
        ),
        Remedy::ask(
            Location::Here,
            "do not track the tunnel's own packets",
            vec![format!(
                "nft 'add table inet untracked; add chain inet untracked in {{ type filter hook prerouting priority raw; }}; \
                 add chain inet untracked out {{ type filter hook output priority raw; }}; \
                 add rule inet untracked in udp dport {port} notrack; add rule inet untracked out udp sport {port} notrack'"
            )],
            "the tunnel no longer depends on the table",
        ),
    ];
    weighted(weight, facts, remedies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;

    fn table(entries: u64, max: u64, dropped: u64) -> Evidence {
        let mut evidence = tunnel();
        gauge(
            &mut evidence,
            Subject::Host,
            metric::CONNTRACK_COUNT,
            entries,
        );
        gauge(&mut evidence, Subject::Host, metric::CONNTRACK_MAX, max);
        count(
            &mut evidence,
            Subject::Host,
            metric::CONNTRACK_DROP,
            dropped,
        );
        evidence
    }

    #[test]
    fn a_full_table_that_drops_is_it() {
        let finding = present(evaluate(&table(1000, 1000, 300)));
        assert!(finding.weight > 0.9);
        assert_eq!(
            finding.remedies[0].commands,
            ["sysctl -w net.netfilter.nf_conntrack_max=\"65536\""]
        );
    }

    #[test]
    fn a_full_table_that_drops_nothing_is_hardly() {
        assert!(present(evaluate(&table(1000, 1000, 0))).weight < 0.3);
    }

    #[test]
    fn drops_with_an_empty_table_are_not() {
        assert!(absent(evaluate(&table(100, 1000, 300))));
    }

    #[test]
    fn no_table_no_cause() {
        assert!(absent(evaluate(&tunnel())));
    }
}
