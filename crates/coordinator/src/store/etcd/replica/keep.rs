//! The thread that keeps the copy up.
//!
//! It owns the connection to etcd ([`keep`]): it loads all rows at one revision, then has every later one told and applies each
//! as one transaction. When the connection breaks it takes the next member of the cluster and goes on where it was; when what it
//! missed is not kept any more it loads again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rusqlite::TransactionBehavior;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tonic::codec::Streaming;

use super::super::client::{Cluster, Connection, Fault, end_of};
use super::super::live::Writer;
use super::super::messages::{Event, KeyValue, RangeRequest, WatchCreateRequest, WatchResponse};
use super::super::rows::Rows;
use super::mend::Lost;
use super::{
    Answer, Epoch, Head, PAGE, PAUSE, Question, Shared, State, Trouble, UNFINISHED, What, lock,
    random,
};
use crate::store::{SCHEMA, StoreError};

/// How long a connection has to last to be a good one.
const LASTING: Duration = Duration::from_secs(5);
/// Pause when no member of the cluster could be reached; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How long is waited before rows that make no sense are loaded again: who runs etcd may have put them right.
const REPAIR: Duration = Duration::from_secs(5);
/// Heads that are remembered: a proposal whose answer was lost looks for its own among them.
const HEADS: usize = 4096;
/// What the watch of the rows is called.
pub(super) const STATE: i64 = 1;
/// That of what lives with coordinators.
pub(super) const LIVE: i64 = 2;
/// That of where members ask.
const PRESENT: i64 = 3;

/// What ends a connection.
pub(super) enum End {
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
pub(super) async fn keep(
    shared: Arc<Shared>,
    cluster: Cluster,
    mut asked: mpsc::Receiver<Question>,
) {
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
                // What it was decided on may be no more, whatever revisions say.
                Some(Question { what: What::Txn(_, Some(loads)), answer, .. })
                    if loads != lock(&shared.state).loads =>
                {
                    let _ = answer.try_send(Ok(Answer::Stale));
                }
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
    let (applied, cluster) = {
        let state = lock(&shared.state);
        (state.applied, state.epoch.cluster)
    };
    let head = RangeRequest {
        key: format!("{}/state/head", shared.settings.prefix).into_bytes(),
        ..RangeRequest::default()
    };
    let now = connection.range(head.clone()).await?;
    let now = now.header.unwrap_or_default();
    // etcd's revisions rise and its past stays what it was, but for a restore from a backup.
    let went_back =
        applied > 0 && (now.revision < applied || !had(shared, connection, head, applied).await?);
    if applied == 0 || went_back || now.cluster_id != cluster {
        load(shared, connection, went_back).await?;
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

/// Whether etcd had at a revision the head that it had there when it was heard of here.
async fn had(
    shared: &Shared,
    connection: &Connection,
    head: RangeRequest,
    revision: i64,
) -> Result<bool, End> {
    let then = match connection.range(RangeRequest { revision, ..head }).await {
        Ok(then) => then.kvs.into_iter().next(),
        // It is not kept any more: everything is loaded, and compared with what was here.
        Err(Fault::Refused(_)) => return Ok(true),
        Err(fault) => return Err(fault.into()),
    };
    let id = then.as_ref().map_or(Some(0), |kv| {
        let head: Head = serde_json::from_slice(&kv.value).ok()?;
        Some(head.id)
    });
    let at = then.map_or(0, |kv| kv.mod_revision);
    let state = lock(&shared.state);
    Ok(at == state.head && id == Some(state.head_id))
}

/// `went_back`: something that is known here is not known there any more.
async fn load(shared: &Shared, connection: &Connection, went_back: bool) -> Result<(), End> {
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
    shared.replace(all, (range.revision, cluster), went_back)
}

/// Answers a question; what broke the connection, if that did.
async fn answer(connection: &Connection, question: Question) -> Option<String> {
    let Question {
        what,
        until,
        taken,
        answer,
    } = question;
    if Instant::now() >= until || taken.swap(true, Ordering::Relaxed) {
        return None;
    }
    let asked = async {
        Ok(match what {
            What::Txn(txn, _) => {
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
    pub(super) fn replace(
        &self,
        all: Vec<KeyValue>,
        (revision, cluster): (i64, u64),
        went_back: bool,
    ) -> Result<(), End> {
        let mut rows = self.pristine.clone();
        let mut news = News::default();
        for kv in all {
            let value = Some(kv.value);
            self.sort(&kv.key, value, kv.mod_revision, &mut rows, &mut news)?;
        }
        // A mesh does not cease to be: what was restored is not all there yet, or somewhere else.
        let before = lock(&self.state).epoch;
        if news.mesh.is_none() && before.mesh != 0 {
            let key = format!("{}/state/mesh", self.settings.prefix);
            return Err(End::Senseless(Trouble::Corrupt(key)));
        }
        let known = self.standing()?;
        self.apply(&rows, true)?;
        let (found, numbers) = self.standing()?;
        let mut state = lock(&self.state);
        state.epoch = Epoch {
            mesh: news.mesh.unwrap_or(0),
            restored: news.restored.unwrap_or(0),
            cluster,
        };
        // Of another mesh nothing is known.
        if before.mesh != state.epoch.mesh {
            state.lost = None;
        } else if before.mesh != 0 && (went_back || found.revision < known.0.revision) {
            let earlier = state.lost.take();
            state.lost = Some(Lost::new(known, &numbers, earlier, before.restored));
        }
        state.applied = revision;
        state.loads += 1;
        // What led here was not told.
        state.heads.clear();
        state.head = news.head.map_or(0, |(at, _)| at);
        state.head_id = news.head.map_or(0, |(_, head)| head.id);
        state.since = state.head;
        state.foreign += 1;
        drop(state);
        self.changed.notify_all();
        self.tell();
        Ok(())
    }

    /// Takes in what is different since.
    pub(super) fn hear(&self, told: WatchResponse) -> Result<(), End> {
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
                let same = |event: &Event| {
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
                state.epoch.mesh = mesh;
                state.foreign += 1;
            }
            if let Some(restored) = news.restored {
                state.epoch.restored = restored;
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
                match head.schema {
                    SCHEMA => {}
                    UNFINISHED => return Err(End::Senseless(Trouble::Unfinished)),
                    other => return Err(End::Senseless(Trouble::Schema(other))),
                }
                news.head = Some((revision, head));
            }
            "mesh" | "restored" => {
                let text = std::str::from_utf8(&value).map_err(|_| senseless())?;
                let number = text.parse().map_err(|_| senseless())?;
                match rest {
                    "mesh" => news.mesh = Some(number),
                    _ => news.restored = Some(number),
                }
            }
            _ => return Err(senseless()),
        }
        Ok(())
    }

    pub(super) fn apply(&self, rows: &Rows, whole: bool) -> Result<(), End> {
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
    restored: Option<u64>,
}

impl State {
    /// Takes in a head.
    fn take(&mut self, at: i64, id: u64) {
        (self.head, self.head_id) = (at, id);
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
