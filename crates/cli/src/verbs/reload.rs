//! `seikan reload`: applies a changed configuration to a running tunnel, as `wg syncconf` does.
//!
//! The daemon has no right to read the file. So this process compares the file with the running
//! state, which it reads from the socket for `wg` (the cross-platform interface of WireGuard), and
//! sends the differences there. Peers without a difference are not mentioned, and keep their
//! sessions.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use ipnet::IpNet;
use seikan_config::{Config, Overrides, PeerConfig, Table};
use seikan_node::control::{RuntimeDirs, ask};
use seikan_node::node::resolve;
use seikan_node::setup::routes::{self, Endpoints};
use seikan_node::userspace::adapt;
use seikan_sys::netlink::{Family, Netlink, Route, TABLE_MAIN};
use zeroize::Zeroizing;

use crate::output::{self, counted};
use uapi::Uapi;

#[cfg(test)]
mod tests;
mod uapi;

/// Size of buffers of keys, in bytes: some hundred peers.
const BUFFER: usize = 64 << 10;

/// Options of `reload`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan reload office           apply a changed /etc/seikan/office.toml\n  \
    sudo systemctl reload seikan@office    the same\n\n\
    SIGHUP to the process of a tunnel without a terminal does the same.\n\n\
    Applies the private key, the port, the firewall mark and the peers, as `wg syncconf` does. Peers that did not change \
    keep their sessions; a peer at another address than in the file is moved back until it sends. Routes of new allowed IPs \
    are added. Everything else takes effect at the next start: addresses, MTU, DNS, hooks, gateway and mesh. Until then, \
    routes of removed allowed IPs stay, without a peer; only names of endpoints that were there at the start are resolved \
    again; in a mesh, removed peers stay.")]
pub struct Arguments {
    /// Interface, or the file that it was started from
    #[arg(value_name = "IFACE|FILE", value_hint = ValueHint::AnyPath)]
    target: String,
}

/// Compares the file with the running tunnel, and applies the differences.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let parsed = seikan_config::load(&arguments.target, &Overrides::default());
    output::diagnostics(&parsed.diagnostics.without_notes());
    let Some(mut config) = parsed.config else {
        return Ok(ExitCode::FAILURE);
    };
    let interface = config.name.clone();
    let name = interface.as_str();
    let dirs = RuntimeDirs::for_client(Some(name));
    // A request to a tunnel that cannot be examined fails with the reason.
    if !dirs.is_running(name).unwrap_or(true) {
        bail!("cannot reload `{name}`: it is not running; `seikan up` starts it");
    }
    let status = ask::status(&dirs, name)?;
    let is_mesh = config.mesh.is_some() || status.mesh.is_some();
    let has_interface = status.userspace.is_none();
    if !has_interface {
        // Their warnings appeared at the start.
        config = adapt(&config, &mut |_| ())?;
    }
    let mut socket = Uapi::connect(&dirs.uapi(name))?;
    let running = Running::parse(&socket.ask("get=1\n\n")?)?;
    let endpoints = resolved(&config)?;
    let netlink = Netlink::open()?;
    if has_interface {
        refuse_loops(&config, &running, &endpoints, &netlink)?;
    }
    let changes = Changes::between(&config, &running, &endpoints, is_mesh);
    if !changes.request.is_empty() {
        socket.set(&changes.request)?;
    }
    let added = if has_interface {
        add_routes(&config, &running, &endpoints, &netlink)?
    } else {
        0
    };
    writeln!(io::stdout(), "{name}: {}", changes.describe(added))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the endpoints of the file, by key. An endpoint that cannot be resolved is left out with
