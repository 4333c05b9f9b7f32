//! Latency: ICMP echo (RFC 792, RFC 4443), answered by the far kernel, so that only the path is
//! measured.
//!
//! Times are from program to program, on the monotonic clock, as `ping -U` prints them: some
//! microseconds above the time that `ping` takes from the kernel's receive stamp.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use seikan_ui::Interrupt;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};

use crate::Ends;
use crate::error::{Doing, LoadError, Result};
use crate::stats::{mean, percentile};

/// Payload bytes of an echo request: ping's default.
const PAYLOAD: usize = 56;
/// Bytes of the header: type, code, checksum, identifier, sequence number.
const HEADER: usize = 8;
/// Interval at which a waiting probe checks its deadline.
const IO_TIMEOUT: Duration = Duration::from_millis(100);

/// Maximum time until a connection through a forwarded port arrives; then another one is opened.
const CONNECTION_PATIENCE: Duration = Duration::from_secs(5);
/// Interval between requests below which the prober does not sleep.
const AWAKE_BELOW: Duration = Duration::from_millis(10);

/// Options of a latency measurement.
#[derive(Clone, Copy, Debug)]
pub struct LatencyOptions {
    /// Number of echo requests.
    pub count: u32,
    /// Time from one request to the next; a late answer delays the next request.
    pub interval: Duration,
    /// An answer that takes longer is lost.
    pub timeout: Duration,
    /// No request is sent after this time, whatever the count.
    pub within: Option<Duration>,
}

impl Default for LatencyOptions {
    fn default() -> Self {
        Self {
            count: 200,
            interval: Duration::from_millis(2),
            timeout: Duration::from_secs(1),
            within: None,
        }
    }
}

/// Round-trip times in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyReport {
    /// Requests sent.
    pub sent: u32,
    /// Answers received in time.
    pub received: u32,
    /// Shortest round trip in microseconds.
    pub min_us: f64,
    /// Mean round trip in microseconds.
    pub mean_us: f64,
    /// Median round trip in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the round trips in microseconds.
    pub p99_us: f64,
    /// Longest round trip in microseconds.
    pub max_us: f64,
}

impl LatencyReport {
    pub(super) fn of(sent: u32, mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |q| percentile(&times, q).unwrap_or(0.0);
        Self {
            sent,
            received: times.len() as u32,
            min_us: at(0.0),
            mean_us: mean(times.iter().copied()),
            p50_us: at(0.5),
            p99_us: at(0.99),
            max_us: at(1.0),
        }
    }
}

/// Measures round trips from the client to the target, one at a time.
///
/// # Errors
/// [`LoadError::Interrupted`]; no permission for a raw socket (CAP_NET_RAW in the namespace).
pub fn ping(
    ends: &Ends<'_>,
    options: &LatencyOptions,
    interrupt: &Interrupt,
) -> Result<LatencyReport> {
    let echo = Echo::open(ends)?;
    let mut times = Vec::with_capacity(options.count as usize);
    let start = Instant::now();
    let (mut next, mut sent) = (start, 0);
    for sequence in 0..options.count {
        wait_until(next, options.interval, interrupt)?;
        if options.within.is_some_and(|time| start.elapsed() > time) {
            break;
        }
        next = Instant::now() + options.interval;
        sent += 1;
        if let Some(time) = echo.round_trip(sequence as u16, options.timeout, interrupt)? {
            times.push(time.as_secs_f64() * 1e6);
        }
    }
    Ok(LatencyReport::of(sent, times))
}

/// Waits for the time of the next request; awake when requests are close together, as `ping` does,
/// so that the path is measured and not how long this processor takes to wake up.
fn wait_until(time: Instant, interval: Duration, interrupt: &Interrupt) -> Result<()> {
    if interval >= AWAKE_BELOW {
        return Ok(interrupt.sleep_until(time)?);
    }
    while Instant::now() < time {
        interrupt.check()?;
        std::thread::yield_now();
    }
    Ok(())
}

/// Waits until the target answers an echo request, or a connection to a forwarded port arrives.
///
/// # Errors
/// [`LoadError::Timeout`] after `patience`; [`LoadError::Interrupted`]; errors of `alive`, which is
/// called between tries.
pub fn wait_reachable<E: From<LoadError>>(
    ends: &Ends<'_>,
    patience: Duration,
    interrupt: &Interrupt,
    mut alive: impl FnMut() -> std::result::Result<(), E>,
) -> std::result::Result<(), E> {
    let arrival = match ends.forward {
        Some(_) => Arrival::Connection(ends.listen(CONNECTION_PATIENCE, None)?),
        None => Arrival::Echo(Echo::open(ends)?),
    };
    let start = Instant::now();
    for sequence in 0_u16.. {
        alive()?;
        let has_arrived = match &arrival {
            Arrival::Echo(echo) => echo
                .round_trip(sequence, Duration::from_millis(200), interrupt)?
                .is_some(),
            // A program may accept a connection before its own to the server is established, so
            // only the server's end counts.
            Arrival::Connection((listener, to)) => {
                let client = ends.connect(None, *to, CONNECTION_PATIENCE);
                client.is_ok() && listener.accept().is_ok()
            }
        };
        if has_arrived {
            return Ok(());
        }
        if start.elapsed() > patience {
            break;
        }
        interrupt
            .sleep(Duration::from_millis(20))
            .map_err(LoadError::from)?;
    }
    let timeout = LoadError::Timeout {
        event: format!("an answer from {}", ends.target),
        seconds: patience.as_secs_f64(),
    };
    Err(timeout.into())
}

