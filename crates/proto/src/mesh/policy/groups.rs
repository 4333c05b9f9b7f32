//! Groups of members and devices to which the same rules apply.
//!
//! A gateway and a peer may each have [`MAX_DEVICES`](crate::mesh::MAX_DEVICES) devices, which are
//! thousands of pairs, and a mesh has many peers. Most of these pairs have the same few filters.
//! Each party is compared with the rules once. Parties with the same rules are one group, and there
//! is one filter for each pair of groups.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use super::{Access, Device, Member, Name, Party, Policy, Rule};
use crate::filter::{Destinations, Filter, Filters, Pairs};

/// This host and the devices behind it, as receivers: [`Access::receivers`].
#[derive(Clone, Debug, Default)]
pub struct Receivers {
    /// Addresses of this host.
    own: Vec<IpAddr>,
    groups: Groups,
    /// Group of each address; all peers share it.
    by_address: Arc<HashMap<IpAddr, usize>>,
}

/// The tags or rules that decide about a party.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Terms {
    /// Its tags, as there are no rules.
    Tags(BTreeSet<Name>),
    /// The rules that select it as sender and as receiver.
    Rules { from: RuleSet, to: RuleSet },
}

/// A set of rules: one bit for each rule of the policy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RuleSet(Vec<u64>);

impl RuleSet {
    fn of(rules: &[Rule], selects: impl Fn(&Rule) -> bool) -> RuleSet {
        let words = rules.chunks(64).map(|rules| {
            let bits = rules.iter().enumerate();
            bits.fold(0, |word, (bit, rule)| {
                word | u64::from(selects(rule)) << bit
            })
        });
        RuleSet(words.collect())
    }

    fn and(&self, other: &RuleSet) -> RuleSet {
        let words = self.0.iter().zip(&other.0);
        RuleSet(words.map(|(a, b)| a & b).collect())
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// The rules of the set, among all of the policy.
    fn rules<'a>(&self, all: &'a [Rule]) -> impl Iterator<Item = &'a Rule> {
        all.iter().enumerate().filter_map(|(at, rule)| {
            let word = self.0.get(at / 64)?;
            (word >> (at % 64) & 1 == 1).then_some(rule)
        })
    }
}

impl Terms {
    fn of(policy: &Policy, party: &Party) -> Terms {
        if policy.is_empty() {
            return Terms::Tags(party.tags.iter().cloned().collect());
        }
        Terms::Rules {
            from: RuleSet::of(&policy.rules, |rule| rule.from.is(party)),
            to: RuleSet::of(&policy.rules, |rule| rule.to.is(party)),
        }
    }
}

/// The different terms of some parties.
#[derive(Clone, Debug, Default)]
struct Groups(Vec<Terms>);

impl Groups {
    /// Returns the group of a party.
    fn join(&mut self, policy: &Policy, party: &Party) -> usize {
        let terms = Terms::of(policy, party);
        let known = self.0.iter().position(|known| *known == terms);
        known.unwrap_or_else(|| {
            self.0.push(terms);
            self.0.len() - 1
        })
    }

    /// Adds a member and the devices behind it. Returns the group of each of their addresses.
    fn join_all(
        &mut self,
        policy: &Policy,
        member: &Party,
        addresses: &[IpAddr],
        devices: &[Device],
    ) -> HashMap<IpAddr, usize> {
        let own = self.join(policy, member);
        let mut all: HashMap<IpAddr, usize> = addresses.iter().map(|ip| (*ip, own)).collect();
        for device in devices {
            let group = self.join(policy, &device.party(&member.name));
            all.extend(device.addresses.iter().map(|ip| (*ip, group)));
        }
        all
    }
}

/// The filters of a peer, each once.
struct Table<'a> {
    policy: &'a Policy,
    filters: Vec<Filter>,
    by_rules: HashMap<RuleSet, u16>,
    all: Option<u16>,
}

impl Table<'_> {
    /// Index of the filter for traffic from one group to another; `None` if neither may begin.
    fn between(&mut self, from: &Terms, to: &Terms) -> Option<u16> {
        match (from, to) {
            (Terms::Tags(from), Terms::Tags(to)) => {
                let allowed = (from.is_empty() && to.is_empty()) || !from.is_disjoint(to);
                allowed.then(|| {
                    let filters = &mut self.filters;
                    *self.all.get_or_insert_with(|| push(filters, Filter::All))
                })
            }
            (
                Terms::Rules { from, to: back_to },
                Terms::Rules {
                    from: back_from,
                    to,
                },
            ) => {
                let rules = from.and(to);
                // Replies pass where only the other end may begin.
                if rules.is_empty() && back_from.and(back_to).is_empty() {
                    return None;
                }
                if let Some(known) = self.by_rules.get(&rules) {
                    return Some(*known);
                }
                let filter = Policy::filter_of(rules.rules(&self.policy.rules));
                let index = push(&mut self.filters, filter);
                self.by_rules.insert(rules, index);
                Some(index)
            }
            // Terms of one policy are of one kind.
            _ => None,
        }
    }
}

/// Adds a filter and returns its index. The devices of two members have fewer than 2^13 pairs.
fn push(filters: &mut Vec<Filter>, filter: Filter) -> u16 {
    let index = filters.len() as u16;
    filters.push(filter);
    index
}

impl Access {
    /// Groups this host, which has the addresses `own`, and the devices behind it by the rules for
    /// them. To be done once for all peers.
    pub fn receivers(&self, own: &[IpAddr]) -> Receivers {
        let mut groups = Groups::default();
        let by_address = self
            .own
            .as_ref()
            .map(|party| groups.join_all(&self.policy, party, own, &self.devices));
        Receivers {
            own: own.to_vec(),
            groups,
            by_address: Arc::new(by_address.unwrap_or_default()),
        }
    }

    /// Returns the filters for traffic from `from` and the devices behind it to this host and the
    /// devices behind it. `receivers` must be those of the same rules.
    pub fn filters(&self, receivers: &Receivers, from: &Member) -> Filters {
        if self.own.is_none() || (self.devices.is_empty() && from.devices.is_empty()) {
            let own = Destinations::Only(receivers.own.clone());
            return Filters::Same(self.filter(from), own);
        }
        let mut groups = Groups::default();
        let senders = groups.join_all(&self.policy, &from.party(), &from.addresses, &from.devices);
        let mut table = Table {
            policy: &self.policy,
            filters: Vec::new(),
            by_rules: HashMap::new(),
            all: None,
        };
        let receiving = &receivers.groups.0;
        let pairs = groups
            .0
            .iter()
            .flat_map(|from| receiving.iter().map(move |to| (from, to)));
        let indices = pairs.map(|(from, to)| table.between(from, to)).collect();
        Filters::Pairs(Pairs {
            senders,
            receivers: Arc::clone(&receivers.by_address),
            receiver_groups: receiving.len(),
            indices,
            filters: table.filters,
        })
    }
}
