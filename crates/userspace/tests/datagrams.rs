//! UDP of forwarded ports and of SOCKS5.

use crate::world::{PATIENCE, PEER_V4, World, options};
use seikan_observe::DropReason;
use seikan_userspace::{Forward, Service, Transport};
use std::net::{SocketAddr, UdpSocket};

fn client() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Answers each datagram with its bytes in reverse.
fn reversed(socket: &UdpSocket) {
    let mut buf = [0; 2000];
    while let Ok((length, from)) = socket.recv_from(&mut buf) {
        buf[..length].reverse();
        socket.send_to(&buf[..length], from).unwrap();
    }
}

#[test]
fn a_forwarded_port_carries_datagrams_of_several_clients() {
    let mut options = options();
    let mut forward: Forward = "1:db-1:4711/udp".parse().unwrap();
    forward.listen.set_port(0);
    options.forwards = vec![forward];
    let world = World::new(options);
    let far = world
        .peer
        .run(|| UdpSocket::bind((PEER_V4, 4711)).unwrap())
        .unwrap();
    std::thread::spawn(move || reversed(&far));
    let to = world.listener(Service::Forward, Transport::Udp);
    let clients = [client(), client()];
    for (client, bytes) in clients.iter().zip([&b"abc"[..], b"uvwxyz"]) {
        client.send_to(bytes, to).unwrap();
    }
    for (client, bytes) in clients.iter().zip([&b"cba"[..], b"zyxwvu"]) {
        let mut buf = [0; 100];
        let (length, from) = client.recv_from(&mut buf).unwrap();
        assert_eq!((&buf[..length], from), (bytes, to));
    }
    world.until("both are counted", |c| c.forwards.open == 2);
    // One that does not fit the tunnel is counted.
    clients[0].send_to(&[0; 1393], to).unwrap();
    world.until("it is counted", |c| c.drops.get(DropReason::TooBig) == 1);
}

#[test]
fn errors_that_end_nothing_are_counted() {
    let mut options = options();
    let mut forward: Forward = "1:db-1:4711/udp".parse().unwrap();
    forward.listen.set_port(0);
    options.forwards = vec![forward];
    let world = World::new(options);
    let to = world.listener(Service::Forward, Transport::Udp);
    client().send_to(b"anyone?", to).unwrap();
    world.until("it is counted", |c| c.drops.get(DropReason::NoService) == 1);
}

#[test]
fn an_association_carries_datagrams_until_its_connection_ends() {
    let world = World::new(options());
    let far = world.udp(PEER_V4);
    let port = far.local_addr().unwrap().port();
    std::thread::spawn(move || reversed(&far));
    let associate = [5, 3, 0, 1, 0, 0, 0, 0, 0, 0];
    let (control, answer) = world.ask(Service::Socks, &[&[5, 1, 0], &associate], &[2, 10]);
    assert_eq!(answer[..4], [5, 0, 0, 1]);
    let bound = SocketAddr::from(([127, 0, 0, 1], u16::from_be_bytes([answer[8], answer[9]])));
    let client = client();
    let mut datagram = vec![0, 0, 0, 1, 10, 9, 0, 2];
    datagram.extend(port.to_be_bytes());
    let header = datagram.clone();
    datagram.extend(b"abc");
    client.send_to(&datagram, bound).unwrap();
    let mut buf = [0; 100];
    let length = client.recv(&mut buf).unwrap();
    assert_eq!(buf[..length], [&header[..], b"cba"].concat());
    // Another sender is not the client.
    self::client().send_to(&datagram, bound).unwrap();
    world.until("it is counted", |c| {
        c.drops.get(DropReason::UnknownSource) == 1
    });
    drop(control);
    world.until("all is gone", |c| c.socks.open == 0);
}
