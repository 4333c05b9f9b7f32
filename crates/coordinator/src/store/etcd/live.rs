//! What is true only as long as a coordinator lives: it keeps a lease, and what it writes under that goes with it.
//!
//! ```text
//! PREFIX/live/coordinators/ID    HOST:PORT where members reach it
//! PREFIX/live/calls/ID           the latest calls that it has for members that ask elsewhere
//! PREFIX/present/MEMBER          the coordinator that the member asks
//! PREFIX/seen/MEMBER             when it began or ceased to ask, which stays as long as it is one: seconds since 1970
//! ```
//!
//! Members ask again and again; only that one begins or ceases is written, and many at a time. Of one that asks elsewhere and then here
//! again it is written anew: what the other wrote goes with that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{MAX_COORDINATORS, RelayAddress};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::client::{Connection, Fault};
use super::messages::{Compare, NOT_EQUAL, Operand, Request, RequestOp, TxnRequest, target};
use super::replica::{delete, put};

/// Seconds that a lease lives after it was renewed last.
const TTL: i64 = 15;
/// How often it is renewed.
const RENEW: Duration = Duration::from_secs(5);
/// Pause between two looks at what is to be written.
const LOOK: Duration = Duration::from_millis(50);
/// Pause after etcd has refused something.
const REFUSED: Duration = Duration::from_secs(2);
/// How long after its last question a member is taken for one that asks: a question waits for 55 s at most.
const ASKS: Duration = Duration::from_secs(90);
/// Members of whom one transaction tells, two operations each at most.
const TOLD: usize = 50;
/// Calls that wait, at most; more are called again by who wants it.
const MAX_CALLS: usize = 256;

/// What is written, and what others write.
#[derive(Default)]
pub(super) struct Live(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// Who asks here: when last, and at which second since 1970.
    asking: BTreeMap<i64, (Instant, u64)>,
    /// Those of them of whom another has written since that they ask there, or what this one wrote is gone.
    elsewhere: BTreeSet<i64>,
    /// Those that were elsewhere, and ask here again.
    back: BTreeSet<i64>,
    /// Under which this coordinator writes.
    lease: i64,
    /// Calls that others are to hear of.
    calls: Vec<Called>,
    /// Calls that others have for members that ask here.
    heard: Vec<Called>,
    /// By the names that they have in etcd.
    coordinators: BTreeMap<String, RelayAddress>,
}

/// A member and who calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Called {
    pub member: i64,
    pub caller: PublicKey,
}

impl Live {
    /// A member asks here.
    pub fn asks(&self, member: i64, now: u64) {
        self.with(|known| {
            known.asking.insert(member, (Instant::now(), now));
            if known.elsewhere.remove(&member) {
                known.back.insert(member);
            }
        });
    }

    /// Where a member asks was written under a lease; 0: it is written no more.
    pub fn is_elsewhere(&self, member: i64, lease: i64) {
        self.with(|known| {
            if lease != known.lease && known.asking.contains_key(&member) {
                known.elsewhere.insert(member);
            }
        });
    }

    /// Whether it asked here, and elsewhere since.
    pub fn asks_elsewhere(&self, member: i64) -> bool {
        self.with(|known| known.elsewhere.contains(&member))
    }

    /// Nobody asks here any more.
    #[cfg(test)]
    pub fn leave(&self) {
        self.with(|known| known.asking.clear());
    }

    /// A member is called that asks elsewhere.
    pub fn call(&self, called: Called) {
        self.with(|known| {
            if known.calls.len() < MAX_CALLS && !known.calls.contains(&called) {
                known.calls.push(called);
            }
        });
    }

    /// What others called since this was last asked.
    pub fn heard(&self) -> Vec<Called> {
        self.with(|known| std::mem::take(&mut known.heard))
    }

    /// Where coordinators are.
    pub fn coordinators(&self) -> Vec<RelayAddress> {
        self.with(|known| {
            let mut all: Vec<_> = known.coordinators.values().cloned().collect();
            all.sort_unstable_by_key(ToString::to_string);
            all.dedup();
            all.truncate(MAX_COORDINATORS);
            all
        })
    }

    /// Forgets what others wrote: it is told anew.
    pub fn forget(&self) {
        self.with(|known| {
            known.coordinators.clear();
            // What was written of them meanwhile was not told.
            known.elsewhere = known.asking.keys().copied().collect();
        });
    }

    /// What a key under `live/` says, `own` aside; whether somebody is called by it. What makes no sense is of a later version.
    pub fn take(&self, key: &str, value: Option<&[u8]>, own: u64) -> bool {
        self.with(|known| {
            if let Some(id) = key.strip_prefix("coordinators/") {
                let address = value.and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
                match address {
                    // More than a mesh ever has are not kept.
                    Some(address) if known.coordinators.len() < 64 * MAX_COORDINATORS => {
                        known.coordinators.insert(id.to_owned(), address);
                    }
                    _ => {
                        known.coordinators.remove(id);
                    }
                }
                return false;
            }
            let foreign = key
                .strip_prefix("calls/")
                .filter(|id| *id != own.to_string());
            let calls = foreign
                .and(value)
                .and_then(|value| serde_json::from_slice(value).ok());
            let calls: Vec<Called> = calls.unwrap_or_default();
            let room = MAX_CALLS.saturating_sub(known.heard.len());
            known.heard.extend(calls.into_iter().take(room));
            !known.heard.is_empty()
        })
    }

