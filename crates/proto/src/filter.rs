//! The packet filter of a peer: the services of this host that the peer may use, applied to every
//! packet from it.
//!
//! A [`Filter`] lists the services that are open to the peer, and [`Destinations`] the addresses at
//! which they are open. The filter checks each packet by its own headers and by the flows that this
//! host has with the peer:
//!
//! A peer may be a gateway: each device behind it is a sender of its own, and each device behind
//! this host a destination of its own. [`Pairs`] has a filter for each pair of them.
//!
//! - **The destination** must be one of the addresses, for replies too. Networks behind this host,
//!   multicast groups and broadcast addresses are never among them.
//! - **TCP** segments that start no connection pass at every port: those with ACK, and those with
//!   RST and without SYN. A connection starts with a SYN without ACK (RFC 9293, section 3.5), and
//!   every other segment except a reset has ACK (section 3.1).
//! - **UDP** passes to an open port, or as a reply to a datagram from this host, between the same
//!   ports.
//! - **ICMP and ICMPv6** pass if they are open. Otherwise two kinds pass: an echo reply to an echo
//!   request of this host, and an error that quotes a packet from this host to the peer (TCP, UDP
//!   that may be answered, or such an echo).
//! - **Fragments** pass if the first fragment did; a fragment that overtakes the first one is
//!   dropped. TCP in fragments is dropped, because a later fragment may overwrite the flags in the
//!   first (RFC 3128). Hosts avoid such fragments by path MTU discovery.
//! - **Everything else** passes only if the filter allows everything.
//!
//! The flows of this host are kept for each peer in bounded memory, and expire two to four minutes
//! after this host last sent in them (RFC 4787, section 4.3, requires at least two). Packets from
//! the peer do not extend them.

mod conntrack;

use crate::time::Instant;
use conntrack::{Conntrack, Key, Kind, identification};
use seikan_observe::DropReason;
use seikan_wire::ip::{IpPacket, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};
use seikan_wire::{icmp, tcp};
use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Services that a peer may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Filter {
    /// All of them; only the destination is checked.
    #[default]
    All,
    /// Only these services.
    Only(Open),
}

impl Filter {
    /// Whether no service is open.
    pub fn is_closed(&self) -> bool {
        match self {
            Filter::All => false,
            Filter::Only(open) => !open.icmp && open.tcp.is_empty() && open.udp.is_empty(),
        }
    }

    /// Whether `other` allows everything that this filter allows.
    pub fn is_within(&self, other: &Filter) -> bool {
        match (self, other) {
            (_, Filter::All) => true,
            (Filter::All, Filter::Only(_)) => false,
            (Filter::Only(own), Filter::Only(other)) => own.is_within(other),
        }
    }
}

/// Addresses that a peer may send packets to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Destinations {
    /// Any address that the host forwards to: a peer without a policy.
    #[default]
    Any,
    /// Only these addresses. They should be few, because each packet is compared with all of them.
    Only(Vec<IpAddr>),
}

impl Destinations {
    fn has(&self, address: IpAddr) -> bool {
        match self {
            Destinations::Any => true,
            Destinations::Only(addresses) => addresses.contains(&address),
        }
    }
}

/// Filters of a peer, by sender and destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filters {
    /// The same for every sender.
    Same(Filter, Destinations),
    /// One filter for each pair.
    Pairs(Pairs),
}

impl Default for Filters {
    /// A peer without a policy.
    fn default() -> Self {
        Filters::Same(Filter::All, Destinations::Any)
    }
}

impl Filters {
    /// The filter for packets from an address to another; `None` if none may pass.
    fn between(&self, from: IpAddr, to: IpAddr) -> Option<&Filter> {
        match self {
            Filters::Same(filter, destinations) => destinations.has(to).then_some(filter),
            Filters::Pairs(pairs) => pairs.get(from, to),
        }
    }

    fn is_any_destination(&self) -> bool {
        matches!(self, Filters::Same(_, Destinations::Any))
    }
}

/// Filters between senders behind a peer and destinations at or behind this host. Nothing passes
/// between others.
///
/// Addresses with the same filters are a group, so that the table grows with the number of different
/// rules, not with the number of pairs of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pairs {
    /// Group of each sender.
    pub senders: HashMap<IpAddr, usize>,
    /// Group of each destination.
    pub receivers: Arc<HashMap<IpAddr, usize>>,
    /// Number of groups of destinations.
    pub receiver_groups: usize,
    /// Indices into `filters`, for each group of senders one for each group of destinations; `None`
    /// if nothing passes.
    pub indices: Vec<Option<u16>>,
    /// The different filters.
    pub filters: Vec<Filter>,
}

