//! Faults against a real kernel: each changes its setting and reverts it. Cheap ones only.

use std::process::{Command, Stdio};
use std::time::Duration;

use seikan_lab::scenario::{Fault, Site};
use seikan_lab::site::Host;
use seikan_lab::site::{Hosts, Link};
use seikan_lab::tunnel::Started;
use seikan_load::{LatencyOptions, ping};
use seikan_sys::ethtool::{Ethtool, Feature};
use seikan_ui::Interrupt;

fn hosts(link: Link) -> Option<Hosts> {
    match Hosts::create(link) {
        Ok(hosts) => Some(hosts),
        Err(error) => {
            crate::common::skip(error.to_string());
            None
        }
    }
}

fn fault(text: &str) -> Fault {
    toml::from_str(text).expect("a fault")
}

/// Applies a fault over the bare link, and looks before, meanwhile, and afterwards.
fn three_looks<T>(text: &str, severity: f64, look: impl Fn(&Hosts) -> T) -> Option<[T; 3]> {
    let hosts = hosts(Link::default())?;
    let started = Started::default();
    let site = Site {
        hosts: &hosts,
        tunnel: "raw",
        started: &started,
    };
    let before = look(&hosts);
    let applied = fault(text).apply(severity, site).expect("apply");
    let meanwhile = look(&hosts);
    drop(applied);
    Some([before, meanwhile, look(&hosts)])
}

