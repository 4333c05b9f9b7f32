//! One client: a stream that never blocks, its unread input, its pending output, and a deadline.

use crate::dialogue::Dialogue;
use crate::output::{Output, PIECE, Phase};
use crate::subject::Subject;
use crate::uapi::{self, Device};
use seikan_proto::time::Instant;
use seikan_sys::poll::Interest;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use zeroize::Zeroizing;

/// Timeout of a request with its reply, and of an idle connection.
const PATIENCE: Duration = Duration::from_secs(30);
/// Timeout of a metrics client, which may be another host.
const METRICS_PATIENCE: Duration = Duration::from_secs(5);

/// A stream of either kind.
#[derive(Debug)]
pub enum Stream {
    /// Local.
    Unix(UnixStream),
    /// Metrics.
    Tcp(TcpStream),
}

impl Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(buffer),
            Stream::Tcp(stream) => stream.read(buffer),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write(bytes),
            Stream::Tcp(stream) => stream.write(bytes),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Dialogue for uapi::Dialogue {
    fn take(&mut self, input: &[u8], subject: &mut Subject<'_>, output: &mut Output) -> usize {
        self.take(input, subject, output)
    }

    fn give(&mut self, subject: &Subject<'_>, output: &mut Output) {
        self.give(subject, output);
    }

    fn phase(&self) -> Phase {
        self.phase()
    }
}

/// Whether a client is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Kept.
    Stays,
    /// Closed: it has its whole reply, or has gone.
    Goes,
}

/// One client.
pub struct Client {
    /// The connection.
    pub stream: Stream,
    /// Events for which the loop waits.
    pub interest: Interest,
    /// Time at which an idle client is closed.
    pub deadline: Instant,
    dialogue: Box<dyn Dialogue>,
    input: Zeroizing<Vec<u8>>,
    /// Number of valid bytes in `input`.
    filled: usize,
    output: Output,
    ended: bool,
}

impl Client {
    /// A client that was just accepted.
    pub fn new(stream: Stream, dialogue: Box<dyn Dialogue>, now: Instant) -> Client {
        let mut client = Client {
            stream,
            interest: Interest::Read,
            deadline: now,
            dialogue,
            input: Zeroizing::default(),
            filled: 0,
            output: Output::default(),
            ended: false,
        };
        client.deadline = now + client.patience();
        client
    }

    fn patience(&self) -> Duration {
        match self.stream {
            Stream::Unix(_) => PATIENCE,
            Stream::Tcp(_) => METRICS_PATIENCE,
        }
    }

    /// Does a bounded piece of work: one read, the lines in it, one piece of the reply, one write. The loop
    /// calls it again after the next packets.
    pub fn run_once(&mut self, subject: &mut Subject<'_>) -> Fate {
        if self.receive().is_err() {
            return Fate::Goes;
        }
        let was_idle = self.is_idle();
        let mut used = 0;
        while !self.output.is_full() {
            match self.dialogue.phase() {
                Phase::Over => break,
                Phase::Replying => self.dialogue.give(subject, &mut self.output),
                Phase::Waiting => {
                    self.dialogue.give(subject, &mut self.output);
                    if self.waits() {
                        break;
                    }
                }
                Phase::Idle | Phase::Asking => {
                    let waiting = &self.input[used..self.filled];
                    match self.dialogue.take(waiting, subject, &mut self.output) {
                        0 => break,
                        more => used += more,
                    }
                }
            }
        }
        self.input.copy_within(used..self.filled, 0);
        self.filled -= used;
        if self.transmit().is_err() {
            return Fate::Goes;
        }
        let replying = !self.output.is_empty() || self.dialogue.phase() == Phase::Replying;
        if !replying && (self.ended || self.dialogue.phase() == Phase::Over) {
            return Fate::Goes;
        }
        // The timeout starts with the first byte of a request, and again once its reply is sent.
        if used > 0 && (was_idle || self.is_idle()) {
            self.deadline = subject.now().mono + self.patience();
        }
        self.interest = if replying {
            Interest::Write
        } else {
            Interest::Read
        };
        Fate::Stays
    }

    /// Whether it must be polled without an event of its descriptor.
    pub fn waits(&self) -> bool {
        self.dialogue.phase() == Phase::Waiting
    }

    fn is_idle(&self) -> bool {
        self.dialogue.phase() == Phase::Idle && self.output.is_empty()
    }

    fn receive(&mut self) -> io::Result<()> {
        if self.ended || self.interest == Interest::Write || self.filled == PIECE {
            return Ok(());
        }
        if self.input.is_empty() {
            self.input = Zeroizing::new(vec![0; PIECE]);
        }
        match self.stream.read(&mut self.input[self.filled..]) {
            Ok(0) => self.ended = true,
            Ok(count) => self.filled += count,
            Err(error) if would_block(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn transmit(&mut self) -> io::Result<()> {
        if self.output.is_empty() {
            return Ok(());
        }
        match self.stream.write(self.output.unsent()) {
            Ok(count) => self.output.advance(count),
            Err(error) if would_block(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

fn would_block(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
