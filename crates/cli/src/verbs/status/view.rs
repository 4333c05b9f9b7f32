//! Text of `seikan status`, in the layout of `wg show`: the interface, its peers, then the gateway.

use std::fmt::Write;

use seikan_mesh::event::Contact;
use seikan_mesh::names::DOMAIN;
use seikan_mesh::names::Found;
use seikan_mesh::nat::Nat;
use seikan_mesh::trust::Changed;
use seikan_node::status::{
    Candidate, CandidateKind, CandidateState, Capability, Device, Direction, MeshStatus,
    NoDirectPath, Path, PeerState, PeerStatus, PortSearch, RelayStatus, Repair, RepairState,
    Report, Socket, Status, TlsPath, Traffic, TurnPath, WebProxyStatus,
};
use seikan_proto::constants::REJECT_AFTER_TIME;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::screen::{
    CYAN, DIM, GREEN, RED, RESET, Screen, YELLOW, bytes, duration, number, printable, sentence,
};
use crate::verbs::gateway;

/// Returns the text; `verbose` adds the batches per system call.
pub fn render(status: &Status, verbose: bool) -> String {
    let mut out = Screen(String::new());
    interface(status, verbose, &mut out);
    let mut peers: Vec<_> = status.peers.iter().collect();
    // The latest handshake first, as in `wg show`.
    peers.sort_by_key(|peer| {
        let at = peer.latest_handshake.as_ref().map(|at| at.unix_s);
        (std::cmp::Reverse(at), &peer.public_key)
    });
    let nat = status.mesh.as_ref().map_or(Nat::Untested, |mesh| mesh.nat4);
    for peer in peers {
        self::peer(peer, nat, &mut out);
    }
    if let Some(gateway) = &status.gateway {
        out.0.push('\n');
        gateway::view::section(gateway, &mut out);
    }
    out.0
}

fn interface(status: &Status, verbose: bool, out: &mut Screen) {
    let interface = &status.interface;
    out.title(GREEN, "interface", &interface.name);
    let up = duration(interface.uptime_s as u64);
    out.line("protocol", format!("{}, up {up}", interface.protocol));
    if interface.mode != "ip" {
        out.line("mode", &interface.mode);
    }
    let key = interface.public_key.as_deref();
    out.line("public key", key.unwrap_or("(none)"));
    out.line("listening port", interface.listen_port);
    if let Some(mark) = interface.fwmark {
        out.line("fwmark", format!("{mark:#x}"));
    }
    out.line("device", device(&status.device));
    if let Some(userspace) = &status.userspace {
        super::userspace::section(userspace, out);
    }
    for (family, socket) in families(&status.sockets) {
        out.line(&format!("socket {family}"), self::socket(socket));
    }
    if let Some(mesh) = &status.mesh {
        out.line("mesh", self::mesh(mesh));
        if !mesh.reflexive.is_empty() {
            let reflexive: Vec<String> = mesh.reflexive.iter().map(ToString::to_string).collect();
            out.line("public endpoints", reflexive.join(", "));
        }
        if let Some(proxy) = &mesh.web_proxy {
            out.line("web proxy", web_proxy(proxy));
        }
        for (address, relay) in &mesh.relays {
            let text = match relay {
                RelayStatus::RttUs(us) => format!("{GREEN}answers{RESET}, {}", rtt(*us)),
                RelayStatus::TlsRttUs(us) => {
                    let mut text = format!(
                        "{GREEN}answers{RESET} {YELLOW}over TLS{RESET}, {}",
                        rtt(*us)
                    );
                    if let Some(stream) = mesh.streams.get(address) {
                        append_counters(stream.received, stream.sent, &stream.drops, &mut text);
                    }
                    text
                }
                RelayStatus::Refuses(reason) => format!("{YELLOW}{}{RESET}", printable(reason)),
            };
            out.line(&format!("relay {}", printable(address)), text);
        }
        for (address, turn) in &mesh.turn {
            let mut text = turn.transport.clone();
            let forwarded = &turn.forwarded;
            append_counters(
                forwarded.received,
                forwarded.sent,
                &forwarded.drops,
                &mut text,
            );
            let label = format!("TURN server {}", printable(address));
            out.line(&label, format!("relayed address {}, {text}", turn.relayed));
        }
        match &mesh.names {
            Some(Found::By(resolver)) => {
                let resolver = printable(resolver);
                out.line("DNS", format!("NAME.{DOMAIN}, through {resolver}"));
            }
            Some(Found::Off(reason)) => out.line("DNS", format!("off: {}", printable(reason))),
            None => {}
        }
        for (key, reason) in &mesh.refused {
            let reason = printable(reason);
            out.line(
                &format!("rejected member {key}"),
                format!("{RED}{reason}{RESET}"),
            );
        }
        if let Some(reason) = &mesh.devices_refused {
            let reason = printable(reason);
            out.line("devices", format!("{RED}refused{RESET}: {reason}"));
        }
        for (name, changed) in &mesh.changed_keys {
            let Changed { was, now, .. } = changed;
            let label = format!("key changed: {}", printable(name));
            let keys = format!("{now}, formerly {was}");
            let text = format!("{YELLOW}{keys}{RESET}; check it if unexpected");
            out.line(&label, text);
        }
    }
    if let Some(reason) = &interface.without_uapi {
        out.line("no socket for `wg`", printable(reason));
    }
    if let Some(log) = &interface.log {
        out.line("log", printable(&log.display().to_string()));
    }
    let restored = &interface.restored;
    if restored.count > 0 {
        let count = number(restored.count);
        let advice = "another program keeps removing them; tell it not to manage this interface";
        let text = if restored.contested {
            format!("{count} addresses, routes or rules, {RED}given up{RESET}: {advice}")
        } else {
            format!("{count} addresses, routes or rules that another program removed")
        };
        out.line("restored", text);
    }
    for (name, capability) in &interface.confinement {
        if !capability.present {
            let reason = capability.reason.as_deref().unwrap_or("not available");
            let label = format!("not confined: {}", printable(name));
            out.line(&label, format!("{YELLOW}{}{RESET}", printable(reason)));
        }
    }
    if status.peers.len() != 1 {
        traffic(&status.totals, out);
    }
    if verbose {
        let batches = &status.batches;
        let text = format!(
            "{:.1} packets read, {:.1} datagrams sent, {:.1} datagrams received, {:.1} packets written",
            batches.packets_per_read.mean,
            batches.datagrams_per_send.mean,
            batches.datagrams_per_receive.mean,
            batches.packets_per_write.mean
        );
        out.line("batches per system call", text);
    }
    if status.gso_fallbacks > 0 {
        let count = number(status.gso_fallbacks);
        out.line(
            "segmentation offload refused",
            format!("{count} times; those batches were sent without it"),
        );
    }
    interface_drops(status, out);
}

