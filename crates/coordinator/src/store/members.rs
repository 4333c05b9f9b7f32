//! Members: endpoints, keys, activity, and removal.

use std::collections::BTreeMap;

use rusqlite::{Connection, Row, Transaction};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Digest, Endpoints, MAX_ENDPOINTS, MAX_RELAYED, Member, Name, Networks};

use super::devices::{self, APPROVED, DeviceInfo};
use super::policy::Visibility;
use super::tokens::{from_json, to_json};
use super::{
    Actor, Store, StoreError, audit, first, networks_of, next_revision, numbers, seconds, unsigned,
    value,
};

/// Minimum interval at which a member's activity is recorded, in seconds.
const SEEN_INTERVAL: i64 = 60;

/// Log entry of a new key.
const KEY_CHANGED: &str = "key changed";
/// Maximum number of new keys of one member within an hour.
const MAX_KEYS_PER_HOUR: u32 = 10;

/// Id of a member in this store. Ids are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub(crate) i64);

/// Reference to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberRef<'a> {
    /// Authenticated by its credential.
    Id(MemberId),
    /// Current owner of this name.
    Name(&'a Name),
}

/// A member as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// Number of the member, which determines its addresses: 1 to [`Networks::capacity`].
    pub number: u32,
    /// The member as others receive it.
    pub member: Member,
    /// Devices behind it, approved or not.
    pub devices: Vec<DeviceInfo>,
    /// Time of joining, in seconds since 1970.
    pub joined: u64,
    /// Time of its latest activity, in seconds since 1970; up to a minute early. While it polls a
    /// `coordinator` that shares the mesh, the time at which it began to.
    pub seen: u64,
    /// Address of the coordinator that it polls now; `None` if it polls none, or if that is
    /// unknown, as for a mesh with one coordinator.
    pub coordinator: Option<String>,
}

impl Store {
    /// Returns the member that a credential belongs to.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`] if it belongs to none; [`StoreError::Unavailable`] if the copy
    /// may be behind; [`StoreError::Sqlite`].
    pub fn authenticate(&self, credential: &Digest) -> Result<MemberId, StoreError> {
        self.read_latest(|connection| {
            with_credential(connection, credential)?.ok_or(StoreError::NotAMember)
        })
    }

