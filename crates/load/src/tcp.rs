//! TCP bulk: N streams in either direction or in both, for a time.
//!
//! Connect all streams; start a writer and a reader thread for each; let the warm-up pass (slow
//! start is not the path's speed); sample every reader's byte count per interval; stop the writers;
//! let the readers drain. Every stream begins with its seeded [`Pattern`], which is always checked;
//! with `verify` all of it is.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use seikan_sys::tcp::TcpInfo;
use seikan_ui::Interrupt;
use serde::{Deserialize, Serialize};
use socket2::SockRef;

use crate::Pattern;
use crate::counters::{CpuClock, retransmitted_segments};
use crate::error::{Doing, LoadError, Result};
use crate::stats::{Spread, mean, ratio};
use crate::{Ends, gbit_per_second, is_timeout, join, time_outs};

/// Bytes per write and read: iperf3's default for TCP.
const BLOCK: usize = 128 * 1024;
/// Number of bytes at the start of a stream that are checked if `verify` is off.
const CHECKED_HEAD: usize = 4096;
/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which readers wait for the remaining data after the writers have stopped.
const DRAIN: Duration = Duration::from_millis(300);
/// Time for which readers wait with verification: data in flight can be megabytes per stream on a
/// slow path.
const DRAIN_VERIFY: Duration = Duration::from_secs(10);
/// Maximum number of streams. Each takes two threads.
const MAX_STREAMS: usize = 1024;

/// Direction of the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// Client to server.
    #[default]
    Forward,
    /// Server to client.
    Reverse,
    /// Both at once, each with the full number of streams.
    Both,
}

/// Options of a bulk transfer.
#[derive(Clone, Copy, Debug)]
pub struct TcpOptions {
    /// Streams per direction, 1 to 1024.
    pub streams: usize,
    /// Direction of the streams.
    pub direction: Direction,
    /// Time before measuring starts.
    pub warmup: Duration,
    /// Measured time.
    pub duration: Duration,
    /// Length of an interval in [`TcpReport::intervals`].
    pub interval: Duration,
    /// Check every byte, not only the head of each stream. Costs CPU at both ends.
    pub verify: bool,
    /// Seed of the streams' content.
    pub seed: u64,
    /// Buffers of the sender and of the receiver (`SO_SNDBUF`, `SO_RCVBUF`), in bytes; sized by the
    /// kernel if `None`.
    pub buffers: Option<[usize; 2]>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            streams: 1,
            direction: Direction::Forward,
            warmup: Duration::from_secs(1),
            duration: Duration::from_secs(4),
            interval: Duration::from_millis(500),
            verify: false,
            seed: 0,
            buffers: None,
        }
    }
}

/// Throughput of one interval.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Interval {
    /// Seconds since measuring began.
    pub start: f64,
    /// Length in seconds.
    pub seconds: f64,
    /// Received, all streams together, in Gbit/s.
    pub gbit_per_second: f64,
}

/// Result of a TCP bulk transfer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TcpReport {
    /// Streams per direction.
    pub streams: usize,
    /// Direction of the bytes.
    pub direction: Direction,
    /// Measured time in seconds.
    pub seconds: f64,
    /// Received within it, all directions together, in Gbit/s.
    pub gbit_per_second: f64,
    /// Share of client to server, in Gbit/s.
    pub forward_gbit_per_second: f64,
    /// Share of server to client, in Gbit/s.
    pub reverse_gbit_per_second: f64,
    /// Busy CPU seconds of the whole machine per Gbit moved.
    pub cpu_seconds_per_gbit: Option<f64>,
    /// Segments sent again by either host's kernel, warm-up included.
    pub retransmitted_segments: u64,
    /// Share of retransmitted segments among all segments with data, warm-up included; `None` if
    /// the kernel does not report the size of a segment.
    #[serde(default)]
    pub retransmitted_share: Option<f64>,
    /// The first stream's congestion window at the end, in bytes; `None` if the kernel does not
    /// report it.
    #[serde(default)]
    pub congestion_window: Option<u64>,
    /// Smoothed round-trip time as the senders' kernels have it, in microseconds: the mean of the
    /// streams, the median of all intervals; `None` if the kernel does not report it.
    #[serde(default)]
    pub round_trip_us: Option<f64>,
    /// Bytes received per stream within the measured time; forward streams first.
    pub stream_bytes: Vec<u64>,
    /// Bytes compared with the pattern and found right, warm-up included.
    pub verified_bytes: u64,
    /// Rates over time.
    pub intervals: Vec<Interval>,
}

