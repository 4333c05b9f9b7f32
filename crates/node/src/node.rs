//! A running tunnel: the protocol, the TUN device, the sockets, and their counters.

use crate::flood::{ALLOWANCE, FloodDetector, Step};
use crate::former::FormerSessions;
use crate::gateway::GatewayNode;
use crate::pacer::Pacer;
use crate::sockets::Sockets;
use crate::system::{SystemRandom, now};
use crate::userspace::Stack;
use seikan_config::{BitRate, CipherPreference, Config, Host, Mode};
use seikan_mesh::state::MeshState;
use seikan_mesh::stun;
use seikan_mesh::transport::Transports;
use seikan_observe::Histogram;
use seikan_proto::capabilities::Cipher;
use seikan_proto::inbox::Inbox;
use seikan_proto::indices::PeerId;
use seikan_proto::noise::Protocol;
use seikan_proto::outbox::Outbox;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::{Tunnel, TunnelConfig};
use seikan_sys::confine::Confinement;
use seikan_sys::netlink::Netlink;
use seikan_sys::packet::PacketSocket;
use seikan_sys::tun::{Tun, TunError, TunOptions};
use seikan_sys::udp::{DatagramFilter, UdpError, UdpOptions};
use seikan_wire::ethernet::{self, Mac};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use tracing::{debug, info};

/// MTU of a WireGuard tunnel unless configured: a 1500-byte path less WireGuard's largest overhead.
pub const WIREGUARD_MTU: u32 = 1420;
/// MTU of a native tunnel unless configured. On a 1500-byte path over IPv4, one datagram carries a full TCP
/// segment also while parity needs its room, and a full packet of any protocol otherwise. Smaller paths need no
/// other value: the MSS of TCP follows them, and longer packets go in two datagrams.
pub const NATIVE_MTU: u32 = 1444;
/// Size of the send buffer: twice a read batch, with headers and tags.
const OUTBOX_BYTES: usize = 2 << 20;

/// Maximum bytes of a super-packet: 44 records on a 1500-byte path, the most that one GSO send holds, carry 44
/// x 1392 bytes of TCP payload behind slice heads and inner headers; the kernel reserves some 320 bytes of the
/// limit for headers.
const GSO_MAX_SIZE: u32 = 44 * 1392 + 320;
/// Smallest limit of super-packets on a slow uplink: four packets.
const GSO_LEAST: u32 = 4 * 1500;
/// Maximum size of super-packets in Ethernet mode. Each record repeats the Ethernet header.
const GSO_MAX_SIZE_ETHERNET: u32 = GSO_MAX_SIZE - 44 * ethernet::HEADER_LEN as u32;
/// The kernel's default (`GSO_LEGACY_MAX_SIZE`).
const GSO_UNLIMITED: u32 = 65_536;

/// Why a node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The TUN device.
    #[error(transparent)]
    Tun(#[from] TunError),
    /// A socket.
    #[error(transparent)]
    Udp(#[from] UdpError),
    /// A peer's endpoint cannot be resolved.
    #[error(
        "cannot resolve the endpoint `{host}`: {error}; use an address, or check the name server"
    )]
    Resolve {
        /// The host name.
        host: String,
        /// The resolver's error.
        error: io::Error,
    },
    /// Another system call failed.
    #[error("{operation}: {error}")]
    System {
        /// The operation that failed.
        operation: &'static str,
        /// The system's answer.
        error: io::Error,
    },
}

/// Distributions of the number of packets or datagrams per system call.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct BatchSizes {
    /// Reads of the TUN device per batch.
    pub packets_per_read: Histogram,
    /// Datagrams per send call.
    pub datagrams_per_send: Histogram,
    /// Datagrams per receive call.
    pub datagrams_per_receive: Histogram,
    /// Packets per write to the TUN device.
    pub packets_per_write: Histogram,
}

/// Restorations of addresses, routes and rules of the tunnel that another program removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Restorations {
    /// Addresses, routes and rules that were added again.
    pub count: u64,
    /// Whether another program keeps removing them, so that restoring is paused.
    pub contested: bool,
}

