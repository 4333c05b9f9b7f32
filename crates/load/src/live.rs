//! A load that runs while something else is done, and can be metered meanwhile: an application that
//! offers a rate, or all it can, over a few TCP streams, as UDP, or as many short TCP connections.
//!
//! Connect; start the threads of both ends; call the caller's work with a [`Meter`]; stop; abort
//! the connections, so that nothing lingers in a namespace whose path is broken.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use seikan_ui::{Interrupt, Stop};
use serde::{Deserialize, Serialize};
use socket2::SockRef;

use crate::error::{Doing, LoadError, Result};
use crate::{Ends, IO_TIMEOUT, is_timeout, join, time_outs};

/// Maximum number of bytes of one write or read.
const BLOCK: usize = 128 * 1024;
/// Amount that an application with an offered rate writes at once, as the time it takes at that
/// rate.
const BURST: Duration = Duration::from_millis(1);
/// Smallest write of an application with an offered rate, in bytes.
const SMALLEST_BURST: f64 = 1_448.0;
/// Data not sent within this time is not sent later: the offered rate is never exceeded for longer.
const CREDIT: Duration = Duration::from_millis(50);
/// Maximum time to open the first connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum duration of a short connection; a longer one counts as failed.
const FLOW_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of concurrent short connections.
const FLOW_WORKERS: usize = 8;

/// Kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LiveKind {
    /// TCP streams that last.
    Tcp,
    /// One UDP flow.
    Udp,
    /// A new TCP connection for every request.
    Connections,
}

/// Options of a load, client to server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LiveOptions {
    /// Kind of traffic.
    pub kind: LiveKind,
    /// TCP streams, 1 to 256.
    pub streams: usize,
    /// Rate that the application offers over all streams together, in Mbit/s; `None`: without a
    /// limit.
    pub rate: Option<f64>,
    /// UDP payload, or data of each short connection, in bytes.
    pub size: usize,
    /// Datagrams sent in a burst, at the offered rate; `None`: the amount of a millisecond.
    pub burst: Option<usize>,
    /// Highest rate at which the receiving application reads, all streams together, in Mbit/s.
    pub reader_rate: Option<f64>,
    /// `SO_RCVBUF` of the receiving application, in bytes.
    pub receive_buffer: Option<usize>,
}

impl Default for LiveOptions {
    fn default() -> Self {
        Self {
            kind: LiveKind::Tcp,
            streams: 1,
            rate: None,
            size: 1_400,
            burst: None,
            reader_rate: None,
            receive_buffer: None,
        }
    }
}

/// Counts what the receiving application has read.
#[derive(Debug, Default)]
pub struct Meter {
    received: AtomicU64,
}

impl Meter {
    /// Bytes so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns the rate received within `time` from now, in Mbit/s.
    ///
    /// # Errors
    /// [`LoadError::Interrupted`].
    pub fn rate_over(&self, time: Duration, interrupt: &Interrupt) -> Result<f64> {
        let (bytes, start) = (self.bytes(), Instant::now());
        interrupt.sleep(time)?;
        let seconds = start.elapsed().as_secs_f64();
        Ok((self.bytes() - bytes) as f64 * 8.0 / 1e6 / seconds)
    }

