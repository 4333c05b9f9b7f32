//! Pages of the web: a document, then the objects that it names, over a few new TCP connections.
//!
//! A page opens one connection for its document and five more for its objects, which are requested
//! one after the other on whichever connection is free, as HTTP/1.1 browsers do. The next page
//! begins when the last byte of this one has arrived. A request is the length of its answer (8
//! bytes, big endian).

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use seikan_ui::{Interrupt, Stop};
use serde::{Deserialize, Serialize};

use crate::error::{Doing, LoadError, Result};
use crate::stats::percentile;
use crate::{Ends, gbit_per_second, is_timeout, join};

/// Connections of a page, as many as browsers open to a host with HTTP/1.1.
const CONNECTIONS: usize = 6;
/// Bytes of the document.
const DOCUMENT: u64 = 30_000;
/// Bytes of the objects, in the order of their requests: scripts, styles, icons and two pictures.
const OBJECTS: [u64; 24] = [
    40_000, 40_000, 10_000, 2_000, 10_000, 2_000, 200_000, 10_000, 2_000, 40_000, 2_000, 10_000,
    10_000, 2_000, 40_000, 2_000, 200_000, 10_000, 2_000, 40_000, 10_000, 2_000, 40_000, 10_000,
];
/// Maximum number of bytes sent for one request.
const MOST: u64 = 1 << 20;
/// Bytes per read and write.
const BLOCK: usize = 64 * 1024;
/// Maximum time of a page; a page that takes longer counts as failed.
const PATIENCE: Duration = Duration::from_secs(30);
/// Interval at which a blocked call checks the stop flag.
const IO_TIMEOUT: Duration = Duration::from_millis(50);

/// Result of loading pages one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WebReport {
    /// Pages that arrived whole.
    pub pages: u32,
    /// Pages that did not arrive within 30 s, or whose connections failed.
    pub failed: u32,
    /// Median time of a page, in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of the time of a page, in milliseconds.
    pub p99_ms: f64,
    /// Rate received by the client, in Gbit/s.
    pub gbit_per_second: f64,
}

/// Loads pages from the server until `duration` has passed: at least one, and the last one to its
/// end.
///
/// # Errors
/// [`LoadError::Interrupted`]; a server that cannot listen.
pub fn web(ends: &Ends<'_>, duration: Duration, interrupt: &Interrupt) -> Result<WebReport> {
    let (listener, to) = ends.listen(IO_TIMEOUT, None)?;
    let page = Page {
        ends,
        to,
        interrupt,
    };
    let stop = Interrupt::new();
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| serve(&listener, &stop));
        let loaded = {
            let _stop = Stop(&stop);
            load_pages(&page, duration)
        };
        join(serving)?;
        loaded
    })
}

fn load_pages(page: &Page<'_>, duration: Duration) -> Result<WebReport> {
    let start = Instant::now();
    let (mut times, mut failed) = (Vec::new(), 0);
    while start.elapsed() < duration {
        let begin = Instant::now();
        match page.load(begin + PATIENCE) {
            Ok(()) => times.push(begin.elapsed().as_secs_f64() * 1e3),
            Err(LoadError::Interrupted(interrupted)) => return Err(interrupted.into()),
            Err(_) => failed += 1,
        }
    }
    let bytes = (DOCUMENT + OBJECTS.iter().sum::<u64>()) * times.len() as u64;
    let gbit_per_second = gbit_per_second(bytes, start.elapsed().as_secs_f64());
    times.sort_by(f64::total_cmp);
    let at = |q| percentile(&times, q).unwrap_or(0.0);
    Ok(WebReport {
        pages: times.len() as u32,
        failed,
        p50_ms: at(0.5),
        p99_ms: at(0.99),
        gbit_per_second,
    })
}

/// A page at a server.
struct Page<'a> {
    ends: &'a Ends<'a>,
    to: SocketAddr,
    interrupt: &'a Interrupt,
}

