//! Faults that are settings of a host's network namespace.

use seikan_sys::ethtool::Feature;

use super::Applied;
use crate::error::Result;
use crate::site::{Host, steering_file};

/// Length of a token bucket's short queue, as time at its rate in seconds.
pub(super) const SHORT: f64 = 0.01;
/// Length of a queue that is far too long, as time at its rate in seconds.
pub(super) const LONG: f64 = 1.0;
/// Burst size of a token bucket, as time at its rate, in seconds; at least [`SMALLEST_BUCKET`].
const BUCKET: f64 = 0.002;
/// Minimum burst size in bytes: a super-packet must fit, or the kernel splits it.
const SMALLEST_BUCKET: f64 = 20_000.0;
/// Minimum length of a short queue in bytes: it still holds some packets.
const SMALLEST_QUEUE: f64 = 15_000.0;
/// Default MTU of OpenVPN's interface.
pub(super) const BELIEVED_MTU: u32 = 1_500;

/// An interface of a host, for faults.
pub(super) struct Nic<'a, 'b> {
    pub(super) host: &'a Host,
    pub(super) device: String,
    pub(super) applied: &'b mut Applied<'a>,
}

impl Nic<'_, '_> {
    /// Runs a tool's command line now, and `undo` when the fault is reverted.
    fn tool(&mut self, line: &str, undo: String) -> Result<()> {
        let host = self.host;
        host.tool(line)?;
        self.applied.then(move || {
            let _ = host.tool(&undo);
        });
        Ok(())
    }

    /// Sets `txqueuelen`.
    pub(super) fn queue_length(&mut self, packets: u32) -> Result<()> {
        let netlink = self.host.netlink()?;
        let link = netlink.link(&self.device)?;
        netlink.set_tx_queue_len(link.index, packets)?;
        self.applied.then(move || {
            // The interface may have disappeared with its program.
            let _ = netlink.set_tx_queue_len(link.index, link.tx_queue_len);
        });
        Ok(())
    }

    /// Puts a token bucket filter in place of the interface's queueing discipline.
    pub(super) fn token_bucket(&mut self, mbit: f64, queue: f64) -> Result<()> {
        let bytes_per_second = mbit * 1e6 / 8.0;
        let burst = (bytes_per_second * BUCKET).max(SMALLEST_BUCKET);
        let limit = (bytes_per_second * queue).max(SMALLEST_QUEUE);
        let (device, rate) = (&self.device, mbit * 1e6);
        let undo = format!("tc qdisc del dev {device} root");
        let line = format!(
            "tc qdisc replace dev {device} root tbf rate {rate:.0}bit burst {burst:.0} limit {limit:.0}"
        );
        self.tool(&line, undo)
    }

    /// Drops received packets at random.
    pub(super) fn loss(&mut self, percent: f64) -> Result<()> {
        let of_a_million = (percent * 1e4).round();
        let rule = format!("numgen random mod 1000000 < {of_a_million:.0} drop");
        self.drop_incoming("loss", &rule)
    }

    /// Drops received packets that are longer than `bytes`, silently.
    pub(super) fn black_hole(&mut self, bytes: u32) -> Result<()> {
        self.drop_incoming("hole", &format!("meta length > {bytes} drop"))
    }

    fn drop_incoming(&mut self, table: &str, rule: &str) -> Result<()> {
        let undo = format!("nft delete table netdev {table}");
        self.tool(&format!("nft add table netdev {table}"), undo)?;
        let chain = format!(
            "nft add chain netdev {table} drops {{ type filter hook ingress device {} priority 0 ; }}",
            self.device
        );
        self.host.tool(&chain)?;
        let rule = format!("nft add rule netdev {table} drops {rule}");
        self.host.tool(&rule)
    }

    /// Makes the kernel track connections, as with a firewall.
    pub(super) fn track_connections(&mut self) -> Result<()> {
        let undo = "nft delete table inet tracked".to_owned();
        self.tool("nft add table inet tracked", undo)?;
        ["input", "output"].into_iter().try_for_each(|hook| {
            let chain = format!(
                "nft add chain inet tracked {hook} {{ type filter hook {hook} priority 0 ; }}"
            );
            self.host.tool(&chain)?;
            let rule = format!("nft add rule inet tracked {hook} ct state new,established accept");
            self.host.tool(&rule)
        })
    }

    /// Sets the MTU.
    pub(super) fn mtu(&mut self, bytes: u32) -> Result<()> {
        let netlink = self.host.netlink()?;
        let link = netlink.link(&self.device)?;
        netlink.set_mtu(link.index, bytes)?;
        self.applied.then(move || {
            let _ = netlink.set_mtu(link.index, link.mtu);
        });
        Ok(())
    }

    /// Switches off those of the offloads that are on and can be switched.
    pub(super) fn offloads(&mut self, features: &[Feature]) -> Result<()> {
        let ethtool = self.host.netns().ethtool()?;
        let device = self.device.clone();
        let is_on = |feature: &Feature| ethtool.feature(&device, *feature).unwrap_or(false);
        let on: Vec<Feature> = features.iter().copied().filter(is_on).collect();
        for feature in &on {
            ethtool.set_feature(&device, *feature, false)?;
        }
        self.applied.then(move || {
            // Segmentation depends on checksums, so checksums go off last and come back first.
            for feature in on.iter().rev() {
                let _ = ethtool.set_feature(&device, *feature, true);
            }
        });
        Ok(())
    }

    /// Steers received packets of the interface to these processors.
    pub(super) fn receive_on(&mut self, cpus: &[u32]) -> Result<()> {
        let (host, device) = (self.host, self.device.clone());
        let before = host.steer(&device, cpus)?;
        self.applied.then(move || {
            let _ = host.set_attribute(&steering_file(&device), before.trim());
        });
        Ok(())
    }

    /// Switches receive offload (GRO) on.
    pub(super) fn receive_offload(&mut self) -> Result<()> {
        let (host, device) = (self.host, self.device.clone());
        host.set_features(&device, &[(Feature::Gro, true)])?;
        self.applied.then(move || {
            let _ = host.set_features(&device, &[(Feature::Gro, false)]);
        });
        Ok(())
    }
}

/// Makes the kernel compare each received frame with `rules` rules that never match.
pub(crate) fn long_ruleset(host: &Host, device: &str, rules: u32) -> Result<()> {
    let mut text = format!(
        "table netdev rules {{ chain received {{ type filter hook ingress device {device} priority 0 ;\n"
    );
    for port in 0..rules {
        // No program here sends from these ports to the discard service.
        text += &format!("udp sport {} udp dport 9 drop\n", port % 1024);
    }
    text += "}\n}\n";
    host.filter(&text)
}
