//! `seikan demo`: the whole product on one machine.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, ValueHint};
use seikan_lab::report::{Report, html, terminal};
use seikan_lab::{DemoOptions, demo};
use seikan_ui::output;
use seikan_ui::screen::Style;

use super::{exit_code, with_progress};

/// Options of `seikan demo`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan demo                    measure, and print a table\n  \
    sudo seikan demo --html demo.html   also write a page\n\n\
    Creates two hosts in network namespaces, and removes them at the end and on Ctrl-C.")]
pub struct Arguments {
    /// Write the result as one self-contained page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    options: DemoOptions,
}

/// Runs the demo, prints its results, and writes the page.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    // This must happen before any thread starts: a process with threads cannot enter a user
    // namespace.
    demo::enter_sandbox().context("cannot run the demo")?;
    let report =
        with_progress(|interrupt, progress| demo::demo(&arguments.options, interrupt, progress))?;
    let page = Report::from(&report);
    if let Some(file) = &arguments.html {
        output::write_file(file, &html(&page)?)?;
    }
    if arguments.json {
        output::print_json(&report)?;
    } else {
        write!(io::stdout(), "{}", terminal(&page, Style::of_stdout()))?;
    }
    Ok(exit_code(report.failed()))
}
