//! Programs that use the tunnel: clients of the proxies, and servers.

use seikan_sys::netns::NetNs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::common::PATIENCE;

/// Bytes that are sent through and come back: many super-packets.
pub const LENGTH: usize = 1 << 20;

/// A server that sends every byte back, until it is dropped.
pub struct Echo {
    pub address: SocketAddr,
    thread: Option<JoinHandle<()>>,
    namespace: NetNs,
}

impl Echo {
    pub fn at(namespace: &NetNs, address: &str) -> Echo {
        let bound = namespace.run(|| TcpListener::bind(address));
        let listener = bound.expect("namespace").expect("bind");
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.expect("a connection");
                let mut first = [0];
                match stream.read(&mut first) {
                    Ok(1) if first == [STOP] => return,
                    Ok(1) => {}
                    _ => continue,
                }
                std::thread::spawn(move || {
                    let mut back = stream.try_clone()?;
                    back.write_all(&first)?;
                    io::copy(&mut stream, &mut back)?;
                    back.shutdown(Shutdown::Write)
                });
            }
        });
        Echo {
            address: address.parse().expect("an address"),
            thread: Some(thread),
            namespace: namespace.try_clone().expect("a namespace"),
        }
    }
}

/// First byte of a connection that ends a server.
const STOP: u8 = 0;

impl Drop for Echo {
    fn drop(&mut self) {
        let address = self.address;
        let stopped = self
            .namespace
            .run(|| TcpStream::connect(address)?.write_all(&[STOP]));
        if matches!(stopped, Ok(Ok(())))
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Connects in a namespace.
pub fn connect(namespace: &NetNs, to: SocketAddr) -> io::Result<TcpStream> {
    let connected = namespace.run(|| TcpStream::connect_timeout(&to, PATIENCE));
    let stream = connected.expect("namespace")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Sends bytes and asserts that all of them come back, and then the end.
pub fn assert_echo(stream: TcpStream) {
    let sent: Vec<u8> = (0..LENGTH).map(|i| (i % 251) as u8 + 1).collect();
    let mut writing = stream.try_clone().expect("a clone");
    let bytes = sent.clone();
    let writer = std::thread::spawn(move || {
        writing.write_all(&bytes)?;
        writing.shutdown(Shutdown::Write)
    });
    let mut received = Vec::new();
    let mut stream = stream;
    stream.read_to_end(&mut received).expect("received");
    writer.join().expect("the writer").expect("sent");
    assert_eq!(received.len(), sent.len());
    assert!(received == sent, "other bytes came back");
}

/// A destination of SOCKS5 (RFC 1928).
pub enum Target<'a> {
    Address(SocketAddr),
    Name(&'a str, u16),
}

/// Connects through a SOCKS5 proxy; the error is the code of its reply.
pub fn socks(namespace: &NetNs, proxy: SocketAddr, target: &Target) -> Result<TcpStream, u8> {
    let mut stream = connect(namespace, proxy).expect("the proxy");
    stream.write_all(&[5, 1, 0]).expect("sent");
    let mut method = [0; 2];
    stream.read_exact(&mut method).expect("a method");
    assert_eq!(method, [5, 0]);
    let mut request = vec![5, 1, 0];
    let port = match target {
        Target::Address(address) => {
            match address.ip() {
                IpAddr::V4(ip) => {
                    request.push(1);
                    request.extend(ip.octets());
                }
                IpAddr::V6(ip) => {
                    request.push(4);
                    request.extend(ip.octets());
                }
            }
            address.port()
        }
        Target::Name(name, port) => {
            request.extend([3, name.len() as u8]);
            request.extend(name.bytes());
            *port
        }
    };
    request.extend(port.to_be_bytes());
    stream.write_all(&request).expect("sent");
    let mut reply = [0; 4];
    stream.read_exact(&mut reply).expect("a reply");
    let address = match reply[3] {
        4 => 16,
        _ => 4,
    };
    stream
        .read_exact(&mut vec![0; address + 2])
        .expect("an address");
    match reply[1] {
        0 => Ok(stream),
        code => Err(code),
    }
}

/// Sends a datagram through a SOCKS5 proxy (RFC 1928, section 7) repeatedly until it comes back;
/// returns whether it did.
pub fn socks_answers_datagram(namespace: &NetNs, proxy: SocketAddr, to: SocketAddrV4) -> bool {
    let mut control = connect(namespace, proxy).expect("the proxy");
    control.write_all(&[5, 1, 0]).expect("sent");
    control.read_exact(&mut [0; 2]).expect("a method");
    // UDP ASSOCIATE, from any address.
    control
        .write_all(&[5, 3, 0, 1, 0, 0, 0, 0, 0, 0])
        .expect("sent");
    let mut reply = [0; 10];
    control.read_exact(&mut reply).expect("a reply");
    let [5, 0, 0, 1, a, b, c, d, high, low] = reply else {
        panic!("{reply:?}");
    };
    let relay = SocketAddr::from(([a, b, c, d], u16::from_be_bytes([high, low])));
    let mut request = vec![0, 0, 0, 1];
    request.extend(to.ip().octets());
    request.extend(to.port().to_be_bytes());
    request.extend(b"are you there?");
    let answered = namespace.run(|| {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("bind");
        let pause = Some(Duration::from_millis(200));
        socket.set_read_timeout(pause).expect("timeout");
        let mut buffer = [0; 64];
        (0..300).any(|_| {
            let _ = socket.send_to(&request, relay);
            // The answer names its sender, which is where the request went.
            socket
                .recv(&mut buffer)
                .is_ok_and(|length| buffer[..length] == request)
        })
    });
    answered.expect("namespace")
}

/// Connects through an HTTP CONNECT proxy (RFC 9110, section 9.3.6).
pub fn http(namespace: &NetNs, proxy: SocketAddr, target: &str) -> TcpStream {
    let mut stream = connect(namespace, proxy).expect("the proxy");
    write!(
        stream,
        "CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"
    )
    .expect("sent");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("a reply");
        head.extend(byte);
    }
    let head = String::from_utf8(head).expect("UTF-8");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    stream
}

/// Returns whether a datagram to this address comes back.
pub fn answers_datagram(namespace: &NetNs, to: SocketAddr) -> bool {
    let answered = namespace.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
        let pause = Some(Duration::from_millis(200));
        socket.set_read_timeout(pause).expect("timeout");
        let mut buffer = [0; 64];
        (0..300).any(|_| {
            let _ = socket.send_to(b"are you there?", to);
            socket
                .recv(&mut buffer)
                .is_ok_and(|length| &buffer[..length] == b"are you there?")
        })
    });
    answered.expect("namespace")
}
