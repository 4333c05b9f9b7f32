//! The daemon: the worker loop, set-up, the control sockets.
#![forbid(unsafe_code)]

pub mod control;
pub mod doors;
pub mod gateway;
mod intake;
pub mod life;
pub mod mesh;
pub mod metrics;
pub mod monitor;
pub mod node;
pub mod save;
pub mod setup;
pub mod state;
pub mod status;
pub mod uapi;
pub mod up;
pub mod worker;
