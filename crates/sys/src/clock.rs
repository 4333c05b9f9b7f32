//! Two clocks: a monotonic one that includes suspended time, and the wall clock.
//!
//! The vDSO reads both without a system call (`lib/vdso/gettimeofday.c`).

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Time since boot (`CLOCK_BOOTTIME`). It never steps back and includes suspended time, so sessions
/// age while a laptop sleeps.
pub fn monotonic() -> Duration {
    read(ClockId::CLOCK_BOOTTIME)
}

/// Time since the Unix epoch (`CLOCK_REALTIME`). It may step in either direction: for handshake
/// timestamps (TAI64N) and for people, never for intervals.
pub fn wall() -> Duration {
    read(ClockId::CLOCK_REALTIME)
}

fn read(clock: ClockId) -> Duration {
    // clock_gettime(2) fails only for an unknown clock or a bad pointer, and every supported kernel
    // has both clocks.
    let now = clock_gettime(clock).expect("CLOCK_BOOTTIME and CLOCK_REALTIME exist");
    Duration::from(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monotonic_does_not_step_back() {
        let mut last = monotonic();
        for _ in 0..10_000 {
            let now = monotonic();
            assert!(now >= last);
            last = now;
        }
    }

    #[test]
    fn monotonic_counts_time_since_boot_including_sleep() {
        // First field of /proc/uptime: seconds on CLOCK_BOOTTIME (fs/proc/uptime.c).
        let text = std::fs::read_to_string("/proc/uptime").expect("/proc/uptime");
        let uptime: f64 = text
            .split(' ')
            .next()
            .expect("a field")
            .parse()
            .expect("a number");
        assert!((monotonic().as_secs_f64() - uptime).abs() < 1.0);
    }

    #[test]
    fn wall_agrees_with_the_standard_library() {
        let ours = wall();
        let theirs = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .expect("after 1970");
        assert!(theirs.abs_diff(ours) < Duration::from_secs(1));
    }
}
