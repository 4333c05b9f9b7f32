//! A tunnel's status for people, laid out as `wg show` does: the interface, its peers, then the gateway.

use std::fmt::Write;

use seikan_node::mesh::names::DOMAIN;
use seikan_node::mesh::{Changed, Contact};
use seikan_node::setup::names::Found;
use seikan_node::status::{
    Candidate, CandidateKind, CandidateState, Capability, Device, Direction, MeshStatus, Path,
    PeerStatus, PortSearch, RelayStatus, Report, Socket, Status, TlsPath, Traffic, TurnPath,
};
use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::screen::{
    CYAN, DIM, GREEN, RED, RESET, Screen, YELLOW, bytes, duration, number, printable, sentence,
};
use crate::verbs::gateway;

/// The screen.
pub fn render(status: &Status) -> String {
    let mut out = Screen(String::new());
    interface(status, &mut out);
    let mut peers: Vec<_> = status.peers.iter().collect();
    // The one that was heard from last comes first, as in `wg show`.
    peers.sort_by_key(|peer| {
        let at = peer.latest_handshake.as_ref().map(|at| at.unix_s);
        (std::cmp::Reverse(at), &peer.public_key)
    });
    for peer in peers {
        self::peer(peer, &mut out);
    }
    if let Some(gateway) = &status.gateway {
        out.0.push('\n');
        gateway::view::section(gateway, &mut out);
    }
    out.0
}

fn interface(status: &Status, out: &mut Screen) {
    let interface = &status.interface;
    out.title(GREEN, "interface", &interface.name);
    let up = duration(interface.uptime_s as u64);
    out.line("protocol", format!("{}, up {up}", interface.protocol));
    let key = interface.public_key.as_deref();
    out.line("public key", key.unwrap_or("(none)"));
    out.line("listening port", interface.listen_port);
    if let Some(mark) = interface.fwmark {
        out.line("fwmark", format!("{mark:#x}"));
    }
    out.line("device", device(&status.device));
    for (family, socket) in families(&status.sockets) {
        out.line(&format!("socket {family}"), self::socket(socket));
    }
    if let Some(mesh) = &status.mesh {
        out.line("mesh", self::mesh(mesh));
        if !mesh.reflexive.is_empty() {
            let seen: Vec<String> = mesh.reflexive.iter().map(ToString::to_string).collect();
            out.line("seen from outside as", seen.join(", "));
        }
        for (address, relay) in &mesh.relays {
            let rtt = |us: &u64| format!("{:.1} {CYAN}ms{RESET}", *us as f64 / 1000.0);
            let text = match relay {
                RelayStatus::RttUs(us) => format!("{GREEN}answers{RESET}, {}", rtt(us)),
                RelayStatus::TlsRttUs(us) => {
                    let mut text =
                        format!("{GREEN}answers{RESET} {YELLOW}by TLS{RESET}, {}", rtt(us));
                    if let Some(stream) = mesh.streams.get(address) {
                        forwarded(stream.received, stream.sent, &stream.drops, &mut text);
                    }
                    text
                }
                RelayStatus::Refuses(reason) => format!("{YELLOW}{}{RESET}", printable(reason)),
            };
            out.line(&format!("relay {}", printable(address)), text);
        }
        for (address, turn) in &mesh.turn {
            let mut text = turn.transport.clone();
            forwarded(turn.received, turn.sent, &turn.drops, &mut text);
            let label = format!("relayed as {}", turn.relayed);
            out.line(&label, format!("{text}, by {}", printable(address)));
        }
        match &mesh.names {
            Some(Found::By(by)) => out.line("names", format!("NAME.{DOMAIN} by {}", printable(by))),
            Some(Found::Off(reason)) => {
                out.line("names", format!("off, because {}", printable(reason)))
            }
            None => {}
        }
        for (key, reason) in &mesh.refused {
            let reason = printable(reason);
            out.line(&format!("no peer: {key}"), format!("{RED}{reason}{RESET}"));
        }
        for (name, changed) in &mesh.changed_keys {
            let Changed { was, now, .. } = changed;
            let label = format!("another key: {}", printable(name));
            out.line(&label, format!("{YELLOW}{now}, was {was}{RESET}"));
        }
    }
    if let Some(reason) = &interface.without_uapi {
        out.line("no socket for `wg`", printable(reason));
    }
    for (name, capability) in &interface.confinement {
        if !capability.present {
            let reason = capability.reason.as_deref().unwrap_or("not there");
            let label = format!("not confined: {}", printable(name));
            out.line(&label, format!("{YELLOW}{}{RESET}", printable(reason)));
        }
    }
    if status.peers.len() != 1 {
        traffic(&status.totals, out);
    }
    let batches = &status.batches;
    out.line(
        "per call",
        format!(
            "{:.1} packets read, {:.1} datagrams sent, {:.1} received, {:.1} packets written",
            batches.packets_per_read.mean,
            batches.datagrams_per_send.mean,
            batches.datagrams_per_receive.mean,
            batches.packets_per_write.mean
        ),
    );
    if status.gso_fallbacks > 0 {
        let count = number(status.gso_fallbacks);
        out.line(
            "segmentation offload refused",
            format!("{count} times, and sent without"),
        );
    }
    interface_drops(status, out);
}

