//! Devices behind members: two sites with the same addresses, each behind a NAT, whose devices run
//! nothing but a kernel.
//!
//! ```text
//! device 192.168.1.10 --- lan0 site-a --- NAT ---|
//!                                                |--- switch --- laptop, coordinator
//! device 192.168.1.10 --- lan0 site-b --- NAT ---|
//! ```

use crate::common::{Tunnel, eventually};
use crate::mesh::nat::{Mapping, Nat};
use crate::mesh::site::{Host, Site, at_a_site, plug};
use crate::schema::printed;
use seikan_sys::netlink::{Netlink, Route};
use seikan_sys::netns::NetNs;
use serde_json::Value;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time to wait for denied traffic that must not arrive.
const NEVER: Duration = Duration::from_millis(300);
/// Limit of the first answer of a device that has just appeared.
const FIRST_ANSWER: Duration = Duration::from_secs(3);
/// Limit of the silence when a gateway is killed and a second one stands by.
const TAKEOVER: Duration = Duration::from_secs(5);
/// Ports at which devices and the laptop serve.
const OPEN: u16 = 8001;
const CLOSED: u16 = 8002;

/// A local network with its switch.
struct Lan {
    netlink: Netlink,
    bridge: u32,
    _netns: NetNs,
}

/// A device.
struct Device {
    netns: NetNs,
    netlink: Netlink,
    nic: u32,
}

/// Addresses of a routed gateway on its local network.
const ROUTED: [&str; 2] = ["192.168.1.1", "fd00:1::1"];

/// A gateway behind a NAT, with its local network.
struct Gateway {
    host: Host,
    lan: Lan,
    is_routed: bool,
    nat: Nat,
}

impl Gateway {
    /// Makes the gateway of site `number`, joined under this name.
    fn new(site: &Site, plan: &Plan, number: u8, name: &str, token: &[String; 2]) -> Gateway {
        let nat = Nat::create(site, number, plan.mapping);
        let host = nat.host(site, 0);
        host.join(name, token);
        let netns = NetNs::create().expect("a namespace");
        let netlink = netns.netlink().expect("netlink");
        let bridge = netlink.create_bridge("switch").expect("a bridge");
        netlink.set_up(bridge).expect("up");
        plug(&netlink, bridge, "gateway", (&host.netns, "lan0"));
        let lan0 = host.netlink.link("lan0").expect("a link").index;
        for (address, length) in ROUTED.iter().zip([24, 64]).filter(|_| plan.is_routed) {
            let address = format!("{address}/{length}").parse().expect("an address");
            host.netlink.add_address(lan0, address).expect("an address");
        }
        host.netlink.set_up(lan0).expect("up");
        let lan = Lan {
            netlink,
            bridge,
            _netns: netns,
        };
        Gateway {
            host,
            lan,
            is_routed: plan.is_routed,
            nat,
        }
    }

    /// Makes a second gateway of the same site, with the file of the first.
    fn second(&self, site: &Site) -> Host {
        let host = self.nat.host(site, 1);
        plug(
            &self.lan.netlink,
            self.lan.bridge,
            "second",
            (&host.netns, "lan0"),
        );
        let lan0 = host.netlink.link("lan0").expect("a link").index;
        host.netlink.set_up(lan0).expect("up");
        std::fs::copy(self.host.file(), host.file()).expect("copied");
        host
    }

    /// Adds a section to its configuration.
    fn configure(&self, text: &str) {
        let mut file = OpenOptions::new();
        let file = file.append(true).open(self.host.file());
        file.expect("a file")
            .write_all(text.as_bytes())
            .expect("written");
    }

    /// Connects a device with this last byte of its addresses, which has routes to the mesh.
    fn device(&self, number: u8) -> Device {
        let netns = NetNs::create().expect("a namespace");
        let netlink = netns.netlink().expect("netlink");
        let port = format!("device{number}");
        plug(&self.lan.netlink, self.lan.bridge, &port, (&netns, "eth0"));
        let nic = netlink.link("eth0").expect("a link").index;
        for address in [
            format!("192.168.1.{number}/24"),
            format!("fd00:1::{number}/64"),
        ] {
            let address = address.parse().expect("an address");
            netlink.add_address(nic, address).expect("an address");
        }
        netlink.set_up(nic).expect("up");
        let device = Device {
            netns,
            netlink,
            nic,
        };
        for net in networks(&self.host) {
            let via = ROUTED[usize::from(net.addr().is_ipv6())];
            let route = Route::to(net).device(device.nic);
            let route = if self.is_routed {
                route.via(via.parse().expect("an address"))
            } else {
                route
            };
            device.netlink.add_route(&route).expect("a route");
        }
        device
    }
}

