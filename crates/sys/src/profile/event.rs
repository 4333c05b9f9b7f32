//! One sampling clock on one processor: perf_event_open(2) with the software event `cpu-clock`.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

use crate::perf::{self, Attributes};

/// From include/uapi/linux/perf_event.h: `PERF_TYPE_SOFTWARE`, `PERF_COUNT_SW_CPU_CLOCK`.
const TYPE_SOFTWARE: u32 = 1;
const COUNT_SW_CPU_CLOCK: u64 = 0;
/// `PERF_SAMPLE_IP`, `PERF_SAMPLE_TID`, `PERF_SAMPLE_CALLCHAIN`.
const SAMPLE_IP: u64 = 1;
const SAMPLE_TID: u64 = 1 << 1;
const SAMPLE_CALLCHAIN: u64 = 1 << 5;
/// Bits of the attribute flags.
const DISABLED: u64 = 1;
const INHERIT: u64 = 1 << 1;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
const FREQUENCY: u64 = 1 << 10;
/// `PERF_EVENT_IOC_ENABLE`, `PERF_EVENT_IOC_DISABLE`, `PERF_EVENT_IOC_SET_OUTPUT`: `_IO('$', n)`.
const IOC_ENABLE: libc::Ioctl = 0x2400;
const IOC_DISABLE: libc::Ioctl = 0x2401;
const IOC_SET_OUTPUT: libc::Ioctl = 0x2405;

/// Maximum number of frames kept of a call stack, the innermost ones.
pub(super) const STACK_MAX: u16 = 32;

/// Properties of a sampling clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Clock {
    /// Samples per second and processor.
    pub hz: u32,
    /// Whether to record call stacks.
    pub stacks: bool,
    /// Only while a program runs code of its own.
    pub user_only: bool,
}

/// An open event.
#[derive(Debug)]
pub(super) struct Event(OwnedFd);

impl Event {
    /// Opens a stopped clock on a processor: for one thread and those that it starts from now on,
    /// or for everything that runs there.
    pub(super) fn open(clock: Clock, cpu: u32, tid: Option<u32>) -> nix::Result<Self> {
        let flags = [
            (DISABLED | FREQUENCY | EXCLUDE_HYPERVISOR, true),
            (INHERIT, tid.is_some()),
            (EXCLUDE_KERNEL, clock.user_only),
        ];
        let flags = flags.into_iter().filter(|(_, set)| *set);
        let stacks = if clock.stacks { SAMPLE_CALLCHAIN } else { 0 };
        let attributes = Attributes {
            kind: TYPE_SOFTWARE,
            config: COUNT_SW_CPU_CLOCK,
            sample_period: clock.hz.into(),
            sample_type: SAMPLE_IP | SAMPLE_TID | stacks,
            flags: flags.fold(0, |all, (flag, _)| all | flag),
            sample_max_stack: if clock.stacks { STACK_MAX } else { 0 },
            ..Attributes::default()
        };
        perf::open(attributes, cpu, tid, None).map(Event)
    }

    /// Starts it.
    pub(super) fn enable(&self) -> nix::Result<()> {
        self.control(IOC_ENABLE, 0)
    }

    /// Stops it.
    pub(super) fn disable(&self) -> nix::Result<()> {
        self.control(IOC_DISABLE, 0)
    }

    /// Writes its samples into the ring of another event of the same processor.
    pub(super) fn redirect(&self, to: &Event) -> nix::Result<()> {
        self.control(IOC_SET_OUTPUT, to.fd())
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    fn control(&self, operation: libc::Ioctl, argument: RawFd) -> nix::Result<()> {
        // SAFETY: these operations take a number and touch no memory of the caller.
        let outcome = unsafe { libc::ioctl(self.fd(), operation, argument) };
        Errno::result(outcome).map(drop)
    }
}
