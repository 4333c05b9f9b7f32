//! Members behind NATs: which pairs find each other, and which need a relay.

use crate::common::{Tunnel, eventually};
use crate::site::{Host, SOON, Site, at_a_site, plug, while_answering};
use seikan_sys::netlink::{Netlink, Route};
use seikan_sys::netns::NetNs;
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How a NAT maps (RFC 4787, section 4.1). All of Linux's filter by address and port (section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// No NAT at all.
    None,
    /// The same port for everybody: what Linux's masquerading comes to while nobody else has the port.
    EndpointIndependent,
    /// A random one for each: `fully-random`.
    AddressAndPortDependent,
}

use Mapping::{AddressAndPortDependent, EndpointIndependent};

/// A router that hides what is behind it.
pub struct Nat {
    pub netlink: Netlink,
    lan: u32,
    pub netns: NetNs,
}

impl Nat {
    /// Number `number`, with 192.0.2.100 and so on outside and 10.0.0.1 inside.
    pub fn create(site: &Site, number: u8, mapping: Mapping) -> Nat {
        let netns = NetNs::create().expect("a namespace");
        let netlink = netns.netlink().expect("netlink");
        plug(
            &site.netlink,
            site.bridge,
            &format!("nat{number}"),
            (&netns, "wan"),
        );
        let lan = netlink.create_bridge("lan").expect("a bridge");
        let wan = netlink.link("wan").expect("a card").index;
        let outside = format!("192.0.2.{}/24", 100 + number);
        for (index, address) in [(wan, outside.as_str()), (lan, "10.0.0.1/24")] {
            let address = address.parse().expect("an address");
            netlink.add_address(index, address).expect("an address");
            netlink.set_up(index).expect("up");
        }
        let random = match mapping {
            AddressAndPortDependent => "random,fully-random",
            _ => "",
        };
        // Routers drop what nobody inside asked for, and say nothing.
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

    /// Changes its rules.
    pub fn run_nft(&self, rules: &str) {
        let mut nft = Command::new("nft");
        nft.args(["-f", "-"]).stdin(Stdio::piped());
        let mut child = self.netns.spawn_command(&mut nft).expect("nft");
        let mut input = child.stdin.take().expect("piped");
        input.write_all(rules.as_bytes()).expect("rules");
        drop(input);
        assert!(child.wait().expect("nft").success());
    }

    /// A host behind it.
    pub fn host(&self, site: &Site, number: u8) -> Host {
        let at = (&self.netlink, self.lan);
        let host = site.host_at(at, &format!("10.0.0.{}/24", 10 + number));
        let gateway = "10.0.0.1".parse().expect("an address");
        let route = Route::to("0.0.0.0/0".parse().expect("a prefix")).via(gateway);
        host.netlink
            .add_route(&route.device(host.card))
            .expect("a route");
        host
    }
}

/// A member that knows what it looks like from outside.
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

/// Two members that know each other, each at the switch or behind a NAT of its own.
pub struct Two {
    pub hosts: Vec<Host>,
    pub nats: Vec<Nat>,
    /// Of the second.
    pub address: std::net::IpAddr,
    _running: [Tunnel; 2],
}

impl Two {
    pub fn new(site: &Site, mappings: [Mapping; 2]) -> Two {
        Two::blocked(site, mappings, &[])
    }

    /// The same, where these routers let no UDP through.
    pub fn blocked(site: &Site, mappings: [Mapping; 2], blocked: &[usize]) -> Two {
        let token = site.token(&["--reusable"]);
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
        let up = |end: usize, name: &str| match blocked.contains(&end) {
            true => up_unseen(&hosts[end], name, &token),
            false => up(&hosts[end], name, &token),
        };
        let (a, _) = up(0, "a");
        let (b, address) = up(1, "b");
        eventually("they know each other", || {
            let ends = |host: &Host, name: &str| host.peers() == [name];
            ends(&hosts[0], "b") && ends(&hosts[1], "a")
        });
        // Where they may be reached is known a moment after that they are there.
        std::thread::sleep(Duration::from_millis(500));
        Two {
            hosts,
            nats,
            address,
            _running: [a, b],
        }
    }

    /// Whether the first hears the second.
    pub fn hear(&self, within: Duration) -> bool {
        self.hosts[0].hears(self.address, within)
    }

    /// Whether each sends by a relay.
    pub fn relayed(&self) -> [Option<bool>; 2] {
        [0, 1].map(|i| self.hosts[i].status()["peers"][0]["path"]["relayed"].as_bool())
    }

