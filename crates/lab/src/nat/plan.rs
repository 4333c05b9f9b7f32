//! The plan: NATs, pairs, events, and their expected results.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::error::{Result, usage};
use crate::site::NatBox;

/// The plan that is part of the program.
pub const PLAN: &str = include_str!("../../nat/matrix.toml");

/// Suffix of the names of NATs with hosts that also have IPv6.
const WITH_IPV6: &str = "+6";

/// The longest delay of a direction, in milliseconds.
const LONGEST_DELAY: f64 = 500.0;
/// Range of the limit for a direct path, in seconds.
const WITHIN: std::ops::RangeInclusive<f64> = 1.0..=600.0;

/// Path between two members, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathKind {
    /// Both members send to the other's own address.
    Direct,
    /// At least one member sends to a relay.
    Relay,
    /// Nothing arrives.
    None,
}

/// Version of the Internet Protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Family {
    /// Version 4.
    IPv4,
    /// Version 6.
    IPv6,
}

/// NATs between a host and the internet.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Nat {
    /// Its name.
    pub name: String,
    /// Its description, in a line.
    pub about: String,
    /// NAT type that the daemon should report in its status.
    pub seen: String,
    /// The routers, from the outside in.
    pub boxes: Vec<NatBox>,
    /// Whether the host has a global IPv6 address, to which its box admits answers: its name in a
    /// pair ends with `+6`.
    #[serde(skip)]
    pub ipv6: bool,
}

/// Pairs and their expected results.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Expect {
    /// Expected path of both.
    pub path: PathKind,
    /// Expected address family, if it matters.
    pub family: Option<Family>,
    /// Why, in a line.
    pub why: String,
    /// Seconds from the start of the second daemon within which a direct path must be in use;
    /// [`DIRECT_WITHIN`](super::DIRECT_WITHIN) by default. If given, the first answer must come
    /// through a relay, as early as without a direct path.
    pub within: Option<f64>,
    /// Routers that both are behind.
    #[serde(default)]
    pub shared: Vec<NatBox>,
    /// Names of NATs, with `+6` where there is IPv6; played in both orders.
    pub pairs: Vec<[String; 2]>,
}

/// Kinds of events. An event of a single host happens at B.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Happening {
    /// No event.
    Nothing,
    /// B's innermost router forgets all mappings.
    RestartNat {
        /// Source NAT statement from then on, if it changes.
        source: Option<String>,
    },
    /// B's outermost router gets another outer address; without a router, B itself does.
    ChangeAddress,
    /// B is cut off for this many seconds.
    Outage(f64),
    /// The relay that the pair uses is killed, or the first if it uses none.
    KillRelay,
    /// The coordinator is killed, and restarted after this many seconds.
    CoordinatorAway(f64),
    /// B's tunnel ends and starts with the machine's own clock.
    RestartWithRightClock,
}

/// Errors of clocks, as offsets of libfaketime: `+1h`, `-90m`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clocks {
    /// Offset of B's clock.
    pub b: Option<String>,
    /// Offset of all relays' clocks.
    pub relay: Option<String>,
}

/// An event of a pair, and its expected result.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Event {
    /// Its name.
    pub name: String,
    /// The event, in a line, and the reason for its expected result.
    pub about: String,
    /// Names of the NATs before A and before B.
    pub nats: [String; 2],
    /// Relays that there are.
    #[serde(default = "one")]
    pub relays: u16,
    /// Hosts with wrong clocks from the start.
    #[serde(default)]
    pub clocks: Clocks,
    /// The event.
    pub happens: Happening,
    /// Expected path of both before the event.
    pub path: PathKind,
    /// Expected path after the event, if it is another.
    pub then: Option<PathKind>,
    /// Maximum time in which nothing arrives, in seconds.
    pub gap: f64,
    /// Maximum time until both use the path expected after the event, in seconds.
    pub settled: f64,
    /// Whether a TCP connection survives.
    #[serde(default = "yes")]
    pub tcp: bool,
    /// Words that B's status must contain at the end.
    pub says: Option<String>,
}

fn one() -> u16 {
    1
}

fn yes() -> bool {
    true
}

/// The whole file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Plan {
    /// Delay of a packet to or from host B, in milliseconds.
    pub delay_ms: f64,
    /// All NATs.
    #[serde(rename = "nat")]
    pub nats: Vec<Nat>,
    /// All pairs.
    #[serde(default)]
    pub expect: Vec<Expect>,
    /// All events.
    #[serde(default, rename = "event")]
    pub events: Vec<Event>,
}

/// A pair in one order.
#[derive(Clone, Debug)]
pub struct Cell {
    /// NATs of A and of B.
    pub nats: [Nat; 2],
    /// Routers that both are behind.
    pub shared: Vec<NatBox>,
    /// Expected path of both.
    pub path: PathKind,
    /// Expected address family, if it matters.
    pub family: Option<Family>,
    /// Why.
    pub why: String,
    /// Maximum time in seconds until a direct path is used, for a pair that starts at a relay.
    pub within: Option<f64>,
}

impl Cell {
    /// Returns the name of the cell, such as `symmetric, open`, followed by the kind of the shared
    /// routers, if any.
    pub fn name(&self) -> String {
        let [a, b] = &self.nats;
        let shared = match self.shared.first() {
            None => "",
            Some(NatBox { hairpin: true, .. }) => ", behind one carrier that hairpins",
            Some(_) if a.boxes.is_empty() => ", behind one NAT",
            Some(_) => ", behind one carrier",
        };
        format!("{}, {}{shared}", a.name, b.name)
    }
}

