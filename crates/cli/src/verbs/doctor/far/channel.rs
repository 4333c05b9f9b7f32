//! Messages between two doctors over TCP, encrypted, and authenticated by a common secret.
//!
//! Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s: without the secret, a client cannot produce the first
//! message of the handshake, and gets no answer. A frame is two bytes of length (big-endian) and a
//! Noise message; the first byte of a transport message says whether more of the same message
//! follows. Only authentic frames are buffered, so memory grows only with data of a peer that knows
//! the secret, and that is bounded.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use seikan_config::PresharedKey;
use seikan_diagnose::exchange::{Message, WrongMessage};
use snow::{Builder, HandshakeState, TransportState};

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Separates this protocol from another use of the same secret.
const PROLOGUE: &[u8] = b"seikan doctor";
/// Largest Noise message, bytes.
const FRAME: usize = 65_535;
const TAG: usize = 16;
/// Bytes of a message in one frame, without the tag and the first byte.
const PART: usize = FRAME - TAG - 1;
/// First bytes of transport messages.
const LAST: u8 = 0;
const MORE: u8 = 1;
/// Bytes of each message of the handshake: an ephemeral key and the tag of an empty payload.
const HANDSHAKE: usize = 32 + TAG;
/// Timeout of a handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason for the end of a channel.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The handshake failed.
    #[error(
        "it has another key, or is no listening doctor: give both ends the same file with --key"
    )]
    Key,
    /// The other end did not answer in time.
    #[error("it does not answer")]
    Silent,
    /// The connection ended.
    #[error("it ended the connection")]
    Closed,
    /// A frame is not authentic, was repeated, or has a wrong length.
    #[error("the data was altered in transit")]
    Altered,
    /// A message is too long.
    #[error("it sent a message of more than {0} bytes")]
    TooLong(usize),
    /// A message is malformed.
    #[error(transparent)]
    Wrong(#[from] WrongMessage),
    /// A system call failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The Noise library failed for a reason that no peer can cause.
    #[error("the Noise library failed: a defect of this program, please report it")]
    Library,
}

/// A connection to another doctor.
pub struct Channel {
    stream: TcpStream,
    noise: TransportState,
    /// Received bytes of an incomplete frame.
    raw: Vec<u8>,
    /// Parts of an incomplete message.
    partial: Vec<u8>,
    last_received: Instant,
    longest: usize,
}

impl Channel {
    /// Performs the handshake of the client; messages of more than `longest` bytes are refused.
    pub fn connect(
        stream: TcpStream,
        key: &PresharedKey,
        longest: usize,
    ) -> Result<Self, ChannelError> {
        let mut noise = builder(key)?
            .build_initiator()
            .map_err(|_| ChannelError::Library)?;
        let until = Instant::now() + HANDSHAKE_TIMEOUT;
        send_handshake(&stream, &mut noise)?;
        // A server with another key closes the connection without an answer.
        match receive_handshake(&stream, &mut noise, until) {
            Err(ChannelError::Closed | ChannelError::Altered) => return Err(ChannelError::Key),
            other => other?,
        }
        Self::new(stream, noise, longest)
    }

    /// Performs the handshake of the server; messages of more than `longest` bytes are refused.
    pub fn listen(
        stream: TcpStream,
        key: &PresharedKey,
        longest: usize,
    ) -> Result<Self, ChannelError> {
        let mut noise = builder(key)?
            .build_responder()
            .map_err(|_| ChannelError::Library)?;
        receive_handshake(&stream, &mut noise, Instant::now() + HANDSHAKE_TIMEOUT)?;
        send_handshake(&stream, &mut noise)?;
        Self::new(stream, noise, longest)
    }

    fn new(stream: TcpStream, noise: HandshakeState, longest: usize) -> Result<Self, ChannelError> {
        let noise = noise
            .into_transport_mode()
            .map_err(|_| ChannelError::Library)?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        Ok(Self {
            stream,
            noise,
            raw: Vec::new(),
            partial: Vec::new(),
            last_received: Instant::now(),
            longest,
        })
    }

    /// The connection.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Time of the last authentic frame.
    pub fn last_received(&self) -> Instant {
        self.last_received
    }

