//! The gateway of a running tunnel: the interface of the local network, and the stage between it and the
//! tunnel.
//!
//! [`GatewayNode::open`] creates it from the configuration while the process is privileged; [`lan`] reads and
//! writes frames in transparent mode. In routed mode the kernel forwards, and packets pass the same stage
//! between TUN device and tunnel.

mod lan;
pub mod offload;
mod role;
pub mod spread;
mod traffic;

pub use lan::{Lan, LanCounters, LanError};
pub(crate) use lan::{LanOptions, Link};
pub(crate) use traffic::{Destination, MAX_FRAMES};

use crate::pacer::Pacer;
use ipnet::IpNet;
use seikan_config::{Config, GatewayMode, GatewaySettings};
use seikan_proto::gateway::{Gateway, GatewayConfig, Mtus};
use seikan_proto::keys::Identity;
use seikan_sys::netlink::Netlink;

/// The gateway's state.
pub struct GatewayNode {
    /// Devices, rules and their counters.
    pub gateway: Gateway,
    /// The interface that frames are read from; `None` in routed mode.
    pub lan: Option<Lan>,
    /// The interface of the local network.
    pub interface: String,
}

impl GatewayNode {
    /// Opens the interface, which must exist, and applies the configuration. `tunnel_mtu` is the TUN device's
    /// MTU.
    pub fn open(
        config: &Config,
        settings: &GatewaySettings,
        identity: &Identity,
        pacer: &Pacer,
        tunnel_mtu: u32,
        netlink: &Netlink,
    ) -> Result<GatewayNode, LanError> {
        let interface = settings.interface.to_string();
        let link = Link::find(netlink, &interface)?;
        let is_hop = settings.mode == GatewayMode::Transparent;
        let gateway = Gateway::new(GatewayConfig {
            devices: settings.devices.clone(),
            remotes: settings.remotes.clone(),
            allocates: config.mesh.is_some(),
            own: config.addresses.iter().map(|net| net.addr()).collect(),
            is_hop,
            mtu: Mtus {
                lan: link.mtu,
                tunnel: tunnel_mtu,
            },
        });
        let lan = match settings.mode {
            GatewayMode::Routed => None,
            GatewayMode::Transparent => {
                let mut answer_for = settings.answer_for.clone();
                if config.mesh.is_some() {
                    answer_for.extend(config.addresses.iter().map(IpNet::trunc));
                }
                let options = LanOptions {
                    settings,
                    answer_for,
                    offload: config.offload,
                    read_limit: pacer.read_limit(),
                };
                Some(Lan::open(options, identity, link)?)
            }
        };
        Ok(GatewayNode {
            gateway,
            lan,
            interface,
        })
    }
}
