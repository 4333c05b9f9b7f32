//! A load between two processes, such as the doctors of two hosts: each has one end of its flow.
//!
//! One process opens a [`Sink`] and gives its port and a token to the other process, in secret; the
//! other process connects by [`reach`]. A connection without the token, or from another host, is
//! refused. Then either process sends and the other receives.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use seikan_ui::Interrupt;
use socket2::SockRef;

use crate::error::{Doing, LoadError, Result};
use crate::live::{Meter, receive, receive_datagrams, send, send_datagrams};
use crate::{IO_TIMEOUT, any, time_outs};

/// Maximum time for the two ends to find each other.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum time from a connection to its token.
const TOKEN_TIMEOUT: Duration = Duration::from_millis(300);
/// Copies of the answer to a token by UDP.
const ANSWERS: usize = 3;
/// UDP payload, bytes: fits into any tunnel in one piece.
const DATAGRAM: usize = 1_200;

/// Transport protocol of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// One connection.
    Tcp,
    /// Datagrams.
    Udp,
}

/// Random bytes that a flow begins with.
pub type Token = [u8; 16];

/// The receiving end of a flow, before it is connected.
#[derive(Debug)]
pub enum Sink {
    /// A listening socket.
    Tcp(TcpListener),
    /// A socket that is not connected yet.
    Udp(UdpSocket),
}

/// One end of a flow.
#[derive(Debug)]
pub enum Flow {
    /// A connection.
    Tcp(TcpStream),
    /// A connected socket.
    Udp(UdpSocket),
}

/// More datagrams than the kernel's default receive buffer holds (`net.core.rmem_default`).
const QUEUED: usize = 4096;

impl Sink {
    /// Opens a port at this address alone; the kernel chooses one for port 0.
    ///
    /// # Errors
    /// The port is in use, or the address is not of this host.
    pub fn open(transport: Transport, at: SocketAddr) -> Result<Sink> {
        let failed = || LoadError::io(format!("open the port of the load, {at}"));
        Ok(match transport {
            Transport::Tcp => {
                let listener = TcpListener::bind(at).map_err(failed())?;
                // accept(2) honours the receive time-out.
                SockRef::from(&listener)
                    .set_read_timeout(Some(IO_TIMEOUT))
                    .map_err(failed())?;
                Sink::Tcp(listener)
            }
            Transport::Udp => {
                let socket = UdpSocket::bind(at).map_err(failed())?;
                time_outs(&socket)?;
                Sink::Udp(socket)
            }
        })
    }

    /// Its port.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn port(&self) -> Result<u16> {
        let address = match self {
            Sink::Tcp(listener) => listener.local_addr(),
            Sink::Udp(socket) => socket.local_addr(),
        };
        let address = address.doing("read the port of the load")?;
        Ok(address.port())
    }

    /// Waits for the flow that begins with the token, from this host or, if `None`, from any;
    /// refuses all others.
    ///
    /// # Errors
    /// It does not connect in time, or `stop` was raised.
    pub fn accept(self, from: Option<IpAddr>, token: &Token, stop: &Interrupt) -> Result<Flow> {
        let until = Instant::now() + PATIENCE;
        let is_it = |address: SocketAddr| {
            from.is_none_or(|from| address.ip().to_canonical() == from.to_canonical())
        };
        while Instant::now() < until && !stop.is_raised() {
            match &self {
                Sink::Tcp(listener) => {
                    let Ok((stream, address)) = listener.accept() else {
                        continue;
                    };
                    if is_it(address) && says(&stream, token) {
                        time_outs(&stream)?;
                        return Ok(Flow::Tcp(stream));
                    }
                }
                Sink::Udp(socket) => {
                    let mut said = [0; 17];
                    let Ok((16, address)) = socket.recv_from(&mut said) else {
                        continue;
                    };
                    if is_it(address) && said[..16] == *token {
                        socket
                            .connect(address)
                            .doing("connect to the load's other end")?;
                        forget_received(socket)?;
                        // The path may lose some of them.
                        for _ in 0..ANSWERS {
                            let _ = socket.send(token);
                        }
                        let socket = socket.try_clone().doing("keep the load's socket")?;
                        return Ok(Flow::Udp(socket));
                    }
                }
            }
        }
        Err(LoadError::Setup(
            "the other end of the load did not connect in time".into(),
        ))
    }
}

