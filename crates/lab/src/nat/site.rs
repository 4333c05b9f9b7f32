//! The hosts of a cell, each behind its NATs.
//!
//! ```text
//! internet 198.51.100.1 --- switch --- .30 shared box --- switch --- .10 A's boxes --- switch --- .10 A
//! coordinator, relays                    (if any)                \-- .20 B's boxes --- switch -w- .20 B
//! ```
//! Everybody at the internet's switch has an address of length 32: packets between them pass the host
//! of the internet, a router. All home networks are 192.168.1.0/24, as in practice; carriers have 100.64.N.0/24. The cable of
//! host B, `w`, is an emulated link with a delay ([`Wire`]). Each host and each box is a namespace
//! of its own. A host with IPv6 has global addresses of a network of its own, 2001:db8:0:END::/64,
//! which its box routes and to which it admits answers. Without a box it is in 2001:db8::/64, the
//! network of the internet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;
use std::time::Duration;

use ipnet::IpNet;
use seikan_sys::netlink::Route;

use super::plan::{Cell, Input, NatBox};
use crate::error::{LabError, Result};
use crate::host::{Host, network as net};
use crate::wire::{Faults, Wire, WireFaults};

/// The network of everybody.
pub(crate) const INTERNET: [u8; 3] = [198, 51, 100];
/// The network of a home.
const HOME: [u8; 3] = [192, 168, 1];
/// Last bytes of addresses: of a network's router, of A and B, and of their common router.
pub(crate) const FIRST: u8 = 1;
const ENDS: [u8; 2] = [10, 20];
const SHARED: u8 = 30;
/// Offset added to the last byte of an address that changes.
const MOVED: u8 = 100;
/// The nic to the outside, the switch inside, and where a wire is plugged in.
const WAN: &str = "wan";
const LAN: &str = "lan";
const WIRED: &str = "wired";

/// Of a switch itself. Without one it has the lowest of its ports', and another when a port comes,
/// which its neighbours do not know.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// The network of a switch.
#[derive(Debug, Clone, Copy)]
struct Network {
    prefix: [u8; 3],
    /// Whether its hosts reach each other through its router alone.
    routed: bool,
}

impl Network {
    fn address(self, end: u8) -> IpAddr {
        address(self.prefix, end)
    }

    /// The address of a host, with the length of its network.
    fn net(self, end: u8) -> IpNet {
        let address = self.address(end);
        if self.routed {
            address.into()
        } else {
            net(address)
        }
    }

    fn add_default_route(self, host: &Host, nic: &str) -> Result<()> {
        let router = self.address(FIRST);
        if self.routed {
            host.add_route(&Route::to(router.into()).device(host.index(nic)?))?;
        }
        host.add_default_route(router, nic)
    }
}

/// A switch with a network, and the host that it belongs to.
#[derive(Debug)]
pub(crate) struct Switch {
    pub(crate) host: Host,
    network: Network,
}

/// A NAT.
#[derive(Debug)]
pub(crate) struct Router {
    /// Its host, and the switch of the network inside.
    pub(crate) inside: Switch,
    rules: NatBox,
    /// The network outside, and its address there.
    outside: (Network, u8),
    /// Ends of the addresses inside that have an outer one of their own.
    customers: Vec<u8>,
}

/// All of a cell.
pub(super) struct Site {
    internet: Switch,
    _shared: Vec<Router>,
    routers: [Vec<Router>; 2],
    hosts: [Host; 2],
    wire: Wire,
    delay: Duration,
}

pub(crate) fn address(network: [u8; 3], end: u8) -> IpAddr {
    address_v4(network, end).into()
}

pub(crate) fn address_v4(network: [u8; 3], end: u8) -> Ipv4Addr {
    let [a, b, c] = network;
    Ipv4Addr::new(a, b, c, end)
}

/// An address of a network of 2001:db8::/48; everybody's is 0.
fn address6(network: u8, end: u8) -> IpAddr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, network.into(), 0, 0, 0, end.into()).into()
}

impl Switch {
    pub(crate) fn create(name: &'static str, network: [u8; 3]) -> Result<Switch> {
        let mut host = Host::create(name, FIRST)?;
        // A box has long been up when hosts behind it begin: its link-local address, from which it
        // looks for neighbours, is not tentative any more (RFC 4862, section 5.4).
        host.write_sysctl("net/ipv6/conf/default/accept_dad", "0")?;
        WIRED.clone_into(&mut host.device);
        let netlink = host.netlink()?;
        netlink.set_hardware_address(netlink.create_bridge(LAN)?, MAC)?;
        host.add_address(LAN, net(address(network, FIRST)))?;
        host.set_up(LAN)?;
        let network = Network {
            prefix: network,
            routed: false,
        };
        Ok(Switch { host, network })
    }

