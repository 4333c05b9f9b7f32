//! The causes of slow tunnels, by their stable names. Their specifications are in [`crate::rules`].

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! causes {
    ($($variant:ident $name:literal)*) => {
        /// The reason why a tunnel is slow, or that it is not. The names are stable.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(rename_all = "kebab-case")]
        pub enum Cause {
            $(
                #[doc = $name]
                #[cfg_attr(feature = "schema", schemars(description = ""))]
                $variant,
            )*
        }

        impl Cause {
            /// Every cause, in the order of the catalogue.
            pub const ALL: &[Cause] = &[$(Cause::$variant,)*];

            /// Its stable name.
            pub fn name(self) -> &'static str {
                match self { $(Cause::$variant => $name,)* }
            }
        }
    };
}

causes! {
    TunQueueOverflow "tun-queue-overflow"
    FramePerSyscall "frame-per-syscall"
    SingleThreadSaturated "single-thread-saturated"
    CpuContention "cpu-contention"
    CpuQuota "cpu-quota"
    CpuSteal "cpu-steal"
    SoftirqOneCore "softirq-one-core"
    OuterFlowCannotSpread "outer-flow-cannot-spread"
    BacklogFull "backlog-full"
    NapiBudget "napi-budget"
    UdpReceiveBuffer "udp-receive-buffer"
    UdpSendBuffer "udp-send-buffer"
    TcpOuterBuffer "tcp-outer-buffer"
    TcpReceiveWindow "tcp-receive-window"
    ApplicationLimited "application-limited"
    PathLoss "path-loss"
    PathDelay "path-delay"
    Reordering "reordering"
    TcpOverTcp "tcp-over-tcp"
    MtuBlackHole "mtu-black-hole"
    OuterFragmentation "outer-fragmentation"
    MtuMismatch "mtu-mismatch"
    PacketsTooSmall "packets-too-small"
    GroBreaksEncapsulation "gro-breaks-encapsulation"
    OffloadMissing "offload-missing"
    OffloadBroken "offload-broken"
    CipherBound "cipher-bound"
    CopyOrChecksumBound "copy-or-checksum-bound"
    HandoffOverhead "handoff-overhead"
    Shaper "shaper"
    Bufferbloat "bufferbloat"
    ConntrackFull "conntrack-full"
    VirtualSwitchUpcalls "virtual-switch-upcalls"
    VhostStarved "vhost-starved"
    Healthy "healthy"
    Idle "idle"
    Unknown "unknown"
}

/// Severity of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The tunnel is well.
    Healthy,
    /// No statement is possible.
    Notice,
    /// The tunnel is slow for an unknown reason.
    Warning,
    /// The tunnel is slow for a known reason.
    Fault,
}

/// A step of the path over a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathStep {
    /// The applications that use the tunnel.
    Applications,
    /// The tunnel's interface.
    InnerLink,
    /// The tunnel's program.
    Program,
    /// The sockets of the program.
    Sockets,
    /// The interface to the outside, or the interface that the first remedy changes.
    OuterLink,
    /// The network between the hosts.
    Network,
    /// The host as a whole.
    Host,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Cause {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Cause::ALL.iter().find(|cause| cause.name() == name);
        found
            .copied()
            .ok_or_else(|| format!("no cause is called `{name}`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_same_everywhere() {
        for cause in Cause::ALL {
            assert_eq!(cause.name().parse::<Cause>().as_ref(), Ok(cause));
            let json = serde_json::to_string(cause).expect("json");
            assert_eq!(json, format!("\"{}\"", cause.name()));
        }
    }
}
