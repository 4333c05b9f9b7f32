//! Changes of rows.
//!
//! A change ([`Replica::change`]) runs on the copy, together with others that wait, and is rolled
//! back. Its effect on the rows is proposed to etcd. A proposal succeeds only if the head is still
//! the one that it was decided on; of two concurrent proposals, one is decided again. A proposal
//! whose response is lost can therefore be sent again: it succeeds at most once, and the number in
//! the next head shows whose it was.

use std::sync::mpsc::{SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Transaction, TransactionBehavior};

use super::super::client::Fault;
use super::super::messages::{Compare, RangeRequest, RequestOp, TxnRequest, delete, put};
use super::super::rows::Rows;
use super::{Head, PAUSE, Replica, State, TIMEOUT, random};
use crate::lock;
use crate::store::{SCHEMA, StoreError};

/// Minimum timeout of changes that share a proposal with an older one.
const MIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of [`Replica::catch_up`].
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of rows that one change may touch. etcd takes 128 operations in a transaction:
/// two are the head and an extra operation, and each removed member (four rows) also deletes its
/// `seen` key.
const MAX_ROWS: usize = 100;
/// Maximum number of changes in one proposal.
const MAX_JOBS: usize = 32;

/// State that a change was decided on.
#[derive(Clone, Copy)]
pub(super) struct Base {
    /// Revision of the head.
    pub head: i64,
    /// [`super::State::loads`].
    loads: u64,
}

/// A waiting change.
pub(super) trait Job: Send {
    /// Runs the change; returns whether it succeeded.
    fn decide(&mut self, transaction: &Transaction<'_>) -> bool;
    /// Reports the outcome to the waiting thread.
    fn answer(self: Box<Self>, outcome: &Result<(), StoreError>);
}

struct Work<T, F> {
    work: F,
    /// Latest result of `work`.
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
            Err(StoreError::OutOfBounds(message)) => Err(StoreError::OutOfBounds(message)),
            Err(_) => Err(StoreError::Interrupted),
        };
        // The waiting thread keeps its end until it has an answer.
        let _ = self.answer.try_send(answer);
    }
}

impl Base {
    pub fn of(state: &State) -> Base {
        Base {
            head: state.head,
            loads: state.loads,
        }
    }
}

