//! Routes into the tunnel, with measures to keep its own datagrams out of it.
//!
//! As wg-quick(8): a route for every allowed prefix that the interface's networks do not include. A default
//! route must not carry the tunnel's own datagrams, so these have a firewall mark, and the default route is in
//! a table that is used only for packets without the mark, and only after all routes of the main table except
//! its default route.
//!
//! Unlike wg-quick, the same is done for any other prefix that contains a peer's endpoint (`AllowedIPs =
//! 0.0.0.0/1, 128.0.0.0/1`, or a site's network that contains its own gateway). Unlike a host route to the
//! endpoint, a mark still works when the peer roams or the host's default route changes. An endpoint whose name
//! could not be resolved yet may be in any prefix.

use ipnet::IpNet;
use seikan_config::{Config, Mode, Table};
use seikan_sys::netlink::{Family, Netlink, NetlinkError, Route, Rule, TABLE_MAIN};
use std::net::IpAddr;

/// The first table and mark to try: WireGuard's port, as in wg-quick.
const FIRST_TABLE: u32 = 51820;
/// Priority of the kernel's rule for the main table; the tunnel's rules precede it.
const LOWEST_KERNEL_RULE: u32 = 32766;
/// The kernel's table of this host's own addresses (`RT_TABLE_LOCAL`).
const TABLE_LOCAL: u32 = 255;

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The kernel's tables cannot be read.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Another program's rules leave no room.
    #[error(
        "cannot add {count} {family} rules before the rule of priority {before}, as the routes of the tunnel need: the \
         priorities before it are in use; give that rule a larger one (`ip rule`), or set `Table`"
    )]
    NoPriority {
        /// Family of the rules.
        family: Family,
        /// Their number.
        count: usize,
        /// Priority of the rule that they have to precede.
        before: u32,
    },
}

/// Routes and rules to add.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Prefixes with their tables, longest prefix first.
    pub routes: Vec<(IpNet, u32)>,
    /// Rules, in the order to add them.
    pub rules: Vec<Rule>,
    /// Mark of the tunnel's datagrams.
    pub mark: Option<u32>,
}

impl Plan {
    /// Whether IPv4 packets without a mark use the tunnel's own table. Received packets must then be checked
    /// with the mark of their answers.
    pub fn marks_ipv4(&self) -> bool {
        self.rules.iter().any(|rule| rule.family == Family::V4)
    }

    /// Adds the rules for prefixes of these lengths, with priorities that the other rules leave.
    fn with_rules(mut self, lengths: &Lengths, others: &[Rule]) -> Result<Plan, PlanError> {
        if let Some(mark) = self.mark {
            for (family, lengths) in [(Family::V4, &lengths.v4), (Family::V6, &lengths.v6)] {
                let rules = rules_for(family, mark, lengths, others)?;
                self.rules.extend(rules);
            }
        }
        Ok(self)
    }

    /// Returns the table and mark of the tunnel's own routes, if any.
    pub fn own_table(&self) -> Option<u32> {
        self.mark.filter(|_| !self.rules.is_empty())
    }
}

/// Endpoints of the configured peers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// Addresses of those that are known.
    pub addresses: Vec<IpAddr>,
    /// Whether there is another one, whose name could not be resolved yet.
    pub has_unknown: bool,
}

/// Endpoints and the tables that route to them.
#[derive(Debug, Clone, Default)]
struct Routed {
    /// Known endpoints, each with the prefix length of its current route.
    known: Vec<(IpAddr, Option<u8>)>,
    has_unknown: bool,
}

/// Prefix lengths in the tunnel's own table, longest first.
#[derive(Default)]
struct Lengths {
    v4: Vec<u8>,
    v6: Vec<u8>,
}

/// Reads the kernel's tables and returns a plan.
pub fn plan(config: &Config, endpoints: &Endpoints, netlink: &Netlink) -> Result<Plan, PlanError> {
    let mut rules = netlink.rules(Family::V4)?;
    rules.extend(netlink.rules(Family::V6)?);
    let (plan, lengths) = plan_routes(config, endpoints, &rules, netlink)?;
    plan.with_rules(&lengths, &rules)
}

