//! Traffic through an observed tunnel: a datagram every few milliseconds with its answer, and a TCP
//! connection with the same exchange.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Doing, Result};
use crate::site::Host;

/// Between two questions, usually.
pub(crate) const EVERY: Duration = Duration::from_millis(10);
/// Where they are answered.
const PORT: u16 = 7;
/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(10);

/// An exchange between two hosts, until it is dropped.
pub(crate) struct Flow {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    threads: Vec<JoinHandle<()>>,
}

/// Answers to the probes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Seen {
    /// The first answer.
    pub(crate) first: Option<Instant>,
    /// The latest.
    pub(crate) latest: Option<Instant>,
    /// Longest time between two answers since the last query.
    pub(crate) gap: Duration,
}

impl Flow {
    /// Has `from` ask so often and `to`, which is `target` to it, answer.
    pub(crate) fn start(from: &Host, to: &Host, target: IpAddr, every: Duration) -> Result<Flow> {
        let (asking, answering) = (socket(from, 0, every)?, socket(to, PORT, every)?);
        let mut buffer = [0; 64];
        let echo = move || -> io::Result<()> {
            let (length, from) = answering.recv_from(&mut buffer)?;
            // Without a return path it counts as lost.
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
        // Nothing has come, or an error that was sent back of an earlier one.
        Ok(Self::of(echo, ask, |_| true))
    }

    /// The same over one TCP connection, which is made first.
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
            // A full buffer takes it later: the sender repeats its requests.
            let _ = answering.write(&[0; 64][..length]);
            Ok(())
        };
        let ask = move || -> io::Result<()> {
            // Its buffer may be full.
            asking.write(&[0]).map(drop).or_else(unless_later)?;
            read(&mut asking)?;
            std::thread::sleep(EVERY);
            Ok(())
        };
        Ok(Self::of(echo, ask, |error| unless_later(error).is_ok()))
    }

    /// Answers and asks in threads, until an error ends one of them; notes what `ask` is answered.
    fn of(
        echo: impl FnMut() -> io::Result<()> + Send + 'static,
        mut ask: impl FnMut() -> io::Result<()> + Send + 'static,
        goes_on: fn(io::Error) -> bool,
    ) -> Flow {
        let (stop, seen) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Seen>>::default());
        let note = Arc::clone(&seen);
        let ask = move || -> io::Result<()> {
            ask()?;
            note.lock().unwrap_or_else(PoisonError::into_inner).note();
            Ok(())
        };
        let repeat = |mut work: Box<dyn FnMut() -> io::Result<()> + Send>| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) && work().map_or_else(goes_on, |()| true) {}
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

    /// Forgets the longest gap.
    pub(crate) fn reset(&self) {
        self.lock().gap = Duration::ZERO;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    /// The longest time without an answer, also if there is none since.
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
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // One that has panicked has answered nothing, which was seen.
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

/// An error, unless there was only nothing to do.
fn unless_later(error: io::Error) -> io::Result<()> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

/// A socket of a host, which waits for a moment only.
fn socket(host: &Host, port: u16, every: Duration) -> Result<UdpSocket> {
    let open = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
        socket.set_read_timeout(Some(every / 2))?;
        io::Result::Ok(socket)
    };
    host.run(open)?
        .doing(format!("open a socket on host {}", host.name))
}
