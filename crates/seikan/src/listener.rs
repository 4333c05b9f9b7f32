//! Listening TCP ports inside a tunnel.

use crate::error::Error;
use crate::stream::TcpStream;
use seikan_userspace::Incoming;
use std::future::poll_fn;
use std::task::{Context, Poll};

/// A TCP port on the addresses of this host inside the tunnel.
///
/// At most 128 connections wait to be accepted. Meanwhile a new attempt is not answered, so its far end tries again; an attempt
/// that was answered before is reset when its handshake is complete. The policy of a mesh applies before. Dropping it closes
/// the port and resets connections that were not accepted.
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
    /// [`Error::Ended`], and [`Error::NoRuntime`], [`Error::System`] about one connection, after which others can be accepted.
    pub async fn accept(&mut self) -> Result<TcpStream, Error> {
        poll_fn(|context| self.poll_accept(context)).await
    }

    /// Accepts the next connection, as [`TcpListener::accept`].
    ///
    /// # Errors
    /// The same.
    pub fn poll_accept(&mut self, context: &mut Context<'_>) -> Poll<Result<TcpStream, Error>> {
        let next = self.incoming.poll_next(context);
        next.map(|stream| TcpStream::new(stream.ok_or(Error::Ended)?))
    }
}
