//! Where relays and TURN servers are, by the host's resolver.

use std::net::SocketAddr;
use std::time::Duration;

/// How long the host may take to resolve a name.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a name stands for; the reason for people if that cannot be said.
pub(super) async fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    let found = tokio::time::timeout(PATIENCE, tokio::net::lookup_host((host, port))).await;
    match found {
        Ok(Ok(found)) => Ok(found.collect()),
        Ok(Err(error)) => Err(format!("cannot resolve its name: {error}")),
        Err(_) => Err("cannot resolve its name: no answer in time".to_owned()),
    }
}

/// The first address of each family, IPv6 first.
pub(super) fn one_of_each(found: &[SocketAddr]) -> Vec<SocketAddr> {
    let v6 = found.iter().find(|address| address.is_ipv6());
    let v4 = found.iter().find(|address| address.is_ipv4());
    v6.into_iter().chain(v4).copied().collect()
}
