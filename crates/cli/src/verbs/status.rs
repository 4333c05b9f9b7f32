//! `seikan status`: what running tunnels are doing.

use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use seikan_node::config::InterfaceName;

/// What `status` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan status                  all tunnels\n  \
    sudo seikan status wg0 --json       one, for a program")]
pub struct Arguments {
    /// Interface; all of them if left out
    #[arg(value_name = "IFACE")]
    interface: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Asks the nodes and prints what they say.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let interface = arguments
        .interface
        .as_ref()
        .map(|name| name.parse::<InterfaceName>())
        .transpose()
        .context("cannot show the status")?;
    show(interface.as_ref(), arguments.json)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the status of one interface, or of all.
fn show(interface: Option<&InterfaceName>, json: bool) -> anyhow::Result<()> {
    let _ = (interface, json);
    anyhow::bail!("cannot show the status: this build has no control socket yet")
}