/// Membership in one line.
fn mesh(mesh: &MeshStatus) -> String {
    let contact = match &mesh.contact {
        Contact::Starting => "not asked yet".to_owned(),
        Contact::Connected => format!("{GREEN}connected{RESET}"),
        Contact::Lost(reason) => format!(
            "{YELLOW}{}{RESET}; goes on with what it knows",
            printable(reason)
        ),
        Contact::Revoked => format!("{RED}this host is no member any more{RESET}"),
    };
    let others = match mesh.members {
        1 => "1 other member".to_owned(),
        count => format!("{} other members", number(count as u64)),
    };
    format!("{}, {contact}, {others}", printable(&mesh.coordinator))
}

/// What was lost around us, and what belongs to no peer.
fn interface_drops(status: &Status, out: &mut Screen) {
    let mut drops = Vec::new();
    if let Some(kernel) = &status.device.kernel {
        let (queue, stack) = (
            "The queue of the TUN device was full, or closed; the kernel dropped it before us.",
            "The kernel's network stack dropped what we handed over.",
        );
        drops.push((kernel.tx_dropped, "out", queue));
        drops.push((kernel.rx_dropped, "in", stack));
    }
    drops.push((
        status.receive_queue_drops,
        "in",
        "The receive buffer of a socket was full; the kernel dropped it before us.",
    ));
    drops.push((
        status.oversized_drops,
        "in",
        "Longer than any datagram that a peer sends; the kernel dropped it before us.",
    ));
    drops.push((
        status.malformed_drops,
        "in",
        "Not a datagram that a peer sends: unknown type, or too short. The kernel dropped it before us.",
    ));
    let of_peers = |pick: fn(&Traffic) -> &Direction, name: &str| -> u64 {
        let all = status.peers.iter();
        all.filter_map(|peer| pick(&peer.traffic).drops.get(name))
            .sum()
    };
    let mut stray = Vec::new();
    for (label, pick) in DIRECTIONS {
        for (name, count) in &pick(&status.totals).drops {
            stray.push((count - of_peers(pick, name).min(*count), label, name));
        }
    }
    let happened = drops.iter().any(|(count, ..)| *count > 0);
    if happened || stray.iter().any(|(count, ..)| *count > 0) {
        out.heading("dropped elsewhere");
    }
    for (count, direction, sentence) in drops {
        if count > 0 {
            out.drop(count, direction, sentence);
        }
    }
    for (count, direction, name) in stray {
        if count > 0 {
            out.drop(count, direction, &sentence(name));
        }
    }
    unaccounted(&status.totals, out);
}

