//! Status, metrics and discovery of a gateway, with the real program and real traffic.
//!
//! ```text
//!  device 192.168.1.10 ---(veth)--- lan0 left ---(veth)--- right
//!                                         ==(tunnel)==
//!         10.80.0.10 in the overlay       10.80.0.1       10.80.0.2, on the LAN 192.168.1.202
//! ```

use std::fs;
use std::io::{IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{ECHO_PORT, Tunnel, World, echo, eventually, in_world, stderr};
use crate::schema::check_json;
use seikan_sys::netns::NetNs;
use seikan_sys::packet::{Accept, PacketOptions, PacketSocket, VNET_HEADER_LEN};
use seikan_wire::arp::Arp;
use seikan_wire::ethernet::{ETHERTYPE_ARP, Ethernet, Mac};
use serde_json::Value;

const GATEWAY: &str = "
[Gateway]
Interface = lan0
[Device]
Name = plc
LAN = 192.168.1.10
Overlay = 10.80.0.10
AllowFrom = any tcp/9000
AllowFrom = any icmp
[Device]
Name = camera
LAN = 192.168.1.11
Overlay = 10.80.0.11
[Remote]
Overlay = 10.80.0.2
LAN = 192.168.1.202
";
const METRICS: &str = "Metrics = 127.0.0.1:9586";
const UNLISTED: Mac = Mac([2, 0, 0, 0, 0, 0x66]);
const THIEF: Mac = Mac([2, 0, 0, 0, 0, 0x99]);
/// Bytes that the device sends.
const BYTES: usize = 1_000_000;

/// A device that runs nothing of Seikan.
struct Device {
    namespace: NetNs,
    index: u32,
    mac: Mac,
}

/// A world whose left host is the gateway of a device.
fn with_device(test: impl FnOnce(&World, &Device)) {
    in_world([METRICS, ""], |world| {
        let device = Device::in_world(world);
        let left = fs::read_to_string(&world.left.config).expect("read");
        world.left.write(&(left + GATEWAY));
        let right = fs::read_to_string(&world.right.config).expect("read");
        world
            .right
            .write(&right.replace("10.80.0.1/32", "10.80.0.1/32, 10.80.0.10/32"));
        test(world, &device);
    });
}

impl Device {
    fn in_world(world: &World) -> Device {
        let namespace = NetNs::create().expect("namespace");
        let netlink = namespace.netlink().expect("netlink");
        let gateway = &world.left.netlink;
        let link = gateway.create_veth("lan0", "eth0", Some(namespace.as_fd()));
        link.expect("veth");
        gateway
            .set_up(gateway.link("lan0").expect("link").index)
            .expect("up");
        let link = netlink.link("eth0").expect("link");
        let address = "192.168.1.10/24".parse().expect("prefix");
        netlink.add_address(link.index, address).expect("address");
        netlink.set_up(link.index).expect("up");
        Device {
            namespace,
            index: link.index,
            mac: Mac(link.mac().expect("Ethernet")),
        }
    }

    /// Sends ARP messages in frames from `mac`.
    fn send(&self, mac: Mac, arp: &Arp) {
        let send = || {
            let options = PacketOptions::new(Accept::Everything { snap_length: 1 });
            let socket = PacketSocket::open(self.index, &options).expect("packet socket");
            let header = Ethernet::new(Mac::BROADCAST, mac, None, ETHERTYPE_ARP);
            let mut frame = vec![0; VNET_HEADER_LEN + header.header_len];
            header.write(&mut frame[VNET_HEADER_LEN..]);
            frame.extend(arp.to_bytes());
            socket.send_vectored(&[IoSlice::new(&frame)]).expect("send");
        };
        self.namespace.run(send).expect("namespace");
    }

    /// Returns whether a datagram of the device comes back from the remote.
    fn is_answered(&self) -> bool {
        let ask = || {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
            let patience = Some(Duration::from_millis(300));
            socket.set_read_timeout(patience).expect("timeout");
            let to: SocketAddr = ([192, 168, 1, 202], ECHO_PORT).into();
            let _ = socket.send_to(b"are you there?", to);
            socket.recv_from(&mut [0; 64]).is_ok()
        };
        self.namespace.run(ask).expect("namespace")
    }
}

/// Raises a flag when dropped, also in a panic, so that no thread waits forever.
struct Raise<'a>(&'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Starts both tunnels and waits for an echo from the device and back.
fn both_up(world: &World, device: &Device) -> [Tunnel; 2] {
    let tunnels = [&world.right, &world.left].map(|host| world.up_with(host, &[]));
    let stop = AtomicBool::new(false);
    let right = &world.right.namespace;
    std::thread::scope(|scope| {
        let _raise = Raise(&stop);
        scope.spawn(|| right.run(|| echo(&stop)));
        eventually("no echo to the device", || device.is_answered());
    });
    tunnels
}

/// Sends so many bytes from the device over TCP.
fn send_bytes(world: &World, device: &Device) {
    let listener = world
        .right
        .namespace
        .run(|| TcpListener::bind("10.80.0.2:9000"));
    let listener = listener.expect("namespace").expect("bind");
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("accept");
            let mut all = Vec::new();
            stream.read_to_end(&mut all).map(|_| all.len())
        });
        let send = || {
            let mut stream = TcpStream::connect("192.168.1.202:9000").expect("connect");
            stream.write_all(&vec![7; BYTES]).expect("write");
        };
        device.namespace.run(send).expect("namespace");
        assert_eq!(receiver.join().expect("join").expect("read"), BYTES);
    });
}

