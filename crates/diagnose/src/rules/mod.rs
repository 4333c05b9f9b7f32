//! The rules, one file for each cause.
//!
//! A rule is a pure function from [`Evidence`] to a [`Judgement`]. It asks for its cause's signature and for what sets
//! it apart from the causes that look like it; it does not look at other rules. Its thresholds are named at its top,
//! with the reason for their values. A rule whose cause makes itself felt through another one names that in
//! [`Rule::makes`].

use crate::{Cause, Evidence, Judgement};

mod application_limited;
mod backlog_full;
mod bufferbloat;
mod calls;
mod cipher_bound;
mod conntrack_full;
mod copy_or_checksum_bound;
mod cpu_contention;
mod cpu_quota;
mod cpu_steal;
mod frame_per_syscall;
mod gro_breaks_encapsulation;
mod handoff_overhead;
mod mtu_black_hole;
mod mtu_mismatch;
mod napi_budget;
mod offload_broken;
mod offload_missing;
mod outer_flow_cannot_spread;
mod outer_fragmentation;
mod packets_too_small;
mod path_delay;
mod path_loss;
mod receive;
mod reordering;
#[cfg(test)]
mod scenes;
mod shaper;
mod single_thread_saturated;
mod softirq_one_core;
mod tcp_outer_buffer;
mod tcp_over_tcp;
mod tcp_receive_window;
#[cfg(test)]
pub(crate) mod testing;
mod tun_queue_overflow;
mod turn;
mod udp_receive_buffer;
mod udp_send_buffer;
mod vhost_starved;
mod virtual_switch_upcalls;
mod weigh;

/// A rule.
#[derive(Debug)]
pub struct Rule {
    /// The cause it looks for.
    pub cause: Cause,
    /// Causes whose signature this one brings about when it is the deeper one: a reader without a processor makes queues
    /// overflow. Where both are present, this one is named and the others are the chain.
    pub makes: &'static [Cause],
    /// The rule.
    pub judge: fn(&Evidence) -> Judgement,
}

/// What a reader that is late brings about.
const LATE: &[Cause] = &[
    Cause::TunQueueOverflow,
    Cause::UdpReceiveBuffer,
    Cause::Bufferbloat,
];
/// What too much work in one thread brings about.
const WORK: &[Cause] = &[
    Cause::SingleThreadSaturated,
    Cause::TunQueueOverflow,
    Cause::UdpReceiveBuffer,
    Cause::Bufferbloat,
];

/// What more packets than the bytes need bring about, in the program, in the kernel, and in whoever sends and receives: on a
/// machine that is full with them all keep each other waiting.
const PACKETS: &[Cause] = &[
    Cause::CpuContention,
    Cause::FramePerSyscall,
    Cause::SingleThreadSaturated,
    Cause::HandoffOverhead,
    Cause::CopyOrChecksumBound,
    Cause::SoftirqOneCore,
    Cause::OuterFlowCannotSpread,
    Cause::BacklogFull,
    Cause::NapiBudget,
    Cause::TunQueueOverflow,
    Cause::UdpReceiveBuffer,
    Cause::Bufferbloat,
];