/// The networks of the mesh.
fn networks(host: &Host) -> Vec<ipnet::IpNet> {
    let text = std::fs::read_to_string(host.file()).expect("a configuration");
    let line = text.lines().find_map(|l| l.strip_prefix("address = "));
    let nets: Vec<ipnet::IpNet> = serde_json::from_str(line.expect(&text)).expect("a list");
    nets.iter().map(ipnet::IpNet::trunc).collect()
}

/// The sites of a mesh.
struct Plan {
    mapping: Mapping,
    is_routed: bool,
    /// Further lines of the section `[gateway]`.
    gateway: &'static str,
    /// Sections of devices in the file of each gateway.
    listed: [String; 2],
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            mapping: Mapping::EndpointIndependent,
            is_routed: false,
            gateway: "",
            listed: [listed("printer", 10), listed("panel", 10)],
        }
    }
}

fn listed(name: &str, number: u8) -> String {
    format!(
        "\n[[gateway.device]]\nname = \"{name}\"\nlan = [\"192.168.1.{number}\", \"fd00:1::{number}\"]\n"
    )
}

fn pings(from: &NetNs, to: IpAddr) -> bool {
    is_answered(from, to, "1")
}

/// Returns whether a ping is answered in so many seconds.
fn is_answered(from: &NetNs, to: IpAddr, seconds: &str) -> bool {
    let mut command = Command::new("ping");
    command.args(["-n", "-c", "1", "-W", seconds, &to.to_string()]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = from.spawn_command(&mut command).expect("ping");
    child.wait().expect("an end").success()
}

/// Returns the time until the first answer.
fn first_answer(from: &NetNs, to: IpAddr) -> Duration {
    let began = Instant::now();
    // Pings in short succession: the resolution of the result.
    eventually("it answers", || is_answered(from, to, "0.2"));
    let taken = began.elapsed();
    println!("first answer of {to}: {taken:?}");
    taken
}

/// Returns whether a connection is accepted, and carries a mebibyte in both directions.
fn connects(from: &NetNs, to: IpAddr, port: u16) -> bool {
    let connected = from.run(|| {
        let address = SocketAddr::new(to, port);
        let Ok(mut stream) = TcpStream::connect_timeout(&address, NEVER) else {
            return false;
        };
        let sent = vec![7; 1 << 20];
        let mut received = vec![0; sent.len()];
        let mut sending = stream.try_clone().expect("a socket");
        std::thread::scope(|scope| {
            scope.spawn(|| sending.write_all(&sent).expect("sent"));
            stream.read_exact(&mut received).expect("received");
        });
        received == sent
    });
    connected.expect("namespace")
}

/// Returns whether a datagram is answered.
fn echoes(from: &NetNs, to: IpAddr, port: u16) -> bool {
    let answered = from.run(|| {
        let any: IpAddr = if to.is_ipv4() {
            [0; 4].into()
        } else {
            [0; 16].into()
        };
        let socket = UdpSocket::bind((any, 0)).expect("bind");
        socket.set_read_timeout(Some(NEVER)).expect("timeout");
        (0..5).any(|_| {
            let _ = socket.send_to(b"are you there?", SocketAddr::new(to, port));
            socket.recv_from(&mut [0; 64]).is_ok()
        })
    });
    answered.expect("namespace")
}

/// Echoes streams and datagrams at both ports of a namespace, until the process ends.
fn serve(netns: &NetNs) {
    for port in [OPEN, CLOSED] {
        let bound = netns.run(|| {
            let listener = TcpListener::bind(("::", port)).expect("bind");
            (listener, UdpSocket::bind(("::", port)).expect("bind"))
        });
        let (listener, socket) = bound.expect("namespace");
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut reading) = stream else { return };
                std::thread::spawn(move || {
                    let mut writing = reading.try_clone().expect("a socket");
                    let _ = std::io::copy(&mut reading, &mut writing);
                });
            }
        });
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..length], from);
            }
        });
    }
}

