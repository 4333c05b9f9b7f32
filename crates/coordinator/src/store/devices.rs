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

use seikan_proto::mesh::{
    Device, DeviceName, Devices, Families, MAX_DEVICES, MAX_MESH_DEVICES, MAX_TAGS, Name, Networks,
    Party,
};
use serde::{Deserialize, Serialize};

use super::members::{keep_former, member};
use super::rows::{Freed, MemberRow, Mesh, Term, is_within_hourly};
use super::{Actor, MemberId, Store, StoreError, audit, numbers};

/// Maximum number of changed reports of one member within an hour.
const MAX_REPORTS_PER_HOUR: usize = 30;
/// Maximum number of devices that one change may remove and add together. Each touches a row, and
/// four more are touched; etcd takes 100 in one change.
const MAX_AT_ONCE: usize = 90;
const _: () = assert!(MAX_DEVICES <= MAX_AT_ONCE);
/// Log entry of a changed report.
const REPORTED: &str = "devices reported";

/// A device as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceInfo {
    /// The device has addresses, and members receive it.
    Approved(Device),
    /// The device waits for approval.
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

/// A device, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoredDevice {
    name: Name,
    /// Families in which it has an address.
    #[serde(default, skip_serializing_if = "Families::is_both")]
    families: Families,
    /// Determines the addresses; `None` until it is approved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tags: Vec<Name>,
}

impl StoredDevice {
    pub fn is_approved(&self) -> bool {
        self.number.is_some()
    }

    /// Returns the device behind a gateway as input to the policy.
    pub fn party(&self, gateway: &Name) -> Party {
        Party {
            name: self.name.clone(),
            tags: self.tags.clone(),
            gateway: Some(gateway.clone()),
        }
    }
}

/// The device that had a free number last.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct FormerDevice {
    name: Name,
    gateway: Name,
    /// Tags of the device; `None`: those of its gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tags: Option<Vec<Name>>,
    /// The token of its gateway.
    token: i64,
}

