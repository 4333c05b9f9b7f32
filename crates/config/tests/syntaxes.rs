//! Tests of the two syntaxes: typical files, and conversion to text and back.

use std::net::IpAddr;

use ipnet::IpNet;
use proptest::prelude::*;
use seikan_config::{
    BitRate, CipherPreference, Config, Endpoint, GatewayMode, GatewaySettings, Hooks, Host,
    InterfaceName, MeshSettings, Mode, Overrides, Parsed, PeerConfig, PresharedKey, PrivateKey,
    Protocol, PublicKey, Repair, Source, Syntax, Table, Trust, parse,
};
use seikan_proto::gateway::{DeviceConfig, Remote};
use seikan_proto::mesh::Pin;
use seikan_wire::ethernet::Mac;
use zeroize::Zeroizing;

const OWN: &str = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=";
const PEER: &str = "8kfUEz8qhR7BQ5TjDIo3G07Wy+gE18QueE0wzU1MNSE=";
const PEER_2: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";

fn parse_text(syntax: Syntax, text: &str, overrides: &Overrides) -> Parsed {
    let file = match syntax {
        Syntax::Ini => "wg0.conf",
        Syntax::Toml => "wg0.toml",
    };
    let source = Source {
        file: file.to_owned(),
        syntax,
        text: Zeroizing::new(text.to_owned()),
    };
    parse(&source, overrides, &|path| match path.to_str() {
        Some("tunnel.key") => Ok(Zeroizing::new(format!("{OWN}\n"))),
        Some("short.key") => Ok(Zeroizing::new(OWN[..43].to_owned())),
        Some("branch.psk") => Ok(Zeroizing::new(format!("{PEER_2}\n"))),
        _ => Err(std::io::ErrorKind::NotFound.into()),
    })
}

fn config(syntax: Syntax, text: &str) -> Config {
    let parsed = parse_text(syntax, text, &Overrides::default());
    match parsed.into_result() {
        Ok((config, _)) => config,
        Err(error) => panic!("{error}\nin:\n{text}"),
    }
}

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn a_redacted_configuration_has_every_key_and_no_secret() {
    let text = format!(
        "[Interface]\nPrivateKey = {OWN}\nPreUp = a hook\nPostUp = a hook\nPostUp = a # hook\nPreDown = a hook\n\
         PostDown = a hook\nMTU = 1400\n[Peer]\nName = web\nPublicKey = {PEER}\nPresharedKey = {PEER_2}\n"
    );
    let config = config(Syntax::Ini, &text);
    let shown = config.to_redacted(Syntax::Ini);
    assert_eq!(
        shown,
        format!(
            "[Interface]\nPrivateKey = (redacted)\nMTU = 1400\nPreUp = (redacted)\nPostUp = (redacted)\n\
             PostUp = (redacted)\nPreDown = (redacted)\nPostDown = (redacted)\n\n[Peer]\nName = web\nPublicKey = {PEER}\n\
             PresharedKey = (redacted)\n"
        )
    );
    let shown = config.to_redacted(Syntax::Toml);
    assert!(
        shown.contains("post-up = [\"(redacted)\", \"(redacted)\"]\n"),
        "{shown}"
    );
    for secret in [OWN, PEER_2, "hook"] {
        assert!(!shown.contains(secret), "{shown}");
    }
}

#[test]
fn texts_that_no_report_may_contain_are_known_also_from_a_file_with_errors() {
    let text = format!(
        "private-key = \"{OWN}\"\npost-up = [\"one\", \"two\"]\nmtu = 1\nlisten-port = 1\n"
    );
    let parsed = parse_text(Syntax::Toml, &text, &Overrides::default());
    assert!(parsed.config.is_none());
    let texts: Vec<_> = parsed
        .unreportable
        .iter()
        .map(|text| text.as_str())
        .collect();
    assert_eq!(texts, [OWN, "one", "two"]);
}

