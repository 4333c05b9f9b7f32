//! A port of the router before this host, asked for so that others may send there unasked: by PCP (RFC 6887), by NAT-PMP (RFC 6886)
//! where that is what the router speaks, or by UPnP (UDA 2.0, WANIPConnection).
//!
//! Only who is behind a NAT asks, and only the router on its way out: what another host of the network answers is passed over.
//! What was given is renewed at half its time and given back at the end; if there is no end, as after a crash, the router forgets it
//! by itself, and a member that starts again has the same.

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

use super::endpoints::is_routable;

/// For how long a port is asked for, in seconds; a router may give it for less.
const LIFETIME: u32 = 3600;
/// The least time between two requests for one port, whatever time the router gave.
const LEAST: Duration = Duration::from_secs(30);
/// When a router that gave nothing is asked again.
pub(super) const RETRY: Duration = Duration::from_secs(600);
/// Of PCP and NAT-PMP: three requests in 1.75 s, where the RFCs have nine in two minutes: a router is one hop away.
const PATIENCE: TimeoutConfig = TimeoutConfig {
    initial_timeout: Duration::from_millis(250),
    max_retries: 2,
    max_retry_timeout: Some(Duration::from_secs(1)),
};
/// How long a router may take to be found by UPnP, and for its answers then.
const UPNP_PATIENCE: Duration = Duration::from_secs(4);
/// Of that, for the answer to one search.
const SEARCH_PATIENCE: Duration = Duration::from_millis(1500);
/// Where one is searched for (UDA 2.0, section 1.3.2): the port at the router itself, and the group, for those that hear nothing else.
const SSDP: u16 = 1900;
const SSDP_GROUP: Ipv4Addr = Ipv4Addr::new(239, 255, 255, 250);
/// Characters of a reason, at most: a router can answer at length.
const MAX_REASON: usize = 200;
/// What people find in the router's list.
const DESCRIPTION: &str = "seikan";

/// How a router was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// RFC 6887.
    Pcp,
    /// RFC 6886.
    NatPmp,
    /// UPnP.
    Upnp,
}

/// A port that a router has given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    /// Where others are to send.
    pub address: SocketAddr,
    /// How it was asked for.
    pub by: Protocol,
}

/// The router on the way out, for IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Router {
    address: Ipv4Addr,
    /// This host's address towards it.
    own: Ipv4Addr,
}

impl Router {
    /// The one by which packets for `seen` go, which is what this host looks like from outside; `None` if that is an address of its
    /// own, so that nothing is before it, or if the way is `own_interface`.
    pub(super) fn before(seen: Ipv4Addr, netlink: &Netlink, own_interface: u32) -> Option<Router> {
        let route = netlink.route_get(seen.into(), None).ok()?;
        let elsewhere = route.kind == RouteType::Unicast && route.device != own_interface;
        match (route.gateway, route.source) {
            (Some(IpAddr::V4(address)), Some(IpAddr::V4(own))) if elsewhere => {
                Some(Router { address, own })
            }
            _ => None,
        }
    }
}

/// A port that is held.
#[derive(Clone)]
pub(super) struct Held {
    /// What is told of it.
    pub mapping: Mapping,
    /// When it is to be asked for again.
    pub renew_at: Instant,
    /// When the router forgets it.
    pub expires_at: Instant,
    by: By,
}

#[derive(Clone)]
enum By {
    Pmp(Box<PortMapping>),
    Upnp(Box<Gateway<Tokio>>, SocketAddr),
}

impl Held {
    /// Asks a router for a port that leads to `port` of this host, the same if it is free. `secret` is this host's alone: from it
    /// comes the nonce, so that who starts again is known to the router.
    ///
    /// # Errors
    /// Why there is none, for people.
    pub(super) async fn ask(
        router: Router,
        port: NonZeroU16,
        secret: &Digest,
    ) -> Result<Held, String> {
        let by_pcp = match ask_pcp(router, port, secret).await {
            Ok(held) => return Ok(held),
            Err(reason) => reason,
        };
        match tokio::time::timeout(UPNP_PATIENCE, ask_upnp(router, port)).await {
            Ok(Ok(held)) => Ok(held),
            Ok(Err(by_upnp)) => Err(shortened(&format!("{by_pcp}; {by_upnp}"))),
            Err(_) => Err(shortened(&format!("{by_pcp}; UPnP: no answer in time"))),
        }
    }

    /// Has it asked for again only after the least time: the router did not answer, and what it gave is good for longer.
    pub(super) fn put_off(&mut self) {
        self.renew_at = Instant::now() + LEAST;
    }

    /// Gives it back, if the router hears it.
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

