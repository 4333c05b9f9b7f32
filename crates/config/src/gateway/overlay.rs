//! Checks the gateway against the tunnel: overlay addresses of devices and remotes, and conflicts.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::draft::{At, DeviceDraft, GatewayDraft, InterfaceDraft, PeerDraft, RemoteDraft};
use crate::report::Reporter;
use crate::schema::Field;

/// Overlay addresses in the rest of the file.
pub(super) struct Overlay<'a> {
    /// The interface's own addresses, with their lines.
    own: HashMap<IpAddr, usize>,
    /// All allowed IPs of peers.
    prefixes: HashSet<IpNet>,
    /// Peers with a prefix of a single address, and the lines.
    hosts: HashMap<IpAddr, (&'a PeerDraft, usize)>,
    /// The interface is in a mesh, whose networks are among `prefixes`. Its coordinator allocates
    /// the addresses of devices without any.
    pub(super) is_mesh: bool,
}

/// Device and line of each address.
pub(super) type AddressOwners<'a> = HashMap<IpAddr, (&'a DeviceDraft, usize)>;

/// Reports overlay addresses that are in use elsewhere. Returns the owners of the others.
pub(super) fn check_overlay_addresses<'a>(
    devices: &'a [DeviceDraft],
    overlay: &Overlay<'_>,
    reporter: &mut Reporter<'_>,
) -> AddressOwners<'a> {
    let mut owners: AddressOwners<'a> = HashMap::new();
    for device in devices {
        if overlay.is_mesh && device.overlay.is_empty() {
            continue;
        }
        for (key, At { value, line }) in device.in_overlay() {
            let other = if let Some((owner, first)) = owners.get(value) {
                // Two of one family, or the same address on the same network: already reported.
                let same_lan = key == Field::DeviceLan && owner.vlan() == device.vlan();
                let known = same_lan && owner.lan.iter().any(|lan| lan.value == *value);
                if known || std::ptr::eq(*owner, device) {
                    continue;
                }
                format!("{}, in line {first}", owner.described())
            } else if let Some(first) = overlay.own.get(value) {
                format!("this interface itself, in line {first}")
            } else if let Some((peer, first)) = overlay.hosts.get(value) {
                format!("{}, in line {first}", peer.described())
            } else {
                owners.insert(*value, (device, *line));
                continue;
            };
            let (message, help) = match key {
                Field::DeviceLan => (
                    format!("has `{value}`, in the overlay the address of {other}"),
                    format!(
                        "give the device another address there, such as {}",
                        reporter.example(Field::DeviceOverlay, sample(*value))
                    ),
                ),
                _ => (
                    format!("has `{value}`, the address of {other}"),
                    "write an address that is unused in the overlay".to_owned(),
                ),
            };
            reporter.key_error(key, *line, &message, help);
        }
    }
    owners
}

/// Returns an example address of the same family in the overlay.
fn sample(address: IpAddr) -> &'static str {
    match address {
        IpAddr::V4(_) => "10.77.0.10",
        IpAddr::V6(_) => "fd77::10",
    }
}

/// Reports missing keys of remotes, and addresses that are in use elsewhere.
pub(super) fn check_remotes(
    draft: &GatewayDraft,
    owners: &AddressOwners<'_>,
    overlay: &Overlay<'_>,
    reporter: &mut Reporter<'_>,
) {
    let lans = draft.devices.iter().flat_map(|device| {
        let line = |lan: &At<IpAddr>| (lan.value, (device, lan.line));
        device.lan.iter().map(line).collect::<Vec<_>>()
    });
    let lans: AddressOwners<'_> = lans.collect();
    let mut overlays_seen = HashMap::new();
    let mut lans_seen = HashMap::new();
    for remote in &draft.remotes {
        for (key, address) in [
            (Field::RemoteOverlay, "10.77.0.2"),
            (Field::RemoteLan, "192.168.1.202"),
        ] {
            if !remote.given.has(key) {
                let message = format!("this remote has no `{}`", reporter.name(key));
                let help = format!("add one, such as {}", reporter.example(key, address));
                reporter.error(remote.line, &message, help);
            }
        }
        if let Some(At { value, line }) = &remote.overlay {
            let first = overlays_seen.insert(*value, *line);
            check_remote_overlay(*value, *line, first, owners, overlay, reporter);
        }
        if let Some(At { value, line }) = &remote.lan {
            let first = lans_seen.insert(*value, *line);
            check_remote_lan(*value, *line, first, &lans, overlay, reporter);
        }
        check_families(remote, reporter);
    }
}