/// a warning.
fn resolved(config: &Config) -> anyhow::Result<BTreeMap<String, SocketAddr>> {
    let mut endpoints = BTreeMap::new();
    for peer in &config.peers {
        let Some(endpoint) = &peer.endpoint else {
            continue;
        };
        match resolve(&endpoint.host, endpoint.port) {
            Ok(address) => {
                endpoints.insert(hex(peer.public_key.as_bytes()).to_string(), address);
            }
            Err(error) => writeln!(
                anstream::stderr(),
                "warning: {error}; this endpoint is not changed"
            )?,
        }
    }
    Ok(endpoints)
}

/// Refuses changes after which the tunnel's own datagrams would enter it: its marks and rules are
/// only set at a start.
fn refuse_loops(
    config: &Config,
    running: &Running,
    endpoints: &BTreeMap<String, SocketAddr>,
    netlink: &Netlink,
) -> anyhow::Result<()> {
    let name = &config.name;
    if config.fwmark.is_some_and(|mark| mark != running.fwmark) && running.fwmark != 0 {
        let mut rules = netlink.rules(Family::V4)?;
        rules.extend(netlink.rules(Family::V6)?);
        if rules.iter().any(|rule| rule.fwmark == Some(running.fwmark)) {
            bail!(
                "cannot change the firewall mark of {name} while it runs: rules use it; restart the tunnel"
            );
        }
    }
    if let Some((endpoint, prefix)) = swallowed(config, running, endpoints) {
        bail!(
            "cannot reload {name}: the endpoint {endpoint} is within the allowed IPs {prefix}, which needs rules that \
             are set only at a start; restart the tunnel"
        );
    }
    Ok(())
}

/// Returns an endpoint and the prefix that would route the tunnel's datagrams for it into the
/// tunnel, if the endpoint or the prefix is new. With a firewall mark, these datagrams have a route
/// of their own.
fn swallowed(
    config: &Config,
    running: &Running,
    endpoints: &BTreeMap<String, SocketAddr>,
) -> Option<(SocketAddr, IpNet)> {
    if running.fwmark != 0 || config.table == Table::Off {
        return None;
    }
    let had = running.peers.values().flat_map(|peer| &peer.allowed_ips);
    let had: BTreeSet<&IpNet> = had.collect();
    endpoints.iter().find_map(|(key, endpoint)| {
        let before = running.peers.get(key).and_then(|peer| peer.endpoint);
        let mut allowed = config.peers.iter().flat_map(|peer| &peer.allowed_ips);
        let swallows = |prefix: &&IpNet| {
            let is_new = before != Some(*endpoint) || !had.contains(prefix);
            is_new && prefix.contains(&endpoint.ip())
        };
        allowed.find(swallows).map(|prefix| (*endpoint, *prefix))
    })
}

/// The state of a running tunnel. Keys are in hexadecimal digits, as on the socket.
#[derive(Debug, Default)]
struct Running {
    private_key: Zeroizing<String>,
    listen_port: u16,
    fwmark: u32,
    peers: BTreeMap<String, RunningPeer>,
}

#[derive(Debug, Default)]
struct RunningPeer {
    preshared_key: Zeroizing<String>,
    endpoint: Option<SocketAddr>,
    keepalive: u16,
    allowed_ips: BTreeSet<IpNet>,
}

impl Running {
    /// Parses the answer to `get=1`.
    fn parse(text: &str) -> anyhow::Result<Running> {
        let mut running = Running::default();
        let mut peer = None;
        for line in text.lines() {
            let (key, value) = line
                .split_once('=')
                .context("the daemon's answer has a line without `=`")?;
            let invalid = || format!("the daemon's answer has an invalid line: {key}");
            if key == "public_key" {
                peer = Some(value.to_owned());
                running
                    .peers
                    .insert(value.to_owned(), RunningPeer::default());
                continue;
            }
            match peer.as_ref().and_then(|peer| running.peers.get_mut(peer)) {
                None => match key {
                    "private_key" => running.private_key = Zeroizing::new(value.to_owned()),
                    "listen_port" => running.listen_port = value.parse().with_context(invalid)?,
                    "fwmark" => running.fwmark = value.parse().with_context(invalid)?,
                    _ => {}
                },
                Some(peer) => match key {
                    "preshared_key" => peer.preshared_key = Zeroizing::new(value.to_owned()),
                    // A file cannot name an address with an interface (scope).
                    "endpoint" => peer.endpoint = value.parse().ok(),
                    "persistent_keepalive_interval" => {
                        peer.keepalive = value.parse().with_context(invalid)?;
                    }
                    "allowed_ip" => {
                        peer.allowed_ips
                            .insert(value.parse().with_context(invalid)?);
                    }
                    _ => {}
                },
            }
        }
        Ok(running)
    }
}