/// Returns the membership in one line.
fn mesh(mesh: &MeshStatus) -> String {
    let contact = match &mesh.contact {
        Contact::Starting => "connecting".to_owned(),
        Contact::Connected => format!("{GREEN}connected{RESET}"),
        Contact::Lost(reason) => {
            let reason = printable(reason);
            format!("{YELLOW}{reason}{RESET}; known members stay reachable")
        }
        Contact::Revoked => {
            return format!("{RED}removed from the mesh{RESET}; run `seikan leave`");
        }
    };
    let others = match mesh.members {
        1 => "1 other member".to_owned(),
        count => format!("{} other members", number(count as u64)),
    };
    format!("{}, {contact}, {others}", printable(&mesh.coordinator))
}

/// Returns a web proxy with the servers behind it.
pub fn web_proxy(proxy: &WebProxyStatus) -> String {
    let servers = printable(&proxy.servers.join(", "));
    format!("{}, to {servers}", printable(&proxy.address))
}

/// Shows drops by the kernel, and drops of packets without a peer.
fn interface_drops(status: &Status, out: &mut Screen) {
    let mut drops = Vec::new();
    if let Some(kernel) = &status.device.kernel {
        let (queue, stack) = (
            "The kernel dropped it before Seikan read it: the queue of the TUN device was full or closed.",
            "The kernel's network stack dropped it after Seikan wrote it.",
        );
        drops.push((kernel.tx_dropped, "out", queue));
        drops.push((kernel.rx_dropped, "in", stack));
    }
    drops.push((
        status.receive_queue_drops,
        "in",
        "The kernel dropped it before Seikan received it: the receive buffer of a socket was full.",
    ));
    drops.push((
        status.oversized_drops,
        "in",
        "The kernel dropped it before Seikan received it: it was longer than any datagram of a peer.",
    ));
    drops.push((
        status.malformed_drops,
        "in",
        "The kernel dropped it before Seikan received it: its type was unknown, or it was too short.",
    ));
    drops.push((
        status.flood_drops,
        "in",
        "The kernel dropped it before Seikan received it: a flood, and its source is no peer's endpoint.",
    ));
    let of_peers = |pick: fn(&Traffic) -> &Direction, name: &str| -> u64 {
        let all = status.peers.iter();
        all.filter_map(|peer| pick(&peer.traffic).drops.get(name))
            .sum()
    };
    let mut unattributed = Vec::new();
    for (label, pick) in DIRECTIONS {
        for (name, count) in &pick(&status.totals).drops {
            unattributed.push((count - of_peers(pick, name).min(*count), label, name));
        }
    }
    let any_kernel_drop = drops.iter().any(|(count, ..)| *count > 0);
    if any_kernel_drop || unattributed.iter().any(|(count, ..)| *count > 0) {
        out.heading("dropped, of no peer");
    }
    for (count, direction, sentence) in drops {
        if count > 0 {
            out.drop(count, direction, sentence);
        }
    }
    for (count, direction, name) in unattributed {
        if count > 0 {
            out.drop(count, direction, &sentence(name));
        }
    }
    unaccounted(&status.totals, out);
}

