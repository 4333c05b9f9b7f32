//! Differences between two policies, by pairs of members and devices.
//!
//! A mesh may have a million pairs, and a policy a thousand rules. Each member is compared with
//! each rule once, which gives the set of rules that apply to it at either end. For a pair the two
//! sets are intersected.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, UdpSocket};

use seikan_coordinator::MemberInfo;
use seikan_proto::filter::Filter;
use seikan_proto::mesh::policy::Rule;
use seikan_proto::mesh::{Party, PartyName, Policy};

use crate::output::counted;

/// Maximum number of pairs that are listed, of each kind.
const MAX_LISTED: usize = 20;
/// Maximum number of cached filters, by set of rules.
const MAX_CACHED: usize = 4096;

/// The differences between two policies.
#[derive(Default)]
pub struct Changes {
    /// Pairs that were closed before and are open now.
    opened: Pairs,
    /// Pairs that were open before and are closed now.
    closed: Pairs,
    /// Pairs that are open for other traffic than before.
    changed: Pairs,
    /// Pairs that lose access, from or to this host.
    pub own: Vec<String>,
}

/// Number of pairs, and the names of the first of them.
#[derive(Default)]
struct Pairs {
    count: usize,
    first: Vec<String>,
}

/// A set of rules by number, as a bit set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Set(Vec<u64>);

/// One of two policies.
struct Side<'a> {
    policy: &'a Policy,
    /// Rules of both policies.
    rules: &'a [&'a Rule],
    /// Rules of this policy.
    own: Set,
    filters: HashMap<Set, Filter>,
}

/// Members and devices to which the same rules apply; with the same tags, if a policy has no rules.
struct Group {
    party: Party,
    /// Rules that allow traffic from them.
    from: Set,
    /// Rules that allow traffic to them.
    to: Set,
    names: Vec<PartyName>,
}

impl Pairs {
    fn describe(&self, kind: &str) -> String {
        let mut text = format!("{kind}: {}\n", counted(self.count, "pair"));
        for pair in &self.first {
            text += &format!("  {pair}\n");
        }
        if self.count > self.first.len() {
            text += &format!("  and {} more\n", self.count - self.first.len());
        }
        text
    }
}

impl Set {
    fn insert(&mut self, number: usize) {
        let (word, bit) = (number / 64, number % 64);
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << bit;
    }

    fn contains(&self, number: usize) -> bool {
        let word = self.0.get(number / 64);
        word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    fn intersection(&self, other: &Set) -> Set {
        let both = self.0.iter().zip(&other.0);
        let mut both: Vec<u64> = both.map(|(a, b)| a & b).collect();
        while both.last() == Some(&0) {
            both.pop();
        }
        Set(both)
    }

    /// Returns whether three sets have a common element.
    fn intersects(&self, other: &Set, third: &Set) -> bool {
        let mut all = self.0.iter().zip(&other.0).zip(&third.0);
        all.any(|((a, b), c)| a & b & c != 0)
    }

    fn numbers(&self) -> impl Iterator<Item = usize> {
        let words = self.0.iter().enumerate();
        words.flat_map(|(at, word)| {
            let bits = (0..64).filter(move |bit| word >> bit & 1 == 1);
            bits.map(move |bit| 64 * at + bit)
        })
    }
}

impl Side<'_> {
    /// Returns the filter from one member to another, to which these rules apply.
    fn filter(&mut self, from: &Party, to: &Party, rules: &Set) -> Filter {
        if self.policy.is_empty() {
            return self.policy.filter(from, to);
        }
        let rules = rules.intersection(&self.own);
        if let Some(known) = self.filters.get(&rules) {
            return known.clone();
        }
        let filter = Policy::filter_of(rules.numbers().map(|number| self.rules[number]));
        if self.filters.len() == MAX_CACHED {
            self.filters.clear();
        }
        self.filters.insert(rules, filter.clone());
        filter
    }
}

