//! `seikan gateway discover`: listens on an interface with a packet socket of its own and lists who is heard.
//!
//! Nothing is sent and nothing is changed, but for `--promiscuous`, which ends with the socket.

use std::io::{self, Write};
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use seikan_node::control::{Places, ask};
use seikan_node::gateway::status::GatewayStatus;
use seikan_node::node::now;
use seikan_proto::gateway::neighbours::{CapturedFrame, NeighbourEntry, NeighbourTable};
use seikan_sys::netlink::{LinkInfo, Netlink};
use seikan_sys::packet::{Accept, PacketOptions, PacketSocket, VNET_HEADER_LEN};
use seikan_sys::poll::{Epoll, Interest};
use seikan_ui::{Interrupt, Progress, ProgressBar};
use seikan_wire::VnetHdr;
use seikan_wire::ethernet::Mac;
use serde::Serialize;

use crate::output::counted;
use crate::screen::{
    Align, BOLD, CYAN, DIM, RED, RESET, Screen, Table, YELLOW, ago, bytes, number,
};

/// Bytes of a frame that are looked at: every header that names a device.
const SNAP: u32 = 128;
/// How often the progress is shown and Ctrl-C noticed.
const TICK: Duration = Duration::from_millis(100);
/// Frames taken between two looks at the clock.
const FRAMES: usize = 256;

/// What `gateway discover` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan gateway discover eth1\n  \
    sudo seikan gateway discover eth1 --seconds 60 --toml >> /etc/seikan/office.toml\n\n\
    Listens only: who is silent is not found, so let devices do something, or wait longer. A switch \
    shows what is meant for everybody or for this host; --promiscuous shows more on a hub or a mirror port, \
    and VLANs that the card would leave out. Addresses behind a router are not listed as the router's.\n\
    Ctrl-C ends it early and prints what was heard. Needs CAP_NET_RAW.")]
pub struct Arguments {
    /// The interface of the local network
    #[arg(value_name = "INTERFACE")]
    interface: String,
    /// How long to listen
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Listen to frames for others, too
    #[arg(long)]
    promiscuous: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "toml")]
    json: bool,
    /// Print sections [[gateway.device]] for a configuration, of those that are not in it yet
    #[arg(long)]
    toml: bool,
}

/// Everything that was found out.
#[derive(Debug, Serialize)]
struct Found {
    /// The interface that was listened on.
    interface: String,
    /// Its own address.
    mac: Option<String>,
    /// Its prefixes.
    prefixes: Vec<String>,
    /// How long it was listened, in seconds.
    listened_s: f64,
    /// Who was heard.
    neighbours: Vec<FoundNeighbour>,
    /// Frames of cards for which there was no room.
    overflowed_frames: u64,
    /// Frames from which no card could be told.
    not_understood_frames: u64,
    /// Frames that the kernel could not queue for us.
    lost_frames: u64,
}

/// A card.
#[derive(Debug, Serialize)]
struct FoundNeighbour {
    mac: String,
    vlan: Option<u16>,
    addresses: Vec<IpAddr>,
    /// There are more addresses.
    has_more_addresses: bool,
    /// Its addresses for a configuration.
    lan: Vec<IpAddr>,
    /// Seconds before the end of listening.
    first_seen_s: f64,
    last_seen_s: f64,
    frames: u64,
    bytes: u64,
    /// Another card that has one of its addresses.
    shares_address_with: Option<String>,
    /// What it is to a gateway here.
    known: Option<Known>,
}

/// What a card is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Known {
    /// The interface itself.
    Own,
    /// A gateway's station.
    Responder,
    /// A configured device.
    Device(String),
}

