//! Access to the store from the event loop, and notification of waiting members.
//!
//! Work on the store runs on blocking threads, a few jobs at a time ([`App::read`],
//! [`App::change`]); unauthenticated requests have a limit of their own. Further work waits in
//! order without a thread. After a change of its own the server publishes the new revision at once.
//! It detects changes of other processes by polling ten times a second ([`run_background`]), or at
//! once if the store notifies it. A woken member's answer is delayed ([`App::wait_for_change`]), so
//! that changes close together share one answer.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use seikan_proto::keys::PublicKey;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tracing::warn;

use super::answers::Answers;
use super::limit::Limits;
use crate::lock;
use crate::store::{MemberId, Store, StoreError};

/// Maximum number of concurrent jobs of each [`Pool`].
const MAX_JOBS: [usize; 4] = [4, 64, 16, 64];
/// Interval of polling for changes of other processes.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of sweeping expired limits and idle subscribers.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum delay from a change to the answers that report it.
const MIN_DELAY: Duration = Duration::from_millis(50);
/// Additional delay per waiting member, so that there are at most 5,000 answers a second.
const DELAY_PER_WAITER: Duration = Duration::from_micros(200);
/// Maximum delay from a change to the answers that report it.
const MAX_DELAY: Duration = Duration::from_millis(500);

/// Maximum number of callers that are reported to one member at once.
const MAX_CALLERS: usize = 64;
/// Maximum number of open requests of one member, until their answers are read. A member has one,
/// and a few more after its connections broke.
const MAX_REQUESTS: usize = 8;

/// Kinds of work on the store. Jobs of one kind do not wait behind those of another.
#[derive(Clone, Copy)]
pub(super) enum Pool {
    /// Reads. The store runs them one after the other; more jobs would wait.
    Reads,
    /// Changes. With a shared store, they wait for etcd.
    Changes,
    /// Jobs for credentials and tokens that the local copy does not know. They query etcd, which
    /// takes seconds if it does not answer.
    Unauthenticated,
    /// Members that name a revision which the local copy does not have. They query etcd, too, and
    /// share their queries.
    CatchUp,
}

/// State that all connections share.
pub(super) struct App {
    store: Store,
    pub limits: Arc<Limits>,
    pub answers: Answers,
    /// Epoch of a store that has none of its own.
    own_epoch: u64,
    /// Permits for jobs, by [`Pool`].
    pools: [Arc<Semaphore>; 4],
    /// Notified by the store when something has changed.
    store_changed: Arc<Notify>,
    progress: watch::Sender<Progress>,
    /// Members that wait for changes, or that were called since their last request.
    subscribers: Mutex<HashMap<MemberId, Arc<Subscriber>>>,
}

/// Pending calls and open requests of a member. Calls that are not fetched within two sweeps are
/// dropped: callers repeat them.
#[derive(Debug)]
pub(super) struct Subscriber {
    callers: Mutex<BTreeSet<PublicKey>>,
    call_arrived: Notify,
    /// No request has waited since the last sweep.
    idle: AtomicBool,
    requests: Arc<Semaphore>,
}

impl Subscriber {
    /// Counts a request until the result is dropped; `None` if the member has too many.
    pub fn open_request(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.requests).try_acquire_owned().ok()
    }

    fn has_requests(&self) -> bool {
        self.requests.available_permits() < MAX_REQUESTS
    }

    /// Takes the keys of the members that have called since the last call of this function.
    pub fn take_callers(&self) -> Vec<PublicKey> {
        let mut callers = lock(&self.callers);
        std::mem::take(&mut *callers).into_iter().collect()
    }
}

/// State that waiting requests watch.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// Epoch of the revision.
    epoch: u64,
    revision: u64,
    /// The server is shutting down: no request may wait.
    stopping: bool,
}

