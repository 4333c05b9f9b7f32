//! UDP flood: numbered datagrams of one size, as fast as the sender's socket takes them or at a
//! given rate.
//!
//! A datagram is its sequence number (8 bytes, big endian), the run's seed (8 bytes) and the seeded
//! [`Pattern`]. The receiver keeps one bit per number, so that each datagram is counted exactly
//! once: new, a duplicate (RFC 5560), or reordered (RFC 4737, section 3: smaller than the next
//! expected number). A number that never arrives is lost (RFC 7680).

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, setsockopt, sockopt};
use seikan_ui::Interrupt;
use serde::{Deserialize, Serialize};
use socket2::SockRef;

use crate::Pattern;
use crate::counters::{CpuClock, udp_receive_buffer_errors};
use crate::error::{Doing, LoadError, Result};
use crate::{Direction, Ends, IO_TIMEOUT, gbit_per_second, is_timeout, join};

/// Sequence number and seed.
const HEADER: usize = 16;
/// Largest payload of a UDP datagram over IPv4.
const MAX_DATAGRAM: usize = 65_507;
/// Maximum number of datagrams in a run, which bounds the receiver's bitmap to 32 MiB.
const MAX_COUNT: u64 = 1 << 28;
/// Receive buffer of a run that requests none, where privileges allow it: the run measures the
/// path, not the delay until the scheduler runs the receiver.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Time for which the receiver sleeps when its queue is empty. The kernel adds its timer slack of
/// 50 us.
const REST: Duration = Duration::from_micros(50);
/// Maximum time until the sender receives the request of a receiver.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// Time without a datagram after which the path counts as empty: once the sender has stopped, no
/// datagram follows.
const QUIET: Duration = Duration::from_millis(200);

/// Options of a flood.
#[derive(Clone, Copy, Debug)]
pub struct UdpOptions {
    /// Direction of the datagrams; not [`Direction::Both`].
    pub direction: Direction,
    /// Payload bytes per datagram, 16 to 65507.
    pub datagram: usize,
    /// Time before measuring starts.
    pub warmup: Duration,
    /// Measured time.
    pub duration: Duration,
    /// Payload bits per second to offer; `None` floods.
    pub rate: Option<f64>,
    /// Receive buffer in bytes, within the kernel's limit; `None` takes 4 MiB with privileges, else
    /// the default.
    pub receive_buffer: Option<usize>,
    /// Compare every payload with the pattern.
    pub verify: bool,
    /// Seed of the content.
    pub seed: u64,
}

impl Default for UdpOptions {
    fn default() -> Self {
        Self {
            direction: Direction::Forward,
            datagram: 1200,
            warmup: Duration::from_millis(200),
            duration: Duration::from_secs(4),
            rate: None,
            receive_buffer: None,
            verify: false,
            seed: 0,
        }
    }
}

/// Result of a UDP flood. Counts cover the whole run, rates the measured time.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct UdpReport {
    /// Payload bytes per datagram.
    pub datagram: usize,
    /// Measured time in seconds.
    pub seconds: f64,
    /// Payload received, each datagram once, in Gbit/s.
    pub gbit_per_second: f64,
    /// Payload offered in Gbit/s.
    pub offered_gbit_per_second: f64,
    /// Busy CPU seconds of the whole machine per Gbit received.
    pub cpu_seconds_per_gbit: Option<f64>,
    /// Datagrams the sender's socket took.
    pub sent: u64,
    /// Datagrams received, duplicates left out.
    pub received: u64,
    /// Sent and never received.
    pub lost: u64,
    /// Number of the lost datagrams that were dropped at the receiver's full socket buffer, behind
    /// the path.
    pub lost_at_receiver: u64,
    /// Datagrams received after one with a higher number.
    pub reordered: u64,
    /// Datagrams received more than once.
    pub duplicated: u64,
    /// Datagrams with a wrong length, number or seed, or (with `verify`) wrong content.
    pub corrupt: u64,
}

impl UdpReport {
    /// Lost share of the sent datagrams, 0 to 1.
    #[must_use]
    pub fn loss(&self) -> f64 {
        if self.sent == 0 {
            0.0
        } else {
            self.lost as f64 / self.sent as f64
        }
    }
}

