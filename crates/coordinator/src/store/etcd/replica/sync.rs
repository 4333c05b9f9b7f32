//! The thread that synchronizes the copy with etcd.
//!
//! It owns the connection ([`run`]). It loads all rows at one revision, then watches later
//! revisions and applies each as one transaction. When the connection breaks, it continues on the
//! next member of the cluster; when the revisions that it missed are compacted, it loads everything
//! again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;
use tonic::codec::Streaming;

use super::super::client::{Cluster, Connection, Fault};
use super::super::live::Writer;
use super::super::messages::{
    Event, KeyValue, RangeRequest, WatchCreateRequest, WatchResponse, end_of,
};
use super::repair::Lost;
use super::{Epoch, Head, Link, PAUSE, Shared, State, Trouble, UNFINISHED, random};
use crate::lock;
use crate::store::StoreError;
use crate::store::file::SCHEMA;
use crate::store::rows::{Mesh, Rows, corrupt, is_local};

/// Minimum lifetime of a connection that counts as stable.
const STABLE_AFTER: Duration = Duration::from_secs(5);
/// Pause after no member of the cluster could be reached; doubled each time.
const MIN_PAUSE: Duration = Duration::from_millis(200);
/// Maximum pause.
const MAX_PAUSE: Duration = Duration::from_secs(2);
/// Pause before invalid rows are loaded again: an operator may have corrected them.
const REPAIR: Duration = Duration::from_secs(5);
/// Number of heads kept: a proposal whose response was lost searches for its head among them.
const MAX_HEADS: usize = 4096;

/// Reason for the end of a connection.
pub(super) enum End {
    /// The replica is closed.
    Closed,
    /// The connection failed; another member of the cluster may work.
    Broken(String),
    /// The requested revisions are compacted, or an import has ended.
    Compacted,
    /// The data in etcd is invalid.
    Invalid(Trouble),
}

impl From<Fault> for End {
    fn from(fault: Fault) -> End {
        End::Broken(fault.to_string())
    }
}

/// Synchronizes until the replica is closed.
pub(super) async fn run(shared: Arc<Shared>, cluster: Cluster, mut stop: oneshot::Receiver<()>) {
    // Coordinators start with different members.
    let mut member_index = random().map_or(0, |n| usize::try_from(n % 1024).unwrap_or(0));
    let mut failed = 0;
    let mut pause = MIN_PAUSE;
    let settings = &shared.settings;
    let mut writer = Writer::new(&settings.prefix, settings.advertise.clone(), shared.id);
    loop {
        let connected = match cluster.connect(member_index).await {
            Ok(connection) => connect(&shared, &connection).await.map(|w| (connection, w)),
            Err(fault) => Err(fault.into()),
        };
        let end = match connected {
            Ok((connection, watch)) => {
                let since = Instant::now();
                let end = tokio::select! {
                    end = serve(&shared, &connection, watch) => end,
                    fault = writer.run(&shared.live, &connection) => fault.into(),
                    _ = &mut stop => End::Closed,
                };
                lock(&shared.state).link = None;
                if since.elapsed() >= STABLE_AFTER {
                    (failed, pause) = (0, MIN_PAUSE);
                }
                if matches!(end, End::Closed) {
                    writer.end(&connection).await;
                }
                end
            }
            Err(end) => end,
        };
        let wait = match end {
            End::Closed => return,
            End::Compacted => {
                lock(&shared.state).applied = 0;
                PAUSE
            }
            End::Invalid(trouble) => {
                shared.set(Some(trouble));
                lock(&shared.state).applied = 0;
                REPAIR
            }
            End::Broken(why) => {
                member_index += 1;
                failed += 1;
                // The failure of one member is no problem while others work.
                if failed < cluster.len() {
                    PAUSE
                } else {
                    // The data was invalid before, and still is.
                    if !lock(&shared.state).is_unusable() {
                        shared.set(Some(Trouble::Away(why)));
                    }
                    failed = 0;
                    pause = (pause * 2).min(MAX_PAUSE);
                    pause
                }
            }
        };
        if stop.try_recv() == Err(TryRecvError::Closed) {
            return;
        }
        sleep(wait).await;
    }
}

/// Serves one connection until it ends.
async fn serve(
    shared: &Shared,
    connection: &Connection,
    mut watch: Streaming<WatchResponse>,
) -> End {
    let (broken, mut breaks) = mpsc::channel(1);
    lock(&shared.state).link = Some(Link {
        connection: connection.clone(),
        broken,
    });
    shared.changed.notify_all();
    loop {
        tokio::select! {
            response = watch.message() => match response {
                Ok(Some(response)) => if let Err(end) = shared.apply_response(response) {
                    return end;
                },
                Ok(None) => return End::Broken("the watch ended".to_owned()),
                Err(status) => return Fault::from(status).into(),
            },
            Some(why) = breaks.recv() => return End::Broken(why),
        }
    }
}