    /// Runs `test` while the second answers.
    pub fn answering(&self, test: impl FnOnce()) {
        while_answering(&[&self.hosts[1]], test);
    }
}

/// A test for each cell of the matrix: they run side by side.
macro_rules! pairs {
    ($($name:ident: $a:ident, $b:ident => $direct:literal;)*) => {$(
        #[test]
        fn $name() {
            at_a_site(|site| {
                let _coordinator = site.coordinator();
                let _relay = site.relay(0);
                let two = Two::new(site, [Mapping::$a, Mapping::$b]);
                two.answering(|| {
                    assert!(two.hear(Duration::from_secs(3)));
                    let until = Instant::now() + Duration::from_secs(3);
                    let direct = [Some(false); 2];
                    while two.hear(SOON) && two.relayed() != direct && Instant::now() < until {}
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
    // The open host's initiation comes from where nobody inside has sent; its call brings the other's.
    from_an_open_host_to_one_behind_a_symmetric_nat: None, AddressAndPortDependent => true;
    both_behind_nats: EndpointIndependent, EndpointIndependent => true;
    // The symmetric one comes by a port that the other's NAT was not told to let in.
    behind_a_nat_and_a_symmetric_nat: EndpointIndependent, AddressAndPortDependent => false;
    behind_a_symmetric_nat_and_a_nat: AddressAndPortDependent, EndpointIndependent => false;
    both_behind_symmetric_nats: AddressAndPortDependent, AddressAndPortDependent => false;
}

#[test]
fn without_a_relay_a_pair_behind_symmetric_nats_has_no_path() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let two = Two::new(site, [AddressAndPortDependent; 2]);
        // Retries, every 5 s, find none either.
        two.answering(|| assert!(!two.hear(Duration::from_secs(12))));
    });
}

#[test]
fn a_relay_that_dies_is_replaced_by_the_other() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let mut relays = [0, 1].map(|number| Some(site.relay(number)));
        let two = Two::new(site, [AddressAndPortDependent; 2]);
        two.answering(|| {
            assert!(two.hear(SOON));
            // Which one it is follows from their keys.
            let used = two.hosts[0].status()["peers"][0]["path"]["endpoint"].clone();
            let used: SocketAddr = used.as_str().expect("one").parse().expect("one");
            drop(relays[usize::from(used.port() >= 41_000)].take());
            // How soon is measured by `seikan lab relay`.
            assert!(two.hear(SOON));
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
            assert!(two.hear(SOON));
            assert_eq!(two.relayed(), [Some(false); 2]);
            // Nobody misses anything by then: who is asked has to be told that its way has died.
            std::thread::sleep(Duration::from_secs(2));
            // Nothing passes between the two NATs any more; to the relay everything does.
            two.nats[0].run_nft("insert rule inet filter through ip daddr 192.0.2.101 drop");
            two.nats[0].run_nft("insert rule inet filter through ip saddr 192.0.2.101 drop");
            // How soon is measured by `seikan lab relay`.
            assert!(
                two.hear(SOON),
                "{:?}",
                two.hosts.iter().map(Host::status).collect::<Vec<_>>()
            );
            assert_eq!(two.relayed(), [Some(true); 2]);
            two.nats[0].run_nft("flush chain inet filter through");
            two.nats[0].run_nft("add rule inet filter through accept");
            eventually("it is direct again", || {
                two.hear(SOON) && two.relayed() == [Some(false); 2]
            });
        });
    });
}

#[test]
fn behind_the_same_nat_they_meet_inside() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let nat = Nat::create(site, 0, AddressAndPortDependent);
        let [a, b] = [nat.host(site, 0), nat.host(site, 1)];
        let (_a, _) = up(&a, "a", &token);
        let (_b, address) = up(&b, "b", &token);
        while_answering(&[&b], || assert!(a.hears(address, SOON)));
        let endpoint = a.status()["peers"][0]["path"]["endpoint"].clone();
        let endpoint = endpoint.as_str().expect("an endpoint").to_owned();
        assert!(endpoint.starts_with("10.0.0.11:"), "{endpoint}");
    });
}

#[test]
fn no_question_goes_to_a_system_service_of_the_host_whatever_a_relay_is_called() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let host = site.host();
        let lo = host.netlink.link("lo").expect("a card").index;
        host.netlink.set_up(lo).expect("up");
        let [system, other] = [53, 5353].map(|port| {
            let address = format!("127.0.0.1:{port}");
            site.administer(&["relay", "add", &address, "--turn", "--secret", "north"]);
            let socket = host.netns.run(|| UdpSocket::bind(&address));
            socket.expect("namespace").expect("bind")
        });
        host.join("a", &site.token(&[]));
        let _tunnel = host.up();
        let asked = |socket: &UdpSocket, within| {
            socket.set_read_timeout(Some(within)).expect("timeout");
            socket.recv_from(&mut [0; 1500]).is_ok()
        };
        // Both are asked at the same time, or not.
        assert!(asked(&other, SOON));
        assert!(!asked(&system, Duration::from_secs(1)));
    });
}

#[test]
fn what_a_host_looks_like_from_outside_is_told() {
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
