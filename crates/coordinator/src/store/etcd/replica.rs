//! The copy of the rows, and the thread that keeps it up.
//!
//! One thread owns the connection to etcd ([`keep`]): it loads all rows at one revision, then has every later one told and applies each
//! as one transaction. When the connection breaks it takes the next member of the cluster and goes on where it was; when what it
//! missed is not kept any more it loads again. Readers have the copy and wait for nobody.
//!
//! A change ([`Replica::change`]) is decided on the copy, together with those that wait at the same time, and taken back; what they would
//! have done to rows is proposed. A proposal
//! counts if the head is still the one that it was decided on: of two at once, one is decided anew. So a proposal can be sent again
//! when its answer is lost: it counts once at most, and the next head tells by its number whose it is.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rusqlite::{Connection as Database, Transaction, TransactionBehavior};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::RelayAddress;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tonic::codec::Streaming;

use super::Etcd;
use super::client::{Cluster, Connection, Fault, end_of};
use super::live::{Called, Live, Writer};
use super::messages::{
    Compare, DeleteRangeRequest, KeyValue, Operand, PutRequest, RangeRequest, Request, RequestOp,
    TxnRequest, WatchCreateRequest, WatchResponse, target,
};
use super::rows::{Rows, Tables};
use crate::store::{SCHEMA, StoreError, lay_out};

/// How long a change waits for etcd.
const PATIENCE: Duration = Duration::from_secs(6);
/// The same at least, for those who wait together with one that has waited long.
const LEAST: Duration = Duration::from_secs(1);
/// How long loading everything may take.
const LOADING: Duration = Duration::from_secs(120);
/// How long somebody is waited with who is to be refused.
const SURE: Duration = Duration::from_secs(3);
/// How long a connection has to last to be a good one.
const LASTING: Duration = Duration::from_secs(5);
/// Pause before something is asked again that got no answer.
const PAUSE: Duration = Duration::from_millis(50);
/// Pause when no member of the cluster could be reached; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How long is waited before rows that make no sense are loaded again: who runs etcd may have put them right.
const REPAIR: Duration = Duration::from_secs(5);
/// Heads that are remembered: a proposal whose answer was lost looks for its own among them.
const HEADS: usize = 4096;
/// Rows that are loaded at a time.
const PAGE: i64 = 1000;
/// Rows that one change may touch: etcd takes 128 operations in a transaction, and one is the head.
const MAX_ROWS: usize = 127;
/// What the watch of the rows is called.
const STATE: i64 = 1;
/// That of what lives with coordinators.
const LIVE: i64 = 2;
/// That of where members ask.
const PRESENT: i64 = 3;
/// Changes that are proposed together, at most.
const MAX_JOBS: usize = 32;
/// Questions that wait for the thread, at most.
const MAX_QUESTIONS: usize = 1024;

/// What the latest change was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Head {
    /// Of the rows.
    schema: i64,
    /// Of the change, by chance.
    id: u64,
    /// How many rows it touched: versions of etcd before August 2024 do not tell who comes back of what was deleted at a revision
    /// if everything before that very revision was forgotten meanwhile ("keep tombstone if revision == compactAtRev").
    rows: usize,
}

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
    /// The revision of the latest head; 0: there is none.
    head: i64,
    /// Every head after `since`, with the numbers of their changes.
    heads: VecDeque<(i64, u64)>,
    since: i64,
    /// The change that is being proposed here.
    own: Option<u64>,
    /// How many changes were not ours.
    foreign: i64,
    /// The mesh's number and the cluster's.
    epoch: (u64, u64),
    /// All members of the cluster were tried, and none answers.
    is_away: bool,
    /// Why etcd cannot be reached, or what it says cannot be understood.
    trouble: Option<Trouble>,
}

#[derive(Clone, Debug)]
enum Trouble {
    Away(String),
    Corrupt(String),
    Schema(i64),
}

