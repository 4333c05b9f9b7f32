//! Relays and tickets.

use std::num::NonZeroU16;

use seikan_proto::mesh::{MAX_RELAYS, RelayKind, RelaySecret, RelayTls};

use super::*;

fn relay(n: usize) -> RelayInfo {
    RelayInfo {
        address: format!("r{n}.example.org:3478")
            .parse()
            .expect("an address"),
        kind: RelayKind::Turn,
        tls: None,
    }
}

/// Returns one of seikan's own relays, with an optional TLS port.
pub(super) fn own(tls: Option<u16>) -> RelayInfo {
    let port = tls.and_then(NonZeroU16::new);
    // FIPS 180-2, appendix B.1: the digest of "abc".
    let pin = "sha256:ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0";
    RelayInfo {
        kind: RelayKind::Seikan,
        tls: port.map(|port| RelayTls {
            port,
            pin: pin.parse().ok(),
        }),
        ..relay(1)
    }
}

pub(super) fn own_secret() -> RelaySecret {
    let secret = "skr_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX";
    RelaySecret::parse(secret, RelayKind::Seikan).expect("a secret")
}

#[test]
fn changes_of_a_relays_tls_port_are_sent() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    let revision = || mesh.store.revision().expect("queried");
    let before = revision();
    let unpinned = RelayInfo {
        tls: own(Some(8443)).tls.map(|tls| RelayTls { pin: None, ..tls }),
        ..own(None)
    };
    let steps = [
        own(Some(443)),
        own(Some(443)),
        own(Some(8443)),
        unpinned,
        own(None),
    ];
    for (relay, more) in steps.iter().zip([1, 1, 2, 3, 4]) {
        let added = mesh.store.add_relay(relay, &own_secret(), &operator(), NOW);
        added.expect("added");
        let tickets_of_member = mesh.store.tickets(a, NOW).expect("tickets");
        assert_eq!(tickets_of_member[0].tls, relay.tls);
        assert_eq!(
            mesh.store.relays().expect("relays").as_slice(),
            std::slice::from_ref(relay)
        );
        assert_eq!(revision(), before + more, "{relay:?}");
    }
    let turn = RelayInfo {
        kind: RelayKind::Turn,
        ..own(Some(443))
    };
    let error = mesh
        .store
        .add_relay(&turn, &secret("north"), &operator(), NOW);
    let error = error.expect_err("a TURN server has no TLS port");
    assert!(matches!(error, StoreError::OutOfBounds(_)), "{error}");
}

fn secret(text: &str) -> RelaySecret {
    RelaySecret::parse(text, RelayKind::Turn).expect("a secret")
}

fn add(store: &Store, n: usize, with: &str) -> Result<(), StoreError> {
    store.add_relay(&relay(n), &secret(with), &operator(), NOW)
}

#[test]
fn a_member_gets_a_ticket_for_each_relay_valid_for_a_day() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    assert_eq!(mesh.store.tickets(a, NOW).expect("tickets"), []);
    for n in [2, 1] {
        add(&mesh.store, n, "north").expect("added");
    }
    let tickets_of_member = mesh.store.tickets(a, NOW).expect("tickets");
    let addresses: Vec<_> = tickets_of_member
        .iter()
        .map(|r| r.address.to_string())
        .collect();
    assert_eq!(addresses, ["r1.example.org:3478", "r2.example.org:3478"]);
    let ticket = &tickets_of_member[0].ticket;
    assert!(ticket.username.ends_with(&format!(":{}", key(1))));
    // As computed by coturn; the codec's own test has a value by openssl.
    assert_eq!(ticket.password, secret("north").password(&ticket.username));
    for later in [0, 1, 3_599, 3_600, 86_399] {
        let tickets_of_member = mesh.store.tickets(a, NOW + later).expect("tickets");
        let left = tickets_of_member[0].ticket.expires().expect("an expiry") - (NOW + later);
        assert!(
            (86_400..=90_000).contains(&left),
            "{left} s after {later} s"
        );
    }
    mesh.remove("a");
    let error = mesh.store.tickets(a, NOW).expect_err("no member any more");
    assert!(matches!(error, StoreError::NotAMember), "{error}");
}

