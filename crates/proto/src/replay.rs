//! The replay window (RFC 6479): the counters received in a session.
//!
//! A datagram is opened first and then entered here. Only [`ReplayWindow::would_accept`] may be
//! called before opening, to save the AEAD of an obvious replay. [`ReplayWindow::update`] moves the
//! window, so it must be called with authenticated counters only.

use std::fmt;

use crate::constants::REJECT_AFTER_MESSAGES;

const WORD_BITS: u64 = u64::BITS as u64;
const WORDS: usize = 256;

/// Number of counters below the highest received one that can still be checked: 16,320.
///
/// The kernel's window is 8,128. Lanes and receive batches put more in flight: at 10 Gbit/s in
/// datagrams of 1,400 bytes this window covers 18 ms of reordering (the kernel's: 9 ms), at 2 KiB
/// per session. When a direct path opens, it overtakes datagrams in flight over a relay, at most
/// the rate times the difference in delay. At 1 Gbit/s, a relay's limit for a member, the window
/// covers 183 ms more. Datagrams beyond that are dropped and counted as replayed. One word of the
/// 16,384 bits is always being reused (RFC 6479, 2.1).
pub const WINDOW: u64 = (WORDS as u64 - 1) * WORD_BITS;

/// Why a counter is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// The counter was accepted before.
    #[error("counter seen before: a replayed or duplicated datagram")]
    Duplicate,
    /// The counter is below the window.
    #[error("counter too old: behind the replay window")]
    TooOld,
    /// The counter has reached [`REJECT_AFTER_MESSAGES`].
    #[error("counter beyond the maximum of a session: the sender failed to rekey")]
    Exhausted,
}

/// The counters received in one session.
#[derive(Clone)]
pub struct ReplayWindow {
    /// The lowest counter greater than all accepted ones.
    next: u64,
    /// Bit `c % 16384` is set if counter `c` was accepted, for the counters in the window.
    seen: [u64; WORDS],
}

impl ReplayWindow {
    /// The window of a new session.
    pub const fn new() -> Self {
        ReplayWindow {
            next: 0,
            seen: [0; WORDS],
        }
    }

    /// Whether [`update`](Self::update) would accept `counter` now.
    #[inline]
    pub fn would_accept(&self, counter: u64) -> Result<(), Rejected> {
        if counter >= self.next {
            return if counter < REJECT_AFTER_MESSAGES {
                Ok(())
            } else {
                Err(Rejected::Exhausted)
            };
        }
        if self.next - counter > WINDOW {
            return Err(Rejected::TooOld);
        }
        let (word, bit) = position(counter);
        if self.seen[word] & bit == 0 {
            Ok(())
        } else {
            Err(Rejected::Duplicate)
        }
    }

    /// Records the counter of an authenticated datagram, or returns why the datagram must be
    /// dropped.
    #[inline]
    pub fn update(&mut self, counter: u64) -> Result<(), Rejected> {
        self.would_accept(counter)?;
        if counter >= self.next {
            self.advance(counter);
        }
        let (word, bit) = position(counter);
        self.seen[word] |= bit;
        Ok(())
    }

    /// The lowest counter greater than all accepted ones; zero before the first.
    pub const fn next_counter(&self) -> u64 {
        self.next
    }

    /// Returns the counter with these low 32 bits that is nearest to [`Self::next_counter`], at
    /// most 2^31 away (RFC 9000, appendix A.3). More than that cannot be in flight: a session lives
    /// for 180 s.
    #[inline]
    pub fn whole_counter(&self, low: u32) -> u64 {
        let distance = i64::from(low.wrapping_sub(self.next as u32) as i32);
        // There is no counter before 0.
        self.next.checked_add_signed(distance).unwrap_or(low.into())
    }

    /// Moves the window so that `counter` is the newest, and clears the words that it enters.
    fn advance(&mut self, counter: u64) {
        let target = counter / WORD_BITS;
        // Before the first counter, the word of counter 0 is already clear.
        let current = self.next.saturating_sub(1) / WORD_BITS;
        for word in 1..=(target - current).min(WORDS as u64) {
            self.seen[((current + word) % WORDS as u64) as usize] = 0;
        }
        self.next = counter + 1;
    }
}

impl Default for ReplayWindow {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for ReplayWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayWindow")
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}

