//! What a member does, and how it ceases to be one.

use rusqlite::{Connection, OptionalExtension as _, Row, Transaction};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Digest, Endpoints, MAX_ENDPOINTS, MAX_RELAYED, Member, Name, Networks};

use super::policy::Eyes;
use super::tokens::{from_json, to_json};
use super::{
    Actor, Backing, Store, StoreError, audit, networks_of, next_revision, seconds, unsigned,
};

/// How often it is noted that a member was heard of, in seconds.
const SEEN_EVERY: i64 = 60;

/// What a new key is called in the log.
const KEY_CHANGED: &str = "key changed";
/// New keys of one member within an hour, at most.
const MAX_KEYS_AN_HOUR: u32 = 10;

/// Stands for a member in this store. None is ever given to another member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub(crate) i64);

/// Which member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom<'a> {
    /// The one that showed its credential.
    Id(MemberId),
    /// The one that has this name now.
    Name(&'a Name),
}

/// A member as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// Its place in the networks, 1 to [`Networks::capacity`].
    pub number: u32,
    /// As the others know it.
    pub member: Member,
    /// When it joined, in seconds since 1970.
    pub joined: u64,
    /// When it was last heard of, in seconds since 1970; up to a minute too early, or if it asks `at` a coordinator when it began to.
    pub seen: u64,
    /// The coordinator that it asks now, by the address that members have for it; `None` if it asks none, or if that is not known, as of
    /// a mesh with one coordinator.
    pub at: Option<String>,
}

impl Store {
    /// Whose credential this is.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`] if nobody's, or not any more; [`StoreError::Unavailable`] if that cannot be said for certain;
    /// [`StoreError::Sqlite`].
    pub fn authenticate(&self, credential: &Digest) -> Result<MemberId, StoreError> {
        self.look_surely(|connection| {
            with_credential(connection, credential)?.ok_or(StoreError::NotAMember)
        })
    }

