//! Members behind NATs: pairs with a direct path, and pairs that need a relay.

use crate::common::{Tunnel, eventually};
use crate::mesh::site::{Host, SOON, Site, at_a_site, plug, while_answering};
use seikan_sys::netlink::{Netlink, Route};
use seikan_sys::netns::NetNs;
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Mapping of a NAT (RFC 4787, section 4.1). Filtering is by address and port (section 5), as all
/// of Linux's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// No NAT at all.
    None,
    /// Endpoint-independent: Linux's masquerade while no other host uses the port.
    EndpointIndependent,
    /// Symmetric, with a random port for each destination: `fully-random`.
    AddressAndPortDependent,
}

use Mapping::{AddressAndPortDependent, EndpointIndependent};

/// Treatment of unsolicited packets to a router's own address.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    /// No rule: the router answers "port unreachable", and its connection tracking keeps an entry.
    /// A host behind the router that sends to the same address later cannot use the port.
    Accept,
    /// A rule drops the packets, as in usual routers.
    Drop,
    /// A rule answers "port unreachable", and no entry remains.
    Reject,
}

/// A router with a NAT.
pub struct Nat {
    pub netlink: Netlink,
    lan: u32,
    pub netns: NetNs,
}

impl Nat {
    /// Makes NAT `number`, with 192.0.2.100 and so on outside and 10.0.0.1 inside. It drops
    /// unsolicited packets.
    pub fn create(site: &Site, number: u8, mapping: Mapping) -> Nat {
        let netns = NetNs::create().expect("a namespace");
        plug(
            &site.netlink,
            site.bridge,
            &format!("nat{number}"),
            (&netns, "wan"),
        );
        let outside = format!("192.0.2.{}/24", 100 + number);
        Nat::configure(netns, &outside, mapping, Input::Drop)
    }

    /// Makes NAT `number` in a network of its own, 203.0.113.2/30 and so on outside. The site's
    /// namespace routes between these networks, so that the routers are no neighbours.
    pub fn routed(site: &Site, number: u8, mapping: Mapping, input: Input) -> Nat {
        let netns = NetNs::create().expect("a namespace");
        let port = format!("nat{number}");
        let peer = Some(netns.as_fd());
        let port = site.netlink.create_veth(&port, "wan", peer).expect("veth");
        let [provider, outside] = [1, 2].map(|end| format!("203.0.113.{}/30", 4 * number + end));
        let address = provider.parse().expect("an address");
        site.netlink.add_address(port, address).expect("an address");
        site.netlink.set_up(port).expect("up");
        site.forward();
        let nat = Nat::configure(netns, &outside, mapping, input);
        let gateway = format!("203.0.113.{}", 4 * number + 1);
        let gateway = gateway.parse().expect("an address");
        let route = Route::to("0.0.0.0/0".parse().expect("a prefix")).via(gateway);
        let wan = nat.netlink.link("wan").expect("a link").index;
        let added = nat.netlink.add_route(&route.device(wan));
        added.expect("a route");
        nat
    }

