//! Handmade recordings.

use std::time::{Duration, SystemTime};

use seikan_diagnose::{Cost, Evidence, Recording};
use seikan_observe::path::{LinkFacts, SocketFacts, Transport};
use seikan_observe::{Column, Key, Kind, Subject};

/// Returns evidence with empty samples at these seconds.
pub fn sampled(seconds: &[f64]) -> Evidence {
    let mut evidence = Evidence::default();
    let times = seconds.iter().map(|at| Duration::from_secs_f64(*at));
    evidence.series.times = times.collect();
    evidence
}

fn column(evidence: &mut Evidence, subject: Subject, name: &str, kind: Kind, values: &[u64]) {
    let points = (0..).zip(values.iter().copied()).collect();
    let key = Key::new(subject, name.to_owned());
    let column = Column { kind, points };
    evidence.series.columns.insert(key, column);
}

/// Adds a counter with these values at the samples.
pub fn count(evidence: &mut Evidence, subject: Subject, name: &str, values: &[u64]) {
    column(evidence, subject, name, Kind::Counter, values);
}

/// Adds a gauge with these values at the samples.
pub fn measure(evidence: &mut Evidence, subject: Subject, name: &str, values: &[u64]) {
    column(evidence, subject, name, Kind::Gauge, values);
}

/// Returns an interface.
pub fn link(name: &str) -> LinkFacts {
    LinkFacts {
        name: name.to_owned(),
        mtu: 1500,
        ..LinkFacts::default()
    }
}

/// Adds a connection through the tunnel.
pub fn flow(evidence: &mut Evidence, inode: u64) {
    evidence.map.flows.push(SocketFacts {
        inode,
        transport: Transport::Tcp,
        local: "10.0.0.1:4000".parse().expect("address"),
        remote: Some("10.0.0.2:80".parse().expect("address")),
        receive_buffer: 0,
        send_buffer: 0,
        congestion: None,
        vnet_hdr: None,
    });
}

/// Returns a recording of the evidence.
pub fn recorded(evidence: Evidence) -> Recording {
    Recording {
        started_at: SystemTime::UNIX_EPOCH,
        evidence,
        functions: None,
        attempts: Vec::new(),
        cost: Cost::default(),
    }
}
