//! Gives the devices behind this host the addresses that the coordinator has allocated.

use super::members::Rules;
use crate::node::Node;
use seikan_mesh::state::LOG;
use seikan_proto::mesh::{Access, Name};
use tracing::info;

/// Sets the overlay addresses of the gateway's devices, and removes the devices from `access` that this host does
/// not have: a coordinator cannot open other addresses.
pub(super) fn assign(node: &mut Node, access: &mut Access, rules: &Rules) {
    let Some(node_gateway) = &mut node.gateway else {
        access.devices.clear();
        return;
    };
    let gateway = &mut node_gateway.gateway;
    let devices = gateway.devices();
    let allocated = devices.filter(|(_, device)| device.config.overlay.is_empty());
    let known: Vec<(_, Name, _)> = allocated
        .filter_map(|(id, device)| Some((id, device.config.name.parse().ok()?, device.overlay)))
        .collect();
    access.devices.retain(|device| {
        let is_known = known.iter().any(|(_, name, _)| *name == device.name);
        is_known && device.addresses.iter().all(|ip| rules.may_allocate(*ip))
    });
    // First, so that an address may move from one device to another.
    for (id, ..) in &known {
        gateway.set_overlay(*id, &[]);
    }
    for (id, name, before) in known {
        let device = access.devices.iter().find(|device| device.name == name);
        let addresses = device.map_or(&[][..], |device| &device.addresses[..]);
        gateway.set_overlay(id, addresses);
        let after = gateway.device(id).map(|device| device.overlay);
        if after != Some(before) {
            info!(target: LOG, device = %name, ?addresses, "addresses of a device changed");
        }
    }
}
