//! Compares methods to receive frames from a packet socket, each with virtio-net headers: one
//! recvmsg(2) per frame (as in the library), recvmmsg(2), and rings (PACKET_RX_RING) of version 2 and
//! 3.
//!
//! Run `cargo bench -p seikan-sys --bench packet` as root. A sender in one namespace, on the last
//! CPU, sends frames over a veth pair to a receiver in another namespace, on CPU 0. The methods are
//! interleaved; each figure is the median of several runs.
//!
//! - flood: as fast as one sender can, measuring the rate received. Both share the CPUs.
//! - paced: at a rate that all methods can sustain, measuring the CPU time per unit of the receiving
//!   thread, and with that of the sender, in whose time the softirq runs: it copies frames into a ring
//!   and wakes the receiver up.
//! - latency: a frame every millisecond, measuring the time from sending to receiving.

mod methods;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use seikan_sys::netns::NetNs;
use seikan_sys::packet::{Accept, PacketOptions, PacketSocket, VNET_HEADER_LEN};

use methods::{METHODS, open, zeroed};

const ROUNDS: usize = 5;
const RUN: Duration = Duration::from_millis(800);
/// An address that no host has: the stack of the receiving namespace drops such frames at once.
const DESTINATION: [u8; 6] = [2, 0, 0, 0, 0, 99];

/// The kind of frames.
#[derive(Clone, Copy, PartialEq)]
enum Load {
    /// TCP super-packets of 64 KiB, as TSO leaves them.
    Super,
    /// UDP datagrams in frames of 64 bytes.
    Small,
}

impl Load {
    /// Returns the virtio-net header and the frame.
    fn packet(self) -> Vec<u8> {
        let total: usize = match self {
            Load::Super => 65_535 - 1_000,
            Load::Small => 50,
        };
        let mut packet = vec![0; VNET_HEADER_LEN];
        packet.extend(DESTINATION);
        packet.extend([2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0]);
        packet.extend((total as u16).to_be_bytes());
        let protocol = if self == Load::Super { 6 } else { 17 };
        packet.extend([0, 0, 0x40, 0, 64, protocol, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2]);
        packet.extend([3, 232, 0, 9]);
        if self == Load::Super {
            packet[0] = 1; // NEEDS_CSUM
            packet[1] = 1; // GSO_TCPV4
            for (at, value) in [(2, 54u16), (4, 1460), (6, 34), (8, 16)] {
                packet[at..at + 2].copy_from_slice(&value.to_ne_bytes());
            }
            packet.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 255, 255, 0, 0, 0, 0]);
        } else {
            packet.extend(((total - 20) as u16).to_be_bytes());
            packet.extend([0, 0]);
        }
        packet.resize(VNET_HEADER_LEN + 14 + total, 0x5a);
        packet
    }

    fn burst(self) -> usize {
        match self {
            Load::Super => 4,
            Load::Small => 64,
        }
    }

    /// Frames per second that every method can sustain on two slow CPUs.
    fn pace(self) -> f64 {
        match self {
            Load::Super => 20_000.0,
            Load::Small => 150_000.0,
        }
    }
}

