//! Answers to members' polls for changes.
//!
//! Every change has a revision. An answer contains the members and the removals after the revision
//! that the member knows, in the order of their revisions, and as many as fit. Removals are kept
//! forever: a member may have been away for long.
//!
//! A member receives only the members and devices that policy allows it and the devices behind it to
//! talk to, in either direction ([`Visibility`]). A device comes with the member that it is behind.
//! If the tags or devices of another member change, it may appear or disappear. If the
//! member's own tags or devices change, or the policy changes which members it sees, it receives all
//! visible members again.
//!
//! The work of one answer is bounded. The caller bounds the work of all answers of a member by
//! counting the examined members, removals and devices.

use std::collections::HashSet;

use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::policy::{MAX_POLICY, MAX_RULES};
use seikan_proto::mesh::{
    Changes, Cursor, Device, MAX_COORDINATORS, MAX_DEVICES, MAX_MEMBERS, MAX_RELAYS, MAX_TAGS,
    Member, Name, Networks,
};

use super::devices;
use super::members::member;
use super::policy::{Difference, Visibility};
use super::rows::Term;
use super::{MemberId, Store, StoreError};

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
/// Bytes of an endpoint in JSON, rounded up: an address of 58 with its scope, quotes and a comma.
const ENDPOINT: usize = 64;
/// Bytes of a device in JSON without its name and tags, rounded up: addresses of 15 and 39, field
/// names and punctuation.
const DEVICE: usize = 128;
/// Bytes of the requester's own devices: each with a name and [`MAX_TAGS`] tags of 63, with quotes
/// and commas.
const OWN_DEVICES: usize = MAX_DEVICES * (DEVICE + 66 * (1 + MAX_TAGS));
/// Bytes of a removal in JSON: a key of 44, quotes and a comma.
const REMOVAL: usize = 47;
/// Maximum number of members and their devices, and of removals, that are examined for one answer,
/// whether or not they are visible. A whole answer, which needs no removals, may examine [`LIMIT`]
/// more.
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
    /// 20,000 members and 16,384 removals, where each device behind a member counts as one more. If
    /// there are more, `more` is set, and the next poll with the answer's cursor returns them.
    ///
    /// The answer is `whole` if the member knows nothing, knows a revision that does not exist, or
    /// may now see other members than before: it must then forget everything that it knew before. A
    /// whole answer with `more` is the first part of a list; the following parts are not `whole`.
    ///
    /// [`Store::catch_up_to`] comes first: another coordinator may have reported changes that this
    /// copy does not have yet.
    ///
    /// The first part also contains the policy, if it has changed since the cursor's sight or the
    /// answer is whole, and the member's own name, tags and devices.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`], [`StoreError::NoNetworks`], [`StoreError::Corrupt`],
    /// [`StoreError::Sqlite`].
    pub fn answer(
        &self,
        known: impl Into<Cursor>,
        asker: MemberId,
        most: usize,
    ) -> Result<Answer, StoreError> {
        let known = known.into();
        self.read(|mesh| {
            let current = mesh.head().revision;
            let networks = mesh.networks()?.ok_or(StoreError::NoNetworks)?;
            let visibility = Visibility::new(self, mesh, asker);
            let difference = visibility.difference(known.sight, current)?;
            let whole = known.revision == 0
                || known.revision > current
                || difference == Difference::Members;
            let found = if whole {
                members_after(&visibility, 0, &networks, MAX_ROWS + LIMIT)?
            } else {
                let mut found = members_after(&visibility, known.revision, &networks, MAX_ROWS)?;
                found.merge(gone_after(&visibility, known.revision)?);
                found
            };
            let with_policy = whole || difference == Difference::Rules;
            let policy = with_policy.then(|| visibility.rules()).transpose()?;
            let row = member(mesh, asker)?;
            let own_devices = whole.then(|| devices::approved(row, &networks));
            let rows = found.rows;
            let changes = Changes {
                sight: current,
                policy,
                own: whole.then(|| row.own.clone()),
                own_devices: own_devices.transpose()?.unwrap_or_default(),
                ..found.into_answer(current, whole, most)
            };
            Ok(Answer { changes, rows })
        })
    }

    /// Waits until the copy has all changes that others have made so far, unless it has this
    /// revision. It may take seconds if etcd does not answer.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]; [`StoreError::Sqlite`].
    pub fn catch_up_to(&self, revision: u64) -> Result<(), StoreError> {
        if revision > self.revision()? {
            self.catch_up()?;
        }
        Ok(())
    }

    /// [`Store::answer`] without the number of rows, after [`Store::catch_up_to`].
    ///
    /// # Errors
    /// As [`Store::answer`].
    #[cfg(any(test, fuzzing))]
    pub fn changes(
        &self,
        known: impl Into<Cursor>,
        asker: MemberId,
    ) -> Result<Changes, StoreError> {
        let known = known.into();
        self.catch_up_to(known.revision)?;
        Ok(self
            .answer(known, asker, seikan_proto::mesh::MAX_ANSWER)?
            .changes)
    }
}

