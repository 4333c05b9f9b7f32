//! Trust on first use: the key and addresses that each name has had, remembered to detect a coordinator that
//! gives them to another host. The file is kept longer than the membership, until this host leaves the mesh.
//!
//! A pinned name is trusted with its pinned key only, and that key with no other name. Otherwise the first key
//! counts: with `pin-first-use` another key is refused; without it, it is accepted and reported. Addresses
//! belong to keys: a member with an address of a pinned member is refused.

use crate::cache;
use seikan_config::Trust;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Change, MAX_KNOWN, Member, Name};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

/// Time for which an accepted change of a key is reported.
const REPORT_CHANGE_FOR: Duration = Duration::from_secs(7 * 86_400);

/// Keys and addresses by name.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    names: BTreeMap<Name, Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    public_key: PublicKey,
    addresses: Vec<IpAddr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    before: Option<Before>,
}

/// The former key of a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Before {
    public_key: PublicKey,
    /// Seconds since the Unix epoch.
    until_unix_s: u64,
}

/// Maximum number of reported conflicts of each kind.
const MAX_CONFLICTS: usize = 1024;
/// Maximum number of remembered addresses of a member, including former ones of a pinned member.
const MAX_REMEMBERED: usize = 16;

/// Unexpected keys of members.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyConflicts {
    /// Members that were refused, by key.
    pub refused: BTreeMap<PublicKey, Refused>,
    /// Members that were accepted with a changed key.
    pub changed: BTreeMap<Name, Changed>,
}

/// A refused member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Its name at the coordinator.
    pub name: Name,
    /// The reason.
    pub reason: String,
}

/// A changed key that was accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Changed {
    /// The former key.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub was: PublicKey,
    /// The current key.
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub now: PublicKey,
    /// Time of the change in seconds since the Unix epoch.
    pub since_unix_s: u64,
}

/// Checks a coordinator's reports against the known keys.
#[derive(Debug)]
pub(crate) struct TrustStore {
    trust: Trust,
    known: Known,
    /// Owner of each remembered address.
    owners: BTreeMap<IpAddr, Name>,
    key_conflicts: KeyConflicts,
    /// The conflicts as of the last call of [`Self::take_changed_conflicts`].
    reported: KeyConflicts,
    /// The known keys have changed since they were stored.
    dirty: bool,
}

impl TrustStore {
    pub fn new(trust: Trust, known: Known) -> TrustStore {
        let entries = known.names.iter();
        let owners = entries.flat_map(|(name, entry)| {
            let addresses = entry.addresses.iter();
            addresses.map(|address| (*address, name.clone()))
        });
        let owners = owners.collect();
        let mut trust_store = TrustStore {
            trust,
            known,
            owners,
            key_conflicts: KeyConflicts::default(),
            reported: KeyConflicts::default(),
            dirty: false,
        };
        for (name, entry) in &trust_store.known.names {
            trust_store
                .key_conflicts
                .note(name, entry, &trust_store.trust);
        }
        trust_store
    }

    /// Whether the known keys have to be stored.
    pub fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// Stores the known keys. After a failure they stay dirty, and memory has the current ones.
    pub fn store(&mut self, file: &Path) {
        self.dirty = self.dirty && cache::store(file, &self.known).is_err();
    }

    /// Returns the conflicts if they have changed since the last call.
    pub fn take_changed_conflicts(&mut self) -> Option<KeyConflicts> {
        let different = self.reported != self.key_conflicts;
        different.then(|| self.reported.clone_from(&self.key_conflicts));
        different.then(|| self.key_conflicts.clone())
    }

    /// Returns the changes to apply at this time, in seconds since the Unix epoch. A refused member is turned
    /// into a removed one.
    pub fn filter(&mut self, changes: Vec<Change>, unix_s: u64) -> Vec<Change> {
        let accepted = changes.into_iter().map(|change| match change {
            Change::Access(access) => Change::Access(access),
            Change::Removed(key) => {
                self.key_conflicts.refused.remove(&key);
                Change::Removed(key)
            }
            Change::Refused(key, reason) => {
                self.key_conflicts.refused.remove(&key);
                Change::Refused(key, reason)
            }
            Change::Set(member) => {
                if self.admit(&member, unix_s) {
                    Change::Set(member)
                } else {
                    Change::Removed(member.public_key)
                }
            }
            Change::Rotated(former, member) => {
                self.key_conflicts.refused.remove(&former);
                if self.admit(&member, unix_s) {
                    Change::Rotated(former, member)
                } else {
                    Change::Removed(former)
                }
            }
        });
        let accepted = accepted.collect();
        self.key_conflicts.changed.retain(|_, changed| {
            let age = unix_s.saturating_sub(changed.since_unix_s);
            age < REPORT_CHANGE_FOR.as_secs()
        });
        accepted
    }

