//! What a member is told of the others.
//!
//! Everything that changed has its revision, so an answer is the members and the removals after the
//! revision that the asker knows, in the order of their revisions; what does not fit comes after it.
//! Removals are kept for good: a member may have been away for long.
//!
//! A member is told of those alone that policy lets it talk to, in either direction ([`Eyes`]). When the tags of another change it hears that
//! one is new or gone. When its own tags change, or the policy does and it may know others by it, it is told of everybody anew whom it may
//! know. Many ask for that at once after such a policy, so everybody is read once for all of them.
//!
//! The work of one answer is bounded, and so is that of all answers of a member: the caller counts the rows that were looked at.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use rusqlite::{Connection, Row};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::policy::{MAX_POLICY, MAX_RULES};
use seikan_proto::mesh::{
    Changes, Cursor, MAX_ANSWER, MAX_COORDINATORS, MAX_MEMBERS, MAX_RELAYS, Member, Networks,
};

use super::members::member_of;
use super::policy::{Difference, Eyes};
use super::{Backing, MemberId, Store, StoreError, networks_of, revision_of, seconds, unsigned};

/// Bytes of an answer that are not members or removals: its other fields (64 callers of 47 among them), with room to spare. Of a policy
/// each rule has quotes and a comma in the place of its line's end, and no rule is longer than it was written.
const FRAME: usize =
    4096 + RELAY * MAX_RELAYS + COORDINATOR * MAX_COORDINATORS + MAX_POLICY + 2 * MAX_RULES;
/// Bytes of a relay in JSON: an address of 260, a name of 65, a password of 28, a pin of 50, and 90 of field names, a port and punctuation,
/// with room to spare.
pub(super) const RELAY: usize = 640;
/// Bytes of a coordinator in JSON: an address of 260, quotes and a comma.
const COORDINATOR: usize = 263;
/// Bytes of a member in JSON, its name, endpoints, relayed addresses and tags aside: field names and punctuation 104, the
/// key 44, the addresses 15 and 39, with room to spare.
const MEMBER: usize = 256;
/// Bytes of a removal in JSON: a key of 44, quotes and a comma.
const REMOVAL: usize = 47;
/// Members, and removals, that are looked at for one answer, at most, whether the asker may know them or not; beside the first members
/// ([`Everybody`]).
pub(super) const MAX_ROWS: usize = 4 * MAX_MEMBERS;

/// What a member is told.
#[derive(Debug)]
pub struct Answer {
    /// The answer itself.
    pub changes: Changes,
    /// Members and removals that were looked at for it.
    pub rows: usize,
}

