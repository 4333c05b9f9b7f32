//! A site: devices, one or two gateways and a remote host, all of them namespaces at two switches.
//!
//! ```text
//! device eth0 --- LAN switch --- lan0 gateway wan0 --- WAN switch --- wan0 remote
//! 192.168.1.10                   192.168.1.1  10.0.0.1                10.0.0.2       on the interfaces
//! fd00:1::10                     fd00:1::1    fd00:2::1               fd00:2::2
//! 10.77.0.10, fd77::10           10.77.0.1, fd77::1                   10.77.0.2, fd77::2   in the overlay
//! 192.168.1.202, fd00:1::202: the remote on the LAN
//! ```
//! Namespaces are unnamed: they end with the test, even if it fails.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use seikan_lab::site::Host;
use seikan_load::{
    Direction, Ends, LoadError, TcpOptions, UdpOptions, tcp_bulk, udp_flood, wait_reachable,
};
use seikan_sys::ethtool::Feature;
use seikan_sys::netlink::{AddressOptions, Netlink, Route};
use seikan_sys::netns::NetNs;
use seikan_ui::Interrupt;
use serde_json::Value;

use crate::common::{PATIENCE, Tunnel, key_pair, skip};

/// Interface of the gateways to the LAN.
pub const LAN: &str = "lan0";
/// Interface of the gateways and the remote to the WAN.
pub const WAN: &str = "wan0";
/// Interface of the device.
pub const DEVICE_INTERFACE: &str = "eth0";
/// Addresses of the remote on the LAN.
pub const SHOWN: [&str; 2] = ["192.168.1.202", "fd00:1::202"];
/// Addresses of the remote in the overlay.
pub const REMOTE: [&str; 2] = ["10.77.0.2", "fd77::2"];
/// Addresses of the device in the overlay.
pub const DEVICE: [&str; 2] = ["10.77.0.10", "fd77::10"];
/// MAC address of the device.
pub const DEVICE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x10];
/// UDP port of the tunnels.
pub const PORT: u16 = 7000;

/// The `[[gateway.remote]]` section of the remote.
pub const REMOTES: &str = r#"
[[gateway.remote]]
overlay = "10.77.0.2"
lan = "192.168.1.202"
[[gateway.remote]]
overlay = "fd77::2"
lan = "fd00:1::202"
"#;

/// The `[[gateway.device]]` section of the device, without further lines.
pub const LISTED: &str = r#"
[[gateway.device]]
name = "device"
lan = ["192.168.1.10", "fd00:1::10"]
overlay = ["10.77.0.10", "fd77::10"]
"#;

/// Lines of the configurations.
pub struct Plan {
    pub protocol: &'static str,
    pub mode: &'static str,
    /// Lines at the top of the gateway's file, and of the remote's.
    pub head: &'static str,
    pub remote_head: &'static str,
    /// Lines in `[gateway]`.
    pub gateway: &'static str,
    /// `[[gateway.device]]`, and then `[[gateway.remote]]`.
    pub devices: String,
    pub remotes: &'static str,
    /// Lines at the end of the remote's file.
    pub remote_gateway: &'static str,
    /// Further `allowed-ips` of the remote in the gateway's file, and of the gateway in the
    /// remote's.
    pub allowed: [&'static str; 2],
    /// MTU on the LAN.
    pub mtu: u32,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            protocol: "native",
            mode: "transparent",
            head: "",
            remote_head: "",
            gateway: "",
            devices: LISTED.to_owned(),
            remotes: REMOTES,
            remote_gateway: "",
            allowed: ["", ""],
            mtu: 1500,
        }
    }
}

/// An Ethernet switch.
pub struct Switch {
    pub netlink: Netlink,
    _netns: NetNs,
    bridge: u32,
    ports: AtomicU32,
}

impl Switch {
    pub fn create() -> Result<Switch, String> {
        let netns = NetNs::create().map_err(|e| e.to_string())?;
        let netlink = netns.netlink().map_err(|e| e.to_string())?;
        let bridge = netlink.create_bridge("switch").map_err(|e| e.to_string())?;
        netlink.set_up(bridge).map_err(|e| e.to_string())?;
        Ok(Switch {
            netlink,
            _netns: netns,
            bridge,
            ports: AtomicU32::new(0),
        })
    }

