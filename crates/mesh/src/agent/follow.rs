//! Follows the changes of the membership at the coordinator.

use super::Agent;
use crate::cache;
use crate::client::{Client, ClientError};
use crate::event::{AgentEvent, Contact, Gone};
use crate::shared::{LONGEST_PAUSE, Pause, RelayEvent, Shared};
use crate::trust::TrustStore;
use seikan_proto::mesh::{Change, Cursor, MAX_CALLS, Membership, Reason, Relay};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long the coordinator holds a request for changes.
const WAIT: Duration = Duration::from_secs(50);
/// Minimum pause between an answer and the next request.
const PAUSE: Duration = Duration::from_millis(20);
/// The same after [`IDLE_ANSWERS`] answers in a row that came sooner than this and were empty.
const IDLE_PAUSE: Duration = Duration::from_secs(1);
/// Early empty answers that are tolerated: each report of this host at its start ends a pending request.
const IDLE_ANSWERS: u32 = 8;
/// Minimum interval between two writes of the state on disk.
const STORE_EVERY: Duration = Duration::from_secs(5);

impl Agent {
    /// Requests changes, forever.
    pub(super) async fn follow(&self, client: &Client, shared: &Shared) -> Result<(), Gone> {
        // Number of coordinators in a row that did not answer.
        let mut silent = 0;
        let mut trust_store = self.trust_store.lock().await;
        let (revision, changes) = {
            let membership = shared.membership.borrow();
            let access = Change::Access(membership.access().clone());
            let members = membership.members().values().cloned().map(Change::Set);
            (
                membership.revision,
                std::iter::once(access).chain(members).collect(),
            )
        };
        self.apply_trusted(&mut trust_store, changes, revision, shared)?;
        // The stored state may be of another coordinator, so the first answer contains all members.
        let (mut cursor, mut idle) = (Cursor::default(), 0);
        let mut pause = Pause::default();
        let mut stored = tokio::time::Instant::now() - STORE_EVERY;
        trust_store.store(&self.known_file);
        let mut dirty = false;
        loop {
            // The first answer comes at once; then the state on disk is written before the next request.
            let wait = if cursor.revision == 0 {
                Duration::ZERO
            } else {
                WAIT
            };
            let requested_at = Instant::now();
            // A request from an address that this host has lost may hang for long.
            let request = async {
                tokio::select! {
                    answer = client.changes(cursor, wait) => Some(answer),
                    () = shared.connections_stale.notified() => None,
                }
            };
            let answer = if dirty || trust_store.is_dirty() {
                match tokio::time::timeout_at(stored + STORE_EVERY, request).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        (stored, dirty) = (tokio::time::Instant::now(), false);
                        self.store(&shared.membership.borrow());
                        trust_store.store(&self.known_file);
                        continue;
                    }
                }
            } else {
                request.await
            };
            let Some(answer) = answer else { continue };
            match answer {
                Ok(mut changes) => {
                    (pause, silent) = (Pause::default(), 0);
                    cursor = changes.cursor();
                    let mut calls = std::mem::take(&mut changes.calls);
                    calls.truncate(MAX_CALLS);
                    if changes.whole {
                        // A coordinator that sends everything may also have lost this host's endpoints.
                        shared.report_again.set(true);
                        shared.endpoints_changed.notify_one();
                    }
                    let (before, changes, after, revision) = {
                        let mut membership = shared.membership.borrow_mut();
                        let before = membership.relays().to_vec();
                        let coordinators = membership.coordinators().to_vec();
                        let changes = membership.take(changes);
                        if coordinators != membership.coordinators() {
                            client.set_others(membership.coordinators());
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
                        // Relays are STUN servers too; together they show the type of the NAT.
                        shared.moved.notify_one();
                    }
                    for change in &changes {
                        if let Change::Set(member) = change
                            && !member.relayed.is_empty()
                        {
                            shared.notify_relays(RelayEvent::Moved(member.public_key));
                        }
                    }
                    let nothing = changes.is_empty() && calls.is_empty();
                    shared.send(AgentEvent::Coordinator(client.url()))?;
                    shared.send(AgentEvent::Contact(Contact::Connected))?;
                    self.apply_trusted(&mut trust_store, changes, revision, shared)?;
                    if !calls.is_empty() {
                        calls
                            .iter()
                            .for_each(|key| shared.notify_relays(RelayEvent::Sought(*key)));
                        shared.send(AgentEvent::CallRequests(calls))?;
                    }
                    // A coordinator that returns early empty answers is polled more slowly.
                    idle = if nothing && requested_at.elapsed() < IDLE_PAUSE {
                        idle + 1
                    } else {
                        0
                    };
                    let slow = idle > IDLE_ANSWERS;
                    tokio::time::sleep(if slow { IDLE_PAUSE } else { PAUSE }).await;
                }
                Err(ClientError::Refused(refusal)) if refusal.reason == Reason::NotAMember => {
                    cache::remove(&self.cache);
                    // Known keys are kept: this host may join the mesh again.
                    trust_store.store(&self.known_file);
                    dirty = false;
                    let changes = shared.membership.borrow_mut().clear();
                    cursor = Cursor::default();
                    shared.send(AgentEvent::Contact(Contact::Revoked))?;
                    self.apply_trusted(&mut trust_store, changes, 0, shared)?;
                    tokio::time::sleep(LONGEST_PAUSE).await;
                }
                Err(error) => {
                    // All coordinators of a mesh have the same state: the next one is used at once, and contact
                    // is lost only if none answers.
                    client.use_next();
                    silent += 1;
                    if silent >= client.count() {
                        silent = 0;
                        shared.send(AgentEvent::Contact(Contact::Lost(error.to_string())))?;
                        pause.wait().await;
                    }
                }
            }
        }
    }

    /// Passes the changes that pass the trust store to the names and to the worker.
    fn apply_trusted(
        &self,
        trust_store: &mut TrustStore,
        changes: Vec<Change>,
        revision: u64,
        shared: &Shared,
    ) -> Result<(), Gone> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let changes = trust_store.filter(changes, since_epoch.unwrap_or_default().as_secs());
        if let Some(key_conflicts) = trust_store.take_changed_conflicts() {
            shared.send(AgentEvent::KeyConflicts(key_conflicts))?;
        }
        self.names.with(|zone| zone.take(&changes));
        shared.send(AgentEvent::Changes { revision, changes })
    }

    fn store(&self, membership: &Membership) {
        // If this fails, this host starts without peers while no coordinator answers, which is no reason to
        // stop.
        let _ = cache::store(&self.cache, membership);
    }
}
