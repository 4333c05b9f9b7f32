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

use crate::journal::change::Change;
use crate::nft;
use crate::setup::Recorder;
use seikan_config::Config;
use seikan_sys::sysctl;
use std::fmt::Write as _;

/// Applies the rules as far as possible.
pub fn apply(config: &Config, mark: u32, recorder: &mut Recorder<'_>) {
    let table = nft::tunnel_table(config.name.as_str());
    let strict = checks_strictly();
    let change = Change::Firewall {
        table: table.clone(),
    };
    recorder.note(change);
    if let Err(error) = nft::run(&script(config, &table, strict.then_some(mark))) {
        let missing = if strict {
            "rp_filter is 1, so the kernel may drop packets from peers: install nftables, or run `sysctl \
             net.ipv4.conf.all.rp_filter=2`"
        } else {
            "neighbours on the local network can send to the tunnel's addresses directly: install nftables, or block \
             that by other means"
        };
        let message = format!("cannot set the firewall's rules: {error}");
        recorder.warn("nft", message, missing);
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
