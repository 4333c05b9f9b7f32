//! The relay: forwards sealed datagrams between two members of a mesh that have no direct path.
//!
//! A member shows a ticket, which the relay checks with the secret that it shares with the coordinator ([`secret`]), and gets
//! a UDP port that it shares with one other member. Both bind themselves to the port (`table`; the messages are in
//! `seikan_proto::mesh::relay`). From then on, datagrams that one of them sends to the port go to the other, in whole batches
//! (`serve`), within the rate that a member may send (`policer`). Members behind firewalls that block UDP use TLS over TCP
//! instead (`streams`). The relay has no key of any tunnel. It counts the datagrams that it forwards and drops
//! ([`counters`]) and exports the counts ([`metrics`]).
#![forbid(unsafe_code)]

pub mod counters;
pub mod metrics;
mod now;
mod options;
mod pair;
mod policer;
pub mod relay;
pub mod secret;
mod serve;
mod streams;
mod table;
mod token;

pub use counters::Counters;
pub use now::Now;
pub use options::{Limits, Options, TlsOptions};
pub use relay::{Relay, RelayError};
