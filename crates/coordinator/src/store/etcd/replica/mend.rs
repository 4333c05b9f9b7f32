//! What becomes of a mesh whose etcd came back from a backup.
//!
//! Revisions, numbers and ids were given after that backup which etcd knows nothing of, and members have them. A coordinator that was
//! there still knows how far it had got ([`Standing`]), and before anything else is changed has the mesh go on from there: no address is
//! given again that somebody may still have, and members, in another epoch, are told of everybody anew. Who joined after the backup is no
//! member, and the policy is the one of the backup: that is in the log, for people to judge.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, Transaction};

use super::change::Job;
use super::keep::End;
use super::{PATIENCE, Replica, Shared, Trouble, lock, put, random};
use crate::store::{Actor, StoreError, audit};

/// Numbers of members who are none any more that can be given again, at most: what else is changed has room beside them.
const MAX_FREED: usize = 100;

/// How far a mesh has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    /// Of the latest change that members were told of.
    pub revision: i64,
    /// No greater number was ever a member's.
    highest: i64,
    /// No greater id was.
    member: i64,
    /// The revision of the policy.
    policy: i64,
    /// [`super::Epoch::restored`] of then.
    restored: u64,
}

impl Standing {
    fn of(connection: &Connection) -> Result<Standing, StoreError> {
        let sql = "SELECT mesh.revision, highest, policy.revision,
                          ifnull((SELECT seq FROM sqlite_sequence WHERE name = 'member'), 0)
                   FROM mesh, policy";
        Ok(connection.query_row(sql, [], |row| {
            Ok(Standing {
                revision: row.get(0)?,
                highest: row.get(1)?,
                policy: row.get(2)?,
                member: row.get(3)?,
                restored: 0,
            })
        })?)
    }

    /// This one, or further where what was lost earlier and is not mended yet had got further.
    pub fn or(self, earlier: Option<Standing>, restored: u64) -> Standing {
        let earlier = earlier.unwrap_or(Standing { restored, ..self });
        Standing {
            revision: self.revision.max(earlier.revision),
            highest: self.highest.max(earlier.highest),
            member: self.member.max(earlier.member),
            policy: self.policy.max(earlier.policy),
            restored: earlier.restored,
        }
    }

    /// Has the mesh go on from here; whether it had not got so far.
    fn mend(&self, transaction: &Transaction<'_>, now: i64) -> Result<bool, StoreError> {
        let found = Standing::of(transaction)?;
        let is_behind = found.revision < self.revision
            || found.highest < self.highest
            || found.member < self.member;
        if !is_behind {
            return Ok(false);
        }
        let mut revision = self.revision.max(found.revision) + 1;
        // They come last: who had one may be on the way back.
        let numbers = found.highest.saturating_add(1)..=self.highest;
        for number in numbers.take(MAX_FREED) {
            revision += 1;
            let sql = "INSERT OR IGNORE INTO freed (number, since) VALUES (?1, ?2)";
            transaction.execute(sql, (number, revision))?;
        }
        transaction.execute(
            "UPDATE mesh SET revision = ?1, highest = max(highest, ?2)",
            (revision, self.highest),
        )?;
        let counter =
            "SELECT max(?1, ifnull(max(seq), 0)) FROM sqlite_sequence WHERE name = 'member'";
        let member: i64 = transaction.query_row(counter, [self.member], |row| row.get(0))?;
        transaction.execute("DELETE FROM sqlite_sequence WHERE name = 'member'", [])?;
        let sql = "INSERT INTO sqlite_sequence (name, seq) VALUES ('member', ?1)";
        transaction.execute(sql, [member])?;
        let mut subject = format!("from revision {} to {}", self.revision, found.revision);
        if found.policy < self.policy {
            subject += ", with an earlier policy";
        }
        let by = Actor::Operator("of etcd".to_owned());
        audit::note(transaction, now, "etcd restored", &subject, &by)?;
        Ok(true)
    }
}

impl Shared {
    /// How far the copy has got.
    pub(super) fn standing(&self) -> Result<Standing, End> {
        Standing::of(&lock(&self.database))
            .map_err(|error| End::Senseless(Trouble::Corrupt(error.to_string())))
    }
}

impl Replica {
    /// Has the mesh go on from where it was if etcd came back from a backup.
    pub fn mend(&self) -> Result<(), StoreError> {
        let _turn = lock(&self.turn);
        self.mend_by(Instant::now() + PATIENCE)
    }

    /// The same for who has the turn.
    pub(super) fn mend_by(&self, deadline: Instant) -> Result<(), StoreError> {
        loop {
            let (lost, epoch) = {
                let state = self.state();
                (state.lost, state.epoch)
            };
            let Some(lost) = lost else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(self.away());
            }
            let mut jobs: Vec<Box<dyn Job>> = vec![Box::new(Mending(lost))];
            let (rows, base) = self.decide(&mut jobs)?;
            let is_told = epoch.restored != lost.restored;
            let done = match is_told && rows.is_empty() {
                true => true,
                false => {
                    let number = random()?.to_string().into_bytes();
                    let number = put(self.key("restored"), number, 0);
                    self.propose(rows, Some(number), base, deadline)?
                }
            };
            if done {
                let mut state = self.state();
                // Else it was lost once more meanwhile.
                if state.lost == Some(lost) {
                    state.lost = None;
                }
            }
        }
    }
}

/// A change for which nobody waits.
struct Mending(Standing);

impl Job for Mending {
    fn decide(&mut self, transaction: &Transaction<'_>) -> bool {
        // The one time that is not said by the caller: who loads does not know it.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_secs());
        let now = i64::try_from(now).unwrap_or(i64::MAX);
        self.0.mend(transaction, now).unwrap_or(false)
    }

    fn answer(self: Box<Self>, _outcome: &Result<(), StoreError>) {}
}
