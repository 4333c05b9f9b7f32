//! Places for connections, a share of them for each source: a connection for which there is none is closed at once, before TLS.

use std::collections::HashMap;
use std::future::{Ready, ready};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum_server::accept::Accept;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::Service;

use super::limit::{Limits, Source};

/// How long what was sent may stay unacknowledged, or unsent because the other end takes nothing: a
/// long answer to somebody who does not read it takes memory and a place.
const UNREAD: Duration = Duration::from_secs(30);
/// Bytes of answers that the kernel holds for one connection; it takes twice as much (socket(7)). By itself it goes up to megabytes.
const SEND_BUFFER: usize = 128 << 10;

/// Gives out places.
#[derive(Clone)]
pub(super) struct Admit {
    places: Arc<Semaphore>,
    of_a_source: usize,
    sources: Arc<Sources>,
    limits: Arc<Limits>,
}

/// Connections of each source that has any.
#[derive(Default)]
struct Sources(Mutex<HashMap<Source, usize>>);

impl Sources {
    fn all(&self) -> MutexGuard<'_, HashMap<Source, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place, until it is dropped.
struct Place {
    _of_all: OwnedSemaphorePermit,
    source: Source,
    sources: Arc<Sources>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.sources.all();
        if let Some(count) = all.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.source);
            }
        }
    }
}

impl Admit {
    /// With so many places in all and for one source. How often a source may connect is counted in `limits`.
    pub fn new(places: usize, of_a_source: usize, limits: Arc<Limits>) -> Admit {
        Admit {
            places: Arc::new(Semaphore::new(places)),
            of_a_source,
            sources: Arc::default(),
            limits,
        }
    }

    fn admit<S>(&self, stream: TcpStream, service: S) -> io::Result<(TcpStream, Placed<S>)> {
        let from = stream.peer_addr()?.ip();
        if !self.limits.may_connect(from) {
            return Err(io::Error::other("its source connects too often"));
        }
        let place = Arc::clone(&self.places).try_acquire_owned();
        let place = place.map_err(|_| io::Error::other("all places are taken"))?;
        let source = Source::of(from);
        let mut all = self.sources.all();
        let count = all.entry(source).or_default();
        if *count >= self.of_a_source {
            return Err(io::Error::other("all places of its source are taken"));
        }
        *count += 1;
        drop(all);
        let place = Place {
            _of_all: place,
            source,
            sources: Arc::clone(&self.sources),
        };
        stream.set_nodelay(true)?;
        let socket = SockRef::from(&stream);
        socket.set_tcp_user_timeout(Some(UNREAD))?;
        socket.set_send_buffer_size(SEND_BUFFER)?;
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
    _place: Arc<Place>,
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
    use tokio::net::{TcpListener, TcpSocket};

    /// Connections from these addresses, one after the other, with places for `places` and two of a source.
    async fn connections(
        places: usize,
    ) -> impl AsyncFn([u8; 4]) -> (TcpStream, io::Result<Placed<()>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let address = listener.local_addr().expect("an address");
        let admit = Admit::new(places, 2, Arc::new(Limits::new()));
        async move |from| {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.bind((from, 0).into()).expect("bound");
            let client = socket.connect(address).await.expect("a connection");
            let (server, _) = listener.accept().await.expect("its other end");
            let placed = admit.accept(server, ()).await.map(|(_, placed)| placed);
            (client, placed)
        }
    }

    #[tokio::test]
    async fn a_place_is_free_again_when_the_connection_is_gone() {
        let connect = connections(1).await;
        let from = [127, 0, 0, 1];
        let (_client, first) = connect(from).await;
        let placed = first.expect("there is a place");
        // The handshake and the requests of one connection share it.
        let shared = placed.clone();
        let (_client, second) = connect(from).await;
        assert!(second.is_err());
        drop(placed);
        let (_client, third) = connect(from).await;
        assert!(third.is_err());
        drop(shared);
        let (_client, fourth) = connect(from).await;
        assert!(fourth.is_ok());
    }

    #[tokio::test]
    async fn a_source_has_its_share_of_the_places_and_another_has_its_own() {
        let connect = connections(10).await;
        let [one, other] = [[127, 0, 0, 1], [127, 0, 0, 2]];
        let (_client, first) = connect(one).await;
        let first = first.expect("a place");
        let (_client, second) = connect(one).await;
        assert!(second.is_ok() && connect(one).await.1.is_err());
        assert!(connect(other).await.1.is_ok());
        drop(first);
        assert!(connect(one).await.1.is_ok());
    }
}