/// Connects to a sink.
///
/// # Errors
/// Nothing answers at the address, or another program does.
pub fn reach(
    transport: Transport,
    to: SocketAddr,
    token: &Token,
    stop: &Interrupt,
) -> Result<Flow> {
    let failed = || LoadError::io(format!("reach the load's port at {to} (a firewall?)"));
    match transport {
        Transport::Tcp => {
            let mut stream = TcpStream::connect_timeout(&to, PATIENCE).map_err(failed())?;
            stream.set_read_timeout(Some(PATIENCE)).map_err(failed())?;
            let mut said = [0; 16];
            stream
                .write_all(token)
                .and_then(|()| stream.read_exact(&mut said))
                .map_err(failed())?;
            if said != *token {
                let stranger = format!("another program answers at the load's port {to}");
                return Err(LoadError::Setup(stranger));
            }
            time_outs(&stream)?;
            Ok(Flow::Tcp(stream))
        }
        Transport::Udp => {
            let socket = UdpSocket::bind(any(to.ip())).map_err(failed())?;
            socket.connect(to).map_err(failed())?;
            time_outs(&socket)?;
            let until = Instant::now() + PATIENCE;
            while Instant::now() < until && !stop.is_raised() {
                // The token or its answer may be lost. It is sent again after the read's timeout.
                let _ = socket.send(token);
                let mut said = [0; 17];
                if matches!(socket.recv(&mut said), Ok(16)) && said[..16] == *token {
                    return Ok(Flow::Udp(socket));
                }
            }
            Err(LoadError::Setup(format!(
                "the load's port at {to} does not answer: a firewall?"
            )))
        }
    }
}

/// Discards datagrams that arrived before the socket was connected, because they may have any
/// source. Later ones come only from the other end, so a bounded number of reads suffices.
fn forget_received(socket: &UdpSocket) -> Result<()> {
    socket
        .set_nonblocking(true)
        .doing("empty the load's socket")?;
    let mut waiting = (0..QUEUED).map(|_| socket.recv(&mut [0; 1]));
    while waiting.next().is_some_and(|received| received.is_ok()) {}
    socket
        .set_nonblocking(false)
        .doing("empty the load's socket")
}

impl Flow {
    /// Sends until `stop` is set, at most `rate` Mbit/s or unlimited. Datagrams have no congestion
    /// control.
    pub fn send(&self, rate: Option<f64>, stop: &Interrupt) {
        match self {
            Flow::Tcp(stream) => send(stream, rate, stop),
            Flow::Udp(socket) => send_datagrams(socket, DATAGRAM, None, rate, stop),
        }
    }

    /// Receives until `stop` is set, or the other end is gone.
    pub fn receive(&self, meter: &Meter, stop: &Interrupt) {
        match self {
            Flow::Tcp(stream) => receive(stream, None, meter, stop),
            Flow::Udp(socket) => receive_datagrams(socket, meter, stop),
        }
    }
}

/// Whether a connection begins with the token. If so, the token is sent back.
fn says(mut stream: &TcpStream, token: &Token) -> bool {
    let until = Instant::now() + TOKEN_TIMEOUT;
    let (mut said, mut length) = ([0; 16], 0);
    if stream.set_nonblocking(false).is_err() {
        return false;
    }
    while length < said.len() {
        let left = until.saturating_duration_since(Instant::now());
        // The timeout is for all bytes together, because other connections wait.
        let is_set = !left.is_zero() && stream.set_read_timeout(Some(left)).is_ok();
        match stream.read(&mut said[length..]) {
            Ok(more @ 1..) if is_set => length += more,
            _ => return false,
        }
    }
    said == *token && stream.write_all(token).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: Token = [7; 16];

    fn here() -> SocketAddr {
        ([127, 0, 0, 1], 0).into()
    }

    /// Returns the bytes of a flow that arrive in a fifth of a second; a connection with a wrong
    /// token comes before it.
    fn flows(transport: Transport) -> u64 {
        let sink = Sink::open(transport, here()).expect("sink");
        let to = SocketAddr::new(here().ip(), sink.port().expect("port"));
        let (stop, meter) = (Interrupt::new(), Meter::default());
        std::thread::scope(|scope| {
            let (stop, meter) = (&stop, &meter);
            scope.spawn(move || {
                let flow = sink
                    .accept(Some(here().ip()), &TOKEN, stop)
                    .expect("the flow");
                flow.receive(meter, stop);
            });
            let wrong_token = Interrupt::new();
            if transport == Transport::Tcp {
                assert!(reach(transport, to, &[8; 16], &wrong_token).is_err());
            }
            let flow = reach(transport, to, &TOKEN, stop).expect("the sink");
            scope.spawn(move || flow.send(Some(8.0), stop));
            std::thread::sleep(Duration::from_millis(200));
            stop.raise();
        });
        meter.bytes()
    }

    #[test]
    fn a_flow_carries_no_more_than_its_rate() {
        for transport in [Transport::Tcp, Transport::Udp] {
            // 8 Mbit/s are 200 kB in a fifth of a second, and 50 ms of credit on a machine that
            // pauses.
            let bytes = flows(transport);
            assert!(
                (20_000..=300_000).contains(&bytes),
                "{transport:?}: {bytes}"
            );
        }
    }

    #[test]
    fn a_connection_from_another_host_is_refused() {
        let sink = Sink::open(Transport::Tcp, here()).expect("sink");
        let to = SocketAddr::new(here().ip(), sink.port().expect("port"));
        let stop = Interrupt::new();
        std::thread::scope(|scope| {
            let elsewhere: IpAddr = [127, 0, 0, 2].into();
            let stop = &stop;
            let waiting = scope.spawn(move || sink.accept(Some(elsewhere), &TOKEN, stop));
            assert!(reach(Transport::Tcp, to, &TOKEN, stop).is_err());
            stop.raise();
            assert!(waiting.join().expect("join").is_err());
        });
    }
}
