//! `seikan lab bench` and `seikan lab gateway`: tunnels and gateways side by side.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};
use seikan_lab::report::{Report, html, svg, terminal};
use seikan_lab::{BenchOptions, GatewayOptions, PathOptions};
use seikan_ui::output;
use seikan_ui::screen::Style;
use serde::Serialize;

use super::{JsonFile, exit_code, with_progress};

/// Options of `lab bench`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab bench --rounds 5 --seconds 4 --json bench.json --plot bench.svg\n  \
    sudo seikan lab bench --only raw,native --loads tcp1,udp\n  \
    sudo seikan lab bench --path --rtt 20,100 --queue 32p,1 --loss 0,1 --congestion bbr")]
pub struct BenchArguments {
    #[command(flatten)]
    options: BenchOptions,
    #[command(flatten)]
    files: Files,
    #[command(flatten, next_help_heading = "Emulated paths")]
    paths: PathOptions,
}

/// Options of `lab gateway`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab gateway --rounds 5 --seconds 4 --json gateway.json\n  \
    sudo seikan lab gateway --only host-to-host,seikan-transparent --loads tcp1,rev,udp")]
pub struct GatewayArguments {
    #[command(flatten)]
    options: GatewayOptions,
    #[command(flatten)]
    files: Files,
}

/// Files to write.
#[derive(Debug, Args)]
struct Files {
    #[command(flatten)]
    json: JsonFile,
    /// Draw the medians as a picture
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    plot: Option<PathBuf>,
    /// Write one self-contained page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    html: Option<PathBuf>,
}

/// Compares tunnels.
pub fn bench(arguments: &BenchArguments) -> anyhow::Result<ExitCode> {
    let BenchArguments { options, paths, .. } = arguments;
    if paths.path {
        let report = with_progress(|interrupt, progress| {
            seikan_lab::bench_paths(options, paths, interrupt, progress)
        })?;
        return arguments.files.write(&report, report.failed());
    }
    let report =
        with_progress(|interrupt, progress| seikan_lab::bench(options, interrupt, progress))?;
    arguments.files.write(&report, report.failed())
}

/// Compares gateways.
pub fn gateway(arguments: &GatewayArguments) -> anyhow::Result<ExitCode> {
    let report = with_progress(|interrupt, progress| {
        seikan_lab::gateway(&arguments.options, interrupt, progress)
    })?;
    arguments.files.write(&report, report.failed())
}

impl Files {
    /// Writes the files, and the page to standard output.
    fn write<'a, R: Serialize>(&self, report: &'a R, failed: bool) -> anyhow::Result<ExitCode>
    where
        Report: From<&'a R>,
    {
        self.json.write(report)?;
        let page = &Report::from(report);
        if let Some(file) = &self.plot {
            output::write_file(file, &svg(page))?;
        }
        if let Some(file) = &self.html {
            output::write_file(file, &html(page)?)?;
        }
        write!(io::stdout(), "{}", terminal(page, Style::of_stdout()))?;
        Ok(exit_code(failed))
    }
}
