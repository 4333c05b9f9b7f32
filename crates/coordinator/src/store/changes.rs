//! Answers to members' polls for changes.
//!
//! Every change has a revision. An answer contains the members and the removals after the revision
//! that the member knows, in the order of their revisions, and as many as fit. Removals are kept
//! forever: a member may have been away for long.
//!
//! A member receives only the members and devices that policy allows it and the devices behind it to
//! talk to, in either direction ([`Visibility`]). A device comes with the member that it is behind.
//! If the tags or devices of another member change, it may appear or disappear. If the
//! member's own tags or devices change, or the policy changes which members it sees, it receives all visible
//! members again. Many members poll right after such a policy, so the first members are read once
//! for all of them.
//!
//! The work of one answer is bounded. The caller bounds the work of all answers of a member by
//! counting the examined members, removals and devices.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use rusqlite::{Connection, Row};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::policy::{MAX_POLICY, MAX_RULES};
use seikan_proto::mesh::{
    Changes, Cursor, MAX_COORDINATORS, MAX_DEVICES, MAX_MEMBERS, MAX_RELAYS, MAX_TAGS, Member,
    Networks,
};

use super::etcd::Replica;
use super::members::member_of;
use super::policy::{Difference, Subject, Visibility};
use super::{MemberId, Store, StoreError, networks_of, revision_of, seconds, unsigned};
use crate::lock;

/// Bytes of an answer's fields other than members and removals, rounded up; among them 64 callers
/// of 47 bytes. In a policy, quotes and a comma replace the newline of each rule, and no rule is
/// longer than in its text.
const FRAME: usize = 4096
    + RELAY * MAX_RELAYS
    + COORDINATOR * MAX_COORDINATORS
    + MAX_POLICY
    + 2 * MAX_RULES
    + OWN_DEVICES;
/// Bytes of a relay in JSON, rounded up: an address of 260, a name of 65, a password of 28, a pin
/// of 50, and 90 of field names, a port and punctuation.
pub(super) const RELAY: usize = 640;
/// Bytes of a coordinator in JSON: an address of 260, quotes and a comma.
const COORDINATOR: usize = 263;
/// Bytes of a member in JSON without its name, endpoints, relayed addresses and tags, rounded up:
/// field names and punctuation 104, the key 44, the addresses 15 and 39.
const MEMBER: usize = 256;
/// Bytes of a device in JSON beside those of its row, rounded up: addresses of 15 and 39, field
/// names and punctuation.
const DEVICE: usize = 128;
/// Bytes of the requester's own devices: each with a name and [`MAX_TAGS`] tags of 63, with quotes
/// and commas.
const OWN_DEVICES: usize = MAX_DEVICES * (DEVICE + 66 * (1 + MAX_TAGS));
/// Bytes of a removal in JSON: a key of 44, quotes and a comma.
const REMOVAL: usize = 47;
/// Number of members and the devices behind them, and of removals likewise, after which no more are
/// examined for one answer, visible or not, in addition to the first members ([`FirstMembers`]).
pub(super) const MAX_ROWS: usize = 4 * MAX_MEMBERS;

/// An answer to a poll.
#[derive(Debug)]
pub struct Answer {
    /// Body of the answer.
    pub changes: Changes,
    /// Number of members, removals, and devices behind both that were examined.
    pub rows: usize,
}

impl Store {
    /// Returns the changes after the cursor among the members that `asker` sees: at most
    /// [`MAX_MEMBERS`] members and removals together, no more than fit into `most` bytes of JSON
    /// (512 KiB to [`seikan_proto::mesh::MAX_ANSWER`]), and no more than are found among some
    /// 20,000 members and 16,384 removals, where each device behind a member counts as one more. If there are more, `more` is set, and the next poll with
    /// the answer's cursor returns them.
    ///
    /// The answer is `whole` if the member knows nothing, knows a revision that does not exist, or
    /// may now see other members than before: it must then forget everything that it knew before. A
    /// whole answer with `more` is the first part of a list; the following parts are not `whole`.
    ///
    /// The first part also contains the policy, if it has changed since the cursor's sight or the
    /// answer is whole, and the member's own name, tags and devices.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`], [`StoreError::NoNetworks`], [`StoreError::Corrupt`], [`StoreError::Sqlite`].
    pub fn answer(
        &self,
        known: impl Into<Cursor>,
        asker: MemberId,
        most: usize,
    ) -> Result<Answer, StoreError> {
        let known = known.into();
        let (since, sight) = (seconds(known.revision), seconds(known.sight));
        // Another coordinator may have reported changes that this copy does not have yet.
        if since > seconds(self.revision()?) {
            self.catch_up()?;
        }
        self.read(|connection| {
            let current = revision_of(connection)?;
            let networks = networks_of(connection)?.ok_or(StoreError::NoNetworks)?;
            let visibility = Visibility::new(self, connection, asker);
            let difference = visibility.difference(sight, current)?;
            let whole = since == 0 || since > current || difference == Difference::Members;
            let found = if whole {
                // A whole answer needs no removals.

                let members = self.first_members(connection, current, &networks)?;
                let mut found = members.visible_to(&visibility, asker)?;
                if let Some(until) = found.until.take()
                    && found.changes.len() < LIMIT
                {
                    found.merge(members_after(
                        connection,
                        until,
                        &networks,
                        &visibility,
                        asker,
                    )?);
                }
                found
            } else {
                let mut found = members_after(connection, since, &networks, &visibility, asker)?;
                found.merge(gone_after(connection, since, &visibility, asker)?);
                found
            };
            let with_policy = whole || difference == Difference::Rules;
            let policy = with_policy.then(|| visibility.rules()).transpose()?;
            let (own, own_devices) = if whole {
                let (own, devices) = visibility.own(&networks)?;
                (Some(own), devices)
            } else {
                (None, Vec::new())
            };
            let rows = found.rows;
            let changes = Changes {
                sight: unsigned(current),
                policy,
                own,
                own_devices,
                ..found.into_answer(current, whole, most)
            };
            Ok(Answer { changes, rows })
        })
    }