/// Listens and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let failed = || format!("cannot listen on {}", arguments.interface);
    let netlink = Netlink::open().with_context(failed)?;
    let link = netlink.link(&arguments.interface).with_context(failed)?;
    let addresses = netlink.addresses(link.index).with_context(failed)?;
    let prefixes: Vec<_> = addresses.iter().map(|address| address.net).collect();
    if !(link.up && link.carrier) {
        anstream::eprintln!(
            "{YELLOW}warning{RESET}: {} is down or has no carrier: nothing can be heard",
            link.name
        );
    }
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let mut table = NeighbourTable::new(prefixes.clone());
    let begun = Instant::now();
    let lost = listen(arguments, &link, &interrupt, &mut table).with_context(failed)?;
    let gateways = gateways(&link);
    let neighbours = table.entries();
    let found = Found {
        interface: link.name.clone(),
        mac: own(&link).map(|mac| mac.to_string()),
        prefixes: prefixes.iter().map(ToString::to_string).collect(),
        listened_s: begun.elapsed().as_millis() as f64 / 1000.0,
        neighbours: neighbours
            .iter()
            .map(|card| describe(card, &table, &link, &gateways))
            .collect(),
        overflowed_frames: table.overflowed(),
        not_understood_frames: table.not_understood(),
        lost_frames: lost,
    };
    let mut stdout = anstream::AutoStream::auto(io::stdout()).lock();
    if arguments.json {
        let json = serde_json::to_string_pretty(&found).context("cannot write JSON")?;
        writeln!(stdout, "{json}")?;
    } else if arguments.toml {
        write!(stdout, "{}", sections(&found))?;
    } else {
        write!(stdout, "{}", render(&found))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Listens until the time is over or somebody has seen enough; frames that were lost.
fn listen(
    arguments: &Arguments,
    link: &LinkInfo,
    interrupt: &Interrupt,
    table: &mut NeighbourTable,
) -> anyhow::Result<u64> {
    let accept = Accept::Everything { snap_length: SNAP };
    let socket = PacketSocket::open(link.index, &PacketOptions::new(accept))?;
    // Without it the card leaves out what neighbours tell each other.
    socket.join_all_multicast()?;
    if arguments.promiscuous {
        socket.set_promiscuous(true)?;
    }
    let mut epoll = Epoll::new(1)?;
    epoll.add(&socket, 0, Interest::Read)?;
    let bar = ProgressBar::new();
    let begun = Instant::now();
    let length = Duration::from_secs(arguments.seconds.into());
    let mut buffer = [0; VNET_HEADER_LEN + SNAP as usize];
    loop {
        let elapsed = begun.elapsed();
        if elapsed >= length || interrupt.is_raised() {
            return Ok(socket.drops());
        }
        bar.show(Progress {
            fraction: elapsed.as_secs_f64() / length.as_secs_f64(),
            step: format!(
                "listening on {}, {} heard (Ctrl-C to end)",
                link.name,
                counted(table.len(), "card")
            ),
        });
        if let Err(error) = epoll.wait(Some(TICK.min(length - elapsed)))
            && error.kind() != io::ErrorKind::Interrupted
        {
            return Err(error.into());
        }
        for _ in 0..FRAMES {
            let received = match socket.receive(&mut buffer) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => continue,
                // Nothing more, or the interface is down, which may change.
                Err(_) => break,
            };
            let read = &buffer[..received.length];
            let (Ok(vnet), Some(frame)) = (VnetHdr::read(read), read.get(VNET_HEADER_LEN..)) else {
                continue;
            };
            let captured = CapturedFrame {
                frame,
                vnet,
                tci: received.vlan,
                length: received.frame_length,
            };
            table.observe(now().mono, &captured);
        }
    }
}

/// Gateways of this host on the interface, if they can be asked.
fn gateways(link: &LinkInfo) -> Vec<GatewayStatus> {
    let places = Places::default();
    let names = ask::running(&places).unwrap_or_default().into_iter();
    names
        .filter_map(|name| ask::status(&places, &name).ok()?.gateway)
        .filter(|gateway| gateway.interface == link.name)
        .collect()
}

fn describe(
    card: &NeighbourEntry,
    table: &NeighbourTable,
    link: &LinkInfo,
    gateways: &[GatewayStatus],
) -> FoundNeighbour {
    let now = now().mono;
    let shared = card.addresses.iter().find_map(|a| table.shares(card, *a));
    FoundNeighbour {
        mac: card.mac.to_string(),
        vlan: card.vlan,
        addresses: card.addresses.clone(),
        has_more_addresses: card.has_more,
        lan: card.lan(),
        first_seen_s: now.duration_since(card.first).as_millis() as f64 / 1000.0,
        last_seen_s: now.duration_since(card.last).as_millis() as f64 / 1000.0,
        frames: card.frames,
        bytes: card.bytes,
        shares_address_with: shared.map(|mac| mac.to_string()),
        known: known(card, link, gateways),
    }
}

