//! Forwarding of a routed gateway: the kernel forwards between local network and tunnel, and nothing else that
//! it did not forward before.
//!
//! - `forwarding` of the two interfaces. IPv6 has one switch for all interfaces; those that accept router
//!   advertisements are told to continue.
//! - Routes into the tunnel for remotes with addresses of the local network, and proxy ARP and neighbour
//!   discovery for them if configured.
//! - Rules in a table of nft(8): between the two interfaces only devices are forwarded, with their own
//!   addresses; a family that was not forwarded before is forwarded nowhere else; a device with a configured
//!   MAC address must use it. The gateway's stage refuses the same packets, so each works without the other.
//!
//! Two routed gateways on one interface would drop each other's packets and revert each other's settings, and so
//! would two that turn on IPv6: [`apply`] refuses the second one.
//!
//! Settings of the interface disappear with it: [`Upkeep`] applies them again to a new one of the same name.

use crate::gateway::LanError;
use crate::journal::change::Change;
use crate::nft;
use crate::setup::Recorder;
use seikan_config::{Config, GatewaySettings};
use seikan_sys::netlink::{Netlink, NetlinkError, Route};
use seikan_sys::sysctl;
use std::fmt::Write as _;

/// Help text of the warning that a parameter cannot be set.
const HELP: &str =
    "the kernel does not forward packets of devices; set by hand the value that the message names";

/// Families in which this host forwards only because of the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Guarded {
    v4: bool,
    v6: bool,
}

impl Guarded {
    fn of(self, v6: bool) -> bool {
        if v6 { self.v6 } else { self.v4 }
    }
}

/// Makes the changes; failures are reported.
///
/// # Errors
/// Another routed gateway excludes this one ([`LanError::Taken`], [`LanError::Ipv6Taken`]), or a netlink error.
pub fn apply(
    config: &Config,
    settings: &GatewaySettings,
    tun: u32,
    netlink: &Netlink,
    recorder: &mut Recorder<'_>,
) -> Result<(), LanError> {
    let lan = settings.interface.as_str();
    let name = config.name.as_str();
    let mut addresses = settings.devices.iter().flat_map(|d| &d.lan);
    let v6 = addresses.any(|a| a.is_ipv6());
    let is_off = |parameter: &[&str]| !sysctl::read(parameter).is_ok_and(|value| value == "1");
    // The limits come before forwarding, in a family that was not forwarded before.
    let guarded = Guarded {
        v4: is_off(&["ipv4", "conf", lan, "forwarding"]),
        v6: v6 && is_off(&["ipv6", "conf", "all", "forwarding"]),
    };
    restrict(config, settings, guarded, recorder);
    exclude_others(name, lan, v6)?;
    // This setting disappears with the interface.
    if let Err(error) = sysctl::write(&["ipv4", "conf", name, "forwarding"], "1") {
        recorder.warn("sysctl", error.to_string(), HELP);
    }
    if guarded.v6 {
        forward_ipv6(recorder);
    }
    for remote in &settings.remotes {
        netlink.add_route(&Route::to(remote.lan.into()).device(tun))?;
    }
    Ok(set_up_interface(settings, netlink, recorder)?)
}

/// Fails if an earlier gateway excludes this one. Each gateway has its table before it looks for others, so of
/// two that start at the same time, the one whose table is newer fails. Without nft(8), none is found.
fn exclude_others(name: &str, lan: &str, v6: bool) -> Result<(), LanError> {
    let tables = nft::output(&["list", "tables", "inet"]).unwrap_or_default();
    let own = Table::read(name);
    let others = tables.lines().filter_map(|line| {
        let other = nft::gateway_of(line.strip_prefix("table inet ")?)?;
        (other != name).then_some(other)
    });
    for other in others {
        let Some(table) = Table::read(&other) else {
            continue;
        };
        if own.as_ref().is_some_and(|own| own.handle < table.handle) {
            continue;
        }
        if table.interface == lan {
            let interface = lan.to_owned();
            return Err(LanError::Taken { interface, other });
        }
        if v6 && table.guards_v6 {
            return Err(LanError::Ipv6Taken { other });
        }
    }
    Ok(())
}

/// The table of a gateway.
#[derive(Debug, PartialEq, Eq)]
struct Table {
    /// The kernel numbers tables in the order of their creation.
    handle: u64,
    /// The interface of the local network.
    interface: String,
    /// Drops IPv6 packets of all other interfaces.
    guards_v6: bool,
}

impl Table {
    /// Reads the table of a tunnel's gateway.
    fn read(tunnel: &str) -> Option<Table> {
        let name = nft::gateway_table(tunnel);
        Table::parse(
            &nft::output(&["--handle", "list", "table", "inet", &name])?,
            tunnel,
        )
    }

