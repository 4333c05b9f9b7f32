//! `seikan down`: stops a running tunnel.

use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, ValueHint};
use seikan_node::config::{self, InterfaceName};

/// What `down` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan down wg0                stop the tunnel of interface wg0\n  \
    sudo seikan down ./wg0.conf         the same, by its file")]
pub struct Arguments {
    /// Interface, or the file it was brought up from
    #[arg(value_name = "IFACE|FILE", value_hint = ValueHint::AnyPath)]
    target: String,
}

/// Finds out which interface is meant and stops its node.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let interface = config::interface_name(&arguments.target)
        .with_context(|| format!("cannot stop `{}`", arguments.target))?;
    stop(&interface)?;
    Ok(ExitCode::SUCCESS)
}

/// Tells the node to stop and waits until the interface is gone.
fn stop(interface: &InterfaceName) -> anyhow::Result<()> {
    anyhow::bail!("cannot stop `{interface}`: this build has no control socket yet")
}
