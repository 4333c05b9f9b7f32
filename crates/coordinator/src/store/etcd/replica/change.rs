//! How rows are changed.
//!
//! A change ([`Replica::change`]) is decided on the copy, together with those that wait at the same time, and taken back; what they would
//! have done to rows is proposed. A proposal counts if the head is still the one that it was decided on: of two at once, one is decided anew. So a proposal can be sent again
//! when its answer is lost: it counts once at most, and the next head tells by its number whose it is.

use std::sync::mpsc::{SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Transaction, TransactionBehavior};

use super::super::client::Fault;
use super::super::messages::{Compare, Operand, RangeRequest, RequestOp, TxnRequest, target};
use super::super::rows::Rows;
use super::{Answer, Head, PATIENCE, PAUSE, Replica, What, delete, lock, put, random};
use crate::store::{SCHEMA, StoreError};

/// The same at least, for those who wait together with one that has waited long.
const LEAST: Duration = Duration::from_secs(1);
/// How long somebody is waited with who is to be refused.
const SURE: Duration = Duration::from_secs(3);
/// Rows that one change may touch: etcd takes 128 operations in a transaction, of which two are the head and what is beside, and with each
/// member that goes, which is four rows, goes when it was seen.
const MAX_ROWS: usize = 100;
/// Changes that are proposed together, at most.
const MAX_JOBS: usize = 32;

/// What a change was decided on.
#[derive(Clone, Copy)]
pub(super) struct Base {
    /// The revision of the head.
    pub head: i64,
    /// [`super::State::loads`].
    loads: u64,
}

