//! Firewall rules of a tunnel, set by nft(8).
//!
//! - Hosts on a neighbouring network must not send to the tunnel's addresses directly and learn about
//!   connections from the answers (CVE-2019-14899).
//! - With strict reverse path filtering (`rp_filter` 1), packets of peers must have the mark of the answers to
//!   them; connection tracking restores it. This costs time for every packet, so it is left out without strict
//!   filtering.
//!
//! nftables has no library without a C library, and wg-quick uses the same program. Without it the tunnel
//! works, and a warning names the consequences.

use crate::setup::{Change, note};
use crate::state::Notes;
use seikan_config::{Config, Diagnostic, Severity};
use seikan_sys::sysctl;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::process::{Command, Stdio};

/// Applies the rules as far as possible.
pub fn apply(
    config: &Config,
    mark: u32,
    journal: &mut dyn Notes,
    warn: &mut dyn FnMut(Diagnostic),
) {
    let table = format!("seikan-{}", config.name);
    let strict = checks_strictly();
    let change = Change::Firewall {
        table: table.clone(),
    };
    note(journal, change, warn);
    if let Err(error) = run(&script(config, &table, strict.then_some(mark))) {
        let missing = if strict {
            "rp_filter is 1, so the kernel may drop packets from peers: install nftables, or run `sysctl \
             net.ipv4.conf.all.rp_filter=2`"
        } else {
            "neighbours on the local network can send to the tunnel's addresses directly: install nftables, or block \
             that by other means"
        };
        let message = format!("cannot set the firewall's rules: {error}");
        warn(Diagnostic::new(Severity::Warning, "nft", message).with_help(missing));
    }
}

/// Removes a table. A missing table is no error.
pub fn remove(table: &str) -> io::Result<()> {
    // Deleting succeeds also if the table is missing.
    match run(&format!(
        "add table inet {table}\ndelete table inet {table}\n"
    )) {
        // Without the program the table was never created.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // Without support in the kernel, neither.
        Err(error) if error.to_string().contains("not supported") => Ok(()),
        other => other,
    }
}

/// Whether any interface has `rp_filter` 1. The larger value of `all` and the interface applies, and 2 is the
/// loose check (Documentation/networking/ip-sysctl).
fn checks_strictly() -> bool {
    let read = |interface: &str| -> Option<u32> {
        let text = sysctl::read(&["ipv4", "conf", interface, "rp_filter"]).ok()?;
        text.parse().ok()
    };
    let all = read("all").unwrap_or(0);
    let interfaces = sysctl::list(&["ipv4", "conf"]).unwrap_or_default();
    interfaces
        .iter()
        .filter(|interface| *interface != "all")
        .filter_map(|interface| read(interface))
        .any(|own| own.max(all) == 1)
}

fn script(config: &Config, table: &str, mark: Option<u32>) -> String {
    let mut text =
        format!("add table inet {table}\ndelete table inet {table}\ntable inet {table} {{\n");
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        " chain addresses {{\n  type filter hook prerouting priority raw;"
    );
    for address in config.addresses.iter().map(|net| net.addr()) {
        let family = if address.is_ipv4() { "ip" } else { "ip6" };
        let _ = writeln!(
            text,
            "  iifname != \"{}\" {family} daddr {address} fib saddr type != local drop",
            config.name
        );
    }
    text.push_str(" }\n");
    if let Some(mark) = mark {
        let _ = write!(
            text,
            " chain sent {{\n  type filter hook postrouting priority mangle;\n  \
             meta l4proto udp meta mark {mark:#x} ct mark set meta mark\n }}\n \
             chain received {{\n  type filter hook prerouting priority mangle;\n  \
             meta l4proto udp ct mark {mark:#x} meta mark set ct mark\n }}\n"
        );
    }
    text.push_str("}\n");
    text
}

/// Runs a script by nft(8).
pub(super) fn run(script: &str) -> io::Result<()> {
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
