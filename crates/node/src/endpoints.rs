//! Endpoints of peers that are given by host name, resolved before a tunnel starts.

use crate::node::resolve;
use seikan_config::{Config, Diagnostic, Host, Severity};
use std::net::{IpAddr, SocketAddr};

/// Returns the configuration with resolved endpoints, and their addresses. A name that cannot be resolved now, as during
/// boot, is retried while the tunnel runs; `warn` gets it.
pub fn resolve_all(config: &Config, warn: &mut dyn FnMut(Diagnostic)) -> (Config, Vec<IpAddr>) {
    let mut resolved = config.clone();
    let mut addresses = Vec::new();
    for peer in &mut resolved.peers {
        let Some(endpoint) = &mut peer.endpoint else {
            continue;
        };
        match resolve(&endpoint.host, endpoint.port) {
            Ok(address) => {
                // A link-local address keeps its name, which has the scope.
                if !matches!(address, SocketAddr::V6(v6) if v6.scope_id() != 0) {
                    endpoint.host = Host::Address(address.ip());
                }
                addresses.push(address.ip());
            }
            Err(error) => {
                let warning =
                    Diagnostic::new(Severity::Warning, config.name.as_str(), error.to_string());
                let help = "the tunnel starts without this peer's address, and resolves it again every few seconds";
                warn(warning.with_help(help));
                peer.endpoint = None;
            }
        }
    }
    (resolved, addresses)
}
