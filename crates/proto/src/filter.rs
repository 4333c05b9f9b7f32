//! What a peer may begin here, applied to every packet that it sends.
//!
//! A [`Filter`] lists the services of this host that are open to the peer. Its guard judges each packet by its own headers and by
//! what this host has sent to the peer:
//!
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

use crate::time::Instant;
use seikan_observe::DropReason;
use seikan_wire::ip::{IpPacket, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};
use seikan_wire::{icmp, tcp};
use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Flows of one generation, of which there are two for each peer.
const GENERATION_FLOWS: usize = 1024;
/// How long a generation lasts.
const GENERATION: Duration = Duration::from_secs(120);

/// What a peer may begin here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Filter {
    /// Everything: packets are not looked at.
    #[default]
    All,
    /// What is open to it.
    Only(Open),
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
pub(crate) struct Guard {
    open: Open,
    begun: Begun,
}

impl Guard {
    /// The guard of a peer that had `before`, under another filter. Who could begin everything had none, and what was sent to it was
    /// not noted: its answers by UDP and to echoes pass again from when this host next sends.
    pub fn set(before: Option<Box<Guard>>, filter: Filter) -> Option<Box<Guard>> {
        let Filter::Only(open) = filter else {
            return None;
        };
        let mut guard = before.unwrap_or_default();
        guard.open = open;
        Some(guard)
    }

    /// Judges a packet from the peer. `packet` is what `ip` was parsed from, of which the headers need to be there.
    pub fn check(&mut self, ip: &IpPacket, packet: &[u8], now: Instant) -> Result<(), DropReason> {
        match self.passes(ip, packet, now) {
            true => Ok(()),
            false => Err(DropReason::PolicyDenied),
        }
    }

    /// Takes note of a packet to the peer, so that it may be answered. Later fragments have no ports: their first one had them.
    pub fn note(&mut self, ip: &IpPacket, packet: &[u8], now: Instant) {
        let Ok(Some((protocol, at))) = ip.transport(packet) else {
            return;
        };
        let transport = packet.get(at..).unwrap_or_default();
        // What is open needs no note.
        if let Some(key) = Key::of_sent(ip, protocol, transport).filter(|key| !self.is_open(key)) {
            self.begun.note(key, now);
        }
    }

    /// Whether the peer needs nothing of ours to send what has this key.
    fn is_open(&self, key: &Key) -> bool {
        let [high, low, ..] = key.id;
        match key.kind {
            Kind::Udp => self.open.udp.contains(u16::from_be_bytes([high, low])),
            Kind::Echo => self.open.icmp,
            Kind::Fragment(_) => false,
        }
    }

    fn passes(&mut self, ip: &IpPacket, packet: &[u8], now: Instant) -> bool {
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
            return fragments.is_some_and(|key| self.begun.has(&key, now));
        };
        let transport = packet.get(at..).unwrap_or_default();
        let passes = match protocol {
            PROTO_TCP => !ip.fragment && self.tcp_passes(transport),
            PROTO_UDP => self.udp_passes(ip, transport, now),
            PROTO_ICMP | PROTO_ICMPV6 => self.open.icmp || self.icmp_passes(ip, packet, at, now),
            _ => false,
        };
        if let Some(key) = fragments.filter(|_| passes) {
            self.begun.note(key, now);
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
                .open
                .tcp
                .contains(u16::from_be_bytes([header[2], header[3]]))
    }

    fn udp_passes(&mut self, ip: &IpPacket, datagram: &[u8], now: Instant) -> bool {
        let Some(&[r0, r1, l0, l1]) = datagram.first_chunk() else {
            return false;
        };
        let key = Key {
            kind: Kind::Udp,
            local: ip.dst,
            remote: ip.src,
            id: [l0, l1, r0, r1],
        };
        self.is_open(&key) || self.begun.has(&key, now)
    }