fn peer(peer: &PeerStatus, out: &mut Screen) {
    out.0.push('\n');
    out.title(
        YELLOW,
        "peer",
        peer.name.as_ref().unwrap_or(&peer.public_key),
    );
    if peer.name.is_some() {
        out.line("public key", &peer.public_key);
    }
    if peer.has_preshared_key {
        out.line("preshared key", "(hidden)");
    }
    if let Some(endpoint) = peer.path.endpoint {
        let endpoint = place(endpoint, peer.path.turn.as_ref(), peer.path.tls.as_ref());
        out.line(
            "endpoint",
            match peer.path.relayed {
                Some(true) => format!("{endpoint}, {YELLOW}by a relay{RESET}"),
                Some(false) => format!("{endpoint}, {GREEN}direct{RESET}"),
                None => endpoint,
            },
        );
    }
    out.line(
        "allowed ips",
        match peer.allowed_ips.is_empty() {
            true => "(none)".into(),
            false => peer.allowed_ips.join(", "),
        },
    );
    if let Some(seconds) = peer.persistent_keepalive_s {
        out.line(
            "persistent keepalive",
            format!("every {}", duration(seconds)),
        );
    }
    match &peer.latest_handshake {
        Some(at) if at.age_s == 0 => out.line("latest handshake", "now"),
        Some(at) => out.line("latest handshake", format!("{} ago", duration(at.age_s))),
        None => out.line("latest handshake", format!("{RED}never{RESET}")),
    }
    if let Some(refusal) = &peer.refusal {
        let refusal = printable(refusal);
        out.line("handshake refused", format!("{RED}{refusal}{RESET}"));
    }
    if let Some(cipher) = &peer.cipher {
        out.line("cipher", cipher);
    }
    if let Some(path) = path(&peer.path) {
        out.line("path", path);
    }
    // Why there is nothing better; while a direct way is in use, nobody asks.
    if peer.path.relayed != Some(false) {
        for candidate in &peer.path.candidates {
            let at = place(
                candidate.address,
                candidate.turn.as_ref(),
                candidate.tls.as_ref(),
            );
            out.line(&format!("  {at}"), self::candidate(candidate));
        }
    }
    if let Some(search) = &peer.path.port_search {
        port_search(search, peer.path.relayed == Some(true), out);
    }
    if !peer.path.gso {
        let text = "off, the path loses by place in the batch";
        out.line("segmentation offload", format!("{YELLOW}{text}{RESET}"));
    }
    traffic(&peer.traffic, out);
    peer_drops(&peer.traffic, out);
}

