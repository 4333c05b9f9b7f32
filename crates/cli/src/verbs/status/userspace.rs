//! The stack of a tunnel without root.

use seikan_node::status::{ExposedPort, ListeningPort, ServiceCounts, UserspaceStatus};

use crate::screen::{RESET, Screen, YELLOW, bytes, number, printable};

/// Labels of the services, in the order of the options.
const LABELS: [(&str, &str); 4] = [
    ("socks", "SOCKS5 proxy"),
    ("http", "HTTP proxy"),
    ("forward", "forwarded ports"),
    ("expose", "exposed ports"),
];

/// Shows the services with their counts.
pub fn section(userspace: &UserspaceStatus, out: &mut Screen) {
    let (packets_in, packets_out) = (number(userspace.packets_in), number(userspace.packets_out));
    out.line(
        "userspace",
        format!("no interface; {packets_in} packets in, {packets_out} out"),
    );
    for (service, label) in LABELS {
        let listening = userspace.listening.iter();
        let mut ports: Vec<String> = listening
            .filter(|port| port.service == service)
            .map(listening_port)
            .collect();
        if service == "expose" {
            ports.extend(userspace.exposed.iter().map(exposed_port));
        }
        if ports.is_empty() {
            continue;
        }
        let counts = userspace.services.get(service).copied();
        let counts = counts.unwrap_or_default();
        out.line(
            label,
            format!("{}; {}", ports.join(", "), self::counts(&counts)),
        );
    }
    for (reason, count) in &userspace.drops {
        let text = format!("{YELLOW}{}{RESET} {}", number(*count), printable(reason));
        out.line("dropped by the stack", text);
    }
}

fn listening_port(port: &ListeningPort) -> String {
    let own = format!("{}{}", port.address, suffix(&port.transport));
    match &port.target {
        Some(target) => format!("{own} to {}", printable(target)),
        None => own,
    }
}

fn exposed_port(port: &ExposedPort) -> String {
    format!(
        "{}{} to {}",
        port.port,
        suffix(&port.transport),
        port.target
    )
}

/// The transport, as in the options.
fn suffix(transport: &str) -> String {
    match transport {
        "tcp" => String::new(),
        other => format!("/{}", printable(other)),
    }
}

fn counts(counts: &ServiceCounts) -> String {
    let ServiceCounts {
        open,
        accepted,
        refused,
        bytes_in,
        bytes_out,
    } = *counts;
    format!(
        "{} open, {} accepted, {} refused, {} received, {} sent",
        number(open),
        number(accepted),
        number(refused),
        bytes(bytes_in),
        bytes(bytes_out)
    )
}