/// Loads all rows unless the copy is current, and starts the watches.
async fn connect(
    shared: &Shared,
    connection: &Connection,
) -> Result<Streaming<WatchResponse>, End> {
    let (applied, cluster) = {
        let state = lock(&shared.state);
        (state.applied, state.epoch.cluster)
    };
    let head = format!("{}/state/head", shared.settings.prefix);
    let head = RangeRequest::key(head.into_bytes());
    let now = connection.range(head.clone()).await?;
    let now = now.header.unwrap_or_default();
    // Revisions only increase and their content never changes, except by a restore from a backup.
    let went_back =
        applied > 0 && (now.revision < applied || !had(shared, connection, head, applied).await?);
    if applied == 0 || went_back || now.cluster_id != cluster {
        load(shared, connection, went_back).await?;
    }
    let prefix = format!("{}/", shared.settings.prefix);
    let live = connection.range(RangeRequest::all(&format!("{prefix}live/")));
    let live = live.await?;
    shared.live.forget();
    for kv in live.kvs {
        let key = String::from_utf8_lossy(&kv.key);
        if let Some(key) = key.strip_prefix(&format!("{prefix}live/")) {
            shared.live.apply(key, Some(&kv.value), shared.id);
        }
    }
    let watch = connection.watch(WatchCreateRequest {
        range_end: end_of(&prefix),
        key: prefix.into_bytes(),
        start_revision: lock(&shared.state).applied + 1,
    });
    let watch = watch.await?;
    shared.set(None);
    Ok(watch)
}

