//! `seikan gateway discover`: listens on an interface with a packet socket and lists the hosts that
//! send.
//!
//! It sends nothing. It changes nothing except for `--promiscuous`, which ends with the socket.

use std::io::{self, Write};
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use seikan_node::control::{RuntimeDirs, ask};
use seikan_node::status::gateway::GatewayStatus;
use seikan_node::system::now;
use seikan_proto::gateway::neighbours::{CapturedFrame, NeighbourEntry, NeighbourTable};
use seikan_sys::netlink::{LinkInfo, Netlink};
use seikan_sys::packet::{Accept, PacketOptions, PacketSocket, VNET_HEADER_LEN};
use seikan_sys::poll::{Epoll, Interest};
use seikan_ui::{Interrupt, Progress, ProgressBar};
use seikan_wire::VnetHdr;
use seikan_wire::ethernet::Mac;
use serde::Serialize;

use crate::output::{self, counted};
use crate::screen::{
    Align, BOLD, CYAN, DIM, RED, RESET, Screen, Table, YELLOW, ago, bytes, number,
};

/// Bytes read of each frame: all headers with addresses.
const SNAP_LENGTH: u32 = 128;
/// Interval of the progress bar and of checks for Ctrl-C.
const TICK: Duration = Duration::from_millis(100);
/// Frames received between two checks of the clock.
const FRAMES_PER_CHECK: usize = 256;

/// Options of `gateway discover`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan gateway discover eth1\n  \
    sudo seikan gateway discover eth1 --seconds 60 --toml >> /etc/seikan/office.toml\n\n\
    It sends nothing, so that a silent host is not found: cause traffic or listen longer. A switch forwards only \
    broadcasts, multicasts and frames for this host; with a hub or a mirror port, --promiscuous shows all frames, \
    and VLANs that the NIC would filter. Addresses behind a router are not listed as the router's.\n\
    Ctrl-C ends it and prints the list. Needs CAP_NET_RAW.")]
pub struct Arguments {
    /// Interface on the LAN
    #[arg(value_name = "INTERFACE")]
    interface: String,
    /// Time to listen, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Receive frames for other hosts too
    #[arg(long)]
    promiscuous: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "toml")]
    json: bool,
    /// Print [[gateway.device]] sections of the hosts that are no devices yet
    #[arg(long)]
    toml: bool,
}

/// Hosts found on a local network.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Discovery {
    /// Interface that was listened on.
    interface: String,
    /// Its MAC address.
    mac: Option<String>,
    /// Its prefixes.
    prefixes: Vec<String>,
    /// Time of listening, in seconds.
    listened_s: f64,
    /// Hosts that sent frames.
    neighbours: Vec<Neighbour>,
    /// Frames of hosts that did not fit into the table.
    overflowed_frames: u64,
    /// Frames without a usable source address.
    not_understood_frames: u64,
    /// Frames dropped because the socket's queue was full.
    lost_frames: u64,
}

/// A host on the LAN, by MAC address and VLAN.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Neighbour {
    /// Its MAC address.
    mac: String,
    /// Its VLAN.
    vlan: Option<u16>,
    /// Its IP addresses.
    addresses: Vec<IpAddr>,
    /// Whether it has more addresses than listed.
    has_more_addresses: bool,
    /// Addresses for a configuration.
    lan: Vec<IpAddr>,
    /// Age of its first frame, in seconds before the end.
    first_seen_s: f64,
    /// Age of its last frame, in seconds before the end.
    last_seen_s: f64,
    /// Number of its frames.
    frames: u64,
    /// Bytes of its frames, with Ethernet headers.
    bytes: u64,
    /// MAC address of another host with one of its addresses.
    shares_address_with: Option<String>,
    /// Its role for a gateway of this host.
    known: Option<Role>,
}

/// The role of a host for a gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
enum Role {
    /// The interface that was listened on.
    Own,
    /// The ARP and neighbour discovery responder of a gateway.
    Responder,
    /// A configured device with this name.
    Device(String),
}