/// A change that waits.
pub(super) trait Job: Send {
    /// Does the work; whether it did not refuse.
    fn decide(&mut self, transaction: &Transaction<'_>) -> bool;
    /// Tells who waits for it what has become of it.
    fn answer(self: Box<Self>, outcome: &Result<(), StoreError>);
}

struct Work<T, F> {
    work: F,
    /// What it said last.
    decided: Option<Result<T, StoreError>>,
    answer: SyncSender<Result<T, StoreError>>,
}

impl<T, F> Job for Work<T, F>
where
    T: Send,
    F: Fn(&Transaction<'_>) -> Result<T, StoreError> + Send,
{
    fn decide(&mut self, transaction: &Transaction<'_>) -> bool {
        let decided = (self.work)(transaction);
        let is_done = decided.is_ok();
        self.decided = Some(decided);
        is_done
    }

    fn answer(self: Box<Self>, outcome: &Result<(), StoreError>) {
        let answer = match outcome {
            Ok(()) => self.decided.unwrap_or(Err(StoreError::Interrupted)),
            Err(StoreError::Unavailable(why)) => Err(StoreError::Unavailable(why.clone())),
            Err(StoreError::Unknown(why)) => Err(StoreError::Unknown(why.clone())),
            Err(StoreError::CorruptRow { key }) => Err(StoreError::CorruptRow { key: key.clone() }),
            Err(StoreError::OutOfBounds(what)) => Err(StoreError::OutOfBounds(what)),
            Err(_) => Err(StoreError::Interrupted),
        };
        // Who waits is there until it has an answer.
        let _ = self.answer.try_send(answer);
    }
}

impl Replica {
    /// Changes rows, all of what `work` does or nothing. It may be called more than once, and by another thread: changes that wait at
    /// the same time are proposed together.
    pub fn change<T: Send + 'static>(
        &self,
        work: impl Fn(&Transaction<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + PATIENCE;
        let (answer, answered) = sync_channel(1);
        let job = Work {
            work,
            decided: None,
            answer,
        };
        lock(&self.jobs).push_back(Box::new(job));
        let _turn = lock(&self.turn);
        // Others' wait with it.
        let deadline = deadline.max(Instant::now() + LEAST);
        loop {
            // Somebody else may have had it done meanwhile.
            match answered.try_recv() {
                Ok(done) => return done,
                Err(TryRecvError::Disconnected) => return Err(StoreError::Interrupted),
                Err(TryRecvError::Empty) => {}
            }
            let mut jobs = self.next_jobs();
            let outcome = self.settle_all(&mut jobs, deadline);
            for job in jobs {
                job.answer(&outcome);
            }
        }
    }

    /// The jobs that have waited longest.
    fn next_jobs(&self) -> Vec<Box<dyn Job>> {
        let mut jobs = lock(&self.jobs);
        let count = jobs.len().min(MAX_JOBS);
        jobs.drain(..count).collect()
    }

    /// Decides and proposes until it is known what has become of it.
    fn settle_all(
        &self,
        jobs: &mut Vec<Box<dyn Job>>,
        deadline: Instant,
    ) -> Result<(), StoreError> {
        loop {
            if Instant::now() >= deadline {
                return Err(self.away());
            }
            self.mend_by(deadline)?;
            let (rows, base) = self.decide(jobs)?;
            let counts = match rows.is_empty() {
                false => self.propose(rows, None, base, deadline)?,
                // It may be so because of what others have changed meanwhile, or have not.
                true => self.catch_up_by(deadline)? == base.head,
            };
            if counts {
                return Ok(());
            }
        }
    }

    /// Has all jobs decide, as many as may be proposed together: what they would do to rows, and what that was decided on. Jobs
    /// for which there is no room wait again.
    pub(super) fn decide(&self, jobs: &mut Vec<Box<dyn Job>>) -> Result<(Rows, Base), StoreError> {
        let mut database = self.database()?;
        let base = {
            let state = self.state();
            Base {
                head: state.head,
                loads: state.loads,
            }
        };
        let tables = &self.shared.tables;
        let transaction = database.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let counter = tables.counter(&transaction)?;
        let mut decided = 0;
        for job in jobs.iter_mut() {
            transaction.execute_batch("SAVEPOINT job")?;
            let is_done = job.decide(&transaction);
            let is_too_much = decided > 0 && tables.count_touched(&transaction)? > MAX_ROWS;
            if !is_done || is_too_much {
                transaction.execute_batch("ROLLBACK TO job")?;
            }
            transaction.execute_batch("RELEASE job")?;
            if is_too_much {
                break;
            }
            decided += 1;
        }
        let touched = tables.touched(&transaction, counter)?;
        // What was noted goes with it.
        transaction.rollback()?;
        // Of what came and went etcd would tell nobody, and the others would miss it.
        let mut rows = Rows::new();
        for (key, row) in touched {
            if row.is_some() || tables.has(&database, &key)? {
                rows.insert(key, row);
            }
        }
        drop(database);
        let mut waiting = lock(&self.jobs);
        for job in jobs.drain(decided..).rev() {
            waiting.push_front(job);
        }
        Ok((rows, base))
    }

    /// Has etcd take the rows, and what is `beside` them, if the head is still this one; whether it did. They are in the copy then.
    pub(super) fn propose(
        &self,
        rows: Rows,
        beside: Option<RequestOp>,
        base: Base,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        if rows.len() > MAX_ROWS {
            return Err(StoreError::OutOfBounds("a change touches 100 rows at most"));
        }
        let id = random()?;
        let new = Head {
            schema: SCHEMA,
            id,
            rows: rows.len(),
        };
        let new = serde_json::to_vec(&new).map_err(|_| StoreError::Corrupt("head"))?;
        let key = self.key("head");
        let mut operations = vec![put(key.clone(), new, 0)];
        operations.extend(beside);
        let gone = rows.iter().filter(|(_, value)| value.is_none());
        let gone = gone.filter_map(|(row, _)| row.strip_prefix("member/"));
        let prefix = &self.shared.settings.prefix;
        operations.extend(gone.map(|id| delete(format!("{prefix}/seen/{id}").into_bytes())));
        operations.extend(rows.into_iter().map(|(row, value)| {
            let key = self.key(&format!("rows/{row}"));
            match value {
                Some(value) => put(key, value, 0),
                None => delete(key),
            }
        }));
        let txn = TxnRequest {
            compare: vec![Compare {
                target: target::MOD,
                key,
                operand: Some(Operand::ModRevision(base.head)),
                ..Compare::default()
            }],
            success: operations,
        };
        self.state().own = Some(id);
        let outcome = self.settle(&txn, base, id, deadline);
        self.state().own = None;
        outcome
    }

    fn settle(
        &self,
        txn: &TxnRequest,
        base: Base,
        id: u64,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        // Of an answer that got lost it is not known what it was.
        let mut lost = false;
        loop {
            match self.ask(What::Txn(txn.clone(), Some(base.loads)), deadline) {
                Ok(Answer::Txn(true, revision)) => {
                    // It is done, whether it is seen here in time or not.
                    let _ = self.wait(deadline, |state| state.head >= revision);
                    return Ok(true);
                }
                Ok(Answer::Stale) if lost => return Err(self.unknown()),
                Ok(Answer::Stale) => return Ok(false),
                Ok(_) => {
                    let told = self.wait(deadline, |state| state.head > base.head);
                    told.map_err(|away| match lost {
                        true => self.unknown(),
                        false => away,
                    })?;
                    let first = self.first_after(base.head);
                    return match first {
                        Some(first) => Ok(first == id),
                        None if lost => Err(self.unknown()),
                        None => Ok(false),
                    };
                }
                Err(Fault::Refused(why)) if !lost => return Err(StoreError::Unavailable(why)),
                Err(_) => {
                    lost = true;
                    if Instant::now() + PAUSE >= deadline {
                        return Err(self.unknown());
                    }
                    thread::sleep(PAUSE);
                }
            }
        }
    }

    /// The number of the first change after a head; `None` if that is not known any more.
    fn first_after(&self, head: i64) -> Option<u64> {
        let state = self.state();
        let first = state.heads.iter().find(|(at, _)| *at > head)?;
        (head >= state.since).then_some(first.1)
    }

    /// Waits until all is known here that others have changed before. Who waits at the same time waits for the same: strangers can have
    /// this asked as often as they like.
    pub fn catch_up(&self) -> Result<(), StoreError> {
        // Not if nobody has answered yet: that may come at once.
        if self.state().is_away {
            return Err(self.away());
        }
        let asked = Instant::now();
        let mut latest = lock(&self.caught_up);
        if let Some((_, is_done)) = latest.filter(|(begun, _)| *begun > asked) {
            return match is_done {
                true => Ok(()),
                false => Err(self.away()),
            };
        }
        let begun = Instant::now();
        let done = self.catch_up_by(begun + SURE);
        *latest = Some((begun, done.is_ok()));
        done.map(drop)
    }

    /// The head that there was at some moment after this was asked.
    fn catch_up_by(&self, deadline: Instant) -> Result<i64, StoreError> {
        loop {
            let range = RangeRequest {
                key: self.key("head"),
                ..RangeRequest::default()
            };
            match self.ask(What::Range(range), deadline) {
                Ok(Answer::Range(found)) => {
                    let head = found.first().map_or(0, |kv| kv.mod_revision);
                    self.wait(deadline, |state| state.head >= head)?;
                    return Ok(self.state().head);
                }
                Err(Fault::Refused(why)) => return Err(StoreError::Unavailable(why)),
                Ok(_) | Err(Fault::Lost(_)) if Instant::now() + PAUSE >= deadline => {
                    return Err(self.away());
                }
                Ok(_) | Err(Fault::Lost(_)) => thread::sleep(PAUSE),
            }
        }
    }
}