impl App {
    pub fn new(store: Store) -> App {
        let store_changed = Arc::new(Notify::new());
        let listener = Arc::clone(&store_changed);
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
            pools: MAX_JOBS.map(|most| Arc::new(Semaphore::new(most))),
            store_changed,
            progress: watch::Sender::new(progress),
            subscribers: Mutex::default(),
        }
    }

    /// Returns the epoch. Revisions of different epochs, such as before and after a restore from a
    /// backup, cannot be compared. An epoch belongs to this process, or to all that share the
    /// store. It may change at any time; reads that start after this call are of this epoch or a
    /// later one.
    pub fn epoch(&self) -> u64 {
        self.store.epoch().unwrap_or(self.own_epoch)
    }

    /// Runs work on the store that changes nothing that members see.
    pub async fn read<T, F>(self: &Arc<Self>, pool: Pool, work: F) -> Result<T, StoreError>
    where
        F: FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        let permit = Arc::clone(&self.pools[pool as usize]).acquire_owned().await;
        let permit = permit.map_err(|_| StoreError::Interrupted)?;
        let app = Arc::clone(self);
        let done = spawn_blocking(move || {
            let done = work(&app.store);
            // The permit is held until the work ends, even if the request has been dropped.
            drop(permit);
            done
        });
        done.await.unwrap_or(Err(StoreError::Interrupted))
    }

    /// Runs a change of the store, and publishes the new revision.
    pub async fn change<T, F>(self: &Arc<Self>, pool: Pool, work: F) -> Result<T, StoreError>
    where
        F: FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
        T: Send + 'static,
    {
        let app = Arc::clone(self);
        let changed = self.read(pool, move |store| {
            let done = work(store)?;
            let epoch = app.epoch();
            // The change is committed. If this fails, polling publishes the revision.
            if let Ok(revision) = store.revision() {
                app.publish(epoch, revision);
            }
            Ok(done)
        });
        changed.await
    }

    fn publish(&self, epoch: u64, revision: u64) {
        self.progress.send_if_modified(|progress| {
            // A slow change must not restore an epoch that has ended; the next poll publishes the
            // current one.
            let is_over = epoch != self.epoch();
            let is_newer = epoch != progress.epoch || revision > progress.revision;
            if is_newer && !is_over {
                (progress.epoch, progress.revision) = (epoch, revision);
            }
            is_newer && !is_over
        });
    }

    /// Ends all waits.
    pub fn stop(&self) {
        self.progress
            .send_modify(|progress| progress.stopping = true);
    }

    /// Returns the subscriber of a member, and creates it if there is none.
    pub fn subscriber(&self, of: MemberId) -> Arc<Subscriber> {
        let mut all = lock(&self.subscribers);
        let new = || {
            Arc::new(Subscriber {
                callers: Mutex::default(),
                call_arrived: Notify::new(),
                idle: AtomicBool::new(false),
                requests: Arc::new(Semaphore::new(MAX_REQUESTS)),
            })
        };
        Arc::clone(all.entry(of).or_insert_with(new))
    }

    /// Notifies a member that another one tries to reach it, on whichever coordinator it polls.
    pub fn call(&self, member: MemberId, caller: PublicKey) {
        let subscriber = self.subscriber(member);
        // A request may still wait here although its client is gone.
        if !subscriber.has_requests() || self.store.polls_elsewhere(member) {
            self.store.call(member, caller);
        }
        self.notify_call(&subscriber, caller);
    }

    fn notify_call(&self, subscriber: &Subscriber, caller: PublicKey) {
        let mut callers = lock(&subscriber.callers);
        if callers.len() < MAX_CALLERS {
            callers.insert(caller);
        }
        drop(callers);
        subscriber.call_arrived.notify_one();
    }

    /// Checks for changes and calls from other processes.
    async fn poll_store(self: &Arc<Self>, known: &mut Option<i64>) {
        let found = self
            .read(Pool::Reads, |store| store.data_version())
            .await
            .ok();
        // A failed read is repeated at the next poll.
        if found != *known && self.change(Pool::Changes, Store::repair).await.is_ok() {
            *known = found;
        }
        for (member, caller) in self.store.calls() {
            // The coordinator that a member polls notifies it.
            let subscribers = lock(&self.subscribers);
            let subscriber = subscribers.get(&member).map(Arc::clone);
            drop(subscribers);
            if let Some(subscriber) = subscriber {
                self.notify_call(&subscriber, caller);
            }
        }
    }

    /// Removes the subscribers that have not waited for a while.
    fn sweep_subscribers(&self) {
        let mut all = lock(&self.subscribers);
        all.retain(|_, subscriber| {
            let is_used = Arc::strong_count(subscriber) > 1 || subscriber.has_requests();
            is_used || !subscriber.idle.swap(true, Ordering::Relaxed)
        });
    }

    /// Waits up to `time` for a revision after `since`, another epoch, or a call, unless `current`
    /// differs from `since` already. Then changes are gathered for a moment.
    pub async fn wait_for_change(
        &self,
        epoch: u64,
        (since, current): (u64, u64),
        subscriber: &Subscriber,
        time: Duration,
    ) {
        subscriber.idle.store(false, Ordering::Relaxed);
        // Subscribing also counts this request as waiting.
        let mut progress = self.progress.subscribe();
        let has_changed = |p: &Progress| p.stopping || p.epoch != epoch || p.revision > since;
        let wakeup = async {
            tokio::select! {
                _ = subscriber.call_arrived.notified() => false,
                _ = progress.wait_for(has_changed) => true,
            }
        };
        let is_change = current != since || timeout(time, wakeup).await.unwrap_or(false);
        // A call is reported without delay: packets wait for it.
        if is_change {
            let waiting = u32::try_from(self.progress.receiver_count()).unwrap_or(u32::MAX);
            let all = DELAY_PER_WAITER.saturating_mul(waiting);
            sleep(all.clamp(MIN_DELAY, MAX_DELAY)).await;
        }
    }
}

/// Returns a random number other than 0, which means no epoch.
fn random() -> u64 {
    let hasher = std::collections::hash_map::RandomState::new();
    std::hash::BuildHasher::hash_one(&hasher, std::process::id()).max(1)
}

/// Polls for changes of other processes, and sweeps limits; never returns.
pub(super) async fn run_background(app: Arc<App>) {
    let mut poll = interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sweep = interval(SWEEP_INTERVAL);
    sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut known = None;
    loop {
        tokio::select! {
            _ = poll.tick() => app.poll_store(&mut known).await,
            () = app.store_changed.notified() => app.poll_store(&mut known).await,
            _ = sweep.tick() => {
                log_slow_connections(&app);
                app.limits.sweep();
                app.answers.sweep();
                app.sweep_subscribers();
            }
        }
    }
}

/// Reports connections that ended because their client read an answer too slowly.
fn log_slow_connections(app: &App) {
    let late = app.limits.slow_connections.swap(0, Ordering::Relaxed);
    if late > 0 {
        warn!(
            target: "coordinator",
            connections = late,
            bytes_per_second = super::PACE.rate,
            "connections closed: clients read their answers too slowly"
        );
    }
}
