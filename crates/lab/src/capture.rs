//! Records the headers of the packets of a host's interface while a load runs, as a capture file
//! (pcap) and for the lab's own figures.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use seikan_sys::packet::capture::CaptureSocket;
use seikan_ui::Interrupt;

use crate::error::{Doing, LabError, Result, setup};
use crate::site::Host;

/// Bytes of each packet: headers of IPv6 and TCP with options.
const SNAP_LENGTH: usize = 128;
/// Maximum number of packets that are kept: 10 s of 50,000 packets a second.
const MAX_PACKETS: usize = 1 << 19;
/// Interval at which the thread checks its flag, in milliseconds.
const PATIENCE: u16 = 50;
/// Magic number of a capture with times in nanoseconds, its version, and raw IP packets
/// (`LINKTYPE_RAW`), from the IETF draft of the format (draft-ietf-opsawg-pcap).
const MAGIC: u32 = 0xa1b2_3c4d;
const VERSION: [u16; 2] = [2, 4];
const RAW: u32 = 101;

/// The first bytes of a packet, from its network header on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    /// Time since the epoch.
    pub at: Duration,
    /// At most [`SNAP_LENGTH`] bytes.
    pub head: Vec<u8>,
}

/// The recorded packets.
#[derive(Debug, Default)]
pub(crate) struct Captured {
    /// Packets in the order of their times.
    pub packets: Vec<Packet>,
    /// Packets that the kernel or the lab could not keep.
    pub lost: u64,
}

/// A running capture. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Capture {
    stop: Interrupt,
    thread: Option<JoinHandle<io::Result<Captured>>>,
}

impl Capture {
    /// Starts to record an interface of `host` into a new file.
    ///
    /// # Errors
    /// There is no such interface, no privilege, or the file cannot be written.
    pub(crate) fn start(host: &Host, interface: &str, file: &Path) -> Result<Self> {
        let index = host.index(interface)?;
        let socket = host
            .run(|| CaptureSocket::open(index))?
            .doing(format!("capture packets of {interface}"))?;
        let write = || LabError::io(format!("write {}", file.display()));
        let mut out = BufWriter::new(File::create(file).map_err(write())?);
        out.write_all(&file_header()).map_err(write())?;
        let stop = Interrupt::new();
        let flag = stop.clone();
        let thread = std::thread::Builder::new()
            .name("capture".to_owned())
            .spawn(move || record(socket, out, &flag))
            .doing("start a thread")?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Ends it and returns the packets.
    ///
    /// # Errors
    /// The file could not be written, or the socket failed.
    pub(crate) fn finish(mut self) -> Result<Captured> {
        self.stop.raise();
        let ended = || setup("the thread of a capture ended: this is a bug");
        let thread = self.thread.take().ok_or_else(ended)?;
        thread.join().map_err(|_| ended())?.doing("capture packets")
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            // Its outcome no longer matters.
            let _ = thread.join();
        }
    }
}

fn record(
    mut socket: CaptureSocket,
    mut out: impl Write,
    stop: &Interrupt,
) -> io::Result<Captured> {
    let mut captured = Captured::default();
    let mut buffer = [0; SNAP_LENGTH];
    let mut refused = 0;
    while !stop.is_raised() {
        let received = match socket.receive(&mut buffer) {
            Ok(received) => received,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
                match poll(&mut fds, PollTimeout::from(PATIENCE)) {
                    Ok(_) | Err(Errno::EINTR) => continue,
                    Err(errno) => return Err(errno.into()),
                }
            }
            // The interface was set down; earlier packets stay.
            Err(e) if e.kind() == io::ErrorKind::NetworkDown => break,
            Err(e) => return Err(e),
        };
        if captured.packets.len() >= MAX_PACKETS {
            refused += 1;
            continue;
        }
        let head = &buffer[..received.length];
        out.write_all(&packet_header(
            received.at,
            head.len(),
            received.packet_length,
        ))?;
        out.write_all(head)?;
        captured.packets.push(Packet {
            at: received.at,
            head: head.to_vec(),
        });
    }
    out.flush()?;
    // Processors deliver their packets independently.
    captured.packets.sort_by_key(|packet| packet.at);
    captured.lost = socket.lost() + refused;
    Ok(captured)
}

/// Returns the header of the file: magic number, version, time zone and accuracy (both always 0),
/// maximum bytes of a packet, kind of packets.
fn file_header() -> [u8; 24] {
    let mut header = [0; 24];
    header[..4].copy_from_slice(&MAGIC.to_le_bytes());
    header[4..6].copy_from_slice(&VERSION[0].to_le_bytes());
    header[6..8].copy_from_slice(&VERSION[1].to_le_bytes());
    header[16..20].copy_from_slice(&(SNAP_LENGTH as u32).to_le_bytes());
    header[20..].copy_from_slice(&RAW.to_le_bytes());
    header
}

/// Returns the header of a packet: seconds, nanoseconds, bytes in the file, bytes of the packet.
fn packet_header(at: Duration, length: usize, packet_length: usize) -> [u8; 16] {
    let mut header = [0; 16];
    let words = [
        at.as_secs() as u32,
        at.subsec_nanos(),
        length as u32,
        packet_length as u32,
    ];
    for (field, word) in header.chunks_exact_mut(4).zip(words) {
        field.copy_from_slice(&word.to_le_bytes());
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes as in the figures of draft-ietf-opsawg-pcap.
    #[test]
    fn headers_are_those_of_the_format() {
        assert_eq!(
            file_header(),
            [
                0x4d, 0x3c, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 128, 0, 0, 0, 101, 0,
                0, 0
            ]
        );
        let header = packet_header(Duration::new(0x0102, 3), 128, 0x0500);
        assert_eq!(header, [2, 1, 0, 0, 3, 0, 0, 0, 128, 0, 0, 0, 0, 5, 0, 0]);
    }
}
