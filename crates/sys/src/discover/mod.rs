//! Finds the path of a tunnel or virtual network through this host.
//!
//! [`path`] reads the interfaces of the calling thread's network namespace (`network`) and chooses
//! the interface to diagnose (`subject`). It finds the program that has the interface open
//! (`holder`) with its threads, limits and sockets (`program`, `group`, `socket`), and the
//! interface through which its packets leave (`egress`). The result has the facts of every
//! interface on the path and of the host (`host`).
//!
//! Nothing is changed, and no packet is read. Information that is not accessible is no error: it is
//! listed with the reason.

mod egress;
mod group;
mod holder;
mod host;
mod network;
mod procfs;
mod program;
mod socket;
mod subject;

use std::io;

use ipnet::IpNet;
use seikan_observe::path::{HostFacts, PathMap, ProgramFacts, Unseen};

use crate::netlink::Family;
use crate::netlink::{LinkNode, NetlinkError, TABLE_MAIN};
use egress::Tunnel;
use network::Network;
use socket::Sockets;
use subject::Chosen;

pub(crate) use socket::listening;
pub use subject::{Candidate, candidates};

/// The subject of a diagnosis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// The network interface with this name.
    Interface(String),
    /// The tunnel or virtual switch that this process implements.
    Process(u32),
    /// Any tunnel. If there are several, the one that has carried the most bytes ([`candidates`]
    /// lists them).
    Anything,
}

/// Why there is no path.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// There is no interface with this name.
    #[error(
        "there is no network interface {name:?} in this network namespace, but {there}; name one of \
         them, or enter the namespace it is in (`nsenter --net=/run/netns/NAME`, `nsenter -t PID -n`)"
    )]
    NoInterface {
        /// The name as given.
        name: String,
        /// The existing interfaces.
        there: String,
    },
    /// The process does not exist.
    #[error("there is no process {pid}; `pgrep -a NAME` finds the number by the name")]
    NoProcess {
        /// The number as given.
        pid: u32,
    },
    /// The process may not be inspected.
    #[error(
        "cannot inspect process {pid} ({name}): {source}; run the doctor as root or as its user"
    )]
    Refused {
        /// The process.
        pid: u32,
        /// Its name.
        name: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The process has no interface in this namespace open.
    #[error(
        "process {pid} ({name}) has neither a tun device nor a packet socket on an interface open, so it carries no packets; name the tunnel's process, or an interface: there are {there}"
    )]
    NoInterfaceOfProcess {
        /// The process.
        pid: u32,
        /// Its name.
        name: String,
        /// The existing interfaces.
        there: String,
    },
    /// The tunnel is in another namespace.
    #[error(
        "process {pid} ({name}) has the tun device {device:?} in another network namespace; run the \
         doctor there: `nsenter --net=/run/netns/NAME seikan doctor`, or, if the process itself is \
         there, `nsenter -t {pid} -n seikan doctor`"
    )]
    Elsewhere {
        /// The process.
        pid: u32,
        /// Its name.
        name: String,
        /// The device.
        device: String,
    },
    /// There is no tunnel and no bridge.
    #[error(
        "found no tunnel (a tun device with a program behind it, WireGuard, VXLAN, Geneve, GRE, IPIP \
         that is up), no bridge with ports and no program that takes packets off an interface in this network namespace; there are: {there}. Start the \
         tunnel, name an interface or a process, or enter the tunnel's network namespace \
         (`nsenter --net=/run/netns/NAME`){hint}"
    )]
    Nothing {
        /// The existing interfaces.
        there: String,
        /// A hint at tunnels in other namespaces, if any were seen.
        hint: String,
    },
    /// The interfaces could not be listed.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
}

