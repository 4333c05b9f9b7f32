//! Text of `seikan gateway discover`: a table of hosts, or sections of a configuration.

use super::{Discovery, Neighbour, Role};
use crate::output::counted;
use crate::screen::{
    Align, BOLD, CYAN, DIM, RED, RESET, Screen, Table, YELLOW, ago, bytes, number,
};

/// Returns the hosts as a table.
pub fn render(discovery: &Discovery) -> String {
    use Align::{Left, Right};
    let mut out = Screen(String::new());
    let interface = match &discovery.mac {
        Some(mac) if discovery.prefixes.is_empty() => {
            format!("{} ({mac}, without address)", discovery.interface)
        }
        Some(mac) => {
            let prefixes = discovery.prefixes.join(", ");
            format!("{} ({mac}, {prefixes})", discovery.interface)
        }
        None => discovery.interface.clone(),
    };
    let hosts = counted(discovery.neighbours.len(), "host");
    let seconds = discovery.listened_s;
    out.0 += &format!("{BOLD}{hosts}{RESET} found in {seconds:.1} {CYAN}s{RESET} on {interface}\n");
    let mut table = Table::new(&[
        ("MAC", Left),
        ("VLAN", Right),
        ("addresses", Left),
        ("first seen", Right),
        ("last seen", Right),
        ("frames", Right),
        ("bytes", Right),
        ("", Left),
    ]);
    for host in &discovery.neighbours {
        let mut addresses: Vec<_> = host.addresses.iter().map(ToString::to_string).collect();
        if host.has_more_addresses {
            addresses.push("…".into());
        }
        table.row(vec![
            format!("{YELLOW}{}{RESET}", host.mac),
            host.vlan.map_or_else(String::new, |vlan| vlan.to_string()),
            if addresses.is_empty() {
                format!("{DIM}unknown{RESET}")
            } else {
                addresses.join(", ")
            },
            ago(Some(host.first_seen_s)),
            ago(Some(host.last_seen_s)),
            number(host.frames),
            bytes(host.bytes),
            remark(host),
        ]);
    }
    if !discovery.neighbours.is_empty() {
        table.write(&mut out);
    }
    for (count, text) in [
        (
            discovery.lost_frames,
            "frames lost: the queue of the socket was full",
        ),
        (
            discovery.overflowed_frames,
            "frames of more hosts: the table is full",
        ),
    ] {
        if count > 0 {
            out.0 += &format!("{RED}{}{RESET} {text}\n", number(count));
        }
    }
    if discovery.neighbours.is_empty() {
        out.0 += &format!(
            "{DIM}Silent hosts are not found: cause traffic or listen longer (`--seconds 60`).{RESET}\n"
        );
    } else if discovery.neighbours.iter().any(|host| host.known.is_none()) {
        out.0 += &format!("{DIM}`--toml` prints them as devices for a configuration.{RESET}\n");
    }
    out.0
}

fn remark(host: &Neighbour) -> String {
    if let Some(other) = &host.shares_address_with {
        return format!("{RED}duplicate address: also used by {other}{RESET}");
    }
    match &host.known {
        None => String::new(),
        Some(Role::Own) => format!("{DIM}this host{RESET}"),
        Some(Role::Responder) => format!("{DIM}the gateway's responder{RESET}"),
        Some(Role::Device(name)) => {
            format!("device {YELLOW}{}{RESET}", crate::screen::printable(name))
        }
    }
}

/// Returns configuration sections of the hosts without a role.
pub fn sections(discovery: &Discovery) -> String {
    let mut text = format!("# Found on {}.\n", discovery.interface);
    let mut names: Vec<String> = Vec::new();
    let unknown = discovery
        .neighbours
        .iter()
        .filter(|host| host.known.is_none());
    for host in unknown {
        let mut name = device_name(host);
        if names.contains(&name) {
            name = format!("{name}-{}", names.len() + 1);
        }
        text += &format!(
            "\n[[gateway.device]]\nname = \"{name}\"\nmac = \"{}\"\n",
            host.mac
        );
        if let Some(vlan) = host.vlan {
            text += &format!("vlan = {vlan}\n");
        }
        let lan: Vec<_> = host
            .lan
            .iter()
            .map(|address| format!("\"{address}\""))
            .collect();
        if !lan.is_empty() {
            text += &format!("lan = [{}]", lan.join(", "));
            text += "    # remove it if the address changes (DHCP): `mac` finds the device\n";
        }
        if let Some(other) = &host.shares_address_with {
            text += &format!("# Duplicate address: {other} also has one of these.\n");
        }
        text += "# overlay = [\"10.77.0.…\"]    # addresses in the overlay [default: those on the LAN]\n";
        names.push(name);
    }
    if names.is_empty() {
        text += "# No host that is not a device already.\n";
    }
    text
}

