//! Routed mode: the settings of the kernel that it needs, no others, and their removal.

use std::fs;
use std::net::UdpSocket;
use std::process::Stdio;
use std::time::Duration;

use seikan_lab::site::Host;

use crate::common::{PATIENCE, eventually};
use crate::gateway::lan::{end, same, settled, traces};
use crate::gateway::site::{
    DEVICE_INTERFACE, LAN, Plan, REMOTE, SHOWN, Site, WAN, add_address, add_addresses, add_route,
    answers, at_site, index, interface, ip, new_host, read_sysctl, run, write_sysctl,
};

/// Sysctls that a routed gateway may set.
const PARAMETERS: [&str; 14] = [
    "ipv4/conf/all/forwarding",
    "ipv4/conf/lan0/forwarding",
    "ipv4/conf/wan0/forwarding",
    "ipv4/conf/lan0/proxy_arp",
    "ipv4/neigh/lan0/proxy_delay",
    "ipv6/conf/all/forwarding",
    "ipv6/conf/default/forwarding",
    "ipv6/conf/lan0/forwarding",
    "ipv6/conf/wan0/forwarding",
    "ipv6/conf/lan0/accept_ra",
    "ipv6/conf/wan0/accept_ra",
    "ipv6/conf/default/accept_ra",
    "ipv6/conf/lan0/proxy_ndp",
    "ipv6/neigh/lan0/proxy_delay",
];

fn plan() -> Plan {
    Plan {
        mode: "routed",
        gateway: "proxy-arp = true",
        ..Plan::default()
    }
}

fn everything(host: &Host) -> Vec<String> {
    let parameter = |name: &&str| format!("{name} = {}", read_sysctl(host, name));
    let mut all: Vec<String> = PARAMETERS.iter().map(parameter).collect();
    all.extend(traces(host));
    all
}

#[test]
fn everything_is_taken_back_in_the_end() {
    at_site(&plan(), |site| {
        write_sysctl(&site.gateway, "ipv6/conf/wan0/accept_ra", "1");
        for interface in ["lan0", "default"] {
            write_sysctl(
                &site.gateway,
                &format!("ipv6/conf/{interface}/forwarding"),
                "1",
            );
        }
        settled(&site.gateway);
        let before = everything(&site.gateway);
        let [gateway, _remote] = site.up();
        site.reaches(&site.device, SHOWN[0]);
        assert_eq!(read_sysctl(&site.gateway, "ipv6/conf/all/forwarding"), "1");
        assert_eq!(read_sysctl(&site.gateway, "ipv6/conf/wan0/accept_ra"), "2");
        assert_eq!(end(gateway, "TERM").0, Some(0), "{}", site.logs());
        same(&before, &everything(&site.gateway));
    });
}

#[test]
fn everything_is_taken_back_after_it_was_killed() {
    at_site(&plan(), |site| {
        settled(&site.gateway);
        let before = everything(&site.gateway);
        let [gateway, _remote] = site.up();
        site.reaches(&site.device, SHOWN[0]);
        end(gateway, "KILL");
        eventually("something stays", || everything(&site.gateway) == before);
        let again = site.start(&site.gateway, &site.gateway_config);
        site.reaches(&site.device, SHOWN[0]);
        assert_eq!(end(again, "TERM").0, Some(0));
        same(&before, &everything(&site.gateway));
    });
}

