//! Text of a peer: its paths, its candidates, and its traffic.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;

use seikan_mesh::nat::Nat;
use seikan_node::status::{
    Candidate, CandidateKind, CandidateState, Direction, NoDirectPath, Path, PeerState, PeerStatus,
    PortSearch, Repair, RepairState, Report, TlsPath, Traffic, TurnPath,
};
use seikan_proto::constants::REJECT_AFTER_TIME;

use crate::screen::{
    CYAN, DIM, GREEN, RED, RESET, Screen, YELLOW, bytes, duration, joined, number, printable,
    sentence,
};

/// Returns why no packets may come from a peer; `None` for a peer that answers, or to which nothing
/// was sent.
fn state(peer: &PeerStatus) -> Option<String> {
    let unanswered = peer.unanswered_s.filter(|seconds| *seconds > 0);
    let waited = unanswered.map(|seconds| format!("no answer for {}", duration(seconds)));
    match (peer.state?, waited) {
        (PeerState::Up | PeerState::Idle, _) => None,
        (PeerState::Down, waited) => {
            let waited = waited.unwrap_or_default();
            Some(format!("{RED}down{RESET}, {waited}"))
        }
        (PeerState::NeverSeen, None) => Some(format!("{YELLOW}never seen{RESET}")),
        (PeerState::NeverSeen, Some(waited)) => Some(format!("{RED}never seen{RESET}, {waited}")),
    }
}

/// Shows a peer; `nat` is this host's NAT.
pub fn peer(peer: &PeerStatus, nat: Nat, out: &mut Screen) {
    out.0.push('\n');
    out.title(
        YELLOW,
        "peer",
        peer.name.as_ref().unwrap_or(&peer.public_key),
    );
    if let Some(state) = state(peer) {
        out.line("state", state);
    }
    if peer.name.is_some() {
        out.line("public key", &peer.public_key);
    }
    if peer.has_preshared_key {
        out.line("preshared key", "(hidden)");
    }
    if let Some(endpoint) = peer.path.endpoint {
        let endpoint = describe_endpoint(endpoint, peer.path.turn.as_ref(), peer.path.tls.as_ref());
        out.line(
            "endpoint",
            match peer.path.relayed {
                Some(true) => format!("{endpoint}, {YELLOW}relayed{RESET}"),
                Some(false) => format!("{endpoint}, {GREEN}direct{RESET}"),
                None => endpoint,
            },
        );
    }
    out.line(
        "allowed ips",
        if peer.allowed_ips.is_empty() {
            "(none)".into()
        } else {
            peer.allowed_ips.join(", ")
        },
    );
    for device in &peer.devices {
        let name = printable(&device.name);
        out.line(
            "device",
            format!("{name}, {}", joined(&device.addresses, ", ")),
        );
    }
    if let Some(seconds) = peer.persistent_keepalive_s {
        out.line(
            "persistent keepalive",
            format!("every {}", duration(seconds)),
        );
    }
    match &peer.latest_handshake {
        Some(at) if at.age_s == 0 => out.line("latest handshake", "now"),
        Some(at) => out.line("latest handshake", format!("{} ago", duration(at.age_s))),
        None => {}
    }
    if let Some(refusal) = &peer.refusal {
        let refusal = printable(refusal);
        out.line("handshake refused", format!("{RED}{refusal}{RESET}"));
    }
    if let Some(cipher) = &peer.cipher {
        out.line("cipher", cipher);
    }
    let handshake = peer.latest_handshake.as_ref();
    if handshake.is_some_and(|at| at.age_s < REJECT_AFTER_TIME.as_secs()) {
        // While the peer is down, the figures of its path are outdated.
        if let Some(path) = path(&peer.path).filter(|_| peer.state != Some(PeerState::Down)) {
            out.line("path", path);
        }
        if let Some(repair) = &peer.path.repair {
            out.line("loss repair", self::repair(repair));
        }
    } else {
        // The figures are of a session that has expired, or of none.
        out.line("path", "not established");
    }
    // If there is no direct path, the candidates explain why.
    if peer.path.relayed != Some(false) {
        for candidate in &peer.path.candidates {
            let address = describe_endpoint(
                candidate.address,
                candidate.turn.as_ref(),
                candidate.tls.as_ref(),
            );
            out.line(&format!("  {address}"), self::candidate(candidate));
        }
    }
    if let Some(no_direct_path) = &peer.path.no_direct_path {
        let search = peer.path.port_search.as_ref();
        let both_symmetric = search.is_some_and(|search| search.both_symmetric);
        let obstacle = obstacle(no_direct_path, nat, both_symmetric);
        let tries = match no_direct_path.tries {
            1 => "1 try".to_owned(),
            tries => format!("{} tries", number(tries.into())),
        };
        out.line(
            "no direct path",
            format!("{YELLOW}{tries}{RESET}: {obstacle}"),
        );
        if !no_direct_path.relay {
            out.line("add a relay", ADD_RELAY);
        }
    }
    if let Some(search) = &peer.path.port_search {
        port_search(search, peer.path.relayed == Some(true), out);
    }
    if !peer.path.gso {
        let text = "off: the path drops packets by their position in a batch";
        out.line("segmentation offload", format!("{YELLOW}{text}{RESET}"));
    }
    traffic(&peer.traffic, out);
    peer_drops(&peer.traffic, out);
}

