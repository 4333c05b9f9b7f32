//! What a node tells about itself: [`Status`], which is also the JSON of `seikan status --json`.
//!
//! That JSON is a stable interface: fields are added but keep their names and meaning as long as
//! [`Status::version`] stays. Keys in it are public ones only.

use crate::control::subject::Record;
use crate::gateway::status::GatewayStatus;
use crate::mesh::mapping::Mapping;
use crate::mesh::nat::{self, Nat, Sight};
use crate::mesh::{self, Answers, Changed, Contact, LegTo, MeshState};
use crate::node::{Node, now};
use crate::setup::names::Found;
use seikan_observe::{DirectionCounters, DropCounts, Histogram, PeerCounters};
use seikan_proto::birthday::Standing;
use seikan_proto::noise::Construction;
use seikan_proto::paths;
use seikan_proto::peer::Peer;
use seikan_proto::tunnel::Now;
use seikan_sys::ability::Ability;
use seikan_sys::udp::UdpSocket;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Version of the interface; another one breaks readers of this one.
pub const VERSION: u32 = 1;

/// Members that are no peers of whom a status tells, at most.
const MAX_REFUSED_SHOWN: usize = 16;

/// A running tunnel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`VERSION`].
    pub version: u32,
    /// The process.
    pub pid: u32,
    /// The interface.
    pub interface: Interface,
    /// The TUN device and the kernel's counts of it.
    pub device: Device,
    /// The UDP sockets, one for each address family.
    pub sockets: Vec<Socket>,
    /// Datagrams that the kernel dropped because the receive buffer was full; what it had joined
    /// counts once.
    pub receive_queue_drops: u64,
    /// Sends that were refused with segmentation offload and repeated without.
    pub gso_fallbacks: u64,
    /// All peers together, past ones and what belonged to none included.
    pub totals: Traffic,
    /// How many packets each system call moved.
    pub batches: Batches,
    /// The mesh that this host is a member of; absent if it is of none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mesh: Option<MeshStatus>,
    /// The peers, ordered by key.
    pub peers: Vec<PeerStatus>,
    /// The gateway; absent if this is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<GatewayStatus>,
}

/// Membership in a mesh.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeshStatus {
    /// Where the coordinator is that is asked, or was last; of several it may be another than the configured one.
    pub coordinator: String,
    /// How it stands with it.
    pub contact: Contact,
    /// The revision up to which the members are known.
    pub revision: u64,
    /// Members that are peers, besides this host.
    pub members: usize,
    /// What this host looks like from outside, as the coordinator sees it; what is not an address of its own a NAT has made.
    #[serde(default)]
    pub reflexive: Vec<SocketAddr>,
    /// A port of the router before this host; absent if none is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_mapping: Option<PortMappingStatus>,
    /// What is between this host and the world, by IPv4.
    #[serde(default = "not_asked")]
    pub nat4: Nat,
    /// The same by IPv6.
    #[serde(default = "not_asked")]
    pub nat6: Nat,
    /// What each STUN server sees of this host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stun: Vec<StunStatus>,
    /// Relays that were asked for something, by address.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub relays: BTreeMap<String, RelayStatus>,
    /// Relays of ours to which there is a connection by TLS, by address.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub streams: BTreeMap<String, StreamStatus>,
    /// This host's allocations at TURN servers, by the servers' addresses.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub turn: BTreeMap<String, TurnStatus>,
    /// How members are found by their names; absent where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<Found>,
    /// Members that are no peers.
    #[serde(default)]
    pub refused_members: usize,
    /// The first of those, by their keys, with the reason; those with doubtful keys before the others.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub refused: BTreeMap<String, String>,
    /// Members that have another key than before and are peers all the same, by name: of the last seven days, and the first of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub changed_keys: BTreeMap<String, Changed>,
}

/// A port of the router before this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortMappingStatus {
    /// It sends on what comes to it.
    Given(Mapping),
    /// It gave none, for this reason.
    Refused(String),
}

