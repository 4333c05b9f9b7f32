//! Checks a gateway's draft and completes it to [`GatewaySettings`]: required keys, and keys that
//! conflict.
//!
//! Order: `[gateway]` itself, each device, devices against each other, devices and remotes against
//! the tunnel (`overlay`). Checks that depend on the mode are skipped if the mode is invalid.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;

use seikan_proto::gateway::{DeviceConfig, Remote};
use seikan_proto::mesh::{MAX_DEVICES, Name};

use crate::draft::{
    At, DeviceDraft, GatewayDraft, GatewaySection, InterfaceDraft, PeerDraft, unique_prefixes,
};
use crate::report::Reporter;
use crate::schema::{Field, SectionKind};
use crate::types::{GatewayMode, GatewaySettings, InterfaceName};
use overlay::{Overlay, check_overlay_addresses, check_remotes};

mod overlay;

/// Completes a gateway's draft and reports its faults; `None` if there is no gateway, or something
/// is missing.
pub(super) fn check(
    draft: GatewayDraft,
    name: Option<&InterfaceName>,
    interface: &InterfaceDraft,
    peers: &[PeerDraft],
    reporter: &mut Reporter<'_>,
) -> Option<GatewaySettings> {
    let mode = match &draft.section {
        Some(section) => {
            check_section(section, name, reporter);
            section.known_mode()
        }
        None => {
            report_missing_section(&draft, reporter);
            None
        }
    };
    let overlay = Overlay::of(interface, peers);
    if overlay.is_mesh {
        check_mesh_devices(&draft.devices, reporter);
    }
    for device in &draft.devices {
        check_device(device, reporter);
        match mode {
            Some(GatewayMode::Routed) => check_routed_device(device, reporter),
            Some(GatewayMode::Transparent) => check_transparent_device(device, reporter),
            None => {}
        }
    }
    check_identities(&draft.devices, reporter);
    let owners = check_overlay_addresses(&draft.devices, &overlay, reporter);
    check_remotes(&draft, &owners, &overlay, reporter);
    if let (Some(section), Some(mode)) = (&draft.section, mode) {
        check_reach(section, mode, &draft, &overlay, reporter);
    }
    complete(draft)
}

fn report_missing_section(draft: &GatewayDraft, reporter: &mut Reporter<'_>) {
    let devices = draft.devices.iter().map(|d| (d.line, SectionKind::Device));
    let remotes = draft.remotes.iter().map(|r| (r.line, SectionKind::Remote));
    let Some((line, kind)) = devices.chain(remotes).min_by_key(|(line, _)| *line) else {
        return;
    };
    let header = |kind: SectionKind| kind.header(reporter.syntax).unwrap_or_default();
    let (this, gateway) = (header(kind), header(SectionKind::Gateway));
    let message = format!("there is a {this}, but no {gateway}");
    let help = format!(
        "add a section {gateway} with {}, the interface of the local network",
        reporter.example(Field::GatewayInterface, "eth1")
    );
    reporter.error(line, &message, help);
}

/// Checks the keys of `[gateway]`.
fn check_section(
    section: &GatewaySection,
    name: Option<&InterfaceName>,
    reporter: &mut Reporter<'_>,
) {
    let key = reporter.name(Field::GatewayInterface);
    match &section.interface {
        None if !section.given.has(Field::GatewayInterface) => {
            let message = format!("the gateway has no `{key}`");
            let help = format!(
                "add the interface of the local network, such as {}",
                reporter.example(Field::GatewayInterface, "eth1")
            );
            reporter.error(section.line, &message, help);
        }
        Some(At { value, line }) if Some(value) == name => {
            let message = format!("is `{value}`, the tunnel itself");
            let help = "write the interface of the local network, such as `eth1`";
            reporter.key_error(Field::GatewayInterface, *line, &message, help);
        }
        _ => {}
    }
    let mut seen = HashMap::new();
    for At { value, line } in &section.answer_for {
        let prefix = reporter.truncate_prefix(Field::AnswerFor, *value, *line);
        if prefix.prefix_len() == 0 {
            let message = format!("has `{prefix}`, which is the local network itself, too");
            let help = "write the prefixes of the overlay, such as `10.77.0.0/24`";
            reporter.key_error(Field::AnswerFor, *line, &message, help);
        }
        if let Some(first) = seen.insert(prefix, *line) {
            reporter.repeated_value(Field::AnswerFor, prefix, *line, first);
        }
    }
}

