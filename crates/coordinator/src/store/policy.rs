//! The policy text of the administrator, and the tags of members. Members enforce the policy.

use std::cell::OnceCell;
use std::collections::VecDeque;
use std::ops::{Bound, RangeInclusive};
use std::sync::{Arc, Mutex};

use seikan_proto::mesh::policy::Sight;
use seikan_proto::mesh::{MAX_TAGS, Member, Name, Networks, Party, Policy};

use super::devices::{self, StoredDevice};
use super::members::{keep_former, member};
use super::rows::{MemberRow, Mesh, PolicyRow, Term};
use super::{Actor, MemberId, Store, StoreError, audit};
use crate::lock;

impl Store {
    /// Returns the text of the policy; empty if there is none.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn policy(&self) -> Result<String, StoreError> {
        self.read(|mesh| Ok(mesh.policy().text.clone()))
    }

    /// Replaces the policy and notifies members; returns whether the text has changed.
    ///
    /// # Errors
    /// [`StoreError::Policy`] if the text cannot be parsed; [`StoreError::Sqlite`].
    pub fn set_policy(&self, text: &str, by: &Actor, now: u64) -> Result<bool, StoreError> {
        let policy = Policy::parse(text)?;
        let (text, by) = (text.to_owned(), by.clone());
        self.change(move |mesh| {
            if mesh.policy().text == text {
                return Ok(false);
            }
            let revision = mesh.next_revision()?;
            mesh.put(PolicyRow::new(text.clone(), revision))?;
            let subject = match policy.rules().len() {
                1 => "1 rule".to_owned(),
                count => format!("{count} rules"),
            };
            audit::record(mesh, now, "policy set", &subject, &by)?;
            Ok(true)
        })
    }

    /// Replaces the tags of a member and notifies members; returns whether they have changed.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`] for more than [`MAX_TAGS`]; [`StoreError::NotAMember`];
    /// [`StoreError::Sqlite`].
    pub fn set_tags(
        &self,
        name: &Name,
        tags: &[Name],
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        if tags.len() > MAX_TAGS {
            return Err(StoreError::OutOfBounds("a member may have at most 16 tags"));
        }
        let (name, tags, by) = (name.clone(), tags.to_vec(), by.clone());
        self.change(move |mesh| {
            let row = mesh.member.find(&Term::Name(name.clone())).cloned();
            let row = row.ok_or(StoreError::NotAMember)?;
            if row.own.tags == tags {
                return Ok(false);
            }
            let revision = mesh.next_revision()?;
            keep_former(mesh, &row, revision, row.id)?;
            mesh.put(MemberRow {
                devices: devices::with_gateway_tags(&row, &tags),
                own: Party {
                    tags: tags.clone(),
                    ..row.own
                },
                revision,
                ..row
            })?;
            let tags: Vec<&str> = tags.iter().map(Name::as_str).collect();
            let subject = format!("{name}: {}", tags.join(" "));
            audit::record(mesh, now, "tags set", &subject, &by)?;
            Ok(true)
        })
    }
}

/// Maximum number of policies in the history. A member that polls knows the latest policy or the
/// one before it, unless the member was away.
const MAX_HISTORY: usize = 4;

/// The latest policies. The difference between two consecutive policies decides what members
/// receive.
#[derive(Debug, Default)]
pub(super) struct PolicyHistory(Mutex<VecDeque<PastPolicy>>);

/// A policy, and the revisions at which it is known to have been in force.
#[derive(Debug)]
struct PastPolicy {
    policy: Arc<Policy>,
    revisions: RangeInclusive<u64>,
}

impl PolicyHistory {
    /// Records the policy in force at the revision `current`, which has the revision `since`.
    fn note(&self, policy: &Arc<Policy>, since: u64, current: u64) {
        let mut all = lock(&self.0);
        if let Some(last) = all.back_mut()
            && Arc::ptr_eq(&last.policy, policy)
        {
            last.revisions = since..=current.max(*last.revisions.end());
            return;
        }
        // After a restore from a backup, other changes may have the same revisions.
        all.retain(|past| *past.revisions.end() < since);
        if all.len() == MAX_HISTORY {
            all.pop_front();
        }
        all.push_back(PastPolicy {
            policy: Arc::clone(policy),
            revisions: since..=current,
        });
    }

