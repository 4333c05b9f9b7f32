//! Punch sockets behind a symmetric NAT: with the marks and bindings of the tunnel's own socket,
//! for both families.

use crate::common::eventually;
use crate::mesh::nat::{
    Input, Mapping,
    Mapping::{AddressAndPortDependent, EndpointIndependent},
    Nat, PROBING_TIME, port_search,
};
use crate::mesh::site::{Host, SOON, Site, at_a_site, while_answering};
use seikan_sys::netlink::{AddressOptions, Route};
use seikan_sys::netns::NetNs;
use std::fs;
use std::io::Write;
use std::net::{IpAddr, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Two members behind NATs, with these lines in their files; up while `test` runs, which gets the
/// address of the second.
pub fn between(site: &Site, hosts: [&Host; 2], settings: &str, test: impl FnOnce(IpAddr)) {
    let token = site.token(&["--reusable"]);
    let names = ["a", "b"];
    let addresses = [0, 1].map(|i| {
        let addresses = hosts[i].join(names[i], &token);
        let file = fs::read_to_string(hosts[i].file()).expect("a file");
        fs::write(hosts[i].file(), format!("{settings}\n{file}")).expect("a file");
        addresses[0]
    });
    let _running = hosts.map(Host::up);
    eventually("they know each other", || {
        hosts[0].peers() == ["b"] && hosts[1].peers() == ["a"]
    });
    while_answering(&hosts, || test(addresses[1]));
}

/// Returns whether both send directly within the time that port probing takes.
pub fn connect_directly(hosts: [&Host; 2], address: IpAddr) -> bool {
    let relayed = |host: &Host| host.status()["peers"][0]["path"]["relayed"].as_bool();
    let until = Instant::now() + SOON + PROBING_TIME;
    loop {
        let received = hosts[0].reaches(address, Duration::from_secs(1));
        let direct = hosts.map(relayed) == [Some(false); 2];
        if received && direct || Instant::now() > until {
            return received && direct;
        }
    }
}

/// Adds these rules to a firewall.
fn nft(netns: &NetNs, rules: &str) {
    let mut nft = Command::new("nft");
    nft.args(["-f", "-"]).stdin(Stdio::piped());
    let mut child = netns.spawn_command(&mut nft).expect("nft");
    let mut input = child.stdin.take().expect("piped");
    input.write_all(rules.as_bytes()).expect("rules");
    drop(input);
    assert!(child.wait().expect("nft").success());
}

/// Hosts behind a NAT and behind a symmetric NAT, with a coordinator and a relay.
pub fn at_nats(test: impl FnOnce(&Site, [&Host; 2])) {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let nats = [(0, EndpointIndependent), (1, AddressAndPortDependent)];
        let nats = nats.map(|(number, mapping)| Nat::create(site, number, mapping));
        let [a, b] = nats.each_ref().map(|nat| nat.host(site, 0));
        test(site, [&a, &b]);
    });
}

#[test]
fn ports_are_opened_with_the_firewall_mark_of_the_configuration() {
    at_nats(|site, [a, b]| {
        // The host behind the symmetric NAT sends no UDP without the mark.
        nft(
            &b.netns,
            "table inet marked {
                 chain out {
                     type filter hook output priority filter;
                     oifname \"eth0\" meta l4proto udp meta mark != 42 drop
                 }
             }",
        );
        between(site, [a, b], "fwmark = 42", |address| {
            assert!(connect_directly([a, b], address), "{}", b.status());
            assert!(port_search(b)["local_port"].is_u64(), "{}", b.status());
        });
    });
}

