//! `seikan netcheck`: what lies between this host and the other members of its mesh, as its daemon sees it.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use seikan_config::InterfaceName;
use seikan_node::control::{Places, ask};
use seikan_node::mesh::mapping::Protocol;
use seikan_node::mesh::nat::Nat;
use seikan_node::status::{MeshStatus, PortMappingStatus, RelayStatus, Status};
use serde::Serialize;

use crate::screen::{BOLD, CYAN, DIM, GREEN, RED, RESET, Screen, YELLOW, printable};

/// What `netcheck` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan netcheck                of the one member that runs here\n  \
    sudo seikan netcheck seikan0 --json for a program\n\n\
    The daemon asks STUN servers every 25 s, and whenever an address of this host changes: its coordinator, the relays that \
    the coordinator tells of, and those of `stun` in its configuration. Nothing is sent for this command.")]
pub struct Arguments {
    /// Interface; may be left out where one member runs
    #[arg(value_name = "IFACE")]
    interface: Option<String>,
    /// Print JSON: the same as `mesh` in `seikan status --json`
    #[arg(long)]
    json: bool,
}

/// Asks the daemon and explains what it says.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot check the network";
    let places = Places::default();
    let (name, mesh) = member(&places, arguments.interface.as_deref()).context(FAILED)?;
    let mut out = anstream::AutoStream::auto(std::io::stdout()).lock();
    if arguments.json {
        #[derive(Serialize)]
        struct Check<'a> {
            interface: &'a str,
            mesh: &'a MeshStatus,
        }
        let check = Check {
            interface: &name,
            mesh: &mesh,
        };
        let json = serde_json::to_string_pretty(&check).context("cannot write JSON")?;
        writeln!(out, "{json}")?;
    } else {
        write!(out, "{}", render(&name, &mesh))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The member of that name, or the only one that there is.
fn member(places: &Places, name: Option<&str>) -> anyhow::Result<(String, MeshStatus)> {
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
        (None, _) => bail!("no member of a mesh runs here: `seikan join` makes this host one"),
        (Some(_), _) => bail!("more than one member runs here: say which interface"),
    }
}

fn render(name: &str, mesh: &MeshStatus) -> String {
    let mut out = Screen(String::new());
    out.title(GREEN, "interface", name);
    for (family, nat) in [("IPv4", mesh.nat4), ("IPv6", mesh.nat6)] {
        let (short, meaning) = explained(nat);
        out.line(family, short);
        out.0.push_str(&format!("    {meaning}\n"));
    }
    match &mesh.port_mapping {
        Some(PortMappingStatus::Given(mapping)) => {
            let by = protocol(mapping.by);
            let said = format!("{GREEN}gives a port{RESET} ({by}): {}", mapping.address);
            out.line("router", said);
            out.0.push_str(
                "    Whoever reaches it there comes in, from behind a symmetric NAT, too.\n",
            );
        }
        Some(PortMappingStatus::Refused(reason)) => {
            out.line(
                "router",
                format!("{YELLOW}gives no port{RESET}: {}", printable(reason)),
            );
        }
        None => {}
    }
    out.heading("seen from outside");
    if mesh.stun.is_empty() {
        out.0.push_str("    no server was asked yet\n");
    }
    for view in &mesh.stun {
        let said = match (view.seen, view.rtt_us) {
            (Some(seen), Some(us)) => {
                format!("{seen} {DIM}after{RESET} {:.1} {CYAN}ms{RESET}", ms(us))
            }
            (Some(seen), None) => seen.to_string(),
            (None, _) => format!("{YELLOW}no answer{RESET}"),
        };
        let (name, server) = (printable(&view.name), view.server.to_string());
        let by = if name == server {
            server
        } else {
            format!("{name} ({server})")
        };
        out.0.push_str(&format!("    {by}: {said}\n"));
    }
    out.heading("relays in use lately");
    if mesh.relays.is_empty() {
        out.0.push_str("    none was needed\n");
    }
    for (address, relay) in &mesh.relays {
        let said = match relay {
            RelayStatus::RttUs(us) => {
                format!("{GREEN}answers{RESET} after {:.1} {CYAN}ms{RESET}", ms(*us))
            }
            RelayStatus::TlsRttUs(us) => {
                format!(
                    "{GREEN}answers{RESET} {YELLOW}by TLS{RESET} after {:.1} {CYAN}ms{RESET}",
                    ms(*us)
                )
            }
            RelayStatus::Refuses(reason) => format!("{YELLOW}{}{RESET}", printable(reason)),
        };
        out.0
            .push_str(&format!("    {}: {said}\n", printable(address)));
    }
    out.0
}

fn protocol(by: Protocol) -> &'static str {
    match by {
        Protocol::Pcp => "PCP",
        Protocol::NatPmp => "NAT-PMP",
        Protocol::Upnp => "UPnP",
    }
}

fn ms(us: u64) -> f64 {
    us as f64 / 1000.0
}

/// What is there, and what it means for paths.
fn explained(nat: Nat) -> (String, &'static str) {
    match nat {
        Nat::NotAsked => (
            format!("{DIM}none{RESET}"),
            "This host has no address of this kind that others could use, or no server has one.",
        ),
        Nat::Silent => (
            format!("{RED}no server answers{RESET}"),
            "Nobody is reached by addresses of this kind, but by relays over TLS and TURN servers over TCP: UDP is blocked on the way, or there is no way out.",
        ),
        Nat::Open => (
            format!("{GREEN}no NAT{RESET}"),
            "Everybody reaches this host directly, unless a firewall lets nothing in that this host has not asked for: then those behind a symmetric NAT come by a relay for some seconds, until one of many ports is met.",
        ),
        Nat::Unknown => (
            format!("{BOLD}a NAT{RESET}"),
            "Only one server answers, which cannot tell of what kind: a relay, or `stun` in the configuration, would be another.",
        ),
        Nat::EndpointIndependent => (
            format!(
                "{GREEN}a NAT that keeps one port for everybody{RESET} (endpoint-independent mapping)"
            ),
            "Direct paths to all; to those behind symmetric NATs after some seconds by a relay, when one of many ports is met.",
        ),
        Nat::Symmetric => (
            format!("{YELLOW}a NAT with another port for each destination{RESET} (symmetric)"),
            "Direct paths to hosts without a NAT, and to those whose NAT is not symmetric after some seconds by a relay, when one of many ports is met. Two symmetric NATs need a relay.",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::plain;

    #[test]
    fn it_says_what_is_there_and_what_that_means() {
        let json = include_str!("../../../node/testdata/status.json");
        let status: Status = serde_json::from_str(json).expect("a status");
        let screen = plain(&render("office", &status.mesh.expect("a mesh")));
        assert_eq!(screen, include_str!("netcheck.txt"));
    }
}