    /// Whether a member is trusted; if so, it is remembered.
    fn admit(&mut self, member: &Member, unix_s: u64) -> bool {
        match self.reason_to_refuse(member) {
            None => {
                self.key_conflicts.refused.remove(&member.public_key);
                self.learn(member, unix_s);
                true
            }
            Some(reason) => {
                let (name, key) = (member.name.clone(), member.public_key);
                let refused = &mut self.key_conflicts.refused;
                if refused.len() < MAX_CONFLICTS || refused.contains_key(&key) {
                    refused.insert(key, Refused { name, reason });
                }
                false
            }
        }
    }

    /// Returns why a member is not trusted.
    fn reason_to_refuse(&self, member: &Member) -> Option<String> {
        let key = member.public_key;
        let pin = self.trust.pins.get(&member.name);
        if pin.is_some_and(|pin| *pin != key) {
            return Some(format!("`{}` is pinned to another key", member.name));
        }
        let mut pins = self.trust.pins.iter();
        if let Some((name, _)) = pins.find(|(name, pin)| **pin == key && **name != member.name) {
            return Some(format!("its key is pinned for `{name}`"));
        }
        let before = self.known.names.get(&member.name);
        let before = before.filter(|before| before.public_key != key && pin.is_none());
        if self.trust.first_use && before.is_some() {
            return Some(format!(
                "`{}` had another key when it was first seen",
                member.name
            ));
        }
        // Nor may a device behind it have an address of another member.
        let owners = member.all_addresses().filter_map(|address| {
            let name = self.owners.get(&address)?;
            Some((address, name, self.known.names.get(name)?))
        });
        for (address, name, owner) in owners.filter(|(_, _, owner)| owner.public_key != key) {
            if self.is_pinned(&owner.public_key) || (self.trust.first_use && pin.is_none()) {
                return Some(format!(
                    "its address {address} belongs to `{name}`, which has another key"
                ));
            }
        }
        None
    }

    fn is_pinned(&self, key: &PublicKey) -> bool {
        self.trust.pins.values().any(|pin| pin == key)
    }

    /// Remembers a trusted member. If the table is full, a new one is remembered only if it is pinned.
    fn learn(&mut self, member: &Member, unix_s: u64) {
        let (name, key) = (&member.name, member.public_key);
        let pinned = self.is_pinned(&key);
        let old = self.known.names.get(name).cloned();
        // A pinned member keeps its former addresses; otherwise a coordinator could claim a move and give an
        // old address to another host.
        let had = old.iter().filter(|old| pinned && old.public_key == key);
        let had = had.flat_map(|old| &old.addresses);
        let mut addresses = member.addresses.clone();
        addresses.extend(had.filter(|address| !member.addresses.contains(address)));
        addresses.truncate(MAX_REMEMBERED);
        let same = |old: &Entry| old.public_key == key && old.addresses == addresses;
        let full = self.known.names.len() >= MAX_KNOWN && !pinned;
        if old.as_ref().is_some_and(same) || (old.is_none() && full) {
            return;
        }
        for address in old.iter().flat_map(|old| &old.addresses) {
            self.owners.remove(address);
        }
        for address in &addresses {
            let other = self.owners.insert(*address, name.clone());
            let other = other.and_then(|other| self.known.names.get_mut(&other));
            if let Some(other) = other {
                other.addresses.retain(|had| had != address);
            }
        }
        let before = match old {
            Some(old) if old.public_key != key => Some(Before {
                public_key: old.public_key,
                until_unix_s: unix_s,
            }),
            old => old.and_then(|old| old.before),
        };
        let entry = Entry {
            public_key: key,
            addresses,
            before,
        };
        self.key_conflicts.note(name, &entry, &self.trust);
        self.known.names.insert(name.clone(), entry);
        self.dirty = true;
    }
}

