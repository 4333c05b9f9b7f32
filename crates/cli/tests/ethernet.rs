//! Ethernet mode with the real program: two hosts, hosts without Seikan behind bridges, and ends
//! that do not fit together.

use std::io::IoSlice;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use seikan_sys::ethtool::Feature;
use seikan_sys::netns::NetNs;
use seikan_sys::packet::{Accept, PacketOptions, PacketSocket, RECEIVE_BUFFER_LEN};
use seikan_wire::VNET_HDR_LEN;
use seikan_wire::ethernet::Mac;

use crate::common::{
    Host, Tunnel, World, drops, eventually, in_world, number, skip, stderr, unaccounted,
};

const ETHERNET: &str = "Protocol = native\nMode = ethernet";
/// Interface of a host behind a bridge.
const LAN: &str = "eth0";
/// Bridge of a host with a tunnel.
const BRIDGE: &str = "br0";

/// A host without Seikan.
struct Guest(NetNs);

/// Runs a command in a namespace to its end.
fn run(namespace: &NetNs, words: &[&str]) -> Output {
    let mut command = Command::new(words[0]);
    command
        .args(&words[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = namespace.spawn_command(&mut command);
    let child = child.unwrap_or_else(|error| panic!("{words:?}: {error}"));
    child.wait_with_output().expect("output")
}

/// Runs a command that must succeed; returns what it prints.
fn must(namespace: &NetNs, words: &[&str]) -> String {
    let output = run(namespace, words);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{words:?}: {printed}{}",
        stderr(&output)
    );
    printed
}

/// Waits until an address answers packets of this size, which must not be fragmented.
fn pings(namespace: &NetNs, address: &str, size: usize) {
    let size = size.to_string();
    eventually(&format!("{address} does not answer {size} bytes"), || {
        let words = [
            "ping", "-c", "1", "-W", "1", "-M", "do", "-s", &size, address,
        ];
        run(namespace, &words).status.success()
    });
}

/// Carries a TCP stream from one namespace to an address of another; returns its bytes.
fn stream(from: &NetNs, to: &NetNs, address: &str) -> u64 {
    let mut server = Command::new("iperf3");
    server.args(["-s", "-B", address]);
    server.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut server = to.spawn_command(&mut server).expect("iperf3");
    // `None` without a report, or with one of an error, after which the status may be 0.
    let bytes = |output: &[u8]| -> Option<u64> {
        let report: serde_json::Value = serde_json::from_slice(output).ok()?;
        report["end"]["sum_received"]["bytes"].as_u64()
    };
    let mut measured = None;
    eventually("iperf3 does not connect", || {
        let words = [
            "iperf3",
            "-c",
            address,
            "-t",
            "2",
            "-J",
            "--connect-timeout",
            "2000",
        ];
        let output = run(from, &words);
        measured = bytes(&output.stdout);
        measured.is_some()
    });
    server.kill().expect("kill");
    server.wait().expect("wait");
    measured.expect("a report")
}

/// Writes the configuration of a host with its keys and other lines than those of the world.
fn configure(host: &Host, interface: &str, peer: &str) {
    let text = std::fs::read_to_string(&host.config).expect("read");
    let line = |name: &str| {
        let mut lines = text.lines();
        let found = lines.find(|line| line.starts_with(name));
        found.expect("the key").to_owned()
    };
    let endpoint = text.lines().find(|line| line.starts_with("Endpoint"));
    host.write(&format!(
        "[Interface]\n{}\n{}\n{ETHERNET}\n{interface}\n[Peer]\n{}\n{}\n{peer}\n",
        line("PrivateKey"),
        line("ListenPort"),
        line("PublicKey"),
        endpoint.unwrap_or_default(),
    ));
}

/// Returns the packets and the super-packets that a host's device has exchanged with its kernel:
/// from the kernel, to the kernel.
fn packets(world: &World, host: &Host) -> [[u64; 2]; 2] {
    let status = world.status(host);
    let kernel = |name: &str| status["device"]["kernel"][name].as_u64().expect("a count");
    [
        [
            number(&status, "outbound", "packets_in"),
            kernel("tx_packets"),
        ],
        [
            number(&status, "inbound", "packets_out"),
            kernel("rx_packets"),
        ],
    ]
}

/// Asserts that the counters of both ends balance, and that no packet was refused.
fn in_order(world: &World) {
    for host in [&world.left, &world.right] {
        let status = world.status(host);
        assert_eq!(unaccounted(&status), [0, 0]);
        for reason in ["tun_write_refused", "bad_offload", "bad_frame", "not_ip"] {
            let count = drops(&status, "inbound", reason) + drops(&status, "outbound", reason);
            assert_eq!(count, 0, "{reason}");
        }
    }
}

#[test]
fn two_hosts_exchange_frames_and_whole_super_packets() {
    in_world(["", ""], |world| {
        for host in [&world.left, &world.right] {
            host.add_to_interface(ETHERNET);
        }
        let _tunnels = world.both_up();
        for host in [&world.left, &world.right] {
            let status = world.status(host);
            assert_eq!(status["interface"]["mode"], "ethernet");
            let link = host.netlink.link(&host.interface).expect("link");
            // 1444 bytes, as in IP mode, with the Ethernet header.
            assert_eq!((link.mtu, link.hardware_type), (1430, 1));
        }
        let shown = world.run(&world.left, &["status", &world.left.interface]);
        assert!(String::from_utf8_lossy(&shown.stdout).contains("mode: ethernet"));
        pings(&world.left.namespace, "10.80.0.2", 1430 - 28);
        let [before, _] = packets(world, &world.left);
        let bytes = stream(&world.left.namespace, &world.right.namespace, "10.80.0.2");
        assert!(bytes > 1_000_000, "{bytes}");
        let [sent, _] = packets(world, &world.left);
        let [_, received] = packets(world, &world.right);
        let [all, reads] = [sent[0] - before[0], sent[1] - before[1]];
        assert!(all > 4 * reads, "{all} packets in {reads} reads");
        assert!(received[0] > 4 * received[1], "{received:?}");
        in_order(world);
    });
}

#[test]
fn addresses_that_are_not_allowed_are_dropped_and_arp_is_not() {
    in_world(["", ""], |world| {
        for host in [&world.left, &world.right] {
            host.add_to_interface(ETHERNET);
        }
        let _tunnels = world.both_up();
        let (left, device) = (&world.left.namespace, &world.left.interface);
        must(
            left,
            &["ip", "address", "add", "10.80.0.9/24", "dev", device],
        );
        must(left, &["ip", "neighbour", "flush", "dev", device]);
        let from = ["ping", "-c", "2", "-W", "1", "-I", "10.80.0.9", "10.80.0.2"];
        assert!(!run(left, &from).status.success());
        let status = world.status(&world.right);
        assert!(drops(&status, "inbound", "source_not_allowed") >= 2);
        // Yet the right has answered the ARP request from this address.
        let neighbours = must(&world.right.namespace, &["ip", "neighbour"]);
        assert!(neighbours.contains("10.80.0.9"), "{neighbours}");
        in_order(world);
    });
}

#[test]
fn an_end_in_ip_mode_and_one_in_ethernet_mode_refuse_each_other_and_say_why() {
    in_world(["", ""], |world| {
        world.left.add_to_interface(ETHERNET);
        world.right.add_to_interface("Protocol = native");
        let right = world.up(&world.right);
        let _left = world.up(&world.left);
        assert!(!world.answers_within(Duration::from_secs(3)));
        let refusal = "set the same `mode` at both ends";
        eventually("no refusal", || {
            let status = world.status(&world.right);
            let peer = &status["peers"][0];
            let said = peer["refusal"].as_str().unwrap_or_default();
            said.contains(refusal) && drops(&status, "inbound", "unsupported_capability") > 0
        });
        right.signal("TERM");
        let (_, errors) = right.ended();
        assert!(
            errors.contains("handshake refused") && errors.contains(refusal),
            "{errors}"
        );
    });
}

#[test]
fn ethernet_mode_is_refused_where_only_ip_is_possible() {
    in_world(["", ""], |world| {
        world.left.add_to_interface("Mode = ethernet");
        for verb in ["check", "up"] {
            let output = world.run(&world.left, &[verb, world.left.config()]);
            assert!(!output.status.success());
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            let said = printed + &stderr(&output);
            assert!(
                said.contains("the WireGuard protocol carries only IP packets"),
                "{verb}: {said}"
            );
        }
        assert!(!world.left.has_tunnel());
    });
}

/// Connects a new host without Seikan, with the addresses that end with `number`, to the bridge of
/// `host`.
fn plug(host: &Host, number: u8) -> Guest {
    let guest = NetNs::create().expect("namespace");
    let end = std::os::fd::AsFd::as_fd(&guest);
    host.netlink
        .create_veth("port", LAN, Some(end))
        .expect("veth");
    must(&host.namespace, &["ip", "link", "set", "port", "up"]);
    let (v4, v6) = (format!("10.99.0.{number}/24"), format!("fd99::{number}/64"));
    for words in [
        &["ip", "link", "set", LAN, "up"][..],
        &["ip", "address", "add", &v4, "dev", LAN],
        &["ip", "address", "add", &v6, "dev", LAN, "nodad"],
    ] {
        must(&guest, words);
    }
    Guest(guest)
}

/// Makes a Linux bridge with a host behind it.
fn bridged(host: &Host, number: u8) -> Guest {
    let bridge = host.netlink.create_bridge(BRIDGE).expect("bridge");
    host.netlink.set_up(bridge).expect("up");
    let guest = plug(host, number);
    must(
        &host.namespace,
        &["ip", "link", "set", "port", "master", BRIDGE],
    );
    guest
}

/// The MAC address of a host behind a bridge.
fn mac_of(namespace: &NetNs) -> [u8; 6] {
    let link = namespace.netlink().expect("netlink").link(LAN);
    link.expect("link").mac().expect("a MAC address")
}

/// Checks that a frame of an unknown type with the tag of VLAN 7 arrives with its tag.
fn tagged_frame_crosses(from: &NetNs, to: &NetNs) {
    let open = |namespace: &NetNs| {
        let link = namespace.netlink().expect("netlink").link(LAN);
        let index = link.expect("link").index;
        let all = PacketOptions::new(Accept::Everything {
            snap_length: 1 << 16,
        });
        let socket = namespace.run(move || PacketSocket::open(index, &all));
        socket.expect("namespace").expect("socket")
    };
    let (sender, receiver) = (open(from), open(to));
    let tagged = [
        &[0xff; 6][..],
        &mac_of(from),
        &[0x81, 0, 0, 7, 0x88, 0xb5],
        b"a frame of VLAN 7, in no protocol that there is, as long as the least frame",
    ]
    .concat();
    // The kernel has removed the tag.
    let payload = &tagged[16..];
    let mut buffer = vec![0; RECEIVE_BUFFER_LEN];
    eventually("the tagged frame does not arrive", || {
        let parts = [IoSlice::new(&[0; VNET_HDR_LEN]), IoSlice::new(&tagged)];
        sender.send_vectored(&parts).expect("send");
        std::thread::sleep(Duration::from_millis(20));
        std::iter::from_fn(|| {
            receiver
                .receive(&mut buffer)
                .ok()
                .map(|r| (r, buffer.clone()))
        })
        .take(100)
        .any(|(received, frame)| {
            received.vlan == Some(7) && frame[..received.length].ends_with(payload)
        })
    });
}

/// Two hosts without Seikan behind the ends of a tunnel reach each other by everything that a
/// switch would carry.
fn reach_each_other(left: &Guest, right: &Guest) {
    let (left, right) = (&left.0, &right.0);
    // The whole MTU of a LAN: 1500 bytes, with 20 or 40 of IP and 8 of ICMP.
    pings(left, "10.99.0.2", 1472);
    pings(right, "fd99::1", 1452);
    tagged_frame_crosses(left, right);
    let mac = Mac(mac_of(right)).to_string();
    let neighbours = must(left, &["ip", "neighbour"]);
    assert!(neighbours.contains(&mac), "{neighbours}");
    // All hosts on the link, among them the one behind the other end.
    let addresses = must(right, &["ip", "-6", "-o", "address", "show", "dev", LAN]);
    let local = addresses
        .split_whitespace()
        .find(|word| word.starts_with("fe80:"))
        .and_then(|word| word.split('/').next())
        .expect("a link-local address");
    let group = format!("ff02::1%{LAN}");
    eventually("no answer to a multicast", || {
        let output = run(left, &["ping", "-c", "2", "-W", "1", &group]);
        String::from_utf8_lossy(&output.stdout).contains(local)
    });
}

#[test]
fn hosts_behind_linux_bridges_share_one_network() {
    in_world(["", ""], |world| {
        let hook = format!("MTU = 1500\nPostUp = ip link set %i master {BRIDGE}");
        for host in [&world.left, &world.right] {
            configure(host, &hook, "PersistentKeepalive = 1");
        }
        let guests = [bridged(&world.left, 1), bridged(&world.right, 2)];
        let _tunnels: [Tunnel; 2] = [&world.right, &world.left].map(|host| world.up(host));
        reach_each_other(&guests[0], &guests[1]);
        let [before, _] = packets(world, &world.left);
        let bytes = stream(&guests[0].0, &guests[1].0, "10.99.0.2");
        assert!(bytes > 1_000_000, "{bytes}");
        let [sent, _] = packets(world, &world.left);
        let [_, received] = packets(world, &world.right);
        let [all, reads] = [sent[0] - before[0], sent[1] - before[1]];
        assert!(all > 4 * reads, "{all} packets in {reads} reads");
        assert!(received[0] > 4 * received[1], "{received:?}");
        in_order(world);
    });
}

/// A program of Open vSwitch in a host, which keeps all its files in a folder.
fn switch(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null());
    for variable in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR"] {
        command.env(variable, folder);
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs such a program to its end.
fn switch_must(namespace: &NetNs, folder: &Path, words: &[&str]) {
    let child = namespace.spawn_command(&mut switch(folder, words));
    let output = child.expect(words[0]).wait_with_output().expect("output");
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
}

/// Stops a program with the test.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts Open vSwitch with its datapath in user space and these ports.
fn start_switch(host: &Host, folder: &Path, ports: &[&str]) -> [Running; 2] {
    const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
    let namespace = &host.namespace;
    let at = |name: &str| folder.join(name).display().to_string();
    let (file, socket) = (at("switch.db"), at("database.sock"));
    switch_must(namespace, folder, &["ovsdb-tool", "create", &file, SCHEMA]);
    let start = |words: &[&str], socket: &str| {
        let mut command = switch(folder, words);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = namespace.spawn_command(&mut command).expect(words[0]);
        let running = Running(child);
        eventually(&format!("{} does not start", words[0]), || {
            Path::new(socket).exists()
        });
        running
    };
    let own = format!("--unixctl={}", at("database.ctl"));
    let remote = format!("--remote=punix:{socket}");
    let database = start(&["ovsdb-server", &file, &remote, &own], &socket);
    let from = format!("unix:{socket}");
    let database_option = format!("--db={from}");
    let vsctl = |words: &[&str]| {
        let words = [&["ovs-vsctl", &database_option, "--timeout=20"], words].concat();
        switch_must(namespace, folder, &words);
    };
    vsctl(&["--no-wait", "init"]);
    let control = at("switch.ctl");
    let own = format!("--unixctl={control}");
    let daemon = start(&["ovs-vswitchd", &from, &own], &control);
    vsctl(&[
        "add-br",
        BRIDGE,
        "--",
        "set",
        "bridge",
        BRIDGE,
        "datapath_type=netdev",
    ]);
    for port in ports {
        vsctl(&["add-port", BRIDGE, port]);
    }
    [database, daemon]
}

#[test]
fn a_host_behind_open_vswitch_shares_the_network_too() {
    if Command::new("ovs-vswitchd")
        .arg("--version")
        .output()
        .is_err()
    {
        return skip("no ovs-vswitchd: Debian's package openvswitch-switch has it");
    }
    in_world(["", ""], |world| {
        // The datapath in user space takes neither super-packets nor partial checksums.
        configure(
            &world.left,
            "MTU = 1500\nOffload = false",
            "PersistentKeepalive = 1",
        );
        let hook = format!("MTU = 1500\nPostUp = ip link set %i master {BRIDGE}");
        configure(&world.right, &hook, "");
        let guests = [plug(&world.left, 1), bridged(&world.right, 2)];
        // The datapath does not accept them from a neighbour either.
        let ethtool = guests[0].0.ethtool().expect("ethtool");
        ethtool
            .set_feature(LAN, Feature::TxChecksum, false)
            .expect("off");
        let _tunnels: [Tunnel; 2] = [&world.right, &world.left].map(|host| world.up(host));
        let folder = tempfile::tempdir().expect("folder");
        let ports = ["port", &world.left.interface];
        let _switch = start_switch(&world.left, folder.path(), &ports);
        reach_each_other(&guests[0], &guests[1]);
        let bytes = stream(&guests[0].0, &guests[1].0, "10.99.0.2");
        assert!(bytes > 100_000, "{bytes}");
        in_order(world);
    });
}
