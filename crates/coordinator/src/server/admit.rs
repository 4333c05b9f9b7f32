//! Places for connections, a share of them for each source: a connection for which there is none is closed at once, before TLS.
//! A connection ends whose answers are taken too slowly ([`Pace`]): they hold memory that others wait for.

use std::collections::HashMap;
use std::future::{Ready, ready};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::HttpBody;
use axum::http::Response;
use axum_server::accept::Accept;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep_until};
use tower::Service;

use super::limit::{Limits, Source};

/// How long what was sent may stay unacknowledged, or unsent because the other end takes nothing: a
/// long answer to somebody who does not read it takes memory and a place.
const UNREAD: Duration = Duration::from_secs(30);
/// Bytes of answers that the kernel holds for one connection; it takes twice as much (socket(7)). By itself it goes up to megabytes.
const SEND_BUFFER: usize = 128 << 10;

/// The slowest that an answer may be taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Time for each answer, however short.
    pub grace: Duration,
    /// Bytes a second beside that.
    pub rate: f64,
}

/// Gives out places.
#[derive(Clone)]
pub(super) struct Admit {
    places: Arc<Semaphore>,
    of_a_source: usize,
    pace: Pace,
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
    pub fn new(places: usize, of_a_source: usize, pace: Pace, limits: Arc<Limits>) -> Admit {
        Admit {
            places: Arc::new(Semaphore::new(places)),
            of_a_source,
            pace,
            sources: Arc::default(),
            limits,
        }
    }

    fn admit<S>(&self, stream: TcpStream, service: S) -> io::Result<(InTime, Placed<S>)> {
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
        let due = Arc::new(Due {
            pace: self.pace,
            state: Mutex::default(),
            limits: Arc::clone(&self.limits),
        });
        let stream = InTime {
            stream,
            due: Arc::clone(&due),
            sleep: None,
        };
        let placed = Placed {
            service,
            due,
            _place: Arc::new(place),
        };
        Ok((stream, placed))
    }
}

impl<S> Accept<TcpStream, S> for Admit {
    type Stream = InTime;
    type Service = Placed<S>;
    type Future = Ready<io::Result<(InTime, Placed<S>)>>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        ready(self.admit(stream, service))
    }
}

/// Until when the answers of a connection have to be taken.
struct Due {
    pace: Pace,
    state: Mutex<DueState>,
    /// Counts those that are not.
    limits: Arc<Limits>,
}

#[derive(Clone, Copy, Debug, Default)]
struct DueState {
    /// `None` before the first answer.
    at: Option<Instant>,
    /// The kernel took nothing when it was last tried.
    is_blocked: bool,
    is_late: bool,
}

impl Due {
    fn state(&self) -> MutexGuard<'_, DueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another answer is ready. As long as earlier ones are not taken it has no time of its own, however many are asked for.
    fn answer(&self, bytes: u64) {
        let mut state = self.state();
        let from = state.at.filter(|_| state.is_blocked);
        let from = from.unwrap_or_else(|| Instant::now() + self.pace.grace);
        state.at = Some(from + Duration::from_secs_f64(bytes as f64 / self.pace.rate));
    }

    fn is_late(&self) -> io::Error {
        let mut state = self.state();
        if !state.is_late {
            state.is_late = true;
            self.limits.late.fetch_add(1, Ordering::Relaxed);
        }
        io::Error::new(io::ErrorKind::TimedOut, "its answer is not taken in time")
    }
}

/// A connection that ends when its answers are not taken in time.
pub(super) struct InTime {
    stream: TcpStream,
    due: Arc<Due>,
    /// Wakes who waits to write.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl InTime {
    fn written(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let mut state = self.due.state();
        state.is_blocked = written.is_pending();
        let at = state.at.filter(|_| state.is_blocked);
        drop(state);
        let Some(at) = at else {
            return written;
        };
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if sleep.deadline() != at {
            sleep.as_mut().reset(at);
        }
        match sleep.as_mut().poll(context) {
            Poll::Ready(()) => {
                // Else the kernel would keep what it has of the answer for as long as that is taken.
                let _ = SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
                Poll::Ready(Err(self.due.is_late()))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for InTime {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for InTime {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.written(context, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, bytes);
        this.written(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

/// A connection's service, which keeps the place for as long as the connection has it, and says when an answer has to be taken.
#[derive(Clone)]
pub(super) struct Placed<S> {
    service: S,
    due: Arc<Due>,
    _place: Arc<Place>,
}

impl<S, R, B> Service<R> for Placed<S>
where
    S: Service<R, Response = Response<B>>,
    S::Future: Send + 'static,
    B: HttpBody,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let answer = self.service.call(request);
        let due = Arc::clone(&self.due);
        Box::pin(async move {
            let answer = answer.await?;
            due.answer(answer.body().size_hint().lower());
            Ok(answer)
        })
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
        let pace = Pace {
            grace: Duration::MAX,
            rate: 1.0,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let address = listener.local_addr().expect("an address");
        let admit = Admit::new(places, 2, pace, Arc::new(Limits::new()));
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
