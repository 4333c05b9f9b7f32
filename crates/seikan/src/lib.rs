//! A [Seikan](https://github.com/seikan-net/seikan) tunnel inside a program: TCP and UDP over an
//! encrypted overlay network, without root, a TUN device or another process.
//!
//! [`Tunnel::connect`] starts a tunnel from a [`Config`]: a file, as `seikan up` reads it, or
//! settings made in code. [`Tunnel::join`] makes the program a member of a mesh. To its peers, the
//! program looks like any other host. Peers run `seikan`, WireGuard, or a program with this crate.
//!
#![doc = "```no_run"]
#![doc = include_str!("../examples/fetch.rs")]
#![doc = "```"]
//!
//! # Sockets
//!
//! [`TcpStream`] implements tokio's `AsyncRead` and `AsyncWrite`, [`TcpListener`] accepts connections of peers, and
//! [`UdpSocket`] exchanges datagrams. Destinations are addresses inside the tunnel, names of peers in the configuration that
//! have a single address (`10.9.0.1/32` among their allowed IPs), and names of members of the mesh and of devices behind them.
//! Other names are unknown: the host's resolver is not asked.
//!
//! All memory is bounded. If a program does not read, the window of its connection closes and the
//! sender stops. A writer waits for space. A datagram for which there is no space is dropped and
//! counted, as in a kernel. Dropping a stream ends it gracefully, or with a reset if it holds
//! unread bytes. A future may be dropped: a connection that it was opening is closed. After
//! dropping [`Tunnel::join`], the program may still become a member.
//!
//! # Threads
//!
//! A tunnel has two threads: `tunnel` encrypts packets, and `stack` runs TCP/IP. If endpoints of
//! peers are host names, a thread `names` resolves them. A member of a mesh has a thread `mesh` for
//! the coordinator. The threads do not use the runtime of the program. [`Tunnel`] and all sockets
//! are `Send` and `Sync`. Sockets have to be opened in a tokio runtime whose I/O is enabled.
//!
//! The crate installs no signal handlers, reads environment variables only on request, changes
//! neither privileges nor limits of the process, and starts no other process. It uses the network
//! namespace of the thread that starts the tunnel. It logs with [`tracing`].
#![forbid(unsafe_code)]

mod config;
mod destination;
mod error;
mod join;
mod listener;
mod status;
mod stream;
mod tunnel;
mod udp;

pub use config::{Builder, Config, Peer};
pub use destination::{Destination, IntoDestination, NotADestination};
pub use error::Error;
pub use join::Join;
pub use listener::TcpListener;
pub use status::{PeerState, PeerStatus, Status};
pub use stream::TcpStream;
pub use tunnel::Tunnel;
pub use udp::UdpSocket;

/// The guide, whose examples `cargo test --doc` compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/library.md")]
mod guide {}