/// Advice on adding a relay to the mesh.
const ADD_RELAY: &str =
    "run `seikan relay` on a public host, and the command that `seikan relay secret` prints";

/// Returns what probably prevents a direct path.
fn obstacle(path: &NoDirectPath, nat: Nat, both_symmetric: bool) -> &'static str {
    match nat {
        _ if !path.has_addresses => "the peer has reported no address",
        _ if both_symmetric => "both ends are behind symmetric NATs",
        Nat::Silent => "no UDP answer reaches this host: a firewall or its network blocks it",
        Nat::Symmetric if path.peer_behind_nat => {
            "this host is behind a symmetric NAT and the peer behind a NAT: port probing needs a relay"
        }
        Nat::Symmetric => "this host is behind a symmetric NAT, and the peer does not answer",
        Nat::EndpointIndependent | Nat::Unknown if path.peer_behind_nat => {
            "both ends are behind NATs, and the packets of neither pass the other's"
        }
        Nat::EndpointIndependent | Nat::Unknown => {
            "this host is behind a NAT, and the peer does not answer"
        }
        Nat::Open | Nat::Untested if path.peer_behind_nat => {
            "the peer is behind a NAT and does not answer"
        }
        Nat::Open | Nat::Untested => "the peer is off, or a firewall at either end blocks it",
    }
}

/// Appends the counters of a proxied transport.
pub fn append_counters(received: u64, sent: u64, drops: &BTreeMap<String, u64>, text: &mut String) {
    let _ = write!(
        text,
        ", {} received, {} sent",
        number(received),
        number(sent)
    );
    for (reason, count) in drops {
        let _ = write!(text, ", {YELLOW}{}{RESET} {reason}", number(*count));
    }
}

/// Shows the port probing through symmetric NATs.
fn port_search(search: &PortSearch, relayed: bool, out: &mut Screen) {
    if let Some(port) = search.local_port {
        out.line(
            "port probing",
            format!("{GREEN}succeeded{RESET}, with local port {port}"),
        );
    }
    if !relayed {
        return;
    }
    if search.both_symmetric {
        let text = "impossible: both ends have symmetric NATs and need a relay";
        out.line("port probing", format!("{YELLOW}{text}{RESET}"));
    } else if search.symmetric {
        let open = match search.open {
            0 => String::new(),
            open => format!("{} sockets open, ", number(open.into())),
        };
        let attempts = match search.failed_attempts {
            0 => "no success yet".to_owned(),
            1 => "1 failed attempt".to_owned(),
            count => format!("{count} failed attempts"),
        };
        let next = match search.next_s {
            Some(seconds) => format!(", next in {}", duration(seconds)),
            None => String::new(),
        };
        out.line("port probing, NAT here", format!("{open}{attempts}{next}"));
    }
    if let Some(trouble) = &search.trouble {
        let trouble = printable(trouble);
        out.line("port probing failed", format!("{YELLOW}{trouble}{RESET}"));
    }
    if search.probes > 0 {
        let probes = number(search.probes);
        let state = if search.probing { ", in progress" } else { "" };
        out.line(
            "port probing, NAT at the peer",
            format!("{probes} probes{state}"),
        );
    }
}

pub fn traffic(traffic: &Traffic, out: &mut Screen) {
    let (received, sent) = (bytes(traffic.received_bytes), bytes(traffic.sent_bytes));
    out.line("transfer", format!("{received} received, {sent} sent"));
    let (inbound, outbound) = (&traffic.inbound, &traffic.outbound);
    let pending = inbound.pending + outbound.pending;
    let mut packets = format!(
        "{} received, {} sent",
        number(inbound.packets_out),
        number(outbound.packets_out)
    );
    if pending > 0 {
        let _ = write!(packets, ", {} waiting", number(pending));
    }
    out.line("packets", packets);
}

fn peer_drops(traffic: &Traffic, out: &mut Screen) {
    let directions = DIRECTIONS.map(|(label, pick)| (label, &pick(traffic).drops));
    if directions.iter().any(|(_, drops)| !drops.is_empty()) {
        out.heading("dropped");
    }
    for (label, drops) in directions {
        for (name, count) in drops {
            out.drop(*count, label, &sentence(name));
        }
    }
    unaccounted(traffic, out);
}

/// Shows packets that are in no counter: a defect of Seikan.
pub fn unaccounted(traffic: &Traffic, out: &mut Screen) {
    let sum = traffic.inbound.unaccounted + traffic.outbound.unaccounted;
    if sum != 0 {
        let text = format!("{RED}{sum} packets{RESET}: a defect of Seikan, please report it");
        out.line("unaccounted for", text);
    }
}

