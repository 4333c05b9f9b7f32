//! Parts about the host: versions, abilities of the kernel, network.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use nix::unistd::Uid;
use seikan_observe::path::{HostFacts, Unseen};
use seikan_sys::netlink::{Family, Netlink, Route};
use seikan_sys::{calls, discover};
use serde::Serialize;

use super::archive::{Content, Report};

/// Programs that Seikan or its guides use.
const PROGRAMS: [&str; 6] = ["ip", "journalctl", "nft", "resolvectl", "systemctl", "wg"];
/// Maximum number of routes in a report: a router may have a million.
const MAX_ROUTES: usize = 1000;
/// Routing table of this host's own addresses (`RT_TABLE_LOCAL`).
const TABLE_LOCAL: u32 = 255;

/// Adds the parts.
pub fn collect(report: &mut Report) {
    report.add(
        "host.json",
        "versions, abilities of the kernel, processors, settings",
        Content::json(&Host::read()),
    );
    report.add(
        "network.txt",
        "interfaces, addresses, routes and rules of this host",
        network().map(Content::Text),
    );
}

#[derive(Serialize)]
struct Host {
    seikan: &'static str,
    architecture: &'static str,
    distribution: Option<String>,
    /// The kernel's build; its release is in `facts`.
    kernel: Option<String>,
    is_root: bool,
    /// Effective capabilities of this process, as a bit mask (capabilities(7)).
    capabilities: Option<String>,
    has_tun: bool,
    can_count_calls: bool,
    /// Whether each program is in `PATH`.
    programs: BTreeMap<&'static str, bool>,
    /// As the doctor sees the host.
    facts: HostFacts,
    /// Facts that the doctor cannot read, with the reason.
    unseen: Vec<Unseen>,
}

impl Host {
    fn read() -> Host {
        let (facts, unseen) = discover::host();
        let line = |file: &str, start: &str| {
            let text = fs::read_to_string(file).ok()?;
            let line = text.lines().find_map(|line| line.strip_prefix(start))?;
            Some(line.trim().trim_matches('"').to_owned())
        };
        Host {
            seikan: env!("CARGO_PKG_VERSION"),
            architecture: std::env::consts::ARCH,
            distribution: line("/etc/os-release", "PRETTY_NAME="),
            kernel: line("/proc/sys/kernel/version", ""),
            is_root: Uid::effective().is_root(),
            capabilities: line("/proc/self/status", "CapEff:"),
            has_tun: Path::new("/dev/net/tun").exists(),
            can_count_calls: calls::can_be_counted(),
            programs: PROGRAMS.map(|name| (name, is_in_path(name))).into(),
            facts,
            unseen,
        }
    }
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Describes the network of this namespace, without MAC addresses.
fn network() -> anyhow::Result<String> {
    let netlink = Netlink::open()?;
    let links = netlink.links()?;
    let name = |index: u32| {
        let link = links.iter().find(|link| link.index == index);
        link.map_or_else(|| format!("#{index}"), |link| link.name.clone())
    };
    let mut text = "interfaces\n".to_owned();
    // Writing to a String cannot fail.
    for link in &links {
        let state = match (link.up, link.carrier) {
            (false, _) => "down",
            (true, false) => "up without carrier",
            (true, true) => "up",
        };
        let _ = writeln!(
            text,
            "  {}: {state}, kind \"{}\", MTU {}, queue {}",
            link.name, link.kind, link.mtu, link.tx_queue_len
        );
    }
    text.push_str("\naddresses\n");
    for address in netlink.all_addresses()? {
        let _ = writeln!(text, "  {}: {}", name(address.index), address.net);
    }
    for family in [Family::V4, Family::V6] {
        let mut routes = netlink.all_routes(family)?;
        routes.retain(|route| route.table != TABLE_LOCAL);
        let _ = writeln!(text, "\n{family} routes");
        for route in routes.iter().take(MAX_ROUTES) {
            let device = route.device.map(&name);
            let _ = writeln!(text, "  {}", describe(route, device.as_deref()));
        }
        if let Some(more) = routes.len().checked_sub(MAX_ROUTES).filter(|n| *n > 0) {
            let _ = writeln!(text, "  and {more} more");
        }
        let _ = writeln!(text, "\n{family} rules");
        for rule in netlink.rules(family)? {
            let _ = writeln!(text, "  {}: {rule}", rule.priority.unwrap_or(0));
        }
    }
    Ok(text)
}

fn describe(route: &Route, device: Option<&str>) -> String {
    let mut text = format!("{route}");
    if let Some(device) = device {
        let _ = write!(text, " by {device}");
    }
    if let Some(mtu) = route.mtu {
        let _ = write!(text, " MTU {mtu}");
    }
    let _ = write!(text, " ({:?})", route.kind);
    text
}
