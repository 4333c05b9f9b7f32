//! Evidence made by hand for the tests of rules: a tunnel `tun0` of process 100 over `eth0`, ten seconds.

use seikan_observe::path::{LinkFacts, PathMap, ProgramFacts, SocketFacts, Transport};
use seikan_observe::{Column, Key, Kind, Subject, metric};
use std::time::Duration;

use crate::{Evidence, Excluded, Finding, Judgement, Profile, Share, Stage};

/// A tunnel without traffic.
pub fn tunnel() -> Evidence {
    let link = |name: &str, kind: &str| LinkFacts {
        name: name.into(),
        kind: kind.into(),
        mtu: 1500,
        queue_length: 500,
        qdisc: "noqueue".into(),
        rx_queues: 1,
        ..LinkFacts::default()
    };
    let mut evidence = Evidence {
        map: PathMap {
            inner: Some("tun0".into()),
            egress: Some("eth0".into()),
            links: vec![link("tun0", "tun"), link("eth0", "veth")],
            program: Some(ProgramFacts {
                pid: 100,
                name: "tunneld".into(),
                threads: vec![(100, "tunneld".into()), (101, "worker".into())],
                cpus: vec![0, 1],
                ..ProgramFacts::default()
            }),
            sockets: vec![socket(1, Transport::Udp)],
            flows: vec![socket(2, Transport::Tcp)],
            ..PathMap::default()
        },
        ..Evidence::default()
    };
    evidence.map.host.cpus = vec![0, 1];
    evidence.series.times = vec![Duration::ZERO, Duration::from_secs(10)];
    evidence
}

/// Socket 1 (UDP) is the tunnel's, socket 2 (TCP) a connection through it.
pub fn socket(inode: u64, transport: Transport) -> SocketFacts {
    SocketFacts {
        inode,
        transport,
        local: ([10, 0, 0, 1], 1000).into(),
        remote: Some(([10, 0, 0, 2], 2000).into()),
        receive_buffer: 212_992,
        send_buffer: 212_992,
        congestion: (transport == Transport::Tcp).then(|| "cubic".into()),
        vnet_hdr: None,
    }
}

/// The inner interface.
pub fn inner() -> Subject {
    Subject::Link("tun0".into())
}

/// The outer interface.
pub fn egress() -> Subject {
    Subject::Link("eth0".into())
}

/// Sets a counter with this growth over the ten seconds.
pub fn count(evidence: &mut Evidence, subject: Subject, name: &'static str, growth: u64) {
    put(
        evidence,
        subject,
        name,
        Kind::Counter,
        vec![(0, 0), (1, growth)],
    );
}

/// Sets a constant gauge.
pub fn gauge(evidence: &mut Evidence, subject: Subject, name: &'static str, value: u64) {
    put(
        evidence,
        subject,
        name,
        Kind::Gauge,
        vec![(0, value), (1, value)],
    );
}

fn put(
    evidence: &mut Evidence,
    subject: Subject,
    name: &'static str,
    kind: Kind,
    points: Vec<(u32, u64)>,
) {
    let columns = &mut evidence.series.columns;
    columns.insert(Key::new(subject, name), Column { kind, points });
}

/// Returns the finding.
pub fn present(judgement: Judgement) -> Finding {
    judgement.expect("a finding")
}

/// Whether a fact excludes the cause.
pub fn absent(judgement: Judgement) -> bool {
    matches!(judgement, Err(Excluded::Absent(_)))
}

/// Sets a thread of the program (100 or 101) that ran and waited for these shares of the time.
pub fn thread(evidence: &mut Evidence, tid: u32, running: f64, waiting: f64) {
    let subject = || Subject::Thread { pid: 100, tid };
    count(evidence, subject(), metric::RUN_NS, (running * 1e10) as u64);
    count(
        evidence,
        subject(),
        metric::RUN_DELAY_NS,
        (waiting * 1e10) as u64,
    );
}

/// Sets a processor that was busy, and handled softirqs, for these shares of the time.
pub fn processor(evidence: &mut Evidence, cpu: u32, busy: f64, softirq: f64) {
    let mut set = |name, share: f64| {
        count(
            evidence,
            Subject::Cpu(cpu),
            name,
            (share * 1e10).round() as u64,
        )
    };
    set(metric::USER_NS, busy - softirq);
    set(metric::SOFTIRQ_NS, softirq);
    set(metric::IDLE_NS, 1.0 - busy);
}

/// Sets a profile of the program by shares of stages.
pub fn profile(evidence: &mut Evidence, shares: &[(Stage, f64)]) {
    let program = shares.iter().map(|(stage, share)| Share {
        symbol: format!("{stage:?}").to_lowercase(),
        stage: *stage,
        share: *share,
    });
    evidence.profile = Some(Profile {
        samples: 1000,
        program: program.collect(),
        machine: Vec::new(),
    });
}

/// Whether the cause could not be examined.
pub fn unseen(judgement: Judgement) -> bool {
    matches!(judgement, Err(Excluded::Unseen(_)))
}
