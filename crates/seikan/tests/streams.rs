//! Bytes in both directions, and the ends of connections.

use crate::bytes::{MEBIBYTE, expect, send};
use crate::pair::{RIGHT_V4, RIGHT_V6, configs, with_configs, with_pair};
use seikan::{TcpStream, Tunnel};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, split};
use tokio::join;

/// A connection from left to right: both ends of it.
async fn connected(left: &Tunnel, right: &Tunnel, host: &str) -> (TcpStream, TcpStream) {
    let mut listener = right.tcp_listen(0).await.expect("a port");
    let port = listener.port();
    let (near, far) = join!(left.tcp_connect((host, port)), listener.accept());
    let (near, far) = (near.expect("connected"), far.expect("accepted"));
    assert_eq!(near.local_addr(), far.peer_addr());
    assert_eq!(near.peer_addr(), far.local_addr());
    assert_eq!(near.peer_addr().port(), port);
    (near, far)
}

async fn exchange(stream: TcpStream, own: u64, other: u64, length: u64) {
    let (mut from, mut to) = split(stream);
    join!(send(&mut to, own, length), expect(&mut from, other, length));
}

async fn exchanges(left: Tunnel, right: Tunnel, host: &str) {
    let (near, far) = connected(&left, &right, host).await;
    let length = 20 * MEBIBYTE;
    join!(exchange(near, 1, 2, length), exchange(far, 2, 1, length));
    join!(left.close(), right.close());
}

#[test]
fn megabytes_cross_in_both_directions_at_once() {
    with_pair(|left, right| exchanges(left, right, RIGHT_V4));
}

#[test]
fn wireguard_and_ipv6_carry_as_much() {
    let mut configs = configs();
    configs.left = configs.left.wireguard();
    configs.right = configs.right.wireguard();
    with_configs(configs, |left, right| exchanges(left, right, RIGHT_V6));
}

#[test]
fn either_direction_may_end_first() {
    with_pair(|left, right| async move {
        let (mut near, mut far) = connected(&left, &right, "right").await;
        send(&mut near, 1, MEBIBYTE).await;
        expect(&mut far, 1, MEBIBYTE).await;
        send(&mut far, 2, MEBIBYTE).await;
        expect(&mut near, 2, MEBIBYTE).await;
    });
}

#[test]
fn a_reset_is_an_error_at_the_other_end() {
    with_pair(|left, right| async move {
        let (near, mut far) = connected(&left, &right, "right").await;
        near.reset();
        let read = far.read(&mut [0; 16]).await.expect_err("a reset");
        assert_eq!(read.kind(), ErrorKind::ConnectionReset);

        // As with a kernel's sockets: the bytes that nobody reads are lost.
        let (near, mut far) = connected(&left, &right, "right").await;
        far.write_all(b"unread").await.expect("sent");
        // They have arrived when they can be read.
        let (mut from, to) = split(near);
        from.read_exact(&mut [0; 1]).await.expect("received");
        drop((from, to));
        let read = far.read(&mut [0; 16]).await.expect_err("a reset");
        assert_eq!(read.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn dropping_a_stream_delivers_what_was_written() {
    with_pair(|left, right| async move {
        let (mut near, mut far) = connected(&left, &right, "right").await;
        let sent = async {
            near.write_all(&vec![7; MEBIBYTE as usize])
                .await
                .expect("sent");
            drop(near);
        };
        let mut received = Vec::new();
        let (_, read) = join!(sent, far.read_to_end(&mut received));
        assert_eq!(read.expect("a clean end") as u64, MEBIBYTE);
    });
}

#[test]
fn a_reader_that_does_not_read_stops_the_writer() {
    let length = 64 * MEBIBYTE;
    with_pair(|left, right| async move {
        let (mut near, mut far) = connected(&left, &right, "right").await;
        let sent = AtomicU64::new(0);
        let writer = async {
            let chunk = vec![7; 65_536];
            while sent.load(Relaxed) < length {
                near.write_all(&chunk).await.expect("sent");
                sent.fetch_add(chunk.len() as u64, Relaxed);
            }
            near.shutdown().await.expect("the end");
        };
        let reader = async {
            // The buffers of both stacks are full: no more is accepted.
            let mut last = 0;
            loop {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let now = sent.load(Relaxed);
                if now == last && now > 0 {
                    break;
                }
                last = now;
            }
            assert!(last < length / 2, "{last} bytes without a reader");
            let mut chunk = vec![0; 65_536];
            let mut received = 0;
            loop {
                match far.read(&mut chunk).await.expect("received") {
                    0 => return received,
                    read => received += read as u64,
                }
            }
        };
        let (_, received) = join!(writer, reader);
        assert_eq!(received, length);
    });
}
