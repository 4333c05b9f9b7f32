//! The differences that another policy makes to pairs of members.
//!
//! A mesh has a million pairs, and a policy a thousand rules. So each member is compared with each rule once, which gives the set of those
//! that apply to it at either end, and of a pair the two sets are intersected.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, UdpSocket};

use seikan_coordinator::MemberInfo;
use seikan_proto::filter::Filter;
use seikan_proto::mesh::policy::Rule;
use seikan_proto::mesh::{Name, Party, Policy};

use crate::output::counted;

/// Pairs of members that are named, of each kind.
const SHOWN: usize = 20;
/// Sets of rules whose filters are kept, at most, so that those of many rules are not made again for each pair.
const KEPT: usize = 4096;

/// The differences between two policies.
#[derive(Default)]
pub struct Changes {
    /// One may begin something with the other, and could begin nothing.
    opened: Pairs,
    /// The other way round.
    closed: Pairs,
    /// Something else than before.
    changed: Pairs,
    /// Those that may begin less, from or to a member that is this host.
    pub own: Vec<String>,
}

/// How many pairs, and the names of the first of them.
#[derive(Default)]
struct Pairs {
    count: usize,
    first: Vec<String>,
}

/// A set of rules, by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Set(Vec<u64>);

/// One of two policies.
struct Side<'a> {
    policy: &'a Policy,
    /// The rules of both.
    rules: &'a [&'a Rule],
    /// Those of this one.
    own: Set,
    filters: HashMap<Set, Filter>,
}

/// Members to which the same rules apply, and that have the same tags if there is a policy without rules.
struct Group<'a> {
    party: Party,
    /// Rules that allow them something.
    from: Set,
    /// Rules that allow others something with them.
    to: Set,
    names: Vec<&'a Name>,
}

impl Pairs {
    fn words(&self, what: &str) -> String {
        let mut text = format!("{what}: {}\n", counted(self.count, "pair"));
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

    fn has(&self, number: usize) -> bool {
        let word = self.0.get(number / 64);
        word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    fn and(&self, other: &Set) -> Set {
        let both = self.0.iter().zip(&other.0);
        let mut both: Vec<u64> = both.map(|(a, b)| a & b).collect();
        while both.last() == Some(&0) {
            both.pop();
        }
        Set(both)
    }

    /// Whether three sets have something in common.
    fn meets(&self, other: &Set, third: &Set) -> bool {
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
    /// Everything that one member may begin with another, to whom both these rules apply.
    fn filter(&mut self, from: &Party, to: &Party, rules: &Set) -> Filter {
        if self.policy.is_empty() {
            return self.policy.filter(from, to);
        }
        let rules = rules.and(&self.own);
        if let Some(known) = self.filters.get(&rules) {
            return known.clone();
        }
        let filter = Policy::filter_of(rules.numbers().map(|number| self.rules[number]));
        if self.filters.len() == KEPT {
            self.filters.clear();
        }
        self.filters.insert(rules, filter.clone());
        filter
    }
}

impl Changes {
    /// Compares what two policies allow between members.
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
            if old.has(number) != new.has(number) {
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
        let own: BTreeSet<&Name> = members
            .iter()
            .filter(|info| info.member.addresses.iter().any(is_here))
            .map(|info| &info.member.name)
            .collect();
        let mut changes = Changes::default();
        for from in &groups {
            for to in &groups {
                if by_tags || from.from.meets(&to.to, &differing) {
                    changes.look(&mut before, &mut after, (from, to), &own);
                }
            }
        }
        changes
    }

    fn look(
        &mut self,
        before: &mut Side<'_>,
        after: &mut Side<'_>,
        (from, to): (&Group<'_>, &Group<'_>),
        own: &BTreeSet<&Name>,
    ) {
        let rules = from.from.and(&to.to);
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
            .flat_map(|a| to.names.iter().map(move |b| (*a, *b)));
        let mut all = all.filter(|(a, b)| a != b);
        let is_less = !before.is_within(&after);
        let of_own = |(a, b): &(&Name, &Name)| is_less && (own.contains(a) || own.contains(b));
        let room = SHOWN.saturating_sub(pairs.first.len());
        let words = |(a, b): (&Name, &Name)| format!("{a} -> {b}");
        if !own.is_empty() {
            let theirs = all.clone().filter(of_own).map(words);
            let room = SHOWN.saturating_sub(self.own.len());
            self.own.extend(theirs.take(room));
        }
        let first: Vec<String> = all.by_ref().take(room).map(words).collect();
        pairs.count += first.len() + all.count();
        pairs.first.extend(first);
    }

    pub fn words(&self) -> String {
        let kinds = [
            (&self.opened, "opened"),
            (&self.closed, "closed"),
            (&self.changed, "changed"),
        ];
        let kinds = kinds.into_iter().filter(|(pairs, _)| pairs.count > 0);
        let text: String = kinds.map(|(pairs, what)| pairs.words(what)).collect();
        match text.is_empty() {
            true => "no pair of members may do anything else than before\n".to_owned(),
            false => text,
        }
    }
}

/// Members that are alike, in the order of the first of each group.
fn groups<'a>(rules: &[&Rule], by_tags: bool, members: &'a [MemberInfo]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    let mut places = HashMap::new();
    for info in members {
        let party = info.member.party();
        let (mut from, mut to) = (Set::default(), Set::default());
        for (number, rule) in rules.iter().enumerate() {
            if rule.from.is(&party) {
                from.insert(number);
            }
            if rule.to.is(&party) {
                to.insert(number);
            }
        }
        let tags = by_tags.then_some(info.member.tags.as_slice());
        let place = places.entry((from.clone(), to.clone(), tags));
        let place = *place.or_insert(groups.len());
        if place == groups.len() {
            groups.push(Group {
                party,
                from,
                to,
                names: Vec::new(),
            });
        }
        groups[place].names.push(&info.member.name);
    }
    groups
}

/// Whether an address is one of this host: only those can be bound to.
fn is_here(address: &IpAddr) -> bool {
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
            },
            joined: 0,
            seen: 0,
            at: None,
        }
    }

    /// The same by comparing the filters of each pair: opened, closed and changed.
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
    fn pairs_that_change_are_those_that_filters_differ_for() {
        let members = [
            info(1, &["a", "b"]),
            info(2, &["a"]),
            info(3, &["b"]),
            info(4, &[]),
            info(5, &[]),
        ];
        // More rules than a word has bits, most of them for nobody.
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
