//! Clocks and randomness of the kernel.

pub use seikan_mesh::random::SystemRandom;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::Now;
use seikan_sys::clock;

/// Returns the kernel's clocks.
pub fn now() -> Now {
    Now {
        mono: Instant::from_nanos(clock::monotonic().as_nanos() as u64),
        wall: clock::wall(),
    }
}
