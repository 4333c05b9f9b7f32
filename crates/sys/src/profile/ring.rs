//! The ring into which the kernel writes the records of an event, as mapped memory
//! (perf_event_open(2), "MMAP layout").
//!
//! The kernel does not write between tail and head until the tail moves, so that part is copied
//! first and released afterwards.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::event::STACK_MAX;

/// Offsets in `struct perf_event_mmap_page`: `data_head`, `data_tail`.
const HEAD: usize = 1024;
const TAIL: usize = 1032;

/// Maximum length of a record in bytes: a sample with a whole call stack and its marks.
const RECORD_MAX: usize = 8 * (4 + STACK_MAX as usize + 8);

/// The ring of an event.
#[derive(Debug)]
pub(crate) struct Ring {
    memory: NonNull<u8>,
    length: usize,
    page: usize,
}

// SAFETY: the mapping belongs to this value alone and is not bound to a thread.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps a ring of `pages` pages (a power of two) for the event of this descriptor.
    pub(crate) fn map(event: RawFd, pages: usize) -> io::Result<Self> {
        // SAFETY: sysconf takes a number and returns one.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page = usize::try_from(page).map_err(|_| io::Error::last_os_error())?;
        let length = page * (1 + pages);
        // SAFETY: a new mapping where the kernel finds room; no memory in use is touched.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                event,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Ring {
            memory,
            length,
            page,
        })
    }

    /// Appends the bytes that the kernel has written since the last call, and releases their space.
    /// Returns whether there was no space left for another record.
    pub(crate) fn take(&mut self, into: &mut Vec<u8>) -> bool {
        let size = self.length - self.page;
        let head = self.field(HEAD).load(Ordering::Acquire);
        let tail = self.field(TAIL).load(Ordering::Relaxed);
        for span in spans(tail, head, size) {
            into.reserve(span.len());
            let from = self.memory.as_ptr().wrapping_add(self.page + span.start);
            // SAFETY: the span lies within the data part of the mapping, the kernel does not write
            // there before the tail moves, `into` has just reserved room for it and is elsewhere.
            unsafe {
                let to = into.as_mut_ptr().add(into.len());
                std::ptr::copy_nonoverlapping(from, to, span.len());
                into.set_len(into.len() + span.len());
            }
        }
        self.field(TAIL).store(head, Ordering::Release);
        head.wrapping_sub(tail) > (size - RECORD_MAX) as u64
    }

    fn field(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the first page of the mapping, aligned to it, has a u64 there, which the kernel
        // also accesses atomically; the mapping lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.memory.as_ptr().add(offset).cast()) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `map` with this length and is not used after.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.length) };
    }
}

/// Returns the one or two pieces of a ring of `size` bytes (a power of two) between the two
/// counters, which only grow.
fn spans(tail: u64, head: u64, size: usize) -> [Range<usize>; 2] {
    let filled = head.wrapping_sub(tail).min(size as u64) as usize;
    let start = (tail % size as u64) as usize;
    let first = filled.min(size - start);
    [start..start + first, 0..filled - first]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_across_the_end_have_two_pieces() {
        assert_eq!(spans(0, 0, 64), [0..0, 0..0]);
        assert_eq!(spans(0, 40, 64), [0..40, 0..0]);
        assert_eq!(spans(40, 64, 64), [40..64, 0..0]);
        assert_eq!(spans(64 + 40, 64 + 80, 64), [40..64, 0..16]);
        assert_eq!(spans(16, 80, 64), [16..64, 0..16]);
    }

    #[test]
    fn counters_may_overflow() {
        assert_eq!(spans(u64::MAX - 7, 8, 64), [56..64, 0..8]);
    }

    #[test]
    fn counters_that_make_no_sense_stay_within_the_ring() {
        assert_eq!(spans(100, 0, 64), [36..64, 0..36]);
    }
}
