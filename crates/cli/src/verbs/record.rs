//! `seikan record`: records a tunnel to a file, for `seikan doctor --from` and other programs.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use seikan_diagnose::recording::{MAX_VALUES, Writer};
use seikan_ui::Interrupt;

use super::doctor::measure::{self, SamplingArguments};
use crate::recording::Draft;
use crate::screen::number;

/// Options of `record`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan record slow.parquet                  record this host's tunnel for a minute\n  \
    sudo seikan record --iface tun0 --seconds 3600 --interval 1000 --stacks hour.parquet\n  \
    sudo seikan doctor --from slow.parquet           diagnose the recording\n\n\
    Takes the same measurements as `seikan doctor`, with the same probes, without a verdict. Ctrl-C ends the \
    recording early. The file is in Apache Parquet format (docs/reference/doctor.md). It appears when it is complete, and \
    only its owner can read it. It contains addresses and names of programs, but no payload.")]
pub struct Arguments {
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Duration of the recording
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Record call stacks, for flame graphs (needs level 2)
    #[arg(long)]
    stacks: bool,
    /// Output file; an existing file is replaced
    file: PathBuf,
}

/// Records the tunnel.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot record the tunnel";
    let map = arguments.sampling.tunnel.path().context(FAILED)?;
    let draft = Draft::create(&arguments.file)?;
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let options = arguments
        .sampling
        .options(arguments.seconds, arguments.stacks);
    let mut writer = Writer::new(draft.file())?;
    let mut full = false;
    let mut last = None;
    let mut write = |sample: seikan_observe::Sample| {
        full = writer.is_full(sample.values.len());
        if full {
            return Ok(ControlFlow::Break(()));
        }
        last = Some(sample.at);
        writer.push(sample)?;
        Ok(ControlFlow::Continue(()))
    };
    let recording = measure::measure(map, &options, &interrupt, &mut write);
    let recording = recording.context(FAILED)?;
    let values = writer.values();
    writer.finish(&recording)?;
    let bytes = draft.keep_for_user()?;
    let why = match (full, interrupt.is_raised()) {
        (true, _) => format!(
            ", ended early at the maximum of {} values",
            number(MAX_VALUES as u64)
        ),
        (_, true) => ", interrupted".to_owned(),
        _ => String::new(),
    };
    let file = arguments.file.display();
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{file}: {:.1} s, {} samples, {} values, {} bytes{why}",
        last.unwrap_or_default().as_secs_f64(),
        number(recording.cost.samples.into()),
        number(values as u64),
        number(bytes),
    )?;
    writeln!(out, "diagnose it with `seikan doctor --from {file}`")?;
    Ok(ExitCode::SUCCESS)
}
