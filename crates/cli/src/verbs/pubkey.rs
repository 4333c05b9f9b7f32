//! `seikan pubkey`: prints the public key of a private key, like `wg pubkey`.

use std::io::{self, Read, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use seikan_config::{KEY_BASE64_LEN, parse_private_key};
use zeroize::Zeroizing;

/// Options of `pubkey`: none. The key is read from standard input: arguments are visible to other
/// users.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan pubkey < tunnel.key")]
pub struct Arguments {}

/// Maximum input in bytes: more than a key and its line end.
const MAX_INPUT: usize = KEY_BASE64_LEN + 20;

/// Reads the private key and prints the public key.
pub fn run(_: &Arguments) -> anyhow::Result<ExitCode> {
    // The whole capacity at once: growing would leave copies of the key in freed memory.
    let mut text = Zeroizing::new(String::with_capacity(MAX_INPUT + 1));
    io::stdin()
        .take(MAX_INPUT as u64)
        .read_to_string(&mut text)
        .context("cannot read a private key from standard input")?;
    let text = text.trim();
    if text.is_empty() {
        bail!(
            "cannot read a private key: standard input is empty; try `seikan pubkey < tunnel.key`"
        );
    }
    let key = parse_private_key(text).map_err(|error| {
        anyhow::anyhow!(
            "cannot use standard input as a private key: it {error}; `seikan genkey` makes one"
        )
    })?;
    writeln!(io::stdout(), "{}", key.public()).context("cannot print the key")?;
    Ok(ExitCode::SUCCESS)
}