fn gateway(world: &World) -> Value {
    world.status(&world.left)["gateway"].clone()
}

#[test]
fn the_status_shows_the_devices_bytes_and_both_sides() {
    with_device(|world, device| {
        let _tunnels = both_up(world, device);
        send_bytes(world, device);
        let gateway = gateway(world);
        assert_eq!(gateway["mode"], "transparent");
        assert_eq!(gateway["interface"], "lan0");
        assert_eq!(gateway["up"], true);
        assert_eq!(gateway["responder"]["active"], true);
        assert_eq!(gateway["devices"][1]["name"], "camera");
        assert_eq!(gateway["devices"][1]["last_seen_s"], Value::Null);
        let plc = &gateway["devices"][0];
        assert_eq!(plc["name"], "plc");
        assert_eq!(plc["mac"], device.mac.to_string());
        assert_eq!(plc["overlay"][0], "10.80.0.10");
        let bytes = plc["outbound"]["bytes_out"].as_u64().expect("a count");
        assert!((BYTES as u64..2 * BYTES as u64).contains(&bytes), "{bytes}");
        assert_eq!(plc["outbound"]["unaccounted"], 0);
        assert_eq!(plc["inbound"]["unaccounted"], 0);
        assert!(plc["last_seen_s"].as_f64().expect("seen") < 10.0);
        for side in ["lan_side", "tunnel_side"] {
            // 1 MB is some 700 segments of 1,400 bytes.
            assert!(plc[side]["segments"].as_u64() >= Some(700), "{plc}");
            assert!(plc[side]["rtt_us"].as_u64().is_some(), "{plc}");
        }
    });
}

#[test]
fn denials_and_rules_are_counted() {
    with_device(|world, device| {
        let _tunnels = both_up(world, device);
        let probe = || {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
            for _ in 0..3 {
                socket.send_to(b"x", "10.80.0.10:22").expect("send");
            }
        };
        world.right.namespace.run(probe).expect("namespace");
        eventually("no denial", || {
            gateway(world)["devices"][0]["denied"]["from"] == 3
        });
        let listener = device.namespace.run(|| TcpListener::bind("0.0.0.0:9000"));
        let _listener = listener.expect("namespace").expect("bind");
        let connect = || TcpStream::connect("10.80.0.10:9000").map(|_| ());
        let connected = world.right.namespace.run(connect).expect("namespace");
        connected.expect("an allowed port");
        let plc = &gateway(world)["devices"][0];
        assert_eq!(plc["inbound"]["drops"]["denied_from"], 3);
        assert_eq!(plc["rules"][0]["rule"], "any tcp/9000");
        assert_eq!(plc["rules"][0]["flows"], 1);
        assert_eq!(plc["rules"][1]["flows"], 0);
        let output = world.run(&world.left, &["gateway", "status"]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("3 packets denied"), "{text}");
    });
}

#[test]
fn unlisted_hosts_and_duplicate_addresses_are_reported() {
    with_device(|world, device| {
        let _tunnels = both_up(world, device);
        let request = Arp::request(
            UNLISTED,
            [192, 168, 1, 66].into(),
            [192, 168, 1, 202].into(),
        );
        device.send(UNLISTED, &request);
        eventually("no unlisted", || {
            gateway(world)["unattributed"]["drops"]["unlisted_device"].as_u64() >= Some(1)
        });
        let takes = Arp::announcement(THIEF, [192, 168, 1, 202].into());
        device.send(THIEF, &takes);
        eventually("no conflict", || {
            gateway(world)["conflicts"][0]["mac"] == THIEF.to_string()
        });
        let conflict = &gateway(world)["conflicts"][0];
        assert_eq!(conflict["address"], "192.168.1.202");
        assert!(conflict["age_s"].as_f64().expect("a number") < 10.0);
    });
}

#[test]
fn offloads_of_both_sides_are_reported_and_left_unchanged() {
    with_device(|world, device| {
        let _tunnels = both_up(world, device);
        let ethtool = world.left.namespace.ethtool().expect("ethtool");
        let before = ethtool.features("lan0").expect("features");
        let offloads = gateway(world)["offloads"].clone();
        let sides: Vec<_> = offloads.as_array().expect("a list").iter().collect();
        let shown = sides
            .iter()
            .map(|o| (o["interface"].clone(), o["side"].clone()));
        let shown: Vec<_> = shown.collect();
        let expected = [("lan0", "lan"), ("under", "wan")];
        assert_eq!(shown, expected.map(|(a, b)| (a.into(), b.into())));
        // veth interfaces are made without GRO (drivers/net/veth.c).
        for (side, name) in [(0, "lan0"), (1, "under")] {
            let command = &sides[side]["findings"][0]["command"];
            assert_eq!(*command, format!("ethtool -K {name} gro on"));
        }
        assert_eq!(ethtool.features("lan0").expect("features"), before);
    });
}

