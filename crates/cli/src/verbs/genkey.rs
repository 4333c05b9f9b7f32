//! `seikan genkey`: a new private key, as `wg genkey` makes it; and what `genpsk` has in common with it.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use seikan_config::{KEY_LEN, encode_key, parse_private_key};
use zeroize::Zeroizing;

/// `genkey` is told nothing.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    umask 077; seikan genkey > private.key; seikan pubkey < private.key > public.key")]
pub struct Arguments {}

/// Prints 32 random bytes, clamped, in base64.
pub fn run(_: &Arguments) -> anyhow::Result<ExitCode> {
    let random = encode_key(&*random_bytes()?);
    // Reading clamps.
    let key = parse_private_key(&random).context("cannot make a key")?;
    print_secret(&encode_key(key.as_bytes()))
}

/// 32 bytes from the kernel.
pub fn random_bytes() -> anyhow::Result<Zeroizing<[u8; KEY_LEN]>> {
    let mut bytes = Zeroizing::new([0; KEY_LEN]);
    getrandom::fill(bytes.as_mut_slice()).context("the kernel gives no random bytes")?;
    Ok(bytes)
}

/// Prints a key; warns, as `wg` does, if that goes to a file that everybody may open.
pub fn print_secret(key: &str) -> anyhow::Result<ExitCode> {
    let stdout = io::stdout();
    if let Ok(fd) = stdout.as_fd().try_clone_to_owned()
        && let Ok(metadata) = File::from(fd).metadata()
        && metadata.is_file()
        && metadata.permissions().mode() & 0o007 != 0
    {
        eprintln!(
            "warning: this key goes to a file that every user of the machine may open; \
             make a new one after `umask 077`"
        );
    }
    writeln!(stdout.lock(), "{key}").context("cannot print the key")?;
    Ok(ExitCode::SUCCESS)
}
