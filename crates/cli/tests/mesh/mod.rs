//! A mesh from the outside: coordinators, members and NATs in namespaces, and nothing but the program.

mod doors;
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
mod rotation;
mod several;
pub mod site;
mod tls;
mod turn;
mod wary;
