//! `seikan gateway`: shows the devices of a gateway, and discovers hosts on a LAN.

pub mod discover;
pub mod status;
pub mod view;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Options of `gateway`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan gateway discover eth1    list the hosts on the LAN of eth1\n  \
    sudo seikan gateway status           show devices, rates, and the slow side")]
pub struct Arguments {
    #[command(subcommand)]
    verb: GatewayVerb,
}

/// Verbs of a gateway.
#[derive(Debug, Subcommand)]
enum GatewayVerb {
    /// Show devices of running gateways: rates, loss, drops, and better settings
    Status(status::Arguments),
    /// List the hosts whose frames arrive on an interface
    Discover(discover::Arguments),
}

/// Runs a verb.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        GatewayVerb::Status(arguments) => status::run(arguments),
        GatewayVerb::Discover(arguments) => discover::run(arguments),
    }
}
