//! Text of `seikan status`, in the layout of `wg show`: the interface, its peers, then the gateway.

use seikan_mesh::event::Contact;
use seikan_mesh::names::DOMAIN;
use seikan_mesh::names::Found;
use seikan_mesh::nat::Nat;
use seikan_mesh::trust::Changed;
use seikan_node::status::{
    Capability, Device, Direction, MeshStatus, RelayStatus, Socket, Status, Traffic, WebProxyStatus,
};
use std::collections::BTreeMap;

use super::peer::{DIRECTIONS, append_counters, rtt, traffic, unaccounted};
use crate::screen::{
    DIM, GREEN, RED, RESET, Screen, YELLOW, bytes, duration, joined, number, printable, sentence,
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
        super::peer::peer(peer, nat, &mut out);
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
    if let Some(rate) = status.uplink_rate {
        let megabits = rate as f64 / 1e6;
        let delayed = number(status.delayed_datagrams);
        let text = format!("at most {megabits} Mbit/s, {delayed} datagrams waited");
        out.line("uplink", text);
    }
    if let Some(userspace) = &status.userspace {
        super::userspace::section(userspace, out);
    }
    for (family, socket) in families(&status.sockets) {
        out.line(&format!("socket {family}"), self::socket(socket));
    }
    if let Some(mesh) = &status.mesh {
        out.line("mesh", self::mesh(mesh));
        if !mesh.reflexive.is_empty() {
            out.line("public endpoints", joined(&mesh.reflexive, ", "));
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
            let label = format!("not confined: {}", printable(&name.replace('_', " ")));
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
    joined(listed, "; ")
}

#[cfg(test)]
mod tests {
    use seikan_node::status::PeerState;

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
