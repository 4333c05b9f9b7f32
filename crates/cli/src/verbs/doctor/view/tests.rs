//! A verdict made by hand, on the screen.

use seikan_diagnose::{Action, Cost};
use seikan_observe::path::{HostFacts, LinkFacts, PathMap, ProgramFacts, SocketFacts, Transport};
use std::time::Duration;

use super::*;
use crate::screen::plain;

const PAGE: Page = Page {
    width: 80,
    unicode: true,
};

fn socket(transport: Transport, local: &str, remote: &str) -> SocketFacts {
    SocketFacts {
        inode: 1,
        transport,
        local: local.parse().unwrap(),
        remote: Some(remote.parse().unwrap()),
        receive_buffer: 212_992,
        send_buffer: 212_992,
        congestion: (transport == Transport::Tcp).then(|| "cubic".into()),
        vnet_hdr: None,
    }
}

fn path() -> PathMap {
    let link = |name: &str, kind: &str, queue_length, features: &[(&str, bool)]| LinkFacts {
        name: name.into(),
        kind: kind.into(),
        mtu: 1420,
        queue_length,
        qdisc: "fq_codel".into(),
        features: features
            .iter()
            .map(|(name, on)| ((*name).into(), *on))
            .collect(),
        ..LinkFacts::default()
    };
    PathMap {
        inner: Some("tun0".into()),
        egress: Some("eth0".into()),
        links: vec![
            link(
                "tun0",
                "tun",
                3,
                &[("tx-tcp-segmentation", false), ("rx-gro", true)],
            ),
            link("eth0", "", 1000, &[]),
        ],
        program: Some(ProgramFacts {
            pid: 4711,
            name: "openvpn".into(),
            threads: vec![(4711, "openvpn".into())],
            cpus: vec![0],
            nice: 5,
            ..ProgramFacts::default()
        }),
        sockets: vec![socket(Transport::Udp, "192.0.2.1:1194", "192.0.2.2:1194")],
        flows: vec![socket(Transport::Tcp, "10.8.0.2:50000", "10.8.0.1:443")],
        host: HostFacts {
            kernel: "6.12.0".into(),
            cpus: vec![0, 1],
            ..HostFacts::default()
        },
        unseen: (0..5)
            .map(|i| Unseen {
                what: format!("rung {i}"),
                why: "needs CAP_PERFMON; run it as root".into(),
            })
            .collect(),
    }
}

fn verdict() -> Verdict {
    let fact = |name: &str, value, expected: &str| Fact::new(name, value, expected, "rtnetlink");
    let out = |cause, fact, unseen: Option<&str>| RuledOut {
        cause,
        fact,
        unseen: unseen.map(str::to_owned),
    };
    Verdict {
        version: 1,
        cause: Cause::TunQueueOverflow,
        sentence: Cause::TunQueueOverflow.sentence().into(),
        level: Level::Supported,
        chain: vec![Cause::TunQueueOverflow],
        evidence: vec![
            fact(
                "share of packets dropped in the queue of tun0",
                0.047_619,
                "below 0.001",
            ),
            fact("capacity of the queue, packets", 3.0, "500 or more"),
            fact(
                "packets dropped in its queueing discipline",
                0.0,
                "as many, if it were the cause",
            ),
        ],
        remedies: vec![
            Remedy::here(
                "lengthen the queue",
                vec![Action::QueueLength {
                    link: "tun0".into(),
                    packets: 1000,
                }],
                "these packets arrive",
            ),
            Remedy::here(
                "limit the segment size",
                vec![Action::ClampMss {
                    link: "tun0".into(),
                    bytes: 1240,
                }],
                "",
            ),
        ],
        moves: None,
        alternatives: vec![Cause::PathLoss],
        ruled_out: vec![
            out(
                Cause::Shaper,
                Some(fact("packets delayed", 0.0, "above 0")),
                None,
            ),
            out(Cause::CpuQuota, None, Some("no control group limits it")),
        ],
        throughput: 123.456e6,
        expected: Some(900e6),
        path: path(),
        far: None,
        cost: Cost {
            seconds: 5.03,
            cpu_seconds: 0.041,
            samples: 51,
        },
    }
}

#[test]
fn a_summary_has_the_cause_its_figures_and_the_remedy() {
    let screen = plain(&summary(&verdict(), true, &PAGE));
    assert_eq!(screen, include_str!("screen.txt"));
}

#[test]
fn a_summary_fits_a_screen() {
    let long = |remedy: Remedy| Verdict {
        remedies: vec![Remedy {
            what: "two lines of text ".repeat(7),
            ..remedy
        }],
        far: Some(far(Some(End::Between))),
        ..verdict()
    };
    let clamp = Action::ClampMss {
        link: "interface".into(),
        bytes: 1240,
    };
    let spread = |queue| Action::Rps {
        link: "eth0".into(),
        queue,
        cpus: vec![0, 1],
    };
    let spread: Vec<_> = (0..64).map(spread).collect();
    for actions in [vec![clamp], spread] {
        let verdict = long(Remedy::here("", actions, "it helps"));
        let screen = plain(&summary(&verdict, true, &PAGE));
        assert!(screen.lines().count() <= 24, "{screen}");
        assert!(screen.lines().all(|line| width(line) <= 80), "{screen}");
    }
}

