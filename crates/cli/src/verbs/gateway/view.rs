//! Text of a gateway: state, better settings, a table of devices, then their details.

use std::fmt::Write;

use seikan_node::status::Direction;
use seikan_node::status::gateway::{DeviceStatus, GatewayStatus, Responder, SideStatus, SlowSide};
use seikan_observe::DropReason;

use crate::screen::{
    Align, CYAN, DIM, GREEN, RED, RESET, Screen, Table, YELLOW, ago, bytes, joined, milliseconds,
    number, printable, sentence, width,
};

/// Maximum devices in the table of `seikan status`.
const MAX_ROWS: usize = 20;
/// Number of devices up to which all are shown in detail. If there are more, only those that need
/// attention are.
const MAX_DETAILS: usize = 8;
/// Loss from which it is coloured, as a fraction.
const COLOURED_LOSS: f64 = 0.005;

/// Shows a gateway in `seikan status`.
pub fn section(gateway: &GatewayStatus, out: &mut Screen) {
    out.title(GREEN, "gateway", &gateway.interface);
    head(gateway, out);
    let mut devices: Vec<_> = gateway.devices.iter().collect();
    if devices.len() > MAX_ROWS {
        // Show the devices with the latest frames.
        let age = |d: &DeviceStatus| d.last_seen_s.unwrap_or(f64::INFINITY);
        devices.sort_by(|a, b| age(a).total_cmp(&age(b)));
        devices.truncate(MAX_ROWS);
    }
    table(gateway, &devices, out);
    let rest = gateway.devices.len() - devices.len();
    if rest > 0 {
        let _ = writeln!(
            out.0,
            "  {DIM}and {rest} more, see `seikan gateway status`{RESET}"
        );
    }
}

/// Shows a gateway in `seikan gateway status`.
pub fn full(tunnel: &str, gateway: &GatewayStatus, out: &mut Screen) {
    out.title(GREEN, "gateway", &gateway.interface);
    out.line("tunnel", printable(tunnel));
    head(gateway, out);
    let devices: Vec<_> = gateway.devices.iter().collect();
    out.0.push('\n');
    table(gateway, &devices, out);
    let mut detailed = devices;
    if detailed.len() > MAX_DETAILS {
        detailed.retain(|device| needs_attention(device));
    }
    for device in detailed {
        out.0.push('\n');
        self::device(device, gateway.responder.is_some(), out);
    }
}

fn head(gateway: &GatewayStatus, out: &mut Screen) {
    let mut mode = vec![gateway.mode.clone()];
    if let Some(responder) = &gateway.responder {
        mode.push(if responder.active {
            format!("{GREEN}active{RESET}")
        } else {
            format!("{YELLOW}standby{RESET}")
        });
    }
    mode.push(if gateway.up {
        format!("{GREEN}up{RESET}")
    } else {
        format!("{RED}down or without carrier{RESET}")
    });
    out.line("mode", mode.join(", "));
    if let Some(responder) = &gateway.responder {
        self::responder(responder, out);
    }
    let mut flows = format!("{} tracked", number(gateway.flows.known));
    if gateway.flows.evicted > 0 {
        let evicted = number(gateway.flows.evicted);
        let _ = write!(
            flows,
            ", {YELLOW}{evicted} evicted from the full table{RESET}"
        );
    }
    out.line("flows", flows);
    for conflict in &gateway.conflicts {
        let (mac, age) = (printable(&conflict.mac), ago(Some(conflict.age_s)));
        let text = format!(
            "{RED}{}{RESET} is also claimed by {mac}, last seen {age}",
            conflict.address
        );
        out.line("duplicate address", text);
    }
    let consumed = match gateway.unattributed.consumed {
        0 => String::new(),
        count => format!(
            ", {} of them ARP, neighbour discovery and similar",
            number(count)
        ),
    };
    no_device("of no device", &gateway.unattributed, "out", &consumed, out);
    no_device("refused", &gateway.refused, "in", " from the tunnel", out);
    advice(gateway, out);
}

