//! Configuration files, and the control sockets of a real node.
#![forbid(unsafe_code)]

mod config_diagnostics;
mod config_syntaxes;
mod control;