impl KeyConflicts {
    /// Notes a changed key, unless the name is pinned.
    fn note(&mut self, name: &Name, entry: &Entry, trust: &Trust) {
        if let Some(before) = entry
            .before
            .as_ref()
            .filter(|_| !trust.pins.contains_key(name))
        {
            let changed = Changed {
                was: before.public_key,
                now: entry.public_key,
                since_unix_s: before.until_unix_s,
            };
            if self.changed.len() < MAX_CONFLICTS || self.changed.contains_key(name) {
                self.changed.insert(name.clone(), changed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_proto::mesh::Device;

    const NOW: u64 = 1_800_000_000;

    fn key(n: u8) -> PublicKey {
        PublicKey::from_bytes([n; 32])
    }

    fn member(name: &str, n: u8, address: u8) -> Change {
        Change::Set(Member {
            name: name.parse().expect("a name"),
            public_key: key(n),
            addresses: vec![[100, 80, 0, address].into()],
            relayed: Vec::new(),
            endpoints: Vec::new(),
            tags: Vec::new(),
            devices: Vec::new(),
        })
    }

    fn trust(pins: &[(&str, u8)], first_use: bool) -> Trust {
        let pins = pins.iter();
        Trust {
            pins: pins
                .map(|(name, n)| (name.parse().expect("a name"), key(*n)))
                .collect(),
            first_use,
        }
    }

    fn trust_store(trust: Trust) -> TrustStore {
        TrustStore::new(trust, Known::default())
    }

    /// Whether a member is trusted, otherwise the reason.
    fn check(trust_store: &mut TrustStore, change: &Change) -> Result<(), String> {
        let Change::Set(member) = change else {
            panic!("a member")
        };
        let accepted = trust_store.filter(vec![change.clone()], NOW);
        if accepted == std::slice::from_ref(change) {
            assert!(
                !trust_store
                    .key_conflicts
                    .refused
                    .contains_key(&member.public_key)
            );
            return Ok(());
        }
        assert_eq!(accepted, [Change::Removed(member.public_key)]);
        Err(trust_store.key_conflicts.refused[&member.public_key]
            .reason
            .clone())
    }

    #[test]
    fn a_pinned_name_has_the_pinned_key_or_none() {
        let mut trust_store = trust_store(trust(&[("db", 1)], false));
        // Also when it was never seen.
        assert!(check(&mut trust_store, &member("db", 2, 2)).is_err());
        assert_eq!(check(&mut trust_store, &member("db", 1, 1)), Ok(()));
        assert!(check(&mut trust_store, &member("db", 2, 2)).is_err());
        assert_eq!(trust_store.key_conflicts.refused.len(), 1);
        trust_store.filter(vec![Change::Removed(key(2))], NOW);
        assert_eq!(trust_store.key_conflicts, KeyConflicts::default());
    }

    #[test]
    fn an_address_that_a_pinned_member_has_or_had_is_nobody_elses() {
        let mut trust_store = trust_store(trust(&[("db", 1)], false));
        assert_eq!(check(&mut trust_store, &member("db", 1, 1)), Ok(()));
        assert!(check(&mut trust_store, &member("evil", 2, 1)).is_err());
        // After its removal, nobody else gets its address.
        trust_store.filter(vec![Change::Removed(key(1))], NOW);
        assert!(check(&mut trust_store, &member("evil", 2, 1)).is_err());
        assert_eq!(check(&mut trust_store, &member("web", 3, 3)), Ok(()));
        // After a move, nobody else gets the old address either.
        assert_eq!(check(&mut trust_store, &member("db", 1, 9)), Ok(()));
        assert!(check(&mut trust_store, &member("evil", 2, 1)).is_err());
        assert!(check(&mut trust_store, &member("evil", 2, 9)).is_err());
        // Nor does a device behind another member.
        let Change::Set(evil) = member("evil", 2, 2) else {
            panic!("a member")
        };
        let devices = vec![Device {
            name: "plc".parse().expect("a name"),
            addresses: vec![[100, 80, 0, 9].into()],
            tags: Vec::new(),
        }];
        let evil = Change::Set(Member { devices, ..evil });
        assert!(check(&mut trust_store, &evil).is_err());
        // Nor under another name with the pinned key.
        assert!(check(&mut trust_store, &member("other", 1, 9)).is_err());
        assert!(check(&mut trust_store, &member("evil", 2, 9)).is_err());
    }

    #[test]
    fn the_number_of_reported_conflicts_is_limited() {
        let mut trust_store = trust_store(trust(&[("db", 1)], false));
        let odd = |n: usize| {
            let mut bytes = [2; 32];
            bytes[..2].copy_from_slice(&(n as u16).to_le_bytes());
            match member("db", 2, 2) {
                Change::Set(member) => Change::Set(Member {
                    public_key: PublicKey::from_bytes(bytes),
                    ..member
                }),
                other => other,
            }
        };
        trust_store.filter((0..=MAX_CONFLICTS).map(odd).collect(), NOW);
        assert_eq!(trust_store.key_conflicts.refused.len(), MAX_CONFLICTS);
    }

    #[test]
    fn a_changed_key_is_accepted_and_reported_for_a_week() {
        let mut trust_store = trust_store(trust(&[], false));
        assert_eq!(check(&mut trust_store, &member("db", 1, 1)), Ok(()));
        assert_eq!(check(&mut trust_store, &member("db", 2, 1)), Ok(()));
        let changed = Changed {
            was: key(1),
            now: key(2),
            since_unix_s: NOW,
        };
        let expected = BTreeMap::from([("db".parse().expect("a name"), changed)]);
        assert_eq!(trust_store.key_conflicts.changed, expected);
        // The stored keys report it again.
        let text = serde_json::to_string(&trust_store.known).expect("text");
        let known = serde_json::from_str(&text).expect("again");
        let again = TrustStore::new(trust(&[], false), known);
        assert_eq!(again.key_conflicts.changed, expected);
        trust_store.filter(Vec::new(), NOW + REPORT_CHANGE_FOR.as_secs());
        assert!(trust_store.key_conflicts.changed.is_empty());
    }

    #[test]
    fn the_first_key_counts_if_that_is_wanted_until_another_is_pinned() {
        let mut first = trust_store(trust(&[], true));
        assert_eq!(check(&mut first, &member("db", 1, 1)), Ok(()));
        for odd in [member("db", 2, 2), member("evil", 3, 1)] {
            assert!(check(&mut first, &odd).is_err());
        }
        assert_eq!(check(&mut first, &member("web", 4, 4)), Ok(()));
        let text = serde_json::to_string(&first.known).expect("text");
        let known = || serde_json::from_str(&text).expect("again");
        let mut again = TrustStore::new(trust(&[], true), known());
        assert!(check(&mut again, &member("db", 2, 2)).is_err());
        let mut pinned = TrustStore::new(trust(&[("db", 2)], true), known());
        assert_eq!(check(&mut pinned, &member("db", 2, 1)), Ok(()));
        assert!(pinned.key_conflicts.changed.is_empty());
    }

    #[test]
    fn a_key_that_is_rotated_is_followed_unless_it_was_pinned() {
        let rotated = |name: &str| match member(name, 2, 1) {
            Change::Set(member) => Change::Rotated(key(1), member),
            other => other,
        };
        let rotate = |trust| {
            let mut trust_store = trust_store(trust);
            assert_eq!(check(&mut trust_store, &member("db", 1, 1)), Ok(()));
            trust_store.filter(vec![rotated("db")], NOW)
        };
        assert_eq!(rotate(trust(&[], false)), [rotated("db")]);
        for wary in [trust(&[("db", 1)], false), trust(&[], true)] {
            assert_eq!(rotate(wary), [Change::Removed(key(1))]);
        }
        let mut again = trust_store(trust(&[("db", 2)], true));
        assert_eq!(check(&mut again, &member("db", 2, 1)), Ok(()));
    }

    #[test]
    fn no_more_is_remembered_than_there_are_members_at_most() {
        let mut trust_store = trust_store(trust(&[], true));
        let all = (0..=MAX_KNOWN).map(|n| member(&format!("m{n}"), 1, 1));
        trust_store.filter(all.collect(), NOW);
        assert_eq!(trust_store.known.names.len(), MAX_KNOWN);
    }
}
