//! The built-in load generator: TCP bulk, UDP flood, web pages, latency, and a load with an offered rate that others watch.
//!
//! Both ends run in threads of this process, but for a [`Flow`], which has its other end on another host. Sockets are opened inside their host's namespace and stay there
//! whichever thread uses them. Everything is bounded in time and looks at the [`Interrupt`] flag.
//! Rates are what the receiver's application read during the measured window, never what was offered.
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

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use socket2::SockRef;

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

/// Raises a flag when dropped, also by a panic: a scope would wait for its threads for ever.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Ends of a load: `client` reaches `server` at `target`.
#[derive(Clone, Copy, Debug)]
pub struct Ends<'a> {
    /// The side that connects, and sends unless the load is reversed.
    pub client: &'a NetNs,
    /// The side that listens.
    pub server: &'a NetNs,
    /// The server's address as the client sees it: on the link, or inside a tunnel.
    pub target: IpAddr,
    /// Addresses of the client that TCP streams come from, in turn; where there are none, the kernel chooses.
    pub sources: &'a [IpAddr],
    /// Congestion control of TCP, as the kernel calls it; if `None`, that of the namespaces. A socket may ask
    /// for those that the machine does not allow to a namespace.
    pub congestion: Option<&'static str>,
}

impl Ends<'_> {
    /// Sets the congestion control of a connection, or of those that a listener accepts.
    fn set_congestion(&self, socket: impl AsFd) -> Result<()> {
        let Some(name) = self.congestion else {
            return Ok(());
        };
        SockRef::from(&socket)
            .set_tcp_congestion(name.as_bytes())
            .map_err(LoadError::io(format!("use the congestion control {name}")))
    }

    /// Any address and port of the target's family, to bind to.
    fn any(&self) -> SocketAddr {
        match self.target {
            IpAddr::V4(_) => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
            IpAddr::V6(_) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
        }
    }
}

/// Bulk transfer and latency probe at once, the probe over the measured window of the transfer.
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
/// What the load or the probe reports, or [`LoadError::Interrupted`].
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
        // A lost one takes as long as its time-out, and afterwards there is no load.
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

/// The result of a scoped thread; a panic in it becomes an error here.
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
