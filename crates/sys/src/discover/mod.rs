//! The path of a tunnel or virtual network over this host, as facts.
//!
//! [`path`] reads the interfaces of the calling thread's network namespace (`network`), settles which
//! one the diagnosis is about (`subject`), finds the program that has it open (`holder`), with its
//! threads, limits and sockets (`program`, `group`, `socket`), and the interface through which its
//! packets leave (`egress`), and then writes down every interface on the way and the host (`host`).
//!
//! Nothing is changed and no packet is looked at. What cannot be seen is not an error: it is listed
//! with its reason, and the rest is there.

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
use seikan_observe::path::{PathMap, ProgramFacts, Unseen};

use crate::netlink::Family;
use crate::netlink::{LinkNode, NetlinkError, TABLE_MAIN};
use egress::Tunnel;
use network::Network;
use socket::Sockets;
use subject::Chosen;

pub(crate) use socket::listening;
pub use subject::{Candidate, candidates};

/// What a diagnosis is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// The network interface of that name.
    Interface(String),
    /// The tunnel or virtual switch that is this process.
    Process(u32),
    /// Whatever there is; of several the one that carried most ([`candidates`] names them).
    Anything,
}

/// Why there is no path to look at.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// No interface of that name.
    #[error(
        "there is no network interface {name:?} in this network namespace, but {there}; name one of \
         them, or enter the namespace it is in (`nsenter --net=/run/netns/NAME`, `nsenter -t PID -n`)"
    )]
    NoInterface {
        /// The name as given.
        name: String,
        /// Those there are.
        there: String,
    },
    /// No such process.
    #[error("there is no process {pid}; `pgrep -a NAME` finds the number by the name")]
    NoProcess {
        /// The number as given.
        pid: u32,
    },
    /// The process may not be looked into.
    #[error(
        "cannot look into process {pid} ({name}): {source}; run the doctor as root or as its user"
    )]
    Refused {
        /// The process.
        pid: u32,
        /// Its name.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The process has no interface of this namespace.
    #[error(
        "process {pid} ({name}) has neither a tun device nor a packet socket on an interface open, \
         and so carries no packets; name the tunnel's process, or an interface: there are {there}"
    )]
    NoInterfaceOfProcess {
        /// The process.
        pid: u32,
        /// Its name.
        name: String,
        /// Interfaces there are.
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
        /// Interfaces there are.
        there: String,
        /// Tunnels in other namespaces, if any were seen.
        hint: String,
    },
    /// The kernel would not list the interfaces.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
}

/// The path of the subject over this host, in the calling thread's network namespace.
///
/// Names of interfaces are the kernel's, which may contain control characters: escape them for a
/// terminal. Names of programs and threads are bounded and have none.
///
/// # Errors
/// The subject is not there, or is in another namespace. What is there but cannot be seen is listed
/// in the map instead.
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
            why: "only the hosts at their ends know their state; run the doctor there, too".into(),
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

/// The addresses of an interface, each with the prefix of its network.
///
/// # Errors
/// No such interface, or the kernel would not say.
pub fn addresses(interface: &str) -> Result<Vec<IpNet>, DiscoverError> {
    let network = Network::read()?;
    let index = index_of(&network, interface)?;
    Ok(network.addresses(index))
}

/// The prefixes that the main table routes through an interface, without link-local and multicast
/// ones, which every interface has; a default route is `0.0.0.0/0`. A connection of this host goes
/// through it if it has one of its [`addresses`], or if its peer's longest match is one of these.
///
/// # Errors
/// No such interface, or the kernel would not say.
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

/// Link-local or multicast.
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
        why: "it is another host or namespace; run the doctor there, too".into(),
    });
}

/// A virtual cable out of this namespace, as containers have it.
fn note_beyond(egress: Option<&LinkNode>, unseen: &mut Vec<Unseen>) {
    if let Some(egress) = egress.filter(|node| node.info.kind == "veth" && node.lower_elsewhere) {
        unseen.push(Unseen {
            what: format!("what is beyond {}", egress.info.name.escape_debug()),
            why: "its other end is in another network namespace of this machine, such as the \
                  container's host; run the doctor there, too"
                .into(),
        });
    }
}

#[cfg(test)]
mod tests;