/// One connection, its content and its counters. `tx` writes what `rx` reads.
struct Stream {
    number: usize,
    reverse: bool,
    pattern: Pattern,
    tx: TcpStream,
    rx: TcpStream,
    sent: AtomicU64,
    received: AtomicU64,
    verified: AtomicU64,
}

/// Runs the load and reports what arrived.
///
/// # Errors
/// [`LoadError::Interrupted`]; connections that fail; [`LoadError::Corrupt`] and [`LoadError::Truncated`].
pub fn tcp_bulk(ends: &Ends<'_>, options: &TcpOptions, interrupt: &Interrupt) -> Result<TcpReport> {
    if options.streams == 0 || options.streams > MAX_STREAMS {
        return Err(LoadError::Usage(format!(
            "cannot open {} TCP streams: use 1 to {MAX_STREAMS}",
            options.streams
        )));
    }
    let again = retransmissions(ends)?;
    let streams = connect_all(ends, options, interrupt)?;
    let stop = Interrupt::new();
    let (samples, cpu, info, outcome) = std::thread::scope(|scope| {
        let stop = &stop;
        let mut workers = Vec::with_capacity(streams.len() * 2);
        for stream in &streams {
            workers.push(scope.spawn(move || send_stream(stream, options.verify, stop)));
            workers.push(scope.spawn(move || receive_stream(stream, options.verify, stop)));
        }
        let measured = measure(&streams, options, interrupt);
        let info = TcpInfo::of(&streams[0].tx).ok();
        stop.raise();
        let mut outcome = Ok(());
        for worker in workers {
            outcome = outcome.and(join(worker).and_then(|r| r));
        }
        measured.map(|(samples, cpu)| (samples, cpu, info, outcome))
    })?;
    outcome?;
    let mut report = summarise(&streams, options, &samples, cpu);
    report.retransmitted_segments = retransmissions(ends)?.saturating_sub(again);
    report.congestion_window =
        info.map(|info| u64::from(info.congestion_window) * u64::from(info.segment));
    report.retransmitted_share = info.and_then(|info| {
        let bytes = sum(&streams, |stream| &stream.received);
        let again = report.retransmitted_segments as f64;
        ratio(again, bytes as f64 / f64::from(info.segment) + again)
    });
    Ok(report)
}

fn sum(streams: &[Stream], of: fn(&Stream) -> &AtomicU64) -> u64 {
    let counts = streams.iter().map(of);
    counts.map(|count| count.load(Ordering::Relaxed)).sum()
}

fn retransmissions(ends: &Ends<'_>) -> Result<u64> {
    Ok(ends.client.run(retransmitted_segments)? + ends.server.run(retransmitted_segments)?)
}

/// Opens every connection, one after the other, so that the n-th accepted is the n-th connected.
fn connect_all(
    ends: &Ends<'_>,
    options: &TcpOptions,
    interrupt: &Interrupt,
) -> Result<Vec<Stream>> {
    let receive = options.buffers.map(|[_, receive]| receive);
    let (listener, target) = ends.listen(CONNECT_TIMEOUT, receive)?;
    let reverse: &[bool] = match options.direction {
        Direction::Forward => &[false],
        Direction::Reverse => &[true],
        Direction::Both => &[false, true],
    };
    let mut streams = Vec::new();
    for &reverse in reverse {
        for number in 0..options.streams {
            interrupt.check()?;
            let source = ends.sources.iter().cycle().nth(number).copied();
            let client = ends.connect(source, target, CONNECT_TIMEOUT)?;
            let (server, _) = listener
                .accept()
                .doing(format!("accept a connection on {target}"))?;
            let number = streams.len();
            let (tx, rx) = if reverse {
                (server, client)
            } else {
                (client, server)
            };
            if let Some([send, receive]) = options.buffers {
                SockRef::from(&tx)
                    .set_send_buffer_size(send)
                    .and_then(|()| SockRef::from(&rx).set_recv_buffer_size(receive))
                    .doing("set the buffers of a connection")?;
            }
            time_outs(&tx)?;
            time_outs(&rx)?;
            streams.push(Stream {
                number,
                reverse,
                pattern: Pattern::new(options.seed.wrapping_add(number as u64)),
                tx,
                rx,
                sent: AtomicU64::new(0),
                received: AtomicU64::new(0),
                verified: AtomicU64::new(0),
            });
        }
    }
    Ok(streams)
}

