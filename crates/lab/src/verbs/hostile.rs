//! `seikan lab hostile`: the throughput of a flow during floods.

use std::process::ExitCode;

use clap::Args;
use seikan_lab::HostileOptions;
use seikan_ui::screen::Align::{Left, Right};
use seikan_ui::screen::Table;

use super::{JsonFile, print_table, with_progress};

/// Options of `lab hostile`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan lab hostile --rounds 3 --floods garbage,replayed")]
pub struct HostileArguments {
    #[command(flatten)]
    options: HostileOptions,
    #[command(flatten)]
    json: JsonFile,
}

/// Measures and prints.
pub fn run(arguments: &HostileArguments) -> anyhow::Result<ExitCode> {
    let report = with_progress(|interrupt, progress| {
        seikan_lab::hostile(&arguments.options, interrupt, progress)
    })?;
    arguments.json.write(&report)?;
    let mut table = Table::new(&[
        ("tunnel", Left),
        ("flood", Left),
        ("baseline", Right),
        ("under", Right),
        ("ratio", Right),
        ("baseline, 1/s", Right),
        ("under, 1/s", Right),
    ]);
    for row in &report.rows {
        let [baseline, under] = row.datagrams_per_second;
        table.row(vec![
            row.tunnel.clone(),
            row.flood.to_string(),
            format!("{:.2}", row.baseline.median),
            format!("{:.2}", row.under.median),
            row.ratio
                .map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
            format!("{baseline:.0}"),
            format!("{under:.0}"),
        ]);
    }
    print_table(
        "One TCP stream in Gbit/s while the flood hits another port (baseline) and the tunnel's (under)",
        &table,
    )?;
    Ok(ExitCode::SUCCESS)
}
