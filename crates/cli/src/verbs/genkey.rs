//! `seikan genkey`: prints a new private key, like `wg genkey`. `genpsk` and `join` share the
//! functions.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use seikan_config::{KEY_LEN, encode_key, parse_private_key};
use zeroize::Zeroizing;

/// Options of `genkey`: none.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    umask 077; seikan genkey > tunnel.key; seikan pubkey < tunnel.key")]
pub struct Arguments {}

/// Prints 32 random bytes, clamped, in base64.
pub fn run(_: &Arguments) -> anyhow::Result<ExitCode> {
    let random = encode_key(&*random_bytes()?);
    // Parsing clamps it.
    let key = parse_private_key(&random).context("cannot make a key")?;
    print_secret(&encode_key(key.as_bytes()))
}

/// Returns 32 random bytes from the kernel.
pub fn random_bytes() -> anyhow::Result<Zeroizing<[u8; KEY_LEN]>> {
    let mut bytes = Zeroizing::new([0; KEY_LEN]);
    getrandom::fill(bytes.as_mut_slice()).context("cannot get random bytes from the kernel")?;
    Ok(bytes)
}

/// Prints a key. If standard output is a file that other users may open, makes the file accessible
/// to its owner only, and says so: another user may have opened it already.
pub fn print_secret(key: &str) -> anyhow::Result<ExitCode> {
    let stdout = io::stdout();
    if let Ok(fd) = stdout.as_fd().try_clone_to_owned()
        && let file = File::from(fd)
        && let Ok(metadata) = file.metadata()
        && metadata.is_file()
        && metadata.permissions().mode() & 0o077 != 0
    {
        match file.set_permissions(Permissions::from_mode(0o600)) {
            Ok(()) => eprintln!(
                "note: other users could open this file until now; `umask 077` before prevents that"
            ),
            Err(_) => eprintln!(
                "warning: other users can open the file that this key is written to; \
                 run `umask 077`, then make a new key"
            ),
        }
    }
    writeln!(stdout.lock(), "{key}").context("cannot print the key")?;
    Ok(ExitCode::SUCCESS)
}