#[test]
fn a_wg_quick_file_of_a_client_is_taken_unchanged() {
    let text = format!(
        "# office\n\
         [interface]\n\
         privatekey={OWN}   # made by hand\n\
         ADDRESS = 10.8.0.2/24,fd42::2/64\n\
         Address = 192.168.7.7\n\
         DNS = 10.8.0.1, fd42::1 corp.example\n\
         MTU = 1380\n\
         Table = 1234\n\
         FwMark = 0xCA6C\n\
         PreUp = echo one; echo %i\n\
         PostUp = iptables -A FORWARD -i %i -j ACCEPT\n\
         PostUp = sysctl net.ipv4.ip_forward=1\n\
         PreDown = true\n\
         PostDown = iptables -D FORWARD -i %i -j ACCEPT\n\
         SaveConfig = true\n\
         \n\
         [PEER]\n\
         PublicKey = {PEER}\n\
         PresharedKey = {PEER_2}\n\
         AllowedIPs = 0.0.0.0/0\n\
         AllowedIPs = ::/0\n\
         Endpoint = vpn.example.com:51820\n\
         PersistentKeepalive = 25\n"
    );
    let config = config(Syntax::Ini, &text);
    assert_eq!(config.name.as_str(), "wg0");
    assert_eq!(config.protocol, Protocol::Wireguard);
    assert_eq!(config.listen_port, None);
    let addresses = nets(&["10.8.0.2/24", "fd42::2/64", "192.168.7.7/32"]);
    assert_eq!(config.addresses, addresses);
    assert_eq!(config.dns, [address("10.8.0.1"), address("fd42::1")]);
    assert_eq!(config.dns_search, ["corp.example"]);
    assert_eq!(config.mtu, Some(1380));
    assert_eq!(config.table, Table::Number(1234));
    assert_eq!(config.fwmark, Some(0xca6c));
    let hooks = Hooks {
        pre_up: vec!["echo one; echo %i".into()],
        post_up: vec![
            "iptables -A FORWARD -i %i -j ACCEPT".into(),
            "sysctl net.ipv4.ip_forward=1".into(),
        ],
        pre_down: vec!["true".into()],
        post_down: vec!["iptables -D FORWARD -i %i -j ACCEPT".into()],
    };
    assert_eq!(config.hooks, hooks);
    assert!(config.save_config);
    assert!(config.offload);
    let [peer] = config.peers.as_slice() else {
        panic!("one peer")
    };
    assert_eq!(peer.public_key.to_string(), PEER);
    assert!(peer.preshared_key.is_some());
    assert_eq!(peer.allowed_ips, nets(&["0.0.0.0/0", "::/0"]));
    let endpoint = Endpoint {
        host: Host::Name("vpn.example.com".into()),
        port: 51820,
    };
    assert_eq!(peer.endpoint, Some(endpoint));
    assert_eq!(peer.persistent_keepalive, Some(25));
}

#[test]
fn a_wg_quick_file_of_a_hub_is_taken_unchanged() {
    // Carriage returns and a byte order mark, as editors elsewhere leave them.
    let text = format!(
        "\u{feff}[Interface]\r\nPrivateKey = {OWN}\r\nListenPort = 51820\r\nFwMark = off\r\nTable = off\r\n\
         [Peer]\r\nPublicKey = {PEER}\r\nAllowedIPs = 10.0.0.2/32, fd00::2\r\nEndpoint = [2001:db8::2]:7\r\n\
         PersistentKeepalive = off\r\n[Peer]\r\nPublicKey = {PEER_2}\r\nAllowedIPs = 10.0.0.7/30"
    );
    let config = config(Syntax::Ini, &text);
    assert_eq!(config.listen_port, Some(51820));
    assert_eq!((config.fwmark, config.table), (None, Table::Off));
    let allowed: Vec<_> = config.peers.iter().map(|p| p.allowed_ips.clone()).collect();
    // The last prefix loses its host bits, as in the kernel.
    let expected = [
        nets(&["10.0.0.2/32", "fd00::2/128"]),
        nets(&["10.0.0.4/30"]),
    ];
    assert_eq!(allowed, expected);
    let endpoint = config.peers[0].endpoint.as_ref().unwrap();
    assert_eq!(endpoint.host, Host::Address(address("2001:db8::2")));
    assert_eq!(config.peers[0].persistent_keepalive, None);
}

#[test]
fn the_rate_of_the_uplink_has_a_unit_and_bounds() {
    let rate = |text: &str| {
        let ini = format!("[Interface]\nPrivateKey = {OWN}\nUplinkRate = {text}\n");
        config(Syntax::Ini, &ini)
            .uplink_rate
            .map(BitRate::bits_per_second)
    };
    assert_eq!(rate("40M"), Some(40_000_000));
    assert_eq!(rate("1500k"), Some(1_500_000));
    assert_eq!(rate("64000"), Some(64_000));
    assert_eq!(rate("1000g"), Some(1_000_000_000_000));
    for bad in [
        "63k",
        "1001G",
        "40 M",
        "1.5G",
        "40mbit",
        "-40M",
        "M",
        "99999999999G",
    ] {
        assert!(bad.parse::<BitRate>().is_err(), "{bad}");
    }
    let toml = format!("private-key = \"{OWN}\"\n");
    assert_eq!(config(Syntax::Toml, &toml).uplink_rate, None);
    let toml = format!("{toml}uplink-rate = \"1500k\"\n");
    assert_eq!(
        config(Syntax::Toml, &toml).uplink_rate.unwrap().to_string(),
        "1500k"
    );
}

#[test]
fn the_traffic_class_is_copied_only_on_request() {
    let ini = format!("[Interface]\nPrivateKey = {OWN}\n");
    let toml = format!("private-key = \"{OWN}\"\n");
    assert!(!config(Syntax::Ini, &ini).copy_dscp);
    assert!(!config(Syntax::Toml, &toml).copy_dscp);
    assert!(config(Syntax::Ini, &format!("{ini}CopyDSCP = true\n")).copy_dscp);
    assert!(config(Syntax::Toml, &format!("{toml}copy-dscp = true\n")).copy_dscp);
}

