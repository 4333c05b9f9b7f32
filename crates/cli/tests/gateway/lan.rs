//! Events on a gateway's LAN: devices that move, unlisted hosts, link changes, other offloads.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use seikan_lab::site::Host;
use seikan_sys::ethtool::Feature;
use serde_json::Value;

use crate::common::{PATIENCE, Tunnel, eventually, unaccounted};
use crate::gateway::site::{
    DEVICE, DEVICE_INTERFACE, LAN, Plan, SHOWN, Site, add_address, answers, at_running_site,
    at_site, carries, carries_udp, index, mac, new_host, remove_address, run, set_feature, set_mac,
};
use crate::gateway::stream::Stream;

/// A device that is configured by its MAC address.
const BY_MAC: &str = r#"
[[gateway.device]]
name = "device"
mac = "02:00:00:00:00:10"
overlay = ["10.77.0.10", "fd77::10"]
"#;

fn dropped(direction: &Value, reason: &str) -> u64 {
    direction["drops"][reason].as_u64().unwrap_or(0)
}

#[test]
fn a_device_known_by_its_mac_may_change_its_address() {
    let plan = Plan {
        devices: BY_MAC.to_owned(),
        ..Plan::default()
    };
    at_running_site(&plan, |site, _tunnels| {
        for (shown, target) in SHOWN.into_iter().zip(DEVICE) {
            // Its address is unknown until it has sent a frame.
            site.reaches(&site.device, shown);
            site.reaches(&site.remote, target);
        }
        remove_address(&site.device, DEVICE_INTERFACE, "192.168.1.10/24");
        add_address(&site.device, DEVICE_INTERFACE, "192.168.1.77/24");
        site.reaches(&site.device, SHOWN[0]);
        carries(&site.remote, &site.device, DEVICE[0]);
        // It may have several IPv6 addresses: the first is probed three times, once a second.
        remove_address(&site.device, DEVICE_INTERFACE, "fd00:1::10/64");
        add_address(&site.device, DEVICE_INTERFACE, "fd00:1::77/64");
        site.reaches(&site.device, SHOWN[1]);
        carries(&site.remote, &site.device, DEVICE[1]);
    });
}

#[test]
fn a_device_known_by_its_address_may_change_its_mac() {
    at_running_site(&Plan::default(), |site, _tunnels| {
        set_mac(&site.device, DEVICE_INTERFACE, [2, 0, 0, 0, 0, 0x99]);
        // It could be a second device with the address: the first MAC address is probed three
        // times, once a second.
        let patience = Duration::from_secs(8);
        let begin = Instant::now();
        assert!(
            answers(&site.device, SHOWN[0], patience),
            "{:#}",
            site.gateway_status()
        );
        eprintln!(
            "another interface is accepted after {:.1?}",
            begin.elapsed()
        );
        carries(&site.remote, &site.device, DEVICE[0]);
    });
}

#[test]
fn an_address_that_two_use_is_reported_and_stays_with_the_first() {
    at_running_site(&Plan::default(), |site, _tunnels| {
        let double = unlisted(site, "192.168.1.10/24");
        eventually("no conflict", || {
            assert!(!answers(&double, SHOWN[0], Duration::from_millis(500)));
            site.gateway_status()["conflicts"][0].is_object()
        });
        let status = site.gateway_status();
        let conflict = &status["conflicts"][0];
        assert_eq!(conflict["address"], "192.168.1.10", "{status:#}");
        assert_eq!(
            conflict["mac"],
            mac(&double, DEVICE_INTERFACE),
            "{status:#}"
        );
        assert_eq!(
            status["devices"][0]["mac"],
            mac(&site.device, DEVICE_INTERFACE)
        );
        carries(&site.remote, &site.device, DEVICE[0]);
    });
}

