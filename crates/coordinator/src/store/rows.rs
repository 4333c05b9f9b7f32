//! The rows of a mesh, in memory: typed, by their keys, and by further terms that are unique.
//!
//! Outside, a row is a key `TABLE/KEY` and a JSON object, in [`super::file`] or in [`super::etcd`].
//! A change works on the typed rows. The journal of its writes has the [`Rows`] to store, and undoes
//! a change that fails.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Digest, Endpoints, Name, Networks, Party, Pin, Policy, RelayAddress};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::audit::{AuditEntry, KEPT, KEPT_REFUSED};
use super::devices::{FormerDevice, StoredDevice};
use super::{RelayInfo, StoreError, TokenInfo};

/// Rows by `TABLE/KEY`, as JSON; `None`: deleted.
pub(super) type Rows = BTreeMap<String, Option<String>>;

/// A type of rows.
pub(super) trait Row: Serialize + DeserializeOwned {
    /// The name of the table.
    const TABLE: &str;
    type Key: Clone + Ord + ToString + FromStr;

    fn key(&self) -> Self::Key;
    /// The table of these rows.
    fn table(mesh: &mut Mesh) -> &mut Table<Self>;
    /// Terms by which the row is found. No two rows of a table have a term in common.
    fn terms(&self) -> Vec<Term>;
}

/// A value by which a row is found, see [`Row::terms`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Term {
    Name(Name),
    Number(u32),
    PublicKey(Bytes),
    /// Digest of a token or a credential.
    Digest(Bytes),
    /// Position in an order: a revision, or the number of a log entry.
    Order(u64),
    /// Id of a member that still has its key, and the revision of an earlier state of it.
    Earlier(i64, u64),
}

/// The rows of one type.
pub(super) struct Table<T: Row> {
    rows: BTreeMap<T::Key, T>,
    terms: BTreeMap<Term, T::Key>,
}

impl<T: Row> Default for Table<T> {
    fn default() -> Table<T> {
        Table {
            rows: BTreeMap::new(),
            terms: BTreeMap::new(),
        }
    }
}

impl<T: Row> Table<T> {
    pub fn get(&self, key: &T::Key) -> Option<&T> {
        self.rows.get(key)
    }

    pub fn find(&self, term: &Term) -> Option<&T> {
        self.rows.get(self.terms.get(term)?)
    }

    /// Returns all rows in the order of their keys.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.rows.values()
    }

    /// Returns the rows whose terms are in a range, in their order.
    pub fn by_terms(&self, range: impl RangeBounds<Term>) -> impl DoubleEndedIterator<Item = &T> {
        let keys = self.terms.range(range).map(|(_, key)| key);
        keys.filter_map(|key| self.rows.get(key))
    }

    /// Returns the rows after a position in their order.
    pub fn ordered_after(&self, position: u64) -> impl DoubleEndedIterator<Item = &T> {
        let last = Bound::Included(Term::Order(u64::MAX));
        self.by_terms((Bound::Excluded(Term::Order(position)), last))
    }

    fn take(&mut self, key: &T::Key) -> Option<T> {
        let row = self.rows.remove(key)?;
        for term in row.terms() {
            self.terms.remove(&term);
        }
        Some(row)
    }

    /// Inserts a row; returns whether its terms are unique.
    fn insert(&mut self, row: T) -> bool {
        let key = row.key();
        let terms = row.terms();
        if terms.iter().any(|term| self.terms.contains_key(term)) {
            return false;
        }
        self.terms
            .extend(terms.into_iter().map(|term| (term, key.clone())));
        self.rows.insert(key, row);
        true
    }
}