#[test]
fn ethernet_mode_needs_neither_addresses_nor_allowed_ips() {
    let ini = format!(
        "[Interface]\nPrivateKey = {OWN}\nProtocol = native\nMode = Ethernet\nListenPort = 1\n\
         [Peer]\nPublicKey = {PEER_2}\n"
    );
    let toml = format!(
        "private-key = \"{OWN}\"\nmode = \"ethernet\"\nlisten-port = 1\n\
         [[peer]]\npublic-key = \"{PEER_2}\"\n"
    );
    for (syntax, text) in [(Syntax::Ini, ini), (Syntax::Toml, toml)] {
        let parsed = config(syntax, &text);
        assert_eq!(parsed.mode, Mode::Ethernet);
        assert!(parsed.addresses.is_empty() && parsed.peers[0].allowed_ips.is_empty());
    }
}

#[test]
fn toml_says_the_same() {
    let text = format!(
        "private-key = \"{OWN}\"\n\
         address = [\"10.8.0.2/24\", \"fd42::2/64\"]\n\
         listen-port = 51820\n\
         mtu = 65535\n\
         dns = \"10.8.0.1\"\n\
         table = \"off\"\n\
         fwmark = 0xca6c\n\
         post-up = \"echo '# %i'\"\n\
         offload = false\n\
         metrics = \"127.0.0.1:9586\"\n\
         cipher = \"chacha20-poly1305\"\n\
         [[peer]]\n\
         name = \"Gebäude 3\"\n\
         public-key = \"{PEER}\"\n\
         allowed-ips = [\"10.8.0.1/32\"]\n\
         endpoint = \"192.0.2.1:51820\"\n\
         persistent-keepalive = 25\n"
    );
    let config = config(Syntax::Toml, &text);
    assert_eq!(config.protocol, Protocol::Native);
    assert_eq!(config.addresses, nets(&["10.8.0.2/24", "fd42::2/64"]));
    assert_eq!(config.listen_port, Some(51820));
    assert_eq!(config.mtu, Some(65535));
    assert_eq!(config.fwmark, Some(0xca6c));
    assert_eq!(config.hooks.post_up, ["echo '# %i'"]);
    assert!(!config.offload);
    assert_eq!(config.metrics.unwrap().to_string(), "127.0.0.1:9586");
    assert_eq!(config.cipher, CipherPreference::ChaCha20Poly1305);
    let [peer] = config.peers.as_slice() else {
        panic!("one peer")
    };
    assert_eq!(peer.name.as_deref(), Some("Gebäude 3"));
    assert_eq!(
        peer.endpoint.as_ref().unwrap().to_string(),
        "192.0.2.1:51820"
    );
    assert_eq!(peer.persistent_keepalive, Some(25));
}

/// The key of the schema that each line of the packaged example shows, in comments too.
#[test]
fn the_example_has_every_key_and_no_fault() {
    let text = include_str!("../../../packaging/examples/office.toml");
    let gateway = include_str!("../../../packaging/examples/gateway.toml");
    for text in [text, gateway] {
        let parsed = parse_text(Syntax::Toml, text, &Overrides::default());
        assert!(parsed.config.is_some(), "{}", parsed.diagnostics);
        assert!(parsed.diagnostics.is_empty(), "{}", parsed.diagnostics);
    }
    // The help for a key that is not near to any lists all of a section.
    let probe = "zzzzzzzz = 1\n[[peer]]\nzzzzzzzz = 1\n[gateway]\nzzzzzzzz = 1\n\
                 [[gateway.device]]\nzzzzzzzz = 1\n[[gateway.remote]]\nzzzzzzzz = 1\n";
    let probed = parse_text(Syntax::Toml, probe, &Overrides::default());
    let lists = probed.diagnostics.iter().filter_map(|d| d.help.as_ref());
    let lists = lists.filter_map(|help| help.strip_prefix("known keys: "));
    let lists: Vec<Vec<_>> = lists.map(|list| list.split(", ").collect()).collect();
    let counts: Vec<_> = lists.iter().map(Vec::len).collect();
    assert_eq!(counts, [29, 7, 5, 7, 2]);
    for (text, lists) in [(text, &lists[..2]), (gateway, &lists[2..])] {
        for key in lists.concat() {
            let line = |line: &str| {
                line.trim_start_matches("# ")
                    .starts_with(&format!("{key} = "))
            };
            assert!(text.lines().any(line), "{key}");
        }
    }
}

