//! Members that only a TURN server connects: Debian's coturn.

use crate::common::{PATIENCE, eventually};
use crate::mesh::nat::Mapping::{AddressAndPortDependent, EndpointIndependent, None as Open};
use crate::mesh::nat::Two;
use crate::mesh::site::{Host, SOON, Site, at_a_site};
use seikan_sys::netlink::Route;
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;

/// Returns the transport to an end's own server, if it has an allocation.
fn transport(two: &Two, end: usize) -> Option<String> {
    let status = two.hosts[end].status();
    let turn = status["mesh"]["turn"].as_object()?;
    let first = turn.values().next()?;
    first["transport"].as_str().map(str::to_owned)
}

/// Returns the path of an end from its status.
fn path(two: &Two, end: usize) -> Value {
    two.hosts[end].status()["peers"][0]["path"].clone()
}

fn at_a_site_with_turn(kind: &str, test: impl FnOnce(&Site)) {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _turn = site.coturn(0, kind);
        test(site);
    });
}

#[test]
fn two_symmetric_nats_connect_through_a_turn_server() {
    at_a_site_with_turn("--turn", |site| {
        let two = Two::new(site, [AddressAndPortDependent; 2]);
        two.answering(|| {
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            assert_eq!(two.relayed(), [Some(true); 2]);
            let used: Vec<Value> = [0, 1].map(|end| path(&two, end)["turn"].clone()).into();
            assert!(used.iter().all(|turn| !turn.is_null()), "{used:?}");
            // No proxied address is sent to other hosts.
            let members = site.members();
            assert!(
                !serde_json::to_string(&members)
                    .expect("text")
                    .contains("[100::")
            );
        });
    });
}

#[test]
fn a_direct_path_is_taken_where_there_is_one_and_a_turn_server_needs_nobody() {
    at_a_site_with_turn("--turn", |site| {
        let two = Two::new(site, [EndpointIndependent; 2]);
        two.answering(|| {
            assert!(two.reaches(SOON));
            assert_eq!(two.relayed(), [Some(false); 2]);
            assert_eq!(transport(&two, 0), None);
        });
    });
}

#[test]
fn a_turn_server_is_left_for_a_direct_path_that_opens() {
    at_a_site_with_turn("--turn", |site| {
        let two = Two::new(site, [EndpointIndependent; 2]);
        for way in ["daddr", "saddr"] {
            two.nats[0].run_nft(&format!(
                "insert rule inet filter through ip {way} 192.0.2.101 drop"
            ));
        }
        two.answering(|| {
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            assert_eq!(two.relayed(), [Some(true); 2]);
            two.nats[0].run_nft("flush chain inet filter through");
            two.nats[0].run_nft("add rule inet filter through accept");
            eventually("it is direct", || {
                two.reaches(SOON) && two.relayed() == [Some(false); 2]
            });
        });
    });
}

#[test]
fn a_member_without_udp_is_reached_through_a_turn_server_over_tcp() {
    at_a_site_with_turn("--turn", |site| {
        let two = Two::blocked(site, [EndpointIndependent, Open], &[0]);
        two.answering(|| {
            assert!(
                two.reaches(Duration::from_secs(20)),
                "{}",
                two.hosts[0].status()
            );
            assert_eq!(transport(&two, 0).as_deref(), Some("TCP"));
        });
    });
}

#[test]
fn two_members_without_udp_connect_through_a_turn_server_over_tls() {
    at_a_site_with_turn("--turns", |site| {
        let two = Two::blocked(site, [EndpointIndependent; 2], &[0, 1]);
        two.answering(|| {
            assert!(
                two.reaches(Duration::from_secs(20)),
                "{}",
                two.hosts[0].status()
            );
            for end in [0, 1] {
                assert_eq!(transport(&two, end).as_deref(), Some("TLS"));
            }
        });
    });
}

#[test]
fn a_turn_server_that_dies_is_replaced_by_the_other() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let mut servers = [0, 1].map(|number| Some(site.coturn(number, "--turn")));
        let two = Two::new(site, [AddressAndPortDependent; 2]);
        two.answering(|| {
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            let both = || {
                let ends = [0, 1].map(|end| two.hosts[end].status());
                ends.iter().all(|end| {
                    let turn = end["mesh"]["turn"].as_object();
                    turn.is_some_and(|turn| turn.len() == 2)
                })
            };
            eventually("both have an allocation at each", both);
            let used = path(&two, 0)["turn"]["to"].clone();
            let used: SocketAddr = used.as_str().expect("one").parse().expect("one");
            // Its own relayed address, that of the other end, or the mapped address of the other's
            // NAT.
            let first = match used.port() {
                44_000..45_000 => true,
                45_000..46_000 => false,
                _ => path(&two, 0)["turn"]["server"] == "192.0.2.1:5478",
            };
            drop(servers[usize::from(!first)].take());
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
        });
    });
}

#[test]
fn an_allocation_is_made_anew_after_a_change_of_address() {
    at_a_site_with_turn("--turn", |site| {
        let two = Two::new(site, [AddressAndPortDependent; 2]);
        two.answering(|| {
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            for Host { netlink, nic, .. } in &two.hosts {
                let [old, new] = ["10.0.0.10/24", "10.0.0.77/24"].map(|net| net.parse());
                netlink
                    .delete_address(*nic, old.expect("one"))
                    .expect("an address");
                netlink
                    .add_address(*nic, new.expect("one"))
                    .expect("an address");
                let gateway = "10.0.0.1".parse().expect("an address");
                let route = Route::to("0.0.0.0/0".parse().expect("a prefix")).via(gateway);
                netlink.add_route(&route.device(*nic)).expect("a route");
            }
            // The server does not know the former allocation by another address.
            let status = || two.hosts.iter().map(Host::status).collect::<Vec<_>>();
            assert!(two.reaches(PATIENCE), "{:?}", status());
            assert_eq!(two.relayed(), [Some(true); 2]);
        });
    });
}

#[test]
fn a_turn_server_that_refuses_the_ticket_is_reported() {
    at_a_site_with_turn("--turn", |site| {
        let again = [
            "relay",
            "add",
            "192.0.2.1:5478",
            "--turn",
            "--secret",
            "south",
        ];
        site.administer(&again);
        let two = Two::new(site, [AddressAndPortDependent; 2]);
        two.answering(|| {
            assert!(!two.reaches(Duration::from_secs(5)));
            eventually("it says why", || {
                let status = two.hosts[0].status();
                let why = status["mesh"]["relays"]["192.0.2.1:5478"]["refuses"].as_str();
                why.is_some_and(|why| why.contains("rejects the ticket"))
            });
        });
    });
}
