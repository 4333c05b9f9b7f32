//! State that lasts as long as a coordinator: keys under its lease.
//!
//! ```text
//! PREFIX/live/coordinators/ID    address of a coordinator, HOST:PORT
//! PREFIX/live/calls/ID           latest calls of a coordinator for members that poll others
//! PREFIX/present/MEMBER          coordinator that the member polls
//! PREFIX/seen/MEMBER             when it started or stopped polling ([`Seen`]); not under the lease
//! ```
//!
//! Members poll continuously. A coordinator writes only when a member starts or stops polling, many
//! members at a time. If a member polls another coordinator and then this one again, the keys are
//! written again, because those of the other coordinator expire with its lease.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{MAX_COORDINATORS, RelayAddress};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::client::{Connection, Fault};
use super::messages::{Compare, Request, RequestOp, TxnRequest, delete, put};
use crate::lock;
use crate::store::rows::Seen;

/// Lifetime of a lease without renewal, in seconds.
const TTL: i64 = 15;
/// Interval of renewals.
const RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// Interval of writes.
const WRITE_INTERVAL: Duration = Duration::from_millis(50);
/// Pause after a refused request.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// Time after its latest poll for which a member counts as polling: a poll waits for at most 55 s.
const POLL_TIMEOUT: Duration = Duration::from_secs(90);
/// Maximum number of members in one transaction, with two operations each.
const BATCH: usize = 50;
/// Maximum number of queued calls; members repeat calls that are lost.
const MAX_CALLS: usize = 256;

/// State that this coordinator writes, and that others have written.
#[derive(Default)]
pub(in crate::store) struct Live(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// Members that poll here: the time of the latest poll, and the same in seconds since 1970.
    polling: BTreeMap<i64, (Instant, u64)>,
    /// Members in `polling` whose key another coordinator has written since, or whose key was
    /// deleted.
    elsewhere: BTreeSet<i64>,
    /// Members that polled elsewhere and poll here again.
    returned: BTreeSet<i64>,
    /// Lease of this coordinator; 0: none.
    lease: i64,
    /// Calls to send to other coordinators.
    outgoing_calls: Vec<MemberCall>,
    /// Calls from other coordinators for members that poll here.
    incoming_calls: Vec<MemberCall>,
    /// Addresses of coordinators by their ids in etcd.
    coordinators: BTreeMap<String, RelayAddress>,
}

/// A member, and the key of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::store) struct MemberCall {
    pub member: i64,
    pub caller: PublicKey,
}

impl Live {
    /// Records a poll of a member at this coordinator.
    pub fn note_poll(&self, member: i64, now: u64) {
        self.with(|known| {
            known.polling.insert(member, (Instant::now(), now));
            if known.elsewhere.remove(&member) {
                known.returned.insert(member);
            }
        });
    }

    /// Records that the presence of a member was written under a lease; 0: deleted.
    pub fn note_presence(&self, member: i64, lease: i64) {
        self.with(|known| {
            if lease != known.lease && known.polling.contains_key(&member) {
                known.elsewhere.insert(member);
            }
        });
    }

    /// Returns whether a member has polled here, and elsewhere since.
    pub fn polls_elsewhere(&self, member: i64) -> bool {
        self.with(|known| known.elsewhere.contains(&member))
    }

    /// Forgets all members that poll here.
    #[cfg(test)]
    pub fn stop_polling(&self) {
        self.with(|known| known.polling.clear());
    }

    /// Queues a call of a member that polls elsewhere.
    pub fn queue_call(&self, member: i64, caller: PublicKey) {
        let call = MemberCall { member, caller };
        self.with(|known| {
            if known.outgoing_calls.len() < MAX_CALLS && !known.outgoing_calls.contains(&call) {
                known.outgoing_calls.push(call);
            }
        });
    }

    /// Takes the calls that other coordinators have sent.
    pub fn take_calls(&self) -> Vec<MemberCall> {
        self.with(|known| std::mem::take(&mut known.incoming_calls))
    }

