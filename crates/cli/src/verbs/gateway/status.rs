//! `seikan gateway status`: shows running gateways, with rates from two samples.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use seikan_config::InterfaceName;
use seikan_node::control::{RuntimeDirs, ask};
use seikan_node::status::gateway::GatewayStatus;
use serde::Serialize;

use super::view;
use crate::output;
use crate::screen::Screen;

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
    let mut code = ExitCode::SUCCESS;
    let names = match &arguments.interface {
        Some(name) => {
            let name: InterfaceName = name.parse().context(FAILED)?;
            vec![name.to_string()]
        }
        None => ask::running(&places).context(FAILED)?,
    };
    let mut samples = BTreeMap::new();
    for name in names {
        match (ask::status(&places, &name), &arguments.interface) {
            (Ok(status), _) => {
                if let Some(gateway) = status.gateway {
                    samples.insert(name, (gateway, Instant::now()));
                } else if arguments.interface.is_some() {
                    bail!(
                        "cannot show the gateway of `{name}`: its configuration has no [gateway]"
                    );
                }
            }
            (Err(error), Some(_)) => return Err(error).context(FAILED),
            // The gateway has just stopped.
            (Err(ask::AskError::NotRunning(_)), None) => {}
            (Err(error), None) => {
                output::error(&error.into());
                code = ExitCode::FAILURE;
            }
        }
    }
    if !samples.is_empty() {
        std::thread::sleep(INTERVAL);
    }
    let mut all = Vec::new();
    for (interface, (first, at)) in samples {
        let second = match ask::status(&places, &interface) {
            Ok(status) => status.gateway,
            Err(ask::AskError::NotRunning(_)) => None,
            Err(error) => return Err(error).context(FAILED),
        };
        let gateway = match second {
            Some(mut gateway) => {
                gateway.since(&first, at.elapsed().as_secs_f64());
                gateway
            }
            None => first,
        };
        all.push(TunnelGateway { interface, gateway });
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
