//! The replica: a copy of the rows in etcd.
//!
//! Reads use the copy and never wait for etcd. One thread applies changes to it ([`sync`]). A
//! change is decided on the copy and proposed to etcd ([`change`]); once etcd has accepted it, that
//! thread applies it like a change of another coordinator. After a restore of etcd from a backup, a
//! coordinator that knows later state repairs the mesh ([`repair`]).

mod change;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod repair;
mod sync;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rusqlite::Connection as Database;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::RelayAddress;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::Etcd;
use super::client::{Cluster, Fault, end_of};
use super::live::{Live, MemberCall};
use super::messages::{
    Compare, DeleteRangeRequest, KeyValue, Operand, PutRequest, RangeRequest, Request, RequestOp,
    TxnRequest, target,
};
use super::rows::{Rows, Tables};
use crate::store::{SCHEMA, StoreError, create_schema};
use change::Job;
use repair::Lost;
use sync::run;

/// Timeout of a change.
pub(super) const TIMEOUT: Duration = Duration::from_secs(6);
/// Timeout of loading everything.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// Pause before a request without response is repeated.
pub(super) const PAUSE: Duration = Duration::from_millis(50);
/// Number of rows per request when loading.
const PAGE: i64 = 1000;
/// Maximum number of requests that wait for the thread.
const MAX_QUERIES: usize = 1024;

/// The latest change of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    /// Schema of the rows, or [`UNFINISHED`].
    pub schema: i64,
    /// Random number of the change.
    pub id: u64,
    /// Number of rows that it touched. Versions of etcd before August 2024 may omit deletions from
    /// a watch that starts at a compacted revision ("keep tombstone if revision == compactAtRev").
    pub rows: usize,
}

/// Schema while an import is in progress and rows are missing.
pub(super) const UNFINISHED: i64 = 0;

/// A copy of the state in etcd.
pub(in crate::store) struct Replica {
    shared: Arc<Shared>,
    /// Waiting changes.
    jobs: Mutex<VecDeque<Box<dyn Job>>>,
    /// Held by the one thread that decides and proposes changes.
    proposing: Mutex<()>,
    /// Start of the latest [`Self::catch_up`], and whether it succeeded.
    caught_up: Mutex<Option<(Instant, bool)>>,
    queries: Option<mpsc::Sender<Query>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    settings: Etcd,
    database: Mutex<Database>,
    tables: Tables,
    /// Rows of a new mesh.
    pristine: Rows,
    /// Lock order: `database` before `state`.
    state: Mutex<State>,
    changed: Condvar,
    live: Live,
    /// Id of this coordinator in etcd.
    id: u64,
    /// Called when others have changed something, or call a member.
    listener: Mutex<Option<Listener>>,
}

/// See [`Replica::listen`].
type Listener = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct State {
    /// Revision of etcd up to which the rows are applied; 0: none.
    applied: i64,
    /// Number of loads.
    loads: u64,
    /// Revision of the latest head; 0: none.
    head: i64,
    /// Revision and change number of every head after `since`.
    heads: VecDeque<(i64, u64)>,
    since: i64,
    /// Number of the change that is being proposed here.
    own: Option<u64>,
    /// Number of changes by others.
    foreign: i64,
    /// Change number of the latest head.
    head_id: u64,
    epoch: Epoch,
    /// State that this copy had before etcd was restored.
    lost: Option<Lost>,
    /// All members of the cluster were tried without success.
    is_away: bool,
    /// Current problem with etcd or its data.
    trouble: Option<Trouble>,
}

/// Distinguishes equal revisions of different states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Epoch {
    /// Number of the mesh; 0: none yet.
    mesh: u64,
    /// Number of the latest detected restore from a backup; 0: none.
    restored: u64,
    /// Id of the cluster.
    cluster: u64,
}

#[derive(Clone, Debug)]
enum Trouble {
    Away(String),
    Corrupt(String),
    Schema(i64),
    /// An import is in progress.
    Unfinished,
}