/// All of them, in the order of the catalogue.
pub const ALL: &[Rule] = &[
    Rule {
        cause: Cause::TunQueueOverflow,
        makes: &[],
        judge: tun_queue_overflow::judge,
    },
    Rule {
        cause: Cause::FramePerSyscall,
        makes: WORK,
        judge: frame_per_syscall::judge,
    },
    Rule {
        cause: Cause::SingleThreadSaturated,
        makes: LATE,
        judge: single_thread_saturated::judge,
    },
    Rule {
        cause: Cause::CpuContention,
        makes: &[
            Cause::SingleThreadSaturated,
            Cause::TunQueueOverflow,
            Cause::UdpReceiveBuffer,
            Cause::Bufferbloat,
            Cause::BacklogFull,
        ],
        judge: cpu_contention::judge,
    },
    Rule {
        cause: Cause::CpuQuota,
        makes: &[
            Cause::SingleThreadSaturated,
            Cause::CpuContention,
            Cause::TunQueueOverflow,
            Cause::UdpReceiveBuffer,
            Cause::Bufferbloat,
        ],
        judge: cpu_quota::judge,
    },
    Rule {
        cause: Cause::CpuSteal,
        makes: &[
            Cause::SingleThreadSaturated,
            Cause::CpuContention,
            Cause::TunQueueOverflow,
            Cause::UdpReceiveBuffer,
            Cause::Bufferbloat,
            Cause::BacklogFull,
        ],
        judge: cpu_steal::judge,
    },
    Rule {
        cause: Cause::SoftirqOneCore,
        makes: &[
            Cause::BacklogFull,
            Cause::NapiBudget,
            Cause::CpuContention,
            Cause::UdpReceiveBuffer,
        ],
        judge: softirq_one_core::judge,
    },
    Rule {
        cause: Cause::OuterFlowCannotSpread,
        makes: &[
            Cause::BacklogFull,
            Cause::NapiBudget,
            Cause::CpuContention,
            Cause::UdpReceiveBuffer,
        ],
        judge: outer_flow_cannot_spread::judge,
    },
    Rule {
        cause: Cause::BacklogFull,
        makes: &[],
        judge: backlog_full::judge,
    },
    Rule {
        cause: Cause::NapiBudget,
        makes: &[Cause::BacklogFull],
        judge: napi_budget::judge,
    },
    Rule {
        cause: Cause::UdpReceiveBuffer,
        makes: &[],
        judge: udp_receive_buffer::judge,
    },
    Rule {
        cause: Cause::UdpSendBuffer,
        makes: &[Cause::TunQueueOverflow, Cause::Bufferbloat],
        judge: udp_send_buffer::judge,
    },
    Rule {
        cause: Cause::TcpOuterBuffer,
        makes: &[Cause::TunQueueOverflow, Cause::Bufferbloat],
        judge: tcp_outer_buffer::judge,
    },
    Rule {
        cause: Cause::TcpReceiveWindow,
        makes: &[],
        judge: tcp_receive_window::judge,
    },
    Rule {
        cause: Cause::ApplicationLimited,
        makes: &[],
        judge: application_limited::judge,
    },
    Rule {
        cause: Cause::PathLoss,
        makes: &[],
        judge: path_loss::judge,
    },
    Rule {
        cause: Cause::PathDelay,
        makes: &[],
        judge: path_delay::judge,
    },
    Rule {
        cause: Cause::Reordering,
        makes: &[],
        judge: reordering::judge,
    },
    Rule {
        cause: Cause::TcpOverTcp,
        makes: &[Cause::TunQueueOverflow, Cause::Bufferbloat],
        judge: tcp_over_tcp::judge,
    },
    Rule {
        cause: Cause::MtuBlackHole,
        makes: &[],
        judge: mtu_black_hole::judge,
    },
    Rule {
        cause: Cause::OuterFragmentation,
        // A lost fragment costs the whole packet; and each is a packet's work, most of it within the program's calls.
        makes: &[
            Cause::PathLoss,
            Cause::FramePerSyscall,
            Cause::SingleThreadSaturated,
        ],
        judge: outer_fragmentation::judge,
    },
    Rule {
        cause: Cause::MtuMismatch,
        makes: &[Cause::MtuBlackHole],
        judge: mtu_mismatch::judge,
    },
    Rule {
        cause: Cause::PacketsTooSmall,
        makes: PACKETS,
        judge: packets_too_small::judge,
    },
    Rule {
        cause: Cause::GroBreaksEncapsulation,
        makes: &[Cause::OuterFragmentation, Cause::MtuBlackHole],
        judge: gro_breaks_encapsulation::judge,
    },
    Rule {
        cause: Cause::OffloadMissing,
        makes: PACKETS,
        judge: offload_missing::judge,
    },
    Rule {
        cause: Cause::OffloadBroken,
        // What arrives damaged is sent again.
        makes: &[Cause::PathLoss],
        judge: offload_broken::judge,
    },
    Rule {
        cause: Cause::CipherBound,
        makes: WORK,
        judge: cipher_bound::judge,
    },
    Rule {
        cause: Cause::CopyOrChecksumBound,
        makes: WORK,
        judge: copy_or_checksum_bound::judge,
    },
    Rule {
        cause: Cause::HandoffOverhead,
        // Who hands over one packet at a time takes one at a time.
        makes: &[
            Cause::FramePerSyscall,
            Cause::SingleThreadSaturated,
            Cause::TunQueueOverflow,
            Cause::UdpReceiveBuffer,
            Cause::Bufferbloat,
        ],
        judge: handoff_overhead::judge,
    },
    Rule {
        cause: Cause::Shaper,
        makes: &[
            Cause::TunQueueOverflow,
            Cause::Bufferbloat,
            Cause::UdpSendBuffer,
        ],
        judge: shaper::judge,
    },
    Rule {
        cause: Cause::Bufferbloat,
        makes: &[],
        judge: bufferbloat::judge,
    },
    Rule {
        cause: Cause::ConntrackFull,
        makes: &[],
        judge: conntrack_full::judge,
    },
    Rule {
        cause: Cause::VirtualSwitchUpcalls,
        makes: &[Cause::SingleThreadSaturated, Cause::TunQueueOverflow],
        judge: virtual_switch_upcalls::judge,
    },
    Rule {
        cause: Cause::VhostStarved,
        makes: &[Cause::CpuContention, Cause::TunQueueOverflow],
        judge: vhost_starved::judge,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_has_one_rule() {
        for (index, rule) in ALL.iter().enumerate() {
            let again = ALL[index + 1..]
                .iter()
                .any(|other| other.cause == rule.cause);
            assert!(!again, "{}", rule.cause);
        }
    }

    #[test]
    fn no_cause_makes_what_makes_it() {
        for rule in ALL {
            let makes = |cause| ALL.iter().filter(move |other| other.cause == cause);
            for made in rule.makes {
                let back = makes(*made).any(|other| other.makes.contains(&rule.cause));
                assert!(!back, "{} and {made}", rule.cause);
            }
        }
    }
}
