//! Members at one switch: joining, leaving, revocation, changes of address, and a stopped
//! coordinator.

use crate::common::{eventually, stderr};
use crate::mesh::site::{Host, SOON, at_a_site, while_answering};
use serde_json::Value;
use std::fs;
use std::time::{Duration, Instant};

#[test]
fn a_joined_host_is_reached_by_its_mesh_address() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        let at_a = a.join("a", &token);
        let at_b = b.join("b", &token);
        assert_ne!(at_a, at_b);
        let _running = [a.up(), b.up()];
        while_answering(&[&a, &b], || {
            // IPv4 and IPv6, from both sides.
            for (host, addresses) in [(&a, &at_b), (&b, &at_a)] {
                for address in addresses {
                    assert!(host.reaches(*address, SOON), "{address}");
                }
            }
        });
        let status = a.status();
        assert_eq!(status["mesh"]["contact"], "connected");
        assert_eq!(status["mesh"]["members"], 1);
        let peer = &status["peers"][0];
        assert_eq!(peer["name"], "b");
        let endpoint = peer["path"]["endpoint"].as_str().expect("an endpoint");
        assert!(endpoint.starts_with("192.0.2.11:"), "{endpoint}");
    });
}

#[test]
fn a_member_that_was_there_before_reaches_a_new_one() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [old, new] = [site.host(), site.host()];
        old.join("old", &token);
        let _old = old.up();
        eventually("the old one is connected", || {
            old.status()["mesh"]["contact"] == "connected"
        });
        let addresses = new.join("new", &token);
        let _new = new.up();
        while_answering(&[&new], || {
            assert!(old.reaches(addresses[0], SOON));
        });
    });
}

#[test]
fn a_revoked_member_is_refused_everywhere_within_seconds() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        let at_b = b.join("b", &token);
        let _running = [a.up(), b.up()];
        while_answering(&[&b], || {
            assert!(a.reaches(at_b[0], SOON));
            site.administer(&["revoke", "b"]);
            let until = Instant::now() + Duration::from_secs(3);
            while !a.peers().is_empty() || !b.peers().is_empty() {
                assert!(Instant::now() < until, "{:?} {:?}", a.peers(), b.peers());
                std::thread::sleep(Duration::from_millis(50));
            }
            assert!(!a.reaches(at_b[0], Duration::from_millis(300)));
        });
        assert_eq!(b.status()["mesh"]["contact"], "revoked");
        assert_eq!(a.status()["mesh"]["contact"], "connected");
    });
}

#[test]
fn members_go_on_without_their_coordinator_and_start_without_it() {
    at_a_site(|site| {
        let coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        let at_a = a.join("a", &token);
        let at_b = b.join("b", &token);
        let _b = b.up();
        let first = a.up();
        while_answering(&[&a, &b], || {
            assert!(a.reaches(at_b[0], SOON));
            let kept = a
                .folder
                .join("state")
                .join(format!("{}/members.json", a.interface));
            eventually("the members are kept", || {
                fs::read_to_string(&kept).is_ok_and(|text| text.contains("192.0.2.11"))
            });
            drop(coordinator);
            eventually("the loss is reported", || {
                !a.status()["mesh"]["contact"]["lost"].is_null()
            });
            assert!(a.reaches(at_b[0], SOON) && b.reaches(at_a[0], SOON));
            first.signal("TERM");
            assert_eq!(first.ended().0, Some(0));
            let _again = a.up();
            assert!(a.reaches(at_b[0], SOON));
            // Once the coordinator is back, the members find it.
            let _coordinator = site.coordinator();
            eventually("it is found again", || {
                a.status()["mesh"]["contact"] == "connected"
                    && b.status()["mesh"]["contact"] == "connected"
            });
        });
    });
}

#[test]
fn a_member_is_found_at_its_new_address() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        let at_b = b.join("b", &token);
        let _running = [a.up(), b.up()];
        while_answering(&[&b], || {
            assert!(a.reaches(at_b[0], SOON));
            let [old, new] = ["192.0.2.11/24", "192.0.2.200/24"].map(|a| a.parse().expect("one"));
            b.netlink.delete_address(b.nic, old).expect("an address");
            b.netlink.add_address(b.nic, new).expect("an address");
            // The member announces the address itself once it is usable.
            assert!(a.reaches(at_b[0], SOON));
        });
        let endpoint = a.status()["peers"][0]["path"]["endpoint"].clone();
        assert!(
            endpoint.as_str().expect("one").starts_with("192.0.2.200:"),
            "{endpoint}"
        );
    });
}

