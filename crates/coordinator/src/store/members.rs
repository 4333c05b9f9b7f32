//! Members: endpoints, keys, activity, and removal.

use std::collections::BTreeMap;

use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{
    Device, Digest, Endpoints, MAX_ENDPOINTS, MAX_RELAYED, Member, Name, Networks,
};

use super::devices::{self, DeviceInfo};
use super::policy::Visibility;
use super::rows::{Bytes, Former, Freed, MemberRow, Mesh, Seen, Term, is_within_hourly};
use super::{Actor, Store, StoreError, audit};

/// Minimum interval at which a member's activity is recorded, in seconds.
const SEEN_INTERVAL: u64 = 60;

/// Log entry of a new key.
const KEY_CHANGED: &str = "key changed";
/// Maximum number of new keys of one member within an hour.
const MAX_KEYS_PER_HOUR: usize = 10;

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
    /// Time of its latest activity, in seconds since 1970; up to a minute early. While the member
    /// polls a `coordinator` that shares the mesh, this is the time at which it began to poll
    /// there.
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
        self.read_latest(|mesh| with_credential(mesh, credential).ok_or(StoreError::NotAMember))
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
        self.read(|mesh| Ok(with_credential(mesh, credential)))
    }

    /// Sets the endpoints of a member, the best first. Returns whether they have changed; if not,
    /// nobody is notified.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`]: more than [`MAX_ENDPOINTS`] or [`MAX_RELAYED`];
    /// [`StoreError::NotAMember`]; [`StoreError::Sqlite`].
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
        if self.read(|mesh| Ok(member(mesh, id)?.endpoints == *wanted))? {
            return Ok(false);
        }
        let wanted = wanted.clone();
        self.change(move |mesh| {
            let revision = mesh.next_revision()?;
            mesh.put(MemberRow {
                endpoints: wanted.clone(),
                revision,
                ..member(mesh, id)?.clone()
            })?;
            record_seen(mesh, id, now).map(|()| true)
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
        let public_key = Bytes::from(key);
        // Members send their key at each start; in most cases it has not changed.
        if self.read(|mesh| Ok(member(mesh, id)?.public_key == public_key))? {
            return Ok(false);
        }
        let (key, by) = (*key, by.clone());
        self.change(move |mesh| {
            let mut former = member(mesh, id)?.clone();
            // A concurrent request has set it.
            if former.public_key == public_key {
                return Ok(false);
            }
            if mesh.member.find(&Term::PublicKey(public_key)).is_some() {
                return Err(StoreError::KeyTaken { key });
            }
            let name = former.own.name.to_string();
            if !is_within_hourly(&mut former.recent.keys, now, MAX_KEYS_PER_HOUR) {
                return Err(StoreError::TooManyKeys {
                    most: MAX_KEYS_PER_HOUR,
                });
            }
            // Two revisions, because each is unique. One answer has both unless it ends between
            // them.
            let gone = mesh.next_revision()?;
            keep_former(mesh, &former, gone, 0)?;
            let revision = mesh.next_revision()?;
            mesh.put(MemberRow {
                public_key,
                revision,
                ..former
            })?;
            audit::record(mesh, now, KEY_CHANGED, &name, &by)?;
            Ok(true)
        })
    }

    /// Records the activity of a member, at most once a minute. For a shared mesh, records that the
    /// member polls this coordinator.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`], [`StoreError::Sqlite`].
    pub fn touch(&self, id: MemberId, now: u64) -> Result<(), StoreError> {
        let seen = self.read(|mesh| Ok(last_seen(mesh, member(mesh, id)?)))?;
        if let Some(live) = self.live() {
            live.note_poll(id.0, now);
            return Ok(());
        }
        if now < seen.saturating_add(SEEN_INTERVAL) {
            return Ok(());
        }
        self.change_local(|mesh| record_seen(mesh, id, now))
    }

    /// Returns the key of a member, and the id of the member with another key; `None` in place of
    /// both if no member that the first may talk to has that key.
    ///
    /// # Errors
    /// [`StoreError::NotAMember`] if the first is no member; [`StoreError::Sqlite`].
    pub fn pair(
        &self,
        id: MemberId,
        other: &PublicKey,
    ) -> Result<(PublicKey, Option<MemberId>), StoreError> {
        self.read(|mesh| {
            let own = member(mesh, id)?.public_key.into();
            let visibility = Visibility::new(self, mesh, id);
            let other = mesh.member.find(&Term::PublicKey(other.into()));
            let other = match other {
                Some(row) if visibility.sees(&row.own, &row.devices)? => Some(MemberId(row.id)),
                _ => None,
            };
            Ok((own, other))
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
            MemberRef::Id(id) => (id.0, None),
            MemberRef::Name(name) => (0, Some(Term::Name(name.clone()))),
        };
        self.change(move |mesh| {
            let found = match &name {
                Some(name) => mesh.member.find(name),
                None => mesh.member.get(&id),
            };
            let Some(row) = found.cloned() else {
                return Ok(false);
            };
            let since = mesh.next_revision()?;
            keep_former(mesh, &row, since, 0)?;
            mesh.put(Freed {
                since,
                number: row.number,
                device: None,
            })?;
            devices::free(mesh, &row, &row.devices)?;
            mesh.delete::<MemberRow>(row.id)?;
            mesh.delete::<Seen>(row.id)?;
            audit::record(mesh, now, change, row.own.name.as_str(), &by)?;
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
        self.read(|mesh| {
            let networks = mesh.networks()?.ok_or(StoreError::NoNetworks)?;
            let by_number = mesh
                .member
                .by_terms(Term::Number(0)..=Term::Number(u32::MAX));
            let infos = by_number.map(|row| {
                let seen = seen.get(&row.id);
                let seen: Option<Seen> = seen.and_then(|seen| serde_json::from_str(seen).ok());
                Ok(MemberInfo {
                    number: row.number,
                    member: row.member(&networks, devices::approved(row, &networks)?)?,
                    devices: devices::infos(row, &networks)?,
                    joined: row.joined,
                    seen: seen.map_or_else(|| last_seen(mesh, row), |seen| seen.at),
                    coordinator: present.get(&row.id).cloned(),
                })
            });
            infos.collect()
        })
    }
}

/// Returns the row of a member.
pub(super) fn member(mesh: &Mesh, id: MemberId) -> Result<&MemberRow, StoreError> {
    mesh.member.get(&id.0).ok_or(StoreError::NotAMember)
}

fn with_credential(mesh: &Mesh, credential: &Digest) -> Option<MemberId> {
    let row = mesh.member.find(&Term::Digest((*credential).into()))?;
    Some(MemberId(row.id))
}

/// Keeps a copy of a member as it was until a revision. `id`: see [`Former::member`].
pub(super) fn keep_former(
    mesh: &mut Mesh,
    row: &MemberRow,
    revision: u64,
    id: i64,
) -> Result<(), StoreError> {
    // Other members never received unapproved devices.
    let approved = row.devices.iter().filter(|device| device.is_approved());
    mesh.put(Former {
        revision,
        member: id,
        public_key: row.public_key,
        own: Some(row.own.clone()),
        devices: approved.cloned().collect(),
    })
}

/// Returns the time of a member's latest activity.
fn last_seen(mesh: &Mesh, row: &MemberRow) -> u64 {
    mesh.seen.get(&row.id).map_or(row.joined, |seen| seen.at)
}

/// Records the activity of a member.
fn record_seen(mesh: &mut Mesh, id: MemberId, now: u64) -> Result<(), StoreError> {
    let known = mesh.seen.get(&id.0).map_or(0, |seen| seen.at);
    mesh.put(Seen {
        member: id.0,
        at: now.max(known),
    })
}

impl MemberRow {
    /// Returns the member as others receive it, with these devices.
    pub fn member(&self, networks: &Networks, devices: Vec<Device>) -> Result<Member, StoreError> {
        let addresses = networks.addresses(self.number);
        Ok(Member {
            name: self.own.name.clone(),
            public_key: self.public_key.into(),
            addresses: addresses.ok_or(StoreError::Corrupt("numbers"))?.to_vec(),
            endpoints: self.endpoints.endpoints.clone(),
            relayed: self.endpoints.relayed.clone(),
            tags: self.own.tags.clone(),
            devices,
        })
    }
}