/// Selects one of the two directions.
pub type PickDirection = fn(&Traffic) -> &Direction;
pub const DIRECTIONS: [(&str, PickDirection); 2] =
    [("out", |t| &t.outbound), ("in", |t| &t.inbound)];

/// Returns an address, with the TURN server or the relay over TLS that carries it.
fn describe_endpoint(
    address: SocketAddr,
    turn: Option<&TurnPath>,
    tls: Option<&TlsPath>,
) -> String {
    if let Some(TlsPath { to, relay }) = tls {
        let relay = printable(relay);
        // Only the web proxy knows the relay's address.
        if to.ip().is_unspecified() {
            return format!("port {} of {relay} (TLS)", to.port());
        }
        return format!("{to} through {relay} (TLS)");
    }
    match turn {
        None => address.to_string(),
        Some(TurnPath { to, server }) => match server {
            Some(server) => format!("{to} through {} (TURN)", printable(server)),
            None => format!("{to} (TURN)"),
        },
    }
}

/// Returns the class and the check state of a candidate.
fn candidate(candidate: &Candidate) -> String {
    let kind = match candidate.kind {
        CandidateKind::Signalled => "direct",
        CandidateKind::PeerReflexive => "direct, peer-reflexive",
        CandidateKind::Relay => "relay",
    };
    let state = match candidate.state {
        CandidateState::InUse => format!("{GREEN}in use{RESET}"),
        CandidateState::Unchecked => format!("{DIM}not checked yet{RESET}"),
        CandidateState::Checking => format!("{DIM}checking{RESET}"),
        CandidateState::Works => format!("{GREEN}works{RESET}"),
        CandidateState::Silent if is_private(candidate.address) => {
            format!("{YELLOW}no answer{RESET}: a private address, perhaps of another network")
        }
        CandidateState::Silent => {
            format!("{YELLOW}no answer{RESET}: blocked by a NAT or firewall at either end")
        }
        CandidateState::NoRoute => format!("{YELLOW}no route{RESET} from this host"),
    };
    match candidate.rtt_us {
        Some(us) => format!("{kind}, {state}, {}", rtt(us)),
        None => format!("{kind}, {state}"),
    }
}

/// Returns whether an address is private (RFC 1918) or unique local (RFC 4193).
fn is_private(address: SocketAddr) -> bool {
    match address {
        SocketAddr::V4(v4) => v4.ip().is_private(),
        SocketAddr::V6(v6) => v6.ip().is_unique_local(),
    }
}

pub fn rtt(us: u64) -> String {
    if us < 100 {
        format!("< 0.1 {CYAN}ms{RESET}")
    } else {
        format!("{:.1} {CYAN}ms{RESET}", us as f64 / 1000.0)
    }
}

fn path(path: &Path) -> Option<String> {
    let mut parts = Vec::new();
    if let Some(us) = path.rtt_us {
        parts.push(format!("round trip {}", rtt(us)));
    }
    if let Some(mtu) = path.mtu {
        parts.push(format!("MTU {mtu}"));
    }
    if let Some(report) = &path.report {
        parts.push(self::report(report));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

fn report(report: &Report) -> String {
    let sent = f64::from(report.received) + f64::from(report.lost);
    let loss = 100.0 * f64::from(report.lost) / sent.max(1.0);
    let loss = match report.lost {
        0 => "no loss".into(),
        _ => format!("{RED}{loss:.2}%{RESET} lost"),
    };
    let delay = f64::from(report.queueing_delay_us) / 1000.0;
    let mut text = format!("{loss}, queueing {delay:.2} {CYAN}ms{RESET}");
    if report.reordering > 0 {
        let _ = write!(text, ", reordered by up to {}", report.reordering);
    }
    if report.congestion_marks > 0 {
        let _ = write!(
            text,
            ", {} CE marks",
            number(report.congestion_marks.into())
        );
    }
    text
}

fn repair(repair: &Repair) -> String {
    let state = match repair.state {
        RepairState::Starting => "on for the first packets".into(),
        RepairState::NotNeeded => "not needed".into(),
        RepairState::Repairing => {
            let loss = 100.0 * repair.loss;
            format!("on, {RED}{loss:.2}%{RESET} lost at random")
        }
        RepairState::Congested => "off, the losses are those of a full queue".into(),
        RepairState::TooMuchLoss => format!("off, {RED}more than 8%{RESET} lost"),
    };
    let mut text = state;
    if repair.parity_sent > 0 {
        let _ = write!(text, "; {} parity records", number(repair.parity_sent));
    }
    if repair.restored + repair.not_restored > 0 {
        let (restored, not) = (number(repair.restored), number(repair.not_restored));
        let _ = write!(text, ", {restored} restored, {not} not");
    }
    if repair.held > 0 {
        let longest = repair.longest_hold_us as f64 / 1000.0;
        let held = number(repair.held);
        let _ = write!(
            text,
            "; {held} received ones held, {longest:.0} {CYAN}ms{RESET} at most"
        );
    }
    text
}