/// Changes found for an answer.
#[derive(Default)]
pub(super) struct Found {
    pub changes: Vec<Change>,
    /// Number of examined rows and of devices in them.
    pub rows: usize,
    /// Revision up to which rows were examined, if there are more.
    pub until: Option<u64>,
}

impl Found {
    /// Adds changes that were found in another table.
    fn merge(&mut self, mut other: Found) {
        self.changes.append(&mut other.changes);
        self.changes.sort_unstable_by_key(|change| change.revision);
        self.rows += other.rows;
        self.until = self.until.into_iter().chain(other.until).min();
    }

    /// Builds the answer, of at most `most` bytes.
    fn into_answer(mut self, current: u64, whole: bool, most: usize) -> Changes {
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
    pub revision: u64,
    /// Maximum bytes of JSON.
    pub cost: usize,
    pub kind: ChangeKind,
}

pub(super) enum ChangeKind {
    Member(Box<Member>),
    Removal(PublicKey),
}

/// One more than fits into an answer, to detect that there are more.
const LIMIT: usize = MAX_MEMBERS + 1;

/// Returns the members after a revision that another one sees; examines at most `most_rows`.
pub(super) fn members_after(
    visibility: &Visibility<'_>,
    since: u64,
    networks: &Networks,
    most_rows: usize,
) -> Result<Found, StoreError> {
    let (mut found, mut last) = (Found::default(), since);
    for row in visibility.mesh.member.ordered_after(since) {
        if found.changes.len() == LIMIT {
            break;
        }
        if found.rows >= most_rows {
            found.until = Some(last);
            break;
        }
        found.rows += 1 + row.devices.len();
        last = row.revision;
        if row.id == visibility.of.0 {
            continue;
        }
        if let Some(member) = visibility.visible(row, networks)? {
            found.changes.push(Change {
                revision: last,
                cost: cost_of(&member),
                kind: ChangeKind::Member(Box::new(member)),
            });
        }
    }
    Ok(found)
}

fn cost_of(member: &Member) -> usize {
    // Each word also has quotes and a comma.
    let words = |name: &Name, tags: &[Name]| -> usize {
        let all = tags.iter().chain([name]);
        all.map(|word| word.as_str().len() + 3).sum()
    };
    let device = |device: &Device| DEVICE + words(&device.name, &device.tags);
    MEMBER
        + words(&member.name, &member.tags)
        + ENDPOINT * (member.endpoints.len() + member.relayed.len())
        + member.devices.iter().map(device).sum::<usize>()
}

/// Returns the removals that the member must receive: former members that it saw, with keys of
/// members that it does not see now.
fn gone_after(visibility: &Visibility<'_>, since: u64) -> Result<Found, StoreError> {
    let (mut found, mut last) = (Found::default(), since);
    let mut reported = HashSet::new();
    for former in visibility.mesh.former.ordered_after(since) {
        if found.changes.len() == LIMIT {
            break;
        }
        if found.rows >= MAX_ROWS {
            found.until = Some(last);
            break;
        }
        if former.member == visibility.of.0 {
            continue;
        }
        found.rows += 1 + former.devices.len();
        last = former.revision;
        let key = former.public_key;
        let was_seen = match &former.own {
            Some(own) => visibility.sees(own, &former.devices)?,
            None => true,
        };
        let current = visibility.mesh.member.find(&Term::PublicKey(key));
        let is_seen = current.map(|row| visibility.sees(&row.own, &row.devices));
        if was_seen && !is_seen.transpose()?.unwrap_or(false) && reported.insert(key.0) {
            found.changes.push(Change {
                revision: last,
                cost: REMOVAL,
                kind: ChangeKind::Removal(key.into()),
            });
        }
    }
    Ok(found)
}

/// Builds an answer of at most `most` bytes from changes in the order of their revisions. If they
/// were cut off at [`LIMIT`], the answer is full before the cut.
pub(super) fn assemble(found: Vec<Change>, current: u64, whole: bool, most: usize) -> Changes {
    let mut changes = Changes {
        revision: current,
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
            changes.revision = last;
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
