//! Detects whether a device that is known by its MAC address has moved to another IPv6 address or
//! uses several.
//!
//! IPv6 hosts use several addresses at once. The first one is translated one-to-one as long as it
//! is used, so a second one is only remembered ([`Device::contend`]). The responder queries for the
//! first one ([`Gateway::poll_successor`]). If the device answers for it or uses it, nothing
//! changes. If the device is silent about it, the device has moved. Only frames from the device's
//! own MAC address count.

use super::devices::Device;
use super::{DeviceId, Gateway};
use crate::time::Instant;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

/// Place of IPv6 in a pair of addresses.
const V6: usize = 1;
/// Maximum number of queries for the first address, and the interval between them (RFC 4861 section
/// 10: `MAX_MULTICAST_SOLICIT` and `RETRANS_TIMER`).
const MAX_QUERIES: u8 = 3;
const INTERVAL: Duration = Duration::from_secs(1);
/// Time for which the result is valid.
const SETTLED_FOR: Duration = Duration::from_secs(10);

/// A second address that the device uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Successor {
    address: IpAddr,
    since: Instant,
    /// Number of queries sent for the first address.
    queries_sent: u8,
    next: Instant,
    /// The device still has the first address.
    refuted: bool,
}

impl Device {
    /// Handles another address of the device.
    pub(super) fn contend(&mut self, address: IpAddr, now: Instant) {
        let settled = |s: Successor| now.duration_since(s.since) >= SETTLED_FOR;
        if self.successor.is_none_or(settled) {
            self.successor = Some(Successor {
                address,
                since: now,
                queries_sent: 0,
                next: now,
                refuted: false,
            });
        }
    }

    /// Handles a claim of the first address. Returns true if it may be an answer to a query, which
    /// is no use of the address.
    pub(super) fn refute(&mut self, address: IpAddr) -> bool {
        match &mut self.successor {
            Some(successor) if self.lan[V6] == Some(address) => {
                successor.refuted = true;
                true
            }
            _ => false,
        }
    }
}

impl Gateway {
    /// Returns the first address if it must be queried now, because the device uses a second one.
    /// If the queries were not answered, the second address replaces the first.
    pub(super) fn poll_successor(&mut self, id: DeviceId, now: Instant) -> Option<Ipv6Addr> {
        let device = self.devices.get_mut(id.0 as usize)?;
        let successor = device.successor.as_mut()?;
        if successor.refuted || now < successor.next {
            return None;
        }
        if successor.queries_sent < MAX_QUERIES {
            successor.queries_sent += 1;
            successor.next = now + INTERVAL;
            return match device.lan[V6] {
                Some(IpAddr::V6(address)) => Some(address),
                _ => None,
            };
        }
        let address = successor.address;
        self.readdress(id, address, now);
        None
    }
}