/// Sends `packet` until `stop` is set: at `rate` frames per second, or as fast as possible.
fn send(
    socket: &PacketSocket,
    packet: &mut [u8],
    burst: usize,
    rate: Option<f64>,
    stop: &AtomicBool,
) {
    let start = Instant::now();
    let mut sent = 0usize;
    while !stop.load(Ordering::Relaxed) {
        if let Some(rate) = rate {
            while (sent as f64) > start.elapsed().as_secs_f64() * rate {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        let end = packet.len();
        packet[end - 8..].copy_from_slice(&now().to_ne_bytes());
        let mut part = libc::iovec {
            iov_base: packet.as_mut_ptr().cast(),
            iov_len: packet.len(),
        };
        let mut headers: [libc::mmsghdr; 64] = zeroed();
        for header in &mut headers {
            header.msg_hdr.msg_iov = &raw mut part;
            header.msg_hdr.msg_iovlen = 1;
        }
        // SAFETY: all headers point to the live `part`, and that to `packet`.
        let count =
            unsafe { libc::sendmmsg(socket.as_raw_fd(), headers.as_mut_ptr(), burst as u32, 0) };
        sent += usize::try_from(count).unwrap_or(0);
    }
}

/// CLOCK_MONOTONIC in nanoseconds.
fn now() -> u64 {
    nanoseconds(libc::CLOCK_MONOTONIC)
}

fn nanoseconds(clock: libc::clockid_t) -> u64 {
    let mut time: libc::timespec = zeroed();
    // SAFETY: writes one timespec, which outlives the call.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu).expect("cpu");
    sched_setaffinity(Pid::from_raw(0), &set).expect("affinity");
}

#[derive(Clone, Copy, Default)]
struct Outcome {
    frames_per_second: f64,
    bytes: f64,
    frames: f64,
    thread: f64,
    both: f64,
    latency: f64,
}

fn run(method: &'static str, load: Load, rate: Option<f64>, burst: usize) -> Outcome {
    let (a, b) = (
        NetNs::create().expect("namespace"),
        NetNs::create().expect("namespace"),
    );
    let netlink = a.netlink().expect("netlink");
    let near = netlink
        .create_veth("d0", "g0", Some(b.as_fd()))
        .expect("veth");
    netlink.set_up(near).expect("up");
    let peer = b.netlink().expect("netlink");
    let far = peer.link("g0").expect("g0").index;
    peer.set_up(far).expect("up");
    let sender = a
        .run(|| PacketSocket::open(near, &PacketOptions::new(Accept::Host([2; 6]))))
        .expect("namespace")
        .expect("packet socket");
    std::thread::sleep(Duration::from_millis(20));
    let stop = AtomicBool::new(false);
    let mut packet = load.packet();
    std::thread::scope(|scope| {
        let stop = &stop;
        let receiver = scope.spawn(move || {
            b.enter().expect("enter");
            pin(0);
            let mut receiver = open(method, far);
            let deadline = Instant::now() + RUN;
            let both = nanoseconds(libc::CLOCK_PROCESS_CPUTIME_ID);
            let thread = nanoseconds(libc::CLOCK_THREAD_CPUTIME_ID);
            let (mut frames, mut bytes, mut delays) = (0u64, 0u64, Vec::new());
            let start = Instant::now();
            while Instant::now() < deadline {
                receiver.drain(&mut |packet| {
                    // The cost of the first access to a packet.
                    std::hint::black_box(packet[VNET_HEADER_LEN + 12]);
                    frames += 1;
                    bytes += (packet.len() - VNET_HEADER_LEN) as u64;
                    if burst == 1
                        && let Some(sent) = packet.last_chunk::<8>()
                        && packet[VNET_HEADER_LEN..][..6] == DESTINATION
                    {
                        delays.push(now() - u64::from_ne_bytes(*sent));
                    }
                });
                // SAFETY: the receiver holds the descriptor open.
                let fd = unsafe { BorrowedFd::borrow_raw(receiver.fd()) };
                let _ = poll(
                    &mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)],
                    PollTimeout::from(50u16),
                );
            }
            let seconds = start.elapsed().as_secs_f64();
            let thread = nanoseconds(libc::CLOCK_THREAD_CPUTIME_ID) - thread;
            let both = nanoseconds(libc::CLOCK_PROCESS_CPUTIME_ID) - both;
            stop.store(true, Ordering::Relaxed);
            delays.sort_unstable();
            Outcome {
                frames_per_second: frames as f64 / seconds,
                bytes: bytes as f64,
                frames: frames as f64,
                thread: thread as f64 / 1e9,
                both: both as f64 / 1e9,
                latency: delays
                    .get(delays.len() / 2)
                    .map_or(0.0, |&delay| delay as f64 / 1e3),
            }
        });
        scope.spawn(move || {
            pin(std::thread::available_parallelism().map_or(0, |n| n.get() - 1));
            send(&sender, &mut packet, burst, rate, stop);
        });
        receiver.join().expect("receiver")
    })
}

fn median(outcomes: &[Outcome], of: impl Fn(&Outcome) -> f64) -> f64 {
    let mut values: Vec<f64> = outcomes.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Interleaves the methods and prints a line for each.
fn compare(load: Load, rate: Option<f64>, burst: usize, line: impl Fn(&[Outcome]) -> String) {
    let mut outcomes = METHODS.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for (method, outcomes) in METHODS.into_iter().zip(&mut outcomes) {
            outcomes.push(run(method, load, rate, burst));
        }
    }
    for (method, outcomes) in METHODS.into_iter().zip(&outcomes) {
        println!("  {method:9} {}", line(outcomes));
    }
}

fn main() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED: needs root");
        return;
    }
    for (load, name, unit, scale) in [
        (Load::Super, "64 KiB TCP super-packets", "GB", 1e9),
        (Load::Small, "64-byte UDP frames", "Mpacket", 1e6),
    ] {
        let units = |outcome: &Outcome| match load {
            Load::Super => outcome.bytes / scale,
            Load::Small => outcome.frames / scale,
        };
        let cost = |outcomes: &[Outcome]| {
            format!(
                "{:9.0} frames/s, CPU seconds per {unit}: receiver {:.3}, with the sender {:.3}",
                median(outcomes, |o| o.frames_per_second),
                median(outcomes, |o| o.thread / units(o)),
                median(outcomes, |o| o.both / units(o)),
            )
        };
        println!("{name}, flood");
        compare(load, None, load.burst(), cost);
        println!("{name}, paced");
        compare(load, Some(load.pace()), load.burst(), cost);
        println!("{name}, latency");
        compare(load, Some(1000.0), 1, |outcomes| {
            format!("{:7.1} us", median(outcomes, |o| o.latency))
        });
    }
}
