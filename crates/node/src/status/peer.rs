//! Status of a peer and its paths.

use super::micros;
use super::traffic::{Traffic, traffic};
use crate::node::Node;
use crate::subject::Record;
use seikan_mesh::transport::ProxyTarget;
use seikan_proto::birthday::PunchState;
use seikan_proto::constants::{KEEPALIVE_TIMEOUT, REKEY_TIMEOUT};
use seikan_proto::native::repair::sender::State;
use seikan_proto::noise::Protocol;
use seikan_proto::paths;
use seikan_proto::peer::Peer;
use seikan_proto::tunnel::{Now, Reachability};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Status of a peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PeerStatus {
    /// Name of the peer in the configuration or the mesh.
    pub name: Option<String>,
    /// Its public key, in Base64.
    pub public_key: String,
    /// Whether there is a preshared key; the key itself is never included.
    pub has_preshared_key: bool,
    /// Whether the peer answers; absent if the daemon has an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<PeerState>,
    /// Seconds since this host sent something that the peer has not answered.
    #[serde(default)]
    pub unanswered_s: Option<u64>,
    /// Prefixes routed to the peer and accepted from it.
    pub allowed_ips: Vec<String>,
    /// Seconds between persistent keepalives, if any.
    pub persistent_keepalive_s: Option<u64>,
    /// The newest session.
    pub latest_handshake: Option<LatestHandshake>,
    /// AEAD of the current session.
    pub cipher: Option<String>,
    /// Reason why the latest handshake was refused.
    pub refusal: Option<String>,
    /// Its path.
    pub path: Path,
    /// Its counters.
    pub traffic: Traffic,
    /// Devices behind a member of a mesh that this host may talk to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<PeerDevice>,
}

/// Whether a peer answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PeerState {
    /// There has been no session since the tunnel started.
    NeverSeen,
    /// There is a session, and no answer is overdue.
    Up,
    /// The last session has ended, and no answer is overdue.
    Idle,
    /// No answer for 15 s, although a reachable peer answers within that time.
    Down,
}

/// A device behind a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PeerDevice {
    /// Name of the device in the mesh, followed by the name of the peer.
    pub name: String,
    /// Its addresses in the mesh.
    pub addresses: Vec<IpAddr>,
    /// Its tags.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
}

/// Time of the newest session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LatestHandshake {
    /// Seconds since the Unix epoch.
    pub unix_s: u64,
    /// Seconds before now.
    pub age_s: u64,
}

/// The path to a peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Path {
    /// Address in use.
    pub endpoint: Option<SocketAddr>,
    /// Largest outer IP packet known to arrive, in bytes (native).
    pub mtu: Option<usize>,
    /// Whether segmentation offload is in use. It is turned off if it loses datagrams.
    pub gso: bool,
    /// The peer's report about received datagrams (native).
    pub report: Option<Report>,
    /// Loss repair, if both ends have it (native).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<Repair>,
    /// Latest round trip of a probe in microseconds (native).
    #[serde(default)]
    pub rtt_us: Option<u64>,
    /// Whether the address is a relay, for a member of a mesh with an address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relayed: Option<bool>,
    /// The TURN server, if the path uses one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnPath>,
    /// The relay, if the path uses one over TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsPath>,
    /// All candidate paths to a member of a mesh, those that it reported first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub candidates: Vec<Candidate>,
    /// The port search at a symmetric NAT; absent before the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_search: Option<PortSearch>,
    /// The attempts to reach a member directly, if there is no direct path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_direct_path: Option<NoDirectPath>,
}

/// Attempts to reach a member without a direct path. The NAT of this host is `nat4` and `nat6` of the mesh.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NoDirectPath {
    /// Handshakes and rounds of checks since the last datagram over a direct path.
    pub tries: u32,
    /// Whether the peer has reported addresses of its own.
    pub has_addresses: bool,
    /// Whether the peer is probably behind a NAT: it has reported a private and a public IPv4 address.
    pub peer_behind_nat: bool,
    /// Whether a relay serves this host.
    pub relay: bool,
}

/// The search for a port of a symmetric NAT at one of the ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortSearch {
    /// Whether the NAT of this host is symmetric, so that its ports are opened. If not, ports of
    /// the other end's NAT are probed.
    pub symmetric: bool,
    /// Number of ports open now.
    pub open: u16,
    /// Datagrams sent to open ports, for all peers.
    pub openers: u64,
    /// Local port of the path in use, if the search found it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_port: Option<u16>,
    /// Failed searches since the last success.
    pub failed_attempts: usize,
    /// Seconds until the next search, if packets are sent then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_s: Option<u64>,
    /// Reason why no ports could be opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Whether both ends are behind symmetric NATs.
    pub both_symmetric: bool,
    /// Probes sent to ports of the other end's NAT.
    pub probes: u64,
    /// Whether probes are being sent now.
    pub probing: bool,
}

