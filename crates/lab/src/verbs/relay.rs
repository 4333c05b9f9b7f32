//! `seikan lab relay`: a flow through a relay, over the direct path, and during the change.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use seikan_lab::{RelayOptions, RelayReport};
use seikan_load::stats::Spread;
use seikan_ui::screen::Align::{Left, Right};
use seikan_ui::screen::Table;

use super::{JsonFile, print_table, with_progress};

/// Options of `lab relay`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan lab relay --rounds 5 --seconds 4")]
pub struct RelayArguments {
    #[command(flatten)]
    options: RelayOptions,
    #[command(flatten)]
    json: JsonFile,
}

/// Measures and prints.
pub fn run(arguments: &RelayArguments) -> anyhow::Result<ExitCode> {
    let report = with_progress(|interrupt, progress| {
        seikan_lab::relay(&arguments.options, interrupt, progress)
    })?;
    arguments.json.write(&report)?;
    print_changes(&report)?;
    print_coturn(&report)?;
    Ok(ExitCode::SUCCESS)
}

fn print_changes(report: &RelayReport) -> std::io::Result<()> {
    let mut table = Table::new(&[
        ("round", Left),
        ("relayed, Gbit/s", Right),
        ("direct, Gbit/s", Right),
        ("direct found, s", Right),
        ("stall, ms", Right),
        ("direct dies, s", Right),
    ]);
    for (number, round) in (1..).zip(&report.rounds) {
        table.row(vec![
            format!("{number}"),
            format!("{:.2}", round.relayed),
            format!("{:.2}", round.direct),
            format!("{:.1}", round.found_after),
            format!("{:.0}", 1000.0 * round.stall),
            format!("{:.1}", round.outage),
        ]);
    }
    let title = format!(
        "One TCP stream between two members; the first answer came by the relay after {:.2} s",
        report.first_answer
    );
    print_table(&title, &table)?;
    let mut table = Table::new(&[
        ("round", Left),
        ("a stream without a limit", Right),
        ("a stream of 500 Mbit/s", Right),
    ]);
    for (number, (round, paced)) in (1..).zip(report.rounds.iter().zip(&report.paced)) {
        let [full, paced] = [round.missing, *paced]
            .map(|of| format!("{} / {} / {}", of.reported, of.dropped, of.relay_queue));
        table.row(vec![format!("{number}"), full, paced]);
    }
    print_table(
        "\nDuring the change to the direct path: datagrams that did not arrive, datagrams that the ends dropped, and\n\
         sends (up to 64 datagrams each) dropped at the relay's full receive buffer",
        &table,
    )?;
    print_ratio(
        "by the relay",
        report.relayed,
        "directly",
        report.direct,
        report.ratio,
    )
}

fn print_coturn(report: &RelayReport) -> std::io::Result<()> {
    let Some(coturn) = &report.coturn else {
        let mut out = anstream::stdout();
        return writeln!(
            out,
            "\nno `turnserver` to compare with: install the package coturn"
        );
    };
    let mut table = Table::new(&[
        ("round", Left),
        ("ours, Gbit/s", Right),
        ("relay", Right),
        ("members", Right),
        ("coturn, Gbit/s", Right),
        ("coturn", Right),
        ("members", Right),
    ]);
    for (number, round) in (1..).zip(&coturn.rounds) {
        let cells = round.iter().flat_map(|by| {
            [by.rate, by.relay_busy, by.members_busy].map(|value| format!("{value:.2}"))
        });
        table.row(std::iter::once(format!("{number}")).chain(cells).collect());
    }
    print_table(
        "\nAlternating with coturn, and the processors that each kept busy",
        &table,
    )?;
    print_ratio(
        "by ours",
        coturn.ours,
        "by coturn",
        coturn.coturn,
        coturn.ratio,
    )
}

/// Prints two medians with their ranges, and their ratio.
fn print_ratio(
    name: &str,
    value: Spread,
    other: &str,
    base: Spread,
    ratio: Option<f64>,
) -> std::io::Result<()> {
    let Some(ratio) = ratio else {
        return Ok(());
    };
    let range = |of: Spread| format!("({:.2} to {:.2})", of.min, of.max);
    writeln!(
        anstream::stdout(),
        "\nmedian {:.2} {name} {}, {:.2} {other} {}: {ratio:.2} x",
        value.median,
        range(value),
        base.median,
        range(base)
    )
}
