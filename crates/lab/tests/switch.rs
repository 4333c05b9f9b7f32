//! A virtual switch in the middle, as the doctor sees it.

use std::time::{Duration, Instant};

use seikan_lab::scenario::{Fault, Site};
use seikan_lab::site::{Hosts, Link, PORTS};
use seikan_lab::tunnel::{self, Changes};
use seikan_load::{Ends, LatencyOptions, LoadError, ping, wait_reachable};
use seikan_observe::{Series, Subject, metric};
use seikan_sys::{discover, sample};
use seikan_ui::Interrupt;

/// Samples the path at the switch for some seconds while packets cross it.
fn look(hosts: &Hosts, ends: &Ends<'_>) -> Series {
    let middle = hosts.middle.as_ref().expect("a host in the middle");
    let few = LatencyOptions {
        count: 10,
        interval: Duration::from_millis(5),
        ..LatencyOptions::default()
    };
    let watch = || {
        let map = discover::path(&discover::Subject::Interface(PORTS[0].into())).expect("a path");
        let program = map.program.as_ref().expect("a program");
        assert_eq!(program.name, "ovs-vswitchd");
        assert_eq!(map.egress.as_deref(), Some(PORTS[1]));
        let mut sampler = sample::Sampler::of_counters(&map).expect("counters");
        let mut series = Series::default();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(4) {
            series.push(sampler.sample());
            ping(ends, &few, &Interrupt::new()).expect("packets");
        }
        series
    };
    middle.run(watch).expect("the host")
}

fn grown(series: &Series, name: &str) -> u64 {
    let column = series.column(&Subject::Host, name);
    column.unwrap_or_else(|| panic!("no {name}")).growth()
}

#[test]
fn open_vswitch_is_found_behind_its_port_and_counts_its_look_ups() {
    let tunnel = tunnel::named("openvswitch", &Changes::default()).expect("a tunnel");
    if let Err(reason) = tunnel.availability() {
        return crate::common::skip(&reason);
    }
    if crate::common::host().is_none() {
        return;
    }
    let hosts = Hosts::create(tunnel.link(Link::default())).expect("hosts");
    let dir = tempfile::tempdir().expect("a directory");
    let interrupt = Interrupt::new();
    let started = tunnel.up(&hosts, dir.path(), &interrupt).expect("a switch");
    let ends = tunnel.ends(&hosts);
    wait_reachable(&ends, Duration::from_secs(15), &interrupt, || {
        Ok::<_, LoadError>(())
    })
    .expect("an answer");
    let well = look(&hosts, &ends);
    assert!(grown(&well, metric::SWITCH_HITS) > 100);
    assert_eq!(grown(&well, metric::SWITCH_LOST), 0);

    let fault: Fault = toml::from_str("kind = \"flow-table\"\nat = \"middle\"").expect("a fault");
    let site = Site {
        hosts: &hosts,
        tunnel: "openvswitch",
        started: &started,
    };
    let applied = fault.apply(3.0, site).expect("the fault");
    assert!(grown(&look(&hosts, &ends), metric::SWITCH_LOST) > 100);
    drop(applied);
    assert!(grown(&look(&hosts, &ends), metric::SWITCH_HITS) > 100);
}