fn responder(responder: &Responder, out: &mut Screen) {
    let per_read = &responder.frames_per_read;
    let mut text = printable(&responder.mac);
    if per_read.count > 0 {
        let _ = write!(text, ", {:.1} frames per read", per_read.mean);
    }
    out.line("responder", text);
    if let Some(second) = &responder.second {
        let text = match (second.present, second.active) {
            (true, true) => format!("{GREEN}active{RESET}"),
            (true, false) => "standby".into(),
            (false, _) => format!("{YELLOW}missing{RESET}: none takes over if this one fails"),
        };
        out.line("second gateway", text);
    }
    if let Some(reason) = &responder.without_gso {
        let reason = printable(reason);
        let text = format!("{YELLOW}done in software{RESET}: {reason}");
        out.line("segmentation offload", text);
    }
    if responder.gso_refused > 0 {
        let refused = number(responder.gso_refused);
        let text = format!(
            "{YELLOW}the NIC refused {refused} super-packets{RESET}, which were segmented in software"
        );
        out.line("segmentation offload", text);
    }
    if responder.lost > 0 {
        let lost = number(responder.lost);
        let text = format!("{RED}{lost}{RESET} frames: the queue of the packet socket was full");
        out.line("lost", text);
    }
    for (name, count) in &responder.own.drops {
        let (unsent, reason) = (number(*count), sentence(name));
        let text = format!("{RED}{unsent}{RESET} of its own frames: {reason}");
        out.line("not sent", text);
    }
}

/// Shows packets that belong to no device; `about` follows their number.
fn no_device(label: &str, of: &Direction, direction: &str, about: &str, out: &mut Screen) {
    if of.packets_in == 0 {
        return;
    }
    out.line(label, format!("{} packets{about}", number(of.packets_in)));
    for (name, count) in &of.drops {
        out.drop(*count, direction, &sentence(name));
    }
}

/// Shows better settings, with their commands.
fn advice(gateway: &GatewayStatus, out: &mut Screen) {
    for offloads in &gateway.offloads {
        if let Some(reason) = &offloads.unread {
            out.line("offloads unknown", printable(reason));
        }
    }
    let spread = gateway.spread.as_ref();
    let all_on = spread.and_then(|spread| Some((spread, spread.all_on?)));
    if gateway.findings().next().is_none() && all_on.is_none() {
        return;
    }
    out.heading("better settings");
    for finding in gateway.findings() {
        let _ = writeln!(
            out.0,
            "    {} of {} is {YELLOW}{}{RESET}: {CYAN}{}{RESET}\n      {DIM}{}{RESET}",
            printable(&finding.setting),
            printable(&finding.interface),
            printable(&finding.is),
            printable(&finding.command),
            printable(&finding.why)
        );
    }
    if let Some((spread, cpu)) = all_on {
        let total: f64 = spread.net_rx_per_s.iter().sum();
        let _ = writeln!(
            out.0,
            "    {YELLOW}all receive softirqs on one core{RESET}: CPU {cpu} handles {:.0} % of {} per second",
            100.0 * spread.share,
            number(total as u64)
        );
        let hint = if spread.commands.is_empty() {
            "RPS is on; a single flow stays on one core"
        } else {
            "to spread several flows over several cores:"
        };
        let _ = writeln!(out.0, "      {DIM}{hint}{RESET}");
        for command in &spread.commands {
            let _ = writeln!(out.0, "      {CYAN}{}{RESET}", printable(command));
        }
    }
}