    fn with<T>(&self, work: impl FnOnce(&mut Known) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What this coordinator has written. It outlives connections.
pub(super) struct Writer {
    prefix: String,
    /// What others tell this coordinator by.
    pub id: u64,
    advertise: Option<RelayAddress>,
    /// 0: none.
    lease: i64,
    renewed: Instant,
    /// Under the lease: where this coordinator is.
    is_told: bool,
    /// Under the lease: who asks here, and when it did last.
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
            is_told: false,
            present: BTreeMap::new(),
        }
    }

    /// Writes what there is to write; ends with the connection.
    pub async fn keep(&mut self, live: &Live, connection: &Connection) -> Fault {
        loop {
            let pause = match self.write(live, connection).await {
                Ok(()) => LOOK,
                // The lease may be gone: everything is written anew under another one.
                Err(Fault::Refused(_)) => {
                    self.end(connection).await;
                    REFUSED
                }
                Err(fault) => return fault,
            };
            sleep(pause).await;
        }
    }

    pub async fn write(&mut self, live: &Live, connection: &Connection) -> Result<(), Fault> {
        let has_calls = live.with(|known| !known.calls.is_empty());
        let is_asked = live.with(|known| !known.asking.is_empty());
        if self.lease == 0 {
            // Who only looks, as an administrator's command, writes nothing.
            if self.advertise.is_none() && !has_calls && !is_asked {
                return Ok(());
            }
            self.lease = connection.grant(TTL).await?;
            live.with(|known| known.lease = self.lease);
            self.renewed = Instant::now();
            self.present.clear();
            self.is_told = false;
        }
        if self.renewed.elapsed() > RENEW {
            if !connection.renew(self.lease).await? {
                self.lease = 0;
                return Ok(());
            }
            self.renewed = Instant::now();
        }
        if let Some(address) = self.advertise.as_ref().filter(|_| !self.is_told) {
            let key = format!("{}/live/coordinators/{}", self.prefix, self.id);
            let value = address.to_string().into_bytes();
            commit(connection, vec![put(key.into_bytes(), value, self.lease)]).await?;
            self.is_told = true;
        }
        let calls = live.with(|known| std::mem::take(&mut known.calls));
        if !calls.is_empty() {
            let key = format!("{}/live/calls/{}", self.prefix, self.id);
            let value = serde_json::to_vec(&calls).unwrap_or_default();
            commit(connection, vec![put(key.into_bytes(), value, self.lease)]).await?;
        }
        self.tell_presence(live, connection).await
    }

    async fn tell_presence(&mut self, live: &Live, connection: &Connection) -> Result<(), Fault> {
        let (asking, back) = live.with(|known| {
            known.asking.retain(|_, (last, _)| last.elapsed() < ASKS);
            let Known {
                asking, elsewhere, ..
            } = known;
            elsewhere.retain(|id| asking.contains_key(id));
            (asking.clone(), std::mem::take(&mut known.back))
        });
        self.present.retain(|id, _| !back.contains(id));
        let new = asking
            .iter()
            .filter(|(id, _)| !self.present.contains_key(id));
        let gone = self.present.keys().filter(|id| !asking.contains_key(id));
        let new: Vec<(i64, u64)> = new.map(|(id, (_, at))| (*id, *at)).take(TOLD).collect();
        let gone: Vec<i64> = gone.copied().take(TOLD - new.len()).collect();
        let key = |folder, id| format!("{}/{folder}/{id}", self.prefix).into_bytes();
        let here = self.advertise.as_ref().map(ToString::to_string);
        let here = here.unwrap_or_default().into_bytes();
        let mut operations = Vec::new();
        for (id, at) in &new {
            operations.push(put(key("present", *id), here.clone(), self.lease));
            operations.push(self.seen(*id, *at));
        }
        for id in &gone {
            let at = self.present.get(id).copied().unwrap_or(0);
            let present = key("present", *id);
            // Unless another coordinator, which it asks now, has written it since.
            let compare = Compare {
                target: target::LEASE,
                key: present.clone(),
                operand: Some(Operand::Lease(self.lease)),
                ..Compare::default()
            };
            operations.push(if_so(compare, vec![delete(present), self.seen(*id, at)]));
        }
        if !operations.is_empty() {
            commit(connection, operations).await?;
        }
        self.present.extend(new);
        for id in gone {
            self.present.remove(&id);
        }
        // When it was heard last, for when it is gone.
        for (id, at) in &mut self.present {
            *at = asking.get(id).map_or(*at, |(_, now)| *now);
        }
        Ok(())
    }

    /// When a member was heard last, unless it is none any more: what was written of it went with it.
    fn seen(&self, id: i64, at: u64) -> RequestOp {
        let is_member = Compare {
            result: NOT_EQUAL,
            target: target::CREATE,
            key: format!("{}/state/rows/member/{id}", self.prefix).into_bytes(),
            operand: Some(Operand::CreateRevision(0)),
        };
        let key = format!("{}/seen/{id}", self.prefix).into_bytes();
        if_so(is_member, vec![put(key, at.to_string().into_bytes(), 0)])
    }

    /// Ends what only lives with this coordinator.
    pub async fn end(&mut self, connection: &Connection) {
        if self.lease != 0 {
            // Else it ends by itself.
            let _ = connection.revoke(self.lease).await;
            self.lease = 0;
        }
    }
}

/// Done only if it is so.
fn if_so(compare: Compare, success: Vec<RequestOp>) -> RequestOp {
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
