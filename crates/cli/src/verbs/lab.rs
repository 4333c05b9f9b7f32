//! `seikan lab`: the test bench.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum, ValueHint};

/// What `lab` is told.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan lab bench               measure every tunnel on PATH side by side")]
pub struct Arguments {
    #[command(subcommand)]
    verb: LabVerb,
}

/// What the lab does.
#[derive(Debug, Subcommand)]
pub enum LabVerb {
    /// Measure tunnels side by side, rounds interleaved
    Bench(BenchArguments),
}

/// What `lab bench` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab bench --rounds 5 --seconds 4 --json bench.json --plot bench.svg\n  \
    sudo seikan lab bench --only raw,native --loads tcp1,udp")]
pub struct BenchArguments {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// How often each measurement is made
    #[arg(long, value_name = "ROUNDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Only these tunnels; all that are found if left out
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Only these loads; all of them if left out
    #[arg(long, value_name = "LOAD,...", value_delimiter = ',')]
    pub loads: Vec<Load>,
    /// Take the offloads away from the link, as on a plain card
    #[arg(long)]
    pub no_offload: bool,
    /// Write every figure as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json: Option<PathBuf>,
    /// Draw the medians as a picture
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    pub plot: Option<PathBuf>,
    /// Write one self-contained page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
}

/// What is sent through a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Load {
    /// One TCP stream
    Tcp1,
    /// Four TCP streams
    Tcp4,
    /// One TCP stream the other way
    Rev,
    /// UDP, as much as goes
    Udp,
}

/// Runs what was asked for.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        LabVerb::Bench(arguments) => bench(arguments),
    }
}

/// Runs the side-by-side measurement.
fn bench(arguments: &BenchArguments) -> anyhow::Result<ExitCode> {
    let _ = (arguments.seconds, arguments.rounds, arguments.no_offload);
    let _ = (&arguments.only, &arguments.loads);
    let _ = (&arguments.json, &arguments.plot, &arguments.html);
    anyhow::bail!("cannot measure: this build has no test bench yet")
}
