//! Tests of tunnels without clocks and sockets, and of published test vectors.
#![forbid(unsafe_code)]

mod birthday;
mod candidates;
mod cost;
mod ethernet;
mod flows;
mod mesh;
mod pair;
mod paths;
mod peers;
mod ping;
mod policy;
mod properties;
mod relayed;
mod repair;
mod rotation;
mod sessions;
mod shapes;
mod sim;
mod vectors;
