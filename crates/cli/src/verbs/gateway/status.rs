//! `seikan gateway status`: asks twice, a second apart, for what only two samples tell.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use seikan_config::InterfaceName;
use seikan_node::control::{Places, ask};
use seikan_node::gateway::status::GatewayStatus;
use serde::Serialize;

use super::view;
use crate::output;
use crate::screen::Screen;

/// Between the two samples.
const INTERVAL: Duration = Duration::from_secs(1);

/// What `gateway status` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan gateway status                 all gateways on this host\n  \
    sudo seikan gateway status office --json   one, for a program\n\n\
    Takes a second, in which rates are measured. With --json: an object for IFACE, an array without; in \
    it, `gateway` is the section of `seikan status --json`, with rates.\n\
    Loss and round trips are told by TCP of the device since the start. A side is slow if it loses 0.5 % \
    or more and twice as much as the other, else if its round trips last twice the other's and more than 1 ms.\n\
    Exit status: 0 if all was shown (also if there is no gateway), 1 if IFACE is not running, is no \
    gateway or does not answer.")]
pub struct Arguments {
    /// Interface of the tunnel; all gateways if left out
    #[arg(value_name = "IFACE")]
    interface: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A gateway and its tunnel.
#[derive(Debug, Serialize)]
struct Told {
    /// The tunnel's interface.
    interface: String,
    gateway: GatewayStatus,
}

/// Asks the instances and prints what they say.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot show the gateway's status";
    let places = Places::default();
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
                    bail!("`{name}` runs, but its configuration has no [gateway]");
                }
            }
            (Err(error), Some(_)) => return Err(error).context(FAILED),
            // It ended while we asked.
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
        all.push(Told { interface, gateway });
    }
    print(&all, arguments)?;
    Ok(code)
}

fn print(all: &[Told], arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.json {
        let json = match (all, &arguments.interface) {
            ([one], Some(_)) => serde_json::to_string_pretty(one),
            _ => serde_json::to_string_pretty(all),
        };
        writeln!(std::io::stdout(), "{}", json.context("cannot write JSON")?)?;
        return Ok(());
    }
    if all.is_empty() {
        anstream::eprintln!(
            "No gateway is running. A tunnel becomes one by a section [gateway] in its configuration."
        );
    }
    // Takes colours out unless it is a terminal, and under NO_COLOR.
    let mut stdout = anstream::AutoStream::auto(std::io::stdout()).lock();
    for (position, told) in all.iter().enumerate() {
        let mut screen = Screen(String::new());
        if position > 0 {
            screen.0.push('\n');
        }
        view::whole(&told.interface, &told.gateway, &mut screen);
        write!(stdout, "{}", screen.0)?;
    }
    Ok(())
}