fn known(card: &NeighbourEntry, link: &LinkInfo, gateways: &[GatewayStatus]) -> Option<Known> {
    let mac = card.mac.to_string();
    if own(link) == Some(card.mac) {
        return Some(Known::Own);
    }
    let responders = gateways
        .iter()
        .filter_map(|gateway| gateway.responder.as_ref());
    if responders.into_iter().any(|responder| responder.mac == mac) {
        return Some(Known::Responder);
    }
    let devices = gateways.iter().flat_map(|gateway| &gateway.devices);
    let device = devices.into_iter().find(|device| match &device.mac {
        Some(its) => device.vlan == card.vlan && *its == mac,
        None => {
            let has = |address| card.addresses.contains(address);
            device.vlan == card.vlan && device.lan.iter().any(has)
        }
    });
    device.map(|device| Known::Device(device.name.clone()))
}

fn own(link: &LinkInfo) -> Option<Mac> {
    link.mac().map(Mac)
}

fn render(found: &Found) -> String {
    use Align::{Left, Right};
    let mut out = Screen(String::new());
    let interface = match (&found.mac, found.prefixes.is_empty()) {
        (Some(mac), false) => format!("{} ({mac}, {})", found.interface, found.prefixes.join(", ")),
        (Some(mac), true) => format!("{} ({mac}, without an address)", found.interface),
        (None, _) => found.interface.clone(),
    };
    let neighbours = counted(found.neighbours.len(), "card");
    let seconds = found.listened_s;
    out.0 +=
        &format!("{BOLD}{neighbours}{RESET} heard in {seconds:.1} {CYAN}s{RESET} on {interface}\n");
    let mut table = Table::new(&[
        ("card", Left),
        ("VLAN", Right),
        ("addresses", Left),
        ("first seen", Right),
        ("last seen", Right),
        ("frames", Right),
        ("bytes", Right),
        ("", Left),
    ]);
    for card in &found.neighbours {
        let mut addresses: Vec<_> = card.addresses.iter().map(ToString::to_string).collect();
        if card.has_more_addresses {
            addresses.push("…".into());
        }
        table.row(vec![
            format!("{YELLOW}{}{RESET}", card.mac),
            card.vlan.map_or_else(String::new, |vlan| vlan.to_string()),
            match addresses.is_empty() {
                true => format!("{DIM}none told{RESET}"),
                false => addresses.join(", "),
            },
            ago(Some(card.first_seen_s)),
            ago(Some(card.last_seen_s)),
            number(card.frames),
            bytes(card.bytes),
            remark(card),
        ]);
    }
    if !found.neighbours.is_empty() {
        table.write(&mut out);
    }
    for (count, text) in [
        (
            found.lost_frames,
            "frames were lost: more came than could be looked at",
        ),
        (
            found.overflowed_frames,
            "frames of further cards: the table is full",
        ),
    ] {
        if count > 0 {
            out.0 += &format!("{RED}{}{RESET} {text}\n", number(count));
        }
    }
    out.0 += &match found.neighbours.iter().any(|card| card.known.is_none()) {
        true => format!("{DIM}`--toml` prints them as devices for a configuration.{RESET}\n"),
        false if found.neighbours.is_empty() => format!(
            "{DIM}Who is silent is not found: let devices do something, or listen longer \
             (`--seconds 60`).{RESET}\n"
        ),
        false => String::new(),
    };
    out.0
}

fn remark(card: &FoundNeighbour) -> String {
    if let Some(other) = &card.shares_address_with {
        return format!("{RED}duplicate address: {other} has it, too{RESET}");
    }
    match &card.known {
        None => String::new(),
        Some(Known::Own) => format!("{DIM}this host{RESET}"),
        Some(Known::Responder) => format!("{DIM}the gateway's responder{RESET}"),
        Some(Known::Device(name)) => {
            format!("device {YELLOW}{}{RESET}", crate::screen::printable(name))
        }
    }
}

