//! The native protocol's data path: frames in records, path MTU, health reports.

pub mod frame;
pub mod health;
pub mod path_mtu;
pub mod reassembly;
pub mod record;
