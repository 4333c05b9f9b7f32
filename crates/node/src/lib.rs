//! The daemon: configuration, the worker loop, the control sockets.
#![forbid(unsafe_code)]

pub mod config;