macro_rules! tables {
    ($($table:ident: $row:ty, $key:ty, $key_of:expr, $terms_of:expr;)*) => {
        /// All rows of a mesh.
        #[derive(Default)]
        pub(super) struct Mesh {
            $(pub $table: Table<$row>,)*
            journal: Vec<Write>,
        }

        $(impl Row for $row {
            const TABLE: &str = stringify!($table);
            type Key = $key;

            fn key(&self) -> $key {
                let key_of: fn(&Self) -> $key = $key_of;
                key_of(self)
            }

            fn table(mesh: &mut Mesh) -> &mut Table<Self> {
                &mut mesh.$table
            }

            fn terms(&self) -> Vec<Term> {
                let terms_of: fn(&Self) -> Vec<Term> = $terms_of;
                terms_of(self)
            }
        })*

        impl Mesh {
            /// Returns all rows.
            pub fn rows(&self) -> Result<Rows, StoreError> {
                let mut rows = Rows::new();
                $(for row in self.$table.all() {
                    let key = name_of::<$row>(&row.key());
                    let json = to_json(&key, row)?;
                    rows.insert(key, Some(json));
                })*
                Ok(rows)
            }

            /// Replaces a row that is given as key and JSON.
            fn set(&mut self, key: &str, json: Option<&str>) -> Result<(), StoreError> {
                match key.split_once('/') {
                    $(Some((stringify!($table), text)) => self.set_in::<$row>(key, text, json),)*
                    _ => Err(corrupt(key)),
                }
            }
        }
    };
}

tables! {
    mesh: Head, u8, |_| 1, |_| vec![];
    policy: PolicyRow, u8, |_| 1, |_| vec![];
    relay: RelayRow, RelayAddress, |relay| relay.info.address.clone(), |_| vec![];
    token: TokenRow, i64, |token| token.info.id.0, |token| vec![Term::Digest(token.digest)];
    member: MemberRow, i64, |member| member.id, |member| vec![
        Term::Name(member.own.name.clone()),
        Term::Number(member.number),
        Term::PublicKey(member.public_key),
        Term::Digest(member.credential),
        Term::Order(member.revision),
    ];
    former: Former, u64, |former| former.revision, Former::terms;
    freed: Freed, u64, |freed| freed.since, |freed| vec![Term::Number(freed.number)];
    audit: Logged<KEPT>, u64, Logged::slot, |entry| vec![Term::Order(entry.id)];
    refused: Logged<KEPT_REFUSED>, u64, Logged::slot, |entry| vec![Term::Order(entry.id)];
    seen: Seen, i64, |seen| seen.member, |_| vec![];
}

/// Returns whether each coordinator of a shared mesh has its own row with this key.
pub(super) fn is_local(key: &str) -> bool {
    key.starts_with("refused/") || key.starts_with("seen/")
}

/// Values of the whole mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    /// `None` until they are set.
    pub networks: Option<Networks>,
    /// Revision of the latest change that members receive.
    pub revision: u64,
    /// Greatest number that a member or device has had.
    pub highest: u32,
    /// Greatest id of a member. Ids are never reused.
    pub last_member: i64,
    /// Pin by which members verify every coordinator of a shared mesh; `None` before the first
    /// coordinator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<Pin>,
}

/// The policy.
#[derive(Serialize, Deserialize)]
pub(super) struct PolicyRow {
    /// The policy, as the administrator wrote it.
    pub text: String,
    /// Revision of its latest change.
    pub revision: u64,
    #[serde(skip)]
    parsed: OnceLock<Arc<Policy>>,
}

impl PolicyRow {
    pub const fn new(text: String, revision: u64) -> PolicyRow {
        PolicyRow {
            text,
            revision,
            parsed: OnceLock::new(),
        }
    }

    /// Returns the policy, which is parsed once.
    pub fn policy(&self) -> Result<Arc<Policy>, StoreError> {
        if self.parsed.get().is_none() {
            let policy = Policy::parse(&self.text).map_err(|_| StoreError::Corrupt("policy"))?;
            // Another thread may have stored the same policy meanwhile.
            let _ = self.parsed.set(Arc::new(policy));
        }
        self.parsed.get().cloned().ok_or(StoreError::Interrupted)
    }
}

/// A relay. Its secret signs tickets, so it is stored in plain text.
#[derive(PartialEq, Serialize, Deserialize)]
pub(super) struct RelayRow {
    pub info: RelayInfo,
    pub secret: String,
}

/// A token.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct TokenRow {
    pub digest: Bytes,
    pub info: TokenInfo,
}

/// A current member.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct MemberRow {
    pub id: i64,
    pub number: u32,
    /// Name and tags.
    pub own: Party,
    pub public_key: Bytes,
    /// Digest of its credential.
    pub credential: Bytes,
    /// The token by which it has joined.
    pub token: i64,
    pub endpoints: Endpoints,
    /// Devices behind it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<StoredDevice>,
    /// Revision of its latest change.
    pub revision: u64,
    /// Time of joining, in seconds since 1970.
    pub joined: u64,
    #[serde(default, skip_serializing_if = "Recent::is_empty")]
    pub recent: Recent,
}

