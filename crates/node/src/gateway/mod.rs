//! The gateway of a running tunnel: the card of the local network, and the stage between it and the tunnel.
//!
//! [`GatewayNode::open`] makes it from the configuration while there are privileges; [`lan`] reads and
//! writes frames in transparent mode; [`traffic`] is its part of the worker's turn; [`watch`] follows
//! what happens to the card; [`status`] tells of it all. In routed mode the kernel forwards
//! ([`crate::setup::forwarding`]), and packets pass the same stage between TUN device and tunnel.
//! [`role`] is for two gateways on one local network.

mod lan;
pub mod offload;
mod role;
pub mod spread;
pub mod status;
mod traffic;
mod watch;

pub use lan::{Lan, LanCounters, LanError};
pub(crate) use traffic::Destination;
pub use watch::Watch;

use lan::Link;
use seikan_config::{Config, GatewayMode, GatewaySettings};
use seikan_proto::gateway::{Gateway, GatewayConfig, Mtus};
use seikan_proto::keys::Identity;
use seikan_sys::netlink::Netlink;

/// The gateway's state.
pub struct GatewayNode {
    /// Devices, rules, legs.
    pub gateway: Gateway,
    /// The card that frames are read from; `None` in routed mode.
    pub lan: Option<Lan>,
    /// The interface of the local network.
    pub interface: String,
}

impl GatewayNode {
    /// Opens the card, which must be there now, and takes in what is configured. `tunnel_mtu` is that of
    /// the TUN device.
    pub fn open(
        config: &Config,
        settings: &GatewaySettings,
        identity: &Identity,
        tunnel_mtu: u32,
        netlink: &Netlink,
    ) -> Result<GatewayNode, LanError> {
        let interface = settings.interface.to_string();
        let link = Link::find(netlink, &interface)?;
        let is_hop = settings.mode == GatewayMode::Transparent;
        let gateway = Gateway::new(GatewayConfig {
            devices: settings.devices.clone(),
            remotes: settings.remotes.clone(),
            own: config.addresses.iter().map(|net| net.addr()).collect(),
            is_hop,
            mtu: Mtus {
                lan: link.mtu,
                tunnel: tunnel_mtu,
            },
        });
        let lan = match settings.mode {
            GatewayMode::Routed => None,
            GatewayMode::Transparent => Some(Lan::open(settings, identity, link, config.offload)?),
        };
        Ok(GatewayNode {
            gateway,
            lan,
            interface,
        })
    }
}
