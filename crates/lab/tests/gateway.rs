//! Gateways in namespaces: the naive one fails as it must, forwarding works, and nothing is left behind.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use seikan_lab::LabError;
use seikan_lab::bench::Load;
use seikan_lab::gateway::site::{LAN, Lan, MAX_DEVICES, Site, on_wan};
use seikan_lab::gateway::{FORWARDING, GatewayOptions, GatewayReport, gateway};
use seikan_lab::site::Host;
use seikan_load::{Ends, LoadError, wait_reachable};
use seikan_ui::Interrupt;

/// One test at a time (processes and descriptors are counted, and figures compared); `None` where
/// it may not run.
fn alone() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    crate::common::host().map(|_| guard)
}

fn options(only: &[&str], loads: &[Load]) -> GatewayOptions {
    GatewayOptions {
        seconds: 1.0,
        rounds: 1,
        only: Some(only.iter().map(|&name| name.to_owned()).collect()),
        loads: loads.to_vec(),
        ..GatewayOptions::default()
    }
}

fn run(only: &[&str], loads: &[Load]) -> Option<GatewayReport> {
    let report = gateway(&options(only, loads), &Interrupt::new(), &mut |_| ()).expect("runs");
    if let Some(absent) = report.absent.first() {
        crate::common::skip(format!("{}: {}", absent.name, absent.reason));
        return None;
    }
    Some(report)
}

fn speed(report: &GatewayReport, row: &str, load: Load) -> f64 {
    let row = report.row(row).expect("row");
    assert_eq!(row.errors, Vec::<String>::new(), "{}", row.name);
    row.load(load).expect("measured").gbit_per_second.median
}

#[test]
fn one_header_on_merged_packets_breaks_tcp_out_of_the_device_only() {
    let Some(_alone) = alone() else { return };
    // Other programs may leave a run too little of the processors to show a difference.
    for runs_left in (0..3).rev() {
        let Some(report) = run(&["naive-gro", "naive-no-gro"], &[Load::Tcp1, Load::Rev]) else {
            return;
        };
        let merged = speed(&report, "naive-gro", Load::Tcp1);
        let single = speed(&report, "naive-no-gro", Load::Tcp1);
        let back = speed(&report, "naive-gro", Load::Rev);
        // The article's factor is 20; here it is more than 1000.
        if single.min(back) > 20.0 * merged {
            return;
        }
        eprintln!("{merged} Gbit/s out of the device, {back} back, {single} without merging");
        assert!(runs_left > 0, "too small a difference in three runs");
    }
}

#[test]
fn the_custom_protocol_carries_tcp_and_udp_between_two_hosts() {
    let Some(_alone) = alone() else { return };
    let row = "naive-host-to-host";
    let Some(report) = run(&[row], &[Load::Tcp1, Load::Udp]) else {
        return;
    };
    // The source's was above 30 Mbit/s. There is no card whose receive offload could break it.
    for load in [Load::Tcp1, Load::Udp] {
        assert!(speed(&report, row, load) > 0.03, "{load:?}");
    }
}

#[test]
fn the_naive_gateway_loses_fragments() {
    let Some(_alone) = alone() else { return };
    let Some(report) = run(&["naive-gro", "naive-no-gro"], &[Load::Tcp1]) else {
        return;
    };
    let fragments = |row: &str| {
        let remote = &report.row(row).expect("row").rounds[0].said[1];
        ["cut", "headless"].map(|field| remote[field].as_u64().expect("a count"))
    };
    let [cut, headless] = fragments("naive-gro");
    assert!(cut > 0 && headless >= cut, "{cut} and {headless}");
    assert_eq!(fragments("naive-no-gro"), [0, 0]);
    // The reason: the packet socket of the gateway returns packets above the MTU of 1500.
    let sizes = |row: &str| {
        let gateway = &report.row(row).expect("row").rounds[0].said[0];
        ["merged", "largest"].map(|field| gateway[field].as_u64().expect("a count"))
    };
    let [merged, largest] = sizes("naive-gro");
    assert!(merged > 0 && largest > 1500, "{merged}, {largest} bytes");
    let [merged, largest] = sizes("naive-no-gro");
    assert!(merged == 0 && largest <= 1500, "{merged}, {largest} bytes");
}

#[test]
fn receive_packet_steering_changes_nothing_but_the_processor() {
    let Some(_alone) = alone() else { return };
    let Some(report) = run(&["naive-no-gro-rps"], &[Load::Tcp1]) else {
        return;
    };
    assert!(speed(&report, "naive-no-gro-rps", Load::Tcp1) > 0.01);
}

#[test]
fn plain_nics_segment_at_the_device_and_merge_at_the_gateway() {
    let Some(_alone) = alone() else { return };
    let site = Site::create(&Lan::default()).expect("site");
    let of = |host: &Host, nic: &str| -> Vec<String> {
        let ethtool = host.netns().ethtool().expect("ethtool");
        let states = ethtool.features(nic).expect("offloads");
        let active = states.into_iter().filter(|state| state.active);
        active.map(|state| state.name).collect()
    };
    let device = of(&site.device, &site.device.device);
    let cuts = |name: &str| {
        let tcp = ["tx-tcp-segmentation", "tx-tcp6-segmentation"].contains(&name);
        tcp || name.starts_with("tx-checksum") || name == "tx-udp-segmentation"
    };
    assert!(!device.iter().any(|name| cuts(name)), "{device:?}");
    let merges = |name: &String| name == "rx-gro";
    assert!(of(&site.gateway, LAN).iter().any(merges));
    let unmerged = Site::create(&Lan {
        gro: false,
        ..Lan::default()
    })
    .expect("site");
    assert!(!of(&unmerged.gateway, LAN).iter().any(merges));
}