    /// Asks for it once more.
    ///
    /// # Errors
    /// Why it is this host's no longer, for people.
    pub(super) async fn renew(&mut self) -> Result<(), String> {
        let renewed = self.renewed().await;
        *self = renewed.map_err(|reason| shortened(&reason))?;
        Ok(())
    }

    async fn renewed(&mut self) -> Result<Held, String> {
        match &mut self.by {
            By::Pmp(mapping) => {
                mapping.renew().await.map_err(|error| error.to_string())?;
                held_by_pmp((**mapping).clone()).await
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

async fn ask_pcp(router: Router, port: NonZeroU16, secret: &Digest) -> Result<Held, String> {
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
    held_by_pmp(mapping).await
}

/// What a router gave by PCP or NAT-PMP.
async fn held_by_pmp(mapping: PortMapping) -> Result<Held, String> {
    let (outside, by) = match mapping.mapping_type() {
        PortMappingType::Pcp { external_ip, .. } => (external_ip, Protocol::Pcp),
        PortMappingType::NatPmp => {
            let outside = natpmp::external_address(mapping.gateway(), Some(PATIENCE)).await;
            let outside = outside.map_err(|error| format!("NAT-PMP: {error}"))?;
            (outside.into(), Protocol::NatPmp)
        }
    };
    Ok(Held {
        mapping: usable(outside, mapping.external_port().get(), by)?,
        renew_at: half_of(mapping.lifetime()),
        expires_at: end_of(mapping.lifetime()),
        by: By::Pmp(Box::new(mapping)),
    })
}

async fn ask_upnp(router: Router, port: NonZeroU16) -> Result<Held, String> {
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

/// Has a router send what comes to its `port`, or to another one if that is taken, to `own`.
async fn add_upnp(
    gateway: Box<Gateway<Tokio>>,
    own: SocketAddr,
    port: u16,
) -> Result<Held, String> {
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
    Ok(Held {
        mapping: usable(outside, port, Protocol::Upnp)?,
        renew_at: half_of(LIFETIME),
        expires_at: end_of(LIFETIME),
        by: By::Upnp(gateway, own),
    })
}

/// What a router says that it gave, if others can send there.
fn usable(outside: IpAddr, port: u16, by: Protocol) -> Result<Mapping, String> {
    if !outside.is_ipv4() || !is_routable(outside) || port == 0 {
        return Err("the router's external address is not routable".to_owned());
    }
    Ok(Mapping {
        address: SocketAddr::new(outside, port),
        by,
    })
}

/// Of a lifetime in seconds.
fn half_of(lifetime: u32) -> Instant {
    let half = Duration::from_secs(lifetime.min(LIFETIME).into()) / 2;
    Instant::now() + half.max(LEAST)
}

fn end_of(lifetime: u32) -> Instant {
    Instant::now() + Duration::from_secs(lifetime.min(LIFETIME).into())
}

/// A reason for people.
fn shortened(reason: &str) -> String {
    reason.chars().take(MAX_REASON).collect()
}

/// By which a router knows who asked first (RFC 6887, section 11.1): this host's, and nobody else's to guess.
fn nonce(secret: &Digest) -> pcp::Nonce {
    let word = |at: usize| {
        let bytes = secret.0.iter().skip(4 * at).take(4);
        bytes.fold(0, |word: u32, byte| word << 8 | u32::from(*byte))
    };
    [word(0), word(1), word(2)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_where_others_can_send_is_taken() {
        let of = |ip: &str, port| usable(ip.parse().expect(ip), port, Protocol::Pcp).is_ok();
        assert!(of("198.51.100.9", 51820));
        // Behind another NAT: of use to those who are there, too.
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

    /// A router as RFC 6886 has it: what is not version 0 is answered with the version that it speaks (section 3.5), a request for
    /// its address (section 3.2) and one for a port (section 3.3) as written there.
    async fn natpmp_router(socket: tokio::net::UdpSocket) {
        let mut request = [0; 100];
        let (address, epoch) = ([198, 51, 100, 9], [0, 0, 0, 42]);
        while let Ok((length, from)) = socket.recv_from(&mut request).await {
            let mut answer = match &request[..length] {
                [0, 0] => [&[0, 128, 0, 0][..], &epoch, &address].concat(),
                [0, 1, 0, 0, inside @ .., _, _, _, _, _, _] => {
                    // Another port than was asked for, for 120 s.
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
        let held = Held::ask(router, port, &Digest([1; 32])).await;
        let held = held.unwrap_or_else(|reason| panic!("{reason}"));
        let wanted = Mapping {
            address: SocketAddr::from(([198, 51, 100, 9], 50_000)),
            by: Protocol::NatPmp,
        };
        assert_eq!(held.mapping, wanted);
        let left = held.expires_at - Instant::now();
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
    fn a_port_ends_when_the_router_says_and_within_what_was_asked_for() {
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
}
