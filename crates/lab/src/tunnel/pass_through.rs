//! A program that only passes packets on, over TCP and without encryption. It sends each packet
//! that it reads from its TUN device with its length in front, and the other end writes it to its
//! device in one write.
//!
//! A read returns a super-packet of several segments if the kernel has one, preceded by the
//! virtio-net header that describes it, so N frames cross between kernel and program at once. With
//! [`PassThroughOptions::frames_per_write`], the writing end splits or merges the packets that the
//! other end has read, so the frames of reads and of writes can be chosen separately.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use ipnet::Ipv4Net;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use seikan_proto::inbox::{self, Inbox, MAX_PIECES};
use seikan_proto::indices::PeerId;
use seikan_proto::segment::SuperPacket;
use seikan_sys::netlink::Netlink;
use seikan_sys::tun::{READ_BUFFER_LEN, Tun, TunOptions};
use seikan_wire::{IpPacket, VNET_HDR_LEN, VnetHdr};

use super::device;
use crate::arguments::whole;
use crate::error::{Doing, Result, usage};

/// Number of attempts of the connecting end, and pause between two attempts.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(50);
/// Size of the length before each packet, in bytes.
const PREFIX: usize = 4;
/// Number of bytes received at once if frames are merged: at least one packet with its length.
const BATCH_LEN: usize = 2 * (PREFIX + READ_BUFFER_LEN);

/// Options of one end, and the address of the other one.
#[derive(Clone, Debug, Args)]
pub struct PassThroughOptions {
    /// Name of the TUN device to make
    #[arg(long, value_name = "INTERFACE")]
    pub device: String,
    /// Address of the TUN device
    #[arg(long, value_name = "ADDRESS/LENGTH")]
    pub address: Ipv4Net,
    /// Address on which to wait for the other end
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        conflicts_with = "connect",
        required_unless_present = "connect"
    )]
    pub listen: Option<SocketAddr>,
    /// Address of the other end to connect to
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub connect: Option<SocketAddr>,
    /// MTU of the device
    #[arg(long, value_name = "BYTES", default_value_t = 1500, value_parser = whole(68..=65535))]
    pub mtu: u32,
    /// Frames in each write to the device [default: as many as the other end has read at once]
    // With 1, super-packets are split. With more, up to this many consecutive frames of a flow are
    // merged.
    #[arg(long, value_name = "NUMBER", value_parser = whole(1..=64))]
    pub frames_per_write: Option<u32>,
}

/// One end. Its device and connection belong to the namespace in which it was opened.
#[derive(Debug)]
pub struct PassThrough {
    tun: Tun,
    stream: TcpStream,
    frames_per_write: Option<u32>,
}

impl PassThrough {
    /// Creates the device, and then waits for a connection or opens one.
    ///
    /// # Errors
    /// A device of this name exists, `CAP_NET_ADMIN` is missing, or there is no connection within 5
    /// s.
    pub fn open(options: &PassThroughOptions) -> Result<Self> {
        let tun = Tun::create(&TunOptions {
            name: options.device.clone(),
            mtu: options.mtu,
            queues: 1,
            offload: true,
        })?;
        device::set_up(
            &Netlink::open()?,
            &options.device,
            &[options.address.into()],
        )?;
        let stream = match (options.listen, options.connect) {
            (Some(at), _) => TcpListener::bind(at).and_then(|listener| Ok(listener.accept()?.0)),
            (None, Some(to)) => connect(to),
            (None, None) => {
                return Err(usage("give either --listen or --connect"));
            }
        };
        let stream = stream.doing("connect the ends")?;
        stream
            .set_nodelay(true)
            .doing("switch Nagle's algorithm off")?;
        Ok(Self {
            tun,
            stream,
            frames_per_write: options.frames_per_write,
        })
    }

    /// Carries packets until the other end leaves. Another thread waits for the device; it ends
    /// with the process.
    ///
    /// # Errors
    /// The connection has failed.
    pub fn run(self) -> Result<()> {
        let end = Arc::new(self);
        let sender = Arc::clone(&end);
        std::thread::spawn(move || {
            let ended = sender.send();
            // The other direction must end as well.
            let _ = sender.stream.shutdown(Shutdown::Both);
            ended
        });
        end.receive().doing("carry packets")
    }