/// Returns the routes of a plan, for a running tunnel, which has its rules.
pub fn routes(
    config: &Config,
    endpoints: &Endpoints,
    netlink: &Netlink,
) -> Result<Vec<(IpNet, u32)>, NetlinkError> {
    let mut rules = netlink.rules(Family::V4)?;
    rules.extend(netlink.rules(Family::V6)?);
    let (plan, _) = plan_routes(config, endpoints, &rules, netlink)?;
    Ok(plan.routes)
}

fn plan_routes(
    config: &Config,
    endpoints: &Endpoints,
    rules: &[Rule],
    netlink: &Netlink,
) -> Result<(Plan, Lengths), NetlinkError> {
    if config.mode == Mode::Ethernet {
        // Allowed IPs only limit what a peer sends.
        let plan = Plan {
            mark: config.fwmark.filter(|mark| *mark != 0),
            ..Plan::default()
        };
        return Ok((plan, Lengths::default()));
    }
    let mut main = netlink.routes(Family::V4, TABLE_MAIN)?;
    main.extend(netlink.routes(Family::V6, TABLE_MAIN)?);
    let endpoints = routed(endpoints, &main);
    let mut table = None;
    if config.fwmark.filter(|mark| *mark != 0).is_none() && needs_table(config, &endpoints) {
        table = Some(free_table(netlink, rules)?);
    }
    Ok(make(config, table, &endpoints))
}

/// Finds the prefix length of the current route to each endpoint.
fn routed(endpoints: &Endpoints, main: &[Route]) -> Routed {
    let best = |ip: &IpAddr| (*ip, best_route(*ip, main));
    Routed {
        known: endpoints.addresses.iter().map(best).collect(),
        has_unknown: endpoints.has_unknown,
    }
}

/// Returns the prefix length of the route to an address.
pub fn best_route(to: IpAddr, routes: &[Route]) -> Option<u8> {
    let matching = routes
        .iter()
        .filter(|route| route.destination.contains(&to));
    matching.map(|route| route.destination.prefix_len()).max()
}

/// Whether a route for this prefix would send datagrams for a peer into the tunnel. An unknown endpoint may be in any
/// prefix; in the network of one of the interface's addresses, a mark would not help: the kernel's own route to that
/// network leads into the tunnel.
fn needs_mark(prefix: &IpNet, config: &Config, endpoints: &Routed) -> bool {
    let swallows = |(endpoint, best): &(IpAddr, Option<u8>)| {
        prefix.contains(endpoint) && best.is_none_or(|best| prefix.prefix_len() > best)
    };
    prefix.prefix_len() == 0
        || endpoints.known.iter().any(swallows)
        || endpoints.has_unknown && !is_covered(prefix, &config.addresses)
}

fn needs_table(config: &Config, endpoints: &Routed) -> bool {
    let mut prefixes = config.peers.iter().flat_map(|peer| &peer.allowed_ips);
    config.table == Table::Auto && prefixes.any(|prefix| needs_mark(prefix, config, endpoints))
}

/// Returns the first number that no route or rule uses.
fn free_table(netlink: &Netlink, rules: &[Rule]) -> Result<u32, NetlinkError> {
    for table in FIRST_TABLE.. {
        let used = rules
            .iter()
            .any(|rule| rule.table == table || rule.fwmark == Some(table));
        if !used
            && netlink.routes(Family::V4, table)?.is_empty()
            && netlink.routes(Family::V6, table)?.is_empty()
        {
            return Ok(table);
        }
    }
    Ok(FIRST_TABLE) // not reached: there are four billion tables
}

fn make(config: &Config, own: Option<u32>, endpoints: &Routed) -> (Plan, Lengths) {
    let mut lengths = Lengths::default();
    let mark = config.fwmark.filter(|mark| *mark != 0).or(own);
    let mut prefixes: Vec<IpNet> = config
        .peers
        .iter()
        .flat_map(|peer| peer.allowed_ips.iter().copied())
        .collect();
    prefixes.sort_by_key(|prefix| (std::cmp::Reverse(prefix.prefix_len()), *prefix));
    prefixes.dedup();
    let mut plan = Plan {
        mark,
        ..Plan::default()
    };
    for prefix in prefixes {
        let table = match (config.table, mark) {
            (Table::Off, _) => continue,
            (Table::Number(table), _) => table,
            (Table::Auto, Some(mark)) if needs_mark(&prefix, config, endpoints) => {
                let lengths = match Family::of(prefix.addr()) {
                    Family::V4 => &mut lengths.v4,
                    Family::V6 => &mut lengths.v6,
                };
                lengths.push(prefix.prefix_len());
                mark
            }
            (Table::Auto, _) if is_covered(&prefix, &config.addresses) => continue,
            (Table::Auto, _) => TABLE_MAIN,
        };
        plan.routes.push((prefix, table));
    }
    (plan, lengths)
}

