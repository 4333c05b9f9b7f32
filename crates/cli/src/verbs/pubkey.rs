//! `seikan pubkey`: from a private key to its public key, as `wg pubkey` does.

use std::io::{self, Read, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use seikan_config::{KEY_BASE64_LEN, parse_private_key};
use zeroize::Zeroizing;

/// `pubkey` is told nothing: the key must not be seen among the processes.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan pubkey < private.key > public.key")]
pub struct Arguments {}

/// More than any key with its line end.
const MAX_INPUT: usize = KEY_BASE64_LEN + 20;

/// Reads one key and prints the other.
pub fn run(_: &Arguments) -> anyhow::Result<ExitCode> {
    // All the room at once: growing would leave copies of the key behind in freed memory.
    let mut text = Zeroizing::new(String::with_capacity(MAX_INPUT + 1));
    io::stdin()
        .take(MAX_INPUT as u64)
        .read_to_string(&mut text)
        .context("cannot read a private key from standard input")?;
    let text = text.trim();
    if text.is_empty() {
        bail!("there is no private key on standard input: try `seikan pubkey < private.key`");
    }
    let key = parse_private_key(text).map_err(|error| {
        anyhow::anyhow!("standard input is no private key: it {error}; `seikan genkey` makes one")
    })?;
    writeln!(io::stdout(), "{}", key.public()).context("cannot print the key")?;
    Ok(ExitCode::SUCCESS)
}
