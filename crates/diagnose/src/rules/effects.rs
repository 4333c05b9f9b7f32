//! Effects that several causes share.

use crate::Cause;

/// Effects of a late reader.
pub(super) const LATE: &[Cause] = &[
    Cause::TunQueueOverflow,
    Cause::UdpReceiveBuffer,
    Cause::Bufferbloat,
];
/// Effects of too much work in one thread.
pub(super) const WORK: &[Cause] = &[
    Cause::SingleThreadSaturated,
    Cause::TunQueueOverflow,
    Cause::UdpReceiveBuffer,
    Cause::Bufferbloat,
];
/// Effects of more packets than the bytes need, in the program, in the kernel, and in senders and
/// receivers: on a fully used machine all of them wait for each other.
pub(super) const PACKETS: &[Cause] = &[
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
