//! `seikan genpsk`: a new preshared key, as `wg genpsk` makes it.

use std::process::ExitCode;

use clap::Args;
use seikan_config::encode_key;

use super::genkey;

/// `genpsk` is told nothing.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    umask 077; seikan genpsk > office.psk\n\n\
    Give the same preshared key to both ends of one pair of peers.")]
pub struct Arguments {}

/// Prints 32 random bytes in base64.
pub fn run(_: &Arguments) -> anyhow::Result<ExitCode> {
    genkey::print_secret(&encode_key(&*genkey::random_bytes()?))
}
