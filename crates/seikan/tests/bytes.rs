//! Streams of known bytes.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

pub const MEBIBYTE: u64 = 1 << 20;

/// Byte number `at` of stream `seed`.
fn byte(seed: u64, at: u64) -> u8 {
    ((at ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Sends so many bytes of a stream, and the end.
pub async fn send(to: &mut (impl AsyncWrite + Unpin), seed: u64, length: u64) {
    let mut at = 0;
    while at < length {
        let end = length.min(at + 65_536);
        let chunk: Vec<u8> = (at..end).map(|at| byte(seed, at)).collect();
        to.write_all(&chunk).await.expect("sent");
        at = end;
    }
    to.shutdown().await.expect("the end");
}

/// Receives so many bytes of a stream, and the end.
pub async fn expect(from: &mut (impl AsyncRead + Unpin), seed: u64, length: u64) {
    let mut chunk = vec![0; 65_536];
    let mut at = 0;
    loop {
        let read = from.read(&mut chunk).await.expect("received");
        if read == 0 {
            break;
        }
        for (value, at) in chunk[..read].iter().zip(at..) {
            assert_eq!(*value, byte(seed, at), "byte {at}");
        }
        at += read as u64;
    }
    assert_eq!(at, length);
}
