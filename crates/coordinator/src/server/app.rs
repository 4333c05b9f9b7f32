//! The store as the event loop has it, and those who wait for changes.
//!
//! Work on the store is done beside the loop, a few at a time ([`App::ask`], [`App::change`], and apart from them what is done for
//! strangers): the rest waits in order, without a thread each. After a change of its own the server tells at once that there
//! is a new revision; that another process wrote it finds out by looking ten times a second ([`keep`]), or at once if
//! the store tells.
//! Who waited does not ask at once ([`App::pause`]): changes that come together are told together.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use seikan_proto::keys::PublicKey;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::answers::Answers;
use super::limit::Limits;
use crate::store::{MemberId, Store, StoreError};

/// Work on the store at a time: it has one connection, so more would wait there.
const TURNS: usize = 4;
/// Changes at a time: where several coordinators share a store they wait for it, and those who only ask do not wait behind them.
const CHANGES: usize = 64;
/// Of those who show what is not known here at a time: others are asked for it, which takes seconds if they do not answer, and nobody else
/// is to wait behind that.
const STRANGERS: usize = 16;
/// Pause between two looks for what other processes wrote.
const LOOK: Duration = Duration::from_millis(100);
/// Pause between two sweeps of the table of sources.
const SWEEP: Duration = Duration::from_secs(10);
/// From when somebody is told that there are changes until they are read, at least.
const PAUSE: Duration = Duration::from_millis(50);
/// For each who waits, so that there are no more than 5,000 answers in a second however often there
/// are changes.
const PAUSE_EACH: Duration = Duration::from_micros(200);
/// The same at most.
const MAX_PAUSE: Duration = Duration::from_millis(500);

/// Callers of one member that it is told of together, at most.
const MAX_CALLERS: usize = 64;
/// Questions of one member at a time, until their answers are read, at most: it has one, and a few more when its connections broke off.
const MAX_QUESTIONS: usize = 8;

/// What is shared by all connections.
pub(super) struct App {
    store: Store,
    pub limits: Arc<Limits>,
    pub answers: Answers,
    /// The epoch of a store that has none.
    own_epoch: u64,
    turns: Arc<Semaphore>,
    changes: Arc<Semaphore>,
    strangers: Arc<Semaphore>,
    /// The store has told of something.
    told: Arc<Notify>,
    progress: watch::Sender<Progress>,
    waiting: AtomicUsize,
    /// Of those who wait, or have been called since they did.
    doorbells: Mutex<HashMap<MemberId, Arc<Doorbell>>>,
}

/// Where others call a member. What is not fetched within a sweep or two is forgotten: whoever calls, calls again.
#[derive(Debug, Default)]
pub(super) struct Doorbell {
    callers: Mutex<BTreeSet<PublicKey>>,
    rung: Notify,
    /// Nobody waited at the last sweep.
    idle: AtomicBool,
    questions: AtomicUsize,
}

/// A question of a member until its answer is read.
#[derive(Debug)]
pub(super) struct Question(Arc<Doorbell>);

impl Drop for Question {
    fn drop(&mut self) {
        self.0.questions.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Doorbell {
    /// Counts a question until it is dropped; `None` if the member has too many.
    pub fn question(self: &Arc<Self>) -> Option<Question> {
        let question = Question(Arc::clone(self));
        let others = self.questions.fetch_add(1, Ordering::Relaxed);
        (others < MAX_QUESTIONS).then_some(question)
    }

    /// Who has called since this was last asked.
    pub fn take(&self) -> Vec<PublicKey> {
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *callers).into_iter().collect()
    }
}

/// What those who wait look at.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// That of the revision.
    epoch: u64,
    revision: u64,
    /// The server ends: nobody is to wait any more.
    stopping: bool,
}