fn set_policy(site: &Site, text: &str) {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), text).expect("written");
    let path = file.path().to_str().expect("UTF-8").to_owned();
    site.administer(&["policy", "set", &path]);
}

/// The devices that the coordinator lists, by their names in the mesh.
fn device(site: &Site, name: &str) -> Option<Value> {
    let listed = site.administer(&["devices", "--json"]);
    let listed = printed("coordinator devices", listed.as_bytes());
    let listed = listed.as_array().expect("a list").clone();
    let is_it = |device: &Value| {
        let full = format!(
            "{}.{}",
            device["name"].as_str().unwrap_or_default(),
            device["gateway"].as_str().unwrap_or_default()
        );
        full == name
    };
    listed.into_iter().find(is_it)
}

/// Approves a device once it is reported; returns its addresses.
fn approve(site: &Site, name: &str, more: &[&str]) -> Vec<IpAddr> {
    eventually("it is reported", || device(site, name).is_some());
    let pending = device(site, name).expect("a device");
    assert_eq!(pending["approved"], false, "{pending}");
    site.administer(&[&["approve-device", name], more].concat());
    let approved = device(site, name).expect("a device");
    assert_eq!(approved["approved"], true, "{approved}");
    let addresses = approved["addresses"].as_array().expect("a list").iter();
    addresses
        .map(|address| address.as_str().expect("text").parse().expect("an address"))
        .collect()
}

