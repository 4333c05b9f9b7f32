//! Metrics of a member that need routers or servers.

use crate::common::eventually;
use crate::mesh::mapping::give_ports;
use crate::mesh::nat::{Mapping::AddressAndPortDependent, Nat};
use crate::mesh::punching::{at_nats, between, connect_directly};
use crate::mesh::site::{Host, SOON, Site, at_a_site};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

/// Two members with metrics, as in [`between`].
fn measured(site: &Site, hosts: [&Host; 2], test: impl FnOnce(IpAddr)) {
    for host in hosts {
        let lo = host.netlink.link("lo").expect("a link").index;
        host.netlink.set_up(lo).expect("up");
    }
    between(site, hosts, "metrics = \"127.0.0.1:9586\"", test);
}

/// Returns the values of a metric's samples with these labels.
fn samples(host: &Host, name: &str, labels: &str) -> Vec<f64> {
    let scraped = host.netns.run(|| {
        let mut stream = TcpStream::connect("127.0.0.1:9586").expect("a connection");
        let request = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
        stream.write_all(request).expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        text
    });
    let text = scraped.expect("namespace");
    let begin = format!("{name}{{");
    let lines = text
        .lines()
        .filter(|line| line.starts_with(&begin) && line.contains(labels));
    let value = |line: &str| line.rsplit(' ').next()?.parse().ok();
    lines.map(|line| value(line).expect("a number")).collect()
}

/// Returns the value of the only sample.
fn metric(host: &Host, name: &str, labels: &str) -> f64 {
    let samples = samples(host, name, labels);
    assert_eq!(samples.len(), 1, "{name} {labels}");
    samples[0]
}

#[test]
fn metrics_say_that_a_peer_and_the_coordinator_are_gone() {
    at_a_site(|site| {
        let coordinator = site.coordinator();
        let [a, b] = [site.host(), site.host()];
        measured(site, [&a, &b], |address| {
            assert!(a.reaches(address, SOON), "{}", a.status());
            let up = || metric(&a, "seikan_peer_up", "peer=");
            assert_eq!(up(), 1.0, "{}", a.status());
            assert_eq!(metric(&a, "seikan_coordinator_up", ""), 1.0);
            assert_eq!(metric(&a, "seikan_peer_relayed", "peer="), 0.0);
            b.netlink.set_down(b.nic).expect("down");
            drop(coordinator);
            assert!(!a.reaches(address, Duration::from_secs(1)));
            eventually("the peer is down", || up() == 0.0);
            let coordinator = || metric(&a, "seikan_coordinator_up", "");
            eventually("the coordinator is down", || coordinator() == 0.0);
        });
    });
}

#[test]
fn metrics_count_port_probing() {
    at_nats(|site, [a, b]| {
        measured(site, [a, b], |address| {
            assert!(connect_directly([a, b], address), "{}", b.status());
            // The other sockets are closed once the path is chosen.
            let sockets = || metric(b, "seikan_port_search_sockets", "");
            eventually("one socket is left", || sockets() == 1.0);
            // 256 sockets were opened at once, and again after 5 s.
            assert!(metric(b, "seikan_port_search_openers_total", "") >= 256.0);
            assert_eq!(metric(a, "seikan_port_search_openers_total", ""), 0.0);
            assert!(metric(a, "seikan_peer_port_search_probes_total", "") >= 1.0);
            assert_eq!(metric(b, "seikan_peer_port_search_probes_total", ""), 0.0);
        });
    });
}

#[test]
fn metrics_report_the_port_mapping() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let nats = [0, 1].map(|n| Nat::create(site, n, AddressAndPortDependent));
        let _daemon = give_ports(site, &nats[0], "enable_natpmp=yes\nenable_upnp=no");
        let [a, b] = nats.each_ref().map(|nat| nat.host(site, 0));
        measured(site, [&a, &b], |_| {
            for (host, expected) in [(&a, 1.0), (&b, 0.0)] {
                let counted = || samples(host, "seikan_port_mapping_active", "");
                eventually("it is known", || !counted().is_empty());
                assert_eq!(counted(), [expected], "{}", host.status());
            }
        });
    });
}

