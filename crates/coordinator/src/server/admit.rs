//! Limits of connections: a bounded number of slots, and a share of them for each source. A
//! connection without a slot is closed at once, before TLS. A connection whose client reads answers
//! too slowly ([`Pace`]) is closed as well, because unread answers hold memory.

use std::future::{Ready, ready};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
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

use super::limit::{BySource, Limits};
use crate::lock;

/// `TCP_USER_TIMEOUT` (tcp(7)): maximum time for which sent data may stay unacknowledged, or unsent
/// because the peer's window is closed. An unread answer holds memory and a slot.
const ACK_TIMEOUT: Duration = Duration::from_secs(30);
/// Send buffer of a connection in the kernel, in bytes; the kernel doubles the value (socket(7)).
/// Without a limit it grows to megabytes.
const SEND_BUFFER: usize = 128 << 10;

/// Minimum rate at which answers must be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Time allowed for each answer of any length.
    pub grace: Duration,
    /// Rate for the bytes of an answer, in bytes per second, in addition to `grace`.
    pub rate: f64,
}

/// Admits connections: limits them, and wraps their streams and services.
#[derive(Clone)]
pub(super) struct Admit {
    slots: Arc<Semaphore>,
    sources: Arc<BySource>,
    pace: Pace,
    limits: Arc<Limits>,
}

impl Admit {
    /// Creates a limit of `slots` connections in total and `per_source` of each source. `limits`
    /// bounds the rate of new connections of a source.
    pub fn new(slots: usize, per_source: usize, pace: Pace, limits: Arc<Limits>) -> Admit {
        Admit {
            slots: Arc::new(Semaphore::new(slots)),
            sources: Arc::new(BySource::new(per_source)),
            pace,
            limits,
        }
    }

    fn admit<S>(
        &self,
        stream: TcpStream,
        service: S,
    ) -> io::Result<(PacedStream, AdmittedService<S>)> {
        let from = stream.peer_addr()?.ip();
        if !self.limits.may_connect(from) {
            return Err(io::Error::other("the source connects too often"));
        }
        let permit = |of: Arc<Semaphore>, full| {
            let permit = of.try_acquire_owned();
            permit.map_err(|_| io::Error::other(full))
        };
        let slots = Arc::clone(&self.slots);
        let slot = [
            permit(slots, "the maximum number of connections is reached")?,
            permit(
                self.sources.of(from),
                "the source has its maximum number of connections",
            )?,
        ];
        stream.set_nodelay(true)?;
        let socket = SockRef::from(&stream);
        socket.set_tcp_user_timeout(Some(ACK_TIMEOUT))?;
        socket.set_send_buffer_size(SEND_BUFFER)?;
        let deadline = Arc::new(Deadline {
            pace: self.pace,
            state: Mutex::default(),
            limits: Arc::clone(&self.limits),
        });
        let stream = PacedStream {
            stream,
            deadline: Arc::clone(&deadline),
            sleep: None,
        };
        let admitted = AdmittedService {
            service,
            deadline,
            _slot: Arc::new(slot),
        };
        Ok((stream, admitted))
    }
}

impl<S> Accept<TcpStream, S> for Admit {
    type Stream = PacedStream;
    type Service = AdmittedService<S>;
    type Future = Ready<io::Result<(PacedStream, AdmittedService<S>)>>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        ready(self.admit(stream, service))
    }
}

/// Deadline by which the pending answers of a connection must be read.
struct Deadline {
    pace: Pace,
    state: Mutex<DeadlineState>,
    /// Counts the connections that miss their deadline.
    limits: Arc<Limits>,
}

#[derive(Clone, Copy, Debug, Default)]
struct DeadlineState {
    /// `None` before the first answer.
    at: Option<Instant>,
    /// The latest write would have blocked.
    is_blocked: bool,
    is_late: bool,
}