/// A gateway with everything that one mode has.
fn gateway() -> GatewaySettings {
    let rule = |text: &str| text.parse().unwrap();
    GatewaySettings {
        interface: "eth1".parse().unwrap(),
        mode: GatewayMode::Transparent,
        answer_for: nets(&["10.77.0.0/24", "fd77::/64"]),
        proxy_arp: false,
        priority: Some(100),
        devices: vec![
            DeviceConfig {
                name: "plc-1".into(),
                mac: Some("02:00:00:00:00:10".parse().unwrap()),
                vlan: Some(10),
                lan: vec![address("192.168.1.10"), address("fd00:1::10")],
                overlay: vec![address("10.77.0.10"), address("fd77::10")],
                allow_from: vec![rule("10.77.0.0/24 tcp/502,8000-8010"), rule("any icmp")],
                allow_to: vec![rule("10.77.0.2 tcp/443")],
            },
            DeviceConfig {
                name: "printer".into(),
                lan: vec![address("192.168.1.20")],
                ..DeviceConfig::default()
            },
        ],
        remotes: vec![Remote {
            overlay: address("10.77.0.2"),
            lan: address("192.168.1.202"),
        }],
    }
}

#[test]
fn a_gateway_in_toml() {
    let text = format!(
        "private-key = \"{OWN}\"\n\
         [gateway]\n\
         interface = \"eth1\"\n\
         mode = \"transparent\"\n\
         answer-for = [\"10.77.0.0/24\", \"fd77::/64\"]\n\
         proxy-arp = false\n\
         priority = 100\n\
         [[gateway.device]]\n\
         name = \"plc-1\"\n\
         mac = \"02-00-00-00-00-10\"\n\
         vlan = 10\n\
         lan = [\"192.168.1.10\", \"fd00:1::10\"]\n\
         overlay = [\"10.77.0.10\", \"fd77::10\"]\n\
         allow-from = [\"10.77.0.0/24 tcp/502,8000-8010\", \"any icmp\"]\n\
         allow-to = \"10.77.0.2 tcp/443\"\n\
         [[gateway.device]]\n\
         name = \"printer\"\n\
         lan = \"192.168.1.20\"\n\
         [[gateway.remote]]\n\
         overlay = \"10.77.0.2\"\n\
         lan = \"192.168.1.202\"\n"
    );
    assert_eq!(config(Syntax::Toml, &text).gateway, Some(gateway()));
}

#[test]
fn a_gateway_in_ini() {
    let text = format!(
        "[Interface]\n\
         PrivateKey = {OWN}\n\
         [Gateway]\n\
         Interface = eth1\n\
         Mode = Transparent\n\
         AnswerFor = 10.77.0.0/24, fd77::/64\n\
         ProxyARP = false\n\
         Priority = 100\n\
         [Device]\n\
         Name = plc-1\n\
         MAC = 02:00:00:00:00:10\n\
         VLAN = 10\n\
         LAN = 192.168.1.10, fd00:1::10\n\
         Overlay = 10.77.0.10\n\
         Overlay = fd77::10\n\
         AllowFrom = 10.77.0.0/24 tcp/502,8000-8010\n\
         AllowFrom = any icmp\n\
         AllowTo = 10.77.0.2 tcp/443\n\
         [device]\n\
         name = printer\n\
         lan = 192.168.1.20\n\
         [Remote]\n\
         Overlay = 10.77.0.2\n\
         LAN = 192.168.1.202\n"
    );
    assert_eq!(config(Syntax::Ini, &text).gateway, Some(gateway()));
}

#[test]
fn a_gateway_that_says_only_where_it_is_is_transparent_and_alone() {
    let text = format!("private-key = \"{OWN}\"\n[gateway]\ninterface = \"eth1\"\n");
    let expected = GatewaySettings {
        answer_for: Vec::new(),
        priority: None,
        devices: Vec::new(),
        remotes: Vec::new(),
        ..gateway()
    };
    assert_eq!(config(Syntax::Toml, &text).gateway, Some(expected));
}

/// The whole examples of the documentation.
#[test]
fn the_gateway_of_the_documentation_has_no_fault() {
    let text = include_str!("../../../docs/guides/gateway-lan.md");
    let blocks = text.split("```toml\n").skip(1);
    let blocks = blocks.filter_map(|rest| rest.split_once("\n```"));
    let mut checked = 0;
    for (block, _) in blocks {
        let key = format!("private-key = \"{OWN}\"");
        let text = block.replace("private-key-file = \"tunnel.key\"", &key);
        let parsed = parse_text(Syntax::Toml, &text, &Overrides::default());
        assert!(parsed.config.is_some(), "{}", parsed.diagnostics);
        assert!(parsed.diagnostics.is_empty(), "{}", parsed.diagnostics);
        checked += 1;
    }
    assert!(checked >= 2, "{checked}");
}

#[test]
fn a_comment_in_the_name_of_a_device_is_refused_in_ini() {
    let text = format!(
        "private-key = \"{OWN}\"\n[gateway]\ninterface = \"eth1\"\n\
         [[gateway.device]]\nname = \"plc #1\"\nlan = \"192.168.1.10\"\n"
    );
    assert!(config(Syntax::Toml, &text).to_ini().is_err());
}

#[test]
fn a_hook_gets_the_name_of_the_interface() {
    let name: InterfaceName = "wg0".parse().unwrap();
    assert_eq!(name.fill_in("up %i %i"), "up wg0 wg0");
}