#[test]
fn commands_that_do_not_fit_are_counted() {
    let spread = |queue| Action::Sysctl {
        name: format!("name{queue}"),
        value: "1".into(),
    };
    let verdict = Verdict {
        remedies: vec![Remedy::here("", (0..9).map(spread).collect(), "")],
        ..verdict()
    };
    let screen = plain(&summary(&verdict, true, &PAGE));
    assert!(screen.contains("name3") && screen.contains("and 5 more commands"));
    assert!(!screen.contains("name4"), "{screen}");
}

#[test]
fn nothing_is_wider_than_the_page() {
    for unicode in [true, false] {
        for cause in Cause::ALL {
            let verdict = Verdict {
                cause: *cause,
                sentence: cause.sentence().into(),
                evidence: vec![Fact::new(
                    "a name ".repeat(20),
                    1e9,
                    "some ".repeat(20),
                    "x",
                )],
                ruled_out: Cause::ALL
                    .iter()
                    .map(|cause| RuledOut {
                        cause: *cause,
                        fact: Some(Fact::new(
                            "a name ".repeat(20),
                            1e9,
                            "some ".repeat(20),
                            "x",
                        )),
                        unseen: None,
                    })
                    .collect(),
                ..verdict()
            };
            let page = Page { width: 80, unicode };
            for text in [summary(&verdict, true, &page), details(&verdict, &page)] {
                let screen = plain(&text);
                let wide = screen.lines().find(|line| line.chars().count() > 80);
                assert_eq!(wide, None, "{cause}");
                assert!(unicode || screen.is_ascii(), "{screen}");
            }
        }
    }
}

#[test]
fn every_cause_but_two_has_its_place_on_the_path() {
    for cause in Cause::ALL {
        let verdict = Verdict {
            cause: *cause,
            ..verdict()
        };
        let screen = drawing::draw(&verdict.path, Some(&verdict), &PAGE);
        let marks = screen.matches('◀').count();
        assert_eq!(marks, usize::from(cause.is_fault()), "{cause}");
    }
}

#[test]
fn verbose_leaves_nothing_out() {
    let screen = plain(&details(&verdict(), &PAGE));
    for text in ["rung 4", "packets delayed 0", "no control group limits it"] {
        assert!(screen.contains(text), "{text}: {screen}");
    }
    assert!(!screen.contains("--verbose"));
}

#[test]
fn an_idle_tunnel_is_told_to_be_used() {
    let mut evidence = seikan_diagnose::Evidence::default();
    evidence.map.inner = Some("tun0".into());
    let bytes = seikan_observe::Key::new(
        seikan_observe::Subject::Link("tun0".into()),
        seikan_observe::metric::TX_BYTES,
    );
    let column = seikan_observe::Column {
        kind: seikan_observe::Kind::Counter,
        points: vec![(0, 0), (1, 500)],
    };
    evidence.series.columns.insert(bytes, column);
    evidence.series.times = vec![Duration::ZERO, Duration::from_secs(5)];
    let verdict = seikan_diagnose::diagnose(&evidence);
    assert_eq!(verdict.cause, Cause::Idle);
    let screen = plain(&summary(&verdict, true, &PAGE));
    for text in ["run it\nunder load", "--load"] {
        assert!(screen.contains(text), "{text}: {screen}");
    }
}

fn far(at: Option<End>) -> Far {
    let mut path = path();
    path.inner = Some("far0".into());
    path.links[0].name = "far0".into();
    Far {
        at,
        path,
        throughput: 99e6,
        cause: Cause::TunQueueOverflow,
        crossing: Some(seikan_diagnose::Crossing {
            sent: 1000.0,
            received: 900.0,
            packets: true,
        }),
    }
}

#[test]
fn the_far_end_is_drawn_below_and_has_the_mark_if_it_is_there() {
    let screen = |at| {
        let verdict = Verdict {
            far: Some(far(at)),
            ..verdict()
        };
        plain(&details(&verdict, &PAGE))
    };
    for (at, name, where_) in [
        (Some(End::FarEnd), "far0", "at the far end."),
        (Some(End::Here), "tun0", "on this host."),
    ] {
        let text = screen(at);
        let marked: Vec<_> = text
            .lines()
            .filter(|line| line.contains("◀ here"))
            .collect();
        assert!(
            matches!(marked[..], [line] if line.contains(name)),
            "{text}"
        );
        assert!(text.contains(&format!("The cause is {where_}")), "{text}");
        assert!(text.contains("99 Mbit/s through far0; 10 % of"), "{text}");
        // The far path continues where the path of this host ends.
        let order = [
            "the network",
            "eth0",
            "sockets",
            "openvpn",
            "far0",
            "applications",
        ];
        let mut rest = text.split_once("┴ the network").expect("this host's").1;
        for step in &order[1..] {
            rest = rest
                .split_once(step)
                .unwrap_or_else(|| panic!("{step}: {text}"))
                .1;
        }
        assert!(text.contains("┴ applications"), "{text}");
        let wide = text.lines().find(|line| width(line) > 80);
        assert_eq!(wide, None);
    }
}
