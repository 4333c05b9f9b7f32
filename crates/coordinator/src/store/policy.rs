//! The policy text of the administrator, and the tags of members. Members enforce the policy.

use std::cell::OnceCell;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard};

use rusqlite::{Connection, Row};
use seikan_proto::mesh::policy::Sight;
use seikan_proto::mesh::{Device, MAX_TAGS, Member, Name, Networks, Party, Policy};

use super::devices::{self, APPROVED};
use super::tokens::{from_json, to_json};
use super::{
    Actor, MemberId, Store, StoreError, audit, first, next_revision, revision_of, seconds,
};
use crate::lock;

impl Store {
    /// Returns the text of the policy; empty if there is none.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn policy(&self) -> Result<String, StoreError> {
        self.read(|connection| Ok(text_of(connection)?.0))
    }

    /// Replaces the policy and notifies members; returns whether the text has changed.
    ///
    /// # Errors
    /// [`StoreError::Policy`] if the text cannot be parsed; [`StoreError::Sqlite`].
    pub fn set_policy(&self, text: &str, by: &Actor, now: u64) -> Result<bool, StoreError> {
        let policy = Policy::parse(text)?;
        let (text, by) = (text.to_owned(), by.clone());
        self.change(move |transaction| {
            if text_of(transaction)?.0 == text {
                return Ok(false);
            }
            let revision = next_revision(transaction)?;
            transaction.execute(
                "UPDATE policy SET text = ?1, revision = ?2",
                (&text, revision),
            )?;
            let subject = match policy.rules().len() {
                1 => "1 rule".to_owned(),
                count => format!("{count} rules"),
            };
            audit::record(transaction, seconds(now), "policy set", &subject, &by)?;
            Ok(true)
        })
    }

    /// Replaces the tags of a member and notifies members; returns whether they have changed.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`] for more than [`MAX_TAGS`]; [`StoreError::NotAMember`];
    /// [`StoreError::Sqlite`].
    pub fn set_tags(
        &self,
        name: &Name,
        tags: &[Name],
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        if tags.len() > MAX_TAGS {
            return Err(StoreError::OutOfBounds("a member may have at most 16 tags"));
        }
        let json = to_json(tags)?;
        let (name, tags, by) = (name.clone(), tags.to_vec(), by.clone());
        self.change(move |transaction| {
            let sql = "SELECT id, tags FROM member WHERE name = ?1";
            let known: Option<(i64, String)> = first(transaction, sql, [name.as_str()], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })?;
            let (id, known) = known.ok_or(StoreError::NotAMember)?;
            if known == json {
                return Ok(false);
            }
            let revision = next_revision(transaction)?;
            transaction.execute(
                &format!(
                    "INSERT INTO former (revision, member, public_key, name, tags, devices)
                     SELECT ?2, id, public_key, name, tags, {APPROVED} FROM member WHERE id = ?1"
                ),
                (id, revision),
            )?;
            devices::follow_tags(transaction, id, &tags)?;
            transaction.execute(
                "UPDATE member SET tags = ?2, revision = ?3 WHERE id = ?1",
                (id, &json, revision),
            )?;
            let tags: Vec<&str> = tags.iter().map(Name::as_str).collect();
            let subject = format!("{name}: {}", tags.join(" "));
            audit::record(transaction, seconds(now), "tags set", &subject, &by)?;
            Ok(true)
        })
    }
}

/// Maximum number of cached policies. A member that polls knows the latest one or the one before
/// it, unless it was away.
const MAX_CACHED: usize = 4;

/// Cache of parsed policies. It saves parsing at each poll, and keeps the former policy, whose
/// difference to the next one decides what members receive.
#[derive(Debug, Default)]
pub(super) struct PolicyCache(Mutex<VecDeque<CachedPolicy>>);

/// A cached policy.
#[derive(Debug)]
struct CachedPolicy {
    text: String,
    policy: Arc<Policy>,
    /// From its revision to the latest one at which it was seen in force.
    revisions: RangeInclusive<i64>,
}

impl CachedPolicy {
    fn is_in_force(&mut self, current: i64) {
        let (since, until) = (*self.revisions.start(), *self.revisions.end());
        self.revisions = since..=until.max(current);
    }
}

