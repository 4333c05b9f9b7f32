//! `seikan lab cost`: the cost of a measurement for a tunnel.

use std::process::ExitCode;

use clap::Args;
use seikan_lab::scenario::{CostOptions, CostRow, cost};
use seikan_load::stats::mean;
use seikan_ui::output::print_json;
use seikan_ui::screen::Align::{Left, Right};
use seikan_ui::screen::Table;

use super::{print_table, with_progress};

/// Options of `lab cost`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan lab cost --tunnel openvpn --rounds 20\n\n\
    Bulk TCP runs through the tunnel, alternately without the doctor and with it, at level 1 (counters and \
    drops by reason) and level 2 (also processor time by function). The cost is the lost share of the throughput, \
    with a 95 % interval over the pairs of neighbouring blocks.")]
pub struct CostArguments {
    #[command(flatten)]
    options: CostOptions,
    /// Print every figure as JSON
    #[arg(long)]
    pub json: bool,
}

/// Measures the cost and prints it.
pub fn measure(arguments: &CostArguments) -> anyhow::Result<ExitCode> {
    let rows = with_progress(|interrupt, progress| cost(&arguments.options, interrupt, progress))?;
    if arguments.json {
        print_json(&rows)?;
    } else {
        print_table("", &table(&rows))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(rows: &[CostRow]) -> Table {
    let mut table = Table::new(&[
        ("Mbit/s through", Left),
        ("level", Left),
        ("without", Right),
        ("with", Right),
        ("cost (95 % interval)", Left),
        ("at most", Left),
    ]);
    for row in rows {
        let mean = |of: fn(&(f64, f64)) -> f64| mean(row.pairs.iter().map(of));
        let cost = row.cost.map_or("nothing went through".to_owned(), |cost| {
            let [value, low, high] = [cost.value, cost.low, cost.high].map(|v| v * 100.0);
            format!("{value:.1} % ({low:.1} to {high:.1})")
        });
        let verdict = match row.cost {
            Some(cost) if cost.low > row.bar => ", certainly exceeded",
            Some(cost) if cost.high <= row.bar => ", certainly met",
            _ => "",
        };
        table.row(vec![
            row.tunnel.clone(),
            row.level.to_string(),
            format!("{:.0}", mean(|pair| pair.0)),
            format!("{:.0}", mean(|pair| pair.1)),
            cost,
            format!("{:.0} %{verdict}", row.bar * 100.0),
        ]);
    }
    table
}