/// Whether the kernel's own route for an interface address includes the prefix.
fn is_covered(prefix: &IpNet, addresses: &[IpNet]) -> bool {
    addresses.iter().any(|net| net.trunc().contains(prefix))
}

/// Returns the largest of `count` successive priorities that no rule has. They precede all other rules but that of the
/// local table; if there is no room, at least all rules for the main table and those of other tunnels.
fn free_priorities(family: Family, count: usize, rules: &[Rule]) -> Result<u32, PlanError> {
    let of_family = || rules.iter().filter(|rule| rule.family == family);
    let priority = |rule: &Rule| rule.priority.unwrap_or(0);
    let local = of_family().filter(|rule| rule.table == TABLE_LOCAL);
    let local = local.map(priority).max().unwrap_or(0);
    let mut taken: Vec<u32> = of_family().map(priority).collect();
    taken.push(LOWEST_KERNEL_RULE);
    taken.retain(|priority| *priority > local);
    taken.sort_unstable();
    let is_preceded =
        |rule: &&Rule| rule.table == TABLE_MAIN || rule.invert && rule.fwmark.is_some();
    let preceded = of_family().filter(is_preceded).map(priority);
    let preceded = preceded.filter(|priority| *priority > local);
    let before = preceded.min().unwrap_or(LOWEST_KERNEL_RULE);
    let before = before.min(LOWEST_KERNEL_RULE);
    let has_room = |end: &u32| {
        let others = taken.iter().filter(|priority| *priority < end);
        (end - 1 - others.max().unwrap_or(&local)) as usize >= count
    };
    let mut ends = taken.iter().filter(|end| **end <= before && has_room(end));
    let end = match ends.next() {
        Some(first) if Some(first) == taken.first() => first,
        other => ends.next_back().or(other).ok_or(PlanError::NoPriority {
            family,
            count,
            before,
        })?,
    };
    Ok(end - 1)
}

