//! `seikan genpsk`: prints a new preshared key, like `wg genpsk`.

use std::process::ExitCode;

use clap::Args;
use seikan_config::encode_key;

use super::genkey;

/// Options of `genpsk`: none.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    umask 077; seikan genpsk > tunnel.psk\n\n\
    Both ends of a tunnel use the same preshared key.")]
pub struct Arguments {}

/// Prints 32 random bytes in base64.
pub fn run(_: &Arguments) -> anyhow::Result<ExitCode> {
    genkey::print_secret(&encode_key(&*genkey::random_bytes()?))
}
