//! Checks the gateway against the tunnel: overlay addresses of devices and remotes, and conflicts.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::read::Draft;
use crate::report::Reporter;
use crate::schema::KeySpec;
use crate::sections::{At, Device, Peer, Remote};

/// Overlay addresses in the rest of the file.
pub(super) struct Overlay<'a> {
    /// The interface's own addresses, with their lines.
    own: HashMap<IpAddr, usize>,
    /// All allowed IPs of peers.
    prefixes: HashSet<IpNet>,
    /// Peers with a prefix of a single address, and the lines.
    hosts: HashMap<IpAddr, (&'a Peer, usize)>,
    /// The interface is in a mesh, whose networks are among `prefixes`. Its coordinator allocates
    /// the addresses of devices without any.
    pub(super) is_mesh: bool,
    /// The key of allowed IPs.
    pub(super) allowed_ips: &'static KeySpec,
}

/// Device and line of each address.
type AddressOwners<'a> = HashMap<IpAddr, (&'a Device, usize)>;

impl<'a> Overlay<'a> {
    /// Collects the addresses in the rest of the file.
    pub(super) fn of(draft: &'a Draft) -> Self {
        let own = draft.interface.address.values.iter();
        let is_mesh = draft.interface.coordinator.is_given();
        let networks = own.clone().filter(|_| is_mesh).map(|a| a.value.trunc());
        let mut this = Self {
            prefixes: networks.collect(),
            own: own.map(|a| (a.value.addr(), a.site.line)).collect(),
            hosts: HashMap::new(),
            is_mesh,
            allowed_ips: Peer::default().allowed_ips.spec,
        };
        for peer in &draft.peers {
            for At { value, site } in &peer.allowed_ips.values {
                let prefix = value.trunc();
                this.prefixes.insert(prefix);
                if prefix.prefix_len() == prefix.max_prefix_len() {
                    this.hosts.insert(prefix.addr(), (peer, site.line));
                }
            }
        }
        this
    }

    /// Reports overlay addresses that are in use elsewhere, and faults of remotes.
    pub(super) fn check_devices_and_remotes(&self, draft: &Draft, reporter: &mut Reporter<'_>) {
        let owners = self.check_devices(&draft.devices, reporter);
        let lans = draft.devices.iter().flat_map(|device| {
            let line = move |lan: &At<IpAddr>| (lan.value, (device, lan.site.line));
            device.lan.values.iter().map(line)
        });
        let lans: AddressOwners<'_> = lans.collect();
        let mut overlays_seen = HashMap::new();
        let mut lans_seen = HashMap::new();
        for remote in &draft.remotes {
            for (key, example) in [
                (&remote.overlay, "10.77.0.2"),
                (&remote.lan, "192.168.1.202"),
            ] {
                key.require(remote.site, "this remote", ["one", example], reporter);
            }
            if let Some(overlay) = remote.overlay.last() {
                let first = overlays_seen.insert(overlay.value, overlay.site.line);
                self.check_remote_overlay(overlay, first, &owners, reporter);
            }
            if let Some(lan) = remote.lan.last() {
                let first = lans_seen.insert(lan.value, lan.site.line);
                self.check_remote_lan(lan, first, &lans, reporter);
            }
            check_families(remote, reporter);
        }
    }

