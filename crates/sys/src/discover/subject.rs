//! The interface to diagnose, and the program that implements it.

use std::io;

use seikan_observe::path::Unseen;

use super::egress::is_kernel_tunnel;
use super::holder::{self, Search};
use super::network::Network;
use super::socket::Sockets;
use super::{DiscoverError, Subject, procfs};
use crate::netlink::LinkNode;

/// Ports of DHCP servers and clients. They use packet sockets but forward no packets.
const DHCP_PORTS: [u16; 4] = [67, 68, 546, 547];
/// Programs that capture packets but forward none.
const LISTENERS: [&str; 16] = [
    "arpwatch",
    "dhclient",
    "dhcpcd",
    "dumpcap",
    "hostapd",
    "keepalived",
    "lldpd",
    "NetworkManager",
    "ntopng",
    "snort",
    "Suricata-Main",
    "systemd-network",
    "tcpdump",
    "tshark",
    "wpa_supplicant",
    "zeek",
];
/// Maximum number of programs or interfaces named in one sentence.
const NAMED_MAX: usize = 8;

/// A tunnel or virtual network of this namespace that can be the subject of [`super::path`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Name of the interface.
    pub interface: String,
    /// Its kind: `tun`, `tap`, `wireguard`, `bridge`.
    pub kind: String,
    /// Bytes carried in both directions together.
    pub bytes: u64,
    /// Number and name of its process.
    pub program: Option<(u32, String)>,
}

/// The chosen interface and process.
pub(super) struct Chosen<'a> {
    pub(super) inner: &'a LinkNode,
    pub(super) pid: Option<u32>,
}

/// Returns the tunnels of the calling thread's network namespace, by bytes carried, most first.
/// Without tunnels, returns bridges with ports, or else interfaces from which a program takes
/// packets.
///
/// # Errors
/// The interfaces could not be listed.
pub fn candidates() -> Result<Vec<Candidate>, DiscoverError> {
    let network = Network::read()?;
    let sockets = Sockets::read(&mut Vec::new());
    let search = holder::search();
    let found = list(&network, &sockets, &search).into_iter();
    Ok(found
        .map(|node| Candidate {
            interface: node.info.name.clone(),
            kind: node.info.kind.clone(),
            bytes: node.bytes,
            program: program_of(node, &search, &sockets, &mut Vec::new())
                .map(|pid| (pid, procfs::name(pid))),
        })
        .collect())
}

/// Chooses the interface and the program.
pub(super) fn choose<'a>(
    subject: &Subject,
    network: &'a Network,
    sockets: &Sockets,
    unseen: &mut Vec<Unseen>,
) -> Result<Chosen<'a>, DiscoverError> {
    match subject {
        Subject::Interface(name) => {
            let inner = network.named(name);
            let inner = inner.ok_or_else(|| no_interface(network, name))?;
            let search = if is_tun(inner) {
                holder::search()
            } else {
                Search::default()
            };
            let pid = program_of(inner, &search, sockets, unseen);
            Ok(Chosen { inner, pid })
        }
        Subject::Process(pid) => {
            let inner = interface_of(*pid, network, sockets, unseen)?;
            Ok(Chosen {
                inner,
                pid: Some(*pid),
            })
        }
        Subject::Anything => {
            let search = holder::search();
            let found = list(network, sockets, &search);
            let Some(inner) = found.first() else {
                return Err(nothing(network, &search));
            };
            let pid = program_of(inner, &search, sockets, unseen);
            Ok(Chosen { inner, pid })
        }
    }
}

pub(super) fn no_interface(network: &Network, name: &str) -> DiscoverError {
    DiscoverError::NoInterface {
        name: name.chars().take(64).collect(),
        there: network.names(),
    }
}

fn is_tun(node: &LinkNode) -> bool {
    matches!(&*node.info.kind, "tun" | "tap")
}

/// Returns tunnels that are up, else bridges with ports, else interfaces from which a program takes
/// packets. Those that carried most come first.
fn list<'a>(network: &'a Network, sockets: &Sockets, search: &Search) -> Vec<&'a LinkNode> {
    let is_tunnel = |node: &&LinkNode| match &*node.info.kind {
        // A carrier means that a program has it open, even if this process cannot see it.
        "tun" | "tap" => node.info.carrier || !search.of(&node.info.name).is_empty(),
        kind => is_kernel_tunnel(kind),
    };
    let up = || network.nodes.iter().filter(|node| node.info.up);
    let mut found: Vec<&LinkNode> = up().filter(is_tunnel).collect();
    if found.is_empty() {
        let has_ports = |node: &&LinkNode| network.ports(node.info.index).next().is_some();
        let bridges = up().filter(|node| node.info.kind == "bridge");
        found = bridges.filter(has_ports).collect();
    }
    if found.is_empty() {
        found = up()
            .filter(|node| node.info.name != "lo")
            .filter(|node| !carriers(node.info.index, sockets).is_empty())
            .collect();
    }
    found.sort_by_key(|node| (std::cmp::Reverse(node.bytes), node.info.index));
    found
}

