//! nft(8), the program that sets nftables rules.

use std::io::{self, Write};
use std::process::{Command, Stdio};

/// Runs a script by nft(8).
pub(crate) fn run(script: &str) -> io::Result<()> {
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => io::Error::new(error.kind(), "there is no program `nft`"),
            _ => error,
        })?;
    if let Some(mut input) = child.stdin.take() {
        // If the program stops reading, its exit status says whether that is an error.
        let _ = input.write_all(script.as_bytes());
    }
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    let first = words.lines().next().unwrap_or_default();
    Err(io::Error::other(format!(
        "`nft -f -` failed ({}): {first}",
        output.status
    )))
}

/// Returns the output of a command of nft(8); `None` if it fails.
pub(crate) fn output(arguments: &[&str]) -> Option<String> {
    let output = Command::new("nft")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then_some(text)
}

/// Removes a table. A missing table is no error.
pub(crate) fn remove_table(table: &str) -> io::Result<()> {
    // Deleting succeeds also if the table is missing.
    match run(&format!(
        "add table inet {table}\ndelete table inet {table}\n"
    )) {
        // Without the program the table was never created.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // Without support in the kernel, the table was not created either.
        Err(error) if error.to_string().contains("not supported") => Ok(()),
        other => other,
    }
}
