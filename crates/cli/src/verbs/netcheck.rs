//! `seikan netcheck`: reports NAT type, reachability and relays of a member.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use seikan_config::InterfaceName;
use seikan_mesh::mapping::Protocol;
use seikan_mesh::nat::Nat;
use seikan_node::control::{RuntimeDirs, ask};
use seikan_node::status::{MeshStatus, PortMappingStatus, RelayStatus, Status};
use serde::Serialize;

use super::status::view::web_proxy;
use crate::output;
use crate::screen::{BOLD, CYAN, DIM, GREEN, RED, RESET, Screen, YELLOW, printable};

/// Options of `netcheck`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan netcheck                   report on the member of this host\n  \
    sudo seikan netcheck seikan0 --json    print the report as JSON\n\n\
    The daemon queries STUN servers every 25 s and when an address of this host changes: the coordinator, its \
    relays, and those of `stun` in the configuration. The command itself sends nothing.")]
pub struct Arguments {
    /// Interface [default: the only member that runs here]
    #[arg(value_name = "IFACE")]
    interface: Option<String>,
    /// Print JSON, as `mesh` in `seikan status --json`
    #[arg(long)]
    json: bool,
}

/// Report on a member of a mesh.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Check<'a> {
    /// Interface of the member.
    interface: &'a str,
    /// The mesh.
    mesh: &'a MeshStatus,
}

/// Prints the report of the daemon.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot check the network";
    let places = RuntimeDirs::for_client(arguments.interface.as_deref());
    let (name, mesh) = member(&places, arguments.interface.as_deref()).context(FAILED)?;
    if arguments.json {
        let check = Check {
            interface: &name,
            mesh: &mesh,
        };
        output::print_json(&check)?;
    } else {
        write!(output::stdout(), "{}", render(&name, &mesh))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the interface and the mesh of a member: the named one, or the only one.
fn member(places: &RuntimeDirs, name: Option<&str>) -> anyhow::Result<(String, MeshStatus)> {
    let of = |status: Status| status.mesh.map(|mesh| (status.interface.name, mesh));
    if let Some(name) = name {
        let name: InterfaceName = name.parse()?;
        let status = ask::status(places, name.as_str())?;
        return of(status).with_context(|| format!("`{name}` is not a member of a mesh"));
    }
    let running = ask::running(places)?;
    let mut members: Vec<_> = running
        .iter()
        .filter_map(|name| of(ask::status(places, name).ok()?))
        .collect();
    match (members.pop(), members.len()) {
        (Some(member), 0) => Ok(member),
        (None, _) => bail!("no member of a mesh runs here; run `seikan join`, or `seikan up`"),
        (Some(_), _) => bail!("several members run here; name an interface"),
    }
}

/// Returns the report on a member, for a terminal.
pub fn render(name: &str, mesh: &MeshStatus) -> String {
    let mut out = Screen(String::new());
    out.title(GREEN, "interface", name);
    for (family, nat) in [("IPv4", mesh.nat4), ("IPv6", mesh.nat6)] {
        let (kind, consequence) = explain(nat);
        out.line(family, kind);
        out.0.push_str(&format!("    {consequence}\n"));
    }
    match &mesh.port_mapping {
        Some(PortMappingStatus::Given(mapping)) => {
            let protocol = protocol(mapping.by);
            let text = format!("{GREEN}open{RESET} ({protocol}): {}", mapping.address);
            out.line("port mapping", text);
            out.0.push_str(
                "    All peers can reach this host there, also through a symmetric NAT.\n",
            );
        }
        Some(PortMappingStatus::Refused(reason)) => {
            let text = format!("{YELLOW}refused{RESET}: {}", printable(reason));
            out.line("port mapping", text);
        }
        None => {}
    }
    if let Some(proxy) = &mesh.web_proxy {
        out.line("web proxy", web_proxy(proxy));
    }
    out.heading("public endpoints");
    if mesh.stun.is_empty() {
        out.0.push_str("    no STUN server queried yet\n");
    }
    for view in &mesh.stun {
        let endpoint = match (view.seen, view.rtt_us) {
            (Some(endpoint), Some(us)) => format!("{endpoint}, {}", rtt(us)),
            (Some(endpoint), None) => endpoint.to_string(),
            (None, _) => format!("{YELLOW}no answer{RESET}"),
        };
        let (name, address) = (printable(&view.name), view.server.to_string());
        let server = if name == address {
            address
        } else {
            format!("{name} ({address})")
        };
        out.0
            .push_str(&format!("    reported by {server}: {endpoint}\n"));
    }
    out.heading("relays in use");
    if mesh.relays.is_empty() {
        out.0.push_str("    none needed\n");
    }
    for (address, relay) in &mesh.relays {
        let state = match relay {
            RelayStatus::RttUs(us) => format!("{GREEN}answers{RESET}, {}", rtt(*us)),
            RelayStatus::TlsRttUs(us) => {
                format!(
                    "{GREEN}answers{RESET} {YELLOW}over TLS{RESET}, {}",
                    rtt(*us)
                )
            }
            RelayStatus::Refuses(reason) => format!("{YELLOW}{}{RESET}", printable(reason)),
        };
        out.0
            .push_str(&format!("    {}: {state}\n", printable(address)));
    }
    out.0
}

fn protocol(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Pcp => "PCP",
        Protocol::NatPmp => "NAT-PMP",
        Protocol::Upnp => "UPnP",
    }
}

fn rtt(us: u64) -> String {
    format!("{:.1} {CYAN}ms{RESET}", us as f64 / 1000.0)
}

/// Returns the type of a NAT, and its consequence for paths.
fn explain(nat: Nat) -> (String, &'static str) {
    match nat {
        Nat::Untested => (
            format!("{DIM}not usable{RESET}"),
            "This host or every STUN server lacks a usable address of this family.",
        ),
        Nat::Silent => (
            format!("{RED}no STUN server answers{RESET}"),
            "UDP is blocked or unrouted. No direct paths; only relays over TLS and TURN servers over TCP work.",
        ),
        Nat::Open => (
            format!("{GREEN}no NAT{RESET}"),
            "All peers reach this host directly. Behind a stateful firewall, peers with a symmetric NAT need some seconds of port probing, on a relay meanwhile.",
        ),
        Nat::Unknown => (
            format!("{BOLD}NAT of unknown type{RESET}"),
            "The type needs a second STUN server: add a relay, or `stun` in the configuration.",
        ),
        Nat::EndpointIndependent => (
            format!(
                "{GREEN}NAT with endpoint-independent mapping{RESET} (one public port for all peers)"
            ),
            "Direct paths to all peers. Those with a symmetric NAT need some seconds of port probing, on a relay meanwhile.",
        ),
        Nat::Symmetric => (
            format!("{YELLOW}symmetric NAT{RESET} (another public port for each destination)"),
            "Direct paths to peers without NAT; to other peers after some seconds of port probing, on a relay meanwhile. If both NATs are symmetric, a relay is needed.",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::plain;

    #[test]
    fn the_report_has_every_value() {
        let json = include_str!("../../../node/testdata/status.json");
        let status: Status = serde_json::from_str(json).expect("a status");
        let screen = plain(&render("office", &status.mesh.expect("a mesh")));
        assert_eq!(screen, include_str!("netcheck.txt"));
    }
}
