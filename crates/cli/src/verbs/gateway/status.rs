//! `seikan gateway status`: shows running gateways, with rates from two samples.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use seikan_node::control::{RuntimeDirs, ask};
use seikan_node::status::Status;
use seikan_node::status::gateway::GatewayStatus;
use serde::Serialize;

use super::view;
use crate::output;
use crate::screen::Screen;
use crate::verbs::status::of_running;

/// Interval between the two samples.
const INTERVAL: Duration = Duration::from_secs(1);

/// Options of `gateway status`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan gateway status                  show all gateways of this host\n  \
    sudo seikan gateway status office --json    print one as JSON\n\n\
    Measures rates for one second. Loss and round trips are from the devices' TCP connections since the start. A \
    side is slow if it loses at least 0.5 % and twice as much as the other side; else if its round trip is over \
    1 ms and twice the other's.\n\
    --json prints an object with IFACE, else an array. `gateway` is as in `seikan status --json`, with rates.\n\
    Exit status: 0 if all gateways were shown (or none runs), 1 if IFACE is not running, is no gateway or does \
    not answer.")]
pub struct Arguments {
    /// Interface of the tunnel [default: all gateways]
    #[arg(value_name = "IFACE")]
    interface: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A running gateway.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TunnelGateway {
    /// Interface of the tunnel.
    interface: String,
    /// The gateway, with rates.
    gateway: GatewayStatus,
}

/// Prints the status of one gateway or of all.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot show the gateway's status";
    let places = RuntimeDirs::default();
    let name = arguments.interface.as_deref();
    let (statuses, code) = of_running(&places, name).context(FAILED)?;
    let mut samples = Vec::new();
    for Status {
        interface, gateway, ..
    } in statuses
    {
        match gateway {
            Some(gateway) => samples.push((interface, gateway)),
            None if name.is_none() => {}
            None => bail!(
                "cannot show the gateway of `{}`: its configuration has no [gateway]",
                interface.name
            ),
        }
    }
    if !samples.is_empty() {
        std::thread::sleep(INTERVAL);
    }
    let mut all = Vec::new();
    for (interface, mut gateway) in samples {
        match ask::status(&places, &interface.name) {
            Ok(second) => {
                if let Some(mut second_gateway) = second.gateway {
                    let seconds = second.interface.uptime_s - interface.uptime_s;
                    second_gateway.since(&gateway, seconds);
                    gateway = second_gateway;
                }
            }
            Err(ask::AskError::NotRunning(_)) => {}
            Err(error) => return Err(error).context(FAILED),
        }
        all.push(TunnelGateway {
            interface: interface.name,
            gateway,
        });
    }
    print(&all, arguments)?;
    Ok(code)
}

fn print(all: &[TunnelGateway], arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.json {
        return match (all, &arguments.interface) {
            ([one], Some(_)) => output::print_json(one),
            _ => output::print_json(all),
        };
    }
    if all.is_empty() {
        anstream::eprintln!(
            "No gateway is running. A section [gateway] in the configuration makes a tunnel one."
        );
    }
    let mut stdout = output::stdout();
    for (position, one) in all.iter().enumerate() {
        let mut screen = Screen(String::new());
        if position > 0 {
            screen.0.push('\n');
        }
        view::full(&one.interface, &one.gateway, &mut screen);
        write!(stdout, "{}", screen.0)?;
    }
    Ok(())
}