/// Returns the addresses of a name at a host.
fn named(host: &Host, name: &str) -> Vec<IpAddr> {
    let output = host.run_program("getent", &["ahosts", name]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let words = text.lines().filter_map(|l| l.split_whitespace().next());
    words.map(|a| a.parse().expect(&text)).collect()
}

/// Whether a member sends to another by a relay; `None` without a session.
fn relayed(host: &Host, other: &str) -> Option<bool> {
    let status = host.status();
    let peers = status["peers"].as_array().expect("a list");
    let peer = peers.iter().find(|peer| peer["name"] == other)?;
    peer["path"]["relayed"].as_bool()
}

/// The devices of both sites reach each other, whose gateways are behind symmetric NATs, so that
/// only a relay connects them.
fn devices_reach_each_other_by_a_relay(site: &Site) {
    let plan = Plan {
        mapping: Mapping::AddressAndPortDependent,
        ..Plan::default()
    };
    let mesh = Mesh::with(site, &plan);
    let [in_a, in_b] = [&mesh.devices[0].netns, &mesh.devices[1].netns];
    for (from, to) in [(in_a, &mesh.at[1]), (in_b, &mesh.at[0])] {
        for address in to {
            first_answer(from, *address);
            assert!(connects(from, *address, OPEN), "{address}");
            assert!(echoes(from, *address, OPEN), "{address}");
        }
    }
    let [a, b] = [&mesh.gateways[0].host, &mesh.gateways[1].host];
    assert_eq!(
        [relayed(a, "site-b"), relayed(b, "site-a")],
        [Some(true); 2]
    );
    // The laptop shows the devices with the path to their gateways, which is direct.
    first_answer(&mesh.laptop.netns, mesh.at[0][0]);
    assert_eq!(relayed(&mesh.laptop, "site-a"), Some(false));
}

/// Two sites with one device each, and a laptop, all of them running.
struct Mesh {
    gateways: [Gateway; 2],
    devices: [Device; 2],
    laptop: Host,
    at_laptop: Vec<IpAddr>,
    /// Addresses of the devices.
    at: [Vec<IpAddr>; 2],
    running: Vec<Tunnel>,
}

impl Mesh {
    /// The devices are `printer.site-a` and `panel.site-b`, approved.
    fn new(site: &Site) -> Mesh {
        Mesh::with(site, &Plan::default())
    }

    fn with(site: &Site, plan: &Plan) -> Mesh {
        let token = site.token(&["--reusable"]);
        let laptop = site.host();
        let at_laptop = laptop.join("laptop", &token);
        let gateways = [(0, "site-a"), (1, "site-b")];
        let gateways = gateways.map(|(n, name)| Gateway::new(site, plan, n, name, &token));
        let devices = [&gateways[0], &gateways[1]].map(|gateway| gateway.device(10));
        let mode = if plan.is_routed {
            "routed"
        } else {
            "transparent"
        };
        for (gateway, listed) in gateways.iter().zip(&plan.listed) {
            let section = format!(
                "\n[gateway]\ninterface = \"lan0\"\nmode = \"{mode}\"\n{}\n",
                plan.gateway
            );
            gateway.configure(&section);
            gateway.configure(listed);
        }
        for netns in [&laptop.netns, &devices[0].netns, &devices[1].netns] {
            serve(netns);
        }
        let running = vec![laptop.up(), gateways[0].host.up(), gateways[1].host.up()];
        let at = ["printer.site-a", "panel.site-b"].map(|name| approve(site, name, &[]));
        Mesh {
            gateways,
            devices,
            laptop,
            at_laptop,
            at,
            running,
        }
    }
}

#[test]
fn devices_of_two_sites_with_the_same_addresses_reach_the_mesh_and_each_other() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let mesh = Mesh::new(site);
        let [printer, panel] = &mesh.at;
        assert!(printer.iter().all(|address| !panel.contains(address)));
        assert_eq!(printer.len(), 2);
        let laptop = &mesh.laptop.netns;
        let [in_a, in_b] = [&mesh.devices[0].netns, &mesh.devices[1].netns];
        let pairs = [
            (laptop, printer),
            (laptop, panel),
            (in_a, &mesh.at_laptop),
            (in_b, &mesh.at_laptop),
            (in_a, panel),
            (in_b, printer),
        ];
        for (from, to) in pairs {
            for address in to {
                first_answer(from, *address);
                assert!(connects(from, *address, OPEN), "{address}");
                assert!(echoes(from, *address, OPEN), "{address}");
            }
        }
        // Each has its name, and `status` shows it with its gateway.
        let named = |name: &str| named(&mesh.laptop, name);
        let found = named("printer.site-a.seikan");
        assert!(
            printer.iter().all(|address| found.contains(address)),
            "{found:?}"
        );
        assert!(named("printer.site-b.seikan").is_empty());
        let status = mesh.laptop.status();
        let peers = status["peers"].as_array().expect("a list");
        let gateway = peers.iter().find(|peer| peer["name"] == "site-a");
        let gateway = gateway.expect("site-a");
        assert_eq!(gateway["devices"][0]["name"], "printer.site-a");
        assert_eq!(gateway["path"]["relayed"], false, "{gateway}");
        let shown = mesh.gateways[0].host.status();
        let shown = &shown["gateway"]["devices"][0];
        assert_eq!(
            shown["overlay"].as_array().map(Vec::len),
            Some(2),
            "{shown}"
        );
        drop(mesh.running);
    });
}

#[test]
fn the_policy_decides_about_each_device() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let mesh = Mesh::new(site);
        let [printer, panel] = &mesh.at;
        let laptop = &mesh.laptop.netns;
        first_answer(laptop, printer[0]);
        first_answer(laptop, panel[0]);
        let rule = format!("allow laptop -> printer.site-a tcp/{OPEN}\n");
        set_policy(site, &rule);
        eventually("the panel is gone", || !pings(laptop, panel[0]));
        for address in printer {
            eventually("the port is open", || connects(laptop, *address, OPEN));
            assert!(!connects(laptop, *address, CLOSED), "{address}");
            assert!(!pings(laptop, *address), "{address}");
            assert!(!echoes(laptop, *address, OPEN), "{address}");
        }
        // The laptop knows the gateway of the device, which it may not reach itself.
        assert_eq!(mesh.laptop.peers(), ["site-a"]);
        let status = mesh.gateways[0].host.status();
        let denied = &status["peers"][0]["traffic"]["inbound"]["drops"]["policy_denied"];
        assert!(denied.as_u64().unwrap_or(0) > 0, "{status}");
        // The device may answer, but not open a connection.
        let in_a = &mesh.devices[0].netns;
        assert!(!connects(in_a, mesh.at_laptop[0], OPEN));
        assert!(!pings(in_a, mesh.at_laptop[0]));
        // By tags: from a device at one site to one at the other.
        site.administer(&["tag", "printer.site-a", "print"]);
        set_policy(site, "allow panel.site-b -> tag:print udp\n");
        let in_b = &mesh.devices[1].netns;
        eventually("the port is open", || echoes(in_b, printer[0], OPEN));
        assert!(echoes(in_b, printer[1], OPEN));
        assert!(!connects(in_b, printer[0], OPEN));
        assert!(!echoes(in_a, panel[0], OPEN));
        assert!(!connects(laptop, printer[0], OPEN));
    });
}