impl PolicyCache {
    /// Returns the policy with this text and revision, which is in force at the revision `current`.
    fn get(&self, text: String, since: i64, current: i64) -> Result<Arc<Policy>, StoreError> {
        let mut all = self.all();
        if let Some(last) = all.back_mut()
            && last.text == text
            && *last.revisions.start() == since
        {
            last.is_in_force(current);
            return Ok(Arc::clone(&last.policy));
        }
        let policy = Policy::parse(&text).map_err(|_| StoreError::Corrupt("policy"))?;
        let policy = Arc::new(policy);
        // After a restore from a backup, other changes may have the same revisions.
        all.retain(|known| *known.revisions.end() < since);
        if all.len() == MAX_CACHED {
            all.pop_front();
        }
        all.push_back(CachedPolicy {
            text,
            policy: Arc::clone(&policy),
            revisions: since..=current,
        });
        Ok(policy)
    }

    /// Records that the policy of this revision is in force at the revision `current`; returns
    /// whether it is cached.
    fn note(&self, since: i64, current: i64) -> bool {
        let mut all = self.all();
        let last = all.back_mut();
        let last = last.filter(|last| *last.revisions.start() == since);
        last.map(|last| last.is_in_force(current)).is_some()
    }

    /// Returns the policy that was in force at a revision, if it is cached.
    fn at(&self, revision: i64) -> Option<Arc<Policy>> {
        let all = self.all();
        let known = all.iter().find(|known| known.revisions.contains(&revision));
        known.map(|known| Arc::clone(&known.policy))
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<CachedPolicy>> {
        lock(&self.0)
    }
}

/// Effect of changes of policy and tags on the members that a member sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Difference {
    /// Policy and tags are the same.
    Nothing,
    /// The rules differ, but the member sees the same members.
    Rules,
    /// The member may see other members, or this is unknown.
    Members,
}

/// A member and the devices behind it, with both as input to the policy: many members examine the
/// same one.
#[derive(Debug)]
pub(super) struct Subject {
    member: Member,
    own: Party,
    devices: Vec<Party>,
}

impl Subject {
    /// Number of parties that are compared with a policy: the member and the devices behind it.
    pub fn parties(&self) -> usize {
        1 + self.devices.len()
    }
}

impl From<Member> for Subject {
    fn from(member: Member) -> Subject {
        let devices = member.devices.iter();
        Subject {
            own: member.party(),
            devices: devices.map(|device| device.party(&member.name)).collect(),
            member,
        }
    }
}

/// The members and devices that one member sees: those that it, or a device behind it, may talk to,
/// in either direction. The policy is
/// read on first use, because most polls report no member.
pub(super) struct Visibility<'a> {
    store: &'a Store,
    connection: &'a Connection,
    of: MemberId,
    sight: OnceCell<Sight>,
}