    /// Returns the addresses of all live coordinators.
    pub fn coordinators(&self) -> Vec<RelayAddress> {
        self.with(|known| {
            let mut all: Vec<_> = known.coordinators.values().cloned().collect();
            all.sort_unstable_by_key(ToString::to_string);
            all.dedup();
            all.truncate(MAX_COORDINATORS);
            all
        })
    }

    /// Forgets the state of others, before it is loaded again.
    pub fn forget(&self) {
        self.with(|known| {
            known.coordinators.clear();
            // Changes of their keys may have been missed.
            known.elsewhere = known.polling.keys().copied().collect();
        });
    }

    /// Applies a key under `live/`, except the calls of this coordinator, `own`. Returns whether
    /// members are called. Ignores values that cannot be parsed: a later version may have written
    /// them.
    pub fn apply(&self, key: &str, value: Option<&[u8]>, own: u64) -> bool {
        self.with(|known| {
            if let Some(id) = key.strip_prefix("coordinators/") {
                let address = value.and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
                match address {
                    // Bounds memory, far above any real mesh.
                    Some(address) if known.coordinators.len() < 64 * MAX_COORDINATORS => {
                        known.coordinators.insert(id.to_owned(), address);
                    }
                    _ => {
                        known.coordinators.remove(id);
                    }
                }
                return false;
            }
            let others = key
                .strip_prefix("calls/")
                .filter(|id| *id != own.to_string());
            let calls = others
                .and(value)
                .and_then(|value| serde_json::from_slice(value).ok());
            let calls: Vec<MemberCall> = calls.unwrap_or_default();
            let remaining = MAX_CALLS.saturating_sub(known.incoming_calls.len());
            known
                .incoming_calls
                .extend(calls.into_iter().take(remaining));
            !known.incoming_calls.is_empty()
        })
    }

    fn with<T>(&self, work: impl FnOnce(&mut Known) -> T) -> T {
        work(&mut lock(&self.0))
    }
}

/// Writes the state of this coordinator. It outlives connections.
pub(super) struct Writer {
    prefix: String,
    /// Id of this coordinator in etcd.
    pub id: u64,
    advertise: Option<RelayAddress>,
    /// 0: no lease.
    lease: i64,
    renewed: Instant,
    /// The address of this coordinator is written under the lease.
    is_advertised: bool,
    /// Members whose presence is written under the lease, with the time of their latest poll.
    present: BTreeMap<i64, u64>,
}

impl Writer {
    pub fn new(prefix: &str, advertise: Option<RelayAddress>, id: u64) -> Writer {
        Writer {
            prefix: prefix.to_owned(),
            id,
            advertise,
            lease: 0,
            renewed: Instant::now(),
            is_advertised: false,
            present: BTreeMap::new(),
        }
    }

    /// Writes changes until the connection fails; returns its error.
    pub async fn run(&mut self, live: &Live, connection: &Connection) -> Fault {
        loop {
            let pause = match self.write(live, connection).await {
                Ok(()) => WRITE_INTERVAL,
                // The lease may be gone: all keys are written again under another one.
                Err(Fault::Refused(_)) => {
                    self.end(connection).await;
                    RETRY_DELAY
                }
                Err(fault) => return fault,
            };
            sleep(pause).await;
        }
    }

    pub async fn write(&mut self, live: &Live, connection: &Connection) -> Result<(), Fault> {
        let has_calls = live.with(|known| !known.outgoing_calls.is_empty());
        let is_polled = live.with(|known| !known.polling.is_empty());
        if self.lease == 0 {
            // An operator's command only reads, and needs no lease.
            if self.advertise.is_none() && !has_calls && !is_polled {
                return Ok(());
            }
            self.lease = connection.grant(TTL).await?;
            live.with(|known| known.lease = self.lease);
            self.renewed = Instant::now();
            self.present.clear();
            self.is_advertised = false;
        }
        if self.renewed.elapsed() > RENEW_INTERVAL {
            if !connection.renew(self.lease).await? {
                self.lease = 0;
                return Ok(());
            }
            self.renewed = Instant::now();
        }
        if let Some(address) = self.advertise.as_ref().filter(|_| !self.is_advertised) {
            let key = format!("{}/live/coordinators/{}", self.prefix, self.id);
            let value = address.to_string().into_bytes();
            commit(connection, vec![put(key.into_bytes(), value, self.lease)]).await?;
            self.is_advertised = true;
        }
        let outgoing_calls = live.with(|known| std::mem::take(&mut known.outgoing_calls));
        if !outgoing_calls.is_empty() {
            let key = format!("{}/live/calls/{}", self.prefix, self.id);
            let value = serde_json::to_vec(&outgoing_calls).unwrap_or_default();
            commit(connection, vec![put(key.into_bytes(), value, self.lease)]).await?;
        }
        self.write_presence(live, connection).await
    }

