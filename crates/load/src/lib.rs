//! The built-in load generator: TCP bulk, UDP flood, web pages, latency, and a load with an offered
//! rate that others watch.
//!
//! Both ends run in threads of this process, except for a [`Flow`], whose other end is on another
//! host. Sockets are opened inside their host's namespace and stay there whichever thread uses
//! them. Everything is bounded in time and checks the [`Interrupt`] flag. Rates are those at which
//! the receiver's application read in the measured window, not the offered ones.
#![forbid(unsafe_code)]

pub mod counters;
mod error;
mod half;
mod latency;
mod live;
mod paced;
mod pattern;
pub mod stats;
mod tcp;
mod udp;
mod web;

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use socket2::{Domain, SockRef, Socket, Type};

use error::Doing as _;
pub use error::{LoadError, Result};
pub use half::{Flow, Sink, Token, Transport, reach};
pub use latency::{LatencyOptions, LatencyReport, ping, wait_reachable};
pub use live::{LiveKind, LiveOptions, Meter, live};
pub use paced::{answer, paced, round_trips};
pub use pattern::Pattern;
pub use tcp::{Direction, Interval, TcpOptions, TcpReport, tcp_bulk, verify_stream};
pub use udp::{Counter, UdpOptions, UdpReport, receive_flood, send_flood, udp_flood};
pub use web::{WebReport, web};

use seikan_sys::netns::NetNs;
use seikan_ui::Interrupt;

/// Ends of a load: `client` reaches `server` at `target`.
#[derive(Clone, Copy, Debug)]
pub struct Ends<'a> {
    /// The side that connects, and sends unless the load is reversed.
    pub client: &'a NetNs,
    /// The side that listens.
    pub server: &'a NetNs,
    /// The server's address as the client sees it: on the link, or inside a tunnel.
    pub target: IpAddr,
    /// Source addresses of TCP streams, used alternately; if empty, the kernel chooses the source.
    pub sources: &'a [IpAddr],
    /// Congestion control of TCP, by the kernel's name; `None`: the default of the namespaces. A
    /// socket may use algorithms that the machine does not allow as a namespace's default.
    pub congestion: Option<&'static str>,
    /// Ports of a program that forwards TCP connections from the client's host to the server, as a
    /// tunnel without an interface does; `target` is then an address of the client's host.
    pub forward: Option<Forward>,
}

/// A forwarded port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The port that the client connects to.
    pub from: u16,
    /// The port of the server that it leads to.
    pub to: u16,
}

impl Ends<'_> {
    /// Sets the congestion control of a connection, or of those that a listener accepts.
    fn set_congestion(&self, socket: impl AsFd) -> Result<()> {
        let Some(name) = self.congestion else {
            return Ok(());
        };
        SockRef::from(&socket)
            .set_tcp_congestion(name.as_bytes())
            .doing(format!("use the congestion control {name}"))
    }

    /// Listens in the server; returns the address that the client connects to. accept(2) honours the
    /// time-out, and connections inherit the receive buffer, on which the scale of their windows
    /// depends.
    fn listen(
        &self,
        timeout: Duration,
        receive_buffer: Option<usize>,
    ) -> Result<(TcpListener, SocketAddr)> {
        let mut any = any(self.target);
        let listener = self.server.run(|| {
            let socket = Socket::new(Domain::for_address(any), Type::STREAM, None)?;
            if let Some(forward) = self.forward {
                any.set_port(forward.to);
                // Connections of the measurement before may still occupy it.
                socket.set_reuse_address(true)?;
            }
            if let Some(bytes) = receive_buffer {
                socket.set_recv_buffer_size(bytes)?;
            }
            socket.set_read_timeout(Some(timeout))?;
            socket.bind(&any.into())?;
            socket.listen(128)?;
            Ok((socket.local_addr()?, TcpListener::from(socket)))
        })?;
        let (at, listener) = listener.doing("listen for the load generator's connections")?;
        self.set_congestion(&listener)?;
        let port = match self.forward {
            Some(forward) => forward.from,
            None => at.as_socket().map_or(0, |at| at.port()),
        };
        Ok((listener, SocketAddr::new(self.target, port)))
    }

    /// Connects from the client, from an address of its own if one is given.
    fn connect(
        &self,
        source: Option<IpAddr>,
        to: SocketAddr,
        timeout: Duration,
    ) -> Result<TcpStream> {
        let stream = self.client.run(|| {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
            if let Some(source) = source {
                socket.bind(&SocketAddr::new(source, 0).into())?;
            }
            socket.connect_timeout(&to.into(), timeout)?;
            Ok(TcpStream::from(socket))
        })?;
        let stream = stream.doing(format!("connect to {to}"))?;
        self.set_congestion(&stream)?;
        Ok(stream)
    }

    /// Opens a UDP socket in the server, and one in the client that is connected to it.
    fn datagrams(&self) -> Result<[UdpSocket; 2]> {
        if self.forward.is_some() {
            let only = "cannot send UDP through a forwarded port: it carries TCP only";
            return Err(LoadError::Usage(only.to_owned()));
        }
        let any = any(self.target);
        let server = self.server.run(|| UdpSocket::bind(any))?;
        let server = server.doing("open the server's UDP socket")?;
        let port = server.local_addr().doing("read the server's port")?.port();
        let to = SocketAddr::new(self.target, port);
        let client = self.client.run(|| {
            let client = UdpSocket::bind(any)?;
            client.connect(to).map(|()| client)
        })?;
        let client = client.doing(format!("open a UDP socket to {to}"))?;
        time_outs(&server)?;
        time_outs(&client)?;
        Ok([server, client])
    }
}