fn table(gateway: &GatewayStatus, devices: &[&DeviceStatus], out: &mut Screen) {
    use Align::{Left, Right};
    if devices.is_empty() {
        let text = "no devices are configured; `seikan gateway discover` lists candidates";
        let _ = writeln!(out.0, "  {text}");
        return;
    }
    let mut table = Table::new(&[
        ("device", Left),
        ("last seen", Right),
        ("out", Right),
        ("in", Right),
        ("LAN: loss, RTT", Right),
        ("tunnel: loss, RTT", Right),
        ("slow side", Left),
        ("drops", Right),
    ]);
    for device in devices {
        let (outbound, inbound) = match (&device.rate, gateway.interval_s) {
            (Some(rate), Some(_)) => (per_second(rate.outbound), per_second(rate.inbound)),
            _ => (
                bytes(device.outbound.bytes_out),
                bytes(device.inbound.bytes_out),
            ),
        };
        let drops = drops(device);
        table.row(vec![
            format!("{YELLOW}{}{RESET}", printable(&device.name)),
            ago(device.last_seen_s),
            outbound,
            inbound,
            loss_and_rtt(&device.lan_side),
            loss_and_rtt(&device.tunnel_side),
            slow(device.slow_side).into(),
            match drops {
                _ if has_only_expected_drops(device) => number(drops),
                _ => format!("{RED}{}{RESET}", number(drops)),
            },
        ]);
    }
    table.write(out);
}

fn device(device: &DeviceStatus, has_frames: bool, out: &mut Screen) {
    out.title(YELLOW, "device", &device.name);
    let mut mac = device
        .mac
        .as_deref()
        .map_or("unknown yet".into(), printable);
    if let Some(vlan) = device.vlan {
        let _ = write!(mac, ", VLAN {vlan}");
    }
    // If the kernel forwards, the gateway sees no MAC address.
    if has_frames || device.mac.is_some() {
        out.line("MAC", mac);
    }
    let list = |addresses: &[std::net::IpAddr]| {
        if addresses.is_empty() {
            format!("{DIM}unknown yet{RESET}")
        } else {
            joined(addresses, ", ")
        }
    };
    out.line("LAN addresses", list(&device.lan));
    if device.pending {
        let verb = "`seikan coordinator approve-device`";
        let text =
            format!("{YELLOW}none: not approved{RESET}; see {verb} on the coordinator's host");
        out.line("overlay addresses", text);
    } else {
        out.line("overlay addresses", list(&device.overlay));
    }
    let directions = [("out", &device.outbound), ("in", &device.inbound)];
    for (label, direction) in directions {
        let (size, packets) = (bytes(direction.bytes_out), number(direction.packets_out));
        let mut text = format!("{size} in {packets} packets");
        if label == "out"
            && let Some(factor) = device.gro_factor
        {
            let _ = write!(text, ", {factor:.1} merged per read (GRO)");
        }
        out.line(label, text);
    }
    for (name, side) in [
        ("LAN side", &device.lan_side),
        ("tunnel side", &device.tunnel_side),
    ] {
        if let Some(text) = self::side(side) {
            out.line(name, text);
        }
    }
    rules(device, out);
    if drops(device) > 0 {
        out.heading("dropped");
        for (label, direction) in directions {
            for (name, count) in &direction.drops {
                out.drop(*count, label, &sentence(name));
            }
        }
    }
}

fn rules(device: &DeviceStatus, out: &mut Screen) {
    for (direction, label, denied) in [
        ("from", "allowed to the device", device.denied.from),
        ("to", "allowed from the device", device.denied.to),
    ] {
        let rules: Vec<_> = device
            .rules
            .iter()
            .filter(|rule| rule.direction == direction)
            .collect();
        if rules.is_empty() {
            continue;
        }
        out.heading(label);
        for rule in rules {
            let rule_text = printable(&rule.rule);
            let flows = number(rule.flows);
            let text = format!("{direction} {rule_text}");
            let plural = if rule.flows == 1 { "" } else { "s" };
            let _ = writeln!(
                out.0,
                "    {flows:>9} flow{plural:<1}  {}",
                text.trim_start()
            );
        }
        if denied > 0 {
            let plural = if denied == 1 { "" } else { "s" };
            let _ = writeln!(
                out.0,
                "    {RED}{:>9}{RESET} packet{plural} denied: no rule allows them",
                number(denied)
            );
        }
    }
}