#[test]
fn overrides_take_precedence() {
    let text = format!("[Interface]\nPrivateKey = {OWN}\nMTU = 100\nProtocol = wireguard\n");
    let overrides = Overrides {
        protocol: Some(Protocol::Native),
        offload: Some(false),
        mtu: Some(9000),
        metrics: Some("127.0.0.1:1".parse().unwrap()),
    };
    let config = parse_text(Syntax::Ini, &text, &overrides).config.unwrap();
    assert_eq!(config.protocol, Protocol::Native);
    assert_eq!(config.mtu, Some(9000));
    assert!(!config.offload);
    assert!(config.metrics.is_some());
}

#[test]
fn a_key_file_that_holds_no_key_is_named() {
    let of = |file: &str| {
        let text = format!("private-key-file = \"{file}\"\n");
        let parsed = parse_text(Syntax::Toml, &text, &Overrides::default());
        parsed.diagnostics.to_string()
    };
    assert!(of("none.key").contains("`private-key-file` names `none.key`: "));
    let short = of("short.key");
    let expected =
        "`private-key-file` names `short.key`, whose content is not a key: it has 43 characters";
    assert!(short.contains(expected), "{short}");
    assert!(!short.contains(&OWN[..16]), "{short}");
}

#[test]
fn a_comment_that_ini_cannot_hold_is_refused() {
    let text = format!("private-key = \"{OWN}\"\npost-up = \"echo a # b\"\n");
    assert!(config(Syntax::Toml, &text).to_ini().is_err());
}