    async fn write_presence(&mut self, live: &Live, connection: &Connection) -> Result<(), Fault> {
        let (polling, returned) = live.with(|known| {
            known
                .polling
                .retain(|_, (last, _)| last.elapsed() < POLL_TIMEOUT);
            let Known {
                polling, elsewhere, ..
            } = known;
            elsewhere.retain(|id| polling.contains_key(id));
            (polling.clone(), std::mem::take(&mut known.returned))
        });
        self.present.retain(|id, _| !returned.contains(id));
        let new = polling
            .iter()
            .filter(|(id, _)| !self.present.contains_key(id));
        let gone = self.present.keys().filter(|id| !polling.contains_key(id));
        let new: Vec<(i64, u64)> = new.map(|(id, (_, at))| (*id, *at)).take(BATCH).collect();
        let gone: Vec<i64> = gone.copied().take(BATCH - new.len()).collect();
        let key = |folder, id| format!("{}/{folder}/{id}", self.prefix).into_bytes();
        let here = self.advertise.as_ref().map(ToString::to_string);
        let here = here.unwrap_or_default().into_bytes();
        let mut operations = Vec::new();
        for (id, at) in &new {
            operations.push(put(key("present", *id), here.clone(), self.lease));
            operations.push(self.write_seen(*id, *at));
        }
        for id in &gone {
            let at = self.present.get(id).copied().unwrap_or(0);
            let present = key("present", *id);
            // Unless another coordinator, which the member polls now, has written it since.
            let compare = Compare::is_under(present.clone(), self.lease);
            operations.push(if_matches(
                compare,
                vec![delete(present), self.write_seen(*id, at)],
            ));
        }
        if !operations.is_empty() {
            commit(connection, operations).await?;
        }
        self.present.extend(new);
        for id in gone {
            self.present.remove(&id);
        }
        // Kept for the time at which the member stops polling.
        for (id, at) in &mut self.present {
            *at = polling.get(id).map_or(*at, |(_, now)| *now);
        }
        Ok(())
    }

    /// Writes the time of a member's latest poll, unless the member has been removed: its removal
    /// deletes the key.
    fn write_seen(&self, id: i64, at: u64) -> RequestOp {
        let row = format!("{}/state/rows/member/{id}", self.prefix);
        let is_member = Compare::exists(row.into_bytes());
        let key = format!("{}/seen/{id}", self.prefix).into_bytes();
        let seen = serde_json::to_vec(&Seen { member: id, at }).unwrap_or_default();
        if_matches(is_member, vec![put(key, seen, 0)])
    }

    /// Revokes the lease.
    pub async fn end(&mut self, connection: &Connection) {
        if self.lease != 0 {
            // On an error the lease expires.
            let _ = connection.revoke(self.lease).await;
            self.lease = 0;
        }
    }
}

/// Returns a transaction that runs only if the comparison succeeds.
fn if_matches(compare: Compare, success: Vec<RequestOp>) -> RequestOp {
    let compare = vec![compare];
    RequestOp {
        request: Some(Request::Txn(TxnRequest { compare, success })),
    }
}

async fn commit(connection: &Connection, success: Vec<RequestOp>) -> Result<(), Fault> {
    let compare = Vec::new();
    connection
        .txn(TxnRequest { compare, success })
        .await
        .map(drop)
}
