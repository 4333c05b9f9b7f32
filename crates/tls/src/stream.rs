//! A stream of frames over TCP, with or without TLS: between a relay and its members, and between a
//! member and its TURN servers.
//!
//! No call blocks. Bytes that the kernel does not accept are buffered up to a limit. The TLS
//! handshake runs in the background, and frames to be sent wait for it.

use rustls::Connection;
use seikan_proto::mesh::framing::{Frame, Framing};
use std::io::{self, BufRead, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

/// Maximum number of buffered bytes. More would only add delay.
pub const MAX_UNSENT: usize = 256 << 10;
/// Additional buffer for requests, in bytes. Requests must get through even if datagrams are
/// waiting.
pub const RESERVE: usize = 16 << 10;
/// Maximum number of bytes of one read: about two records of TLS.
const MAX_READ: usize = 32 << 10;
/// Maximum number of buffered bytes that TLS may have encrypted.
const MAX_SEALED: usize = 64 << 10;

/// A connection.
#[derive(Debug)]
pub struct Stream {
    socket: TcpStream,
    tls: Option<Box<Connection>>,
    framing: Framing,
    unsent: Vec<u8>,
    /// The kernel did not accept everything at the last write.
    blocked: bool,
    received: Vec<u8>,
    /// Start of the frames that have not been taken.
    taken: usize,
    /// The other end has closed TLS.
    is_ended: bool,
}

impl Stream {
    /// Wraps an established connection.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn new(socket: TcpStream, tls: Option<Connection>, framing: Framing) -> io::Result<Stream> {
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        let mut tls = tls.map(Box::new);
        if let Some(tls) = &mut tls {
            tls.set_buffer_limit(Some(MAX_SEALED));
        }
        Ok(Stream {
            socket,
            tls,
            framing,
            unsent: Vec::new(),
            blocked: false,
            received: Vec::new(),
            taken: 0,
            is_ended: false,
        })
    }

    /// Queues a frame with a datagram, given in parts. Returns false and sends nothing if there is
    /// no space.
    pub fn push(&mut self, parts: &[&[u8]]) -> bool {
        self.append(parts, MAX_UNSENT)
    }

    /// Queues a request. It may use space that is not available to datagrams.
    pub fn push_request(&mut self, parts: &[&[u8]]) -> bool {
        self.append(parts, MAX_UNSENT + RESERVE)
    }

    fn append(&mut self, parts: &[&[u8]], most: usize) -> bool {
        let content = parts.iter().map(|part| part.len()).sum();
        let max_unsent = most.checked_sub(self.framing.length(content));
        let fits = |stream: &Stream| {
            max_unsent.is_some_and(|max_unsent| stream.unsent.len() <= max_unsent)
        };
        // Many frames may be queued at once; flush before refusing one. The next call reports an
        // error again.
        if !fits(self) && !self.blocked {
            let _ = self.flush();
        }
        fits(self) && self.framing.put(parts, &mut self.unsent)
    }

    /// Sends as much as the kernel accepts. Returns whether anything is left.
    ///
    /// # Errors
    /// The error of the system call. `WouldBlock` is not an error here.
    pub fn flush(&mut self) -> io::Result<bool> {
        let mut sent = 0;
        self.blocked = false;
        let outcome = loop {
            let rest = self.unsent.get(sent..).unwrap_or_default();
            let step = match &mut self.tls {
                None if rest.is_empty() => break Ok(()),
                None => self.socket.write(rest),
                Some(tls) => {
                    sent += tls.writer().write(rest)?;
                    if !tls.wants_write() {
                        break Ok(());
                    }
                    tls.write_tls(&mut self.socket).map(|_| 0)
                }
            };
            match step {
                Ok(n) => sent += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    break Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        self.unsent.drain(..sent);
        outcome?;
        Ok(match &self.tls {
            None => !self.unsent.is_empty(),
            // Until the handshake ends, only the other end can make progress.
            Some(tls) => tls.wants_write() || (!tls.is_handshaking() && !self.unsent.is_empty()),
        })
    }

    /// Reads once, at most 32 KiB, and processes all of it, since epoll does not report data
    /// buffered by TLS. Returns whether there was any. Call [`Self::flush`] afterwards, because TLS
    /// may have to answer.
    ///
    /// # Errors
    /// `UnexpectedEof`: the other end has closed the connection. `InvalidData`: TLS rejects the
    /// data or the certificate. Otherwise the error of the system call.
    pub fn receive(&mut self) -> io::Result<bool> {
        self.received.drain(..std::mem::take(&mut self.taken));
        match self.read() {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn read(&mut self) -> io::Result<()> {
        let mut buffer = [0; MAX_READ];
        let read = if self.is_ended {
            0
        } else {
            self.socket.read(&mut buffer)?
        };
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let before = self.received.len();
        let mut rest = buffer.get(..read).unwrap_or_default();
        let Some(tls) = &mut self.tls else {
            self.received.extend_from_slice(rest);
            return Ok(());
        };
        // One call takes only a part of the data.
        while !rest.is_empty() && !self.is_ended {
            tls.read_tls(&mut rest)?;
            if let Err(error) = tls.process_new_packets() {
                // Sends the alert, if the other end still receives.
                let _ = tls.write_tls(&mut self.socket);
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
            let mut reader = tls.reader();
            // Data before the end is processed first.
            self.is_ended = loop {
                match reader.fill_buf() {
                    Ok([]) => break true,
                    Ok(data) => {
                        self.received.extend_from_slice(data);
                        let taken = data.len();
                        reader.consume(taken);
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break false,
                    Err(error) => return Err(error),
                }
            };
        }
        if self.is_ended && self.received.len() == before {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// The content of the next complete frame, to be removed by [`Self::take`].
    ///
    /// # Errors
    /// `InvalidData`: the received bytes are not a frame, and the stream is unusable.
    pub fn peek(&self) -> io::Result<Option<&[u8]>> {
        let rest = self.received.get(self.taken..).unwrap_or_default();
        let frame = self.framing.first(rest);
        let frame = frame.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(frame.and_then(|frame| rest.get(frame.content)))
    }

    /// Removes the next complete frame.
    pub fn take(&mut self) {
        let rest = self.received.get(self.taken..).unwrap_or_default();
        if let Ok(Some(Frame { length, .. })) = self.framing.first(rest) {
            self.taken += length;
        }
    }

    /// Number of received bytes that have not been taken.
    pub fn waiting(&self) -> usize {
        self.received.len().saturating_sub(self.taken)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Certificate;
    use rustls::pki_types::ServerName;
    use rustls::version::TLS13;
    use rustls::{ClientConnection, ServerConnection};
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    fn pair() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let server = listener.local_addr().expect("an address");
        let ours = TcpStream::connect(server).expect("connected");
        [ours, listener.accept().expect("accepted").0]
    }

    /// Reads until there are this many frames.
    fn frames(stream: &mut Stream, count: usize) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let until = Instant::now() + Duration::from_secs(10);
        while frames.len() < count && Instant::now() < until {
            stream.receive().expect("it goes on");
            while let Some(frame) = stream.peek().expect("a frame").map(<[u8]>::to_vec) {
                stream.take();
                frames.push(frame);
            }
        }
        frames
    }

    #[test]
    fn frames_come_out_of_a_stream_as_they_went_in() {
        let [ours, mut theirs] = pair();
        let mut ours = Stream::new(ours, None, Framing::Turn).expect("a stream");
        let message = [0x40, 0x01, 0, 5, 1, 2, 3, 4, 5];
        assert!(ours.push(&[&message]) && ours.push(&[&message[..4], &message[4..]]));
        assert!(!ours.flush().expect("sent"));
        let mut got = [0; 24];
        theirs.read_exact(&mut got).expect("read");
        assert_eq!(got[..9], message);
        assert_eq!(got[9..12], [0; 3]);
        for piece in got.chunks(7) {
            theirs.write_all(piece).expect("written");
        }
        assert_eq!(frames(&mut ours, 2), [message.to_vec(), message.to_vec()]);
        assert_eq!(ours.waiting(), 0);
    }

    /// Queues frames while there is space. Returns the number of messages of 1,000 bytes, which
    /// need no padding.
    fn fill(stream: &mut Stream) -> usize {
        (0..).take_while(|_| stream.push(&[&[0x40; 1000]])).count()
    }

    #[test]
    fn a_burst_is_flushed_before_it_is_refused() {
        let [ours, _theirs] = pair();
        let mut ours = Stream::new(ours, None, Framing::Turn).expect("a stream");
        assert!(fill(&mut ours) > MAX_UNSENT / 1000);
        assert!(ours.unsent.len() > MAX_UNSENT - 1000);
    }

    #[test]
    fn a_frame_without_space_is_not_sent_in_part() {
        let [ours, mut theirs] = pair();
        let mut ours = Stream::new(ours, None, Framing::Turn).expect("a stream");
        let fit = fill(&mut ours);
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).expect("read");
            all.len()
        });
        while ours.flush().expect("sent") {}
        drop(ours);
        assert_eq!(reader.join().expect("read"), fit * 1000);
    }

    #[test]
    fn requests_have_a_bounded_reserve_behind_datagrams() {
        let [ours, _theirs] = pair();
        let mut ours = Stream::new(ours, None, Framing::Turn).expect("a stream");
        while ours.push(&[&[0x40; 1024]]) {}
        let max_unsent = MAX_UNSENT + RESERVE - ours.unsent.len();
        let fit = (0..).take_while(|_| ours.push_request(&[&[0; 1024]]));
        assert_eq!(fit.count(), max_unsent / 1024);
        assert!(!ours.push(&[&[0x40; 4]]));
    }

    #[test]
    fn frames_queued_before_the_handshake_arrive_after_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = Certificate::own(folder.path(), "a server", &[]).expect("made");
        let config = crate::pinned(own.pin(), &[&TLS13]).expect("a configuration");
        let name = ServerName::try_from("localhost").expect("a name");
        let client = ClientConnection::new(Arc::new(config), name).expect("a client");
        let server = Arc::new(own.server_config().expect("it can serve"));
        let server = ServerConnection::new(server).expect("a server");
        let [ours, theirs] = pair();
        let mut ours = Stream::new(ours, Some(client.into()), Framing::Relay).expect("a stream");
        let mut theirs = Stream::new(theirs, Some(server.into()), Framing::Relay).expect("one");
        assert!(ours.push(&[&[0, 7], b"hello"]));
        let until = Instant::now() + Duration::from_secs(10);
        while theirs.waiting() == 0 && Instant::now() < until {
            for end in [&mut ours, &mut theirs] {
                end.flush().expect("flushed");
                end.receive().expect("it goes on");
            }
        }
        assert_eq!(theirs.peek().expect("a frame"), Some(&b"\0\x07hello"[..]));
    }
}
