//! Whether the program gets a processor when it wants one: the question that several causes share.
//!
//! A program that is kept waiting or stopped is not limited by its own work, however much of it there is.

use super::weigh::Ramp;
use crate::{Evidence, ThreadUse};

/// Waiting, of the time it wants to run, that is normal where a load runs beside it on few processors, and at which
/// getting its turn is what it lacks: nearly as much as beside one other of the same weight.
const WAIT: Ramp = Ramp::new(0.3, 0.43);
/// Time for which its control group was stopped, of the time it wanted to run: from a tenth on throughput falls by as
/// much.
const STOPPED: Ramp = Ramp::new(0.02, 0.1);
/// Others must have used at least this part of what it waited; otherwise it waited for its own threads.
const BY_OTHERS: Ramp = Ramp::new(0.3, 0.7);
/// Idle time, of the processors it may use, up to which they are full, and from which nobody lacks one.
const ROOM: Ramp = Ramp::new(0.05, 0.25);
/// Sleeps per packet, all threads together; beside hogs packets come in batches, and there are few.
const SLEEPS: Ramp = Ramp::new(0.5, 1.5);
/// The program's time, running or wanting to, from which its work can be what limits it: one that sleeps for a quarter of
/// the time could do more; TCP's own pauses leave a full one a twentieth.
const BUSY: Ramp = Ramp::new(0.72, 0.95);

/// How the program fares.
pub(super) struct Turn {
    /// The thread that wants most, those of a virtual machine aside.
    pub thread: ThreadUse,
    /// Of the time it wanted a processor, waiting while others had it.
    pub kept: f64,
    /// Of the time the program wanted to run, stopped by its control group.
    pub stopped: f64,
    /// Processors' worth of time that others used.
    pub others: Option<f64>,
}

/// Asks how the program fares; `None` without a program or its threads' times.
pub(super) fn turn(evidence: &Evidence) -> Option<Turn> {
    // A guest's threads are another cause.
    let own = evidence.threads().into_iter();
    let own = own.filter(|thread| !thread.serves_guest());
    let thread = own.max_by(|a, b| a.wish().total_cmp(&b.wish()))?;
    let throttled = evidence.throttled().unwrap_or(0.0);
    // The scheduler counts the time stopped as waiting.
    let waiting = (thread.waiting - throttled).max(0.0);
    let others = evidence.used_by_others();
    let by_others = others.map_or(1.0, |used| BY_OTHERS.at(used / waiting.max(1e-9)));
    // Who waits beside an idle processor waits to be moved there, not for others to be through.
    let full = 1.0 - ROOM.at(evidence.room().unwrap_or(0.0));
    // Who goes to sleep for every packet waits anew each time that it is woken: that is of its own making.
    let sleeps: f64 = evidence.threads().iter().map(|thread| thread.sleeps).sum();
    let own = SLEEPS.at(sleeps / evidence.packets().max(1.0));
    Some(Turn {
        kept: waiting / thread.wish().max(1e-9) * by_others * full * (1.0 - own),
        stopped: throttled / (throttled + evidence.running()).max(1e-9),
        thread,
        others,
    })
}

/// 1 if nothing keeps the program from running when it wants to, 0 if that is what it lacks.
pub(super) fn unhindered(evidence: &Evidence) -> f64 {
    let free = |turn: Turn| (1.0 - WAIT.at(turn.kept)) * (1.0 - STOPPED.at(turn.stopped));
    turn(evidence).map_or(1.0, free)
}

/// How far the program's own work is what limits it, 0 to 1, whatever that work is.
pub(super) fn limited_by_work(evidence: &Evidence) -> Option<f64> {
    let busy = evidence.busy()?;
    Some(BUSY.at(busy) * unhindered(evidence))
}
