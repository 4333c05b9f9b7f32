//! Moves bytes between a connection of the host and a connection inside the tunnel, without a
//! buffer of its own: bytes from the host are read into the send buffer of the inner connection,
//! and bytes to the host are written from its receive buffer.

use crate::host_stream::HostStream;
use smoltcp::socket::tcp::{RecvError, Socket, State};
use std::io::{ErrorKind, Read, Write};

/// Maximum number of bytes that are moved in each direction before other connections get their
/// share.
const SHARE: usize = 512 * 1024;

/// Maximum number of reads that discard the rest of a refused request.
const UNREAD_CHUNKS: usize = 16;

/// The host's side of a connection.
#[derive(Debug)]
pub(crate) struct Splice {
    pub host: HostStream,
    /// Whether a read may return something. The events are edge-triggered.
    pub readable: bool,
    /// Whether a write may accept something.
    pub writable: bool,
    /// Whether the host's end is closed in both directions.
    pub closed: bool,
    /// Whether the host sends nothing more; bytes that it has sent may be unread.
    pub ended: bool,
    /// Whether everything from the host has been read.
    host_ended: bool,
    /// Whether everything from the far end has been written to the host.
    inside_ended: bool,
}

/// Result of one call of [`Splice::pump`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Bytes from the tunnel.
    pub bytes_in: u64,
    /// Bytes to the tunnel.
    pub bytes_out: u64,
    /// Whether there is more to move at once.
    pub more: bool,
    /// Whether the connection is over on both sides.
    pub over: bool,
}

impl Splice {
    pub fn new(host: HostStream) -> Splice {
        Splice {
            host,
            readable: true,
            writable: true,
            closed: false,
            ended: false,
            host_ended: false,
            inside_ended: false,
        }
    }

    /// Whether either side has ended its sending direction.
    pub fn is_ending(&self) -> bool {
        self.ended || self.closed || self.host_ended || self.inside_ended
    }

    /// Whether the host sends nothing more; bytes that it has sent may be unread.
    pub fn has_ended(&self) -> bool {
        self.host_ended || self.closed || self.host.is_shut_down()
    }

    /// Ends the direction to the client, and discards the rest of its request: the kernel resets a
    /// connection that is closed with unread bytes, and the client would lose the answer.
    pub fn end_request(&mut self) {
        self.host.shut_down();
        let mut chunk = [0; 4096];
        for _ in 0..UNREAD_CHUNKS {
            if !matches!(self.host.read(&mut chunk), Ok(1..)) {
                break;
            }
        }
    }

    /// Moves what can be moved.
    pub fn pump(&mut self, inside: &mut Socket<'_>) -> Moved {
        let mut moved = Moved::default();
        // Reads would report a reset only when there is space in the send buffer. A far end that keeps its
        // window closed never makes any.
        let reset = self.closed && (self.host.is_reset() || self.host.has_failed());
        let alive = !reset && self.outward(inside, &mut moved) && self.inward(inside, &mut moved);
        // In LAST-ACK, smoltcp 0.14 ignores windows in segments that acknowledge nothing new, so
        // bytes that wait for a window or a retransmission would wait forever. Therefore FIN is
        // sent only after all bytes.
        if self.host_ended && (inside.state() != State::CloseWait || inside.send_queue() == 0) {
            inside.close();
        }
        if !alive {
            inside.abort();
            self.host.reset();
            moved.over = true;
            return moved;
        }
        match inside.state() {
            State::Closed | State::TimeWait if self.host_ended && self.inside_ended => {
                moved.over = true;
            }
            // The far end is done, but the host has not read everything yet.
            State::Closed if inside.can_recv() => {}
            State::Closed if !self.inside_ended || !self.host_ended => {
                self.host.reset();
                moved.over = true;
            }
            _ => {}
        }
        moved
    }

    /// Moves bytes from the host to the inside. Returns false if the host's connection failed.
    fn outward(&mut self, inside: &mut Socket<'_>, moved: &mut Moved) -> bool {
        let mut share = SHARE;
        while self.readable && !self.host_ended && inside.can_send() {
            if share == 0 {
                moved.more = true;
                return true;
            }
            let host = &mut self.host;
            let read = inside.send(|space| {
                let length = space.len().min(share);
                match host.read(&mut space[..length]) {
                    Ok(length) => (length, Ok(length)),
                    Err(error) => (0, Err(error)),
                }
            });
            match read {
                Ok(Ok(0)) if self.host.is_reset() => return false,
                Ok(Ok(0)) => self.host_ended = true,
                Ok(Ok(length)) => {
                    moved.bytes_out += length as u64;
                    share -= length;
                }
                Ok(Err(error)) if error.kind() == ErrorKind::Interrupted => {}
                Ok(Err(error)) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
                Ok(Err(_)) => return false,
                Err(_) => return true,
            }
        }
        true
    }

    /// Moves bytes from the inside to the host. Returns false if the host's connection failed.
    fn inward(&mut self, inside: &mut Socket<'_>, moved: &mut Moved) -> bool {
        let mut share = SHARE;
        while self.writable && !self.inside_ended {
            if share == 0 {
                moved.more = true;
                return true;
            }
            let host = &mut self.host;
            let written = inside.recv(|bytes| {
                if bytes.is_empty() {
                    return (0, Ok(0));
                }
                let length = bytes.len().min(share);
                match host.write(&bytes[..length]) {
                    Ok(length) => (length, Ok(length)),
                    Err(error) => (0, Err(error)),
                }
            });
            match written {
                Ok(Ok(0)) => break,
                Ok(Ok(length)) => {
                    moved.bytes_in += length as u64;
                    share -= length;
                }
                Ok(Err(error)) if error.kind() == ErrorKind::Interrupted => {}
                Ok(Err(error)) if error.kind() == ErrorKind::WouldBlock => self.writable = false,
                Ok(Err(_)) => return false,
                Err(RecvError::Finished) => {
                    self.inside_ended = true;
                    self.host.finish();
                }
                Err(RecvError::InvalidState) => break,
            }
        }
        true
    }
}