#[test]
fn a_ticket_stays_the_same_within_an_hour() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    add(&mesh.store, 1, "north").expect("added");
    // 1,800,000,000 is the start of an hour.
    let tickets = |after| mesh.store.tickets(a, NOW + after).expect("tickets");
    assert_eq!(tickets(0), tickets(3_599));
    assert_ne!(tickets(0), tickets(3_600));
}

#[test]
fn changes_of_relays_have_a_revision_and_a_log_entry_without_secrets() {
    let mesh = Mesh::new("100.80.0.0/12");
    let store = &mesh.store;
    let steps: [(&dyn Fn(), u64); 6] = [
        (&|| add(store, 1, "north").expect("added"), 1),
        (&|| add(store, 1, "north").expect("the same again"), 1),
        (&|| add(store, 1, "south").expect("another secret"), 2),
        (
            &|| assert!(!remove(store, 2).expect("queried"), "there is none"),
            2,
        ),
        (&|| assert!(remove(store, 1).expect("queried")), 3),
        (
            &|| assert!(!remove(store, 1).expect("queried"), "no more"),
            3,
        ),
    ];
    for (number, (step, revision)) in steps.into_iter().enumerate() {
        step();
        assert_eq!(
            store.revision().expect("queried"),
            revision,
            "step {number}"
        );
    }
    assert_eq!(store.relays().expect("relays"), []);
    let tickets_of_member = store.audit(3).expect("an audit");
    let tickets_of_member: Vec<_> = tickets_of_member
        .iter()
        .map(|e| (e.change.as_str(), e.subject.as_str()))
        .collect();
    let address = "r1.example.org:3478";
    assert_eq!(
        tickets_of_member,
        [
            ("relay removed", address),
            ("relay added", address),
            ("relay added", address)
        ]
    );
}

fn remove(store: &Store, n: usize) -> Result<bool, StoreError> {
    store.remove_relay(&relay(n).address, &operator(), NOW)
}

#[test]
fn the_number_of_relays_is_bounded() {
    let mesh = Mesh::new("100.80.0.0/12");
    for n in 0..MAX_RELAYS {
        add(&mesh.store, n, "north").expect("added");
    }
    let error = add(&mesh.store, MAX_RELAYS, "north").expect_err("one too many");
    assert!(matches!(error, StoreError::OutOfBounds(_)), "{error}");
    add(&mesh.store, 0, "south").expect("one that is there may change");
    assert_eq!(mesh.store.relays().expect("relays").len(), MAX_RELAYS);
}

#[test]
fn the_longest_relay_is_within_its_cost() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    let host = format!(
        "{}.{}",
        ["a".repeat(63).as_str(); 3].join("."),
        "a".repeat(61)
    );
    let longest = RelayInfo {
        address: format!("{host}:65535").parse().expect("an address"),
        ..own(Some(65_535))
    };
    let added = mesh
        .store
        .add_relay(&longest, &own_secret(), &operator(), NOW);
    added.expect("added");
    let tickets_of_member = mesh.store.tickets(a, NOW * 10).expect("tickets");
    let length = serde_json::to_vec(&tickets_of_member[0])
        .expect("JSON")
        .len();
    assert!(length < changes::RELAY, "{length}");
}

#[test]
fn a_file_without_relays_is_upgraded() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mesh.db");
    let file = Connection::open(&path).expect("opened");
    file.execute_batch(MIGRATIONS[0]).expect("created");
    file.pragma_update(None, "user_version", 1).expect("set");
    file.execute_batch("UPDATE mesh SET v4 = '100.80.0.0/12', v6 = 'fd00::/64', revision = 7")
        .expect("filled");
    drop(file);
    for expected in [vec![], vec![relay(1)]] {
        let store = Store::open(&path).expect("opened");
        assert_eq!(
            store.networks().expect("queried"),
            Some(networks("100.80.0.0/12"))
        );
        assert_eq!(store.relays().expect("relays"), expected);
        add(&store, 1, "north").expect("added");
        assert_eq!(store.revision().expect("queried"), 8);
    }
}

on_etcd! {
    changes_of_a_relays_tls_port_are_sent
    a_member_gets_a_ticket_for_each_relay_valid_for_a_day
    a_ticket_stays_the_same_within_an_hour
    changes_of_relays_have_a_revision_and_a_log_entry_without_secrets
    the_number_of_relays_is_bounded
    the_longest_relay_is_within_its_cost
}