impl Page<'_> {
    /// Loads the document and all its objects.
    fn load(&self, deadline: Instant) -> Result<()> {
        let mut first = self.connect()?;
        self.fetch(&mut first, DOCUMENT, deadline)?;
        let next = &AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let workers: Vec<_> = std::iter::once(Some(first))
                .chain((1..CONNECTIONS).map(|_| None))
                .map(|open| scope.spawn(move || self.fetch_objects(open, next, deadline)))
                .collect();
            workers
                .into_iter()
                .try_for_each(|worker| join(worker).and_then(|fetched| fetched))
        })
    }

    /// Fetches objects over one connection until none is left.
    fn fetch_objects(
        &self,
        open: Option<TcpStream>,
        next: &AtomicUsize,
        deadline: Instant,
    ) -> Result<()> {
        let mut stream = match open {
            Some(stream) => stream,
            None => self.connect()?,
        };
        while let Some(length) = OBJECTS.get(next.fetch_add(1, Ordering::Relaxed)) {
            self.fetch(&mut stream, *length, deadline)?;
        }
        Ok(())
    }

    fn connect(&self) -> Result<TcpStream> {
        let stream = self.ends.connect(None, self.to, PATIENCE)?;
        stream
            .set_read_timeout(Some(IO_TIMEOUT))
            .and_then(|()| stream.set_nodelay(true))
            .doing("prepare a connection for web pages")?;
        Ok(stream)
    }

    /// Requests `length` bytes and reads them.
    fn fetch(&self, stream: &mut TcpStream, length: u64, deadline: Instant) -> Result<()> {
        let failed = || LoadError::io("load a part of a web page");
        stream.write_all(&length.to_be_bytes()).map_err(failed())?;
        let mut block = vec![0; BLOCK];
        let mut left = length;
        while left > 0 {
            self.interrupt.check()?;
            if Instant::now() > deadline {
                return Err(LoadError::Timeout {
                    event: "a web page".to_owned(),
                    seconds: PATIENCE.as_secs_f64(),
                });
            }
            let most = left.min(BLOCK as u64) as usize;
            match stream.read(&mut block[..most]) {
                Ok(0) => return Err(failed()(ErrorKind::UnexpectedEof.into())),
                Ok(bytes) => left -= bytes as u64,
                Err(e) if is_timeout(&e) => {}
                Err(e) => return Err(failed()(e)),
            }
        }
        Ok(())
    }
}

/// Answers requests until `stop` is set.
fn serve(listener: &TcpListener, stop: &Interrupt) {
    std::thread::scope(|scope| {
        while !stop.is_raised() {
            if let Ok((stream, _)) = listener.accept() {
                // A failed connection fails its page, which the client counts.
                scope.spawn(move || answer(stream, stop));
            }
        }
    });
}

/// Answers the requests of one connection.
fn answer(mut stream: TcpStream, stop: &Interrupt) -> std::io::Result<()> {
    stream.set_read_timeout(Some(IO_TIMEOUT))?;
    stream.set_write_timeout(Some(IO_TIMEOUT))?;
    stream.set_nodelay(true)?;
    let block = [0x5a; BLOCK];
    let mut request = [0; 8];
    let mut known = 0;
    while !stop.is_raised() {
        match stream.read(&mut request[known..]) {
            Ok(0) => break,
            Ok(bytes) => known += bytes,
            Err(e) if is_timeout(&e) => {}
            Err(e) => return Err(e),
        }
        if known < request.len() {
            continue;
        }
        known = 0;
        let mut left = u64::from_be_bytes(request).min(MOST);
        while left > 0 && !stop.is_raised() {
            let most = left.min(BLOCK as u64) as usize;
            match stream.write(&block[..most]) {
                Ok(bytes) => left -= bytes as u64,
                Err(e) if is_timeout(&e) => {}
                Err(e) => return Err(e),
            }
        }
    }
    Ok(())
}
