//! Resolves the names of relays and TURN servers by the host's resolver.

use std::net::SocketAddr;
use std::time::Duration;

/// Timeout of the host's resolver.
const PATIENCE: Duration = Duration::from_secs(5);

/// Resolves a name; the error is a text for the user.
pub(super) async fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    let found = tokio::time::timeout(PATIENCE, tokio::net::lookup_host((host, port))).await;
    match found {
        Ok(Ok(found)) => Ok(found.collect()),
        Ok(Err(error)) => Err(format!("cannot resolve its name: {error}")),
        Err(_) => Err("cannot resolve its name: no answer in time".to_owned()),
    }
}

/// Returns the first address of each family, IPv6 first.
pub(super) fn one_of_each(found: &[SocketAddr]) -> Vec<SocketAddr> {
    let v6 = found.iter().find(|address| address.is_ipv6());
    let v4 = found.iter().find(|address| address.is_ipv4());
    v6.into_iter().chain(v4).copied().collect()
}