    /// `at` is where the ICMP message begins.
    fn icmp_passes(&mut self, ip: &IpPacket, packet: &[u8], at: usize, now: Instant) -> bool {
        if let Some(quote) = icmp::quote(ip, packet) {
            return self.quote_passes(ip, packet.get(quote..).unwrap_or_default(), now);
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
        kind == if ip.is_v6() { 129 } else { 0 } && self.begun.has(&key, now)
    }

    /// An error that quotes a packet.
    fn quote_passes(&mut self, error: &IpPacket, quote: &[u8], now: Instant) -> bool {
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
            Some(key) => self.is_open(&key) || self.begun.has(&key, now),
            // Which connections there are the kernel knows.
            None => protocol == PROTO_TCP,
        }
    }
}

/// The identification of a fragment: that of IPv4, or that of the fragment header, at whose end the walk over IPv6 headers ends.
fn identification(ip: &IpPacket, packet: &[u8]) -> [u8; 4] {
    match ip.src {
        IpAddr::V4(_) => match packet.get(4..6) {
            Some(&[i0, i1]) => [i0, i1, 0, 0],
            _ => [0; 4],
        },
        IpAddr::V6(_) => {
            let header = packet.get(..ip.header_len);
            header
                .and_then(<[u8]>::last_chunk)
                .copied()
                .unwrap_or_default()
        }
    }
}

/// What an answer is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    kind: Kind,
    local: IpAddr,
    remote: IpAddr,
    /// Local and remote port, the identifier of an echo, or the identification of fragments.
    id: [u8; 4],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Udp,
    Echo,
    /// Of this protocol, of which the first one passed.
    Fragment(u8),
}

/// Most of what looking for a key costs. The peer has few addresses and there are few kinds, so they are left out; what it can choose
/// is not.
impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self.local {
            IpAddr::V4(address) => state.write_u32(address.to_bits()),
            IpAddr::V6(address) => state.write_u128(address.to_bits()),
        }
        state.write_u32(u32::from_be_bytes(self.id));
    }
}

impl Key {
    /// What the answers to a packet of this host are known by; `None` for what has none, or needs no note for it.
    fn of_sent(ip: &IpPacket, protocol: u8, transport: &[u8]) -> Option<Key> {
        let (kind, id) = match protocol {
            PROTO_UDP => (Kind::Udp, *transport.first_chunk()?),
            PROTO_ICMP | PROTO_ICMPV6 => {
                let &[kind, _, _, _, i0, i1] = transport.first_chunk()?;
                if kind != if ip.is_v6() { 128 } else { 8 } {
                    return None;
                }
                (Kind::Echo, [i0, i1, 0, 0])
            }
            _ => return None,
        };
        Some(Key {
            kind,
            local: ip.src,
            remote: ip.dst,
            id,
        })
    }
}

/// What may be answered, in two generations: when the younger is full or old enough it becomes the older, and the older is forgotten
/// but for what was noted again since. Their memory is used again.
#[derive(Debug, Default)]
struct Begun {
    young: HashSet<Key>,
    old: HashSet<Key>,
    /// Among the young: a flow is mostly many packets in a row.
    newest: Option<Key>,
    since: Instant,
}

impl Begun {
    fn note(&mut self, key: Key, now: Instant) {
        self.age(now);
        if self.newest == Some(key) {
            return;
        }
        if self.young.len() >= GENERATION_FLOWS && !self.young.contains(&key) {
            self.turn(now);
        }
        self.young.insert(key);
        self.newest = Some(key);
    }

    fn has(&mut self, key: &Key, now: Instant) -> bool {
        self.age(now);
        self.newest == Some(*key) || self.young.contains(key) || self.old.contains(key)
    }

    fn age(&mut self, now: Instant) {
        if self.since.has_expired(2 * GENERATION, now) {
            self.turn(now);
            self.old.clear();
        } else if self.since.has_expired(GENERATION, now) {
            self.turn(self.since + GENERATION);
        }
    }

