//! Switches with a network, and routers that translate addresses.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use seikan_sys::netlink::Route;
use serde::Deserialize;

use super::host::{Host, network as net};
use super::link::Link;
use crate::error::Result;
use crate::wire::Wire;

/// First three bytes of the network that represents the internet (TEST-NET-2, RFC 5737).
pub(crate) const INTERNET: [u8; 3] = [198, 51, 100];
/// Last byte of the address of each network's router.
pub(crate) const FIRST: u8 = 1;
/// Offset added to the last byte of an address that changes.
const MOVED: u8 = 100;
/// Names of a router's outer NIC and of a switch's bridge.
pub(crate) const WAN: &str = "wan";
pub(crate) const LAN: &str = "lan";

/// MAC address of a switch's bridge. Without a fixed one, a bridge takes the lowest MAC address of
/// its ports. It would change with a new port, and neighbours would not know the new one.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Treatment of unsolicited packets to a router's own address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Input {
    /// They are accepted: connection tracking keeps an entry for each.
    Accept,
    /// They are dropped, as usual routers do.
    #[default]
    Drop,
    /// They are answered, and no entry remains.
    Reject,
}

/// A router with address translation.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct NatBox {
    /// Source NAT statement of nftables, such as `masquerade random`.
    pub source: String,
    /// Use a static map instead: one outer address for each customer, in both directions.
    pub one_to_one: bool,
    /// Whether the static map also applies to packets from inside.
    pub hairpin: bool,
    /// Whether the router forwards UDP.
    pub udp: bool,
    /// Treatment of unsolicited packets to the router's own address.
    pub input: Input,
}

impl Default for NatBox {
    fn default() -> Self {
        Self {
            source: "masquerade".to_owned(),
            one_to_one: false,
            hairpin: false,
            udp: true,
            input: Input::default(),
        }
    }
}

/// The network of a switch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Network {
    prefix: [u8; 3],
    /// Whether its hosts reach each other only through its router.
    routed: bool,
}

impl Network {
    /// Returns the address whose last byte is `end`, with a /24, or a /32 if the network is routed.
    fn net(self, end: u8) -> IpNet {
        let address = address(self.prefix, end);
        if self.routed {
            address.into()
        } else {
            net(address)
        }
    }

    fn add_default_route(self, host: &Host, nic: &str) -> Result<()> {
        let router = address(self.prefix, FIRST);
        if self.routed {
            host.add_route(&Route::to(router.into()).device(host.index(nic)?))?;
        }
        host.add_default_route(router, nic)
    }

    /// Gives a NIC another address, with the NIC down in between as if it had been unplugged.
    pub(crate) fn readdress(self, host: &Host, nic: &str, end: u8) -> Result<()> {
        let netlink = host.netlink()?;
        netlink.set_down(netlink.link(nic)?.index)?;
        host.replace_address(nic, [end, end + MOVED].map(|end| self.net(end)))?;
        host.set_up(nic)?;
        self.add_default_route(host, nic)
    }
}

/// A host with a bridge, and its network.
#[derive(Debug)]
pub(crate) struct Switch {
    pub(crate) host: Host,
    pub(crate) network: Network,
}

/// Returns an address of a network.
pub(crate) fn address(network: [u8; 3], end: u8) -> IpAddr {
    let [a, b, c] = network;
    Ipv4Addr::new(a, b, c, end).into()
}

impl Switch {
    pub(crate) fn create(name: &'static str, prefix: [u8; 3]) -> Result<Switch> {
        let host = Host::create(name, FIRST)?;
        // A real router has long been up when hosts behind it start. So the link-local address from
        // which it discovers neighbours must not be tentative (RFC 4862, section 5.4).
        host.write_sysctl("net/ipv6/conf/default/accept_dad", "0")?;
        let netlink = host.netlink()?;
        netlink.set_hardware_address(netlink.create_bridge(LAN)?, MAC)?;
        host.add_address(LAN, net(address(prefix, FIRST)))?;
        host.set_up(LAN)?;
        let network = Network {
            prefix,
            routed: false,
        };
        Ok(Switch { host, network })
    }

    /// Makes the hosts of the network reach each other only through its router. ICMP redirects
    /// would end that and are disabled.
    pub(crate) fn route(mut self) -> Result<Switch> {
        self.host.forward(true)?;
        for interface in ["all", LAN] {
            let name = format!("net/ipv4/conf/{interface}/send_redirects");
            self.host.write_sysctl(&name, "0")?;
        }
        self.network.routed = true;
        Ok(self)
    }

