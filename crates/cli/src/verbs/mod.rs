//! One file for every verb: its `Arguments` with their help, and `run`.

pub mod bench;
pub mod bugreport;
pub mod check;
pub mod coordinator;
pub mod doctor;
pub mod down;
pub mod gateway;
pub mod genkey;
pub mod genpsk;
pub mod interface;
pub mod join;
pub mod lab;
pub mod leave;
pub mod netcheck;
pub mod ping;
pub mod pubkey;
pub mod record;
pub mod relay;
pub mod reload;
pub mod report;
pub mod rotate_key;
pub mod status;
pub mod top;
pub mod up;
