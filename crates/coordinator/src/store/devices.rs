//! Devices behind members: the names that gateways report, and the approvals of administrators.
//!
//! A gateway reports the names of its devices, always all of them. A new one is pending: it has no
//! address, and no other member receives it. An administrator approves it and gives it tags. If its
//! gateway has joined with a token that allows devices, no approval is needed, and the device has
//! the tags of its gateway: a gateway that was taken over gains nothing by it. The name of a device
//! contains that of its gateway, so no member can claim a device of another.
//!
//! An approved device has a number of the same sequence as members, which determines its addresses.
//! It keeps the number until its gateway no longer reports it, or the approval is revoked.
//!
//! The devices of a member are a column of its row. A change of approved devices is a change of the
//! member, which others receive as any other.

use std::collections::BTreeSet;

use rusqlite::{Connection, Transaction};
use seikan_proto::mesh::{
    Device, DeviceName, MAX_DEVICES, MAX_MESH_DEVICES, MAX_TAGS, Name, Networks, Party,
};
use serde::{Deserialize, Serialize};

use super::tokens::{from_json, to_json};
use super::{
    Actor, MemberId, Store, StoreError, audit, first, networks_of, next_revision, numbers, seconds,
    value,
};

/// Maximum number of changed reports of one member within an hour.
const MAX_REPORTS_PER_HOUR: u32 = 30;
/// The approved devices of a row of `member`, in SQL: nobody has received others, so they are not
/// kept with former states.
pub(super) const APPROVED: &str = "(SELECT nullif(json_group_array(json(value)), '[]')
    FROM json_each(devices) WHERE value ->> 'number' NOT NULL)";
/// Log entry of a changed report.
const REPORTED: &str = "devices reported";

/// A device as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceInfo {
    /// It has addresses, and members receive it.
    Approved(Device),
    /// It waits for approval.
    Pending(Name),
}

impl DeviceInfo {
    /// Returns the name of the device behind its gateway.
    pub fn name(&self) -> &Name {
        match self {
            DeviceInfo::Approved(device) => &device.name,
            DeviceInfo::Pending(name) => name,
        }
    }
}

/// A device as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StoredDevice {
    name: Name,
    /// Determines the addresses; `None` until it is approved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    number: Option<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tags: Vec<Name>,
}

/// The row of a gateway.
struct Gateway {
    id: i64,
    name: String,
    tags: Vec<Name>,
    devices: Vec<StoredDevice>,
    /// The token by which its devices need no approval.
    trusted_by: Option<i64>,
}

impl Store {
    /// Sets the devices behind a member: new ones are pending or approved at once, and those that
    /// are not in the list are removed. Returns whether there was a change.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`] for more than [`MAX_DEVICES`], or a name that occurs twice;
    /// [`StoreError::TooManyDeviceChanges`], because former devices are kept forever;
    /// [`StoreError::DevicesFull`], [`StoreError::Full`]; [`StoreError::NotAMember`];
    /// [`StoreError::Sqlite`].
    pub fn report_devices(
        &self,
        id: MemberId,
        names: &[Name],
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        if names.len() > MAX_DEVICES {
            return Err(StoreError::OutOfBounds(
                "a member may have at most 64 devices",
            ));
        }
        let wanted: BTreeSet<Name> = names.iter().cloned().collect();
        if wanted.len() < names.len() {
            return Err(StoreError::OutOfBounds("two devices have the same name"));
        }
        // Gateways repeat their report; mostly it has not changed.
        if self.read(|connection| gateway(connection, id))?.names() == wanted {
            return Ok(false);
        }
        let (by, now) = (by.clone(), seconds(now));
        self.change(move |transaction| {
            let gateway = gateway(transaction, id)?;
            if gateway.names() == wanted {
                return Ok(false);
            }
            let recent = audit::count_since(transaction, REPORTED, &gateway.name, now - 3600)?;
            if recent >= MAX_REPORTS_PER_HOUR {
                return Err(StoreError::TooManyDeviceChanges {
                    most: MAX_REPORTS_PER_HOUR,
                });
            }
            check_total(transaction, gateway.devices.len(), wanted.len())?;
            let gone = gateway.devices.iter();
            let gone = gone.filter(|device| !wanted.contains(&device.name));
            free(transaction, gone)?;
            let mut devices = Vec::new();
            for name in &wanted {
                let known = gateway.devices.iter().find(|device| device.name == *name);
                devices.push(match known {
                    Some(known) => known.clone(),
                    None => new_device(transaction, &gateway, name)?,
                });
            }
            write(transaction, &gateway, &devices)?;
            audit::record(transaction, now, REPORTED, &gateway.name, &by)?;
            Ok(true)
        })
    }