/// Times of a member's changes that are limited per hour, in seconds since 1970. They are part of
/// its row, so that no other member's changes displace them.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Recent {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<u64>,
    /// Changed reports of devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reports: Vec<u64>,
}

impl Recent {
    fn is_empty(&self) -> bool {
        *self == Recent::default()
    }
}

/// Adds a change to those of the last hour; returns whether there were fewer than `most`.
pub(super) fn is_within_hourly(times: &mut Vec<u64>, now: u64, most: usize) -> bool {
    times.retain(|at| *at > now.saturating_sub(3600));
    let is_allowed = times.len() < most;
    if is_allowed {
        times.push(now);
    }
    is_allowed
}

/// A member as it was before a change of its key, tags or devices, or before its removal. A member
/// that saw it and does not see the current one receives a removal, whenever it polls, so these
/// rows are kept forever.
#[derive(Serialize, Deserialize)]
pub(super) struct Former {
    /// Revision of the change that ended the membership.
    pub revision: u64,
    /// The id of the member if it still has the key; otherwise 0.
    pub member: i64,
    pub public_key: Bytes,
    /// Name and tags; `None`: unknown, so all members receive the removal.
    pub own: Option<Party>,
    /// Its approved devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<StoredDevice>,
}

impl Former {
    fn terms(&self) -> Vec<Term> {
        let mut terms = vec![Term::Order(self.revision)];
        if self.member != 0 {
            terms.push(Term::Earlier(self.member, self.revision));
        }
        terms
    }
}

/// A free number that a member or device has had.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Freed {
    /// Revision since which it is free.
    pub since: u64,
    pub number: u32,
    /// The device that had the number last, so that the device keeps it at another gateway; `None`:
    /// a member had it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<FormerDevice>,
}

/// An entry of a log, of which the newest `KEPT` are kept.
#[derive(Serialize, Deserialize)]
pub(super) struct Logged<const KEPT: u64> {
    pub id: u64,
    pub entry: AuditEntry,
}

impl<const KEPT: u64> Logged<KEPT> {
    fn slot(&self) -> u64 {
        self.id % KEPT
    }
}

/// Time of a member's latest activity.
#[derive(Serialize, Deserialize)]
pub(super) struct Seen {
    pub member: i64,
    /// Time in seconds since 1970.
    pub at: u64,
}

/// A public key, or a digest of a secret: hexadecimal digits in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Bytes(#[serde(with = "hex::serde")] pub [u8; 32]);

impl From<&PublicKey> for Bytes {
    fn from(key: &PublicKey) -> Bytes {
        Bytes(*key.as_bytes())
    }
}

impl From<Bytes> for PublicKey {
    fn from(bytes: Bytes) -> PublicKey {
        PublicKey::from_bytes(bytes.0)
    }
}

impl From<Digest> for Bytes {
    fn from(digest: Digest) -> Bytes {
        Bytes(digest.0)
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Leave out the rows: they contain secrets of relays.
        f.debug_struct("Mesh").finish_non_exhaustive()
    }
}

/// A row that was written.
struct Write {
    key: String,
    before: Option<String>,
    after: Option<String>,
}

impl Mesh {
    /// Returns the mesh that has these rows.
    pub fn of(rows: Rows) -> Result<Mesh, StoreError> {
        let mut mesh = Mesh::default();
        for (key, row) in rows {
            mesh.set(&key, row.as_deref())?;
            // The journal of a large mesh would need as much memory as the mesh.
            mesh.journal.clear();
        }
        Ok(mesh)
    }

    pub fn head(&self) -> Head {
        self.mesh.get(&1).copied().unwrap_or_default()
    }

    /// Returns the networks; `None` until they are set.
    pub fn networks(&self) -> Result<Option<Networks>, StoreError> {
        let networks = self.head().networks;
        let checked = networks.map(|networks| Networks::new(networks.v4, networks.v6));
        checked
            .transpose()
            .map_err(|_| StoreError::Corrupt("networks"))
    }

