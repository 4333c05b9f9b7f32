//! Waiting for events: epoll with timeouts in nanoseconds.
//!
//! Register descriptors with tokens, wait, and look at the events. Except for [`Epoll::add_edge`] it is
//! level-triggered, so a loop that leaves data unread gets the event again.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::epoll::{self, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

/// The events to wait for on a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Readable.
    Read,
    /// Writable.
    Write,
    /// Readable or writable.
    ReadWrite,
}

impl Interest {
    fn flags(self) -> EpollFlags {
        match self {
            Interest::Read => EpollFlags::EPOLLIN,
            Interest::Write => EpollFlags::EPOLLOUT,
            Interest::ReadWrite => EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT,
        }
    }
}

/// One ready descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The token given to [`Epoll::add`].
    pub token: u64,
    /// There is data to read.
    pub readable: bool,
    /// There is space to write.
    pub writable: bool,
    /// EPOLLRDHUP, only with [`Epoll::add_edge`]: the other end sends nothing more; bytes before the
    /// end may be unread.
    pub ended: bool,
    /// EPOLLERR or EPOLLHUP: the next read or write returns the error.
    pub failed: bool,
}

/// An epoll instance and its buffer of events.
#[derive(Debug)]
pub struct Epoll {
    epoll: epoll::Epoll,
    events: Vec<EpollEvent>,
    /// Whether epoll_pwait2(2) exists (Linux 5.11). Without it, timeouts are rounded up to
    /// milliseconds.
    nanoseconds: bool,
}

impl Epoll {
    /// Creates an instance that reports at most `capacity` (at least 1) descriptors per wait.
    ///
    /// # Errors
    /// Those of epoll_create1(2): out of descriptors or memory.
    pub fn new(capacity: usize) -> io::Result<Self> {
        Ok(Epoll {
            epoll: epoll::Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            events: vec![EpollEvent::empty(); capacity.max(1)],
            nanoseconds: true,
        })
    }

    /// Watches `fd`. Its events carry `token`. Closing the last duplicate of `fd` removes it.
    ///
    /// # Errors
    /// Those of epoll_ctl(2): `AlreadyExists` if it is watched already.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(self
            .epoll
            .add(fd, EpollEvent::new(interest.flags(), token))?)
    }

    /// Watches `fd`, edge-triggered: an event says that it has become readable or writable, and is not repeated. Read or
    /// write until `WouldBlock` before waiting for the next one.
    ///
    /// # Errors
    /// Those of epoll_ctl(2): `AlreadyExists` if it is watched already.
    pub fn add_edge(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        let edge = EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        let flags = Interest::ReadWrite.flags() | edge;
        Ok(self.epoll.add(fd, EpollEvent::new(flags, token))?)
    }

    /// Changes the events to wait for on `fd`.
    ///
    /// # Errors
    /// Those of epoll_ctl(2): `NotFound` if it is not watched.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(self
            .epoll
            .modify(fd, &mut EpollEvent::new(interest.flags(), token))?)
    }

    /// Stops watching `fd`.
    ///
    /// # Errors
    /// Those of epoll_ctl(2): `NotFound` if it is not watched.
    pub fn delete(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(self.epoll.delete(fd)?)
    }

    /// Waits until a descriptor is ready or `timeout` has passed (`None`: no timeout) and returns
    /// the ready ones: none after a timeout or a signal handler. It never returns early without a
    /// reason, so a timer is due when its wait ends empty.
    ///
    /// # Errors
    /// Those of epoll_pwait2(2) except EINTR.
    pub fn wait(
        &mut self,
        timeout: Option<Duration>,
    ) -> io::Result<impl ExactSizeIterator<Item = Event> + '_> {
        let mut outcome = if self.nanoseconds {
            self.wait_nanoseconds(timeout)
        } else {
            self.wait_milliseconds(timeout)
        };
        // ENOSYS before Linux 5.11; EPERM from seccomp profiles that are older than the call.
        if self.nanoseconds && matches!(outcome, Err(Errno::ENOSYS | Errno::EPERM)) {
            self.nanoseconds = false;
            outcome = self.wait_milliseconds(timeout);
        }
        let ready = match outcome {
            Ok(ready) => ready,
            Err(Errno::EINTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        Ok(self.events[..ready].iter().map(|event| {
            let flags = event.events();
            Event {
                token: event.data(),
                readable: flags.contains(EpollFlags::EPOLLIN),
                writable: flags.contains(EpollFlags::EPOLLOUT),
                ended: flags.contains(EpollFlags::EPOLLRDHUP),
                failed: flags.intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP),
            }
        }))
    }

    fn wait_nanoseconds(&mut self, timeout: Option<Duration>) -> nix::Result<usize> {
        let timeout = timeout.map(|timeout| KernelTimespec {
            seconds: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: timeout.subsec_nanos().into(),
        });
        let timeout = timeout
            .as_ref()
            .map_or(std::ptr::null(), std::ptr::from_ref);
        let capacity = self.events.len().min(libc::c_int::MAX as usize);
        // SAFETY: `events` is exclusively borrowed and `capacity` long, EpollEvent is a transparent
        // epoll_event; `timeout` is null or points to a __kernel_timespec that outlives the call; a
        // null signal mask makes the last argument unused.
        let ready = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.epoll.0.as_raw_fd(),
                self.events.as_mut_ptr(),
                capacity as libc::c_int,
                timeout,
                std::ptr::null::<libc::sigset_t>(),
                0usize,
            )
        };
        Errno::result(ready).map(|ready| ready as usize)
    }

    fn wait_milliseconds(&mut self, timeout: Option<Duration>) -> nix::Result<usize> {
        // Rounded up: waking early would spin until the timer is due.
        let timeout = timeout.map_or(EpollTimeout::NONE, |timeout| {
            let milliseconds = timeout.as_nanos().div_ceil(1_000_000);
            EpollTimeout::try_from(milliseconds).unwrap_or(EpollTimeout::MAX)
        });
        self.epoll.wait(&mut self.events, timeout)
    }
}

