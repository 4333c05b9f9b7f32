//! Loss repair of the packets of a device, which knows nothing of the tunnel.

use std::process::Command;

use crate::common::lossy::{LOSS, is_repaired};
use crate::gateway::site::{DEVICE, Plan, SHOWN, at_running_site, ip};

#[test]
fn a_lossy_path_is_repaired_for_a_device() {
    at_running_site(&Plan::default(), |site, _tunnels| {
        // The rule drops datagrams of the tunnel in both directions, before the tunnels get them.
        for host in [&site.gateway, &site.remote] {
            let rules = format!(
                "add table inet t; add chain inet t c {{ type filter hook input priority 0; }}; \
                 add rule inet t c iifname \"wan0\" {LOSS}"
            );
            let mut nft = host.spawn(Command::new("nft").arg(rules)).expect("nft");
            assert!(nft.wait().expect("nft").success());
        }
        let repair = |host, config| site.status(host, config)["peers"][0]["path"]["repair"].clone();
        let (device, remote) = (site.device.netns(), site.remote.netns());
        is_repaired([device, remote], ip(SHOWN[0]), &|| {
            repair(&site.gateway, site.gateway_config.as_path())
        });
        is_repaired([remote, device], ip(DEVICE[0]), &|| {
            repair(&site.remote, site.remote_config.as_path())
        });
    });
}
