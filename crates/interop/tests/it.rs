//! Our program beside other people's.
#![forbid(unsafe_code)]

mod gateway;
mod interop;
mod soak;
mod uapi;