    /// Parses the output of nft(8) for the rules of [`rules`].
    fn parse(text: &str, tunnel: &str) -> Option<Table> {
        let into_lan = format!("iifname \"{tunnel}\" oifname \"");
        let (_, rule) = text.split_once(&into_lan)?;
        let (_, handle) = text.lines().next()?.split_once("# handle ")?;
        Some(Table {
            handle: handle.trim().parse().ok()?,
            interface: rule.split_once('"')?.0.to_owned(),
            guards_v6: text.contains("meta nfproto ipv6 iifname != {"),
        })
    }
}

/// Sets up a recreated interface while the tunnel runs.
pub struct Upkeep<'a> {
    settings: &'a GatewaySettings,
    /// Index of the interface that is set up.
    index: Option<u32>,
}

impl<'a> Upkeep<'a> {
    /// After [`apply`].
    pub fn new(
        settings: &'a GatewaySettings,
        netlink: &Netlink,
    ) -> Result<Upkeep<'a>, NetlinkError> {
        let index = netlink.link_index(settings.interface.as_str())?;
        Ok(Upkeep { settings, index })
    }

    /// Returns the interface's name.
    pub fn interface(&self) -> &str {
        self.settings.interface.as_str()
    }

    /// The interface was removed, and its settings with it.
    pub fn interface_removed(&mut self) {
        self.index = None;
    }

    /// Sets up the interface that has the name now; failures are reported.
    pub fn look(&mut self, netlink: &Netlink, recorder: &mut Recorder<'_>) {
        // Unknown for now; the next event retries.
        let Ok(index) = netlink.link_index(self.settings.interface.as_str()) else {
            return;
        };
        if index.is_none() || index == self.index {
            return;
        }
        self.index = index;
        if let Err(error) = set_up_interface(self.settings, netlink, recorder) {
            let message = format!("the interface was recreated: {error}");
            let help = "devices may not find the remotes: restart the tunnel";
            recorder.warn("gateway", message, help);
        }
    }
}

/// Settings of the interface: IPv4 forwarding, which each interface has (that of IPv6 is copied from
/// `default`), and proxy entries for remotes.
fn set_up_interface(
    settings: &GatewaySettings,
    netlink: &Netlink,
    recorder: &mut Recorder<'_>,
) -> Result<(), NetlinkError> {
    let lan = settings.interface.as_str();
    recorder.set(&["ipv4", "conf", lan, "forwarding"], "1", HELP);
    if settings.proxy_arp {
        answer_for_remotes(settings, netlink, recorder)?;
    }
    Ok(())
}

/// Turns on forwarding of all interfaces.
fn forward_ipv6(recorder: &mut Recorder<'_>) {
    // `all` sets every interface, also when its old value is restored, so the switches that are on are noted first.
    // A router ignores advertisements (`accept_ra` 1), except with 2.
    for interface in sysctl::list(&["ipv6", "conf"]).unwrap_or_default() {
        let [switch, learns] =
            ["forwarding", "accept_ra"].map(|parameter| ["ipv6", "conf", &interface, parameter]);
        let is =
            |parameter: &[&str], value: &str| sysctl::read(parameter).is_ok_and(|v| v == value);
        if interface == "all" {
            continue;
        }
        if is(&switch, "1") {
            if let Ok(path) = sysctl::path(&switch) {
                let before = "1".to_owned();
                recorder.note(Change::Sysctl { path, before });
            }
        } else if is(&learns, "1") {
            recorder.set(&learns, "2", HELP);
        }
    }
    recorder.set(&["ipv6", "conf", "all", "forwarding"], "1", HELP);
}

fn answer_for_remotes(
    settings: &GatewaySettings,
    netlink: &Netlink,
    recorder: &mut Recorder<'_>,
) -> Result<(), NetlinkError> {
    let lan = settings.interface.as_str();
    let Some(index) = netlink.link_index(lan)? else {
        return Ok(());
    };
    let families = |v6: bool| settings.remotes.iter().any(|r| r.lan.is_ipv6() == v6);
    if families(false) {
        // Otherwise the kernel delays answers by up to 0.8 s.
        recorder.set(&["ipv4", "neigh", lan, "proxy_delay"], "0", HELP);
    }
    if families(true) {
        recorder.set(&["ipv6", "neigh", lan, "proxy_delay"], "0", HELP);
        recorder.set(&["ipv6", "conf", lan, "proxy_ndp"], "1", HELP);
    }
    for remote in &settings.remotes {
        let change = Change::Proxy {
            interface: lan.to_owned(),
            address: remote.lan,
        };
        recorder.note(change);
        netlink.add_proxy(index, remote.lan)?;
    }
    Ok(())
}

