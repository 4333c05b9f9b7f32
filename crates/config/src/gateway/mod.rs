//! Checks a gateway's draft and completes it to [`GatewaySettings`]: required keys, and keys that
//! conflict.
//!
//! Order: `[gateway]` itself, each device, devices against each other, devices and remotes against
//! the tunnel (`overlay`). Checks that depend on the mode are skipped if the mode is invalid.

use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;
use std::net::IpAddr;

use seikan_proto::gateway::{DeviceConfig, Remote};
use seikan_proto::mesh::{MAX_DEVICES, Name};

use crate::read::Draft;
use crate::report::Reporter;
use crate::schema::{SectionKind, Site};
use crate::sections::{At, Device, Gateway};
use crate::types::{GatewayMode, GatewaySettings, InterfaceName};
use overlay::Overlay;

mod overlay;

/// Completes a gateway's draft and reports its faults; `None` if there is no gateway, or something
/// is missing.
pub(super) fn check(
    draft: &Draft,
    name: Option<&InterfaceName>,
    reporter: &mut Reporter<'_>,
) -> Option<GatewaySettings> {
    let gateway = &draft.gateway;
    let mode = if gateway.site.line == 0 {
        report_missing_section(draft, reporter);
        None
    } else {
        check_section(gateway, name, reporter);
        gateway.known_mode()
    };
    let overlay = Overlay::of(draft);
    if overlay.is_mesh {
        check_mesh_devices(&draft.devices, reporter);
    }
    for device in &draft.devices {
        check_device(device, reporter);
        match mode {
            Some(GatewayMode::Routed) => check_routed_device(device, reporter),
            // Addresses are learned by MAC address.
            Some(GatewayMode::Transparent) if !device.mac.is_given() => {
                report_unreachable(device, reporter);
            }
            _ => {}
        }
    }
    check_identities(&draft.devices, reporter);
    overlay.check_devices_and_remotes(draft, reporter);
    let mode = mode?;
    check_reach(draft, mode, &overlay, reporter);
    let remotes = draft.remotes.iter().filter_map(|remote| {
        Some(Remote {
            overlay: remote.overlay.get()?,
            lan: remote.lan.get()?,
        })
    });
    Some(GatewaySettings {
        interface: gateway.interface.get()?,
        mode,
        answer_for: gateway.answer_for.unique(),
        proxy_arp: gateway.proxy_arp.get().unwrap_or(false),
        priority: gateway.priority.get(),
        devices: draft.devices.iter().filter_map(complete_device).collect(),
        remotes: remotes.collect(),
    })
}

fn report_missing_section(draft: &Draft, reporter: &mut Reporter<'_>) {
    let devices = draft
        .devices
        .iter()
        .map(|device| (device.site, SectionKind::Device));
    let remotes = draft
        .remotes
        .iter()
        .map(|remote| (remote.site, SectionKind::Remote));
    let Some((site, kind)) = devices.chain(remotes).min_by_key(|(site, _)| site.line) else {
        return;
    };
    let this = kind.header(reporter.syntax);
    let gateway = SectionKind::Gateway.header(reporter.syntax);
    let example = reporter.example(draft.gateway.interface.spec, "eth1");
    reporter.error(
        site,
        format!("there is a {this}, but no {gateway}"),
        format!("add a section {gateway} with {example}, the interface of the local network"),
    );
}

/// Checks the keys of `[gateway]`.
fn check_section(gateway: &Gateway, name: Option<&InterfaceName>, reporter: &mut Reporter<'_>) {
    let interface = &gateway.interface;
    let wanted = ["the interface of the local network", "eth1"];
    interface.require(gateway.site, "the gateway", wanted, reporter);
    if let Some(At { value, site }) = interface.last()
        && Some(value) == name
    {
        reporter.error(
            *site,
            format!("is `{value}`, the tunnel itself"),
            "write the interface of the local network, such as `eth1`",
        );
    }
    let mut seen = HashMap::new();
    for At { value, site } in &gateway.answer_for.values {
        let prefix = reporter.truncate_prefix(*site, *value);
        if prefix.prefix_len() == 0 {
            reporter.error(
                *site,
                format!("has `{prefix}`, which is the local network itself, too"),
                "write the prefixes of the overlay, such as `10.77.0.0/24`",
            );
        }
        if let Some(first) = seen.insert(prefix, site.line) {
            reporter.repeated_value(*site, prefix, first);
        }
    }
}