/// A counter of datagrams, with a cache line (and its neighbour, which is fetched with it) of its
/// own: sender and receiver count at the same time.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Counter(AtomicU64);

impl Counter {
    /// Datagrams so far.
    #[must_use]
    pub fn datagrams(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The numbers that have arrived.
#[derive(Debug, Default)]
struct Arrivals {
    seen: Vec<u64>,
    next_expected: u64,
    received: u64,
    reordered: u64,
    duplicated: u64,
}

impl Arrivals {
    /// Notes the arrival of `number`, below [`MAX_COUNT`]; returns whether it is the first with
    /// this number.
    fn note(&mut self, number: u64) -> bool {
        let (word, bit) = ((number / 64) as usize, 1_u64 << (number % 64));
        if word >= self.seen.len() {
            self.seen.resize(word + 1, 0);
        }
        if self.seen[word] & bit != 0 {
            self.duplicated += 1;
            return false;
        }
        self.seen[word] |= bit;
        self.received += 1;
        if number < self.next_expected {
            self.reordered += 1;
        } else {
            self.next_expected = number + 1;
        }
        true
    }
}

/// Runs the flood and reports what arrived.
///
/// # Errors
/// [`LoadError::Interrupted`]; sockets that fail; a datagram larger than the path takes.
pub fn udp_flood(
    ends: &Ends<'_>,
    options: &UdpOptions,
    interrupt: &Interrupt,
) -> Result<UdpReport> {
    if !(HEADER..=MAX_DATAGRAM).contains(&options.datagram) {
        return Err(LoadError::Usage(format!(
            "cannot send UDP datagrams of {} bytes: use {HEADER} to {MAX_DATAGRAM}",
            options.datagram
        )));
    }
    let (sender, receiver) = open(ends, options, interrupt)?;
    let receiving = match options.direction {
        Direction::Reverse => ends.client,
        Direction::Forward | Direction::Both => ends.server,
    };
    let dropped = receiving.run(udp_receive_buffer_errors)?;
    let (sent, received) = (Counter::default(), Counter::default());
    let stop = Interrupt::new();
    let (window, tx, rx) = std::thread::scope(|scope| {
        let rx = scope.spawn(|| receive(&receiver, options, &received, &stop));
        let tx = scope.spawn(|| send_flood(&sender, options, &sent, &stop));
        let window = measure(&sent, &received, options, interrupt);
        stop.raise();
        Ok::<_, LoadError>((window, join(tx)?, join(rx)?))
    })?;
    let (window, (), (arrivals, corrupt)) = (window?, tx?, rx?);
    let sent = sent.0.into_inner();
    let lost = sent.saturating_sub(arrivals.received);
    let dropped = receiving
        .run(udp_receive_buffer_errors)?
        .saturating_sub(dropped);
    let rate = |count: u64| gbit_per_second(count * options.datagram as u64, window.seconds);
    let gbit = rate(window.received) * window.seconds;
    Ok(UdpReport {
        datagram: options.datagram,
        seconds: window.seconds,
        gbit_per_second: rate(window.received),
        offered_gbit_per_second: rate(window.sent),
        cpu_seconds_per_gbit: (gbit > 0.0).then(|| window.cpu / gbit),
        sent,
        received: arrivals.received,
        lost,
        lost_at_receiver: dropped.min(lost),
        reordered: arrivals.reordered,
        duplicated: arrivals.duplicated,
        corrupt,
    })
}

/// Receives what [`send_flood`] sends with the same options, until `stop` is set and nothing more
/// arrives. `received` counts each datagram once; datagrams of another length or seed do not count.
///
/// # Errors
/// The socket fails.
pub fn receive_flood(
    socket: &UdpSocket,
    options: &UdpOptions,
    received: &Counter,
    stop: &Interrupt,
) -> Result<()> {
    set_receive_buffer(socket, options)?;
    receive(socket, options, received, stop).map(drop)
}

/// Opens the sending and the receiving socket; the sender is connected to the receiver.
fn open(
    ends: &Ends<'_>,
    options: &UdpOptions,
    interrupt: &Interrupt,
) -> Result<(UdpSocket, UdpSocket)> {
    let [server, client] = ends.datagrams()?;
    let (sender, receiver) = match options.direction {
        Direction::Forward => (client, server),
        Direction::Reverse => {
            introduce(&client, &server, interrupt)?;
            (server, client)
        }
        Direction::Both => {
            return Err(LoadError::Usage(
                "a UDP flood has one direction: use forward or reverse".into(),
            ));
        }
    };
    set_receive_buffer(&receiver, options)?;
    Ok((sender, receiver))
}

fn set_receive_buffer(receiver: &UdpSocket, options: &UdpOptions) -> Result<()> {
    match options.receive_buffer {
        Some(bytes) => SockRef::from(receiver)
            .set_recv_buffer_size(bytes)
            .doing(format!("set a receive buffer of {bytes} bytes")),
        // Refused in a user namespace: the default is used, and its drops are counted separately.
        None => {
            let _ = setsockopt(receiver, sockopt::RcvBufForce, &RECEIVE_BUFFER);
            Ok(())
        }
    }
}

/// Makes the client send until the server receives a datagram, and connects the server to its
/// source. Behind a gateway that translates addresses, the server cannot know the address
/// otherwise.
fn introduce(client: &UdpSocket, server: &UdpSocket, interrupt: &Interrupt) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < INTRODUCTION {
        interrupt.check()?;
        // A lost datagram is sent again.
        let _ = client.send(b"?");
        if let Ok((_, from)) = server.recv_from(&mut [0; 8]) {
            return server
                .connect(from)
                .doing(format!("connect a UDP socket to {from}"));
        }
    }
    Err(LoadError::Timeout {
        event: "a datagram from the client".to_owned(),
        seconds: INTRODUCTION.as_secs_f64(),
    })
}

/// Sends numbered datagrams over a connected socket until `stop` is set: the sending end of a flood
/// between two hosts. `sent` counts the datagrams that the socket accepted.
///
/// # Errors
/// The socket fails, or a datagram is too large for the path.
pub fn send_flood(
    socket: &UdpSocket,
    options: &UdpOptions,
    sent: &Counter,
    stop: &Interrupt,
) -> Result<()> {
    let mut datagram = vec![0_u8; options.datagram];
    datagram[8..HEADER].copy_from_slice(&options.seed.to_be_bytes());
    Pattern::new(options.seed).fill(0, &mut datagram[HEADER..]);
    let bits = options.datagram as f64 * 8.0;
    let start = Instant::now();
    let mut number = 0;
    while number < MAX_COUNT && !stop.is_raised() {
        if let Some(rate) = options.rate {
            let due = start + Duration::from_secs_f64(number as f64 * bits / rate);
            let early = due.saturating_duration_since(Instant::now());
            // A sleep is never shorter than the timer slack, 50 us: below that, send at once and
            // rest later.
            if early > Duration::from_micros(50) {
                std::thread::sleep(early.min(IO_TIMEOUT));
                continue;
            }
        }
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        match socket.send(&datagram) {
            Ok(_) => {
                number += 1;
                sent.0.store(number, Ordering::Relaxed);
            }
            // A queue of the host is full, or the far end is not ready: the same number is sent
            // again.
            Err(e) if is_transient(&e) => {}
            Err(e) => {
                return Err(LoadError::io(format!(
                    "send datagrams of {} bytes",
                    options.datagram
                ))(e));
            }
        }
    }
    Ok(())
}

fn is_transient(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(Errno::ENOBUFS as i32)
        || error.kind() == ErrorKind::ConnectionRefused
        || is_timeout(error)
}

/// Counts until the sender has stopped and nothing comes any more.
fn receive(
    socket: &UdpSocket,
    options: &UdpOptions,
    received: &Counter,
    stop: &Interrupt,
) -> Result<(Arrivals, u64)> {
    let mut expected = vec![0_u8; options.datagram];
    expected[8..HEADER].copy_from_slice(&options.seed.to_be_bytes());
    Pattern::new(options.seed).fill(0, &mut expected[HEADER..]);
    let checked = if options.verify {
        options.datagram
    } else {
        HEADER
    };
    let mut buf = vec![0_u8; MAX_DATAGRAM + 1];
    let (mut arrivals, mut corrupt) = (Arrivals::default(), 0);
    let (mut news, mut last) = (false, Instant::now());
    // A receiver that blocks costs the sender a wake-up per datagram. This one empties the queue
    // and rests a moment, far shorter than the queue takes to fill, and blocks only when the path
    // has run dry.
    let mut flags = MsgFlags::empty();
    loop {
        match nix::sys::socket::recv(socket.as_raw_fd(), &mut buf, flags) {
            Ok(n) => {
                match number_of(&buf[..n], &expected, checked) {
                    Some(number) => drop(arrivals.note(number)),
                    None => corrupt += 1,
                }
                received.0.store(arrivals.received, Ordering::Relaxed);
                (news, flags) = (true, MsgFlags::MSG_DONTWAIT);
            }
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNREFUSED) => {
                if std::mem::take(&mut news) {
                    last = Instant::now();
                } else if last.elapsed() > QUIET {
                    if stop.is_raised() {
                        return Ok((arrivals, corrupt));
                    }
                    flags = MsgFlags::empty();
                }
                if flags.contains(MsgFlags::MSG_DONTWAIT) {
                    std::thread::sleep(REST);
                }
            }
            Err(e) => return Err(LoadError::io("receive datagrams")(e.into())),
        }
    }
}