/// A candidate path to a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Candidate {
    /// Destination address.
    pub address: SocketAddr,
    /// Kind of the address.
    pub kind: CandidateKind,
    /// The TURN server, if the path uses one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnPath>,
    /// The relay, if the path uses one over TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsPath>,
    /// State of the path.
    pub state: CandidateState,
    /// Round trip of its latest check in microseconds, if it works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_us: Option<u64>,
}

/// A path through a TURN server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TurnPath {
    /// Address of the peer to which this host's server forwards; without `server`, the relayed
    /// address of the other end's allocation.
    pub to: SocketAddr,
    /// Address of the server; absent if it is the other end's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
}

/// A path through a relay over TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TlsPath {
    /// Address of the relay, unspecified if only a web proxy knows it, with the port of the pair.
    pub to: SocketAddr,
    /// Name of the relay at the coordinator.
    pub relay: String,
}

/// Kind of a candidate's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CandidateKind {
    /// Reported by the peer.
    Signalled,
    /// Source address of an authentic datagram.
    PeerReflexive,
    /// A relay.
    Relay,
}

/// State of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CandidateState {
    /// In use.
    InUse,
    /// Not checked: the path in use is direct, or nothing was sent yet.
    Unchecked,
    /// A check is pending.
    Checking,
    /// The last check was answered.
    Works,
    /// The last check was not answered.
    Silent,
    /// This host has no route to it.
    NoRoute,
}

/// The peer's latest report, about one second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Report {
    /// Datagrams received.
    pub received: u32,
    /// Datagrams lost.
    pub lost: u32,
    /// Lost datagrams that were the first of their batch.
    pub lost_first: u32,
    /// Largest reordering distance, in datagrams.
    pub reordering: u16,
    /// Datagrams with a congestion mark.
    pub congestion_marks: u32,
    /// Mean delay above the minimum, in microseconds.
    pub queueing_delay_us: u32,
}

/// Loss repair of a path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Repair {
    /// Whether parity is sent, and if not, why.
    pub state: RepairState,
    /// Share of the records to the peer that was lost at random, from 0 to 1.
    pub loss: f64,
    /// Parity records sent.
    pub parity_sent: u64,
    /// Lost records that the peer restored, as it reports.
    pub restored: u64,
    /// Lost records that the peer could not restore while parity was sent.
    pub not_restored: u64,
    /// Records from the peer whose segments were held back here behind a lost one.
    pub held: u64,
    /// Longest time for which a record was held back, in microseconds.
    pub longest_hold_us: u64,
}

/// Whether a path is repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RepairState {
    /// The first records of a path have parity.
    Starting,
    /// There is hardly any random loss.
    NotNeeded,
    /// Parity is sent.
    Repairing,
    /// Most losses happen in a full queue.
    Congested,
    /// The path loses more than 8 %.
    TooMuchLoss,
}

fn repair(peer: &Peer, now: Now) -> Option<Repair> {
    let sender = peer.path.repair();
    let state = match sender.state(now.mono) {
        State::Off => return None,
        State::Starting => RepairState::Starting,
        State::NotNeeded => RepairState::NotNeeded,
        State::Repairing => RepairState::Repairing,
        State::Congested => RepairState::Congested,
        State::TooMuchLoss => RepairState::TooMuchLoss,
    };
    Some(Repair {
        state,
        loss: sender.loss().unwrap_or(0.0),
        parity_sent: sender.sent,
        restored: peer.path.restored,
        not_restored: peer.path.not_restored,
        held: peer.repair.as_ref().map_or(0, |repair| repair.held),
        longest_hold_us: peer
            .repair
            .as_ref()
            .map_or(0, |repair| micros(repair.longest)),
    })
}

/// Maximum time until a reachable peer answers.
const ANSWER_TIME: Duration = KEEPALIVE_TIMEOUT.saturating_add(REKEY_TIMEOUT);

/// Returns whether a peer answers. `unanswered`: for how long something waits for an answer.
fn state(was_seen: bool, has_session: bool, unanswered: Option<Duration>) -> PeerState {
    if !was_seen {
        PeerState::NeverSeen
    } else if is_silent(unanswered) {
        PeerState::Down
    } else if has_session {
        PeerState::Up
    } else {
        PeerState::Idle
    }
}

fn is_silent(unanswered: Option<Duration>) -> bool {
    unanswered.is_some_and(|waited| waited > ANSWER_TIME)
}