/// Gives a router IPv6 on both sides and a NAT with this mapping for the host behind it, which gets
/// an address too.
fn add_ipv6(nat: &Nat, number: u8, mapping: Mapping, host: &Host) {
    let wan = nat.netlink.link("wan").expect("a link").index;
    let lan = nat.netlink.link("lan").expect("a bridge").index;
    let outside = format!("2001:db8::10{number}/64");
    for (netlink, index, address) in [
        (&nat.netlink, wan, outside.as_str()),
        (&nat.netlink, lan, "fd00::1/64"),
        (&host.netlink, host.nic, "fd00::10/64"),
    ] {
        let address = address.parse().expect("an address");
        // While its address is tentative, the router would map to its link-local address, and keep
        // that mapping.
        let options = AddressOptions {
            no_dad: true,
            ..AddressOptions::default()
        };
        let added = netlink.add_address_with(index, address, options);
        added.expect("an address");
    }
    let forward = || fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1");
    nat.netns.run(forward).expect("namespace").expect("written");
    let random = match mapping {
        AddressAndPortDependent => "random,fully-random",
        _ => "",
    };
    nat.run_nft(&format!(
        "table ip6 nat {{
             chain out {{
                 type nat hook postrouting priority srcnat;
                 oifname \"wan\" masquerade {random}
             }}
         }}
         insert rule inet filter in meta l4proto icmpv6 accept"
    ));
    let gateway = "fd00::1".parse().expect("an address");
    let route = Route::to("::/0".parse().expect("a prefix")).via(gateway);
    let added = host.netlink.add_route(&route.device(host.nic));
    added.expect("a route");
}

#[test]
fn port_probing_through_a_symmetric_nat_works_over_ipv6() {
    at_a_site(|site| {
        let address = "2001:db8::1/64".parse().expect("an address");
        let added = site.netlink.add_address(site.bridge, address);
        added.expect("an address");
        let _coordinator = site.coordinator();
        let _relays = [site.relay(0), site.relay(1)];
        let nats = [0, 1].map(|i| Nat::create(site, i, EndpointIndependent));
        let [a, b] = nats.each_ref().map(|nat| nat.host(site, 0));
        add_ipv6(&nats[0], 0, EndpointIndependent, &a);
        add_ipv6(&nats[1], 1, AddressAndPortDependent, &b);
        // IPv4 leads to the relay only.
        nats[0].run_nft("insert rule inet filter through ip daddr 192.0.2.101 drop");
        // Relays answer STUN at all their addresses.
        let stun = "stun = [\"[2001:db8::1]:3478\", \"[2001:db8::1]:3479\"]";
        between(site, [&a, &b], stun, |address| {
            assert!(
                connect_directly([&a, &b], address),
                "{} {}",
                a.status(),
                b.status()
            );
            let search = port_search(&b);
            assert!(search["local_port"].is_u64(), "{search}");
            let endpoint = b.status()["peers"][0]["path"]["endpoint"].clone();
            let endpoint = endpoint.as_str().expect("an endpoint");
            assert!(endpoint.starts_with("[2001:db8::100]:"), "{endpoint}");
        });
    });
}

#[test]
fn a_port_that_is_taken_at_a_router_is_replaced_by_another() {
    const PORT: u16 = 40_000;
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let nats = [0, 1].map(|n| Nat::routed(site, n, EndpointIndependent, Input::Accept));
        // The router between them sends from the address and port of the first.
        nft(
            &site.netns,
            "table ip forged {
                 chain out {
                     type filter hook output priority raw;
                     udp sport 40001 ip saddr set 203.0.113.2 udp sport set 40000
                 }
             }",
        );
        let socket = site.netns.run(|| UdpSocket::bind(("0.0.0.0", 40_001)));
        let socket = socket.expect("namespace").expect("a port");
        let take = || {
            let sent = socket.send_to(b"taken", ("203.0.113.6", PORT));
            sent.expect("sent");
        };
        take();
        let hosts = nats.each_ref().map(|nat| nat.host(site, 0));
        let hosts = [&hosts[0], &hosts[1]];
        let settings = format!("listen-port = {PORT}");
        between(site, hosts, &settings, |address| {
            let relayed = |host: &Host| host.status()["peers"][0]["path"]["relayed"].as_bool();
            // One of the ends switches after 20 s, the other after 40.
            let until = Instant::now() + 2 * SOON + PROBING_TIME;
            while hosts.map(relayed) != [Some(false); 2] && Instant::now() < until {
                take();
                assert!(hosts[0].reaches(address, SOON));
                std::thread::sleep(Duration::from_millis(100));
            }
            assert_eq!(
                hosts.map(relayed),
                [Some(false); 2],
                "{}",
                hosts[0].status()
            );
            let local_port = port_search(hosts[1])["local_port"].clone();
            assert!(local_port.is_u64() && local_port != PORT, "{local_port}");
        });
    });
}