    /// Passes packets from the device to the connection.
    fn send(&self) -> io::Result<()> {
        let queue = &self.tun.queues()[0];
        let mut buffer = vec![0; READ_BUFFER_LEN];
        loop {
            match queue.read(&mut buffer) {
                Ok(length) => write_all(&self.stream, &buffer[..length])?,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let mut fds = [PollFd::new(queue.as_fd(), PollFlags::POLLIN)];
                    poll(&mut fds, PollTimeout::NONE)?;
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Passes packets from the connection to the device.
    fn receive(&self) -> io::Result<()> {
        match self.frames_per_write {
            Some(frames @ 2..) => self.receive_merged(frames as usize),
            _ => self.receive_single(),
        }
    }

    /// Writes each packet as the other end has read it, or its segments one by one.
    fn receive_single(&self) -> io::Result<()> {
        let mut buffer = vec![0; READ_BUFFER_LEN];
        let mut frame = vec![0; READ_BUFFER_LEN];
        let mut length = [0; PREFIX];
        loop {
            match (&self.stream).read_exact(&mut length) {
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            }
            let length = u32::from_be_bytes(length) as usize;
            let packet = buffer.get_mut(..length).ok_or_else(|| too_long(length))?;
            (&self.stream).read_exact(packet)?;
            match SuperPacket::parse(packet) {
                Ok(whole) if self.frames_per_write == Some(1) && whole.segments() > 1 => {
                    self.write_segments(&whole, &mut frame);
                }
                _ => self.write(&[IoSlice::new(packet)]),
            }
        }
    }

    /// Writes every segment separately. The kernel completes their checksums where necessary, as it
    /// does when it segments a packet itself.
    fn write_segments(&self, packet: &SuperPacket<'_>, frame: &mut [u8]) {
        let header = packet.kind.map(|transport| VnetHdr {
            needs_csum: true,
            csum_start: packet.ip.header_len as u16,
            csum_offset: transport.checksum_at() as u16,
            ..VnetHdr::default()
        });
        let header = header.unwrap_or_default().to_bytes();
        for index in 0..packet.segments() {
            packet.segment(index, true, frame);
            let segment = &frame[..packet.segment_len(index)];
            self.write(&[IoSlice::new(&header), IoSlice::new(segment)]);
        }
    }

    /// Receives all available packets, and writes up to `frames` of them at once if they are
    /// consecutive segments of a stream.
    fn receive_merged(&self, frames: usize) -> io::Result<()> {
        let mut buffer = vec![0; BATCH_LEN];
        let mut filled = 0;
        let mut inbox = Inbox::new(true, true);
        loop {
            match (&self.stream).read(&mut buffer[filled..])? {
                0 => return Ok(()),
                length => filled += length,
            }
            let mut from = 0;
            let mut pending = 0;
            while let Some(length) = first_length(&buffer[from..filled]) {
                if length > READ_BUFFER_LEN {
                    return Err(too_long(length));
                }
                let packet = from + PREFIX..from + PREFIX + length;
                if packet.end > filled {
                    break;
                }
                from = packet.end;
                let read = &buffer[packet.clone()];
                match frame_of(read, packet.start) {
                    Some(frame) => {
                        inbox.packet(&buffer, &frame, PeerId(0));
                        pending += 1;
                    }
                    // First write the packets that arrived before this one.
                    None => {
                        self.write_inbox(&mut inbox, &buffer);
                        pending = 0;
                        self.write(&[IoSlice::new(read)]);
                    }
                }
                if pending == frames {
                    self.write_inbox(&mut inbox, &buffer);
                    pending = 0;
                }
            }
            self.write_inbox(&mut inbox, &buffer);
            buffer.copy_within(from..filled, 0);
            filled -= from;
        }
    }

    /// Writes the merged packets, and empties the inbox.
    fn write_inbox(&self, inbox: &mut Inbox, arena: &[u8]) {
        inbox.finish(arena);
        for write in inbox.writes() {
            let mut parts = [IoSlice::new(&[]); MAX_PIECES + 2];
            let count = write.parts(arena, &mut parts);
            self.write(&parts[..count]);
        }
        inbox.clear();
    }

    /// Writes a packet to the device. The kernel may refuse it; it then counts as lost on the link.
    fn write(&self, parts: &[IoSlice<'_>]) {
        let _ = self.tun.queues()[0].write_vectored(parts);
    }
}

fn too_long(length: usize) -> io::Error {
    io::Error::other(format!("a packet of {length} bytes"))
}

/// Returns the length of the first packet; `None` if the packet has not arrived completely.
fn first_length(received: &[u8]) -> Option<usize> {
    let length = received.first_chunk::<PREFIX>()?;
    Some(u32::from_be_bytes(*length) as usize)
}

/// Returns a single packet that the other end has read from its device, for merging; `None` for a
/// super-packet and for anything but IP. `start` is its position in the buffer.
fn frame_of(read: &[u8], start: usize) -> Option<inbox::Packet> {
    let whole = SuperPacket::parse(read).ok().filter(|p| p.kind.is_none())?;
    let at = start + VNET_HDR_LEN;
    Some(inbox::Packet {
        range: at..at + whole.bytes.len(),
        ip_at: 0,
        ip: IpPacket::parse(whole.bytes).ok()?,
        partial: whole.partial,
    })
}

/// Sends a packet with its length in front.
fn write_all(mut stream: &TcpStream, packet: &[u8]) -> io::Result<()> {
    let length = (packet.len() as u32).to_be_bytes();
    let sent = stream.write_vectored(&[IoSlice::new(&length), IoSlice::new(packet)])?;
    match sent.checked_sub(length.len()) {
        Some(sent) => stream.write_all(&packet[sent..]),
        None => {
            stream.write_all(&length[sent..])?;
            stream.write_all(packet)
        }
    }
}

fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    for _ in 1..ATTEMPTS {
        if let Ok(stream) = TcpStream::connect(address) {
            return Ok(stream);
        }
        std::thread::sleep(PAUSE);
    }
    TcpStream::connect(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_read_as_soon_as_it_is_whole() {
        assert_eq!(first_length(&[0, 0, 1]), None);
        assert_eq!(first_length(&[0, 0, 1, 2]), Some(258));
        assert_eq!(first_length(&[0xff; 9]), Some(u32::MAX as usize));
    }

    #[test]
    fn what_is_no_packet_is_not_merged() {
        assert!(frame_of(&[], PREFIX).is_none());
        assert!(frame_of(&[0; 60], PREFIX).is_none());
    }
}
