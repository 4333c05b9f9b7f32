//! Devices behind members: the names that gateways report, and the approvals of administrators.
//!
//! A gateway reports the names of its devices, always all of them. A new one is pending: it has no
//! address, and no other member receives it. An administrator approves it and gives it tags. If its
//! gateway has joined with a token that allows devices, no approval is needed, and the device has
//! the tags of its gateway: a gateway that was taken over gains nothing by it. The name of a device
//! contains that of its gateway, so no member can claim a device of another.
//!
//! An approved device has a number of the same sequence as members, which determines its addresses.
//! It keeps the number until its gateway no longer reports it, or the approval is revoked. An
//! approval is for one gateway: at another gateway the device is approved again, and then has its
//! former number if an administrator says so, or if both gateways joined with one token that allows
//! devices.
//!
//! The devices of a member are a column of its row. A change of approved devices is a change of the
//! member, which others receive as any other.

use std::collections::BTreeMap;

use rusqlite::{Connection, Row, Transaction};
use seikan_proto::mesh::{
    Device, DeviceName, Devices, Families, MAX_DEVICES, MAX_MESH_DEVICES, MAX_TAGS, Name, Networks,
    Party,
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
    /// Families in which it has an address.
    #[serde(default, skip_serializing_if = "Families::is_both")]
    families: Families,
    /// Determines the addresses; `None` until it is approved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    number: Option<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tags: Vec<Name>,
}

/// The row of a gateway.
struct Gateway {
    id: i64,
    name: Name,
    tags: Vec<Name>,
    devices: Vec<StoredDevice>,
    /// The token by which it has joined.
    token: i64,
    /// Whether its devices need no approval, by that token.
    is_trusted: bool,
}

/// The device that had a free number last.
#[derive(Serialize, Deserialize)]
struct FormerDevice {
    name: Name,
    gateway: Name,
    /// `None`: those of its gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tags: Option<Vec<Name>>,
    /// The token of its gateway.
    token: i64,
}

