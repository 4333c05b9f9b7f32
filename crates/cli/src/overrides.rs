//! Options that replace values of the configuration file.

use std::net::SocketAddr;

use clap::{Args, ValueEnum};
use seikan_config::{Diagnostics, Overrides, Protocol};

/// Options that replace values of the configuration file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Overrides of the configuration file")]
pub struct OverrideArguments {
    /// Wire protocol [env: SEIKAN_PROTOCOL]
    #[arg(long)]
    pub protocol: Option<ProtocolName>,
    /// Disable segmentation and checksum offloads [env: SEIKAN_OFFLOAD=false]
    #[arg(long)]
    pub no_offload: bool,
    /// Address that serves Prometheus metrics, e.g. 127.0.0.1:9586 [env: SEIKAN_METRICS]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
    /// MTU inside the tunnel, in bytes [env: SEIKAN_MTU]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
}

/// A wire protocol, as a value of an option.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum ProtocolName {
    /// WireGuard, for any WireGuard peer
    Wireguard,
    /// Seikan's protocol, for Seikan peers
    Native,
}

impl OverrideArguments {
    /// Returns these options merged with the environment's variables; options win.
    ///
    /// # Errors
    /// A variable has an invalid value.
    pub fn with_environment(&self) -> Result<Overrides, Diagnostics> {
        let options = Overrides {
            protocol: self.protocol.map(|name| match name {
                ProtocolName::Wireguard => Protocol::Wireguard,
                ProtocolName::Native => Protocol::Native,
            }),
            offload: self.no_offload.then_some(false),
            metrics: self.metrics,
            mtu: self.mtu,
        };
        Ok(options.over(Overrides::from_env()?))
    }
}