    fn count(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Runs a load while `work` runs, and returns the result of `work`.
///
/// # Errors
/// The error of `work`; connections that cannot be made. A stream that breaks meanwhile is not an
/// error: it carries nothing more.
pub fn live<T, E: From<LoadError>>(
    ends: &Ends<'_>,
    options: &LiveOptions,
    interrupt: &Interrupt,
    work: impl FnOnce(&Meter) -> std::result::Result<T, E>,
) -> std::result::Result<T, E> {
    let (meter, stop) = (Meter::default(), Interrupt::new());
    let mut jobs = match options.kind {
        LiveKind::Tcp => streams(ends, options, interrupt)?,
        LiveKind::Udp => {
            let [rx, tx] = ends.datagrams()?;
            vec![Job::Datagrams { tx, rx }]
        }
        LiveKind::Connections => connections(ends)?,
    };
    let parts = jobs.len() as f64;
    std::thread::scope(|scope| {
        let guard = Stop(&stop);
        let (meter, stop) = (&meter, &stop);
        let mut threads = Vec::new();
        for job in jobs.drain(..) {
            let (tx, rx) = job.threads(ends, options, parts, meter, stop);
            threads.push(scope.spawn(tx));
            threads.push(scope.spawn(rx));
        }
        let outcome = work(meter);
        drop(guard);
        for thread in threads {
            join(thread)?;
        }
        outcome
    })
}

/// The two sockets of a flow; for short connections, the target and the listener.
enum Job {
    Stream { tx: TcpStream, rx: TcpStream },
    Datagrams { tx: UdpSocket, rx: UdpSocket },
    Connections { to: SocketAddr, rx: TcpListener },
}

type Work<'a> = Box<dyn FnOnce() + Send + 'a>;

impl Job {
    /// Returns the work of the sender and of the receiver; `parts` flows share the rates.
    fn threads<'a>(
        self,
        ends: &'a Ends<'_>,
        options: &LiveOptions,
        parts: f64,
        meter: &'a Meter,
        stop: &'a Interrupt,
    ) -> (Work<'a>, Work<'a>) {
        let send_rate = options.rate.map(|rate| rate / parts);
        let read_rate = options.reader_rate.map(|rate| rate / parts);
        let (size, burst) = (options.size, options.burst);
        match self {
            Self::Stream { tx, rx } => (
                Box::new(move || send(&tx, send_rate, stop)),
                Box::new(move || receive(&rx, read_rate, meter, stop)),
            ),
            Self::Datagrams { tx, rx } => (
                Box::new(move || send_datagrams(&tx, size, burst, send_rate, stop)),
                Box::new(move || receive_datagrams(&rx, meter, stop)),
            ),
            Self::Connections { to, rx } => (
                Box::new(move || {
                    // The thread stays in the client's namespace for as long as it opens
                    // connections.
                    let _ = ends
                        .client
                        .run(|| request_again_and_again(to, size, send_rate, stop));
                }),
                Box::new(move || serve(&rx, meter, stop)),
            ),
        }
    }
}

fn streams(ends: &Ends<'_>, options: &LiveOptions, interrupt: &Interrupt) -> Result<Vec<Job>> {
    let (listener, target) = ends.listen(CONNECT_TIMEOUT, options.receive_buffer)?;
    let mut jobs = Vec::new();
    for _ in 0..options.streams {
        interrupt.check()?;
        let tx = ends.connect(None, target, CONNECT_TIMEOUT)?;
        let (rx, _) = listener
            .accept()
            .doing(format!("accept a connection on {target}"))?;
        time_outs(&tx)?;
        time_outs(&rx)?;
        jobs.push(Job::Stream { tx, rx });
    }
    Ok(jobs)
}

fn connections(ends: &Ends<'_>) -> Result<Vec<Job>> {
    let job = |_| {
        let (rx, to) = ends.listen(IO_TIMEOUT, None)?;
        Ok(Job::Connections { to, rx })
    };
    (0..FLOW_WORKERS).map(job).collect()
}

/// Limits bytes to a rate, with a token bucket that holds [`CREDIT`].
#[derive(Debug)]
struct Pace {
    bytes_per_second: f64,
    tokens: f64,
    filled: Instant,
}

impl Pace {
    fn new(mbit: f64) -> Self {
        Self {
            bytes_per_second: mbit * 1e6 / 8.0,
            tokens: 0.0,
            filled: Instant::now(),
        }
    }

    /// Returns the number of bytes to send or read at once.
    fn burst(&self) -> usize {
        let burst = self.bytes_per_second * BURST.as_secs_f64();
        burst.clamp(SMALLEST_BURST, BLOCK as f64) as usize
    }

    /// Refills the bucket, and returns the time to wait until it holds `bytes`; `None` if it does
    /// already.
    fn wait_for(&mut self, bytes: usize, now: Instant) -> Option<Duration> {
        let most = (self.bytes_per_second * CREDIT.as_secs_f64()).max(bytes as f64);
        let since = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + since * self.bytes_per_second).min(most);
        self.filled = now;
        let missing = bytes as f64 - self.tokens;
        // Shorter sleeps are not possible.
        (missing > 0.0).then(|| {
            Duration::from_secs_f64(missing / self.bytes_per_second).max(Duration::from_micros(20))
        })
    }

    fn take(&mut self, bytes: usize) {
        self.tokens -= bytes as f64;
    }
}

/// Waits until the pace allows `bytes`. Returns whether to continue.
fn allowed(pace: &mut Option<Pace>, bytes: usize, stop: &Interrupt) -> bool {
    while !stop.is_raised() {
        let Some(wait) = pace
            .as_mut()
            .and_then(|p| p.wait_for(bytes, Instant::now()))
        else {
            return true;
        };
        std::thread::sleep(wait.min(IO_TIMEOUT));
    }
    false
}

