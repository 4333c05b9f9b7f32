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
use crate::screen::{RESET, YELLOW};
use render::{render, sections};

mod render;

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