    fn turn(&mut self, since: Instant) {
        std::mem::swap(&mut self.young, &mut self.old);
        self.young.clear();
        self.newest = None;
        self.since = since;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tcp::{ACK, FIN, PSH, RST, SYN};

    const HERE: u8 = 1;
    const PEER: u8 = 2;

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(1 << 40) + Duration::from_secs(seconds)
    }

    fn guard(open: Open) -> Guard {
        *Guard::set(None, Filter::Only(open)).expect("not everything is open")
    }

    /// TCP 443 and 8000 to 8010, UDP 53, and no ICMP.
    fn some() -> Guard {
        guard(Open {
            icmp: false,
            tcp: [443..=443, 8000..=8010].into_iter().collect(),
            udp: std::iter::once(53..=53).collect(),
        })
    }

    /// A packet from host to host, whose addresses end in these numbers.
    fn packet(v6: bool, [from, to]: [u8; 2], protocol: u8, transport: &[u8]) -> Vec<u8> {
        let mut p = vec![0; if v6 { 40 } else { 20 }];
        if v6 {
            (p[0], p[6], p[8], p[23], p[24], p[39]) = (0x60, protocol, 0xfd, from, 0xfd, to);
        } else {
            (p[0], p[9], p[12], p[15], p[16], p[19]) = (0x45, protocol, 10, from, 10, to);
        }
        p.extend(transport);
        let (header, length) = (if v6 { 40 } else { 20 }, p.len());
        seikan_wire::ip::set_length(&mut p, header, length, None);
        p
    }

    fn judged(guard: &mut Guard, packet: &[u8], now: Instant) -> bool {
        let ip = IpPacket::parse(packet).expect("a packet");
        let judged = guard.check(&ip, packet, now);
        assert!(matches!(judged, Ok(()) | Err(DropReason::PolicyDenied)));
        judged.is_ok()
    }

    fn sends(guard: &mut Guard, packet: &[u8], now: Instant) {
        let ip = IpPacket::parse(packet).expect("a packet");
        guard.note(&ip, packet, now);
    }

    fn ports(from: u16, to: u16) -> Vec<u8> {
        [from.to_be_bytes(), to.to_be_bytes()].concat()
    }

    fn tcp_to(v6: bool, port: u16, flags: u8) -> Vec<u8> {
        let mut segment = ports(40_000, port);
        segment.resize(20, 0);
        (segment[12], segment[13]) = (0x50, flags);
        packet(v6, [PEER, HERE], PROTO_TCP, &segment)
    }

    fn udp(v6: bool, way: [u8; 2], from: u16, to: u16) -> Vec<u8> {
        let datagram = [ports(from, to), vec![0, 12, 0, 0, 1, 2, 3, 4]].concat();
        packet(v6, way, PROTO_UDP, &datagram)
    }

    fn echo(v6: bool, way: [u8; 2], kind: [u8; 2], id: u8) -> Vec<u8> {
        let protocol = if v6 { PROTO_ICMPV6 } else { PROTO_ICMP };
        let kind = kind[usize::from(v6)];
        packet(v6, way, protocol, &[kind, 0, 0, 0, 0, id, 0, 1])
    }
    const REQUEST: [u8; 2] = [8, 128];
    const REPLY: [u8; 2] = [0, 129];
    const UNREACHABLE: [u8; 2] = [3, 1];

    /// An error about a packet.
    fn error(v6: bool, way: [u8; 2], about: &[u8]) -> Vec<u8> {
        let protocol = if v6 { PROTO_ICMPV6 } else { PROTO_ICMP };
        let mut message = vec![UNREACHABLE[usize::from(v6)], 0, 0, 0, 0, 0, 0, 0];
        message.extend(about);
        packet(v6, way, protocol, &message)
    }

    #[test]
    fn a_connection_is_begun_at_open_ports_alone() {
        for v6 in [false, true] {
            for (port, open) in [
                (443, true),
                (442, false),
                (444, false),
                (7999, false),
                (8000, true),
                (8010, true),
                (8011, false),
                (53, false),
            ] {
                let syn = tcp_to(v6, port, SYN);
                assert_eq!(judged(&mut some(), &syn, at(0)), open, "{port}");
            }
        }
    }

