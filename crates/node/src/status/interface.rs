//! The interface, its device, its sockets, and their capabilities.

use crate::node::Node;
use crate::subject::Record;
use crate::system::now;
use seikan_proto::mode::Mode;
use seikan_proto::noise::Protocol;
use seikan_sys::ability::Ability;
use seikan_sys::udp::UdpSocket;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Properties of the interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// `wireguard` or `native`.
    pub protocol: String,
    /// `ip` or `ethernet`.
    #[serde(default = "ip")]
    pub mode: String,
    /// Public key, in Base64; `None` after a client has removed the private key.
    pub public_key: Option<String>,
    /// UDP port.
    pub listen_port: u16,
    /// Mark of sent datagrams, if any.
    pub fwmark: Option<u32>,
    /// Seconds since the start, including suspend.
    pub uptime_s: f64,
    /// Reason if there is no socket for `wg`.
    pub without_uapi: Option<String>,
    /// Configuration file; `None` if other programs configure the interface.
    #[serde(default)]
    pub config: Option<PathBuf>,
    /// Log file, if the tunnel runs in the background.
    #[serde(default)]
    pub log: Option<PathBuf>,
    /// Addresses, routes and rules that another program removed.
    #[serde(default)]
    pub restored: Restored,
    /// Restrictions of the process, which limit an attacker who takes it over.
    pub confinement: BTreeMap<String, Capability>,
}

/// Restorations of addresses, routes and rules that another program removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Restored {
    /// Number of items that were added again.
    pub count: u64,
    /// Whether another program keeps removing them, so that they are not restored for ten minutes.
    pub contested: bool,
}

/// The TUN device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Device {
    /// MTU inside the tunnel in bytes.
    pub mtu: Option<u32>,
    /// Maximum number of packets that wait to be read; further ones are dropped by the kernel.
    pub queue_length: Option<u32>,
    /// The kernel's counters.
    pub kernel: Option<KernelCounters>,
    /// MAC addresses learned from peers, in Ethernet mode with several peers.
    #[serde(default)]
    pub learned_macs: usize,
    /// Capabilities of the device.
    pub capabilities: BTreeMap<String, Capability>,
}

/// The kernel's counters of the TUN device, from the kernel's point of view: it transmits to the tunnel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KernelCounters {
    /// Packets passed to the tunnel; a super-packet counts once.
    pub tx_packets: u64,
    /// Packets dropped before the tunnel: the queue was full, or closed.
    pub tx_dropped: u64,
    /// Packets that could not be passed to the tunnel.
    pub tx_errors: u64,
    /// Packets received from the tunnel; a super-packet counts once.
    pub rx_packets: u64,
    /// Packets of the tunnel that the kernel's network stack dropped.
    pub rx_dropped: u64,
    /// Malformed packets of the tunnel.
    pub rx_errors: u64,
}

/// A capability.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Capability {
    /// Whether it is available.
    pub present: bool,
    /// Reason if it is not available.
    pub reason: Option<String>,
}

/// A UDP socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Socket {
    /// Local address.
    pub address: Option<SocketAddr>,
    /// Receive buffer in bytes, as granted.
    pub receive_buffer: Option<usize>,
    /// Send buffer in bytes, as granted.
    pub send_buffer: Option<usize>,
    /// Whether segmentation offload is in use.
    pub gso: bool,
    /// Capabilities of the socket.
    pub capabilities: BTreeMap<String, Capability>,
}

/// The mode of a daemon that does not report it.
fn ip() -> String {
    "ip".into()
}

pub(super) fn interface(node: &Node, record: &Record) -> Interface {
    let key = node.tunnel.identity().public();
    let uptime = now().mono.duration_since(node.started);
    Interface {
        name: record.name.clone(),
        protocol: match node.tunnel.protocol() {
            Protocol::WireGuard => "wireguard".into(),
            Protocol::Native => "native".into(),
        },
        mode: match node.tunnel.mode() {
            Mode::Ip => ip(),
            Mode::Ethernet => "ethernet".into(),
        },
        public_key: (!record.keyless).then(|| key.to_string()),
        listen_port: node.sockets.port(),
        fwmark: node.sockets.fwmark(),
        uptime_s: uptime.as_millis() as f64 / 1000.0,
        without_uapi: record.without_uapi.clone(),
        config: record.config.clone(),
        log: record.log.clone(),
        restored: Restored {
            count: node.restorations.count,
            contested: node.restorations.contested,
        },
        confinement: node
            .confinement
            .as_ref()
            .map(|confinement| capabilities(&confinement.table()))
            .unwrap_or_default(),
    }
}

pub(super) fn device(node: &Node, record: &Record) -> Device {
    let index = node.tun.index();
    let interface = record.netlink.as_ref().zip(index);
    let link = interface.and_then(|(netlink, index)| netlink.link_by_index(index).ok());
    let stats = interface.and_then(|(netlink, index)| netlink.link_stats(index).ok());
    // Without an interface, the kernel has no MTU for the tunnel.
    let own_mtu = || index.is_none().then(|| node.tunnel.inner_mtu());
    Device {
        mtu: link.as_ref().map(|link| link.mtu).or_else(own_mtu),
        queue_length: link.as_ref().map(|link| link.tx_queue_len),
        kernel: stats.map(|stats| KernelCounters {
            tx_packets: stats.tx_packets,
            tx_dropped: stats.tx_dropped,
            tx_errors: stats.tx_errors,
            rx_packets: stats.rx_packets,
            rx_dropped: stats.rx_dropped,
            rx_errors: stats.rx_errors,
        }),
        learned_macs: node.tunnel.learned_macs(),
        capabilities: capabilities(&node.tun.capabilities().table()),
    }
}

pub(super) fn socket(socket: &UdpSocket) -> Socket {
    let buffers = socket.buffers().ok();
    Socket {
        address: socket.local_addr().ok(),
        receive_buffer: buffers.map(|(receive, _)| receive),
        send_buffer: buffers.map(|(_, send)| send),
        gso: socket.gso(),
        capabilities: capabilities(&socket.capabilities().table()),
    }
}

fn capabilities(table: &[(&'static str, &Ability)]) -> BTreeMap<String, Capability> {
    let entry = |(name, ability): &(&'static str, &Ability)| {
        let capability = Capability {
            present: ability.is_present(),
            reason: ability.reason().map(str::to_owned),
        };
        ((*name).to_owned(), capability)
    };
    table.iter().map(entry).collect()
}