/// `struct __kernel_timespec`: 64 bits also where the C library's `timespec` has 32.
#[repr(C)]
struct KernelTimespec {
    seconds: i64,
    nanoseconds: i64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::eventfd::EventFd;
    use std::time::Instant;

    fn both_kinds() -> [Epoll; 2] {
        let mut coarse = Epoll::new(4).expect("epoll");
        coarse.nanoseconds = false;
        [Epoll::new(4).expect("epoll"), coarse]
    }

    #[test]
    fn a_ready_descriptor_comes_with_its_token() {
        for mut epoll in both_kinds() {
            let event = EventFd::new().expect("eventfd");
            epoll
                .add(&event, 0x1234_5678_9abc_def0, Interest::Read)
                .expect("add");
            assert_eq!(epoll.wait(Some(Duration::ZERO)).expect("wait").len(), 0);
            event.write(1).expect("write");
            let events: Vec<Event> = epoll.wait(None).expect("wait").collect();
            let expected = Event {
                token: 0x1234_5678_9abc_def0,
                readable: true,
                writable: false,
                ended: false,
                failed: false,
            };
            assert_eq!(events, [expected]);
        }
    }

    #[test]
    fn an_edge_is_reported_once() {
        let mut epoll = Epoll::new(4).expect("epoll");
        let event = EventFd::new().expect("eventfd");
        epoll.add_edge(&event, 1).expect("add");
        event.write(1).expect("write");
        let events: Vec<Event> = epoll.wait(None).expect("wait").collect();
        assert!(events[0].readable && events[0].writable);
        assert_eq!(epoll.wait(Some(Duration::ZERO)).expect("wait").len(), 0);
        event.write(1).expect("write");
        assert_eq!(epoll.wait(None).expect("wait").len(), 1);
    }

    #[test]
    fn interest_can_be_changed_and_withdrawn() {
        let mut epoll = Epoll::new(4).expect("epoll");
        let event = EventFd::new().expect("eventfd");
        epoll.add(&event, 1, Interest::Read).expect("add");
        epoll
            .modify(&event, 2, Interest::ReadWrite)
            .expect("modify");
        let events: Vec<Event> = epoll.wait(None).expect("wait").collect();
        assert_eq!((events[0].token, events[0].writable), (2, true));
        epoll.delete(&event).expect("delete");
        assert_eq!(epoll.wait(Some(Duration::ZERO)).expect("wait").len(), 0);
    }

    #[test]
    fn a_timeout_is_never_early() {
        for mut epoll in both_kinds() {
            let timeout = Duration::from_micros(1_300);
            let start = Instant::now();
            assert_eq!(epoll.wait(Some(timeout)).expect("wait").len(), 0);
            assert!(start.elapsed() >= timeout);
        }
    }

    #[test]
    fn a_timeout_below_a_millisecond_does_not_take_one() {
        let mut epoll = Epoll::new(1).expect("epoll");
        assert_eq!(
            epoll
                .wait(Some(Duration::from_nanos(1)))
                .expect("wait")
                .len(),
            0
        );
        if !epoll.nanoseconds {
            return crate::testing::skip("no epoll_pwait2");
        }
        let best = (0..50)
            .map(|_| {
                let start = Instant::now();
                drop(epoll.wait(Some(Duration::from_micros(50))).expect("wait"));
                start.elapsed()
            })
            .min();
        assert!(best < Some(Duration::from_millis(1)), "{best:?}");
    }
}