/// Checks one device.
fn check_device(device: &DeviceDraft, reporter: &mut Reporter<'_>) {
    let (mac, lan) = (
        reporter.name(Field::DeviceMac),
        reporter.name(Field::DeviceLan),
    );
    if !device.given.has(Field::DeviceName) {
        let name = reporter.name(Field::DeviceName);
        let message = format!("this device has no `{name}`");
        let example = reporter.example(Field::DeviceName, "plc-1");
        let help = format!("add one, such as {example}");
        reporter.error(device.line, &message, help);
    }
    if !device.given.has(Field::DeviceMac) && !device.given.has(Field::DeviceLan) {
        let message = format!("this device has neither `{mac}` nor `{lan}`: nothing identifies it");
        let help = "add one of them, or both; `seikan gateway discover` lists the devices of the local network";
        reporter.error(device.line, &message, help);
    }
    for (key, addresses) in [
        (Field::DeviceLan, &device.lan),
        (Field::DeviceOverlay, &device.overlay),
    ] {
        for v6 in [false, true] {
            let mut family = addresses.iter().filter(|a| a.value.is_ipv6() == v6);
            let (Some(first), Some(second)) = (family.next(), family.next()) else {
                continue;
            };
            let message = format!(
                "has two {} addresses, `{}` and `{}`",
                if v6 { "IPv6" } else { "IPv4" },
                first.value,
                second.value
            );
            let help = "a device has one address of each family: keep one, or describe two devices";
            reporter.key_error(key, second.line, &message, help);
        }
    }
}

/// Checks the devices whose addresses the coordinator of the mesh allocates: those without an
/// overlay address. They are reported by name.
fn check_mesh_devices(devices: &[DeviceDraft], reporter: &mut Reporter<'_>) {
    let allocated = devices
        .iter()
        .filter(|device| !device.given.has(Field::DeviceOverlay));
    let mut names = HashMap::new();
    for (index, device) in allocated.enumerate() {
        if index == MAX_DEVICES {
            let message = format!("this device is one of more than {MAX_DEVICES}");
            let help =
                "a member of a mesh has at most that many devices: give some to a second gateway";
            reporter.error(device.line, &message, help);
        }
        let Some(At { value, line }) = &device.name else {
            continue;
        };
        match value.parse::<Name>() {
            Err(error) => {
                let message = format!("is `{value}`, but in a mesh {error}");
                let help = "write a name as of a host, such as `plc-1`";
                reporter.key_error(Field::DeviceName, *line, &message, help);
            }
            Ok(name) => {
                // Equal names were reported already.
                let first = *names.entry(name).or_insert((value, *line));
                if first.0 != value {
                    let message = format!(
                        "is `{value}`, the same name in a mesh as `{}`, in line {}",
                        first.0, first.1
                    );
                    let help = "give each device a unique name";
                    reporter.key_error(Field::DeviceName, *line, &message, help);
                }
            }
        }
    }
}

/// Checks a device in routed mode: the kernel forwards by address.
fn check_routed_device(device: &DeviceDraft, reporter: &mut Reporter<'_>) {
    if let Some(At { value, line }) = &device.vlan {
        let interface = reporter.name(Field::GatewayInterface);
        let message = format!("is {value}, but in routed mode the kernel takes VLANs apart");
        let help = format!(
            "remove it, and let `{interface}` name the VLAN's own interface, such as `eth1.{value}`"
        );
        reporter.key_error(Field::DeviceVlan, *line, &message, help);
    }
    if device.given.has(Field::DeviceMac) && !device.given.has(Field::DeviceLan) {
        let lan = reporter.name(Field::DeviceLan);
        let message = format!(
            "this device has no `{lan}`, but in routed mode the kernel forwards by address"
        );
        let help = format!(
            "add {}, or use mode `transparent`",
            reporter.example(Field::DeviceLan, "192.168.1.10")
        );
        reporter.error(device.line, &message, help);
    }
    report_unreachable(device, device.given.has(Field::DeviceLan), reporter);
}

