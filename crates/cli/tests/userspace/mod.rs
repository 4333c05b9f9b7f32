//! Tunnels without root: a user without any capability and without /dev/net/tun, at the left.

mod client;
mod library;
mod life;
mod member;
mod services;
mod throughput;
mod user;
