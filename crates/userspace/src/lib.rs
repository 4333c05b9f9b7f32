//! TCP/IP for a tunnel without root: a stack in user space, proxies and port forwards.
//!
//! [`Stack::start`] takes one end of a SOCK_SEQPACKET socket pair ([`packet_pair`]). The tunnel's
//! worker uses the other end as its TUN device: each message is a virtio-net header and an IP
//! packet. The stack runs in a thread of its own (`stack`), and answers for the addresses of this
//! host inside the tunnel. Programs of the host connect to the inside by SOCKS5, HTTP CONNECT and
//! forwarded ports ([`Forward`]). Hosts inside connect to exposed ports of this host ([`Exposed`]).
//! This process opens sockets inside by [`Sockets`].
#![forbid(unsafe_code)]

mod congestion;
mod counters;
mod device;
mod engine;
#[cfg(fuzzing)]
pub mod fuzzing;
mod host_stream;
mod http;
mod inside;
mod options;
mod packet;
mod sender;
mod service;
mod sockets;
mod socks;
mod splice;
mod stack;
mod target;
mod waker;

pub use counters::{Counters, ServiceCounters};
pub use host_stream::StreamEnd;
pub use options::{Exposed, Forward, Limits, OptionError, Options, Transport};
pub use seikan_sys::packet_pair::packet_pair;
pub use service::{Names, Service};
pub use sockets::{
    ADDRESS_LEN, Datagrams, Ends, Incoming, SocketError, Sockets, Stream, read_address,
    write_address,
};
pub use stack::{Handle, Listener, Stack, StackError};
