//! CPU time of the machine and network counters of a namespace, read before and after a measurement.

use seikan_sys::process::machine_time;

use crate::{LoadError, Result};

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
        let time = machine_time().map_err(|e| LoadError::Setup(e.to_string()))?;
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

/// TCP segments that arrived before one that was sent earlier, in the calling thread's network
/// namespace (`TCPOFOQueue`, Documentation/networking/snmp_counter.rst).
#[must_use]
pub fn segments_out_of_order() -> u64 {
    let netstat = std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap_or_default();
    named_value(&netstat, "TcpExt:", "TCPOFOQueue").unwrap_or(0)
}

/// Datagrams dropped at a full receive buffer in the calling thread's network namespace
/// (`RcvbufErrors`, RFC 4113).
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
}