/// An allocation at a TURN server (RFC 8656), and what was forwarded by it, in datagrams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnStatus {
    /// Where others send.
    pub relayed: SocketAddr,
    /// UDP, TCP or TLS.
    pub transport: String,
    /// To this host.
    pub received: u64,
    /// By this host.
    pub sent: u64,
    /// What went no further here, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub drops: BTreeMap<String, u64>,
}

/// A connection by TLS to a relay of ours, and what was forwarded by it, in datagrams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamStatus {
    /// To this host.
    pub received: u64,
    /// By this host.
    pub sent: u64,
    /// What went no further here, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub drops: BTreeMap<String, u64>,
}

/// What a STUN server sees of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StunStatus {
    /// As the configuration or the coordinator calls it.
    pub name: String,
    /// Where it was asked.
    pub server: SocketAddr,
    /// Where it sees this host; absent if it does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<SocketAddr>,
    /// From the question to the answer, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_us: Option<u64>,
}

fn not_asked() -> Nat {
    Nat::NotAsked
}

/// How it stands with a relay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RelayStatus {
    /// It answers, after so many microseconds.
    RttUs(u64),
    /// It does by TLS, and not by UDP.
    TlsRttUs(u64),
    /// It does not do what it was asked for.
    Refuses(String),
}

/// What the interface is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// `wireguard` or `native`.
    pub protocol: String,
    /// Our public key; absent after a client took the private one away.
    pub public_key: Option<String>,
    /// UDP port.
    pub listen_port: u16,
    /// Mark on what we send, if any.
    pub fwmark: Option<u32>,
    /// Seconds since the start, time asleep included.
    pub uptime_s: f64,
    /// Why `wg` cannot reach this instance, if so.
    pub without_uapi: Option<String>,
}

/// The TUN device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// MTU inside the tunnel in bytes.
    pub mtu: Option<u32>,
    /// Packets that wait for us at most; what comes then is dropped before we see it.
    pub queue_length: Option<u32>,
    /// The kernel's counts.
    pub kernel: Option<KernelCounters>,
    /// What the device can do.
    pub capabilities: BTreeMap<String, Capability>,
}

/// The kernel's counts of the TUN device, seen from the kernel: it transmits to us.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelCounters {
    /// Packets handed to us; a super-packet counts once.
    pub tx_packets: u64,
    /// Packets dropped before us: the queue was full, or nobody read.
    pub tx_dropped: u64,
    /// Packets that could not be handed to us.
    pub tx_errors: u64,
    /// Packets taken from us; a super-packet counts once.
    pub rx_packets: u64,
    /// Packets of ours that the kernel's stack dropped.
    pub rx_dropped: u64,
    /// Packets of ours that the kernel found faulty.
    pub rx_errors: u64,
}

/// Something that the kernel may or may not be able to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// Whether it can.
    pub present: bool,
    /// Why not.
    pub reason: Option<String>,
}

/// A UDP socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Socket {
    /// Where it listens.
    pub address: Option<SocketAddr>,
    /// Receive buffer in bytes, as granted.
    pub receive_buffer: Option<usize>,
    /// Send buffer in bytes, as granted.
    pub send_buffer: Option<usize>,
    /// Segmentation offload is in use.
    pub gso: bool,
    /// What the socket can do.
    pub capabilities: BTreeMap<String, Capability>,
}

/// Both directions and the handshakes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// Outer bytes sent: the payload of UDP.
    pub sent_bytes: u64,
    /// Outer bytes received and authenticated.
    pub received_bytes: u64,
    /// From the TUN device to the network.
    pub outbound: Direction,
    /// From the network to the TUN device.
    pub inbound: Direction,
    /// Handshakes.
    pub handshakes: Handshakes,
}

/// One direction. `packets_in = packets_out + consumed + held + drops + unaccounted`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Direction {
    /// Inner packets that entered; a super-packet counts as those it stands for.
    pub packets_in: u64,
    /// Inner packets that left.
    pub packets_out: u64,
    /// Inner bytes that left.
    pub bytes_out: u64,
    /// Packets that ended here as intended: keepalives, probes, reports, handshakes.
    pub consumed: u64,
    /// Packets that wait for a handshake or for missing parts.
    pub held: u64,
    /// Packets whose fate is unknown. Anything but 0 is a fault of Seikan.
    pub unaccounted: i64,
    /// Packets dropped, by the reason's name; reasons that never occurred are left out.
    pub drops: BTreeMap<String, u64>,
}

