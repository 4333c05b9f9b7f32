//! The changes of a tunnel that outlive its interface.

use super::{Undo, of_others};
use crate::nft;
use seikan_config::Config;
use seikan_sys::netlink::{Family, Netlink, Rule, TABLE_MAIN};
use seikan_sys::resolv_conf::{self, ResolvConf};
use seikan_sys::{dns, sysctl};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::{fs, io};

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
    pub(crate) fn of_rule(rule: &Rule) -> Change {
        Change::Rule {
            v6: rule.family == Family::V6,
            priority: rule.priority.unwrap_or(0),
            table: rule.table,
            unless_mark: rule.fwmark,
            suppress: rule.suppress_prefix_length,
        }
    }

    /// Returns the change of `src_valid_mark` that another tunnel in this network namespace has made. Of several tunnels
    /// that need the parameter, the last one to end restores it.
    pub(crate) fn source_valid_mark_of_others(directory: &Path, name: &str) -> Option<Change> {
        let mut changes = of_others::<Change>(directory, name).into_iter();
        changes.find(
            |change| matches!(change, Change::Sysctl { path, .. } if path == Path::new(SOURCE_VALID_MARK)),
        )
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
                    gateway
                        .is_some_and(|g| interface.is_empty() || interface == g.interface.as_str())
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
                is_value
                    && (path == Path::new(SOURCE_VALID_MARK)
                        || gateway_interface_of(path).is_some())
            }
            Change::Rule {
                table,
                unless_mark,
                suppress,
                ..
            } => match (unless_mark, suppress) {
                (Some(mark), _) => mark == table,
                (None, Some(_)) => *table == TABLE_MAIN,
                _ => false,
            },
            Change::Dns { interface } | Change::ResolvConf { interface, .. } => interface == name,
            Change::Firewall { table } => {
                [nft::tunnel_table(name), nft::gateway_table(name)].contains(table)
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
        ["ipv6", "conf", _, "forwarding" | "accept_ra"] => Some(""),
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
            Change::Firewall { table } => nft::remove_table(&table).map_err(|e| e.to_string()),
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
