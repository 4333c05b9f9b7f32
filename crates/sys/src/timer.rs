//! A timer as a file descriptor, for work at a certain time in a loop that otherwise waits for
//! packets.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

/// A one-shot timer. It is readable from its expiry until [`Timer::set`] or [`Timer::stop`].
#[derive(Debug)]
pub struct Timer {
    fd: TimerFd,
}

impl Timer {
    /// Creates a timer that is not running.
    ///
    /// # Errors
    /// Those of timerfd_create(2): out of descriptors or memory.
    pub fn new() -> io::Result<Timer> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        Ok(Timer {
            fd: TimerFd::new(ClockId::CLOCK_BOOTTIME, flags)?,
        })
    }

    /// Sets the expiry to `delay` from now. An earlier setting is replaced.
    ///
    /// # Errors
    /// Those of timerfd_settime(2).
    pub fn set(&self, delay: Duration) -> io::Result<()> {
        // Zero would stop the timer (timerfd_settime(2)).
        let delay = TimeSpec::from(delay.max(Duration::from_nanos(1)));
        let once = Expiration::OneShot(delay);
        Ok(self.fd.set(once, TimerSetTimeFlags::empty())?)
    }

    /// Stops the timer.
    ///
    /// # Errors
    /// Those of timerfd_settime(2).
    pub fn stop(&self) -> io::Result<()> {
        Ok(self.fd.unset()?)
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poll::{Epoll, Interest};
    use std::time::Instant;

    #[test]
    fn it_fires_after_its_delay_and_not_before() {
        let timer = Timer::new().expect("timer");
        let mut epoll = Epoll::new(1).expect("epoll");
        epoll.add(&timer, 0, Interest::Read).expect("add");
        let delay = Duration::from_millis(20);
        let start = Instant::now();
        timer.set(delay).expect("set");
        let fired = epoll.wait(Some(Duration::from_secs(5))).expect("wait");
        assert_eq!(fired.len(), 1);
        assert!(start.elapsed() >= delay);
    }

    #[test]
    fn a_stopped_one_does_not_fire() {
        let timer = Timer::new().expect("timer");
        let mut epoll = Epoll::new(1).expect("epoll");
        epoll.add(&timer, 0, Interest::Read).expect("add");
        timer.set(Duration::ZERO).expect("set");
        assert_eq!(epoll.wait(None).expect("wait").len(), 1);
        timer.stop().expect("stop");
        assert_eq!(epoll.wait(Some(Duration::ZERO)).expect("wait").len(), 0);
    }
}
