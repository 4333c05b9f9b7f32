//! The program of an emulated link: one loop over two TAP devices, timers of frames in flight, and
//! commands on standard input.
//!
//! The loop reads a batch from a device, passes it to its direction, writes due frames to the other
//! device, answers commands, and sleeps until the next event.

use std::io::{self, ErrorKind, IoSlice, Stdin, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use seikan_sys::clock::monotonic;
use seikan_sys::netlink::Netlink;
use seikan_sys::netns::NetNs;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::tun::{TAP_READ_BUFFER_LEN, Tun, TunOptions};

use super::direction::Direction;
use super::{DirectionCounts, Order, WireCounts};
use crate::error::{Doing, Result};

/// Maximum number of packets read from a device at a time.
const BATCH: usize = 64;
/// Queue length of a device, in packets: a burst from a socket with a large buffer fits.
const QUEUE: u32 = 8192;
/// Token of standard input; the devices have 0 and 1.
const ORDERS: u64 = 2;
/// Maximum length of an order, in bytes.
const LONGEST_ORDER: usize = 1 << 16;

/// The devices, and the properties of the wire that do not change.
#[derive(Clone, Debug, Args)]
pub struct CarrierOptions {
    /// Name of the TAP device to make here
    #[arg(long, value_name = "INTERFACE")]
    pub near: String,
    /// Name of the TAP device to make in the other namespace
    #[arg(long, value_name = "INTERFACE")]
    pub far: String,
    /// The other network namespace
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub far_namespace: PathBuf,
    /// Seed of the random faults
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub seed: u64,
    /// Run with real-time priority
    #[arg(long)]
    pub punctual: bool,
}

/// A device and where its counters are read.
struct End {
    tun: Tun,
    index: u32,
    netlink: Netlink,
}

impl End {
    /// Opens a device in the calling thread's namespace.
    fn open(name: &str) -> Result<Self> {
        let tun = Tun::create_tap(&TunOptions {
            name: name.to_owned(),
            mtu: 1500,
            queues: 1,
            offload: true,
        })?;
        let netlink = Netlink::open()?;
        let index = netlink.link(name)?.index;
        netlink.set_tx_queue_len(index, QUEUE)?;
        Ok(Self {
            tun,
            index,
            netlink,
        })
    }

    /// Packets that the device dropped before we could read them.
    fn missed(&self) -> u64 {
        let stats = self.netlink.link_stats(self.index);
        stats.map_or(0, |stats| stats.tx_dropped)
    }

    fn write(&self, packet: &[u8]) -> bool {
        self.tun.queues()[0]
            .write_vectored(&[IoSlice::new(packet)])
            .is_ok()
    }
}

/// Creates the first device in the calling thread's network namespace (host A) and the second in
/// another one (host B), and carries frames between them until standard input ends. `seed` is the
/// seed of the random faults. With `punctual`, the thread has real-time priority if permitted.
///
/// # Errors
/// The kernel refuses an operation, or a command is invalid.
pub fn carry(options: &CarrierOptions) -> Result<()> {
    let seed = options.seed;
    // Late wake-ups add delay. If the kernel refuses, frames arrive late and are counted as late.
    let _ = nix::sys::prctl::set_timerslack(1);
    if options.punctual {
        let _ = seikan_sys::schedule::set_real_time();
    }
    let near = End::open(&options.near)?;
    let there = NetNs::open(&options.far_namespace)?;
    let far = there.run(|| End::open(&options.far))??;
    let mut carrier = Carrier {
        ends: [near, far],
        directions: [Direction::new(seed), Direction::new(!seed)],
        orders: Vec::new(),
        stdin: io::stdin(),
    };
    carrier.run().doing("carry frames")
}

struct Carrier {
    ends: [End; 2],
    /// For the frames from the device with the same index.
    directions: [Direction; 2],
    /// Received part of an order.
    orders: Vec<u8>,
    stdin: Stdin,
}

impl Carrier {
    fn run(&mut self) -> io::Result<()> {
        let mut epoll = Epoll::new(4)?;
        for (token, end) in (0..).zip(&self.ends) {
            epoll.add(end.tun.queues()[0].as_fd(), token, Interest::Read)?;
        }
        epoll.add(self.stdin.as_fd(), ORDERS, Interest::Read)?;
        let mut buffer = vec![0; TAP_READ_BUFFER_LEN];
        loop {
            let mut ready = [false; 3];
            for event in epoll.wait(self.patience())? {
                ready[event.token as usize] = true;
            }
            if ready[ORDERS as usize] && !self.take_orders()? {
                return Ok(());
            }
            for (from, ready) in ready.into_iter().enumerate().take(self.directions.len()) {
                if ready {
                    self.read(from, &mut buffer)?;
                }
                self.deliver(from);
            }
        }
    }

    /// Time until something is due.
    fn patience(&self) -> Option<Duration> {
        let next = self
            .directions
            .iter()
            .filter_map(Direction::next_due)
            .min()?;
        Some(next.saturating_sub(monotonic()))
    }

    fn read(&mut self, from: usize, buffer: &mut [u8]) -> io::Result<()> {
        for _ in 0..BATCH {
            let packet = match self.ends[from].tun.queues()[0].read(buffer) {
                Ok(length) => &buffer[..length],
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    return Ok(());
                }
                Err(e) => return Err(e),
            };
            let direction = &mut self.directions[from];
            if direction.is_open() {
                let done = self.ends[1 - from].write(packet);
                direction.count_passing(packet, done);
            } else {
                direction.offer(monotonic(), packet);
            }
        }
        Ok(())
    }

    fn deliver(&mut self, from: usize) {
        let now = monotonic();
        while let Some((packet, frames)) = self.directions[from].due(now) {
            let done = self.ends[1 - from].write(&packet);
            self.directions[from].count_arrived(frames, done);
        }
    }

    /// Reads available input; returns false at its end.
    fn take_orders(&mut self) -> io::Result<bool> {
        let mut chunk = [0; 4096];
        let length = nix::unistd::read(&self.stdin, &mut chunk)?;
        if length == 0 {
            return Ok(false);
        }
        self.orders.extend_from_slice(&chunk[..length]);
        while let Some(end) = self.orders.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.orders.drain(..=end).collect();
            if let Order::Set(faults) = serde_json::from_slice(&line)? {
                self.directions[0].set(faults.a_to_b);
                self.directions[1].set(faults.b_to_a);
            }
            let mut out = io::stdout().lock();
            serde_json::to_writer(&mut out, &self.counts())?;
            out.write_all(b"\n")?;
            out.flush()?;
        }
        if self.orders.len() > LONGEST_ORDER {
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                "an order is longer than 64 KiB",
            ));
        }
        Ok(true)
    }

    fn counts(&self) -> WireCounts {
        let of = |from: usize| DirectionCounts {
            missed: self.ends[from].missed(),
            ..self.directions[from].counts()
        };
        WireCounts {
            a_to_b: of(0),
            b_to_a: of(1),
        }
    }
}
