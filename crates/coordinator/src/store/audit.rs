//! Log of changes for operators: joins, removals, tokens, and refused joins.
//!
//! A change is recorded in the transaction that makes it. Refused joins have a separate, smaller
//! log, because unauthenticated hosts cause them.

use std::cmp::Reverse;
use std::fmt;
use std::net::IpAddr;

use seikan_proto::mesh::Name;
use serde::{Deserialize, Serialize};
use tracing::info;

use super::rows::{Logged, Mesh, Row};
use super::{Store, StoreError};

/// Maximum number of entries; the newest are kept.
pub(super) const KEPT: u64 = 100_000;
/// Maximum number of refused joins; the newest are kept.
pub(super) const KEPT_REFUSED: u64 = 1_000;
/// Maximum length of an operator's name, in characters.
const MAX_OPERATOR: usize = 64;

/// The person or host that makes a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Actor {
    /// A user of the coordinator's host, by name.
    Operator(String),
    /// A host, by its source address.
    Host(IpAddr),
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operator(name) => {
                let plain = name.chars().filter(|c| !c.is_control());
                write!(
                    f,
                    "operator {}",
                    plain.take(MAX_OPERATOR).collect::<String>()
                )
            }
            Self::Host(address) => write!(f, "{address}"),
        }
    }
}

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// Time, in seconds since 1970.
    pub time: u64,
    /// Kind of the change: `joined`, `key changed`, `left`, `removed`, `refused`, `token created`,
    /// `token withdrawn`, `networks set`, `relay added`, `relay removed`, `policy set`, `tags set`,
    /// `devices reported`, `device approved`, `device revoked`, `imported` or `etcd restored`.
    pub change: String,
    /// Object of the change: a member's name, a token's number and label, networks, a relay's
    /// address, the number of rules, a member's name and tags, the revision of a snapshot, or the
    /// revisions before and after.
    pub subject: String,
    /// Author of the change: `operator NAME`, or the address of a host.
    pub actor: String,
}

impl Store {
    /// Returns the newest entries, refused joins included, the newest first, at most `limit`.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn audit(&self, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        self.read(|mesh| {
            let changes = mesh.audit.by_terms(..).rev().map(|logged| &logged.entry);
            let refused = mesh.refused.by_terms(..).rev().map(|logged| &logged.entry);
            let mut all: Vec<&AuditEntry> = changes.chain(refused).collect();
            // The sort is stable: among entries of the same second, refused joins are last.
            all.sort_by_key(|entry| Reverse(entry.time));
            all.truncate(limit as usize);
            Ok(all.into_iter().cloned().collect())
        })
    }

    /// Records that a host was refused under the name that it requested. The newest 1,000 entries
    /// are kept. Each coordinator of a shared mesh has its own log of refused joins, for as long as
    /// it runs.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn log_refused(&self, name: &Name, from: IpAddr, now: u64) -> Result<(), StoreError> {
        let by = Actor::Host(from);
        self.change_local(|mesh| append::<KEPT_REFUSED>(mesh, now, "refused", name.as_str(), &by))
    }
}

/// Records the change that is made.
pub(super) fn record(
    mesh: &mut Mesh,
    time: u64,
    change: &'static str,
    subject: &str,
    by: &Actor,
) -> Result<(), StoreError> {
    // Only changes by hosts are logged: commands of operators print their changes themselves.
    if let Actor::Host(address) = by {
        info!(target: "coordinator", member = subject, %address, "{change}");
    }
    append::<KEPT>(mesh, time, change, subject, by)
}

/// Appends an entry to a log. If the log is full (`KEPT` entries), it replaces the oldest one.
fn append<const KEPT: u64>(
    mesh: &mut Mesh,
    time: u64,
    change: &str,
    subject: &str,
    by: &Actor,
) -> Result<(), StoreError>
where
    Logged<KEPT>: Row,
{
    let last = Logged::<KEPT>::table(mesh).by_terms(..).next_back();
    let id = last.map_or(0, |last| last.id).saturating_add(1);
    let entry = AuditEntry {
        time,
        change: change.to_owned(),
        subject: subject.to_owned(),
        actor: by.to_string(),
    };
    mesh.put(Logged::<KEPT> { id, entry })
}
