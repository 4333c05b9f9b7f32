//! Repair of a mesh after its etcd was restored from a backup.
//!
//! The restored state lacks revisions, numbers and ids that members may already have. A coordinator
//! that ran before still knows how far they had got ([`Lost`]). Before any other change it makes
//! the mesh continue after them: no address is reused that a host may still have, and members
//! receive everything again in another epoch. Hosts that joined after the backup are no members,
//! and the policy is that of the backup. The log records the restore.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use tracing::warn;

use super::super::messages::put;
use super::change::Proposal;
use super::{Replica, TIMEOUT, random};
use crate::lock;
use crate::store::rows::{Freed, Head, Mesh, Term};
use crate::store::{Actor, StoreError, audit};

/// Maximum number of numbers that one change frees again. Each may touch two rows, the former
/// [`Freed`] and the new one, and the change also touches the [`Head`] and the log: 92 of the
/// [`super::change::MAX_ROWS`].
const BATCH: usize = 45;
const _: () = assert!(2 * BATCH + 2 <= super::change::MAX_ROWS);

/// State that was lost in a restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lost {
    had: Head,
    /// Revision of the policy.
    policy: u64,
    /// Numbers that were in use later than the restored state says.
    later: BTreeSet<u32>,
    /// [`super::Epoch::restored`] before the restore.
    restored: u64,
}

/// Returns the revision until which each number was in use; [`u64::MAX`] for numbers in use.
fn numbers(mesh: &Mesh) -> BTreeMap<u32, u64> {
    let freed = mesh.freed.all().map(|row| (row.number, row.since));
    let used = mesh.member.all().flat_map(|row| {
        let devices = row.devices.iter().filter_map(|device| device.number);
        devices.chain([row.number])
    });
    freed.chain(used.map(|number| (number, u64::MAX))).collect()
}

impl Lost {
    /// Compares the state before and after a restore. Includes `earlier` losses that are not
    /// repaired yet.
    pub fn new(had: &Mesh, now: &Mesh, earlier: Option<Lost>, restored: u64) -> Lost {
        let (numbers, known) = (numbers(had), numbers(now));
        let is_later = |(number, until): &(u32, u64)| known.get(number) < Some(until);
        let later = numbers.into_iter().filter(is_later);
        let (head, policy) = (had.head(), had.policy().revision);
        let earlier = earlier.unwrap_or(Lost {
            had: head,
            policy,
            later: BTreeSet::new(),
            restored,
        });
        Lost {
            had: Head {
                revision: head.revision.max(earlier.had.revision),
                highest: head.highest.max(earlier.had.highest),
                last_member: head.last_member.max(earlier.had.last_member),
                ..head
            },
            policy: policy.max(earlier.policy),
            later: later
                .map(|(number, _)| number)
                .chain(earlier.later)
                .collect(),
            restored: earlier.restored,
        }
    }

    /// Repairs the mesh; returns whether it changed anything. It may take several changes.
    fn repair(&self, mesh: &mut Mesh, now: u64) -> Result<bool, StoreError> {
        let (found, had) = (mesh.head(), self.had);
        let highest = had.highest.max(found.highest);
        let last = self.numbers_to_free_again(mesh, highest)?;
        let is_behind = found.revision < had.revision
            || found.highest < had.highest
            || found.last_member < had.last_member;
        if !is_behind && last.is_empty() {
            return Ok(false);
        }
        mesh.put(Head {
            revision: had.revision.max(found.revision).saturating_add(1),
            highest,
            last_member: had.last_member.max(found.last_member),
            ..found
        })?;
        for number in last {
            if let Some(&Freed { since, .. }) = mesh.freed.find(&Term::Number(number)) {
                mesh.delete::<Freed>(since)?;
            }
            let since = mesh.next_revision()?;
            mesh.put(Freed {
                since,
                number,
                device: None,
            })?;
        }
        if is_behind {
            let mut subject = format!("from revision {} to {}", had.revision, found.revision);
            if mesh.policy().revision < self.policy {
                subject += ", with an earlier policy";
            }
            let by = Actor::Operator("of etcd".to_owned());
            audit::record(mesh, now, "etcd restored", &subject, &by)?;
            warn!(target: "coordinator", "etcd restored {subject}");
        }
        Ok(true)
    }

    /// Returns free numbers that must be reused last, because their former members may still use
    /// the addresses: numbers that were given after the backup and that the restored state does not
    /// know, and numbers that became free after the backup.
    fn numbers_to_free_again(&self, mesh: &Mesh, highest: u32) -> Result<Vec<u32>, StoreError> {
        let known = numbers(mesh);
        let capacity = mesh.networks()?.map_or(0, |networks| networks.capacity());
        let missing = (1..=highest.min(capacity)).filter(|number| !known.contains_key(number));
        // A number that is freed again has a revision above the lost ones.
        let early = self.later.iter().filter(|number| {
            let since = known.get(number);
            since.is_some_and(|since| *since <= self.had.revision)
        });
        Ok(missing.chain(early.copied()).take(BATCH).collect())
    }
}

impl Replica {
    /// Repairs the mesh if etcd was restored from a backup.
    pub fn repair(&self) -> Result<(), StoreError> {
        let _proposing = lock(&self.proposing);
        self.repair_by(Instant::now() + TIMEOUT)
    }

    /// Does the same for a caller that holds `proposing`.
    pub(super) fn repair_by(&self, deadline: Instant) -> Result<(), StoreError> {
        loop {
            let (lost, epoch) = {
                let state = self.state();
                (state.lost.clone(), state.epoch)
            };
            let Some(lost) = lost else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(self.away());
            }
            // The clock is read only here: the loading thread gets no time from a caller.
            let now = crate::now();
            let repair = |mesh: &mut Mesh| lost.repair(mesh, now).unwrap_or(false);
            let Proposal { rows, base, .. } = self.decide([repair].into_iter())?;
            let is_announced = epoch.restored != lost.restored;
            if is_announced && rows.is_empty() {
                let mut state = self.state();
                // If they differ, another restore has happened meanwhile.
                if state.lost.as_ref() == Some(&lost) {
                    state.lost = None;
                }
                continue;
            }
            let number = random()?.to_string().into_bytes();
            let announcement = put(self.key("restored"), number, 0);
            let announcement = (!is_announced).then_some(announcement);
            self.propose(rows, announcement, base, deadline)?;
        }
    }
}