impl Deadline {
    fn state(&self) -> MutexGuard<'_, DeadlineState> {
        lock(&self.state)
    }

    /// Extends the deadline for another answer. While earlier answers are unread, the new one adds
    /// time for its bytes only, so pipelined requests gain no extra time.
    fn answer(&self, bytes: u64) {
        let mut state = self.state();
        let from = state.at.filter(|_| state.is_blocked);
        let from = from.unwrap_or_else(|| Instant::now() + self.pace.grace);
        state.at = Some(from + Duration::from_secs_f64(bytes as f64 / self.pace.rate));
    }

    fn missed(&self) -> io::Error {
        let mut state = self.state();
        if !state.is_late {
            state.is_late = true;
            self.limits.slow_connections.fetch_add(1, Ordering::Relaxed);
        }
        io::Error::new(
            io::ErrorKind::TimedOut,
            "the client did not read an answer in time",
        )
    }
}

/// Stream of a connection that fails once an answer misses its deadline.
pub(super) struct PacedStream {
    stream: TcpStream,
    deadline: Arc<Deadline>,
    /// Timer that wakes a blocked write at the deadline.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl PacedStream {
    fn written(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let mut state = self.deadline.state();
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
                // Without this option, the kernel would keep its part of the answer while the
                // client reads slowly.
                let _ = SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
                Poll::Ready(Err(self.deadline.missed()))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for PacedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for PacedStream {
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

/// Service of a connection. It keeps the slot as long as the connection lives, and sets the
/// deadline of each answer.
#[derive(Clone)]
pub(super) struct AdmittedService<S> {
    service: S,
    deadline: Arc<Deadline>,
    /// Slots of the connection: one of all, and one of its source.
    _slot: Arc<[OwnedSemaphorePermit; 2]>,
}

impl<S, R, B> Service<R> for AdmittedService<S>
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
        let deadline = Arc::clone(&self.deadline);
        Box::pin(async move {
            let answer = answer.await?;
            deadline.answer(answer.body().size_hint().lower());
            Ok(answer)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::{TcpListener, TcpSocket};

    /// Returns a function that connects from an address to a server with `slots` slots, two of them
    /// for each source.
    async fn connections(
        slots: usize,
    ) -> impl AsyncFn([u8; 4]) -> (TcpStream, io::Result<AdmittedService<()>>) {
        let pace = Pace {
            grace: Duration::MAX,
            rate: 1.0,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let address = listener.local_addr().expect("an address");
        let admit = Admit::new(slots, 2, pace, Arc::new(Limits::new()));
        async move |from| {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.bind((from, 0).into()).expect("bound");
            let client = socket.connect(address).await.expect("a connection");
            let (server, _) = listener.accept().await.expect("its other end");
            let admitted = admit.accept(server, ()).await.map(|(_, admitted)| admitted);
            (client, admitted)
        }
    }

    #[tokio::test]
    async fn a_slot_is_free_once_its_connection_is_closed() {
        let connect = connections(1).await;
        let from = [127, 0, 0, 1];
        let (_client, first) = connect(from).await;
        let admitted = first.expect("a slot");
        // The handshake and the requests of one connection have the same slot.
        let shared = admitted.clone();
        let (_client, second) = connect(from).await;
        assert!(second.is_err());
        drop(admitted);
        let (_client, third) = connect(from).await;
        assert!(third.is_err());
        drop(shared);
        let (_client, fourth) = connect(from).await;
        assert!(fourth.is_ok());
    }

    #[tokio::test]
    async fn each_source_has_its_own_share_of_the_slots() {
        let connect = connections(10).await;
        let [one, other] = [[127, 0, 0, 1], [127, 0, 0, 2]];
        let (_client, first) = connect(one).await;
        let first = first.expect("a slot");
        let (_client, second) = connect(one).await;
        assert!(second.is_ok() && connect(one).await.1.is_err());
        assert!(connect(other).await.1.is_ok());
        drop(first);
        assert!(connect(one).await.1.is_ok());
    }
}
