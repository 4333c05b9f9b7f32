//! The hosts of a cell, each behind its NATs.
//!
//! ```text
//! internet 198.51.100.1 --- switch --- .30 shared box --- switch --- .10 A's boxes --- switch --- .10 A
//! coordinator, relays                    (if any)                \-- .20 B's boxes --- switch -w- .20 B
//! ```
//! Networks of homes are all 192.168.1.0/24, as they are in life; carriers have 100.64.N.0/24. The cable of host B, `w`, is a
//! [`Wire`], which takes its time. Each host and each box is a namespace of its own. Who has IPv6 has global addresses of a network of
//! its own, 2001:db8:0:END::/64, which its box routes and lets answers into; without a box it is in 2001:db8::/64 with everybody.

use std::fs;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use ipnet::IpNet;
use seikan_sys::netlink::{AddressOptions, Netlink, NetlinkError, Route};

use super::plan::{Cell, NatBox};
use crate::error::{LabError, Result};
use crate::link::Host;
use crate::wire::{Faults, Wire, WireFaults};

/// The network of everybody.
pub(crate) const INTERNET: [u8; 3] = [198, 51, 100];
/// The network of a home.
const HOME: [u8; 3] = [192, 168, 1];
/// Ends of addresses: of who gives a network its way out, of A and B, and of what both are behind.
pub(crate) const FIRST: u8 = 1;
const ENDS: [u8; 2] = [10, 20];
const SHARED: u8 = 30;
/// What is added to the end of an address that changes.
const MOVED: u8 = 100;
/// The card to the outside, the switch inside, and where a wire is plugged in.
const WAN: &str = "wan";
const LAN: &str = "lan";
const WIRED: &str = "wired";

/// Of a switch itself. Without one it has the lowest of its ports', and another when a port comes, which its neighbours do not know.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// A switch with a network, and the host that it belongs to.
pub(crate) struct Switch {
    pub(crate) host: Host,
    netlink: Netlink,
    bridge: u32,
    network: [u8; 3],
}

/// A NAT.
struct Router {
    inside: Switch,
    what: NatBox,
    /// The network outside, and its address there.
    outside: ([u8; 3], u8),
    wan: u32,
    /// Ends of the addresses inside that have an outer one of their own.
    customers: Vec<u8>,
}

/// All of a cell.
pub(super) struct Site {
    internet: Switch,
    _shared: Vec<Router>,
    routers: [Vec<Router>; 2],
    hosts: [Host; 2],
    cards: [u32; 2],
    wire: Wire,
    delay: Duration,
}

fn refused(error: NetlinkError) -> LabError {
    LabError::Setup(error.to_string())
}

pub(crate) fn address(network: [u8; 3], end: u8) -> IpAddr {
    let [a, b, c] = network;
    Ipv4Addr::new(a, b, c, end).into()
}

/// An address of a network of 2001:db8::/48; everybody's is 0.
fn address6(network: u8, end: u8) -> IpAddr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, network.into(), 0, 0, 0, end.into()).into()
}

fn net6(network: u8, end: u8) -> IpNet {
    IpNet::new_assert(address6(network, end), 64)
}

fn net(network: [u8; 3], end: u8) -> IpNet {
    IpNet::new_assert(address(network, end), 24)
}

impl Switch {
    pub(crate) fn create(name: &'static str, network: [u8; 3]) -> Result<Switch> {
        let mut host = Host::create(name, FIRST)?;
        // A box has long been up when hosts behind it begin: its link-local address, from which it looks for neighbours, is not
        // tentative any more (RFC 4862, section 5.4).
        let file = "/proc/sys/net/ipv6/conf/default/accept_dad";
        let sure = host.run(|| fs::write(file, "0"))?;
        sure.map_err(LabError::io("have a box be sure of its address"))?;
        WIRED.clone_into(&mut host.device);
        let netlink = host.netlink()?;
        let bridge = netlink.create_bridge(LAN).map_err(refused)?;
        netlink.set_hardware_address(bridge, MAC).map_err(refused)?;
        netlink
            .add_address(bridge, net(network, FIRST))
            .map_err(refused)?;
        netlink.set_up(bridge).map_err(refused)?;
        Ok(Switch {
            host,
            netlink,
            bridge,
            network,
        })
    }

    /// Gives a port to what is at the other end of a cable.
    fn take(&self, port: &str) -> Result<()> {
        let port = self.netlink.link(port).map_err(refused)?.index;
        self.netlink
            .set_master(port, Some(self.bridge))
            .map_err(refused)?;
        self.netlink.set_up(port).map_err(refused)
    }

    /// Gives `host` a card at this switch.
    pub(crate) fn plug(&self, host: &Host, card: &str, end: u8) -> Result<()> {
        let port = format!("port{end}");
        let peer = Some(host.netns().as_fd());
        self.netlink
            .create_veth(&port, card, peer)
            .map_err(refused)?;
        self.take(&port)
    }

