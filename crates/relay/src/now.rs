//! The time of an event.

use seikan_proto::time::Instant;
use seikan_sys::clock;

/// The time, by both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Monotonic time, for intervals.
    pub mono: Instant,
    /// Seconds since the Unix epoch, for the expiry of tickets.
    pub unix: u64,
}

impl Now {
    /// Reads the system's clocks.
    pub fn read() -> Now {
        Now {
            mono: Instant::BOOT + clock::monotonic(),
            unix: clock::wall().as_secs(),
        }
    }
}