impl Changes {
    /// Compares two policies for all pairs of members.
    pub fn between(before: &Policy, after: &Policy, members: &[MemberInfo]) -> Changes {
        let mut all: Vec<&Rule> = Vec::new();
        let mut numbers: HashMap<String, usize> = HashMap::new();
        let [mut old, mut new] = [Set::default(), Set::default()];
        for (policy, own) in [(before, &mut old), (after, &mut new)] {
            for rule in policy.rules() {
                let number = *numbers.entry(rule.to_string()).or_insert(all.len());
                if number == all.len() {
                    all.push(rule);
                }
                own.insert(number);
            }
        }
        let mut differing = Set::default();
        for number in 0..all.len() {
            if old.contains(number) != new.contains(number) {
                differing.insert(number);
            }
        }
        let side = |policy, own| Side {
            policy,
            rules: &all,
            own,
            filters: HashMap::new(),
        };
        let [mut before, mut after] = [side(before, old), side(after, new)];
        let by_tags = before.policy.is_empty() || after.policy.is_empty();
        let groups = groups(&all, by_tags, members);
        let own: BTreeSet<PartyName> = members
            .iter()
            .filter(|info| info.member.addresses.iter().any(is_local))
            .map(|info| info.member.party().full_name())
            .collect();
        let mut changes = Changes::default();
        for from in &groups {
            for to in &groups {
                if by_tags || from.from.intersects(&to.to, &differing) {
                    changes.compare(&mut before, &mut after, (from, to), &own);
                }
            }
        }
        changes
    }

    fn compare(
        &mut self,
        before: &mut Side<'_>,
        after: &mut Side<'_>,
        (from, to): (&Group, &Group),
        own: &BTreeSet<PartyName>,
    ) {
        let rules = from.from.intersection(&to.to);
        let filter = |side: &mut Side<'_>| side.filter(&from.party, &to.party, &rules);
        let (before, after) = (filter(before), filter(after));
        let pairs = match (before.is_closed(), after.is_closed()) {
            _ if before == after => return,
            (true, _) => &mut self.opened,
            (_, true) => &mut self.closed,
            _ => &mut self.changed,
        };
        let all = from
            .names
            .iter()
            .flat_map(|a| to.names.iter().map(move |b| (a, b)));
        let mut all = all.filter(|(a, b)| a != b);
        let is_less = !before.is_within(&after);
        let is_own =
            |(a, b): &(&PartyName, &PartyName)| is_less && (own.contains(*a) || own.contains(*b));
        let capacity = MAX_LISTED.saturating_sub(pairs.first.len());
        let arrow = |(a, b): (&PartyName, &PartyName)| format!("{a} -> {b}");
        if !own.is_empty() {
            let own_pairs = all.clone().filter(is_own).map(arrow);
            let capacity = MAX_LISTED.saturating_sub(self.own.len());
            self.own.extend(own_pairs.take(capacity));
        }
        let first: Vec<String> = all.by_ref().take(capacity).map(arrow).collect();
        pairs.count += first.len() + all.count();
        pairs.first.extend(first);
    }

    /// Returns a list for the terminal.
    pub fn describe(&self) -> String {
        let kinds = [
            (&self.opened, "opened"),
            (&self.closed, "closed"),
            (&self.changed, "changed"),
        ];
        let kinds = kinds.into_iter().filter(|(pairs, _)| pairs.count > 0);
        let text: String = kinds.map(|(pairs, kind)| pairs.describe(kind)).collect();
        if text.is_empty() {
            "no change for any pair of members\n".to_owned()
        } else {
            text
        }
    }
}

