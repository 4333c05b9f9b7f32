use super::*;
use seikan_config::{Source, Syntax, parse};

// RFC 7748, section 6.1: the private keys of Alice and Bob, and their public keys.
const ALICE: &str = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=";
const BOB_PUBLIC: &str = "3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08=";
const BOB_HEX: &str = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f";
const OTHER_HEX: &str = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a";

fn config(peers: &str) -> Config {
    let text = format!(
        "private-key = \"{ALICE}\"\naddress = \"10.9.0.1/24\"\nlisten-port = 51820\n{peers}"
    );
    let source = Source {
        file: "office.toml".into(),
        syntax: Syntax::Toml,
        text: text.into(),
    };
    let parsed = parse(&source, &Overrides::default(), &|_| {
        Err(io::ErrorKind::NotFound.into())
    });
    parsed
        .config
        .unwrap_or_else(|| panic!("{}", parsed.diagnostics))
}

fn running(config: &Config, peers: &str) -> Running {
    let key = hex(config.private_key.as_bytes());
    Running::parse(&format!("private_key={}\nlisten_port=51820\n{peers}", *key)).unwrap()
}

fn bob(more: &str) -> String {
    format!("[[peer]]\npublic-key = \"{BOB_PUBLIC}\"\nallowed-ips = \"10.9.0.2/32\"\n{more}")
}

fn bob_runs() -> String {
    let zero = "0".repeat(64);
    format!(
        "public_key={BOB_HEX}\npreshared_key={zero}\nallowed_ip=10.9.0.2/32\npersistent_keepalive_interval=0\n"
    )
}

#[test]
fn what_did_not_change_is_not_mentioned() {
    let config = config(&bob(""));
    let changes = Changes::between(
        &config,
        &running(&config, &bob_runs()),
        &BTreeMap::new(),
        false,
    );
    assert_eq!(*changes.request, "");
    assert_eq!(changes.describe(0), "nothing to change");
}

#[test]
fn peers_are_added_changed_and_removed() {
    let config = config(&bob("persistent-keepalive = 25\n"));
    let other = format!("public_key={OTHER_HEX}\nallowed_ip=10.9.0.3/32\n");
    let before = running(&config, &(bob_runs() + &other));
    let changes = Changes::between(&config, &before, &BTreeMap::new(), false);
    let expected = format!(
        "public_key={BOB_HEX}\npersistent_keepalive_interval=25\npublic_key={OTHER_HEX}\nremove=true\n"
    );
    assert_eq!(*changes.request, expected);
    assert_eq!(changes.describe(0), "1 peer changed, 1 peer removed");

    let endpoints = BTreeMap::from([(BOB_HEX.to_owned(), "192.0.2.2:51820".parse().unwrap())]);
    let changes = Changes::between(&config, &running(&config, ""), &endpoints, false);
    let expected = format!(
        "public_key={BOB_HEX}\nendpoint=192.0.2.2:51820\npersistent_keepalive_interval=25\n\
         replace_allowed_ips=true\nallowed_ip=10.9.0.2/32\n"
    );
    assert_eq!(*changes.request, expected);
    assert_eq!(changes.describe(1), "1 peer added, 1 route added");

    // Members of a mesh are not in the file.
    let changes = Changes::between(&config, &before, &endpoints, true);
    assert_eq!(changes.removed, 0);
}

#[test]
fn an_endpoint_within_allowed_ips_is_refused_unless_both_were_there() {
    let config = config(&bob(""));
    let endpoints =
        |address: &str| BTreeMap::from([(BOB_HEX.to_owned(), address.parse().unwrap())]);
    let runs = |more: &str| running(&config, &(bob_runs() + more));
    let inside = endpoints("10.9.0.2:51820");
    assert!(swallowed(&config, &runs(""), &inside).is_some());
    assert!(swallowed(&config, &runs("endpoint=10.9.0.3:51820\n"), &inside).is_some());
    assert_eq!(
        swallowed(&config, &runs("endpoint=10.9.0.2:51820\n"), &inside),
        None
    );
    assert_eq!(
        swallowed(&config, &runs(""), &endpoints("192.0.2.2:51820")),
        None
    );
    let marked = Running {
        fwmark: 51820,
        ..runs("")
    };
    assert_eq!(swallowed(&config, &marked, &inside), None);
}

#[test]
fn a_preshared_key_is_removed_and_any_port_stays() {
    let mut config = config(&bob(""));
    config.listen_port = Some(0);
    let before = bob_runs().replace(&"0".repeat(64), &"11".repeat(32));
    let changes = Changes::between(&config, &running(&config, &before), &BTreeMap::new(), false);
    let expected = format!("public_key={BOB_HEX}\npreshared_key={}\n", "0".repeat(64));
    assert_eq!(*changes.request, expected);
}
