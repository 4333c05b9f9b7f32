//! `seikan check`: everything that is wrong with a configuration file.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, ValueHint};
use seikan_node::config::{self, Config, Diagnostics, Severity};
use serde::Serialize;

use crate::cli::OverrideArguments;
use crate::output::{self, counted};

/// What `check` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    seikan check ./wg0.conf             every fault, with its line and what would be right\n  \
    seikan check wg0 --json             the same for a program\n\n\
    Exit status: 0 if the file can be used (there may be warnings), 1 if not.")]
pub struct Arguments {
    /// Configuration file, or the name of an interface
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    target: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    overrides: OverrideArguments,
}

/// The result, for programs.
#[derive(Debug, Serialize)]
struct Report<'a> {
    file: String,
    usable: bool,
    errors: usize,
    warnings: usize,
    diagnostics: &'a Diagnostics,
}

/// Reads the file and says what was found.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (config, file, diagnostics) = match arguments.overrides.with_environment() {
        Ok(overrides) => {
            let parsed = config::load(&arguments.target, &overrides);
            let file = parsed.path.map(|path| path.display().to_string());
            (parsed.config, file, parsed.diagnostics)
        }
        Err(faults) => (None, None, faults),
    };
    let report = Report {
        file: file.unwrap_or_else(|| arguments.target.clone()),
        usable: config.is_some(),
        errors: diagnostics.count(Severity::Error),
        warnings: diagnostics.count(Severity::Warning),
        diagnostics: &diagnostics,
    };
    if arguments.json {
        let json = serde_json::to_string_pretty(&report).context("cannot write JSON")?;
        writeln!(io::stdout(), "{json}")?;
    } else {
        output::diagnostics(&diagnostics);
        writeln!(io::stdout(), "{}", summary(&report, config.as_ref()))?;
    }
    Ok(match config {
        Some(_) => ExitCode::SUCCESS,
        None => ExitCode::FAILURE,
    })
}

/// One line at the end.
fn summary(report: &Report<'_>, config: Option<&Config>) -> String {
    let warnings = match report.warnings {
        0 => String::new(),
        count => format!(", {}", counted(count, "warning")),
    };
    match config {
        Some(config) => {
            let gateway = config.gateway.as_ref().map(|gateway| {
                let devices = counted(gateway.devices.len(), "device");
                let remotes = counted(gateway.remotes.len(), "remote");
                format!(
                    ", {} gateway on {} for {devices} and {remotes}",
                    gateway.mode, gateway.interface
                )
            });
            format!(
                "{}: usable: interface {}, protocol {}, {}{}{warnings}",
                report.file,
                config.name,
                config.protocol,
                counted(config.peers.len(), "peer"),
                gateway.unwrap_or_default()
            )
        }
        None => format!(
            "{}: not usable: {}{warnings}",
            report.file,
            counted(report.errors, "error")
        ),
    }
}