    #[test]
    fn what_begins_no_connection_passes_at_every_port() {
        for (flags, passes) in [
            (ACK, true),
            (ACK | PSH, true),
            (SYN | ACK, true),
            (FIN | ACK, true),
            (RST, true),
            (RST | ACK, true),
            (SYN, false),
            (SYN | FIN, false),
            (SYN | RST, false),
            // Nobody sends these but who looks for open ports.
            (0, false),
            (FIN, false),
            (FIN | PSH | tcp::URG, false),
        ] {
            let segment = tcp_to(false, 22, flags);
            assert_eq!(judged(&mut some(), &segment, at(0)), passes, "{flags:#x}");
        }
    }

    #[test]
    fn datagrams_pass_to_open_ports_and_as_answers() {
        for v6 in [false, true] {
            let mut guard = some();
            assert!(judged(&mut guard, &udp(v6, [PEER, HERE], 999, 53), at(0)));
            let answer = udp(v6, [PEER, HERE], 123, 5000);
            assert!(!judged(&mut guard, &answer, at(0)));
            sends(&mut guard, &udp(v6, [HERE, PEER], 5000, 123), at(0));
            assert!(judged(&mut guard, &answer, at(1)));
            // From another port, and to another.
            for (from, to) in [(124, 5000), (123, 5001), (5000, 123)] {
                let other = udp(v6, [PEER, HERE], from, to);
                assert!(!judged(&mut guard, &other, at(1)), "{from} {to}");
            }
        }
    }

    #[test]
    fn an_answer_is_let_in_for_two_to_four_minutes_after_what_it_answers() {
        for began in [0, 60, 119] {
            let mut guard = some();
            // The generations' own time begins here.
            sends(&mut guard, &udp(false, [HERE, PEER], 1, 1), at(0));
            sends(&mut guard, &udp(false, [HERE, PEER], 5000, 123), at(began));
            let answer = udp(false, [PEER, HERE], 123, 5000);
            // What comes in prolongs nothing.
            for second in (began..began + 120).step_by(10) {
                assert!(judged(&mut guard, &answer, at(second)), "{began} {second}");
            }
            assert!(!judged(&mut guard, &answer, at(began + 240)));
        }
        let mut guard = some();
        sends(&mut guard, &udp(false, [HERE, PEER], 5000, 123), at(0));
        let answer = udp(false, [PEER, HERE], 123, 5000);
        assert!(!judged(&mut guard, &answer, at(3600)), "silent for an hour");
    }

    #[test]
    fn flows_are_bounded_and_the_newest_are_kept() {
        let mut guard = some();
        for port in 1000..1000 + 10 * GENERATION_FLOWS as u16 {
            sends(&mut guard, &udp(false, [HERE, PEER], port, 123), at(0));
        }
        let kept = guard.begun.young.len() + guard.begun.old.len();
        assert!(kept <= 2 * GENERATION_FLOWS, "{kept}");
        let newest = 1000 + 10 * GENERATION_FLOWS as u16 - 1;
        for (port, known) in [(newest, true), (1000, false)] {
            let answer = udp(false, [PEER, HERE], 123, port);
            assert_eq!(judged(&mut guard, &answer, at(0)), known, "{port}");
        }
    }

    #[test]
    fn an_echo_is_answered_and_none_is_begun() {
        for v6 in [false, true] {
            let mut guard = some();
            let request = echo(v6, [PEER, HERE], REQUEST, 7);
            let reply = echo(v6, [PEER, HERE], REPLY, 7);
            assert!(!judged(&mut guard, &request, at(0)));
            assert!(!judged(&mut guard, &reply, at(0)));
            sends(&mut guard, &echo(v6, [HERE, PEER], REQUEST, 7), at(0));
            assert!(judged(&mut guard, &reply, at(0)));
            assert!(!judged(&mut guard, &request, at(0)));
            assert!(!judged(
                &mut guard,
                &echo(v6, [PEER, HERE], REPLY, 8),
                at(0)
            ));
            let mut open = self::guard(Open {
                icmp: true,
                ..Open::default()
            });
            assert!(judged(&mut open, &request, at(0)));
        }
    }

