//! The kinds of faults, and the meaning of their severity.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::wire;
use crate::wire::Faults;

/// Kinds of faults. Each kind documents its severity. Faults of the whole machine are reverted
/// afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// No fault.
    None,
    /// `txqueuelen` of the tunnel's interface, in packets.
    QueueLength,
    /// A token bucket with a short queue on the interface, in Mbit/s.
    Shaper,
    /// A token bucket with a long queue on the interface, in Mbit/s.
    Bufferbloat,
    /// Number of processes that spin on the only processor that the tunnel's program may use.
    CpuHog,
    /// Processor time of the tunnel's program by a control group, in percent of one processor.
    CpuQuota,
    /// Share of packets from the link that the host drops at random, in percent.
    Loss,
    /// Length in bytes above which packets are dropped silently before the host receives them.
    MtuBlackHole,
    /// MTU of the interface, in bytes.
    Mtu,
    /// The tunnel's program assumes an MTU of this many bytes. OpenVPN and the crude tunnel only.
    MtuMismatch,
    /// Segmentation, receive and checksum offloads of the interface are off.
    OffloadsOff,
    /// Receive buffer that the tunnel's program requests, in bytes. OpenVPN and the crude tunnel
    /// only.
    ReceiveBufferOption,
    /// Send buffer that the tunnel's program requests, in bytes. OpenVPN and the crude tunnel only.
    SendBufferOption,
    /// `net.core.rmem_default` of the machine while the tunnel starts, in bytes.
    DefaultReceiveBuffer,
    /// `net.core.netdev_max_backlog` of the machine, in packets; no receive offload and no
    /// segmentation of datagrams on the link, and received packets go to the last processor.
    NetdevBacklog,
    /// `net.core.netdev_budget` of the machine, in packets.
    NapiBudget,
    /// `net.netfilter.nf_conntrack_max` of the machine, in connections; the host tracks them.
    ConntrackMax,
    /// The receiving application reads at a bounded rate, in Mbit/s.
    SlowReader,
    /// The sending application sends less, in Mbit/s.
    ApplicationLimited,
    /// The application offers more than the tunnel can carry, in Mbit/s.
    Overload,
    /// One processor handles all packets from the interface (receive packet steering). The severity
    /// is the number of firewall rules with which each packet is compared, with and without the
    /// fault. Only for the crude tunnel with several outer flows.
    ReceiveOnOneCpu,
    /// The crude tunnel's packets are one flow instead of several, so one processor handles them.
    /// The severity is the number of firewall rules with which each packet is compared, with and
    /// without the fault.
    OneFlow,
    /// Receive offload (GRO) of the interface is on.
    ReceiveOffload,
    /// The virtual switch's flow table stays empty, so that each packet takes the slow path. The
    /// severity is the number of rule tables that it passes there.
    FlowTable,
    /// OpenVPN's library does not use the processor's AES instructions.
    NoAesInstructions,
    /// Send and receive buffer that the tunnel's program requests, in bytes. OpenVPN only.
    BothBufferOptions,
    /// Processor time that the crude tunnel spends on a slow cipher for each packet, in
    /// microseconds.
    SlowCipher,
    /// The crude tunnel passes every packet from thread to thread.
    Handoff,
    /// Number of times that the crude tunnel copies each packet.
    Copies,
    /// Delay of the wire in each direction, in milliseconds.
    WireDelay,
    /// Frames that the wire loses from A to B, in percent.
    WireLoss,
    /// Frames that the wire holds back by 30 ms from A to B, so that others overtake them, in
    /// percent.
    WireReorder,
    /// Length in bytes above which IP packets are dropped silently on the wire from A to B.
    WireBlackHole,
    /// The wire's rate from A to B, in Mbit/s.
    WireRate,
    /// Share of frames that leave A's NIC without the checksum that was left to it, in percent.
    BrokenChecksum,
    /// Share of super-packets that are lost when A's NIC should segment them, in percent.
    BrokenSegmentation,
}

/// Limits of a severity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Minimum.
    pub min: f64,
    /// Maximum.
    pub max: f64,
    /// Whether only whole numbers are possible.
    pub whole: bool,
    /// Unit.
    pub unit: &'static str,
}

