//! Costs added to each packet: a slow cipher, copies, and handing it from thread to thread.
//!
//! The functions are not inlined: a profile of the processor shows their names.

use std::hint::black_box;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Target of copied packets, in bytes: larger than a core's own caches.
const MEMORY: usize = 32 << 20;
/// Rounds of the cipher between two readings of the clock, and number of readings; the fastest
/// counts.
const CALIBRATION: (u32, u32) = (1000, 7);

/// Computes one ChaCha20 block (RFC 8439, section 2.3), without any optimisation.
#[inline(never)]
pub(super) fn chacha20_block_slow(state: &mut [u32; 16]) {
    const ROUNDS: [[usize; 4]; 8] = [
        [0, 4, 8, 12],
        [1, 5, 9, 13],
        [2, 6, 10, 14],
        [3, 7, 11, 15],
        [0, 5, 10, 15],
        [1, 6, 11, 12],
        [2, 7, 8, 13],
        [3, 4, 9, 14],
    ];
    let start = *state;
    for _ in 0..10 {
        for [a, b, c, d] in ROUNDS {
            for (x, y, z, by) in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)] {
                state[x] = state[x].wrapping_add(state[y]);
                state[z] = (state[z] ^ state[x]).rotate_left(by);
            }
        }
    }
    for (word, before) in state.iter_mut().zip(start) {
        *word = word.wrapping_add(before);
    }
}

/// Copies a packet out and back.
#[inline(never)]
fn copy_through_memory(packet: &mut [u8], memory: &mut [u8]) {
    black_box(&mut *memory).copy_from_slice(packet);
    packet.copy_from_slice(black_box(memory));
}

/// Processor time of the calling thread; zero where there is no such clock.
fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Costs of each packet.
#[derive(Debug)]
pub(super) struct Work {
    state: [u32; 16],
    /// Cipher blocks per packet.
    pub(super) blocks: u64,
    copies: u32,
    memory: Vec<u8>,
    /// Position of the next copy.
    offset: usize,
}

impl Work {
    pub(super) fn new(burn: Duration, copies: u32) -> Self {
        let mut state = [0x9e37_79b9; 16];
        let blocks = match burn {
            Duration::ZERO => 0,
            burn => (burn.as_secs_f64() / block_seconds(&mut state)).ceil() as u64,
        };
        Self {
            state,
            blocks,
            copies,
            memory: vec![0; if copies > 0 { MEMORY } else { 0 }],
            offset: 0,
        }
    }

    /// Works on a packet, which is the same afterwards.
    pub(super) fn on(&mut self, packet: &mut [u8]) {
        for _ in 0..self.blocks {
            chacha20_block_slow(black_box(&mut self.state));
        }
        for _ in 0..self.copies {
            if self.offset + packet.len() > self.memory.len() {
                self.offset = 0;
            }
            let memory = &mut self.memory[self.offset..][..packet.len()];
            copy_through_memory(packet, memory);
            self.offset += packet.len();
        }
    }

    /// Bytes copied out for a packet of this length.
    pub(super) fn copied(&self, length: usize) -> u64 {
        u64::from(self.copies) * length as u64
    }
}

/// Returns the processor time of one block, in seconds; above 0.
fn block_seconds(state: &mut [u32; 16]) -> f64 {
    let (rounds, tries) = CALIBRATION;
    let once = || {
        let begin = thread_time();
        for _ in 0..rounds {
            chacha20_block_slow(black_box(state));
        }
        (thread_time() - begin).as_secs_f64() / f64::from(rounds)
    };
    std::iter::repeat_with(once)
        .take(tries as usize)
        .fold(f64::INFINITY, f64::min)
        .max(1e-9)
}

/// A slot for one packet between two threads. The producer sleeps until the packet is taken; the
/// consumer sleeps until there is one.
#[derive(Debug, Default)]
pub(super) struct Handoff {
    state: Mutex<SlotState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SlotState {
    packet: Option<Vec<u8>>,
    closed: bool,
}

impl Handoff {
    /// Puts a packet into the slot, and waits until it is taken. Returns false once the slot is
    /// closed.
    #[inline(never)]
    pub(super) fn put(&self, packet: Vec<u8>) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.packet = Some(packet);
        self.changed.notify_all();
        let state = self
            .changed
            .wait_while(state, |state| state.packet.is_some() && !state.closed);
        !state.unwrap_or_else(PoisonError::into_inner).closed
    }

    /// Waits for a packet, and takes it. Returns `None` once the slot is closed.
    #[inline(never)]
    pub(super) fn take(&self) -> Option<Vec<u8>> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self
            .changed
            .wait_while(state, |state| state.packet.is_none() && !state.closed);
        let packet = state.unwrap_or_else(PoisonError::into_inner).packet.take();
        self.changed.notify_all();
        packet
    }

    /// Closes the slot and wakes both threads.
    pub(super) fn close(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 8439, section 2.3.2.
    #[test]
    fn the_slow_cipher_is_chacha20() {
        let mut state = [
            0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, 0x03020100, 0x07060504, 0x0b0a0908,
            0x0f0e0d0c, 0x13121110, 0x17161514, 0x1b1a1918, 0x1f1e1d1c, 0x00000001, 0x09000000,
            0x4a000000, 0x00000000,
        ];
        chacha20_block_slow(&mut state);
        assert_eq!(state[..4], [0xe4e7f110, 0x15593bd1, 0x1fdd0f50, 0xc47120a3]);
        assert_eq!(
            state[12..],
            [0xd19c12b5, 0xb94e16de, 0xe883d0cb, 0x4e3c50a2]
        );
    }

    #[test]
    fn twice_the_time_is_about_twice_the_blocks() {
        let once = Work::new(Duration::from_micros(100), 0).blocks as f64;
        let twice = Work::new(Duration::from_micros(200), 0).blocks as f64;
        assert!(
            once > 1.0 && (1.0..4.0).contains(&(twice / once)),
            "{once} {twice}"
        );
    }

    #[test]
    fn a_copied_packet_is_the_same() {
        let mut work = Work::new(Duration::ZERO, 3);
        let mut packet: Vec<u8> = (0..=255).collect();
        let before = packet.clone();
        // Around the end of the memory.
        work.offset = MEMORY - 300;
        work.on(&mut packet);
        assert_eq!(packet, before);
        assert_eq!(work.copied(packet.len()), 3 * 256);
    }

    #[test]
    fn a_closed_handoff_lets_everybody_go() {
        let handoff = Handoff::default();
        std::thread::scope(|scope| {
            let putting = scope.spawn(|| handoff.put(vec![1]) && handoff.put(vec![2]));
            assert_eq!(handoff.take(), Some(vec![1]));
            handoff.close();
            assert!(!putting.join().expect("thread"));
        });
    }
}