/// Returns a name made from the address, else from the MAC address.
fn device_name(host: &Neighbour) -> String {
    let v4 = host.lan.iter().find(|address| address.is_ipv4());
    match v4 {
        Some(address) => format!("device-{}", address.to_string().replace('.', "-")),
        None => {
            let digits: String = host.mac.chars().filter(|c| *c != ':').collect();
            format!("device-{}", digits.get(6..).unwrap_or(&digits))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::screen::plain;

    fn host(mac: &str, lan: &[&str]) -> Neighbour {
        let lan: Vec<IpAddr> = lan.iter().map(|text| text.parse().unwrap()).collect();
        Neighbour {
            mac: mac.into(),
            vlan: None,
            addresses: lan.clone(),
            has_more_addresses: false,
            lan,
            first_seen_s: 9.5,
            last_seen_s: 0.5,
            frames: 1234,
            bytes: 2048,
            shares_address_with: None,
            known: None,
        }
    }

    fn found(neighbours: Vec<Neighbour>) -> Discovery {
        Discovery {
            interface: "eth1".into(),
            mac: Some("02:00:00:00:00:01".into()),
            prefixes: vec!["192.168.1.1/24".into()],
            listened_s: 10.0,
            neighbours,
            overflowed_frames: 0,
            not_understood_frames: 0,
            lost_frames: 0,
        }
    }

    #[test]
    fn the_table_lists_hosts() {
        let device = Neighbour {
            known: Some(Role::Device("camera".into())),
            ..host("02:00:00:00:00:11", &["192.168.1.11"])
        };
        let unknown = host("02:00:00:00:00:10", &["192.168.1.10", "fd00:1::10"]);
        let text = plain(&render(&found(vec![unknown, device])));
        let expected = "\
2 hosts found in 10.0 s on eth1 (02:00:00:00:00:01, 192.168.1.1/24)
  MAC                addresses                 first seen  last seen  frames     bytes
  02:00:00:00:00:10  192.168.1.10, fd00:1::10    10 s ago        now   1,234  2.00 KiB
  02:00:00:00:00:11  192.168.1.11                10 s ago        now   1,234  2.00 KiB  device camera
`--toml` prints them as devices for a configuration.
";
        assert_eq!(text, expected);
    }

    #[test]
    fn printed_sections_are_valid_configuration() {
        let own = Neighbour {
            known: Some(Role::Own),
            ..host("02:00:00:00:00:01", &["192.168.1.1"])
        };
        let tagged = Neighbour {
            vlan: Some(7),
            ..host("02:00:00:00:00:12", &["192.168.7.10"])
        };
        let neighbours = vec![
            host("02:00:00:00:00:10", &["192.168.1.10", "fd00:1::10"]),
            own,
            tagged,
            host("02:00:00:a1:b2:c3", &[]),
        ];
        let text = format!(
            "private-key = \"{}\"\naddress = \"10.77.0.1/24\"\n[gateway]\ninterface = \"eth1\"\n{}",
            "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=",
            sections(&found(neighbours))
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gateway.toml");
        std::fs::write(&file, text).unwrap();
        let target = file.to_str().unwrap();
        let parsed = seikan_config::load(target, &seikan_config::Overrides::default());
        let gateway = parsed.into_result().unwrap().0.gateway.unwrap();
        let names: Vec<_> = gateway.devices.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "device-192-168-1-10",
                "device-192-168-7-10",
                "device-a1b2c3"
            ]
        );
    }
}
