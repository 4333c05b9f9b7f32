//! The two clocks: one that only goes forward and counts sleep, one that people read.
//!
//! Both are answered by the vDSO, without entering the kernel (`lib/vdso/gettimeofday.c`).

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Time since boot on `CLOCK_BOOTTIME`: never steps back, and goes on while the machine sleeps, so
/// that a session that aged in a closed laptop is seen as old on waking.
pub fn monotonic() -> Duration {
    read(ClockId::CLOCK_BOOTTIME)
}

/// Time since the Unix epoch on `CLOCK_REALTIME`: may step in either direction. For handshake
/// stamps (TAI64N) and for people; never for intervals.
pub fn wall() -> Duration {
    read(ClockId::CLOCK_REALTIME)
}

fn read(clock: ClockId) -> Duration {
    // clock_gettime(2) fails only for an unknown clock or a bad pointer; both clocks are older than
    // any kernel this builds for.
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
