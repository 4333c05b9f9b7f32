//! The copy of the rows.
//!
//! Readers have the copy and wait for nobody: one thread keeps it up ([`keep()`]). A change is decided on it and proposed to etcd
//! ([`change`]); what etcd has taken comes into the copy as what others change does, by that thread. When etcd comes back from a backup,
//! who still knows what came after it sees to the rest ([`mend`]).

mod change;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod keep;
mod mend;

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
use super::live::{Called, Live};
use super::messages::{
    Compare, DeleteRangeRequest, KeyValue, Operand, PutRequest, RangeRequest, Request, RequestOp,
    TxnRequest, target,
};
use super::rows::{Rows, Tables};
use crate::store::{SCHEMA, StoreError, lay_out};
use change::Job;
use keep::keep;
use mend::Lost;

/// How long a change waits for etcd.
pub(super) const PATIENCE: Duration = Duration::from_secs(6);
/// How long loading everything may take.
const LOADING: Duration = Duration::from_secs(120);
/// Pause before something is asked again that got no answer.
pub(super) const PAUSE: Duration = Duration::from_millis(50);
/// Rows that are loaded at a time.
const PAGE: i64 = 1000;
/// Questions that wait for the thread, at most.
const MAX_QUESTIONS: usize = 1024;

/// What the latest change was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    /// Of the rows, or [`UNFINISHED`].
    pub schema: i64,
    /// Of the change, by chance.
    pub id: u64,
    /// How many rows it touched: versions of etcd before August 2024 do not tell who comes back of what was deleted at a revision
    /// if everything before that very revision was forgotten meanwhile ("keep tombstone if revision == compactAtRev").
    pub rows: usize,
}

/// In the place of a schema as long as a mesh is being brought in, of which not all rows are there.
pub(super) const UNFINISHED: i64 = 0;

/// A copy of what etcd has.
pub(in crate::store) struct Replica {
    shared: Arc<Shared>,
    /// Changes that wait.
    jobs: Mutex<VecDeque<Box<dyn Job>>>,
    /// Who has them decided and proposed: one thread at a time.
    turn: Mutex<()>,
    /// When [`Self::catch_up`] last began to ask, and whether it got to know.
    caught_up: Mutex<Option<(Instant, bool)>>,
    questions: Option<mpsc::Sender<Question>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    settings: Etcd,
    database: Mutex<Database>,
    tables: Tables,
    /// The rows of a new mesh.
    pristine: Rows,
    /// Taken while the database is held, never the other way round.
    state: Mutex<State>,
    changed: Condvar,
    live: Live,
    /// What this coordinator is called in etcd.
    id: u64,
    /// Is told that others have changed something, or call somebody.
    listener: Mutex<Option<Listener>>,
}

/// See [`Replica::listen`].
type Listener = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct State {
    /// etcd's revision, up to which the rows are applied; 0: nothing is.
    applied: i64,
    /// How often everything was loaded.
    loads: u64,
    /// The revision of the latest head; 0: there is none.
    head: i64,
    /// Every head after `since`, with the numbers of their changes.
    heads: VecDeque<(i64, u64)>,
    since: i64,
    /// The change that is being proposed here.
    own: Option<u64>,
    /// How many changes were not ours.
    foreign: i64,
    /// The number of the change that the latest head is of.
    head_id: u64,
    epoch: Epoch,
    /// What this copy knew and etcd does not know any more.
    lost: Option<Lost>,
    /// All members of the cluster were tried, and none answers.
    is_away: bool,
    /// Why etcd cannot be reached, or what it says cannot be understood.
    trouble: Option<Trouble>,
}

/// What tells revisions of a mesh from others of the same number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Epoch {
    /// The mesh's number; 0: it has none yet.
    mesh: u64,
    /// The number of the latest restore from a backup that somebody noticed; 0: there was none.
    restored: u64,
    /// The cluster's number.
    cluster: u64,
}

#[derive(Clone, Debug)]
enum Trouble {
    Away(String),
    Corrupt(String),
    Schema(i64),
    /// A mesh is being brought in.
    Unfinished,
}