impl Store {
    /// Sets the devices behind a member: new ones are pending or approved at once, and those that
    /// are not in the list are removed. A new device that is approved at once gets the addresses of
    /// a removed device with the same name, if the gateway of the removed one had joined with the
    /// same token. Returns whether there was a change.
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
        let known = self.read(|mesh| Ok(reported_by(member(mesh, id)?)))?;
        // Gateways repeat their report, which has not changed in most cases.
        if known == wanted {
            return Ok(false);
        }
        let kept = wanted.iter().filter(|(name, _)| known.contains_key(name));
        let kept: BTreeMap<Name, Families> = kept.map(|(name, of)| (name.clone(), *of)).collect();
        if known.len() + wanted.len() - 2 * kept.len() > MAX_AT_ONCE {
            // Removals first: added devices may get the addresses of removed ones.
            self.set_devices(id, (kept, wanted.len()), by, now)?;
        }
        let count = wanted.len();
        self.set_devices(id, (wanted, count), by, now)
    }

    /// Sets the devices behind a member as the report says, or a part of them if it lists `count`
    /// others. A part is checked, but neither counted nor logged.
    fn set_devices(
        &self,
        id: MemberId,
        (wanted, count): (BTreeMap<Name, Families>, usize),
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        let by = by.clone();
        self.change(move |mesh| {
            let mut gateway = member(mesh, id)?.clone();
            if reported_by(&gateway) == wanted {
                return Ok(false);
            }
            let is_part = wanted.len() < count;
            let mut reports = gateway.recent.reports.clone();
            if !is_within_hourly(&mut reports, now, MAX_REPORTS_PER_HOUR) {
                return Err(StoreError::TooManyDeviceChanges {
                    most: MAX_REPORTS_PER_HOUR,
                });
            }
            if !is_part {
                gateway.recent.reports = reports;
            }
            check_total(mesh, gateway.devices.len(), count)?;
            let gone = gateway.devices.iter();
            let gone = gone.filter(|device| !wanted.contains_key(&device.name));
            free(mesh, &gateway, gone)?;
            let mut devices = Vec::new();
            for (name, families) in &wanted {
                let known = gateway.devices.iter().find(|device| device.name == *name);
                let device = match known {
                    Some(known) => known.clone(),
                    None => new_device(mesh, &gateway, name)?,
                };
                devices.push(StoredDevice {
                    families: *families,
                    ..device
                });
            }
            write(mesh, &gateway, devices)?;
            if !is_part {
                audit::record(mesh, now, REPORTED, gateway.own.name.as_str(), &by)?;
            }
            Ok(true)
        })
    }

    /// Approves a device with these tags; `None`: the tags of its gateway. Returns whether the
    /// device was pending or had other tags.
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
            move |mesh, gateway, device| {
                match (device.number, &tags) {
                    (None, tags) => {
                        device.number = Some(next_number(mesh)?);
                        let tags = tags.as_ref().unwrap_or(&gateway.own.tags);
                        device.tags.clone_from(tags);
                    }
                    (Some(_), Some(tags)) => device.tags.clone_from(tags),
                    (Some(_), None) => {}
                }
                Ok(())
            },
        )
    }

    /// Approves a device that was `from` before, at another gateway or with another name. The
    /// device gets the addresses of `from`, and the tags of `from` unless `tags` are given. If `from`
    /// had the tags of its gateway, the device gets the tags of its new gateway. If the gateway of
    /// `from` still reports it, `from` becomes pending.
    ///
    /// # Errors
    /// As [`Self::approve_device`]; [`StoreError::NoAddresses`] if `from` never had addresses, or
    /// another device has them now.
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
        let by = by.clone();
        self.change(move |mesh| {
            let (gateway, at) = find(mesh, &name)?;
            let own = gateway.devices[at].clone();
            if from == name && own.is_approved() {
                return Err(StoreError::NoAddresses(from.clone()));
            }
            free(mesh, &gateway, [&own])?;
            let (number, former_tags) = take_over(mesh, &from)?;
            // The former gateway may be the same gateway, with a changed row: find the row again.
            let (gateway, at) = find(mesh, &name)?;
            let mut devices = gateway.devices.clone();
            let tags = tags.clone().or(former_tags);
            devices[at] = StoredDevice {
                number: Some(number),
                tags: tags.unwrap_or_else(|| gateway.own.tags.clone()),
                ..own
            };
            write(mesh, &gateway, devices)?;
            let subject = format!("{from} to {name}");
            audit::record(mesh, now, "device moved", &subject, &by)
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
            move |mesh, gateway, device| {
                if is_trusted(mesh, gateway) {
                    let (device, token) = (full.clone(), gateway.token);
                    return Err(StoreError::DeviceTrusted { device, token });
                }
                free(mesh, gateway, [&*device])?;
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
        work: impl Fn(&mut Mesh, &MemberRow, &mut StoredDevice) -> Result<(), StoreError>
        + Send
        + 'static,
    ) -> Result<bool, StoreError> {
        let (name, by) = (name.clone(), by.clone());
        self.change(move |mesh| {
            let (gateway, at) = find(mesh, &name)?;
            let mut devices = gateway.devices.clone();
            work(mesh, &gateway, &mut devices[at])?;
            if devices == gateway.devices {
                return Ok(false);
            }
            write(mesh, &gateway, devices)?;
            audit::record(mesh, now, change, &name.to_string(), &by)?;
            Ok(true)
        })
    }
}

fn reported_by(gateway: &MemberRow) -> BTreeMap<Name, Families> {
    let devices = gateway.devices.iter();
    devices
        .map(|device| (device.name.clone(), device.families))
        .collect()
}

/// Returns whether devices behind a gateway need no approval, by the token of the gateway.
fn is_trusted(mesh: &Mesh, gateway: &MemberRow) -> bool {
    let token = mesh.token.get(&gateway.token);
    token.is_some_and(|row| row.info.devices && row.info.withdrawn.is_none())
}

/// Returns the gateway of a device, and the position of the device in its list.
fn find(mesh: &Mesh, name: &DeviceName) -> Result<(MemberRow, usize), StoreError> {
    let gateway = mesh.member.find(&Term::Name(name.gateway.clone()));
    let found = gateway.and_then(|gateway| {
        let mut devices = gateway.devices.iter();
        let at = devices.position(|device| device.name == name.device)?;
        Some((gateway.clone(), at))
    });
    found.ok_or_else(|| StoreError::NoDevice(name.clone()))
}

/// Takes the number away from a device, or from the record of a removed one. Returns the number,
/// and the tags of the device unless they were those of its gateway.
fn take_over(mesh: &mut Mesh, name: &DeviceName) -> Result<(u32, Option<Vec<Name>>), StoreError> {
    if let Ok((gateway, at)) = find(mesh, name) {
        let mut devices = gateway.devices.clone();
        if let Some(number) = devices[at].number.take() {
            let tags = std::mem::take(&mut devices[at].tags);
            write(mesh, &gateway, devices)?;
            return Ok((number, (tags != gateway.own.tags).then_some(tags)));
        }
    }
    let is_it =
        |device: &FormerDevice| device.name == name.device && device.gateway == name.gateway;
    let found = former_devices(mesh).rfind(|(_, device)| is_it(device));
    let (row, device) = found.ok_or_else(|| StoreError::NoAddresses(name.clone()))?;
    let (since, number, tags) = (row.since, row.number, device.tags.clone());
    mesh.delete::<Freed>(since)?;
    Ok((number, tags))
}

/// Takes the number that a removed device with this name had behind this gateway, or else behind
/// another one that joined with the same token, if there is one.
fn take_same_token(
    mesh: &mut Mesh,
    gateway: &MemberRow,
    name: &Name,
) -> Result<Option<u32>, StoreError> {
    let former = former_devices(mesh);
    let former = former.filter(|(_, device)| device.name == *name && device.token == gateway.token);
    let best = former.max_by_key(|(row, device)| (device.gateway == gateway.own.name, row.since));
    let Some((&Freed { since, number, .. }, _)) = best else {
        return Ok(None);
    };
    mesh.delete::<Freed>(since)?;
    Ok(Some(number))
}

/// Returns the free numbers that devices had last.
fn former_devices(mesh: &Mesh) -> impl DoubleEndedIterator<Item = (&Freed, &FormerDevice)> {
    let freed = mesh.freed.all();
    freed.filter_map(|row| Some((row, row.device.as_ref()?)))
}

fn check_tags(tags: &[Name]) -> Result<(), StoreError> {
    if tags.len() > MAX_TAGS {
        return Err(StoreError::OutOfBounds("a device may have at most 16 tags"));
    }
    Ok(())
}

/// Checks the number of devices of the mesh when a member has `after` in place of `before`.
fn check_total(mesh: &Mesh, before: usize, after: usize) -> Result<(), StoreError> {
    let all: usize = mesh.member.all().map(|row| row.devices.len()).sum();
    if after > before && all + after - before > MAX_MESH_DEVICES {
        return Err(StoreError::DevicesFull {
            most: MAX_MESH_DEVICES,
        });
    }
    Ok(())
}

fn new_device(
    mesh: &mut Mesh,
    gateway: &MemberRow,
    name: &Name,
) -> Result<StoredDevice, StoreError> {
    let mut device = StoredDevice {
        name: name.clone(),
        families: Families::Both,
        number: None,
        tags: Vec::new(),
    };
    if is_trusted(mesh, gateway) {
        let former = take_same_token(mesh, gateway, name)?;
        device.number = Some(match former {
            Some(former) => former,
            None => next_number(mesh)?,
        });
        device.tags.clone_from(&gateway.own.tags);
    }
    Ok(device)
}

fn next_number(mesh: &mut Mesh) -> Result<u32, StoreError> {
    let networks = mesh.networks()?.ok_or(StoreError::NoNetworks)?;
    numbers::take(mesh, &networks)
}

/// Frees the numbers of devices of a gateway. Each has a revision of its own, because those are
/// unique.
pub(super) fn free<'a>(
    mesh: &mut Mesh,
    gateway: &MemberRow,
    devices: impl IntoIterator<Item = &'a StoredDevice>,
) -> Result<(), StoreError> {
    for device in devices {
        let Some(number) = device.number else {
            continue;
        };
        let former = FormerDevice {
            name: device.name.clone(),
            gateway: gateway.own.name.clone(),
            tags: (device.tags != gateway.own.tags).then(|| device.tags.clone()),
            token: gateway.token,
        };
        let since = mesh.next_revision()?;
        mesh.put(Freed {
            since,
            number,
            device: Some(former),
        })?;
    }
    Ok(())
}

