//! Restores addresses, routes and rules of the tunnel that another program removes.
//!
//! Managers of networks remove what they did not add, for instance when they restart. The tunnel then looks
//! up but carries nothing. It compares its settings with the kernel's tables after each change, and adds the
//! missing ones. If that happens too often, two programs fight for a setting: then it gives up for a while, and
//! says so.

use crate::node::Restorations;
use crate::setup::routes::Plan;
use ipnet::IpNet;
use seikan_proto::time::Instant;
use seikan_sys::netlink::{Family, Netlink, NetlinkError, Route, Rule};
use std::collections::VecDeque;
use std::time::Duration;
use tracing::{info, warn};

/// Restorations within [`WINDOW`] after which the tunnel gives up.
const MAX_RESTORATIONS: usize = 10;
/// See [`MAX_RESTORATIONS`].
const WINDOW: Duration = Duration::from_secs(60);
/// Time for which nothing is restored after another program kept removing it.
const PAUSE: Duration = Duration::from_secs(600);

/// Addresses, routes and rules that a tunnel has added to the kernel's tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Addresses of the interface.
    pub addresses: Vec<IpNet>,
    /// Routes into it, with their tables.
    pub routes: Vec<(IpNet, u32)>,
    /// Rules for these tables.
    pub rules: Vec<Rule>,
}

impl Settings {
    /// The settings of a tunnel with these addresses and this plan of routes.
    pub fn new(addresses: &[IpNet], plan: &Plan) -> Settings {
        Settings {
            addresses: addresses.to_vec(),
            routes: plan.routes.clone(),
            rules: plan.rules.clone(),
        }
    }

    /// Returns the settings that the kernel's tables lack.
    fn missing(&self, netlink: &Netlink, index: u32) -> Result<Settings, NetlinkError> {
        let mut missing = Settings::default();
        let addresses = netlink.addresses(index)?;
        let is_missing = |net: &&IpNet| addresses.iter().all(|address| address.net != **net);
        missing.addresses = self.addresses.iter().filter(is_missing).copied().collect();
        for family in [Family::V4, Family::V6] {
            let is_of = |(prefix, _): &&(IpNet, u32)| Family::of(prefix.addr()) == family;
            if self.routes.iter().any(|route| is_of(&route)) {
                let present = netlink.all_routes(family)?;
                let is_missing = |(prefix, table): &&(IpNet, u32)| {
                    present.iter().all(|route| {
                        route.device != Some(index)
                            || route.table != *table
                            || route.destination != prefix.trunc()
                    })
                };
                let routes = self.routes.iter().filter(is_of).filter(is_missing);
                missing.routes.extend(routes);
            }
            if self.rules.iter().any(|rule| rule.family == family) {
                let present = netlink.rules(family)?;
                let rules = self.rules.iter().filter(|rule| rule.family == family);
                missing
                    .rules
                    .extend(rules.filter(|rule| !present.contains(rule)));
            }
        }
        Ok(missing)
    }

    fn forget(&mut self, settings: &Settings) {
        self.addresses
            .retain(|address| !settings.addresses.contains(address));
        self.routes.retain(|route| !settings.routes.contains(route));
        self.rules.retain(|rule| !settings.rules.contains(rule));
    }
}

/// Restores the settings of one tunnel.
#[derive(Debug)]
pub struct Restorer {
    settings: Settings,
    index: u32,
    /// Times of the latest restorations; at most [`MAX_RESTORATIONS`].
    latest: VecDeque<Instant>,
    given_up_until: Option<Instant>,
    restorations: Restorations,
}

impl Restorer {
    /// Watches over the settings of the interface with this index, as far as they are there now: a hook may
    /// have removed one.
    pub fn new(mut settings: Settings, index: u32) -> Restorer {
        let missing = Netlink::open().and_then(|netlink| settings.missing(&netlink, index));
        if let Ok(missing) = missing {
            settings.forget(&missing);
        }
        Restorer {
            settings,
            index,
            latest: VecDeque::new(),
            given_up_until: None,
            restorations: Restorations::default(),
        }
    }

    /// The restorations so far.
    pub fn restorations(&self) -> Restorations {
        self.restorations
    }

    /// When to call [`Self::check`] although nothing has changed.
    pub fn next_check(&self) -> Option<Instant> {
        self.given_up_until
    }

    /// Adds the missing settings. An interface that is down keeps no routes, so nothing is added to it.
    pub fn check(&mut self, now: Instant) {
        if self.given_up_until.is_some_and(|until| now < until) {
            return;
        }
        if self.given_up_until.take().is_some() {
            self.latest.clear();
            self.restorations.contested = false;
        }
        // Without netlink there is nothing to compare with. The next change runs this again.
        let Ok(netlink) = Netlink::open() else { return };
        if !netlink.link_by_index(self.index).is_ok_and(|link| link.up) {
            return;
        }
        let restored = match self.restore(&netlink) {
            Ok(0) => return,
            Ok(restored) => restored,
            // A failure counts as an attempt, so that it is not retried forever.
            Err(error) => {
                warn!(target: "tunnel", %error, "cannot restore a setting that another program removed");
                0
            }
        };
        self.restorations.count += restored;
        self.latest.push_back(now);
        while self
            .latest
            .front()
            .is_some_and(|at| now.duration_since(*at) > WINDOW)
        {
            self.latest.pop_front();
        }
        if self.latest.len() >= MAX_RESTORATIONS {
            warn!(
                target: "tunnel",
                "another program keeps removing addresses, routes or rules of this tunnel: they are not \
                 restored for ten minutes; tell that program not to manage the interface"
            );
            self.restorations.contested = true;
            self.given_up_until = Some(now + PAUSE);
        }
    }

    /// Returns the number of settings that were added.
    fn restore(&self, netlink: &Netlink) -> Result<u64, NetlinkError> {
        let mut restored = 0;
        // Addresses come first, since routes need them.
        let missing = self.settings.missing(netlink, self.index)?;
        for address in &missing.addresses {
            added(
                netlink.add_address(self.index, *address),
                address,
                &mut restored,
            )?;
        }
        for (prefix, table) in &missing.routes {
            let route = Route::to(*prefix).device(self.index).table(*table);
            added(netlink.add_route(&route), prefix, &mut restored)?;
        }
        for rule in &missing.rules {
            added(netlink.add_rule(rule), rule, &mut restored)?;
        }
        Ok(restored)
    }
}

/// Logs and counts a setting that was added. One that was there is none: the other program was faster.
fn added(
    result: Result<(), NetlinkError>,
    setting: &dyn std::fmt::Display,
    restored: &mut u64,
) -> Result<(), NetlinkError> {
    match result {
        Ok(()) => {
            info!(target: "tunnel", %setting, "restored a setting that another program removed");
            *restored += 1;
            Ok(())
        }
        Err(error) if error.is_exists() => Ok(()),
        Err(error) => Err(error),
    }
}