fn took(pace: &mut Option<Pace>, bytes: usize) {
    if let Some(pace) = pace {
        pace.take(bytes);
    }
}

pub(super) fn send(mut tx: &TcpStream, rate: Option<f64>, stop: &Interrupt) {
    let block = vec![0x5a_u8; BLOCK];
    let mut pace = rate.map(Pace::new);
    let burst = pace.as_ref().map_or(BLOCK, Pace::burst);
    while allowed(&mut pace, burst, stop) {
        match tx.write(&block[..burst]) {
            Ok(bytes) => took(&mut pace, bytes),
            Err(e) if is_timeout(&e) => {}
            Err(_) => break,
        }
    }
    abort(tx);
}

pub(super) fn receive(mut rx: &TcpStream, rate: Option<f64>, meter: &Meter, stop: &Interrupt) {
    let mut block = vec![0_u8; BLOCK];
    let mut pace = rate.map(Pace::new);
    let burst = pace.as_ref().map_or(BLOCK, Pace::burst);
    while allowed(&mut pace, burst, stop) {
        match rx.read(&mut block[..burst]) {
            Ok(0) => break,
            Ok(bytes) => {
                took(&mut pace, bytes);
                meter.count(bytes);
            }
            Err(e) if is_timeout(&e) => {}
            Err(_) => break,
        }
    }
    abort(rx);
}

/// Ends a connection without waiting for data in flight, which may never arrive.
fn abort(stream: &TcpStream) {
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
    let _ = stream.shutdown(Shutdown::Both);
}

pub(super) fn send_datagrams(
    tx: &UdpSocket,
    size: usize,
    burst: Option<usize>,
    rate: Option<f64>,
    stop: &Interrupt,
) {
    let block = vec![0x5a_u8; size];
    let mut pace = rate.map(Pace::new);
    let steady = pace.as_ref().map_or(1, |p| p.burst().div_ceil(size));
    let burst = burst.unwrap_or(steady);
    while allowed(&mut pace, burst * size, stop) {
        for _ in 0..burst {
            // A datagram that the kernel refuses counts as lost on the path.
            let _ = tx.send(&block);
        }
        took(&mut pace, burst * size);
    }
}

pub(super) fn receive_datagrams(rx: &UdpSocket, meter: &Meter, stop: &Interrupt) {
    let mut block = vec![0_u8; BLOCK];
    while !stop.is_raised() {
        if let Ok(bytes) = rx.recv(&mut block) {
            meter.count(bytes);
        }
    }
}

fn request_again_and_again(to: SocketAddr, size: usize, rate: Option<f64>, stop: &Interrupt) {
    let block = vec![0x5a_u8; size];
    let mut pace = rate.map(Pace::new);
    while allowed(&mut pace, size, stop) {
        took(&mut pace, size);
        let Ok(mut stream) = TcpStream::connect_timeout(&to, FLOW_TIMEOUT) else {
            continue;
        };
        // Whether this connection succeeded or failed, the next one follows.
        let _ = stream
            .set_write_timeout(Some(FLOW_TIMEOUT))
            .and_then(|()| stream.set_read_timeout(Some(FLOW_TIMEOUT)))
            .and_then(|()| stream.write_all(&block))
            .and_then(|()| stream.shutdown(Shutdown::Write))
            .and_then(|()| stream.read(&mut [0]));
    }
}

fn serve(listener: &TcpListener, meter: &Meter, stop: &Interrupt) {
    let mut block = vec![0_u8; BLOCK];
    while !stop.is_raised() {
        let Ok((mut stream, _)) = listener.accept() else {
            continue;
        };
        let _ = stream.set_read_timeout(Some(FLOW_TIMEOUT));
        while let Ok(bytes @ 1..) = stream.read(&mut block) {
            meter.count(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_lets_its_rate_through_and_forgets_old_credit() {
        // 8 Mbit/s are 1 MB/s: 1000 bytes in a millisecond.
        let mut pace = Pace::new(8.0);
        let start = pace.filled;
        assert_eq!(
            pace.wait_for(1_000, start),
            Some(Duration::from_millis(1)),
            "an empty bucket"
        );
        assert_eq!(pace.wait_for(1_000, start + Duration::from_millis(1)), None);
        pace.take(1_000);
        // A second later there is credit for 50 ms only.
        let later = start + Duration::from_secs(1);
        assert_eq!(pace.wait_for(50_000, later), None);
        pace.take(50_000);
        assert!(pace.wait_for(1_000, later).is_some());
    }
}
