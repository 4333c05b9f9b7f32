//! A hostile remote sends arbitrary packets into the tunnel: past a gateway it reaches the listed
//! devices by their overlay addresses, the gateway by its own, and nothing else.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use seikan_lab::site::Host;
use socket2::{Domain, InterfaceIndexOrAddress, Socket, Type};

use super::site::{
    DEVICE, DEVICE_INTERFACE, LAN, LISTED, Plan, REMOTE, SHOWN, Site, add_address, add_addresses,
    add_route, at_site, index, interface, ip, new_host, remove_address, run, write_sysctl,
};
use crate::common::{eventually, unaccounted};

/// The UDP and TCP port that the rules allow.
const OPEN: u16 = 5001;
/// A port that no rule names.
const CLOSED: u16 = 5002;
/// A host on the LAN that is not listed.
const NEIGHBOUR: [&str; 2] = ["192.168.1.20", "fd00:1::20"];
/// Addresses of the gateway in the overlay, and its others.
const GATEWAY: [&str; 2] = ["10.77.0.1", "fd77::1"];
const GATEWAY_ELSEWHERE: [&str; 4] = ["192.168.1.1", "fd00:1::1", "10.0.0.1", "fd00:2::1"];
/// Addresses of the device on the LAN.
const DEVICE_LAN: [&str; 2] = ["192.168.1.10", "fd00:1::10"];
/// Multicast groups that the hosts of the LAN and the gateway join, and others that need no
/// joining.
const GROUPS: [&str; 2] = ["239.1.2.3", "ff05::123"];
const EVERYBODY: [&str; 5] = [
    "255.255.255.255",
    "192.168.1.255",
    "10.77.0.255",
    "224.0.0.1",
    "ff02::1",
];
/// Time after which a packet counts as blocked; allowed packets arrive at once.
const SILENCE: Duration = Duration::from_millis(700);

/// The remote routes by interface only, and accepts everything from the device's side.
fn plan(mode: &'static str) -> Plan {
    let rules = format!(
        "allow-from = [{}]\n",
        ["udp", "tcp"]
            .map(|kind| format!(
                "\"{} {kind}/{OPEN}\", \"{} {kind}/{OPEN}\"",
                REMOTE[0], REMOTE[1]
            ))
            .join(", ")
    );
    Plan {
        mode,
        devices: format!("{LISTED}{rules}"),
        gateway: if mode == "routed" {
            "proxy-arp = true"
        } else {
            ""
        },
        remote_head: "table = \"off\"",
        allowed: ["", ", \"0.0.0.0/0\", \"::/0\""],
        ..Plan::default()
    }
}

/// A site with an unlisted host, routes to the overlay through the gateway, and forwarding on the
/// gateway's host.
fn at_hostile_site(plan: &Plan, test: impl FnOnce(&Site, &Host)) {
    at_site(plan, |site| {
        let neighbour = new_host("neighbour").expect("host");
        site.lan.plug(&neighbour, DEVICE_INTERFACE, 1500);
        add_addresses(
            &neighbour,
            DEVICE_INTERFACE,
            ["192.168.1.20/24", "fd00:1::20/64"],
        );
        if plan.mode == "transparent" {
            // Rules of an operator: the worst case for the host's kernel.
            add_addresses(&site.gateway, LAN, ["192.168.1.1/24", "fd00:1::1/64"]);
            write_sysctl(&site.gateway, "ipv4/ip_forward", "1");
            write_sysctl(&site.gateway, "ipv6/conf/all/forwarding", "1");
        }
        for host in [&site.device, &neighbour] {
            add_route(host, "10.77.0.0/24", "192.168.1.1");
            add_route(host, "fd77::/64", "fd00:1::1");
        }
        let _tunnels = site.up();
        for address in REMOTE {
            site.reaches(&site.gateway, address);
        }
        // IPv6 sends nothing through an interface without a route; IPv4 does.
        let tunnel = interface(&site.remote_config);
        run(&site.remote, &["ip", "route", "add", "::/0", "dev", tunnel]);
        test(site, &neighbour);
    });
}