/// Listens and prints the hosts.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let failed = || format!("cannot listen on {}", arguments.interface);
    let netlink = Netlink::open().with_context(failed)?;
    let link = netlink.link(&arguments.interface).with_context(failed)?;
    let addresses = netlink.addresses(link.index).with_context(failed)?;
    let prefixes: Vec<_> = addresses.iter().map(|address| address.net).collect();
    if !(link.up && link.carrier) {
        anstream::eprintln!(
            "{YELLOW}warning{RESET}: {} is down or has no carrier, so no host will be found",
            link.name
        );
    }
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let mut table = NeighbourTable::new(prefixes.clone());
    let started_at = Instant::now();
    let lost = listen(arguments, &link, &interrupt, &mut table).with_context(failed)?;
    let gateways = gateways(&link);
    let neighbours = table.entries();
    let discovery = Discovery {
        interface: link.name.clone(),
        mac: own_mac(&link).map(|mac| mac.to_string()),
        prefixes: prefixes.iter().map(ToString::to_string).collect(),
        listened_s: started_at.elapsed().as_millis() as f64 / 1000.0,
        neighbours: neighbours
            .iter()
            .map(|entry| describe(entry, &table, &link, &gateways))
            .collect(),
        overflowed_frames: table.overflowed(),
        not_understood_frames: table.not_understood(),
        lost_frames: lost,
    };
    if arguments.json {
        output::print_json(&discovery)?;
    } else if arguments.toml {
        write!(output::stdout(), "{}", sections(&discovery))?;
    } else {
        write!(output::stdout(), "{}", render(&discovery))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Listens until the time is over or Ctrl-C; returns the number of lost frames.
fn listen(
    arguments: &Arguments,
    link: &LinkInfo,
    interrupt: &Interrupt,
    table: &mut NeighbourTable,
) -> anyhow::Result<u64> {
    let accept = Accept::Everything {
        snap_length: SNAP_LENGTH,
    };
    let socket = PacketSocket::open(link.index, &PacketOptions::new(accept))?;
    // Otherwise the NIC filters neighbour discovery between other hosts.
    socket.join_all_multicast()?;
    if arguments.promiscuous {
        socket.set_promiscuous(true)?;
    }
    let mut epoll = Epoll::new(1)?;
    epoll.add(&socket, 0, Interest::Read)?;
    let bar = ProgressBar::new();
    let started_at = Instant::now();
    let length = Duration::from_secs(arguments.seconds.into());
    let mut buffer = [0; VNET_HEADER_LEN + SNAP_LENGTH as usize];
    loop {
        let elapsed = started_at.elapsed();
        if elapsed >= length || interrupt.is_raised() {
            return Ok(socket.drops());
        }
        bar.show(Progress {
            fraction: elapsed.as_secs_f64() / length.as_secs_f64(),
            step: format!(
                "listening on {}, {} found (Ctrl-C to end)",
                link.name,
                counted(table.len(), "host")
            ),
        });
        if let Err(error) = epoll.wait(Some(TICK.min(length - elapsed)))
            && error.kind() != io::ErrorKind::Interrupted
        {
            return Err(error.into());
        }
        for _ in 0..FRAMES_PER_CHECK {
            let received = match socket.receive(&mut buffer) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => continue,
                // No more frames, or the interface is down for now.
                Err(_) => break,
            };
            let read = &buffer[..received.length];
            let (Ok(vnet), Some(frame)) = (VnetHdr::read(read), read.get(VNET_HEADER_LEN..)) else {
                continue;
            };
            let captured = CapturedFrame {
                frame,
                vnet,
                tci: received.vlan,
                length: received.frame_length,
            };
            table.observe(now().mono, &captured);
        }
    }
}

/// Returns the gateways of this host on the interface, if they answer.
fn gateways(link: &LinkInfo) -> Vec<GatewayStatus> {
    let places = RuntimeDirs::default();
    let names = ask::running(&places).unwrap_or_default().into_iter();
    names
        .filter_map(|name| ask::status(&places, &name).ok()?.gateway)
        .filter(|gateway| gateway.interface == link.name)
        .collect()
}

fn describe(
    entry: &NeighbourEntry,
    table: &NeighbourTable,
    link: &LinkInfo,
    gateways: &[GatewayStatus],
) -> Neighbour {
    let now = now().mono;
    let shared = entry.addresses.iter().find_map(|a| table.shares(entry, *a));
    Neighbour {
        mac: entry.mac.to_string(),
        vlan: entry.vlan,
        addresses: entry.addresses.clone(),
        has_more_addresses: entry.has_more,
        lan: entry.lan(),
        first_seen_s: now.duration_since(entry.first).as_millis() as f64 / 1000.0,
        last_seen_s: now.duration_since(entry.last).as_millis() as f64 / 1000.0,
        frames: entry.frames,
        bytes: entry.bytes,
        shares_address_with: shared.map(|mac| mac.to_string()),
        known: role(entry, link, gateways),
    }
}