    /// Gives a card that is plugged in its address, and the way out; the card's index.
    pub(crate) fn configure(&self, host: &Host, card: &str, end: u8) -> Result<u32> {
        let netlink = host.netlink()?;
        let index = netlink.link(card).map_err(refused)?.index;
        netlink
            .add_address(index, net(self.network, end))
            .map_err(refused)?;
        netlink.set_up(index).map_err(refused)?;
        netlink
            .add_route(&way(self.network, index))
            .map_err(refused)?;
        Ok(index)
    }
}

/// Gives a card an address of such a network, and the way out by its first address if that is another's.
fn configure6(netlink: &Netlink, card: u32, network: u8, end: u8) -> Result<()> {
    // Nobody else has it, and who starts next is to have it at once.
    let options = AddressOptions {
        no_dad: true,
        ..AddressOptions::default()
    };
    netlink
        .add_address_with(card, net6(network, end), options)
        .map_err(refused)?;
    if end == FIRST {
        return Ok(());
    }
    let all = IpNet::new_assert(Ipv6Addr::UNSPECIFIED.into(), 0);
    let route = Route::to(all).via(address6(network, FIRST)).device(card);
    netlink.add_route(&route).map_err(refused)
}

/// Has a host forward IPv6.
fn forward6(host: &Host) -> Result<()> {
    let file = "/proc/sys/net/ipv6/conf/all/forwarding";
    let forwarded = host.run(|| fs::write(file, "1"))?;
    forwarded.map_err(LabError::io("have a box forward IPv6"))
}

/// The way to everything else.
fn way(network: [u8; 3], card: u32) -> Route {
    let all = IpNet::new_assert([0; 4].into(), 0);
    Route::to(all).via(address(network, FIRST)).device(card)
}

impl Router {
    /// A box at a switch, with a network inside for these.
    fn create(
        at: &Switch,
        end: u8,
        what: &NatBox,
        inside: [u8; 3],
        customers: &[u8],
    ) -> Result<Router> {
        let inside = Switch::create("box", inside)?;
        at.plug(&inside.host, WAN, end)?;
        // Networks of carriers are not the world's: who is in the world needs no way to them.
        let wan = at.configure(&inside.host, WAN, end)?;
        let mut router = Router {
            inside,
            what: what.clone(),
            outside: (at.network, end),
            wan,
            customers: customers.to_vec(),
        };
        for (_, outer) in router.maps().into_iter().skip(1) {
            let outer = IpNet::from(outer);
            router
                .inside
                .netlink
                .add_address(wan, outer)
                .map_err(refused)?;
        }
        let forwarded = router
            .inside
            .host
            .run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1"))?;
        forwarded.map_err(LabError::io("have a box forward"))?;
        router.set_rules(None)?;
        Ok(router)
    }

    /// With a static map: who inside has which outer address.
    fn maps(&self) -> Vec<(IpAddr, IpAddr)> {
        let (network, first) = self.outside;
        let outer = (first..).map(|end| address(network, end));
        let inner = self.customers.iter();
        let inner = inner.map(|end| address(self.inside.network, *end));
        match self.what.one_to_one {
            true => inner.zip(outer).collect(),
            false => Vec::new(),
        }
    }

    /// Puts its rules in force, with another statement that maps perhaps.
    fn set_rules(&mut self, source: Option<&str>) -> Result<()> {
        if let Some(source) = source {
            source.clone_into(&mut self.what.source);
        }
        let (mut inward, mut outward) = (String::new(), String::new());
        if self.what.one_to_one {
            let from = if self.what.hairpin {
                String::new()
            } else {
                format!("iifname {WAN} ")
            };
            for (inner, outer) in self.maps() {
                inward += &format!("{from}ip daddr {outer} dnat to {inner}\n");
                outward += &format!("ip saddr {inner} snat to {outer}\n");
            }
        } else {
            outward = format!("oifname {WAN} {}", self.what.source);
        }
        let udp = if self.what.udp {
            ""
        } else {
            "meta l4proto udp drop"
        };
        // Routers drop what nobody inside asked for, and say nothing.
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
                 }}
                 chain through {{ type filter hook forward priority filter; policy drop
                     {udp}
                     ct state established,related accept
                     ct status dnat accept
                     iifname {LAN} accept
                 }}
             }}"
        );
        nft(&self.inside.host, &rules)
    }
}

