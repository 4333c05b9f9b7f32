//! `seikan status`: shows running tunnels.

mod peer;
mod userspace;
pub(super) mod view;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use seikan_config::InterfaceName;
use seikan_node::control::{RuntimeDirs, ask};
use seikan_node::status::Status;

use crate::output;

/// Options of `status`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan status               show all tunnels\n  \
    sudo seikan status wg0 --json    print one as JSON\n\n\
    --json prints an object with IFACE, else an array. Fields keep their names and meaning while `version` is \
    the same. SEIKAN_RUN_DIR replaces /run/seikan as the directory of control sockets.\n\
    Exit status: 0 if all tunnels were shown (or none runs), 1 if one is not running or does not answer.")]
pub struct Arguments {
    /// Interface [default: all]
    #[arg(value_name = "IFACE")]
    interface: Option<String>,
    /// Also show the number of packets per system call
    #[arg(short, long, conflicts_with = "json")]
    verbose: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the status of one tunnel or of all.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot show the status";
    let places = RuntimeDirs::for_client(arguments.interface.as_deref());
    let name = arguments.interface.as_deref();
    let (all, code) = of_running(&places, name).context(FAILED)?;
    if arguments.json {
        match &all[..] {
            [one] if name.is_some() => output::print_json(one)?,
            _ => output::print_json(&all)?,
        }
    } else if all.is_empty() && code == ExitCode::SUCCESS {
        anstream::eprintln!("No tunnel is running. `seikan up FILE` starts one.");
    } else {
        print(&all, arguments.verbose)?;
    }
    Ok(code)
}

/// Returns the status of a tunnel, or of all that run, and the exit code.
pub fn of_running(
    places: &RuntimeDirs,
    name: Option<&str>,
) -> anyhow::Result<(Vec<Status>, ExitCode)> {
    if let Some(name) = name {
        let name: InterfaceName = name.parse()?;
        return Ok((vec![ask::status(places, name.as_str())?], ExitCode::SUCCESS));
    }
    let (mut all, mut code) = (Vec::new(), ExitCode::SUCCESS);
    for name in ask::running(places)? {
        match ask::status(places, &name) {
            Ok(status) => all.push(status),
            // The tunnel has just stopped.
            Err(ask::AskError::NotRunning(_)) => {}
            // A tunnel that does not answer must not hide the others.
            Err(error) => {
                output::error(&error.into());
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok((all, code))
}

fn print(all: &[Status], verbose: bool) -> anyhow::Result<()> {
    let mut out = output::stdout();
    for (position, status) in all.iter().enumerate() {
        if position > 0 {
            writeln!(out)?;
        }
        write!(out, "{}", view::render(status, verbose))?;
    }
    Ok(())
}