/// Any address and port of an address's family, to bind to.
fn any(target: IpAddr) -> SocketAddr {
    match target {
        IpAddr::V4(_) => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        IpAddr::V6(_) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
    }
}

/// Interval at which a blocked call checks the stop flag.
const IO_TIMEOUT: Duration = Duration::from_millis(100);

/// Bounds how long a call on a socket blocks.
fn time_outs(socket: &impl AsFd) -> Result<()> {
    let socket = SockRef::from(socket);
    socket
        .set_read_timeout(Some(IO_TIMEOUT))
        .and_then(|()| socket.set_write_timeout(Some(IO_TIMEOUT)))
        .doing("set the time-outs of a socket")
}

/// Whether a call only took too long.
fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// A bulk transfer and a latency probe at the same time. The probe covers the measured window of
/// the transfer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LoadedLatency {
    /// Throughput meanwhile, in Gbit/s.
    pub gbit_per_second: f64,
    /// Round-trip time that TCP has measured meanwhile, see [`TcpReport::round_trip_us`].
    #[serde(default)]
    pub round_trip_us: Option<f64>,
    /// Round trips under that load.
    pub latency: LatencyReport,
}

/// Measures round trips: [`ping`] or [`paced()`].
pub type Probe = fn(&Ends<'_>, &LatencyOptions, &Interrupt) -> Result<LatencyReport>;

/// Measures latency while TCP bulk traffic runs.
///
/// # Errors
/// Errors of the load or of the probe; [`LoadError::Interrupted`].
pub fn loaded_latency(
    ends: &Ends<'_>,
    tcp: &TcpOptions,
    probe: Probe,
    interval: Duration,
    interrupt: &Interrupt,
) -> Result<LoadedLatency> {
    let count = (tcp.duration.as_secs_f64() / interval.as_secs_f64()).floor() as u32;
    let options = LatencyOptions {
        count: count.max(1),
        interval,
        // A lost request waits for its whole timeout, and the load may have ended by then.
        within: Some(tcp.duration),
        timeout: tcp
            .duration
            .div_f64(4.0)
            .min(LatencyOptions::default().timeout),
    };
    std::thread::scope(|scope| {
        let load = scope.spawn(|| tcp_bulk(ends, tcp, interrupt));
        let latency = interrupt
            .sleep(tcp.warmup)
            .map_err(LoadError::from)
            .and_then(|()| probe(ends, &options, interrupt));
        let load = join(load)??;
        Ok(LoadedLatency {
            gbit_per_second: load.gbit_per_second,
            round_trip_us: load.round_trip_us,
            latency: latency?,
        })
    })
}

/// Returns the result of a scoped thread; a panic in it becomes an error.
pub fn join<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> Result<T> {
    thread.join().map_err(|_| {
        LoadError::Setup("a thread of the load generator panicked: this is a bug".into())
    })
}

/// Bytes in `seconds` as Gbit/s (10^9 bits).
fn gbit_per_second(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        bytes as f64 * 8.0 / 1e9 / seconds
    } else {
        0.0
    }
}
