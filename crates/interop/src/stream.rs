//! A TCP stream of predictable bytes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use crate::side::Side;
use crate::tunnel::Tunnel;

const CHUNK: usize = 16 * 1024;
/// Time without a byte after which a stream has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running stream.
#[derive(Debug)]
pub struct Stream {
    sender: JoinHandle<Result<u64>>,
    receiver: JoinHandle<Result<Report>>,
}

/// Statistics of a stream that arrived in order and unchanged.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Bytes received.
    pub bytes: u64,
    /// Longest time without a byte.
    pub longest_gap: Duration,
    /// Start of that time, from the start of the stream.
    pub gap_at: Duration,
}

impl Report {
    /// Fails if the stream was idle for `limit`.
    pub fn no_gap_of(&self, limit: Duration) -> Result<()> {
        let (gap, at) = (self.longest_gap, self.gap_at);
        ensure!(
            gap < limit,
            "no byte for {gap:.2?}, {at:.2?} after the start"
        );
        Ok(())
    }
}

impl Stream {
    /// Starts sending to `to` from the other end for `duration`, at `rate` bytes per second
    /// (`None`: unlimited).
    pub fn start(
        tunnel: &Tunnel,
        to: &Side,
        v6: bool,
        rate: Option<u64>,
        duration: Duration,
    ) -> Result<Stream> {
        let address = to.inner[usize::from(v6)].addr();
        let listener = to.host.run(|| TcpListener::bind((address, 0)))??;
        let target = listener.local_addr()?;
        let from = tunnel.other(to);
        let outgoing = from
            .host
            .run(|| TcpStream::connect_timeout(&target, PATIENCE))?
            .with_context(|| tunnel.logs())?;
        let (incoming, _) = listener.accept()?;
        outgoing.set_write_timeout(Some(PATIENCE))?;
        incoming.set_read_timeout(Some(PATIENCE))?;
        Ok(Stream {
            sender: thread::spawn(move || send(outgoing, rate, duration)),
            receiver: thread::spawn(move || receive(incoming)),
        })
    }

    /// Waits for the end and verifies that everything has arrived.
    pub fn finish(self) -> Result<Report> {
        let sent = self
            .sender
            .join()
            .map_err(|_| anyhow!("the sender panicked"))?;
        // If both have failed, the receiver has the cause: it ends the stream at the first wrong byte.
        let report = self
            .receiver
            .join()
            .map_err(|_| anyhow!("the receiver panicked"))?
            .context("receiving")?;
        let sent = sent.context("sending")?;
        ensure!(
            sent == report.bytes,
            "sent {sent} bytes, {} arrived",
            report.bytes
        );
        Ok(report)
    }
}

/// Returns the eight bytes at position `8 * word`. An odd multiplier makes each unique, so that
/// shifts, repetitions and swaps are detected.
fn pattern(word: u64) -> [u8; 8] {
    word.wrapping_add(1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .to_le_bytes()
}

fn send(mut stream: TcpStream, rate: Option<u64>, duration: Duration) -> Result<u64> {
    let begin = Instant::now();
    let mut sent = 0;
    let mut chunk = [0; CHUNK];
    while begin.elapsed() < duration {
        for (word, bytes) in (sent / 8..).zip(chunk.as_chunks_mut::<8>().0) {
            *bytes = pattern(word);
        }
        stream.write_all(&chunk)?;
        sent += CHUNK as u64;
        if let Some(rate) = rate {
            let due = Duration::from_micros(sent * 1_000_000 / rate);
            thread::sleep(due.saturating_sub(begin.elapsed()));
        }
    }
    Ok(sent)
}

fn receive(mut stream: TcpStream) -> Result<Report> {
    let mut report = Report {
        bytes: 0,
        longest_gap: Duration::ZERO,
        gap_at: Duration::ZERO,
    };
    let mut buffer = [0; 4 * CHUNK];
    let mut pending = 0;
    let begin = Instant::now();
    let mut last = begin;
    loop {
        let length = stream.read(&mut buffer[pending..])?;
        let gap = last.elapsed();
        if gap > report.longest_gap {
            (report.longest_gap, report.gap_at) = (gap, last - begin);
        }
        last = Instant::now();
        if length == 0 {
            ensure!(pending == 0, "the stream ends inside a word");
            return Ok(report);
        }
        let filled = pending + length;
        let whole = filled / 8 * 8;
        for bytes in buffer[..whole].as_chunks::<8>().0 {
            ensure!(
                *bytes == pattern(report.bytes / 8),
                "wrong content at byte {}",
                report.bytes
            );
            report.bytes += 8;
        }
        buffer.copy_within(whole..filled, 0);
        pending = filled - whole;
    }
}