    /// [`Store::answer`] without the number of rows.
    ///
    /// # Errors
    /// As [`Store::answer`].
    #[cfg(any(test, fuzzing))]
    pub fn changes(
        &self,
        known: impl Into<Cursor>,
        asker: MemberId,
    ) -> Result<Changes, StoreError> {
        Ok(self
            .answer(known, asker, seikan_proto::mesh::MAX_ANSWER)?
            .changes)
    }

    /// Returns the first members as of a revision.
    fn first_members(
        &self,
        connection: &Connection,
        current: i64,
        networks: &Networks,
    ) -> Result<Arc<FirstMembers>, StoreError> {
        // After a reload, a replica may count revisions from the start.
        let loads = self.replica().map_or(0, Replica::loads);
        let mut last = lock(&self.first_members.0);
        if let Some(first_members) = last.as_ref()
            && first_members.of == (loads, current)
        {
            return Ok(Arc::clone(first_members));
        }
        let first_members = FirstMembers::read(connection, (loads, current), networks)?;
        Ok(Arc::clone(last.insert(Arc::new(first_members))))
    }
}

/// [`FirstMembers`], as last read.
#[derive(Debug, Default)]
pub(super) struct MemberCache(Mutex<Option<Arc<FirstMembers>>>);

/// The first [`LIMIT`] members by revision.
#[derive(Debug)]
struct FirstMembers {
    /// Number of loads of the replica, and the revision.
    of: (u64, i64),
    /// Each with its revision and its bytes of JSON.
    members: Vec<(MemberId, i64, usize, Subject)>,
    /// Revision of the last one, if there are more.
    until: Option<i64>,
}

impl FirstMembers {
    fn read(
        connection: &Connection,
        of: (u64, i64),
        networks: &Networks,
    ) -> Result<FirstMembers, StoreError> {
        let mut statement = connection.prepare_cached(MEMBERS)?;
        // No member has the id 0.
        let mut rows = statement.query((0, 0))?;
        let mut members: Vec<(MemberId, i64, usize, Subject)> = Vec::new();
        let mut until = None;
        while let Some(row) = rows.next()? {
            if members.len() == LIMIT {
                until = members.last().map(|(_, revision, ..)| *revision);
                break;
            }
            let member = Subject::from(member_of(row, networks)?);
            members.push((MemberId(row.get(9)?), row.get(7)?, cost_of(row)?, member));
        }
        Ok(FirstMembers { of, members, until })
    }

    /// Returns the members that `asker` sees.
    fn visible_to(
        &self,
        visibility: &Visibility<'_>,
        asker: MemberId,
    ) -> Result<Found, StoreError> {
        let mut found = Found {
            until: self.until,
            ..Found::default()
        };
        for (id, revision, cost, member) in &self.members {
            if found.changes.len() == LIMIT {
                break;
            }
            found.rows += member.parties();
            if *id == asker {
                continue;
            }
            if let Some(member) = visibility.visible(member)? {
                found.changes.push(Change {
                    revision: *revision,
                    cost: *cost,
                    kind: ChangeKind::Member(Box::new(member)),
                });
            }
        }
        Ok(found)
    }
}

/// Changes found for an answer.
#[derive(Default)]
pub(super) struct Found {
    pub changes: Vec<Change>,
    /// Number of examined rows and of devices in them.
    pub rows: usize,
    /// Revision up to which rows were examined, if there are more.
    pub until: Option<i64>,
}

impl Found {
    /// Adds changes that were found in other tables.
    fn merge(&mut self, mut other: Found) {
        self.changes.append(&mut other.changes);
        self.changes.sort_unstable_by_key(|change| change.revision);
        self.rows += other.rows;
        self.until = self.until.into_iter().chain(other.until).min();
    }

