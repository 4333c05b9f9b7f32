//! A TCP stream during events on its path; every byte is checked.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use seikan_lab::site::Host;
use seikan_load::Pattern;

use crate::common::PATIENCE;
use crate::gateway::site::ip;

const CHUNK: usize = 8 * 1024;
const PATTERN: Pattern = Pattern::new(7);

/// A stream.
pub struct Stream {
    stop: Arc<AtomicBool>,
    received: Arc<AtomicU64>,
    sender: JoinHandle<u64>,
    receiver: JoinHandle<Report>,
}

/// Result of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    pub bytes: u64,
    /// Longest time without a byte.
    pub longest_gap: Duration,
}

impl Stream {
    /// Starts a stream from one host to the address of another, with at most `rate` bytes per
    /// second.
    pub fn start(from: &Host, to: &Host, target: &str, rate: u64) -> Stream {
        let target = ip(target);
        let any = if target.is_ipv4() {
            "0.0.0.0:0"
        } else {
            "[::]:0"
        };
        let listener = to.run(|| TcpListener::bind(any)).expect("namespace");
        let listener = listener.expect("listen");
        let port = listener.local_addr().expect("address").port();
        let target = SocketAddr::new(target, port);
        let outgoing = from.run(|| TcpStream::connect_timeout(&target, PATIENCE));
        let outgoing = outgoing.expect("namespace").expect("connect");
        let (incoming, _) = listener.accept().expect("accept");
        outgoing.set_write_timeout(Some(PATIENCE)).expect("timeout");
        incoming.set_read_timeout(Some(PATIENCE)).expect("timeout");
        let stop = Arc::new(AtomicBool::new(false));
        let received = Arc::new(AtomicU64::new(0));
        let (stops, counts) = (Arc::clone(&stop), Arc::clone(&received));
        Stream {
            stop,
            received,
            sender: std::thread::spawn(move || send(outgoing, rate, &stops)),
            receiver: std::thread::spawn(move || receive(incoming, &counts)),
        }
    }

    /// Waits until more bytes arrive; returns the time it took.
    pub fn goes_on_within(&self, patience: Duration) -> Duration {
        let (begin, now) = (Instant::now(), self.received.load(Ordering::Relaxed));
        while self.received.load(Ordering::Relaxed) <= now + CHUNK as u64 {
            assert!(begin.elapsed() < patience, "the stream stands still");
            std::thread::sleep(Duration::from_millis(5));
        }
        begin.elapsed()
    }

    /// Waits until a megabyte has arrived within half a second.
    pub fn is_fast_within(&self, patience: Duration) {
        let begin = Instant::now();
        loop {
            let before = self.received.load(Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(500));
            if self.received.load(Ordering::Relaxed) > before + 1_000_000 {
                return;
            }
            assert!(begin.elapsed() < patience, "the stream stays slow");
        }
    }

    /// Stops the stream once everything sent has arrived.
    pub fn finish(self) -> Report {
        self.stop.store(true, Ordering::Relaxed);
        let sent = self.sender.join().expect("sender");
        let report = self.receiver.join().expect("receiver");
        assert_eq!(sent, report.bytes, "sent, received");
        report
    }
}

fn send(mut stream: TcpStream, rate: u64, stop: &AtomicBool) -> u64 {
    let begin = Instant::now();
    let mut chunk = [0; CHUNK];
    let (mut sent, mut paced_from) = (0, 0);
    let mut pace = begin;
    while !stop.load(Ordering::Relaxed) {
        PATTERN.fill(sent, &mut chunk);
        stream.write_all(&chunk).expect("send");
        sent += CHUNK as u64;
        let due = Duration::from_micros((sent - paced_from) * 1_000_000 / rate);
        let late = pace.elapsed().saturating_sub(due);
        if late > Duration::from_millis(100) {
            // No burst to catch up after an outage.
            (pace, paced_from) = (Instant::now(), sent);
        }
        std::thread::sleep(due.saturating_sub(pace.elapsed()));
    }
    stream.shutdown(Shutdown::Write).expect("shutdown");
    sent
}

fn receive(mut stream: TcpStream, count: &AtomicU64) -> Report {
    let mut report = Report {
        bytes: 0,
        longest_gap: Duration::ZERO,
    };
    let mut buffer = [0; 64 * 1024];
    let mut last = Instant::now();
    loop {
        let length = match stream.read(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => panic!("after {} bytes: {error}", report.bytes),
        };
        report.longest_gap = report.longest_gap.max(last.elapsed());
        last = Instant::now();
        if length == 0 {
            return report;
        }
        let wrong = PATTERN.first_mismatch(report.bytes, &buffer[..length]);
        assert_eq!(wrong, None, "wrong content after {} bytes", report.bytes);
        report.bytes += length as u64;
        count.store(report.bytes, Ordering::Relaxed);
    }
}
