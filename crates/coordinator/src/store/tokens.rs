//! Join tokens. The store keeps their digests only.

use rusqlite::Connection;
use seikan_proto::mesh::{Digest, MAX_TAGS, Name};

use super::{Actor, Store, StoreError, audit, first, seconds, unsigned, value};

/// Maximum length of a label, in characters.
const MAX_LABEL: usize = 100;

/// Number of a token, shown in place of the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(pub i64);

/// Properties of a new token. The default admits any number of hosts, without tags, until it is
/// withdrawn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewToken {
    /// Label for operators; at most 100 characters.
    pub label: Option<String>,
    /// Number of hosts that it admits, at least 1; `None`: unlimited.
    pub uses: Option<u32>,
    /// Time at which it expires, in seconds since 1970; `None`: never.
    pub expires: Option<u64>,
    /// Tags of members that it admits; at most [`MAX_TAGS`].
    pub tags: Vec<Name>,
    /// Whether devices behind members that it admits need no approval.
    pub devices: bool,
}

/// A token as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenInfo {
    /// For [`Store::withdraw_token`].
    pub id: TokenId,
    /// Label for operators.
    pub label: Option<String>,
    /// Number of hosts that it admits, at least 1; `None`: unlimited.
    pub uses: Option<u32>,
    /// Number of hosts that it has admitted.
    pub used: u64,
    /// Time of creation, in seconds since 1970.
    pub created: u64,
    /// Time at which it expires, in seconds since 1970.
    pub expires: Option<u64>,
    /// Time of withdrawal, in seconds since 1970.
    pub withdrawn: Option<u64>,
    /// Tags of members that it admits.
    pub tags: Vec<Name>,
    /// Whether devices behind members that it admits need no approval.
    pub devices: bool,
}

impl TokenInfo {
    /// Returns whether it admits hosts at this time.
    pub fn is_good(&self, now: u64) -> bool {
        let left = self.uses.is_none_or(|uses| self.used < u64::from(uses));
        left && self.withdrawn.is_none() && self.expires.is_none_or(|end| now < end)
    }
}

impl Store {
    /// Stores a new token by its digest.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`] for more than [`MAX_TAGS`] tags, a label that is too long, or
    /// zero uses; [`StoreError::Sqlite`].
    pub fn create_token(
        &self,
        digest: &Digest,
        token: &NewToken,
        by: &Actor,
        now: u64,
    ) -> Result<TokenId, StoreError> {
        if token.tags.len() > MAX_TAGS {
            return Err(StoreError::OutOfBounds("a token may have at most 16 tags"));
        }
        if token.uses == Some(0) {
            return Err(StoreError::OutOfBounds(
                "a token must admit at least one host",
            ));
        }
        let label = token.label.as_deref();
        if label.is_some_and(|label| label.chars().count() > MAX_LABEL) {
            return Err(StoreError::OutOfBounds(
                "a token's label may have at most 100 characters",
            ));
        }
        let tags = to_json(&token.tags)?;
        let (digest, token, by) = (digest.0, token.clone(), by.clone());
        self.change(move |transaction| {
            let label = token.label.as_deref();
            transaction.execute(
                "INSERT INTO token (digest, label, uses, used, created, expires, tags, devices)
                 VALUES (?1, ?2, ?3, 0, ?4, ?5, ?6, ?7)",
                (
                    digest,
                    label,
                    token.uses,
                    seconds(now),
                    token.expires.map(seconds),
                    &tags,
                    token.devices,
                ),
            )?;
            let id = transaction.last_insert_rowid();
            let subject = audit_subject(id, label);
            audit::record(transaction, seconds(now), "token created", &subject, &by)?;
            Ok(TokenId(id))
        })
    }

    /// Returns all tokens, the newest first, including those that admit nobody any more.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn tokens(&self) -> Result<Vec<TokenInfo>, StoreError> {
        self.read(|connection| {
            let mut statement = connection.prepare_cached(
                "SELECT id, label, uses, used, created, expires, withdrawn, tags, devices FROM token
                 ORDER BY id DESC",
            )?;
            let mut rows = statement.query([])?;
            let mut tokens = Vec::new();
            while let Some(row) = rows.next()? {
                tokens.push(TokenInfo {
                    id: TokenId(row.get(0)?),
                    label: row.get(1)?,
                    uses: row.get(2)?,
                    used: unsigned(row.get(3)?),
                    created: unsigned(row.get(4)?),
                    expires: row.get::<_, Option<i64>>(5)?.map(unsigned),
                    withdrawn: row.get::<_, Option<i64>>(6)?.map(unsigned),
                    tags: from_json(&row.get::<_, String>(7)?, "tags")?,
                    devices: row.get(8)?,
                });
            }
            Ok(tokens)
        })
    }

    /// Withdraws a token; members that it admitted stay. New devices behind them need approval. Returns whether there was a token that had
    /// not been withdrawn before.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn withdraw_token(&self, id: TokenId, by: &Actor, now: u64) -> Result<bool, StoreError> {
        let by = by.clone();
        self.change(move |transaction| {
            let changed = transaction.execute(
                "UPDATE token SET withdrawn = ?2 WHERE id = ?1 AND withdrawn IS NULL",
                (id.0, seconds(now)),
            )?;
            if changed == 0 {
                return Ok(false);
            }
            let sql = "SELECT label FROM token WHERE id = ?1";
            let label: Option<String> = value(transaction, sql, [id.0])?;
            let subject = audit_subject(id.0, label.as_deref());
            audit::record(transaction, seconds(now), "token withdrawn", &subject, &by)?;
            Ok(true)
        })
    }
}

/// A token that a join refers to.
pub(super) struct Found {
    pub id: i64,
    /// It has admitted as many hosts as it may.
    pub used_up: bool,
    /// A JSON array.
    pub tags: String,
}

/// Returns the token with this digest, unless it has expired or was withdrawn.
pub(super) fn find(
    connection: &Connection,
    digest: &Digest,
    at: i64,
) -> Result<Option<Found>, StoreError> {
    let sql = "SELECT id, used >= ifnull(uses, used + 1), tags FROM token
         WHERE digest = ?1 AND withdrawn IS NULL AND ifnull(expires > ?2, 1)";
    first(connection, sql, (digest.0, at), |row| {
        Ok(Found {
            id: row.get(0)?,
            used_up: row.get(1)?,
            tags: row.get(2)?,
        })
    })
}

/// Counts a use of the token.
pub(super) fn count_use(connection: &Connection, id: i64) -> Result<(), StoreError> {
    connection.execute("UPDATE token SET used = used + 1 WHERE id = ?1", [id])?;
    Ok(())
}

/// Returns the subject of log entries about a token.
fn audit_subject(id: i64, label: Option<&str>) -> String {
    match label {
        Some(label) => format!("{id} ({label})"),
        None => id.to_string(),
    }
}

pub(super) fn to_json<T: serde::Serialize>(values: &[T]) -> Result<String, StoreError> {
    serde_json::to_string(values).map_err(|_| StoreError::Corrupt("lists"))
}

pub(super) fn from_json<T: serde::de::DeserializeOwned>(
    text: &str,
    field: &'static str,
) -> Result<Vec<T>, StoreError> {
    serde_json::from_str(text).map_err(|_| StoreError::Corrupt(field))
}