impl Store {
    /// What changed after what the asker knows among the others that it may know: at most [`MAX_MEMBERS`] members and
    /// removals together, and no more than fit into [`MAX_ANSWER`] bytes of JSON or are found among some 20,000 members and 16,384 removals.
    /// If that is not all, `more` is set, and asking with the answer's cursor gives what comes next.
    ///
    /// If the asker knows nothing, or a revision that there has not been, or others may be known to it than to its knowledge, the answer is
    /// `whole`: the asker is to forget everything that it knew before this answer. A whole answer with `more` is the first part
    /// of a list; the parts after it are plain changes, not `whole` again.
    ///
    /// The policy, if it is another one than at the asker's sight or the answer is whole, and what the asker is known by come before
    /// anything else that is news: with the first part.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`], [`StoreError::NoNetworks`], [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn answer(&self, known: impl Into<Cursor>, asker: MemberId) -> Result<Answer, StoreError> {
        let known = known.into();
        let (since, sight) = (seconds(known.revision), seconds(known.sight));
        // Another coordinator may have told of more than is known here yet.
        if since > seconds(self.revision()?) {
            self.catch_up()?;
        }
        self.look(|connection| {
            let current = revision_of(connection)?;
            let networks = networks_of(connection)?.ok_or(StoreError::NoNetworks)?;
            let eyes = Eyes::new(self, connection, asker);
            let difference = eyes.difference(sight, current)?;
            let whole = since == 0 || since > current || difference == Difference::Members;
            let found = match whole {
                // Who forgets everything need not hear who is gone.
                true => {
                    let everybody = self.everybody(connection, current, &networks)?;
                    let mut found = everybody.seen(&eyes, asker)?;
                    if let Some(until) = found.until.take()
                        && found.news.len() < LIMIT
                    {
                        found.join(members_after(connection, until, &networks, &eyes, asker)?);
                    }
                    found
                }
                false => {
                    let mut found = members_after(connection, since, &networks, &eyes, asker)?;
                    found.join(gone_after(connection, since, &eyes, asker)?);
                    found
                }
            };
            let is_told = whole || difference == Difference::Rules;
            let policy = is_told.then(|| eyes.rules()).transpose()?;
            let own = whole.then(|| eyes.party()).transpose()?;
            let rows = found.rows;
            let changes = Changes {
                sight: unsigned(current),
                policy,
                own,
                ..found.tell(current, whole)
            };
            Ok(Answer { changes, rows })
        })
    }

    /// [`Store::answer`], for who does not count rows.
    ///
    /// # Errors
    /// The same.
    #[cfg(any(test, fuzzing))]
    pub fn changes(
        &self,
        known: impl Into<Cursor>,
        asker: MemberId,
    ) -> Result<Changes, StoreError> {
        Ok(self.answer(known, asker)?.changes)
    }

    /// The first members, as of a revision.
    fn everybody(
        &self,
        connection: &Connection,
        current: i64,
        networks: &Networks,
    ) -> Result<Arc<Everybody>, StoreError> {
        // A replica that was loaded anew may count revisions anew.
        let loads = match &self.backing {
            Backing::File(_) => 0,
            Backing::Etcd(replica) => replica.loads(),
        };
        let mut last = self
            .everybody
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(everybody) = last.as_ref()
            && everybody.of == (loads, current)
        {
            return Ok(Arc::clone(everybody));
        }
        let everybody = Everybody::read(connection, (loads, current), networks)?;
        Ok(Arc::clone(last.insert(Arc::new(everybody))))
    }
}

/// [`Everybody`], as last read.
#[derive(Debug, Default)]
pub(super) struct Last(Mutex<Option<Arc<Everybody>>>);

/// The first [`LIMIT`] members in the order of their revisions.
#[derive(Debug)]
struct Everybody {
    /// How often everything had been loaded, and the revision.
    of: (u64, i64),
    /// Each with its revision and cost.
    members: Vec<(MemberId, i64, usize, Member)>,
    /// The revision of the last of them, if there are more.
    until: Option<i64>,
}

impl Everybody {
    fn read(
        connection: &Connection,
        of: (u64, i64),
        networks: &Networks,
    ) -> Result<Everybody, StoreError> {
        let mut statement = connection.prepare_cached(MEMBERS)?;
        // No member has that number.
        let mut rows = statement.query((0, 0))?;
        let mut members: Vec<(MemberId, i64, usize, Member)> = Vec::new();
        let mut until = None;
        while let Some(row) = rows.next()? {
            if members.len() == LIMIT {
                until = members.last().map(|(_, revision, ..)| *revision);
                break;
            }
            let member = member_of(row, networks)?;
            members.push((MemberId(row.get(8)?), row.get(6)?, cost_of(row)?, member));
        }
        Ok(Everybody { of, members, until })
    }

    /// Those that somebody may know.
    fn seen(&self, eyes: &Eyes<'_>, asker: MemberId) -> Result<Found, StoreError> {
        let mut found = Found {
            until: self.until,
            ..Found::default()
        };
        for (id, revision, cost, member) in &self.members {
            if found.news.len() == LIMIT {
                break;
            }
            found.rows += 1;
            if *id != asker && eyes.see_party(&member.name, &member.tags)? {
                found.news.push(News {
                    revision: *revision,
                    cost: *cost,
                    what: What::Member(Box::new(member.clone())),
                });
            }
        }
        Ok(found)
    }
}

/// What was found for an answer.
#[derive(Default)]
pub(super) struct Found {
    pub news: Vec<News>,
    /// How many rows were looked at.
    pub rows: usize,
    /// Up to which revision, if there are more.
    pub until: Option<i64>,
}

impl Found {
    /// Takes in what was found of other rows.
    fn join(&mut self, mut other: Found) {
        self.news.append(&mut other.news);
        self.news.sort_unstable_by_key(|news| news.revision);
        self.rows += other.rows;
        self.until = self.until.into_iter().chain(other.until).min();
    }