#[test]
fn ten_thousand_peers_are_read_in_no_time() {
    let mut text = format!("[Interface]\nPrivateKey = {OWN}\nListenPort = 1\n");
    for n in 0..10_000u32 {
        let mut key = [7; 32];
        key[..4].copy_from_slice(&n.to_le_bytes());
        let key = PublicKey::from_bytes(key);
        let ip = std::net::Ipv4Addr::from(0x0a00_0000 + n);
        text.push_str(&format!(
            "[Peer]\nPublicKey = {key}\nAllowedIPs = {ip}/32\n"
        ));
    }
    let start = std::time::Instant::now();
    assert_eq!(config(Syntax::Ini, &text).peers.len(), 10_000);
    // A quadratic search takes tens of seconds.
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

#[test]
fn ten_thousand_devices_are_read_in_no_time() {
    let mut text = format!("[Interface]\nPrivateKey = {OWN}\n[Gateway]\nInterface = eth1\n");
    for n in 0..10_000u32 {
        let lan = std::net::Ipv4Addr::from(0x0a00_0001 + n);
        let (shown, remote) = (0x0a01_0001 + n, 0x0a80_0001 + n);
        let (shown, remote): (std::net::Ipv4Addr, std::net::Ipv4Addr) =
            (shown.into(), remote.into());
        text.push_str(&format!(
            "[Device]\nName = d{n}\nLAN = {lan}\n[Remote]\nOverlay = {remote}\nLAN = {shown}\n"
        ));
    }
    for n in 0..10_000u32 {
        let mut key = [7; 32];
        key[..4].copy_from_slice(&n.to_le_bytes());
        let key = PublicKey::from_bytes(key);
        let ip = std::net::Ipv4Addr::from(0x0a80_0001 + n);
        text.push_str(&format!(
            "[Peer]\nPublicKey = {key}\nAllowedIPs = {ip}/32\n"
        ));
    }
    let start = std::time::Instant::now();
    let gateway = config(Syntax::Ini, &text).gateway.unwrap();
    assert_eq!(
        (gateway.devices.len(), gateway.remotes.len()),
        (10_000, 10_000)
    );
    // A quadratic search takes tens of seconds.
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

/// Returns a whole configuration as text for comparison, secrets included.
fn description(config: &Config) -> String {
    let secrets: Vec<_> = config
        .peers
        .iter()
        .map(|peer| peer.preshared_key.as_ref().map(|key| *key.as_bytes()))
        .collect();
    let keys: Vec<_> = config
        .peers
        .iter()
        .map(|peer| peer.public_key.to_string())
        .collect();
    let own = config.private_key.as_bytes();
    let credential = config.mesh.as_ref().map(|mesh| mesh.credential.reveal());
    format!("{config:?}\n{own:?}\n{secrets:?}\n{keys:?}\n{credential:?}")
}

prop_compose! {
    fn network()(v6 in any::<bool>(), bits in any::<u128>(), length in 0u8..=128) -> IpNet {
        let address = if v6 {
IpAddr::V6(bits.into())
} else {
IpAddr::V4((bits as u32).into())
};
        let longest = if v6 { 128 } else { 32 };
        IpNet::new(address, length.min(longest)).unwrap()
    }
}

prop_compose! {
    fn endpoint()(
        host in prop_oneof![
            network().prop_map(|net| Host::Address(net.addr())),
            "[a-z][a-z0-9-]{0,20}(\\.[a-z]{2,5})?".prop_map(Host::Name),
            Just(Host::Name("fe80::1%eth0".into())),
        ],
        port in 1u16..,
    ) -> Endpoint {
        Endpoint { host, port }
    }
}

/// One line without anything that a .conf file cannot hold.
fn line() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9%][^#\\p{C}\\p{Z}]{0,20}( [a-z=,;|&\"'\\\\]{1,5})?"
}

prop_compose! {
    fn peer()(
        name in proptest::option::of(line()),
        key in any::<[u8; 32]>(),
        preshared_key in proptest::option::of(any::<[u8; 32]>()),
        endpoint in proptest::option::of(endpoint()),
        persistent_keepalive in proptest::option::of(1u16..),
    ) -> PeerConfig {
        PeerConfig {
            name,
            public_key: PublicKey::from_bytes(key),
            preshared_key: preshared_key.map(PresharedKey::from_bytes),
            allowed_ips: Vec::new(),
            endpoint,
            persistent_keepalive,
        }
    }
}

prop_compose! {
    fn hooks()(
        pre_up in proptest::collection::vec(line(), 0..3),
        post_up in proptest::collection::vec(line(), 0..3),
        pre_down in proptest::collection::vec(line(), 0..3),
        post_down in proptest::collection::vec(line(), 0..3),
    ) -> Hooks {
        Hooks { pre_up, post_up, pre_down, post_down }
    }
}

fn rule() -> impl Strategy<Value = seikan_proto::gateway::rules::Rule> {
    let source = prop_oneof![
        Just("any".to_owned()),
        network().prop_map(|net| net.to_string())
    ];
    let ports = (any::<u16>(), any::<u16>())
        .prop_map(|(a, b)| format!("tcp/{},{}-{}", a, a.min(b), a.max(b)));
    let service = prop_oneof![
        Just(String::new()),
        Just("icmp".to_owned()),
        Just("udp".to_owned()),
        ports
    ];
    (source, service).prop_map(|(source, service)| format!("{source} {service}").parse().unwrap())
}

/// Device `n`, with nothing that another device has.
fn device(n: u8) -> impl Strategy<Value = DeviceConfig> {
    let words = (any::<bool>(), any::<bool>(), any::<bool>());
    let rules = || proptest::collection::vec(rule(), 0..3);
    let vlan = proptest::option::of(1u16..=4094);
    (line(), words, vlan, rules(), rules()).prop_map(
        move |(name, (has_mac, v6, translated), vlan, allow_from, allow_to)| {
            let both = |v4: [u8; 4], v6_net: u16| {
                let mut all = vec![IpAddr::from(v4)];
                all.extend(v6.then(|| IpAddr::from([v6_net, 1, 0, 0, 0, 0, 0, u16::from(n)])));
                all
            };
            DeviceConfig {
                name: format!("{name}-{n}"),
                mac: has_mac.then_some(Mac([2, 0, 0, 0, 0, n])),
                vlan,
                lan: both([192, 168, 1, n], 0xfd00),
                overlay: if translated {
                    both([10, 77, 0, n], 0xfd77)
                } else {
                    Vec::new()
                },
                allow_from,
                allow_to,
            }
        },
    )
}

prop_compose! {
    fn any_gateway()(
        routed in any::<bool>(),
        proxy_arp in any::<bool>(),
        prefixes in proptest::collection::hash_set(network().prop_map(|net| net.trunc()), 0..3),
        priority in proptest::option::of(1u8..=254),
        mut devices in (device(1), device(2), device(3)).prop_map(|(a, b, c)| vec![a, b, c]),
        count in 0usize..=3,
        remotes in 0u8..3,
    ) -> GatewaySettings {
        devices.truncate(count);
        if routed {
            devices.iter_mut().for_each(|device| device.vlan = None);
        }
        GatewaySettings {
            interface: "eth1".parse().unwrap(),
            mode: if routed { GatewayMode::Routed } else { GatewayMode::Transparent },
            answer_for: prefixes.into_iter().filter(|net| net.prefix_len() > 0).collect(),
            proxy_arp,
            priority: priority.filter(|_| !routed),
            devices,
            remotes: (1..=remotes)
                .map(|n| Remote {
                    overlay: [10, 77, 1, n].into(),
                    lan: [192, 168, 2, n].into(),
                })
                .collect(),
        }
    }
}

prop_compose! {
    fn any_config()(
        words in (any::<[u8; 32]>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
        numbers in (
            proptest::option::of(any::<u16>()),
            proptest::option::of(1280u32..65472),
            proptest::option::of(1u32..),
            proptest::option::of(1u16..),
            proptest::option::of(64_000u64..=1_000_000_000_000),
        ),
        cipher in 0usize..3,
        repair in 0u8..=13,
        ethernet in any::<bool>(),
        table in prop_oneof![
            Just(Table::Auto), Just(Table::Off), (1u32..).prop_map(Table::Number)
        ],
        addresses in proptest::collection::hash_set(network(), 0..4),
        allowed in proptest::collection::hash_set(network().prop_map(|net| net.trunc()), 0..8),
        dns in proptest::collection::vec(network().prop_map(|net| net.addr()), 0..3),
        dns_search in proptest::collection::vec("[a-z]{1,8}\\.[a-z]{2,4}", 0..3),
        hooks in hooks(),
        mut peers in proptest::collection::vec(peer(), 0..4),
        mut gateway in proptest::option::of(any_gateway()),
        mesh in proptest::option::of(any_mesh()),
    ) -> Config {
        let (mut own, native, offload, save_config, copy_dscp) = words;
        own[0] &= 248;
        own[31] = own[31] & 127 | 64;
        let (listen_port, mtu, fwmark, metrics, uplink) = numbers;
        for (index, prefix) in allowed.into_iter().enumerate() {
            let count = peers.len().max(1);
            if let Some(peer) = peers.get_mut(index % count) {
                peer.allowed_ips.push(prefix);
            }
        }
        // In a mesh, the names of devices are names of hosts.
        let devices = gateway.iter_mut().flat_map(|gateway| &mut gateway.devices);
        for (index, device) in devices.filter(|_| mesh.is_some()).enumerate() {
            device.name = format!("device-{index}");
        }
        Config {
            name: "wg0".parse().unwrap(),
            protocol: if native { Protocol::Native } else { Protocol::Wireguard },
            // Native, and with neither a gateway nor a mesh.
            mode: if ethernet && native && gateway.is_none() && mesh.is_none() {
                Mode::Ethernet
            } else {
                Mode::Ip
            },
            private_key: PrivateKey::from_bytes(own),
            listen_port,
            addresses: addresses.into_iter().collect(),
            mtu,
            dns,
            dns_search,
            table,
            fwmark,
            hooks,
            save_config,
            offload,
            metrics: metrics.map(|port| ([127, 0, 0, 1], port).into()),
            cipher: [
                CipherPreference::Auto,
                CipherPreference::Aes256Gcm,
                CipherPreference::ChaCha20Poly1305,
            ][cipher],
            copy_dscp,
            repair: match repair {
                0 => Repair::Off,
                13 => Repair::Auto,
                percent => Repair::Percent(percent),
            },
            uplink_rate: uplink.map(|rate| rate.to_string().parse().unwrap()),
            peers,
            gateway,
            mesh,
        }
    }
}

prop_compose! {
    fn any_mesh()(
        endpoint in endpoint(),
        pin in proptest::option::of(any::<[u8; 8]>()),
        secret in any::<u8>(),
        stun in proptest::collection::vec(endpoint(), 0..3),
        names in any::<bool>(),
        port_mapping in any::<bool>(),
        pins in proptest::collection::btree_map("[a-z][a-z0-9]{0,8}", any::<u8>(), 0..3),
        first_use in any::<bool>(),
    ) -> MeshSettings {
        let url = format!("https://{endpoint}");
        let text = format!("skc_{}", ["A", "b", "7", "_"][usize::from(secret % 4)].repeat(32));
        MeshSettings {
            // A scope is local to a host.
            coordinator: url.parse().unwrap_or_else(|_| "https://mesh:7443".parse().unwrap()),
            pin: pin.map(|bytes| Pin::of_certificate(&bytes)),
            credential: text.parse().unwrap(),
            stun,
            names,
            port_mapping,
            trust: Trust {
                pins: pins
                    .into_iter()
                    .map(|(name, byte)| (name.parse().unwrap(), PublicKey::from_bytes([byte | 1; 32])))
                    .collect(),
                first_use,
            },
        }
    }
}

/// Lines that resemble a configuration.
fn nearly_a_file() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        Just("[Interface]\n".to_owned()),
        Just("[Peer]\n".to_owned()),
        Just("[[peer]]\n".to_owned()),
        "(\\[Gateway|\\[Device|\\[Remote|\\[gateway|\\[\\[gateway.device\\]|\\[\\[gateway.remote\\])\\]\n",
        "(interface|mode|answer-for|ProxyARP|priority|name|mac|VLAN|lan|Overlay|AllowFrom) ?= ?[\"\\[]{0,2}(eth1|routed|true|1|02:00:00:00:00:10|10.77.0.[1-3](/24)?|any icmp|fd77::1)?[\"\\]]{0,2}\n",
        Just(format!("PrivateKey = {OWN}\n")),
        Just(format!("public-key = \"{PEER}\"\n")),
        "(address|AllowedIPs|endpoint|MTU|FwMark|Table|dns|peer) ?= ?[\"\\[]?[0-9a-fx:./%,\\[\\]]{0,20}[\"\\]]?\n",
        "[a-zA-Z-]{0,12}[ =.#\"'\\[\\]{}\n]{1,3}",
        "\\PC{0,8}\n",
    ];
    proptest::collection::vec(word, 0..20).prop_map(|words| words.concat())
}

