//! Routes: add, list, and look up the route that the kernel would use.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NlasIterator, ParseableParametrized};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteLwEnCapType, RouteMessage,
    RouteMetric, RouteProtocol, RouteScope, RouteType,
};
use nix::errno::Errno;

use super::{Family, Netlink, NetlinkError, TABLE_MAIN};

/// `struct rtmsg`.
const ROUTE_HEADER_SIZE: usize = 12;

/// One route. Build it with [`Route::to`] and the methods that follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The destinations; a prefix of length 0 is the default route.
    pub destination: IpNet,
    /// The next hop, if not directly connected.
    pub gateway: Option<IpAddr>,
    /// Index of the outgoing interface.
    pub device: Option<u32>,
    /// Routing table.
    pub table: u32,
    /// Preference; the lower wins. `None` leaves the kernel's default (IPv4 0, IPv6 1024).
    pub metric: Option<u32>,
    /// Unicast, blackhole, unreachable, prohibit ...
    pub kind: RouteType,
    /// IPv4: distance to the destination. `None`: as iproute2 chooses it (host for local routes,
    /// link without gateway, else universe).
    pub scope: Option<RouteScope>,
    /// Path MTU in bytes for this route.
    pub mtu: Option<u32>,
    /// Source address of packets of this host.
    pub source: Option<IpAddr>,
    /// Origin of the route (`RTPROT_*`, include/uapi/linux/rtnetlink.h).
    pub protocol: u8,
}

/// Result of a route lookup ([`Netlink::route_get`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteLookup {
    /// Index of the outgoing interface.
    pub device: u32,
    /// The source address that the kernel would choose.
    pub source: Option<IpAddr>,
    /// The next hop, if not directly connected.
    pub gateway: Option<IpAddr>,
    /// Path MTU in bytes: that of the route or a learned one, else that of the interface.
    pub mtu: u32,
    /// The table with the route.
    pub table: u32,
    /// Unicast, local, blackhole ...
    pub kind: RouteType,
}

impl Route {
    /// Creates a unicast route in the main table.
    pub fn to(destination: IpNet) -> Self {
        Self {
            destination: destination.trunc(),
            gateway: None,
            device: None,
            table: TABLE_MAIN,
            metric: None,
            kind: RouteType::Unicast,
            scope: None,
            mtu: None,
            source: None,
            protocol: libc::RTPROT_BOOT,
        }
    }

    /// Sets the next hop.
    pub fn via(mut self, gateway: IpAddr) -> Self {
        self.gateway = Some(gateway);
        self
    }

    /// Sets the outgoing interface.
    pub fn device(mut self, index: u32) -> Self {
        self.device = Some(index);
        self
    }

    /// Sets the table.
    pub fn table(mut self, table: u32) -> Self {
        self.table = table;
        self
    }

    /// Sets the metric; the lower wins.
    pub fn metric(mut self, metric: u32) -> Self {
        self.metric = Some(metric);
        self
    }

    /// Sets the path MTU in bytes.
    pub fn mtu(mut self, bytes: u32) -> Self {
        self.mtu = Some(bytes);
        self
    }

    /// Sets the kind.
    pub fn kind(mut self, kind: RouteType) -> Self {
        self.kind = kind;
        self
    }

    /// Sets the source address of packets of this host.
    pub fn source(mut self, source: IpAddr) -> Self {
        self.source = Some(source);
        self
    }

    /// Returns IPv4 or IPv6.
    pub fn family(&self) -> Family {
        Family::of(self.destination.addr())
    }

    fn scope_for_kernel(&self) -> RouteScope {
        match (self.scope, self.kind) {
            (Some(scope), _) => scope,
            _ if self.family() == Family::V6 => RouteScope::Universe,
            (None, RouteType::Local | RouteType::Nat) => RouteScope::Host,
            (None, RouteType::Unicast | RouteType::Broadcast | RouteType::Multicast)
                if self.gateway.is_none() =>
            {
                RouteScope::Link
            }
            _ => RouteScope::Universe,
        }
    }

    fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: self.family().into(),
            destination_prefix_length: self.destination.prefix_len(),
            // Larger numbers go into the attribute, which takes precedence.
            table: u8::try_from(self.table).unwrap_or(0),
            protocol: RouteProtocol::from(self.protocol),
            scope: self.scope_for_kernel(),
            kind: self.kind,
            ..RouteHeader::default()
        };
        let attributes = &mut message.attributes;
        attributes.push(RouteAttribute::Table(self.table));
        attributes.push(RouteAttribute::Destination(self.destination.addr().into()));
        attributes.extend(self.gateway.map(|ip| RouteAttribute::Gateway(ip.into())));
        attributes.extend(self.device.map(RouteAttribute::Oif));
        attributes.extend(self.metric.map(RouteAttribute::Priority));
        attributes.extend(self.source.map(|ip| RouteAttribute::PrefSource(ip.into())));
        attributes.extend(
            self.mtu
                .map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)])),
        );
        message
    }
}

impl std::fmt::Display for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.destination)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if self.table != TABLE_MAIN {
            write!(f, " in table {}", self.table)?;
        }
        if let Some(metric) = self.metric {
            write!(f, " with metric {metric}")?;
        }
        Ok(())
    }
}

impl Netlink {
    /// Adds a route. It is an error if an equal one exists.
    pub fn add_route(&self, route: &Route) -> Result<(), NetlinkError> {
        self.change(
            RouteNetlinkMessage::NewRoute(route.message()),
            NLM_F_CREATE | NLM_F_EXCL,
            |netlink| netlink.describe_route("add", route),
        )
    }