fn side(side: &SideStatus) -> Option<String> {
    let mut parts = Vec::new();
    if let Some(rtt) = side.rtt_us {
        let min = side.rtt_min_us.map(milliseconds).unwrap_or_default();
        parts.push(format!(
            "RTT {} {DIM}(min{RESET} {min}{DIM}){RESET}",
            milliseconds(rtt)
        ));
    }
    if side.segments > 0 {
        let (lost, all) = (number(side.lost), number(side.segments));
        parts.push(format!("{lost} of {all} TCP segments lost"));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Returns whether a device is shown in detail among many.
fn needs_attention(device: &DeviceStatus) -> bool {
    !has_only_expected_drops(device) || matches!(device.slow_side, SlowSide::Lan | SlowSide::Tunnel)
}

/// Returns whether all drops are of frames that belong to the LAN only.
fn has_only_expected_drops(device: &DeviceStatus) -> bool {
    let mut drops = device
        .outbound
        .drops
        .keys()
        .chain(device.inbound.drops.keys());
    drops.all(|name| name == DropReason::NotUnicast.name())
}

fn drops(device: &DeviceStatus) -> u64 {
    let all = [&device.outbound, &device.inbound].into_iter();
    all.flat_map(|direction| direction.drops.values()).sum()
}

fn loss_and_rtt(side: &SideStatus) -> String {
    let percent = format!("{:.2} %", 100.0 * side.loss);
    let loss = (side.segments > 0).then(|| {
        if side.loss >= COLOURED_LOSS {
            format!("{RED}{percent}{RESET}")
        } else {
            percent
        }
    });
    // Padded to the usual width, to align the losses.
    let rtt = side.rtt_us.map(milliseconds);
    let rtt = rtt.map(|text| format!("{}{text}", " ".repeat(7usize.saturating_sub(width(&text)))));
    match (loss, rtt) {
        (None, None) => format!("{DIM}-{RESET}"),
        (loss, rtt) => format!(
            "{} {}",
            loss.unwrap_or_else(|| "-".into()),
            rtt.unwrap_or_else(|| "      -".into())
        ),
    }
}

fn slow(side: SlowSide) -> &'static str {
    const LAN: &str = "\x1b[1;33mLAN\x1b[0m";
    const TUNNEL: &str = "\x1b[1;33mtunnel\x1b[0m";
    const UNKNOWN: &str = "\x1b[2m-\x1b[0m";
    match side {
        SlowSide::Lan => LAN,
        SlowSide::Tunnel => TUNNEL,
        SlowSide::Neither => "neither",
        SlowSide::Unknown => UNKNOWN,
    }
}

fn per_second(rate: f64) -> String {
    if rate < 0.5 {
        format!("{DIM}0{RESET}")
    } else {
        format!("{}{CYAN}/s{RESET}", bytes(rate.round() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::plain;

    fn golden() -> GatewayStatus {
        let json = include_str!("../../../../node/testdata/status.json");
        let status: seikan_node::status::Status = serde_json::from_str(json).unwrap();
        status.gateway.unwrap()
    }

    #[test]
    fn the_text_has_every_value_once() {
        let mut out = Screen(String::new());
        full("office", &golden(), &mut out);
        assert_eq!(plain(&out.0), include_str!("screen.txt"));
    }

    #[test]
    fn of_many_devices_the_latest_are_shown() {
        let mut gateway = golden();
        let device = gateway.devices[0].clone();
        gateway.devices = (0..30)
            .map(|n| DeviceStatus {
                name: format!("d{n}"),
                last_seen_s: (n % 2 == 1).then_some(f64::from(n)),
                ..device.clone()
            })
            .collect();
        let mut out = Screen(String::new());
        section(&gateway, &mut out);
        let text = plain(&out.0);
        assert!(
            text.contains("d29 ") && text.contains("and 10 more"),
            "{text}"
        );
    }
}