/// A change that waits.
trait Job: Send {
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

/// For the thread.
struct Question {
    what: What,
    until: Instant,
    answer: SyncSender<Result<Answer, Fault>>,
}

enum What {
    Txn(TxnRequest),
    Range(RangeRequest),
}

enum Answer {
    /// Whether what was compared was so, and etcd's revision.
    Txn(bool, i64),
    Range(Vec<KeyValue>),
}

impl Replica {
    /// Connects and loads everything.
    pub fn open(settings: &Etcd) -> Result<Replica, StoreError> {
        let cluster = Cluster::new(settings)?;
        let mut database = Database::open_in_memory()?;
        database.pragma_update(None, "foreign_keys", true)?;
        lay_out(&mut database, "etcd".as_ref())?;
        let tables = Tables::of(&database)?;
        let shared = Arc::new(Shared {
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
        });
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
        if replica.state().epoch.0 == 0 {
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
            }],
            success: vec![put(key, random()?.to_string().into_bytes(), 0)],
        };
        let deadline = Instant::now() + PATIENCE;
        self.ask(What::Txn(txn), deadline)
            .map_err(|fault| StoreError::Unavailable(fault.to_string()))?;
        self.wait(deadline, |state| state.epoch.0 != 0)
    }

    /// The database, if what is in it is what etcd has, or had when it was last heard of.
    pub fn database(&self) -> Result<MutexGuard<'_, Database>, StoreError> {
        self.found()?;
        Ok(lock(&self.shared.database))
    }

    /// A number that is the same for all coordinators of the mesh.
    pub fn epoch(&self) -> u64 {
        let (mesh, cluster) = self.state().epoch;
        (mesh ^ cluster.rotate_left(32)).max(1)
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
            }],
            success: vec![put(key.clone(), own.as_bytes().to_vec(), 0)],
        };
        let range = RangeRequest {
            key,
            ..RangeRequest::default()
        };
        let deadline = Instant::now() + PATIENCE;
        let away = |fault: Fault| StoreError::Unavailable(fault.to_string());
        self.ask(What::Txn(txn), deadline).map_err(away)?;
        match self.ask(What::Range(range), deadline).map_err(away)? {
            Answer::Range(found) => {
                let noted = found
                    .first()
                    .and_then(|kv| String::from_utf8(kv.value.clone()).ok());
                noted.ok_or_else(|| StoreError::CorruptRow {
                    key: name.to_owned(),
                })
            }
            Answer::Txn(..) => Err(StoreError::Interrupted),
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
                Ok(Answer::Txn(..)) => Vec::new(),
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
            let (rows, head) = self.decide(jobs)?;
            let counts = match rows.is_empty() {
                false => self.propose(rows, head, deadline)?,
                // It may be so because of what others have changed meanwhile, or have not.
                true => self.catch_up_by(deadline)? == head,
            };
            if counts {
                return Ok(());
            }
        }
    }

    /// Has all jobs decide, as many as may be proposed together: what they would do to rows, and the head that it was decided on. Jobs
    /// for which there is no room wait again.
    fn decide(&self, jobs: &mut Vec<Box<dyn Job>>) -> Result<(Rows, i64), StoreError> {
        let mut database = self.database()?;
        let head = self.state().head;
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
        Ok((rows, head))
    }

    /// Has etcd take the rows if the head is still this one; whether it did. They are in the copy then.
    fn propose(&self, rows: Rows, head: i64, deadline: Instant) -> Result<bool, StoreError> {
        if rows.len() > MAX_ROWS {
            return Err(StoreError::OutOfBounds("a change touches 127 rows at most"));
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
                operand: Some(Operand::ModRevision(head)),
            }],
            success: operations,
        };
        self.state().own = Some(id);
        let outcome = self.settle(&txn, head, id, deadline);
        self.state().own = None;
        outcome
    }

    fn settle(
        &self,
        txn: &TxnRequest,
        head: i64,
        id: u64,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        // Of an answer that got lost it is not known what it was.
        let mut lost = false;
        loop {
            match self.ask(What::Txn(txn.clone()), deadline) {
                Ok(Answer::Txn(true, revision)) => {
                    // It is done, whether it is seen here in time or not.
                    let _ = self.wait(deadline, |state| state.head >= revision);
                    return Ok(true);
                }
                Ok(_) => {
                    let told = self.wait(deadline, |state| state.head > head);
                    told.map_err(|away| match lost {
                        true => self.unknown(),
                        false => away,
                    })?;
                    let first = self.first_after(head);
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
        let is_away = matches!(self.state().trouble, Some(Trouble::Away(_)));
        if is_away {
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

    fn ask(&self, what: What, until: Instant) -> Result<Answer, Fault> {
        let (answer, answered) = sync_channel(1);
        let question = Question {
            what,
            until,
            answer,
        };
        let gone = || Fault::Lost("the coordinator ends".to_owned());
        let questions = self.questions.as_ref().ok_or_else(gone)?;
        questions
            .try_send(question)
            .map_err(|_| Fault::Lost("too much is asked at once".to_owned()))?;
        let time = until.saturating_duration_since(Instant::now());
        answered
            .recv_timeout(time)
            .map_err(|_| Fault::Lost("no answer in time".to_owned()))?
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
            Some(Trouble::Away(_)) | None => Ok(()),
        }
    }

    fn away(&self) -> StoreError {
        StoreError::Unavailable(match &self.state().trouble {
            Some(Trouble::Away(why)) => why.clone(),
            _ => "it does not answer in time".to_owned(),
        })
    }

    fn unknown(&self) -> StoreError {
        StoreError::Unknown(match &self.state().trouble {
            Some(Trouble::Away(why)) => why.clone(),
            _ => "it does not answer in time".to_owned(),
        })
    }

    fn key(&self, of: &str) -> Vec<u8> {
        format!("{}/state/{of}", self.shared.settings.prefix).into_bytes()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
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
        matches!(self.trouble, Some(Trouble::Corrupt(_) | Trouble::Schema(_)))
    }
}

/// What ends a connection.
enum End {
    /// Nobody asks any more.
    Over,
    /// Another member of the cluster may do better.
    Broken(String),
    /// What was asked for is not kept any more.
    Compacted,
    /// What etcd has makes no sense.
    Senseless(Trouble),
}

impl From<Fault> for End {
    fn from(fault: Fault) -> End {
        End::Broken(fault.to_string())
    }
}

/// Keeps the copy up until nobody asks any more.
async fn keep(shared: Arc<Shared>, cluster: Cluster, mut asked: mpsc::Receiver<Question>) {
    // Not all coordinators begin with the same member.
    let mut turn = random().map_or(0, |n| usize::try_from(n % 1024).unwrap_or(0));
    let mut failed = 0;
    let mut pause = FIRST_PAUSE;
    let settings = &shared.settings;
    let mut writer = Writer::new(&settings.prefix, settings.advertise.clone(), shared.id);
    loop {
        let begun = match cluster.connect(turn).await {
            Ok(connection) => begin(&shared, &connection).await.map(|w| (connection, w)),
            Err(fault) => Err(fault.into()),
        };
        let end = match begun {
            Ok((connection, watch)) => {
                let since = Instant::now();
                let end = tokio::select! {
                    end = serve(&shared, &connection, watch, &mut asked) => end,
                    fault = writer.keep(&shared.live, &connection) => fault.into(),
                };
                if since.elapsed() >= LASTING {
                    (failed, pause) = (0, FIRST_PAUSE);
                }
                if matches!(end, End::Over) {
                    writer.end(&connection).await;
                }
                end
            }
            Err(end) => end,
        };
        let wait = match end {
            End::Over => return,
            End::Compacted => {
                lock(&shared.state).applied = 0;
                PAUSE
            }
            End::Senseless(trouble) => {
                shared.set(Some(trouble));
                lock(&shared.state).applied = 0;
                REPAIR
            }
            End::Broken(why) => {
                turn += 1;
                failed += 1;
                // A member that goes is nobody's trouble while there are others.
                if failed < cluster.len() {
                    PAUSE
                } else {
                    // What made no sense still makes none.
                    if !lock(&shared.state).is_hopeless() {
                        shared.set(Some(Trouble::Away(why)));
                    }
                    failed = 0;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    pause
                }
            }
        };
        if asked.is_closed() {
            return;
        }
        sleep(wait).await;
    }
}

/// One connection.
async fn serve(
    shared: &Arc<Shared>,
    connection: &Connection,
    mut watch: Streaming<WatchResponse>,
    asked: &mut mpsc::Receiver<Question>,
) -> End {
    let (broken, mut breaks) = mpsc::channel(1);
    loop {
        tokio::select! {
            told = watch.message() => match told {
                Ok(Some(told)) => if let Err(end) = shared.hear(told) {
                    return end;
                },
                Ok(None) => return End::Broken("the watch ended".to_owned()),
                Err(status) => return Fault::from(status).into(),
            },
            question = asked.recv() => match question {
                Some(question) => {
                    let (connection, broken) = (connection.clone(), broken.clone());
                    tokio::spawn(async move {
                        if let Some(why) = answer(&connection, question).await {
                            // One is enough.
                            let _ = broken.try_send(why);
                        }
                    });
                }
                None => return End::Over,
            },
            Some(why) = breaks.recv() => return End::Broken(why),
        }
    }
}

/// Loads all rows, unless they are there, and has later ones told.
async fn begin(shared: &Shared, connection: &Connection) -> Result<Streaming<WatchResponse>, End> {
    let (applied, (_, cluster)) = {
        let state = lock(&shared.state);
        (state.applied, state.epoch)
    };
    let now = RangeRequest {
        key: format!("{}/state/head", shared.settings.prefix).into_bytes(),
        ..RangeRequest::default()
    };
    let now = connection.range(now).await?.header.unwrap_or_default();
    // etcd's revisions rise, but for a restore from a backup.
    if applied == 0 || now.revision < applied || now.cluster_id != cluster {
        load(shared, connection).await?;
    }
    let live = format!("{}/live/", shared.settings.prefix);
    let range = RangeRequest {
        range_end: end_of(&live),
        key: live.clone().into_bytes(),
        ..RangeRequest::default()
    };
    let found = connection.range(range).await?;
    shared.live.forget();
    for kv in found.kvs {
        shared.hear_live(&kv.key, Some(&kv.value));
    }
    let watch = |watch_id, prefix: String, after: i64| WatchCreateRequest {
        range_end: end_of(&prefix),
        key: prefix.into_bytes(),
        start_revision: after + 1,
        watch_id,
    };
    let state = format!("{}/state/", shared.settings.prefix);
    let applied = lock(&shared.state).applied;
    let now = found.header.unwrap_or_default().revision;
    let present = format!("{}/present/", shared.settings.prefix);
    let watches = vec![
        watch(STATE, state, applied),
        watch(LIVE, live, now),
        watch(PRESENT, present, now),
    ];
    let watch = connection.watch(watches).await?;
    shared.set(None);
    Ok(watch)
}

async fn load(shared: &Shared, connection: &Connection) -> Result<(), End> {
    let prefix = format!("{}/state/", shared.settings.prefix);
    let mut range = RangeRequest {
        range_end: end_of(&prefix),
        key: prefix.into_bytes(),
        limit: PAGE,
        revision: 0,
    };
    let mut all = Vec::new();
    let mut cluster = 0;
    loop {
        let page = connection.range(range.clone()).await?;
        let header = page.header.unwrap_or_default();
        if range.revision == 0 {
            // The pages after the first are of the same moment.
            (range.revision, cluster) = (header.revision, header.cluster_id);
        }
        let last = page.kvs.last().map(|kv| kv.key.clone());
        all.extend(page.kvs);
        match last {
            Some(last) if page.more => {
                range.key = last;
                range.key.push(0);
            }
            _ => break,
        }
    }
    shared.replace(all, range.revision, cluster)
}

/// Answers a question; what broke the connection, if that did.
async fn answer(connection: &Connection, question: Question) -> Option<String> {
    let Question {
        what,
        until,
        answer,
    } = question;
    if Instant::now() >= until {
        return None;
    }
    let asked = async {
        Ok(match what {
            What::Txn(txn) => {
                let done = connection.txn(txn).await?;
                Answer::Txn(done.succeeded, done.header.unwrap_or_default().revision)
            }
            What::Range(range) => Answer::Range(connection.range(range).await?.kvs),
        })
    };
    let answered: Result<Answer, Fault> = asked.await;
    let broken = match &answered {
        Err(Fault::Lost(why)) => Some(why.clone()),
        _ => None,
    };
    // Who asked may not wait any more.
    let _ = answer.try_send(answered);
    broken
}

impl Shared {
    fn set(&self, trouble: Option<Trouble>) {
        let mut state = lock(&self.state);
        state.is_away = matches!(trouble, Some(Trouble::Away(_)));
        state.trouble = trouble;
        drop(state);
        self.changed.notify_all();
    }

    /// Takes in all that there is.
    fn replace(&self, all: Vec<KeyValue>, revision: i64, cluster: u64) -> Result<(), End> {
        let mut rows = self.pristine.clone();
        let mut news = News::default();
        for kv in all {
            let value = Some(kv.value);
            self.sort(&kv.key, value, kv.mod_revision, &mut rows, &mut news)?;
        }
        // A mesh does not cease to be: what was restored is not all there yet, or somewhere else.
        if news.mesh.is_none() && lock(&self.state).epoch.0 != 0 {
            let key = format!("{}/state/mesh", self.settings.prefix);
            return Err(End::Senseless(Trouble::Corrupt(key)));
        }
        self.apply(&rows, true)?;
        let mut state = lock(&self.state);
        state.epoch = (news.mesh.unwrap_or(0), cluster);
        state.applied = revision;
        // What led here was not told.
        state.heads.clear();
        state.head = news.head.map_or(0, |(at, _)| at);
        state.since = state.head;
        state.foreign += 1;
        drop(state);
        self.changed.notify_all();
        self.tell();
        Ok(())
    }

    /// Takes in what is different since.
    fn hear(&self, told: WatchResponse) -> Result<(), End> {
        if told.compact_revision > 0 {
            return Err(End::Compacted);
        }
        if told.canceled {
            return Err(End::Broken(told.cancel_reason));
        }
        if told.watch_id == LIVE {
            let called = told.events.iter().filter(|event| {
                let value = |kv: &KeyValue| (event.kind == 0).then(|| kv.value.clone());
                let kv = event.kv.as_ref();
                kv.is_some_and(|kv| self.hear_live(&kv.key, value(kv).as_deref()))
            });
            if called.count() > 0 {
                self.tell();
            }
            return Ok(());
        }
        if told.watch_id == PRESENT {
            let prefix = format!("{}/present/", self.settings.prefix);
            for kv in told.events.iter().filter_map(|event| event.kv.as_ref()) {
                let key = String::from_utf8_lossy(&kv.key);
                // What makes no sense is of a later version.
                if let Some(Ok(member)) = key.strip_prefix(&prefix).map(str::parse) {
                    self.live.is_elsewhere(member, kv.lease);
                }
            }
            return Ok(());
        }
        let before = lock(&self.state).foreign;
        let mut events = told.events.into_iter().peekable();
        while let Some(first) = events.next() {
            let revision = first.kv.as_ref().map_or(0, |kv| kv.mod_revision);
            let mut rows = Rows::new();
            let mut news = News::default();
            let mut next = Some(first);
            while let Some(event) = next {
                let Some(kv) = event.kv else { break };
                let value = (event.kind == 0).then_some(kv.value);
                self.sort(&kv.key, value, revision, &mut rows, &mut news)?;
                let same = |event: &super::messages::Event| {
                    event
                        .kv
                        .as_ref()
                        .is_some_and(|kv| kv.mod_revision == revision)
                };
                next = events.next_if(same);
            }
            if news.head.is_some_and(|(_, head)| head.rows != rows.len()) {
                return Err(End::Compacted);
            }
            if !rows.is_empty() {
                self.apply(&rows, false)?;
            }
            let mut state = lock(&self.state);
            state.applied = revision;
            if let Some(mesh) = news.mesh {
                state.epoch.0 = mesh;
                state.foreign += 1;
            }
            if let Some((at, head)) = news.head {
                state.take(at, head.id);
            }
            drop(state);
            self.changed.notify_all();
        }
        if lock(&self.state).foreign != before {
            self.tell();
        }
        Ok(())
    }

    /// What a key under `live/` says; whether somebody is called by it.
    fn hear_live(&self, key: &[u8], value: Option<&[u8]>) -> bool {
        let prefix = format!("{}/live/", self.settings.prefix);
        let key = String::from_utf8_lossy(key);
        key.strip_prefix(&prefix)
            .is_some_and(|key| self.live.take(key, value, self.id))
    }

    fn tell(&self) {
        if let Some(listener) = &*lock(&self.listener) {
            listener();
        }
    }

    /// What one key says.
    fn sort(
        &self,
        key: &[u8],
        value: Option<Vec<u8>>,
        revision: i64,
        rows: &mut Rows,
        news: &mut News,
    ) -> Result<(), End> {
        let shown = String::from_utf8_lossy(key).into_owned();
        let senseless = || End::Senseless(Trouble::Corrupt(shown.clone()));
        let prefix = format!("{}/state/", self.settings.prefix);
        let rest = shown.strip_prefix(&prefix).ok_or_else(senseless)?;
        if let Some(row) = rest.strip_prefix("rows/") {
            rows.insert(row.to_owned(), value);
            return Ok(());
        }
        let value = value.ok_or_else(senseless)?;
        match rest {
            "head" => {
                let head: Head = serde_json::from_slice(&value).map_err(|_| senseless())?;
                if head.schema != SCHEMA {
                    return Err(End::Senseless(Trouble::Schema(head.schema)));
                }
                news.head = Some((revision, head));
            }
            "mesh" => {
                let text = std::str::from_utf8(&value).map_err(|_| senseless())?;
                news.mesh = Some(text.parse().map_err(|_| senseless())?);
            }
            _ => return Err(senseless()),
        }
        Ok(())
    }

    fn apply(&self, rows: &Rows, whole: bool) -> Result<(), End> {
        let mut database = lock(&self.database);
        let mut work = || {
            let transaction = database.transaction_with_behavior(TransactionBehavior::Immediate)?;
            if whole {
                self.tables.clear(&transaction)?;
            }
            self.tables.put(&transaction, rows)?;
            Ok(transaction.commit()?)
        };
        work().map_err(|error: StoreError| {
            End::Senseless(Trouble::Corrupt(match error {
                StoreError::CorruptRow { key } => key,
                other => other.to_string(),
            }))
        })
    }
}

/// What keys say that are no rows.
#[derive(Default)]
struct News {
    /// And its revision.
    head: Option<(i64, Head)>,
    mesh: Option<u64>,
}

impl State {
    /// Takes in a head.
    fn take(&mut self, at: i64, id: u64) {
        self.head = at;
        self.heads.push_back((at, id));
        if self.heads.len() > HEADS
            && let Some((forgotten, _)) = self.heads.pop_front()
        {
            self.since = forgotten;
        }
        if self.own != Some(id) {
            self.foreign += 1;
        }
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
fn random() -> Result<u64, StoreError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|_| StoreError::Interrupted)?;
    Ok(u64::from_ne_bytes(bytes).max(1))
}

/// After a panic what is locked is as good as before.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
