//! The system's random source.

use seikan_proto::rng::Rng;
use seikan_sys::random;

/// The system's random source.
pub struct SystemRandom;

impl Rng for SystemRandom {
    fn fill(&mut self, destination: &mut [u8]) {
        // getrandom(2) fails only before the pool is initialised or for invalid arguments; without randomness there is
        // no secrecy, so the process must not go on.
        random::fill(destination).expect("the kernel's random source works");
    }
}