    /// Gives `host` a NIC at the end of a link to this switch, with an address and the default route.
    pub(crate) fn connect(
        &self,
        host: &Host,
        nic: &str,
        end: u8,
        link: &Link,
    ) -> Result<Option<Wire>> {
        let wire = self
            .host
            .plug(LAN, &format!("port{end}"), host.nic(nic, &[]), link)?;
        host.add_address(nic, self.network.net(end))?;
        self.network.add_default_route(host, nic)?;
        Ok(wire)
    }
}

/// A NAT.
#[derive(Debug)]
pub(crate) struct Router {
    /// The router's host, which is also the switch of the inner network.
    pub(crate) inside: Switch,
    rules: NatBox,
    /// The outer network, and the last byte of the router's address in it.
    outside: (Network, u8),
    /// Last bytes of the inner addresses that have an outer address of their own.
    customers: Vec<u8>,
}

impl Router {
    /// Creates a NAT at the switch `at`, with an inner network. Each of `customers` has an outer
    /// address of its own if the map is static.
    pub(crate) fn create(
        at: &Switch,
        end: u8,
        rules: &NatBox,
        inside: [u8; 3],
        customers: &[u8],
    ) -> Result<Router> {
        let inside = Switch::create("box", inside)?;
        // Carrier networks are private: hosts of the internet need no route to them.
        at.connect(&inside.host, WAN, end, &Link::default())?;
        let mut router = Router {
            inside,
            rules: rules.clone(),
            outside: (at.network, end),
            customers: customers.to_vec(),
        };
        for (_, outer) in router.maps().into_iter().skip(1) {
            router.inside.host.add_address(WAN, IpNet::from(outer))?;
        }
        router.inside.host.forward(true)?;
        router.set_rules(None)?;
        Ok(router)
    }

    /// Returns the pairs of inner and outer addresses of a static map.
    fn maps(&self) -> Vec<(IpAddr, IpAddr)> {
        if !self.rules.one_to_one {
            return Vec::new();
        }
        let (network, first) = self.outside;
        let outer = (first..).map(|end| address(network.prefix, end));
        let inner = self.customers.iter();
        let inner = inner.map(|end| address(self.inside.network.prefix, *end));
        inner.zip(outer).collect()
    }

    /// Loads the router's rules. `source` replaces the source NAT statement if given.
    fn set_rules(&mut self, source: Option<&str>) -> Result<()> {
        if let Some(source) = source {
            source.clone_into(&mut self.rules.source);
        }
        let (mut inward, mut outward) = (String::new(), String::new());
        if self.rules.one_to_one {
            let from = if self.rules.hairpin {
                String::new()
            } else {
                format!("iifname {WAN} ")
            };
            for (inner, outer) in self.maps() {
                inward += &format!("{from}ip daddr {outer} dnat to {inner}\n");
                outward += &format!("ip saddr {inner} snat to {outer}\n");
            }
        } else {
            outward = format!("oifname {WAN} {}", self.rules.source);
        }
        let udp = if self.rules.udp {
            ""
        } else {
            "meta l4proto udp drop"
        };
        let unsolicited = match self.rules.input {
            Input::Accept => "accept",
            Input::Drop => "drop",
            Input::Reject => "reject",
        };
        let rules = format!(
            "table ip nat
             delete table ip nat
             table ip nat {{
                 chain inward {{ type nat hook prerouting priority dstnat
                     {inward}
                 }}
                 chain outward {{ type nat hook postrouting priority srcnat
                     {outward}
                 }}
             }}
             table inet filter
             delete table inet filter
             table inet filter {{
                 chain here {{ type filter hook input priority filter; policy drop
                     ct state established,related accept
                     icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
                     {unsolicited}
                 }}
                 chain through {{ type filter hook forward priority filter; policy drop
                     {udp}
                     ct state established,related accept
                     ct status dnat accept
                     iifname {LAN} accept
                 }}
             }}"
        );
        self.inside.host.filter(&rules)
    }

    /// Forgets all mappings. `source` replaces the source NAT statement if given.
    pub(crate) fn restart(&mut self, source: Option<&str>) -> Result<()> {
        self.set_rules(source)?;
        // Masquerading forgets the mappings of a NIC that goes down.
        let host = &self.inside.host;
        host.netlink()?.set_down(host.index(WAN)?)?;
        host.set_up(WAN)?;
        self.outside.0.add_default_route(host, WAN)
    }

    /// Gives the router another outer address.
    pub(crate) fn change_address(&self) -> Result<()> {
        let (network, end) = self.outside;
        network.readdress(&self.inside.host, WAN, end)
    }
}
