//! TCP connections inside a tunnel.

use crate::error::Error;
use seikan_userspace::{Ends, Stream, StreamEnd};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::runtime::Handle;

/// A TCP connection inside the tunnel.
///
/// It reads and writes as tokio's `TcpStream` does: `shutdown` ends the sending direction, a read
/// returns 0 bytes after the far end has ended its direction, and [`tokio::io::split`] makes two
/// halves. Written bytes are sent at once (as with `TCP_NODELAY`). After a reset by the far end, a
/// timeout, or the end of the tunnel, reads fail with `ConnectionReset` and writes with
/// `BrokenPipe`.
///
/// Dropping the stream ends the connection: all written bytes are still delivered, but unread
/// received bytes cause a reset.
#[derive(Debug)]
pub struct TcpStream {
    socket: UnixStream,
    end: Arc<StreamEnd>,
    ends: Ends,
}

impl TcpStream {
    pub(crate) fn new(stream: Stream) -> Result<TcpStream, Error> {
        Handle::try_current().map_err(|_| Error::NoRuntime)?;
        Ok(TcpStream {
            socket: UnixStream::from_std(stream.socket)?,
            end: stream.end,
            ends: stream.ends,
        })
    }

    /// Returns the address and port of this host inside the tunnel.
    pub fn local_addr(&self) -> SocketAddr {
        self.ends.local
    }

    /// Returns the address and port of the far end.
    pub fn peer_addr(&self) -> SocketAddr {
        self.ends.remote
    }

    /// Resets the connection: bytes that are not yet delivered are lost, and the far end sees an error.
    pub fn reset(self) {
        self.end.reset();
    }
}

impl Drop for TcpStream {
    fn drop(&mut self) {
        self.end.shut_down();
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = (buf.filled().len(), buf.remaining());
        let read = Pin::new(&mut self.socket).poll_read(context, buf);
        let is_end = before.1 > 0 && buf.filled().len() == before.0;
        match read {
            Poll::Ready(Ok(())) if is_end && !self.end.is_finished() => {
                Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
            }
            other => other,
        }
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end.shut_down();
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}