/// Differences between a file and a running tunnel.
#[derive(Debug, Default)]
struct Changes {
    /// Lines after `set=1`.
    request: Zeroizing<String>,
    device: Vec<&'static str>,
    added: usize,
    changed: usize,
    removed: usize,
}

impl Changes {
    /// Compares the file with the running tunnel. `endpoints` are the resolved endpoints of the
    /// file, by key.
    fn between(
        config: &Config,
        running: &Running,
        endpoints: &BTreeMap<String, SocketAddr>,
        is_mesh: bool,
    ) -> Changes {
        // Large enough for most requests: growing leaves copies of the keys in freed memory.
        let mut changes = Changes {
            request: Zeroizing::new(String::with_capacity(BUFFER)),
            ..Changes::default()
        };
        let private_key = hex(config.private_key.as_bytes());
        if private_key != running.private_key {
            changes.device("private key", "private_key", &private_key);
        }
        if let Some(port) = config
            .listen_port
            .filter(|port| *port != 0 && *port != running.listen_port)
        {
            changes.device("port", "listen_port", &port.to_string());
        }
        if let Some(mark) = config.fwmark.filter(|mark| *mark != running.fwmark) {
            changes.device("firewall mark", "fwmark", &mark.to_string());
        }
        for peer in &config.peers {
            let key = hex(peer.public_key.as_bytes());
            let endpoint = endpoints.get(&*key).copied();
            let before = running.peers.get(&*key);
            let lines = peer_lines(peer, endpoint, before);
            match before {
                None => changes.added += 1,
                Some(_) if lines.is_empty() => continue,
                Some(_) => changes.changed += 1,
            }
            let _ = writeln!(changes.request, "public_key={}", *key);
            changes.request.push_str(&lines);
        }
        // Members of a mesh are peers as well, and not in the file.
        if !is_mesh {
            let public = |peer: &PeerConfig| hex(peer.public_key.as_bytes()).to_string();
            let kept: BTreeSet<String> = config.peers.iter().map(public).collect();
            for key in running.peers.keys().filter(|key| !kept.contains(*key)) {
                changes.removed += 1;
                let _ = writeln!(changes.request, "public_key={key}\nremove=true");
            }
        }
        changes
    }

    fn device(&mut self, name: &'static str, key: &str, value: &str) {
        self.device.push(name);
        let _ = writeln!(self.request, "{key}={value}");
    }

    fn describe(&self, routes: usize) -> String {
        let mut parts: Vec<String> = self
            .device
            .iter()
            .map(|name| format!("{name} changed"))
            .collect();
        let counts = [
            (self.added, "added"),
            (self.changed, "changed"),
            (self.removed, "removed"),
        ];
        for (count, verb) in counts.into_iter().filter(|(count, _)| *count > 0) {
            parts.push(format!("{} {verb}", counted(count, "peer")));
        }
        if routes > 0 {
            parts.push(format!("{} added", counted(routes, "route")));
        }
        if parts.is_empty() {
            return "nothing to change".to_owned();
        }
        parts.join(", ")
    }
}

