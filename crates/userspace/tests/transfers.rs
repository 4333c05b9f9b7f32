//! Bytes in both directions, ends of connections, sizes of segments.

use crate::bytes;
use crate::world::{OURS_V4, PEER_V4, PEER_V6, Path, World, options};
use seikan_userspace::{Service, Transport};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::atomic::Ordering::Relaxed;

const MEBIBYTE: u64 = 1 << 20;

fn transfer(address: &'static str, length: u64) {
    let world = World::new(options());
    let port = world.serve(address, move |socket| {
        bytes::exchange(&socket, 2, 1, length)
    });
    let (socket, code) = world.socks(address, port);
    assert_eq!(code, 0);
    bytes::exchange(&socket, 1, 2, length);
    let seen = &world.seen;
    for merged in [&seen.merged_out, &seen.merged_in] {
        assert!(merged.load(Relaxed) > 10, "{seen:?}");
    }
    assert_eq!(seen.largest_out.load(Relaxed), 1420, "{seen:?}");
    assert!(seen.largest_in.load(Relaxed) <= 1420, "{seen:?}");
    drop(socket);
    world.until("the connection ends", |c| c.socks.open == 0);
    let counters = world.counters();
    assert_eq!(
        (counters.socks.bytes_in, counters.socks.bytes_out),
        (length, length)
    );
}

#[test]
fn fifty_megabytes_cross_in_both_directions() {
    transfer(PEER_V4, 50 * MEBIBYTE);
}

#[test]
fn ipv6_carries_as_much() {
    transfer(PEER_V6, 50 * MEBIBYTE);
}

#[test]
fn either_side_may_end_first() {
    let world = World::new(options());
    // The far end answers after it has read everything.
    let port = world.serve(PEER_V4, |socket| {
        bytes::expect(&socket, 1, MEBIBYTE);
        bytes::send(&socket, 2, MEBIBYTE);
    });
    let (socket, _) = world.socks(PEER_V4, port);
    bytes::send(&socket, 1, MEBIBYTE);
    bytes::expect(&socket, 2, MEBIBYTE);
    // The far end ends before the client has sent anything.
    let port = world.serve(PEER_V4, |socket| {
        bytes::send(&socket, 2, MEBIBYTE);
        bytes::expect(&socket, 1, MEBIBYTE);
    });
    let (socket, _) = world.socks(PEER_V4, port);
    bytes::expect(&socket, 2, MEBIBYTE);
    bytes::send(&socket, 1, MEBIBYTE);
    world.until("both end", |c| c.socks.open == 0);
}

#[test]
fn a_slow_reader_stops_the_sender() {
    let world = World::new(options());
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let port = world.serve(PEER_V4, move |socket| {
        wait.recv().unwrap();
        bytes::expect(&socket, 1, 32 * MEBIBYTE);
    });
    let (socket, _) = world.socks(PEER_V4, port);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| bytes::send(&socket, 1, 32 * MEBIBYTE));
        // The buffers of both kernels and of the stack are full; no more is accepted.
        let mut last = u64::MAX;
        while last != world.counters().socks.bytes_out || last == 0 {
            last = world.counters().socks.bytes_out;
            std::thread::sleep(std::time::Duration::from_millis(300));
        }
        assert!(last < 30 * MEBIBYTE && !sender.is_finished(), "{last}");
        go.send(()).unwrap();
    });
    world.until("it ends", |c| c.socks.bytes_out == 32 * MEBIBYTE);
}

#[test]
fn a_reset_of_the_far_end_reaches_the_client() {
    let world = World::new(options());
    let port = world.serve(PEER_V4, |mut socket| {
        let _ = socket.read(&mut [0; 1]);
        socket2::SockRef::from(&socket)
            .set_linger(Some(std::time::Duration::ZERO))
            .unwrap();
    });
    let (mut socket, _) = world.socks(PEER_V4, port);
    socket.write_all(&[1]).unwrap();
    let error = socket.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    world.until("it ends", |c| c.socks.open == 0);
}

#[test]
fn a_reset_of_the_client_reaches_the_far_end() {
    let world = World::new(options());
    let (tell, told) = std::sync::mpsc::channel();
    let port = world.serve(PEER_V4, move |mut socket| {
        tell.send(socket.read(&mut [0; 1]).map_err(|error| error.kind()))
            .unwrap();
    });
    let (socket, _) = world.socks(PEER_V4, port);
    socket2::SockRef::from(&socket)
        .set_linger(Some(std::time::Duration::ZERO))
        .unwrap();
    drop(socket);
    assert_eq!(told.recv().unwrap(), Err(ErrorKind::ConnectionReset));
}

/// The kernel's device carries more than the tunnel does: both sides have to send what the tunnel carries.
#[test]
fn segments_fit_the_tunnel_in_both_directions() {
    let mut narrow = options();
    narrow.mtu = 1300;
    let world = World::with(narrow, 9000, Path::default());
    for (address, headers) in [(PEER_V4, 40), (PEER_V6, 60)] {
        let port = world.serve(address, |socket| bytes::exchange(&socket, 2, 1, MEBIBYTE));
        let (socket, code) = world.socks(address, port);
        assert_eq!(code, 0);
        bytes::exchange(&socket, 1, 2, MEBIBYTE);
        let seen = &world.seen;
        assert_eq!(seen.largest_out.load(Relaxed), 1300, "{headers}: {seen:?}");
        assert_eq!(seen.largest_in.load(Relaxed), 1300, "{headers}: {seen:?}");
    }
}

/// The other way round: the far end's device carries less than the tunnel.
#[test]
fn segments_fit_the_far_end() {
    let world = World::with(options(), 1280, Path::default());
    let port = world.serve(PEER_V4, |socket| bytes::exchange(&socket, 2, 1, MEBIBYTE));
    let (socket, _) = world.socks(PEER_V4, port);
    bytes::exchange(&socket, 1, 2, MEBIBYTE);
    assert_eq!(
        world.seen.largest_out.load(Relaxed),
        1280,
        "{:?}",
        world.seen
    );
}

#[test]
fn the_far_end_sees_the_address_of_this_host() {
    let world = World::new(options());
    let (tell, told) = std::sync::mpsc::channel();
    let port = world.serve(PEER_V4, move |socket| {
        tell.send(socket.peer_addr().unwrap().ip().to_string())
            .unwrap();
        let _ = socket.shutdown(Shutdown::Both);
    });
    let (_socket, _) = world.socks(PEER_V4, port);
    assert_eq!(told.recv().unwrap(), OURS_V4);
    let _ = world.listener(Service::Http, Transport::Tcp);
}