    /// An answer of it.
    fn tell(mut self, current: i64, whole: bool) -> Changes {
        let Some(until) = self.until else {
            return tell(self.news, current, whole);
        };
        self.news.retain(|news| news.revision <= until);
        Changes {
            more: true,
            ..tell(self.news, until, whole)
        }
    }
}

/// One change.
pub(super) struct News {
    pub revision: i64,
    /// Bytes of JSON, at most.
    pub cost: usize,
    pub what: What,
}

pub(super) enum What {
    Member(Box<Member>),
    Removal(PublicKey),
}

/// As much as one answer has room for, and one more, by which it is known that there is more.
const LIMIT: usize = MAX_MEMBERS + 1;

/// Members after a revision, but for one.
const MEMBERS: &str = "SELECT number, name, public_key, endpoints, relayed, tags, revision,
        octet_length(name) + octet_length(endpoints) + octet_length(relayed) + octet_length(tags),
        id, name, tags
    FROM member WHERE revision > ?1 AND id != ?2 ORDER BY revision";

fn cost_of(row: &Row<'_>) -> rusqlite::Result<usize> {
    Ok(MEMBER + row.get::<_, u32>(7)? as usize)
}

pub(super) fn members_after(
    connection: &Connection,
    since: i64,
    networks: &Networks,
    eyes: &Eyes<'_>,
    asker: MemberId,
) -> Result<Found, StoreError> {
    let mut statement = connection.prepare_cached(MEMBERS)?;
    let mut rows = statement.query((since, asker.0))?;
    let (mut found, mut last) = (Found::default(), since);
    while let Some(row) = rows.next()?
        && found.news.len() < LIMIT
    {
        if found.rows == MAX_ROWS {
            found.until = Some(last);
            break;
        }
        found.rows += 1;
        last = row.get(6)?;
        if eyes.see(row, 9)? {
            found.news.push(News {
                revision: last,
                cost: cost_of(row)?,
                what: What::Member(Box::new(member_of(row, networks)?)),
            });
        }
    }
    Ok(found)
}

/// Those that went, of whom the asker knew; and those that it knew by what they were and may not know by what they are: to the asker they
/// went, too.
fn gone_after(
    connection: &Connection,
    since: i64,
    eyes: &Eyes<'_>,
    asker: MemberId,
) -> Result<Found, StoreError> {
    let mut statement = connection.prepare_cached(
        "SELECT revision, public_key, name, tags FROM removed WHERE revision > ?1
         UNION ALL
         SELECT revision, public_key, name, tags FROM former WHERE revision > ?1 AND member != ?2
         ORDER BY revision",
    )?;
    let mut rows = statement.query((since, asker.0))?;
    let (mut found, mut last) = (Found::default(), since);
    let mut told = HashSet::new();
    while let Some(row) = rows.next()?
        && found.news.len() < LIMIT
    {
        if found.rows == MAX_ROWS {
            found.until = Some(last);
            break;
        }
        found.rows += 1;
        last = row.get(0)?;
        let key = row.get(1)?;
        if eyes.see(row, 2)? && !eyes.see_key(&key)? && told.insert(key) {
            found.news.push(removal(last, key));
        }
    }
    Ok(found)
}

fn removal(revision: i64, key: [u8; 32]) -> News {
    News {
        revision,
        cost: REMOVAL,
        what: What::Removal(PublicKey::from_bytes(key)),
    }
}

/// An answer from what there is to tell, ordered by revisions. Where it was cut off at [`LIMIT`], the
/// answer is full before the cut is reached.
pub(super) fn tell(news: Vec<News>, current: i64, whole: bool) -> Changes {
    let mut changes = Changes {
        revision: unsigned(current),
        whole,
        ..Changes::default()
    };
    let mut room = MAX_ANSWER - FRAME;
    let mut last = 0;
    for News {
        revision,
        cost,
        what,
    } in news
    {
        if changes.members.len() + changes.removed.len() == MAX_MEMBERS || cost > room {
            changes.more = true;
            changes.revision = unsigned(last);
            break;
        }
        room -= cost;
        last = revision;
        match what {
            What::Member(member) => changes.members.push(*member),
            What::Removal(key) => changes.removed.push(key),
        }
    }
    changes
}
