//! `seikan down`: stops a tunnel.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueHint};
use seikan_config::Diagnostics;
use seikan_node::control::RuntimeDirs;
use seikan_node::control::ask::{self, AskError};
use seikan_node::monitor;

use crate::output;

/// Maximum time for the tunnel to stop, hooks included.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Options of `down`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan down wg0           stop the tunnel of interface wg0\n  \
    sudo seikan down ./wg0.conf    stop the same tunnel, by its file\n\n\
    Returns once all settings of the tunnel are reverted, after ten seconds at most. Also reverts those that a \
    killed tunnel left behind.")]
pub struct Arguments {
    /// Interface, or the file that it was started from
    #[arg(value_name = "IFACE|FILE", value_hint = ValueHint::AnyPath)]
    target: String,
}

/// Stops the tunnel of an interface and waits for its end; reverts the settings of one that was
/// killed.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let failed = || format!("cannot stop `{}`", arguments.target);
    let interface = seikan_config::interface_name(&arguments.target).with_context(failed)?;
    let dirs = RuntimeDirs::for_client(Some(interface.as_str()));
    match ask::stop(&dirs, interface.as_str(), STOP_TIMEOUT) {
        // The tunnel may have been killed.
        Err(AskError::NotRunning(name)) => {
            let mut warnings = Diagnostics::default();
            let reverted = monitor::clean_up(&dirs, &name, &mut |warning| warnings.push(warning));
            output::diagnostics(&warnings);
            if !reverted.with_context(failed)? {
                return Err(AskError::NotRunning(name)).with_context(failed);
            }
            Ok(ExitCode::SUCCESS)
        }
        stopped => {
            stopped.with_context(failed)?;
            // The log may be elsewhere, or on standard error.
            let _ = std::fs::remove_file(dirs.log(interface.as_str()));
            Ok(ExitCode::SUCCESS)
        }
    }
}
