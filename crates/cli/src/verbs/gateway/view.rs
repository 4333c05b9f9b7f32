//! A gateway for people: what it is, a table of its devices, what should be set otherwise, then the details.

use std::fmt::Write;

use seikan_node::gateway::status::{DeviceStatus, GatewayStatus, LegStatus, SlowLeg, Station};
use seikan_node::status::Direction;
use seikan_observe::DropReason;

use crate::screen::{
    Align, CYAN, DIM, GREEN, RED, RESET, Screen, Table, YELLOW, ago, bytes, milliseconds, number,
    printable, sentence,
};

/// Devices in the table of `seikan status`.
const MAX_ROWS: usize = 20;
/// Devices up to which all of them are told in detail.
const MAX_DETAILS: usize = 8;
/// Loss that is worth a colour, as a share.
const LOSS: f64 = 0.005;

/// The gateway in `seikan status`.
pub fn section(gateway: &GatewayStatus, out: &mut Screen) {
    out.title(GREEN, "gateway", &gateway.interface);
    head(gateway, out);
    let mut devices: Vec<_> = gateway.devices.iter().collect();
    if devices.len() > MAX_ROWS {
        // Those that were heard last.
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

/// The gateway in `seikan gateway status`.
pub fn whole(tunnel: &str, gateway: &GatewayStatus, out: &mut Screen) {
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
        self::device(device, out);
    }
}

fn head(gateway: &GatewayStatus, out: &mut Screen) {
    let mut mode = vec![gateway.mode.clone()];
    if let Some(station) = &gateway.station {
        mode.push(match station.active {
            true => format!("{GREEN}active{RESET}"),
            false => format!("{YELLOW}standing by{RESET}"),
        });
    }
    mode.push(match gateway.up {
        true => format!("{GREEN}up{RESET}"),
        false => format!("{RED}down, or without a carrier{RESET}"),
    });
    out.line("mode", mode.join(", "));
    if let Some(station) = &gateway.station {
        self::station(station, out);
    }
    let mut flows = format!("{} known", number(gateway.flows.known));
    if gateway.flows.evicted > 0 {
        let evicted = number(gateway.flows.evicted);
        let _ = write!(
            flows,
            ", {YELLOW}{evicted} forgotten for want of room{RESET}"
        );
    }
    out.line("flows", flows);
    for conflict in &gateway.conflicts {
        let (mac, age) = (printable(&conflict.mac), ago(Some(conflict.age_s)));
        let text = format!(
            "{RED}{}{RESET} is claimed by {mac}, too, heard {age}",
            conflict.address
        );
        out.line("duplicate address", text);
    }
    stray(&gateway.stray, out);
    advice(gateway, out);
}

fn station(station: &Station, out: &mut Screen) {
    let per_read = &station.frames_per_read;
    let mut text = printable(&station.mac);
    if per_read.count > 0 {
        let _ = write!(text, ", {:.1} frames per read", per_read.mean);
    }
    out.line("station", text);
    if let Some(second) = &station.second {
        let text = match (second.heard, second.active) {
            (true, true) => format!("{GREEN}active{RESET}"),
            (true, false) => "stands by".into(),
            (false, _) => format!("{YELLOW}is not heard{RESET}: nobody takes over"),
        };
        out.line("second gateway", text);
    }
    if let Some(reason) = &station.without_gso {
        let reason = printable(reason);
        let text = format!("{YELLOW}super-packets are cut up here{RESET}: {reason}");
        out.line("segmentation offload", text);
    }
    if station.gso_refused > 0 {
        let refused = number(station.gso_refused);
        let text = format!(
            "{YELLOW}the card refused {refused} super-packets{RESET}, which were cut up here"
        );
        out.line("segmentation offload", text);
    }
    if station.lost > 0 {
        let lost = number(station.lost);
        let text = format!("{RED}{lost}{RESET} frames: the kernel could not queue them for us");
        out.line("lost", text);
    }
}

/// What is of no device.
fn stray(stray: &Direction, out: &mut Screen) {
    if stray.packets_in == 0 {
        return;
    }
    let (all, consumed) = (number(stray.packets_in), number(stray.consumed));
    let text = format!("{all} packets, of which {consumed} ARP, neighbour discovery and the like");
    out.line("of no device", text);
    for (name, count) in &stray.drops {
        out.drop(*count, "out", &sentence(name));
    }
}

/// What should be set otherwise, with the commands.
fn advice(gateway: &GatewayStatus, out: &mut Screen) {
    for offloads in &gateway.offloads {
        if let Some(reason) = &offloads.unread {
            out.line("offloads unknown", printable(reason));
        }
    }
    let mut advice = Vec::new();
    for finding in gateway.findings() {
        let (interface, setting) = (printable(&finding.interface), printable(&finding.setting));
        advice.push((
            format!(
                "{interface}: {setting} is {YELLOW}{}{RESET}: {}",
                finding.is, finding.why
            ),
            vec![&finding.command],
        ));
    }
    if let Some(spread) = &gateway.spread
        && let Some(cpu) = spread.all_on
    {
        let total: f64 = spread.net_rx_per_s.iter().sum();
        let mut text = format!(
            "{YELLOW}all on one softirq core{RESET}: CPU {cpu} does {:.0} % of {} receive softirqs per second",
            100.0 * spread.share,
            number(total as u64)
        );
        if spread.commands.is_empty() {
            text += ", although packets are spread: a single flow stays on one";
        }
        advice.push((text, spread.commands.iter().collect()));
    }
    if advice.is_empty() {
        return;
    }
    out.heading("could be faster");
    for (text, commands) in advice {
        let _ = writeln!(out.0, "    {text}");
        for command in commands {
            let _ = writeln!(out.0, "      {CYAN}{}{RESET}", printable(command));
        }
    }
}

fn table(gateway: &GatewayStatus, devices: &[&DeviceStatus], out: &mut Screen) {
    use Align::{Left, Right};
    if devices.is_empty() {
        let text = "no devices are configured; `seikan gateway discover` lists who is there";
        let _ = writeln!(out.0, "  {text}");
        return;
    }
    let mut table = Table::new(&[
        ("device", Left),
        ("overlay", Left),
        ("last seen", Right),
        ("out", Right),
        ("in", Right),
        ("LAN loss", Right),
        ("RTT", Right),
        ("tunnel loss", Right),
        ("RTT", Right),
        ("slow leg", Left),
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
        let overlay = device.overlay.first();
        let drops = drops(device);
        table.row(vec![
            format!("{YELLOW}{}{RESET}", printable(&device.name)),
            overlay.map_or_else(String::new, ToString::to_string),
            ago(device.last_seen_s),
            outbound,
            inbound,
            loss(&device.lan_leg),
            rtt(&device.lan_leg),
            loss(&device.tunnel_leg),
            rtt(&device.tunnel_leg),
            slow(device.slow_leg).into(),
            match drops {
                _ if expected_only(device) => number(drops),
                _ => format!("{RED}{}{RESET}", number(drops)),
            },
        ]);
    }
    table.write(out);
}

fn device(device: &DeviceStatus, out: &mut Screen) {
    out.title(YELLOW, "device", &device.name);
    let mut card = device
        .mac
        .as_deref()
        .map_or("not found yet".into(), printable);
    if let Some(vlan) = device.vlan {
        let _ = write!(card, ", VLAN {vlan}");
    }
    out.line("card", card);
    let list = |addresses: &[std::net::IpAddr]| {
        let texts: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        match texts.is_empty() {
            true => format!("{DIM}not known yet{RESET}"),
            false => texts.join(", "),
        }
    };
    let (lan, overlay) = (list(&device.lan), list(&device.overlay));
    out.line(
        "addresses",
        format!("{lan} {DIM}here,{RESET} {overlay} {DIM}in the overlay{RESET}"),
    );
    let (sent, received) = (&device.outbound, &device.inbound);
    let mut transfer = format!(
        "{} in {} packets out, {} in {} packets in",
        bytes(sent.bytes_out),
        number(sent.packets_out),
        bytes(received.bytes_out),
        number(received.packets_out)
    );
    if let Some(factor) = device.gro_factor {
        let _ = write!(transfer, ", {factor:.1} packets joined per read");
    }
    out.line("transfer", transfer);
    for (name, leg) in [
        ("LAN leg", &device.lan_leg),
        ("tunnel leg", &device.tunnel_leg),
    ] {
        if let Some(text) = self::leg(leg) {
            out.line(name, text);
        }
    }
    rules(device, out);
    if drops(device) > 0 {
        out.heading("dropped");
        for (label, direction) in [("out", &device.outbound), ("in", &device.inbound)] {
            for (name, count) in &direction.drops {
                out.drop(*count, label, &sentence(name));
            }
        }
    }
}

fn rules(device: &DeviceStatus, out: &mut Screen) {
    for (direction, label, denied) in [
        ("from", "may be reached", device.denied.from),
        ("to", "may reach", device.denied.to),
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
            let (preposition, flows) = (
                if direction == "from" { "by" } else { "" },
                number(rule.flows),
            );
            let text = format!("{preposition} {rule_text}");
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

fn leg(leg: &LegStatus) -> Option<String> {
    let mut parts = Vec::new();
    if let Some(rtt) = leg.rtt_us {
        let least = leg.rtt_min_us.map(milliseconds).unwrap_or_default();
        parts.push(format!(
            "RTT {} {DIM}(least{RESET} {least}{DIM}){RESET}",
            milliseconds(rtt)
        ));
    }
    if leg.segments > 0 {
        let (lost, all) = (number(leg.lost), number(leg.segments));
        parts.push(format!("{lost} of {all} TCP segments lost"));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Worth the reader's time among many.
fn needs_attention(device: &DeviceStatus) -> bool {
    !expected_only(device) || matches!(device.slow_leg, SlowLeg::Lan | SlowLeg::Tunnel)
}

/// Nothing was dropped but what belongs to the local network.
fn expected_only(device: &DeviceStatus) -> bool {
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

fn loss(leg: &LegStatus) -> String {
    match leg.segments {
        0 => format!("{DIM}-{RESET}"),
        _ if leg.loss >= LOSS => format!("{RED}{:.2} %{RESET}", 100.0 * leg.loss),
        _ => format!("{:.2} %", 100.0 * leg.loss),
    }
}

fn rtt(leg: &LegStatus) -> String {
    leg.rtt_us
        .map_or_else(|| format!("{DIM}-{RESET}"), milliseconds)
}

fn slow(leg: SlowLeg) -> &'static str {
    const LAN: &str = "\x1b[1;33mLAN\x1b[0m";
    const TUNNEL: &str = "\x1b[1;33mtunnel\x1b[0m";
    const UNKNOWN: &str = "\x1b[2m-\x1b[0m";
    match leg {
        SlowLeg::Lan => LAN,
        SlowLeg::Tunnel => TUNNEL,
        SlowLeg::Neither => "neither",
        SlowLeg::Unknown => UNKNOWN,
    }
}

fn per_second(rate: f64) -> String {
    match rate < 0.5 {
        true => format!("{DIM}0{RESET}"),
        false => format!("{}{CYAN}/s{RESET}", bytes(rate.round() as u64)),
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
    fn a_screen_has_everything_and_tells_it_once() {
        let mut out = Screen(String::new());
        whole("office", &golden(), &mut out);
        assert_eq!(plain(&out.0), include_str!("screen.txt"));
    }

    #[test]
    fn of_many_devices_those_heard_last_are_shown() {
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
