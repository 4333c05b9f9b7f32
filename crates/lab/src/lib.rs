//! The test bench of Seikan: hosts in network namespaces, a link between them, tunnels over the link, load through
//! the tunnels, and reports of what was measured. It needs neither iproute2 nor iperf3.
//!
//! [`link`] makes two hosts ([`wire`] joins them with faults); [`tunnel`] starts a tunnel between them; [`load`] loads it; [`bench`](mod@bench)
//! compares tunnels, [`gateway`](mod@gateway) puts them between a device and its remote, [`hostile`](mod@hostile)
//! floods ours, [`scenario`] breaks them for the doctor, [`relay`](mod@relay) takes the direct path away, [`nat`] hides members from each other, [`crowd`] has many, and [`demo`](mod@demo) shows them; [`report`] draws the result for a terminal, as SVG or HTML.
//!
//! Nothing is left behind: namespaces have no name and end with the process, children die with it
//! (`PR_SET_PDEATHSIG`), directories are removed by their guards, and every wait watches [`Interrupt`].
#![forbid(unsafe_code)]

pub mod bench;
pub mod crowd;
pub mod demo;
mod error;
pub mod gateway;
pub mod hostile;
mod interrupt;
pub mod link;
pub mod load;
pub mod machine;
mod mesh;
pub mod nat;
pub mod process;
pub mod relay;
pub mod report;
pub mod reproduce;
pub mod scenario;
pub mod stats;
pub mod tunnel;
pub mod wire;

pub use bench::{BenchOptions, BenchReport, bench};
pub use demo::{DemoOptions, DemoReport, demo};
pub use error::{LabError, Result};
pub use gateway::{GatewayOptions, GatewayReport, gateway};
pub use hostile::{HostileOptions, HostileReport, hostile};
pub use interrupt::{Interrupt, SignalGuard};
pub use relay::{RelayOptions, RelayReport, relay};
pub use reproduce::{Experiment, ReproduceOptions, reproduce};

/// One step of a long run, for a progress bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Work done so far, 0 to 1.
    pub fraction: f64,
    /// What happens next, a few words.
    pub what: String,
}
