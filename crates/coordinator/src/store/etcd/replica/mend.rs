//! What becomes of a mesh whose etcd came back from a backup.
//!
//! Revisions, numbers and ids were given after that backup which etcd knows nothing of, and members have them. A coordinator that was
//! there still knows how far it had got ([`Lost`]), and before anything else is changed has the mesh go on from there: no address is
//! given again that somebody may still have, and members, in another epoch, are told of everybody anew. Who joined after the backup is no
//! member, and the policy is the one of the backup: that is in the log, for people to judge.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, Transaction};

use super::change::Job;
use super::keep::End;
use super::{PATIENCE, Replica, Shared, Trouble, lock, put, random};
use crate::store::{Actor, StoreError, audit, networks_of};

/// Numbers that one change has come last, at most: what else it touches has room beside them.
const BATCH: usize = 90;

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
}

/// How far a mesh had got that is not there any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lost {
    had: Standing,
    /// Numbers that were somebody's later than is known now.
    later: BTreeSet<i64>,
    /// [`super::Epoch::restored`] of then.
    restored: u64,
}

/// Until which revision each number that was ever given was a member's; of those that are one's there is no end.
pub(super) struct Numbers(BTreeMap<i64, i64>);

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
            })
        })?)
    }
}

impl Numbers {
    fn of(connection: &Connection) -> Result<Numbers, StoreError> {
        let sql = "SELECT number, since FROM freed UNION ALL SELECT number, ?1 FROM member";
        let mut statement = connection.prepare(sql)?;
        let rows = statement.query_map([i64::MAX], |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(Numbers(rows.collect::<Result<_, _>>()?))
    }
}

impl Lost {
    /// What was known, of which there is less now; with what was lost `earlier`, if that is not mended yet.
    pub fn new(
        had: (Standing, Numbers),
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
            had: Standing {
                revision: had.revision.max(earlier.had.revision),
                highest: had.highest.max(earlier.had.highest),
                member: had.member.max(earlier.had.member),
                policy: had.policy.max(earlier.had.policy),
            },
            later: later.chain(earlier.later).collect(),
            restored: earlier.restored,
        }
    }

    /// Has the mesh go on from there; whether there was anything left to do. It may take more than one change.
    fn mend(&self, transaction: &Transaction<'_>, now: i64) -> Result<bool, StoreError> {
        let found = Standing::of(transaction)?;
        let highest = self.had.highest.max(found.highest);
        let last = self.to_come_last(transaction, highest)?;
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
            self.count_on(transaction)?;
            let mut subject = format!("from revision {} to {}", self.had.revision, found.revision);
            if found.policy < self.had.policy {
                subject += ", with an earlier policy";
            }
            let by = Actor::Operator("of etcd".to_owned());
            audit::note(transaction, now, "etcd restored", &subject, &by)?;
        }
        Ok(true)
    }

    /// Numbers that nobody has and that are to be given after all others, as who had one may be on the way back: those that were given
    /// after the backup and are nowhere now, and those that it has as free for longer than they are.
    fn to_come_last(&self, connection: &Connection, highest: i64) -> Result<Vec<i64>, StoreError> {
        let Numbers(known) = Numbers::of(connection)?;
        let capacity = networks_of(connection)?.map_or(0, |networks| networks.capacity());
        let missing =
            (1..=highest.min(capacity.into())).filter(|number| !known.contains_key(number));
        // Once it comes last it has a revision after all that there were.
        let early = self.later.iter().filter(|number| {
            let since = known.get(number);
            since.is_some_and(|since| *since <= self.had.revision)
        });
        Ok(missing.chain(early.copied()).take(BATCH).collect())
    }

    /// Has ids go on.
    fn count_on(&self, transaction: &Transaction<'_>) -> Result<(), StoreError> {
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
    /// How far the copy has got.
    pub(super) fn standing(&self) -> Result<(Standing, Numbers), End> {
        let database = lock(&self.database);
        let standing = Standing::of(&database).and_then(|all| Ok((all, Numbers::of(&database)?)));
        standing.map_err(|error| End::Senseless(Trouble::Corrupt(error.to_string())))
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
                (state.lost.clone(), state.epoch)
            };
            let Some(lost) = lost else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(self.away());
            }
            let mut jobs: Vec<Box<dyn Job>> = vec![Box::new(Mending(lost.clone()))];
            let (rows, base) = self.decide(&mut jobs)?;
            let is_told = epoch.restored != lost.restored;
            if is_told && rows.is_empty() {
                let mut state = self.state();
                // Else it was lost once more meanwhile.
                if state.lost.as_ref() == Some(&lost) {
                    state.lost = None;
                }
                continue;
            }
            let number = match is_told {
                true => None,
                false => Some(random()?.to_string().into_bytes()),
            };
            let number = number.map(|number| put(self.key("restored"), number, 0));
            self.propose(rows, number, base, deadline)?;
        }
    }
}

/// A change for which nobody waits.
struct Mending(Lost);

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