#[inline]
fn position(counter: u64) -> (usize, u64) {
    (
        (counter / WORD_BITS) as usize % WORDS,
        1 << (counter % WORD_BITS),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn each_counter_is_accepted_once() {
        let mut window = ReplayWindow::new();
        assert_eq!(window.update(0), Ok(()));
        assert_eq!(window.update(0), Err(Rejected::Duplicate));
        assert_eq!(window.update(9), Ok(()));
        assert_eq!(window.update(8), Ok(()));
        assert_eq!(window.update(8), Err(Rejected::Duplicate));
    }

    #[test]
    fn a_counter_is_recovered_across_the_wrap_of_its_low_half() {
        const WRAP: u64 = 1 << 32;
        let mut window = ReplayWindow::new();
        assert_eq!(window.whole_counter(0), 0);
        // There is none before the first.
        assert_eq!(window.whole_counter(u32::MAX), u64::from(u32::MAX));
        window.update(WRAP - 2).unwrap();
        assert_eq!(window.whole_counter(u32::MAX), WRAP - 1);
        assert_eq!(window.whole_counter(0), WRAP);
        window.update(WRAP + 5).unwrap();
        assert_eq!(window.whole_counter(u32::MAX), WRAP - 1, "late");
        assert_eq!(window.whole_counter(6), WRAP + 6);
    }

    #[test]
    fn the_window_ends_where_it_says() {
        let mut window = ReplayWindow::new();
        window.update(WINDOW + 5).unwrap();
        assert_eq!(window.would_accept(6), Ok(()));
        assert_eq!(window.would_accept(5), Err(Rejected::TooOld));
    }

    #[test]
    fn the_last_counter_is_below_reject_after_messages() {
        let mut window = ReplayWindow::new();
        assert_eq!(window.update(REJECT_AFTER_MESSAGES - 1), Ok(()));
        assert_eq!(
            window.update(REJECT_AFTER_MESSAGES),
            Err(Rejected::Exhausted)
        );
        assert_eq!(window.update(u64::MAX), Err(Rejected::Exhausted));
        assert_eq!(window.update(REJECT_AFTER_MESSAGES - 2), Ok(()));
    }

    #[test]
    fn a_check_alone_changes_nothing() {
        let window = ReplayWindow::new();
        assert_eq!(window.would_accept(1 << 40), Ok(()));
        assert_eq!(window.would_accept(0), Ok(()));
    }

    /// The reference: the set of accepted counters and the highest of them.
    #[derive(Default)]
    struct Model {
        seen: HashSet<u64>,
        next: u64,
    }

    impl Model {
        fn update(&mut self, counter: u64) -> Result<(), Rejected> {
            if counter >= REJECT_AFTER_MESSAGES {
                return Err(Rejected::Exhausted);
            }
            if self.next.saturating_sub(counter) > WINDOW {
                return Err(Rejected::TooOld);
            }
            if !self.seen.insert(counter) {
                return Err(Rejected::Duplicate);
            }
            self.next = self.next.max(counter + 1);
            Ok(())
        }
    }

    fn steps() -> impl Strategy<Value = i64> {
        prop_oneof![
            6 => -70i64..70,
            2 => -(WINDOW as i64) - 130..WINDOW as i64 + 130,
            1 => 0i64..1 << 40,
        ]
    }

    proptest! {
        #[test]
        fn counters_within_half_of_the_low_ones_are_recovered(
            greatest in 0..REJECT_AFTER_MESSAGES,
            distance in -(1i64 << 31)..1 << 31,
        ) {
            let mut window = ReplayWindow::new();
            window.update(greatest).unwrap();
            if let Some(counter) = window.next_counter().checked_add_signed(distance) {
                prop_assert_eq!(window.whole_counter(counter as u32), counter);
            }
        }

        #[test]
        fn agrees_with_the_set_of_all_counters(
            start in prop_oneof![Just(0u64), 0..1u64 << 62],
            steps in prop::collection::vec(steps(), 1..400),
        ) {
            let mut window = ReplayWindow::new();
            let mut model = Model::default();
            let mut counter = start;
            for step in steps {
                counter = counter.saturating_add_signed(step);
                prop_assert_eq!(window.update(counter), model.update(counter), "counter {}", counter);
            }
        }
    }
}
