//! What a member is told of the others.
//!
//! Everything that changed has its revision, so an answer is the members and the removals after the
//! revision that the asker knows, in the order of their revisions; what does not fit comes after it.
//! Removals are kept for good: a member may have been away for long.
//!
//! A member is told of those alone that policy lets it talk to, in either direction ([`Eyes`]). When the tags of another change it hears that
//! one is new or gone; when the policy or its own tags do, it is told of everybody anew whom it may know.

use std::collections::HashSet;

use rusqlite::Connection;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::policy::{MAX_POLICY, MAX_RULES};
use seikan_proto::mesh::{
    Changes, Cursor, MAX_ANSWER, MAX_COORDINATORS, MAX_MEMBERS, MAX_RELAYS, Member, Networks,
};

use super::members::member_of;
use super::policy::Eyes;
use super::{MemberId, Store, StoreError, networks_of, revision_of, seconds, unsigned};

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

impl Store {
    /// What changed after what the asker knows among the others that it may know: at most [`MAX_MEMBERS`] members and
    /// removals together, and no more than fit into [`MAX_ANSWER`] bytes of JSON. If that is not all,
    /// `more` is set, and asking with the answer's cursor gives what comes next.
    ///
    /// If the asker knows nothing, or a revision that there has not been, or others may be known to it than to its knowledge, the answer is
    /// `whole`: the asker is to forget everything that it knew before this answer. A whole answer with `more` is the first part
    /// of a list; the parts after it are plain changes, not `whole` again.
    ///
    /// The policy, and what the asker is known by, come before anything else that is news: with the first part.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`], [`StoreError::NoNetworks`], [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn changes(
        &self,
        known: impl Into<Cursor>,
        asker: MemberId,
    ) -> Result<Changes, StoreError> {
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
            let whole = since == 0 || since > current || eyes.are_others_since(sight)?;
            let since = if whole { 0 } else { since };
            let mut news = members_after(connection, since, &networks, &eyes, asker)?;
            // Who forgets everything need not hear who is gone.
            if !whole {
                news.append(&mut gone_after(connection, since, &eyes, asker)?);
                news.sort_unstable_by_key(|news| news.revision);
            }
            let policy = whole.then(|| eyes.rules()).transpose()?;
            let own = whole.then(|| eyes.party()).transpose()?;
            Ok(Changes {
                sight: unsigned(current),
                policy,
                own,
                ..tell(news, current, whole)
            })
        })
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

pub(super) fn members_after(
    connection: &Connection,
    since: i64,
    networks: &Networks,
    eyes: &Eyes<'_>,
    asker: MemberId,
) -> Result<Vec<News>, StoreError> {
    let mut statement = connection.prepare_cached(
        "SELECT number, name, public_key, endpoints, relayed, tags, revision,
                octet_length(name) + octet_length(endpoints) + octet_length(relayed) + octet_length(tags)
         , name, tags FROM member WHERE revision > ?1 AND id != ?2 ORDER BY revision",
    )?;
    let mut rows = statement.query((since, asker.0))?;
    let mut news = Vec::new();
    while let Some(row) = rows.next()?
        && news.len() < LIMIT
    {
        if !eyes.see(row, 8)? {
            continue;
        }
        news.push(News {
            revision: row.get(6)?,
            cost: MEMBER + row.get::<_, u32>(7)? as usize,
            what: What::Member(Box::new(member_of(row, networks)?)),
        });
    }
    Ok(news)
}

/// Those that went, of whom the asker knew; and those that it knew by what they were and may not know by what they are: to the asker they
/// went, too.
fn gone_after(
    connection: &Connection,
    since: i64,
    eyes: &Eyes<'_>,
    asker: MemberId,
) -> Result<Vec<News>, StoreError> {
    let mut statement = connection.prepare_cached(
        "SELECT revision, public_key, name, tags FROM removed WHERE revision > ?1
         UNION ALL
         SELECT revision, public_key, name, tags FROM former WHERE revision > ?1 AND member != ?2
         ORDER BY revision",
    )?;
    let mut rows = statement.query((since, asker.0))?;
    let (mut news, mut told) = (Vec::new(), HashSet::new());
    while let Some(row) = rows.next()?
        && news.len() < LIMIT
    {
        let key = row.get(1)?;
        if eyes.see(row, 2)? && !eyes.see_key(&key)? && told.insert(key) {
            news.push(removal(row.get(0)?, key));
        }
    }
    Ok(news)
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