/// A tunnel with its device and sockets.
pub struct Node {
    /// The protocol.
    pub tunnel: Tunnel,
    /// The device.
    pub tun: Tun,
    /// Whether the TAP device is a port of a bridge (Ethernet mode).
    is_port: Option<bool>,
    /// The sockets.
    pub sockets: Sockets,
    /// Sizes of the batches.
    pub batches: BatchSizes,
    /// Time of its creation.
    pub started: Instant,
    /// The gateway, if it is one.
    pub gateway: Option<GatewayNode>,
    /// The mesh, if this host is a member of one.
    pub mesh: Option<MeshState>,
    /// Relays over TLS and TURN servers that a member uses.
    pub transports: Transports,
    /// The TCP/IP stack in this process, if there is no interface.
    pub stack: Option<Stack>,
    /// Restorations of settings that another program removed.
    pub restorations: Restorations,
    /// Peers that had a session with the last process of this tunnel.
    pub former: FormerSessions,
    /// Restrictions of the process; `None` before they are applied.
    pub confinement: Option<Confinement>,
    /// The limit of the sending rate.
    pub pacer: Pacer,
    pub(crate) floods: FloodDetector,
    pub(crate) outbox: Outbox,
    pub(crate) inbox: Inbox,
}

impl Node {
    /// Whether this gateway is on standby for another one.
    pub fn is_standby(&self) -> bool {
        self.gateway.as_ref().is_some_and(GatewayNode::is_standby)
    }

    /// Returns the socket on a transparent gateway's local network.
    pub(crate) fn lan_socket(&self) -> Option<&PacketSocket> {
        self.gateway.as_ref()?.lan.as_ref()?.socket()
    }

    /// Creates device, sockets and peers. Addresses and routes are set elsewhere.
    pub fn create(config: &Config) -> Result<Node, NodeError> {
        let options = tun_options(config);
        let tun = match config.mode {
            Mode::Ip => Tun::create(&options),
            Mode::Ethernet => Tun::create_tap(&options),
        }?;
        Node::with_device(config, tun)
    }

    /// Creates sockets and peers, for a device that exists.
    pub fn with_device(config: &Config, tun: Tun) -> Result<Node, NodeError> {
        let mtu = config.mtu.unwrap_or(default_mtu(config.protocol));
        let pacer = Pacer::new(config.uplink_rate.map(BitRate::bits_per_second));
        if config.gateway.is_none() && config.mode == Mode::Ip {
            limit_super_packets(&tun, super_packet_limit(&pacer, GSO_MAX_SIZE));
        }
        let options = UdpOptions {
            fwmark: config.fwmark,
            gso: config.offload,
            gro: config.offload,
            datagram_filter: match DatagramFilter::load() {
                Ok(filter) => Ok(Arc::new(filter)),
                Err(error) => Err(format!("the kernel refused the filter program: {error}")),
            },
            ..UdpOptions::default()
        };
        let sockets = Sockets::bind(config.listen_port.unwrap_or(0), options)?;
        let able = tun.capabilities();
        let tcp_gso = config.offload && able.vnet_header.is_present();
        let udp_gso = tcp_gso && able.uso4.is_present() && able.uso6.is_present();
        let mut tunnel = Tunnel::new(TunnelConfig {
            protocol: match config.protocol {
                seikan_config::Protocol::Wireguard => Protocol::WireGuard,
                seikan_config::Protocol::Native => Protocol::Native,
            },
            mode: match config.mode {
                Mode::Ip => seikan_proto::mode::Mode::Ip,
                Mode::Ethernet => seikan_proto::mode::Mode::Ethernet,
            },
            private_key: config.private_key.clone(),
            inner_mtu: mtu,
            offload: tcp_gso,
            ciphers: ciphers(config.cipher),
            copy_dscp: config.copy_dscp,
            repair: config.repair.ceiling(),
            rng: Box::new(SystemRandom),
        });
        let now = now();
        for peer in &config.peers {
            // A peer with this host's own key is an error that the configuration's check reports.
            let Some(id) = tunnel.add_peer(peer.public_key) else {
                continue;
            };
            add_peer(&mut tunnel, id, peer, now.mono)?;
        }
        let mut outbox = Outbox::new(OUTBOX_BYTES);
        outbox.set_gso(sockets.iter().any(|s| s.gso()));
        let mut node = Node {
            tunnel,
            tun,
            is_port: None,
            sockets,
            batches: BatchSizes::default(),
            started: now.mono,
            gateway: None,
            mesh: None,
            transports: Transports::default(),
            stack: None,
            restorations: Restorations::default(),
            former: FormerSessions::default(),
            confinement: None,
            pacer,
            floods: FloodDetector::default(),
            outbox,
            inbox: Inbox::new(tcp_gso, udp_gso),
        };
        node.follow_tap();
        node.limit_datagrams();
        node.filter_types(config);
        Ok(node)
    }