/// Returns the lines that give a peer the settings of the file, whether the peer runs already or is
/// new.
fn peer_lines(
    peer: &PeerConfig,
    endpoint: Option<SocketAddr>,
    before: Option<&RunningPeer>,
) -> Zeroizing<String> {
    let mut lines = Zeroizing::new(String::new());
    let none = RunningPeer {
        preshared_key: hex(&[0; 32]),
        ..RunningPeer::default()
    };
    let before = before.unwrap_or(&none);
    let preshared_key = hex(peer
        .preshared_key
        .as_ref()
        .map_or(&[0; 32], |key| key.as_bytes()));
    if preshared_key != before.preshared_key {
        let _ = writeln!(lines, "preshared_key={}", *preshared_key);
    }
    if let Some(endpoint) = endpoint.filter(|endpoint| Some(*endpoint) != before.endpoint) {
        let _ = writeln!(lines, "endpoint={endpoint}");
    }
    let keepalive = peer.persistent_keepalive.unwrap_or(0);
    if keepalive != before.keepalive {
        let _ = writeln!(lines, "persistent_keepalive_interval={keepalive}");
    }
    let allowed: BTreeSet<IpNet> = peer.allowed_ips.iter().map(IpNet::trunc).collect();
    if allowed != before.allowed_ips {
        lines.push_str("replace_allowed_ips=true\n");
        for prefix in allowed {
            let _ = writeln!(lines, "allowed_ip={prefix}");
        }
    }
    lines
}

/// Adds the routes of allowed IPs that are missing. Returns their number.
fn add_routes(
    config: &Config,
    running: &Running,
    endpoints: &BTreeMap<String, SocketAddr>,
    netlink: &Netlink,
) -> anyhow::Result<usize> {
    let endpoints = planned(config, running, endpoints);
    let planned = routes::routes(config, &endpoints, netlink)?;
    let index = netlink.link(config.name.as_str())?.index;
    let mut there = netlink.all_routes(Family::V4)?;
    there.extend(netlink.all_routes(Family::V6)?);
    there.retain(|route| route.device == Some(index));
    let mut added = 0;
    let mut failures = Vec::new();
    for (prefix, table) in planned {
        // Default routes are in a table of their own.
        if there.iter().any(|route| route.destination == prefix) {
            continue;
        }
        if table != TABLE_MAIN && config.table != Table::Number(table) {
            failures.push(format!(
                "{prefix} (needs rules that are set only at a start)"
            ));
            continue;
        }
        match netlink.add_route(&Route::to(prefix).device(index).table(table)) {
            Ok(()) => added += 1,
            Err(error) => failures.push(format!("{prefix} ({error})")),
        }
    }
    if !failures.is_empty() {
        bail!(
            "the peers are as in the file, but there are no routes to {}",
            failures.join(", ")
        );
    }
    Ok(added)
}

/// Returns the endpoints for a plan of routes. A name that cannot be resolved now may be known to the tunnel, which
/// otherwise resolves it later.
fn planned(
    config: &Config,
    running: &Running,
    endpoints: &BTreeMap<String, SocketAddr>,
) -> Endpoints {
    let mut planned = Endpoints {
        addresses: endpoints.values().map(SocketAddr::ip).collect(),
        has_unknown: false,
    };
    for peer in config.peers.iter().filter(|peer| peer.endpoint.is_some()) {
        let key = hex(peer.public_key.as_bytes());
        if endpoints.contains_key(&*key) {
            continue;
        }
        // The name of a new peer is resolved by the next reload only.
        let Some(before) = running.peers.get(&*key) else {
            continue;
        };
        match before.endpoint {
            Some(endpoint) => planned.addresses.push(endpoint.ip()),
            None => planned.has_unknown = true,
        }
    }
    planned
}

/// A key in hexadecimal digits.
fn hex(key: &[u8; 32]) -> Zeroizing<String> {
    let mut digits = Zeroizing::new(String::with_capacity(64));
    for byte in key {
        let _ = write!(digits, "{byte:02x}");
    }
    digits
}
