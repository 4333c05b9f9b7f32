//! A stack whose far end is the kernel: a TUN device in a network namespace.
#![forbid(unsafe_code)]

mod bytes;
mod closing;
mod datagrams;
mod exposed;
mod limits;
mod own;
mod path;
mod proxies;
mod transfers;
mod world;
