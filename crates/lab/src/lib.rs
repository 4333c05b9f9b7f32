//! The test bench of Seikan: hosts in network namespaces, a link between them, tunnels over the
//! link, load through the tunnels, and reports of what was measured. It needs neither iproute2 nor
//! iperf3.
//!
//! [`site`] makes hosts and joins them ([`wire`] with faults); [`tunnel`] starts a tunnel between
//! them; [`seikan_load`] loads it; [`bench`](mod@bench) compares tunnels, also over emulated paths,
//! [`gateway`](mod@gateway) puts them between a device and its remote, [`hostile`](mod@hostile)
//! floods ours, [`scenario`] breaks them for the doctor, [`relay`](mod@relay) takes the direct path
//! away, [`nat`] hides members from each other, [`scale`] has many, and [`demo`](mod@demo) shows
//! them; [`report`] draws the result for a terminal, as SVG or HTML.
//!
//! Nothing is left behind: namespaces have no name and end with the process, children die with it
//! (`PR_SET_PDEATHSIG`), directories are removed by their guards, and every wait watches
//! [`Interrupt`](seikan_ui::Interrupt).
#![forbid(unsafe_code)]

pub mod arguments;
pub mod bench;
mod capture;
pub mod cleanup;
pub mod demo;
mod error;
pub mod etcd;
pub mod gateway;
pub mod hostile;
mod load;
pub mod machine;
mod mesh;
pub mod nat;
pub mod process;
pub mod program;
pub mod relay;
pub mod report;
pub mod reproduce;
pub mod scale;
pub mod scenario;
pub mod site;
pub mod tunnel;
pub mod wire;

pub use bench::path::{PathOptions, PathReport, bench_paths};
pub use bench::{BenchOptions, BenchReport, bench};
pub use demo::{DemoOptions, DemoReport, demo};
pub use error::{LabError, Result, setup, usage};
pub use gateway::{GatewayOptions, GatewayReport, gateway};
pub use hostile::{HostileOptions, HostileReport, hostile};
pub use relay::{RelayOptions, RelayReport, relay};
pub use reproduce::{Experiment, ReproduceOptions, reproduce};