/// A request to the thread.
struct Query {
    kind: QueryKind,
    until: Instant,
    /// Set by the thread when it sends the request, or by the caller when it gives up, whichever is
    /// first.
    is_claimed: Arc<AtomicBool>,
    answer: SyncSender<Result<Answer, Fault>>,
}

enum QueryKind {
    /// With the number of loads when it was decided, if it was decided on the copy.
    Txn(TxnRequest, Option<u64>),
    Range(RangeRequest),
}

enum Answer {
    /// Whether the comparisons succeeded, and etcd's revision.
    Txn(bool, i64),
    Range(Vec<KeyValue>),
    /// Not sent: everything was loaded again since it was decided.
    Stale,
}

impl Replica {
    /// Connects and loads everything.
    pub fn open(settings: &Etcd) -> Result<Replica, StoreError> {
        let cluster = Cluster::new(settings)?;
        let shared = Arc::new(Shared::new(settings)?);
        let (queries, received) = mpsc::channel(MAX_QUERIES);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let thread = runtime.and_then(|runtime| {
            let shared = Arc::clone(&shared);
            let work = async move { run(shared, cluster, received).await };
            thread::Builder::new()
                .name("etcd".to_owned())
                .spawn(move || runtime.block_on(work))
        });
        let thread = thread.map_err(|source| StoreError::Io {
            path: "etcd".into(),
            source,
        })?;
        let replica = Replica {
            shared,
            jobs: Mutex::default(),
            proposing: Mutex::new(()),
            caught_up: Mutex::default(),
            queries: Some(queries),
            thread: Some(thread),
        };
        let started_at = Instant::now();
        replica.wait(started_at + LOAD_TIMEOUT, |state| {
            let is_away = state.is_away && started_at.elapsed() > TIMEOUT;
            state.applied > 0 || state.is_unusable() || is_away
        })?;
        replica.check()?;
        if replica.state().applied == 0 {
            return Err(replica.away());
        }
        let found = replica.mesh();
        if let Some(expected) = settings.mesh.filter(|expected| found != Some(*expected)) {
            let prefix = settings.prefix.clone();
            return Err(StoreError::OtherMesh {
                prefix,
                expected,
                found,
            });
        }
        if found.is_none() {
            replica.create_number()?;
        }
        Ok(replica)
    }

    /// Writes a random number for the mesh, unless another coordinator has.
    fn create_number(&self) -> Result<(), StoreError> {
        let key = self.key("mesh");
        let txn = TxnRequest {
            compare: vec![Compare {
                target: target::CREATE,
                key: key.clone(),
                operand: Some(Operand::CreateRevision(0)),
                ..Compare::default()
            }],
            success: vec![put(key, random()?.to_string().into_bytes(), 0)],
        };
        let deadline = Instant::now() + TIMEOUT;
        self.ask(QueryKind::Txn(txn, None), deadline)
            .map_err(|fault| StoreError::Unavailable(fault.to_string()))?;
        self.wait(deadline, |state| state.epoch.mesh != 0)
    }