    fn configure(netns: NetNs, outside: &str, mapping: Mapping, input: Input) -> Nat {
        let netlink = netns.netlink().expect("netlink");
        let lan = netlink.create_bridge("lan").expect("a bridge");
        let wan = netlink.link("wan").expect("a link").index;
        for (index, address) in [(wan, outside), (lan, "10.0.0.1/24")] {
            let address = address.parse().expect("an address");
            netlink.add_address(index, address).expect("an address");
            netlink.set_up(index).expect("up");
        }
        let random = match mapping {
            AddressAndPortDependent => "random,fully-random",
            _ => "",
        };
        let unsolicited = match input {
            Input::Accept => "accept",
            Input::Drop => "drop",
            Input::Reject => "reject",
        };
        let rules = format!(
            "table ip nat {{
                 chain out {{
                     type nat hook postrouting priority srcnat;
                     oifname \"wan\" masquerade {random}
                 }}
             }}
             table inet filter {{
                 chain in {{
                     type filter hook input priority filter; policy drop;
                     ct state established,related accept
                     {unsolicited}
                 }}
                 chain through {{
                     type filter hook forward priority filter; policy drop;
                     ct state established,related accept
                     iifname \"lan\" accept
                 }}
             }}"
        );
        netns
            .run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1"))
            .expect("namespace")
            .expect("forwarding");
        let nat = Nat {
            netlink,
            lan,
            netns,
        };
        nat.run_nft(&rules);
        nat
    }

    /// Changes the rules.
    pub fn run_nft(&self, rules: &str) {
        let mut nft = Command::new("nft");
        nft.args(["-f", "-"]).stdin(Stdio::piped());
        let mut child = self.netns.spawn_command(&mut nft).expect("nft");
        let mut input = child.stdin.take().expect("piped");
        input.write_all(rules.as_bytes()).expect("rules");
        drop(input);
        assert!(child.wait().expect("nft").success());
    }

    /// Makes a host behind the NAT.
    pub fn host(&self, site: &Site, number: u8) -> Host {
        let at = (&self.netlink, self.lan);
        let host = site.host_at(at, &format!("10.0.0.{}/24", 10 + number));
        let gateway = "10.0.0.1".parse().expect("an address");
        let route = Route::to("0.0.0.0/0".parse().expect("a prefix")).via(gateway);
        host.netlink
            .add_route(&route.device(host.nic))
            .expect("a route");
        host
    }
}

/// Starts a member and waits until it knows its public endpoint.
pub fn up(host: &Host, name: &str, token: &[String; 2]) -> (Tunnel, std::net::IpAddr) {
    let (tunnel, address) = up_unseen(host, name, token);
    eventually("it knows what it looks like from outside", || {
        let seen = &host.status()["mesh"]["reflexive"];
        seen.as_array().is_some_and(|seen| !seen.is_empty())
    });
    (tunnel, address)
}

fn up_unseen(host: &Host, name: &str, token: &[String; 2]) -> (Tunnel, std::net::IpAddr) {
    let addresses = host.join(name, token);
    (host.up(), addresses[0])
}

/// Two members of a mesh, each at the switch or behind a NAT of its own.
pub struct Two {
    pub hosts: Vec<Host>,
    pub nats: Vec<Nat>,
    /// Addresses of the second host.
    pub address: std::net::IpAddr,
    pub running: [Tunnel; 2],
}

impl Two {
    pub fn new(site: &Site, mappings: [Mapping; 2]) -> Two {
        Two::blocked(site, mappings, &[])
    }

    /// Two members behind NATs with a router between these.
    pub fn routed(site: &Site, kinds: [(Mapping, Input); 2]) -> Two {
        let nats: Vec<Nat> = (0..)
            .zip(kinds)
            .map(|(number, (mapping, input))| Nat::routed(site, number, mapping, input))
            .collect();
        let hosts = nats.iter().map(|nat| nat.host(site, 0)).collect();
        Two::start(site, hosts, nats, &[])
    }

    /// As `new`, with routers that block UDP.
    pub fn blocked(site: &Site, mappings: [Mapping; 2], blocked: &[usize]) -> Two {
        let mut nats = Vec::new();
        let hosts: Vec<Host> = mappings
            .iter()
            .zip(0..)
            .map(|(mapping, number)| match mapping {
                Mapping::None => site.host(),
                mapping => {
                    let nat = Nat::create(site, number, *mapping);
                    let host = nat.host(site, 0);
                    nats.push(nat);
                    host
                }
            })
            .collect();
        for nat in blocked {
            nats[*nat].run_nft("insert rule inet filter through meta l4proto udp drop");
        }
        Two::start(site, hosts, nats, blocked)
    }

    fn start(site: &Site, hosts: Vec<Host>, nats: Vec<Nat>, blocked: &[usize]) -> Two {
        let token = site.token(&["--reusable"]);
        let up = |end: usize, name: &str| {
            if blocked.contains(&end) {
                up_unseen(&hosts[end], name, &token)
            } else {
                up(&hosts[end], name, &token)
            }
        };
        let (a, _) = up(0, "a");
        let (b, address) = up(1, "b");
        eventually("they know each other", || {
            let ends = |host: &Host, name: &str| host.peers() == [name];
            ends(&hosts[0], "b") && ends(&hosts[1], "a")
        });
        // Endpoints are known a moment after the members themselves.
        std::thread::sleep(Duration::from_millis(500));
        Two {
            hosts,
            nats,
            address,
            running: [a, b],
        }
    }