/// Evidence that the target is reachable.
enum Arrival {
    /// An answer to an echo request.
    Echo(Echo),
    /// A connection to this address, accepted by this listener.
    Connection((TcpListener, SocketAddr)),
}

/// A raw ICMP socket and the identifier of this run.
struct Echo {
    socket: Socket,
    target: IpAddr,
    id: u16,
}

impl Echo {
    fn open(ends: &Ends<'_>) -> Result<Self> {
        if ends.forward.is_some() {
            let only = "cannot ping through a forwarded port: it carries TCP only";
            return Err(LoadError::Usage(only.to_owned()));
        }
        let (domain, protocol) = match ends.target {
            IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
            IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
        };
        let socket = ends
            .client
            .run(|| Socket::new(domain, Type::RAW, Some(protocol)))?
            .doing("open a raw ICMP socket (needs CAP_NET_RAW)")?;
        socket
            .set_read_timeout(Some(IO_TIMEOUT))
            .doing("set a read time-out")?;
        // Threads of one process may probe at the same time: the address of the socket's number
        // distinguishes them.
        let id = std::process::id() as u16
            ^ (std::os::fd::AsRawFd::as_raw_fd(&socket) as u16).rotate_left(8);
        Ok(Self {
            socket,
            target: ends.target,
            id,
        })
    }

    /// Sends one request and waits for its answer; `None` when it does not come in time.
    fn round_trip(
        &self,
        sequence: u16,
        timeout: Duration,
        interrupt: &Interrupt,
    ) -> Result<Option<Duration>> {
        let request = request(self.target, self.id, sequence);
        let start = Instant::now();
        match self
            .socket
            .send_to(&request, &SocketAddr::new(self.target, 0).into())
        {
            Ok(_) => {}
            // No route, an interface that is down, or a full queue counts as no answer, because a
            // tunnel may just be starting.
            Err(e) if e.kind() == ErrorKind::PermissionDenied => {
                return Err(LoadError::io(format!("ping {}", self.target))(e));
            }
            Err(_) => return Ok(None),
        }
        let mut buf = [0_u8; 2048];
        while start.elapsed() < timeout {
            interrupt.check()?;
            // An error is a timeout, or the path's own answer (unreachable). Neither is the reply,
            // so keep waiting.
            if let Ok(n) = (&self.socket).read(&mut buf) {
                let elapsed = start.elapsed();
                if is_reply(self.target, &buf[..n], self.id, sequence) {
                    return Ok(Some(elapsed));
                }
            }
        }
        Ok(None)
    }
}

/// Builds an echo request.
fn request(target: IpAddr, id: u16, sequence: u16) -> [u8; HEADER + PAYLOAD] {
    let mut message = [0x55; HEADER + PAYLOAD];
    message[0] = if target.is_ipv4() { 8 } else { 128 };
    message[1..4].fill(0);
    message[4..6].copy_from_slice(&id.to_be_bytes());
    message[6..8].copy_from_slice(&sequence.to_be_bytes());
    // The kernel fills in ICMPv6's checksum (RFC 3542, section 3.1), not ICMPv4's.
    if target.is_ipv4() {
        let sum = checksum(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    message
}

/// The internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes
        .as_chunks::<2>()
        .0
        .iter()
        .map(|pair| u32::from(u16::from_be_bytes(*pair)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Whether `packet` is the answer: raw IPv4 sockets deliver the IP header too, IPv6 ones do not.
fn is_reply(target: IpAddr, packet: &[u8], id: u16, sequence: u16) -> bool {
    let (message, kind) = match target {
        IpAddr::V4(_) => (
            packet.get(usize::from(packet.first().map_or(0, |b| b & 15)) * 4..),
            0,
        ),
        IpAddr::V6(_) => (Some(packet), 129),
    };
    let Some([k, 0, _, _, id0, id1, seq0, seq1, ..]) = message else {
        return false;
    };
    *k == kind && [*id0, *id1] == id.to_be_bytes() && [*seq0, *seq1] == sequence.to_be_bytes()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

    /// RFC 1071, section 3: 0001 f203 f4f5 f6f7 add up to ddf2.
    #[test]
    fn checksum_of_rfc_1071() {
        assert_eq!(
            checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]),
            !0xddf2
        );
    }

    #[test]
    fn a_request_sums_to_zero() {
        assert_eq!(checksum(&request(V4, 0x1234, 7)), 0);
    }

    #[test]
    fn only_the_reply_with_id_and_sequence_counts() {
        let mut v4 = vec![0x46; 24];
        v4.extend([0, 0, 0, 0, 0x12, 0x34, 0, 7]);
        assert!(is_reply(V4, &v4, 0x1234, 7));
        assert!(!is_reply(V4, &v4, 0x1234, 8));
        assert!(!is_reply(V4, &v4, 0x1235, 7));
        assert!(!is_reply(V4, &v4[..28], 0x1234, 7), "cut off");
        assert!(!is_reply(V4, &[], 0x1234, 7));
        assert!(is_reply(V6, &[129, 0, 0, 0, 0x12, 0x34, 0, 7], 0x1234, 7));
        assert!(
            !is_reply(V6, &[128, 0, 0, 0, 0x12, 0x34, 0, 7], 0x1234, 7),
            "a request"
        );
    }

    #[test]
    fn times_become_percentiles() {
        let r = LatencyReport::of(5, vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!(
            (r.sent, r.received, r.min_us, r.p50_us, r.p99_us, r.max_us),
            (5, 4, 1.0, 2.0, 4.0, 4.0)
        );
        assert_eq!(r.mean_us, 2.5);
        assert_eq!(LatencyReport::of(3, vec![]).received, 0);
    }
}
