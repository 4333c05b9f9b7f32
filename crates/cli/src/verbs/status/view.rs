//! A tunnel's status for people, laid out as `wg show` does: the interface, then its peers.
//!
//! Colours are always written; the stream takes them out where they are not wanted.

use std::fmt::Write;

use seikan_node::status::{
    Capability, Device, Direction, Path, PeerStatus, Report, Socket, Status, Traffic,
};
use seikan_observe::DropReason;
use std::collections::BTreeMap;

const RESET: &str = "\x1b[0m";
const BOLD: &str = "\x1b[1m";
const GREEN: &str = "\x1b[1;32m";
const YELLOW: &str = "\x1b[1;33m";
const RED: &str = "\x1b[1;31m";
const CYAN: &str = "\x1b[36m";
const DIM: &str = "\x1b[2m";

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
    out.0
}

struct Screen(String);

impl Screen {
    fn title(&mut self, colour: &str, kind: &str, name: &str) {
        let kind_colour = colour.replace("1;", "");
        // Writing to memory does not fail.
        let _ = writeln!(
            self.0,
            "{colour}{kind}{RESET}: {kind_colour}{}{RESET}",
            printable(name)
        );
    }

    fn line(&mut self, label: &str, text: impl std::fmt::Display) {
        let _ = writeln!(self.0, "  {BOLD}{label}{RESET}: {text}");
    }

    fn heading(&mut self, label: &str) {
        let _ = writeln!(self.0, "  {BOLD}{label}{RESET}:");
    }

    /// A count with the sentence behind it.
    fn drop(&mut self, count: u64, direction: &str, sentence: &str) {
        let _ = writeln!(
            self.0,
            "    {RED}{:>9}{RESET} {direction:<3}  {sentence}",
            number(count)
        );
    }
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
    if let Some(reason) = &interface.without_uapi {
        out.line("no socket for `wg`", printable(reason));
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
        out.line("endpoint", endpoint);
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
    if !peer.path.gso {
        let text = "off, the path loses by place in the batch";
        out.line("segmentation offload", format!("{YELLOW}{text}{RESET}"));
    }
    traffic(&peer.traffic, out);
    peer_drops(&peer.traffic, out);
}

fn traffic(traffic: &Traffic, out: &mut Screen) {
    let (received, sent) = (bytes(traffic.received_bytes), bytes(traffic.sent_bytes));
    out.line("transfer", format!("{received} received, {sent} sent"));
    let (inbound, outbound) = (&traffic.inbound, &traffic.outbound);
    let held = inbound.held + outbound.held;
    let mut packets = format!(
        "{} received, {} sent",
        number(inbound.packets_out),
        number(outbound.packets_out)
    );
    if held > 0 {
        let _ = write!(packets, ", {} waiting", number(held));
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

/// What a reason's name means; a newer instance may have others.
fn sentence(name: &str) -> String {
    let known = DropReason::ALL.iter().find(|reason| reason.name() == name);
    known.map_or_else(|| printable(name), |reason| reason.describe().into())
}

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

fn path(path: &Path) -> Option<String> {
    let mut parts = Vec::new();
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

/// Without what could move a terminal's cursor.
fn printable(text: &str) -> String {
    let shown = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    text.chars().map(shown).collect()
}

/// With separators.
fn number(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// As `wg` writes it.
fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = count as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} {CYAN}B{RESET}"),
        _ => format!("{size:.2} {CYAN}{}{RESET}", UNITS[unit]),
    }
}

/// As `wg` writes it: at most the two largest units, which is as exact as anybody needs it.
fn duration(seconds: u64) -> String {
    const UNITS: [(&str, u64); 4] = [
        ("day", 86_400),
        ("hour", 3_600),
        ("minute", 60),
        ("second", 1),
    ];
    let mut rest = seconds;
    let mut parts = Vec::new();
    for (name, length) in UNITS {
        let count = rest / length;
        rest %= length;
        if count > 0 {
            let plural = if count == 1 { "" } else { "s" };
            parts.push(format!("{count} {CYAN}{name}{plural}{RESET}"));
        }
    }
    parts.truncate(2);
    match parts.is_empty() {
        true => format!("0 {CYAN}seconds{RESET}"),
        false => parts.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(text: &str) -> String {
        anstream::adapter::strip_str(text).to_string()
    }

    #[test]
    fn sizes_and_times_are_written_as_wg_does() {
        assert_eq!(plain(&bytes(1023)), "1023 B");
        assert_eq!(plain(&bytes(1536)), "1.50 KiB");
        assert_eq!(plain(&bytes(5 << 30)), "5.00 GiB");
        assert_eq!(plain(&duration(0)), "0 seconds");
        assert_eq!(plain(&duration(61)), "1 minute, 1 second");
        assert_eq!(plain(&duration(86_400 + 7_200 + 5)), "1 day, 2 hours");
        assert_eq!(number(1_234_567), "1,234,567");
        assert_eq!(number(123), "123");
    }

    #[test]
    fn every_reason_has_its_sentence() {
        for reason in DropReason::ALL {
            assert_eq!(sentence(reason.name()), reason.describe());
        }
        assert_eq!(sentence("from_the_future"), "from_the_future");
    }

    #[test]
    fn a_screen_has_everything_and_tells_it_once() {
        let json = include_str!("../../../../node/testdata/status.json");
        let screen = plain(&render(&serde_json::from_str(json).unwrap()));
        assert_eq!(screen, include_str!("screen.txt"));
    }

    #[test]
    fn nothing_moves_the_cursor() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
