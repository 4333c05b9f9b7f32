//! The relay: sealed datagrams between members of a mesh that no direct path joins.
//!
//! A member shows a ticket ([`secret`] has what that is judged by) and gets a UDP port that it shares with one other member;
//! both bind themselves to it ([`table`]), as `seikan_proto::mesh::relay` has it. From then on what one of them sends there goes to
//! the other, in whole batches ([`serve`], by [`relay`]'s loop), within what a member may send ([`policer`]). Who has no answer by UDP has
//! the same by TLS over TCP ([`streams`]). It is opened by nobody in
//! between: the relay has no key. What was forwarded and what was dropped is counted ([`counters`]) and told ([`metrics`]).
#![forbid(unsafe_code)]

pub mod counters;
pub mod metrics;
mod pair;
mod policer;
pub mod relay;
pub mod secret;
mod serve;
mod streams;
mod table;

pub use counters::Counters;
pub use relay::{Limits, Now, Options, Relay, RelayError, TlsOptions};