/// For the thread.
struct Question {
    what: What,
    until: Instant,
    /// It is being asked, or nobody waits for it any more: whoever comes first.
    taken: Arc<AtomicBool>,
    answer: SyncSender<Result<Answer, Fault>>,
}

enum What {
    /// And how often everything had been loaded when it was decided, if it was decided on the copy.
    Txn(TxnRequest, Option<u64>),
    Range(RangeRequest),
}

enum Answer {
    /// Whether what was compared was so, and etcd's revision.
    Txn(bool, i64),
    Range(Vec<KeyValue>),
    /// Everything was loaded anew since this was decided: it is not asked.
    Stale,
}

impl Replica {
    /// Connects and loads everything.
    pub fn open(settings: &Etcd) -> Result<Replica, StoreError> {
        let cluster = Cluster::new(settings)?;
        let shared = Arc::new(Shared::new(settings)?);
        let (questions, asked) = mpsc::channel(MAX_QUESTIONS);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let thread = runtime.and_then(|runtime| {
            let shared = Arc::clone(&shared);
            let work = async move { keep(shared, cluster, asked).await };
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
            turn: Mutex::new(()),
            caught_up: Mutex::default(),
            questions: Some(questions),
            thread: Some(thread),
        };
        let begun = Instant::now();
        replica.wait(begun + LOADING, |state| {
            let is_away = state.is_away && begun.elapsed() > PATIENCE;
            state.applied > 0 || state.is_hopeless() || is_away
        })?;
        replica.found()?;
        if replica.state().applied == 0 {
            return Err(replica.away());
        }
        let found = replica.mesh();
        if let Some(noted) = settings.mesh.filter(|noted| found != Some(*noted)) {
            let prefix = settings.prefix.clone();
            return Err(StoreError::OtherMesh {
                prefix,
                noted,
                found,
            });
        }
        if found.is_none() {
            replica.name()?;
        }
        Ok(replica)
    }

    /// Gives the mesh its number, unless another coordinator is faster.
    fn name(&self) -> Result<(), StoreError> {
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
        let deadline = Instant::now() + PATIENCE;
        self.ask(What::Txn(txn, None), deadline)
            .map_err(|fault| StoreError::Unavailable(fault.to_string()))?;
        self.wait(deadline, |state| state.epoch.mesh != 0)
    }

    /// The database, if what is in it is what etcd has, or had when it was last heard of.
    pub fn database(&self) -> Result<MutexGuard<'_, Database>, StoreError> {
        self.found()?;
        Ok(lock(&self.shared.database))
    }

    /// The mesh's number, if it has one.
    pub fn mesh(&self) -> Option<u64> {
        Some(self.state().epoch.mesh).filter(|mesh| *mesh != 0)
    }

    /// A number that is the same for all coordinators of the mesh.
    pub fn epoch(&self) -> u64 {
        let epoch = self.state().epoch;
        (epoch.mesh ^ epoch.restored.rotate_left(16) ^ epoch.cluster.rotate_left(32)).max(1)
    }

    /// How often everything was loaded.
    pub fn loads(&self) -> u64 {
        self.state().loads
    }

    /// How many changes others have made, as far as is known here.
    pub fn foreign(&self) -> i64 {
        self.state().foreign
    }

