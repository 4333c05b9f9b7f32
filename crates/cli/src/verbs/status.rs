//! `seikan status`: what running tunnels are doing.

mod view;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use seikan_config::InterfaceName;
use seikan_node::control::{Places, ask};
use seikan_node::status::Status;

use crate::output;

/// What `status` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan status                  all tunnels\n  \
    sudo seikan status wg0 --json       one, for a program\n\n\
    With --json: an object for IFACE, an array without. Its fields keep their names and meaning as \
    long as `version` stays the same.\n\
    Exit status: 0 if all was shown (also if nothing runs), 1 if an interface is not running or \
    does not answer. SEIKAN_RUN_DIR says where instances are looked for, if not in /run/seikan.")]
pub struct Arguments {
    /// Interface; all of them if left out
    #[arg(value_name = "IFACE")]
    interface: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Asks the instances and prints what they say.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot show the status";
    let places = Places::default();
    if let Some(name) = &arguments.interface {
        let name: InterfaceName = name.parse().context(FAILED)?;
        let status = ask::status(&places, name.as_str()).context(FAILED)?;
        match arguments.json {
            true => print_json(&status)?,
            false => print(std::slice::from_ref(&status))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut code = ExitCode::SUCCESS;
    let mut all = Vec::new();
    for name in ask::running(&places).context(FAILED)? {
        match ask::status(&places, &name) {
            Ok(status) => all.push(status),
            // It ended while we asked.
            Err(ask::AskError::NotRunning(_)) => {}
            // One that hangs does not hide the others.
            Err(error) => {
                output::error(&error.into());
                code = ExitCode::FAILURE;
            }
        }
    }
    if arguments.json {
        print_json(&all)?;
    } else if all.is_empty() && code == ExitCode::SUCCESS {
        anstream::eprintln!("No tunnel is running. `seikan up FILE` starts one.");
    } else {
        print(&all)?;
    }
    Ok(code)
}

fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    writeln!(std::io::stdout(), "{json}")?;
    Ok(())
}

fn print(all: &[Status]) -> anyhow::Result<()> {
    // Takes colours out unless it is a terminal, and under NO_COLOR.
    let mut out = anstream::AutoStream::auto(std::io::stdout()).lock();
    for (position, status) in all.iter().enumerate() {
        if position > 0 {
            writeln!(out)?;
        }
        write!(out, "{}", view::render(status))?;
    }
    Ok(())
}