/// Returns whether etcd has the same head at a revision as this copy had.
async fn had(
    shared: &Shared,
    connection: &Connection,
    head: RangeRequest,
    revision: i64,
) -> Result<bool, End> {
    let then = match connection.range(RangeRequest { revision, ..head }).await {
        Ok(then) => then.kvs.into_iter().next(),
        // The revision is compacted: everything is loaded, and compared with the copy.
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

/// Loads all rows. `went_back`: etcd lacks state that the copy has.
async fn load(shared: &Shared, connection: &Connection, went_back: bool) -> Result<(), End> {
    let prefix = format!("{}/state/", shared.settings.prefix);
    let (header, all) = connection.range_all(&prefix).await?;
    shared.replace(all, (header.revision, header.cluster_id), went_back)
}

impl Shared {
    fn set(&self, trouble: Option<Trouble>) {
        let mut state = lock(&self.state);
        state.is_away = matches!(trouble, Some(Trouble::Away(_)));
        state.trouble = trouble;
        drop(state);
        self.changed.notify_all();
    }

    /// Replaces the copy by the given keys.
    pub(super) fn replace(
        &self,
        all: Vec<KeyValue>,
        (revision, cluster): (i64, u64),
        went_back: bool,
    ) -> Result<(), End> {
        let mut keys = StateKeys::default();
        let prefix = format!("{}/state/", self.settings.prefix);
        for kv in all {
            let key = String::from_utf8_lossy(&kv.key);
            let key = key.strip_prefix(&prefix).unwrap_or(&key);
            keys.take(key, Some(kv.value), kv.mod_revision)?;
        }
        // A mesh is never deleted: the restored data is incomplete or has another prefix.
        let before = lock(&self.state).epoch;
        if keys.mesh.is_none() && before.mesh != 0 {
            return Err(corrupt(&format!("{}/state/mesh", self.settings.prefix)).into());
        }
        let is_unfinished = keys.head.is_some_and(|(_, head)| head.schema == UNFINISHED);
        if is_unfinished {
            keys.rows.clear();
        }
        let mut new = Mesh::of(std::mem::take(&mut keys.rows))?;
        let mut copy = lock(&self.copy);
        copy.undo(0);
        new.refused = std::mem::take(&mut copy.refused);
        let known = std::mem::replace(&mut *copy, new);
        let mut state = lock(&self.state);
        state.epoch = Epoch {
            mesh: keys.mesh.unwrap_or(0),
            restored: keys.restored.unwrap_or(0),
            cluster,
        };
        // A mesh that differs from the one before has no former state, so nothing of it was lost.
        if before.mesh != state.epoch.mesh {
            state.lost = None;
        } else if before.mesh != 0 && (went_back || copy.head().revision < known.head().revision) {
            let earlier = state.lost.take();
            state.lost = Some(Lost::new(&known, &copy, earlier, before.restored));
        }
        state.is_unfinished = is_unfinished;
        state.applied = revision;
        state.loads += 1;
        // The earlier heads are unknown.
        state.heads.clear();
        state.head = keys.head.map_or(0, |(at, _)| at);
        state.head_id = keys.head.map_or(0, |(_, head)| head.id);
        state.since = state.head;
        state.foreign += 1;
        drop(state);
        self.changed.notify_all();
        self.notify_listener();
        Ok(())
    }

    /// Applies a response of a watch.
    pub(super) fn apply_response(&self, response: WatchResponse) -> Result<(), End> {
        if response.compact_revision > 0 {
            return Err(End::Compacted);
        }
        if response.canceled {
            return Err(End::Broken(response.cancel_reason));
        }
        let before = lock(&self.state).foreign;
        let mut is_called = false;
        let prefix = format!("{}/", self.settings.prefix);
        let revision_of = |event: &Event| event.kv.as_ref().map_or(0, |kv| kv.mod_revision);
        for events in response
            .events
            .chunk_by(|a, b| revision_of(a) == revision_of(b))
        {
            let mut keys = StateKeys::default();
            for Event { kind, kv } in events {
                let Some(kv) = kv else { continue };
                let value = (*kind == 0).then(|| kv.value.clone());
                let key = String::from_utf8_lossy(&kv.key);
                let key = key.strip_prefix(&prefix).unwrap_or(&key);
                match key.split_once('/') {
                    Some(("state", key)) => keys.take(key, value, kv.mod_revision)?,
                    Some(("live", key)) => {
                        is_called |= self.live.apply(key, value.as_deref(), self.id);
                    }
                    // A later version may have written keys that cannot be parsed.
                    Some(("present", member)) => {
                        let member = member.parse();
                        let _ = member.map(|member| self.live.note_presence(member, kv.lease));
                    }
                    _ => {}
                }
            }
            let was_unfinished = lock(&self.state).is_unfinished;
            let schema = keys.head.map(|(_, head)| head.schema);
            let is_unfinished = schema.map_or(was_unfinished, |schema| schema == UNFINISHED);
            if !is_unfinished {
                if was_unfinished
                    || keys
                        .head
                        .is_some_and(|(_, head)| head.rows != keys.rows.len())
                {
                    return Err(End::Compacted);
                }
                let mut copy = lock(&self.copy);
                copy.undo(0);
                copy.apply(&keys.rows)?;
            }
            let mut state = lock(&self.state);
            state.is_unfinished = is_unfinished;
            state.applied = revision_of(&events[0]);
            if let Some(mesh) = keys.mesh {
                state.epoch.mesh = mesh;
                state.foreign += 1;
            }
            if let Some(restored) = keys.restored {
                state.epoch.restored = restored;
                state.foreign += 1;
            }
            if let Some((at, head)) = keys.head {
                state.take(at, head.id);
            }
            drop(state);
            self.changed.notify_all();
        }
        if is_called || lock(&self.state).foreign != before {
            self.notify_listener();
        }
        Ok(())
    }

    fn notify_listener(&self) {
        if let Some(listener) = &*lock(&self.listener) {
            listener();
        }
    }
}

impl From<StoreError> for End {
    fn from(error: StoreError) -> End {
        End::Invalid(Trouble::Corrupt(match error {
            StoreError::CorruptRow { key } => key,
            other => other.to_string(),
        }))
    }
}

/// All keys under `state/`, or only the changed ones.
#[derive(Default)]
struct StateKeys {
    rows: Rows,
    /// The head, with its revision.
    head: Option<(i64, Head)>,
    mesh: Option<u64>,
    restored: Option<u64>,
}

impl StateKeys {
    /// Adds a key, without the prefix, and its value; `None`: deleted.
    fn take(&mut self, key: &str, value: Option<Vec<u8>>, revision: i64) -> Result<(), End> {
        let value = value.map(String::from_utf8).transpose();
        let value = value.map_err(|_| corrupt(key))?;
        if let Some(row) = key.strip_prefix("rows/").filter(|row| !is_local(row)) {
            self.rows.insert(row.to_owned(), value);
            return Ok(());
        }
        let value = value.ok_or_else(|| corrupt(key))?;
        let number = || value.parse().map_err(|_| corrupt(key));
        match key {
            "head" => {
                let head: Head = serde_json::from_str(&value).map_err(|_| corrupt(key))?;
                if ![SCHEMA, UNFINISHED].contains(&head.schema) {
                    return Err(End::Invalid(Trouble::Schema(head.schema)));
                }
                self.head = Some((revision, head));
            }
            "mesh" => self.mesh = Some(number()?),
            "restored" => self.restored = Some(number()?),
            _ => return Err(corrupt(key).into()),
        }
        Ok(())
    }
}

impl State {
    /// Records a head.
    fn take(&mut self, at: i64, id: u64) {
        (self.head, self.head_id) = (at, id);
        self.heads.push_back((at, id));
        if self.heads.len() > MAX_HEADS
            && let Some((forgotten, _)) = self.heads.pop_front()
        {
            self.since = forgotten;
        }
        if self.own != Some(id) {
            self.foreign += 1;
        }
    }
}
