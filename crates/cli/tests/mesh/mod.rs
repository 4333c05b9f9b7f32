//! A mesh from outside: coordinators, members and NATs in namespaces, through the program only.

mod devices;
mod guarded;
mod lasting;
mod mapping;
mod members;
mod metrics;
mod names;
mod nat;
mod owned;
mod ping;
mod policy;
mod punching;
mod repair;
mod rotation;
mod several;
pub mod site;
mod tls;
mod turn;
mod wary;
mod web_proxy;
