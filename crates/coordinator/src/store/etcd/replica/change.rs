//! Changes of rows.
//!
//! A change ([`Replica::change`]) runs on the copy, together with other waiting changes, and is
//! rolled back. Its effect on the rows is proposed to etcd. A proposal succeeds only if the head is
//! still the one on which the change was decided; of two concurrent proposals, one is decided
//! again. A proposal whose response is lost can therefore be sent again: it succeeds at most once,
//! and the number in the next head shows whose proposal succeeded.

use std::sync::mpsc::{SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::super::client::Fault;
use super::super::messages::{Compare, RangeRequest, RequestOp, TxnRequest, delete, put};
use super::{Head, PAUSE, Replica, State, TIMEOUT, random};
use crate::lock;
use crate::store::StoreError;
use crate::store::file::SCHEMA;
use crate::store::rows::{Mesh, Rows, is_local};

/// Minimum timeout of changes that share a proposal with an older one.
const MIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of [`Replica::catch_up`].
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of rows that one change may touch. etcd takes 128 operations in a transaction:
/// two are the head and an extra operation, and each removed member (four rows) also deletes its
/// `seen` key.
pub(super) const MAX_ROWS: usize = 100;
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

/// The effect of changes on the rows.
pub(super) struct Proposal {
    pub rows: Rows,
    /// State on which the changes ran.
    pub base: Base,
    /// Number of changes that were run.
    works: usize,
}

/// A waiting change.
pub(super) struct Job {
    /// Runs the change; returns whether it succeeded.
    decide: Box<dyn FnMut(&mut Mesh) -> bool + Send>,
    /// Reports the outcome to the waiting thread.
    answer: SyncSender<Result<(), StoreError>>,
}

impl Job {
    fn answer(&self, outcome: &Result<(), StoreError>) {
        let answer = match outcome {
            Ok(()) => Ok(()),
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
        work: impl Fn(&mut Mesh) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + TIMEOUT;
        let (answer, answered) = sync_channel(1);
        let decided = Arc::new(Mutex::new(None));
        let latest = Arc::clone(&decided);
        let decide = move |mesh: &mut Mesh| {
            let done = work(mesh);
            let is_done = done.is_ok();
            *lock(&latest) = Some(done);
            is_done
        };
        lock(&self.jobs).push_back(Job {
            decide: Box::new(decide),
            answer,
        });
        let _proposing = lock(&self.proposing);
        // Changes of other threads may be part of the proposal.
        let deadline = deadline.max(Instant::now() + MIN_TIMEOUT);
        loop {
            // Another thread may have proposed the change meanwhile.
            match answered.try_recv() {
                Ok(outcome) => {
                    return outcome.and_then(|()| {
                        lock(&decided)
                            .take()
                            .unwrap_or(Err(StoreError::Interrupted))
                    });
                }
                Err(TryRecvError::Disconnected) => return Err(StoreError::Interrupted),
                Err(TryRecvError::Empty) => {}
            }
            let mut jobs = self.next_jobs();
            let outcome = self.settle_all(&mut jobs, deadline);
            jobs.iter().for_each(|job| job.answer(&outcome));
        }
    }

    /// Takes the oldest jobs, at most [`MAX_JOBS`].
    fn next_jobs(&self) -> Vec<Job> {
        let mut jobs = lock(&self.jobs);
        let count = jobs.len().min(MAX_JOBS);
        jobs.drain(..count).collect()
    }

    /// Decides and proposes until the outcome is known.
    fn settle_all(&self, jobs: &mut Vec<Job>, deadline: Instant) -> Result<(), StoreError> {
        loop {
            if Instant::now() >= deadline {
                return Err(self.away());
            }
            self.repair_by(deadline)?;
            let Proposal { rows, base, works } =
                self.decide(jobs.iter_mut().map(|job| &mut job.decide))?;
            let mut waiting = lock(&self.jobs);
            for job in jobs.drain(works..).rev() {
                waiting.push_front(job);
            }
            drop(waiting);
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

    /// Runs as many changes as fit into a proposal.
    pub(super) fn decide(
        &self,
        changes: impl Iterator<Item: FnMut(&mut Mesh) -> bool>,
    ) -> Result<Proposal, StoreError> {
        let mut copy = self.copy()?;
        let base = Base::of(&self.state());
        let mut works = 0;
        for mut change in changes {
            let before = copy.writes();
            let is_done = change(&mut copy);
            let is_too_much = works > 0 && copy.changed().len() > MAX_ROWS;
            if !is_done || is_too_much {
                copy.undo(before);
            }
            if is_too_much {
                break;
            }
            works += 1;
        }
        let mut rows = copy.changed();
        rows.retain(|key, _| !is_local(key));
        copy.undo(0);
        Ok(Proposal { rows, base, works })
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
                Some(value) => put(key, value.into(), 0),
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
            // The state on which the change was decided may be gone, even if revisions match.
            let is_current = |state: &State| state.loads == base.loads;
            match self.ask_if(deadline, is_current, |link| async move {
                link.txn(request).await
            }) {
                Ok(Some(done)) if done.succeeded => {
                    let revision = done.header.unwrap_or_default().revision;
                    // The proposal has succeeded, even if the copy is not updated in time.
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
        // Without this check, each call would wait for the timeout.
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

    /// Waits until the copy has a head that etcd had after the start of the call; returns its
    /// revision.
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