    /// Returns the routes of a table. A route with several next hops is listed once for each.
    pub fn routes(&self, family: Family, table: u32) -> Result<Vec<Route>, NetlinkError> {
        let mut routes = self.all_routes(family)?;
        routes.retain(|route| route.table == table);
        Ok(routes)
    }

    /// Returns the routes of all tables, including those to this host's own addresses (table
    /// `local`).
    pub fn all_routes(&self, family: Family) -> Result<Vec<Route>, NetlinkError> {
        let mut message = RouteMessage::default();
        message.header.address_family = family.into();
        let routes = self.dump(
            RouteNetlinkMessage::GetRoute(message),
            |_, payload| Some(parse_routes(payload)),
            |_| format!("list the {family} routes"),
        )?;
        Ok(routes.into_iter().flatten().collect())
    }

    /// Looks up how a packet of this host to `destination` with this firewall mark would leave.
    pub fn route_get(
        &self,
        destination: IpAddr,
        mark: Option<u32>,
    ) -> Result<RouteLookup, NetlinkError> {
        let mut message = RouteMessage::default();
        message.header.address_family = Family::of(destination).into();
        message.header.destination_prefix_length = if destination.is_ipv4() { 32 } else { 128 };
        message.header.flags = RouteFlags::LookupTable;
        message
            .attributes
            .push(RouteAttribute::Destination(destination.into()));
        message.attributes.extend(mark.map(RouteAttribute::Mark));
        let action = || format!("find a route to {destination}");
        let route = self
            .get(
                RouteNetlinkMessage::GetRoute(message),
                |_, payload| parse_message(payload).into_iter().next(),
                |_| action(),
            )?
            .ok_or_else(|| NetlinkError::Malformed {
                action: action(),
                reason: "no route in it".into(),
            })?;
        let device = route.device.ok_or_else(|| NetlinkError::Refused {
            action: action(),
            errno: Errno::ENETUNREACH,
            detail: format!("the route is {:?}", route.kind),
            remedy: "no interface leads there",
        })?;
        let mtu = match route.mtu {
            Some(mtu) => mtu,
            None => self.link_by_index(device)?.mtu,
        };
        Ok(RouteLookup {
            device,
            source: route.source,
            gateway: route.gateway,
            mtu,
            table: route.table,
            kind: route.kind,
        })
    }

    fn describe_route(&self, verb: &str, route: &Route) -> String {
        match route.device {
            Some(device) => format!(
                "{verb} the route to {route} on {}",
                self.describe_link(device)
            ),
            None => format!("{verb} the route to {route}"),
        }
    }
}

/// Parses `RTM_NEWROUTE` or `RTM_DELROUTE` of the tables. Entries of the route cache are ignored.
pub(super) fn parse_routes(payload: &[u8]) -> Vec<Route> {
    match RouteHeader::parse(payload) {
        Ok(header) if !header.flags.contains(RouteFlags::Cloned) => parse_message(payload),
        _ => Vec::new(),
    }
}

fn parse_message(payload: &[u8]) -> Vec<Route> {
    let Ok(header) = RouteHeader::parse(payload) else {
        return Vec::new();
    };
    let any: IpAddr = match header.address_family {
        netlink_packet_route::AddressFamily::Inet => std::net::Ipv4Addr::UNSPECIFIED.into(),
        netlink_packet_route::AddressFamily::Inet6 => std::net::Ipv6Addr::UNSPECIFIED.into(),
        _ => return Vec::new(),
    };
    let mut destination = any;
    let mut hops = Vec::new();
    let mut route = Route::to(IpNet::from(any));
    route.table = header.table.into();
    route.kind = header.kind;
    route.scope = Some(header.scope);
    route.protocol = header.protocol.into();
    let parameters = (header.address_family, header.kind, RouteLwEnCapType::None);
    let attributes = NlasIterator::new(payload.get(ROUTE_HEADER_SIZE..).unwrap_or(&[]));
    for nla in attributes.map_while(Result::ok) {
        match RouteAttribute::parse_with_param(&nla, parameters) {
            Ok(RouteAttribute::Destination(address)) => destination = ip(&address).unwrap_or(any),
            Ok(RouteAttribute::MultiPath(next_hops)) => hops = next_hops,
            Ok(attribute) => apply(&mut route, &attribute),
            Err(_) => {}
        }
    }
    let Ok(destination) = IpNet::new(destination, header.destination_prefix_length) else {
        return Vec::new();
    };
    route.destination = destination;
    if hops.is_empty() {
        return vec![route];
    }
    hops.iter()
        .map(|hop| {
            let mut route = route.clone().device(hop.interface_index);
            hop.attributes
                .iter()
                .for_each(|attribute| apply(&mut route, attribute));
            route
        })
        .collect()
}

fn apply(route: &mut Route, attribute: &RouteAttribute) {
    match attribute {
        RouteAttribute::Gateway(address) => route.gateway = ip(address),
        // An IPv4 route with an IPv6 next hop (RFC 5549).
        RouteAttribute::Via(netlink_packet_route::route::RouteVia::Inet6(address)) => {
            route.gateway = Some((*address).into());
        }
        RouteAttribute::PrefSource(address) => route.source = ip(address),
        RouteAttribute::Oif(index) => route.device = Some(*index),
        RouteAttribute::Priority(metric) => route.metric = Some(*metric),
        RouteAttribute::Table(table) => route.table = *table,
        RouteAttribute::Metrics(metrics) => {
            route.mtu = metrics.iter().find_map(|metric| match metric {
                RouteMetric::Mtu(mtu) => Some(*mtu),
                _ => None,
            });
        }
        _ => {}
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some((*v4).into()),
        RouteAddress::Inet6(v6) => Some((*v6).into()),
        _ => None,
    }
}
