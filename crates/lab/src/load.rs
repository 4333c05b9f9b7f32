//! Loads of the lab: functions of [`seikan_load`] that take closures, with the lab's errors.

use std::time::Duration;

use seikan_load::{Ends, LiveOptions, Meter};
use seikan_ui::Interrupt;

use crate::error::Result;

/// Runs a load for as long as `work` takes.
///
/// # Errors
/// The load cannot be started; the error of `work`.
pub(crate) fn live<T>(
    ends: &Ends<'_>,
    options: &LiveOptions,
    interrupt: &Interrupt,
    work: impl FnOnce(&Meter) -> Result<T>,
) -> Result<T> {
    seikan_load::live(ends, options, interrupt, work)
}

/// Waits until the target answers an echo request.
///
/// # Errors
/// [`Timeout`](crate::error::LabError::Timeout)(crate::LabError::Timeout) after `patience`; the error of `alive`, which is
/// called between tries.
pub(crate) fn wait_reachable(
    ends: &Ends<'_>,
    patience: Duration,
    interrupt: &Interrupt,
    alive: impl FnMut() -> Result<()>,
) -> Result<()> {
    seikan_load::wait_reachable(ends, patience, interrupt, alive)
}
