//! `seikan down`: stops a running tunnel.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueHint};
use seikan_node::config;
use seikan_node::control::{Places, ask};

/// How long the tunnel has to end, hooks included.
const PATIENCE: Duration = Duration::from_secs(10);

/// What `down` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan down wg0                stop the tunnel of interface wg0\n  \
    sudo seikan down ./wg0.conf         the same, by its file\n\n\
    Returns once everything it set up is gone, after ten seconds at most.")]
pub struct Arguments {
    /// Interface, or the file it was brought up from
    #[arg(value_name = "IFACE|FILE", value_hint = ValueHint::AnyPath)]
    target: String,
}

/// Finds out which interface is meant, asks its instance to stop and waits until it has.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let failed = || format!("cannot stop `{}`", arguments.target);
    let interface = config::interface_name(&arguments.target).with_context(failed)?;
    ask::stop(&Places::default(), interface.as_str(), PATIENCE).with_context(failed)?;
    Ok(ExitCode::SUCCESS)
}