fn role(entry: &NeighbourEntry, link: &LinkInfo, gateways: &[GatewayStatus]) -> Option<Role> {
    let mac = entry.mac.to_string();
    if own_mac(link) == Some(entry.mac) {
        return Some(Role::Own);
    }
    let responders = gateways
        .iter()
        .filter_map(|gateway| gateway.responder.as_ref());
    if responders.into_iter().any(|responder| responder.mac == mac) {
        return Some(Role::Responder);
    }
    let devices = gateways.iter().flat_map(|gateway| &gateway.devices);
    let device = devices.into_iter().find(|device| match &device.mac {
        Some(device_mac) => device.vlan == entry.vlan && *device_mac == mac,
        None => {
            let has = |address| entry.addresses.contains(address);
            device.vlan == entry.vlan && device.lan.iter().any(has)
        }
    });
    device.map(|device| Role::Device(device.name.clone()))
}

fn own_mac(link: &LinkInfo) -> Option<Mac> {
    link.mac().map(Mac)
}

fn render(discovery: &Discovery) -> String {
    use Align::{Left, Right};
    let mut out = Screen(String::new());
    let interface = match &discovery.mac {
        Some(mac) if discovery.prefixes.is_empty() => {
            format!("{} ({mac}, without address)", discovery.interface)
        }
        Some(mac) => {
            let prefixes = discovery.prefixes.join(", ");
            format!("{} ({mac}, {prefixes})", discovery.interface)
        }
        None => discovery.interface.clone(),
    };
    let hosts = counted(discovery.neighbours.len(), "host");
    let seconds = discovery.listened_s;
    out.0 += &format!("{BOLD}{hosts}{RESET} found in {seconds:.1} {CYAN}s{RESET} on {interface}\n");
    let mut table = Table::new(&[
        ("MAC", Left),
        ("VLAN", Right),
        ("addresses", Left),
        ("first seen", Right),
        ("last seen", Right),
        ("frames", Right),
        ("bytes", Right),
        ("", Left),
    ]);
    for host in &discovery.neighbours {
        let mut addresses: Vec<_> = host.addresses.iter().map(ToString::to_string).collect();
        if host.has_more_addresses {
            addresses.push("…".into());
        }
        table.row(vec![
            format!("{YELLOW}{}{RESET}", host.mac),
            host.vlan.map_or_else(String::new, |vlan| vlan.to_string()),
            if addresses.is_empty() {
                format!("{DIM}unknown{RESET}")
            } else {
                addresses.join(", ")
            },
            ago(Some(host.first_seen_s)),
            ago(Some(host.last_seen_s)),
            number(host.frames),
            bytes(host.bytes),
            remark(host),
        ]);
    }
    if !discovery.neighbours.is_empty() {
        table.write(&mut out);
    }
    for (count, text) in [
        (
            discovery.lost_frames,
            "frames lost: the queue of the socket was full",
        ),
        (
            discovery.overflowed_frames,
            "frames of more hosts: the table is full",
        ),
    ] {
        if count > 0 {
            out.0 += &format!("{RED}{}{RESET} {text}\n", number(count));
        }
    }
    if discovery.neighbours.is_empty() {
        out.0 += &format!(
            "{DIM}Silent hosts are not found: cause traffic or listen longer (`--seconds 60`).{RESET}\n"
        );
    } else if discovery.neighbours.iter().any(|host| host.known.is_none()) {
        out.0 += &format!("{DIM}`--toml` prints them as devices for a configuration.{RESET}\n");
    }
    out.0
}

fn remark(host: &Neighbour) -> String {
    if let Some(other) = &host.shares_address_with {
        return format!("{RED}duplicate address: also used by {other}{RESET}");
    }
    match &host.known {
        None => String::new(),
        Some(Role::Own) => format!("{DIM}this host{RESET}"),
        Some(Role::Responder) => format!("{DIM}the gateway's responder{RESET}"),
        Some(Role::Device(name)) => {
            format!("device {YELLOW}{}{RESET}", crate::screen::printable(name))
        }
    }
}

