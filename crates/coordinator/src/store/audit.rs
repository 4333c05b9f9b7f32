//! Who did what, for operators: joins, removals, tokens, and what strangers were refused.
//!
//! What changed the mesh is noted within the very transaction that changed it. Refusals are kept
//! apart, and fewer: strangers decide how many there are.

use std::fmt;
use std::net::IpAddr;

use rusqlite::{Connection, Transaction};
use seikan_proto::mesh::Name;

use super::{Store, StoreError, seconds, unsigned};

/// Entries that are kept, the newest.
const KEPT: i64 = 100_000;
/// Refusals that are kept, the newest.
const KEPT_REFUSED: i64 = 1_000;
/// Longest name of an operator that is noted, in characters.
const MAX_OPERATOR: usize = 64;

/// Who does something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Actor {
    /// A user of the coordinator's own host, by name.
    Operator(String),
    /// A host, by the address that it speaks from.
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

/// One thing that was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// When, in seconds since 1970.
    pub time: u64,
    /// What: `joined`, `key changed`, `left`, `removed`, `refused`, `token created`, `token withdrawn`,
    /// `networks set`, `relay added`, `relay removed`, `policy set`, `tags set`,
    /// `moved to etcd` or `etcd restored`.
    pub what: String,
    /// To what or whom: a member's name, a token's number and label, networks, a relay's address, how many rules, a member's name and tags, what
    /// keys begin with in etcd, the revisions before and after.
    pub subject: String,
    /// By whom: `operator NAME`, or the address of a host.
    pub actor: String,
}

/// How often something was done to somebody since a time, of the newest ten thousand entries.
pub(super) fn count_since(
    connection: &Connection,
    what: &str,
    subject: &str,
    since: i64,
) -> Result<u32, StoreError> {
    let mut statement = connection.prepare_cached(
        "SELECT count(*) FROM audit
         WHERE id > (SELECT max(id) FROM audit) - 10000 AND what = ?1 AND subject = ?2 AND at > ?3",
    )?;
    Ok(statement.query_row((what, subject, since), |row| row.get(0))?)
}

impl Store {
    /// The newest entries, refusals included, the newest first; `limit` at most.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn audit(&self, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        self.look(|connection| {
            // The table is part of the order: ids of one say nothing about the other's.
            let mut statement = connection.prepare_cached(
                "SELECT at, what, subject, actor FROM (
                     SELECT 0 AS part, id, at, what, subject, actor FROM audit
                     UNION ALL
                     SELECT 1, id, at, what, subject, actor FROM refused)
                 ORDER BY at DESC, part, id DESC LIMIT ?1",
            )?;
            let rows = statement.query_map([limit], |row| {
                Ok(AuditEntry {
                    time: unsigned(row.get(0)?),
                    what: row.get(1)?,
                    subject: row.get(2)?,
                    actor: row.get(3)?,
                })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Notes that a host was not let in under the name it wanted. The newest 1,000 of these are kept; of coordinators that share a
    /// mesh each has its own, for as long as it runs.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn note_refused(&self, name: &Name, from: IpAddr, now: u64) -> Result<(), StoreError> {
        self.note(|transaction| {
            transaction.execute(
                "INSERT INTO refused (at, what, subject, actor) VALUES (?1, 'refused', ?2, ?3)",
                (seconds(now), name.as_str(), Actor::Host(from).to_string()),
            )?;
            forget_old(
                transaction,
                "DELETE FROM refused WHERE id <= ?1",
                KEPT_REFUSED,
            )
        })
    }
}

/// Notes what the transaction does.
pub(super) fn note(
    transaction: &Transaction<'_>,
    at: i64,
    what: &'static str,
    subject: &str,
    by: &Actor,
) -> Result<(), StoreError> {
    let mut statement = transaction
        .prepare_cached("INSERT INTO audit (at, what, subject, actor) VALUES (?1, ?2, ?3, ?4)")?;
    statement.execute((at, what, subject, by.to_string()))?;
    forget_old(transaction, "DELETE FROM audit WHERE id <= ?1", KEPT)
}

/// Ids count up by one, so what is further back than `kept` from the one just given is too much.
fn forget_old(connection: &Connection, sql: &str, kept: i64) -> Result<(), StoreError> {
    let newest = connection.last_insert_rowid();
    connection.prepare_cached(sql)?.execute([newest - kept])?;
    Ok(())
}