#[test]
fn a_device_appears_within_seconds_and_disappears_with_its_approval() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let mesh = Mesh::new(site);
        let laptop = &mesh.laptop.netns;
        first_answer(laptop, mesh.at[0][0]);
        // In the configuration, but not plugged in yet.
        let gateway = &mesh.gateways[1];
        gateway.configure(&listed("camera", 11));
        let mut running = mesh.running;
        let stopped = running.pop().expect("site-b");
        stopped.signal("TERM");
        assert_eq!(stopped.ended().0, Some(0));
        let _again = gateway.host.up();
        eventually("it is reported", || device(site, "camera.site-b").is_some());
        let began = Instant::now();
        let at = approve(site, "camera.site-b", &[]);
        assert!(!pings(laptop, at[0]));
        let camera = gateway.device(11);
        eventually("it answers", || pings(laptop, at[0]));
        println!("approved to first answer: {:?}", began.elapsed());
        for address in &at {
            assert!(first_answer(laptop, *address) < FIRST_ANSWER, "{address}");
        }
        // The panel kept its address while its gateway was away.
        first_answer(laptop, mesh.at[1][0]);
        drop(camera);
        site.administer(&["revoke", "camera.site-b"]);
        eventually("it is gone", || {
            let peers = mesh.laptop.status()["peers"].clone();
            !peers.to_string().contains("camera.site-b")
        });
        let status = gateway.host.status();
        let devices = status["gateway"]["devices"].as_array().expect("a list");
        let camera = devices.iter().find(|device| device["name"] == "camera");
        assert_eq!(camera.expect("the camera")["pending"], true);
    });
}

#[test]
fn devices_behind_symmetric_nats_reach_each_other_by_a_relay() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        devices_reach_each_other_by_a_relay(site);
    });
}

#[test]
fn devices_behind_symmetric_nats_reach_each_other_by_a_turn_server() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _turn = site.coturn(0, "--turn");
        devices_reach_each_other_by_a_relay(site);
    });
}

#[test]
fn devices_behind_routed_gateways_reach_the_mesh_and_each_other_in_their_families() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let ipv4_only = "\n[[gateway.device]]\nname = \"panel\"\nlan = \"192.168.1.10\"\n";
        let plan = Plan {
            is_routed: true,
            listed: [listed("printer", 10), ipv4_only.to_owned()],
            ..Plan::default()
        };
        let mesh = Mesh::with(site, &plan);
        let [printer, panel] = &mesh.at;
        // The panel has no IPv6 address, and so no such name.
        assert_eq!((printer.len(), panel.len()), (2, 1));
        assert!(panel[0].is_ipv4(), "{panel:?}");
        let laptop = &mesh.laptop.netns;
        let [in_a, in_b] = [&mesh.devices[0].netns, &mesh.devices[1].netns];
        let pairs = [
            (laptop, printer),
            (laptop, panel),
            (in_a, &mesh.at_laptop),
            (in_a, panel),
        ];
        for (from, to) in pairs {
            for address in to {
                first_answer(from, *address);
                assert!(connects(from, *address, OPEN), "{address}");
                assert!(echoes(from, *address, OPEN), "{address}");
            }
        }
        first_answer(in_b, printer[0]);
        let found = named(&mesh.laptop, "panel.site-b.seikan");
        assert!(
            !found.is_empty() && found.iter().all(|ip| *ip == panel[0]),
            "{found:?}"
        );
        let found = named(&mesh.laptop, "printer.site-a.seikan");
        assert!(printer.iter().all(|ip| found.contains(ip)), "{found:?}");
    });
}

