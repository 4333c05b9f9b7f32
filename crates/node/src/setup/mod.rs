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

use crate::state::{Notes, Undo};
use seikan_config::{Config, Diagnostic, Severity};
use seikan_sys::dns::{self, DnsError, DnsSettings};
use seikan_sys::netlink::{Family, Netlink, NetlinkError, Route, Rule, TABLE_MAIN};
use seikan_sys::resolv_conf::{self, ResolvConf};
use seikan_sys::sysctl;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Length of the TUN device's queue in packets. The kernel's default of 500 overflows in a burst of small
/// packets; 1000 packets of 1500 bytes are 12 ms of a gigabit, longer than the worker's pauses, and short
/// enough that a full queue adds no noticeable delay.
const TX_QUEUE_LEN: u32 = 1000;
/// Whether the check of a packet's source uses the packet's mark (Documentation/networking/ip-sysctl).
const SOURCE_VALID_MARK: &str = "/proc/sys/net/ipv4/conf/all/src_valid_mark";

/// A change that outlives the interface, with the data to undo it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// Hooks were run whose effects the hooks of the end undo.
    Hooks,
    /// A sysctl was set.
    Sysctl {
        /// Its path below /proc/sys.
        path: PathBuf,
        /// Its old value.
        before: String,
    },
    /// A policy rule was added.
    Rule {
        /// For IPv6 rather than IPv4.
        v6: bool,
        /// Its priority.
        priority: u32,
        /// The table it looks up.
        table: u32,
        /// Only for packets without this mark.
        unless_mark: Option<u32>,
        /// Ignores prefixes of this length or shorter.
        suppress: Option<u32>,
    },
    /// The interface's name servers were set at the resolver.
    Dns {
        /// The interface.
        interface: String,
    },
    /// The mesh's name server was added to resolv.conf.
    ResolvConf {
        /// The interface.
        interface: String,
        /// Its address.
        server: IpAddr,
    },
    /// An nftables table was created.
    Firewall {
        /// Its name.
        table: String,
    },
    /// A proxy entry was added for an address.
    Proxy {
        /// The interface.
        interface: String,
        /// The address.
        address: IpAddr,
    },
}

impl Change {
    fn of_rule(rule: &Rule) -> Change {
        Change::Rule {
            v6: rule.family == Family::V6,
            priority: rule.priority.unwrap_or(0),
            table: rule.table,
            unless_mark: rule.fwmark,
            suppress: rule.suppress_prefix_length,
        }
    }

    /// Whether a tunnel of this configuration makes such a change, so that undoing it affects only the tunnel
    /// itself.
    pub fn is_of(&self, config: &Config) -> bool {
        let gateway = config.gateway.as_ref();
        let is_configured = match self {
            Change::Hooks => !config.hooks.is_empty(),
            Change::Sysctl { path, .. } => {
                let interface = gateway_interface_of(path);
                interface.is_none_or(|interface| {
                    gateway.is_some_and(|g| interface.is_empty() || interface == g.interface.as_str())
                })
            }
            Change::Rule { .. } | Change::Firewall { .. } => true,
            Change::Dns { .. } => !config.dns.is_empty(),
            Change::ResolvConf { server, .. } => {
                let mut own = config.addresses.iter().map(|net| net.addr());
                config.mesh.is_some() && own.any(|own| own == *server)
            }
            Change::Proxy { interface, address } => gateway.is_some_and(|gateway| {
                *interface == gateway.interface.to_string()
                    && gateway.remotes.iter().any(|remote| remote.lan == *address)
            }),
        };
        is_configured && self.may_be_of(config.name.as_str())
    }

    /// Whether a tunnel of this name makes such a change with some configuration.
    pub fn may_be_of(&self, name: &str) -> bool {
        match self {
            Change::Hooks | Change::Proxy { .. } => true,
            Change::Sysctl { path, before } => {
                let is_value = before.len() <= 10 && before.bytes().all(|b| b.is_ascii_digit());
                is_value && (path == Path::new(SOURCE_VALID_MARK) || gateway_interface_of(path).is_some())
            }
            Change::Rule {
                table,
                unless_mark,
                suppress,
                ..
            } => match (unless_mark, suppress) {
                (Some(mark), None) => mark == table,
                (None, Some(_)) => *table == TABLE_MAIN,
                _ => false,
            },
            Change::Dns { interface } | Change::ResolvConf { interface, .. } => interface == name,
            Change::Firewall { table } => {
                *table == format!("seikan-{name}") || *table == format!("seikan-gateway-{name}")
            }
        }
    }
}