/// Returns two rules for each length of the tunnel's prefixes, which come longest first: the first consults the main
/// table for more specific routes; the second, the tunnel's table for packets without the mark. So the longest prefix
/// of both tables applies, as if they were one table.
fn rules_for(
    family: Family,
    mark: u32,
    lengths: &[u8],
    others: &[Rule],
) -> Result<Vec<Rule>, PlanError> {
    let shorter = lengths.iter().map(|length| length.saturating_sub(1));
    let mut shorter: Vec<u32> = shorter.map(u32::from).collect();
    shorter.dedup();
    let mut rules = Vec::new();
    if shorter.is_empty() {
        return Ok(rules);
    }
    let mut priority = free_priorities(family, 2 * shorter.len(), others)?;
    for (i, shorter) in shorter.iter().rev().enumerate() {
        rules.push(Rule {
            priority: Some(priority),
            // The last one of the table takes all its routes.
            suppress_prefix_length: (i > 0).then_some(*shorter),
            ..Rule::unless_marked(family, mark, mark)
        });
        rules.push(Rule {
            priority: Some(priority - 1),
            suppress_prefix_length: Some(*shorter),
            ..Rule::suppress_default(family)
        });
        priority = priority.saturating_sub(2);
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_config::{Overrides, Source, Syntax, parse};
    use zeroize::Zeroizing;

    /// A configuration with these lines in `[Interface]` and these allowed IPs.
    fn config(interface: &str, allowed: &str) -> Config {
        let text = format!(
            "[Interface]\nPrivateKey = yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=\n{interface}\n\
             [Peer]\nPublicKey = xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=\n\
             AllowedIPs = {allowed}\nEndpoint = 192.0.2.1:51820\n"
        );
        let source = Source {
            file: "wg0.conf".into(),
            syntax: Syntax::Ini,
            text: Zeroizing::new(text),
        };
        let parsed = parse(&source, &Overrides::default(), &|_| unreachable!());
        parsed
            .config
            .unwrap_or_else(|| panic!("{}", parsed.diagnostics.render(false)))
    }

    fn net(text: &str) -> IpNet {
        text.parse().expect("a prefix")
    }

    fn route(text: &str) -> Route {
        Route::to(net(text))
    }

    /// Where the endpoint 192.0.2.1 is reached by the host's default route.
    fn plan_for(interface: &str, allowed: &str) -> Plan {
        plan_with(interface, allowed, false)
    }

    fn plan_with(interface: &str, allowed: &str, has_unknown: bool) -> Plan {
        let endpoints = Endpoints {
            addresses: vec!["192.0.2.1".parse().expect("ip")],
            has_unknown,
        };
        let endpoints = routed(&endpoints, &[route("0.0.0.0/0")]);
        let config = config(interface, allowed);
        let own = needs_table(&config, &endpoints).then_some(FIRST_TABLE);
        let (plan, lengths) = make(&config, own, &endpoints);
        plan.with_rules(&lengths, &[]).expect("a plan")
    }

    #[test]
    fn networks_of_the_interface_need_no_route_of_their_own() {
        let plan = plan_for(
            "Address = 10.0.0.2/24",
            "10.0.0.1/32, 10.1.0.0/16, fd00::/64",
        );
        let expected = [
            (net("fd00::/64"), TABLE_MAIN),
            (net("10.1.0.0/16"), TABLE_MAIN),
        ];
        assert_eq!(plan.routes, expected);
        assert_eq!((plan.rules, plan.mark), (vec![], None));
    }

    #[test]
    fn a_default_route_gets_a_table_and_rules_as_wg_quick_makes_them() {
        let plan = plan_for("Address = 10.0.0.2/24", "0.0.0.0/0, 10.1.0.0/16");
        assert_eq!(
            plan.routes,
            [
                (net("10.1.0.0/16"), TABLE_MAIN),
                (net("0.0.0.0/0"), FIRST_TABLE)
            ]
        );
        assert_eq!(plan.mark, Some(FIRST_TABLE));
        let texts: Vec<String> = plan.rules.iter().map(Rule::to_string).collect();
        assert_eq!(
            texts,
            [
                "IPv4 rule not fwmark 0xca6c lookup 51820",
                "IPv4 rule lookup 254 suppress_prefixlength 0"
            ]
        );
        assert!(plan.rules[1].priority < plan.rules[0].priority);
    }

    #[test]
    fn both_families_get_their_rules() {
        let plan = plan_for("", "0.0.0.0/0, ::/0");
        let families: Vec<_> = plan.rules.iter().map(|rule| rule.family).collect();
        assert_eq!(families, [Family::V4, Family::V4, Family::V6, Family::V6]);
    }

    #[test]
    fn a_mark_of_the_users_is_the_table_too() {
        let plan = plan_for("FwMark = 0x1234", "0.0.0.0/0");
        assert_eq!(plan.routes, [(net("0.0.0.0/0"), 0x1234)]);
        assert_eq!(plan.own_table(), Some(0x1234));
    }

    #[test]
    fn halves_of_the_internet_do_not_swallow_the_endpoint() {
        let plan = plan_for("", "0.0.0.0/1, 128.0.0.0/1");
        assert_eq!(
            plan.routes,
            [
                (net("0.0.0.0/1"), TABLE_MAIN),
                (net("128.0.0.0/1"), FIRST_TABLE)
            ]
        );
        assert_eq!(plan.rules[1].suppress_prefix_length, Some(0));
    }

    #[test]
    fn an_endpoint_on_a_more_specific_network_needs_no_mark() {
        let endpoints = Endpoints {
            addresses: vec!["192.0.2.1".parse().expect("ip")],
            has_unknown: false,
        };
        let endpoints = routed(&endpoints, &[route("0.0.0.0/0"), route("192.0.2.0/24")]);
        let config = config("", "10.0.0.0/8");
        assert!(!needs_mark(&net("192.0.0.0/16"), &config, &endpoints));
        assert!(needs_mark(&net("192.0.2.0/25"), &config, &endpoints));
    }

    #[test]
    fn an_unknown_endpoint_may_be_in_any_prefix_but_the_interfaces_own_network() {
        let plan = plan_with("Address = 10.0.0.2/24", "8.0.0.0/7, 10.0.0.1/32", true);
        assert_eq!(plan.routes, [(net("8.0.0.0/7"), FIRST_TABLE)]);
        assert_eq!(plan.own_table(), Some(FIRST_TABLE));
        let plan = plan_with("Address = 10.0.0.2/24", "10.0.0.1/32", true);
        assert_eq!(plan, Plan::default());
    }

    #[test]
    fn the_longest_prefix_of_both_tables_applies() {
        let plan = plan_with("", "0.0.0.0/0, 10.1.0.0/16, 10.2.0.0/16", true);
        let mut rules = plan.rules;
        rules.sort_by_key(|rule| rule.priority);
        let texts: Vec<String> = rules.iter().map(Rule::to_string).collect();
        assert_eq!(
            texts,
            [
                "IPv4 rule lookup 254 suppress_prefixlength 15",
                "IPv4 rule not fwmark 0xca6c lookup 51820 suppress_prefixlength 15",
                "IPv4 rule lookup 254 suppress_prefixlength 0",
                "IPv4 rule not fwmark 0xca6c lookup 51820",
            ]
        );
    }

    #[test]
    fn off_makes_nothing_and_a_number_makes_routes_only() {
        assert_eq!(plan_for("Table = off", "0.0.0.0/0"), Plan::default());
        let plan = plan_for("Table = 1000", "0.0.0.0/0, 10.0.0.0/8");
        assert_eq!(
            plan.routes,
            [(net("10.0.0.0/8"), 1000), (net("0.0.0.0/0"), 1000)]
        );
        assert!(plan.rules.is_empty());
    }

    fn rule(priority: u32, table: u32) -> Rule {
        Rule {
            priority: Some(priority),
            suppress_prefix_length: None,
            table,
            ..Rule::suppress_default(Family::V4)
        }
    }

    /// The kernel's rules, and these.
    fn with_kernels(others: &[Rule]) -> Vec<Rule> {
        let kernels = [
            rule(0, TABLE_LOCAL),
            rule(32766, TABLE_MAIN),
            rule(32767, 253),
        ];
        [&kernels[..], others].concat()
    }

    #[test]
    fn rules_go_before_those_of_other_tunnels() {
        let free = |rules: &[Rule]| free_priorities(Family::V4, 2, rules).expect("room");
        let others = rules_for(Family::V4, 7, &[0], &with_kernels(&[])).expect("room");
        assert_eq!(free(&with_kernels(&[])), 32765);
        assert_eq!(free(&with_kernels(&others)), 32763);
        assert_eq!(free(&with_kernels(&[rule(100, 9)])), 99);
        assert_eq!(
            free_priorities(Family::V6, 2, &others).expect("room"),
            32765
        );
    }

    #[test]
    fn a_rule_that_cannot_be_preceded_is_passed_over_unless_it_is_of_the_main_table() {
        let free = |others: &[Rule]| free_priorities(Family::V4, 2, &with_kernels(others));
        for priority in [1, 2] {
            assert_eq!(free(&[rule(priority, 9)]).expect("room"), 32765);
        }
        assert_eq!(free(&[rule(3, 9)]).expect("room"), 2);
        let tunnel = rules_for(Family::V4, 7, &[0], &with_kernels(&[rule(1, 9)])).expect("room");
        let others = [&tunnel[..], &[rule(1, 9), rule(32763, 9)]].concat();
        assert_eq!(
            free(&others).expect("room"),
            32762,
            "before the other tunnel"
        );
        let error = free(&[rule(1, TABLE_MAIN)])
            .expect_err("no room")
            .to_string();
        assert!(error.contains("before the rule of priority 1"), "{error}");
        // Where the local table is looked up later, as with Cilium.
        let moved = [
            rule(9, 200),
            rule(100, TABLE_LOCAL),
            rule(32766, TABLE_MAIN),
        ];
        assert_eq!(free_priorities(Family::V4, 2, &moved).expect("room"), 32765);
    }
}
