//! `seikan lab naive`, `wire`, `crude` and `pass-through`, hidden: processes that the lab starts for its
//! experiments.

use std::process::ExitCode;

use clap::Args;
use seikan_lab::gateway::naive::{Naive, NaiveOptions};
use seikan_lab::tunnel::crude::{CrudeEnd, CrudeOptions};
use seikan_lab::tunnel::pass_through::{PassThrough, PassThroughOptions};
use seikan_lab::wire::CarrierOptions;
use seikan_ui::Interrupt;
use seikan_ui::output::print_json;

/// Carries frames until standard input ends; orders are read there, and answered.
pub fn wire(options: &CarrierOptions) -> anyhow::Result<ExitCode> {
    seikan_lab::wire::carry(options)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs one end of the crude tunnel until a signal, then prints its packet counts.
pub fn crude(options: &CrudeOptions) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let end = CrudeEnd::open(options.clone())?;
    end.run(&interrupt)?;
    print_json(&end.counts())?;
    Ok(ExitCode::SUCCESS)
}

/// Runs one end of the pass-through program until the other end closes the connection.
pub fn pass_through(options: &PassThroughOptions) -> anyhow::Result<ExitCode> {
    PassThrough::open(options)?.run()?;
    Ok(ExitCode::SUCCESS)
}

/// Options of `lab naive`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan lab naive --wan wan0 --peer 10.0.0.2 --lan lan0 --overlay 10.77.0.0/24\n  \
    sudo seikan lab naive --wan wan0 --peer 10.0.0.1 --tun naive0 --address 10.77.0.2/24 --network 192.168.1.0/24")]
pub struct NaiveArguments {
    #[command(flatten)]
    options: NaiveOptions,
}

/// Runs one end of the naive encapsulator until a signal.
pub fn naive(arguments: &NaiveArguments) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;
    let mut naive = Naive::open(&arguments.options)?;
    naive.run(&interrupt)?;
    print_json(&naive.counts())?;
    Ok(ExitCode::SUCCESS)
}