/// Two members that reach each other only through a server: their metrics equal this part of the
/// status.
fn count_forwarded_traffic(site: &Site, nats: &[Nat; 2], part: &str, (by, server): (&str, &str)) {
    let [a, b] = nats.each_ref().map(|nat| nat.host(site, 0));
    measured(site, [&a, &b], |address| {
        assert!(a.reaches(address, SOON), "{}", a.status());
        // One end's allocation at a TURN server may serve both.
        let forwards = |host: &&Host| {
            let status = host.status();
            let endpoint = status["peers"][0]["path"]["endpoint"].as_str();
            endpoint.is_some_and(|at| at.starts_with("[100::"))
        };
        let mut host = None;
        // At first each member may send to the allocation of the other.
        eventually("one forwards", || {
            host = [&a, &b].into_iter().find(forwards);
            host.is_some()
        });
        let host = host.expect("one");
        assert_eq!(metric(host, "seikan_peer_relayed", "peer="), 1.0);
        let status = || host.status()["mesh"][part][server].clone();
        eventually("it is counted", || status()["received"].as_u64() > Some(0));
        let counted = |name: &str, label: (&str, &str)| {
            let (key, value) = label;
            let labels = format!("by=\"{by}\",server=\"{server}\",{key}=\"{value}\"");
            metric(host, name, &labels)
        };
        for (name, direction) in [("received", "inbound"), ("sent", "outbound")] {
            let count = || status()[name].as_f64().expect("a number");
            let datagrams = "seikan_forwarded_datagrams_total";
            let (least, counted, most) = (
                count(),
                counted(datagrams, ("direction", direction)),
                count(),
            );
            assert!(
                least <= counted && counted <= most,
                "{name}: {least}, {counted}, {most}"
            );
        }
        if by == "turn" {
            host.netns.run(send_to_all_sockets).expect("namespace");
            let other = if std::ptr::eq(host, &a) { &b } else { &a };
            let relayed = status()["relayed"].as_str().map(str::to_owned);
            let relayed: SocketAddr = relayed.expect("one").parse().expect("an address");
            let drops = |reason| status()["drops"][reason].as_f64().unwrap_or(0.0);
            eventually("a drop is counted", || {
                other
                    .netns
                    .run(|| send_from_many_ports(relayed))
                    .expect("namespace");
                drops("no_channel") > 0.0
            });
            let metric = || {
                let dropped = "seikan_forwarded_dropped_datagrams_total";
                counted(dropped, ("reason", "no_channel"))
            };
            let (least, metric, most) = (drops("no_channel"), metric(), drops("no_channel"));
            assert!(
                least <= metric && metric <= most,
                "{least}, {metric}, {most}"
            );
            // The kernel has refused what was not from the server.
            assert_eq!(drops("unknown_source"), 0.0);
        }
    });
}

/// More ports of one host than get an address in the tunnel.
fn send_from_many_ports(to: SocketAddr) {
    for _ in 0..40 {
        let socket = UdpSocket::bind(("0.0.0.0", 0)).expect("bind");
        socket.send_to(&[1; 100], to).expect("sent");
    }
}

/// Sends a datagram to each UDP socket of this namespace (proc_pid_net(5)), that of an allocation included, from
/// another address than the server's.
fn send_to_all_sockets() {
    let table = std::fs::read_to_string("/proc/thread-self/net/udp").expect("the sockets");
    let sender = UdpSocket::bind(("127.0.0.1", 0)).expect("bind");
    for line in table.lines().skip(1) {
        let local = line.split_whitespace().nth(1).expect("an address");
        let (_, port) = local.split_once(':').expect("a port");
        let port = u16::from_str_radix(port, 16).expect("a port");
        sender.send_to(&[1], ("127.0.0.1", port)).expect("sent");
    }
}

#[test]
fn metrics_count_traffic_through_a_turn_server() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _turn = site.coturn(0, "--turn");
        let nats = [0, 1].map(|n| Nat::create(site, n, AddressAndPortDependent));
        count_forwarded_traffic(site, &nats, "turn", ("turn", "192.0.2.1:5478"));
    });
}

#[test]
fn metrics_count_traffic_over_tls_to_a_relay() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay_by_tls(None);
        let nats = [0, 1].map(|n| Nat::create(site, n, AddressAndPortDependent));
        for nat in &nats {
            nat.run_nft("insert rule inet filter through meta l4proto udp drop");
        }
        count_forwarded_traffic(site, &nats, "streams", ("tls", "192.0.2.1:3478"));
    });
}
