//! Wakes the thread of the stack, and tells it to end.

use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// An event that the thread of the stack waits for.
#[derive(Debug)]
pub(crate) struct Waker {
    event: EventFd,
    ends: AtomicBool,
}

impl Waker {
    /// Creates the event.
    ///
    /// # Errors
    /// Errors of eventfd(2): out of descriptors or memory.
    pub fn new() -> io::Result<Waker> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Waker {
            event: EventFd::from_value_and_flags(0, flags)?,
            ends: AtomicBool::new(false),
        })
    }

    /// Wakes the thread.
    pub fn wake(&self) {
        // The write fails only if 2^64 - 2 events are pending.
        let _ = self.event.write(1);
    }

    /// Clears pending events. Must be called before the thread checks why it was woken.
    pub fn clear(&self) {
        let _ = self.event.read();
    }

    /// Makes the thread end.
    pub fn end(&self) {
        self.ends.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether the thread has to end.
    pub fn ends(&self) -> bool {
        self.ends.load(Ordering::Acquire)
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