/// Writes until `stop` is set, then ends the stream.
fn send_stream(stream: &Stream, verify: bool, stop: &Interrupt) -> Result<()> {
    let mut block = vec![0_u8; BLOCK];
    stream.pattern.fill(0, &mut block);
    let mut sent = 0_u64;
    let mut from = 0;
    while !stop.is_raised() {
        match (&stream.tx).write(&block[from..]) {
            Ok(n) => {
                sent += n as u64;
                from += n;
            }
            Err(e) if is_timeout(&e) => {}
            // The far end has closed the connection, and reports the reason itself.
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                break;
            }
            Err(e) => {
                return Err(LoadError::io(format!("write to stream {}", stream.number))(
                    e,
                ));
            }
        }
        if from == BLOCK {
            from = 0;
            if verify {
                stream.pattern.fill(sent, &mut block);
            }
        }
    }
    stream.sent.store(sent, Ordering::Release);
    // Fails only when the connection is gone already, which the reader reports.
    let _ = stream.tx.shutdown(Shutdown::Write);
    Ok(())
}

/// Reads to the end of the stream, or until nothing comes any more after the stop.
fn receive_stream(stream: &Stream, verify: bool, stop: &Interrupt) -> Result<()> {
    let mut block = vec![0_u8; BLOCK];
    let patience = if verify { DRAIN_VERIFY } else { DRAIN };
    let mut drain: Option<Instant> = None;
    let mut check = Check {
        stream: stream.number,
        pattern: stream.pattern,
        whole: verify,
        received: 0,
        verified: 0,
    };
    let ended = loop {
        match (&stream.rx).read(&mut block) {
            Ok(0) => break true,
            Ok(n) => {
                if let Err(corrupt) = check.take(&block[..n]) {
                    // Unblocks the writer.
                    let _ = stream.rx.shutdown(Shutdown::Both);
                    return Err(corrupt);
                }
                stream.received.store(check.received, Ordering::Relaxed);
            }
            Err(e) if is_timeout(&e) => {}
            Err(e) => {
                return Err(LoadError::io(format!("read from stream {}", stream.number))(e));
            }
        }
        if stop.is_raised()
            && *drain.get_or_insert_with(|| Instant::now() + patience) < Instant::now()
        {
            break false;
        }
    };
    stream.verified.store(check.verified, Ordering::Relaxed);
    // The writer stored its count before it ended the stream.
    let (sent, received) = (stream.sent.load(Ordering::Acquire), check.received);
    if ended && sent != received {
        return Err(LoadError::Truncated {
            stream: stream.number,
            sent,
            received,
        });
    }
    Ok(())
}

/// Reads `source` to its end and compares every byte with `pattern`; returns how many there were.
///
/// # Errors
/// [`LoadError::Corrupt`] at the first byte that differs, naming it as one of `stream`; an unreadable source.
pub fn verify_stream(source: &mut impl Read, stream: usize, pattern: Pattern) -> Result<u64> {
    let mut block = vec![0_u8; BLOCK];
    let mut check = Check {
        stream,
        pattern,
        whole: true,
        received: 0,
        verified: 0,
    };
    loop {
        match source
            .read(&mut block)
            .doing(format!("read from stream {stream}"))?
        {
            0 => return Ok(check.received),
            n => check.take(&block[..n])?,
        }
    }
}

/// Compares a stream with its pattern as it comes in: all of it, or the head only.
struct Check {
    stream: usize,
    pattern: Pattern,
    whole: bool,
    received: u64,
    verified: u64,
}

