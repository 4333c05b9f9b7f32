//! Sockets of this process, with the kernel as the far end.

use crate::world::{OURS_V4, PATIENCE, PEER_V4, Path, World, names, options};
use seikan_observe::DropReason;
use seikan_userspace::{SocketError, Stack, packet_pair, read_address, write_address};
use seikan_wire::{VNET_HDR_LEN, checksum};
use std::future::{Future, poll_fn};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

fn wait<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.expect("a runtime").block_on(work)
}

fn ours(port: u16) -> SocketAddr {
    SocketAddr::new(OURS_V4.parse().unwrap(), port)
}

#[test]
fn an_attempt_that_is_given_up_leaves_nothing() {
    let world = World::new(options());
    // Nothing has this address.
    let mut attempt = Box::pin(world.sockets().connect("10.9.0.77", 80));
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(attempt.as_mut().poll(&mut context), Poll::Pending));
    world.until("it is tried", |c| c.own.open == 1);
    drop(attempt);
    world.until("it is given up", |c| c.own.open == 0 && c.own.refused == 1);
}

/// ICMP "host unreachable" about a packet of the stack, as the device carries both.
fn unreachable(about: &[u8]) -> Vec<u8> {
    let quoted = &about[VNET_HDR_LEN..][..28];
    let mut packet = vec![0; VNET_HDR_LEN + 28];
    let ip = &mut packet[VNET_HDR_LEN..];
    (ip[0], ip[3], ip[8], ip[9]) = (0x45, 56, 64, 1);
    // A router on the path answers to the sender.
    ip[12..16].copy_from_slice(&[10, 9, 0, 2]);
    ip[16..20].copy_from_slice(&quoted[12..16]);
    let check = !checksum::fold(checksum::sum(&ip[..20]));
    ip[10..12].copy_from_slice(&check.to_be_bytes());
    (ip[20], ip[21]) = (3, 1);
    packet.extend(quoted);
    packet
}