    pub fn policy(&self) -> &PolicyRow {
        static NONE: PolicyRow = PolicyRow::new(String::new(), 0);
        self.policy.get(&1).unwrap_or(&NONE)
    }

    /// Increments the revision and returns it.
    pub fn next_revision(&mut self) -> Result<u64, StoreError> {
        let revision = self.head().revision.saturating_add(1);
        self.put(Head {
            revision,
            ..self.head()
        })?;
        Ok(revision)
    }

    /// Inserts a row, or replaces the one with its key.
    pub fn put<T: Row>(&mut self, row: T) -> Result<(), StoreError> {
        self.replace(row.key(), Some(row))
    }

    /// Deletes a row, if there is one.
    pub fn delete<T: Row>(&mut self, key: T::Key) -> Result<(), StoreError> {
        self.replace::<T>(key, None)
    }

    fn replace<T: Row>(&mut self, key: T::Key, row: Option<T>) -> Result<(), StoreError> {
        let name = name_of::<T>(&key);
        let json = |row: Option<&T>| row.map(|row| to_json(&name, row)).transpose();
        let after = json(row.as_ref())?;
        let table = T::table(self);
        let before = json(table.take(&key).as_ref())?;
        let is_unique = row.is_none_or(|row| table.insert(row));
        if before.is_some() || after.is_some() {
            let key = name.clone();
            self.journal.push(Write { key, before, after });
        }
        if is_unique {
            Ok(())
        } else {
            Err(corrupt(&name))
        }
    }

    fn set_in<T: Row>(
        &mut self,
        name: &str,
        key: &str,
        json: Option<&str>,
    ) -> Result<(), StoreError> {
        let invalid = || corrupt(name);
        let parsed: T::Key = key.parse().map_err(|_| invalid())?;
        let row: Option<T> = json
            .map(serde_json::from_str)
            .transpose()
            .map_err(|_| invalid())?;
        let has_key = |row: &T| row.key() == parsed;
        if parsed.to_string() != key || !row.as_ref().is_none_or(has_key) {
            return Err(invalid());
        }
        self.replace(parsed, row)
    }

    /// Applies rows that are written already: all or, after an error, none. Deletes first, so that
    /// a term can move from one row to another.
    pub fn apply(&mut self, rows: &Rows) -> Result<(), StoreError> {
        let mut apply = || {
            for key in rows.keys() {
                self.set(key, None)?;
            }
            for (key, row) in rows.iter().filter(|(_, row)| row.is_some()) {
                self.set(key, row.as_deref())?;
            }
            Ok(())
        };
        let applied = apply();
        if applied.is_err() {
            self.undo(0);
        }
        self.journal.clear();
        applied
    }

    /// Number of writes since the last [`Self::undo`] or [`Self::forget`].
    pub fn writes(&self) -> usize {
        self.journal.len()
    }

    /// Returns the rows that the writes have changed.
    pub fn changed(&self) -> Rows {
        let mut changed: BTreeMap<&String, (&Option<String>, &Option<String>)> = BTreeMap::new();
        for Write { key, before, after } in &self.journal {
            changed.entry(key).or_insert((before, after)).1 = after;
        }
        let changed = changed
            .into_iter()
            .filter(|(_, (before, after))| before != after);
        changed
            .map(|(key, (_, after))| (key.clone(), after.clone()))
            .collect()
    }

    /// Undoes all writes but the first ones.
    pub fn undo(&mut self, first: usize) {
        while self.journal.len() > first
            && let Some(Write { key, before, .. }) = self.journal.pop()
        {
            let length = self.journal.len();
            // The row was there before.
            let _ = self.set(&key, before.as_deref());
            self.journal.truncate(length);
        }
    }

    /// Keeps all writes.
    pub fn forget(&mut self) {
        self.journal.clear();
    }
}

fn name_of<T: Row>(key: &T::Key) -> String {
    format!("{}/{}", T::TABLE, key.to_string())
}

fn to_json<T: Row>(key: &str, row: &T) -> Result<String, StoreError> {
    serde_json::to_string(row).map_err(|_| corrupt(key))
}

pub(super) fn corrupt(key: &str) -> StoreError {
    StoreError::CorruptRow {
        // Bounded, because it is printed.
        key: key.chars().filter(|c| !c.is_control()).take(200).collect(),
    }
}