    /// Returns whether the first host gets an answer from the second.
    pub fn reaches(&self, within: Duration) -> bool {
        self.hosts[0].reaches(self.address, within)
    }

    /// Returns whether each end sends through a relay.
    pub fn relayed(&self) -> [Option<bool>; 2] {
        [0, 1].map(|i| self.hosts[i].status()["peers"][0]["path"]["relayed"].as_bool())
    }

    /// Runs `test` while the second host answers.
    pub fn answering(&self, test: impl FnOnce()) {
        while_answering(&[&self.hosts[1]], test);
    }
}

/// Defines a test for each cell of the matrix; they run in parallel.
macro_rules! pairs {
    ($($name:ident: $a:ident, $b:ident => $direct:literal;)*) => {$(
        #[test]
        fn $name() {
            at_a_site(|site| {
                let _coordinator = site.coordinator();
                let _relay = site.relay(0);
                let two = Two::new(site, [Mapping::$a, Mapping::$b]);
                two.answering(|| {
                    assert!(two.reaches(Duration::from_secs(3)));
                    let until = Instant::now() + Duration::from_secs(3);
                    let direct = [Some(false); 2];
                    while two.reaches(SOON) && two.relayed() != direct && Instant::now() < until {}
                    assert_eq!(two.relayed(), [Some(!$direct); 2], "{}", two.hosts[0].status());
                });
            });
        }
    )*};
}

pairs! {
    from_behind_a_nat_to_an_open_host: EndpointIndependent, None => true;
    from_an_open_host_to_one_behind_a_nat: None, EndpointIndependent => true;
    from_behind_a_symmetric_nat_to_an_open_host: AddressAndPortDependent, None => true;
    // The open host's initiation is blocked at the NAT; its call-me-maybe makes the other host
    // begin.
    from_an_open_host_to_one_behind_a_symmetric_nat: None, AddressAndPortDependent => true;
    both_behind_nats: EndpointIndependent, EndpointIndependent => true;
    both_behind_symmetric_nats: AddressAndPortDependent, AddressAndPortDependent => false;
}

/// Whether both send directly, within some time.
fn become_direct(two: &Two, within: Duration) -> bool {
    let direct = [Some(false); 2];
    let until = Instant::now() + within;
    while Instant::now() < until {
        if two.reaches(Duration::from_secs(1)) && two.relayed() == direct {
            return true;
        }
    }
    false
}

/// Defines a test for each pair of routers with endpoint-independent mapping that treat unsolicited
/// packets like this. There is no relay.
macro_rules! routers {
    ($($name:ident: $a:ident, $b:ident;)*) => {$(
        #[test]
        fn $name() {
            at_a_site(|site| {
                let _coordinator = site.coordinator();
                let kinds = [Input::$a, Input::$b].map(|input| (EndpointIndependent, input));
                let two = Two::routed(site, kinds);
                two.answering(|| {
                    assert!(become_direct(&two, Duration::from_secs(20)), "{}", two.hosts[0].status());
                });
            });
        }
    )*};
}

routers! {
    between_routers_that_accept: Accept, Accept;
    between_a_router_that_accepts_and_one_that_drops: Accept, Drop;
    between_a_router_that_drops_and_one_that_accepts: Drop, Accept;
    between_a_router_that_accepts_and_one_that_rejects: Accept, Reject;
    between_a_router_that_rejects_and_one_that_accepts: Reject, Accept;
    between_routers_that_reject: Reject, Reject;
}

/// Defines a test for each pair of such routers, the second of which has a symmetric NAT. A relay
/// carries the packets until port probing succeeds.
macro_rules! routers_with_a_symmetric_nat {
    ($($name:ident: $a:ident, $b:ident;)*) => {$(
        #[test]
        fn $name() {
            at_a_site(|site| {
                let _coordinator = site.coordinator();
                let _relay = site.relay(0);
                let kinds = [
                    (EndpointIndependent, Input::$a),
                    (AddressAndPortDependent, Input::$b),
                ];
                let two = Two::routed(site, kinds);
                two.answering(|| {
                    assert!(two.reaches(Duration::from_secs(3)));
                    assert!(become_direct(&two, PROBING_TIME), "{}", two.hosts[1].status());
                });
            });
        }
    )*};
}