fn check_remote_overlay(
    address: IpAddr,
    line: usize,
    first: Option<usize>,
    owners: &AddressOwners<'_>,
    overlay: &Overlay<'_>,
    reporter: &mut Reporter<'_>,
) {
    let key = Field::RemoteOverlay;
    if let Some(first) = first {
        let message = format!("is `{address}`, which the remote in line {first} has already");
        let help = "map each address of the overlay to one address of the local network";
        reporter.key_error(key, line, &message, help);
    } else if let Some((device, first)) = owners.get(&address) {
        let message = format!(
            "is `{address}`, the address of {}, in line {first}",
            device.described()
        );
        let help = "write an address behind a peer: devices reach each other without the gateway";
        reporter.key_error(key, line, &message, help);
    } else if !overlay.leads_to(address) {
        let allowed_ips = reporter.name(Field::AllowedIps);
        let message = format!("is `{address}`, which no peer has in its `{allowed_ips}`");
        let help = "correct it, or add the address to the peer that it is behind";
        reporter.key_warning(key, line, &message, help);
    }
}

fn check_remote_lan(
    address: IpAddr,
    line: usize,
    first: Option<usize>,
    lans: &AddressOwners<'_>,
    overlay: &Overlay<'_>,
    reporter: &mut Reporter<'_>,
) {
    let other = if let Some(first) = first {
        format!("which the remote in line {first} has already")
    } else if let Some((device, first)) = lans.get(&address) {
        format!("the address of {}, in line {first}", device.described())
    } else if let Some(first) = overlay.own.get(&address) {
        format!("the address of this interface itself, in line {first}")
    } else {
        return;
    };
    let message = format!("is `{address}`, {other}");
    let help = "write an address that is free on the local network";
    reporter.key_error(Field::RemoteLan, line, &message, help);
}

fn check_families(remote: &RemoteDraft, reporter: &mut Reporter<'_>) {
    let (Some(overlay), Some(lan)) = (&remote.overlay, &remote.lan) else {
        return;
    };
    if overlay.value.is_ipv6() != lan.value.is_ipv6() {
        let message = format!(
            "is `{}`, of another family than `{}`, `{}`",
            lan.value,
            reporter.name(Field::RemoteOverlay),
            overlay.value
        );
        let help = "write two IPv4 addresses, or two IPv6 addresses";
        reporter.key_error(Field::RemoteLan, lan.line, &message, help);
    }
}

impl DeviceDraft {
    /// Returns the device's overlay addresses and their keys: in a family without one it is the
    /// address on the local network.
    fn in_overlay(&self) -> impl Iterator<Item = (Field, &At<IpAddr>)> {
        let given = |v6| self.overlay.iter().any(|a| a.value.is_ipv6() == v6);
        let given = [given(false), given(true)];
        let same = self
            .lan
            .iter()
            .filter(move |a| !given[usize::from(a.value.is_ipv6())]);
        let overlay = self.overlay.iter().map(|a| (Field::DeviceOverlay, a));
        overlay.chain(same.map(|a| (Field::DeviceLan, a)))
    }
}

impl<'a> Overlay<'a> {
    /// Collects the addresses in the rest of the file.
    pub(super) fn of(interface: &InterfaceDraft, peers: &'a [PeerDraft]) -> Self {
        let own = interface.addresses.iter();
        let is_mesh = interface.given.has(Field::Coordinator);
        let networks = own.clone().filter(|_| is_mesh).map(|a| a.value.trunc());
        let mut this = Self {
            prefixes: networks.collect(),
            own: own.map(|a| (a.value.addr(), a.line)).collect(),
            hosts: HashMap::new(),
            is_mesh,
        };
        for peer in peers {
            for At { value, line } in &peer.allowed_ips {
                let prefix = value.trunc();
                this.prefixes.insert(prefix);
                if prefix.prefix_len() == prefix.max_prefix_len() {
                    this.hosts.insert(prefix.addr(), (peer, *line));
                }
            }
        }
        this
    }

    /// Returns whether a peer's allowed IPs contain the address.
    fn leads_to(&self, address: IpAddr) -> bool {
        // By length, not prefix by prefix: thousands of remotes may meet thousands of prefixes.
        let all = 0..=IpNet::from(address).prefix_len();
        let mut prefixes = all.filter_map(|length| IpNet::new(address, length).ok());
        prefixes.any(|prefix| self.prefixes.contains(&prefix.trunc()))
    }

    /// Returns whether the prefix overlaps a peer's allowed IPs.
    pub(super) fn touches(&self, prefix: &IpNet) -> bool {
        let mut all = self.prefixes.iter();
        all.any(|other| other.contains(prefix) || prefix.contains(other))
    }
}