#[test]
fn a_recreated_interface_is_set_up_again_and_all_is_reverted() {
    at_site(&plan(), |site| {
        let parameters = || PARAMETERS.map(|name| (name, read_sysctl(&site.gateway, name)));
        let before = parameters();
        let [gateway, _remote] = site.up();
        site.reaches(&site.device, SHOWN[0]);
        let during = parameters();
        let netlink = site.gateway.netlink().expect("netlink");
        let delete = || {
            let interface = index(&site.gateway, LAN);
            netlink.delete_link(interface).expect("delete");
        };
        delete();
        // Also after a long absence, and so quickly that only the last interface is set up.
        std::thread::sleep(Duration::from_millis(500));
        for again in [true, true, false] {
            site.lan.plug(&site.gateway, LAN, 1500);
            if again {
                delete();
            }
        }
        eventually("not set up again", || parameters() == during);
        add_addresses(&site.gateway, LAN, ["192.168.1.1/24", "fd00:1::1/64"]);
        // The neighbour entry of the gateway has the former MAC address.
        run(
            &site.device,
            &["ip", "neigh", "flush", "dev", DEVICE_INTERFACE],
        );
        for shown in SHOWN {
            site.reaches(&site.device, shown);
        }
        assert_eq!(end(gateway, "TERM").0, Some(0), "{}", site.logs());
        assert_eq!(parameters(), before);
        let left = traces(&site.gateway).join("\n");
        assert!(
            !left.contains("proxy") && !left.contains("seikan"),
            "{left}"
        );
    });
}

/// Adds routes between LAN and WAN through the gateway, on device and remote.
fn know_each_other(site: &Site) {
    add_route(&site.device, "10.0.0.0/24", "192.168.1.1");
    add_route(&site.device, "fd00:2::/64", "fd00:1::1");
    add_route(&site.remote, "192.168.1.0/24", "10.0.0.1");
    add_route(&site.remote, "fd00:1::/64", "fd00:2::1");
}

const SILENCE: Duration = Duration::from_millis(600);

#[test]
fn nobody_else_is_forwarded() {
    at_site(&plan(), |site| {
        know_each_other(site);
        let _tunnels = site.up();
        site.reaches(&site.device, SHOWN[0]);
        // Either direction suffices: the answer of an echo may be the packet that is not forwarded.
        let (device, remote) = (&site.device, &site.remote);
        for (from, source, to, target) in [
            (device, "192.168.1.10", remote, "10.0.0.2"),
            (device, "fd00:1::10", remote, "fd00:2::2"),
            (remote, "10.0.0.2", device, "192.168.1.10"),
            (remote, "fd00:2::2", device, "fd00:1::10"),
        ] {
            assert!(!arrives(from, source, to, target), "{target} from {source}");
        }
    });
}

#[test]
fn a_peer_gets_no_further_than_to_devices() {
    at_site(&plan(), |site| {
        let _tunnels = site.up();
        site.reaches(&site.device, SHOWN[0]);
        let neighbour = new_host("neighbour").expect("host");
        site.wan.plug(&neighbour, WAN, 1500);
        for (source, address) in REMOTE.into_iter().zip(["10.77.0.50", "fd77::50"]) {
            let whole = if ip(address).is_ipv4() { 32 } else { 128 };
            let host = format!("{address}/{whole}");
            add_address(&neighbour, WAN, &host);
            run(&site.gateway, &["ip", "route", "add", &host, "dev", WAN]);
            assert!(
                !arrives(&site.remote, source, &neighbour, address),
                "{address} from {source}"
            );
        }
    });
}

#[test]
fn the_wan_sends_nothing_to_a_device_or_into_the_overlay() {
    at_site(&plan(), |site| {
        let _tunnels = site.up();
        site.reaches(&site.device, SHOWN[0]);
        let neighbour = new_host("neighbour").expect("host");
        site.wan.plug(&neighbour, WAN, 1500);
        add_addresses(&neighbour, WAN, ["10.0.0.9/24", "fd00:2::9/64"]);
        for (net, via) in [
            ("192.168.1.0/24", "10.0.0.1"),
            ("10.77.0.0/24", "10.0.0.1"),
            ("fd00:1::/64", "fd00:2::1"),
            ("fd77::/64", "fd00:2::1"),
        ] {
            add_route(&neighbour, net, via);
        }
        for (from, to) in [("10.0.0.9", "192.168.1.10"), ("fd00:2::9", "fd00:1::10")] {
            assert!(
                !arrives(&neighbour, from, &site.device, to),
                "{to} from {from}"
            );
        }
        // To the device's own address it may pass.
        for address in ["192.168.1.10/32", "fd00:1::10/128"] {
            add_address(&neighbour, WAN, address);
        }
        for (from, host, to) in [
            ("192.168.1.10", &site.remote, REMOTE[0]),
            ("fd00:1::10", &site.remote, REMOTE[1]),
        ] {
            assert!(!arrives(&neighbour, from, host, to), "{to} from {from}");
        }
    });
}