#[test]
fn a_device_moves_to_another_site_with_its_addresses_and_disappears_there() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let camera = listed("camera", 11);
        let [a, b] = Plan::default().listed;
        // The other gateway lists it before it arrives.
        let plan = Plan {
            listed: [a + &camera, b + &camera],
            ..Plan::default()
        };
        let mut mesh = Mesh::with(site, &plan);
        let laptop = &mesh.laptop.netns;
        let at = approve(site, "camera.site-a", &["--tag", "cameras"]);
        set_policy(site, "allow laptop -> tag:cameras *\n");
        let camera = mesh.gateways[0].device(11);
        first_answer(laptop, at[0]);
        drop(camera);
        eventually("the other gateway reports it", || {
            device(site, "camera.site-b").is_some()
        });
        site.administer(&["approve-device", "camera.site-b", "--from", "camera.site-a"]);
        let moved = device(site, "camera.site-b").expect("a device");
        assert_eq!(moved["tags"][0], "cameras", "{moved}");
        let former = device(site, "camera.site-a").expect("a device");
        assert_eq!(former["approved"], false, "{former}");
        // Plugged in at the other site, it answers at the addresses that it had.
        let camera = mesh.gateways[1].device(11);
        for address in &at {
            assert!(first_answer(laptop, *address) < FIRST_ANSWER, "{address}");
        }
        // A member has routes to it before it knows its name.
        eventually("the laptop knows it by its new name", || {
            let found = named(&mesh.laptop, "camera.site-b.seikan");
            at.iter().all(|ip| found.contains(ip))
        });
        assert!(named(&mesh.laptop, "camera.site-a.seikan").is_empty());
        // The device disappears: a host that is no longer a gateway leaves no device behind.
        let running = mesh.running.pop().expect("site-b");
        running.signal("TERM");
        assert_eq!(running.ended().0, Some(0));
        let host = &mesh.gateways[1].host;
        let text = std::fs::read_to_string(host.file()).expect("a file");
        let (before, _) = text.split_once("[gateway]").expect("a gateway");
        std::fs::write(host.file(), before).expect("written");
        let _again = host.up();
        eventually("nothing is left", || {
            let left = ["camera.site-b", "panel.site-b"].map(|name| device(site, name));
            left.iter().all(Option::is_none)
        });
        eventually("it is gone", || {
            named(&mesh.laptop, "camera.site-b.seikan").is_empty()
        });
        assert!(device(site, "camera.site-a").is_some());
        drop(camera);
    });
}

#[test]
fn a_second_gateway_takes_over_the_devices_of_one_that_is_killed() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let plan = Plan {
            gateway: "priority = 100",
            ..Plan::default()
        };
        let mut mesh = Mesh::with(site, &plan);
        let first = &mesh.gateways[0].host;
        let second = mesh.gateways[0].second(site);
        let second_runs = second.up();
        let printer = &mesh.at[0];
        let [laptop, in_a] = [&mesh.laptop.netns, &mesh.devices[0].netns];
        let active = |host: &Host| host.status()["gateway"]["responder"]["active"] == true;
        eventually("the first is active", || active(first) && !active(&second));
        for address in printer {
            first_answer(laptop, *address);
        }
        // The standby gateway has not replaced the endpoints of the member.
        std::thread::sleep(Duration::from_secs(3));
        assert!(pings(laptop, printer[0]) && active(first));
        let mut killed = mesh.running.remove(1);
        let began = Instant::now();
        killed.child.kill().expect("kill");
        killed.child.wait().expect("wait");
        eventually("the second takes over", || pings(laptop, printer[0]));
        let taken = began.elapsed();
        println!("killed to first answer: {taken:?}");
        assert!(taken < TAKEOVER, "{taken:?}");
        assert!(active(&second));
        for address in printer {
            assert!(first_answer(laptop, *address) < FIRST_ANSWER, "{address}");
            assert!(connects(laptop, *address, OPEN), "{address}");
        }
        for address in &mesh.at_laptop {
            first_answer(in_a, *address);
        }
        // The first gateway returns and stands by, and takes over in turn.
        let _first = first.up();
        std::thread::sleep(Duration::from_secs(3));
        assert!(active(&second) && !active(first));
        assert!(pings(laptop, printer[0]));
        drop(second_runs);
        eventually("the first takes over", || pings(laptop, printer[0]));
        assert!(active(first));
    });
}
