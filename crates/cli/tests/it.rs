//! The program from outside: as a shell, a host and a network see it.
#![forbid(unsafe_code)]

mod bench;
mod bugreport;
mod cli;
mod common;
mod crowd;
mod docs;
mod doctor;
mod doctor_ends;
mod ethernet;
mod gateway;
mod gateway_status;
mod golden;
mod hostile;
mod ledger;
mod life;
mod mesh;
mod monitoring;
mod openwrt;
mod overload;
mod permission;
mod relay;
mod report;
mod roaming;
mod schema;
mod shape;
#[path = "../../proto/tests/shapes/mod.rs"]
mod shapes;
mod units;
mod uplink;
mod userspace;
mod wg_quick;