impl Limits {
    /// Whether a severity is possible.
    pub fn contains(&self, severity: f64) -> bool {
        (self.min..=self.max).contains(&severity)
    }
}

impl FaultKind {
    /// Returns the limits of the severity; `None` if the kind has no severity.
    pub fn limits(self) -> Option<Limits> {
        let (min, max, whole, unit) = match self {
            Self::None
            | Self::OffloadsOff
            | Self::ReceiveOffload
            | Self::NoAesInstructions
            | Self::Handoff => return None,
            Self::QueueLength => (1.0, 10_000.0, true, "packets"),
            Self::Shaper
            | Self::Bufferbloat
            | Self::SlowReader
            | Self::ApplicationLimited
            | Self::WireRate
            | Self::Overload => (0.1, 100_000.0, false, "Mbit/s"),
            Self::CpuHog => (1.0, 64.0, true, "processes"),
            Self::CpuQuota => (1.0, 100.0, false, "% of a processor"),
            Self::Loss
            | Self::WireLoss
            | Self::WireReorder
            | Self::BrokenChecksum
            | Self::BrokenSegmentation => (0.001, 100.0, false, "% of the packets"),
            Self::WireDelay => (0.01, 5_000.0, false, "ms"),
            Self::SlowCipher => (0.1, 10_000.0, false, "µs per packet"),
            Self::Copies => (1.0, 1e5, true, "copies"),
            Self::MtuBlackHole | Self::WireBlackHole => (100.0, 65_535.0, true, "bytes"),
            // IPv4 does not work below (RFC 791).
            Self::Mtu | Self::MtuMismatch => (68.0, 65_535.0, true, "bytes"),
            // This is near the kernel's minimum (SOCK_MIN_RCVBUF, include/net/sock.h).
            Self::ReceiveBufferOption
            | Self::SendBufferOption
            | Self::BothBufferOptions
            | Self::DefaultReceiveBuffer => (2_304.0, 16e6, true, "bytes"),
            Self::NetdevBacklog | Self::NapiBudget => (1.0, 10_000.0, true, "packets"),
            Self::ReceiveOnOneCpu | Self::OneFlow => (0.0, 100_000.0, true, "rules"),
            Self::FlowTable => (1.0, 254.0, true, "tables"),
            Self::ConntrackMax => (8.0, 1e6, true, "connections"),
        };
        Some(Limits {
            min,
            max,
            whole,
            unit,
        })
    }

    /// Returns the unit of the severity; empty if the kind has none.
    pub fn unit(self) -> &'static str {
        self.limits().map_or("", |limits| limits.unit)
    }

    /// Rounds a severity to one that this kind can have.
    pub fn round(self, severity: f64) -> f64 {
        match self.limits() {
            Some(limits) if limits.whole => severity.round().clamp(limits.min, limits.max),
            Some(limits) => severity.clamp(limits.min, limits.max),
            None => severity,
        }
    }

    /// Returns the prefixes of the names of tunnels in which the fault can be made, because it
    /// changes how they are started; `None` if any tunnel can have it.
    pub(super) fn programs(self) -> Option<&'static [&'static str]> {
        match self {
            Self::MtuMismatch | Self::ReceiveBufferOption | Self::SendBufferOption => {
                Some(&["openvpn", "crude"])
            }
            Self::NoAesInstructions | Self::BothBufferOptions => Some(&["openvpn"]),
            Self::SlowCipher
            | Self::Handoff
            | Self::Copies
            | Self::ReceiveOnOneCpu
            | Self::OneFlow => Some(&["crude"]),
            _ => None,
        }
    }

    /// Returns the time until streams have adapted to this fault.
    pub fn settling(self) -> Duration {
        Duration::from_secs(match self {
            // Slow start doubles once in a round trip.
            Self::WireDelay => 6,
            _ => 2,
        })
    }

    /// Returns whether the fault needs an emulated link.
    pub fn is_of_a_wire(self) -> bool {
        wire::with(self, 1.0, Faults::default()).is_some()
    }
}
