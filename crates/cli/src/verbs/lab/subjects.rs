//! `seikan lab wire` and `seikan lab crude`, hidden: what the lab starts to have something to diagnose.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueHint};
use seikan_lab::wire::CarrierOptions;

/// What `lab wire` is told.
#[derive(Debug, Args)]
pub struct WireArguments {
    /// Name of the TAP device to make here
    #[arg(long, value_name = "INTERFACE")]
    pub near: String,
    /// Name of the TAP device to make in the other namespace
    #[arg(long, value_name = "INTERFACE")]
    pub far: String,
    /// The other network namespace
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub far_namespace: PathBuf,
    /// Seed of the random faults
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub seed: u64,
}

/// Carries frames until standard input ends; orders are read there, and answered.
pub fn wire(arguments: &WireArguments) -> anyhow::Result<ExitCode> {
    seikan_lab::wire::carry(&CarrierOptions {
        near: arguments.near.clone(),
        far: arguments.far.clone(),
        far_namespace: arguments.far_namespace.clone(),
        seed: arguments.seed,
    })?;
    Ok(ExitCode::SUCCESS)
}