    /// Returns the database, unless its content is invalid or incomplete.
    pub fn database(&self) -> Result<MutexGuard<'_, Database>, StoreError> {
        self.check()?;
        Ok(lock(&self.shared.database))
    }

    /// Returns the number of the mesh, if it has one.
    pub fn mesh(&self) -> Option<u64> {
        Some(self.state().epoch.mesh).filter(|mesh| *mesh != 0)
    }

    /// Returns a number that is the same for all coordinators of the mesh.
    pub fn epoch(&self) -> u64 {
        let epoch = self.state().epoch;
        (epoch.mesh ^ epoch.restored.rotate_left(16) ^ epoch.cluster.rotate_left(32)).max(1)
    }

    /// Number of loads.
    pub fn loads(&self) -> u64 {
        self.state().loads
    }

    /// Returns the number of changes by others that are known here.
    pub fn foreign(&self) -> i64 {
        self.state().foreign
    }

    /// Returns the value of a key, after writing `own` if there was none: all coordinators get the
    /// same.
    pub fn agree(&self, name: &str, own: &str) -> Result<String, StoreError> {
        let key = format!("{}/{name}", self.shared.settings.prefix).into_bytes();
        let txn = TxnRequest {
            compare: vec![Compare {
                target: target::CREATE,
                key: key.clone(),
                operand: Some(Operand::CreateRevision(0)),
                ..Compare::default()
            }],
            success: vec![put(key.clone(), own.as_bytes().to_vec(), 0)],
        };
        let range = RangeRequest {
            key,
            ..RangeRequest::default()
        };
        let deadline = Instant::now() + TIMEOUT;
        let away = |fault: Fault| StoreError::Unavailable(fault.to_string());
        self.ask(QueryKind::Txn(txn, None), deadline)
            .map_err(away)?;
        match self.ask(QueryKind::Range(range), deadline).map_err(away)? {
            Answer::Range(found) => {
                let stored = found
                    .first()
                    .and_then(|kv| String::from_utf8(kv.value.clone()).ok());
                stored.ok_or_else(|| StoreError::CorruptRow {
                    key: name.to_owned(),
                })
            }
            Answer::Txn(..) | Answer::Stale => Err(StoreError::Interrupted),
        }
    }

    /// Sets a function that is called, on a thread that must not block, when others have changed
    /// something or call a member.
    pub fn listen(&self, listener: Listener) {
        *lock(&self.shared.listener) = Some(listener);
    }

    /// Records a poll of a member at this coordinator.
    pub fn note_poll(&self, member: i64, now: u64) {
        self.shared.live.note_poll(member, now);
    }

    /// Returns whether a member has polled here, and elsewhere since.
    pub fn polls_elsewhere(&self, member: i64) -> bool {
        self.shared.live.polls_elsewhere(member)
    }

    /// Reports a call of a member to the other coordinators.
    pub fn call(&self, member: i64, caller: PublicKey) {
        self.shared.live.queue_call(MemberCall { member, caller });
    }

    /// Takes the calls from other coordinators: the callee and the caller.
    pub fn calls(&self) -> Vec<(i64, PublicKey)> {
        let calls = self.shared.live.take_calls().into_iter();
        calls.map(|call| (call.member, call.caller)).collect()
    }

    /// Returns the addresses of all live coordinators.
    pub fn coordinators(&self) -> Vec<RelayAddress> {
        self.shared.live.coordinators()
    }

    /// Returns the values of all keys under `present` or `seen`, by members.
    pub fn member_values(&self, folder: &str) -> Result<BTreeMap<i64, String>, StoreError> {
        let prefix = format!("{}/{folder}/", self.shared.settings.prefix);
        let mut range = RangeRequest {
            range_end: end_of(&prefix),
            key: prefix.clone().into_bytes(),
            limit: PAGE,
            revision: 0,
        };
        self.check()?;
        let mut all = BTreeMap::new();
        loop {
            let answer = self.ask(QueryKind::Range(range.clone()), Instant::now() + TIMEOUT);
            let page = match answer {
                Ok(Answer::Range(page)) => page,
                Ok(Answer::Txn(..) | Answer::Stale) => Vec::new(),
                Err(fault) => return Err(StoreError::Unavailable(fault.to_string())),
            };
            for kv in &page {
                let key = String::from_utf8_lossy(&kv.key);
                let id = key.strip_prefix(&prefix).and_then(|id| id.parse().ok());
                let id = id.ok_or_else(|| StoreError::CorruptRow {
                    key: format!("{folder}/..."),
                })?;
                all.insert(id, String::from_utf8_lossy(&kv.value).into_owned());
            }
            match page.last() {
                Some(last) if page.len() as i64 == PAGE => {
                    range.key.clone_from(&last.key);
                    range.key.push(0);
                }
                _ => return Ok(all),
            }
        }
    }

    /// Sends a request and waits; [`Fault::Refused`] also if it was never sent.
    fn ask(&self, kind: QueryKind, until: Instant) -> Result<Answer, Fault> {
        let (answer, answered) = sync_channel(1);
        let is_claimed = Arc::new(AtomicBool::new(false));
        let query = Query {
            kind,
            until,
            is_claimed: Arc::clone(&is_claimed),
            answer,
        };
        let gone = || Fault::Lost("the coordinator is shutting down".to_owned());
        let queries = self.queries.as_ref().ok_or_else(gone)?;
        queries
            .try_send(query)
            .map_err(|_| Fault::Refused("too many requests are waiting".to_owned()))?;
        let time = until.saturating_duration_since(Instant::now());
        answered.recv_timeout(time).unwrap_or_else(|_| {
            match is_claimed.swap(true, Ordering::Relaxed) {
                true => Err(Fault::Lost("no response in time".to_owned())),
                false => Err(Fault::Refused(self.why_away())),
            }
        })
    }

    /// Waits until the condition holds.
    fn wait(&self, deadline: Instant, is_so: impl Fn(&State) -> bool) -> Result<(), StoreError> {
        let mut state = self.state();
        while !is_so(&state) {
            let time = deadline.saturating_duration_since(Instant::now());
            if time.is_zero() {
                drop(state);
                return Err(self.away());
            }
            let waited = self.shared.changed.wait_timeout(state, time);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Returns an error if the copy cannot be used.
    fn check(&self) -> Result<(), StoreError> {
        match &self.state().trouble {
            Some(Trouble::Corrupt(key)) => Err(StoreError::CorruptRow { key: key.clone() }),
            Some(Trouble::Schema(found)) => Err(StoreError::LaterVersion {
                path: self.shared.settings.prefix.clone().into(),
                found: *found,
                known: SCHEMA,
            }),
            Some(Trouble::Unfinished) => Err(StoreError::Unavailable(
                "an import is not finished; if it was interrupted, repeat it".to_owned(),
            )),
            Some(Trouble::Away(_)) | None => Ok(()),
        }
    }

    fn away(&self) -> StoreError {
        StoreError::Unavailable(self.why_away())
    }

    fn unknown(&self) -> StoreError {
        StoreError::Unknown(self.why_away())
    }

    fn why_away(&self) -> String {
        match &self.state().trouble {
            Some(Trouble::Away(why)) => why.clone(),
            _ => "no response in time".to_owned(),
        }
    }

    fn key(&self, of: &str) -> Vec<u8> {
        format!("{}/state/{of}", self.shared.settings.prefix).into_bytes()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }
}

impl Shared {
    /// Creates an empty copy.
    fn new(settings: &Etcd) -> Result<Shared, StoreError> {
        let mut database = Database::open_in_memory()?;
        database.pragma_update(None, "foreign_keys", true)?;
        create_schema(&mut database, "etcd".as_ref())?;
        let tables = Tables::of(&database)?;
        Ok(Shared {
            settings: settings.clone(),
            pristine: tables.all(&database)?,
            tables,
            database: Mutex::new(database),
            state: Mutex::new(State {
                trouble: Some(Trouble::Away("no response yet".to_owned())),
                ..State::default()
            }),
            changed: Condvar::new(),
            live: Live::default(),
            id: random()?,
            listener: Mutex::default(),
        })
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        // Closing the channel ends the thread.
        self.queries = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica")
            .field("settings", &self.shared.settings)
            .finish_non_exhaustive()
    }
}

impl State {
    fn is_unusable(&self) -> bool {
        matches!(
            self.trouble,
            Some(Trouble::Corrupt(_) | Trouble::Schema(_) | Trouble::Unfinished)
        )
    }
}

/// Returns a put operation under a lease; 0: no lease.
pub(super) fn put(key: Vec<u8>, value: Vec<u8>, lease: i64) -> RequestOp {
    RequestOp {
        request: Some(Request::Put(PutRequest { key, value, lease })),
    }
}

pub(super) fn delete(key: Vec<u8>) -> RequestOp {
    let range_end = Vec::new();
    RequestOp {
        request: Some(Request::Delete(DeleteRangeRequest { key, range_end })),
    }
}

/// Returns a random number other than 0.
pub(in crate::store) fn random() -> Result<u64, StoreError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|_| StoreError::Interrupted)?;
    Ok(u64::from_ne_bytes(bytes).max(1))
}

/// Locks; data behind a poisoned lock is still valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
