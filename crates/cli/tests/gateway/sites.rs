//! Two sites with the same addresses, and a device in a VLAN.

use crate::gateway::site::{
    DEVICE, DEVICE_INTERFACE, LAN, LISTED, Plan, SHOWN, add_addresses, at_site, carries,
    carries_tcp, new_host,
};
use crate::gateway::tagger::Tagger;
use crate::{common::skip, gateway::site::Switch};

#[test]
fn two_sites_have_the_same_addresses() {
    let far = r#"
[gateway]
interface = "lan0"
[[gateway.device]]
name = "far"
lan = ["192.168.1.10", "fd00:1::10"]
overlay = ["10.77.0.20", "fd77::20"]
[[gateway.remote]]
overlay = "10.77.0.10"
lan = "192.168.1.202"
[[gateway.remote]]
overlay = "fd77::10"
lan = "fd00:1::202"
"#;
    let near = r#"
[[gateway.remote]]
overlay = "10.77.0.20"
lan = "192.168.1.202"
[[gateway.remote]]
overlay = "fd77::20"
lan = "fd00:1::202"
"#;
    let plan = Plan {
        remotes: near,
        remote_gateway: far,
        ..Plan::default()
    };
    at_site(&plan, |site| {
        let far = new_host("far device").expect("host");
        let lan = Switch::create().expect("switch");
        lan.plug(&site.remote, LAN, 1500);
        lan.plug(&far, DEVICE_INTERFACE, 1500);
        add_addresses(&far, DEVICE_INTERFACE, ["192.168.1.10/24", "fd00:1::10/64"]);
        let _tunnels = site.up();
        site.reaches(&site.device, SHOWN[0]);
        for target in SHOWN {
            carries(&site.device, &far, target);
            carries(&far, &site.device, target);
        }
    });
}

#[test]
fn a_device_in_a_vlan() {
    let tagged = r#"
[[gateway.device]]
name = "tagged"
vlan = 10
lan = ["192.168.1.11", "fd00:1::11"]
overlay = ["10.77.0.11", "fd77::11"]
"#;
    let plan = Plan {
        devices: format!("{LISTED}{tagged}"),
        ..Plan::default()
    };
    at_site(&plan, |site| {
        let device = new_host("tagged").expect("host");
        let tagger = match Tagger::start(&device, DEVICE_INTERFACE, &site.lan, 10) {
            Ok(tagger) => tagger,
            Err(reason) => return skip(&reason),
        };
        add_addresses(
            &device,
            DEVICE_INTERFACE,
            ["192.168.1.11/24", "fd00:1::11/64"],
        );
        let _tunnels = site.up();
        site.reaches(&device, SHOWN[0]);
        for (there, back) in SHOWN.into_iter().zip(["10.77.0.11", "fd77::11"]) {
            carries_tcp(&device, &site.remote, there);
            carries(&site.remote, &device, back);
        }
        // The device without a tag still works.
        carries_tcp(&site.remote, &site.device, DEVICE[0]);
        let longest = tagger.longest();
        assert!(
            longest.iter().all(|length| *length > 3000),
            "no super-packets with tags, from and to the device: {longest:?}"
        );
    });
}
