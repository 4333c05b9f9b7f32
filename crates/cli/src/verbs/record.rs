//! `seikan record`: keeps what a tunnel does in a file, for `seikan doctor --from` and for other programs.

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

/// What `record` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan record slow.parquet                  a minute of the tunnel of this host\n  \
    sudo seikan record --iface tun0 --seconds 3600 --interval 1000 --stacks hour.parquet\n  \
    seikan doctor --from slow.parquet                what it says\n\n\
    Looks at what `seikan doctor` looks at, with the same probes, and gives no verdict. Ctrl-C ends it with what \
    there is. The file is Apache Parquet, which other programs read, too (docs/reference/doctor.md); it is there when it is \
    whole, for its owner only. It has addresses and names of programs in it, and no payload.")]
pub struct Arguments {
    #[command(flatten)]
    sampling: SamplingArguments,
    /// How long to look
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Keep call stacks too, for flame graphs (needs level 2)
    #[arg(long)]
    stacks: bool,
    /// The file; one that is there is replaced
    file: PathBuf,
}

/// Looks, and writes down what is seen.
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
    let bytes = draft.keep()?;
    let why = match (full, interrupt.is_raised()) {
        (true, _) => format!(
            ", ended early: it holds {} values at most",
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
    writeln!(out, "`seikan doctor --from {file}` says what it shows")?;
    Ok(ExitCode::SUCCESS)
}