/// Handshakes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handshakes {
    /// Initiations sent.
    pub initiations_sent: u64,
    /// Valid initiations received.
    pub initiations_received: u64,
    /// Sessions established.
    pub completed: u64,
}

/// How many packets or datagrams each system call moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Batches {
    /// Reads of the TUN device handled together; each may be a super-packet.
    pub packets_per_read: Distribution,
    /// Datagrams per send.
    pub datagrams_per_send: Distribution,
    /// Datagrams per receive.
    pub datagrams_per_receive: Distribution,
    /// Packets per write to the TUN device.
    pub packets_per_write: Distribution,
}

/// A distribution of sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// How many batches.
    pub count: u64,
    /// Arithmetic mean of their sizes; 0 without batches.
    pub mean: f64,
    /// How many had which size; empty classes are left out.
    pub buckets: Vec<Bucket>,
}

/// Sizes from a power of two up to the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Least size.
    pub from: u64,
    /// How many had this size or more, up to twice as much.
    pub count: u64,
}

/// A peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its name in the configuration or the mesh.
    pub name: Option<String>,
    /// Its identity.
    pub public_key: String,
    /// Whether there is a preshared key; never which.
    pub has_preshared_key: bool,
    /// Prefixes routed to it and accepted from it.
    pub allowed_ips: Vec<String>,
    /// Seconds between persistent keepalives, if any.
    pub persistent_keepalive_s: Option<u64>,
    /// The newest session.
    pub latest_handshake: Option<LatestHandshake>,
    /// AEAD of the current session.
    pub cipher: Option<String>,
    /// Why its latest handshake was refused.
    pub refusal: Option<String>,
    /// The way to it.
    pub path: Path,
    /// What was counted.
    pub traffic: Traffic,
}

/// When a session was established.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatestHandshake {
    /// Seconds since the Unix epoch.
    pub unix_s: u64,
    /// Seconds ago.
    pub age_s: u64,
}

/// The way to a peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Path {
    /// Where the peer is.
    pub endpoint: Option<SocketAddr>,
    /// Largest outer IP packet that is known to get through, in bytes (native).
    pub mtu: Option<usize>,
    /// Segmentation offload is used; not where it turned out to lose datagrams.
    pub gso: bool,
    /// What the far end says about what we send (native).
    pub report: Option<Report>,
    /// From a probe to its acknowledgement, the latest, in microseconds (native).
    #[serde(default)]
    pub rtt_us: Option<u64>,
    /// Whether that is a relay, for a member of a mesh that has an endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relayed: Option<bool>,
    /// By which TURN server, if it is one's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnWay>,
    /// By which relay of ours, if it is one's and this host reaches it by TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsWay>,
    /// All ways to a member of a mesh, what it told of first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ways: Vec<Way>,
    /// The search for a port of a symmetric NAT, once there was a reason for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_search: Option<PortSearch>,
}

/// The search for a port of a symmetric NAT at one of the ends, by which the two meet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortSearch {
    /// The NAT before this host is symmetric: its ports are opened. Else those of the other end's are probed.
    pub symmetric: bool,
    /// Ports that are open now.
    pub open: u16,
    /// Datagrams sent from open ports to open them, for all peers.
    pub openers: u64,
    /// This host's own port by which the way in use goes: the one that was met.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub met: Option<u16>,
    /// Attempts that met nothing since one did.
    pub fruitless: usize,
    /// Seconds to the next one, if packets are sent then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_s: Option<u64>,
    /// Why no ports could be opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Both ends are behind symmetric NATs.
    pub both_symmetric: bool,
    /// Probes that this host has sent to ports of the other end's NAT, and whether it is at it.
    pub probes: u64,
    /// Likewise.
    pub probing: bool,
}