/// Returns whether a peer answers, for alerts: unlike [`PeerState`], a peer that was never seen is silent once it has
/// not answered for [`ANSWER_TIME`], so that a restart does not hide its absence. `None` while nothing is known: it was
/// never seen, and nothing has waited so long for it.
fn answers(was_seen: bool, unanswered: Option<Duration>) -> Option<bool> {
    if is_silent(unanswered) {
        Some(false)
    } else {
        was_seen.then_some(true)
    }
}

fn unanswered(peer: &Peer, now: Now) -> Option<Duration> {
    let since = peer.waiting_since()?;
    Some(now.mono.duration_since(since))
}

/// Returns whether a peer answers, as [`answers`].
pub(crate) fn is_up(peer: &Peer, now: Now) -> Option<bool> {
    answers(peer.last_handshake.is_some(), unanswered(peer, now))
}

/// Returns whether the path to a member of a mesh is a relay; `None` for other peers, and without a path.
pub(crate) fn is_relayed(peer: &Peer) -> Option<bool> {
    let endpoint = peer.path.endpoint.filter(|_| !peer.paths.is_empty())?;
    Some(peer.paths.is_relay(endpoint))
}

/// Returns the status of one peer.
pub fn peer(node: &Node, record: &Record, peer: &Peer, now: Now) -> PeerStatus {
    let native = node.tunnel.protocol() == Protocol::Native;
    let turn = |address: SocketAddr| turn(node, peer, address);
    let unanswered = unanswered(peer, now);
    let state = state(
        peer.last_handshake.is_some(),
        peer.has_session(now.mono),
        unanswered,
    );
    PeerStatus {
        name: record.name_of(node, &peer.public_key),
        public_key: peer.public_key.to_string(),
        has_preshared_key: peer.preshared_key.is_set(),
        state: Some(state),
        unanswered_s: unanswered.map(|waited| waited.as_secs()),
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
            repair: repair(peer, now),
            rtt_us: peer.path.rtt.map(micros),
            relayed: is_relayed(peer),
            turn: peer.path.endpoint.and_then(turn),
            tls: peer.path.endpoint.and_then(|at| tls(node, at)),
            candidates: peer
                .paths
                .candidates()
                .iter()
                .map(|candidate| {
                    let used = peer.path.endpoint == Some(candidate.address);
                    let in_use = used && !peer.paths.is_lost();
                    self::candidate(
                        candidate,
                        in_use,
                        turn(candidate.address),
                        tls(node, candidate.address),
                    )
                })
                .collect(),
            port_search: port_search(node, peer, now),
            no_direct_path: no_direct_path(node, peer, now),
        },
        traffic: traffic(&peer.counters),
        devices: devices(node, peer),
    }
}

fn devices(node: &Node, peer: &Peer) -> Vec<PeerDevice> {
    let mesh = node.mesh.as_ref();
    let Some(member) = mesh.and_then(|mesh| mesh.members.get(&peer.public_key)) else {
        return Vec::new();
    };
    let devices = member.devices.iter().map(|device| PeerDevice {
        name: device.party(&member.name).full_name().to_string(),
        addresses: device.addresses.clone(),
        tags: device.tags.iter().map(ToString::to_string).collect(),
    });
    devices.collect()
}

fn port_search(node: &Node, peer: &Peer, now: Now) -> Option<PortSearch> {
    let (birthday, sockets) = (&peer.birthday, &node.sockets.punch);
    let local_port = peer.path.endpoint;
    let local_port = local_port.and_then(|to| sockets.port_to(to, peer.id));
    let symmetric = node.tunnel.nat_mappings().is_symmetric();
    let punch = birthday.punch_state();
    let idle = punch == PunchState::Idle(None);
    let nothing = local_port.is_none() && birthday.probes() == 0 && !birthday.is_both_symmetric();
    if nothing && (idle || !symmetric) {
        return None;
    }
    Some(PortSearch {
        symmetric,
        open: match punch {
            PunchState::Open(ports) => ports,
            PunchState::Idle(_) | PunchState::Succeeded => 0,
        },
        openers: sockets.openers(),
        local_port,
        failed_attempts: birthday.failed_attempts(),
        next_s: match punch {
            PunchState::Idle(next) => next.filter(|_| symmetric),
            PunchState::Open(_) | PunchState::Succeeded => None,
        }
        .map(|next| next.duration_since(now.mono).as_secs()),
        trouble: sockets.trouble(peer.id).map(str::to_owned),
        both_symmetric: birthday.is_both_symmetric(),
        probes: birthday.probes(),
        probing: birthday.is_probing(now.mono),
    })
}