routers_with_a_symmetric_nat! {
    port_probing_between_routers_that_accept: Accept, Accept;
    port_probing_between_a_router_that_accepts_and_one_that_drops: Accept, Drop;
    port_probing_between_a_router_that_drops_and_one_that_accepts: Drop, Accept;
    port_probing_between_routers_that_reject: Reject, Reject;
}

#[test]
fn through_a_relay_routers_that_accept_get_a_direct_path() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let two = Two::routed(site, [(EndpointIndependent, Input::Accept); 2]);
        two.answering(|| {
            assert!(two.reaches(Duration::from_secs(3)));
            assert!(
                become_direct(&two, Duration::from_secs(10)),
                "{}",
                two.hosts[0].status()
            );
        });
    });
}

/// Maximum time of port probing with one symmetric NAT: half a second on the relay, 4.1 s of
/// probes, of which one run in 3,400 finds no port, and some time for both daemons to validate the
/// path.
pub const PROBING_TIME: Duration = Duration::from_secs(18);

/// Returns the state of port probing from a host's status.
pub fn port_search(host: &Host) -> Value {
    host.status()["peers"][0]["path"]["port_search"].clone()
}

/// One end's NAT is symmetric: its packets come from a port that the other NAT blocks, until port
/// probing succeeds.
fn port_probing_succeeds(mappings: [Mapping; 2]) {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let two = Two::new(site, mappings);
        two.answering(|| {
            assert!(two.reaches(Duration::from_secs(3)));
            assert_eq!(two.relayed(), [Some(true); 2]);
            let until = Instant::now() + PROBING_TIME;
            let direct = [Some(false); 2];
            while two.reaches(SOON) && two.relayed() != direct && Instant::now() < until {}
            let status = || two.hosts.iter().map(Host::status).collect::<Vec<_>>();
            assert_eq!(two.relayed(), direct, "{:?}", status());
            let symmetric = |mapping: &Mapping| *mapping == AddressAndPortDependent;
            let hard = mappings.iter().position(symmetric).expect("one");
            // The tunnel's own port is not the one that succeeded; the other end reports its
            // probes.
            let [hard, easy] = [hard, 1 - hard].map(|end| port_search(&two.hosts[end]));
            let own = status()[mappings.iter().position(symmetric).expect("one")]["interface"]
                ["listen_port"]
                .clone();
            assert!(
                hard["local_port"].is_u64() && hard["local_port"] != own,
                "{hard}"
            );
            assert!(easy["probes"].as_u64() > Some(0), "{easy}");
            // Of the 256 punch sockets one is left, and it carries the traffic.
            assert_eq!(hard["open"], 0);
            std::thread::sleep(Duration::from_secs(8));
            assert!(two.reaches(Duration::from_secs(1)));
            assert_eq!(two.relayed(), direct, "{:?}", status());
        });
    });
}

#[test]
fn behind_a_nat_and_a_symmetric_nat() {
    port_probing_succeeds([EndpointIndependent, AddressAndPortDependent]);
}

#[test]
fn behind_a_symmetric_nat_and_a_nat() {
    port_probing_succeeds([AddressAndPortDependent, EndpointIndependent]);
}

#[test]
fn two_symmetric_nats_stay_at_the_relay_and_nothing_is_sprayed() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let two = Two::new(site, [AddressAndPortDependent; 2]);
        two.answering(|| {
            eventually("they know that both are", || {
                assert!(two.reaches(SOON));
                let both = |host: &Host| port_search(host)["both_symmetric"] == true;
                both(&two.hosts[0]) && both(&two.hosts[1])
            });
            let until = Instant::now() + Duration::from_secs(6);
            while two.reaches(SOON) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(100));
            }
            assert_eq!(two.relayed(), [Some(true); 2]);
            for host in &two.hosts {
                let search = port_search(host);
                assert_eq!(search["probes"], 0, "{search}");
                assert_eq!(search["open"], 0, "{search}");
            }
        });
    });
}