/// Returns configuration sections of the hosts without a role.
fn sections(discovery: &Discovery) -> String {
    let mut text = format!("# Found on {}.\n", discovery.interface);
    let mut names: Vec<String> = Vec::new();
    let unknown = discovery
        .neighbours
        .iter()
        .filter(|host| host.known.is_none());
    for host in unknown {
        let mut name = device_name(host);
        if names.contains(&name) {
            name = format!("{name}-{}", names.len() + 1);
        }
        text += &format!(
            "\n[[gateway.device]]\nname = \"{name}\"\nmac = \"{}\"\n",
            host.mac
        );
        if let Some(vlan) = host.vlan {
            text += &format!("vlan = {vlan}\n");
        }
        let lan: Vec<_> = host
            .lan
            .iter()
            .map(|address| format!("\"{address}\""))
            .collect();
        if !lan.is_empty() {
            text += &format!("lan = [{}]", lan.join(", "));
            text += "    # remove it if the address changes (DHCP): `mac` finds the device\n";
        }
        if let Some(other) = &host.shares_address_with {
            text += &format!("# Duplicate address: {other} also has one of these.\n");
        }
        text += "# overlay = [\"10.77.0.…\"]    # addresses in the overlay [default: those on the LAN]\n";
        names.push(name);
    }
    if names.is_empty() {
        text += "# No host that is not a device already.\n";
    }
    text
}

/// Returns a name made from the address, else from the MAC address.
fn device_name(host: &Neighbour) -> String {
    let v4 = host.lan.iter().find(|address| address.is_ipv4());
    match v4 {
        Some(address) => format!("device-{}", address.to_string().replace('.', "-")),
        None => {
            let digits: String = host.mac.chars().filter(|c| *c != ':').collect();
            format!("device-{}", digits.get(6..).unwrap_or(&digits))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::plain;

    fn host(mac: &str, lan: &[&str]) -> Neighbour {
        let lan: Vec<IpAddr> = lan.iter().map(|text| text.parse().unwrap()).collect();
        Neighbour {
            mac: mac.into(),
            vlan: None,
            addresses: lan.clone(),
            has_more_addresses: false,
            lan,
            first_seen_s: 9.5,
            last_seen_s: 0.5,
            frames: 1234,
            bytes: 2048,
            shares_address_with: None,
            known: None,
        }
    }

    fn found(neighbours: Vec<Neighbour>) -> Discovery {
        Discovery {
            interface: "eth1".into(),
            mac: Some("02:00:00:00:00:01".into()),
            prefixes: vec!["192.168.1.1/24".into()],
            listened_s: 10.0,
            neighbours,
            overflowed_frames: 0,
            not_understood_frames: 0,
            lost_frames: 0,
        }
    }

    #[test]
    fn the_table_lists_hosts() {
        let device = Neighbour {
            known: Some(Role::Device("camera".into())),
            ..host("02:00:00:00:00:11", &["192.168.1.11"])
        };
        let unknown = host("02:00:00:00:00:10", &["192.168.1.10", "fd00:1::10"]);
        let text = plain(&render(&found(vec![unknown, device])));
        let expected = "\
2 hosts found in 10.0 s on eth1 (02:00:00:00:00:01, 192.168.1.1/24)
  MAC                addresses                 first seen  last seen  frames     bytes
  02:00:00:00:00:10  192.168.1.10, fd00:1::10    10 s ago        now   1,234  2.00 KiB
  02:00:00:00:00:11  192.168.1.11                10 s ago        now   1,234  2.00 KiB  device camera
`--toml` prints them as devices for a configuration.
";
        assert_eq!(text, expected);
    }

    #[test]
    fn printed_sections_are_valid_configuration() {
        let own = Neighbour {
            known: Some(Role::Own),
            ..host("02:00:00:00:00:01", &["192.168.1.1"])
        };
        let tagged = Neighbour {
            vlan: Some(7),
            ..host("02:00:00:00:00:12", &["192.168.7.10"])
        };
        let neighbours = vec![
            host("02:00:00:00:00:10", &["192.168.1.10", "fd00:1::10"]),
            own,
            tagged,
            host("02:00:00:a1:b2:c3", &[]),
        ];
        let text = format!(
            "private-key = \"{}\"\naddress = \"10.77.0.1/24\"\n[gateway]\ninterface = \"eth1\"\n{}",
            "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=",
            sections(&found(neighbours))
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gateway.toml");
        std::fs::write(&file, text).unwrap();
        let target = file.to_str().unwrap();
        let parsed = seikan_config::load(target, &seikan_config::Overrides::default());
        let gateway = parsed.into_result().unwrap().0.gateway.unwrap();
        let names: Vec<_> = gateway.devices.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "device-192-168-1-10",
                "device-192-168-7-10",
                "device-a1b2c3"
            ]
        );
    }
}