    /// Builds the answer, of at most `most` bytes.
    fn into_answer(mut self, current: i64, whole: bool, most: usize) -> Changes {
        let Some(until) = self.until else {
            return assemble(self.changes, current, whole, most);
        };
        self.changes.retain(|change| change.revision <= until);
        Changes {
            more: true,
            ..assemble(self.changes, until, whole, most)
        }
    }
}

/// A change.
pub(super) struct Change {
    pub revision: i64,
    /// Maximum bytes of JSON.
    pub cost: usize,
    pub kind: ChangeKind,
}

pub(super) enum ChangeKind {
    Member(Box<Member>),
    Removal(PublicKey),
}

/// One more than fit into an answer, which shows that there are more.
const LIMIT: usize = MAX_MEMBERS + 1;

/// Members after a revision, except one.
const MEMBERS: &str =
    "SELECT number, name, public_key, endpoints, relayed, tags, devices, revision,
        octet_length(name) + octet_length(endpoints) + octet_length(relayed) + octet_length(tags)
            + octet_length(devices), id, json_array_length(devices), name, tags, devices
    FROM member WHERE revision > ?1 AND id != ?2 ORDER BY revision";

fn cost_of(row: &Row<'_>) -> rusqlite::Result<usize> {
    let devices = row.get::<_, u32>(10)? as usize;
    Ok(MEMBER + DEVICE * devices + row.get::<_, u32>(8)? as usize)
}

pub(super) fn members_after(
    connection: &Connection,
    since: i64,
    networks: &Networks,
    visibility: &Visibility<'_>,
    asker: MemberId,
) -> Result<Found, StoreError> {
    let mut statement = connection.prepare_cached(MEMBERS)?;
    let mut rows = statement.query((since, asker.0))?;
    let (mut found, mut last) = (Found::default(), since);
    while let Some(row) = rows.next()?
        && found.changes.len() < LIMIT
    {
        if found.rows >= MAX_ROWS {
            found.until = Some(last);
            break;
        }
        found.rows += 1 + row.get::<_, u32>(10)? as usize;
        last = row.get(7)?;
        // Most rows are invisible, and cost less if the rest of them is not parsed.
        if !visibility.sees_row(row, 11)? {
            continue;
        }
        let member = Subject::from(member_of(row, networks)?);
        if let Some(member) = visibility.visible(&member)? {
            found.changes.push(Change {
                revision: last,
                cost: cost_of(row)?,
                kind: ChangeKind::Member(Box::new(member)),
            });
        }
    }
    Ok(found)
}

/// Returns the removals that the member must receive: removed members that it saw, and members that
/// it saw by their former name and tags and does not see any more.
fn gone_after(
    connection: &Connection,
    since: i64,
    visibility: &Visibility<'_>,
    asker: MemberId,
) -> Result<Found, StoreError> {
    let mut statement = connection.prepare_cached(
        "SELECT revision, public_key, name, tags, devices, ifnull(json_array_length(devices), 0)
         FROM removed WHERE revision > ?1
         UNION ALL
         SELECT revision, public_key, name, tags, devices, ifnull(json_array_length(devices), 0)
         FROM former WHERE revision > ?1 AND member != ?2
         ORDER BY revision",
    )?;
    let mut rows = statement.query((since, asker.0))?;
    let (mut found, mut last) = (Found::default(), since);
    let mut reported = HashSet::new();
    while let Some(row) = rows.next()?
        && found.changes.len() < LIMIT
    {
        if found.rows >= MAX_ROWS {
            found.until = Some(last);
            break;
        }
        found.rows += 1 + row.get::<_, u32>(5)? as usize;
        last = row.get(0)?;
        let key = row.get(1)?;
        if visibility.sees_row(row, 2)? && !visibility.sees_key(&key)? && reported.insert(key) {
            found.changes.push(removal(last, key));
        }
    }
    Ok(found)
}

fn removal(revision: i64, key: [u8; 32]) -> Change {
    Change {
        revision,
        cost: REMOVAL,
        kind: ChangeKind::Removal(PublicKey::from_bytes(key)),
    }
}

/// Builds an answer of at most `most` bytes from changes in the order of their revisions. If they
/// were cut off at [`LIMIT`], the answer is full before the cut.
pub(super) fn assemble(found: Vec<Change>, current: i64, whole: bool, most: usize) -> Changes {
    let mut changes = Changes {
        revision: unsigned(current),
        whole,
        ..Changes::default()
    };
    let mut remaining = most.saturating_sub(FRAME);
    let mut last = 0;
    for Change {
        revision,
        cost,
        kind,
    } in found
    {
        if changes.members.len() + changes.removed.len() == MAX_MEMBERS || cost > remaining {
            changes.more = true;
            changes.revision = unsigned(last);
            break;
        }
        remaining -= cost;
        last = revision;
        match kind {
            ChangeKind::Member(member) => changes.members.push(*member),
            ChangeKind::Removal(key) => changes.removed.push(key),
        }
    }
    changes
}
