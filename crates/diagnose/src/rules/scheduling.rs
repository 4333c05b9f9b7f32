//! Whether the program gets a processor when it is ready to run, as several rules need it.
//!
//! A waiting or throttled program is not limited by its own work, however much of it there is.

use super::weigh::Ramp;
use crate::{Evidence, Excluded, Fact, Stage, ThreadUse};

/// Waiting share of the demand that is normal with a load on few processors, and at which the lack
/// of a processor is the limit: nearly as much as with one competitor of the same weight.
const WAIT: Ramp = Ramp::new(0.3, 0.43);
/// Throttled share of the demand: from a tenth on throughput falls by as much.
const STOPPED: Ramp = Ramp::new(0.02, 0.1);
/// Ratio of the time used by others to the waiting time; below, the program waits for its own threads.
const BY_OTHERS: Ramp = Ramp::new(0.3, 0.7);
/// Idle share of the processors that the program may use, up to which they are full, and from which
/// there is no lack.
const IDLE_SHARE: Ramp = Ramp::new(0.05, 0.25);
/// Sleeps per packet, all threads together; with competing programs packets come in batches, and
/// there are few.
const SLEEPS: Ramp = Ramp::new(0.5, 1.5);
/// Demand from which the program's work can be the limit: a program that sleeps for a quarter of
/// the time could do more; pauses of TCP leave a full one a twentieth.
const BUSY: Ramp = Ramp::new(0.72, 0.95);

/// How the program is scheduled on processors.
pub(super) struct Scheduling {
    /// The thread with the largest demand, except threads of a virtual machine.
    pub thread: ThreadUse,
    /// Share of its demand in which it waited while others used the processor.
    pub waiting: f64,
    /// Throttled share of the program's demand.
    pub stopped: f64,
    /// Processors that others used.
    pub others: Option<f64>,
}

/// Returns how the program gets processors; `None` without a program or the times of its threads.
pub(super) fn scheduling(evidence: &Evidence) -> Option<Scheduling> {
    // Threads of a guest are another cause.
    let own = evidence.threads().into_iter();
    let own = own.filter(|thread| !thread.serves_guest());
    let thread = own.max_by(|a, b| a.demand().total_cmp(&b.demand()))?;
    let throttled = evidence.throttled().unwrap_or(0.0);
    // The scheduler counts throttled time as waiting.
    let waiting = (thread.waiting - throttled).max(0.0);
    let others = evidence.used_by_others();
    let by_others = others.map_or(1.0, |used| BY_OTHERS.at(used / waiting.max(1e-9)));
    // A thread that waits next to an idle processor waits for its migration, not for other programs.
    let full = 1.0 - IDLE_SHARE.at(evidence.idle_share().unwrap_or(0.0));
    // A thread that sleeps for every packet waits at each wake-up: its own program causes that.
    let sleeps: f64 = evidence.threads().iter().map(|thread| thread.sleeps).sum();
    let own = SLEEPS.at(sleeps / evidence.packets().max(1.0));
    Some(Scheduling {
        waiting: waiting / thread.demand().max(1e-9) * by_others * full * (1.0 - own),
        stopped: throttled / (throttled + evidence.running()).max(1e-9),
        thread,
        others,
    })
}

/// 1 if the program runs whenever it is ready, 0 if it lacks a processor.
pub(super) fn runs_when_ready(evidence: &Evidence) -> f64 {
    let free = |scheduling: Scheduling| {
        (1.0 - WAIT.at(scheduling.waiting)) * (1.0 - STOPPED.at(scheduling.stopped))
    };
    scheduling(evidence).map_or(1.0, free)
}

/// Returns how far the program's own work is the limit, 0 to 1.
pub(super) fn limited_by_work(evidence: &Evidence) -> Option<f64> {
    let busy = evidence.busy()?;
    Some(BUSY.at(busy) * runs_when_ready(evidence))
}

/// Returns how far the program's own work is the limit, with the figure for it; `Err` if it is not.
pub(super) fn limit_of_work(evidence: &Evidence) -> Result<(f64, Fact), Excluded> {
    let busy = evidence
        .busy()
        .ok_or("neither threads nor processors are readable")?;
    let fact = Fact::new(
        "share of the time in which the program ran or was ready to run",
        busy,
        "below 0.7, or waiting for other programs",
        "schedstat",
    );
    match limited_by_work(evidence) {
        Some(limited) if limited > 0.0 => Ok((limited, fact)),
        _ => Err(Excluded::Absent(fact)),
    }
}

/// Returns the largest of the program's shares of time in these stages.
pub(super) fn largest(evidence: &Evidence, stages: &[Stage]) -> f64 {
    let shares = stages.iter().filter_map(|stage| evidence.work(*stage));
    shares.fold(0.0, f64::max)
}