/// Has nftables do this on a host.
fn nft(host: &Host, rules: &str) -> Result<()> {
    let mut nft = Command::new("nft");
    nft.args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = host
        .spawn(&mut nft)
        .map_err(LabError::io("start nft: is it installed"))?;
    if let Some(mut input) = child.stdin.take() {
        input
            .write_all(rules.as_bytes())
            .map_err(LabError::io("write rules to nft"))?;
    }
    let output = child
        .wait_with_output()
        .map_err(LabError::io("wait for nft"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(LabError::Setup(format!("nft: {}", said.trim())));
    }
    Ok(())
}

impl Site {
    /// Makes all of it, with packets taking `delay` to host B and again from it.
    pub(super) fn create(cell: &Cell, delay: Duration) -> Result<Site> {
        let internet = Switch::create("internet", INTERNET)?;
        let mut shared: Vec<Router> = Vec::new();
        let own = cell.nats.iter().map(|nat| nat.boxes.len()).max();
        let own = own.unwrap_or(0);
        for (depth, what) in cell.shared.iter().enumerate() {
            let last = depth + 1 == cell.shared.len();
            let (end, customers) = (SHARED, if last { &ENDS[..] } else { &[SHARED] });
            let network = inner(depth, last && own == 0);
            let at = shared.last().map_or(&internet, |router| &router.inside);
            shared.push(Router::create(at, end, what, network, customers)?);
        }
        let hosts = [Host::create("A", 1)?, Host::create("B", 2)?];
        let mut routers = [Vec::new(), Vec::new()];
        for ((nat, end), routers) in cell.nats.iter().zip(ENDS).zip(&mut routers) {
            for (depth, what) in nat.boxes.iter().enumerate() {
                let network = inner(shared.len() + depth, depth + 1 == nat.boxes.len());
                let at = outer(&internet, &shared, routers);
                routers.push(Router::create(at, end, what, network, &[end])?);
            }
        }
        let at = outer(&internet, &shared, &routers[0]);
        at.plug(&hosts[0], &hosts[0].device, ENDS[0])?;
        let a = at.configure(&hosts[0], &hosts[0].device, ENDS[0])?;
        let at = outer(&internet, &shared, &routers[1]);
        let wire = Wire::between(&at.host, &hosts[1], delayed(delay, false))?;
        at.take(WIRED)?;
        let b = at.configure(&hosts[1], &hosts[1].device, ENDS[1])?;
        let site = Site {
            internet,
            _shared: shared,
            routers,
            hosts,
            cards: [a, b],
            wire,
            delay,
        };
        if cell.nats.iter().any(|nat| nat.ipv6) {
            site.add_ipv6(cell)?;
        }
        Ok(site)
    }

    /// Gives IPv6 to who is to have it.
    fn add_ipv6(&self, cell: &Cell) -> Result<()> {
        let Switch {
            host,
            netlink,
            bridge,
            ..
        } = &self.internet;
        forward6(host)?;
        configure6(netlink, *bridge, 0, FIRST)?;
        for (end, at) in ENDS.into_iter().enumerate() {
            if !cell.nats[end].ipv6 {
                continue;
            }
            let (card, of) = (self.cards[end], self.hosts[end].netlink()?);
            match self.routers[end].as_slice() {
                [] => configure6(&of, card, 0, at)?,
                [router] if cell.shared.is_empty() => {
                    let inside = &router.inside;
                    forward6(&inside.host)?;
                    configure6(&inside.netlink, router.wan, 0, at)?;
                    configure6(&inside.netlink, inside.bridge, at, FIRST)?;
                    configure6(&of, card, at, at)?;
                    let home = Route::to(net6(at, 0)).via(address6(0, at)).device(*bridge);
                    netlink.add_route(&home).map_err(refused)?;
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

    /// B's innermost box forgets what it has mapped, and maps by this statement perhaps.
    pub(super) fn restart_nat(&mut self, source: Option<&str>) -> Result<()> {
        let router = self.routers[1].last_mut();
        let router = router.ok_or_else(|| LabError::Usage("B has no NAT to restart".to_owned()))?;
        router.set_rules(source)?;
        // Masquerading forgets what it has mapped to a card that goes down.
        let netlink = &router.inside.netlink;
        netlink.set_down(router.wan).map_err(refused)?;
        netlink.set_up(router.wan).map_err(refused)?;
        let (network, _) = router.outside;
        netlink
            .add_route(&way(network, router.wan))
            .map_err(refused)
    }

    /// B's outermost box has another address outside, or B itself if it has none.
    pub(super) fn change_address(&mut self) -> Result<()> {
        let Some(router) = self.routers[1].first_mut() else {
            let netlink = self.hosts[1].netlink()?;
            let network = INTERNET;
            return readdress(&netlink, self.cards[1], network, ENDS[1]);
        };
        let (network, end) = router.outside;
        readdress(&router.inside.netlink, router.wan, network, end)
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

/// A card gets another address, after it was unplugged as it were.
fn readdress(netlink: &Netlink, card: u32, network: [u8; 3], end: u8) -> Result<()> {
    netlink.set_down(card).map_err(refused)?;
    netlink
        .delete_address(card, net(network, end))
        .map_err(refused)?;
    netlink
        .add_address(card, net(network, end + MOVED))
        .map_err(refused)?;
    netlink.set_up(card).map_err(refused)?;
    netlink.add_route(&way(network, card)).map_err(refused)
}

/// The network inside of a box with so many before it.
fn inner(depth: usize, last: bool) -> [u8; 3] {
    match last {
        true => HOME,
        false => [100, 64, depth as u8],
    }
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