    #[test]
    fn errors_pass_about_what_was_sent_to_the_peer() {
        for v6 in [false, true] {
            let mut guard = some();
            let begun = udp(v6, [HERE, PEER], 5000, 123);
            sends(&mut guard, &begun, at(0));
            sends(&mut guard, &echo(v6, [HERE, PEER], REQUEST, 7), at(0));
            let segment = packet(
                v6,
                [HERE, PEER],
                PROTO_TCP,
                &[ports(443, 40_000), vec![0; 16]].concat(),
            );
            for (about, passes) in [
                (&begun, true),
                (&echo(v6, [HERE, PEER], REQUEST, 7), true),
                (&segment, true),
                // An answer from an open port.
                (&udp(v6, [HERE, PEER], 53, 999), true),
                // Nothing that was sent, sent to somebody else, not sent by this host, not whole.
                (&udp(v6, [HERE, PEER], 5001, 123), false),
                (&echo(v6, [HERE, PEER], REQUEST, 8), false),
                (&udp(v6, [HERE, 3], 5000, 123), false),
                (
                    &packet(
                        v6,
                        [HERE, 3],
                        PROTO_TCP,
                        &segment[if v6 { 40 } else { 20 }..],
                    ),
                    false,
                ),
                (&udp(v6, [PEER, HERE], 5000, 123), false),
                (&begun[..10].to_vec(), false),
            ] {
                let error = error(v6, [PEER, HERE], about);
                assert_eq!(judged(&mut guard, &error, at(0)), passes, "{about:?}");
            }
        }
    }

    /// A fragment: of `offset` bytes, with more behind it or not.
    fn fragment(
        v6: bool,
        protocol: u8,
        offset: u16,
        more: bool,
        id: u8,
        payload: &[u8],
    ) -> Vec<u8> {
        if v6 {
            let [high, low] = (offset | u16::from(more)).to_be_bytes();
            let header = [protocol, 0, high, low, 0, 0, 0, id];
            return packet(true, [PEER, HERE], 44, &[&header, payload].concat());
        }
        let mut p = packet(false, [PEER, HERE], protocol, payload);
        let field = (offset / 8) | if more { 0x2000 } else { 0 };
        p[4..6].copy_from_slice(&[0, id]);
        p[6..8].copy_from_slice(&field.to_be_bytes());
        p
    }

    #[test]
    fn later_fragments_pass_if_the_first_did() {
        let datagram = |port| [ports(999, port), vec![0; 12]].concat();
        for v6 in [false, true] {
            let mut guard = some();
            let later = |id| fragment(v6, PROTO_UDP, 16, false, id, &[0; 8]);
            assert!(!judged(&mut guard, &later(1), at(0)), "before the first");
            let first = fragment(v6, PROTO_UDP, 0, true, 1, &datagram(53));
            assert!(judged(&mut guard, &first, at(0)));
            assert!(judged(&mut guard, &later(1), at(0)));
            assert!(!judged(&mut guard, &later(2), at(0)), "of another packet");
            let closed = fragment(v6, PROTO_UDP, 0, true, 3, &datagram(54));
            assert!(!judged(&mut guard, &closed, at(0)));
            assert!(!judged(&mut guard, &later(3), at(0)));
        }
    }

    #[test]
    fn tcp_in_fragments_does_not_pass() {
        for v6 in [false, true] {
            let mut guard = some();
            let segment = &tcp_to(false, 443, ACK)[20..];
            let first = fragment(v6, PROTO_TCP, 0, true, 1, segment);
            assert!(!judged(&mut guard, &first, at(0)));
            let flags = fragment(v6, PROTO_TCP, 8, false, 1, &segment[8..]);
            assert!(!judged(&mut guard, &flags, at(0)));
        }
    }

