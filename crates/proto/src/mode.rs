//! Content of a tunnel: IP packets of a TUN device, or Ethernet frames of a TAP device.

use seikan_observe::DropReason;
use seikan_wire::ethernet::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6};

/// Content of a tunnel. Both ends must have the same mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// IP packets.
    #[default]
    Ip,
    /// Ethernet frames (native protocol only).
    Ethernet,
}

/// Largest payload in bytes of an Ethernet frame: with two VLAN tags, the length of the frame fits
/// the fields of the native protocol.
pub const MAX_ETHERNET_MTU: u32 = 65_535 - 22;

/// A [`Mode`] as a type. The code for packets is compiled once for each mode, so that neither has
/// branches for the other.
pub trait Carried {
    /// Whether packets begin with an Ethernet header.
    const ETHERNET: bool;

    /// Returns the offset of the IP header in a packet, or `None` if it carries no IP.
    fn ip_at(packet: &[u8]) -> Result<Option<usize>, DropReason>;
}

/// [`Mode::Ip`].
#[derive(Debug)]
pub struct Ip;

/// [`Mode::Ethernet`].
#[derive(Debug)]
pub struct Ethernet;

impl Carried for Ip {
    const ETHERNET: bool = false;

    #[inline]
    fn ip_at(_: &[u8]) -> Result<Option<usize>, DropReason> {
        Ok(Some(0))
    }
}

impl Carried for Ethernet {
    const ETHERNET: bool = true;

    #[inline]
    fn ip_at(packet: &[u8]) -> Result<Option<usize>, DropReason> {
        let (ethertype, at) = ethernet::payload(packet).ok_or(DropReason::BadEthernet)?;
        Ok(matches!(ethertype, ETHERTYPE_IPV4 | ETHERTYPE_IPV6).then_some(at))
    }
}

impl Mode {
    /// [`Carried::ip_at`] of this mode.
    pub fn ip_at(self, packet: &[u8]) -> Result<Option<usize>, DropReason> {
        match self {
            Mode::Ip => Ip::ip_at(packet),
            Mode::Ethernet => Ethernet::ip_at(packet),
        }
    }
}
