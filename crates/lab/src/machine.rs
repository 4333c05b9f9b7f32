//! The machine a measurement ran on: CPU time used, kernel counters, versions for the report.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use seikan_sys::process::machine_time;

use crate::error::{LabError, Result};

/// Busy CPU time of the whole machine since boot: everything but idle and waiting for a disk.
#[derive(Clone, Copy, Debug)]
pub struct CpuClock {
    seconds: f64,
}

impl CpuClock {
    /// Reads the clock; its resolution is a tick, usually 10 ms.
    ///
    /// # Errors
    /// When `/proc/stat` cannot be read.
    pub fn now() -> Result<Self> {
        let time = machine_time().map_err(|e| LabError::Setup(e.to_string()))?;
        Ok(Self {
            seconds: time.busy.as_secs_f64(),
        })
    }

    /// CPU seconds used since `earlier`, over all cores.
    #[must_use]
    pub fn since(self, earlier: Self) -> f64 {
        (self.seconds - earlier.seconds).max(0.0)
    }
}

/// TCP segments sent again in the calling thread's network namespace (`RetransSegs`, RFC 4022).
#[must_use]
pub fn retransmitted_segments() -> u64 {
    let snmp = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap_or_default();
    named_value(&snmp, "Tcp:", "RetransSegs").unwrap_or(0)
}

/// Datagrams dropped at a full receive buffer in the calling thread's network namespace (`RcvbufErrors`, RFC 4113).
#[must_use]
pub fn udp_receive_buffer_errors() -> u64 {
    ["snmp", "snmp6"]
        .iter()
        .map(|file| {
            std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default()
        })
        .map(|text| {
            named_value(&text, "Udp:", "RcvbufErrors").unwrap_or(0)
                + listed_value(&text, "Udp6RcvbufErrors").unwrap_or(0)
        })
        .sum()
}

/// `/proc/net/snmp`: a line of names, then a line of values, both with the same prefix.
fn named_value(text: &str, prefix: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|l| l.strip_prefix(prefix));
    let index = lines.next()?.split_whitespace().position(|n| n == name)?;
    lines.next()?.split_whitespace().nth(index)?.parse().ok()
}

/// `/proc/net/snmp6`: a name and its value per line.
fn listed_value(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|l| l.strip_prefix(name))?
        .trim()
        .parse()
        .ok()
}

/// What the report says about the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Kernel release, as `uname -r`.
    pub kernel: String,
    /// Architecture, as `uname -m`.
    pub arch: String,
    /// CPU model name.
    pub cpu: String,
    /// CPUs this process may use.
    pub cores: usize,
    /// Memory in bytes.
    pub memory: u64,
    /// Instruction sets that matter to the ciphers.
    pub features: Vec<String>,
}

impl Machine {
    /// Looks at this machine; what cannot be read stays empty.
    #[must_use]
    pub fn this() -> Self {
        let uname = nix::sys::utsname::uname().ok();
        let text = |s: &std::ffi::OsStr| s.to_string_lossy().into_owned();
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let flags: Vec<&str> = field(&cpuinfo, "flags")
            .or_else(|| field(&cpuinfo, "Features"))
            .unwrap_or_default()
            .split(' ')
            .collect();
        Self {
            kernel: uname
                .as_ref()
                .map(|u| text(u.release()))
                .unwrap_or_default(),
            arch: uname
                .as_ref()
                .map(|u| text(u.machine()))
                .unwrap_or_default(),
            cpu: field(&cpuinfo, "model name")
                .unwrap_or("unknown CPU")
                .to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory: field(&meminfo, "MemTotal")
                .and_then(|m| m.strip_suffix(" kB")?.parse::<u64>().ok())
                .map_or(0, |kib| kib * 1024),
            features: [
                "aes",
                "pclmulqdq",
                "avx2",
                "avx512f",
                "vaes",
                "vpclmulqdq",
                "pmull",
            ]
            .into_iter()
            .filter(|f| flags.contains(f))
            .map(str::to_owned)
            .collect(),
        }
    }
}

/// The value of the first `name : value` line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|l| {
        let (key, value) = l.split_once(':')?;
        (key.trim() == name).then_some(value.trim())
    })
}

/// Today's date and time in UTC, `YYYY-MM-DD HH:MM`.
#[must_use]
pub fn utc_now() -> String {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    utc(since.as_secs())
}

/// Seconds since 1970 as date and time, `YYYY-MM-DD HH:MM` (proleptic Gregorian; the day count of Hinnant,
/// "chrono-compatible low-level date algorithms").
#[must_use]
pub fn utc(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}",
        second / 3600,
        second / 60 % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_goes_up_while_this_thread_spins() {
        let before = CpuClock::now().expect("clock");
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_millis(100) {
            std::hint::spin_loop();
        }
        assert!(CpuClock::now().expect("clock").since(before) >= 0.05);
    }

    #[test]
    fn values_are_found_by_name() {
        let snmp = "Ip: A B\nIp: 1 2\nTcp: X RetransSegs Y\nTcp: 7 42 9\n";
        assert_eq!(named_value(snmp, "Tcp:", "RetransSegs"), Some(42));
        assert_eq!(named_value(snmp, "Udp:", "RcvbufErrors"), None);
        assert_eq!(
            listed_value("Udp6RcvbufErrors   \t12\n", "Udp6RcvbufErrors"),
            Some(12)
        );
    }

    #[test]
    fn dates() {
        assert_eq!(utc(0), "1970-01-01 00:00");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00");
        assert_eq!(utc(4_102_444_740), "2099-12-31 23:59");
    }
}
