//! Port mapping at the router, so that others may send first: by PCP (RFC 6887), by NAT-PMP (RFC 6886) if the
//! router speaks only that, or by UPnP (UDA 2.0, WANIPConnection).
//!
//! Only a host behind a NAT requests one, and only from its default router; answers of other hosts are ignored.
//! A lease is renewed at half its lifetime and deleted at the end. After a crash it expires, and a restarted
//! member gets the same port.

use crab_nat::{
    GatewayAddress, InternetProtocol, PortMapping, PortMappingOptions, PortMappingType,
    TimeoutConfig, VersionCode, natpmp, pcp,
};
use igd_next::aio::Gateway;
use igd_next::aio::tokio::{Tokio, search_gateway};
use igd_next::{PortMappingProtocol, SearchOptions};
use seikan_proto::mesh::Digest;
use seikan_sys::netlink::{Netlink, RouteType};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use crate::endpoints::is_routable;

/// Requested lifetime in seconds; a router may grant less.
const LIFETIME: u32 = 3600;
/// Minimum time between two requests for one port, whatever the granted lifetime.
const MIN_RENEWAL: Duration = Duration::from_secs(30);
/// Time after a failure until the next request.
pub(super) const RETRY: Duration = Duration::from_secs(600);
/// Retransmissions of PCP and NAT-PMP: three requests in 1.75 s instead of the RFCs' nine in two minutes, since
/// the router is one hop away.
const PATIENCE: TimeoutConfig = TimeoutConfig {
    initial_timeout: Duration::from_millis(250),
    max_retries: 2,
    max_retry_timeout: Some(Duration::from_secs(1)),
};
/// Timeout of discovery by UPnP and of the requests after it.
const UPNP_PATIENCE: Duration = Duration::from_secs(4);
/// Timeout of one search, within that.
const SEARCH_PATIENCE: Duration = Duration::from_millis(1500);
/// UPnP discovery (UDA 2.0, section 1.3.2): the port at the router itself, and the multicast group, for routers
/// that listen only there.
const SSDP: u16 = 1900;
const SSDP_GROUP: Ipv4Addr = Ipv4Addr::new(239, 255, 255, 250);
/// Maximum number of characters of a reason that a router has sent.
const MAX_REASON: usize = 200;
/// Description shown in the router's list of mappings.
const DESCRIPTION: &str = "seikan";

/// Protocol of a port mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// RFC 6887.
    Pcp,
    /// RFC 6886.
    NatPmp,
    /// UPnP.
    Upnp,
}

/// A granted port mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Mapping {
    /// External address.
    pub address: SocketAddr,
    /// Protocol by which it was requested.
    pub by: Protocol,
}

/// The default router, for IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Router {
    address: Ipv4Addr,
    /// This host's address towards the router.
    own: Ipv4Addr,
}

impl Router {
    /// Returns the router if `seen`, this host's reflexive address, is behind it; `None` if it is an address of
    /// this host, so that there is no NAT, or if the route goes through `own_interface`, if the mesh has one.
    pub(super) fn before(
        seen: Ipv4Addr,
        netlink: &Netlink,
        own_interface: Option<u32>,
    ) -> Option<Router> {
        let route = netlink.route_get(seen.into(), None).ok()?;
        let elsewhere = route.kind == RouteType::Unicast && Some(route.device) != own_interface;
        match (route.gateway, route.source) {
            (Some(IpAddr::V4(address)), Some(IpAddr::V4(own))) if elsewhere => {
                Some(Router { address, own })
            }
            _ => None,
        }
    }
}

/// A leased port.
#[derive(Clone)]
pub(super) struct Lease {
    /// The mapping as reported.
    pub mapping: Mapping,
    /// Time of the next renewal.
    pub renew_at: Instant,
    /// Time at which the lease expires.
    pub expires_at: Instant,
    by: By,
}

#[derive(Clone)]
enum By {
    Pmp(Box<PortMapping>),
    Upnp(Box<Gateway<Tokio>>, SocketAddr),
}