    /// Has the hosts at it reach each other through its router, whose redirects would end that.
    pub(crate) fn route(mut self) -> Result<Switch> {
        self.host.forward(true)?;
        for interface in ["all", LAN] {
            let name = format!("net/ipv4/conf/{interface}/send_redirects");
            self.host.write_sysctl(&name, "0")?;
        }
        self.network.routed = true;
        Ok(self)
    }

    /// Gives `host` a nic at this switch.
    pub(crate) fn plug(&self, host: &Host, nic: &str, end: u8) -> Result<()> {
        let port = format!("port{end}");
        self.host.plug(LAN, &port, host, nic)
    }

    /// Gives a nic that is plugged in its address, and the default route.
    pub(crate) fn configure(&self, host: &Host, nic: &str, end: u8) -> Result<()> {
        host.add_address(nic, self.network.net(end))?;
        host.set_up(nic)?;
        self.network.add_default_route(host, nic)
    }
}

/// Gives a nic an address of such a network, and the default route by its first address if that is
/// another's.
fn configure6(host: &Host, nic: &str, network: u8, end: u8) -> Result<()> {
    host.add_address(nic, net(address6(network, end)))?;
    match end {
        FIRST => Ok(()),
        _ => host.add_default_route(address6(network, FIRST), nic),
    }
}

impl Router {
    /// A box at a switch, with a network inside for these.
    pub(crate) fn create(
        at: &Switch,
        end: u8,
        rules: &NatBox,
        inside: [u8; 3],
        customers: &[u8],
    ) -> Result<Router> {
        let inside = Switch::create("box", inside)?;
        at.plug(&inside.host, WAN, end)?;
        // Carrier networks are private: hosts of the internet need no route to them.
        at.configure(&inside.host, WAN, end)?;
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

    /// Pairs of inner and outer addresses of a static map.
    fn maps(&self) -> Vec<(IpAddr, IpAddr)> {
        let (network, first) = self.outside;
        let outer = (first..).map(|end| network.address(end));
        let inner = self.customers.iter();
        let inner = inner.map(|end| self.inside.network.address(*end));
        if self.rules.one_to_one {
            inner.zip(outer).collect()
        } else {
            Vec::new()
        }
    }

    /// Puts its rules in force, with another statement that maps perhaps.
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
        let mut nft = Command::new("nft");
        let host = &self.inside.host;
        host.output(nft.args(["-f", "-"]), &rules).map(drop)
    }
}

impl Site {
    /// Makes all of it, with packets taking `delay` to host B and again from it.
    pub(super) fn create(cell: &Cell, delay: Duration) -> Result<Site> {
        let internet = Switch::create("internet", INTERNET)?.route()?;
        let mut shared: Vec<Router> = Vec::new();
        let own = cell.nats.iter().map(|nat| nat.boxes.len()).max();
        let own = own.unwrap_or(0);
        for (depth, rules) in cell.shared.iter().enumerate() {
            let last = depth + 1 == cell.shared.len();
            let (end, customers) = (SHARED, if last { &ENDS[..] } else { &[SHARED] });
            let network = inner(depth, last && own == 0);
            let at = shared.last().map_or(&internet, |router| &router.inside);
            shared.push(Router::create(at, end, rules, network, customers)?);
        }
        let hosts = [Host::create("A", 1)?, Host::create("B", 2)?];
        let mut routers = [Vec::new(), Vec::new()];
        for ((nat, end), routers) in cell.nats.iter().zip(ENDS).zip(&mut routers) {
            for (depth, rules) in nat.boxes.iter().enumerate() {
                let network = inner(shared.len() + depth, depth + 1 == nat.boxes.len());
                let at = outer(&internet, &shared, routers);
                routers.push(Router::create(at, end, rules, network, &[end])?);
            }
        }
        let at = outer(&internet, &shared, &routers[0]);
        at.plug(&hosts[0], &hosts[0].device, ENDS[0])?;
        at.configure(&hosts[0], &hosts[0].device, ENDS[0])?;
        let at = outer(&internet, &shared, &routers[1]);
        let wire = Wire::between(&at.host, &hosts[1], delayed(delay, false))?;
        at.host.add_port(LAN, WIRED)?;
        at.configure(&hosts[1], &hosts[1].device, ENDS[1])?;
        let site = Site {
            internet,
            _shared: shared,
            routers,
            hosts,
            wire,
            delay,
        };
        if cell.nats.iter().any(|nat| nat.ipv6) {
            site.add_ipv6(cell)?;
        }
        Ok(site)
    }