/// Checks a device in transparent mode: addresses are learned by MAC address.
fn check_transparent_device(device: &DeviceDraft, reporter: &mut Reporter<'_>) {
    let learned = device.given.has(Field::DeviceMac);
    report_unreachable(
        device,
        device.given.has(Field::DeviceLan) && !learned,
        reporter,
    );
}

/// Warns of overlay addresses of a family in which the device has no address on its own network.
fn report_unreachable(device: &DeviceDraft, lan_is_all: bool, reporter: &mut Reporter<'_>) {
    // A list with faults may be incomplete.
    let unknown = device.lan.is_empty();
    for At { value, line } in &device.overlay {
        let has_family = |lan: &At<IpAddr>| lan.value.is_ipv6() == value.is_ipv6();
        if lan_is_all && !unknown && !device.lan.iter().any(has_family) {
            let lan = reporter.name(Field::DeviceLan);
            let message = format!(
                "has `{value}`, but there is no {} address in `{lan}` to map it to",
                if value.is_ipv6() { "IPv6" } else { "IPv4" },
            );
            let help = "add the device's address of that family, or remove this one";
            reporter.key_warning(Field::DeviceOverlay, *line, &message, help);
        }
    }
}

/// Checks that names, MAC addresses and addresses on the local network are unique.
fn check_identities(devices: &[DeviceDraft], reporter: &mut Reporter<'_>) {
    let help = "give each device a unique name";
    let mut names = Owners::new(Field::DeviceName, help, devices);
    let help = "merge both into one section, correct one of them, or leave it out: a device is known by its address, too";
    let mut macs = Owners::new(Field::DeviceMac, help, devices);
    let help = "correct one of them; in two VLANs both may have it";
    let mut lans = Owners::new(Field::DeviceLan, help, devices);
    for (index, device) in devices.iter().enumerate() {
        if let Some(At { value, line }) = &device.name {
            names.claim(value, value, index, *line, reporter);
        }
        // The VLAN is invalid.
        if device.given.has(Field::DeviceVlan) && device.vlan.is_none() {
            continue;
        }
        if let Some(At { value, line }) = &device.mac {
            macs.claim((device.vlan(), *value), value, index, *line, reporter);
        }
        for At { value, line } in &device.lan {
            lans.claim((device.vlan(), *value), value, index, *line, reporter);
        }
    }
}

/// The owner of each value of a key whose values must be unique.
struct Owners<'a, K> {
    key: Field,
    help: &'static str,
    devices: &'a [DeviceDraft],
    /// Indices of devices, and lines.
    owners: HashMap<K, (usize, usize)>,
}

impl<'a, K: Eq + Hash> Owners<'a, K> {
    fn new(key: Field, help: &'static str, devices: &'a [DeviceDraft]) -> Self {
        Self {
            key,
            help,
            devices,
            owners: HashMap::new(),
        }
    }

    /// Assigns `value` to a device, or reports its owner.
    fn claim(
        &mut self,
        value: K,
        shown: impl std::fmt::Display,
        index: usize,
        line: usize,
        reporter: &mut Reporter<'_>,
    ) {
        let (owner, first) = *self.owners.entry(value).or_insert((index, line));
        if owner == index {
            return;
        }
        let described = self.devices[owner].described();
        let message = format!("is `{shown}`, which {described} has already, in line {first}");
        reporter.key_error(self.key, line, &message, self.help);
    }
}