    /// Returns the policy that was in force at a revision, if it is known.
    fn at(&self, revision: u64) -> Option<Arc<Policy>> {
        let all = lock(&self.0);
        let past = all.iter().find(|past| past.revisions.contains(&revision));
        past.map(|past| Arc::clone(&past.policy))
    }
}

/// Effect of changes of policy and tags on the members that a member sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Difference {
    /// Policy and tags are the same.
    Nothing,
    /// The rules differ, but the member sees the same members.
    Rules,
    /// The member may see other members, or this is unknown.
    Members,
}

/// The members and devices that a member sees: all to which it, or a device behind it, may talk in
/// either direction. The set is computed on first use, because most polls report no member.
pub(super) struct Visibility<'a> {
    history: &'a PolicyHistory,
    pub mesh: &'a Mesh,
    pub of: MemberId,
    sight: OnceCell<Sight>,
}

impl<'a> Visibility<'a> {
    pub fn new(store: &'a Store, mesh: &'a Mesh, of: MemberId) -> Visibility<'a> {
        Visibility {
            history: &store.policies,
            mesh,
            of,
            sight: OnceCell::new(),
        }
    }

    /// Returns whether a member is visible, or a device behind it.
    pub fn sees(&self, own: &Party, devices: &[StoredDevice]) -> Result<bool, StoreError> {
        let sight = self.sight()?;
        let mut approved = devices.iter().filter(|device| device.is_approved());
        Ok(sight.has(own) || approved.any(|device| sight.has(&device.party(&own.name))))
    }

    /// Returns a member with the devices that are visible; `None` if neither it nor one of its
    /// devices is.
    pub fn visible(
        &self,
        row: &MemberRow,
        networks: &Networks,
    ) -> Result<Option<Member>, StoreError> {
        let sight = self.sight()?;
        let mut devices = devices::approved(row, networks)?;
        devices.retain(|device| sight.has(&device.party(&row.own.name)));
        if devices.is_empty() && !sight.has(&row.own) {
            return Ok(None);
        }
        row.member(networks, devices).map(Some)
    }

    fn sight(&self) -> Result<&Sight, StoreError> {
        if let Some(sight) = self.sight.get() {
            return Ok(sight);
        }
        let sight = self.mesh.policy().policy()?.sight(&self.parties()?);
        Ok(self.sight.get_or_init(|| sight))
    }

    /// Returns the member itself and the devices behind it.
    fn parties(&self) -> Result<Vec<Party>, StoreError> {
        let row = member(self.mesh, self.of)?;
        let approved = row.devices.iter().filter(|device| device.is_approved());
        let devices = approved.map(|device| device.party(&row.own.name));
        Ok(std::iter::once(row.own.clone()).chain(devices).collect())
    }

    /// Returns the part of the policy that concerns the member.
    pub fn rules(&self) -> Result<Policy, StoreError> {
        Ok(self.mesh.policy().policy()?.concerning(&self.parties()?))
    }

    /// Returns the difference between a revision and the revision `current`.
    pub fn difference(&self, revision: u64, current: u64) -> Result<Difference, StoreError> {
        let row = self.mesh.policy();
        let (policy, since) = (row.policy()?, row.revision);
        self.history.note(&policy, since, current);
        // Only its own rows: those of others may be many, and a member may name any revision.
        let first = Bound::Excluded(Term::Earlier(self.of.0, revision));
        let last = Bound::Included(Term::Earlier(self.of.0, u64::MAX));
        if self.mesh.former.by_terms((first, last)).next().is_some() {
            return Ok(Difference::Members);
        }
        if since <= revision {
            return Ok(Difference::Nothing);
        }
        let Some(former) = self.history.at(revision) else {
            return Ok(Difference::Members);
        };
        Ok(if former.sight(&self.parties()?) == *self.sight()? {
            Difference::Rules
        } else {
            Difference::Members
        })
    }
}
