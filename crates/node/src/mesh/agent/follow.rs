//! What the coordinator has to say.

use super::{Agent, Gone, LONGEST_PAUSE, News, Pause, Shared, Worker};
use crate::mesh::client::{Client, ClientError};
use crate::mesh::known::Judge;
use crate::mesh::relay::Wish;
use crate::mesh::{Contact, cache};
use seikan_proto::mesh::{Change, Cursor, MAX_CALLS, Membership, Reason, Relay};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a question for changes waits at the coordinator.
const WAIT: Duration = Duration::from_secs(50);
/// Least time between an answer and the next question.
const BREATH: Duration = Duration::from_millis(20);
/// The same after too many answers in a row that came sooner than this and said nothing.
const IDLE_PAUSE: Duration = Duration::from_secs(1);
/// Such answers that are no reason to ask more slowly: what this host tells of itself as it starts ends a question each time.
const IDLE_ANSWERS: u32 = 8;
/// Least time between two versions of what is kept on disk.
const STORE_EVERY: Duration = Duration::from_secs(5);

impl Agent {
    /// Asks for changes, again and again.
    pub(super) async fn follow(
        &self,
        client: &Client,
        worker: &Worker,
        shared: &Shared,
    ) -> Result<(), Gone> {
        shared.membership.replace(cache::load(&self.cache));
        client.know(shared.membership.borrow().coordinators());
        // Coordinators in a row that did not answer.
        let mut silent = 0;
        let mut judge = Judge::new(self.settings.trust.clone(), self.remembered.take());
        let (revision, changes) = {
            let membership = shared.membership.borrow();
            let access = Change::Access(membership.access().clone());
            let members = membership.members().values().cloned().map(Change::Set);
            (
                membership.revision,
                std::iter::once(access).chain(members).collect(),
            )
        };
        self.believe(&mut judge, changes, revision, worker)?;
        // What is on disk may be of another coordinator: it tells of everybody once.
        let (mut cursor, mut idle) = (Cursor::default(), 0);
        let mut pause = Pause::default();
        let mut stored = tokio::time::Instant::now() - STORE_EVERY;
        judge.keep(&self.known);
        let mut dirty = false;
        loop {
            // The first answer comes at once; then what was kept has time to be written before the next question.
            let wait = if cursor.revision == 0 {
                Duration::ZERO
            } else {
                WAIT
            };
            let asked = Instant::now();
            // What waits at an address that this host has no more may wait for long.
            let question = async {
                tokio::select! {
                    answer = client.changes(cursor, wait) => Some(answer),
                    () = shared.elsewhere.notified() => None,
                }
            };
            let answer = match dirty || judge.is_dirty() {
                true => match tokio::time::timeout_at(stored + STORE_EVERY, question).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        (stored, dirty) = (tokio::time::Instant::now(), false);
                        self.keep(&shared.membership.borrow());
                        judge.keep(&self.known);
                        continue;
                    }
                },
                false => question.await,
            };
            let Some(answer) = answer else { continue };
            match answer {
                Ok(mut changes) => {
                    (pause, silent) = (Pause::default(), 0);
                    cursor = changes.cursor();
                    let mut calls = std::mem::take(&mut changes.calls);
                    calls.truncate(MAX_CALLS);
                    if changes.whole {
                        // It may know as little of this host as it takes this host to know of others.
                        shared.retell.set(true);
                        shared.different.notify_one();
                    }
                    let (before, changes, after, revision) = {
                        let mut membership = shared.membership.borrow_mut();
                        let before = membership.relays().to_vec();
                        let coordinators = membership.coordinators().to_vec();
                        let changes = membership.take(changes);
                        if coordinators != membership.coordinators() {
                            client.know(membership.coordinators());
                            dirty = true;
                        }
                        (
                            before,
                            changes,
                            membership.relays().to_vec(),
                            membership.revision,
                        )
                    };
                    dirty |= !changes.is_empty() || before != after;
                    let addresses = |relays: &[Relay]| -> Vec<_> {
                        relays.iter().map(|relay| relay.address.clone()).collect()
                    };
                    if addresses(&before) != addresses(&after) {
                        // They are STUN servers, too: with them it is seen what kind of a NAT there is.
                        shared.moved.notify_one();
                    }
                    for change in &changes {
                        if let Change::Set(member) = change
                            && !member.relayed.is_empty()
                        {
                            shared.wish(Wish::Moved(member.public_key));
                        }
                    }
                    let nothing = changes.is_empty() && calls.is_empty();
                    worker.tell(News::Coordinator(client.url()))?;
                    worker.tell(News::Contact(Contact::Connected))?;
                    self.believe(&mut judge, changes, revision, worker)?;
                    if !calls.is_empty() {
                        calls.iter().for_each(|key| shared.wish(Wish::Sought(*key)));
                        worker.tell(News::Called(calls))?;
                    }
                    // A coordinator that answers at once and says nothing is not asked as fast as it answers.
                    idle = if nothing && asked.elapsed() < IDLE_PAUSE {
                        idle + 1
                    } else {
                        0
                    };
                    let slow = idle > IDLE_ANSWERS;
                    tokio::time::sleep(if slow { IDLE_PAUSE } else { BREATH }).await;
                }
                Err(ClientError::Refused(refusal)) if refusal.reason == Reason::NotAMember => {
                    cache::forget(&self.cache);
                    // Who was who is remembered: it may be made a member of this mesh again.
                    judge.keep(&self.known);
                    dirty = false;
                    let changes = shared.membership.borrow_mut().clear();
                    cursor = Cursor::default();
                    worker.tell(News::Contact(Contact::Revoked))?;
                    self.believe(&mut judge, changes, 0, worker)?;
                    tokio::time::sleep(LONGEST_PAUSE).await;
                }
                Err(error) => {
                    // Another coordinator of the mesh says the same: it is asked at once, and it is no loss unless none answers.
                    client.turn();
                    silent += 1;
                    if silent >= client.known() {
                        silent = 0;
                        worker.tell(News::Contact(Contact::Lost(error.to_string())))?;
                        pause.wait().await;
                    }
                }
            }
        }
    }

    /// Has what of the changes is to be believed taken in by the names and by the worker.
    fn believe(
        &self,
        judge: &mut Judge,
        changes: Vec<Change>,
        revision: u64,
        worker: &Worker,
    ) -> Result<(), Gone> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let changes = judge.judge(changes, since_epoch.unwrap_or_default().as_secs());
        if let Some(doubts) = judge.news() {
            worker.tell(News::Doubts(doubts))?;
        }
        self.names.with(|zone| zone.take(&changes));
        worker.tell(News::Changes { revision, changes })
    }

    fn keep(&self, membership: &Membership) {
        // Without it, a host that starts without a coordinator has no peers: worth a try, not an end.
        let _ = cache::store(&self.cache, membership);
    }
}