/// Returns a socket that receives datagrams to any address of a host, broadcasts, and multicasts of
/// the groups.
fn receiver(host: &Host, interface: &str, v6: bool) -> Socket {
    let index = index(host, interface);
    let open = || -> std::io::Result<Socket> {
        let any = ip(if v6 { "::" } else { "0.0.0.0" });
        let socket = Socket::new(Domain::for_address((any, 0).into()), Type::DGRAM, None)?;
        if v6 {
            socket.set_only_v6(true)?;
        }
        socket.set_reuse_address(true)?;
        match ip(GROUPS[usize::from(v6)]) {
            IpAddr::V4(group) => {
                socket.join_multicast_v4_n(&group, &InterfaceIndexOrAddress::Index(index))?
            }
            IpAddr::V6(group) => socket.join_multicast_v6(&group, index)?,
        }
        socket.bind(&SocketAddr::new(any, OPEN).into())?;
        Ok(socket)
    };
    host.run(open).expect("namespace").expect("listener")
}

/// Returns a socket of the remote that sends into the tunnel regardless of its routes.
fn gun(site: &Site, kind: Type, source: &str) -> std::io::Result<Socket> {
    let tunnel = interface(&site.remote_config).to_owned();
    let source = SocketAddr::new(ip(source), 0);
    let open = || -> std::io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(source), kind, None)?;
        socket.bind_device(Some(tunnel.as_bytes()))?;
        socket.bind(&source.into())?;
        if kind == Type::DGRAM {
            socket.set_broadcast(true)?;
            if source.is_ipv4() {
                socket.set_multicast_ttl_v4(8)?;
            } else {
                socket.set_multicast_hops_v6(8)?;
            }
        }
        Ok(socket)
    };
    site.remote.run(open).expect("namespace")
}