#[test]
fn every_device_behind_a_switch_reaches_the_remote() {
    let Some(_alone) = alone() else { return };
    let site = Site::create(&Lan {
        devices: 3,
        ..Lan::default()
    })
    .expect("site");
    site.let_gateway_forward().expect("forwarding");
    site.route_through_gateway(&on_wan(2).networks())
        .expect("routes");
    site.route_to_lan(None).expect("routes");
    let devices: Vec<_> = site.devices().collect();
    assert_eq!(devices.len(), 3);
    for client in devices {
        for target in on_wan(2).both() {
            let ends = Ends {
                client: client.netns(),
                server: site.remote.netns(),
                target,
                sources: &[],
                congestion: None,
                forward: None,
            };
            let patience = Duration::from_secs(5);
            wait_reachable(
                &ends,
                patience,
                &Interrupt::new(),
                || Ok::<_, LoadError>(()),
            )
            .expect("an answer");
        }
    }
}

#[test]
fn forwarding_carries_both_directions_in_both_families() {
    let Some(_alone) = alone() else { return };
    for ipv6 in [false, true] {
        let options = GatewayOptions {
            ipv6,
            ..options(&[FORWARDING], &[Load::Tcp1, Load::Rev])
        };
        let report = gateway(&options, &Interrupt::new(), &mut |_| ()).expect("runs");
        for load in options.loads {
            assert!(speed(&report, FORWARDING, load) > 0.05, "IPv6: {ipv6}");
        }
    }
}

#[test]
fn a_device_of_a_mesh_reaches_a_member_behind_another_nat() {
    let Some(_alone) = alone() else { return };
    let rows = [
        "host-to-host",
        "seikan-transparent",
        "seikan-routed",
        "naive-no-gro",
    ];
    for ipv6 in [false, true] {
        // The naive encapsulator has no IPv6.
        let rows = if ipv6 { &rows[..3] } else { &rows[..] };
        let options = GatewayOptions {
            mesh: true,
            ipv6,
            ..options(rows, &[Load::Tcp1, Load::Rev])
        };
        let report = gateway(&options, &Interrupt::new(), &mut |_| ()).expect("runs");
        if let Some(absent) = report.absent.first() {
            crate::common::skip(format!("{}: {}", absent.name, absent.reason));
            return;
        }
        for row in rows {
            for load in [Load::Tcp1, Load::Rev] {
                assert!(speed(&report, row, load) > 0.01, "{row}, IPv6: {ipv6}");
            }
        }
    }
    let options = GatewayOptions {
        mesh: true,
        ..options(&[FORWARDING], &[Load::Tcp1])
    };
    let report = gateway(&options, &Interrupt::new(), &mut |_| ()).expect("runs");
    assert_eq!(report.absent[0].name, FORWARDING);
}

/// Namespaces that this process holds, and processes of the naive encapsulator that it has started.
fn open_files() -> (Vec<PathBuf>, usize) {
    let entries = |path: &str| std::fs::read_dir(path).expect("procfs").flatten();
    let links = entries("/proc/self/fd").filter_map(|fd| std::fs::read_link(fd.path()).ok());
    let ours = |link: &PathBuf| link.to_string_lossy().starts_with("net:[");
    let is_child = |entry: &std::fs::DirEntry| {
        let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
        let [words, status] = ["cmdline", "status"].map(|name| {
            let bytes = read(name);
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let parent = format!("PPid:\t{}\n", std::process::id());
        words.contains("\0naive\0") && status.contains(&parent)
    };
    let children = entries("/proc").filter(is_child).count();
    (links.filter(ours).collect(), children)
}

#[test]
fn nothing_is_left_after_an_interruption() {
    let Some(_alone) = alone() else { return };
    assert_eq!(open_files(), (Vec::new(), 0), "before");
    let interrupt = Interrupt::new();
    let mut busy = (Vec::new(), 0);
    let outcome = gateway(
        &options(&["naive-no-gro"], &[Load::Tcp1]),
        &interrupt,
        &mut |step| {
            if step.step.contains("TCP") {
                busy = open_files();
                interrupt.raise();
            }
        },
    );
    assert!(matches!(outcome, Err(LabError::Interrupted)), "{outcome:?}");
    assert_eq!((busy.0.len(), busy.1), (3, 2), "three hosts and both ends");
    assert_eq!(open_files(), (Vec::new(), 0), "after");
}

#[test]
fn impossible_options_are_refused() {
    let refused = |options: GatewayOptions| {
        let outcome = gateway(&options, &Interrupt::new(), &mut |_| ());
        matches!(outcome, Err(LabError::Usage(_)))
    };
    assert!(refused(options(&["wireguard-og"], &[Load::Tcp1])));
    assert!(refused(options(&[FORWARDING], &[])));
    for devices in [0, MAX_DEVICES + 1] {
        assert!(refused(GatewayOptions {
            devices,
            ..options(&[FORWARDING], &[Load::Tcp1])
        }));
    }
}