#[test]
fn tokens_admit_as_created_and_reveal_nothing_to_others() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let once = site.token(&[]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &once);
        let texts = |[token, pin]: &[String; 2]| [token.clone(), pin.clone()];
        let refused = |[token, pin]: [String; 2], name: &str| {
            let output = b.try_join(name, [&token, &pin]);
            assert!(!output.status.success());
            assert!(!std::path::Path::new(&b.file()).exists(), "a file is left");
            stderr(&output)
        };
        let used_up = refused(texts(&once), "b");
        let never = format!("skt_{}", "A".repeat(32));
        let unknown = refused([never, once[1].clone()], "b");
        assert_eq!(used_up, unknown);
        let reusable = site.token(&["--reusable"]);
        let taken = refused(texts(&reusable), "a");
        assert!(taken.contains("name"), "{taken}");
        // The pin of another certificate.
        let other = "sha256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
        let elsewhere = refused([reusable[0].clone(), other.to_owned()], "b");
        assert!(elsewhere.contains("certificate"), "{elsewhere}");
        assert_eq!(site.members().len(), 1);
    });
}

#[test]
fn leaving_removes_all_files() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        b.join("b", &token);
        let _a = a.up();
        let b_runs = b.up();
        eventually("they know each other", || a.peers() == ["b"]);
        let output = b.run(&["leave", &b.file()]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(b_runs.ended().0, Some(0));
        assert!(!std::path::Path::new(&b.file()).exists());
        eventually("it is reported", || a.peers().is_empty());
        let names: Vec<Value> = site.members().iter().map(|m| m["name"].clone()).collect();
        assert_eq!(names, ["a"]);
        // The name is free; the address is not given to another member soon.
        let again = site.host();
        again.join("b", &token);
    });
}

#[test]
fn a_member_with_a_new_key_is_refused_if_pinned_and_reported_otherwise() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [pinning, first_use, following, old, new] = [0; 5].map(|_| site.host());
        let others = [&pinning, &first_use, &following];
        for (host, name) in others.iter().zip(["pinning", "first-use", "following"]) {
            host.join(name, &token);
        }
        let at_old = old.join("db", &token);
        let key_of = |host: &Host| {
            let status = host.status();
            status["interface"]["public_key"]
                .as_str()
                .expect("a key")
                .to_owned()
        };
        let old_runs = old.up();
        let pin = format!("pins = [\"db {}\"]\n", key_of(&old));
        for (host, line) in [
            (&pinning, pin.as_str()),
            (&first_use, "pin-first-use = true\n"),
        ] {
            let text = fs::read_to_string(host.file()).expect("a file");
            fs::write(host.file(), line.to_owned() + &text).expect("written");
        }
        let [pinning_runs, _first_use, _following] = others.map(Host::up);
        while_answering(&[&old], || {
            for host in others {
                assert!(host.reaches(at_old[0], SOON));
            }
        });
        site.administer(&["revoke", "db"]);
        old_runs.signal("TERM");
        assert_eq!(old_runs.ended().0, Some(0));
        let at_new = new.join("db", &token);
        let _new = new.up();
        let key = key_of(&new);
        eventually("it is reported everywhere", || {
            let refused = |host: &Host| !host.status()["mesh"]["refused"][&key].is_null();
            let changed = following.status()["mesh"]["changed_keys"]["db"]["now"].clone();
            refused(&pinning) && refused(&first_use) && changed == *key
        });
        while_answering(&[&new], || {
            assert!(following.reaches(at_new[0], SOON));
            for (host, word) in [(&pinning, "pinned"), (&first_use, "first seen")] {
                assert!(!host.reaches(at_new[0], Duration::from_millis(300)));
                assert!(!host.peers().contains(&"db".to_owned()));
                let reason = host.status()["mesh"]["refused"][&key].clone();
                assert!(
                    reason.as_str().expect("a reason").contains(word),
                    "{reason}"
                );
                let output = host.run(&["ping", "db.seikan", "-c", "1"]);
                assert!(stderr(&output).contains(word), "{}", stderr(&output));
            }
        });
        pinning_runs.signal("TERM");
        let (_, said) = pinning_runs.ended();
        assert!(said.contains(&format!("rejected member {key}")), "{said}");
    });
}