    /// Follows changes of the TAP device in Ethernet mode: its address, which no peer may use, and whether it is
    /// a port of a bridge. Super-packets of this host are limited as in IP mode; those that a bridge forwards are
    /// not, because the kernel would have to segment the larger ones of other hosts.
    pub(crate) fn follow_tap(&mut self) {
        if self.tunnel.mode() == seikan_proto::mode::Mode::Ip {
            return;
        }
        let Some(index) = self.tun.index() else {
            return;
        };
        let links = Netlink::open().and_then(|netlink| netlink.topology());
        let own = links.unwrap_or_default();
        let Some(own) = own.into_iter().find(|link| link.info.index == index) else {
            return;
        };
        if let Some(mac) = own.info.mac() {
            self.tunnel.set_own_mac(Mac(mac));
        }
        let is_port = Some(own.master.is_some());
        if self.is_port != is_port {
            self.is_port = is_port;
            let limit = if own.master.is_some() {
                GSO_UNLIMITED
            } else {
                super_packet_limit(&self.pacer, GSO_MAX_SIZE_ETHERNET)
            };
            limit_super_packets(&self.tun, limit);
        }
    }

    /// Follows the MTU of the device in WireGuard, where padding does not exceed it.
    pub(crate) fn follow_mtu(&mut self) {
        if self.tunnel.protocol() != Protocol::WireGuard {
            return;
        }
        let Some(index) = self.tun.index() else {
            return;
        };
        if let Ok(link) = Netlink::open().and_then(|netlink| netlink.link_by_index(index)) {
            self.tunnel.set_inner_mtu(link.mtu);
        }
    }

    /// Sets the socket filter's maximum length; to be called again when an interface appears, disappears or
    /// changes its MTU.
    ///
    /// Datagrams of the native protocol are never fragmented, so they fit the MTU of an interface. Those of
    /// WireGuard may be, and hold a packet of the MTU of the peer's tunnel.
    pub(crate) fn limit_datagrams(&self) {
        let Ok(filter) = &self.sockets.options().datagram_filter else {
            return;
        };
        let links = Netlink::open().and_then(|netlink| netlink.links());
        let longest = links.map(|links| {
            let mtus = links.iter().map(|link| {
                if Some(link.index) == self.tun.index() {
                    link.mtu + SEALED
                } else if link.hardware_type == LOOPBACK {
                    // The limit does not apply to it.
                    0
                } else {
                    link.mtu
                }
            });
            let always = match self.tunnel.protocol() {
                Protocol::Native => SMALL_DATAGRAM,
                Protocol::WireGuard => JUMBO_DATAGRAM,
            };
            // This applies also to a tunnel without an interface.
            let own = self.tunnel.inner_mtu() + SEALED;
            mtus.max().unwrap_or(0).max(own).max(always)
        });
        filter.set_maximum(longest.unwrap_or(u32::MAX));
    }

    /// Sets the socket filter's message types and their minimum lengths. A member of a mesh also receives
    /// responses of STUN servers.
    fn filter_types(&self, config: &Config) {
        if let Ok(filter) = &self.sockets.options().datagram_filter {
            let mut types = self.tunnel.protocol().message_types().to_vec();
            if config.mesh.is_some() {
                types.push(stun::SHORTEST_ANSWER);
            }
            filter.set_types(&types);
        }
    }

    /// Limits unknown sources at the socket filter during a flood, and lifts the limit after it.
    pub(crate) fn poll_floods(&mut self, now: Instant) {
        let Ok(filter) = &self.sockets.options().datagram_filter else {
            return;
        };
        let unwanted = self.tunnel.rejected() + filter.limited();
        match self.floods.poll(now, unwanted) {
            None => {}
            Some(Step::Lift) => {
                info!(target: "tunnel", "flood ended: unknown sources are not limited");
                filter.lift_limit();
            }
            Some(Step::Limit) => {
                debug!(target: "tunnel", rejected = self.tunnel.rejected(), "flood: unknown sources are limited");
                let peers = self.tunnel.peers().flat_map(|peer| {
                    let endpoint = peer.path.endpoint.into_iter();
                    endpoint.chain(peer.paths.working())
                });
                let servers = self.mesh.iter().flat_map(MeshState::queried);
                filter.limit_sources(peers.chain(servers), ALLOWANCE);
            }
        }
    }
}

