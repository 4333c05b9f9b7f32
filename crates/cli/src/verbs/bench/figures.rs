//! Results of a bench, as `--json` prints them.

use std::fmt::Display;
use std::net::IpAddr;

use seikan_diagnose::Verdict;
use seikan_load::LatencyReport;
use serde::Serialize;

use super::control::Counts;
use super::near::Measured;

/// The paths between two hosts.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// Version of this format.
    pub version: u32,
    /// The host as given.
    pub host: String,
    /// Name of this host.
    pub here: String,
    /// Name of the far host, as it calls itself.
    pub far: String,
    /// Duration of each measurement of throughput, seconds.
    pub seconds: u32,
    /// Port of the load at the far end, TCP and UDP.
    pub port: u16,
    /// Outside of any tunnel.
    pub raw: PathReport,
    /// Through the tunnel.
    pub tunnel: PathReport,
    /// Through temporary interfaces of the kernel's WireGuard.
    pub kernel_wireguard: PathReport,
    /// Verdict of the doctors of both ends about the tunnel, in the direction that loses more to
    /// the raw path; null if no tunnel was measured.
    pub doctor: Option<Diagnosis>,
}

/// A verdict of the doctor.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Diagnosis {
    /// Whether the load came from the far end.
    pub reverse: bool,
    /// The verdict, as `seikan doctor --json` prints it.
    pub verdict: Verdict,
}

/// A path.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PathReport {
    /// Address of the far end on this path; null if there is none.
    pub address: Option<IpAddr>,
    /// Interface of the tunnel on this host; null if the path is no tunnel.
    pub interface: Option<String>,
    /// Why the path was not measured; null if it was.
    pub unavailable: Option<String>,
    /// The measurements; null without them.
    pub figures: Option<Figures>,
}

/// Measurements of a path.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Figures {
    /// Round trips without load.
    pub idle: RoundTrips,
    /// Load to the far end.
    pub to_far: Direction,
    /// Load from the far end.
    pub from_far: Direction,
}

/// Measurements of a direction.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Direction {
    /// Received over one TCP connection, bits per second.
    pub tcp_bits_per_second: f64,
    /// Round trips meanwhile.
    pub round_trips: RoundTrips,
    /// Processor time of this host meanwhile.
    pub cpu_here: Cpu,
    /// Processor time of the far host meanwhile.
    pub cpu_far: Cpu,
    /// Datagrams.
    pub udp: Udp,
}

/// Round trips of small datagrams, from program to program.
#[derive(Clone, Copy, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RoundTrips {
    /// Requests.
    pub sent: u32,
    /// Requests without an answer within a second.
    pub lost: u32,
    /// Median, microseconds; null without an answer.
    pub median_us: Option<f64>,
    /// 99 of 100 are at most this, microseconds; null without an answer.
    pub p99_us: Option<f64>,
}

/// Processor time for a gigabit, seconds.
#[derive(Clone, Copy, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Cpu {
    /// Processor time of the whole host, including the ends of the load and all other programs;
    /// null if nothing arrived.
    pub host: Option<f64>,
    /// Processor time of the tunnel's process; null without one.
    pub tunnel: Option<f64>,
}

/// Datagrams of 1,200 bytes, payload only.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Udp {
    /// Rate received while as many datagrams as possible were sent, in bits per second.
    pub most_bits_per_second: f64,
    /// Received while 80 % of the highest rate was sent, bits per second.
    pub steady_bits_per_second: f64,
    /// Share of those datagrams that were lost, 0 to 1; null if none was sent.
    pub loss: Option<f64>,
}

impl PathReport {
    /// A path that was not measured, for this reason.
    pub fn unavailable(reason: impl Display) -> Self {
        PathReport {
            unavailable: Some(format!("{reason:#}")),
            ..PathReport::default()
        }
    }
}

impl Figures {
    /// The measurements of a direction.
    pub fn direction(&self, reverse: bool) -> &Direction {
        if reverse {
            &self.from_far
        } else {
            &self.to_far
        }
    }
}

impl From<LatencyReport> for RoundTrips {
    fn from(report: LatencyReport) -> Self {
        let known = |us| (report.received > 0).then_some(us);
        RoundTrips {
            sent: report.sent,
            lost: report.sent.saturating_sub(report.received),
            median_us: known(report.p50_us),
            p99_us: known(report.p99_us),
        }
    }
}

impl Direction {
    /// The measurements of a TCP connection and of datagrams.
    pub fn of(tcp: &Measured, reverse: bool, udp: Udp) -> Self {
        let rate = bits_per_second(tcp, reverse);
        let cpu = |counts: &Counts| {
            let gigabits = rate * counts.seconds / 1e9;
            let each = |seconds: f64| (gigabits > 0.0).then(|| seconds / gigabits);
            Cpu {
                host: each(counts.host_cpu),
                tunnel: counts.tunnel_cpu.and_then(each),
            }
        };
        Direction {
            tcp_bits_per_second: rate,
            round_trips: tcp.round_trips.into(),
            cpu_here: cpu(&tcp.here),
            cpu_far: cpu(&tcp.there),
            udp,
        }
    }
}

impl Udp {
    /// The measurements of a steady flow. `most`: highest rate, bits per second.
    pub fn of(most: f64, steady: &Measured, reverse: bool) -> Self {
        let (sent, received) = if reverse {
            (steady.there.datagrams, steady.here.datagrams)
        } else {
            (steady.here.datagrams, steady.there.datagrams)
        };
        let lost = sent.saturating_sub(received);
        Udp {
            most_bits_per_second: most,
            steady_bits_per_second: bits_per_second(steady, reverse),
            loss: (sent > 0).then(|| lost as f64 / sent as f64),
        }
    }
}

/// Returns the rate at the receiving end.
pub fn bits_per_second(measured: &Measured, reverse: bool) -> f64 {
    let counts = if reverse {
        &measured.here
    } else {
        &measured.there
    };
    if counts.seconds > 0.0 {
        counts.bytes as f64 * 8.0 / counts.seconds
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Measured {
        let counts = |bytes, datagrams| Counts {
            seconds: 2.0,
            bytes,
            datagrams,
            host_cpu: 1.0,
            tunnel_cpu: Some(0.5),
        };
        Measured {
            here: counts(0, 1000),
            there: counts(250_000_000, 990),
            round_trips: LatencyReport::default(),
            evidence: None,
        }
    }

    #[test]
    fn rates_are_those_of_the_receiver() {
        // 2 Gbit in two seconds.
        let direction = Direction::of(&measured(), false, Udp::default());
        assert_eq!(direction.tcp_bits_per_second, 1e9);
        assert_eq!(direction.cpu_far.host, Some(0.5));
        assert_eq!(direction.cpu_far.tunnel, Some(0.25));
        assert_eq!(direction.round_trips.median_us, None);
        let reverse = Direction::of(&measured(), true, Udp::default());
        assert_eq!(reverse.tcp_bits_per_second, 0.0);
        assert_eq!(reverse.cpu_here.host, None);
    }

    #[test]
    fn loss_is_counted_from_the_sender_to_the_receiver() {
        let udp = Udp::of(2e9, &measured(), false);
        assert!((udp.loss.expect("sent") - 0.01).abs() < 1e-9);
        assert_eq!(Udp::of(2e9, &measured(), true).loss, Some(0.0));
    }
}