impl Pairs {
    /// The filter of a pair.
    pub fn get(&self, from: IpAddr, to: IpAddr) -> Option<&Filter> {
        let (from, to) = (self.senders.get(&from)?, self.receivers.get(&to)?);
        let index = self.indices.get(from * self.receiver_groups + to)?;
        self.filters.get(usize::from((*index)?))
    }
}

/// Services that are open to a peer. The default is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Open {
    /// ICMP and ICMPv6.
    pub icmp: bool,
    /// TCP ports.
    pub tcp: Ports,
    /// UDP ports.
    pub udp: Ports,
}

/// A set of ports: ranges in ascending order that neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports(Vec<(u16, u16)>);

impl Ports {
    /// Whether the set contains `port`.
    pub fn contains(&self, port: u16) -> bool {
        let before = self.0.partition_point(|(first, _)| *first <= port);
        let nearest = before.checked_sub(1).and_then(|at| self.0.get(at));
        nearest.is_some_and(|(_, last)| port <= *last)
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `others` contains all of these ports.
    fn is_within(&self, others: &Ports) -> bool {
        let mut all = self.0.iter();
        all.all(|(first, last)| {
            others
                .0
                .iter()
                .any(|(low, high)| low <= first && last <= high)
        })
    }
}

impl FromIterator<RangeInclusive<u16>> for Ports {
    fn from_iter<I: IntoIterator<Item = RangeInclusive<u16>>>(ranges: I) -> Ports {
        let ranges = ranges.into_iter().filter(|range| !range.is_empty());
        let mut ranges: Vec<(u16, u16)> = ranges.map(|r| (*r.start(), *r.end())).collect();
        ranges.sort_unstable();
        ranges.dedup_by(|next, kept| {
            let joins = next.0 <= kept.1.saturating_add(1);
            if joins {
                kept.1 = kept.1.max(next.1);
            }
            joins
        });
        Ports(ranges)
    }
}

/// The filter of a restricted peer, with its connection tracking.
#[derive(Debug, Default)]
pub(crate) struct StatefulFilter {
    filters: Filters,
    conntrack: Conntrack,
}

impl StatefulFilter {
    /// Creates the filter of a peer that had `before`. An unrestricted peer had none, so the flows
    /// of this host were not tracked: its replies by UDP and to echoes pass once this host sends
    /// again.
    pub fn set(
        before: Option<Box<StatefulFilter>>,
        filters: Filters,
    ) -> Option<Box<StatefulFilter>> {
        if filters == Filters::default() {
            return None;
        }
        let mut state = before.unwrap_or_default();
        if matches!(filters, Filters::Same(Filter::All, _)) {
            state.conntrack = Conntrack::default();
        }
        state.filters = filters;
        Some(state)
    }

    /// Checks a packet from the peer. `packet` is the packet that `ip` was parsed from; its headers
    /// must be complete.
    pub fn check(&mut self, ip: &IpPacket, packet: &[u8], now: Instant) -> Result<(), DropReason> {
        // A source route would lead on to another address.
        let is_final = self.filters.is_any_destination() || !ip.source_routed(packet);
        let filter = self.filters.between(ip.src, ip.dst).filter(|_| is_final);
        let passes = match filter {
            None => false,
            Some(Filter::All) => true,
            Some(Filter::Only(open)) => open.passes(&mut self.conntrack, ip, packet, now),
        };
        if passes {
            Ok(())
        } else {
            Err(DropReason::PolicyDenied)
        }
    }

    /// Tracks a packet to the peer, so that replies pass. Later fragments have no ports; the first
    /// fragment was tracked.
    pub fn note(&mut self, ip: &IpPacket, packet: &[u8], now: Instant) {
        let filter = match &self.filters {
            Filters::Same(filter, _) => Some(filter),
            Filters::Pairs(pairs) => pairs.get(ip.dst, ip.src),
        };
        let Some(Filter::Only(open)) = filter else {
            return;
        };
        let Ok(Some((protocol, at))) = ip.transport(packet) else {
            return;
        };
        let transport = packet.get(at..).unwrap_or_default();
        // Replies from an open service pass without an entry.
        if let Some(key) = Key::of_sent(ip, protocol, transport).filter(|key| !open.has(key)) {
            self.conntrack.note(key, now);
        }
    }
}

impl Open {
    fn is_within(&self, other: &Open) -> bool {
        (other.icmp || !self.icmp)
            && self.tcp.is_within(&other.tcp)
            && self.udp.is_within(&other.udp)
    }