    /// The same by what is known here alone: `None` may be a member that others have made one just now.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn recognise(&self, credential: &Digest) -> Result<Option<MemberId>, StoreError> {
        self.look(|connection| with_credential(connection, credential))
    }

    /// Says where a member may be reached, the best first; whether that is different from before. The
    /// same again is no change: nobody is told of it.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`]: more than [`MAX_ENDPOINTS`] or [`MAX_RELAYED`]; [`StoreError::NotAMember`];
    /// [`StoreError::Sqlite`].
    pub fn set_endpoints(
        &self,
        id: MemberId,
        told: &Endpoints,
        now: u64,
    ) -> Result<bool, StoreError> {
        if told.endpoints.len() > MAX_ENDPOINTS {
            return Err(StoreError::OutOfBounds("a member has 16 endpoints at most"));
        }
        if told.relayed.len() > MAX_RELAYED {
            return Err(StoreError::OutOfBounds(
                "a member has 4 relayed addresses at most",
            ));
        }
        let (endpoints, relayed) = (to_json(&told.endpoints)?, to_json(&told.relayed)?);
        let known: Option<(String, String)> = self.look(|connection| {
            let mut statement =
                connection.prepare_cached("SELECT endpoints, relayed FROM member WHERE id = ?1")?;
            let row = statement.query_row([id.0], |row| Ok((row.get(0)?, row.get(1)?)));
            Ok(row.optional()?)
        })?;
        let told = (endpoints, relayed);
        if known.ok_or(StoreError::NotAMember)? == told {
            return Ok(false);
        }
        self.change(move |transaction| {
            let revision = next_revision(transaction)?;
            let changed = transaction.execute(
                "UPDATE member SET endpoints = ?2, relayed = ?3, revision = ?4 WHERE id = ?1",
                (id.0, &told.0, &told.1, revision),
            )?;
            match changed {
                0 => Err(StoreError::NotAMember),
                _ => heard(transaction, id, seconds(now)).map(|()| true),
            }
        })
    }

    /// Gives a member another key; whether it is another. It stays who it is: number, name, tags and credential. The others hear of it
    /// as of one who is gone and one who is new with the same name and addresses.
    ///
    /// # Errors
    /// [`StoreError::KeyTaken`]: it is another member's; [`StoreError::TooManyKeys`]: what is gone is remembered for good;
    /// [`StoreError::NotAMember`]; [`StoreError::Sqlite`].
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
            let own = connection.query_row(sql, [id.0], row).optional()?;
            own.ok_or(StoreError::NotAMember)
        };
        // Members say so whenever they start: mostly nothing is to be written.
        if self.look(own)?.0 == *key.as_bytes() {
            return Ok(false);
        }
        let (key, by, now) = (*key, by.clone(), seconds(now));
        self.change(move |transaction| {
            let (former, name) = own(transaction)?;
            // Told twice at once.
            if former == *key.as_bytes() {
                return Ok(false);
            }
            let sql = "SELECT EXISTS (SELECT 1 FROM member WHERE public_key = ?1)";
            if transaction.query_row(sql, [key.as_bytes()], |row| row.get(0))? {
                return Err(StoreError::KeyTaken { key });
            }
            let lately = audit::count_since(transaction, KEY_CHANGED, &name, now - 3600)?;
            if lately >= MAX_KEYS_AN_HOUR {
                return Err(StoreError::TooManyKeys {
                    most: MAX_KEYS_AN_HOUR,
                });
            }
            comes_again(transaction, key.as_bytes())?;
            // One after the other, as no two have the same revision; together in an answer unless that ends between them.
            let gone = next_revision(transaction)?;
            let sql = "INSERT INTO removed (public_key, revision, name, tags)
                       SELECT public_key, ?2, name, tags FROM member WHERE id = ?1";
            transaction.execute(sql, (id.0, gone))?;
            let new = next_revision(transaction)?;
            let sql = "UPDATE member SET public_key = ?2, revision = ?3 WHERE id = ?1";
            transaction.execute(sql, (id.0, key.as_bytes(), new))?;
            audit::note(transaction, now, KEY_CHANGED, &name, &by)?;
            Ok(true)
        })
    }

    /// Notes that a member was heard of, once a minute at most; for coordinators that share a mesh, that it asks here.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`], [`StoreError::Sqlite`].
    pub fn touch(&self, id: MemberId, now: u64) -> Result<(), StoreError> {
        let now = seconds(now);
        let seen: Option<i64> = self.look(|connection| {
            let mut statement = connection.prepare_cached(
                "SELECT ifnull((SELECT at FROM seen WHERE member = id), joined) FROM member
                     WHERE id = ?1",
            )?;
            Ok(statement.query_row([id.0], |row| row.get(0)).optional()?)
        })?;
        let seen = seen.ok_or(StoreError::NotAMember)?;
        if let Backing::Etcd(replica) = &self.backing {
            replica.asks(id.0, unsigned(now));
            return Ok(());
        }
        if now < seen.saturating_add(SEEN_EVERY) {
            return Ok(());
        }
        self.note(|transaction| heard(transaction, id, now))
    }

    /// The key of a member, and the member with another key; `None` if there is none that the first may talk to.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`] if the first is none; [`StoreError::Sqlite`].
    pub fn pair(
        &self,
        id: MemberId,
        other: &PublicKey,
    ) -> Result<(PublicKey, Option<MemberId>), StoreError> {
        self.look(|connection| {
            let mut statement =
                connection.prepare_cached("SELECT public_key FROM member WHERE id = ?1")?;
            let own: Option<[u8; 32]> = statement.query_row([id.0], |row| row.get(0)).optional()?;
            let own = own.ok_or(StoreError::NotAMember)?;
            let eyes = Eyes::new(self, connection, id);
            let mut statement = connection
                .prepare_cached("SELECT id, name, tags FROM member WHERE public_key = ?1")?;
            let mut rows = statement.query([other.as_bytes()])?;
            let other = match rows.next()? {
                Some(row) if eyes.see(row, 1)? => Some(MemberId(row.get(0)?)),
                _ => None,
            };
            Ok((PublicKey::from_bytes(own), other))
        })
    }

    /// Ends a membership: the credential is good for nothing from now on, the name is free, the number
    /// will be after all that were never anybody's, and the others hear of it. Whether there was such
    /// a member.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn remove(&self, whom: Whom<'_>, by: &Actor, now: u64) -> Result<bool, StoreError> {
        // A host can only remove itself.
        let what = match by {
            Actor::Host(_) => "left",
            Actor::Operator(_) => "removed",
        };
        let by = by.clone();
        let whom = match whom {
            Whom::Id(id) => Ok(id),
            Whom::Name(name) => Err(name.clone()),
        };
        self.change(move |transaction| {
            let found = match &whom {
                Ok(id) => {
                    let sql = "SELECT id, name FROM member WHERE id = ?1";
                    transaction.query_row(sql, [id.0], id_and_name)
                }
                Err(name) => {
                    let sql = "SELECT id, name FROM member WHERE name = ?1";
                    transaction.query_row(sql, [name.as_str()], id_and_name)
                }
            };
            let Some((id, name)) = found.optional()? else {
                return Ok(false);
            };
            let revision = next_revision(transaction)?;
            transaction.execute(
                "INSERT INTO removed (public_key, revision, name, tags)
                 SELECT public_key, ?2, name, tags FROM member WHERE id = ?1",
                (id, revision),
            )?;
            transaction.execute(
                "INSERT INTO freed (number, since) SELECT number, ?2 FROM member WHERE id = ?1",
                (id, revision),
            )?;
            transaction.execute("DELETE FROM member WHERE id = ?1", [id])?;
            transaction.execute("DELETE FROM seen WHERE member = ?1", [id])?;
            audit::note(transaction, seconds(now), what, &name, &by)?;
            Ok(true)
        })
    }

    /// All members by their numbers.
    ///
    /// # Errors
    /// [`StoreError::NoNetworks`], [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn members(&self) -> Result<Vec<MemberInfo>, StoreError> {
        let (present, seen) = match &self.backing {
            Backing::File(_) => Default::default(),
            Backing::Etcd(replica) => (replica.of_members("present")?, replica.of_members("seen")?),
        };
        self.look(|connection| {
            let networks = networks_of(connection)?.ok_or(StoreError::NoNetworks)?;
            let mut statement = connection.prepare_cached(
                "SELECT number, name, public_key, endpoints, relayed, tags, joined, ifnull(at, joined), member.id
                 FROM member LEFT JOIN seen ON seen.member = member.id ORDER BY number",
            )?;
            let mut rows = statement.query([])?;
            let mut members = Vec::new();
            while let Some(row) = rows.next()? {
                let id = row.get(8)?;
                let told = seen.get(&id).and_then(|seen| seen.parse().ok());
                members.push(MemberInfo {
                    number: row.get(0)?,
                    member: member_of(row, &networks)?,
                    joined: unsigned(row.get(6)?),
                    seen: told.unwrap_or(unsigned(row.get(7)?)),
                    at: present.get(&id).cloned(),
                });
            }
            Ok(members)
        })
    }
}

