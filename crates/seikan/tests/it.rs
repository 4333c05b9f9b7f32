//! Tests of the library, with tunnels of a user without privileges in network namespaces.

mod bytes;
mod examples;
mod lifetimes;
mod pair;
mod sockets;
mod streams;