impl Store {
    /// Sets the devices behind a member: new ones are pending or approved at once, and those that
    /// are not in the list are removed. A new one that is approved at once has the addresses of a
    /// removed one with its name, if the gateway of that had joined with the same token. Returns
    /// whether there was a change.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`] for more than [`MAX_DEVICES`], or a name that occurs twice;
    /// [`StoreError::TooManyDeviceChanges`], because former devices are kept forever;
    /// [`StoreError::DevicesFull`], [`StoreError::Full`]; [`StoreError::NotAMember`];
    /// [`StoreError::Sqlite`].
    pub fn report_devices(
        &self,
        id: MemberId,
        reported: &Devices,
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        if reported.devices.len() > MAX_DEVICES {
            return Err(StoreError::OutOfBounds(
                "a member may have at most 64 devices",
            ));
        }
        let names = reported.devices.iter();
        let wanted = names.map(|name| (name.clone(), reported.families(name)));
        let wanted: BTreeMap<Name, Families> = wanted.collect();
        if wanted.len() < reported.devices.len() {
            return Err(StoreError::OutOfBounds("two devices have the same name"));
        }
        // Gateways repeat their report; mostly it has not changed.
        if self.read(|connection| gateway(connection, id))?.reported() == wanted {
            return Ok(false);
        }
        let (by, now) = (by.clone(), seconds(now));
        self.change(move |transaction| {
            let gateway = gateway(transaction, id)?;
            if gateway.reported() == wanted {
                return Ok(false);
            }
            let recent =
                audit::count_since(transaction, REPORTED, gateway.name.as_str(), now - 3600)?;
            if recent >= MAX_REPORTS_PER_HOUR {
                return Err(StoreError::TooManyDeviceChanges {
                    most: MAX_REPORTS_PER_HOUR,
                });
            }
            check_total(transaction, gateway.devices.len(), wanted.len())?;
            let gone = gateway.devices.iter();
            let gone = gone.filter(|device| !wanted.contains_key(&device.name));
            free(transaction, &gateway, gone)?;
            let mut devices = Vec::new();
            for (name, families) in &wanted {
                let known = gateway.devices.iter().find(|device| device.name == *name);
                let device = match known {
                    Some(known) => known.clone(),
                    None => new_device(transaction, &gateway, name)?,
                };
                devices.push(StoredDevice {
                    families: *families,
                    ..device
                });
            }
            write(transaction, &gateway, &devices)?;
            audit::record(transaction, now, REPORTED, gateway.name.as_str(), &by)?;
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

    /// Approves a device as the one that was `from` before, at another gateway or with another name:
    /// it gets the addresses of that, and its tags unless there are others in `tags`. Tags that were
    /// those of the former gateway are replaced by those of the new one. `from` is pending if its
    /// gateway still reports it.
    ///
    /// # Errors
    /// As [`Self::approve_device`]; [`StoreError::NoAddresses`] if `from` has and had none, or
    /// another has them.
    pub fn move_device(
        &self,
        (from, name): (&DeviceName, &DeviceName),
        tags: Option<&[Name]>,
        by: &Actor,
        now: u64,
    ) -> Result<(), StoreError> {
        check_tags(tags.unwrap_or_default())?;
        let tags = tags.map(<[Name]>::to_vec);
        let (from, name) = (from.clone(), name.clone());
        let (by, now) = (by.clone(), seconds(now));
        self.change(move |transaction| {
            let (mut gateway, at) = find(transaction, &name)?;
            if from == name && gateway.devices[at].number.is_some() {
                return Err(StoreError::NoAddresses(from.clone()));
            }
            let own = gateway.devices[at].clone();
            free(transaction, &gateway, [&own])?;
            let (number, former_tags) = take_over(transaction, &from)?;
            // The former gateway may be the same.
            if from.gateway == name.gateway {
                (gateway, _) = find(transaction, &name)?;
            }
            let mut devices = gateway.devices.clone();
            let tags = tags.clone().or(former_tags);
            devices[at] = StoredDevice {
                number: Some(number),
                tags: tags.unwrap_or_else(|| gateway.tags.clone()),
                ..own
            };
            write(transaction, &gateway, &devices)?;
            let subject = format!("{from} to {name}");
            audit::record(transaction, now, "device moved", &subject, &by)
        })
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
                if gateway.is_trusted {
                    let (device, token) = (full.clone(), gateway.token);
                    return Err(StoreError::DeviceTrusted { device, token });
                }
                free(transaction, gateway, [&*device])?;
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
            let (gateway, at) = find(transaction, &name)?;
            let mut devices = gateway.devices.clone();
            work(transaction, &gateway, &mut devices[at])?;
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
    fn reported(&self) -> BTreeMap<Name, Families> {
        let devices = self.devices.iter();
        devices
            .map(|device| (device.name.clone(), device.families))
            .collect()
    }
}

/// Returns the gateway of a device, and the position of the device in its list.
fn find(connection: &Connection, name: &DeviceName) -> Result<(Gateway, usize), StoreError> {
    let no_device = || StoreError::NoDevice(name.clone());
    let id = member_called(connection, &name.gateway)?.ok_or_else(no_device)?;
    let gateway = gateway(connection, id)?;
    let mut devices = gateway.devices.iter();
    let at = devices.position(|device| device.name == name.device);
    let at = at.ok_or_else(no_device)?;
    Ok((gateway, at))
}

fn member_called(connection: &Connection, name: &Name) -> Result<Option<MemberId>, StoreError> {
    let sql = "SELECT id FROM member WHERE name = ?1";
    let id = first(connection, sql, [name.as_str()], |row| row.get(0))?;
    Ok(id.map(MemberId))
}

/// Takes the number of a device, which may have lost it. Returns it with the tags of the device,
/// unless they were those of its gateway.
fn take_over(
    transaction: &Transaction<'_>,
    name: &DeviceName,
) -> Result<(u32, Option<Vec<Name>>), StoreError> {
    if let Some(id) = member_called(transaction, &name.gateway)? {
        let gateway = gateway(transaction, id)?;
        let mut devices = gateway.devices.clone();
        let device = devices.iter_mut().find(|device| device.name == name.device);
        if let Some(device) = device
            && let Some(number) = device.number.take()
        {
            let tags = std::mem::take(&mut device.tags);
            write(transaction, &gateway, &devices)?;
            return Ok((number, (tags != gateway.tags).then_some(tags)));
        }
    }
    let sql = "SELECT number, device FROM freed
               WHERE device NOT NULL AND device ->> 'name' = ?1 AND device ->> 'gateway' = ?2
               ORDER BY since DESC LIMIT 1";
    let words = (name.device.as_str(), name.gateway.as_str());
    let row = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?));
    let found: Option<(u32, String)> = first(transaction, sql, words, row)?;
    let (number, device) = found.ok_or_else(|| StoreError::NoAddresses(name.clone()))?;
    let device: FormerDevice =
        serde_json::from_str(&device).map_err(|_| StoreError::Corrupt("former devices"))?;
    numbers::take_back(transaction, number)?;
    Ok((number, device.tags))
}

/// Takes the number that a removed device with this name had behind this gateway, or else behind
/// another one that joined with the same token, if there is one.
fn take_same_token(
    transaction: &Transaction<'_>,
    gateway: &Gateway,
    name: &Name,
) -> Result<Option<u32>, StoreError> {
    let sql = "SELECT number FROM freed
               WHERE device NOT NULL AND device ->> 'name' = ?1 AND device ->> 'token' = ?2
               ORDER BY device ->> 'gateway' = ?3 DESC, since DESC LIMIT 1";
    let values = (name.as_str(), gateway.token, gateway.name.as_str());
    let found = first(transaction, sql, values, |row| row.get(0))?;
    if let Some(number) = found {
        numbers::take_back(transaction, number)?;
    }
    Ok(found)
}

fn gateway(connection: &Connection, id: MemberId) -> Result<Gateway, StoreError> {
    let sql = "SELECT member.name, member.tags, member.devices,
                      token.id, token.devices AND token.withdrawn IS NULL
               FROM member JOIN token ON token.id = member.token WHERE member.id = ?1";
    let row = first(connection, sql, [id.0], |row| {
        let texts: (String, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        Ok((texts, row.get(3)?, row.get(4)?))
    })?;
    let ((name, tags, devices), token, is_trusted) = row.ok_or(StoreError::NotAMember)?;
    Ok(Gateway {
        id: id.0,
        name: name.parse().map_err(|_| StoreError::Corrupt("names"))?,
        tags: from_json(&tags, "tags")?,
        devices: from_json(&devices, "devices")?,
        token,
        is_trusted,
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
        families: Families::Both,
        number: None,
        tags: Vec::new(),
    };
    if gateway.is_trusted {
        let former = take_same_token(transaction, gateway, name)?;
        device.number = Some(match former {
            Some(former) => former,
            None => next_number(transaction)?,
        });
        device.tags.clone_from(&gateway.tags);
    }
    Ok(device)
}

fn next_number(transaction: &Transaction<'_>) -> Result<u32, StoreError> {
    let networks = networks_of(transaction)?.ok_or(StoreError::NoNetworks)?;
    numbers::take(transaction, &networks)
}

/// Frees the numbers of devices of a gateway. Each has a revision of its own, because those are
/// unique.
fn free<'a>(
    transaction: &Transaction<'_>,
    gateway: &Gateway,
    devices: impl IntoIterator<Item = &'a StoredDevice>,
) -> Result<(), StoreError> {
    for device in devices {
        let Some(number) = device.number else {
            continue;
        };
        let former = FormerDevice {
            name: device.name.clone(),
            gateway: gateway.name.clone(),
            tags: (device.tags != gateway.tags).then(|| device.tags.clone()),
            token: gateway.token,
        };
        let former = serde_json::to_string(&former).map_err(|_| StoreError::Corrupt("devices"))?;
        numbers::free(
            transaction,
            number,
            next_revision(transaction)?,
            Some(&former),
        )?;
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
    let gateway = gateway(transaction, MemberId(id))?;
    free(transaction, &gateway, &gateway.devices)
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
        let addresses = addresses.ok_or(StoreError::Corrupt("numbers"))?.into_iter();
        let of_device = addresses.filter(|address| device.families.has(address));
        Ok(DeviceInfo::Approved(Device {
            name: device.name,
            addresses: of_device.collect(),
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