impl Plan {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Usage`](crate::error::LabError::Usage) with the mistake and its position.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |what: String| usage(format!("cannot use the plan: {what}"));
        let plan: Self = toml::from_str(text).map_err(|e| wrong(e.to_string()))?;
        if !(0.0..=LONGEST_DELAY).contains(&plan.delay_ms) {
            let most = LONGEST_DELAY;
            return Err(wrong(format!(
                "delay-ms is {}: use 0 to {most}",
                plan.delay_ms
            )));
        }
        let within = plan.expect.iter().filter_map(|expect| expect.within);
        if let Some(within) = within.into_iter().find(|within| !WITHIN.contains(within)) {
            let (least, most) = (WITHIN.start(), WITHIN.end());
            return Err(wrong(format!("within is {within}: use {least} to {most}")));
        }
        let names: BTreeSet<&str> = plan.nats.iter().map(|nat| nat.name.as_str()).collect();
        if names.len() != plan.nats.len() {
            return Err(wrong("two NATs have the same name".to_owned()));
        }
        let pairs = plan.expect.iter().flat_map(|expect| &expect.pairs);
        let pairs = pairs.chain(plan.events.iter().map(|event| &event.nats));
        for name in pairs.flatten() {
            plan.nat(name)?;
        }
        Ok(plan)
    }

    /// Returns a NAT by its name, which may end with `+6`.
    ///
    /// # Errors
    /// [`Usage`](crate::error::LabError::Usage) if there is none.
    pub fn nat(&self, name: &str) -> Result<Nat> {
        let plain = name.strip_suffix(WITH_IPV6);
        let found = self
            .nats
            .iter()
            .find(|nat| nat.name == plain.unwrap_or(name));
        let found = found.map(|nat| Nat {
            name: name.to_owned(),
            ipv6: plain.is_some(),
            ..nat.clone()
        });
        found.ok_or_else(|| {
            let all: Vec<&str> = self.nats.iter().map(|nat| nat.name.as_str()).collect();
            usage(format!(
                "no NAT is called `{name}`: use one of {}",
                all.join(", ")
            ))
        })
    }

    /// All pairs in both orders, in the order of the file.
    ///
    /// # Errors
    /// A NAT does not exist.
    pub fn cells(&self) -> Result<Vec<Cell>> {
        let mut cells = Vec::new();
        for expect in &self.expect {
            for [a, b] in &expect.pairs {
                let orders = if a == b {
                    vec![[a, b]]
                } else {
                    vec![[a, b], [b, a]]
                };
                for [a, b] in orders {
                    cells.push(Cell {
                        nats: [self.nat(a)?, self.nat(b)?],
                        shared: expect.shared.clone(),
                        path: expect.path,
                        family: expect.family,
                        why: expect.why.clone(),
                        within: expect.within,
                    });
                }
            }
        }
        Ok(cells)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Returns the pairs without an expected result, or with two.
    fn unclear(plan: &Plan) -> Vec<String> {
        let mut said: BTreeMap<[&str; 2], usize> = BTreeMap::new();
        for expect in plan.expect.iter().filter(|e| e.shared.is_empty()) {
            for pair in &expect.pairs {
                let mut pair = [pair[0].as_str(), pair[1].as_str()];
                pair.sort_unstable();
                *said.entry(pair).or_default() += 1;
            }
        }
        let mut unclear = Vec::new();
        for (at, a) in plan.nats.iter().enumerate() {
            for b in &plan.nats[at..] {
                let mut pair = [a.name.as_str(), b.name.as_str()];
                pair.sort_unstable();
                if said.get(&pair) != Some(&1) {
                    unclear.push(pair.join(", "));
                }
            }
        }
        unclear
    }

    #[test]
    fn the_matrix_is_full_and_says_one_thing_of_each_pair() {
        let plan = Plan::parse(PLAN).expect("a plan");
        assert_eq!(unclear(&plan), [""; 0]);
        // 12 NATs in both orders, and three shared ones.
        let cells = plan.cells().expect("cells");
        let (with, without): (Vec<&Cell>, Vec<&Cell>) = cells
            .iter()
            .partition(|cell| cell.nats.iter().any(|nat| nat.ipv6));
        assert_eq!(without.len(), 12 * 12 + 3);
        assert!(with.iter().all(|cell| cell.shared.is_empty()));
        assert!(!with.is_empty());
    }

    #[test]
    fn errors_in_a_file_are_reported() {
        for (text, said) in [
            ("delay-ms = 5\nnat = []\nodd = 1", "unknown field `odd`"),
            ("delay-ms = -1\nnat = []", "delay-ms is -1: use 0 to 500"),
            (
                "delay-ms = 0\nnat = []\n[[expect]]\npath = \"relay\"\nwhy = \"\"\npairs = [[\"a\", \"b\"]]",
                "no NAT is called `a`",
            ),
            (
                "delay-ms = 0\nnat = []\n[[expect]]\npath = \"direct\"\nwithin = 0\nwhy = \"\"\npairs = []",
                "within is 0: use 1 to 600",
            ),
        ] {
            let error = Plan::parse(text).expect_err(text).to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
