//! Interoperability tests with other programs.
#![forbid(unsafe_code)]

mod gateway;
mod interop;
mod soak;
mod uapi;