    /// Connects a host to the switch by a new interface, and sets it up; returns the index of the
    /// switch's port.
    pub fn plug(&self, host: &Host, interface: &str, mtu: u32) -> u32 {
        let number = self.ports.fetch_add(1, Ordering::Relaxed);
        let name = format!("port{number}");
        let peer = Some(host.netns().as_fd());
        let port = self
            .netlink
            .create_veth(&name, interface, peer)
            .expect("the switch's port");
        self.netlink
            .set_master(port, Some(self.bridge))
            .expect("the switch's port");
        self.netlink.set_mtu(port, mtu).expect("mtu");
        self.netlink.set_up(port).expect("up");
        let there = host.netlink().expect("netlink");
        let index = there.link(interface).expect("interface").index;
        there.set_mtu(index, mtu).expect("mtu");
        there.set_up(index).expect("up");
        port
    }
}

/// The hosts and their files.
pub struct Site {
    pub device: Host,
    pub gateway: Host,
    pub remote: Host,
    pub lan: Switch,
    pub wan: Switch,
    /// Port of the LAN's switch to the gateway.
    pub gateway_port: u32,
    pub gateway_config: PathBuf,
    pub remote_config: PathBuf,
    pub folder: tempfile::TempDir,
    number: u32,
}

/// Runs a test with a site of its own.
pub fn at_site(plan: &Plan, test: impl FnOnce(&Site)) {
    if !Path::new("/dev/net/tun").exists() {
        return skip("no /dev/net/tun");
    }
    match Site::create(plan) {
        Ok(site) => test(&site),
        Err(reason) => skip(&reason),
    }
}

/// As [`at_site`], with the gateway and the remote up, and after an echo from the device to the
/// remote.
pub fn at_running_site(plan: &Plan, test: impl FnOnce(&Site, [Tunnel; 2])) {
    at_site(plan, |site| {
        let tunnels = site.up();
        let target = if plan.remotes.is_empty() {
            REMOTE
        } else {
            SHOWN
        };
        if plan.mode == "routed" && plan.remotes.is_empty() {
            site.route_the_overlay();
        }
        site.reaches(&site.device, target[0]);
        test(site, tunnels);
    });
}

