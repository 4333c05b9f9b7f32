//! The native protocol's data path: frames in records, checks, address validation, path MTU, health
//! reports, loss repair.

pub mod address_validation;
pub mod check;
pub mod fold;
pub mod frame;
pub mod health;
pub mod path_mtu;
pub mod probe_request;
pub mod reassembly;
pub mod record;
pub mod repair;
pub mod stamp;
