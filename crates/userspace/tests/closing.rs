//! Which bytes arrive, and when a connection ends, above all if its far end does not read.

use crate::world::{PATIENCE, PEER_V4, Path, World, options};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// A client whose far end reads nothing, with a full send buffer in between, and the far end.
fn stuck(world: &World) -> (TcpStream, TcpStream) {
    let (tell, told) = std::sync::mpsc::channel();
    let port = world.serve(PEER_V4, move |socket| tell.send(socket).unwrap());
    let (mut client, code) = world.socks(PEER_V4, port);
    assert_eq!(code, 0);
    let far = told.recv_timeout(PATIENCE).unwrap();
    let mut written = 0;
    let started = Instant::now();
    loop {
        // Less than the kernel's buffers: the end must get past them.
        written += client.write(&[7; 32 << 10]).unwrap() as u64;
        let asked = Instant::now();
        while world.counters().socks.bytes_out < written {
            if asked.elapsed() > Duration::from_secs(1) {
                return (client, far);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(started.elapsed() < PATIENCE, "{written}");
    }
}

/// A world whose connections have small buffers, and end that long after one side has ended them.
fn world(half_closed_for: Duration, path: Path) -> World {
    let mut options = options();
    options.limits.buffer_bytes = 1 << 20;
    options.limits.half_closed_for = half_closed_for;
    World::with(options, 1420, path)
}

#[test]
fn urgent_bytes_of_a_client_are_carried() {
    let world = World::new(options());
    let (tell, told) = std::sync::mpsc::channel();
    let port = world.serve(PEER_V4, move |mut socket| {
        let mut all = Vec::new();
        socket.read_to_end(&mut all).unwrap();
        tell.send(all).unwrap();
    });
    let (mut client, code) = world.socks(PEER_V4, port);
    assert_eq!(code, 0);
    client.write_all(b"ab").unwrap();
    let sent = socket2::SockRef::from(&client).send_out_of_band(b"!");
    assert_eq!(sent.unwrap(), 1);
    client.write_all(b"cd").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(told.recv_timeout(PATIENCE).unwrap(), b"ab!cd");
}

#[test]
fn a_client_that_resets_ends_a_connection_whose_far_end_does_not_read() {
    let world = world(PATIENCE * 10, Path::default());
    let (client, mut far) = stuck(&world);
    let linger = Some(Duration::ZERO);
    socket2::SockRef::from(&client).set_linger(linger).unwrap();
    drop(client);
    world.until("it ends", |c| c.socks.open == 0);
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    let read = far.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(read.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn a_client_that_ends_does_not_wait_forever_for_a_far_end_that_does_not_read() {
    let world = world(Duration::from_secs(1), Path::default());
    let (client, _far) = stuck(&world);
    client.shutdown(Shutdown::Write).unwrap();
    world.until("it ends", |c| c.socks.open == 0);
}

#[test]
fn bytes_of_a_client_that_has_ended_are_delivered_however_long_it_takes() {
    let path = Path {
        delay: Duration::from_millis(5),
        rate: 500_000,
        queue: 20_000,
        ..Path::default()
    };
    let world = world(Duration::from_secs(1), path);
    let (tell, told) = std::sync::mpsc::channel();
    let port = world.serve(PEER_V4, move |mut socket| {
        let mut all = Vec::new();
        let read = socket.read_to_end(&mut all).map(drop);
        tell.send((read.is_ok(), all.len())).unwrap();
    });
    let (mut client, code) = world.socks(PEER_V4, port);
    assert_eq!(code, 0);
    // Four seconds on this path, of which the send buffer holds one.
    let bytes = vec![1; 250_000];
    client.write_all(&bytes).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let read = told.recv_timeout(PATIENCE).unwrap();
    assert_eq!(read, (true, bytes.len()));
}