proptest! {
    #[test]
    fn ini_holds_a_whole_configuration(config in any_config()) {
        let text = config.to_ini().unwrap();
        let parsed = parse_text(Syntax::Ini, &text, &Overrides::default());
        prop_assert!(parsed.config.is_some(), "{}\n{}", parsed.diagnostics, *text);
        let again = parsed.config.unwrap();
        prop_assert_eq!(description(&again), description(&config));
        prop_assert_eq!(again.to_ini().unwrap(), text);
    }

    #[test]
    fn toml_holds_a_whole_configuration(config in any_config()) {
        let text = config.to_toml();
        let parsed = parse_text(Syntax::Toml, &text, &Overrides::default());
        prop_assert!(parsed.config.is_some(), "{}\n{}", parsed.diagnostics, *text);
        prop_assert_eq!(description(&parsed.config.unwrap()), description(&config));
    }

    #[test]
    fn no_bytes_make_a_parser_panic(bytes in any::<Vec<u8>>()) {
        let text = String::from_utf8_lossy(&bytes);
        for syntax in [Syntax::Ini, Syntax::Toml] {
            let _ = parse_text(syntax, &text, &Overrides::default()).diagnostics.to_string();
        }
    }

    #[test]
    fn no_words_make_a_parser_panic(text in nearly_a_file()) {
        for syntax in [Syntax::Ini, Syntax::Toml] {
            let parsed = parse_text(syntax, &text, &Overrides::default());
            let shown = parsed.diagnostics.to_string();
            prop_assert!(!shown.contains(OWN), "{}", shown);
            prop_assert_eq!(parsed.config.is_none(), parsed.diagnostics.has_errors());
        }
    }
}