/// Checks one device.
fn check_device(device: &Device, reporter: &mut Reporter<'_>) {
    let wanted = ["one", "plc-1"];
    device
        .name
        .require(device.site, "this device", wanted, reporter);
    if !device.mac.is_given() && !device.lan.is_given() {
        let (mac, lan) = (
            reporter.name(device.mac.spec),
            reporter.name(device.lan.spec),
        );
        reporter.error(
            device.site,
            format!("this device has neither `{mac}` nor `{lan}`: nothing identifies it"),
            "add one of them, or both; `seikan gateway discover` lists the devices of the local network",
        );
    }
    for addresses in [&device.lan.values, &device.overlay.values] {
        for v6 in [false, true] {
            let mut family = addresses.iter().filter(|a| a.value.is_ipv6() == v6);
            if let (Some(first), Some(second)) = (family.next(), family.next()) {
                let (name, first, last) = (family_name(first.value), first.value, second.value);
                reporter.error(
                    second.site,
                    format!("has two {name} addresses, `{first}` and `{last}`"),
                    "a device has one address of each family: keep one, or describe two devices",
                );
            }
        }
    }
}

fn family_name(address: IpAddr) -> &'static str {
    match address {
        IpAddr::V4(_) => "IPv4",
        IpAddr::V6(_) => "IPv6",
    }
}

/// Checks the devices whose addresses the coordinator of the mesh allocates: those without an
/// overlay address. They are reported by name.
fn check_mesh_devices(devices: &[Device], reporter: &mut Reporter<'_>) {
    let allocated = devices.iter().filter(|device| !device.overlay.is_given());
    let mut names = HashMap::new();
    for (index, device) in allocated.enumerate() {
        if index == MAX_DEVICES {
            reporter.error(
                device.site,
                format!("this device is one of more than {MAX_DEVICES}"),
                "a member of a mesh has at most that many devices: give some to a second gateway",
            );
        }
        let Some(At { value, site }) = device.name.last() else {
            continue;
        };
        match value.parse::<Name>() {
            Err(error) => {
                reporter.error(
                    *site,
                    format!("is `{value}`, but in a mesh {error}"),
                    "write a name as of a host, such as `plc-1`",
                );
            }
            Ok(name) => {
                // Equal names were reported already.
                let (first, line) = *names.entry(name).or_insert((value, site.line));
                if first != value {
                    reporter.error(
                        *site,
                        format!(
                            "is `{value}`, the same name in a mesh as `{first}`, in line {line}"
                        ),
                        "give each device a unique name",
                    );
                }
            }
        }
    }
}

/// Checks a device in routed mode: the kernel forwards by address.
fn check_routed_device(device: &Device, reporter: &mut Reporter<'_>) {
    if let Some(At { value, site }) = device.vlan.last() {
        let interface = reporter.name(Gateway::default().interface.spec);
        reporter.error(*site, format!("is {value}, but in routed mode the kernel takes VLANs apart"), format!(
            "remove it, and let `{interface}` name the VLAN's own interface, such as `eth1.{value}`"
        ));
    }
    if device.mac.is_given() && !device.lan.is_given() {
        let lan = reporter.name(device.lan.spec);
        let message = format!(
            "this device has no `{lan}`, but in routed mode the kernel forwards by address"
        );
        let example = reporter.example(device.lan.spec, "192.168.1.10");
        reporter.error(
            device.site,
            message,
            format!("add {example}, or use mode `transparent`"),
        );
    }
    report_unreachable(device, reporter);
}

/// Warns of overlay addresses of a family in which the device has no address on its own network. A
/// list with faults may be incomplete.
fn report_unreachable(device: &Device, reporter: &mut Reporter<'_>) {
    let lan = &device.lan.values;
    for At { value, site } in &device.overlay.values {
        if !lan.is_empty() && !lan.iter().any(|lan| lan.value.is_ipv6() == value.is_ipv6()) {
            let (family, lan) = (family_name(*value), reporter.name(device.lan.spec));
            reporter.warn(
                *site,
                format!("has `{value}`, but there is no {family} address in `{lan}` to map it to"),
                "add the device's address of that family, or remove this one",
            );
        }
    }
}

/// Checks that names, MAC addresses and addresses on the local network are unique.
fn check_identities(devices: &[Device], reporter: &mut Reporter<'_>) {
    let mut names = Owners::new("give each device a unique name");
    let mut macs = Owners::new(
        "merge both into one section, correct one of them, or leave it out: a device is known by its address, too",
    );
    let mut lans = Owners::new("correct one of them; in two VLANs both may have it");
    for device in devices {
        if let Some(At { value, site }) = device.name.last() {
            names.claim(value, value, device, *site, reporter);
        }
        let vlan = device.vlan.get();
        // The VLAN is invalid.
        if device.vlan.is_given() && vlan.is_none() {
            continue;
        }
        if let Some(At { value, site }) = device.mac.last() {
            macs.claim((vlan, value), value, device, *site, reporter);
        }
        for At { value, site } in &device.lan.values {
            lans.claim((vlan, value), value, device, *site, reporter);
        }
    }
}