/// One of the ways to a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    /// Where to send.
    pub address: SocketAddr,
    /// What is there.
    pub kind: WayKind,
    /// By which TURN server, if it is one's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnWay>,
    /// By which relay of ours, if it is one's and this host reaches it by TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsWay>,
    /// What became of it.
    pub standing: WayStanding,
    /// From a check to its acknowledgement in microseconds, if it works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_us: Option<u64>,
}

/// A way by a TURN server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnWay {
    /// Where it is sent to in the end, if this host's own server sends it there.
    pub to: SocketAddr,
    /// That server; absent if it is one of the other end's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
}

/// A way by a relay of ours, to which this host sends by TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TlsWay {
    /// Its address, and the port of it that this host shares with the peer.
    pub to: SocketAddr,
    /// As the coordinator calls it.
    pub relay: String,
}

/// What is at the end of a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WayKind {
    /// An address that the peer told of.
    Told,
    /// An address that something authentic came from.
    Seen,
    /// A relay.
    Relay,
}

/// What became of a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WayStanding {
    /// Packets go there.
    InUse,
    /// Not checked: the one in use is direct, or nothing was sent yet.
    Unchecked,
    /// A check may be on its way.
    Checking,
    /// A check was answered.
    Works,
    /// No answer.
    Silent,
    /// This host has no route there.
    NoRoute,
}

/// The far end's latest report: of about a second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Datagrams received.
    pub received: u32,
    /// Datagrams missing.
    pub lost: u32,
    /// Of those, the first of their batch.
    pub lost_first: u32,
    /// Largest distance by which one came late, in datagrams.
    pub reordering: u16,
    /// Datagrams marked by a congested router.
    pub congestion_marks: u32,
    /// Mean delay above the least, in microseconds.
    pub queueing_delay_us: u32,
}

/// Everything but peers and gateway: they may be long and are told of one by one.
pub fn without_peers(node: &Node, record: &Record) -> Status {
    let counts = node.sockets.counts();
    Status {
        version: VERSION,
        pid: std::process::id(),
        interface: interface(node, record),
        device: device(node, record),
        sockets: node.sockets.iter().map(socket).collect(),
        receive_queue_drops: counts.receive_queue_drops,
        gso_fallbacks: counts.gso_fallbacks,
        totals: traffic(&node.tunnel.totals()),
        batches: Batches {
            packets_per_read: distribution(&node.batches.packets_per_read),
            datagrams_per_send: distribution(&node.batches.datagrams_per_send),
            datagrams_per_receive: distribution(&node.batches.datagrams_per_receive),
            packets_per_write: distribution(&node.batches.packets_per_write),
        },
        mesh: node.mesh.as_ref().map(|mesh| {
            let netlink = record.netlink.as_ref();
            let all = netlink.and_then(|netlink| netlink.all_addresses().ok());
            let tun = node.tun.index();
            let others = all.into_iter().flatten().filter(|a| a.index != tun);
            let usable = others
                .map(|a| a.net.addr())
                .filter(|ip| mesh::is_routable(*ip));
            self::mesh(mesh, &usable.collect::<Vec<_>>())
        }),
        peers: Vec::new(),
        gateway: None,
    }
}

