//! The replica: a copy of the rows in etcd.
//!
//! Reads use the copy and never wait for etcd. One thread applies changes to it ([`sync`]). A
//! change is decided on the copy and proposed to etcd ([`change`]); once etcd has accepted it, that
//! thread applies it like a change of another coordinator. After a restore of etcd from a backup, a
//! coordinator that knows later state repairs the mesh ([`repair`]).

mod change;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod import;
mod repair;
mod sync;

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use super::Etcd;
use super::client::{Cluster, Connection, Fault};
use super::live::Live;
use super::messages::{Compare, KeyValue, RangeRequest, TxnRequest, put};
use crate::lock;
use crate::store::StoreError;
use crate::store::file::SCHEMA;
use crate::store::rows::{Mesh, corrupt};
use change::Job;
pub(in crate::store) use import::import;
use repair::Lost;
use sync::run;

/// Timeout of a change.
pub(super) const TIMEOUT: Duration = Duration::from_secs(6);
/// Timeout of loading everything.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// Pause before a request without response is repeated.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

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
    jobs: Mutex<VecDeque<Job>>,
    /// Held by the thread that decides and proposes changes.
    proposing: Mutex<()>,
    /// Start of the latest [`Self::catch_up`], and whether it succeeded.
    caught_up: Mutex<Option<(Instant, bool)>>,
    /// `None` once it is closed.
    thread: Option<SyncThread>,
}

/// The thread that connects to etcd and applies changes. It ends when `stop` is dropped.
struct SyncThread {
    runtime: Handle,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

struct Shared {
    settings: Etcd,
    /// Lock order: `copy` before `state`.
    copy: Mutex<Mesh>,
    state: Mutex<State>,
    changed: Condvar,
    live: Live,
    /// Id of this coordinator in etcd.
    id: u64,
    /// Called when others have changed something, or call a member.
    listener: Mutex<Option<Listener>>,
}

/// Function that [`Replica::listen`] registers.
type Listener = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct State {
    /// Revision of etcd up to which the rows are applied; 0: none.
    applied: i64,
    /// Number of times that everything was loaded. Constant as long as there is a link.
    loads: u64,
    /// The connection in use.
    link: Option<Link>,
    /// Revision of the latest head; 0: none.
    head: i64,
    /// Revision and change number of every head after `since`.
    heads: VecDeque<(i64, u64)>,
    since: i64,
    /// Number of the change that this coordinator is proposing.
    own: Option<u64>,
    /// Number of changes by others.
    foreign: i64,
    /// Change number of the latest head.
    head_id: u64,
    epoch: Epoch,
    /// State that this copy had before etcd was restored.
    lost: Option<Lost>,
    /// An import is in progress: rows are missing, and the copy has none.
    is_unfinished: bool,
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
}

/// A connection that is in use.
#[derive(Clone)]
struct Link {
    connection: Connection,
    /// Reports that it is broken.
    broken: mpsc::Sender<String>,
}

impl Replica {
    /// Connects and loads everything, unless an import is in progress.
    fn connect(settings: &Etcd) -> Result<Replica, StoreError> {
        let cluster = Cluster::new(settings)?;
        let shared = Arc::new(Shared::new(settings)?);
        let start = || {
            let (stop, stopped) = oneshot::channel();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let (handle, shared) = (runtime.handle().clone(), Arc::clone(&shared));
            let work = async move { run(shared, cluster, stopped).await };
            Ok(SyncThread {
                runtime: handle,
                stop,
                thread: thread::Builder::new()
                    .name("etcd".to_owned())
                    .spawn(move || runtime.block_on(work))?,
            })
        };
        let thread = start().map_err(|source| StoreError::Io {
            path: "etcd".into(),
            source,
        })?;
        let replica = Replica {
            shared,
            jobs: Mutex::default(),
            proposing: Mutex::new(()),
            caught_up: Mutex::default(),
            thread: Some(thread),
        };
        let started_at = Instant::now();
        let is_loaded = |state: &State| {
            let is_away = state.is_away && started_at.elapsed() > TIMEOUT;
            state.applied > 0 || state.is_unusable() || is_away
        };
        drop(replica.wait(started_at + LOAD_TIMEOUT, is_loaded)?);
        if replica.state().applied == 0 {
            replica.check()?;
            return Err(replica.away());
        }
        Ok(replica)
    }

    /// Opens a mesh, and creates one if there is none.
    pub fn open(settings: &Etcd) -> Result<Replica, StoreError> {
        let replica = Replica::connect(settings)?;
        replica.check()?;
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
            // Another coordinator may write a mesh at the same time; then this proposal has no
            // effect.
            let deadline = Instant::now() + TIMEOUT;
            let (key, number) = (replica.key("mesh"), random()?.to_string());
            let txn = TxnRequest {
                compare: vec![Compare::is_at(key.clone(), 0)],
                success: vec![put(key, number.into(), 0)],
            };
            let created = replica.ask(deadline, |link| async move { link.txn(txn).await });
            created.map_err(|fault| StoreError::Unavailable(fault.to_string()))?;
            drop(replica.wait(deadline, |state| state.epoch.mesh != 0)?);
        }
        Ok(replica)
    }

