//! The comparison of tunnels, by the real program.

use serde_json::Value;

use crate::common::skip;

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

#[test]
fn forwarded_ports_are_compared_and_carry_tcp_only() {
    if !nix::unistd::geteuid().is_root() {
        return skip("the lab needs root");
    }
    // With the loads in one run, the port of the server is used again at once.
    let names = "native-userspace,wireguard-userspace,wireproxy";
    // Its status is 1 because a load fails.
    let (_, report): (_, Value) = super::bench(&["--only", names, "--loads", "tcp1,rev,udp"]);
    let (rows, absent) = (list(&report["rows"]), list(&report["absent"]));
    if let Some(absent) = absent.first() {
        // Required by no test: `make bench-userspace` installs it.
        assert_eq!(absent["name"], "wireproxy");
        eprintln!("SKIPPED: {}", absent["reason"]);
    }
    assert_eq!(rows.len() + absent.len(), 3, "{report:#}");
    for row in rows {
        assert!(row["ping_us"].is_null(), "{row:#}");
        let [forward, reverse] = list(&row["loads"]) else {
            panic!("{row:#}");
        };
        for load in [forward, reverse] {
            let median = load["gbit_per_second"]["median"].as_f64();
            assert!(median > Some(0.0), "{row:#}");
        }
        let [error] = list(&row["errors"]) else {
            panic!("{row:#}");
        };
        let error = error.as_str().expect("a text");
        assert!(
            error.contains("udp") && error.contains("it carries TCP only"),
            "{error}"
        );
    }
}
