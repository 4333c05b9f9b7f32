//! Repair of a mesh after its etcd was restored from a backup.
//!
//! The restored state lacks revisions, numbers and ids that members may already have. A coordinator
//! that ran before still knows how far they had got ([`Lost`]). Before any other change it makes
//! the mesh continue after them: no address is reused that a host may still have, and members
//! receive everything again in another epoch. Hosts that joined after the backup are no members,
//! and the policy is that of the backup. The log records the restore.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, Transaction};
use tracing::warn;

use super::super::messages::put;
use super::change::Job;
use super::sync::End;
use super::{Replica, Shared, TIMEOUT, Trouble, random};
use crate::lock;
use crate::store::{Actor, StoreError, audit, networks_of};

/// Maximum number of numbers that one change frees again, which leaves space for its other rows.
const BATCH: usize = 90;

/// High-water marks of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HighWaterMarks {
    /// Latest revision.
    pub revision: i64,
    /// Greatest number that a member has had.
    highest: i64,
    /// Greatest id of a member.
    member: i64,
    /// Revision of the policy.
    policy: i64,
}

/// State that was lost in a restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lost {
    had: HighWaterMarks,
    /// Numbers that were in use later than the restored state says.
    later: BTreeSet<i64>,
    /// [`super::Epoch::restored`] before the restore.
    restored: u64,
}

/// Revision until which each number was in use; [`i64::MAX`] for numbers in use.
pub(super) struct Numbers(BTreeMap<i64, i64>);

impl HighWaterMarks {
    fn of(connection: &Connection) -> Result<HighWaterMarks, StoreError> {
        let sql = "SELECT mesh.revision, highest, policy.revision,
                          ifnull((SELECT seq FROM sqlite_sequence WHERE name = 'member'), 0)
                   FROM mesh, policy";
        Ok(connection.query_row(sql, [], |row| {
            Ok(HighWaterMarks {
                revision: row.get(0)?,
                highest: row.get(1)?,
                policy: row.get(2)?,
                member: row.get(3)?,
            })
        })?)
    }
}

impl Numbers {
    fn of(connection: &Connection) -> Result<Numbers, StoreError> {
        let sql = "SELECT number, since FROM freed UNION ALL SELECT number, ?1 FROM member
                   UNION ALL SELECT value ->> 'number', ?1 FROM member, json_each(devices)
                   WHERE value ->> 'number' NOT NULL";
        let mut statement = connection.prepare(sql)?;
        let rows = statement.query_map([i64::MAX], |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(Numbers(rows.collect::<Result<_, _>>()?))
    }
}

impl Lost {
    /// Compares the state before and after a restore. Includes `earlier` losses that are not
    /// repaired yet.
    pub fn new(
        had: (HighWaterMarks, Numbers),
        now: &Numbers,
        earlier: Option<Lost>,
        restored: u64,
    ) -> Lost {
        let (had, numbers) = had;
        let is_later = |(number, until): &(&i64, &i64)| now.0.get(number) < Some(until);
        let later = numbers.0.iter().filter(is_later).map(|(number, _)| *number);
        let earlier = earlier.unwrap_or(Lost {
            had,
            later: BTreeSet::new(),
            restored,
        });
        Lost {
            had: HighWaterMarks {
                revision: had.revision.max(earlier.had.revision),
                highest: had.highest.max(earlier.had.highest),
                member: had.member.max(earlier.had.member),
                policy: had.policy.max(earlier.had.policy),
            },
            later: later.chain(earlier.later).collect(),
            restored: earlier.restored,
        }
    }

