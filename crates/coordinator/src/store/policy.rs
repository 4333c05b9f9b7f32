//! Who may talk to whom: the text that an administrator wrote, and the tags that members have. The members themselves apply it.

use std::cell::OnceCell;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rusqlite::{Connection, OptionalExtension as _, Row};
use seikan_proto::mesh::policy::Sight;
use seikan_proto::mesh::{MAX_TAGS, Name, Party, Policy};

use super::tokens::{from_json, to_json};
use super::{Actor, MemberId, Store, StoreError, audit, next_revision, revision_of, seconds};

impl Store {
    /// The policy as it was written; empty if none was.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn policy(&self) -> Result<String, StoreError> {
        self.look(|connection| Ok(text_of(connection)?.0))
    }

    /// Puts a policy in the place of the one that there is; whether it is another text. Members are told if it is.
    ///
    /// # Errors
    /// [`StoreError::Policy`] if it is none; [`StoreError::Sqlite`].
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
            audit::note(transaction, seconds(now), "policy set", &subject, &by)?;
            Ok(true)
        })
    }

    /// Gives a member these tags in the place of those that it has; whether they are others. Members are told if they are.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`]: more than [`MAX_TAGS`]; [`StoreError::NotAMember`]; [`StoreError::Sqlite`].
    pub fn set_tags(
        &self,
        name: &Name,
        tags: &[Name],
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        if tags.len() > MAX_TAGS {
            return Err(StoreError::OutOfBounds("a member has 16 tags at most"));
        }
        let json = to_json(tags)?;
        let (name, tags, by) = (name.clone(), tags.to_vec(), by.clone());
        self.change(move |transaction| {
            let sql = "SELECT tags FROM member WHERE name = ?1";
            let known = transaction.query_row(sql, [name.as_str()], |row| row.get::<_, String>(0));
            if known.optional()?.ok_or(StoreError::NotAMember)? == json {
                return Ok(false);
            }
            let revision = next_revision(transaction)?;
            transaction.execute(
                "INSERT INTO former (revision, member, public_key, name, tags)
                 SELECT ?2, id, public_key, name, tags FROM member WHERE name = ?1",
                (name.as_str(), revision),
            )?;
            transaction.execute(
                "UPDATE member SET tags = ?2, revision = ?3 WHERE name = ?1",
                (name.as_str(), &json, revision),
            )?;
            let tags: Vec<&str> = tags.iter().map(Name::as_str).collect();
            let subject = format!("{name}: {}", tags.join(" "));
            audit::note(transaction, seconds(now), "tags set", &subject, &by)?;
            Ok(true)
        })
    }
}

/// Policies that are remembered, at most. A member that asks knows the latest one or the one before it, unless it was away.
const REMEMBERED: usize = 4;

/// The policies that were read lately: one is not parsed for each question, and the effect of the next one on a member is known.
#[derive(Debug, Default)]
pub(super) struct Parsed(Mutex<VecDeque<Known>>);

/// A policy.
#[derive(Debug)]
struct Known {
    text: String,
    policy: Arc<Policy>,
    /// From its own revision to the latest at which it was seen to be in force.
    revisions: RangeInclusive<i64>,
}

impl Known {
    fn is_in_force(&mut self, current: i64) {
        let (since, until) = (*self.revisions.start(), *self.revisions.end());
        self.revisions = since..=until.max(current);
    }
}