impl Replica {
    /// Changes rows in one transaction. `work` may run more than once, and on another thread:
    /// waiting changes are proposed together.
    pub fn change<T: Send + 'static>(
        &self,
        work: impl Fn(&Transaction<'_>) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + TIMEOUT;
        let (answer, answered) = sync_channel(1);
        let job = Work {
            work,
            decided: None,
            answer,
        };
        lock(&self.jobs).push_back(Box::new(job));
        let _proposing = lock(&self.proposing);
        // Changes of other threads may be part of the proposal.
        let deadline = deadline.max(Instant::now() + MIN_TIMEOUT);
        loop {
            // Another thread may have proposed it meanwhile.
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

    /// Takes the oldest jobs.
    fn next_jobs(&self) -> Vec<Box<dyn Job>> {
        let mut jobs = lock(&self.jobs);
        let count = jobs.len().min(MAX_JOBS);
        jobs.drain(..count).collect()
    }

    /// Decides and proposes until the outcome is known.
    fn settle_all(
        &self,
        jobs: &mut Vec<Box<dyn Job>>,
        deadline: Instant,
    ) -> Result<(), StoreError> {
        loop {
            if Instant::now() >= deadline {
                return Err(self.away());
            }
            self.repair_by(deadline)?;
            let (rows, base) = self.decide(jobs)?;
            let counts = if rows.is_empty() {
                // The copy may be behind, so the result may be wrong.

                self.catch_up_by(deadline)? == base.head
            } else {
                self.propose(rows, None, base, deadline)?
            };
            if counts {
                return Ok(());
            }
        }
    }

    /// Runs as many jobs as fit into a proposal. Returns their effect on the rows, and the state
    /// that they ran on. Further jobs wait again.
    pub(super) fn decide(&self, jobs: &mut Vec<Box<dyn Job>>) -> Result<(Rows, Base), StoreError> {
        let mut database = self.database()?;
        let base = Base::of(&self.state());
        let tables = &self.shared.tables;
        let transaction = database.transaction_with_behavior(TransactionBehavior::Immediate)?;
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
        let mut rows = tables.touched(&transaction)?;
        // This also clears the record of touched rows.
        transaction.rollback()?;
        // The head counts rows, and etcd reports no event for a row that is inserted and deleted
        // again.
        let before = tables.read(&database, rows.keys().cloned())?;
        rows.retain(|key, row| before.get(key) != Some(row));
        drop(database);
        let mut waiting = lock(&self.jobs);
        for job in jobs.drain(decided..).rev() {
            waiting.push_front(job);
        }
        Ok((rows, base))
    }

    /// Writes the rows and an extra operation to etcd if the head is still that of `base`. Returns
    /// whether it succeeded; the copy then has the rows.
    pub(super) fn propose(
        &self,
        rows: Rows,
        extra: Option<RequestOp>,
        base: Base,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        if rows.len() > MAX_ROWS {
            return Err(StoreError::OutOfBounds(
                "a change may touch at most 100 rows",
            ));
        }
        let count = rows.len();
        let mut operations = Vec::from_iter(extra);
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
        let committed = self.commit((SCHEMA, count), operations, base, deadline);
        Ok(committed?.is_some())
    }

    /// Runs operations and replaces the head, with its schema and number of rows, if the head is
    /// still that of `base`. Returns the revision of the new head, or `None` if it did not succeed.
    pub(super) fn commit(
        &self,
        (schema, rows): (i64, usize),
        mut success: Vec<RequestOp>,
        base: Base,
        deadline: Instant,
    ) -> Result<Option<i64>, StoreError> {
        let (id, key) = (random()?, self.key("head"));
        let head = serde_json::to_vec(&Head { schema, id, rows });
        let head = head.map_err(|_| StoreError::Corrupt("head"))?;
        let compare = vec![Compare::is_at(key.clone(), base.head)];
        success.push(put(key, head, 0));
        let txn = TxnRequest { compare, success };
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
    ) -> Result<Option<i64>, StoreError> {
        // Set once a response was lost: the proposal may have succeeded.
        let mut lost = false;
        loop {
            let request = txn.clone();
            // The state that it was decided on may be gone, even if revisions match.
            let is_current = |state: &State| state.loads == base.loads;
            match self.ask_if(deadline, is_current, |link| async move {
                link.txn(request).await
            }) {
                Ok(Some(done)) if done.succeeded => {
                    let revision = done.header.unwrap_or_default().revision;
                    // It has succeeded, even if the copy is not updated in time.
                    drop(self.wait(deadline, |state| state.head >= revision));
                    return Ok(Some(revision));
                }
                Ok(None) if lost => return Err(self.unknown()),
                Ok(None) => return Ok(None),
                Ok(Some(_)) => {
                    let waited = self.wait(deadline, |state| state.head > base.head);
                    drop(waited.map_err(|away| if lost { self.unknown() } else { away })?);
                    return match self.first_after(base.head) {
                        Some((at, first)) => Ok((first == id).then_some(at)),
                        None if lost => Err(self.unknown()),
                        None => Ok(None),
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

    /// Returns revision and number of the first change after a head; `None` if that is unknown.
    fn first_after(&self, head: i64) -> Option<(i64, u64)> {
        let state = self.state();
        let first = state.heads.iter().find(|(at, _)| *at > head)?;
        (head >= state.since).then_some(*first)
    }

    /// Waits until the copy has all changes that others have made so far. Concurrent callers share
    /// one request, because unauthenticated hosts may cause any number of calls.
    pub fn catch_up(&self) -> Result<(), StoreError> {
        // Otherwise each call would wait for the timeout.
        if self.state().is_away {
            return Err(self.away());
        }
        let entered_at = Instant::now();
        let mut latest = lock(&self.caught_up);
        if let Some((_, is_done)) = latest.filter(|(started_at, _)| *started_at > entered_at) {
            return if is_done { Ok(()) } else { Err(self.away()) };
        }
        let started_at = Instant::now();
        let done = self.catch_up_by(started_at + CATCH_UP_TIMEOUT);
        *latest = Some((started_at, done.is_ok()));
        done.map(drop)
    }

    /// Waits for the head at some moment after the call; returns its revision.
    fn catch_up_by(&self, deadline: Instant) -> Result<i64, StoreError> {
        loop {
            match self.range(RangeRequest::key(self.key("head")), deadline) {
                Ok(found) => {
                    let head = found.first().map_or(0, |kv| kv.mod_revision);
                    return Ok(self.wait(deadline, |state| state.head >= head)?.head);
                }
                Err(Fault::Refused(why)) => return Err(StoreError::Unavailable(why)),
                Err(Fault::Lost(_)) if Instant::now() + PAUSE >= deadline => {
                    return Err(self.away());
                }
                Err(Fault::Lost(_)) => thread::sleep(PAUSE),
            }
        }
    }
}
