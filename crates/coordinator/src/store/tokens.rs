//! Join tokens. The store keeps their digests only.

use seikan_proto::mesh::{Digest, MAX_TAGS, Name};
use serde::{Deserialize, Serialize};

use super::rows::{Bytes, Mesh, Term, TokenRow};
use super::{Actor, Store, StoreError, audit};

/// Maximum length of a label, in characters.
const MAX_LABEL: usize = 100;

/// Number of a token, shown in place of the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
        self.is_in_force(now) && !self.is_used_up()
    }

    /// Returns whether it has neither expired nor been withdrawn.
    fn is_in_force(&self, now: u64) -> bool {
        self.withdrawn.is_none() && self.expires.is_none_or(|end| now < end)
    }

    /// Returns whether the token has admitted its maximum number of hosts.
    pub(super) fn is_used_up(&self) -> bool {
        self.uses.is_some_and(|uses| self.used >= u64::from(uses))
    }

    /// Returns the subject of log entries about the token.
    fn subject(&self) -> String {
        match &self.label {
            Some(label) => format!("{} ({label})", self.id.0),
            None => self.id.0.to_string(),
        }
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
        let (digest, token, by) = (Bytes::from(*digest), token.clone(), by.clone());
        self.change(move |mesh| {
            // Tokens are never deleted.
            let last = mesh.token.all().next_back();
            let id = TokenId(last.map_or(0, |last| last.info.id.0).saturating_add(1));
            let info = TokenInfo {
                id,
                label: token.label.clone(),
                uses: token.uses,
                used: 0,
                created: now,
                expires: token.expires,
                withdrawn: None,
                tags: token.tags.clone(),
                devices: token.devices,
            };
            audit::record(mesh, now, "token created", &info.subject(), &by)?;
            mesh.put(TokenRow { digest, info })?;
            Ok(id)
        })
    }

    /// Returns all tokens, the newest first, including those that no longer admit hosts.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn tokens(&self) -> Result<Vec<TokenInfo>, StoreError> {
        self.read(|mesh| {
            let newest = mesh.token.all().rev();
            Ok(newest.map(|row| row.info.clone()).collect())
        })
    }

    /// Withdraws a token. Members that it admitted stay; new devices behind them need approval.
    /// Returns whether there was a token that had not been withdrawn before.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn withdraw_token(&self, id: TokenId, by: &Actor, now: u64) -> Result<bool, StoreError> {
        let by = by.clone();
        self.change(move |mesh| {
            let row = mesh.token.get(&id.0).cloned();
            let Some(mut row) = row.filter(|row| row.info.withdrawn.is_none()) else {
                return Ok(false);
            };
            row.info.withdrawn = Some(now);
            audit::record(mesh, now, "token withdrawn", &row.info.subject(), &by)?;
            mesh.put(row)?;
            Ok(true)
        })
    }
}

/// Returns the token with this digest, unless it has expired or was withdrawn.
pub(super) fn find(mesh: &Mesh, digest: Digest, at: u64) -> Option<&TokenRow> {
    let token = mesh.token.find(&Term::Digest(digest.into()));
    token.filter(|row| row.info.is_in_force(at))
}
