//! Sites: the hosts of a lab, and the links, switches and routers that join them.
//!
//! Every lab builds its topology here; nothing else makes namespaces, interfaces, addresses or
//! routes. A [`Host`] is a network namespace. [`join`] connects two NICs by a veth pair or an
//! emulated path ([`Wire`](crate::wire::Wire)) with the properties of a [`Link`]. [`Host::plug`]
//! connects a NIC to a bridge. A [`Switch`] is a host with a bridge and a network. A [`Router`] is
//! a host that translates addresses. [`Hosts`] are the two ends of a tunnel.

mod host;
mod link;
mod router;

pub use host::{Congestion, Host};
pub(crate) use host::{all_cpus, network, output, steering_file};
pub(crate) use link::join;
pub use link::{Hosts, Link, LinkKind, NO_OFFLOAD, PLAIN_NIC, PORTS};
pub(crate) use router::{FIRST, INTERNET, LAN, Router, Switch, WAN, address};
pub use router::{Input, NatBox};