/// Returns the path of the subject through this host, as seen from the network namespace of the
/// calling thread.
///
/// Names of interfaces come from the kernel and may contain control characters: escape them for a
/// terminal. Names of programs and threads are bounded and have none.
///
/// # Errors
/// The subject does not exist, or is in another namespace. Other information that is not accessible
/// is listed in the map.
pub fn path(subject: &Subject) -> Result<PathMap, DiscoverError> {
    let network = Network::read()?;
    let mut unseen = Vec::new();
    let sockets = Sockets::read(&mut unseen);
    let chosen = subject::choose(subject, &network, &sockets, &mut unseen)?;
    let Chosen { inner, pid } = chosen;
    let program = pid.map(|pid| program::facts(pid, &mut unseen));
    let own = pid
        .map(|pid| sockets.of(pid, &mut unseen))
        .unwrap_or_default();
    let peers: Vec<_> = inner.remote.into_iter().collect();
    let tunnel = Tunnel {
        network: &network,
        inner,
        program: pid.is_some(),
        sockets: &own.facts,
        peers: &peers,
        bound: &own.bound,
    };
    let egress = tunnel.egress(&mut unseen);

    let mut order = Vec::new();
    network.surround(inner.info.index, &mut order);
    for index in own.bound.iter().chain(&egress) {
        network.surround(*index, &mut order);
    }
    let links = network.facts(&order, &mut unseen);
    let flows = sockets.flows(&network, inner.info.index, &mut unseen);
    let host = host::facts(&mut unseen);
    note_far_ends(inner, program.as_ref(), &mut unseen);
    note_beyond(egress.and_then(|index| network.node(index)), &mut unseen);
    let forwards = host
        .sysctls
        .get("net.ipv4.ip_forward")
        .is_some_and(|on| on != "0");
    if forwards && flows.is_empty() {
        unseen.push(Unseen {
            what: "connections of other hosts through this one".into(),
            why: "only the hosts at their ends know their state; run the doctor there too".into(),
        });
    }
    let name = |index| Some(network.node(index)?.info.name.clone());
    Ok(PathMap {
        inner: Some(inner.info.name.clone()),
        egress: egress.and_then(name),
        links,
        program,
        sockets: own.facts,
        flows,
        host,
        unseen,
    })
}

/// Returns the facts of the host, and those that could not be read.
pub fn host() -> (HostFacts, Vec<Unseen>) {
    let mut unseen = Vec::new();
    let facts = host::facts(&mut unseen);
    (facts, unseen)
}

/// Returns the addresses of an interface, each with its network prefix.
///
/// # Errors
/// The interface does not exist, or the kernel refused.
pub fn addresses(interface: &str) -> Result<Vec<IpNet>, DiscoverError> {
    let network = Network::read()?;
    let index = index_of(&network, interface)?;
    Ok(network.addresses(index))
}

/// Returns the prefixes that the main table routes through an interface, without link-local and
/// multicast ones, which every interface has. A default route is `0.0.0.0/0`. A connection of this
/// host uses the interface if it has one of its [`addresses`], or if the longest match of its peer
/// is one of these.
///
/// # Errors
/// The interface does not exist, or the kernel refused.
pub fn routed(interface: &str) -> Result<Vec<IpNet>, DiscoverError> {
    let network = Network::read()?;
    let index = index_of(&network, interface)?;
    let mut prefixes = Vec::new();
    for family in [Family::V4, Family::V6] {
        let routes = network.netlink.routes(family, TABLE_MAIN)?.into_iter();
        let through = routes.filter(|route| route.device == Some(index));
        let prefix = through.map(|route| route.destination);
        prefixes.extend(prefix.filter(|prefix| !is_everywhere(prefix)));
    }
    Ok(prefixes)
}

/// Whether the prefix is link-local or multicast.
fn is_everywhere(prefix: &IpNet) -> bool {
    match prefix {
        IpNet::V4(v4) => v4.addr().is_link_local() || v4.addr().is_multicast(),
        IpNet::V6(v6) => v6.addr().is_unicast_link_local() || v6.addr().is_multicast(),
    }
}

fn index_of(network: &Network, interface: &str) -> Result<u32, DiscoverError> {
    let node = network.named(interface);
    let node = node.ok_or_else(|| subject::no_interface(network, interface))?;
    Ok(node.info.index)
}

fn note_far_ends(inner: &LinkNode, program: Option<&ProgramFacts>, unseen: &mut Vec<Unseen>) {
    let far = match (program, &*inner.info.kind) {
        (Some(_), _) => "the other end of the tunnel",
        (None, kind) if egress::is_kernel_tunnel(kind) => "the other end of the tunnel",
        (None, "bridge") => "the guests behind the bridge's ports",
        (None, "veth" | "tap") => "the guest behind the interface",
        _ => "the other end",
    };
    unseen.push(Unseen {
        what: far.into(),
        why: "it is another host or namespace; run the doctor there too".into(),
    });
}

/// Notes that the other end of a veth is in another namespace, as for containers.
fn note_beyond(egress: Option<&LinkNode>, unseen: &mut Vec<Unseen>) {
    if let Some(egress) = egress.filter(|node| node.info.kind == "veth" && node.lower_elsewhere) {
        unseen.push(Unseen {
            what: format!("what is beyond {}", egress.info.name.escape_debug()),
            why: "its other end is in another network namespace of this machine, such as the container's host; run the doctor there too"
                .into(),
        });
    }
}

#[cfg(test)]
mod tests;