/// Returns the interface whose parameter a gateway sets in this file, empty for one of all interfaces; `None`
/// if a gateway never sets it.
fn gateway_interface_of(path: &Path) -> Option<&str> {
    let parameter = path.to_str()?.strip_prefix("/proc/sys/net/")?;
    let components: Vec<&str> = parameter.split('/').collect();
    // Otherwise the path could lead to another file.
    sysctl::path(&components).ok()?;
    match components[..] {
        ["ipv6", "conf", "all", "forwarding"] | ["ipv6", "conf", _, "accept_ra"] => Some(""),
        ["ipv4" | "ipv6", _, "all" | "default", _] => None,
        ["ipv4", "conf", interface, "forwarding"]
        | ["ipv6", "conf", interface, "proxy_ndp"]
        | ["ipv4" | "ipv6", "neigh", interface, "proxy_delay"] => Some(interface),
        _ => None,
    }
}

impl Undo for Change {
    fn undoes_as(&self, other: &Change) -> bool {
        match (self, other) {
            (Change::Sysctl { path, .. }, Change::Sysctl { path: other, .. }) => path == other,
            _ => self == other,
        }
    }

    /// An entry in resolv.conf is in a file. The kernel loses the rest, and `/run` with the resolvers' state is empty.
    fn outlives_boot(&self) -> bool {
        matches!(self, Change::ResolvConf { .. })
    }

    fn take_back(self) -> Result<(), String> {
        match self {
            Change::Hooks => Ok(()),
            Change::Sysctl { path, before } => restore(&path, &before),
            Change::Rule {
                v6,
                priority,
                table,
                unless_mark,
                suppress,
            } => {
                let rule = Rule {
                    family: if v6 { Family::V6 } else { Family::V4 },
                    priority: Some(priority),
                    fwmark: unless_mark,
                    fwmask: None,
                    invert: unless_mark.is_some(),
                    table,
                    suppress_prefix_length: suppress,
                };
                match Netlink::open().and_then(|netlink| netlink.delete_rule(&rule)) {
                    Err(error) if !error.is_not_found() => Err(error.to_string()),
                    _ => Ok(()),
                }
            }
            Change::Dns { interface } => dns::revert(&interface).map_err(|e| e.to_string()),
            Change::ResolvConf { interface, server } => {
                let file = ResolvConf {
                    path: resolv_conf::FILE.into(),
                    interface,
                    server,
                };
                file.remove().map_err(|e| e.to_string())
            }
            Change::Firewall { table } => firewall::remove(&table).map_err(|e| e.to_string()),
            Change::Proxy { interface, address } => {
                let taken_back =
                    Netlink::open().and_then(|netlink| match netlink.link_index(&interface)? {
                        Some(index) => netlink.delete_proxy(index, address),
                        None => Ok(()),
                    });
                match taken_back {
                    Err(error) if !error.is_not_found() => Err(error.to_string()),
                    _ => Ok(()),
                }
            }
        }
    }
}

/// Restores a sysctl, unless another tunnel's rules depend on the new value.
fn restore(path: &Path, before: &str) -> Result<(), String> {
    if path == Path::new(SOURCE_VALID_MARK) && marks_are_in_use() {
        return Ok(());
    }
    match fs::write(path, before) {
        // The interface is gone, and its parameter with it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!(
            "cannot restore {} to {before}: {error}; restore it by hand",
            path.display()
        )),
        Ok(()) => Ok(()),
    }
}

fn marks_are_in_use() -> bool {
    let rules = Netlink::open().and_then(|netlink| netlink.rules(Family::V4));
    rules.is_ok_and(|rules| {
        rules
            .iter()
            .any(|rule| rule.invert && rule.fwmark.is_some())
    })
}

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
