//! A router that maps ports on request: miniupnpd.

use crate::common::eventually;
use crate::mesh::nat::{Mapping, Nat, up};
use crate::mesh::site::{SOON, Site, at_a_site, while_answering};
use std::fs;
use std::process::{Child, Command, Stdio};

/// The chains that miniupnpd fills, where the router's rules lead to them.
const CHAINS: &str = "table inet miniupnpd {
    chain miniupnpd {
    }
    chain prerouting_miniupnpd {
    }
    chain postrouting_miniupnpd {
    }
    chain prerouting {
        type nat hook prerouting priority dstnat;
        jump prerouting_miniupnpd
    }
}
insert rule inet filter in iifname \"lan\" accept
insert rule inet filter through ct status dnat accept
";

/// A running miniupnpd; killed when dropped.
pub struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts miniupnpd on a NAT. It maps ports only to public addresses, but the addresses of this
/// site are reserved. So it gets another address, which hosts of the site reach.
pub fn give_ports(site: &Site, nat: &Nat, settings: &str) -> Daemon {
    let wan = nat.netlink.link("wan").expect("a link").index;
    let outside = "11.0.0.100/24".parse().expect("an address");
    nat.netlink.add_address(wan, outside).expect("an address");
    nat.run_nft(CHAINS);
    let file = site.folder().join("miniupnpd.conf");
    let text = format!(
        "ext_ifname=wan\next_ip=11.0.0.100\nlistening_ip=lan\nsecure_mode=yes\n{settings}\n\
         upnp_table_name=miniupnpd\nupnp_nat_table_name=miniupnpd\nupnp_forward_chain=miniupnpd\n\
         upnp_nat_chain=prerouting_miniupnpd\nupnp_nat_postrouting_chain=postrouting_miniupnpd\n\
         uuid=00000000-0000-4000-8000-000000000001\nallow 1-65535 10.0.0.0/24 1-65535\n"
    );
    fs::write(&file, text).expect("a configuration");
    let mut command = Command::new("miniupnpd");
    command.args(["-d", "-f"]).arg(&file).arg("-P");
    command.arg(site.folder().join("miniupnpd.pid"));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Daemon(nat.netns.spawn_command(&mut command).expect("miniupnpd"))
}

/// Returns the port mappings of a NAT, as rules.
fn given_ports(nat: &Nat) -> String {
    let mut nft = Command::new("nft");
    nft.args(["list", "chain", "inet", "miniupnpd", "prerouting_miniupnpd"]);
    nft.stdout(Stdio::piped());
    let child = nat.netns.spawn_command(&mut nft).expect("nft");
    let listed = child.wait_with_output().expect("nft");
    String::from_utf8(listed.stdout).expect("text")
}

/// Two members behind symmetric NATs, one of whose routers maps ports.
fn comes_in_by_a_port(settings: &str, by: &str) {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let token = site.token(&["--reusable"]);
        let nats = [0, 1].map(|n| Nat::create(site, n, Mapping::AddressAndPortDependent));
        let wan = nats[1].netlink.link("wan").expect("a link").index;
        let outside = "11.0.0.101/24".parse().expect("an address");
        nats[1]
            .netlink
            .add_address(wan, outside)
            .expect("an address");
        let daemon = give_ports(site, &nats[0], settings);
        let hosts = [nats[0].host(site, 0), nats[1].host(site, 0)];
        let (given, address) = up(&hosts[0], "a", &token);
        let (_other, _) = up(&hosts[1], "b", &token);
        let mapping = || hosts[0].status()["mesh"]["port_mapping"]["given"].clone();
        eventually("the router gives a port", || mapping()["by"] == by);
        let mapped = mapping()["address"].clone();
        assert!(
            mapped
                .as_str()
                .is_some_and(|mapped| mapped.starts_with("11.0.0.100:")),
            "{mapped}"
        );
        while_answering(&[&hosts[0]], || {
            eventually("it is direct, by that port", || {
                hosts[1].reaches(address, SOON)
                    && hosts[1].status()["peers"][0]["path"]["endpoint"] == mapped
            });
        });
        let rules = || given_ports(&nats[0]);
        assert!(rules().contains("dnat"), "{}", rules());
        given.signal("INT");
        eventually("the port is given back", || !rules().contains("dnat"));
        drop(daemon);
    });
}

#[test]
fn a_router_that_speaks_pcp_gives_a_port_and_gets_it_back() {
    comes_in_by_a_port("enable_natpmp=yes\nenable_upnp=no", "pcp");
}

#[test]
fn a_router_that_speaks_upnp_gives_a_port_and_gets_it_back() {
    comes_in_by_a_port("enable_natpmp=no\nenable_upnp=yes\nhttp_port=5000", "upnp");
}

#[test]
fn port_mapping_can_be_turned_off() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let nat = Nat::create(site, 0, Mapping::EndpointIndependent);
        let _daemon = give_ports(site, &nat, "enable_natpmp=yes\nenable_upnp=no");
        let hosts = [nat.host(site, 0), nat.host(site, 1)];
        hosts[0].join("a", &token);
        let text = fs::read_to_string(hosts[0].file()).expect("a configuration");
        let text = format!("port-mapping = false\n{text}");
        fs::write(hosts[0].file(), text).expect("written");
        let _quiet = hosts[0].up();
        eventually("it would have reason to ask", || {
            let seen = &hosts[0].status()["mesh"]["reflexive"];
            seen.as_array().is_some_and(|seen| !seen.is_empty())
        });
        // A host that requested a mapping later has it, so there was time.
        let (_other, _) = up(&hosts[1], "b", &token);
        let mapping = |host: usize| hosts[host].status()["mesh"]["port_mapping"].clone();
        eventually("the router gives a port", || {
            mapping(1)["given"].is_object()
        });
        assert!(mapping(0).is_null(), "{}", mapping(0));
        let rules = given_ports(&nat);
        assert_eq!(rules.matches("dnat").count(), 1, "{rules}");
        assert!(rules.contains("10.0.0.11"), "{rules}");
    });
}
