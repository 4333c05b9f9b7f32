//! A member's view of the other members.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{
    Access, Changes, MAX_COORDINATORS, MAX_MEMBERS, MAX_MESH_DEVICES, MAX_RELAYS, Member, Name,
    Relay, RelayAddress,
};
use crate::keys::PublicKey;

/// Maximum number of members kept; others are refused.
pub const MAX_KNOWN: usize = 1 << 17;
/// Maximum number of devices kept; members with further ones are refused. It is twice the number
/// that a coordinator allows: devices that change their gateway are behind both until the entry of
/// the former gateway arrives, and all devices may do so at once.
const MAX_KNOWN_DEVICES: usize = 2 * MAX_MESH_DEVICES;

/// Maximum number of refused members that are remembered. A coordinator could name any number.
const MAX_REFUSED: usize = 1024;

/// The other members, as of the last answer. Its JSON is stored on disk, for times without a
/// coordinator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// Everything up to this revision is included.
    pub revision: u64,
    #[serde(default)]
    access: Access,
    members: BTreeMap<PublicKey, Member>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    relays: Vec<Relay>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    coordinators: Vec<RelayAddress>,
    /// Members known before a whole answer that it has not confirmed yet.
    #[serde(skip)]
    unconfirmed: BTreeSet<PublicKey>,
    /// Members that are not kept in this membership. Their removal is reported like that of other
    /// members.
    #[serde(skip)]
    refused: BTreeSet<PublicKey>,
}

/// A change of the membership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The access rules of this host have changed.
    Access(Access),
    /// A member is new or has changed.
    Set(Member),
    /// A member has replaced this key by another and kept its name and addresses.
    Rotated(PublicKey, Member),
    /// A member has left, or one that was refused.
    Removed(PublicKey),
    /// A member is not kept, for this reason, and removed if it was kept before.
    Refused(PublicKey, &'static str),
}

impl Membership {
    /// All other members by key.
    pub fn members(&self) -> &BTreeMap<PublicKey, Member> {
        &self.members
    }

    /// The mesh's relays with this member's tickets, as of the last answer. They are no [`Change`]:
    /// every answer replaces them.
    pub fn relays(&self) -> &[Relay] {
        &self.relays
    }

    /// Addresses of the mesh's coordinators, as of the last answer; empty if there is only one.
    pub fn coordinators(&self) -> &[RelayAddress] {
        &self.coordinators
    }

    /// The access rules of this host.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Applies an answer and returns the changes. Access rules come first, so that no new member
    /// meets the old ones. Removals come before new members, since an address may have moved. A
    /// whole answer removes only members that neither it nor its continuations name.
    pub fn take(&mut self, mut changes: Changes) -> Vec<Change> {
        // A number from the coordinator allocates nothing here.
        changes.members.truncate(MAX_MEMBERS);
        if changes.whole {
            self.unconfirmed = self.members.keys().copied().collect();
            self.unconfirmed.extend(&self.refused);
        }
        let mut gone: BTreeSet<PublicKey> = changes.removed.into_iter().collect();
        for member in &changes.members {
            self.unconfirmed.remove(&member.public_key);
            gone.remove(&member.public_key);
        }
        if !changes.more {
            gone.append(&mut self.unconfirmed);
        }
        let mut rotated = self.rotated(&gone, &changes.members);
        self.revision = changes.revision;
        changes.relays.truncate(MAX_RELAYS);
        self.relays = changes.relays;
        changes.coordinators.truncate(MAX_COORDINATORS);
        self.coordinators = changes.coordinators;
        let mut different = Vec::new();
        if self
            .access
            .take(changes.own, changes.own_devices, changes.policy)
        {
            different.push(Change::Access(self.access.clone()));
        }
        for key in gone {
            self.unconfirmed.remove(&key);
            let known = self.members.remove(&key).is_some() | self.refused.remove(&key);
            if known && !rotated.values().any(|former| *former == key) {
                different.push(Change::Removed(key));
            }
        }
        let mut devices: usize = self.members.values().map(|m| m.devices.len()).sum();
        for member in changes.members {
            let key = member.public_key;
            let known = self.members.get(&key);
            let known_devices = known.map_or(0, |known| known.devices.len());
            let others = devices - known_devices;
            let former = rotated.remove(&key);
            if let Err(reason) = self.check_space(&member, others) {
                different.extend(former.map(Change::Removed));
                self.members.remove(&key);
                devices = others;
                if self.refused.len() < MAX_REFUSED {
                    self.refused.insert(key);
                }
                different.push(Change::Refused(key, reason));
            } else if known != Some(&member) {
                self.refused.remove(&key);
                devices = others + member.devices.len();
                self.members.insert(key, member.clone());
                different.push(match former {
                    Some(former) => Change::Rotated(former, member),
                    None => Change::Set(member),
                });
            }
        }
        different
    }