/// The owner of each value of a key whose values must be unique, and the line.
struct Owners<'a, K> {
    help: &'static str,
    owners: HashMap<K, (&'a Device, usize)>,
}

impl<'a, K: Eq + Hash> Owners<'a, K> {
    fn new(help: &'static str) -> Self {
        Self {
            help,
            owners: HashMap::new(),
        }
    }

    /// Assigns `value` to a device, or reports its owner.
    fn claim(
        &mut self,
        value: K,
        shown: impl Display,
        device: &'a Device,
        site: Site,
        reporter: &mut Reporter<'_>,
    ) {
        let (owner, first) = *self.owners.entry(value).or_insert((device, site.line));
        if !std::ptr::eq(owner, device) {
            let owner = owner.described();
            reporter.error(
                site,
                format!("is `{shown}`, which {owner} has already, in line {first}"),
                self.help,
            );
        }
    }
}

/// Checks that packets can pass, and warns of keys without effect.
fn check_reach(
    draft: &Draft,
    mode: GatewayMode,
    overlay: &Overlay<'_>,
    reporter: &mut Reporter<'_>,
) {
    let gateway = &draft.gateway;
    if draft.devices.is_empty() {
        let device = SectionKind::Device.header(reporter.syntax);
        reporter.warn(gateway.site, format!("there is no {device}: nothing passes the gateway"), format!(
            "add a {device} for each; `seikan gateway discover` lists the devices of the local network"
        ));
    }
    match mode {
        GatewayMode::Transparent => {
            if let Some(At { value: true, site }) = gateway.proxy_arp.last() {
                reporter.warn(
                    *site,
                    "has no effect in transparent mode",
                    "remove it: the gateway itself answers for the remotes",
                );
            }
            // The gateway of a mesh answers for its networks.
            if !gateway.answer_for.is_given() && draft.remotes.is_empty() && !overlay.is_mesh {
                let remote = SectionKind::Remote.header(reporter.syntax);
                let answer_for = reporter.name(gateway.answer_for.spec);
                let example = reporter.example(gateway.answer_for.spec, "10.77.0.0/24");
                reporter.warn(gateway.site, format!(
                    "there is neither `{answer_for}` nor a {remote}: devices cannot reach the overlay"
                ), format!(
                    "add {example} with the overlay's prefix, or a {remote} for each address"
                ));
            }
            check_answer_for(draft, overlay, reporter);
        }
        GatewayMode::Routed => {
            if let Some(At { site, .. }) = gateway.answer_for.values.first() {
                reporter.warn(
                    *site,
                    "has no effect in routed mode",
                    "remove it: devices need a route to the overlay through this host",
                );
            }
            if let Some(At { site, .. }) = gateway.priority.last() {
                reporter.error(
                    *site,
                    "is for transparent mode",
                    "remove it: devices route to this host's own address, which \
                            VRRP (keepalived) moves to another",
                );
            }
        }
    }
}

/// Warns of prefixes that contain a device, or no peer.
fn check_answer_for(draft: &Draft, overlay: &Overlay<'_>, reporter: &mut Reporter<'_>) {
    for At { value, site } in &draft.gateway.answer_for.values {
        let prefix = value.trunc();
        let inside = |device: &&Device| device.lan.values.iter().any(|a| prefix.contains(&a.value));
        if prefix.prefix_len() == 0 {
            // Already reported.
        } else if let Some(device) = draft.devices.iter().find(inside) {
            let device = device.described();
            reporter.warn(*site, format!(
                "has `{prefix}`, in which {device} is: the gateway would also answer for its neighbours"
            ), "write prefixes that are not on the local network");
        } else if !overlay.touches(&prefix) {
            let allowed_ips = reporter.name(overlay.allowed_ips);
            reporter.warn(
                *site,
                format!("has `{prefix}`, of which no peer has anything in its `{allowed_ips}`"),
                "correct it, or add the prefix to the peer that it is behind",
            );
        }
    }
}

/// Completes a device; `None` if it has no name.
fn complete_device(device: &Device) -> Option<DeviceConfig> {
    Some(DeviceConfig {
        name: device.name.get()?,
        mac: device.mac.get(),
        vlan: device.vlan.get(),
        lan: device.lan.all(),
        overlay: device.overlay.all(),
        allow_from: device.allow_from.all(),
        allow_to: device.allow_to.all(),
    })
}

impl Gateway {
    /// Returns the mode; `None` if it is invalid.
    fn known_mode(&self) -> Option<GatewayMode> {
        match self.mode.get() {
            None if !self.mode.is_given() => Some(GatewayMode::default()),
            mode => mode,
        }
    }
}