    /// Configures IPv6 for the hosts that need it.
    fn add_ipv6(&self, cell: &Cell) -> Result<()> {
        let internet = &self.internet.host;
        internet.forward6()?;
        configure6(internet, LAN, 0, FIRST)?;
        for (end, at) in ENDS.into_iter().enumerate() {
            if !cell.nats[end].ipv6 {
                continue;
            }
            let host = &self.hosts[end];
            match self.routers[end].as_slice() {
                [] => configure6(host, &host.device, 0, at)?,
                [router] if cell.shared.is_empty() => {
                    let inside = &router.inside.host;
                    inside.forward6()?;
                    configure6(inside, WAN, 0, at)?;
                    configure6(inside, LAN, at, FIRST)?;
                    configure6(host, &host.device, at, at)?;
                    let home = Route::to(net(address6(at, 0))).via(address6(0, at));
                    internet.add_route(&home.device(internet.index(LAN)?))?;
                }
                _ => {
                    return Err(LabError::Usage(format!(
                        "{}: IPv6 is played behind one box of a host's own, or none",
                        cell.name()
                    )));
                }
            }
        }
        Ok(())
    }

    /// A or B.
    pub(super) fn host(&self, end: usize) -> &Host {
        &self.hosts[end]
    }

    /// Where B finds A without a NAT before it.
    pub(super) fn open_a(&self) -> IpAddr {
        address(INTERNET, ENDS[0])
    }

    /// Nothing gets to B or from it, or everything does.
    pub(super) fn cut(&self, cut: bool) -> Result<()> {
        self.wire.set(delayed(self.delay, cut))
    }

    /// Restarts B's innermost router, which loses its mappings, optionally with another statement.
    pub(super) fn restart_nat(&mut self, source: Option<&str>) -> Result<()> {
        let router = self.routers[1].last_mut();
        let router = router.ok_or_else(|| LabError::Usage("B has no NAT to restart".to_owned()))?;
        router.set_rules(source)?;
        // Masquerading forgets the mappings of a nic that goes down.
        let host = &router.inside.host;
        host.netlink()?.set_down(host.index(WAN)?)?;
        host.set_up(WAN)?;
        let (network, _) = router.outside;
        network.add_default_route(host, WAN)
    }

    /// B's outermost box has another address outside, or B itself if it has none.
    pub(super) fn change_address(&self) -> Result<()> {
        match self.routers[1].first() {
            Some(router) => {
                let (network, end) = router.outside;
                readdress(&router.inside.host, WAN, network, end)
            }
            None => {
                let (host, network) = (&self.hosts[1], self.internet.network);
                readdress(host, &host.device, network, ENDS[1])
            }
        }
    }

    /// Where coordinator and relays run, and their address.
    pub(super) fn internet(&self) -> (&Host, IpAddr) {
        (&self.internet.host, address(INTERNET, FIRST))
    }

    /// Where relays are by IPv6, if anybody has it.
    pub(super) fn internet6(&self) -> IpAddr {
        address6(0, FIRST)
    }
}

/// A nic gets another address, after it was unplugged as it were.
fn readdress(host: &Host, nic: &str, network: Network, end: u8) -> Result<()> {
    let netlink = host.netlink()?;
    let index = host.index(nic)?;
    netlink.set_down(index)?;
    netlink.delete_address(index, network.net(end))?;
    netlink.add_address(index, network.net(end + MOVED))?;
    netlink.set_up(index)?;
    network.add_default_route(host, nic)
}

/// Returns the inner network of a router at this depth.
fn inner(depth: usize, last: bool) -> [u8; 3] {
    if last { HOME } else { [100, 64, depth as u8] }
}

/// The innermost switch.
fn outer<'a>(internet: &'a Switch, shared: &'a [Router], own: &'a [Router]) -> &'a Switch {
    let last = own.last().or(shared.last());
    last.map_or(internet, |router| &router.inside)
}

fn delayed(delay: Duration, cut: bool) -> WireFaults {
    WireFaults::both(Faults {
        delay_us: delay.as_micros() as u64,
        loss: if cut { 1.0 } else { 0.0 },
        ..Faults::default()
    })
}
