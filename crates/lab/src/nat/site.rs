//! The hosts of a cell, each behind its NATs.
//!
//! ```text
//! internet 198.51.100.1 --- switch --- .30 shared box --- switch --- .10 A's boxes --- switch --- .10 A
//! coordinator, relays                    (if any)                \-- .20 B's boxes --- switch -w- .20 B
//! ```
//! All hosts at the internet's switch have addresses of length 32, so packets between them pass the
//! host of the internet, which is a router. All home networks are 192.168.1.0/24, as in practice;
//! carriers have 100.64.N.0/24. The cable of host B, `w`, is an emulated link with a delay
//! ([`Wire`]). Each host and each box is a namespace of its own. A host with IPv6 has global
//! addresses of a network of its own, 2001:db8:0:END::/64, which its box routes and to which it
//! admits answers. Without a box it is in 2001:db8::/64, the network of the internet.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use seikan_sys::netlink::Route;

use super::plan::Cell;
use crate::error::{Result, usage};
use crate::site::{FIRST, Host, INTERNET, LAN, Link, Router, Switch, WAN, address, network as net};
use crate::wire::{Faults, Wire, WireFaults};

/// The network of a home.
const HOME: [u8; 3] = [192, 168, 1];
/// Last bytes of the addresses of A and B, and of their common router.
const ENDS: [u8; 2] = [10, 20];
const SHARED: u8 = 30;

/// All hosts and links of a cell.
pub(super) struct Site {
    internet: Switch,
    _shared: Vec<Router>,
    routers: [Vec<Router>; 2],
    hosts: [Host; 2],
    wire: Option<Wire>,
    delay: Duration,
}

/// Returns an address in a network of 2001:db8::/48. Network 0 is the internet's.
fn address6(network: u8, end: u8) -> IpAddr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, network.into(), 0, 0, 0, end.into()).into()
}

/// Gives a NIC an address in such a network. If the network's first address belongs to another
/// host, also adds the default route via that address.
fn configure6(host: &Host, nic: &str, network: u8, end: u8) -> Result<()> {
    host.add_address(nic, net(address6(network, end)))?;
    match end {
        FIRST => Ok(()),
        _ => host.add_default_route(address6(network, FIRST), nic),
    }
}

impl Site {
    /// Creates the hosts. Packets take `delay` to host B, and again from it.
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
        at.connect(&hosts[0], &hosts[0].device, ENDS[0], &Link::default())?;
        let at = outer(&internet, &shared, &routers[1]);
        let slow = Link::with_faults(delayed(delay, false));
        let wire = at.connect(&hosts[1], &hosts[1].device, ENDS[1], &slow)?;
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
                    return Err(usage(format!(
                        "cannot play {}: a host with IPv6 is behind one box of its own, or behind none",
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

    /// Returns A's address as B sees it if A is not behind a NAT.
    pub(super) fn open_a(&self) -> IpAddr {
        address(INTERNET, ENDS[0])
    }

    /// Cuts B off from the network, or reconnects it.
    pub(super) fn cut(&self, cut: bool) -> Result<()> {
        let mut wire = self.wire.iter();
        wire.try_for_each(|wire| wire.set(delayed(self.delay, cut)))
    }

    /// Restarts B's innermost router, which loses its mappings, optionally with another statement.
    pub(super) fn restart_nat(&mut self, source: Option<&str>) -> Result<()> {
        let router = self.routers[1].last_mut();
        let router = router.ok_or_else(|| usage("B has no NAT to restart"))?;
        router.restart(source)
    }

    /// Replaces the outer address of B's outermost box; without a box, the address of B itself.
    pub(super) fn change_address(&self) -> Result<()> {
        match self.routers[1].first() {
            Some(router) => router.change_address(),
            None => {
                let (host, network) = (&self.hosts[1], self.internet.network);
                network.readdress(host, &host.device, ENDS[1])
            }
        }
    }

    /// Returns the host on which coordinator and relays run, and its address.
    pub(super) fn internet(&self) -> (&Host, IpAddr) {
        (&self.internet.host, address(INTERNET, FIRST))
    }

    /// Returns the IPv6 address of relays, for cells with IPv6.
    pub(super) fn internet6(&self) -> IpAddr {
        address6(0, FIRST)
    }
}

/// Returns the inner network of a router at this depth.
fn inner(depth: usize, last: bool) -> [u8; 3] {
    if last { HOME } else { [100, 64, depth as u8] }
}

/// Returns the inner switch of the innermost box; without a box, the switch of the internet.
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