#[test]
fn only_an_error_about_the_syn_ends_an_attempt() {
    let (worker, device) = packet_pair().expect("pair");
    let handle = Stack::start(device, options(), names()).expect("stack");
    let mut attempt = pin!(handle.sockets().connect("10.9.0.77", 80));
    let mut context = Context::from_waker(Waker::noop());
    assert!(attempt.as_mut().poll(&mut context).is_pending());
    let mut buf = vec![0; 1 << 16];
    let started = Instant::now();
    let syn = loop {
        if let Ok(length @ 1..) = nix::unistd::read(&worker, &mut buf) {
            break &buf[..length];
        }
        assert!(started.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut forged = syn.to_vec();
    forged[VNET_HDR_LEN + 20 + 4] ^= 1;
    nix::unistd::write(&worker, &unreachable(&forged)).expect("write");
    // Nothing counts an error that is ignored.
    std::thread::sleep(Duration::from_millis(200));
    assert!(attempt.as_mut().poll(&mut context).is_pending());
    nix::unistd::write(&worker, &unreachable(syn)).expect("write");
    let failed = wait(attempt);
    assert!(
        matches!(failed, Err(SocketError::Unreachable)),
        "{failed:?}"
    );
}

#[test]
fn a_refusal_and_an_unknown_name_are_told_apart() {
    let world = World::new(options());
    let refused = wait(world.sockets().connect(PEER_V4, 9));
    assert!(matches!(refused, Err(SocketError::Refused)), "{refused:?}");
    let unknown = wait(world.sockets().connect("db-2", 9));
    assert!(
        matches!(unknown, Err(SocketError::UnknownName)),
        "{unknown:?}"
    );
    let found = wait(world.sockets().find("DB-1.")).expect("found");
    assert_eq!(found.len(), 2);
}

#[test]
fn connections_beyond_the_backlog_are_not_answered() {
    let world = World::new(options());
    let incoming = wait(world.sockets().listen(80)).expect("a port");
    let connected: Vec<TcpStream> = (0..128)
        .map(|_| world.connect(ours(80)).expect("connected"))
        .collect();
    world.until("all are accepted", |c| c.exposed.accepted == 128);
    let pause = Duration::from_millis(300);
    let late = world
        .peer
        .run(|| TcpStream::connect_timeout(&ours(80), pause));
    assert!(late.expect("namespace").is_err());
    assert!(world.dropped(DropReason::FlowLimit) > 0);
    // Those that nobody accepts are reset with the listener.
    drop(incoming);
    for mut socket in connected {
        assert!(socket.read(&mut [0]).is_err());
    }
    world.until("all are gone", |c| c.exposed.open == 0);
}

#[test]
fn bytes_of_a_kernel_arrive_with_their_end() {
    let world = World::new(options());
    let mut incoming = wait(world.sockets().listen(0)).expect("a port");
    let mut far = world.connect(ours(incoming.port)).expect("connected");
    far.write_all(b"hello").expect("sent");
    far.shutdown(std::net::Shutdown::Write).expect("the end");
    let near = wait(poll_fn(|context| incoming.poll_next(context))).expect("accepted");
    near.socket.set_nonblocking(false).expect("set");
    let mut read = Vec::new();
    (&near.socket).read_to_end(&mut read).expect("received");
    assert_eq!(
        (read.as_slice(), near.end.is_finished()),
        (b"hello".as_slice(), true)
    );
    assert_eq!(near.ends.remote, far.local_addr().expect("an address"));
}

#[test]
fn bytes_that_are_lost_after_the_far_end_has_ended_are_sent_again() {
    let path = Path {
        lost: 8,
        ..Path::default()
    };
    let world = World::with(options(), 1420, path);
    let (counted, received) = std::sync::mpsc::channel();
    let port = world.serve(PEER_V4, move |mut socket| {
        socket.shutdown(std::net::Shutdown::Write).expect("the end");
        let mut all = Vec::new();
        socket.read_to_end(&mut all).expect("a clean end");
        counted.send(all.len()).expect("awaited");
    });
    let near = wait(world.sockets().connect(PEER_V4, port)).expect("connected");
    near.socket.set_nonblocking(false).expect("set");
    assert_eq!((&near.socket).read(&mut [0; 1]).expect("the end"), 0);
    // All of them are in the stack's buffer when it reads the end.
    let bytes = vec![7; 1 << 20];
    (&near.socket).write_all(&bytes).expect("sent");
    near.socket
        .shutdown(std::net::Shutdown::Write)
        .expect("the end");
    let received = received.recv_timeout(PATIENCE).expect("in time");
    assert_eq!(received, bytes.len());
}

#[test]
fn datagrams_of_a_kernel_have_their_source() {
    let world = World::new(options());
    let port = wait(world.sockets().bind(53)).expect("a port");
    let far = world.udp(PEER_V4);
    let from = far.local_addr().expect("an address");
    far.send_to(b"query", ours(53)).expect("sent");
    let mut message = [0; 64];
    let length = loop {
        match nix::unistd::read(&port.socket, &mut message) {
            Ok(length) => break length,
            Err(nix::errno::Errno::EAGAIN) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("{error}"),
        }
    };
    let (address, query) = message[..length].split_first_chunk().expect("an address");
    assert_eq!((read_address(address), query), (from, b"query".as_slice()));
    let answer = [write_address(from).as_slice(), b"answer"].concat();
    nix::unistd::write(&port.socket, &answer).expect("sent");
    let mut buf = [0; 64];
    let (length, source) = far.recv_from(&mut buf).expect("received");
    assert_eq!((&buf[..length], source), (b"answer".as_slice(), ours(53)));
    drop(port);
    world.until("the port is closed", |c| c.own.open == 0);
    // A port that nothing has is answered with an error.
    far.connect(ours(53)).expect("connected");
    far.send(b"query").expect("sent");
    assert!(far.recv(&mut buf).is_err());
}

#[test]
fn a_port_with_unread_datagrams_is_closed_with_its_program() {
    let world = World::new(options());
    let port = wait(world.sockets().bind(53)).expect("a port");
    let far = world.udp(PEER_V4);
    far.send_to(b"query", ours(53)).expect("sent");
    world.until("it has arrived", |c| c.own.bytes_in == 5);
    drop(port);
    world.until("the port is closed", |c| c.own.open == 0);
    wait(world.sockets().bind(53)).expect("the port is free");
}

#[test]
fn finishing_resets_what_is_open_and_ends_the_stack() {
    let world = World::new(options());
    let port = world.serve(PEER_V4, |mut socket| {
        let mut all = Vec::new();
        assert!(socket.read_to_end(&mut all).is_err(), "a clean end");
    });
    let stream = wait(world.sockets().connect(PEER_V4, port)).expect("connected");
    wait(pin!(world.sockets().finish(Duration::from_secs(60))));
    stream.socket.set_nonblocking(false).expect("set");
    let _ = (&stream.socket).read(&mut [0]);
    assert!(!stream.end.is_finished());
    let ended = wait(world.sockets().connect(PEER_V4, port));
    assert!(matches!(ended, Err(SocketError::Ended)), "{ended:?}");
}