    #[test]
    fn what_has_no_whole_header_does_not_pass() {
        for v6 in [false, true] {
            for (protocol, most) in [
                (PROTO_TCP, 13),
                (PROTO_UDP, 3),
                (PROTO_ICMP, 5),
                (PROTO_ICMPV6, 5),
            ] {
                for length in 0..=most {
                    // Ports that are open, and padding behind the packet that would make it whole.
                    let transport = &[0, 53, 0, 53, 0, 7, 0, 0, 0, 0, 0, 0, 0x50, ACK][..length];
                    let mut packet = packet(v6, [PEER, HERE], protocol, transport);
                    packet.extend([0xff; 32]);
                    assert!(!judged(&mut some(), &packet, at(0)), "{protocol} {length}");
                }
            }
        }
    }

    #[test]
    fn other_protocols_do_not_pass() {
        for protocol in [2, 4, 41, 47, 50, 51, 132, 255] {
            for v6 in [false, true] {
                let packet = packet(v6, [PEER, HERE], protocol, &[0; 40]);
                assert!(!judged(&mut some(), &packet, at(0)), "{protocol}");
            }
        }
    }

    #[test]
    fn ports_are_found_behind_extension_headers() {
        let mut rest = vec![PROTO_TCP, 0, 1, 4, 0, 0, 0, 0];
        rest.extend(&tcp_to(true, 22, SYN)[40..]);
        let closed = packet(true, [PEER, HERE], 60, &rest);
        assert!(!judged(&mut some(), &closed, at(0)));
        rest[10..12].copy_from_slice(&443u16.to_be_bytes());
        let open = packet(true, [PEER, HERE], 60, &rest);
        assert!(judged(&mut some(), &open, at(0)));
    }

    #[test]
    fn another_filter_keeps_what_was_begun() {
        let mut guard = some();
        sends(&mut guard, &udp(false, [HERE, PEER], 5000, 123), at(0));
        let changed = Guard::set(Some(Box::new(guard)), Filter::Only(Open::default()));
        let mut guard = changed.expect("a guard");
        assert!(judged(
            &mut guard,
            &udp(false, [PEER, HERE], 123, 5000),
            at(1)
        ));
        assert!(!judged(&mut guard, &tcp_to(false, 443, SYN), at(1)));
        assert!(Guard::set(Some(guard), Filter::All).is_none());
    }

    #[test]
    fn after_a_peer_could_begin_everything_only_what_is_sent_anew_is_answered() {
        let open = Open {
            tcp: std::iter::once(443..=443).collect(),
            ..Open::default()
        };
        let mut guard = Guard::set(None, Filter::Only(open)).expect("a guard");
        let answer = udp(false, [PEER, HERE], 123, 5000);
        assert!(!judged(&mut guard, &answer, at(0)));
        // A connection goes on, whoever began it.
        assert!(judged(&mut guard, &tcp_to(false, 22, tcp::ACK), at(0)));
        sends(&mut guard, &udp(false, [HERE, PEER], 5000, 123), at(1));
        assert!(judged(&mut guard, &answer, at(1)));
    }

    #[test]
    fn ranges_of_ports_are_joined_where_they_meet() {
        let ports = |ranges: &[(u16, u16)]| -> Ports {
            ranges.iter().map(|(first, last)| *first..=*last).collect()
        };
        let joined = ports(&[
            (20, 30),
            (1, 5),
            (6, 6),
            (25, 40),
            (65_535, 65_535),
            (0, 0),
            (9, 8),
        ]);
        assert_eq!(joined, Ports(vec![(0, 6), (20, 40), (65_535, 65_535)]));
        let all = ports(&[(0, 65_535), (7, 7)]);
        assert_eq!(all, Ports(vec![(0, 65_535)]));
        for (port, inside) in [
            (0, true),
            (6, true),
            (7, false),
            (19, false),
            (20, true),
            (40, true),
            (41, false),
        ] {
            assert_eq!(joined.contains(port), inside, "{port}");
        }
        assert!(!Ports::default().contains(0));
    }