/// Returns the MTU of a tunnel of IP packets unless configured.
pub(crate) fn default_mtu(protocol: seikan_config::Protocol) -> u32 {
    match protocol {
        seikan_config::Protocol::Wireguard => WIREGUARD_MTU,
        seikan_config::Protocol::Native => NATIVE_MTU,
    }
}

/// Returns the options of the device of a configuration.
pub(crate) fn tun_options(config: &Config) -> TunOptions {
    TunOptions {
        name: config.name.to_string(),
        mtu: config.mtu.unwrap_or(default_mtu(config.protocol)),
        queues: 1,
        offload: config.offload,
    }
}

/// Maximum bytes that a record of WireGuard adds to a packet: header, padding, tag.
const SEALED: u32 = 16 + 15 + 16;
/// Datagrams up to this length are never filtered, since interfaces may receive somewhat more than their MTU.
const SMALL_DATAGRAM: u32 = 2048;
/// With WireGuard's protocol, datagrams up to this length are never filtered: jumbo frames of 9,216
/// bytes.
const JUMBO_DATAGRAM: u32 = 9216;
/// `ARPHRD_LOOPBACK` (include/uapi/linux/if_arp.h).
const LOOPBACK: u16 = 772;

/// Maximum bytes of a super-packet, `most` without a limit of the uplink. One is sealed as a whole and delays the
/// packets behind it.
fn super_packet_limit(pacer: &Pacer, most: u32) -> u32 {
    pacer.read_limit().clamp(GSO_LEAST as usize, most as usize) as u32
}

/// Limits the kernel's super-packets to what one GSO send can carry, records included; larger ones would need a
/// second call. Only speed depends on it, so an error is ignored. Not for a gateway, whose kernel would have to
/// segment the larger packets that GRO merges.
fn limit_super_packets(tun: &Tun, limit: u32) {
    if let (Some(index), Ok(netlink)) = (tun.index(), Netlink::open()) {
        let segments = if limit < GSO_UNLIMITED { 64 } else { 65_535 };
        let _ = netlink.set_gso_max(index, limit, segments, limit);
    }
}

fn add_peer(
    tunnel: &mut Tunnel,
    id: PeerId,
    peer: &seikan_config::PeerConfig,
    now: Instant,
) -> Result<(), NodeError> {
    if let Some(key) = &peer.preshared_key {
        tunnel.set_preshared_key(id, key.clone());
    }
    for prefix in &peer.allowed_ips {
        tunnel.add_allowed_ip(id, *prefix);
    }
    if let Some(endpoint) = &peer.endpoint {
        tunnel.set_endpoint(id, resolve(&endpoint.host, endpoint.port)?);
    }
    let keepalive = u64::from(peer.persistent_keepalive.unwrap_or(0));
    tunnel.set_persistent_keepalive(id, std::time::Duration::from_secs(keepalive), now);
    Ok(())
}

/// Resolves an endpoint.
pub fn resolve(host: &Host, port: u16) -> Result<SocketAddr, NodeError> {
    match host {
        Host::Address(address) => Ok(SocketAddr::new(*address, port)),
        Host::Name(name) => {
            let failed = |error| NodeError::Resolve {
                host: name.clone(),
                error,
            };
            let mut found = (name.as_str(), port).to_socket_addrs().map_err(failed)?;
            found
                .next()
                .ok_or_else(|| failed(io::Error::from(io::ErrorKind::NotFound)))
        }
    }
}

/// AEADs in order of preference: AES-256-GCM first where the processor has instructions for it.
fn ciphers(preference: CipherPreference) -> Vec<Cipher> {
    use Cipher::{Aes256Gcm, ChaCha20Poly1305};
    match preference {
        CipherPreference::Aes256Gcm => vec![Aes256Gcm],
        CipherPreference::ChaCha20Poly1305 => vec![ChaCha20Poly1305],
        #[cfg(feature = "null-cipher")]
        CipherPreference::Null => vec![Cipher::Null],
        CipherPreference::Auto if seikan_sys::cpu::has_aes() => vec![Aes256Gcm, ChaCha20Poly1305],
        CipherPreference::Auto => vec![ChaCha20Poly1305, Aes256Gcm],
    }
}