    /// Approves a device, with these tags; `None`: those of its gateway. Returns whether it was
    /// pending, or had other tags.
    ///
    /// # Errors
    /// [`StoreError::NoDevice`]; [`StoreError::OutOfBounds`] for more than [`MAX_TAGS`];
    /// [`StoreError::Full`], [`StoreError::Sqlite`].
    pub fn approve_device(
        &self,
        name: &DeviceName,
        tags: Option<&[Name]>,
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        check_tags(tags.unwrap_or_default())?;
        let tags = tags.map(<[Name]>::to_vec);
        self.change_device(
            name,
            ("device approved", by, now),
            move |transaction, gateway, device| {
                match (device.number, &tags) {
                    (None, tags) => {
                        device.number = Some(next_number(transaction)?);
                        device
                            .tags
                            .clone_from(tags.as_ref().unwrap_or(&gateway.tags));
                    }
                    (Some(_), Some(tags)) => device.tags.clone_from(tags),
                    (Some(_), None) => {}
                }
                Ok(())
            },
        )
    }

    /// Replaces the tags of an approved device. Returns whether they have changed.
    ///
    /// # Errors
    /// [`StoreError::NoDevice`]; [`StoreError::DevicePending`]; [`StoreError::OutOfBounds`] for more
    /// than [`MAX_TAGS`]; [`StoreError::Sqlite`].
    pub fn set_device_tags(
        &self,
        name: &DeviceName,
        tags: &[Name],
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        check_tags(tags)?;
        let (tags, full) = (tags.to_vec(), name.clone());
        self.change_device(name, ("tags set", by, now), move |_, _, device| {
            if device.number.is_none() {
                return Err(StoreError::DevicePending(full.clone()));
            }
            device.tags.clone_from(&tags);
            Ok(())
        })
    }

    /// Takes the approval of a device back: it loses its addresses and is pending. Returns whether
    /// it was approved.
    ///
    /// # Errors
    /// [`StoreError::NoDevice`]; [`StoreError::DeviceTrusted`], since its gateway could have it
    /// approved again by two reports; [`StoreError::Sqlite`].
    pub fn revoke_device(
        &self,
        name: &DeviceName,
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        let full = name.clone();
        self.change_device(
            name,
            ("device revoked", by, now),
            move |transaction, gateway, device| {
                if let Some(token) = gateway.trusted_by {
                    let device = full.clone();
                    return Err(StoreError::DeviceTrusted { device, token });
                }
                free(transaction, [&*device])?;
                (device.number, device.tags) = (None, Vec::new());
                Ok(())
            },
        )
    }

