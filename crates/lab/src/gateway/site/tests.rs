use super::*;

#[test]
fn addresses_have_the_same_digits_in_both_families() {
    assert_eq!(
        on_lan(10).both().map(|a| a.to_string()),
        ["192.168.1.10", "fd00:1::10"]
    );
    assert_eq!(
        PRESENTED.both().map(|a| a.to_string()),
        ["192.168.1.202", "fd00:1::202"]
    );
    assert_eq!(
        on_overlay(2).networks().map(|n| n.to_string()),
        ["10.77.0.0/24", "fd77::/64"]
    );
}

#[test]
fn many_addresses_leave_out_those_of_the_hosts() {
    let all: std::collections::BTreeSet<u8> = many_numbers().collect();
    assert_eq!(all.len(), MANY);
    assert!([1, 2, 202].iter().all(|n| !all.contains(n)));
    assert_eq!(many_numbers().next(), Some(DEVICE));
}

#[test]
fn names_of_interfaces_fit_the_kernel() {
    // Named after the host by tunnels, with the largest process id; IFNAMSIZ is 16 with its
    // NUL.
    for name in ["gate", "remote", "device"] {
        assert!(format!("sk4194304{name}").len() < 16);
    }
}
