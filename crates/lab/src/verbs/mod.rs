//! The command line of `seikan-lab`.

mod coordinators;
mod cost;
mod demo;
mod hostile;
mod members;
mod mesh;
mod nat;
mod png;
mod relay;
mod reproduce;
mod scale;
mod scenario;
mod score;
mod subjects;
mod tunnels;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Command, CommandFactory, Parser, Subcommand, ValueHint};
use seikan_lab::tunnel::crude::CrudeOptions;
use seikan_lab::tunnel::pass_through::PassThroughOptions;
use seikan_lab::wire::CarrierOptions;
use seikan_lab::{LabError, Result};
use seikan_ui::screen::{Screen, Table};
use seikan_ui::{Interrupt, Progress, ProgressBar, generate, output};
use serde::Serialize;

/// Measure and test on this machine
#[derive(Debug, Parser)]
#[command(
    name = "seikan-lab",
    bin_name = "seikan lab",
    version,
    max_term_width = 100,
    arg_required_else_help = true
)]
#[command(after_help = "Example:\n  \
    sudo seikan lab bench               measure every tunnel on PATH side by side\n  \
    sudo seikan lab gateway             from a device without Seikan, through a gateway\n  \
    sudo seikan lab hostile             the rate of a flow during a flood\n  \
    sudo seikan lab run shaper          a slow tunnel, and the doctor's diagnosis\n  \
    sudo seikan lab reproduce queue     a published measurement, reproduced\n  \
    sudo seikan lab relay               a flow through a relay, and while its path changes\n  \
    sudo seikan lab nat                 the pairs of NATs that allow a direct path\n  \
    sudo seikan lab crowd               many daemons among a thousand members\n  \
    seikan lab mesh                     a thousand members at one coordinator\n  \
    seikan lab coordinators             the same with three coordinators, one of which is killed")]
pub struct Cli {
    /// The verb.
    #[command(subcommand)]
    verb: LabVerb,
}

/// Verbs, in the order of the help.
#[derive(Debug, Subcommand)]
pub enum LabVerb {
    /// Measure tunnels side by side, rounds interleaved
    Bench(tunnels::BenchArguments),
    /// Measure paths from a device through a gateway, rounds interleaved
    Gateway(tunnels::GatewayArguments),
    /// Run one end of the naive encapsulator, which fails behind receive offload
    #[command(hide = true)]
    Naive(subjects::NaiveArguments),
    /// Carry frames between two TAP devices, with faults
    #[command(hide = true)]
    Wire(CarrierOptions),
    /// Run one end of the crude tunnel, with chosen faults
    #[command(hide = true)]
    Crude(CrudeOptions),
    /// Run one end of a program that only passes packets on
    #[command(hide = true)]
    PassThrough(PassThroughOptions),
    /// Measure the rate of a flow while other hosts flood the tunnel's port
    Hostile(hostile::HostileArguments),
    /// Make a tunnel slow and run the doctor on it
    Run(scenario::RunArguments),
    /// Make tunnels slow with every fault and count the doctor's correct diagnoses
    Score(score::ScoreArguments),
    /// Measure the throughput that the doctor's measurements cost
    Cost(cost::CostArguments),
    /// Measure one coordinator while many members join and change
    Mesh(mesh::MeshArguments),
    /// Kill a coordinator and a member of etcd while members change
    Coordinators(coordinators::CoordinatorsArguments),
    /// Measure a flow through a relay and directly, and while the path changes
    Relay(relay::RelayArguments),
    /// Let pairs of hosts connect through NATs, and compare with theory
    Nat(nat::NatArguments),
    /// Run many daemons among a thousand members, and measure their resources
    #[command(name = "crowd")]
    Scale(scale::ScaleArguments),
    /// Reproduce published measurements of slow tunnels, and run the doctor on them
    Reproduce(reproduce::ReproduceArguments),
    /// Show everything on this machine: two hosts, a tunnel, load, figures
    #[command(hide = true, override_usage = "seikan demo [OPTIONS]")]
    Demo(demo::Arguments),
    /// Draw a picture as PNG
    #[command(hide = true)]
    Png,
    /// Write shell completions and man pages
    #[command(hide = true)]
    #[command(after_help = "Example:\n  seikan lab generate man ./man1")]
    Generate(generate::Arguments),
}

/// Runs the command.
pub fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    match &cli.verb {
        LabVerb::Bench(arguments) => tunnels::bench(arguments),
        LabVerb::Gateway(arguments) => tunnels::gateway(arguments),
        LabVerb::Naive(arguments) => subjects::naive(arguments),
        LabVerb::Wire(arguments) => subjects::wire(arguments),
        LabVerb::Crude(arguments) => subjects::crude(arguments),
        LabVerb::PassThrough(arguments) => subjects::pass_through(arguments),
        LabVerb::Hostile(arguments) => hostile::run(arguments),
        LabVerb::Run(arguments) => scenario::play(arguments),
        LabVerb::Score(arguments) => score::count(arguments),
        LabVerb::Cost(arguments) => cost::measure(arguments),
        LabVerb::Mesh(arguments) => mesh::run(arguments),
        LabVerb::Coordinators(arguments) => coordinators::run(arguments),
        LabVerb::Relay(arguments) => relay::run(arguments),
        LabVerb::Nat(arguments) => nat::run(arguments),
        LabVerb::Scale(arguments) => scale::run(arguments),
        LabVerb::Reproduce(arguments) => reproduce::run(arguments),
        LabVerb::Demo(arguments) => demo::run(arguments),
        LabVerb::Png => png::run(),
        LabVerb::Generate(arguments) => {
            let show = |demo: Command| demo.hide(false).display_name("seikan-demo");
            let command = Cli::command().mut_subcommand("demo", show);
            generate::run(arguments, "seikan-lab", command, &[])
        }
    }
}

/// Runs `work` with a progress bar; a signal interrupts it.
fn with_progress<T>(
    work: impl FnOnce(&Interrupt, &mut (dyn FnMut(Progress) + Send)) -> Result<T>,
) -> anyhow::Result<T> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let bar = ProgressBar::new();
    Ok(work(&interrupt, &mut |step| bar.show(step))?)
}

fn exit_code(failed: bool) -> ExitCode {
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// Returns the exit status of an error: 2 for options without meaning.
pub fn exit_code_of(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref() {
        Some(LabError::Usage(_)) => ExitCode::from(2),
        _ => ExitCode::FAILURE,
    }
}

/// Output file for the figures.
#[derive(Debug, Args)]
struct JsonFile {
    /// Write every figure as JSON
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    json: Option<PathBuf>,
}

impl JsonFile {
    /// Writes a report, if a file is given.
    fn write(&self, report: &impl Serialize) -> anyhow::Result<()> {
        match &self.json {
            Some(file) => output::write_file(file, &(serde_json::to_string_pretty(report)? + "\n")),
            None => Ok(()),
        }
    }
}

/// Prints a table below a line of text, which may be empty.
fn print_table(title: &str, table: &Table) -> io::Result<()> {
    let mut screen = Screen(String::new());
    table.write(&mut screen);
    let mut out = anstream::stdout();
    if !title.is_empty() {
        writeln!(out, "{title}\n")?;
    }
    write!(out, "{}", screen.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }
}