/// Returns the output of a tool in a host; `None` (loudly) without the tool.
fn printed(host: &Host, line: &str) -> Option<String> {
    let mut words = line.split(' ');
    let program = words.next().unwrap_or_default();
    let mut command = Command::new(program);
    command
        .args(words)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    match host.spawn(&mut command) {
        Ok(child) => {
            let output = child.wait_with_output().expect("output");
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Err(error) => {
            crate::common::skip(format!("{program}: {error}"));
            None
        }
    }
}

/// Whether the tools that faults are made with are there.
fn tools() -> bool {
    let Some(host) = crate::common::host() else {
        return false;
    };
    printed(&host, "nft --version").is_some() && printed(&host, "tc -V").is_some()
}

#[test]
fn a_short_queue_is_long_again() {
    let looks = three_looks("kind = \"queue-length\"", 3.0, |hosts| {
        let netlink = hosts.a.netlink().expect("netlink");
        netlink.link(&hosts.a.device).expect("link").tx_queue_len
    });
    let Some([before, meanwhile, after]) = looks else {
        return;
    };
    assert_eq!((meanwhile, after), (3, before));
}

#[test]
fn a_smaller_mtu_is_the_old_one_again_at_both_ends() {
    let text = "kind = \"mtu\"\nat = \"both\"";
    let looks = three_looks(text, 700.0, |hosts| {
        [&hosts.a, &hosts.b].map(|host| {
            let netlink = host.netlink().expect("netlink");
            netlink.link(&host.device).expect("link").mtu
        })
    });
    let Some(looks) = looks else { return };
    assert_eq!(looks, [[1500; 2], [700; 2], [1500; 2]]);
}

#[test]
fn offloads_come_back() {
    let looks = three_looks("kind = \"offloads-off\"", 0.0, |hosts| {
        let ethtool = hosts.a.run(Ethtool::open).expect("host").expect("ethtool");
        [
            Feature::Tso,
            Feature::Gso,
            Feature::Gro,
            Feature::TxChecksum,
        ]
        .map(|feature| ethtool.feature(&hosts.a.device, feature).expect("feature"))
    });
    let Some([before, meanwhile, after]) = looks else {
        return;
    };
    assert_eq!(meanwhile, [false; 4]);
    assert_eq!(after, before);
}

#[test]
fn receive_offload_goes_again() {
    let text = "kind = \"receive-offload\"\nat = \"receiver\"";
    let looks = three_looks(text, 0.0, |hosts| {
        let ethtool = hosts.b.run(Ethtool::open).expect("host").expect("ethtool");
        ethtool
            .feature(&hosts.b.device, Feature::Gro)
            .expect("feature")
    });
    let Some(looks) = looks else { return };
    assert_eq!(looks, [false, true, false]);
}

#[test]
fn receiving_is_dear_and_spread_before_a_fault_of_receiving() {
    if !tools() {
        return;
    }
    let Some(hosts) = hosts(Link::default()) else {
        return;
    };
    let fault = fault("kind = \"one-flow\"\nat = \"both\"");
    fault.prepare(1_500.0, &hosts).expect("prepare");
    let rules = printed(&hosts.b, "nft list ruleset").unwrap_or_default();
    assert_eq!(rules.matches(" drop").count(), 1_500);
    let queue = format!("{}/queues/rx-0/rps_cpus", hosts.b.device);
    let before = hosts.b.set_attribute(&queue, "0").expect("rps_cpus");
    let processors = std::thread::available_parallelism()
        .expect("processors")
        .get() as u32;
    let all: Vec<u32> = (0..processors).collect();
    assert_eq!(before.trim(), seikan_sys::softirq::mask(&all));
}

#[test]
fn a_moderated_link_answers_late() {
    let rtt = |moderation| {
        let hosts = hosts(Link {
            moderation,
            ..Link::default()
        })?;
        let few = LatencyOptions {
            count: 50,
            interval: Duration::from_millis(3),
            ..LatencyOptions::default()
        };
        let report = ping(&hosts.over_link(), &few, &Interrupt::new()).expect("answers");
        Some(report.p50_us)
    };
    let (Some(at_once), Some(late)) = (rtt(0), rtt(2_000)) else {
        return;
    };
    // The NIC may be polled at any time of its period.
    assert!(late > at_once + 500.0, "{at_once} and {late} µs");
}

#[test]
fn a_token_bucket_goes() {
    if !tools() {
        return;
    }
    let looks = three_looks("kind = \"shaper\"", 50.0, |hosts| {
        printed(&hosts.a, "tc qdisc show").unwrap_or_default()
    });
    let Some([before, meanwhile, after]) = looks else {
        return;
    };
    assert!(
        meanwhile.contains("tbf") && meanwhile.contains("50Mbit"),
        "{meanwhile}"
    );
    assert_eq!(after, before);
}

#[test]
fn dropping_filters_go() {
    if !tools() {
        return;
    }
    for (kind, severity, rule) in [
        ("loss", 1.5, "< 15000 drop"),
        ("mtu-black-hole", 900.0, "length > 900 drop"),
    ] {
        let text = format!("kind = \"{kind}\"\nat = \"receiver\"");
        let looks = three_looks(&text, severity, |hosts| {
            printed(&hosts.b, "nft list ruleset").unwrap_or_default()
        });
        let Some([_, meanwhile, after]) = looks else {
            return;
        };
        assert!(meanwhile.contains(rule), "{meanwhile}");
        assert_eq!(after, "");
    }
}

#[test]
fn packets_are_steered_no_longer() {
    let text = "kind = \"receive-on-one-cpu\"\nat = \"receiver\"";
    // The fault mounts its own view of /sys. The script does the same, to see the setting.
    let looks = three_looks(text, 0.0, |hosts| {
        let file = format!("/sys/class/net/{}/queues/rx-0/rps_cpus", hosts.b.device);
        let script = format!("mount -t sysfs none /sys && cat {file}");
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", &script])
            .stdout(Stdio::piped());
        let child = hosts.b.spawn(&mut command).expect("unshare");
        let output = child.wait_with_output().expect("output");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    });
    let Some([before, meanwhile, after]) = looks else {
        return;
    };
    assert_eq!(meanwhile.trim_start_matches(['0', ',']), "1");
    assert_eq!(after, before);
}

#[test]
fn a_setting_of_the_machine_is_set_back_also_after_a_panic() {
    let file = "/proc/sys/net/core/netdev_budget";
    let read = || std::fs::read_to_string(file).expect("sysctl");
    let before = read();
    let Some(hosts) = hosts(Link::default()) else {
        return;
    };
    let started = Started::default();
    let outcome = std::panic::catch_unwind(|| {
        let site = Site {
            hosts: &hosts,
            tunnel: "raw",
            started: &started,
        };
        let applied = fault("kind = \"napi-budget\"").apply(299.0, site);
        if let Err(error) = &applied {
            crate::common::skip(error.to_string());
            return;
        }
        assert_eq!(read().trim(), "299");
        panic!("on purpose");
    });
    assert_eq!(read(), before);
    drop(outcome);
}