    /// Checks whether a member can be kept beside `others`, the devices of the others.
    fn check_space(&self, member: &Member, others: usize) -> Result<(), &'static str> {
        if !member.is_within_bounds() {
            return Err("it has too many addresses, endpoints, tags or devices");
        }
        if !self.members.contains_key(&member.public_key) && self.members.len() >= MAX_KNOWN {
            return Err("the mesh has more than 131072 members");
        }
        if others + member.devices.len() > MAX_KNOWN_DEVICES {
            return Err("the members have more than 16384 devices");
        }
        Ok(())
    }

    /// New members that replace one that has left, with the old key by the new one. Numbers are not
    /// reused soon, so the same name and addresses mean the same member.
    fn rotated(
        &self,
        gone: &BTreeSet<PublicKey>,
        members: &[Member],
    ) -> BTreeMap<PublicKey, PublicKey> {
        let gone = gone.iter().filter_map(|key| self.members.get(key));
        let mut gone: BTreeMap<&Name, &Member> =
            gone.map(|member| (&member.name, member)).collect();
        let new = members
            .iter()
            .filter(|member| !self.members.contains_key(&member.public_key));
        let rotated = new.filter_map(|member| {
            let former = gone.get(&member.name)?;
            let same = former.addresses == member.addresses;
            // At most one new member replaces an old one.
            let former = same.then(|| gone.remove(&member.name)).flatten()?;
            Some((member.public_key, former.public_key))
        });
        rotated.collect()
    }

    /// Removes everybody, because this host is no longer a member. Returns the changes.
    pub fn clear(&mut self) -> Vec<Change> {
        let Membership {
            members,
            access,
            refused,
            ..
        } = std::mem::take(self);
        let access = (access != Access::default()).then(|| Change::Access(Access::default()));
        let gone = members.into_keys().chain(refused).map(Change::Removed);
        gone.chain(access).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filter::Filter;
    use crate::mesh::{
        Device, MAX_DEVICES, MAX_ENDPOINTS, MAX_RELAYED, Party, Policy, RelayKind, RelaySecret,
        Ticket,
    };

    fn key(n: u8) -> PublicKey {
        PublicKey::from_bytes([n; 32])
    }

    fn member(n: u8, port: u16) -> Member {
        Member {
            name: format!("m{n}").parse().expect("a name"),
            public_key: key(n),
            addresses: vec![[100, 80, 0, n].into()],
            endpoints: vec![([192, 0, 2, n], port).into()],
            relayed: Vec::new(),
            tags: Vec::new(),
            devices: Vec::new(),
        }
    }

    fn answer(revision: u64, members: &[Member], removed: &[u8]) -> Changes {
        Changes {
            revision,
            members: members.to_vec(),
            removed: removed.iter().map(|n| key(*n)).collect(),
            ..Changes::default()
        }
    }

    fn whole(changes: Changes) -> Changes {
        Changes {
            whole: true,
            ..changes
        }
    }

    #[test]
    fn only_differences_are_reported() {
        let mut membership = Membership::default();
        let first = membership.take(whole(answer(5, &[member(1, 1), member(2, 1)], &[])));
        assert_eq!(first.len(), 2);
        let second = membership.take(answer(7, &[member(1, 1), member(2, 9)], &[3]));
        assert_eq!(second, [Change::Set(member(2, 9))]);
        assert_eq!(membership.revision, 7);
        let third = membership.take(answer(8, &[], &[1]));
        assert_eq!(third, [Change::Removed(key(1))]);
        assert_eq!(membership.members().len(), 1);
    }

    #[test]
    fn a_whole_answer_removes_only_members_it_does_not_name() {
        let mut membership = Membership::default();
        membership.take(answer(5, &[member(1, 1), member(2, 1), member(3, 1)], &[]));
        let changes = membership.take(whole(answer(9, &[member(1, 1), member(3, 2)], &[])));
        assert_eq!(
            changes,
            [Change::Removed(key(2)), Change::Set(member(3, 2))]
        );
    }

    #[test]
    fn a_whole_answer_in_parts_removes_nobody_before_its_end() {
        let mut membership = Membership::default();
        membership.take(answer(5, &[member(1, 1), member(2, 1)], &[]));
        let part = Changes {
            more: true,
            ..whole(answer(3, &[member(3, 1)], &[]))
        };
        assert_eq!(membership.take(part), [Change::Set(member(3, 1))]);
        let rest = membership.take(answer(9, &[member(2, 1)], &[]));
        assert_eq!(rest, [Change::Removed(key(1))]);
    }

    #[test]
    fn a_member_that_left_and_rejoined_in_one_answer_is_a_member() {
        let mut membership = Membership::default();
        membership.take(answer(1, &[member(1, 1)], &[]));
        assert_eq!(membership.take(answer(3, &[member(1, 1)], &[1])), []);
        assert_eq!(membership.members().len(), 1);
    }

    #[test]
    fn a_member_out_of_bounds_is_refused() {
        let mut membership = Membership::default();
        let good = member(1, 1);
        let endpoint = good.endpoints[0];
        let many = Member {
            endpoints: vec![endpoint; MAX_ENDPOINTS + 1],
            ..member(2, 1)
        };
        let relayed = Member {
            relayed: vec![endpoint; MAX_RELAYED + 1],
            ..member(4, 1)
        };
        let nowhere = Member {
            addresses: Vec::new(),
            ..member(3, 1)
        };
        let taken = membership.take(answer(1, &[good.clone(), many, relayed, nowhere], &[]));
        let reason = "it has too many addresses, endpoints, tags or devices";
        let refused = |n: u8| Change::Refused(key(n), reason);
        assert_eq!(
            taken,
            [
                Change::Set(good.clone()),
                refused(2),
                refused(4),
                refused(3)
            ]
        );
        assert_eq!(membership.members().len(), 1);
        // One that was kept before is not kept as it was.
        let grown = Member {
            endpoints: vec![endpoint; MAX_ENDPOINTS + 1],
            ..good
        };
        assert_eq!(membership.take(answer(2, &[grown], &[])), [refused(1)]);
        assert!(membership.members().is_empty());
    }

    /// A member that is refused: it has no address.
    fn unusable(n: u8) -> Member {
        Member {
            addresses: Vec::new(),
            ..member(n, 1)
        }
    }

    #[test]
    fn a_refused_member_that_has_left_is_removed() {
        let mut membership = Membership::default();
        let both = [unusable(1), unusable(2)];
        let reason = "it has too many addresses, endpoints, tags or devices";
        let refused = [1, 2].map(|n| Change::Refused(key(n), reason));
        let removed = |n: u8| Change::Removed(key(n));
        assert_eq!(membership.take(answer(1, &both, &[])), refused);
        assert_eq!(membership.take(answer(2, &[], &[1])), [removed(1)]);
        assert_eq!(membership.take(answer(3, &[], &[1])), [], "only once");
        // By a whole answer without it.
        assert_eq!(membership.take(whole(answer(4, &[], &[]))), [removed(2)]);
        // By the end of this host's membership.
        assert_eq!(membership.take(answer(5, &both, &[])), refused);
        assert_eq!(membership.clear(), [removed(1), removed(2)]);
    }

    #[test]
    fn a_refused_member_that_is_kept_later_is_no_refused_one() {
        let mut membership = Membership::default();
        membership.take(answer(1, &[unusable(1)], &[]));
        let taken = membership.take(answer(2, &[member(1, 1)], &[]));
        assert_eq!(taken, [Change::Set(member(1, 1))]);
        assert_eq!(
            membership.take(answer(3, &[], &[1])),
            [Change::Removed(key(1))]
        );
        assert_eq!(membership.clear(), []);
    }

    #[test]
    fn no_more_refused_members_are_remembered_than_a_bound() {
        let mut membership = Membership::default();
        let nowhere: Vec<Member> = (0..=MAX_REFUSED as u16)
            .map(|n| Member {
                addresses: Vec::new(),
                ..gateway(n, 0, 0)
            })
            .collect();
        assert_eq!(
            membership.take(answer(1, &nowhere, &[])).len(),
            MAX_REFUSED + 1
        );
        assert_eq!(membership.clear().len(), MAX_REFUSED);
    }

    /// A gateway with `count` devices, numbered from `first`.
    fn gateway(n: u16, first: usize, count: usize) -> Member {
        let [high, low] = n.to_be_bytes();
        let mut key = [7; 32];
        key[..2].copy_from_slice(&[high, low]);
        let device = |number: usize| Device {
            name: format!("d{number}").parse().expect("a name"),
            addresses: vec![[100, 96, (number >> 8) as u8, number as u8].into()],
            tags: Vec::new(),
        };
        Member {
            name: format!("g{n}").parse().expect("a name"),
            public_key: PublicKey::from_bytes(key),
            addresses: vec![[100, 81, high, low].into()],
            devices: (first..first + count).map(device).collect(),
            ..member(1, 1)
        }
    }

    /// A mesh full of devices, its gateways numbered from `first`.
    fn full_mesh(first: u16) -> Vec<Member> {
        let gateways = MAX_MESH_DEVICES / MAX_DEVICES;
        (0..gateways)
            .map(|n| gateway(first + n as u16, n * MAX_DEVICES, MAX_DEVICES))
            .collect()
    }

    #[test]
    fn all_devices_of_a_full_mesh_may_change_their_gateways() {
        let mut membership = Membership::default();
        let (former, latter) = (full_mesh(0), full_mesh(1000));
        let set = |members: &[Member]| -> Vec<Change> {
            members.iter().cloned().map(Change::Set).collect()
        };
        let without_devices = |members: &[Member]| -> Vec<Member> {
            let mut members = members.to_vec();
            members.iter_mut().for_each(|member| member.devices.clear());
            members
        };
        let known = [former.clone(), without_devices(&latter)].concat();
        assert_eq!(membership.take(answer(1, &known, &[])), set(&known));
        // The entries of the gateways that gain devices arrive first.
        assert_eq!(membership.take(answer(2, &latter, &[])), set(&latter));
        let former = without_devices(&former);
        assert_eq!(membership.take(answer(3, &former, &[])), set(&former));
        let devices = membership.members().values().map(|m| m.devices.len());
        assert_eq!(devices.sum::<usize>(), MAX_MESH_DEVICES);
    }

    #[test]
    fn devices_beyond_the_maximum_are_refused_with_their_member() {
        let mut membership = Membership::default();
        let gateways = [full_mesh(0), full_mesh(1000)].concat();
        let known: usize = gateways.iter().map(|member| member.devices.len()).sum();
        assert_eq!(known, MAX_KNOWN_DEVICES);
        let taken = membership.take(answer(1, &gateways, &[]));
        assert_eq!(taken.len(), gateways.len());
        let one = gateway(2000, 0, 1);
        let refused = Change::Refused(one.public_key, "the members have more than 16384 devices");
        let one_more = answer(2, &[one.clone(), member(1, 1)], &[]);
        let taken = membership.take(one_more.clone());
        assert_eq!(taken, [refused, Change::Set(member(1, 1))]);
        // There is space once another has fewer.
        let fewer = gateway(0, 0, MAX_DEVICES - 1);
        assert_eq!(membership.take(answer(3, &[fewer], &[])).len(), 1);
        assert_eq!(membership.take(one_more), [Change::Set(one)]);
    }

    #[test]
    fn a_member_with_a_new_key_stays_the_same_member() {
        let mut membership = Membership::default();
        let with_key = |n: u8, member: Member| Member {
            public_key: key(n),
            ..member
        };
        membership.take(answer(1, &[member(1, 1), member(2, 1)], &[]));
        let rotated = with_key(11, member(1, 5));
        let changes = membership.take(answer(3, std::slice::from_ref(&rotated), &[1]));
        assert_eq!(changes, [Change::Rotated(key(1), rotated.clone())]);
        // The same by a whole answer.
        let again = with_key(12, member(1, 5));
        let changes = membership.take(whole(answer(5, &[again.clone(), member(2, 1)], &[])));
        assert_eq!(changes, [Change::Rotated(key(11), again)]);
        // If two claim to replace a member, one does.
        let two = [21, 22].map(|n| with_key(n, member(2, 1)));
        let mut twice = membership.clone();
        let changes = twice.take(answer(7, &two, &[2]));
        let [first, second] = two;
        let expected = [Change::Rotated(key(2), first), Change::Set(second)];
        assert_eq!(changes, expected);
        // A member that joins again after it was revoked has another address.
        let back = Member {
            addresses: vec![[100, 80, 0, 9].into()],
            ..with_key(13, member(2, 1))
        };
        let changes = membership.take(answer(7, std::slice::from_ref(&back), &[2]));
        assert_eq!(changes, [Change::Removed(key(2)), Change::Set(back)]);
        assert_eq!(membership.members().len(), 2);
    }

    fn relay(expires: u64) -> Relay {
        let text = "skr_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX";
        let secret = RelaySecret::parse(text, RelayKind::Seikan).expect("a secret");
        Relay {
            address: "relay.example.org:3478".parse().expect("an address"),
            kind: RelayKind::Seikan,
            tls: None,
            ticket: Ticket::new(&secret, 9, &key(9), expires),
        }
    }

    #[test]
    fn relays_are_those_of_the_last_answer_and_no_more_than_a_mesh_has() {
        let mut membership = Membership::default();
        let with = |relays| Changes {
            relays,
            ..answer(1, &[], &[])
        };
        assert_eq!(membership.take(with(vec![relay(1)])), []);
        assert_eq!(membership.relays(), [relay(1)]);
        membership.take(with(vec![relay(2); MAX_RELAYS + 1]));
        assert_eq!(membership.relays(), vec![relay(2); MAX_RELAYS]);
        membership.take(with(Vec::new()));
        assert_eq!(membership.relays(), []);
    }

    #[test]
    fn coordinators_are_those_of_the_last_answer_up_to_the_maximum() {
        let mut membership = Membership::default();
        let at = |n: usize| -> RelayAddress { format!("c{n}:7443").parse().expect("an address") };
        let with = |coordinators: Vec<RelayAddress>| Changes {
            coordinators,
            ..answer(1, &[], &[])
        };
        membership.take(with((0..=MAX_COORDINATORS).map(at).collect()));
        let first: Vec<RelayAddress> = (0..MAX_COORDINATORS).map(at).collect();
        assert_eq!(membership.coordinators(), first);
        let text = serde_json::to_string(&membership).expect("text");
        let kept: Membership = serde_json::from_str(&text).expect("again");
        assert_eq!(kept.coordinators(), first);
        // A single coordinator sends no list.
        membership.take(with(Vec::new()));
        assert!(membership.coordinators().is_empty());
    }

    #[test]
    fn access_rules_come_before_members_and_stay_until_replaced() {
        let party = |tag: &str| Party {
            name: "me".parse().expect("a name"),
            tags: vec![tag.parse().expect("a tag")],
            gateway: None,
        };
        let policy = Policy::parse("allow tag:a -> tag:b tcp/443").expect("a policy");
        let mut membership = Membership::default();
        let first = Changes {
            policy: Some(policy.clone()),
            own: Some(party("b")),
            ..answer(1, &[member(1, 1)], &[])
        };
        let access = |tag: &str| Access {
            own: Some(party(tag)),
            devices: Vec::new(),
            policy: policy.clone(),
        };
        assert_eq!(
            membership.take(first.clone()),
            [Change::Access(access("b")), Change::Set(member(1, 1))]
        );
        // The same answer again, and one without access rules.
        assert_eq!(membership.take(first), []);
        assert_eq!(membership.take(whole(answer(2, &[member(1, 1)], &[]))), []);
        let tagged = Changes {
            own: Some(party("c")),
            ..answer(3, &[], &[])
        };
        assert_eq!(membership.take(tagged), [Change::Access(access("c"))]);
        let text = serde_json::to_string(&membership).expect("text");
        let kept: Membership = serde_json::from_str(&text).expect("again");
        assert_eq!(kept.access(), &access("c"));
    }

    #[test]
    fn a_membership_from_before_policies_admits_everything() {
        let membership: Membership =
            serde_json::from_str(r#"{"revision": 4, "members": {}}"#).expect("a book");
        assert_eq!(membership.access().filter(&member(1, 1)), Filter::All);
    }

    #[test]
    fn it_is_kept_as_json() {
        let mut membership = Membership::default();
        membership.take(Changes {
            relays: vec![relay(5)],
            ..answer(4, &[member(1, 1)], &[])
        });
        let text = serde_json::to_string(&membership).expect("text");
        assert_eq!(
            serde_json::from_str::<Membership>(&text).expect("again"),
            membership
        );
        assert_eq!(membership.clear(), [Change::Removed(key(1))]);
        assert_eq!(membership, Membership::default());
    }
}