/// Returns the targets at which a datagram of the remote arrived, with the name of the receiving
/// host.
fn datagrams_that_arrive(
    site: &Site,
    hosts: &[(&Host, &str)],
    sources: [&str; 2],
    targets: &[&str],
    port: u16,
) -> BTreeSet<String> {
    let sockets: Vec<(&str, UdpSocket)> = hosts
        .iter()
        .flat_map(|(host, interface)| {
            [false, true].map(|v6| (host.name, receiver(host, interface, v6).into()))
        })
        .collect();
    let guns = sources.map(|source| gun(site, Type::DGRAM, source).expect("source"));
    let mut arrived = BTreeSet::new();
    // The first can be lost during address resolution.
    for _ in 0..3 {
        for target in targets {
            let to = SocketAddr::new(ip(target), port);
            let gun = &guns[usize::from(to.is_ipv6())];
            // If the remote's own kernel refuses, nothing was sent.
            let _ = gun.send_to(target.as_bytes(), &to.into());
        }
        let until = Instant::now() + SILENCE;
        while Instant::now() < until {
            for (name, socket) in &sockets {
                socket.set_nonblocking(true).expect("socket");
                let mut buffer = [0; 64];
                while let Ok(length) = socket.recv(&mut buffer) {
                    let target = String::from_utf8_lossy(&buffer[..length]).into_owned();
                    arrived.insert(format!("{target} at the {name}"));
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    arrived
}

/// Returns the targets and ports to which the remote can connect.
fn connections_that_come_about(
    site: &Site,
    hosts: &[&Host],
    targets: &[(&str, u16)],
) -> BTreeSet<String> {
    let _listeners: Vec<TcpListener> = hosts
        .iter()
        .flat_map(|host| [OPEN, CLOSED].map(|port| (host, port)))
        .map(|(host, port)| {
            // Accepts both families.
            let listener = host.run(|| TcpListener::bind(("::", port)));
            listener.expect("namespace").expect("listen")
        })
        .collect();
    std::thread::scope(|scope| {
        let attempts = targets.iter().map(|(target, port)| {
            let source = REMOTE[usize::from(ip(target).is_ipv6())];
            let gun = gun(site, Type::STREAM, source).expect("source");
            let to = SocketAddr::new(ip(target), *port);
            scope.spawn(move || {
                let connected = gun.connect_timeout(&to.into(), 2 * SILENCE).is_ok();
                connected.then(|| format!("{target} {port}"))
            })
        });
        let attempts: Vec<_> = attempts.collect();
        let outcomes = attempts.into_iter().map(|a| a.join().expect("attempt"));
        outcomes.flatten().collect()
    })
}

fn set(texts: &[String]) -> BTreeSet<String> {
    texts.iter().cloned().collect()
}

fn nothing_reaches_unlisted_hosts(mode: &'static str) {
    at_hostile_site(&plan(mode), |site, neighbour| {
        let tunnel = interface(&site.gateway_config);
        let hosts = [
            (&site.device, DEVICE_INTERFACE),
            (neighbour, DEVICE_INTERFACE),
            (&site.gateway, LAN),
            (&site.gateway, tunnel),
        ];
        // The last joins the groups on the tunnel's interface; both sockets of the gateway receive
        // all its packets.
        let targets: Vec<&str> = (DEVICE.iter().chain(&DEVICE_LAN))
            .chain(&NEIGHBOUR)
            .chain(&GATEWAY)
            .chain(&GATEWAY_ELSEWHERE)
            .chain(&SHOWN)
            .chain(&GROUPS)
            .chain(&EVERYBODY)
            .copied()
            .collect();
        let arrived = datagrams_that_arrive(site, &hosts, REMOTE, &targets, OPEN);
        let expected = [
            format!("{} at the device", DEVICE[0]),
            format!("{} at the device", DEVICE[1]),
            format!("{} at the gateway", GATEWAY[0]),
            format!("{} at the gateway", GATEWAY[1]),
        ];
        assert_eq!(arrived, set(&expected), "UDP, {mode}");
        let tcp: Vec<(&str, u16)> = (DEVICE.iter().chain(&DEVICE_LAN))
            .chain(&NEIGHBOUR)
            .chain(&GATEWAY)
            .chain(&GATEWAY_ELSEWHERE)
            .flat_map(|target| [(*target, OPEN), (*target, CLOSED)])
            .collect();
        let hosts = [&site.device, neighbour, &site.gateway];
        let connected = connections_that_come_about(site, &hosts, &tcp);
        let expected = [
            format!("{} {OPEN}", DEVICE[0]),
            format!("{} {OPEN}", DEVICE[1]),
            format!("{} {OPEN}", GATEWAY[0]),
            format!("{} {OPEN}", GATEWAY[1]),
            format!("{} {CLOSED}", GATEWAY[0]),
            format!("{} {CLOSED}", GATEWAY[1]),
        ];
        assert_eq!(connected, set(&expected), "TCP, {mode}");
        all_is_counted(site);
    });
}

/// Asserts that refused packets are counted by reason, and that the tunnel's counters balance.
fn all_is_counted(site: &Site) {
    let status = site.status(&site.gateway, &site.gateway_config);
    let refused = &status["gateway"]["refused"];
    for reason in ["unlisted_device", "not_unicast"] {
        let count = refused["drops"][reason].as_u64();
        assert!(count >= Some(3), "{reason}: {refused:#}");
        let total = status["totals"]["inbound"]["drops"][reason].as_u64();
        assert_eq!(total, count, "{reason}: {status:#}");
    }
    assert_eq!(unaccounted(&status), [0, 0], "{status:#}");
}

#[test]
fn a_routed_gateway_delivers_nothing_to_unlisted_hosts() {
    nothing_reaches_unlisted_hosts("routed");
}

#[test]
fn a_transparent_gateway_delivers_nothing_to_unlisted_hosts() {
    nothing_reaches_unlisted_hosts("transparent");
}

#[test]
fn a_remote_reaches_a_gateway_by_the_addresses_that_its_interface_has_at_the_time() {
    at_hostile_site(&plan("routed"), |site, _| {
        let tunnel = interface(&site.gateway_config);
        let reaches = |target: &str| {
            let hosts = [(&site.gateway, LAN)];
            let sources = [REMOTE[0], REMOTE[1]];
            !datagrams_that_arrive(site, &hosts, sources, &[target], OPEN).is_empty()
        };
        for (address, net) in [
            ("10.77.0.99", "10.77.0.99/32"),
            ("fd77::99", "fd77::99/128"),
        ] {
            assert!(!reaches(address), "{address} is not there yet");
            // Other addresses belong to the host, not to the tunnel.
            add_address(&site.gateway, LAN, net);
            assert!(!reaches(address), "{address} is on the LAN's interface");
            remove_address(&site.gateway, LAN, net);
            add_address(&site.gateway, tunnel, net);
            eventually("not reached", || reaches(address));
            remove_address(&site.gateway, tunnel, net);
            eventually("still reached", || !reaches(address));
        }
    });
}

#[test]
fn a_remote_that_may_use_any_address_uses_none_of_the_gateways_side() {
    for mode in ["routed", "transparent"] {
        let mut plan = plan(mode);
        // Rules depend on the source: another device is allowed.
        plan.devices = format!(
            "{LISTED}allow-from = [\"any udp/{OPEN}\"]\n\
             [[gateway.device]]\nname = \"other\"\nlan = [\"192.168.1.11\", \"fd00:1::11\"]\n\
             overlay = [\"10.77.0.11\", \"fd77::11\"]\n"
        );
        plan.head = "table = \"off\"";
        plan.allowed[0] = ", \"0.0.0.0/0\", \"::/0\"";
        at_hostile_site(&plan, |site, _| {
            let device = [(&site.device, DEVICE_INTERFACE)];
            let honest = datagrams_that_arrive(site, &device, REMOTE, &DEVICE, OPEN);
            assert_eq!(honest.len(), 2, "{mode}: {honest:?}");
            let tunnel = interface(&site.remote_config);
            for pretended in [
                GATEWAY,
                ["10.77.0.11", "fd77::11"],
                ["192.168.1.11", "fd00:1::11"],
                SHOWN,
            ] {
                for (address, length) in pretended.into_iter().zip([32, 128]) {
                    add_address(&site.remote, tunnel, &format!("{address}/{length}"));
                }
                let arrived = datagrams_that_arrive(site, &device, pretended, &DEVICE, OPEN);
                assert_eq!(arrived, BTreeSet::new(), "{mode}: from {pretended:?}");
            }
            let refused = &site.gateway_status()["refused"]["drops"]["device_mismatch"];
            assert!(refused.as_u64() >= Some(8), "{refused}");
        });
    }
}

#[test]
fn a_host_of_the_lan_enters_the_overlay_under_no_address_of_the_gateway() {
    at_hostile_site(&plan("routed"), |site, neighbour| {
        // IPv4 checks for its own addresses as source on other interfaces; IPv6 does not.
        add_address(neighbour, DEVICE_INTERFACE, "fd77::1/128");
        let socket = site.remote.run(|| UdpSocket::bind((ip(REMOTE[1]), OPEN)));
        let socket = socket.expect("namespace").expect("bind");
        socket.set_read_timeout(Some(SILENCE)).expect("timeout");
        for (source, arrives) in [
            ("fd00:1::10", true),
            ("fd77::1", false),
            (NEIGHBOUR[1], false),
        ] {
            let from = if arrives { &site.device } else { neighbour };
            let sender = from.run(|| UdpSocket::bind((ip(source), 0)));
            let sender = sender.expect("namespace").expect("bind");
            let target = if arrives { SHOWN[1] } else { REMOTE[1] };
            let got = (0..3).any(|_| {
                sender.send_to(b"x", (ip(target), OPEN)).expect("send");
                socket.recv_from(&mut [0; 8]).is_ok()
            });
            assert_eq!(got, arrives, "from {source}");
        }
    });
}
