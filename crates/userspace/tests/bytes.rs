//! Streams of known bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

/// The byte at an offset of the stream with this number.
fn byte(stream: u64, at: u64) -> u8 {
    let mixed = (at / 7 + stream).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8 ^ at as u8
}

/// Sends `length` bytes of a stream, then ends this direction.
pub fn send(mut socket: &TcpStream, stream: u64, length: u64) {
    let mut at = 0;
    while at < length {
        let count = (length - at).min(128 * 1024);
        let chunk: Vec<u8> = (at..at + count).map(|at| byte(stream, at)).collect();
        socket.write_all(&chunk).expect("send");
        at += count;
    }
    socket.shutdown(Shutdown::Write).expect("shutdown");
}

/// Reads a stream to its end and checks every byte.
pub fn expect(mut socket: &TcpStream, stream: u64, length: u64) {
    let mut buf = vec![0; 128 * 1024];
    let mut at = 0;
    loop {
        let count = socket.read(&mut buf).expect("receive");
        if count == 0 {
            break;
        }
        for (i, got) in buf[..count].iter().enumerate() {
            let at = at + i as u64;
            assert_eq!(*got, byte(stream, at), "byte {at} of stream {stream}");
        }
        at += count as u64;
    }
    assert_eq!(at, length, "the stream {stream} has ended early or late");
}

/// Sends one stream and expects another, at the same time.
pub fn exchange(socket: &TcpStream, sent: u64, expected: u64, length: u64) {
    std::thread::scope(|scope| {
        scope.spawn(|| send(socket, sent, length));
        expect(socket, expected, length);
    });
}