impl Check {
    fn take(&mut self, bytes: &[u8]) -> Result<()> {
        let head =
            CHECKED_HEAD.saturating_sub(usize::try_from(self.received).unwrap_or(usize::MAX));
        let length = if self.whole {
            bytes.len()
        } else {
            bytes.len().min(head)
        };
        if let Some(at) = self.pattern.first_mismatch(self.received, &bytes[..length]) {
            return Err(LoadError::Corrupt {
                stream: self.stream,
                offset: self.received + at as u64,
            });
        }
        self.verified += length as u64;
        self.received += bytes.len() as u64;
        Ok(())
    }
}

/// Byte counts of all streams at one time, and the mean of their round-trip times in microseconds.
struct Sample {
    at: Instant,
    received: Vec<u64>,
    round_trip_us: Option<f64>,
}

impl Sample {
    fn take(streams: &[Stream]) -> Self {
        let received = streams
            .iter()
            .map(|s| s.received.load(Ordering::Relaxed))
            .collect();
        let round_trips: Option<Vec<f64>> = streams
            .iter()
            .map(|s| Some(TcpInfo::of(&s.tx).ok()?.round_trip.as_secs_f64() * 1e6))
            .collect();
        Self {
            at: Instant::now(),
            received,
            round_trip_us: round_trips.map(mean),
        }
    }

    fn total(&self) -> u64 {
        self.received.iter().sum()
    }
}

/// Waits out the warm-up, then samples at every interval; also the CPU seconds in between.
fn measure(
    streams: &[Stream],
    options: &TcpOptions,
    interrupt: &Interrupt,
) -> Result<(Vec<Sample>, f64)> {
    interrupt.sleep(options.warmup)?;
    let cpu = CpuClock::now()?;
    let mut samples = vec![Sample::take(streams)];
    let end = samples[0].at + options.duration;
    loop {
        let next = samples[samples.len() - 1].at + options.interval;
        // A short rest at the end is part of the last interval.
        let next = if next + options.interval / 2 > end {
            end
        } else {
            next
        };
        interrupt.sleep_until(next)?;
        samples.push(Sample::take(streams));
        if next >= end {
            return Ok((samples, CpuClock::now()?.since(cpu)));
        }
    }
}

fn summarise(streams: &[Stream], options: &TcpOptions, samples: &[Sample], cpu: f64) -> TcpReport {
    let (first, last) = (&samples[0], &samples[samples.len() - 1]);
    let seconds = (last.at - first.at).as_secs_f64();
    let both = last.received.iter().zip(&first.received);
    let stream_bytes: Vec<u64> = both.map(|(last, first)| last - first).collect();
    let bytes = |reverse: bool| -> u64 {
        let streams = streams.iter().zip(&stream_bytes);
        let those = streams.filter(|(stream, _)| stream.reverse == reverse);
        those.map(|(_, bytes)| bytes).sum()
    };
    let (forward, reverse) = (bytes(false), bytes(true));
    let gbit = (forward + reverse) as f64 * 8.0 / 1e9;
    let intervals = samples
        .windows(2)
        .map(|pair| {
            let seconds = (pair[1].at - pair[0].at).as_secs_f64();
            Interval {
                start: (pair[0].at - first.at).as_secs_f64(),
                seconds,
                gbit_per_second: gbit_per_second(pair[1].total() - pair[0].total(), seconds),
            }
        })
        .collect();
    TcpReport {
        streams: options.streams,
        direction: options.direction,
        seconds,
        gbit_per_second: gbit_per_second(forward + reverse, seconds),
        forward_gbit_per_second: gbit_per_second(forward, seconds),
        reverse_gbit_per_second: gbit_per_second(reverse, seconds),
        cpu_seconds_per_gbit: (gbit > 0.0).then(|| cpu / gbit),
        retransmitted_segments: 0,
        retransmitted_share: None,
        congestion_window: None,
        round_trip_us: round_trip(&samples[1..]),
        stream_bytes,
        verified_bytes: sum(streams, |stream| &stream.verified),
        intervals,
    }
}

/// The median of the samples' round-trip times.
fn round_trip(samples: &[Sample]) -> Option<f64> {
    let times: Vec<f64> = samples.iter().filter_map(|s| s.round_trip_us).collect();
    Spread::of(&times).map(|spread| spread.median)
}