#[test]
fn rates_come_from_two_samples() {
    with_device(|world, device| {
        let _tunnels = both_up(world, device);
        let words = ["gateway", "status", &world.left.interface, "--json"];
        let output = world.run(&world.left, &words);
        assert!(output.status.success(), "{}", stderr(&output));
        let shown: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        check_json("gateway status", &shown);
        assert_eq!(shown["interface"], world.left.interface);
        let gateway = &shown["gateway"];
        assert!(gateway["interval_s"].as_f64() >= Some(1.0));
        assert_eq!(gateway["devices"][0]["rate"]["outbound"], 0.0);
        assert!(gateway["spread"]["share"].is_number(), "{gateway}");
        let output = world.run(&world.right, &["gateway", "status", &world.right.interface]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("no [gateway]"));
    });
}

#[test]
fn metrics_have_the_device() {
    with_device(|world, device| {
        let _tunnels = both_up(world, device);
        let scrape = || {
            let mut stream = TcpStream::connect("127.0.0.1:9586").expect("connect");
            let request = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
            stream.write_all(request).expect("write");
            let mut text = String::new();
            stream.read_to_string(&mut text).map(|_| text)
        };
        let text = world
            .left
            .namespace
            .run(scrape)
            .expect("namespace")
            .expect("read");
        let name = &world.left.interface;
        for line in [
            format!("seikan_gateway_up{{interface=\"{name}\"}} 1"),
            format!("seikan_gateway_conflicts{{interface=\"{name}\"}} 0"),
            format!(
                "seikan_gateway_device_bytes_total{{interface=\"{name}\",device=\"plc\",direction=\"outbound\"}} "
            ),
        ] {
            assert!(text.contains(&line), "{line}\n{text}");
        }
    });
}

#[test]
fn hosts_on_the_lan_are_discovered() {
    with_device(|world, device| {
        let _tunnels = both_up(world, device);
        let done = AtomicBool::new(false);
        let output = std::thread::scope(|scope| {
            let _raise = Raise(&done);
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    device.send(
                        device.mac,
                        &Arp::announcement(device.mac, [192, 168, 1, 10].into()),
                    );
                    device.send(
                        UNLISTED,
                        &Arp::announcement(UNLISTED, [192, 168, 1, 66].into()),
                    );
                    std::thread::sleep(Duration::from_millis(50));
                }
            });
            let words = ["gateway", "discover", "lan0", "--seconds", "1", "--json"];
            let json = world.run(&world.left, &words);
            let toml = ["gateway", "discover", "lan0", "--seconds", "1", "--toml"];
            let toml = world.run(&world.left, &toml);
            [json, toml]
        });
        let [json, toml] = output;
        assert!(json.status.success(), "{}", stderr(&json));
        let found: Value = serde_json::from_slice(&json.stdout).expect("JSON");
        check_json("gateway discover", &found);
        let neighbour = |mac: Mac| {
            let neighbours = found["neighbours"].as_array().expect("a list");
            let found = neighbours
                .iter()
                .find(|entry| entry["mac"] == mac.to_string());
            found
                .unwrap_or_else(|| panic!("{mac} in {neighbours:?}"))
                .clone()
        };
        let known = neighbour(device.mac);
        assert_eq!(known["addresses"][0], "192.168.1.10");
        assert_eq!(known["known"]["device"], "plc");
        let unlisted = neighbour(UNLISTED);
        assert_eq!(unlisted["known"], Value::Null);
        // An ARP message of 28 bytes after an Ethernet header.
        let (frames, bytes) = (unlisted["frames"].as_u64(), unlisted["bytes"].as_u64());
        assert_eq!(bytes, frames.map(|frames| 42 * frames));
        let toml = String::from_utf8_lossy(&toml.stdout).into_owned();
        let section = format!("name = \"device-192-168-1-66\"\nmac = \"{UNLISTED}\"");
        assert!(toml.contains(&section), "{toml}");
        assert!(!toml.contains(&device.mac.to_string()), "{toml}");
    });
}

#[test]
fn unusable_interfaces_are_reported() {
    in_world(["", ""], |world| {
        let output = world.run(&world.left, &["gateway", "discover", "absent0"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("absent0"), "{}", stderr(&output));
        let output = world.run(
            &world.left,
            &["gateway", "discover", "lo", "--seconds", "1"],
        );
        assert_eq!(output.status.code(), Some(1));
        assert!(
            stderr(&output).contains("not Ethernet"),
            "{}",
            stderr(&output)
        );
    });
}