    /// Sends a message.
    pub fn send(&mut self, message: &Message) -> Result<(), ChannelError> {
        let bytes = message.write();
        let parts = bytes.chunks(PART);
        let count = parts.len();
        let mut frame = vec![0; 2 + FRAME];
        for (index, part) in parts.enumerate() {
            let mut plain = Vec::with_capacity(1 + part.len());
            plain.push(if index + 1 < count { MORE } else { LAST });
            plain.extend_from_slice(part);
            let length = self
                .noise
                .write_message(&plain, &mut frame[2..])
                .map_err(|_| ChannelError::Library)?;
            frame[..2].copy_from_slice(&(length as u16).to_be_bytes());
            write(&self.stream, &frame[..2 + length])?;
        }
        Ok(())
    }

    /// Returns the next message, if it is complete before `until`.
    pub fn receive(&mut self, until: Instant) -> Result<Option<Message>, ChannelError> {
        loop {
            while let Some(frame) = take_frame(&mut self.raw) {
                if let Some(message) = self.open(&frame)? {
                    return Ok(Some(message));
                }
            }
            let mut bytes = [0; 16 << 10];
            match read(&self.stream, &mut bytes, until)? {
                Some(0) => return Err(ChannelError::Closed),
                Some(count) => self.raw.extend_from_slice(&bytes[..count]),
                None => return Ok(None),
            }
        }
    }

    /// Decrypts a frame; returns the message that it completes.
    fn open(&mut self, frame: &[u8]) -> Result<Option<Message>, ChannelError> {
        let mut plain = vec![0; frame.len()];
        let length = self
            .noise
            .read_message(frame, &mut plain)
            .map_err(|_| ChannelError::Altered)?;
        self.last_received = Instant::now();
        let (first, part) = plain[..length].split_first().ok_or(ChannelError::Altered)?;
        if self.partial.len() + part.len() > self.longest {
            return Err(ChannelError::TooLong(self.longest));
        }
        self.partial.extend_from_slice(part);
        match *first {
            MORE => Ok(None),
            LAST => {
                let bytes = std::mem::take(&mut self.partial);
                Ok(Some(Message::read(&bytes)?))
            }
            _ => Err(ChannelError::Altered),
        }
    }
}

fn builder(key: &PresharedKey) -> Result<Builder<'_>, ChannelError> {
    let pattern = PATTERN.parse().map_err(|_| ChannelError::Library)?;
    Builder::new(pattern)
        .prologue(PROLOGUE)
        .and_then(|builder| builder.psk(0, key.as_bytes()))
        .map_err(|_| ChannelError::Library)
}

/// Sends the next message of the handshake.
fn send_handshake(stream: &TcpStream, noise: &mut HandshakeState) -> Result<(), ChannelError> {
    let mut message = [0; 2 + HANDSHAKE];
    message[..2].copy_from_slice(&(HANDSHAKE as u16).to_be_bytes());
    let written = noise.write_message(&[], &mut message[2..]);
    if !matches!(written, Ok(HANDSHAKE)) {
        return Err(ChannelError::Library);
    }
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
    write(stream, &message)
}

/// Receives the next message of the handshake.
fn receive_handshake(
    stream: &TcpStream,
    noise: &mut HandshakeState,
    until: Instant,
) -> Result<(), ChannelError> {
    let mut message = [0; 2 + HANDSHAKE];
    let mut filled = 0;
    while filled < message.len() {
        match read(stream, &mut message[filled..], until)? {
            Some(0) => return Err(ChannelError::Closed),
            Some(count) => filled += count,
            None => return Err(ChannelError::Silent),
        }
        // Fail at once if the other end uses another protocol.
        if filled >= 2 && message[..2] != (HANDSHAKE as u16).to_be_bytes() {
            return Err(ChannelError::Altered);
        }
    }
    match noise.read_message(&message[2..], &mut []) {
        Ok(0) => Ok(()),
        _ => Err(ChannelError::Altered),
    }
}

/// Removes the first frame from the received bytes, if it is complete.
fn take_frame(raw: &mut Vec<u8>) -> Option<Vec<u8>> {
    let length = usize::from(u16::from_be_bytes([*raw.first()?, *raw.get(1)?]));
    let frame = raw.get(2..2 + length)?.to_vec();
    raw.drain(..2 + length);
    Some(frame)
}

