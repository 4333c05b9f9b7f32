//! Link to a server: UDP, TCP or TLS.

use super::proxied::{Run, whole};
use seikan_observe::{DropCounts, DropReason};
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::udp::{ReceiveBatch, UdpSocket};
use seikan_tls::Stream;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;

/// Maximum number of reads from a stream in a row.
const MAX_READS: usize = 32;

/// An open link.
#[derive(Debug)]
pub(crate) enum Link {
    Udp {
        socket: UdpSocket,
        server: SocketAddr,
    },
    Stream(Stream),
}

impl Link {
    /// Registers the link in the worker's loop. Events of a stream are edge-triggered: it must be
    /// read and written until the call would block.
    pub(super) fn watch(&self, epoll: &Epoll, token: u64) -> io::Result<()> {
        match self {
            Link::Udp { socket, .. } => epoll.add(socket, token, Interest::Read),
            Link::Stream(stream) => epoll.add_edge(stream, token),
        }
    }

    /// Receives messages into the arena of `batch` and adds their positions to `messages`.
    /// Datagrams that are not valid messages from the server are counted in `drops`. Returns
    /// whether there may be more.
    ///
    /// # Errors
    /// The connection is lost. Messages added before the error are complete.
    pub(super) fn receive(
        &mut self,
        batch: &mut ReceiveBatch,
        messages: &mut Vec<Range<usize>>,
        drops: &mut DropCounts,
    ) -> io::Result<bool> {
        match self {
            Link::Udp { socket, server } => {
                // An error belongs to an earlier send. Its loss is detected by the missing answer.
                if socket.receive(batch).is_err() {
                    return Ok(false);
                }
                for meta in batch.metas() {
                    let count = meta.datagrams();
                    if meta.source != *server {
                        drops.add(DropReason::UnknownSource, count);
                    } else if meta.truncated {
                        drops.add(DropReason::Truncated, count);
                    } else if meta.length == 0 {
                        drops.add(DropReason::NoChannel, count);
                    } else {
                        messages.extend(meta.segments());
                    }
                }
                // The loop reports the socket again if there is more.
                Ok(false)
            }
            Link::Stream(stream) => {
                let arena = batch.parts_mut().1;
                let mut used = 0;
                for _ in 0..MAX_READS {
                    while let Some(frame) = stream.peek()? {
                        let range = used..used + frame.len();
                        let Some(space) = arena.get_mut(range.clone()) else {
                            return Ok(true);
                        };
                        space.copy_from_slice(frame);
                        used = range.end;
                        messages.push(range);
                        stream.take();
                    }
                    if !stream.receive()? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }

    /// Sends a request or an indication. Its sender repeats it if it is lost.
    pub(super) fn say(&mut self, message: &[u8]) {
        match self {
            Link::Udp { socket, server } => drop(socket.send(&whole(*server, message))),
            Link::Stream(stream) => {
                let _ = stream.push_request(&[message]);
            }
        }
    }

    /// Sends messages and returns the number sent. The others are counted in `drops`.
    pub(super) fn send(&mut self, run: &Run, drops: &mut DropCounts) -> u64 {
        let stream = match self {
            Link::Udp { socket, server } => return run.send(socket, *server, drops),
            Link::Stream(stream) => stream,
        };
        let mut sent = 0;
        for message in run.bytes.chunks(run.size.max(1)) {
            if stream.push(&[message]) {
                sent += 1
            } else {
                drops.add(DropReason::SendNoBuffers, 1)
            }
        }
        sent
    }

    /// Sends pending bytes, as many as the kernel accepts.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        match self {
            Link::Udp { .. } => Ok(()),
            Link::Stream(stream) => stream.flush().map(drop),
        }
    }

    /// Returns the number of drops by the kernel at a full receive buffer.
    pub(super) fn receive_queue_drops(&self) -> u64 {
        match self {
            Link::Udp { socket, .. } => socket.receive_queue_drops(),
            Link::Stream(_) => 0,
        }
    }
}