impl Lease {
    /// Requests a port of the router that leads to `port` of this host, preferably the same. The nonce is
    /// derived from `secret`, which only this host knows, so that the router recognises it after a restart.
    ///
    /// # Errors
    /// Why there is none, as a text for the user.
    pub(super) async fn ask(
        router: Router,
        port: NonZeroU16,
        secret: &Digest,
    ) -> Result<Lease, String> {
        let by_pcp = match ask_pcp(router, port, secret).await {
            Ok(lease) => return Ok(lease),
            Err(reason) => reason,
        };
        match tokio::time::timeout(UPNP_PATIENCE, ask_upnp(router, port)).await {
            Ok(Ok(lease)) => Ok(lease),
            Ok(Err(by_upnp)) => Err(shortened(&format!("{by_pcp}; {by_upnp}"))),
            Err(_) => Err(shortened(&format!("{by_pcp}; UPnP: no answer in time"))),
        }
    }

    /// Postpones the renewal by the minimum time, after a request was not answered while the lease is still
    /// valid.
    pub(super) fn put_off(&mut self) {
        self.renew_at = Instant::now() + MIN_RENEWAL;
    }

    /// Deletes the mapping, if the router answers.
    pub(super) async fn give_back(self) {
        match self.by {
            By::Pmp(mapping) => {
                let _ = mapping.try_drop().await;
            }
            By::Upnp(gateway, _) => {
                let port = self.mapping.address.port();
                let given_back = gateway.remove_port(PortMappingProtocol::UDP, port);
                let _ = tokio::time::timeout(UPNP_PATIENCE, given_back).await;
            }
        }
    }

    /// Renews the lease.
    ///
    /// # Errors
    /// Why the lease is lost, as a text for the user.
    pub(super) async fn renew(&mut self) -> Result<(), String> {
        let renewed = self.renewed().await;
        *self = renewed.map_err(|reason| shortened(&reason))?;
        Ok(())
    }

    async fn renewed(&mut self) -> Result<Lease, String> {
        match &mut self.by {
            By::Pmp(mapping) => {
                mapping.renew().await.map_err(|error| error.to_string())?;
                lease_by_pmp((**mapping).clone()).await
            }
            By::Upnp(gateway, own) => {
                let (gateway, own) = (gateway.clone(), *own);
                let again = add_upnp(gateway, own, self.mapping.address.port());
                let again = tokio::time::timeout(UPNP_PATIENCE, again).await;
                again.unwrap_or_else(|_| Err("UPnP: no answer in time".to_owned()))
            }
        }
    }
}

async fn ask_pcp(router: Router, port: NonZeroU16, secret: &Digest) -> Result<Lease, String> {
    let gateway = GatewayAddress::IpV4(router.address);
    let options = PortMappingOptions {
        external_port: Some(port),
        lifetime_seconds: Some(LIFETIME),
        timeout_config: Some(PATIENCE),
    };
    let request = pcp::BaseMapRequest::new(gateway, router.own.into(), InternetProtocol::Udp, port);
    let mapping = match pcp::port_mapping(request, Some(nonce(secret)), None, options).await {
        Ok(mapping) => mapping,
        Err(pcp::Failure::UnsupportedVersion(VersionCode::NatPmp)) => {
            natpmp::port_mapping(gateway, InternetProtocol::Udp, port, options)
                .await
                .map_err(|error| format!("NAT-PMP: {error}"))?
        }
        Err(pcp::Failure::Timeout | pcp::Failure::Socket(_)) => {
            return Err("PCP, NAT-PMP: no answer".to_owned());
        }
        Err(error) => return Err(format!("PCP: {error}")),
    };
    lease_by_pmp(mapping).await
}