/// Returns whether a datagram from an address of `from` arrives at an address of `host`.
fn arrives(from: &Host, source: &str, host: &Host, target: &str) -> bool {
    let bind = |host: &Host, address: &str| {
        let socket = host.run(|| UdpSocket::bind((ip(address), 0)));
        let socket = socket.expect("namespace").expect("bind");
        socket.set_read_timeout(Some(SILENCE)).expect("timeout");
        socket
    };
    let receiver = bind(host, target);
    let to = receiver.local_addr().expect("address");
    let sender = bind(from, source);
    (0..3).any(|_| {
        // The first can be lost during address resolution.
        sender.send_to(b"hello", to).expect("send");
        receiver.recv_from(&mut [0; 8]).is_ok()
    })
}

#[test]
fn a_router_of_one_family_stays_one() {
    for (forwards, (source, silent), switch) in [
        ("10.0.0.2", ("fd00:1::10", "fd00:2::2"), "ipv4/ip_forward"),
        (
            "fd00:2::2",
            ("192.168.1.10", "10.0.0.2"),
            "ipv6/conf/all/forwarding",
        ),
    ] {
        at_site(&plan(), |site| {
            know_each_other(site);
            write_sysctl(&site.gateway, switch, "1");
            let advertisements = "ipv6/conf/lan0/accept_ra";
            write_sysctl(&site.gateway, advertisements, "1");
            assert!(answers(&site.device, forwards, PATIENCE));
            let _tunnels = site.up();
            site.reaches(&site.device, SHOWN[0]);
            assert!(answers(&site.device, forwards, PATIENCE), "{switch}");
            // A router ignored advertisements before.
            let expected = if switch.starts_with("ipv6") { "1" } else { "2" };
            let during = read_sysctl(&site.gateway, advertisements);
            assert_eq!(during, expected, "{switch}");
            let leaks = arrives(&site.device, source, &site.remote, silent);
            assert!(!leaks, "{switch}");
        });
    }
}

/// Returns the error of `up` with a configuration like that of the gateway, but with another overlay
/// and for these texts.
fn refused(site: &Site, changes: &[(&str, &str)]) -> String {
    let text = fs::read_to_string(&site.gateway_config).expect("a file");
    let mut text = text.replace("10.77.", "10.78.").replace("fd77:", "fd78:");
    for (before, after) in changes {
        assert!(text.contains(before), "{before}");
        text = text.replace(before, after);
    }
    let config = site.write("h", &text);
    let mut command = site.seikan(&["up", config.to_str().expect("UTF-8")]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let child = site.gateway.spawn(&mut command).expect("start");
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr).expect("UTF-8")
}

#[test]
fn a_second_gateway_that_would_break_the_first_is_refused() {
    at_site(&plan(), |site| {
        let [_gateway, _remote] = site.up();
        site.reaches(&site.device, SHOWN[0]);
        let parameters = || PARAMETERS.map(|name| (name, read_sysctl(&site.gateway, name)));
        let before = parameters();
        let port = ("listen-port = 7000", "listen-port = 7001");
        let first = interface(&site.gateway_config);
        let error = refused(site, &[port]);
        let expected = format!("cannot be a routed gateway on lan0: tunnel {first} is one there");
        assert!(error.contains(&expected), "{error}");
        // On another interface, IPv6 alone is in the way.
        let elsewhere = ("interface = \"lan0\"", "interface = \"wan0\"");
        let error = refused(site, &[port, elsewhere]);
        let expected = format!("forwards IPv6 only for the gateway of tunnel {first}");
        assert!(error.contains(&expected), "{error}");
        assert_eq!(parameters(), before);
        site.reaches(&site.device, SHOWN[1]);
    });
}