    /// Reports overlay addresses of devices that are in use elsewhere. Returns the owners of the others.
    fn check_devices<'d>(
        &self,
        devices: &'d [Device],
        reporter: &mut Reporter<'_>,
    ) -> AddressOwners<'d> {
        let mut owners: AddressOwners<'d> = HashMap::new();
        let is_allocated = |device: &&Device| self.is_mesh && device.overlay.values.is_empty();
        for device in devices.iter().filter(|device| !is_allocated(device)) {
            for (At { value, site }, is_lan) in device.in_overlay() {
                let other = if let Some((owner, first)) = owners.get(value) {
                    // Two of one family, or the same address on the same network: already reported.
                    let same_lan = is_lan && owner.vlan.get() == device.vlan.get();
                    let known = same_lan && owner.lan.values.iter().any(|lan| lan.value == *value);
                    if known || std::ptr::eq(*owner, device) {
                        continue;
                    }
                    format!("{}, in line {first}", owner.described())
                } else if let Some(first) = self.own.get(value) {
                    format!("this interface itself, in line {first}")
                } else if let Some((peer, first)) = self.hosts.get(value) {
                    format!("{}, in line {first}", peer.described())
                } else {
                    owners.insert(*value, (device, site.line));
                    continue;
                };
                if is_lan {
                    let sample = match value {
                        IpAddr::V4(_) => "10.77.0.10",
                        IpAddr::V6(_) => "fd77::10",
                    };
                    let example = reporter.example(device.overlay.spec, sample);
                    reporter.error(
                        *site,
                        format!("has `{value}`, in the overlay the address of {other}"),
                        format!("give the device another address there, such as {example}"),
                    );
                } else {
                    reporter.error(
                        *site,
                        format!("has `{value}`, the address of {other}"),
                        "write an address that is unused in the overlay",
                    );
                }
            }
        }
        owners
    }

    fn check_remote_overlay(
        &self,
        At { value, site }: &At<IpAddr>,
        first: Option<usize>,
        owners: &AddressOwners<'_>,
        reporter: &mut Reporter<'_>,
    ) {
        if let Some(first) = first {
            reporter.error(
                *site,
                format!("is `{value}`, which the remote in line {first} has already"),
                "map each address of the overlay to one address of the local network",
            );
        } else if let Some((device, first)) = owners.get(value) {
            let device = device.described();
            reporter.error(
                *site,
                format!("is `{value}`, the address of {device}, in line {first}"),
                "write an address behind a peer: devices reach each other without the gateway",
            );
        } else if !self.leads_to(*value) {
            let allowed_ips = reporter.name(self.allowed_ips);
            reporter.warn(
                *site,
                format!("is `{value}`, which no peer has in its `{allowed_ips}`"),
                "correct it, or add the address to the peer that it is behind",
            );
        }
    }

    fn check_remote_lan(
        &self,
        At { value, site }: &At<IpAddr>,
        first: Option<usize>,
        lans: &AddressOwners<'_>,
        reporter: &mut Reporter<'_>,
    ) {
        let other = if let Some(first) = first {
            format!("which the remote in line {first} has already")
        } else if let Some((device, first)) = lans.get(value) {
            format!("the address of {}, in line {first}", device.described())
        } else if let Some(first) = self.own.get(value) {
            format!("the address of this interface itself, in line {first}")
        } else {
            return;
        };
        reporter.error(
            *site,
            format!("is `{value}`, {other}"),
            "write an address that is free on the local network",
        );
    }

    /// Returns whether a peer's allowed IPs contain the address.
    fn leads_to(&self, address: IpAddr) -> bool {
        // Look up each prefix length instead of comparing with every prefix: there may be thousands
        // of remotes and of prefixes.
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

fn check_families(remote: &Remote, reporter: &mut Reporter<'_>) {
    if let (Some(overlay), Some(lan)) = (remote.overlay.last(), remote.lan.last())
        && overlay.value.is_ipv6() != lan.value.is_ipv6()
    {
        let (key, overlay) = (reporter.name(remote.overlay.spec), overlay.value);
        reporter.error(
            lan.site,
            format!(
                "is `{}`, of another family than `{key}`, `{overlay}`",
                lan.value
            ),
            "write two IPv4 addresses, or two IPv6 addresses",
        );
    }
}

impl Device {
    /// Returns the device's overlay addresses, and whether each is its address on the local
    /// network, which counts in a family without another.
    fn in_overlay(&self) -> impl Iterator<Item = (&At<IpAddr>, bool)> {
        let overlay = &self.overlay.values;
        let is_same = |lan: &&At<IpAddr>| {
            let family = lan.value.is_ipv6();
            !overlay.iter().any(|given| given.value.is_ipv6() == family)
        };
        let same = self.lan.values.iter().filter(is_same);
        overlay
            .iter()
            .map(|at| (at, false))
            .chain(same.map(|at| (at, true)))
    }
}
