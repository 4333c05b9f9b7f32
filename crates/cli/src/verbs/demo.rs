//! `seikan demo`: the whole product on one machine.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};

/// What `demo` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan demo                    run it, and read the table\n  \
    sudo seikan demo --html demo.html   and keep it as a page\n\n\
    Makes two hosts in network namespaces of its own and takes them away again, on Ctrl-C too.")]
pub struct Arguments {
    /// Write the result as one self-contained page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=60))]
    pub seconds: u32,
}

/// Runs the demo.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let _ = (&arguments.html, arguments.json, arguments.seconds);
    anyhow::bail!("cannot run the demo: this build has no data path yet")
}