#[test]
fn a_tcp_connection_survives_successful_port_probing() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let two = Two::new(site, [EndpointIndependent, AddressAndPortDependent]);
        two.answering(|| assert!(two.reaches(SOON)));
        let listener = two.hosts[1].netns.run(|| TcpListener::bind(("::", 7000)));
        let listener = listener.expect("namespace").expect("a port");
        let address = SocketAddr::new(two.address, 7000);
        let stream = two.hosts[0].netns.run(|| TcpStream::connect(address));
        let mut stream = stream.expect("namespace").expect("a connection");
        let (mut other, _) = listener.accept().expect("a connection");
        for end in [&stream, &other] {
            end.set_read_timeout(Some(SOON)).expect("a timeout");
        }
        assert_eq!(two.relayed(), [Some(true); 2]);
        let until = Instant::now() + PROBING_TIME;
        let mut block = [0; 1000];
        let mut number: u32 = 0;
        while two.relayed() != [Some(false); 2] && Instant::now() < until {
            for _ in 0..50 {
                block[..4].copy_from_slice(&number.to_be_bytes());
                stream.write_all(&block).expect("written");
                let mut read = [0; 1000];
                other.read_exact(&mut read).expect("read");
                assert_eq!(read, block);
                other.write_all(&read).expect("written back");
                stream.read_exact(&mut read).expect("read back");
                assert_eq!(read, block);
                number += 1;
            }
        }
        assert_eq!(two.relayed(), [Some(false); 2], "after {number} blocks");
    });
}

/// Returns the bytes per second of a TCP stream from the first to the second.
fn stream(two: &Two, time: Duration) -> f64 {
    let listener = two.hosts[1].netns.run(|| TcpListener::bind(("::", 7001)));
    let listener = listener.expect("namespace").expect("a port");
    let address = SocketAddr::new(two.address, 7001);
    let stream = two.hosts[0].netns.run(|| TcpStream::connect(address));
    let mut stream = stream.expect("namespace").expect("a connection");
    let (mut other, _) = listener.accept().expect("a connection");
    let started_at = Instant::now();
    let sender = std::thread::spawn(move || {
        let block = vec![0; 256 << 10];
        while started_at.elapsed() < time {
            stream.write_all(&block).expect("written");
        }
    });
    let (mut read, mut block) = (0, vec![0; 256 << 10]);
    loop {
        match other.read(&mut block).expect("read") {
            0 => break,
            some => read += some,
        }
    }
    let rate = read as f64 / started_at.elapsed().as_secs_f64();
    sender.join().expect("sent");
    rate
}

#[test]
#[ignore = "takes a minute, and says only how fast"]
fn throughput_after_port_probing() {
    at_a_site(|first| {
        at_a_site(|second| {
            let _services = [first, second].map(|site| (site.coordinator(), site.relay(0)));
            let pairs = [
                Two::new(first, [EndpointIndependent, AddressAndPortDependent]),
                Two::new(second, [EndpointIndependent; 2]),
            ];
            for two in &pairs {
                two.answering(|| {
                    let direct = || two.reaches(SOON) && two.relayed() == [Some(false); 2];
                    let until = Instant::now() + PROBING_TIME;
                    while !direct() && Instant::now() < until {}
                    assert!(direct());
                });
            }
            let mut rates = [Vec::new(), Vec::new()];
            for _ in 0..7 {
                for (two, rates) in pairs.iter().zip(&mut rates) {
                    rates.push(stream(two, Duration::from_secs(3)) * 8.0 / 1e9);
                    assert_eq!(two.relayed(), [Some(false); 2]);
                }
            }
            for (rates, what) in rates
                .iter_mut()
                .zip(["a port that was met", "the tunnel's own"])
            {
                rates.sort_by(f64::total_cmp);
                println!("by {what}: {:.2} Gbit/s of {rates:.2?}", rates[3]);
            }
        });
    });
}

#[test]
fn without_a_relay_a_pair_behind_symmetric_nats_has_no_path() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let two = Two::new(site, [AddressAndPortDependent; 2]);
        // Retries, every 5 s, find no path either.
        two.answering(|| assert!(!two.reaches(Duration::from_secs(12))));
    });
}

