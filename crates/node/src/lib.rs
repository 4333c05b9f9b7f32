//! The daemon: configuration, the worker loop, the control sockets.
#![forbid(unsafe_code)]

pub mod config;
pub mod node;
pub mod up;
pub mod worker;