impl App {
    pub fn new(store: Store) -> App {
        let told = Arc::new(Notify::new());
        let listener = Arc::clone(&told);
        store.listen(move || listener.notify_one());
        let own_epoch = random();
        let progress = Progress {
            epoch: store.epoch().unwrap_or(own_epoch),
            ..Progress::default()
        };
        App {
            own_epoch,
            store,
            limits: Arc::new(Limits::new()),
            answers: Answers::new(),
            turns: Arc::new(Semaphore::new(TURNS)),
            changes: Arc::new(Semaphore::new(CHANGES)),
            strangers: Arc::new(Semaphore::new(STRANGERS)),
            told,
            progress: watch::Sender::new(progress),
            waiting: AtomicUsize::new(0),
            doorbells: Mutex::default(),
        }
    }

    /// Of this process, or of all that share the store: revisions of another one may be others, as after a restore from a backup, which
    /// may come at any time. What is read from the store after this was asked is of this epoch or a later one.
    pub fn epoch(&self) -> u64 {
        self.store.epoch().unwrap_or(self.own_epoch)
    }

    /// Asks the store for something that members are not told of.
    pub async fn ask<T, F>(self: &Arc<Self>, work: F) -> Result<T, StoreError>
    where
        F: FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        self.take_turn(&self.turns, work).await
    }

    /// The same for who shows what is not known here.
    pub async fn ask_for_stranger<T, F>(self: &Arc<Self>, work: F) -> Result<T, StoreError>
    where
        F: FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        self.take_turn(&self.strangers, work).await
    }

    async fn take_turn<T, F>(
        self: &Arc<Self>,
        turns: &Arc<Semaphore>,
        work: F,
    ) -> Result<T, StoreError>
    where
        F: FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        let turn = Arc::clone(turns).acquire_owned().await;
        let turn = turn.map_err(|_| StoreError::Interrupted)?;
        let app = Arc::clone(self);
        let done = spawn_blocking(move || {
            let done = work(&app.store);
            // The turn is over when the work is, even if nobody waits for it any more.
            drop(turn);
            done
        });
        done.await.unwrap_or(Err(StoreError::Interrupted))
    }

    /// Has the store change something, and wakes those who wait if there is a new revision by it.
    pub async fn change<T, F>(self: &Arc<Self>, work: F) -> Result<T, StoreError>
    where
        F: FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        self.change_in_turn(&self.changes, work).await
    }

    /// The same for who shows what is not known here.
    pub async fn change_for_stranger<T, F>(self: &Arc<Self>, work: F) -> Result<T, StoreError>
    where
        F: FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        self.change_in_turn(&self.strangers, work).await
    }

    async fn change_in_turn<T, F>(
        self: &Arc<Self>,
        turns: &Arc<Semaphore>,
        work: F,
    ) -> Result<T, StoreError>
    where
        F: FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        let app = Arc::clone(self);
        self.take_turn(turns, move |store| {
            let done = work(store)?;
            let epoch = app.epoch();
            // What is done is done; that nobody heard of it is found out by looking.
            if let Ok(revision) = store.revision() {
                app.tell(epoch, revision);
            }
            Ok(done)
        })
        .await
    }

    fn tell(&self, epoch: u64, revision: u64) {
        self.progress.send_if_modified(|progress| {
            // Who was slow may not bring back an epoch that is over; the next look tells of the one that is.
            let is_over = epoch != self.epoch();
            let is_newer = epoch != progress.epoch || revision > progress.revision;
            if is_newer && !is_over {
                (progress.epoch, progress.revision) = (epoch, revision);
            }
            is_newer && !is_over
        });
    }

    /// Has nobody wait any more.
    pub fn stop(&self) {
        self.progress
            .send_modify(|progress| progress.stopping = true);
    }

    /// Counts one who waits, until it is dropped.
    pub fn waiting(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting { app: self }
    }

    /// Where a member is called.
    pub fn doorbell(&self, of: MemberId) -> Arc<Doorbell> {
        let mut all = self
            .doorbells
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(of).or_default())
    }

    /// Tells a member that somebody tries to reach it, wherever it asks.
    pub fn call(&self, whom: MemberId, caller: PublicKey) {
        let bell = self.doorbell(whom);
        // A question may still wait here of which the other end is gone.
        if bell.questions.load(Ordering::Relaxed) == 0 || self.store.asks_elsewhere(whom) {
            self.store.call(whom, caller);
        }
        self.ring(&bell, caller);
    }

    fn ring(&self, bell: &Doorbell, caller: PublicKey) {
        let mut callers = bell.callers.lock().unwrap_or_else(PoisonError::into_inner);
        if callers.len() < MAX_CALLERS {
            callers.insert(caller);
        }
        drop(callers);
        bell.rung.notify_one();
    }

    /// Looks for what others wrote, and whom they call.
    async fn look(self: &Arc<Self>, known: &mut Option<i64>) {
        let found = self.ask(|store| store.data_version()).await.ok();
        // What cannot be read now is read at the next look.
        if found != *known && self.change(Store::mend).await.is_ok() {
            *known = found;
        }
        for (member, caller) in self.store.calls() {
            // Who does not ask here is called where it does.
            let bells = self
                .doorbells
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let bell = bells.get(&member).map(Arc::clone);
            drop(bells);
            if let Some(bell) = bell {
                self.ring(&bell, caller);
            }
        }
    }

    /// Forgets the doorbells of those who have not waited for a while.
    fn sweep_doorbells(&self) {
        let mut all = self
            .doorbells
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, bell| {
            Arc::strong_count(bell) > 1 || !bell.idle.swap(true, Ordering::Relaxed)
        });
    }

    /// Waits for a revision after `since`, or another epoch, or for a call; which of them came within that time.
    pub async fn wait_for_news(
        &self,
        epoch: u64,
        since: u64,
        bell: &Doorbell,
        time: Duration,
    ) -> News {
        bell.idle.store(false, Ordering::Relaxed);
        let mut progress = self.progress.subscribe();
        let is_news = |p: &Progress| p.stopping || p.epoch != epoch || p.revision > since;
        let news = async {
            tokio::select! {
                _ = bell.rung.notified() => News::Call,
                _ = progress.wait_for(is_news) => News::Revision,
            }
        };
        timeout(time, news).await.unwrap_or(News::None)
    }

    /// How long changes are gathered before they are told.
    pub fn pause(&self) -> Duration {
        let waiting = self.waiting.load(Ordering::Relaxed);
        let all = PAUSE_EACH.saturating_mul(u32::try_from(waiting).unwrap_or(u32::MAX));
        all.clamp(PAUSE, MAX_PAUSE)
    }
}

