//! The mesh of a member, apart from its tunnel: the agent talks to coordinators, STUN servers, relays, TURN servers
//! and the router.
//!
//! [`agent`] is a thread. It reports by an [`AgentEvent`](event::AgentEvent), which the daemon applies to its
//! [`MeshState`](state::MeshState) and its tunnel, and gets a [`WorkerEvent`](event::WorkerEvent) in return. The data
//! path does not depend on it: without a coordinator, peers stay as they are.
#![forbid(unsafe_code)]

pub mod agent;
pub mod cache;
mod causes;
pub mod client;
pub mod endpoints;
pub mod event;
pub mod join;
pub mod mapping;
pub mod names;
pub mod nat;
pub mod random;
mod relay;
mod resolve;
mod shared;
pub mod state;
pub mod stun;
pub mod transport;
pub mod trust;
mod turn;
pub mod web_proxy;