impl Site {
    pub fn create(plan: &Plan) -> Result<Site, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let host = |name| new_host(name);
        let (device, gateway, remote) = (host("device")?, host("gateway")?, host("remote")?);
        let (lan, wan) = (Switch::create()?, Switch::create()?);
        lan.plug(&device, DEVICE_INTERFACE, plan.mtu);
        set_mac(&device, DEVICE_INTERFACE, DEVICE_MAC);
        let gateway_port = lan.plug(&gateway, LAN, plan.mtu);
        wan.plug(&gateway, WAN, 1500);
        wan.plug(&remote, WAN, 1500);
        add_addresses(
            &device,
            DEVICE_INTERFACE,
            ["192.168.1.10/24", "fd00:1::10/64"],
        );
        add_addresses(&gateway, WAN, ["10.0.0.1/24", "fd00:2::1/64"]);
        add_addresses(&remote, WAN, ["10.0.0.2/24", "fd00:2::2/64"]);
        if plan.mode == "routed" {
            add_addresses(&gateway, LAN, ["192.168.1.1/24", "fd00:1::1/64"]);
        }
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut site = Site {
            device,
            gateway,
            remote,
            lan,
            wan,
            gateway_port,
            gateway_config: PathBuf::new(),
            remote_config: PathBuf::new(),
            folder,
            number,
        };
        site.configure(plan);
        Ok(site)
    }

    fn configure(&mut self, plan: &Plan) {
        let [gateway, remote] = [key_pair(), key_pair()];
        let protocol = plan.protocol;
        let text = format!(
            "protocol = \"{protocol}\"\nprivate-key = \"{}\"\nlisten-port = {PORT}\n\
             address = [\"10.77.0.1/24\", \"fd77::1/64\"]\n{}\n\
             [[peer]]\npublic-key = \"{}\"\nallowed-ips = [\"10.77.0.2/32\", \"10.77.0.20/32\", \"fd77::2/128\", \"fd77::20/128\"{}]\n\
             endpoint = \"10.0.0.2:{PORT}\"\npersistent-keepalive = 5\n\
             [gateway]\ninterface = \"{LAN}\"\nmode = \"{}\"\n{}\n{}\n{}\n",
            gateway.0,
            plan.head,
            remote.1,
            plan.allowed[0],
            plan.mode,
            plan.gateway,
            plan.devices,
            plan.remotes,
        );
        self.gateway_config = self.write("g", &text);
        let text = format!(
            "protocol = \"{protocol}\"\nprivate-key = \"{}\"\nlisten-port = {PORT}\n\
             address = [\"10.77.0.2/24\", \"fd77::2/64\"]\n{}\n\
             [[peer]]\npublic-key = \"{}\"\nendpoint = \"10.0.0.1:{PORT}\"\n\
             allowed-ips = [\"10.77.0.0/24\", \"fd77::/64\"{}]\n{}\n",
            remote.0, plan.remote_head, gateway.1, plan.allowed[1], plan.remote_gateway,
        );
        self.remote_config = self.write("r", &text);
    }

    /// Writes the configuration of a tunnel whose interface name is unique on this machine.
    pub fn write(&self, side: &str, text: &str) -> PathBuf {
        let name = format!("s{}x{}{side}.toml", std::process::id(), self.number);
        let path = self.folder.path().join(name);
        fs::write(&path, text).expect("write");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("mode");
        path
    }

    /// Starts the gateway and the remote.
    pub fn up(&self) -> [Tunnel; 2] {
        let remote = self.start(&self.remote, &self.remote_config);
        [self.start(&self.gateway, &self.gateway_config), remote]
    }

    /// Starts a tunnel and waits until it is up.
    pub fn start(&self, host: &Host, config: &Path) -> Tunnel {
        let errors = config.with_extension("log");
        let log = fs::File::create(&errors).expect("log");
        let mut command = self.seikan(&["up", config.to_str().expect("UTF-8")]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = host.spawn(command.stderr(log)).expect("start");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("read");
        let is_up = line.contains(" is up");
        assert!(
            is_up,
            "not up: {}",
            fs::read_to_string(&errors).unwrap_or_default()
        );
        Tunnel { child, stdout }
    }

    pub fn seikan(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        for name in ["PROTOCOL", "OFFLOAD", "METRICS", "MTU"] {
            command.env_remove(format!("SEIKAN_{name}"));
        }
        command.env("SEIKAN_RUN_DIR", self.folder.path().join("run"));
        command.args(words);
        command
    }

    /// Returns `seikan status --json` of a tunnel.
    pub fn status(&self, host: &Host, config: &Path) -> Value {
        let mut command = self.seikan(&["status", interface(config), "--json"]);
        let child = host.spawn(command.stdout(Stdio::piped())).expect("status");
        let output = child.wait_with_output().expect("status");
        assert!(output.status.success());
        crate::schema::printed("status", &output.stdout)
    }

    /// Returns the gateway in the status.
    pub fn gateway_status(&self) -> Value {
        self.status(&self.gateway, &self.gateway_config)["gateway"].clone()
    }

    /// Fails unless an address echoes within ten seconds.
    pub fn reaches(&self, from: &Host, to: &str) {
        assert!(
            answers(from, to, PATIENCE),
            "no answer from {to} to the {}: {}",
            from.name,
            self.logs()
        );
    }

    /// Adds routes to the overlay through the gateway.
    pub fn route_the_overlay(&self) {
        for (net, via) in [("10.77.0.0/24", "192.168.1.1"), ("fd77::/64", "fd00:1::1")] {
            add_route(&self.device, net, via);
        }
    }

    pub fn logs(&self) -> String {
        let of = |config: &Path| fs::read_to_string(config.with_extension("log"));
        let logs = [&self.gateway_config, &self.remote_config].map(|config| of(config).ok());
        format!("{logs:?}")
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // Files that killed tunnels could not remove.
        let configs = fs::read_dir(self.folder.path()).into_iter().flatten();
        for config in configs.flatten().map(|entry| entry.path()) {
            if config.extension().is_some_and(|end| end == "toml") {
                let socket = format!("/var/run/wireguard/{}.sock", interface(&config));
                let _ = fs::remove_file(socket);
            }
        }
    }
}

/// Returns the interface of a configuration's tunnel.
pub fn interface(config: &Path) -> &str {
    config.file_stem().and_then(|n| n.to_str()).expect("UTF-8")
}

/// Makes a host whose IPv6 addresses are usable at once.
pub fn new_host(name: &'static str) -> Result<Host, String> {
    let host = Host::create(name, 0).map_err(|e| e.to_string())?;
    write_sysctl(&host, "ipv6/conf/default/dad_transmits", "0");
    write_sysctl(&host, "ipv6/conf/default/accept_ra", "0");
    Ok(host)
}

pub fn write_sysctl(host: &Host, path: &str, value: &str) {
    let path = format!("/proc/sys/net/{path}");
    let written = host.run(|| fs::write(&path, value)).expect("namespace");
    written.unwrap_or_else(|e| panic!("{path}: {e}"));
}

pub fn read_sysctl(host: &Host, path: &str) -> String {
    let path = format!("/proc/sys/net/{path}");
    let read = host.run(|| fs::read_to_string(&path)).expect("namespace");
    read.map_or_else(|e| e.to_string(), |text| text.trim().to_owned())
}