/// Checks that packets can pass, and warns of keys without effect.
fn check_reach(
    section: &GatewaySection,
    mode: GatewayMode,
    draft: &GatewayDraft,
    overlay: &Overlay<'_>,
    reporter: &mut Reporter<'_>,
) {
    let header = |kind: SectionKind| kind.header(reporter.syntax).unwrap_or_default();
    let (device, remote) = (header(SectionKind::Device), header(SectionKind::Remote));
    let answer_for = reporter.name(Field::AnswerFor);
    if draft.devices.is_empty() {
        let message = format!("there is no {device}: nothing passes the gateway");
        let help = format!(
            "add a {device} for each; `seikan gateway discover` lists the devices of the local network"
        );
        reporter.warn(section.line, &message, help);
    }
    match mode {
        GatewayMode::Transparent => {
            if let Some(At { value: true, line }) = section.proxy_arp {
                let message = "has no effect in transparent mode";
                let help = "remove it: the gateway itself answers for the remotes";
                reporter.key_warning(Field::ProxyArp, line, message, help);
            }
            let has_prefixes = section.given.has(Field::AnswerFor);
            // The gateway of a mesh answers for its networks.
            if !has_prefixes && draft.remotes.is_empty() && !overlay.is_mesh {
                let message = format!(
                    "there is neither `{answer_for}` nor a {remote}: devices cannot reach the overlay"
                );
                let help = format!(
                    "add {} with the overlay's prefix, or a {remote} for each address",
                    reporter.example(Field::AnswerFor, "10.77.0.0/24")
                );
                reporter.warn(section.line, &message, help);
            }
            check_answer_for(section, draft, overlay, reporter);
        }
        GatewayMode::Routed => {
            if let Some(At { line, .. }) = section.answer_for.first() {
                let message = "has no effect in routed mode";
                let help = "remove it: devices need a route to the overlay through this host";
                reporter.key_warning(Field::AnswerFor, *line, message, help);
            }
            if let Some(At { line, .. }) = section.priority {
                let message = "is for transparent mode";
                let help = "remove it: devices route to this host's own address, which \
                            VRRP (keepalived) moves to another";
                reporter.key_error(Field::Priority, line, message, help);
            }
        }
    }
}

/// Warns of prefixes that contain a device, or no peer.
fn check_answer_for(
    section: &GatewaySection,
    draft: &GatewayDraft,
    overlay: &Overlay<'_>,
    reporter: &mut Reporter<'_>,
) {
    for At { value, line } in &section.answer_for {
        let prefix = value.trunc();
        let inside = |device: &&DeviceDraft| device.lan.iter().any(|a| prefix.contains(&a.value));
        if prefix.prefix_len() == 0 {
            // Already reported.
        } else if let Some(device) = draft.devices.iter().find(inside) {
            let message = format!(
                "has `{prefix}`, in which {} is: the gateway would also answer for its neighbours",
                device.described()
            );
            let help = "write prefixes that are not on the local network";
            reporter.key_warning(Field::AnswerFor, *line, &message, help);
        } else if !overlay.touches(&prefix) {
            let message = format!(
                "has `{prefix}`, of which no peer has anything in its `{}`",
                reporter.name(Field::AllowedIps)
            );
            let help = "correct it, or add the prefix to the peer that it is behind";
            reporter.key_warning(Field::AnswerFor, *line, &message, help);
        }
    }
}

/// Completes a gateway; `None` if something is missing.
fn complete(draft: GatewayDraft) -> Option<GatewaySettings> {
    let section = draft.section?;
    let mode = section.known_mode()?;
    let devices = draft.devices.into_iter().filter_map(complete_device);
    let remotes = draft.remotes.into_iter();
    let remotes = remotes.filter_map(|remote| {
        Some(Remote {
            overlay: remote.overlay?.value,
            lan: remote.lan?.value,
        })
    });
    Some(GatewaySettings {
        interface: section.interface?.value,
        mode,
        answer_for: unique_prefixes(&section.answer_for),
        proxy_arp: section.proxy_arp.is_some_and(|proxy_arp| proxy_arp.value),
        priority: section.priority.map(|at| at.value),
        devices: devices.collect(),
        remotes: remotes.collect(),
    })
}

fn complete_device(draft: DeviceDraft) -> Option<DeviceConfig> {
    let values = |all: Vec<At<IpAddr>>| all.into_iter().map(|address| address.value).collect();
    Some(DeviceConfig {
        name: draft.name?.value,
        mac: draft.mac.map(|mac| mac.value),
        vlan: draft.vlan.map(|vlan| vlan.value),
        lan: values(draft.lan),
        overlay: values(draft.overlay),
        allow_from: draft.allow_from,
        allow_to: draft.allow_to,
    })
}

impl GatewaySection {
    /// Returns the mode; `None` if it is invalid.
    fn known_mode(&self) -> Option<GatewayMode> {
        match self.mode {
            None if !self.given.has(Field::GatewayMode) => Some(GatewayMode::default()),
            mode => mode,
        }
    }
}