#[test]
fn unlisted_hosts_stay_out_and_are_counted() {
    at_running_site(&Plan::default(), |site, _tunnels| {
        let unlisted = unlisted(site, "192.168.1.66/24");
        assert!(!answers(&unlisted, SHOWN[0], Duration::from_millis(500)));
        let responder = site.gateway_status()["responder"]["mac"].clone();
        // The unlisted host gets no answer, even with a route to the device.
        let responder = responder.as_str().expect("MAC");
        let known = [
            "ip",
            "neigh",
            "replace",
            SHOWN[0],
            "lladdr",
            responder,
            "dev",
            DEVICE_INTERFACE,
        ];
        run(&unlisted, &known);
        let before = dropped(&site.gateway_status()["unattributed"], "unlisted_device");
        send(&unlisted, &format!("{}:9", SHOWN[0]), 5, 5);
        eventually("not counted", || {
            dropped(&site.gateway_status()["unattributed"], "unlisted_device") == before + 5
        });
    });
}

#[test]
fn broadcast_and_multicast_stay_on_the_lan_and_are_counted() {
    at_running_site(&Plan::default(), |site, _tunnels| {
        run(
            &site.device,
            &["ip", "route", "add", "default", "dev", DEVICE_INTERFACE],
        );
        let counted = || {
            dropped(
                &site.gateway_status()["devices"][0]["outbound"],
                "not_unicast",
            )
        };
        let multicast6 = format!("[ff02::fb%{}]:5353", index(&site.device, DEVICE_INTERFACE));
        for group in [
            "192.168.1.255:9",
            "255.255.255.255:9",
            "224.0.0.251:5353",
            &multicast6,
        ] {
            let before = counted();
            send(&site.device, group, 3, 5);
            eventually(&format!("{group} not counted"), || counted() >= before + 3);
        }
    });
}

#[test]
fn a_cable_out_and_in_holds_a_stream_up_and_no_more() {
    at_running_site(&Plan::default(), |site, [gateway, _remote]| {
        let netlink = &site.lan.netlink;
        let cable = |in_: bool| {
            if in_ {
                netlink.set_up(site.gateway_port).expect("up")
            } else {
                netlink.set_down(site.gateway_port).expect("down")
            }
        };
        survives(site, &gateway, || cable(false), || cable(true));
    });
}

#[test]
fn an_interface_down_and_up_only_delays_a_stream() {
    at_running_site(&Plan::default(), |site, [gateway, _remote]| {
        let netlink = site.gateway.netlink().expect("netlink");
        let interface = index(&site.gateway, LAN);
        let (down, up) = (|| netlink.set_down(interface), || netlink.set_up(interface));
        survives(
            site,
            &gateway,
            || down().expect("down"),
            || up().expect("up"),
        );
    });
}

#[test]
fn an_interface_deleted_and_recreated_only_delays_a_stream() {
    at_running_site(&Plan::default(), |site, [gateway, _remote]| {
        let netlink = site.gateway.netlink().expect("netlink");
        let delete = || {
            netlink
                .delete_link(index(&site.gateway, LAN))
                .expect("delete")
        };
        let plug = || {
            site.lan.plug(&site.gateway, LAN, 1500);
        };
        survives(site, &gateway, delete, plug);
    });
}

/// Streams both ways survive `off`, a pause, and `on`; the gateway idles meanwhile.
fn survives(site: &Site, gateway: &Tunnel, off: impl FnOnce(), on: impl FnOnce()) {
    let streams = [
        Stream::start(&site.device, &site.remote, SHOWN[0], 1_000_000),
        Stream::start(&site.remote, &site.device, DEVICE[1], 1_000_000),
    ];
    for stream in &streams {
        stream.goes_on_within(PATIENCE);
    }
    off();
    // Packets in flight are still processed.
    std::thread::sleep(Duration::from_millis(300));
    let (begin, busy) = (Instant::now(), cpu_time(gateway));
    std::thread::sleep(Duration::from_millis(1500));
    let load = (cpu_time(gateway) - busy).as_secs_f64() / begin.elapsed().as_secs_f64();
    assert!(
        load < 0.2,
        "{load:.2} of a processor while nothing can pass"
    );
    on();
    for stream in &streams {
        // Retransmission backs off to 1.6 s meanwhile.
        let time = stream.goes_on_within(PATIENCE);
        eprintln!("goes on after {time:.1?}");
    }
    for stream in streams {
        stream.finish();
    }
}