/// Sections of a configuration, of cards that a gateway does not know yet.
fn sections(found: &Found) -> String {
    let mut text = format!("# Heard on {}.\n", found.interface);
    let mut names: Vec<String> = Vec::new();
    for card in found.neighbours.iter().filter(|card| card.known.is_none()) {
        let mut name = name(card);
        if names.contains(&name) {
            name = format!("{name}-{}", names.len() + 1);
        }
        text += &format!(
            "\n[[gateway.device]]\nname = \"{name}\"\nmac = \"{}\"\n",
            card.mac
        );
        if let Some(vlan) = card.vlan {
            text += &format!("vlan = {vlan}\n");
        }
        let lan: Vec<_> = card
            .lan
            .iter()
            .map(|address| format!("\"{address}\""))
            .collect();
        if !lan.is_empty() {
            text += &format!("lan = [{}]", lan.join(", "));
            text += "    # leave it out where addresses change (DHCP): `mac` finds it\n";
        }
        if let Some(other) = &card.shares_address_with {
            text += &format!("# Duplicate address: {other} has one of these, too.\n");
        }
        text += "# overlay = [\"10.77.0.…\"]    # its addresses in the overlay; left out: as on the local network\n";
        names.push(name);
    }
    if names.is_empty() {
        text += "# Nobody who is not a device already.\n";
    }
    text
}

/// After its address, else after its card.
fn name(card: &FoundNeighbour) -> String {
    let v4 = card.lan.iter().find(|address| address.is_ipv4());
    match v4 {
        Some(address) => format!("device-{}", address.to_string().replace('.', "-")),
        None => {
            let digits: String = card.mac.chars().filter(|c| *c != ':').collect();
            format!("device-{}", digits.get(6..).unwrap_or(&digits))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::plain;

    fn card(mac: &str, lan: &[&str]) -> FoundNeighbour {
        let lan: Vec<IpAddr> = lan.iter().map(|text| text.parse().unwrap()).collect();
        FoundNeighbour {
            mac: mac.into(),
            vlan: None,
            addresses: lan.clone(),
            has_more_addresses: false,
            lan,
            first_seen_s: 9.5,
            last_seen_s: 0.5,
            frames: 1234,
            bytes: 2048,
            shares_address_with: None,
            known: None,
        }
    }

    fn found(neighbours: Vec<FoundNeighbour>) -> Found {
        Found {
            interface: "eth1".into(),
            mac: Some("02:00:00:00:00:01".into()),
            prefixes: vec!["192.168.1.1/24".into()],
            listened_s: 10.0,
            neighbours,
            overflowed_frames: 0,
            not_understood_frames: 0,
            lost_frames: 0,
        }
    }

    #[test]
    fn a_table_for_people() {
        let device = FoundNeighbour {
            known: Some(Known::Device("camera".into())),
            ..card("02:00:00:00:00:11", &["192.168.1.11"])
        };
        let unknown = card("02:00:00:00:00:10", &["192.168.1.10", "fd00:1::10"]);
        let text = plain(&render(&found(vec![unknown, device])));
        let expected = "\
2 cards heard in 10.0 s on eth1 (02:00:00:00:00:01, 192.168.1.1/24)
  card               addresses                 first seen  last seen  frames     bytes
  02:00:00:00:00:10  192.168.1.10, fd00:1::10    10 s ago        now   1,234  2.00 KiB
  02:00:00:00:00:11  192.168.1.11                10 s ago        now   1,234  2.00 KiB  device camera
`--toml` prints them as devices for a configuration.
";
        assert_eq!(text, expected);
    }

    #[test]
    fn what_is_printed_can_be_pasted() {
        let own = FoundNeighbour {
            known: Some(Known::Own),
            ..card("02:00:00:00:00:01", &["192.168.1.1"])
        };
        let tagged = FoundNeighbour {
            vlan: Some(7),
            ..card("02:00:00:00:00:12", &["192.168.7.10"])
        };
        let neighbours = vec![
            card("02:00:00:00:00:10", &["192.168.1.10", "fd00:1::10"]),
            own,
            tagged,
            card("02:00:00:a1:b2:c3", &[]),
        ];
        let text = format!(
            "private-key = \"{}\"\naddress = \"10.77.0.1/24\"\n[gateway]\ninterface = \"eth1\"\n{}",
            "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=",
            sections(&found(neighbours))
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gateway.toml");
        std::fs::write(&file, text).unwrap();
        let target = file.to_str().unwrap();
        let parsed = seikan_config::load(target, &seikan_config::Overrides::default());
        let gateway = parsed.into_result().unwrap().0.gateway.unwrap();
        let names: Vec<_> = gateway.devices.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "device-192-168-1-10",
                "device-192-168-7-10",
                "device-a1b2c3"
            ]
        );
    }
}
