//! The kinds of faults, with what their severity means.

use serde::{Deserialize, Serialize};

/// What can be wrong. What the severity is, is said with each; kinds of the whole machine are set back afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// Nothing.
    None,
    /// `txqueuelen` of the tunnel's interface, in packets.
    QueueLength,
    /// A token bucket with a short queue on the interface, in Mbit/s.
    Shaper,
    /// A token bucket with a long queue on the interface, in Mbit/s.
    Bufferbloat,
    /// Processes that spin on the one processor that the tunnel's program is left with; how many.
    CpuHog,
    /// Processor time of the tunnel's program by a control group, in percent of one processor.
    CpuQuota,
    /// Packets that the host does not get from the link, at random, in percent.
    Loss,
    /// Packets longer than this vanish before the host gets them, in bytes.
    MtuBlackHole,
    /// MTU of the interface, in bytes.
    Mtu,
    /// The tunnel's program believes in an MTU of so many bytes, its interface in the other end's. OpenVPN only.
    MtuMismatch,
    /// Segmentation, receive and checksum offloads of the interface are off.
    OffloadsOff,
    /// `--rcvbuf` of OpenVPN, in bytes.
    ReceiveBufferOption,
    /// `--sndbuf` of OpenVPN, in bytes.
    SendBufferOption,
    /// `net.core.rmem_default` of the machine while the tunnel starts, in bytes.
    DefaultReceiveBuffer,
    /// `net.core.netdev_max_backlog` of the machine, in packets, and no receive offload on the link.
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
    /// Packets from the interface are handled by one processor (receive packet steering).
    ReceiveOnOneCpu,
    /// OpenVPN's library has to do without the processor's instructions for AES.
    NoAesInstructions,
}

/// What a severity can be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
    /// Only whole numbers.
    pub whole: bool,
    /// What it counts.
    pub unit: &'static str,
}

impl Limits {
    /// Whether a severity is possible.
    #[must_use]
    pub fn contains(&self, severity: f64) -> bool {
        (self.min..=self.max).contains(&severity)
    }
}

impl FaultKind {
    /// What its severity can be; `None` if it has none.
    #[must_use]
    pub fn limits(self) -> Option<Limits> {
        let (min, max, whole, unit) = match self {
            Self::None | Self::OffloadsOff | Self::ReceiveOnOneCpu | Self::NoAesInstructions => {
                return None;
            }
            Self::QueueLength => (1.0, 10_000.0, true, "packets"),
            Self::Shaper
            | Self::Bufferbloat
            | Self::SlowReader
            | Self::ApplicationLimited
            | Self::Overload => (0.1, 100_000.0, false, "Mbit/s"),
            Self::CpuHog => (1.0, 64.0, true, "processes"),
            Self::CpuQuota => (1.0, 100.0, false, "% of a processor"),
            Self::Loss => (0.01, 100.0, false, "% of the packets"),
            Self::MtuBlackHole => (100.0, 65_535.0, true, "bytes"),
            // IPv4 does not work below (RFC 791).
            Self::Mtu | Self::MtuMismatch => (68.0, 65_535.0, true, "bytes"),
            // The kernel's minimum (SOCK_MIN_RCVBUF, include/net/sock.h) is near.
            Self::ReceiveBufferOption | Self::SendBufferOption | Self::DefaultReceiveBuffer => {
                (2_304.0, 16e6, true, "bytes")
            }
            Self::NetdevBacklog | Self::NapiBudget => (1.0, 10_000.0, true, "packets"),
            Self::ConntrackMax => (8.0, 1e6, true, "connections"),
        };
        Some(Limits {
            min,
            max,
            whole,
            unit,
        })
    }

    /// The unit of its severity; empty if it has none.
    #[must_use]
    pub fn unit(self) -> &'static str {
        self.limits().map_or("", |limits| limits.unit)
    }

    /// A severity that this kind can have.
    #[must_use]
    pub fn round(self, severity: f64) -> f64 {
        match self.limits() {
            Some(limits) if limits.whole => severity.round().clamp(limits.min, limits.max),
            Some(limits) => severity.clamp(limits.min, limits.max),
            None => severity,
        }
    }

    /// Whether it is a change of how OpenVPN is started.
    pub(super) fn changes_openvpn(self) -> bool {
        matches!(
            self,
            Self::MtuMismatch
                | Self::ReceiveBufferOption
                | Self::SendBufferOption
                | Self::NoAesInstructions
        )
    }
}
