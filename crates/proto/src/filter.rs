//! What a peer may begin here, applied to every packet that it sends.
//!
//! A [`Filter`] lists the services of this host that are open to the peer, and [`Destinations`] the addresses at which they are. The
//! guard of the peer checks each packet against its own headers and against what this host has sent to the peer:
//!
//! - **The destination** is one of the addresses, for answers too. Networks behind this host, multicast groups and broadcast addresses
//!   are none of them.
//! - **TCP** that begins nothing passes whatever its port: a segment with ACK, or with RST and without SYN. A connection begins with
//!   a SYN without ACK (RFC 9293, section 3.5), and of all others every segment but a reset has ACK (section 3.1).
//! - **UDP** passes to an open port, or from where this host has sent to, between the same ports.
//! - **ICMP and ICMPv6** pass if they are open. Otherwise two kinds do: an echo reply to an echo that this host has sent, and an
//!   error that quotes what this host sent to the peer: TCP, UDP that may be answered, or such an echo.
//! - **Fragments** are judged by the first one, and the others pass if it did: one that overtakes it is dropped. TCP in fragments is
//!   dropped, as a later one may overwrite the flags in the first (RFC 3128); hosts avoid it by path MTU discovery.
//! - **Everything else** passes only where everything does.
//!
//! What this host has begun is kept for each peer in bounded memory, and forgotten two to four minutes after it last sent something
//! (RFC 4787, section 4.3, asks for two at least); what the peer sends prolongs nothing.

mod conntrack;

use crate::time::Instant;
use conntrack::{Conntrack, Key, Kind, identification};
use seikan_observe::DropReason;
use seikan_wire::ip::{IpPacket, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};
use seikan_wire::{icmp, tcp};
use std::net::IpAddr;
use std::ops::RangeInclusive;

/// What a peer may begin here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Filter {
    /// Everything: only the destination counts.
    #[default]
    All,
    /// What is open to it.
    Only(Open),
}

impl Filter {
    /// Whether nothing is open.
    pub fn is_closed(&self) -> bool {
        match self {
            Filter::All => false,
            Filter::Only(open) => !open.icmp && open.tcp.is_empty() && open.udp.is_empty(),
        }
    }

    /// Whether a peer may begin everything under `other` that it may begin under this.
    pub fn is_within(&self, other: &Filter) -> bool {
        match (self, other) {
            (_, Filter::All) => true,
            (Filter::All, Filter::Only(_)) => false,
            (Filter::Only(own), Filter::Only(other)) => own.is_within(other),
        }
    }
}

/// Where a peer may send packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Destinations {
    /// Anywhere, as far as the host forwards: a peer under no policy.
    #[default]
    Any,
    /// To these addresses alone; a few, as each packet is compared with all of them.
    Only(Vec<IpAddr>),
}

impl Destinations {
    fn has(&self, ip: &IpPacket, packet: &[u8]) -> bool {
        match self {
            Destinations::Any => true,
            // With a source route it would go on from there.
            Destinations::Only(addresses) => {
                addresses.contains(&ip.dst) && !ip.source_routed(packet)
            }
        }
    }
}

/// What is open to a peer. The default is nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Open {
    /// ICMP and ICMPv6.
    pub icmp: bool,
    /// TCP ports.
    pub tcp: Ports,
    /// UDP ports.
    pub udp: Ports,
}

/// A set of ports: ranges in order, none of which touches another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports(Vec<(u16, u16)>);

impl Ports {
    /// Whether the port is one of them.
    pub fn contains(&self, port: u16) -> bool {
        let before = self.0.partition_point(|(first, _)| *first <= port);
        let nearest = before.checked_sub(1).and_then(|at| self.0.get(at));
        nearest.is_some_and(|(_, last)| port <= *last)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all of them are among others.
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

/// Applies the filter of a peer that may not send everything.
#[derive(Debug, Default)]
pub(crate) struct StatefulFilter {
    to: Destinations,
    filter: Filter,
    conntrack: Conntrack,
}

impl StatefulFilter {
    /// The guard of a peer that had `before`, under another filter. Who could begin everything had none, and what was sent to it was
    /// not noted: its answers by UDP and to echoes pass again from when this host next sends.
    pub fn set(
        before: Option<Box<StatefulFilter>>,
        filter: Filter,
        to: Destinations,
    ) -> Option<Box<StatefulFilter>> {
        if (&filter, &to) == (&Filter::All, &Destinations::Any) {
            return None;
        }
        let mut state = before.unwrap_or_default();
        if filter == Filter::All {
            state.conntrack = Conntrack::default();
        }
        (state.filter, state.to) = (filter, to);
        Some(state)
    }

    /// Judges a packet from the peer. `packet` is what `ip` was parsed from, of which the headers need to be there.
    pub fn check(&mut self, ip: &IpPacket, packet: &[u8], now: Instant) -> Result<(), DropReason> {
        let passes = self.to.has(ip, packet)
            && match &self.filter {
                Filter::All => true,
                Filter::Only(open) => open.passes(&mut self.conntrack, ip, packet, now),
            };
        match passes {
            true => Ok(()),
            false => Err(DropReason::PolicyDenied),
        }
    }

    /// Takes note of a packet to the peer, so that it may be answered. Later fragments have no ports: their first one had them.
    pub fn note(&mut self, ip: &IpPacket, packet: &[u8], now: Instant) {
        let Filter::Only(open) = &self.filter else {
            return;
        };
        let Ok(Some((protocol, at))) = ip.transport(packet) else {
            return;
        };
        let transport = packet.get(at..).unwrap_or_default();
        // What is open needs no note.
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

    /// Whether the peer needs nothing of ours to send what has this key.
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
        // Behind the packet there may be padding, which has no ports.
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

    /// `at` is where the ICMP message begins.
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

    /// An error that quotes a packet.
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
        // It was ours, and went to who complains.
        if (ip.src, ip.dst) != (error.dst, error.src) {
            return false;
        }
        let Ok(Some((protocol, at))) = ip.transport(quote) else {
            return false;
        };
        let transport = quote.get(at..).unwrap_or_default();
        match Key::of_sent(&ip, protocol, transport) {
            Some(key) => self.has(&key) || conntrack.has(&key, now),
            // Which connections there are the kernel knows.
            None => protocol == PROTO_TCP,
        }
    }
}

#[cfg(test)]
mod tests;