    /// Returns the member that a credential belongs to in the local copy. `None` may be a member
    /// that has just joined at another coordinator.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn authenticate_locally(
        &self,
        credential: &Digest,
    ) -> Result<Option<MemberId>, StoreError> {
        self.read(|connection| with_credential(connection, credential))
    }

    /// Sets the endpoints of a member, the best first. Returns whether they have changed; if not,
    /// nobody is notified.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`]: more than [`MAX_ENDPOINTS`] or [`MAX_RELAYED`]; [`StoreError::NotAMember`];
    /// [`StoreError::Sqlite`].
    pub fn set_endpoints(
        &self,
        id: MemberId,
        wanted: &Endpoints,
        now: u64,
    ) -> Result<bool, StoreError> {
        if wanted.endpoints.len() > MAX_ENDPOINTS {
            return Err(StoreError::OutOfBounds(
                "a member may have at most 16 endpoints",
            ));
        }
        if wanted.relayed.len() > MAX_RELAYED {
            return Err(StoreError::OutOfBounds(
                "a member may have at most 4 relayed addresses",
            ));
        }
        let (endpoints, relayed) = (to_json(&wanted.endpoints)?, to_json(&wanted.relayed)?);
        let known: Option<(String, String)> = self.read(|connection| {
            let sql = "SELECT endpoints, relayed FROM member WHERE id = ?1";
            first(connection, sql, [id.0], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
        })?;
        let encoded = (endpoints, relayed);
        if known.ok_or(StoreError::NotAMember)? == encoded {
            return Ok(false);
        }
        self.change(move |transaction| {
            let revision = next_revision(transaction)?;
            let changed = transaction.execute(
                "UPDATE member SET endpoints = ?2, relayed = ?3, revision = ?4 WHERE id = ?1",
                (id.0, &encoded.0, &encoded.1, revision),
            )?;
            match changed {
                0 => Err(StoreError::NotAMember),
                _ => record_seen(transaction, id, seconds(now)).map(|()| true),
            }
        })
    }

    /// Replaces the key of a member; returns whether it has changed. Number, name, tags and
    /// credential stay. Others receive a removal of the old key and a new member with the same name
    /// and addresses.
    ///
    /// # Errors
    /// [`StoreError::KeyTaken`] if another member has the key; [`StoreError::TooManyKeys`], because
    /// removed keys are kept forever; [`StoreError::NotAMember`]; [`StoreError::Sqlite`].
    pub fn set_key(
        &self,
        id: MemberId,
        key: &PublicKey,
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        let own = move |connection: &Connection| {
            let sql = "SELECT public_key, name FROM member WHERE id = ?1";
            let row = |row: &Row<'_>| Ok((row.get::<_, [u8; 32]>(0)?, row.get::<_, String>(1)?));
            first(connection, sql, [id.0], row)?.ok_or(StoreError::NotAMember)
        };
        // Members send their key at each start; mostly it has not changed.
        if self.read(own)?.0 == *key.as_bytes() {
            return Ok(false);
        }
        let (key, by, now) = (*key, by.clone(), seconds(now));
        self.change(move |transaction| {
            let (former, name) = own(transaction)?;
            // A concurrent request has set it.
            if former == *key.as_bytes() {
                return Ok(false);
            }
            let sql = "SELECT EXISTS (SELECT 1 FROM member WHERE public_key = ?1)";
            if value(transaction, sql, [key.as_bytes()])? {
                return Err(StoreError::KeyTaken { key });
            }
            let recent = audit::count_since(transaction, KEY_CHANGED, &name, now - 3600)?;
            if recent >= MAX_KEYS_PER_HOUR {
                return Err(StoreError::TooManyKeys {
                    most: MAX_KEYS_PER_HOUR,
                });
            }
            record_return(transaction, key.as_bytes())?;
            // Two revisions, because each is unique. One answer has both unless it ends between
            // them.
            let gone = next_revision(transaction)?;
            let sql = format!(
                "INSERT INTO removed (public_key, revision, name, tags, devices)
                 SELECT public_key, ?2, name, tags, {APPROVED} FROM member WHERE id = ?1"
            );
            transaction.execute(&sql, (id.0, gone))?;
            let new = next_revision(transaction)?;
            let sql = "UPDATE member SET public_key = ?2, revision = ?3 WHERE id = ?1";
            transaction.execute(sql, (id.0, key.as_bytes(), new))?;
            audit::record(transaction, now, KEY_CHANGED, &name, &by)?;
            Ok(true)
        })
    }

    /// Records the activity of a member, at most once a minute; with a shared mesh, that it polls
    /// here.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`], [`StoreError::Sqlite`].
    pub fn touch(&self, id: MemberId, now: u64) -> Result<(), StoreError> {
        let now = seconds(now);
        let seen: Option<i64> = self.read(|connection| {
            let sql = "SELECT ifnull((SELECT at FROM seen WHERE member = id), joined) FROM member
                     WHERE id = ?1";
            first(connection, sql, [id.0], |row| row.get(0))
        })?;
        let seen = seen.ok_or(StoreError::NotAMember)?;
        if let Some(replica) = self.replica() {
            replica.note_poll(id.0, unsigned(now));
            return Ok(());
        }
        if now < seen.saturating_add(SEEN_INTERVAL) {
            return Ok(());
        }
        self.change_local(|transaction| record_seen(transaction, id, now))
    }

    /// Returns the key of a member, and the id of the member with another key; `None` if there is
    /// none that the first may talk to.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`] if the first is no member; [`StoreError::Sqlite`].
    pub fn pair(
        &self,
        id: MemberId,
        other: &PublicKey,
    ) -> Result<(PublicKey, Option<MemberId>), StoreError> {
        self.read(|connection| {
            let sql = "SELECT public_key FROM member WHERE id = ?1";
            let own: Option<[u8; 32]> = first(connection, sql, [id.0], |row| row.get(0))?;
            let own = own.ok_or(StoreError::NotAMember)?;
            let visibility = Visibility::new(self, connection, id);
            let mut statement = connection.prepare_cached(
                "SELECT id, name, tags, devices FROM member WHERE public_key = ?1",
            )?;
            let mut rows = statement.query([other.as_bytes()])?;
            let other = match rows.next()? {
                Some(row) if visibility.sees_row(row, 1)? => Some(MemberId(row.get(0)?)),
                _ => None,
            };
            Ok((PublicKey::from_bytes(own), other))
        })
    }

    /// Removes a member: its credential becomes invalid, its name is free, its number is reused
    /// after all numbers that no member has had, and others are notified. Returns whether there was
    /// such a member.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn remove(&self, member: MemberRef<'_>, by: &Actor, now: u64) -> Result<bool, StoreError> {
        // A host can remove only itself.
        let change = match by {
            Actor::Host(_) => "left",
            Actor::Operator(_) => "removed",
        };
        let by = by.clone();
        let (id, name) = match member {
            MemberRef::Id(id) => (Some(id.0), None),
            MemberRef::Name(name) => (None, Some(name.to_string())),
        };
        self.change(move |transaction| {
            let sql = "SELECT id, name, number FROM member WHERE id = ?1 OR name = ?2";
            let row = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
            let found: Option<(i64, String, u32)> = first(transaction, sql, (id, &name), row)?;
            let Some((id, name, number)) = found else {
                return Ok(false);
            };
            let revision = next_revision(transaction)?;
            transaction.execute(
                &format!(
                    "INSERT INTO removed (public_key, revision, name, tags, devices)
                     SELECT public_key, ?2, name, tags, {APPROVED} FROM member WHERE id = ?1"
                ),
                (id, revision),
            )?;
            numbers::free(transaction, number, revision, None)?;
            devices::free_all(transaction, id)?;
            transaction.execute("DELETE FROM member WHERE id = ?1", [id])?;
            transaction.execute("DELETE FROM seen WHERE member = ?1", [id])?;
            audit::record(transaction, seconds(now), change, &name, &by)?;
            Ok(true)
        })
    }

    /// Returns all members in the order of their numbers.
    ///
    /// # Errors
    /// [`StoreError::NoNetworks`], [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn members(&self) -> Result<Vec<MemberInfo>, StoreError> {
        let values = |folder| {
            let replica = self.replica();
            replica.map_or(Ok(BTreeMap::new()), |replica| replica.member_values(folder))
        };
        let (present, seen) = (values("present")?, values("seen")?);
        self.read(|connection| {
            let networks = networks_of(connection)?.ok_or(StoreError::NoNetworks)?;
            let mut statement = connection.prepare_cached(
                "SELECT number, name, public_key, endpoints, relayed, tags, devices, joined, ifnull(at, joined), member.id
                 FROM member LEFT JOIN seen ON seen.member = member.id ORDER BY number",
            )?;
            let mut rows = statement.query([])?;
            let mut members = Vec::new();
            while let Some(row) = rows.next()? {
                let id = row.get(9)?;
                let last_seen = seen.get(&id).and_then(|seen| seen.parse().ok());
                members.push(MemberInfo {
                    number: row.get(0)?,
                    member: member_of(row, &networks)?,
                    devices: devices::infos(&row.get::<_, String>(6)?, &networks)?,
                    joined: unsigned(row.get(7)?),
                    seen: last_seen.unwrap_or(unsigned(row.get(8)?)),
                    coordinator: present.get(&id).cloned(),
                });
            }
            Ok(members)
        })
    }
}

