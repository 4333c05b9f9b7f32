//! Ctrl-C as a flag: every wait and loop of the lab looks at it, so that guards run and clean up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// The run was ended by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("interrupted; everything that was set up has been removed")]
pub struct Interrupted;

/// The kernel refused a signal handler.
#[derive(Debug, thiserror::Error)]
#[error("cannot install a signal handler: {0}")]
pub struct SignalError(#[from] std::io::Error);

/// Interval at which a waiting loop checks the flag.
const POLL: Duration = Duration::from_millis(20);

/// A flag that asks everything to stop. Clones share the flag.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Creates a flag that only [`Interrupt::raise`] sets.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets SIGINT, SIGTERM and SIGHUP raise this flag until the guard is dropped.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn catch_signals(&self) -> Result<SignalGuard, SignalError> {
        self.catch(&[SIGINT, SIGTERM, SIGHUP])
    }

    /// Catches the signals except SIGHUP, which then ends the process. For programs that are
    /// useless without their terminal.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn catch_signals_but_hangup(&self) -> Result<SignalGuard, SignalError> {
        self.catch(&[SIGINT, SIGTERM])
    }

    fn catch(&self, signals: &[i32]) -> Result<SignalGuard, SignalError> {
        let mut guard = SignalGuard(Vec::new());
        for &signal in signals {
            let id = signal_hook::flag::register(signal, Arc::clone(&self.0))?;
            guard.0.push(id);
        }
        Ok(guard)
    }

    /// Asks everything that shares this flag to stop.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether the flag is raised.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns an error if the flag is raised, for use with `?` in loops.
    ///
    /// # Errors
    /// [`Interrupted`] if the flag is raised.
    pub fn check(&self) -> Result<(), Interrupted> {
        if self.is_raised() {
            return Err(Interrupted);
        }
        Ok(())
    }

    /// Sleeps until `deadline` unless interrupted.
    ///
    /// # Errors
    /// [`Interrupted`].
    pub fn sleep_until(&self, deadline: Instant) -> Result<(), Interrupted> {
        loop {
            self.check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(POLL));
        }
    }

    /// Sleeps for `time` unless interrupted.
    ///
    /// # Errors
    /// [`Interrupted`].
    pub fn sleep(&self, time: Duration) -> Result<(), Interrupted> {
        self.sleep_until(Instant::now() + time)
    }
}

/// Raises a flag when dropped, so that threads that check it end even if the one that waits for them
/// fails.
#[derive(Debug)]
pub struct Stop<'a>(pub &'a Interrupt);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.raise();
    }
}

/// Takes the signal handlers away again when dropped.
#[derive(Debug)]
pub struct SignalGuard(Vec<SigId>);

impl Drop for SignalGuard {
    fn drop(&mut self) {
        for id in self.0.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raised_flag_ends_a_sleep_early() {
        let interrupt = Interrupt::new();
        let other = interrupt.clone();
        let start = Instant::now();
        let waker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            other.raise();
        });
        assert_eq!(interrupt.sleep(Duration::from_secs(60)), Err(Interrupted));
        waker.join().expect("waker");
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
