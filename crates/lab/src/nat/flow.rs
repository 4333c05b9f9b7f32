//! Traffic through an observed tunnel: a datagram every few milliseconds with its answer, and a TCP
//! connection with the same exchange.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::site::Host;
use crate::error::{Doing, Result};

/// Between two questions, usually.
pub(crate) const EVERY: Duration = Duration::from_millis(10);
/// Where they are answered.
const PORT: u16 = 7;
/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(10);

/// Datagrams from one host to another and back, until it is dropped.
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
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new(Seen::default()));
        let over = Arc::clone(&stop);
        let echo = move || {
            let mut buffer = [0; 64];
            while !over.load(Ordering::Relaxed) {
                if let Ok((length, from)) = answering.recv_from(&mut buffer) {
                    // Without a return path it counts as lost.
                    let _ = answering.send_to(&buffer[..length], from);
                }
            }
        };
        let (over, note) = (Arc::clone(&stop), Arc::clone(&seen));
        let ask = move || {
            let target = SocketAddr::new(target, PORT);
            let mut buffer = [0; 64];
            while !over.load(Ordering::Relaxed) {
                let next = Instant::now() + every;
                // There may be no tunnel yet.
                let _ = asking.send_to(b"are you there?", target);
                while Instant::now() < next {
                    // Else nothing yet, or an error that was sent back of an earlier one.
                    if asking.recv_from(&mut buffer).is_ok() {
                        note.lock().unwrap_or_else(PoisonError::into_inner).note();
                    }
                }
            }
        };
        Ok(Flow {
            stop,
            seen,
            threads: vec![std::thread::spawn(echo), std::thread::spawn(ask)],
        })
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
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new(Seen::default()));
        let over = Arc::clone(&stop);
        let echo = move || {
            let mut buffer = [0; 64];
            while !over.load(Ordering::Relaxed) {
                match answering.read(&mut buffer) {
                    // It has ended.
                    Ok(0) => break,
                    // A full buffer takes it later: the sender repeats its requests.
                    Ok(length) => drop(answering.write(&buffer[..length])),
                    Err(e) if later(&e) => {}
                    Err(_) => break,
                }
            }
        };
        let (over, note) = (Arc::clone(&stop), Arc::clone(&seen));
        let ask = move || {
            let mut buffer = [0; 64];
            while !over.load(Ordering::Relaxed) {
                match asking.write(&[0]) {
                    Ok(_) => {}
                    Err(e) if later(&e) => {}
                    Err(_) => break,
                }
                match asking.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(_) => {
                        note.lock().unwrap_or_else(PoisonError::into_inner).note();
                        std::thread::sleep(EVERY);
                    }
                    Err(e) if later(&e) => {}
                    Err(_) => break,
                }
            }
        };
        Ok(Flow {
            stop,
            seen,
            threads: vec![std::thread::spawn(echo), std::thread::spawn(ask)],
        })
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

/// Nothing is wrong, there was only nothing to do.
fn later(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// A socket of a host, which waits for a moment only.
fn socket(host: &Host, port: u16, every: Duration) -> Result<UdpSocket> {
    let open = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
        socket.set_read_timeout(Some(every / 2))?;
        std::io::Result::Ok(socket)
    };
    host.run(open)?
        .doing(format!("open a socket on host {}", host.name))
}
