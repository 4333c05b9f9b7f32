//! One end of the crude tunnel: poll, one read, one `sendto`; poll, one `recvfrom`, one write.
//!
//! With `--handoff`, the loop only reads. For each direction, one thread processes packets, and
//! another sends them.

use std::io::{self, ErrorKind, IoSlice};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use clap::Args;
use ipnet::IpNet;
use seikan_sys::netlink::Netlink;
use seikan_sys::tun::{Tun, TunOptions, VNET_HEADER_LEN};
use seikan_ui::Interrupt;
use serde::{Deserialize, Serialize};
use socket2::SockRef;

use super::cost::{Handoff, Work};
use crate::arguments::whole;
use crate::error::{Doing, Result};
use crate::tunnel::device::{PATIENCE, readable, set_up};

/// Options of one end: its addresses and its faults.
#[derive(Clone, Debug, Args)]
pub struct CrudeOptions {
    /// Name of the TUN device to make
    #[arg(long, value_name = "INTERFACE")]
    pub device: String,
    /// Addresses of the TUN device
    #[arg(
        long,
        value_name = "ADDRESS/LENGTH,...",
        value_delimiter = ',',
        required = true
    )]
    pub address: Vec<IpNet>,
    /// Own outer address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// Outer address of the other end
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub peer: SocketAddr,
    /// MTU of the device
    // The end reads at most this many bytes of a packet from either side, so larger packets from
    // the other end arrive truncated. TCP avoids such packets: it uses the smaller segment size of
    // both ends.
    #[arg(long, value_name = "BYTES", default_value_t = 1400, value_parser = whole(68..=65535))]
    pub mtu: u32,
    /// Processor time to spend on each packet, like a slow cipher
    // The time is spent in a function named `chacha20_block_slow`. The number of rounds is measured
    // once, so that preemption does not reduce the work.
    #[arg(long, value_name = "NANOSECONDS", default_value_t = 0)]
    pub burn: u64,
    /// Pass each packet through two more threads
    // A thread waits each time until the next one has taken the packet.
    #[arg(long)]
    pub handoff: bool,
    /// Number of times to copy each packet to memory and back
    #[arg(long, value_name = "TIMES", default_value_t = 0)]
    pub copy: u32,
    /// Receive buffer of the socket
    // The value is passed to setsockopt(2), and the kernel doubles it.
    #[arg(long, value_name = "BYTES")]
    pub rcvbuf: Option<usize>,
    /// Send buffer of the socket
    #[arg(long, value_name = "BYTES")]
    pub sndbuf: Option<usize>,
    /// Queue length of the device, in packets
    #[arg(long, value_name = "PACKETS")]
    pub queue: Option<u32>,
    /// Number of outer flows over which connections are spread
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub lanes: u8,
}

/// Packet counts, and their cost. `out` is towards the other end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrudeCounts {
    /// Packets sent to the other end.
    pub out: u64,
    /// Packets that the socket refused to send.
    pub unsent: u64,
    /// Packets from the other end handed to the kernel.
    pub arrived: u64,
    /// Packets that the kernel refused.
    pub undelivered: u64,
    /// Cipher blocks burned.
    pub blocks: u64,
    /// Number of bytes copied to memory.
    pub copied: u64,
    /// Number of times that a packet was passed to another thread.
    pub handed_on: u64,
    /// Receive buffer of the socket, in bytes, as the kernel counts (twice the requested size).
    pub receive_buffer: u64,
    /// Send buffer of the socket, in bytes, as the kernel counts (twice the requested size).
    pub send_buffer: u64,
}

/// Direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Out,
    In,
}

/// One end, ready to run. Its device and socket belong to the namespace in which it was opened.
#[derive(Debug)]
pub struct CrudeEnd {
    tun: Tun,
    udp: UdpSocket,
    /// Sockets of the other flows, which only send.
    lanes: Vec<UdpSocket>,
    options: CrudeOptions,
    counts: Mutex<CrudeCounts>,
}