impl Parsed {
    /// The policy of this text and revision, which is in force at the revision `current`.
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
        // After a restore from a backup, revisions may be others of the same number.
        all.retain(|known| *known.revisions.end() < since);
        if all.len() == REMEMBERED {
            all.pop_front();
        }
        all.push_back(Known {
            text,
            policy: Arc::clone(&policy),
            revisions: since..=current,
        });
        Ok(policy)
    }

    /// Notes that the policy of this revision is in force at the revision `current`; whether it is known.
    fn note(&self, since: i64, current: i64) -> bool {
        let mut all = self.all();
        let last = all.back_mut();
        let last = last.filter(|last| *last.revisions.start() == since);
        last.map(|last| last.is_in_force(current)).is_some()
    }

    /// The policy that was in force at a revision, if that is known.
    fn at(&self, revision: i64) -> Option<Arc<Policy>> {
        let all = self.all();
        let known = all.iter().find(|known| known.revisions.contains(&revision));
        known.map(|known| Arc::clone(&known.policy))
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The difference that policy and tags make to what a member knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Difference {
    /// None.
    Nothing,
    /// Other rules, by which it may know the same members as before.
    Rules,
    /// It may know others, or that cannot be told.
    Members,
}

/// Whom one member is told of: those that it may talk to, whichever begins. The policy is read when it is first needed: most questions are
/// of what concerns nobody.
pub(super) struct Eyes<'a> {
    store: &'a Store,
    connection: &'a Connection,
    of: MemberId,
    sight: OnceCell<Sight>,
}

impl<'a> Eyes<'a> {
    pub fn new(store: &'a Store, connection: &'a Connection, of: MemberId) -> Eyes<'a> {
        Eyes {
            store,
            connection,
            of,
            sight: OnceCell::new(),
        }
    }

    /// Whether a member is seen whose name and tags are in a row, from that column on. What it was known by is not known of who went before
    /// that was noted: everybody hears of it.
    pub fn see(&self, row: &Row<'_>, column: usize) -> Result<bool, StoreError> {
        let name: Option<String> = row.get(column)?;
        let tags: Option<String> = row.get(column + 1)?;
        let (Some(name), Some(tags)) = (name, tags) else {
            return Ok(true);
        };
        let name = name.parse().map_err(|_| StoreError::Corrupt("names"))?;
        self.see_party(&name, &from_json(&tags, "tags")?)
    }

    /// The same of a member with this name and these tags.
    pub fn see_party(&self, name: &Name, tags: &[Name]) -> Result<bool, StoreError> {
        Ok(self.sight()?.has(name, tags))
    }

    /// Whether the member with a key is seen; not if there is none.
    pub fn see_key(&self, key: &[u8; 32]) -> Result<bool, StoreError> {
        let mut statement = self
            .connection
            .prepare_cached("SELECT name, tags FROM member WHERE public_key = ?1")?;
        let mut rows = statement.query([key])?;
        match rows.next()? {
            Some(row) => self.see(row, 0),
            None => Ok(false),
        }
    }

    fn sight(&self) -> Result<&Sight, StoreError> {
        if let Some(sight) = self.sight.get() {
            return Ok(sight);
        }
        let sight = self.policy()?.sight(&self.party()?);
        Ok(self.sight.get_or_init(|| sight))
    }

    fn policy(&self) -> Result<Arc<Policy>, StoreError> {
        let (text, since) = text_of(self.connection)?;
        let current = revision_of(self.connection)?;
        self.store.parsed.get(text, since, current)
    }

    /// What the others know the member by.
    pub fn party(&self) -> Result<Party, StoreError> {
        let mut statement = self
            .connection
            .prepare_cached("SELECT name, tags FROM member WHERE id = ?1")?;
        let found = statement.query_row([self.of.0], |row| {
            Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?))
        });
        let (name, tags) = found.optional()?.ok_or(StoreError::NotAMember)?;
        let name = name.parse().map_err(|_| StoreError::Corrupt("names"))?;
        let tags = from_json(&tags, "tags")?;
        Ok(Party { name, tags })
    }

    /// What it is told of the policy.
    pub fn rules(&self) -> Result<Policy, StoreError> {
        Ok(self.policy()?.concerning(&self.party()?))
    }

    /// What became different since a revision, at the revision `current`.
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
        Ok(match former.sight(&self.party()?) == *self.sight()? {
            true => Difference::Rules,
            false => Difference::Members,
        })
    }
}

fn text_of(connection: &Connection) -> Result<(String, i64), StoreError> {
    let mut statement = connection.prepare_cached("SELECT text, revision FROM policy")?;
    Ok(statement.query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?)
}
