//! `seikan demo`: the whole product on one machine.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, ValueHint};
use seikan_lab::report::{ProgressBar, Sheet, Style, html, terminal};
use seikan_lab::{DemoOptions, Interrupt, demo};

use crate::output;

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
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=60))]
    pub seconds: u32,
}

/// Runs the demo, shows what it measured, and writes the page.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    // Before anything starts a thread: a process with threads cannot enter a user namespace.
    demo::enter_sandbox().context("cannot run the demo")?;
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let bar = ProgressBar::new();
    let options = DemoOptions {
        seconds: f64::from(arguments.seconds),
    };
    let outcome = demo::demo(&options, &interrupt, &mut |step| bar.show(step));
    drop(bar);
    let report = outcome?;
    let sheet = Sheet::from(&report);
    if let Some(file) = &arguments.html {
        output::write_file(file, &html(&sheet)?)?;
    }
    if arguments.json {
        writeln!(io::stdout(), "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        write!(io::stdout(), "{}", terminal(&sheet, Style::of_stdout()))?;
    }
    Ok(if report.failed() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