/// Creates the lease of a mapping by PCP or NAT-PMP.
async fn lease_by_pmp(mapping: PortMapping) -> Result<Lease, String> {
    let (outside, by) = match mapping.mapping_type() {
        PortMappingType::Pcp { external_ip, .. } => (external_ip, Protocol::Pcp),
        PortMappingType::NatPmp => {
            let outside = natpmp::external_address(mapping.gateway(), Some(PATIENCE)).await;
            let outside = outside.map_err(|error| format!("NAT-PMP: {error}"))?;
            (outside.into(), Protocol::NatPmp)
        }
    };
    Ok(Lease {
        mapping: usable(outside, mapping.external_port().get(), by)?,
        renew_at: half_of(mapping.lifetime()),
        expires_at: end_of(mapping.lifetime()),
        by: By::Pmp(Box::new(mapping)),
    })
}

async fn ask_upnp(router: Router, port: NonZeroU16) -> Result<Lease, String> {
    let mut found = Err("UPnP: no answer".to_owned());
    for target in [router.address, SSDP_GROUP] {
        let mut options = SearchOptions::default();
        options.bind_addr = SocketAddr::from((router.own, 0));
        options.broadcast_address = SocketAddr::from((target, SSDP));
        options.timeout = Some(SEARCH_PATIENCE);
        match search_gateway(options).await {
            Ok(gateway) if gateway.addr.ip() == router.address => {
                found = Ok(gateway);
                break;
            }
            Ok(other) => {
                found = Err(format!(
                    "UPnP: {} answered, which is not the router",
                    other.addr.ip()
                ))
            }
            Err(_) => {}
        }
    }
    let gateway = found?;
    let own = SocketAddr::from((router.own, port.get()));
    add_upnp(Box::new(gateway), own, port.get()).await
}

/// Requests a mapping of the router's `port`, or another one if that is taken, to `own`.
async fn add_upnp(
    gateway: Box<Gateway<Tokio>>,
    own: SocketAddr,
    port: u16,
) -> Result<Lease, String> {
    const UDP: PortMappingProtocol = PortMappingProtocol::UDP;
    let said = |error: &dyn std::fmt::Display| format!("UPnP: {error}");
    let outside = gateway.get_external_ip().await.map_err(|e| said(&e))?;
    let same = gateway
        .add_port(UDP, port, own, LIFETIME, DESCRIPTION)
        .await;
    let port = match same {
        Ok(()) => port,
        Err(_) => {
            let any = gateway.add_any_port(UDP, own, LIFETIME, DESCRIPTION).await;
            any.map_err(|e| said(&e))?
        }
    };
    Ok(Lease {
        mapping: usable(outside, port, Protocol::Upnp)?,
        renew_at: half_of(LIFETIME),
        expires_at: end_of(LIFETIME),
        by: By::Upnp(gateway, own),
    })
}

/// Checks that others can send to the address that a router reports.
fn usable(outside: IpAddr, port: u16, by: Protocol) -> Result<Mapping, String> {
    if !outside.is_ipv4() || !is_routable(outside) || port == 0 {
        return Err("the router's external address is not routable".to_owned());
    }
    Ok(Mapping {
        address: SocketAddr::new(outside, port),
        by,
    })
}

/// Returns the time at half a lifetime in seconds.
fn half_of(lifetime: u32) -> Instant {
    let half = Duration::from_secs(lifetime.min(LIFETIME).into()) / 2;
    Instant::now() + half.max(MIN_RENEWAL)
}

fn end_of(lifetime: u32) -> Instant {
    Instant::now() + Duration::from_secs(lifetime.min(LIFETIME).into())
}

/// Shortens a reason for display.
fn shortened(reason: &str) -> String {
    reason.chars().take(MAX_REASON).collect()
}