fn restrict(
    config: &Config,
    settings: &GatewaySettings,
    guarded: Guarded,
    recorder: &mut Recorder<'_>,
) {
    let table = nft::gateway_table(config.name.as_str());
    let rules = rules(config, settings, guarded);
    let change = Change::Firewall {
        table: table.clone(),
    };
    recorder.note(change);
    let script = format!(
        "add table inet {table}\ndelete table inet {table}\ntable inet {table} {{\n \
         chain forward {{\n  type filter hook forward priority filter - 10;\n{rules} }}\n}}\n"
    );
    if let Err(error) = nft::run(&script) {
        let message = format!("cannot set the gateway's firewall rules: {error}");
        let help = if guarded.v4 || guarded.v6 {
            "this host now forwards packets from any sender: install nftables, or block that by other means"
        } else {
            "only the tunnel filters packets between itself and the local network: install nftables, or block other \
             packets by other means"
        };
        recorder.warn("nft", message, help);
    }
}

fn rules(config: &Config, settings: &GatewaySettings, guarded: Guarded) -> String {
    let (lan, tun) = (&settings.interface, &config.name);
    // Only this host sends from its own addresses, and those packets are not forwarded. IPv6 does not check
    // that.
    let mut text = format!("  oifname \"{tun}\" fib saddr type local counter drop\n");
    // Writing to a String cannot fail.
    for (family, protocol, v6) in [("ip", "ipv4", false), ("ip6", "ipv6", true)] {
        let addresses = settings.devices.iter().flat_map(|device| &device.lan);
        let addresses = addresses.filter(|address| address.is_ipv6() == v6);
        let devices: Vec<String> = addresses.map(ToString::to_string).collect();
        let (to, from, elsewhere) = match devices.join(", ") {
            none if none.is_empty() => (String::new(), String::new(), None),
            all => (
                format!(" {family} daddr != {{ {all} }}"),
                format!(" {family} saddr != {{ {all} }}"),
                Some(format!("{family} saddr {{ {all} }}")),
            ),
        };
        let _ = writeln!(
            text,
            "  meta nfproto {protocol} iifname \"{tun}\" oifname \"{lan}\"{to} counter drop\n  \
             meta nfproto {protocol} iifname \"{lan}\" oifname \"{tun}\"{from} counter drop"
        );
        if let Some(devices) = elsewhere {
            let _ = writeln!(
                text,
                "  iifname != \"{lan}\" oifname \"{tun}\" {devices} counter drop"
            );
        }
        if guarded.of(v6) {
            let _ = writeln!(
                text,
                "  meta nfproto {protocol} iifname \"{lan}\" oifname != \"{tun}\" counter drop\n  \
                 meta nfproto {protocol} iifname \"{tun}\" oifname != \"{lan}\" counter drop"
            );
        }
    }
    for device in &settings.devices {
        let Some(mac) = device.mac else { continue };
        for address in &device.lan {
            let family = if address.is_ipv4() { "ip" } else { "ip6" };
            let _ = writeln!(
                text,
                "  iifname \"{lan}\" {family} saddr {address} ether saddr != {mac} counter drop"
            );
        }
    }
    if guarded.v6 {
        // The single switch of IPv6 lets every interface forward.
        let _ = writeln!(
            text,
            "  meta nfproto ipv6 iifname != {{ \"{lan}\", \"{tun}\" }} counter drop"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_another_gateway_shows_its_interface() {
        // Output of nft 1.0.6.
        let text = "table inet seikan-gateway-wg0 { # handle 2\n\tchain forward { # handle 1\n\t\t\
            type filter hook forward priority filter - 10; policy accept;\n\t\t\
            oifname \"wg0\" fib saddr type local counter packets 0 bytes 0 drop # handle 2\n\t\t\
            iifname \"wg0\" oifname \"eth1\" ip daddr != 192.0.2.4 counter packets 0 bytes 0 drop # handle 3\n\t\t\
            meta nfproto ipv6 iifname \"wg0\" oifname \"eth1\" counter packets 0 bytes 0 drop # handle 4\n";
        let guard = "\t\tmeta nfproto ipv6 iifname != { \"eth1\", \"wg0\" } counter packets 0 bytes 0 drop # handle 6\n";
        for (rule, guards_v6) in [("", false), (guard, true)] {
            let table = Table::parse(&format!("{text}{rule}\t}}\n}}\n"), "wg0");
            let expected = Table {
                handle: 2,
                interface: "eth1".to_owned(),
                guards_v6,
            };
            assert_eq!(table, Some(expected));
        }
        assert_eq!(Table::parse(text, "wg1"), None);
    }
}
