//! Ports of the host that the inside reaches, and packets for nobody.

use crate::bytes;
use crate::world::{OURS_V4, OURS_V6, PATIENCE, PEER_V4, World, options};
use seikan_observe::DropReason;
use seikan_userspace::{Exposed, Transport};
use socket2::{Domain, Socket, Type};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

fn inside(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), port)
}

fn exposed(port: u16, target: SocketAddr, transport: Transport) -> Exposed {
    Exposed {
        port,
        target,
        transport,
    }
}

#[test]
fn an_exposed_port_leads_to_the_host() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = options();
    options.exposed = vec![exposed(80, listener.local_addr().unwrap(), Transport::Tcp)];
    let world = World::new(options);
    for address in [OURS_V4, OURS_V6] {
        std::thread::scope(|scope| {
            scope.spawn(|| bytes::exchange(&listener.accept().unwrap().0, 2, 1, 20 << 20));
            let socket = world.connect(inside(address, 80)).unwrap();
            bytes::exchange(&socket, 1, 2, 20 << 20);
        });
    }
    world.until("both end", |c| c.exposed.open == 0);
    assert_eq!(world.counters().exposed.accepted, 2);
}

#[test]
fn a_port_that_the_host_refuses_is_refused_inside() {
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut options = options();
    options.exposed = vec![exposed(80, free, Transport::Tcp)];
    let world = World::new(options);
    for port in [80, 81] {
        let error = world.connect(inside(OURS_V4, port)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{port}");
    }
    world.until("both are counted", |c| {
        (c.exposed.refused, c.drops.get(DropReason::NoService)) == (1, 1)
    });
    world.until("nothing is left", |c| c.exposed.open == 0);
}

#[test]
fn a_connection_that_the_far_end_resets_before_it_is_there_leaves_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = options();
    options.exposed = vec![exposed(80, listener.local_addr().unwrap(), Transport::Tcp)];
    let world = World::new(options);
    let attempts = 20;
    for _ in 0..attempts {
        let connect = || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            // Closed at once: the kernel resets the connection when the answer to its SYN arrives, or now if that is here.
            socket.set_linger(Some(Duration::ZERO)).unwrap();
            let _ = socket.connect(&inside(OURS_V4, 80).into());
        };
        world.peer.run(connect).unwrap();
    }
    world.until("all have come", |c| {
        c.exposed.accepted + c.exposed.refused == attempts
    });
    world.until("nothing is left", |c| c.exposed.open == 0);
}

#[test]
fn an_exposed_udp_port_leads_to_the_host() {
    let host = UdpSocket::bind("127.0.0.1:0").unwrap();
    host.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut options = options();
    options.exposed = vec![exposed(53, host.local_addr().unwrap(), Transport::Udp)];
    let world = World::new(options);
    let far = world.udp(PEER_V4);
    far.send_to(b"question", inside(OURS_V4, 53)).unwrap();
    let mut buf = [0; 100];
    let (length, from) = host.recv_from(&mut buf).unwrap();
    assert_eq!(&buf[..length], b"question");
    host.send_to(b"answer", from).unwrap();
    let (length, from) = far.recv_from(&mut buf).unwrap();
    assert_eq!(
        (&buf[..length], from),
        (&b"answer"[..], inside(OURS_V4, 53))
    );
    world.until("it is counted", |c| c.exposed.open == 1);
}

#[test]
fn datagrams_for_nobody_are_answered_by_an_error() {
    let world = World::new(options());
    let far = world.udp(PEER_V4);
    far.connect(inside(OURS_V4, 9)).unwrap();
    far.send(b"anyone?").unwrap();
    assert_eq!(
        far.recv(&mut [0; 10]).unwrap_err().kind(),
        ErrorKind::ConnectionRefused
    );
    world.until("it is counted", |c| c.drops.get(DropReason::NoService) == 1);
    // Another address of the network, and all of them: no answer.
    let far = world.udp(PEER_V4);
    far.set_broadcast(true).unwrap();
    for address in ["10.9.0.3", "10.9.0.255"] {
        far.send_to(b"anyone?", inside(address, 9)).unwrap();
    }
    world.until("both are counted", |c| {
        c.drops.get(DropReason::NotAddressed) >= 2
    });
    assert_eq!(world.dropped(DropReason::NoService), 1);
}

#[test]
fn pings_are_answered() {
    let world = World::new(options());
    for address in [OURS_V4, OURS_V6] {
        let mut command = std::process::Command::new("ping");
        command
            .args(["-c", "1", "-W", "20", "-s", "1000", address])
            .stdout(std::process::Stdio::null());
        let mut ping = world.peer.spawn_command(&mut command).expect("ping");
        assert!(ping.wait().unwrap().success(), "{address}");
    }
}

/// A listener, and a world in which it is exposed and far ends may be silent for two seconds.
fn impatient() -> (TcpListener, World) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = options();
    options.exposed = vec![exposed(80, listener.local_addr().unwrap(), Transport::Tcp)];
    options.limits.silent_for = Duration::from_secs(2);
    (listener, World::new(options))
}

#[test]
fn a_far_end_that_has_vanished_is_given_up() {
    let (listener, world) = impatient();
    let far = world.connect(inside(OURS_V4, 80)).unwrap();
    let (mut host, _) = listener.accept().unwrap();
    host.set_read_timeout(Some(PATIENCE)).unwrap();
    world.sever();
    let read = host.read(&mut [0]).unwrap_err();
    assert_eq!(read.kind(), ErrorKind::ConnectionReset);
    world.until("nothing is left", |c| c.exposed.open == 0);
    drop(far);
}

/// Waits until the kernel probes the other end of a connection of this host to itself.
fn keeps_alive(local: SocketAddr, remote: SocketAddr) {
    let hex = |address: SocketAddr| format!("0100007F:{:04X}", address.port());
    let ends = format!("{} {}", hex(local), hex(remote));
    let started = Instant::now();
    // The timer of the socket: 02 is the one of keep-alives, once everything is acknowledged.
    while !std::fs::read_to_string("/proc/self/net/tcp")
        .unwrap()
        .lines()
        .find(|line| line.contains(&ends))
        .and_then(|line| line.split_whitespace().nth(5))
        .is_some_and(|timer| timer.starts_with("02:"))
    {
        assert!(started.elapsed() < Duration::from_secs(10), "{ends}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_kernel_probes_the_ends_on_the_host() {
    let (listener, world) = impatient();
    let _far = world.connect(inside(OURS_V4, 80)).unwrap();
    let (host, stack) = listener.accept().unwrap();
    keeps_alive(stack, host.local_addr().unwrap());
    let port = world.serve(PEER_V4, |socket| drop((&socket).read(&mut [0])));
    let (client, _) = world.socks(PEER_V4, port);
    let stack = client.peer_addr().unwrap();
    keeps_alive(stack, client.local_addr().unwrap());
}

#[test]
fn a_far_end_that_is_silent_but_there_is_kept() {
    let (listener, world) = impatient();
    let mut far = world.connect(inside(OURS_V4, 80)).unwrap();
    let (mut host, _) = listener.accept().unwrap();
    // It answers probes of two such times.
    let before = world.counters().packets_in;
    world.until("it was probed", |c| c.packets_in > before + 10);
    assert_eq!(world.counters().exposed.open, 1);
    far.write_all(b"still there").unwrap();
    let mut read = [0; 11];
    host.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"still there");
}