#[test]
fn a_member_of_a_mesh_says_where_its_coordinator_is() {
    let credential = format!("skc_{}", "A".repeat(32));
    let text = format!(
        "private-key = \"{OWN}\"\naddress = \"100.80.0.1/12\"\n\
         coordinator = \"https://mesh.example.org:7443\"\ncredential = \"{credential}\"\n"
    );
    let mesh = config(Syntax::Toml, &text).mesh.expect("a mesh");
    assert_eq!(
        mesh.coordinator.to_string(),
        "https://mesh.example.org:7443"
    );
    assert_eq!(*mesh.credential.reveal(), credential);
    assert_eq!(mesh.pin, None);
    // The credential is never shown, even if it is invalid.
    assert!(!format!("{mesh:?}").contains(&credential));
    let wrong = text.replace("skc_AAAA", "skc_!AAA");
    let parsed = parse_text(Syntax::Toml, &wrong, &Overrides::default());
    assert!(parsed.config.is_none());
    let description = parsed.diagnostics.to_string();
    assert!(
        description.contains("credential") && !description.contains("AAAA"),
        "{description}"
    );
}

#[test]
fn a_members_key_is_pinned_by_its_name() {
    let credential = format!("skc_{}", "A".repeat(32));
    let base = format!(
        "private-key = \"{OWN}\"\naddress = \"100.80.0.1/12\"\n\
         coordinator = \"https://m\"\ncredential = \"{credential}\"\n"
    );
    let text = format!("{base}pins = [\"db-1 {PEER}\", \"WEB {PEER_2}\"]\npin-first-use = true\n");
    let trust = config(Syntax::Toml, &text).mesh.expect("a mesh").trust;
    let pins: Vec<_> = trust.pins.iter().map(|(n, k)| format!("{n} {k}")).collect();
    assert_eq!(pins, [format!("db-1 {PEER}"), format!("web {PEER_2}")]);
    assert!(trust.first_use);
    let none = config(Syntax::Toml, &base).mesh.expect("a mesh").trust;
    assert_eq!(none, Trust::default());
    for (pins, description) in [
        ("[\"db-1\"]".to_owned(), "not a name and a key"),
        (format!("[\"db_1 {PEER}\"]"), "not the name of a member"),
        ("[\"db-1 AAAA\"]".to_owned(), "not a key"),
        (format!("[\"a {PEER}\", \"A {PEER_2}\"]"), "another key"),
    ] {
        let parsed = parse_text(
            Syntax::Toml,
            &format!("{base}pins = {pins}\n"),
            &Overrides::default(),
        );
        assert!(parsed.config.is_none(), "{pins}");
        assert!(
            parsed.diagnostics.to_string().contains(description),
            "{}",
            parsed.diagnostics
        );
    }
}

#[test]
fn half_a_membership_is_an_error() {
    let credential = format!("skc_{}", "A".repeat(32));
    let base = format!("private-key = \"{OWN}\"\naddress = \"100.80.0.1/12\"\n");
    for (line, missing) in [
        ("coordinator = \"https://m\"".to_owned(), "credential"),
        (format!("credential = \"{credential}\""), "coordinator"),
    ] {
        let text = format!("{base}{line}\n");
        let parsed = parse_text(Syntax::Toml, &text, &Overrides::default());
        assert!(parsed.config.is_none(), "{text}");
        let description = parsed.diagnostics.to_string();
        assert!(
            description.contains(&format!("needs `{missing}`")),
            "{description}"
        );
    }
}