/// What this host forwarded for itself, behind other text.
fn forwarded(received: u64, sent: u64, drops: &BTreeMap<String, u64>, text: &mut String) {
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

/// At which of many ports the two ends meet, or why at none yet.
fn port_search(search: &PortSearch, relayed: bool, out: &mut Screen) {
    if let Some(port) = search.met {
        out.line(
            "symmetric NAT here",
            format!("{GREEN}met{RESET} by a port of its own, {port}"),
        );
    }
    if !relayed {
        return;
    }
    if search.both_symmetric {
        let text = "at both ends: they need a relay";
        out.line("symmetric NATs", format!("{YELLOW}{text}{RESET}"));
    } else if search.symmetric {
        let open = match search.open {
            0 => String::new(),
            open => format!("{} ports open, the other end probes, ", number(open.into())),
        };
        let attempts = match search.fruitless {
            0 => "not met yet".to_owned(),
            1 => "not met in an attempt".to_owned(),
            some => format!("not met in {some} attempts"),
        };
        let next = match search.next_s {
            Some(seconds) => format!(", next in {}", duration(seconds)),
            None => String::new(),
        };
        out.line("symmetric NAT here", format!("{open}{attempts}{next}"));
    }
    if let Some(trouble) = &search.trouble {
        let trouble = printable(trouble);
        out.line("no ports opened", format!("{YELLOW}{trouble}{RESET}"));
    }
    if search.probes > 0 {
        let (probes, at_it) = (
            number(search.probes),
            if search.probing { ", going on" } else { "" },
        );
        out.line(
            "symmetric NAT there",
            format!("{probes} probes of its ports{at_it}"),
        );
    }
}

fn traffic(traffic: &Traffic, out: &mut Screen) {
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

/// Must never show; if it does, nobody may overlook it.
fn unaccounted(traffic: &Traffic, out: &mut Screen) {
    let sum = traffic.inbound.unaccounted + traffic.outbound.unaccounted;
    if sum != 0 {
        let text =
            format!("{RED}{sum} packets; this is a fault of Seikan, please report it{RESET}");
        out.line("unaccounted for", text);
    }
}

type Pick = fn(&Traffic) -> &Direction;
const DIRECTIONS: [(&str, Pick); 2] = [("out", |t| &t.outbound), ("in", |t| &t.inbound)];

fn device(device: &Device) -> String {
    let mut parts = Vec::new();
    if let Some(mtu) = device.mtu {
        parts.push(format!("MTU {mtu}"));
    }
    if let Some(length) = device.queue_length {
        parts.push(format!("queue of {length} packets"));
    }
    parts.push(abilities(&device.capabilities));
    parts.join(", ")
}

fn families(sockets: &[Socket]) -> impl Iterator<Item = (&'static str, &Socket)> {
    sockets.iter().map(|socket| match socket.address {
        Some(address) if address.is_ipv4() => ("IPv4", socket),
        _ => ("IPv6", socket),
    })
}

fn socket(socket: &Socket) -> String {
    let mut parts = Vec::new();
    if let (Some(receive), Some(send)) = (socket.receive_buffer, socket.send_buffer) {
        let (receive, send) = (bytes(receive as u64), bytes(send as u64));
        parts.push(format!("buffers {receive} in, {send} out"));
    }
    parts.push(abilities(&socket.capabilities));
    parts.join(", ")
}

/// What is there, in one word if it is all, and what is not, with the reason.
fn abilities(capabilities: &BTreeMap<String, Capability>) -> String {
    // More than one queue is a choice and no offload.
    let absent = capabilities
        .iter()
        .filter(|(name, c)| !c.present && *name != "multi_queue");
    let absent: Vec<_> = absent.collect();
    if absent.is_empty() {
        return "all offloads".into();
    }
    // Many things are often absent for the same reason.
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, capability) in absent {
        let reason = capability.reason.as_deref().unwrap_or("not there");
        reasons.entry(reason).or_default().push(name);
    }
    let listed = reasons.iter().map(|(reason, names)| {
        let reason = printable(reason);
        format!("no {} {DIM}({reason}){RESET}", names.join(", "))
    });
    listed.collect::<Vec<_>>().join("; ")
}

/// Where something is sent, and by which TURN server, or by which relay over TLS.
fn place(address: SocketAddr, turn: Option<&TurnPath>, tls: Option<&TlsPath>) -> String {
    if let Some(TlsPath { to, relay }) = tls {
        return format!("{to} of {} (TLS)", printable(relay));
    }
    match turn {
        None => address.to_string(),
        Some(TurnPath { to, server }) => match server {
            Some(server) => format!("{to} from {} (TURN)", printable(server)),
            None => format!("{to} (TURN)"),
        },
    }
}

/// A way and what became of it.
fn candidate(candidate: &Candidate) -> String {
    let kind = match candidate.kind {
        CandidateKind::Signalled => "direct",
        CandidateKind::PeerReflexive => "direct, as seen from here",
        CandidateKind::Relay => "relay",
    };
    let state = match candidate.state {
        CandidateState::InUse => format!("{GREEN}in use{RESET}"),
        CandidateState::Unchecked => format!("{DIM}not tried yet{RESET}"),
        CandidateState::Checking => format!("{DIM}asked{RESET}"),
        CandidateState::Works => format!("{GREEN}works{RESET}"),
        CandidateState::Silent if is_private(candidate.address) => {
            format!("{YELLOW}no answer{RESET}: a private address, of another network maybe")
        }
        CandidateState::Silent => {
            format!("{YELLOW}no answer{RESET}: a NAT or a firewall at either end lets nothing in")
        }
        CandidateState::NoRoute => format!("{YELLOW}this host has no route there{RESET}"),
    };
    match candidate.rtt_us {
        Some(us) => format!("{kind}, {state}, {:.1} {CYAN}ms{RESET}", us as f64 / 1000.0),
        None => format!("{kind}, {state}"),
    }
}

/// RFC 1918, RFC 4193.
fn is_private(address: SocketAddr) -> bool {
    match address {
        SocketAddr::V4(v4) => v4.ip().is_private(),
        SocketAddr::V6(v6) => v6.ip().is_unique_local(),
    }
}

fn path(path: &Path) -> Option<String> {
    let mut parts = Vec::new();
    if let Some(us) = path.rtt_us {
        parts.push(format!(
            "round trip {:.1} {CYAN}ms{RESET}",
            us as f64 / 1000.0
        ));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::plain;

    #[test]
    fn a_screen_has_everything_and_tells_it_once() {
        let json = include_str!("../../../../node/testdata/status.json");
        let screen = plain(&render(&serde_json::from_str(json).unwrap()));
        assert_eq!(screen, include_str!("screen.txt"));
    }
}
