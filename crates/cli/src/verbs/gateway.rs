//! `seikan gateway`: the devices of a gateway, and who is on a local network.

mod discover;
mod status;
pub mod view;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// What `gateway` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan gateway discover eth1   who is on the local network?\n  \
    sudo seikan gateway status          how are the devices, and which side is slow?")]
pub struct Arguments {
    #[command(subcommand)]
    verb: GatewayVerb,
}

/// What is asked of a gateway.
#[derive(Debug, Subcommand)]
enum GatewayVerb {
    /// Show the devices of running gateways: rates, both sides, drops, what is set wrong
    Status(status::Arguments),
    /// Listen on an interface and list who is there
    Discover(discover::Arguments),
}

/// Does what was asked for.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.verb {
        GatewayVerb::Status(arguments) => status::run(arguments),
        GatewayVerb::Discover(arguments) => discover::run(arguments),
    }
}
