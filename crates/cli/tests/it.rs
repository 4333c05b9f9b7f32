//! The program from outside: as a shell, a host and a network see it.
#![forbid(unsafe_code)]

mod cli;
mod common;
mod crowd;
mod docs;
mod doctor;
mod doctor_ends;
mod gateway;
mod gateway_status;
mod golden;
mod hostile;
mod lab_crowd;
mod lab_crude;
mod lab_gateway;
mod lab_nat;
mod lab_reproduce;
mod lab_scenarios;
mod lab_score;
mod lab_wire;
mod ledger;
mod life;
mod mesh;
mod overload;
mod relay;
mod report;
#[path = "../../proto/tests/shapes/mod.rs"]
mod shapes;
mod units;
