//! Log of changes for operators: joins, removals, tokens, and refused joins.
//!
//! A change is recorded in the transaction that makes it. Refused joins have a separate, smaller
//! log, because unauthenticated hosts cause them.

use std::fmt;
use std::net::IpAddr;

use rusqlite::{Connection, Transaction};
use seikan_proto::mesh::Name;
use tracing::info;

use super::{Store, StoreError, seconds, unsigned, value};

/// Maximum number of entries; the newest are kept.
const KEPT: i64 = 100_000;
/// Maximum number of refused joins; the newest are kept.
const KEPT_REFUSED: i64 = 1_000;
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
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// Counts the entries of a change and a subject since a time, among the newest ten thousand.
pub(super) fn count_since(
    connection: &Connection,
    change: &str,
    subject: &str,
    since: i64,
) -> Result<u32, StoreError> {
    let sql = "SELECT count(*) FROM audit
         WHERE id > (SELECT max(id) FROM audit) - 10000 AND change = ?1 AND subject = ?2 AND at > ?3";
    value(connection, sql, (change, subject, since))
}

impl Store {
    /// Returns the newest entries, refused joins included, the newest first, at most `limit`.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn audit(&self, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        self.read(|connection| {
            // Ids of the two tables cannot be compared, so the table is part of the order.
            let mut statement = connection.prepare_cached(
                "SELECT at, change, subject, actor FROM (
                     SELECT 0 AS part, id, at, change, subject, actor FROM audit
                     UNION ALL
                     SELECT 1, id, at, change, subject, actor FROM refused)
                 ORDER BY at DESC, part, id DESC LIMIT ?1",
            )?;
            let rows = statement.query_map([limit], |row| {
                Ok(AuditEntry {
                    time: unsigned(row.get(0)?),
                    change: row.get(1)?,
                    subject: row.get(2)?,
                    actor: row.get(3)?,
                })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Records that a host was refused under the name that it requested. The newest 1,000 entries
    /// are kept. Each coordinator of a shared mesh has its own, for as long as it runs.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn log_refused(&self, name: &Name, from: IpAddr, now: u64) -> Result<(), StoreError> {
        self.change_local(|transaction| {
            transaction.execute(
                "INSERT INTO refused (at, change, subject, actor) VALUES (?1, 'refused', ?2, ?3)",
                (seconds(now), name.as_str(), Actor::Host(from).to_string()),
            )?;
            delete_old(
                transaction,
                "DELETE FROM refused WHERE id <= ?1",
                KEPT_REFUSED,
            )
        })
    }
}

/// Records the change that the transaction makes.
pub(super) fn record(
    transaction: &Transaction<'_>,
    at: i64,
    change: &'static str,
    subject: &str,
    by: &Actor,
) -> Result<(), StoreError> {
    // The commands of operators print what they do.
    if let Actor::Host(address) = by {
        info!(target: "coordinator", member = subject, %address, "{change}");
    }
    let mut statement = transaction
        .prepare_cached("INSERT INTO audit (at, change, subject, actor) VALUES (?1, ?2, ?3, ?4)")?;
    statement.execute((at, change, subject, by.to_string()))?;
    delete_old(transaction, "DELETE FROM audit WHERE id <= ?1", KEPT)
}

/// Deletes the entries that are more than `kept` ids behind the one just inserted.
fn delete_old(connection: &Connection, sql: &str, kept: i64) -> Result<(), StoreError> {
    let newest = connection.last_insert_rowid();
    connection.prepare_cached(sql)?.execute([newest - kept])?;
    Ok(())
}
