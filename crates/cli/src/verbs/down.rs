//! `seikan down`: stops a running tunnel.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueHint};
use seikan_config::Diagnostics;
use seikan_node::control::Places;
use seikan_node::control::ask::{self, AskError};
use seikan_node::monitor;

use crate::output;

/// How long the tunnel has to end, hooks included.
const PATIENCE: Duration = Duration::from_secs(10);

/// What `down` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan down wg0                stop the tunnel of interface wg0\n  \
    sudo seikan down ./wg0.conf         the same, by its file\n\n\
    Returns once everything it set up is gone, after ten seconds at most. What a tunnel has left that was \
    killed is taken back, too.")]
pub struct Arguments {
    /// Interface, or the file it was brought up from
    #[arg(value_name = "IFACE|FILE", value_hint = ValueHint::AnyPath)]
    target: String,
}

/// Finds out which interface is meant, asks its instance to stop and waits until it has.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let failed = || format!("cannot stop `{}`", arguments.target);
    let interface = seikan_config::interface_name(&arguments.target).with_context(failed)?;
    let places = Places::default();
    match ask::stop(&places, interface.as_str(), PATIENCE) {
        // It may have been killed.
        Err(AskError::NotRunning(name)) => {
            let mut warnings = Diagnostics::default();
            let left = monitor::clean_up(&places, &name, &mut |warning| warnings.push(warning));
            output::diagnostics(&warnings);
            match left.with_context(failed)? {
                true => Ok(ExitCode::SUCCESS),
                false => Err(AskError::NotRunning(name)).with_context(failed),
            }
        }
        stopped => {
            stopped.with_context(failed)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