impl<'a> Visibility<'a> {
    pub fn new(store: &'a Store, connection: &'a Connection, of: MemberId) -> Visibility<'a> {
        Visibility {
            store,
            connection,
            of,
            sight: OnceCell::new(),
        }
    }

    /// Returns whether a member is visible, or a device behind it, whose name, tags and devices are
    /// in a row, from this column on. Removals before version 7 have no name and tags; all members
    /// see them.
    pub fn sees_row(&self, row: &Row<'_>, column: usize) -> Result<bool, StoreError> {
        let name: Option<String> = row.get(column)?;
        let tags: Option<String> = row.get(column + 1)?;
        let (Some(name), Some(tags)) = (name, tags) else {
            return Ok(true);
        };
        let devices: Option<String> = row.get(column + 2)?;
        let parties = parties_of(&name, &tags, devices.as_deref().unwrap_or("[]"))?;
        let sight = self.sight()?;
        Ok(parties.iter().any(|party| sight.has(party)))
    }

    /// Returns a member with the devices that are visible; `None` if neither it nor one of its
    /// devices is.
    pub fn visible(&self, subject: &Subject) -> Result<Option<Member>, StoreError> {
        let (sight, member) = (self.sight()?, &subject.member);
        let is_visible: Vec<bool> = subject.devices.iter().map(|d| sight.has(d)).collect();
        if !sight.has(&subject.own) && !is_visible.contains(&true) {
            return Ok(None);
        }
        let devices = member.devices.iter().zip(is_visible);
        let devices = devices.filter(|(_, is_visible)| *is_visible);
        Ok(Some(Member {
            devices: devices.map(|(device, _)| device.clone()).collect(),
            ..member.clone()
        }))
    }

    /// Returns whether the member with a key is visible; `false` if there is none.
    pub fn sees_key(&self, key: &[u8; 32]) -> Result<bool, StoreError> {
        let mut statement = self
            .connection
            .prepare_cached("SELECT name, tags, devices FROM member WHERE public_key = ?1")?;
        let mut rows = statement.query([key])?;
        match rows.next()? {
            Some(row) => self.sees_row(row, 0),
            None => Ok(false),
        }
    }

    fn sight(&self) -> Result<&Sight, StoreError> {
        if let Some(sight) = self.sight.get() {
            return Ok(sight);
        }
        let sight = self.policy()?.sight(&self.parties()?);
        Ok(self.sight.get_or_init(|| sight))
    }

    fn policy(&self) -> Result<Arc<Policy>, StoreError> {
        let (text, since) = text_of(self.connection)?;
        let current = revision_of(self.connection)?;
        self.store.parsed.get(text, since, current)
    }

    /// Returns the member itself and the devices behind it.
    fn parties(&self) -> Result<Vec<Party>, StoreError> {
        let (name, tags, devices) = self.row()?;
        parties_of(&name, &tags, &devices)
    }

    /// Returns name and tags of the member itself, and the devices behind it.
    pub fn own(&self, networks: &Networks) -> Result<(Party, Vec<Device>), StoreError> {
        let (name, tags, devices) = self.row()?;
        let mut parties = parties_of(&name, &tags, "[]")?;
        let own = parties.pop().ok_or(StoreError::NotAMember)?;
        Ok((own, devices::approved(&devices, networks)?))
    }

    /// Returns name, tags and devices of the member itself, as stored.
    fn row(&self) -> Result<(String, String, String), StoreError> {
        let sql = "SELECT name, tags, devices FROM member WHERE id = ?1";
        let found = first(self.connection, sql, [self.of.0], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?))
        })?;
        found.ok_or(StoreError::NotAMember)
    }

    /// Returns the part of the policy that concerns the member.
    pub fn rules(&self) -> Result<Policy, StoreError> {
        Ok(self.policy()?.concerning(&self.parties()?))
    }

    /// Returns the difference between a revision and the revision `current`.
    pub fn difference(&self, revision: i64, current: i64) -> Result<Difference, StoreError> {
        let mut statement = self.connection.prepare_cached(
            "SELECT (SELECT revision FROM policy),
                    EXISTS (SELECT 1 FROM former WHERE revision > ?2 AND member = ?1)",
        )?;
        let (since, is_retagged): (i64, bool) =
            statement.query_row((self.of.0, revision), |row| Ok((row.get(0)?, row.get(1)?)))?;
        if !self.store.parsed.note(since, current) {
            self.policy()?;
        }
        if is_retagged {
            return Ok(Difference::Members);
        }
        if since <= revision {
            return Ok(Difference::Nothing);
        }
        let Some(former) = self.store.parsed.at(revision) else {
            return Ok(Difference::Members);
        };
        Ok(if former.sight(&self.parties()?) == *self.sight()? {
            Difference::Rules
        } else {
            Difference::Members
        })
    }
}

/// Returns a member and the approved devices behind it, from the columns of its row.
fn parties_of(name: &str, tags: &str, devices: &str) -> Result<Vec<Party>, StoreError> {
    let name: Name = name.parse().map_err(|_| StoreError::Corrupt("names"))?;
    let devices = devices::parties(devices, &name)?;
    let own = Party {
        tags: from_json(tags, "tags")?,
        name,
        gateway: None,
    };
    Ok(std::iter::once(own).chain(devices).collect())
}

fn text_of(connection: &Connection) -> Result<(String, i64), StoreError> {
    let mut statement = connection.prepare_cached("SELECT text, revision FROM policy")?;
    Ok(statement.query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?)
}
