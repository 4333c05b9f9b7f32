//! Changes that a tunnel makes to the system.
//!
//! In order: hooks ([`hooks`]), addresses and MTU of the interface ([`mtu`]), name servers, routes and rules
//! ([`routes`]), firewall ([`firewall`]), for a gateway forwarding ([`forwarding`]), for a member of a mesh the
//! names ([`names`]). Changes that outlive the interface are written to the journal ([`crate::journal`]) before
//! they are made.

pub mod firewall;
pub mod forwarding;
pub mod hooks;
pub mod mtu;
pub mod names;
pub mod occupied;
pub mod routes;

use crate::journal::Notes;
use crate::journal::change::{Change, SOURCE_VALID_MARK};
use seikan_config::{Config, Diagnostic, Severity};
use seikan_sys::dns::{self, DnsError, DnsSettings};
use seikan_sys::netlink::{Netlink, NetlinkError, Route};
use seikan_sys::sysctl;
use std::fs;

/// Length of the TUN device's queue in packets. The kernel's default of 500 overflows in a burst of small
/// packets; 1000 packets of 1500 bytes are 12 ms of a gigabit, longer than the worker's pauses, and short
/// enough that a full queue adds no noticeable delay.
const TX_QUEUE_LEN: u32 = 1000;

/// Gives the interface its addresses and sets it up.
pub fn set_up_interface(
    config: &Config,
    index: u32,
    netlink: &Netlink,
) -> Result<(), NetlinkError> {
    // No link-local address: the kernel would send router solicitations and multicast reports into the tunnel,
    // from an address of no peer. 1 is IN6_ADDR_GEN_MODE_NONE; a host without IPv6 has no such file.
    let mode = ["ipv6", "conf", config.name.as_str(), "addr_gen_mode"];
    let _ = sysctl::write(&mode, "1");
    netlink.set_tx_queue_len(index, TX_QUEUE_LEN)?;
    for address in &config.addresses {
        netlink.add_address(index, *address)?;
    }
    netlink.set_up(index)
}

/// Sets the resolver's name servers, if any are configured.
pub fn set_dns(
    config: &Config,
    journal: &mut dyn Notes,
    warn: &mut dyn FnMut(Diagnostic),
) -> Result<(), DnsError> {
    // Like wg-quick, search domains without a name server have no effect.
    if config.dns.is_empty() {
        return Ok(());
    }
    let interface = config.name.to_string();
    note(
        journal,
        Change::Dns {
            interface: interface.clone(),
        },
        warn,
    );
    let settings = DnsSettings {
        servers: config.dns.clone(),
        search: config.dns_search.clone(),
    };
    dns::apply(&interface, &settings)?.keep();
    Ok(())
}

/// Adds routes and rules.
pub fn set_routes(
    plan: &routes::Plan,
    index: u32,
    netlink: &Netlink,
    journal: &mut dyn Notes,
    warn: &mut dyn FnMut(Diagnostic),
) -> Result<(), NetlinkError> {
    for (prefix, table) in &plan.routes {
        netlink.add_route(&Route::to(*prefix).device(index).table(*table))?;
    }
    if plan.marks_ipv4() {
        set_source_valid_mark(journal, warn);
    }
    for rule in &plan.rules {
        note(journal, Change::of_rule(rule), warn);
        netlink.add_rule(rule)?;
    }
    Ok(())
}

fn set_source_valid_mark(journal: &mut dyn Notes, warn: &mut dyn FnMut(Diagnostic)) {
    let before = match fs::read_to_string(SOURCE_VALID_MARK) {
        Ok(text) if text.trim() == "1" => return,
        Ok(text) => text.trim().to_owned(),
        Err(_) => "0".to_owned(),
    };
    let change = Change::Sysctl {
        path: SOURCE_VALID_MARK.into(),
        before,
    };
    note(journal, change, warn);
    if let Err(error) = fs::write(SOURCE_VALID_MARK, "1") {
        let message = format!("cannot set {SOURCE_VALID_MARK} to 1: {error}");
        let help = "where net.ipv4.conf.*.rp_filter is 1, packets from peers are dropped: run `sysctl \
                    net.ipv4.conf.all.src_valid_mark=1`";
        warn(Diagnostic::new(Severity::Warning, "sysctl", message).with_help(help));
    }
}

/// Records a change; if the journal cannot be written, the change is made nevertheless.
pub(crate) fn note(journal: &mut dyn Notes, change: Change, warn: &mut dyn FnMut(Diagnostic)) {
    if let Err(error) = journal.will_do(change) {
        warn(without_journal(&error));
    }
}

/// Returns the warning that there is no journal.
pub(crate) fn without_journal(error: &str) -> Diagnostic {
    Diagnostic::new(Severity::Warning, "journal", error).with_help(
        "the tunnel works, and undoes its changes at the end; after a kill -9 its rules and name servers would stay",
    )
}
