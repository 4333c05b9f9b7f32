//! What a default route through the tunnel asks of the firewall, by way of nft(8).
//!
//! - Nobody on a neighbouring network may send to the tunnel's addresses directly and learn from the
//!   answers what goes on in it (CVE-2019-14899).
//! - Where the kernel checks strictly that a packet comes in where its answer would go out
//!   (`rp_filter` 1), what the peers send must bear the mark that the answer will bear. Connection
//!   tracking remembers it. This costs time for every packet, so it is left out where no check is
//!   strict.
//!
//! There is no nftables library without a C library behind it, and wg-quick asks the same program;
//! where it is missing the tunnel works, and a warning says what it lacks.

use crate::setup::{Change, note};
use crate::state::Notes;
use seikan_config::{Config, Diagnostic, Severity};
use seikan_sys::sysctl;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::process::{Command, Stdio};

/// Puts the rules in force, as far as this host lets us.
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

/// Removes a table. One that is not there is no failure.
pub fn remove(table: &str) -> io::Result<()> {
    // Adding it first makes deleting it succeed.
    match run(&format!(
        "add table inet {table}\ndelete table inet {table}\n"
    )) {
        // Without the program it was never made.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // Without the kernel's part, neither.
        Err(error) if error.to_string().contains("not supported") => Ok(()),
        other => other,
    }
}

/// Whether any interface has `rp_filter` 1. The larger of `all` and the interface's own holds, and 2
/// is the loose check (Documentation/networking/ip-sysctl).
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

/// Gives a script to nft(8).
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
        // A program that does not read to the end says by its status if that is bad.
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
