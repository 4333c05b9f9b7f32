//! What runs through a tunnel while it is watched: a datagram every few milliseconds that is answered.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{LabError, Result};
use crate::link::Host;

/// Between two questions.
pub(super) const EVERY: Duration = Duration::from_millis(10);
/// Where they are answered.
const PORT: u16 = 7;

/// Datagrams from one host to another and back, until it is dropped.
pub(super) struct Flow {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    threads: Vec<JoinHandle<()>>,
}

/// What came back.
#[derive(Clone, Copy, Default)]
pub(super) struct Seen {
    /// The first answer.
    pub(super) first: Option<Instant>,
    /// The latest.
    pub(super) latest: Option<Instant>,
    /// The longest time between two, since it was last asked for.
    pub(super) gap: Duration,
}

impl Flow {
    /// Has `from` ask and `to`, which is `target` to it, answer.
    pub(super) fn start(from: &Host, to: &Host, target: std::net::IpAddr) -> Result<Flow> {
        let (asking, answering) = (socket(from, 0)?, socket(to, PORT)?);
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new(Seen::default()));
        let over = Arc::clone(&stop);
        let echo = move || {
            let mut buffer = [0; 64];
            while !over.load(Ordering::Relaxed) {
                if let Ok((length, from)) = answering.recv_from(&mut buffer) {
                    // Without a way back it is as good as lost.
                    let _ = answering.send_to(&buffer[..length], from);
                }
            }
        };
        let (over, note) = (Arc::clone(&stop), Arc::clone(&seen));
        let ask = move || {
            let target = SocketAddr::new(target, PORT);
            let mut buffer = [0; 64];
            while !over.load(Ordering::Relaxed) {
                let next = Instant::now() + EVERY;
                // There may be no tunnel yet.
                let _ = asking.send_to(b"are you there?", target);
                while Instant::now() < next {
                    match asking.recv_from(&mut buffer) {
                        Ok(_) => note.lock().unwrap_or_else(PoisonError::into_inner).note(),
                        Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                        // An error that was sent back, of an earlier one.
                        Err(_) => {}
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

    /// What came back so far.
    pub(super) fn seen(&self) -> Seen {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
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

/// A socket of a host, which waits for a moment only.
fn socket(host: &Host, port: u16) -> Result<UdpSocket> {
    let open = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
        socket.set_read_timeout(Some(EVERY / 2))?;
        std::io::Result::Ok(socket)
    };
    host.run(open)?
        .map_err(LabError::io(format!("open a socket on host {}", host.name)))
}