/// Returns user and system time of a tunnel's process (proc_pid_stat(5)).
fn cpu_time(tunnel: &Tunnel) -> Duration {
    let path = format!("/proc/{}/stat", tunnel.child.id());
    let text = std::fs::read_to_string(path).expect("stat");
    let (_, fields) = text.rsplit_once(')').expect("name");
    let fields: Vec<&str> = fields.split_whitespace().collect();
    // Fields 14 and 15, in hundredths of a second (USER_HZ).
    let ticks: u64 = [11, 12]
        .iter()
        .map(|i| fields[*i].parse::<u64>().expect("ticks"))
        .sum();
    Duration::from_millis(ticks * 10)
}

#[test]
fn offloads_may_be_switched_under_a_stream() {
    at_running_site(&Plan::default(), |site, _tunnels| {
        let streams = [
            Stream::start(&site.device, &site.remote, SHOWN[0], 30_000_000),
            Stream::start(&site.remote, &site.device, DEVICE[0], 30_000_000),
            Stream::start(&site.remote, &site.device, DEVICE[1], 30_000_000),
        ];
        let until = Instant::now() + Duration::from_secs(3);
        let mut on = false;
        while Instant::now() < until {
            for (host, interface) in [(&site.gateway, LAN), (&site.device, DEVICE_INTERFACE)] {
                // Segmentation depends on checksums: those are disabled first and enabled last.
                let mut features = [Feature::Gro, Feature::Tso, Feature::TxChecksum];
                if on {
                    features.reverse();
                }
                for feature in features {
                    set_feature(host, interface, feature, on);
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            on = !on;
        }
        for stream in streams {
            stream.goes_on_within(PATIENCE);
            let report = stream.finish();
            assert!(report.longest_gap < PATIENCE / 4, "{report:?}");
        }
    });
}

#[test]
fn super_packets_are_segmented_for_a_nic_that_loses_them() {
    at_running_site(&Plan::default(), |site, _tunnels| {
        // Like a NIC with broken segmentation: packets above the MTU are lost.
        let rules = format!(
            "add table netdev broken\n\
             add chain netdev broken interface {{ type filter hook ingress device {DEVICE_INTERFACE} priority 0; }}\n\
             add rule netdev broken interface meta length > 1600 drop"
        );
        run(&site.device, &["nft", &rules]);
        let stream = Stream::start(&site.remote, &site.device, DEVICE[0], 30_000_000);
        // Without help it makes some 25 kB per second.
        stream.is_fast_within(Duration::from_secs(15));
        stream.finish();
    });
}

#[test]
fn every_packet_is_accounted_for() {
    let plan = Plan {
        mtu: 9000,
        ..Plan::default()
    };
    at_running_site(&plan, |site, _tunnels| {
        for (there, back) in SHOWN.into_iter().zip(DEVICE) {
            carries(&site.device, &site.remote, there);
            carries(&site.remote, &site.device, back);
        }
        carries_udp(&site.device, &site.remote, SHOWN[0], 20_000);
        let unlisted = unlisted(site, "192.168.1.66/24");
        eventually("the unlisted is not heard", || {
            assert!(!answers(&unlisted, SHOWN[0], Duration::from_millis(300)));
            dropped(&site.gateway_status()["unattributed"], "unlisted_device") > 0
        });
        send(&site.device, "192.168.1.255:9", 5, 5);
        // One datagram is too long, one is for a remote by its own address, and one is for an
        // unknown address.
        send(&site.device, &format!("{}:9", SHOWN[0]), 2, 3000);
        let route = ["ip", "route", "add", "10.77.0.0/24", "via", SHOWN[0]];
        run(&site.device, &route);
        send(&site.device, "10.77.0.2:9", 5, 5);
        send(&site.device, "10.77.0.99:9", 5, 5);
        send(&site.remote, "10.77.0.77:9", 5, 5);
        std::thread::sleep(Duration::from_millis(200));
        let status = site.status(&site.gateway, &site.gateway_config);
        assert_eq!(unaccounted(&status), [0, 0], "{status:#}");
        let gateway = &status["gateway"];
        let device = &gateway["devices"][0];
        for counts in [
            &gateway["unattributed"],
            &gateway["responder"]["own"],
            &device["outbound"],
            &device["inbound"],
        ] {
            balanced(counts);
        }
        assert_eq!(
            dropped(&device["outbound"], "shown_otherwise"),
            5,
            "{device:#}"
        );
        assert!(dropped(&device["outbound"], "too_big") > 0, "{device:#}");
    });
}

#[test]
fn frames_that_the_gateway_cannot_send_are_counted() {
    at_site(&Plan::default(), |site| {
        let netlink = site.gateway.netlink().expect("netlink");
        let interface = index(&site.gateway, LAN);
        netlink.set_down(interface).expect("down");
        let _gateway = site.start(&site.gateway, &site.gateway_config);
        let own = || site.gateway_status()["responder"]["own"].clone();
        // The gateway probes for the device, which it has not found yet.
        eventually("not counted", || dropped(&own(), "lan_write_refused") > 0);
        balanced(&own());
        netlink.set_up(interface).expect("up");
        eventually("nothing is sent", || {
            own()["packets_out"].as_u64() > Some(0)
        });
        balanced(&own());
    });
}

fn balanced(counts: &Value) {
    let of = |name: &str| counts[name].as_u64().expect("a number");
    let drops = counts["drops"].as_object().expect("drops");
    let dropped: u64 = drops.values().map(|n| n.as_u64().expect("a number")).sum();
    let fates = of("packets_out") + of("consumed") + of("pending") + dropped;
    assert_eq!(of("packets_in"), fates, "{counts:#}");
    assert!(of("packets_in") > 0, "{counts:#}");
}

#[test]
fn nothing_is_left_when_it_ends() {
    at_site(&Plan::default(), |site| {
        let before = settled(&site.gateway);
        let [gateway, _remote] = site.up();
        site.reaches(&site.device, SHOWN[0]);
        assert_ne!(traces(&site.gateway), before);
        let (code, _) = end(gateway, "TERM");
        assert_eq!(code, Some(0), "{}", site.logs());
        same(&before, &traces(&site.gateway));
    });
}

/// Fails if lines were added or removed, and shows only those.
pub fn same(before: &[String], after: &[String]) {
    let missing = |from: &[String], of: &[String]| -> Vec<String> {
        let lines = from.iter().filter(|line| !of.contains(line));
        lines.cloned().collect()
    };
    let (gone, new) = (missing(before, after), missing(after, before));
    assert!(
        gone.is_empty() && new.is_empty(),
        "gone: {gone:#?}\nnew: {new:#?}"
    );
}

/// Stops a tunnel; returns its exit code and the time it took.
pub fn end(mut tunnel: Tunnel, signal: &str) -> (Option<i32>, Duration) {
    let begin = Instant::now();
    tunnel.signal(signal);
    (tunnel.wait(PATIENCE).code(), begin.elapsed())
}

/// Returns everything that a gateway can leave: links with promiscuity, addresses, groups, routes,
/// rules, proxies, tables.
pub fn traces(host: &Host) -> Vec<String> {
    let commands = [
        "ip -details link",
        "ip addr",
        "ip maddr",
        "ip route show table all",
        "ip -6 route show table all",
        "ip rule",
        "ip neigh show proxy",
        "ip -6 neigh show proxy",
        "nft list ruleset",
    ];
    let printed = commands.map(|command| {
        let words: Vec<&str> = command.split(' ').collect();
        run(host, &words)
    });
    printed
        .iter()
        .flat_map(|text| text.lines())
        .map(str::to_owned)
        .collect()
}

/// As [`traces`], once the kernel's own addresses are usable.
pub fn settled(host: &Host) -> Vec<String> {
    let is_settled = || !run(host, &["ip", "addr"]).contains("tentative");
    std::thread::sleep(Duration::from_millis(300));
    eventually("addresses are tentative", is_settled);
    traces(host)
}

/// Makes another host on the LAN.
fn unlisted(site: &Site, address: &str) -> Host {
    let host = new_host("unlisted").expect("host");
    site.lan.plug(&host, DEVICE_INTERFACE, 1500);
    add_address(&host, DEVICE_INTERFACE, address);
    host
}

/// Sends datagrams that are not answered.
fn send(from: &Host, to: &str, count: usize, length: usize) {
    let to: SocketAddr = to.parse().expect("address");
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let send = || {
        let socket = UdpSocket::bind(any).expect("bind");
        socket.set_broadcast(true).expect("broadcast");
        for _ in 0..count {
            socket.send_to(&vec![1; length], to).expect("send");
        }
    };
    from.run(send).expect("namespace");
}