impl CrudeEnd {
    /// Makes the device and the socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// A device of this name exists, an address is in use, or `CAP_NET_ADMIN` is missing.
    pub fn open(options: CrudeOptions) -> Result<Self> {
        let device = &options.device;
        let tun = Tun::create_without_header(&TunOptions {
            name: device.clone(),
            mtu: options.mtu,
            queues: 1,
            offload: false,
        })?;
        let netlink = Netlink::open()?;
        let index = set_up(&netlink, device, &options.address)?;
        if let Some(packets) = options.queue {
            netlink.set_tx_queue_len(index, packets)?;
        }
        let udp = open_socket(&options).doing("open the outer socket")?;
        let lanes = (1..options.lanes)
            .map(|_| UdpSocket::bind((options.listen.ip(), 0)))
            .collect::<io::Result<_>>()
            .doing("open a socket for another flow")?;
        Ok(Self {
            tun,
            udp,
            lanes,
            options,
            counts: Mutex::default(),
        })
    }

    /// Carries packets until `stop` is set.
    ///
    /// # Errors
    /// The device or the socket no longer exists.
    pub fn run(&self, stop: &Interrupt) -> Result<()> {
        let done = if self.options.handoff {
            self.run_handing_on(stop)
        } else {
            let mut work = self.work();
            self.read_all(stop, |direction, packet| {
                self.count_work(&mut work, packet);
                self.send(direction, packet);
                true
            })
        };
        done.doing("carry packets")
    }

    /// Returns the packet counts so far.
    pub fn counts(&self) -> CrudeCounts {
        let socket = SockRef::from(&self.udp);
        CrudeCounts {
            receive_buffer: socket.recv_buffer_size().unwrap_or(0) as u64,
            send_buffer: socket.send_buffer_size().unwrap_or(0) as u64,
            ..*self.lock()
        }
    }

