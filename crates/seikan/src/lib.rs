//! A tunnel of [Seikan](https://github.com/seikan-net/seikan) inside of a program: TCP and UDP over an encrypted overlay
//! network, without root, a TUN device or another process.
//!
//! [`Tunnel::connect`] starts a tunnel from a [`Config`]: a file, as `seikan up` reads it, or settings made in code.
//! [`Tunnel::join`] makes the program a member of a mesh. Peers see no difference to any other host: they run `seikan`,
//! WireGuard, or a program with this crate.
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
//! Everything is bounded. A reader that does not read closes the window of its connection, and so stops the sender. A writer
//! waits for space. A datagram that finds no space is dropped and counted, as by a kernel. Dropping a stream ends it:
//! gracefully, or with a reset if it holds bytes that were not read. A future may be dropped: a connection that it was opening is closed,
//! except that [`Tunnel::join`] may still make the program a member.
//!
//! # Threads
//!
//! A tunnel has two threads: `tunnel` encrypts packets, `stack` is its TCP/IP. A member of a mesh has a third one, `mesh`, for
//! the coordinator, and one for each connection to a relay. They do not use the runtime of the program. [`Tunnel`] and all
//! sockets are `Send` and `Sync`. Sockets have to be opened in a tokio runtime whose I/O is enabled.
//!
//! The crate installs no signal handlers, reads no environment variables unless told to, changes neither privileges nor limits
//! of the process, and starts no other process. It uses the network namespace of the thread that starts the tunnel. It logs
//! by [`tracing`].
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