    /// Changes one device, with a log entry if it differs then.
    fn change_device(
        &self,
        name: &DeviceName,
        (change, by, now): (&'static str, &Actor, u64),
        work: impl Fn(&Transaction<'_>, &Gateway, &mut StoredDevice) -> Result<(), StoreError>
        + Send
        + 'static,
    ) -> Result<bool, StoreError> {
        let (name, by, now) = (name.clone(), by.clone(), seconds(now));
        self.change(move |transaction| {
            let no_device = || StoreError::NoDevice(name.clone());
            let sql = "SELECT id FROM member WHERE name = ?1";
            let id = first(transaction, sql, [name.gateway.as_str()], |row| row.get(0))?;
            let gateway = gateway(transaction, MemberId(id.ok_or_else(no_device)?))?;
            let mut devices = gateway.devices.clone();
            let device = devices.iter_mut().find(|device| device.name == name.device);
            work(transaction, &gateway, device.ok_or_else(no_device)?)?;
            if devices == gateway.devices {
                return Ok(false);
            }
            write(transaction, &gateway, &devices)?;
            audit::record(transaction, now, change, &name.to_string(), &by)?;
            Ok(true)
        })
    }
}

impl Gateway {
    fn names(&self) -> BTreeSet<Name> {
        let devices = self.devices.iter();
        devices.map(|device| device.name.clone()).collect()
    }
}

fn gateway(connection: &Connection, id: MemberId) -> Result<Gateway, StoreError> {
    let sql = "SELECT member.name, member.tags, member.devices,
                      iif(token.devices AND token.withdrawn IS NULL, token.id, NULL)
               FROM member JOIN token ON token.id = member.token WHERE member.id = ?1";
    let row = first(connection, sql, [id.0], |row| {
        let texts: (String, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        Ok((texts, row.get(3)?))
    })?;
    let ((name, tags, devices), trusted_by) = row.ok_or(StoreError::NotAMember)?;
    Ok(Gateway {
        id: id.0,
        name,
        tags: from_json(&tags, "tags")?,
        devices: from_json(&devices, "devices")?,
        trusted_by,
    })
}

fn check_tags(tags: &[Name]) -> Result<(), StoreError> {
    if tags.len() > MAX_TAGS {
        return Err(StoreError::OutOfBounds("a device may have at most 16 tags"));
    }
    Ok(())
}

/// Checks the number of devices of the mesh when a member has `after` in place of `before`.
fn check_total(connection: &Connection, before: usize, after: usize) -> Result<(), StoreError> {
    if after <= before {
        return Ok(());
    }
    let sql = "SELECT ifnull(sum(json_array_length(devices)), 0) FROM member WHERE devices != '[]'";
    let all: u32 = value(connection, sql, [])?;
    if all as usize + after - before > MAX_MESH_DEVICES {
        return Err(StoreError::DevicesFull {
            most: MAX_MESH_DEVICES,
        });
    }
    Ok(())
}

fn new_device(
    transaction: &Transaction<'_>,
    gateway: &Gateway,
    name: &Name,
) -> Result<StoredDevice, StoreError> {
    let mut device = StoredDevice {
        name: name.clone(),
        number: None,
        tags: Vec::new(),
    };
    if gateway.trusted_by.is_some() {
        device.number = Some(next_number(transaction)?);
        device.tags.clone_from(&gateway.tags);
    }
    Ok(device)
}

fn next_number(transaction: &Transaction<'_>) -> Result<u32, StoreError> {
    let networks = networks_of(transaction)?.ok_or(StoreError::NoNetworks)?;
    numbers::take(transaction, &networks)
}

/// Frees the numbers of devices. Each has a revision of its own, because those are unique.
fn free<'a>(
    transaction: &Transaction<'_>,
    devices: impl IntoIterator<Item = &'a StoredDevice>,
) -> Result<(), StoreError> {
    for number in devices.into_iter().filter_map(|device| device.number) {
        numbers::free(transaction, number, next_revision(transaction)?)?;
    }
    Ok(())
}

/// Gives the devices of a member that have its former tags the new ones, in a change of its row.
pub(super) fn follow_tags(
    transaction: &Transaction<'_>,
    id: i64,
    tags: &[Name],
) -> Result<(), StoreError> {
    let mut gateway = gateway(transaction, MemberId(id))?;
    for device in gateway.devices.iter_mut().filter(|d| d.number.is_some()) {
        if device.tags == gateway.tags {
            device.tags = tags.to_vec();
        }
    }
    let sql = "UPDATE member SET devices = ?2 WHERE id = ?1";
    transaction.execute(sql, (id, to_json(&gateway.devices)?))?;
    Ok(())
}

/// Frees the numbers of all devices behind a member.
pub(super) fn free_all(transaction: &Transaction<'_>, id: i64) -> Result<(), StoreError> {
    free(transaction, &gateway(transaction, MemberId(id))?.devices)
}

/// Replaces the devices of a gateway. If approved ones differ, others receive the gateway again, and
/// it receives all members that it sees.
fn write(
    transaction: &Transaction<'_>,
    gateway: &Gateway,
    devices: &[StoredDevice],
) -> Result<(), StoreError> {
    let approved = |devices: &[StoredDevice]| -> Vec<StoredDevice> {
        let approved = devices.iter().filter(|device| device.number.is_some());
        approved.cloned().collect()
    };
    if approved(devices) != approved(&gateway.devices) {
        let revision = next_revision(transaction)?;
        transaction.execute(
            &format!(
                "INSERT INTO former (revision, member, public_key, name, tags, devices)
                 SELECT ?2, id, public_key, name, tags, {APPROVED} FROM member WHERE id = ?1"
            ),
            (gateway.id, revision),
        )?;
        let sql = "UPDATE member SET revision = ?2 WHERE id = ?1";
        transaction.execute(sql, (gateway.id, revision))?;
    }
    let sql = "UPDATE member SET devices = ?2 WHERE id = ?1";
    transaction.execute(sql, (gateway.id, to_json(devices)?))?;
    Ok(())
}

/// Returns the approved devices of a row.
pub(super) fn approved(json: &str, networks: &Networks) -> Result<Vec<Device>, StoreError> {
    let infos = infos(json, networks)?.into_iter();
    let approved = infos.filter_map(|info| match info {
        DeviceInfo::Approved(device) => Some(device),
        DeviceInfo::Pending(_) => None,
    });
    Ok(approved.collect())
}

/// Returns all devices of a row.
pub(super) fn infos(json: &str, networks: &Networks) -> Result<Vec<DeviceInfo>, StoreError> {
    let devices = from_json::<StoredDevice>(json, "devices")?.into_iter();
    let infos = devices.map(|device| {
        let Some(number) = device.number else {
            return Ok(DeviceInfo::Pending(device.name));
        };
        let addresses = networks.addresses(number);
        Ok(DeviceInfo::Approved(Device {
            name: device.name,
            addresses: addresses.ok_or(StoreError::Corrupt("numbers"))?.to_vec(),
            tags: device.tags,
        }))
    });
    infos.collect()
}

/// Returns the approved devices of a row as input to the policy.
pub(super) fn parties(json: &str, gateway: &Name) -> Result<Vec<Party>, StoreError> {
    let devices = from_json::<StoredDevice>(json, "devices")?.into_iter();
    let approved = devices.filter(|device| device.number.is_some());
    let parties = approved.map(|device| Party {
        name: device.name,
        tags: device.tags,
        gateway: Some(gateway.clone()),
    });
    Ok(parties.collect())
}
