//! Faults that are settings of a host's network namespace.

use std::process::Command;

use seikan_sys::ethtool::Feature;

use super::{Applied, tool};
use crate::error::Result;
use crate::host::Host;

/// How much a token bucket's queue holds, as time at its rate, in seconds.
pub(super) const SHORT: f64 = 0.01;
/// The same for one that is far too long.
pub(super) const LONG: f64 = 1.0;
/// Burst size of a token bucket, as time at its rate, in seconds; at least [`SMALLEST_BUCKET`].
const BUCKET: f64 = 0.002;
/// In bytes: a super-packet must fit, or the kernel cuts it up.
const SMALLEST_BUCKET: f64 = 20_000.0;
/// A short queue still holds some packets, in bytes.
const SMALLEST_QUEUE: f64 = 15_000.0;
/// MTU of OpenVPN's interface when nothing else is said.
pub(super) const BELIEVED_MTU: u32 = 1_500;

/// Sets `txqueuelen`.
pub(super) fn queue_length<'a>(
    host: &'a Host,
    device: &str,
    packets: u32,
    applied: &mut Applied<'a>,
) -> Result<()> {
    let netlink = host.netlink()?;
    let link = netlink.link(device)?;
    let before = link.tx_queue_len;
    netlink.set_tx_queue_len(link.index, packets)?;
    applied.then(move || {
        // The interface may have gone with its program.
        let _ = netlink.set_tx_queue_len(link.index, before);
    });
    Ok(())
}

/// Puts a token bucket filter in place of the interface's queueing discipline.
pub(super) fn token_bucket<'a>(
    host: &'a Host,
    device: &str,
    mbit: f64,
    queue: f64,
    applied: &mut Applied<'a>,
) -> Result<()> {
    let bytes_per_second = mbit * 1e6 / 8.0;
    let burst = (bytes_per_second * BUCKET).max(SMALLEST_BUCKET);
    let limit = (bytes_per_second * queue).max(SMALLEST_QUEUE);
    tool(
        host,
        &format!(
            "tc qdisc replace dev {device} root tbf rate {:.0}bit burst {burst:.0} limit {limit:.0}",
            mbit * 1e6
        ),
    )?;
    let device = device.to_owned();
    applied.then(move || {
        let _ = tool(host, &format!("tc qdisc del dev {device} root"));
    });
    Ok(())
}

/// Drops packets that come in, at random.
pub(super) fn loss<'a>(
    host: &'a Host,
    device: &str,
    percent: f64,
    applied: &mut Applied<'a>,
) -> Result<()> {
    let of_a_million = (percent * 1e4).round();
    let rule = format!("numgen random mod 1000000 < {of_a_million:.0} drop");
    drop_incoming(host, device, "loss", &rule, applied)
}

/// Drops packets that come in and are longer than `bytes`, without a word.
pub(super) fn black_hole<'a>(
    host: &'a Host,
    device: &str,
    bytes: u32,
    applied: &mut Applied<'a>,
) -> Result<()> {
    let rule = format!("meta length > {bytes} drop");
    drop_incoming(host, device, "hole", &rule, applied)
}

fn drop_incoming<'a>(
    host: &'a Host,
    device: &str,
    table: &'static str,
    rule: &str,
    applied: &mut Applied<'a>,
) -> Result<()> {
    tool(host, &format!("nft add table netdev {table}"))?;
    applied.then(move || {
        let _ = tool(host, &format!("nft delete table netdev {table}"));
    });
    tool(
        host,
        &format!(
            "nft add chain netdev {table} drops {{ type filter hook ingress device {device} priority 0 ; }}"
        ),
    )?;
    tool(host, &format!("nft add rule netdev {table} drops {rule}"))
}

/// Has the kernel track connections, as a firewall does.
pub(super) fn track_connections<'a>(host: &'a Host, applied: &mut Applied<'a>) -> Result<()> {
    tool(host, "nft add table inet tracked")?;
    applied.then(move || {
        let _ = tool(host, "nft delete table inet tracked");
    });
    for hook in ["input", "output"] {
        tool(
            host,
            &format!(
                "nft add chain inet tracked {hook} {{ type filter hook {hook} priority 0 ; }}"
            ),
        )?;
        tool(
            host,
            &format!("nft add rule inet tracked {hook} ct state new,established accept"),
        )?;
    }
    Ok(())
}

/// Sets the MTU.
pub(super) fn mtu<'a>(
    host: &'a Host,
    device: &str,
    bytes: u32,
    applied: &mut Applied<'a>,
) -> Result<()> {
    let netlink = host.netlink()?;
    let link = netlink.link(device)?;
    netlink.set_mtu(link.index, bytes)?;
    applied.then(move || {
        let _ = netlink.set_mtu(link.index, link.mtu);
    });
    Ok(())
}

/// Takes offloads away, those that are on and can be.
pub(super) fn offloads<'a>(
    host: &'a Host,
    device: &str,
    features: &[Feature],
    applied: &mut Applied<'a>,
) -> Result<()> {
    let ethtool = host.netns().ethtool()?;
    let on: Vec<Feature> = features
        .iter()
        .copied()
        .filter(|feature| ethtool.feature(device, *feature).unwrap_or(false))
        .collect();
    for feature in &on {
        ethtool.set_feature(device, *feature, false)?;
    }
    let device = device.to_owned();
    applied.then(move || {
        // Segmentation depends on checksums: last to go, first to come back.
        for feature in on.iter().rev() {
            let _ = ethtool.set_feature(&device, *feature, true);
        }
    });
    Ok(())
}

/// Steers received packets of the interface to these processors.
pub(super) fn receive_on<'a>(
    host: &'a Host,
    device: &str,
    cpus: &[u32],
    applied: &mut Applied<'a>,
) -> Result<()> {
    let file = format!("{device}/queues/rx-0/rps_cpus");
    let before = host.set_attribute(&file, &seikan_sys::softirq::mask(cpus))?;
    applied.then(move || {
        let _ = host.set_attribute(&file, before.trim());
    });
    Ok(())
}

/// Makes the kernel compare each received frame with `rules` rules that never match.
pub(crate) fn long_ruleset(host: &Host, device: &str, rules: u32) -> Result<()> {
    let mut text = format!(
        "table netdev rules {{ chain received {{ type filter hook ingress device {device} priority 0 ;\n"
    );
    for port in 0..rules {
        // Near the discard service: no program here sends from these ports.
        text += &format!("udp sport {} udp dport 9 drop\n", port % 1024);
    }
    text += "}\n}\n";
    let mut nft = Command::new("nft");
    host.output(nft.args(["-f", "-"]), &text).map(drop)
}

/// Puts receive offload (GRO) on.
pub(super) fn receive_offload<'a>(
    host: &'a Host,
    device: &str,
    applied: &mut Applied<'a>,
) -> Result<()> {
    host.set_features(device, &[(Feature::Gro, true)])?;
    let device = device.to_owned();
    applied.then(move || {
        let _ = host.set_features(&device, &[(Feature::Gro, false)]);
    });
    Ok(())
}