/// Never 0, which is no epoch.
fn random() -> u64 {
    let hasher = std::collections::hash_map::RandomState::new();
    std::hash::BuildHasher::hash_one(&hasher, std::process::id()).max(1)
}

/// What ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// The time.
    None,
    /// Somebody calls.
    Call,
    /// A new revision, another epoch, or the end of the server.
    Revision,
}

/// Somebody waits.
pub(super) struct Waiting<'a> {
    app: &'a App,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.app.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Looks for what other processes wrote, and forgets sources; never ends.
pub(super) async fn keep(app: Arc<App>) {
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sweep = interval(SWEEP);
    sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut known = None;
    loop {
        tokio::select! {
            _ = look.tick() => app.look(&mut known).await,
            () = app.told.notified() => app.look(&mut known).await,
            _ = sweep.tick() => {
                tell_of_late(&app);
                app.limits.sweep();
                app.answers.sweep();
                app.sweep_doorbells();
            }
        }
    }
}

/// Says so if connections ended as their answers were not taken in time.
fn tell_of_late(app: &App) {
    let late = app.limits.late.swap(0, Ordering::Relaxed);
    if late > 0 {
        // There may be nobody to be told.
        let _ = writeln!(
            io::stderr(),
            "note: ended {late} connections that took an answer more slowly than {} bytes a second after {} s",
            super::PACE.rate,
            super::PACE.grace.as_secs()
        );
    }
}