fn no_direct_path(node: &Node, peer: &Peer, now: Now) -> Option<NoDirectPath> {
    let mesh = node.mesh.as_ref()?;
    let tries = peer.paths.direct_tries();
    let is_direct = node.tunnel.reached(peer.id, now.mono) == Reachability::Direct;
    if is_direct || tries == 0 || !mesh.members.contains_key(&peer.public_key) {
        return None;
    }
    let candidates = || peer.paths.candidates().iter();
    let mut signalled = candidates().filter(|c| c.kind == paths::CandidateKind::Signalled);
    Some(NoDirectPath {
        tries,
        has_addresses: signalled.clone().next().is_some(),
        peer_behind_nat: signalled.any(|c| peer.paths.is_behind_nat(c.address)),
        relay: !mesh.relays.is_empty()
            || candidates().any(|c| c.kind == paths::CandidateKind::Relayed),
    })
}

/// Returns the TURN server by which an address is reached, if any.
fn turn(node: &Node, peer: &Peer, address: SocketAddr) -> Option<TurnPath> {
    let mesh = node.mesh.as_ref()?;
    match node.transports.target(address) {
        Some(ProxyTarget::Turn { server, to }) => {
            let server = Some(server);
            return Some(TurnPath { to, server });
        }
        Some(ProxyTarget::Relay { .. }) => return None,
        None => {}
    }
    let member = mesh.members.get(&peer.public_key)?;
    let (to, server) = (address, None);
    member
        .relayed
        .contains(&address)
        .then_some(TurnPath { to, server })
}

/// Returns the relay by which an address is reached over TLS, if any.
fn tls(node: &Node, address: SocketAddr) -> Option<TlsPath> {
    match node.transports.target(address)? {
        ProxyTarget::Relay { relay, to } => Some(TlsPath { to, relay }),
        ProxyTarget::Turn { .. } => None,
    }
}

fn candidate(
    candidate: &paths::Candidate,
    in_use: bool,
    turn: Option<TurnPath>,
    tls: Option<TlsPath>,
) -> Candidate {
    Candidate {
        address: candidate.address,
        kind: match candidate.kind {
            _ if turn.is_some() || tls.is_some() => CandidateKind::Relay,
            paths::CandidateKind::Signalled => CandidateKind::Signalled,
            paths::CandidateKind::PeerReflexive => CandidateKind::PeerReflexive,
            paths::CandidateKind::Relayed => CandidateKind::Relay,
        },
        turn,
        tls,
        state: match candidate.state {
            _ if in_use => CandidateState::InUse,
            paths::CheckState::Silent => CandidateState::Silent,
            paths::CheckState::Unchecked => CandidateState::Unchecked,
            paths::CheckState::Checking => CandidateState::Checking,
            paths::CheckState::Works { .. } => CandidateState::Works,
            paths::CheckState::NoRoute => CandidateState::NoRoute,
        },
        rtt_us: match candidate.state {
            paths::CheckState::Works { rtt } => Some(micros(rtt)),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_proto::time::Instant;

    #[test]
    fn a_peer_is_down_once_it_has_not_answered_for_15_seconds() {
        let waited = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(state(false, false, None), PeerState::NeverSeen);
        assert_eq!(state(false, false, waited(60)), PeerState::NeverSeen);
        assert_eq!(state(true, true, None), PeerState::Up);
        assert_eq!(state(true, true, waited(15)), PeerState::Up);
        assert_eq!(state(true, true, waited(16)), PeerState::Down);
        assert_eq!(state(true, false, waited(16)), PeerState::Down);
        assert_eq!(state(true, false, None), PeerState::Idle);
    }

    #[test]
    fn an_absent_peer_is_noticed_after_a_restart_too() {
        let waited = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(answers(false, None), None);
        assert_eq!(answers(false, waited(15)), None);
        assert_eq!(answers(false, waited(16)), Some(false));
        assert_eq!(answers(true, None), Some(true));
        assert_eq!(answers(true, waited(15)), Some(true));
        assert_eq!(answers(true, waited(16)), Some(false));
    }

    #[test]
    fn a_path_in_use_is_shown_as_such_after_silence() {
        let address: SocketAddr = "192.0.2.1:7".parse().unwrap();
        let mut paths = paths::Paths::default();
        paths.set_signalled(&[address]);
        paths.sent(Instant::BOOT);
        let late = Instant::BOOT + paths::SILENCE;
        paths.due(Some(address), late, &mut crate::system::SystemRandom);
        let shown = |in_use| candidate(&paths.candidates()[0], in_use, None, None).state;
        assert_eq!(shown(false), CandidateState::Silent);
        assert_eq!(shown(true), CandidateState::InUse);
    }
}