    /// Prints what judging a packet costs: `CARGO_PROFILE_DEV_OPT_LEVEL=3 cargo test -p seikan-proto --lib filter_cost -- --ignored
    /// --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    #[expect(clippy::disallowed_methods, reason = "a measurement reads the clock")]
    fn filter_cost_with_64_rules() {
        use std::hint::black_box;
        const ROUNDS: u32 = 10_000_000;
        // 32 ranges of TCP and 32 of UDP, none of which touches another.
        let ranges = || (0..32u16).map(|n| 1000 * n + 100..=1000 * n + 200);
        let open = Open {
            icmp: false,
            tcp: ranges().collect(),
            udp: ranges().collect(),
        };
        let time = |name: &str, bytes: &[u8], guard: &mut Option<Box<Guard>>| {
            let ip = IpPacket::parse(bytes).expect("a packet");
            let best = (0..5).map(|_| {
                let start = std::time::Instant::now();
                for _ in 0..ROUNDS {
                    let (ip, bytes) = (black_box(&ip), black_box(bytes));
                    let judged = match black_box(&mut *guard) {
                        None => Ok(()),
                        Some(guard) => guard.check(ip, bytes, at(1)),
                    };
                    black_box(judged.is_ok());
                }
                start.elapsed().as_nanos() as f64 / f64::from(ROUNDS)
            });
            eprintln!("{name}: {:.1} ns", best.fold(f64::INFINITY, f64::min));
        };
        for v6 in [false, true] {
            let (data, syn) = (tcp_to(v6, 15_150, ACK), tcp_to(v6, 15_150, SYN));
            let asked = udp(v6, [PEER, HERE], 999, 15_150);
            let answer = udp(v6, [PEER, HERE], 53, 5000);
            let begun = udp(v6, [HERE, PEER], 5000, 53);
            let mut guard = Guard::set(None, Filter::Only(open.clone()));
            // As many flows as there may be.
            for port in 0..2 * GENERATION_FLOWS as u16 {
                let guard = guard.as_mut().expect("a guard");
                sends(guard, &udp(v6, [HERE, PEER], 5000 + port, 53), at(0));
            }
            sends(guard.as_mut().expect("a guard"), &begun, at(0));
            let family = if v6 { "IPv6" } else { "IPv4" };
            time(&format!("{family}, no filter"), &data, &mut None);
            time(&format!("{family}, TCP data"), &data, &mut guard);
            time(
                &format!("{family}, TCP SYN to an open port"),
                &syn,
                &mut guard,
            );
            time(
                &format!("{family}, UDP to an open port"),
                &asked,
                &mut guard,
            );
            let name = format!("{family}, UDP, an answer");
            time(&format!("{name}, same flow as before"), &answer, &mut guard);
            let other = udp(v6, [HERE, PEER], 5001, 53);
            sends(guard.as_mut().expect("a guard"), &other, at(1));
            time(&format!("{name}, another flow"), &answer, &mut guard);
            let guard = guard.as_mut().expect("a guard");
            let both =
                [&begun, &other].map(|bytes| (IpPacket::parse(bytes).expect("a packet"), bytes));
            for (name, step) in [("the same flow", 0), ("two flows in turns", 1)] {
                let best = (0..5).map(|_| {
                    let start = std::time::Instant::now();
                    for round in 0..ROUNDS as usize {
                        let (ip, bytes) = black_box(&both[(round & 1) * step]);
                        guard.note(ip, bytes, at(1));
                    }
                    start.elapsed().as_nanos() as f64 / f64::from(ROUNDS)
                });
                let best = best.fold(f64::INFINITY, f64::min);
                eprintln!("{family}, UDP, noting what is sent, {name}: {best:.1} ns");
            }
        }
    }
}