/// Returns the devices of a member, in which devices with the member's tags have the new `tags`.
pub(super) fn with_gateway_tags(gateway: &MemberRow, tags: &[Name]) -> Vec<StoredDevice> {
    let mut devices = gateway.devices.clone();
    for device in &mut devices {
        if device.is_approved() && device.tags == gateway.own.tags {
            device.tags = tags.to_vec();
        }
    }
    devices
}

/// Replaces the devices of a gateway. If approved ones differ, others receive the gateway again, and
/// it receives all members that it sees.
fn write(
    mesh: &mut Mesh,
    gateway: &MemberRow,
    devices: Vec<StoredDevice>,
) -> Result<(), StoreError> {
    let approved = |devices: &[StoredDevice]| -> Vec<StoredDevice> {
        let approved = devices.iter().filter(|device| device.is_approved());
        approved.cloned().collect()
    };
    let mut revision = gateway.revision;
    if approved(&devices) != approved(&gateway.devices) {
        revision = mesh.next_revision()?;
        keep_former(mesh, gateway, revision, gateway.id)?;
    }
    mesh.put(MemberRow {
        devices,
        revision,
        ..gateway.clone()
    })
}

/// Returns the approved devices of a member.
pub(super) fn approved(row: &MemberRow, networks: &Networks) -> Result<Vec<Device>, StoreError> {
    let infos = infos(row, networks)?.into_iter();
    let approved = infos.filter_map(|info| match info {
        DeviceInfo::Approved(device) => Some(device),
        DeviceInfo::Pending(_) => None,
    });
    Ok(approved.collect())
}

/// Returns all devices of a member.
pub(super) fn infos(row: &MemberRow, networks: &Networks) -> Result<Vec<DeviceInfo>, StoreError> {
    let infos = row.devices.iter().cloned().map(|device| {
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