    /// Repairs the mesh; returns whether it changed anything. It may take several changes.
    fn repair(&self, transaction: &Transaction<'_>, now: i64) -> Result<bool, StoreError> {
        let found = HighWaterMarks::of(transaction)?;
        let highest = self.had.highest.max(found.highest);
        let last = self.numbers_to_free_again(transaction, highest)?;
        let is_behind = found.revision < self.had.revision
            || found.highest < self.had.highest
            || found.member < self.had.member;
        if !is_behind && last.is_empty() {
            return Ok(false);
        }
        let mut revision = self.had.revision.max(found.revision) + 1;
        for number in last {
            revision += 1;
            let sql = "INSERT OR REPLACE INTO freed (number, since) VALUES (?1, ?2)";
            transaction.execute(sql, (number, revision))?;
        }
        let sql = "UPDATE mesh SET revision = ?1, highest = ?2";
        transaction.execute(sql, (revision, highest))?;
        if is_behind {
            self.raise_id_counter(transaction)?;
            let mut subject = format!("from revision {} to {}", self.had.revision, found.revision);
            if found.policy < self.had.policy {
                subject += ", with an earlier policy";
            }
            let by = Actor::Operator("of etcd".to_owned());
            audit::record(transaction, now, "etcd restored", &subject, &by)?;
            warn!(target: "coordinator", "etcd restored {subject}");
        }
        Ok(true)
    }

    /// Returns free numbers that must be reused last, because their former members may still use
    /// the addresses: those given after the backup and unknown now, and those that became free
    /// after the backup.
    fn numbers_to_free_again(
        &self,
        connection: &Connection,
        highest: i64,
    ) -> Result<Vec<i64>, StoreError> {
        let Numbers(known) = Numbers::of(connection)?;
        let capacity = networks_of(connection)?.map_or(0, |networks| networks.capacity());
        let missing =
            (1..=highest.min(capacity.into())).filter(|number| !known.contains_key(number));
        // A number that is freed again has a revision above the lost ones.
        let early = self.later.iter().filter(|number| {
            let since = known.get(number);
            since.is_some_and(|since| *since <= self.had.revision)
        });
        Ok(missing.chain(early.copied()).take(BATCH).collect())
    }

    /// Makes ids continue.
    fn raise_id_counter(&self, transaction: &Transaction<'_>) -> Result<(), StoreError> {
        let counter =
            "SELECT max(?1, ifnull(max(seq), 0)) FROM sqlite_sequence WHERE name = 'member'";
        let member: i64 = transaction.query_row(counter, [self.had.member], |row| row.get(0))?;
        transaction.execute("DELETE FROM sqlite_sequence WHERE name = 'member'", [])?;
        let sql = "INSERT INTO sqlite_sequence (name, seq) VALUES ('member', ?1)";
        transaction.execute(sql, [member])?;
        Ok(())
    }
}

impl Shared {
    /// Returns the high-water marks and numbers of the copy.
    pub(super) fn high_water_marks(&self) -> Result<(HighWaterMarks, Numbers), End> {
        let database = lock(&self.database);
        let high_water_marks =
            HighWaterMarks::of(&database).and_then(|all| Ok((all, Numbers::of(&database)?)));
        high_water_marks.map_err(|error| End::Invalid(Trouble::Corrupt(error.to_string())))
    }
}

impl Replica {
    /// Repairs the mesh if etcd was restored from a backup.
    pub fn repair(&self) -> Result<(), StoreError> {
        let _proposing = lock(&self.proposing);
        self.repair_by(Instant::now() + TIMEOUT)
    }

    /// The same for a caller that holds `proposing`.
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
            let mut jobs: Vec<Box<dyn Job>> = vec![Box::new(Repair(lost.clone()))];
            let (rows, base) = self.decide(&mut jobs)?;
            let is_announced = epoch.restored != lost.restored;
            if is_announced && rows.is_empty() {
                let mut state = self.state();
                // Otherwise another restore has happened meanwhile.
                if state.lost.as_ref() == Some(&lost) {
                    state.lost = None;
                }
                continue;
            }
            let number = if is_announced {
                None
            } else {
                Some(random()?.to_string().into_bytes())
            };
            let number = number.map(|number| put(self.key("restored"), number, 0));
            self.propose(rows, number, base, deadline)?;
        }
    }
}

/// The change that repairs the mesh. No thread waits for its result.
struct Repair(Lost);

impl Job for Repair {
    fn decide(&mut self, transaction: &Transaction<'_>) -> bool {
        // The only use of the clock: the loading thread has no time from a caller.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_secs());
        let now = i64::try_from(now).unwrap_or(i64::MAX);
        self.0.repair(transaction, now).unwrap_or(false)
    }

    fn answer(self: Box<Self>, _outcome: &Result<(), StoreError>) {}
}
