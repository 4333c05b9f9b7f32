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
use crate::journal::change::Change;
use seikan_config::{Config, Diagnostic, Mode, Severity};
use seikan_sys::dns::{self, DnsError, DnsSettings};
use seikan_sys::netlink::{Netlink, NetlinkError, Route};
use seikan_sys::sysctl::{self, SysctlError};
use std::path::Path;

/// Length of the TUN device's queue in packets. The kernel's default of 500 overflows in a burst of small
/// packets; 1000 packets of 1500 bytes are 12 ms of a gigabit, longer than the worker's pauses, and short
/// enough that a full queue adds no noticeable delay.
const TX_QUEUE_LEN: u32 = 1000;

/// Records changes to the system, and reports warnings about them.
pub struct Recorder<'a> {
    pub(crate) journal: &'a mut dyn Notes,
    pub(crate) warn: &'a mut dyn FnMut(Diagnostic),
}

impl Recorder<'_> {
    /// Records a change; if the journal cannot be written, the change is made nevertheless.
    fn note(&mut self, change: Change) {
        if let Err(error) = self.journal.will_do(change) {
            (self.warn)(without_journal(&error));
        }
    }

    /// Sets a parameter below /proc/sys/net, and records its old value.
    fn set(&mut self, components: &[&str], value: &str, help: &str) {
        if let Err(error) = self.try_set(components, value) {
            self.warn("sysctl", error.to_string(), help);
        }
    }

    /// A parameter that cannot be read is not written: it could not be restored.
    fn try_set(&mut self, components: &[&str], value: &str) -> Result<(), SysctlError> {
        let before = sysctl::read(components)?;
        if before != value {
            let path = sysctl::path(components)?;
            self.note(Change::Sysctl { path, before });
            sysctl::write(components, value)?;
        }
        Ok(())
    }

    fn warn(&mut self, subject: &str, message: String, help: &str) {
        (self.warn)(Diagnostic::new(Severity::Warning, subject, message).with_help(help));
    }
}

/// Gives the interface its addresses and sets it up.
pub fn set_up_interface(
    config: &Config,
    index: u32,
    netlink: &Netlink,
) -> Result<(), NetlinkError> {
    prepare_interface(config, index, netlink)?;
    for address in &config.addresses {
        netlink.add_address(index, *address)?;
    }
    netlink.set_up(index)
}

/// Sets the properties of an interface that other programs may then set up.
pub fn prepare_interface(
    config: &Config,
    index: u32,
    netlink: &Netlink,
) -> Result<(), NetlinkError> {
    // No link-local address: the kernel would send router solicitations and multicast reports into the tunnel,
    // from an address of no peer. 1 is IN6_ADDR_GEN_MODE_NONE; a host without IPv6 has no such file. On Ethernet,
    // neighbour discovery needs one, but no peer becomes this host's router.
    let ipv6 = |name: &str, value: &str| {
        let _ = sysctl::write(&["ipv6", "conf", config.name.as_str(), name], value);
    };
    match config.mode {
        Mode::Ip => ipv6("addr_gen_mode", "1"),
        Mode::Ethernet => {
            ipv6("accept_ra", "0");
            ipv6("accept_redirects", "0");
        }
    }
    netlink.set_tx_queue_len(index, TX_QUEUE_LEN)
}

/// Sets the resolver's name servers, if any are configured.
pub fn set_dns(config: &Config, recorder: &mut Recorder<'_>) -> Result<(), DnsError> {
    // Like wg-quick, search domains without a name server have no effect.
    if config.dns.is_empty() {
        return Ok(());
    }
    let interface = config.name.to_string();
    recorder.note(Change::Dns {
        interface: interface.clone(),
    });
    let settings = DnsSettings {
        servers: config.dns.clone(),
        search: config.dns_search.clone(),
    };
    dns::apply(&interface, &settings)?.keep();
    Ok(())
}

/// Adds routes and rules. `others` has the journals of other tunnels.
pub fn set_routes(
    config: &Config,
    plan: &routes::Plan,
    index: u32,
    netlink: &Netlink,
    others: &Path,
    recorder: &mut Recorder<'_>,
) -> Result<(), NetlinkError> {
    for (prefix, table) in &plan.routes {
        netlink.add_route(&Route::to(*prefix).device(index).table(*table))?;
    }
    if plan.marks_ipv4() {
        let help = "where net.ipv4.conf.*.rp_filter is 1, packets from peers are dropped: run `sysctl \
                    net.ipv4.conf.all.src_valid_mark=1`";
        // First: then the parameter is 1 already, and this tunnel makes no change of its own.
        if let Some(change) = Change::source_valid_mark_of_others(others, config.name.as_str()) {
            recorder.note(change);
        }
        recorder.set(&["ipv4", "conf", "all", "src_valid_mark"], "1", help);
    }
    for rule in &plan.rules {
        recorder.note(Change::of_rule(rule));
        netlink.add_rule(rule)?;
    }
    Ok(())
}

/// Returns the warning that there is no journal.
pub(crate) fn without_journal(error: &str) -> Diagnostic {
    Diagnostic::new(Severity::Warning, "journal", error).with_help(
        "the tunnel works, and undoes its changes at the end; after a kill -9 its rules and name servers would stay",
    )
}
