//! The lab against a real kernel.
#![forbid(unsafe_code)]

mod cleanup;
mod common;
mod faults;
mod gateway;
mod program;
#[path = "../../cli/tests/shape/mod.rs"]
mod shape;
mod steering;
mod switch;