/// One peer.
pub fn peer(node: &Node, record: &Record, peer: &Peer, now: Now) -> PeerStatus {
    let native = node.tunnel.construction() == Construction::Native;
    let turn = |address: SocketAddr| turn(node, peer, address);
    PeerStatus {
        name: record.name_of(node, &peer.public_key),
        public_key: peer.public_key.to_string(),
        has_preshared_key: peer.preshared_key.is_set(),
        allowed_ips: node
            .tunnel
            .allowed_ips(peer.id)
            .map(|prefix| prefix.to_string())
            .collect(),
        persistent_keepalive_s: peer.persistent_keepalive().map(|i| i.as_secs()),
        latest_handshake: peer.last_handshake.map(|at| LatestHandshake {
            unix_s: at.as_secs(),
            age_s: now.wall.saturating_sub(at).as_secs(),
        }),
        cipher: peer.cipher().map(|cipher| cipher.name().to_owned()),
        refusal: peer.refusal.clone(),
        path: Path {
            endpoint: peer.path.endpoint,
            mtu: native.then(|| peer.path.mtu.mtu()),
            gso: peer.path.gso,
            report: peer.path.report.as_ref().map(|report| Report {
                received: report.received,
                lost: report.lost,
                lost_first: report.lost_first,
                reordering: report.reordering,
                congestion_marks: report.congestion_marks,
                queueing_delay_us: report.queueing_delay,
            }),
            rtt_us: peer.path.rtt.map(micros),
            relayed: peer
                .path
                .endpoint
                .filter(|_| !peer.paths.is_empty())
                .map(|endpoint| peer.paths.is_relay(endpoint)),
            turn: peer.path.endpoint.and_then(turn),
            tls: peer.path.endpoint.and_then(|at| tls(node, at)),
            ways: peer
                .paths
                .ways()
                .iter()
                .map(|way| {
                    let used = peer.path.endpoint == Some(way.address);
                    let in_use = used && !peer.paths.is_lost();
                    self::way(way, in_use, turn(way.address), tls(node, way.address))
                })
                .collect(),
            port_search: port_search(node, peer, now),
        },
        traffic: traffic(&peer.counters),
    }
}

fn port_search(node: &Node, peer: &Peer, now: Now) -> Option<PortSearch> {
    let (birthday, doors) = (&peer.birthday, &node.sockets.doors);
    let met = peer.path.endpoint.and_then(|to| doors.port_to(to, peer.id));
    let symmetric = node.tunnel.outside().is_symmetric();
    let standing = birthday.standing();
    let idle = standing == Standing::Idle(None);
    let nothing = met.is_none() && birthday.probes() == 0 && !birthday.is_hopeless();
    if nothing && (idle || !symmetric) {
        return None;
    }
    Some(PortSearch {
        symmetric,
        open: match standing {
            Standing::Open(ports) => ports,
            Standing::Idle(_) | Standing::Met => 0,
        },
        openers: doors.openers(),
        met,
        fruitless: birthday.fruitless(),
        next_s: match standing {
            Standing::Idle(next) => next.filter(|_| symmetric),
            Standing::Open(_) | Standing::Met => None,
        }
        .map(|next| next.duration_since(now.mono).as_secs()),
        trouble: doors.trouble(peer.id).map(str::to_owned),
        both_symmetric: birthday.is_hopeless(),
        probes: birthday.probes(),
        probing: birthday.is_spraying(now.mono),
    })
}

/// By which TURN server something is sent there, if it is.
fn turn(node: &Node, peer: &Peer, address: SocketAddr) -> Option<TurnWay> {
    let mesh = node.mesh.as_ref()?;
    match mesh.legs.get(&address) {
        Some(LegTo::Turn { server, to }) => {
            let (to, server) = (*to, Some(server.clone()));
            return Some(TurnWay { to, server });
        }
        Some(LegTo::Relay { .. }) => return None,
        None => {}
    }
    let member = mesh.members.get(&peer.public_key)?;
    let (to, server) = (address, None);
    member
        .relayed
        .contains(&address)
        .then_some(TurnWay { to, server })
}

/// By which relay of ours something is sent there by TLS, if it is.
fn tls(node: &Node, address: SocketAddr) -> Option<TlsWay> {
    match node.mesh.as_ref()?.legs.get(&address)? {
        LegTo::Relay { relay, to } => Some(TlsWay {
            to: *to,
            relay: relay.clone(),
        }),
        LegTo::Turn { .. } => None,
    }
}