/// Returns why nothing may come from a peer; nothing about one that answers or was not asked.
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
fn peer(peer: &PeerStatus, nat: Nat, out: &mut Screen) {
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
        let addresses: Vec<_> = device.addresses.iter().map(ToString::to_string).collect();
        let name = printable(&device.name);
        out.line("device", format!("{name}, {}", addresses.join(", ")));
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
        // Figures of a path on which nothing comes back are from before.
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
    // Candidates explain why there is no direct path.
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

/// How to add a relay to the mesh.
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
fn append_counters(received: u64, sent: u64, drops: &BTreeMap<String, u64>, text: &mut String) {
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

/// Shows packets that are in no counter: a defect of Seikan.
fn unaccounted(traffic: &Traffic, out: &mut Screen) {
    let sum = traffic.inbound.unaccounted + traffic.outbound.unaccounted;
    if sum != 0 {
        let text = format!("{RED}{sum} packets{RESET}: a defect of Seikan, please report it");
        out.line("unaccounted for", text);
    }
}

type PickDirection = fn(&Traffic) -> &Direction;
const DIRECTIONS: [(&str, PickDirection); 2] = [("out", |t| &t.outbound), ("in", |t| &t.inbound)];

fn device(device: &Device) -> String {
    let mut parts = Vec::new();
    if let Some(mtu) = device.mtu {
        parts.push(format!("MTU {mtu}"));
    }
    if let Some(length) = device.queue_length {
        parts.push(format!("queue of {length} packets"));
    }
    parts.push(offloads(&device.capabilities));
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
    parts.push(offloads(&socket.capabilities));
    parts.join(", ")
}

/// Returns the missing offloads by reason, or "all offloads".
fn offloads(capabilities: &BTreeMap<String, Capability>) -> String {
    // Several queues are a choice, not an offload.
    let absent = capabilities
        .iter()
        .filter(|(name, c)| !c.present && *name != "multi_queue");
    let absent: Vec<_> = absent.collect();
    if absent.is_empty() {
        return "all offloads".into();
    }
    // Several are often missing for the same reason.
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, capability) in absent {
        let reason = capability.reason.as_deref().unwrap_or("not available");
        reasons.entry(reason).or_default().push(name);
    }
    let listed = reasons.iter().map(|(reason, names)| {
        let reason = printable(reason);
        format!("no {} {DIM}({reason}){RESET}", names.join(", "))
    });
    listed.collect::<Vec<_>>().join("; ")
}

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

fn rtt(us: u64) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::plain;

    #[test]
    fn the_text_has_every_value_once() {
        let json = include_str!("../../../../node/testdata/status.json");
        let screen = plain(&render(&serde_json::from_str(json).unwrap(), true));
        assert_eq!(screen, include_str!("screen.txt"));
    }

    #[test]
    fn a_peer_that_does_not_answer_is_named_and_its_former_path_is_not_shown() {
        let json = include_str!("../../../../node/testdata/status.json");
        let shown = |state, unanswered_s| {
            let mut status: Status = serde_json::from_str(json).unwrap();
            status.peers.truncate(1);
            status.peers[0].state = state;
            status.peers[0].unanswered_s = unanswered_s;
            plain(&render(&status, true))
        };
        let down = shown(Some(PeerState::Down), Some(26));
        assert!(
            down.contains("state: down, no answer for 26 seconds\n"),
            "{down}"
        );
        assert!(!down.contains("path: round trip"), "{down}");
        let never = shown(Some(PeerState::NeverSeen), Some(7));
        assert!(
            never.contains("state: never seen, no answer for 7 seconds\n"),
            "{never}"
        );
        let never = shown(Some(PeerState::NeverSeen), None);
        assert!(never.contains("state: never seen\n"), "{never}");
        for quiet in [Some(PeerState::Up), Some(PeerState::Idle), None] {
            let quiet = shown(quiet, Some(3));
            assert!(!quiet.contains("state:"), "{quiet}");
            assert!(quiet.contains("path: round trip"), "{quiet}");
        }
    }
}