/// Groups members and devices to which the same rules apply, in the order of each group's first.
fn groups(rules: &[&Rule], by_tags: bool, members: &[MemberInfo]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut positions = HashMap::new();
    for party in members.iter().flat_map(|info| info.member.parties()) {
        let (mut from, mut to) = (Set::default(), Set::default());
        for (number, rule) in rules.iter().enumerate() {
            if rule.from.is(&party) {
                from.insert(number);
            }
            if rule.to.is(&party) {
                to.insert(number);
            }
        }
        let (name, tags) = (party.full_name(), by_tags.then(|| party.tags.clone()));
        let position = positions.entry((from.clone(), to.clone(), tags));
        let position = *position.or_insert(groups.len());
        if position == groups.len() {
            groups.push(Group {
                party,
                from,
                to,
                names: Vec::new(),
            });
        }
        groups[position].names.push(name);
    }
    groups
}

/// Returns whether this host has the address: a socket can be bound to no other address.
fn is_local(address: &IpAddr) -> bool {
    UdpSocket::bind((*address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_proto::keys::PublicKey;
    use seikan_proto::mesh::Member;

    fn info(number: u8, tags: &[&str]) -> MemberInfo {
        MemberInfo {
            number: number.into(),
            member: Member {
                name: format!("m{number}").parse().expect("a name"),
                public_key: PublicKey::from_bytes([number; 32]),
                addresses: Vec::new(),
                endpoints: Vec::new(),
                relayed: Vec::new(),
                tags: tags.iter().map(|tag| tag.parse().expect("a tag")).collect(),
                devices: Vec::new(),
            },
            devices: Vec::new(),
            joined: 0,
            seen: 0,
            coordinator: None,
        }
    }

    /// Returns the pairs that are opened, closed and changed, by comparing the filters of each
    /// pair.
    fn one_by_one(
        before: &Policy,
        after: &Policy,
        members: &[MemberInfo],
    ) -> [BTreeSet<String>; 3] {
        let mut kinds: [BTreeSet<String>; 3] = Default::default();
        for from in members {
            for to in members {
                let (one, other) = (from.member.party(), to.member.party());
                let [before, after] = [before, after].map(|policy| policy.filter(&one, &other));
                if one.name == other.name || before == after {
                    continue;
                }
                let kind = match (before.is_closed(), after.is_closed()) {
                    (true, _) => 0,
                    (_, true) => 1,
                    _ => 2,
                };
                kinds[kind].insert(format!("{} -> {}", one.name, other.name));
            }
        }
        kinds
    }

    #[test]
    fn changed_pairs_are_those_with_different_filters() {
        let members = [
            info(1, &["a", "b"]),
            info(2, &["a"]),
            info(3, &["b"]),
            info(4, &[]),
            info(5, &[]),
        ];
        // More rules than a word has bits; most apply to no member.
        let many: String = (0..70)
            .map(|n| format!("allow nobody{n} -> m1 tcp/{n}\n"))
            .collect();
        let texts = [
            String::new(),
            "allow * -> * *\n".to_owned(),
            "allow m1 -> tag:b tcp/1\nallow tag:a -> m4 udp/1-9\nallow m4 -> m5 icmp\n".to_owned(),
            "allow m1 -> tag:b tcp/2\nallow tag:a -> m4 udp/1-9\nallow * -> m5 icmp\n".to_owned(),
            "allow m1 -> m3 tcp/1\nallow m1 -> tag:b tcp/1\nallow m1 -> tag:b tcp/1\n".to_owned(),
            format!("{many}allow * -> m5 icmp\nallow m3 -> m4 *\n"),
        ];
        let policies = texts.map(|text| Policy::parse(&text).expect("a policy"));
        for before in &policies {
            for after in &policies {
                let changes = Changes::between(before, after, &members);
                let found = [&changes.opened, &changes.closed, &changes.changed];
                for (found, wanted) in found.iter().zip(one_by_one(before, after, &members)) {
                    assert_eq!(found.count, wanted.len());
                    let first: BTreeSet<String> = found.first.iter().cloned().collect();
                    assert_eq!(first, wanted);
                }
            }
        }
    }
}