    /// What the first coordinator of the mesh noted under a name, which is `own` if there was none.
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
        let deadline = Instant::now() + PATIENCE;
        let away = |fault: Fault| StoreError::Unavailable(fault.to_string());
        self.ask(What::Txn(txn, None), deadline).map_err(away)?;
        match self.ask(What::Range(range), deadline).map_err(away)? {
            Answer::Range(found) => {
                let noted = found
                    .first()
                    .and_then(|kv| String::from_utf8(kv.value.clone()).ok());
                noted.ok_or_else(|| StoreError::CorruptRow {
                    key: name.to_owned(),
                })
            }
            Answer::Txn(..) | Answer::Stale => Err(StoreError::Interrupted),
        }
    }

    /// Has `listener` told, on a thread that must not wait, when others have changed something or call somebody.
    pub fn listen(&self, listener: Listener) {
        *lock(&self.shared.listener) = Some(listener);
    }

    /// A member asks here.
    pub fn asks(&self, member: i64, now: u64) {
        self.shared.live.asks(member, now);
    }

    /// Whether it asked here, and elsewhere since.
    pub fn asks_elsewhere(&self, member: i64) -> bool {
        self.shared.live.asks_elsewhere(member)
    }

    /// Tells the other coordinators that a member is called.
    pub fn call(&self, member: i64, caller: PublicKey) {
        self.shared.live.call(Called { member, caller });
    }

    /// Whom others call, and who calls, since this was last asked.
    pub fn calls(&self) -> Vec<(i64, PublicKey)> {
        let heard = self.shared.live.heard().into_iter();
        heard.map(|called| (called.member, called.caller)).collect()
    }

    /// Where coordinators are that live.
    pub fn coordinators(&self) -> Vec<RelayAddress> {
        self.shared.live.coordinators()
    }

    /// What all keys in a folder beside the rows have, by members: `present` or `seen`.
    pub fn of_members(&self, folder: &str) -> Result<BTreeMap<i64, String>, StoreError> {
        let prefix = format!("{}/{folder}/", self.shared.settings.prefix);
        let mut range = RangeRequest {
            range_end: end_of(&prefix),
            key: prefix.clone().into_bytes(),
            limit: PAGE,
            revision: 0,
        };
        self.found()?;
        let mut all = BTreeMap::new();
        loop {
            let asked = self.ask(What::Range(range.clone()), Instant::now() + PATIENCE);
            let page = match asked {
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

    /// [`Fault::Refused`] also if it was never asked.
    fn ask(&self, what: What, until: Instant) -> Result<Answer, Fault> {
        let (answer, answered) = sync_channel(1);
        let taken = Arc::new(AtomicBool::new(false));
        let question = Question {
            what,
            until,
            taken: Arc::clone(&taken),
            answer,
        };
        let gone = || Fault::Lost("the coordinator ends".to_owned());
        let questions = self.questions.as_ref().ok_or_else(gone)?;
        questions
            .try_send(question)
            .map_err(|_| Fault::Refused("too much is asked at once".to_owned()))?;
        let time = until.saturating_duration_since(Instant::now());
        answered
            .recv_timeout(time)
            .unwrap_or_else(|_| match taken.swap(true, Ordering::Relaxed) {
                true => Err(Fault::Lost("no answer in time".to_owned())),
                false => Err(Fault::Refused(self.why_away())),
            })
    }

    /// Waits until it is so.
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

    /// An error if nothing can be said of the mesh.
    fn found(&self) -> Result<(), StoreError> {
        match &self.state().trouble {
            Some(Trouble::Corrupt(key)) => Err(StoreError::CorruptRow { key: key.clone() }),
            Some(Trouble::Schema(found)) => Err(StoreError::LaterVersion {
                path: self.shared.settings.prefix.clone().into(),
                found: *found,
                known: SCHEMA,
            }),
            Some(Trouble::Unfinished) => Err(StoreError::Unavailable(
                "a mesh is being brought into it; if that was broken off, do it again".to_owned(),
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
            _ => "it does not answer in time".to_owned(),
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
    /// A copy of which nothing is known yet.
    fn new(settings: &Etcd) -> Result<Shared, StoreError> {
        let mut database = Database::open_in_memory()?;
        database.pragma_update(None, "foreign_keys", true)?;
        lay_out(&mut database, "etcd".as_ref())?;
        let tables = Tables::of(&database)?;
        Ok(Shared {
            settings: settings.clone(),
            pristine: tables.all(&database)?,
            tables,
            database: Mutex::new(database),
            state: Mutex::new(State {
                trouble: Some(Trouble::Away("no answer yet".to_owned())),
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
        // The thread ends with the last question.
        self.questions = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been told by itself.
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
    fn is_hopeless(&self) -> bool {
        matches!(
            self.trouble,
            Some(Trouble::Corrupt(_) | Trouble::Schema(_) | Trouble::Unfinished)
        )
    }
}

/// Under a lease, or 0.
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

/// Never 0.
pub(in crate::store) fn random() -> Result<u64, StoreError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|_| StoreError::Interrupted)?;
    Ok(u64::from_ne_bytes(bytes).max(1))
}

/// After a panic what is locked is as good as before.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