    /// Returns the copy, unless its content is invalid or incomplete.
    pub fn copy(&self) -> Result<MutexGuard<'_, Mesh>, StoreError> {
        self.check()?;
        let mut copy = lock(&self.shared.copy);
        // A change that panicked has left its writes.
        copy.undo(0);
        Ok(copy)
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

    /// Returns the number of changes by others that are known here.
    pub fn foreign(&self) -> i64 {
        self.state().foreign
    }

    /// Sets a function that is called, on a thread that must not block, when others have changed
    /// something or call a member.
    pub fn listen(&self, listener: Listener) {
        *lock(&self.shared.listener) = Some(listener);
    }

    /// Returns the state that lasts as long as a coordinator.
    pub fn live(&self) -> &Live {
        &self.shared.live
    }

    /// Returns the values of all keys under `folder` (`present` or `seen`), by member.
    pub fn member_values(&self, folder: &str) -> Result<BTreeMap<i64, String>, StoreError> {
        let prefix = format!("{}/{folder}/", self.shared.settings.prefix);
        self.check()?;
        let all = prefix.clone();
        let found = self.ask(Instant::now() + LOAD_TIMEOUT, |link| async move {
            link.range_all(&all).await
        });
        let (_, found) = found.map_err(|fault| StoreError::Unavailable(fault.to_string()))?;
        let values = found.into_iter().map(|kv| {
            let key = String::from_utf8_lossy(&kv.key);
            let id = key.strip_prefix(&prefix).and_then(|id| id.parse().ok());
            let id = id.ok_or_else(|| corrupt(&key))?;
            Ok((id, String::from_utf8_lossy(&kv.value).into_owned()))
        });
        values.collect()
    }

    /// Requests keys.
    fn range(&self, range: RangeRequest, until: Instant) -> Result<Vec<KeyValue>, Fault> {
        let found = self.ask(until, |link| async move { link.range(range).await })?;
        Ok(found.kvs)
    }

    /// Sends a request and waits for its response. Returns [`Fault::Refused`] also if it was never
    /// sent.
    fn ask<T, F>(&self, until: Instant, request: impl FnOnce(Connection) -> F) -> Result<T, Fault>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Fault>> + Send + 'static,
    {
        let response = self.ask_if(until, |_| true, request)?;
        response.ok_or_else(|| Fault::Refused(self.why_away()))
    }

    /// Sends a request only if the state then meets a condition; otherwise returns `None`.
    fn ask_if<T, F>(
        &self,
        until: Instant,
        is_current: impl Fn(&State) -> bool,
        request: impl FnOnce(Connection) -> F,
    ) -> Result<Option<T>, Fault>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Fault>> + Send + 'static,
    {
        let connected_by = until.min(Instant::now() + TIMEOUT);
        let state = self.wait(connected_by, |state| state.link.is_some());
        let state = state.map_err(|_| Fault::Refused(self.why_away()))?;
        let (Some(link), Some(thread)) = (&state.link, &self.thread) else {
            return Err(Fault::Refused(
                "the coordinator is shutting down".to_owned(),
            ));
        };
        if !is_current(&state) {
            return Ok(None);
        }
        let (response, broken) = (request(link.connection.clone()), link.broken.clone());
        drop(state);
        let (answer, answered) = sync_channel(1);
        thread.runtime.spawn(async move {
            let response = response.await;
            if let Err(Fault::Lost(why)) = &response {
                // One report is enough.
                let _ = broken.try_send(why.clone());
            }
            // The caller may have given up.
            let _ = answer.try_send(response);
        });
        let time = until.saturating_duration_since(Instant::now());
        let response = answered.recv_timeout(time);
        response
            .unwrap_or_else(|_| Err(Fault::Lost("no response in time".to_owned())))
            .map(Some)
    }

    /// Waits until the condition holds.
    fn wait(
        &self,
        deadline: Instant,
        is_so: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>, StoreError> {
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
        Ok(state)
    }

    /// Returns an error if the copy cannot be used.
    fn check(&self) -> Result<(), StoreError> {
        let state = self.state();
        match &state.trouble {
            Some(Trouble::Corrupt(key)) => Err(StoreError::CorruptRow { key: key.clone() }),
            Some(Trouble::Schema(found)) if *found < SCHEMA => Err(StoreError::EarlierVersion {
                prefix: self.shared.settings.prefix.clone(),
                found: *found,
            }),
            Some(Trouble::Schema(found)) => Err(StoreError::LaterVersion {
                path: self.shared.settings.prefix.clone().into(),
                found: *found,
                known: SCHEMA,
            }),
            _ if state.is_unfinished => Err(StoreError::Unavailable(
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
        Ok(Shared {
            settings: settings.clone(),
            copy: Mutex::default(),
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
        if let Some(SyncThread { stop, thread, .. }) = self.thread.take() {
            drop(stop);
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
        matches!(self.trouble, Some(Trouble::Corrupt(_) | Trouble::Schema(_)))
    }
}

/// Returns a random number other than 0.
pub(in crate::store) fn random() -> Result<u64, StoreError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|_| StoreError::Interrupted)?;
    Ok(u64::from_ne_bytes(bytes).max(1))
}
