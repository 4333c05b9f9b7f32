//! Places for connections: whoever comes when all are taken is let go at once.

use std::future::{Ready, ready};
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum_server::accept::Accept;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::Service;

/// How long what was sent may stay unacknowledged, or unsent because the other end takes nothing: a
/// long answer to somebody who does not read it takes memory and a place.
const UNREAD: Duration = Duration::from_secs(30);

/// Gives out places.
#[derive(Clone)]
pub(super) struct Admit {
    places: Arc<Semaphore>,
}

impl Admit {
    /// With so many places.
    pub fn new(places: usize) -> Admit {
        Admit {
            places: Arc::new(Semaphore::new(places)),
        }
    }

    fn admit<S>(&self, stream: TcpStream, service: S) -> io::Result<(TcpStream, Placed<S>)> {
        let place = Arc::clone(&self.places).try_acquire_owned();
        let place = place.map_err(|_| io::Error::other("all places are taken"))?;
        stream.set_nodelay(true)?;
        SockRef::from(&stream).set_tcp_user_timeout(Some(UNREAD))?;
        let placed = Placed {
            service,
            _place: Arc::new(place),
        };
        Ok((stream, placed))
    }
}

impl<S> Accept<TcpStream, S> for Admit {
    type Stream = TcpStream;
    type Service = Placed<S>;
    type Future = Ready<io::Result<(TcpStream, Placed<S>)>>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        ready(self.admit(stream, service))
    }
}

/// A connection's service, which keeps the place for as long as the connection has it.
#[derive(Clone)]
pub(super) struct Placed<S> {
    service: S,
    _place: Arc<OwnedSemaphorePermit>,
}

impl<S, R> Service<R> for Placed<S>
where
    S: Service<R>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: R) -> Self::Future {
        self.service.call(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_place_is_free_again_when_the_connection_is_gone() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let address = listener.local_addr().expect("an address");
        let admit = Admit::new(1);
        let connect = async || {
            let client = TcpStream::connect(address).await.expect("a connection");
            let (server, _) = listener.accept().await.expect("its other end");
            (client, admit.accept(server, ()).await)
        };
        let (_client, first) = connect().await;
        let (_, placed) = first.expect("there is a place");
        // The handshake and the requests of one connection share it.
        let shared = placed.clone();
        let (_client, second) = connect().await;
        assert!(second.is_err());
        drop(placed);
        let (_client, third) = connect().await;
        assert!(third.is_err());
        drop(shared);
        let (_client, fourth) = connect().await;
        assert!(fourth.is_ok());
    }
}
