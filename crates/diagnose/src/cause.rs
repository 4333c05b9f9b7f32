//! Why tunnels are slow: the catalogue.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! causes {
    ($($variant:ident $name:literal $sentence:literal;)*) => {
        /// A reason for which a tunnel is slow, or that it is not. The names are stable.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum Cause {
            $(#[doc = $sentence] $variant,)*
        }

        impl Cause {
            /// Every one, in the order of the catalogue.
            pub const ALL: &[Cause] = &[$(Cause::$variant,)*];

            /// Its stable name.
            pub fn name(self) -> &'static str {
                match self { $(Cause::$variant => $name,)* }
            }

            /// Whether it says that something is wrong, and what: not [`Cause::Healthy`], [`Cause::Idle`] and
            /// [`Cause::Unknown`].
            pub fn is_fault(self) -> bool {
                !matches!(self, Cause::Healthy | Cause::Idle | Cause::Unknown)
            }

            /// One sentence for somebody who knows nothing of it.
            pub fn sentence(self) -> &'static str {
                match self { $(Cause::$variant => $sentence,)* }
            }
        }
    };
}

causes! {
    TunQueueOverflow "tun-queue-overflow" "The queue in front of the tunnel's program is too short: packets are lost there before the program can take them.";
    FramePerSyscall "frame-per-syscall" "The tunnel's program carries one packet for each call into the kernel, and spends its time on the calls.";
    SingleThreadSaturated "single-thread-saturated" "One thread of the tunnel's program uses a whole processor while others are idle.";
    CpuContention "cpu-contention" "The tunnel's program is ready to work but has to wait for a processor that others use.";
    CpuQuota "cpu-quota" "The tunnel's program is stopped again and again because its control group has used up its share of processor time.";
    CpuSteal "cpu-steal" "The machine is virtual and its host gives the processor to somebody else.";
    SoftirqOneCore "softirq-one-core" "One processor handles all received packets, and it is full.";
    OuterFlowCannotSpread "outer-flow-cannot-spread" "All of the tunnel's packets are one flow for the kernel, so one processor has to receive them all.";
    BacklogFull "backlog-full" "The kernel's queue of received packets is full and drops them.";
    NapiBudget "napi-budget" "The kernel stops handling received packets before it is done, again and again.";
    UdpReceiveBuffer "udp-receive-buffer" "The receive buffer of the tunnel's socket is full and packets are lost there.";
    UdpSendBuffer "udp-send-buffer" "The send buffer of the tunnel's socket is too small: the program waits for room or loses packets.";
    TcpOuterBuffer "tcp-outer-buffer" "The tunnel runs over a TCP connection whose buffers hold too little for this distance.";
    TcpReceiveWindow "tcp-receive-window" "The receiving program takes its data too slowly, or has room for too little of it.";
    ApplicationLimited "application-limited" "The application itself sends no more than this; the tunnel could carry more.";
    PathLoss "path-loss" "Packets are lost on the way, outside of this host.";
    PathDelay "path-delay" "The way is long, and the sender may have too little under way for that.";
    Reordering "reordering" "Packets overtake each other on the way, which TCP takes for loss.";
    TcpOverTcp "tcp-over-tcp" "The tunnel itself runs over TCP: what that sends again late, the connections inside send again as well.";
    MtuBlackHole "mtu-black-hole" "Large packets vanish on the way and nobody says so; small ones arrive.";
    OuterFragmentation "outer-fragmentation" "The tunnel's packets are too large for the way and are cut into fragments.";
    MtuMismatch "mtu-mismatch" "The two ends of the tunnel disagree on how long a packet may be, and long ones are lost.";
    PacketsTooSmall "packets-too-small" "The packets in the tunnel are so small that the work for each of them is the limit.";
    GroBreaksEncapsulation "gro-breaks-encapsulation" "The kernel merges received packets, and a program that expects single ones wraps the merged ones and has them cut up or lost.";
    OffloadMissing "offload-missing" "Packets take the whole way through the kernel one by one, because merging and cutting offloads are off.";
    OffloadBroken "offload-broken" "A network card or driver damages or loses what it has to cut up or checksum itself.";
    CipherBound "cipher-bound" "The processor spends its time on encryption.";
    CopyOrChecksumBound "copy-or-checksum-bound" "The processor spends its time on copying or summing up packets.";
    HandoffOverhead "handoff-overhead" "The tunnel's program hands every packet from thread to thread, and waking them costs more than the work.";
    Shaper "shaper" "A queueing discipline on this host limits the rate.";
    Bufferbloat "bufferbloat" "A long queue stands in front of a bottleneck: everything waits in it.";
    ConntrackFull "conntrack-full" "The table of tracked connections is full, and packets of new ones are dropped.";
    VirtualSwitchUpcalls "virtual-switch-upcalls" "The virtual switch does not know the flows and asks its slow path for each packet.";
    VhostStarved "vhost-starved" "The thread that moves a virtual machine's packets does not get a processor.";
    Healthy "healthy" "Nothing is wrong: the tunnel carries what it is given.";
    Idle "idle" "Hardly anything goes through the tunnel, so nothing can be said of its speed: run it under load.";
    Unknown "unknown" "It is slow, and none of the known causes shows.";
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