/// Who comes again under a key is told of as a member, not as somebody who went; who saw it before and does not now hears that it went.
pub(super) fn comes_again(transaction: &Transaction<'_>, key: &[u8; 32]) -> Result<(), StoreError> {
    transaction.execute(
        "INSERT INTO former (revision, member, public_key, name, tags)
         SELECT revision, 0, public_key, name, tags FROM removed WHERE public_key = ?1",
        [key],
    )?;
    transaction.execute("DELETE FROM removed WHERE public_key = ?1", [key])?;
    Ok(())
}

fn with_credential(
    connection: &Connection,
    credential: &Digest,
) -> Result<Option<MemberId>, StoreError> {
    let mut statement = connection.prepare_cached("SELECT id FROM member WHERE credential = ?1")?;
    let id = statement.query_row([credential.0], |row| row.get(0));
    Ok(id.optional()?.map(MemberId))
}

/// Notes that a member was heard of.
fn heard(transaction: &Transaction<'_>, id: MemberId, at: i64) -> Result<(), StoreError> {
    transaction.execute(
        "INSERT INTO seen (member, at) VALUES (?1, ?2)
         ON CONFLICT DO UPDATE SET at = max(at, excluded.at)",
        (id.0, at),
    )?;
    Ok(())
}

fn id_and_name(row: &Row<'_>) -> rusqlite::Result<(i64, String)> {
    Ok((row.get(0)?, row.get(1)?))
}

/// The member of a row that begins with its number, name, key, endpoints, relayed addresses and tags.
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
    })
}