/// Records that a removed key belongs to a member again. Others then receive a member instead of a
/// removal; those that saw the old one and do not see the new one receive a removal.
pub(super) fn record_return(
    transaction: &Transaction<'_>,
    key: &[u8; 32],
) -> Result<(), StoreError> {
    transaction.execute(
        "INSERT INTO former (revision, member, public_key, name, tags, devices)
         SELECT revision, 0, public_key, name, tags, devices FROM removed WHERE public_key = ?1",
        [key],
    )?;
    transaction.execute("DELETE FROM removed WHERE public_key = ?1", [key])?;
    Ok(())
}

fn with_credential(
    connection: &Connection,
    credential: &Digest,
) -> Result<Option<MemberId>, StoreError> {
    let sql = "SELECT id FROM member WHERE credential = ?1";
    let id = first(connection, sql, [credential.0], |row| row.get(0))?;
    Ok(id.map(MemberId))
}

/// Records the activity of a member.
fn record_seen(transaction: &Transaction<'_>, id: MemberId, at: i64) -> Result<(), StoreError> {
    transaction.execute(
        "INSERT INTO seen (member, at) VALUES (?1, ?2)
         ON CONFLICT DO UPDATE SET at = max(at, excluded.at)",
        (id.0, at),
    )?;
    Ok(())
}

/// Reads a member from a row that begins with number, name, key, endpoints, relayed addresses, tags
/// and devices.
pub(super) fn member_of(row: &Row<'_>, networks: &Networks) -> Result<Member, StoreError> {
    let addresses = networks.addresses(row.get(0)?);
    let name = row.get::<_, String>(1)?.parse::<Name>();
    Ok(Member {
        name: name.map_err(|_| StoreError::Corrupt("names"))?,
        public_key: PublicKey::from_bytes(row.get(2)?),
        addresses: addresses.ok_or(StoreError::Corrupt("numbers"))?.to_vec(),
        endpoints: from_json(&row.get::<_, String>(3)?, "endpoints")?,
        relayed: from_json(&row.get::<_, String>(4)?, "relayed addresses")?,
        tags: from_json(&row.get::<_, String>(5)?, "tags")?,
        devices: devices::approved(&row.get::<_, String>(6)?, networks)?,
    })
}