pub fn index(host: &Host, interface: &str) -> u32 {
    let link = host
        .netlink()
        .expect("netlink")
        .link(interface)
        .expect("interface");
    link.index
}

pub fn add_address(host: &Host, interface: &str, address: &str) {
    let options = AddressOptions {
        no_dad: true,
        ..AddressOptions::default()
    };
    let netlink = host.netlink().expect("netlink");
    let address = address.parse().expect("address");
    let added = netlink.add_address_with(index(host, interface), address, options);
    added.expect("address");
}

pub fn add_addresses(host: &Host, interface: &str, addresses: [&str; 2]) {
    for address in addresses {
        add_address(host, interface, address);
    }
}

pub fn remove_address(host: &Host, interface: &str, address: &str) {
    let netlink = host.netlink().expect("netlink");
    let address = address.parse().expect("address");
    let removed = netlink.delete_address(index(host, interface), address);
    removed.expect("address");
}

pub fn add_route(host: &Host, net: &str, via: &str) {
    let route = Route::to(net.parse().expect("net")).via(via.parse().expect("address"));
    let netlink = host.netlink().expect("netlink");
    netlink.add_route(&route).expect("route");
}

pub fn mac(host: &Host, interface: &str) -> String {
    let link = host
        .netlink()
        .expect("netlink")
        .link(interface)
        .expect("interface");
    let mac = link.mac().expect("Ethernet");
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

pub fn set_mac(host: &Host, interface: &str, mac: [u8; 6]) {
    let netlink = host.netlink().expect("netlink");
    let set = netlink.set_hardware_address(index(host, interface), mac);
    set.expect("hardware address");
}

pub fn set_feature(host: &Host, interface: &str, feature: Feature, on: bool) {
    let ethtool = host.netns().ethtool().expect("ethtool");
    ethtool
        .set_feature(interface, feature, on)
        .expect("feature");
}

pub fn ip(text: &str) -> IpAddr {
    text.parse().expect("address")
}

/// Returns whether an echo arrives in time.
pub fn answers(from: &Host, to: &str, patience: Duration) -> bool {
    let ends = Ends {
        client: from.netns(),
        server: from.netns(),
        target: ip(to),
        sources: &[],
        congestion: None,
        forward: None,
    };
    wait_reachable(
        &ends,
        patience,
        &Interrupt::new(),
        || Ok::<_, LoadError>(()),
    )
    .is_ok()
}

/// Sends TCP both ways at once and UDP one way, from `client` to `server`; checks every byte.
pub fn carries(client: &Host, server: &Host, target: &str) {
    carries_tcp(client, server, target);
    carries_udp(client, server, target, 1200);
}

/// Sends TCP both ways at once; checks every byte.
pub fn carries_tcp(client: &Host, server: &Host, target: &str) {
    let ends = Ends {
        client: client.netns(),
        server: server.netns(),
        target: ip(target),
        sources: &[],
        congestion: None,
        forward: None,
    };
    let options = TcpOptions {
        warmup: Duration::ZERO,
        duration: Duration::from_millis(200),
        direction: Direction::Both,
        verify: true,
        ..TcpOptions::default()
    };
    let report = tcp_bulk(&ends, &options, &Interrupt::new());
    let report = report.unwrap_or_else(|e| panic!("TCP to {target}: {e}"));
    for bytes in &report.stream_bytes {
        assert!(*bytes > 100_000, "TCP to {target}: {report:?}");
    }
}

/// Sends datagrams, checks every byte, and fails if more than few are lost.
pub fn carries_udp(client: &Host, server: &Host, target: &str, datagram: usize) {
    let ends = Ends {
        client: client.netns(),
        server: server.netns(),
        target: ip(target),
        sources: &[],
        congestion: None,
        forward: None,
    };
    let options = UdpOptions {
        datagram,
        warmup: Duration::ZERO,
        duration: Duration::from_millis(200),
        rate: Some(10e6),
        verify: true,
        ..UdpOptions::default()
    };
    let report = udp_flood(&ends, &options, &Interrupt::new());
    let report = report.unwrap_or_else(|e| panic!("UDP to {target}: {e}"));
    assert_eq!(report.corrupt, 0, "UDP to {target}: {report:?}");
    assert!(
        report.received > 0 && report.loss() < 0.1,
        "UDP to {target}: {report:?}"
    );
}

/// Runs a program on a host to its end; returns its output. It must succeed.
pub fn run(host: &Host, words: &[&str]) -> String {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = host.spawn(&mut command);
    let child = child.unwrap_or_else(|e| panic!("{words:?}: {e}"));
    let output = child.wait_with_output().expect("wait");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {errors}");
    String::from_utf8(output.stdout).expect("UTF-8")
}
