//! A TURN server by TCP or TLS: whole messages in and out of a stream (RFC 8656, sections 3.1 and 12.5).

use rustls::ClientConnection;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// How long the server may take to accept, and as long again for TLS.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes that wait for the kernel to take them, at most: more would only stand in a queue.
const MAX_UNSENT: usize = 256 << 10;
/// As many more may be requests: without them the allocation ends while datagrams stand before them.
const RESERVE: usize = 16 << 10;
/// Bytes of a message, at most: a header, and what its 16 bits of length can say, padded.
const MAX_MESSAGE: usize = 20 + (1 << 16);
/// Bytes of a STUN message's header (RFC 8489, section 5).
const STUN_HEADER: usize = 20;
/// What is in it after its type and length.
const COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
/// Bytes of a ChannelData message's header (RFC 8656, section 12.4).
const CHANNEL_HEADER: usize = 4;

/// The connection.
pub(super) struct Stream {
    socket: TcpStream,
    tls: Option<Box<ClientConnection>>,
    unsent: Vec<u8>,
    received: Vec<u8>,
    /// Where what is not taken yet begins.
    taken: usize,
}

/// What the other end sends is neither a STUN message nor one of a channel.
#[derive(Debug, thiserror::Error)]
#[error("what it sends is not TURN")]
pub(super) struct NotTurn;

impl Stream {
    /// Connects, and shakes hands if it is to be TLS; it does not block any more then.
    pub(super) fn connect(server: SocketAddr, tls: Option<ClientConnection>) -> io::Result<Stream> {
        let mut socket = TcpStream::connect_timeout(&server, PATIENCE)?;
        socket.set_nodelay(true)?;
        let mut tls = tls.map(Box::new);
        if let Some(tls) = &mut tls {
            tls.set_buffer_limit(Some(MAX_UNSENT));
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.set_write_timeout(Some(PATIENCE))?;
            while tls.is_handshaking() {
                tls.complete_io(&mut socket)?;
            }
        }
        socket.set_nonblocking(true)?;
        let mut stream = Stream {
            socket,
            tls,
            unsent: Vec::new(),
            received: Vec::new(),
            taken: 0,
        };
        stream.flush()?;
        Ok(stream)
    }

    /// Takes a message with a datagram to be sent, padded; `false`: there is no room, nothing of it is sent.
    pub(super) fn push(&mut self, message: &[u8]) -> bool {
        self.append(message, MAX_UNSENT)
    }

    /// Takes a request, for which there is room where there is none for a datagram.
    pub(super) fn push_request(&mut self, message: &[u8]) -> bool {
        self.append(message, MAX_UNSENT + RESERVE)
    }

    fn append(&mut self, message: &[u8], most: usize) -> bool {
        let padded = message.len().next_multiple_of(4);
        if self.unsent.len() + padded > most {
            return false;
        }
        self.unsent.extend_from_slice(message);
        self.unsent
            .resize(self.unsent.len() + padded - message.len(), 0);
        true
    }