    /// Whether packets with this key pass without connection tracking.
    fn has(&self, key: &Key) -> bool {
        let [high, low, ..] = key.id;
        match key.kind {
            Kind::Udp => self.udp.contains(u16::from_be_bytes([high, low])),
            Kind::Echo => self.icmp,
            Kind::Fragment(_) => false,
        }
    }

    fn passes(
        &self,
        conntrack: &mut Conntrack,
        ip: &IpPacket,
        packet: &[u8],
        now: Instant,
    ) -> bool {
        // Padding may follow the packet, and it has no ports.
        let packet = packet.get(..ip.total_len).unwrap_or(packet);
        let Ok(transport) = ip.transport(packet) else {
            return false;
        };
        let fragments = ip.fragment.then(|| Key {
            kind: Kind::Fragment(ip.protocol),
            local: ip.dst,
            remote: ip.src,
            id: identification(ip, packet),
        });
        let Some((protocol, at)) = transport else {
            return fragments.is_some_and(|key| conntrack.has(&key, now));
        };
        let transport = packet.get(at..).unwrap_or_default();
        let passes = match protocol {
            PROTO_TCP => !ip.fragment && self.tcp_passes(transport),
            PROTO_UDP => self.udp_passes(conntrack, ip, transport, now),
            PROTO_ICMP | PROTO_ICMPV6 => {
                self.icmp || self.icmp_passes(conntrack, ip, packet, at, now)
            }
            _ => false,
        };
        if let Some(key) = fragments.filter(|_| passes) {
            conntrack.note(key, now);
        }
        passes
    }

    fn tcp_passes(&self, segment: &[u8]) -> bool {
        let Some(header) = segment.first_chunk::<14>() else {
            return false;
        };
        let flags = tcp::flags(header);
        let begins_nothing = flags & tcp::ACK != 0 || flags & (tcp::RST | tcp::SYN) == tcp::RST;
        begins_nothing
            || self
                .tcp
                .contains(u16::from_be_bytes([header[2], header[3]]))
    }

    fn udp_passes(
        &self,
        conntrack: &mut Conntrack,
        ip: &IpPacket,
        datagram: &[u8],
        now: Instant,
    ) -> bool {
        let Some(&[r0, r1, l0, l1]) = datagram.first_chunk() else {
            return false;
        };
        let key = Key {
            kind: Kind::Udp,
            local: ip.dst,
            remote: ip.src,
            id: [l0, l1, r0, r1],
        };
        self.has(&key) || conntrack.has(&key, now)
    }

    /// Whether an ICMP message passes; it begins at `at`.
    fn icmp_passes(
        &self,
        conntrack: &mut Conntrack,
        ip: &IpPacket,
        packet: &[u8],
        at: usize,
        now: Instant,
    ) -> bool {
        if let Some(quote) = icmp::quote(ip, packet) {
            return self.quote_passes(conntrack, ip, packet.get(quote..).unwrap_or_default(), now);
        }
        let Some(&[kind, _, _, _, i0, i1]) = packet.get(at..).and_then(<[u8]>::first_chunk) else {
            return false;
        };
        let key = Key {
            kind: Kind::Echo,
            local: ip.dst,
            remote: ip.src,
            id: [i0, i1, 0, 0],
        };
        kind == if ip.is_v6() { 129 } else { 0 } && conntrack.has(&key, now)
    }

    /// Whether an error with this quoted packet passes.
    fn quote_passes(
        &self,
        conntrack: &mut Conntrack,
        error: &IpPacket,
        quote: &[u8],
        now: Instant,
    ) -> bool {
        let Ok(ip) = IpPacket::parse_headers(quote) else {
            return false;
        };
        // The quoted packet must be from this host to the sender of the error.
        if (ip.src, ip.dst) != (error.dst, error.src) {
            return false;
        }
        let Ok(Some((protocol, at))) = ip.transport(quote) else {
            return false;
        };
        let transport = quote.get(at..).unwrap_or_default();
        match Key::of_sent(&ip, protocol, transport) {
            Some(key) => self.has(&key) || conntrack.has(&key, now),
            // The kernel knows which TCP connections exist.
            None => protocol == PROTO_TCP,
        }
    }
}

#[cfg(test)]
mod tests;
