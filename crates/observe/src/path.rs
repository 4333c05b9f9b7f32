//! The path of packets on this host: facts that rarely change.
//!
//! It goes from the inner interface (the tunnel's, or a port of a bridge) to the program that
//! serves it, the program's sockets, and the interface through which they send. Facts that could
//! not be read are listed with the reason.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// The path on this host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PathMap {
    /// The interface that the diagnosis is about: packets go in and out unencrypted.
    pub inner: Option<String>,
    /// The interface through which the tunnel's own packets leave.
    pub egress: Option<String>,
    /// Every interface on the path, including `inner` and `egress`, inner ones first.
    pub links: Vec<LinkFacts>,
    /// The program that serves the inner interface; `None` if the kernel does.
    pub program: Option<ProgramFacts>,
    /// The program's outer sockets.
    pub sockets: Vec<SocketFacts>,
    /// TCP connections of this host through the inner interface.
    pub flows: Vec<SocketFacts>,
    /// The host.
    pub host: HostFacts,
    /// Facts that could not be read.
    pub unseen: Vec<Unseen>,
}

impl PathMap {
    /// The facts of an interface.
    pub fn link(&self, name: &str) -> Option<&LinkFacts> {
        self.links.iter().find(|link| link.name == name)
    }

    /// The facts of the inner interface.
    pub fn inner_link(&self) -> Option<&LinkFacts> {
        self.link(self.inner.as_deref()?)
    }

    /// The facts of the interface to the outside.
    pub fn egress_link(&self) -> Option<&LinkFacts> {
        self.link(self.egress.as_deref()?)
    }
}

/// An interface.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LinkFacts {
    /// Its name.
    pub name: String,
    /// Its kind, as named by the kernel: `tun`, `veth`, `bridge`, `vxlan`, `wireguard`; empty for
    /// hardware and loopback.
    pub kind: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// Maximum number of queued packets (`txqueuelen`).
    pub queue_length: u32,
    /// The root queueing discipline, such as `noqueue`, `tbf`; empty if unknown.
    pub qdisc: String,
    /// Its rate in bits per second, if it has one.
    pub qdisc_rate: Option<u64>,
    /// Features by the kernel's name (`rx-gro`, `tx-tcp-segmentation`), and whether they are on.
    pub features: BTreeMap<String, bool>,
    /// Features that can be changed.
    pub changeable: Vec<String>,
    /// Processors to which each receive queue is spread (RPS), queue by queue; empty: not spread.
    pub rps: Vec<Vec<u32>>,
    /// Number of receive queues.
    pub rx_queues: u32,
    /// The bridge or bond it belongs to.
    pub master: Option<String>,
    /// Whether a tun device carries super-packets (`IFF_VNET_HDR`), if known.
    pub vnet_hdr: Option<bool>,
}

/// A program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProgramFacts {
    /// Its process.
    pub pid: u32,
    /// Its name (`comm`).
    pub name: String,
    /// Its threads' ids and names.
    pub threads: Vec<(u32, String)>,
    /// Processors it may run on.
    pub cpus: Vec<u32>,
    /// Path of its control group in the hierarchy that limits processors, if there is a limit.
    pub group: Option<String>,
    /// Processor time that the control group may use, as a number of processors, such as 0.5.
    pub cpu_limit: Option<f64>,
    /// Its nice value.
    pub nice: i32,
}

/// The transport of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// UDP.
    Udp,
    /// TCP.
    Tcp,
    /// IP without a transport (a raw or packet socket).
    Raw,
}

/// A socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SocketFacts {
    /// Inode of the socket, by which samples refer to it.
    pub inode: u64,
    /// Its transport.
    pub transport: Transport,
    /// Its local address.
    pub local: SocketAddr,
    /// Its remote address; `None` for an unconnected UDP socket.
    pub remote: Option<SocketAddr>,
    /// Size of its receive buffer in bytes (with the kernel's overhead; `SO_RCVBUF` as read back).
    pub receive_buffer: u32,
    /// Size of its send buffer in bytes.
    pub send_buffer: u32,
    /// The congestion control of a TCP socket.
    pub congestion: Option<String>,
    /// Whether a packet socket accepts super-packets, with a header for them (`PACKET_VNET_HDR`,
    /// packet(7)); absent for other sockets, or if the kernel does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnet_hdr: Option<bool>,
}

/// The host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HostFacts {
    /// The kernel's release.
    pub kernel: String,
    /// Processors that are online.
    pub cpus: Vec<u32>,
    /// Instruction sets for ciphers (`aes`, `vaes`, `pclmulqdq`, `avx2`).
    pub cpu_features: Vec<String>,
    /// Settings by their path below `/proc/sys`, with dots: `net.core.netdev_max_backlog`.
    pub sysctls: BTreeMap<String, String>,
    /// Whether this namespace has connection tracking.
    pub conntrack: bool,
}

/// A fact that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Unseen {
    /// The fact.
    pub what: String,
    /// Why it could not be read, and the remedy.
    pub why: String,
}
