//! Listening TCP ports inside a tunnel.

use crate::error::Error;
use crate::stream::TcpStream;
use seikan_userspace::Incoming;
use std::future::poll_fn;
use std::task::{Context, Poll};

/// A TCP port on the addresses of this host inside the tunnel.
///
/// At most 128 connections wait to be accepted. When as many wait, a new attempt is not answered,
/// so its far end tries again; an attempt that was answered earlier is reset when its handshake is
/// complete. In a mesh, attempts that the policy forbids do not reach the listener. Dropping the
/// listener closes the port and resets connections that were not accepted.
#[derive(Debug)]
pub struct TcpListener {
    incoming: Incoming,
}

impl TcpListener {
    pub(crate) fn new(incoming: Incoming) -> TcpListener {
        TcpListener { incoming }
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        self.incoming.port
    }

    /// Accepts the next connection. Nothing is lost if the future is dropped.
    ///
    /// # Errors
    /// [`Error::Ended`]. [`Error::NoRuntime`] and [`Error::System`] concern one connection; others
    /// can be accepted afterwards.
    pub async fn accept(&mut self) -> Result<TcpStream, Error> {
        poll_fn(|context| self.poll_accept(context)).await
    }

    /// Polls for the next connection, as [`TcpListener::accept`] does.
    ///
    /// # Errors
    /// Those of [`TcpListener::accept`].
    pub fn poll_accept(&mut self, context: &mut Context<'_>) -> Poll<Result<TcpStream, Error>> {
        let next = self.incoming.poll_next(context);
        next.map(|stream| TcpStream::new(stream.ok_or(Error::Ended)?))
    }
}