/// Reads the available bytes; `None` if there are none before `until`.
fn read(mut stream: &TcpStream, bytes: &mut [u8], until: Instant) -> io::Result<Option<usize>> {
    // A timeout of zero would mean none.
    let left = until.saturating_duration_since(Instant::now());
    stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
    match stream.read(bytes) {
        Ok(count) => Ok(Some(count)),
        Err(error) if waited(&error) => Ok(None),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(Some(0)),
        Err(error) => Err(error),
    }
}

fn write(mut stream: &TcpStream, bytes: &[u8]) -> Result<(), ChannelError> {
    stream.write_all(bytes).map_err(|error| match error.kind() {
        _ if waited(&error) => ChannelError::Silent,
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => ChannelError::Closed,
        _ => ChannelError::Io(error),
    })
}

fn waited(error: &io::Error) -> bool {
    use ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const KEY: PresharedKey = PresharedKey::from_bytes([7; 32]);

    /// Two ends of a connection.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let near = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
        (near, listener.accept().expect("accept").0)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    fn channels(longest: usize) -> (Channel, Channel) {
        let (near, far) = pair();
        std::thread::scope(|scope| {
            let far = scope.spawn(move || Channel::listen(far, &KEY, longest));
            let near = Channel::connect(near, &KEY, 1 << 20).expect("near");
            (near, far.join().expect("join").expect("far"))
        })
    }

    /// A server channel, and a raw connection to it after the handshake.
    fn channel_and_wire() -> (TcpStream, TransportState, Channel) {
        let (near, far) = pair();
        let mut noise = builder(&KEY).unwrap().build_initiator().unwrap();
        std::thread::scope(|scope| {
            let far = scope.spawn(move || Channel::listen(far, &KEY, 1 << 10));
            send_handshake(&near, &mut noise).expect("hello");
            receive_handshake(&near, &mut noise, soon()).expect("answer");
            let far = far.join().expect("join").expect("far");
            (near, noise.into_transport_mode().unwrap(), far)
        })
    }

    /// A frame with this inside.
    fn frame(noise: &mut TransportState, plain: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 2 + plain.len() + TAG];
        let length = noise.write_message(plain, &mut frame[2..]).expect("room");
        frame[..2].copy_from_slice(&(length as u16).to_be_bytes());
        frame
    }

    fn alive() -> Vec<u8> {
        [&[LAST][..], &Message::Alive.write()].concat()
    }

    #[test]
    fn messages_come_whole_whatever_their_length() {
        let (mut near, mut far) = channels(1 << 20);
        for length in [0, 1, PART, 3 * PART] {
            let message = Message::Refused("x".repeat(length));
            let received = std::thread::scope(|scope| {
                let far = scope.spawn(|| far.receive(soon()));
                near.send(&message).expect("send");
                far.join().expect("join")
            });
            assert_eq!(received.expect("received"), Some(message));
        }
        far.send(&Message::Alive).expect("send");
        assert_eq!(
            near.receive(soon()).expect("received"),
            Some(Message::Alive)
        );
    }

    #[test]
    fn another_key_gets_no_receive_handshake() {
        let (near, far) = pair();
        let other = PresharedKey::from_bytes([8; 32]);
        std::thread::scope(|scope| {
            let far = scope.spawn(move || Channel::listen(far, &KEY, 1 << 10));
            let near = Channel::connect(near, &other, 1 << 10).err();
            assert!(matches!(near, Some(ChannelError::Key)), "{near:?}");
            let far = far.join().expect("join").err();
            assert!(matches!(far, Some(ChannelError::Altered)), "{far:?}");
        });
    }

    #[test]
    fn an_unknown_client_gets_no_byte() {
        let mut wrong = [9; 2 + HANDSHAKE];
        wrong[..2].copy_from_slice(&(HANDSHAKE as u16).to_be_bytes());
        for sent in [&wrong[..], b"GET / HTTP/1.1\r\n\r\n", &[0; 3]] {
            let (mut near, far) = pair();
            near.write_all(sent).expect("write");
            assert!(Channel::listen(far, &KEY, 1 << 10).is_err());
            let mut received = Vec::new();
            // The kernel resets the connection, because there are unread bytes.
            let _ = near.read_to_end(&mut received);
            assert!(received.is_empty(), "{received:?}");
        }
    }

    #[test]
    fn a_client_that_stalls_is_closed() {
        for sent in [&[][..], &[0, HANDSHAKE as u8, 1, 2]] {
            let (mut near, far) = pair();
            near.write_all(sent).expect("write");
            let started = Instant::now();
            let end = Channel::listen(far, &KEY, 1 << 10).err();
            assert!(matches!(end, Some(ChannelError::Silent)), "{end:?}");
            assert!(started.elapsed() < HANDSHAKE_TIMEOUT + Duration::from_secs(5));
        }
    }

    #[test]
    fn a_replayed_handshake_opens_nothing() {
        let (near, far) = pair();
        let mut noise = builder(&KEY).unwrap().build_initiator().unwrap();
        let mut recorded = [0; HANDSHAKE];
        noise.write_message(&[], &mut recorded).expect("recorded");
        let mut sent = vec![0, HANDSHAKE as u8];
        sent.extend(recorded);
        // Arbitrary bytes follow in place of the next message, which would need the ephemeral key.
        sent.extend([0, 40]);
        sent.extend([5; 40]);
        (&near).write_all(&sent).expect("write");
        let mut far = Channel::listen(far, &KEY, 1 << 10).expect("it is authentic");
        let end = far.receive(soon());
        assert!(matches!(end, Err(ChannelError::Altered)), "{end:?}");
    }

    #[test]
    fn a_frame_is_taken_once() {
        let (mut wire, mut noise, mut far) = channel_and_wire();
        let frame = frame(&mut noise, &alive());
        wire.write_all(&[&frame[..], &frame].concat())
            .expect("write");
        assert_eq!(
            far.receive(soon()).expect("the first"),
            Some(Message::Alive)
        );
        let again = far.receive(soon());
        assert!(matches!(again, Err(ChannelError::Altered)), "{again:?}");
    }

    #[test]
    fn an_altered_frame_ends_it() {
        let (mut wire, mut noise, mut far) = channel_and_wire();
        let mut frame = frame(&mut noise, &alive());
        frame[7] ^= 1;
        wire.write_all(&frame).expect("write");
        let end = far.receive(soon());
        assert!(matches!(end, Err(ChannelError::Altered)), "{end:?}");
    }

    #[test]
    fn a_frame_in_pieces_is_one_and_a_truncated_one_is_none() {
        let (mut wire, mut noise, mut far) = channel_and_wire();
        let whole = frame(&mut noise, &alive());
        wire.write_all(&whole[..9]).expect("write");
        let now = Instant::now() + Duration::from_millis(50);
        assert_eq!(far.receive(now).expect("nothing yet"), None);
        wire.write_all(&whole[9..]).expect("write");
        assert_eq!(far.receive(soon()).expect("all"), Some(Message::Alive));
        wire.write_all(&frame(&mut noise, &alive())[..9])
            .expect("write");
        drop(wire);
        let end = far.receive(soon());
        assert!(matches!(end, Err(ChannelError::Closed)), "{end:?}");
    }

    #[test]
    fn a_message_without_end_is_refused_at_the_bound() {
        let (mut wire, mut noise, mut far) = channel_and_wire();
        for _ in 0..3 {
            let part = [&[MORE][..], &[b' '; 500]].concat();
            wire.write_all(&frame(&mut noise, &part)).expect("write");
        }
        let end = far.receive(soon());
        assert!(matches!(end, Err(ChannelError::TooLong(1024))), "{end:?}");
    }

    #[test]
    fn garbage_behind_the_key_is_an_error() {
        let behind: [&[u8]; 3] = [&[], &[2, b'x'], &[LAST, b'{']];
        for plain in behind {
            let (mut wire, mut noise, mut far) = channel_and_wire();
            wire.write_all(&frame(&mut noise, plain)).expect("write");
            let end = far.receive(soon());
            assert!(
                matches!(end, Err(ChannelError::Altered | ChannelError::Wrong(_))),
                "{end:?}"
            );
        }
    }
}
