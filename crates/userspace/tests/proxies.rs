//! SOCKS5, HTTP CONNECT and forwarded ports.

use crate::bytes;
use crate::world::{OURS_V4, OURS_V6, PEER_V4, PEER_V6, World, options};
use seikan_userspace::{Service, Transport};
use std::io::{Read, Write};
use std::net::TcpStream;

const LENGTH: u64 = 100_000;

#[test]
fn socks_takes_addresses_and_names() {
    let world = World::new(options());
    let ports = [PEER_V4, PEER_V6]
        .map(|address| world.serve(address, |socket| bytes::exchange(&socket, 2, 1, LENGTH)));
    for (host, port) in [
        (PEER_V4, ports[0]),
        (PEER_V6, ports[1]),
        ("DB-1.", ports[0]),
        ("v6.peer", ports[1]),
    ] {
        let (socket, code) = world.socks(host, port);
        assert_eq!(code, 0, "{host}");
        bytes::exchange(&socket, 1, 2, LENGTH);
    }
    world.until("all are counted", |c| c.socks.accepted == 4);
}

#[test]
fn socks_says_why_a_destination_is_not_reached() {
    let world = World::new(options());
    for (host, port, expected) in [
        (PEER_V4, 1, 5),
        (PEER_V6, 1, 5),
        ("nobody", 1, 4),
        ("a b", 1, 8),
        (PEER_V4, 0, 8),
        ("224.0.0.1", 1, 4),
        (OURS_V4, 1, 4),
        (OURS_V6, 1, 4),
        ("127.0.0.1", 1, 4),
        ("::1", 1, 4),
    ] {
        let (mut socket, code) = world.socks(host, port);
        assert_eq!(code, expected, "{host}");
        assert_eq!(socket.read(&mut [0; 1]).unwrap(), 0, "{host}");
    }
    let (_, answer) = world.ask(Service::Socks, &[&[5, 1, 2]], &[2]);
    assert_eq!(answer, [5, 0xff], "authentication only");
    let bind = [5, 2, 0, 1, 10, 9, 0, 2, 0, 1];
    let (_, answer) = world.ask(Service::Socks, &[&[5, 1, 0], &bind], &[2, 10]);
    assert_eq!(answer[1], 7, "BIND");
    world.until("all are closed", |c| c.socks.open == 0);
    assert_eq!(world.counters().socks.refused, 12);
}

#[test]
fn what_is_no_socks_is_closed_without_an_answer() {
    let world = World::new(options());
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[4, 1, 0, 80, 10, 9, 0, 2, 0],
    ] {
        let mut socket =
            TcpStream::connect(world.listener(Service::Socks, Transport::Tcp)).unwrap();
        socket.write_all(bytes).unwrap();
        assert!(matches!(socket.read(&mut [0; 1]), Ok(0) | Err(_)));
    }
    world.until("all are closed", |c| c.socks.open == 0);
}

/// Reads the head of an answer.
fn head(socket: &mut TcpStream) -> String {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && socket.read(&mut byte).unwrap() == 1 {
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

fn connect(world: &World, authority: &str) -> (TcpStream, String) {
    let request = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    let (mut socket, _) = world.ask(Service::Http, &[request.as_bytes()], &[0]);
    let head = head(&mut socket);
    (socket, head)
}

#[test]
fn http_connect_opens_a_stream() {
    let world = World::new(options());
    let port = world.serve(PEER_V6, |socket| bytes::exchange(&socket, 2, 1, LENGTH));
    let (socket, head) = connect(&world, &format!("[{PEER_V6}]:{port}"));
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    bytes::exchange(&socket, 1, 2, LENGTH);
}

#[test]
fn bytes_after_the_request_go_to_the_far_end() {
    let world = World::new(options());
    let port = world.serve(PEER_V4, |mut socket| {
        let mut early = [0; 5];
        socket.read_exact(&mut early).unwrap();
        socket.write_all(&early).unwrap();
    });
    let request = format!("CONNECT db-1:{port} HTTP/1.1\r\n\r\nearly");
    let (mut socket, _) = world.ask(Service::Http, &[request.as_bytes()], &[0]);
    assert!(head(&mut socket).starts_with("HTTP/1.1 200 "));
    let mut back = [0; 5];
    socket.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"early");
}

#[test]
fn http_says_why_a_destination_is_not_reached() {
    let world = World::new(options());
    for (authority, status) in [
        (format!("{PEER_V4}:1"), 502),
        ("nobody:1".into(), 502),
        ("db-1".into(), 400),
    ] {
        let (_, head) = connect(&world, &authority);
        assert!(
            head.starts_with(&format!("HTTP/1.1 {status} ")),
            "{authority}: {head}"
        );
    }
    let (mut socket, _) = world.ask(Service::Http, &[b"GET http://db-1/ HTTP/1.1\r\n\r\n"], &[0]);
    let head = head(&mut socket);
    assert!(
        head.starts_with("HTTP/1.1 405 ") && head.contains("Allow: CONNECT"),
        "{head}"
    );
    world.until("all are closed", |c| c.http.open == 0);
}

#[test]
fn a_head_that_is_too_long_is_refused() {
    let world = World::new(options());
    let long = format!("CONNECT db-1:1 HTTP/1.1\r\nA: {}", "b".repeat(9000));
    let many = format!("CONNECT db-1:1 HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65));
    for request in [long, many] {
        let (mut socket, _) = world.ask(Service::Http, &[request.as_bytes()], &[0]);
        assert!(head(&mut socket).starts_with("HTTP/1.1 431 "));
    }
}

/// Takes the half minute after which an attempt is given up.
#[test]
fn no_answer_is_a_timeout() {
    let world = World::new(options());
    let (_, head) = connect(&world, "10.9.0.77:80");
    assert!(head.starts_with("HTTP/1.1 504 "), "{head}");
}

#[test]
fn a_forwarded_port_leads_to_a_name() {
    let mut options = options();
    let mut forward: seikan_userspace::Forward = "1:db-1:4711".parse().unwrap();
    forward.listen.set_port(0);
    options.forwards = vec![forward];
    let world = World::new(options);
    let listener = world
        .peer
        .run(|| std::net::TcpListener::bind((PEER_V4, 4711)).unwrap())
        .unwrap();
    let far =
        std::thread::spawn(move || bytes::exchange(&listener.accept().unwrap().0, 2, 1, LENGTH));
    let socket = TcpStream::connect(world.listener(Service::Forward, Transport::Tcp)).unwrap();
    bytes::exchange(&socket, 1, 2, LENGTH);
    far.join().unwrap();
    world.until("it ends", |c| {
        c.forwards.open == 0 && c.forwards.accepted == 1
    });
}