fn nothing(network: &Network, search: &Search) -> DiscoverError {
    let mut elsewhere: Vec<String> = search
        .holders
        .iter()
        .filter(|holder| !holder.here)
        .map(|holder| {
            let name = procfs::name(holder.pid);
            let device = procfs::clean(&holder.device);
            format!("{device} of process {} ({name})", holder.pid)
        })
        .collect();
    elsewhere.truncate(NAMED_MAX);
    let hint = if elsewhere.is_empty() {
        String::new()
    } else {
        format!(
            ". Other network namespaces have: {}; enter one with `nsenter -t PID -n`",
            elsewhere.join(", ")
        )
    };
    DiscoverError::Nothing {
        there: network.names(),
        hint,
    }
}

/// Returns the program of an interface: the one that has it open as a tun, or takes packets from
/// it.
fn program_of(
    inner: &LinkNode,
    search: &Search,
    sockets: &Sockets,
    unseen: &mut Vec<Unseen>,
) -> Option<u32> {
    let tun = is_tun(inner);
    let mut pids = if tun {
        search.of(&inner.info.name)
    } else {
        carriers(inner.info.index, sockets)
    };
    pids.dedup();
    let pid = worker(&pids, sockets);
    let missing = format!("the program behind {}", inner.info.name.escape_debug());
    match pid {
        Some(pid) if pids.len() > 1 => {
            let all: Vec<String> = pids
                .iter()
                .take(NAMED_MAX)
                .map(|pid| format!("{} ({pid})", procfs::name(*pid)))
                .collect();
            unseen.push(Unseen {
                what: missing,
                why: format!(
                    "several processes have it open: {}; using {pid}, because of its sockets and processor time. Name another one by its number",
                    all.join(", ")
                ),
            });
        }
        None if tun => {
            let why = match search.refused {
                0 if !inner.info.carrier => "no process has it open: start the tunnel".into(),
                0 => "none of the processes seen here has it open; it may be in a container or \
                      another process namespace: run the doctor on the host"
                    .into(),
                refused => format!(
                    "/proc/PID/fdinfo of {refused} processes of other users cannot be read; run \
                     the doctor as root"
                ),
            };
            unseen.push(Unseen { what: missing, why });
        }
        _ => {}
    }
    pid
}

/// Returns programs that receive every packet of an interface and have sockets to forward them:
/// gateways and virtual switches, but not captures or DHCP.
fn carriers(index: u32, sockets: &Sockets) -> Vec<u32> {
    let taking = sockets.packets_on(index);
    if taking.is_empty() {
        return Vec::new();
    }
    let passes_on = |inode: &u64| {
        let socket = sockets.facts(*inode);
        socket.is_some_and(|socket| !DHCP_PORTS.contains(&socket.local.port()))
            || sockets.bound_to(*inode).is_some_and(|other| other != index)
    };
    let mut pids = procfs::pids();
    pids.retain(|pid| {
        let open = socket_inodes(*pid).unwrap_or_default();
        open.iter().any(|inode| taking.contains(inode))
            && open.iter().any(passes_on)
            && !LISTENERS.contains(&&*procfs::name(*pid))
    });
    pids
}

fn worker(pids: &[u32], sockets: &Sockets) -> Option<u32> {
    holder::worker(pids, |pid| {
        let open = socket_inodes(pid).unwrap_or_default();
        open.iter().any(|inode| sockets.facts(*inode).is_some())
    })
}

fn socket_inodes(pid: u32) -> io::Result<Vec<u64>> {
    let open = procfs::descriptors(pid)?;
    Ok(open
        .iter()
        .filter_map(|(_, target)| procfs::socket_inode(target))
        .collect())
}

/// Returns the interface of a process: its tun device, else the interface of its packet sockets.
fn interface_of<'a>(
    pid: u32,
    network: &'a Network,
    sockets: &Sockets,
    unseen: &mut Vec<Unseen>,
) -> Result<&'a LinkNode, DiscoverError> {
    if !holder::exists(pid) {
        return Err(DiscoverError::NoProcess { pid });
    }
    let name = procfs::name(pid);
    let refused = |source| DiscoverError::Refused {
        pid,
        name: name.clone(),
        source,
    };
    let devices = holder::of_process(pid).map_err(refused)?;
    let mut nodes: Vec<&LinkNode> = devices
        .iter()
        .filter(|holder| holder.here)
        .filter_map(|holder| network.named(&holder.device))
        .collect();
    if nodes.is_empty()
        && let Some(holder) = devices.first()
    {
        return Err(DiscoverError::Elsewhere {
            pid,
            name,
            device: holder.device.chars().take(64).collect(),
        });
    }
    if nodes.is_empty() {
        let open = socket_inodes(pid).map_err(refused)?;
        let bound = open.iter().filter_map(|inode| sockets.bound_to(*inode));
        nodes = bound.filter_map(|index| network.node(index)).collect();
        nodes.dedup_by_key(|node| node.info.index);
    }
    nodes.sort_by_key(|node| {
        (
            std::cmp::Reverse((node.info.up, node.bytes)),
            node.info.index,
        )
    });
    let Some(inner) = nodes.first() else {
        let there = network.names();
        return Err(DiscoverError::NoInterfaceOfProcess { pid, name, there });
    };
    if nodes.len() > 1 {
        let all = nodes.iter().take(NAMED_MAX);
        let all: Vec<String> = all
            .map(|node| node.info.name.escape_debug().to_string())
            .collect();
        unseen.push(Unseen {
            what: "the other interfaces of the process".into(),
            why: format!(
                "it has {}; using the one that carried the most bytes. Name another one by its name",
                all.join(", ")
            ),
        });
    }
    Ok(inner)
}
