//! The daemon: the worker's loop, the set-up of the system, the control sockets.
#![forbid(unsafe_code)]

mod batch_reader;
pub mod control;
pub mod dialogue;
pub mod embedded;
pub mod endpoints;
mod flood;
pub mod former;
pub mod gateway;
pub mod journal;
pub mod mesh;
pub mod metrics;
pub mod monitor;
pub mod network;
pub mod nft;
pub mod node;
pub mod options;
pub mod output;
pub mod pacer;
pub mod save;
pub mod setup;
pub mod sockets;
pub mod status;
pub mod subject;
pub mod system;
pub mod uapi;
pub mod up;
pub mod userspace;
pub mod worker;
