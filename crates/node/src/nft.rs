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

/// Returns the name of the table of a tunnel.
pub fn tunnel_table(interface: &str) -> String {
    format!("seikan-{}", identifier(interface))
}

/// Names of the tables of gateways begin with this.
const GATEWAY: &str = "seikan-gateway-";

/// Returns the name of the table of a gateway.
pub fn gateway_table(interface: &str) -> String {
    format!("{GATEWAY}{}", identifier(interface))
}

/// Returns the interface whose gateway has this table; `None` for other tables.
pub(crate) fn gateway_of(table: &str) -> Option<String> {
    let identifier = table.strip_prefix(GATEWAY)?;
    Some(identifier.replace("/e", "=").replace("/p", "+"))
}

/// Replaces the characters of an interface's name that nft(8) refuses in the name of a table. It accepts letters, digits
/// and `/-_.`, and interfaces' names have no `/`, so two names stay two.
fn identifier(interface: &str) -> String {
    interface.replace('=', "/e").replace('+', "/p")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_distinct_names_that_nft_accepts() {
        assert_eq!(tunnel_table("wg-0_a.b"), "seikan-wg-0_a.b");
        let names = ["a=b", "a+b", "ab", "aeb", "a-b"].map(tunnel_table);
        for (i, name) in names.iter().enumerate() {
            let accepted = |c: char| c.is_ascii_alphanumeric() || "/-_.".contains(c);
            assert!(name.chars().all(accepted), "{name}");
            assert!(!names[..i].contains(name), "{name}");
        }
    }
}
