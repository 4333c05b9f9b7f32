//! The control sockets of a real node.
#![forbid(unsafe_code)]

mod control;