    /// Hands over what the kernel takes; whether something is left.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        let mut sent = 0;
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
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        self.unsent.drain(..sent);
        outcome?;
        let encrypted = self.tls.as_ref().is_some_and(|tls| tls.wants_write());
        Ok(encrypted || !self.unsent.is_empty())
    }

    /// Reads what is there, once, and all that comes of it: epoll knows nothing of what TLS would keep.
    ///
    /// # Errors
    /// `WouldBlock`: nothing more; `UnexpectedEof`: the server has closed it; or what the kernel or TLS says.
    pub(super) fn receive(&mut self) -> io::Result<()> {
        self.received.drain(..std::mem::take(&mut self.taken));
        let mut buffer = [0; 1 << 14];
        let Some(tls) = &mut self.tls else {
            let n = self.socket.read(&mut buffer)?;
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.received.extend_from_slice(&buffer[..n]);
            return Ok(());
        };
        if tls.read_tls(&mut self.socket)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let processed = tls.process_new_packets();
        processed.map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        let before = self.received.len();
        loop {
            let read = tls.reader().read(&mut buffer);
            match read {
                Ok(0) if self.received.len() == before => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                // What came before the end is taken first.
                Ok(0) => return Ok(()),
                Ok(n) => self.received.extend_from_slice(&buffer[..n]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// The next message that is there as a whole.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, NotTurn> {
        let rest = self.received.get(self.taken..).unwrap_or_default();
        let Some((message, padded)) = frame(rest)? else {
            return Ok(None);
        };
        let message = rest.get(message).map(<[u8]>::to_vec);
        self.taken += padded;
        Ok(message)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Where the first message in `bytes` lies, and its length with padding; `None`: not all of it is there.
fn frame(bytes: &[u8]) -> Result<Option<(Range<usize>, usize)>, NotTurn> {
    let Some([kind, _, high, low]) = bytes.first_chunk() else {
        return Ok(None);
    };
    let said = usize::from(u16::from_be_bytes([*high, *low]));
    // The two uppermost bits (RFC 8656, section 12): 00 of a STUN message, 01 of a channel's.
    let length = match kind >> 6 {
        0 if !said.is_multiple_of(4) => return Err(NotTurn),
        // The library would wait for more of what it does not know.
        0 if bytes.get(4..8).is_some_and(|at| *at != COOKIE) => return Err(NotTurn),
        0 => STUN_HEADER + said,
        1 => CHANNEL_HEADER + said,
        _ => return Err(NotTurn),
    };
    let padded = length.next_multiple_of(4);
    debug_assert!(padded <= MAX_MESSAGE);
    Ok((bytes.len() >= padded).then_some((0..length, padded)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Instant;

    #[test]
    fn messages_are_told_apart_and_their_padding_is_no_part_of_them() {
        // RFC 8656, section 12.5: over TCP a ChannelData message is padded to a multiple of four bytes.
        let channel = [0x40, 0x00, 0, 5, 1, 2, 3, 4, 5, 0, 0, 0];
        let found = frame(&channel).expect("TURN");
        assert_eq!(found, Some((0..9, 12)));
        // RFC 8489, section 5: 20 bytes, the cookie among them, and as many as it says.
        let mut stun = [0; 28];
        stun[3] = 8;
        stun[4..8].copy_from_slice(&[0x21, 0x12, 0xa4, 0x42]);
        assert_eq!(frame(&stun).expect("TURN"), Some((0..28, 28)));
        for part in [
            &channel[..3],
            &channel[..11],
            &stun[..4],
            &stun[..7],
            &stun[..8],
            &stun[..27],
            &[],
        ] {
            assert_eq!(frame(part).expect("TURN"), None, "{part:?}");
        }
    }

    #[test]
    fn the_longest_message_is_one() {
        let mut longest = vec![0; CHANNEL_HEADER + 0xffff + 1];
        longest[..4].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff]);
        let found = frame(&longest).expect("TURN");
        assert_eq!(found, Some((0..4 + 0xffff, 4 + 0x1_0000)));
    }

    #[test]
    fn what_is_not_turn_is_no_message() {
        for bad in [
            &[0x80, 0, 0, 0][..],
            &[0xff, 0, 0, 0],
            &[0, 1, 0, 3],
            &[0, 1, 0, 0, 0, 0, 0, 0],
            &[0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x43],
            &[0, 1, 0xff, 0xfc, 0x42, 0xa4, 0x12, 0x21, 0],
            b"\r\n\r\n\r\n\r\n",
            b"HTTP",
        ] {
            // "H" begins as a channel does; no channel has that number, which is the library's to say.
            let expected = bad == b"HTTP";
            assert_eq!(frame(bad).is_ok(), expected, "{bad:?}");
        }
    }

    #[test]
    fn messages_come_out_of_a_stream_as_they_went_in() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let server = listener.local_addr().expect("an address");
        let mut ours = Stream::connect(server, None).expect("connected");
        let (mut theirs, _) = listener.accept().expect("accepted");
        let message = [0x40, 0x01, 0, 5, 1, 2, 3, 4, 5];
        assert!(ours.push(&message) && ours.push(&message));
        assert!(!ours.flush().expect("sent"));
        let mut got = [0; 24];
        theirs.read_exact(&mut got).expect("read");
        assert_eq!(got[..9], message);
        assert_eq!(got[9..12], [0; 3]);
        for piece in got.chunks(7) {
            theirs.write_all(piece).expect("written");
        }
        let mut messages = Vec::new();
        let until = Instant::now() + Duration::from_secs(10);
        while messages.len() < 2 && Instant::now() < until {
            // Nothing there yet is no end.
            let _ = ours.receive();
            while let Some(message) = ours.next().expect("TURN") {
                messages.push(message);
            }
        }
        assert_eq!(messages, [message.to_vec(), message.to_vec()]);
    }

    proptest::proptest! {
        #[test]
        fn whatever_comes_a_message_lies_within_what_is_there(bytes in proptest::collection::vec(0u8.., 0..100)) {
            if let Ok(Some((message, padded))) = frame(&bytes) {
                assert!(message.end <= padded && padded <= bytes.len() && !message.is_empty());
            }
        }
    }

    #[test]
    fn what_has_no_room_is_not_sent_in_part() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let server = listener.local_addr().expect("an address");
        let mut ours = Stream::connect(server, None).expect("connected");
        let message = vec![0x40; 1000];
        let fit = (0..).take_while(|_| ours.push(&message)).count();
        assert_eq!(fit, MAX_UNSENT / 1000);
        assert_eq!(ours.unsent.len(), fit * 1000);
    }

    #[test]
    fn a_request_has_room_behind_datagrams_and_not_without_end() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let server = listener.local_addr().expect("an address");
        let mut ours = Stream::connect(server, None).expect("connected");
        while ours.push(&[0x40; 1024]) {}
        let fit = (0..).take_while(|_| ours.push_request(&[0; 1024])).count();
        assert_eq!(fit, RESERVE / 1024);
        assert!(!ours.push(&[0x40; 4]));
    }
}
