//! A program that only passes packets on, over TCP and without encryption: each read of its TUN
//! device goes out behind its length, and comes out of the other end's device in one write.
//!
//! A read returns a super-packet of several segments where the kernel has one, behind the
//! virtio-net header that describes it, so N frames cross between kernel and program at once.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use ipnet::Ipv4Net;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use seikan_sys::netlink::{AddressOptions, Netlink};
use seikan_sys::tun::{READ_BUFFER_LEN, Tun, TunOptions};

use crate::error::{LabError, Result};

/// How long the connecting end tries, and how long between two attempts.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(50);
/// MTU of the device, in bytes.
const MTU: u32 = 1_500;

/// One end. Its device and connection belong to the namespace that it was opened in.
#[derive(Debug)]
pub struct PassThrough {
    tun: Tun,
    stream: TcpStream,
}

impl PassThrough {
    /// Makes the device, and then waits for a connection to `address` or makes one.
    ///
    /// # Errors
    /// A device of that name, no `CAP_NET_ADMIN`, no connection within 5 s.
    pub fn open(device: &str, own: Ipv4Net, address: SocketAddr, listen: bool) -> Result<Self> {
        let tun = Tun::create(&TunOptions {
            name: device.to_owned(),
            mtu: MTU,
            queues: 1,
            offload: true,
        })?;
        let netlink = Netlink::open()?;
        netlink.add_address_with(tun.index(), own.into(), AddressOptions::default())?;
        netlink.set_up(tun.index())?;
        let stream = if listen {
            TcpListener::bind(address).and_then(|listener| Ok(listener.accept()?.0))
        } else {
            connect(address)
        };
        let stream = stream.map_err(LabError::io(format!("connect the ends by {address}")))?;
        stream
            .set_nodelay(true)
            .map_err(LabError::io("switch Nagle's algorithm off"))?;
        Ok(Self { tun, stream })
    }

    /// Carries packets until the other end goes. A thread of its own waits for the device; it ends
    /// with the process.
    ///
    /// # Errors
    /// When the connection breaks.
    pub fn run(self) -> Result<()> {
        let end = Arc::new(self);
        let sender = Arc::clone(&end);
        std::thread::spawn(move || {
            let ended = sender.send();
            // The other direction ends, too.
            let _ = sender.stream.shutdown(Shutdown::Both);
            ended
        });
        end.receive().map_err(LabError::io("carry packets"))
    }

    /// From the device to the connection.
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

    /// From the connection to the device.
    fn receive(&self) -> io::Result<()> {
        let mut buffer = vec![0; READ_BUFFER_LEN];
        let mut length = [0; 4];
        loop {
            match (&self.stream).read_exact(&mut length) {
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            }
            let length = u32::from_be_bytes(length) as usize;
            let packet = buffer
                .get_mut(..length)
                .ok_or_else(|| io::Error::other(format!("a packet of {length} bytes")))?;
            (&self.stream).read_exact(packet)?;
            // The kernel may refuse one, as any link loses one.
            let _ = self.tun.queues()[0].write_vectored(&[IoSlice::new(packet)]);
        }
    }
}

/// Sends a packet behind its length.
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