/// The datagram's number if length, seed and the first `checked` bytes are as sent.
fn number_of(datagram: &[u8], expected: &[u8], checked: usize) -> Option<u64> {
    let (number, rest) = datagram.split_first_chunk::<8>()?;
    let number = u64::from_be_bytes(*number);
    let right = datagram.len() == expected.len() && rest[..checked - 8] == expected[8..checked];
    (right && number < MAX_COUNT).then_some(number)
}

/// Counts within the measured time.
struct Window {
    seconds: f64,
    sent: u64,
    received: u64,
    cpu: f64,
}

fn measure(
    sent: &Counter,
    received: &Counter,
    options: &UdpOptions,
    interrupt: &Interrupt,
) -> Result<Window> {
    let take = || {
        (
            Instant::now(),
            sent.0.load(Ordering::Relaxed),
            received.0.load(Ordering::Relaxed),
        )
    };
    interrupt.sleep(options.warmup)?;
    let cpu = CpuClock::now()?;
    let first = take();
    interrupt.sleep_until(first.0 + options.duration)?;
    let last = take();
    Ok(Window {
        seconds: (last.0 - first.0).as_secs_f64(),
        sent: last.1 - first.1,
        received: last.2 - first.2,
        cpu: CpuClock::now()?.since(cpu),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_order_is_neither_reordered_nor_duplicated() {
        let mut a = Arrivals::default();
        for n in 0..1000 {
            a.note(n);
        }
        assert_eq!((a.received, a.reordered, a.duplicated), (1000, 0, 0));
    }

    /// The example of RFC 4737, section 3.3: of 1 2 3 7 8 9 10 4 5 6 the last three are reordered.
    #[test]
    fn reordering_is_rfc_4737s() {
        let mut a = Arrivals::default();
        for n in [1, 2, 3, 7, 8, 9, 10, 4, 5, 6] {
            a.note(n);
        }
        assert_eq!((a.received, a.reordered, a.duplicated), (10, 3, 0));
    }

    #[test]
    fn the_second_of_a_number_is_a_duplicate_and_not_received() {
        let mut a = Arrivals::default();
        for n in [0, 64, 64, 0, 1] {
            a.note(n);
        }
        assert_eq!((a.received, a.reordered, a.duplicated), (3, 1, 2));
    }

    #[test]
    fn a_wrong_seed_length_or_number_is_not_ours() {
        let expected = [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
        let mut datagram = expected;
        datagram[7] = 5;
        assert_eq!(number_of(&datagram, &expected, HEADER), Some(5));
        assert_eq!(number_of(&datagram[..16], &expected, HEADER), None);
        datagram[16] = 0;
        assert_eq!(
            number_of(&datagram, &expected, HEADER),
            Some(5),
            "content is not checked"
        );
        assert_eq!(number_of(&datagram, &expected, 17), None);
        datagram[9] ^= 1;
        assert_eq!(number_of(&datagram, &expected, HEADER), None);
        assert_eq!(number_of(&[0xff; 17], &expected, HEADER), None);
    }
}
