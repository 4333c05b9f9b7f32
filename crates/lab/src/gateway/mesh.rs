//! A gateway that is a member of a mesh, as is the remote host. Each is behind a NAT, and there is no
//! relay: packets pass on a punched path or not at all.

use std::net::IpAddr;
use std::path::Path;

use seikan_ui::Interrupt;

use crate::error::{LabError, Result, usage};
use crate::gateway::site::{Mode, Site};
use crate::mesh::Mesh;
use crate::site::Host;
use crate::tunnel::{Started, device_name};

/// Port of the coordinator, on the host of the internet.
const COORDINATOR: u16 = 7443;

/// Programs of a mesh, and the addresses of the remote in it, IPv4 first.
pub(super) struct InMesh {
    pub(super) started: Started,
    pub(super) remote: Vec<IpAddr>,
}

/// Starts a mesh of gateway and remote, which meet with the first packet. With a mode, the devices of
/// the site are devices of the gateway. Files go to `dir`.
pub(super) fn start(
    mode: Option<Mode>,
    site: &Site,
    dir: &Path,
    interrupt: &Interrupt,
) -> Result<InMesh> {
    let internet = site.internet.as_ref();
    let internet = internet
        .ok_or_else(|| usage("cannot start a mesh: gateway and remote are not behind NATs"))?;
    let (core, address) = internet.host();
    let coordinator = (address, COORDINATOR).into();
    let (mesh, process) = Mesh::start(core, coordinator, dir, interrupt)?;
    let mut started = Started::from(vec![process]);
    let mut join = |host: &Host, sections: &str| {
        let member = mesh.join(host, host.name, &device_name(host))?;
        member.configure(sections)?;
        started.processes.push(member.up(&[])?);
        Ok::<_, LabError>(member)
    };
    // Devices get addresses from the mesh.
    let addresses = site.devices().map(Host::addresses);
    let sections = mode.map(|mode| mode.section(addresses, |_| String::new()));
    let gateway = join(&site.gateway, &sections.unwrap_or_default())?;
    let remote = join(&site.remote, "")?;
    let networks: Vec<_> = gateway.networks.iter().map(ipnet::IpNet::trunc).collect();
    match mode {
        Some(Mode::Transparent) => site.route_on_lan(&networks)?,
        Some(Mode::Routed) => site.route_through_gateway(&networks)?,
        None => {}
    }
    Ok(InMesh {
        started,
        remote: remote.networks.iter().map(ipnet::IpNet::addr).collect(),
    })
}
