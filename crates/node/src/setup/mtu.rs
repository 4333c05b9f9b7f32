//! MTU inside the tunnel, if the configuration has none.

use crate::node::{NATIVE_MTU, WIREGUARD_MTU};
use seikan_config::{Config, Mode, Protocol};
use seikan_sys::netlink::{Family, Netlink, TABLE_MAIN};
use seikan_wire::ethernet;
use std::net::IpAddr;

/// Maximum bytes that WireGuard adds to a packet: IPv6 and UDP header, message header, padding, tag (40 + 8 +
/// 16 + 16); the same as wg-quick's value.
const OVERHEAD: u32 = 80;
/// Minimum MTU of IPv6 (RFC 8200, section 5).
const MIN_IPV6: u32 = 1280;
/// Minimum size that every IPv4 host accepts (RFC 791).
const MIN_IPV4: u32 = 576;

/// Returns the configured MTU; otherwise [`NATIVE_MTU`] for the native protocol, and for WireGuard
/// [`WIREGUARD_MTU`], or less if a path to a peer has a smaller MTU.
///
/// In Ethernet mode the frame has the size that a packet has in IP mode. The native protocol fits TCP and splits
/// packets to the path's MTU, so its default is the same at both ends of a tunnel, whatever the path is. `mark`
/// is the mark of the tunnel's datagrams.
pub fn inner_mtu(
    config: &Config,
    endpoints: &[IpAddr],
    mark: Option<u32>,
    netlink: &Netlink,
) -> u32 {
    if let Some(mtu) = config.mtu {
        return mtu;
    }
    if config.mode == Mode::Ethernet {
        return NATIVE_MTU - ethernet::HEADER_LEN as u32;
    }
    if config.protocol == Protocol::Native {
        return NATIVE_MTU;
    }
    let paths = endpoints
        .iter()
        .filter_map(|ip| netlink.route_get(*ip, mark).ok())
        .map(|route| route.mtu);
    let path = paths.min().or_else(|| default_route(netlink));
    let ipv6 = config.addresses.iter().any(|net| net.addr().is_ipv6());
    fitting(path, ipv6)
}

fn fitting(path: Option<u32>, ipv6: bool) -> u32 {
    let least = if ipv6 { MIN_IPV6 } else { MIN_IPV4 };
    path.map_or(WIREGUARD_MTU, |path| {
        path.saturating_sub(OVERHEAD).clamp(least, WIREGUARD_MTU)
    })
}

/// Returns the MTU of the default route, for a host without endpoints.
fn default_route(netlink: &Netlink) -> Option<u32> {
    let routes = [Family::V4, Family::V6].map(|family| netlink.routes(family, TABLE_MAIN));
    let mut routes = routes.into_iter().flatten().flatten();
    let route = routes.find(|route| route.destination.prefix_len() == 0)?;
    route
        .mtu
        .or_else(|| Some(netlink.link_by_index(route.device?).ok()?.mtu))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_fits_the_path_and_no_less_than_ip_needs() {
        assert_eq!(fitting(None, true), 1420);
        assert_eq!(fitting(Some(1500), true), 1420); // wg-quick's figure for Ethernet
        assert_eq!(fitting(Some(1492), true), 1412); // and for PPPoE
        assert_eq!(fitting(Some(9000), false), 1420);
        assert_eq!(fitting(Some(1300), true), 1280);
        assert_eq!(fitting(Some(600), false), 576);
    }
}