#[test]
fn a_relay_that_dies_is_replaced_by_the_other() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let mut relays = [0, 1].map(|number| Some(site.relay(number)));
        let two = Two::new(site, [AddressAndPortDependent; 2]);
        two.answering(|| {
            assert!(two.reaches(SOON));
            // Their keys determine the relay.
            let used = two.hosts[0].status()["peers"][0]["path"]["endpoint"].clone();
            let used: SocketAddr = used.as_str().expect("one").parse().expect("one");
            drop(relays[usize::from(used.port() >= 41_000)].take());
            // `seikan lab relay` measures the time.
            assert!(two.reaches(SOON));
        });
    });
}

#[test]
fn a_direct_path_that_dies_is_replaced_by_a_relay_and_found_again() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let two = Two::new(site, [EndpointIndependent; 2]);
        two.answering(|| {
            assert!(two.reaches(SOON));
            assert_eq!(two.relayed(), [Some(false); 2]);
            // Without lost traffic the other end has to learn that its path is dead.
            std::thread::sleep(Duration::from_secs(2));
            // The two NATs block each other from now on; the relay stays reachable.
            two.nats[0].run_nft("insert rule inet filter through ip daddr 192.0.2.101 drop");
            two.nats[0].run_nft("insert rule inet filter through ip saddr 192.0.2.101 drop");
            // `seikan lab relay` measures the time.
            assert!(
                two.reaches(SOON),
                "{:?}",
                two.hosts.iter().map(Host::status).collect::<Vec<_>>()
            );
            assert_eq!(two.relayed(), [Some(true); 2]);
            two.nats[0].run_nft("flush chain inet filter through");
            two.nats[0].run_nft("add rule inet filter through accept");
            eventually("it is direct again", || {
                two.reaches(SOON) && two.relayed() == [Some(false); 2]
            });
        });
    });
}

#[test]
fn hosts_behind_the_same_nat_connect_inside() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let nat = Nat::create(site, 0, AddressAndPortDependent);
        let [a, b] = [nat.host(site, 0), nat.host(site, 1)];
        let (_a, _) = up(&a, "a", &token);
        let (_b, address) = up(&b, "b", &token);
        while_answering(&[&b], || assert!(a.reaches(address, SOON)));
        let endpoint = a.status()["peers"][0]["path"]["endpoint"].clone();
        let endpoint = endpoint.as_str().expect("an endpoint").to_owned();
        assert!(endpoint.starts_with("10.0.0.11:"), "{endpoint}");
    });
}

#[test]
fn no_query_goes_to_a_system_service_of_the_host_whatever_the_name_of_a_relay() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let host = site.host();
        let lo = host.netlink.link("lo").expect("a link").index;
        host.netlink.set_up(lo).expect("up");
        let [system, other] = [53, 5353].map(|port| {
            let address = format!("127.0.0.1:{port}");
            site.administer(&["relay", "add", &address, "--turn", "--secret", "north"]);
            let socket = host.netns.run(|| UdpSocket::bind(&address));
            socket.expect("namespace").expect("bind")
        });
        host.join("a", &site.token(&[]));
        let _tunnel = host.up();
        let answers = |socket: &UdpSocket, within| {
            socket.set_read_timeout(Some(within)).expect("timeout");
            socket.recv_from(&mut [0; 1500]).is_ok()
        };
        // With simultaneous and separate requests.
        assert!(answers(&other, SOON));
        assert!(!answers(&system, Duration::from_secs(1)));
    });
}

#[test]
fn the_public_endpoint_of_a_host_is_reported() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let nat = Nat::create(site, 3, EndpointIndependent);
        let host = nat.host(site, 0);
        let (_tunnel, _) = up(&host, "a", &token);
        let seen = host.status()["mesh"]["reflexive"][0].clone();
        let seen = seen.as_str().expect("an address");
        assert!(seen.starts_with("192.0.2.103:"), "{seen}");
        eventually("the coordinator knows", || {
            let endpoints = site.members()[0]["endpoints"].clone();
            let endpoints = endpoints.as_array().expect("a list").clone();
            endpoints.iter().any(|e| e == seen)
                && endpoints
                    .iter()
                    .any(|e| e.as_str().is_some_and(|e| e.starts_with("10.0.0.10:")))
        });
    });
}
