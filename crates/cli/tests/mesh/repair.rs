//! Loss repair of a lossy path behind NATs and over a relay, and after a change of the path.

use std::net::IpAddr;

use serde_json::Value;

use crate::common::lossy::{LOSS, is_repaired, send_until};
use crate::mesh::nat::{Mapping, Two};
use crate::mesh::site::{SOON, at_a_site};

/// Drops one datagram in fifty on its way out through the first NAT; `more` selects the affected
/// ones.
fn lose(two: &Two, more: &str) {
    two.nats[0].run_nft(&format!(
        "insert rule inet filter through iifname \"lan\" {more} {LOSS}"
    ));
}

/// Returns the loss repair of the first host towards the second.
fn repair(two: &Two) -> Value {
    two.hosts[0].status()["peers"][0]["path"]["repair"].clone()
}

fn repaired(two: &Two) {
    let ends = [&two.hosts[0].netns, &two.hosts[1].netns];
    is_repaired(ends, two.address, &|| repair(two));
}

#[test]
fn a_lossy_path_between_nats_is_repaired() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let two = Two::new(site, [Mapping::EndpointIndependent; 2]);
        two.answering(|| assert!(two.reaches(SOON)));
        lose(&two, "");
        repaired(&two);
        assert_eq!(two.relayed(), [Some(false); 2]);
    });
}

#[test]
fn a_lossy_path_over_a_relay_is_repaired() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let two = Two::new(site, [Mapping::AddressAndPortDependent; 2]);
        two.answering(|| assert!(two.reaches(SOON)));
        lose(&two, "");
        repaired(&two);
        assert_eq!(two.relayed(), [Some(true); 2]);
    });
}

#[test]
fn a_change_of_the_path_starts_repair_anew() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let two = Two::new(site, [Mapping::EndpointIndependent; 2]);
        two.answering(|| {
            assert!(two.reaches(SOON));
            assert_eq!(two.relayed(), [Some(false); 2]);
            // The direct path loses packets, the path over the relay does not.
            lose(&two, "ip daddr 192.0.2.101");
            repaired(&two);
            let lossy = repair(&two);
            assert!(
                lossy["loss"].as_f64().is_some_and(|loss| loss > 0.005),
                "{lossy}"
            );
            for direction in ["saddr", "daddr"] {
                let rule =
                    format!("insert rule inet filter through ip {direction} 192.0.2.101 drop");
                two.nats[0].run_nft(&rule);
            }
            assert!(two.reaches(SOON));
            assert_eq!(two.relayed(), [Some(true); 2]);
            let (ends, target): (_, IpAddr) =
                ([&two.hosts[0].netns, &two.hosts[1].netns], two.address);
            send_until(ends, target, &|| repair(&two), &|repair| {
                repair["state"] == "not-needed"
            });
            // Not even a trace of the mean loss of the former path is left.
            let clean = repair(&two);
            assert_eq!(clean["loss"], 0.0, "{clean}");
        });
    });
}