/// Returns the nonce that identifies this host's mapping (RFC 6887, section 11.1); nobody else can guess it. It is the
/// end of the digest: the beginning is the number of the member in its tickets for relays, which anybody on the path to
/// a relay can read.
fn nonce(secret: &Digest) -> pcp::Nonce {
    let [.., a, b, c, d, e, f, g, h, i, j, k, l] = secret.0;
    [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_where_others_can_send_is_taken() {
        let of = |ip: &str, port| usable(ip.parse().expect(ip), port, Protocol::Pcp).is_ok();
        assert!(of("198.51.100.9", 51820));
        // Behind another NAT: useful for hosts in that network.
        assert!(of("100.64.0.9", 51820));
        for (ip, port) in [
            ("0.0.0.0", 7),
            ("127.0.0.1", 7),
            ("169.254.1.1", 7),
            ("255.255.255.255", 7),
            ("224.0.0.1", 7),
            ("2001:db8::1", 7),
            ("198.51.100.9", 0),
        ] {
            assert!(!of(ip, port), "{ip} {port}");
        }
    }

    /// A router according to RFC 6886: it answers requests of another version with its own version (section
    /// 3.5), and requests for its address (section 3.2) and for a port (section 3.3).
    async fn natpmp_router(socket: tokio::net::UdpSocket) {
        let mut request = [0; 100];
        let (address, epoch) = ([198, 51, 100, 9], [0, 0, 0, 42]);
        while let Ok((length, from)) = socket.recv_from(&mut request).await {
            let mut answer = match &request[..length] {
                [0, 0] => [&[0, 128, 0, 0][..], &epoch, &address].concat(),
                [0, 1, 0, 0, inside @ .., _, _, _, _, _, _] => {
                    // Grants another port than requested, for 120 s.
                    [
                        &[0, 129, 0, 0][..],
                        &epoch,
                        inside,
                        &[0xc3, 0x50],
                        &[0, 0, 0, 120],
                    ]
                    .concat()
                }
                _ => vec![0, request[1] | 128, 0, 1, 0, 0, 0, 42],
            };
            answer.truncate(16);
            let _ = socket.send_to(&answer, from).await;
        }
    }

    #[tokio::test]
    async fn a_router_that_speaks_natpmp_alone_gives_a_port() {
        let address = Ipv4Addr::new(127, 0, 0, 77);
        let socket = tokio::net::UdpSocket::bind((address, 5351)).await;
        let server = tokio::spawn(natpmp_router(socket.expect("the port of NAT-PMP")));
        let router = Router {
            address,
            own: Ipv4Addr::LOCALHOST,
        };
        let port = NonZeroU16::new(51820).expect("a port");
        let lease = Lease::ask(router, port, &Digest([1; 32])).await;
        let lease = lease.unwrap_or_else(|reason| panic!("{reason}"));
        let wanted = Mapping {
            address: SocketAddr::from(([198, 51, 100, 9], 50_000)),
            by: Protocol::NatPmp,
        };
        assert_eq!(lease.mapping, wanted);
        let left = lease.expires_at - Instant::now();
        assert!((110..=120).contains(&left.as_secs()), "{left:?}");
        server.abort();
    }

    #[test]
    fn a_port_is_renewed_at_half_its_time_and_never_all_the_time() {
        for (lifetime, wanted) in [(3600, 1800), (120, 60), (1, 30), (u32::MAX, 1800)] {
            let wait = half_of(lifetime) - Instant::now();
            assert_eq!(wait.as_secs_f64().round() as u64, wanted, "{lifetime}");
        }
    }

    #[test]
    fn a_lease_expires_as_granted_and_at_most_as_requested() {
        for (lifetime, wanted) in [(3600, 3600), (120, 120), (1, 1), (u32::MAX, 3600)] {
            let left = end_of(lifetime) - Instant::now();
            assert_eq!(left.as_secs_f64().round() as u64, wanted, "{lifetime}");
        }
    }

    #[test]
    fn a_reason_is_no_longer_than_people_read() {
        assert_eq!(shortened("PCP: no answer"), "PCP: no answer");
        assert_eq!(shortened(&"é".repeat(1 << 20)).chars().count(), MAX_REASON);
    }

    #[test]
    fn nonces_are_the_same_again_for_a_host_and_others_for_others() {
        let of = |n| nonce(&Digest([n; 32]));
        assert_eq!(of(1), [0x0101_0101; 3]);
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn a_nonce_has_nothing_of_the_number_in_tickets() {
        let digest = Digest(std::array::from_fn(|at| at as u8));
        // The number is the first eight bytes.
        let nonce = nonce(&digest).map(u32::to_be_bytes);
        assert_eq!(nonce.as_flattened(), &digest.0[20..]);
    }
}