fn way(way: &paths::Way, in_use: bool, turn: Option<TurnWay>, tls: Option<TlsWay>) -> Way {
    Way {
        address: way.address,
        kind: match way.kind {
            _ if turn.is_some() || tls.is_some() => WayKind::Relay,
            paths::Kind::Told => WayKind::Told,
            paths::Kind::Seen => WayKind::Seen,
            paths::Kind::Relay => WayKind::Relay,
        },
        turn,
        tls,
        standing: match way.standing {
            _ if in_use => WayStanding::InUse,
            paths::Standing::Silent => WayStanding::Silent,
            paths::Standing::Unchecked => WayStanding::Unchecked,
            paths::Standing::Checking => WayStanding::Checking,
            paths::Standing::Works { .. } => WayStanding::Works,
            paths::Standing::NoRoute => WayStanding::NoRoute,
        },
        rtt_us: match way.standing {
            paths::Standing::Works { rtt } => Some(micros(rtt)),
            _ => None,
        },
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}

fn interface(node: &Node, record: &Record) -> Interface {
    let key = node.tunnel.identity().public();
    let uptime = now().mono.duration_since(node.started);
    Interface {
        name: record.name.clone(),
        protocol: match node.tunnel.construction() {
            Construction::WireGuard => "wireguard".into(),
            Construction::Native => "native".into(),
        },
        public_key: (!record.keyless).then(|| key.to_string()),
        listen_port: node.sockets.port(),
        fwmark: node.sockets.fwmark(),
        uptime_s: uptime.as_millis() as f64 / 1000.0,
        without_uapi: record.without_uapi.clone(),
    }
}

fn mesh(mesh: &MeshState, own: &[IpAddr]) -> MeshStatus {
    let doubted = mesh.doubts.refused.iter();
    let doubted = doubted.map(|(key, refused)| (key, refused.reason.as_str()));
    let refused = mesh.refused.iter().map(|(key, reason)| (key, *reason));
    let refused = doubted.chain(refused).take(MAX_REFUSED_SHOWN);
    let changed = mesh.doubts.changed.iter().take(MAX_REFUSED_SHOWN);
    let nat = |v6: bool| {
        let views = mesh.views.iter();
        let of_family = views.filter(|view| view.server.is_ipv6() == v6);
        let sights: Vec<Sight> = of_family
            .map(|view| Sight {
                server: view.server,
                seen: view.seen,
            })
            .collect();
        let own: Vec<IpAddr> = own
            .iter()
            .copied()
            .filter(|ip| ip.is_ipv6() == v6)
            .collect();
        nat::judge(&sights, &own)
    };
    MeshStatus {
        nat4: nat(false),
        nat6: nat(true),
        stun: mesh
            .views
            .iter()
            .map(|view| StunStatus {
                name: view.name.clone(),
                server: view.server,
                seen: view.seen,
                rtt_us: view.rtt.map(micros),
            })
            .collect(),
        refused_members: mesh.refused.len() + mesh.doubts.refused.len(),
        coordinator: mesh.coordinator.clone(),
        contact: mesh.contact.clone(),
        revision: mesh.revision,
        members: mesh.members.len(),
        reflexive: mesh.reflexive.clone(),
        port_mapping: mesh.mapped.clone().map(|standing| match standing {
            Ok(mapping) => PortMappingStatus::Given(mapping),
            Err(reason) => PortMappingStatus::Refused(reason),
        }),
        relays: mesh
            .relays
            .iter()
            .map(|(address, standing)| {
                let status = match standing {
                    Ok(Answers { rtt, by_tls: false }) => RelayStatus::RttUs(micros(*rtt)),
                    Ok(Answers { rtt, by_tls: true }) => RelayStatus::TlsRttUs(micros(*rtt)),
                    Err(reason) => RelayStatus::Refuses(reason.clone()),
                };
                (address.clone(), status)
            })
            .collect(),
        streams: mesh
            .streams
            .iter()
            .map(|(address, counters)| {
                let status = StreamStatus {
                    received: counters.received,
                    sent: counters.sent,
                    drops: drops(&counters.drops),
                };
                (address.clone(), status)
            })
            .collect(),
        turn: mesh
            .turn
            .iter()
            .map(|(address, allocation)| {
                let counters = &allocation.counters;
                let status = TurnStatus {
                    relayed: allocation.relayed,
                    transport: allocation.transport.to_owned(),
                    received: counters.received,
                    sent: counters.sent,
                    drops: drops(&counters.drops),
                };
                (address.clone(), status)
            })
            .collect(),
        names: Some(mesh.names.clone()),
        refused: refused
            .map(|(key, reason)| (key.to_string(), reason.to_owned()))
            .collect(),
        changed_keys: changed
            .map(|(name, changed)| (name.to_string(), changed.clone()))
            .collect(),
    }
}

fn device(node: &Node, record: &Record) -> Device {
    let index = node.tun.index();
    let netlink = record.netlink.as_ref();
    let link = netlink.and_then(|netlink| netlink.link_by_index(index).ok());
    let stats = netlink.and_then(|netlink| netlink.link_stats(index).ok());
    Device {
        mtu: link.as_ref().map(|link| link.mtu),
        queue_length: link.as_ref().map(|link| link.tx_queue_len),
        kernel: stats.map(|stats| KernelCounters {
            tx_packets: stats.tx_packets,
            tx_dropped: stats.tx_dropped,
            tx_errors: stats.tx_errors,
            rx_packets: stats.rx_packets,
            rx_dropped: stats.rx_dropped,
            rx_errors: stats.rx_errors,
        }),
        capabilities: capabilities(&node.tun.capabilities().table()),
    }
}

fn socket(socket: &UdpSocket) -> Socket {
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

fn traffic(counters: &PeerCounters) -> Traffic {
    Traffic {
        sent_bytes: counters.sent_bytes,
        received_bytes: counters.received_bytes,
        outbound: direction(&counters.outbound),
        inbound: direction(&counters.inbound),
        handshakes: Handshakes {
            initiations_sent: counters.handshakes.initiations_sent,
            initiations_received: counters.handshakes.initiations_received,
            completed: counters.handshakes.completed,
        },
    }
}

pub(crate) fn direction(counters: &DirectionCounters) -> Direction {
    Direction {
        packets_in: counters.packets_in,
        packets_out: counters.packets_out,
        bytes_out: counters.bytes_out,
        consumed: counters.consumed,
        held: counters.held,
        unaccounted: i64::try_from(counters.unaccounted()).unwrap_or(i64::MAX),
        drops: drops(&counters.drops),
    }
}

fn drops(counts: &DropCounts) -> BTreeMap<String, u64> {
    let named = counts.nonzero();
    named.map(|(r, n)| (r.name().to_owned(), n)).collect()
}

pub(crate) fn distribution(histogram: &Histogram) -> Distribution {
    let filled = histogram.buckets().filter(|(_, count)| *count > 0);
    Distribution {
        count: histogram.count(),
        mean: histogram.mean(),
        buckets: filled.map(|(from, count)| Bucket { from, count }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_proto::time::Instant;
    use serde_json::Value;

    /// The stable interface, with every field that there is.
    const GOLDEN: &str = include_str!("../testdata/status.json");

    #[test]
    fn the_json_has_the_fields_it_is_known_for() {
        let known: Value = serde_json::from_str(GOLDEN).unwrap();
        let status: Status = serde_json::from_str(GOLDEN).unwrap();
        assert_eq!(status.version, VERSION);
        assert_eq!(serde_json::to_value(&status).unwrap(), known);
    }

    #[test]
    fn a_way_that_was_silent_once_is_shown_as_in_use_when_it_is() {
        let address: SocketAddr = "192.0.2.1:7".parse().unwrap();
        let mut paths = paths::Paths::default();
        paths.set_told(&[address]);
        paths.sent(Instant::BOOT);
        let late = Instant::BOOT + paths::SILENCE;
        paths.due(Some(address), late, &mut crate::node::SystemRandom);
        let shown = |in_use| way(&paths.ways()[0], in_use, None, None).standing;
        assert_eq!(shown(false), WayStanding::Silent);
        assert_eq!(shown(true), WayStanding::InUse);
    }

    #[test]
    fn peers_come_last_so_that_they_can_follow_in_pieces() {
        let mut status: Status = serde_json::from_str(GOLDEN).unwrap();
        status.peers.clear();
        status.gateway = None;
        let text = serde_json::to_string(&status).unwrap();
        assert!(text.ends_with("\"peers\":[]}"), "{text}");
    }
}
