//! `seikan lab cost`: what it costs a tunnel to be looked at.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Args;
use seikan_lab::report::ProgressBar;
use seikan_lab::scenario::{COST_TUNNELS, CostOptions, CostRow, cost};
use seikan_lab::{Interrupt, LabError};

use super::wrong_usage;

/// What `lab cost` is told.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan lab cost --tunnel openvpn --rounds 20\n\n\
    Bulk TCP runs through the tunnel, without the doctor and with it in turns, which looks at level 1 (counters and \
    dropped packets by reason) and at level 2 (processor time by function too). The cost is the share of the \
    throughput that is lost, with a 95 % interval over the pairs of neighbouring blocks.")]
pub struct CostArguments {
    /// Only this tunnel; may be given more than once. seikan-native, seikan-wireguard and openvpn if left out
    #[arg(long, value_name = "NAME")]
    pub tunnel: Vec<String>,
    /// Pairs of blocks for each level
    #[arg(long, value_name = "ROUNDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(4..=1000))]
    pub rounds: u32,
    /// Length of a block
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// Print every figure as JSON
    #[arg(long)]
    pub json: bool,
}

/// Measures and shows it.
pub fn measure(arguments: &CostArguments) -> anyhow::Result<ExitCode> {
    let options = CostOptions {
        tunnels: match arguments.tunnel.as_slice() {
            [] => COST_TUNNELS.map(str::to_owned).to_vec(),
            some => some.to_vec(),
        },
        rounds: arguments.rounds,
        seconds: f64::from(arguments.seconds),
    };
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let bar = ProgressBar::new();
    let rows = cost(&options, &interrupt, &mut |step| bar.show(step));
    drop(bar);
    let rows = match rows {
        Err(error @ LabError::Usage(_)) => return wrong_usage(error),
        rows => rows?,
    };
    let mut out = io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&rows)?)?;
    } else {
        write!(out, "{}", shown(&rows))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn shown(rows: &[CostRow]) -> String {
    let mut text = format!(
        "{:<20}{:<8}{:>8}{:>8}   {:<30}{}\n",
        "Mbit/s through", "level", "without", "with", "cost (95 % interval)", "at most"
    );
    for row in rows {
        let mean = |of: fn(&(f64, f64)) -> f64| {
            row.pairs.iter().map(of).sum::<f64>() / row.pairs.len().max(1) as f64
        };
        let cost = row.cost.map_or("nothing went through".to_owned(), |cost| {
            let [value, low, high] = [cost.value, cost.low, cost.high].map(|v| v * 100.0);
            format!("{value:.1} % ({low:.1} to {high:.1})")
        });
        text += &format!(
            "{:<20}{:<8}{:>8.0}{:>8.0}   {cost:<30}{:.0} %{}\n",
            row.tunnel,
            row.level,
            mean(|pair| pair.0),
            mean(|pair| pair.1),
            row.bar * 100.0,
            match row.cost {
                Some(cost) if cost.low > row.bar => ", which it is surely above",
                Some(cost) if cost.high <= row.bar => ", which it is surely within",
                _ => "",
            }
        );
    }
    text
}