    fn lock(&self) -> MutexGuard<'_, CrudeCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) -> Work {
        Work::new(Duration::from_nanos(self.options.burn), self.options.copy)
    }

    /// Passes one packet after the other to `next`, until `stop` is set or `next` ends the loop.
    fn read_all(
        &self,
        stop: &Interrupt,
        mut next: impl FnMut(Direction, &mut [u8]) -> bool,
    ) -> io::Result<()> {
        let mut buffer = vec![0; VNET_HEADER_LEN + self.options.mtu as usize];
        while !stop.is_raised() {
            let ready = readable([self.tun.queues()[0].as_fd(), self.udp.as_fd()])?;
            for (direction, ready) in [Direction::Out, Direction::In].into_iter().zip(ready) {
                if !ready {
                    continue;
                }
                if let Some(length) = self.read(direction, &mut buffer)?
                    && !next(direction, &mut buffer[VNET_HEADER_LEN..][..length])
                {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Reads one packet into `buffer`, behind space for the device's header. Returns its length.
    fn read(&self, direction: Direction, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let read = match direction {
            Direction::Out => self.tun.queues()[0]
                .read(buffer)
                .map(|length| length.saturating_sub(VNET_HEADER_LEN)),
            Direction::In => self
                .udp
                .recv_from(&mut buffer[VNET_HEADER_LEN..])
                .map(|(length, _)| length),
        };
        match read {
            Ok(length) => Ok(Some(length)),
            // The other end is not running yet: ICMP reported this for an earlier packet.
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => Ok(None),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    fn send(&self, direction: Direction, packet: &[u8]) {
        match direction {
            Direction::Out => {
                let sent = self.socket_for(packet).send_to(packet, self.options.peer);
                let mut counts = self.lock();
                match sent {
                    Ok(_) => counts.out += 1,
                    Err(_) => counts.unsent += 1,
                }
            }
            Direction::In => {
                let none = [0; VNET_HEADER_LEN];
                let parts = [IoSlice::new(&none), IoSlice::new(packet)];
                let taken = self.tun.queues()[0].write_vectored(&parts);
                let mut counts = self.lock();
                match taken {
                    Ok(_) => counts.arrived += 1,
                    Err(_) => counts.undelivered += 1,
                }
            }
        }
    }

    /// Returns the socket for the connection that a packet belongs to.
    fn socket_for(&self, packet: &[u8]) -> &UdpSocket {
        match flow_of(packet, self.options.lanes) {
            0 => &self.udp,
            other => &self.lanes[other - 1],
        }
    }

    fn count_work(&self, work: &mut Work, packet: &mut [u8]) {
        work.on(packet);
        let mut counts = self.lock();
        counts.blocks += work.blocks;
        counts.copied += work.copied(packet.len());
    }

    fn run_handing_on(&self, stop: &Interrupt) -> io::Result<()> {
        let lines: [[Handoff; 2]; 2] = Default::default();
        std::thread::scope(|scope| {
            let start = |direction: Direction| {
                let [first, second] = &lines[direction as usize];
                let work = move || {
                    let mut work = self.work();
                    while let Some(mut packet) = first.take() {
                        self.count_work(&mut work, &mut packet);
                        self.lock().handed_on += 1;
                        second.put(packet);
                    }
                };
                let send = move || {
                    while let Some(packet) = second.take() {
                        self.send(direction, &packet);
                    }
                };
                let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
                thread("work").spawn_scoped(scope, work)?;
                thread("send").spawn_scoped(scope, send).map(drop)
            };
            let started = start(Direction::Out).and_then(|()| start(Direction::In));
            let done = started.and_then(|()| {
                self.read_all(stop, |direction, packet| {
                    self.lock().handed_on += 1;
                    lines[direction as usize][0].put(packet.to_vec())
                })
            });
            // Close them even if not all could be started, so that the others end.
            lines.iter().flatten().for_each(Handoff::close);
            done
        })
    }
}

/// Returns the outer flow of an IPv4 packet, of `lanes`, by its ports. Ports of different
/// connections differ only slightly; the multiplication spreads the difference over the upper bits.
fn flow_of(packet: &[u8], lanes: u8) -> usize {
    let header = packet
        .first()
        .map_or(0, |first| usize::from(first & 15) * 4);
    let ports = packet.get(header..header + 4);
    let ports = ports.and_then(|ports| ports.try_into().ok());
    let hash = u32::from_be_bytes(ports.unwrap_or_default()).wrapping_mul(0x9e37_79b1);
    ((u64::from(hash) * u64::from(lanes.max(1))) >> 32) as usize
}

/// Opens the socket. Sends block, as in similar programs. A receive blocks only for a short time
/// if the packet that poll(2) announced had a bad checksum.
fn open_socket(options: &CrudeOptions) -> io::Result<UdpSocket> {
    let udp = UdpSocket::bind(options.listen)?;
    udp.set_read_timeout(Some(Duration::from_millis(PATIENCE.into())))?;
    let socket = SockRef::from(&udp);
    if let Some(bytes) = options.rcvbuf {
        socket.set_recv_buffer_size(bytes)?;
    }
    if let Some(bytes) = options.sndbuf {
        socket.set_send_buffer_size(bytes)?;
    }
    Ok(udp)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An IPv4 header of 20 bytes, then ports.
    fn packet(from: u16, to: u16) -> Vec<u8> {
        let mut packet = vec![0; 40];
        packet[0] = 0x45;
        packet[20..22].copy_from_slice(&from.to_be_bytes());
        packet[22..24].copy_from_slice(&to.to_be_bytes());
        packet
    }

    #[test]
    fn connections_keep_their_flow_and_share_all_of_them() {
        let mut taken = [0; 4];
        // Ports as the kernel gives them out, every other one.
        for port in (32_768..32_832).step_by(2) {
            let first = flow_of(&packet(port, 80), 4);
            assert_eq!(first, flow_of(&packet(port, 80), 4));
            taken[first] += 1;
        }
        assert!(taken.iter().all(|n| *n > 0), "{taken:?}");
        assert_eq!(flow_of(&packet(1, 2), 1), 0);
        assert_eq!(flow_of(&[0x45], 4), 0);
    }
}
