//! Traffic through an observed tunnel: a datagram every few milliseconds with its answer, and a TCP
//! connection with the same exchange.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use seikan_ui::Interrupt;

use crate::error::{Doing, Result};
use crate::site::Host;

/// Usual interval between two requests.
pub(crate) const EVERY: Duration = Duration::from_millis(10);
/// Port on which requests are answered.
const PORT: u16 = 7;
/// Timeout of a connection attempt.
const CONNECT: Duration = Duration::from_secs(10);

/// An exchange between two hosts, until it is dropped.
pub(crate) struct Flow {
    stop: Interrupt,
    seen: Arc<Mutex<Seen>>,
    threads: Vec<JoinHandle<()>>,
}

/// Answers to the requests so far.
#[derive(Clone, Copy, Default)]
pub(crate) struct Seen {
    /// Time of the first answer.
    pub(crate) first: Option<Instant>,
    /// Time of the latest answer.
    pub(crate) latest: Option<Instant>,
    /// Longest time between two answers since the last reset.
    pub(crate) gap: Duration,
}

impl Flow {
    /// Makes `from` send a request to `target`, an address of `to`, at this interval, and `to`
    /// answer.
    pub(crate) fn start(from: &Host, to: &Host, target: IpAddr, every: Duration) -> Result<Flow> {
        let (asking, answering) = (socket(from, 0, every)?, socket(to, PORT, every)?);
        let mut buffer = [0; 64];
        let echo = move || -> io::Result<()> {
            let (length, from) = answering.recv_from(&mut buffer)?;
            // Without a return path, the answer counts as lost.
            let _ = answering.send_to(&buffer[..length], from);
            Ok(())
        };
        let mut next = Instant::now();
        let ask = move || -> io::Result<()> {
            if Instant::now() >= next {
                next = Instant::now() + every;
                // There may be no tunnel yet.
                let _ = asking.send_to(b"are you there?", (target, PORT));
            }
            asking.recv_from(&mut buffer).map(drop)
        };
        // Nothing has arrived, or an ICMP error about an earlier datagram.
        Ok(Self::of(echo, ask, |_| true))
    }

    /// Exchanges requests and answers over one TCP connection, which is opened first.
    pub(crate) fn over_tcp(from: &Host, to: &Host, target: IpAddr) -> Result<Flow> {
        let listen = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT));
        let connect = || TcpStream::connect_timeout(&SocketAddr::new(target, PORT), CONNECT);
        let failed = "connect through the tunnel";
        let listener = to.run(listen)?.doing("listen")?;
        let mut asking = from.run(connect)?.doing(failed)?;
        let (mut answering, _) = listener.accept().doing(failed)?;
        for stream in [&asking, &answering] {
            stream
                .set_nodelay(true)
                .and_then(|()| stream.set_read_timeout(Some(EVERY)))
                .and_then(|()| stream.set_write_timeout(Some(EVERY)))
                .doing(failed)?;
        }
        let echo = move || -> io::Result<()> {
            let length = read(&mut answering)?;
            // If the buffer is full, the answer is dropped: the sender repeats its requests.
            let _ = answering.write(&[0; 64][..length]);
            Ok(())
        };
        let ask = move || -> io::Result<()> {
            // The connection's buffer may be full.
            asking.write(&[0]).map(drop).or_else(unless_later)?;
            read(&mut asking)?;
            std::thread::sleep(EVERY);
            Ok(())
        };
        Ok(Self::of(echo, ask, |error| unless_later(error).is_ok()))
    }

    /// Answers and sends requests in threads, until an error ends one of them. Records the answers
    /// that `ask` receives.
    fn of(
        echo: impl FnMut() -> io::Result<()> + Send + 'static,
        mut ask: impl FnMut() -> io::Result<()> + Send + 'static,
        goes_on: fn(io::Error) -> bool,
    ) -> Flow {
        let (stop, seen) = (Interrupt::new(), Arc::<Mutex<Seen>>::default());
        let note = Arc::clone(&seen);
        let ask = move || -> io::Result<()> {
            ask()?;
            note.lock().unwrap_or_else(PoisonError::into_inner).note();
            Ok(())
        };
        let repeat =
            |mut work: Box<dyn FnMut() -> io::Result<()> + Send>| {
                let stop = stop.clone();
                std::thread::spawn(move || {
                    while !stop.is_raised() && work().map_or_else(goes_on, |()| true) {}
                })
            };
        Flow {
            threads: vec![repeat(Box::new(echo)), repeat(Box::new(ask))],
            stop,
            seen,
        }
    }

    /// Returns the answers so far.
    pub(crate) fn seen(&self) -> Seen {
        *self.lock()
    }

    /// Resets the longest gap.
    pub(crate) fn reset(&self) {
        self.lock().gap = Duration::ZERO;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    /// Returns the longest time without an answer, including the time since the latest one.
    pub(crate) fn longest(&self) -> Duration {
        let since = self.latest.map_or(Duration::ZERO, |at| at.elapsed());
        self.gap.max(since)
    }

    fn note(&mut self) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        if let Some(latest) = self.latest.replace(now) {
            self.gap = self.gap.max(now - latest);
        }
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.stop.raise();
        for thread in self.threads.drain(..) {
            // A thread that has panicked has answered nothing, which the result shows.
            let _ = thread.join();
        }
    }
}

/// Reads at most 64 bytes; the end of a connection is an error.
fn read(stream: &mut TcpStream) -> io::Result<usize> {
    match stream.read(&mut [0; 64])? {
        0 => Err(ErrorKind::UnexpectedEof.into()),
        length => Ok(length),
    }
}

/// Returns the error, unless it only means that the call would block.
fn unless_later(error: io::Error) -> io::Result<()> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

/// Opens a socket in a host whose reads wait only for a short time.
fn socket(host: &Host, port: u16, every: Duration) -> Result<UdpSocket> {
    let open = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
        socket.set_read_timeout(Some(every / 2))?;
        io::Result::Ok(socket)
    };
    host.run(open)?
        .doing(format!("open a socket on host {}", host.name))
}
