//! Trust of a host: known keys of members, and networks that it accepts.

use crate::common::{PATIENCE, Tunnel, eventually, stderr};
use crate::mesh::site::{Host, Site, at_a_site};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Output;

/// Returns a host's file of known keys.
fn known(host: &Host) -> PathBuf {
    host.folder
        .join("state")
        .join(&host.interface)
        .join("known.json")
}

fn end(tunnel: Tunnel) {
    tunnel.signal("TERM");
    assert_eq!(tunnel.ended().0, Some(0));
}

/// Makes a host that pinned the first key it saw; its coordinator keeps running.
fn at_a_host_that_remembers(test: impl FnOnce(&Site, &Host)) {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [host, other] = [site.host(), site.host()];
        host.join("host", &token);
        other.join("other", &token);
        let file = host.file();
        let text = fs::read_to_string(&file).expect("a configuration");
        fs::write(&file, format!("pin-first-use = true\n{text}")).expect("a configuration");
        let tunnel = host.up();
        eventually("it is remembered who the other is", || {
            fs::read_to_string(known(&host)).is_ok_and(|text| text.contains("\"other\""))
        });
        end(tunnel);
        test(site, &host);
    });
}

/// Asserts that `up` names the file and the remedy, and changes nothing.
fn is_refused(host: &Host, reason: &str) {
    let output = host.run(&["up", &host.file()]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{reason}: {said}");
    let file = known(host).display().to_string();
    assert!(
        said.contains(&file) && said.contains("move it away"),
        "{reason}: {said}"
    );
    assert!(host.netlink.link(&host.interface).is_err(), "{reason}");
}

#[test]
fn a_host_with_an_unreadable_trust_store_does_not_start() {
    at_a_host_that_remembers(|_, host| {
        let file = known(host);
        let good = fs::read(&file).expect("remembered");
        let damaged: [&[u8]; 5] = [b"", b"{", b"[]", b"{\"names\": 1}", &good[..good.len() / 2]];
        for bytes in damaged {
            fs::write(&file, bytes).expect("damaged");
            is_refused(host, &String::from_utf8_lossy(bytes));
            assert_eq!(fs::read(&file).expect("still there"), bytes);
        }
        fs::write(&file, &good).expect("mended");
        // A member's process cannot override file modes.
        fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).expect("mode");
        is_refused(host, "unreadable");
        fs::remove_file(&file).expect("removed");
        fs::create_dir(&file).expect("a folder");
        is_refused(host, "a folder");
        fs::remove_dir(&file).expect("removed");
        // A missing file is normal: a new member has none.
        end(host.up());
        fs::write(&file, &good).expect("mended");
        end(host.up());
    });
}

/// Returns the output of `join` for a mesh with this network, and whether it wrote a configuration.
fn try_join(site: &Site, host: &Host, name: &str, more: &[&str]) -> (Output, bool) {
    let [token, pin] = site.token(&[]);
    let (url, file) = ("https://192.0.2.1:7443", host.file());
    let words = [
        "join", url, "--token", &token, "--pin", &pin, "--name", name,
    ];
    let output = host.run(&[&words[..], &["--iface", &file, "--no-up"], more].concat());
    let written = PathBuf::from(&file).exists();
    (output, written)
}

#[test]
fn join_refuses_networks_in_use() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let host = site.host();
        // A connected network inside of the mesh's, a route around it, and both over IPv6.
        let networks = networks_of_the_mesh(site);
        for (network, route) in networks.iter().zip(["100.64.0.0/10", "fd00::/8"]) {
            let via = |words: &[&str]| {
                let output = host.run_program("ip", &[&["route"], words].concat());
                assert!(output.status.success(), "{}", stderr(&output));
            };
            via(&["add", route, "dev", "eth0"]);
            let (output, written) = try_join(site, &host, "host", &[]);
            let said = stderr(&output);
            assert!(!output.status.success() && !written, "{said}");
            assert!(said.contains(&format!("{route} on eth0")), "{said}");
            assert!(said.contains(&format!("--network {network}")), "{said}");
            assert!(site.members().is_empty(), "{:?}", site.members());
            via(&["del", route, "dev", "eth0"]);
        }
        let own = "100.80.3.1/24".parse().expect("an address");
        host.netlink.add_address(host.nic, own).expect("an address");
        let (output, written) = try_join(site, &host, "host", &[]);
        let said = stderr(&output);
        assert!(!written && said.contains("100.80.3.0/24 on eth0"), "{said}");
        let (output, written) = try_join(site, &host, "host", &["--network", &networks[0]]);
        assert!(written, "{}", stderr(&output));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            networks.iter().all(|network| said.contains(network)),
            "{said}"
        );
        // A default route, also in halves, does not count as overlap.
        let other = site.host();
        for net in ["0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1"] {
            let words = ["route", "add", net, "via", "192.0.2.1"];
            assert!(other.run_program("ip", &words).status.success(), "{net}");
        }
        let (output, written) = try_join(site, &other, "other", &[]);
        assert!(written, "{}", stderr(&output));
    });
}

#[test]
fn an_interrupted_join_leaves_nothing_that_prevents_the_next() {
    at_a_site(|site| {
        let coordinator = site.coordinator();
        let [token, pin] = site.token(&[]);
        drop(coordinator);
        // It accepts connections and does not answer.
        let silent = site.netns.run(|| TcpListener::bind("192.0.2.1:7443"));
        let silent = silent.expect("namespace").expect("a listener");
        let host = site.host();
        let file = host.file();
        let words = ["join", "https://192.0.2.1:7443", "--token", &token];
        let more = ["--pin", &pin, "--name", "host", "--iface", &file];
        let command = &mut host.command(&[&words[..], &more].concat());
        let mut join = host.start(command);
        let connection = silent.accept().expect("a connection");
        let entries = || fs::read_dir(&host.folder).expect("a folder").flatten();
        let of_file = |entry: &fs::DirEntry| {
            let name = entry.file_name();
            name.to_string_lossy().contains(host.interface.as_str())
        };
        assert_eq!(entries().filter(of_file).count(), 0);
        join.signal("KILL");
        join.wait(PATIENCE);
        drop((silent, connection));
        let _coordinator = site.coordinator();
        let output = host.try_join("host", [&token, &pin]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(entries().filter(of_file).count(), 1);
    });
}

#[test]
fn a_join_that_cannot_write_its_file_leaves_the_mesh() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let [token, pin] = site.token(&[]);
        let host = site.host();
        let small = host.folder.join("small");
        let small = small.to_str().expect("UTF-8");
        let file = format!("{small}/{}.toml", host.interface);
        let script = "mkdir $0 && mount -t tmpfs -o size=16k none $0 && \
             { cat /dev/zero > $0/fill 2>/dev/null; true; } && \"$@\"; ls -A $0";
        let words = ["-c", script, small, env!("CARGO_BIN_EXE_seikan"), "join"];
        let more = ["https://192.0.2.1:7443", "--token", &token, "--pin", &pin];
        let last = ["--name", "host", "--iface", &file, "--no-up"];
        let output = host.run_program("sh", &[&words[..], &more, &last].concat());
        let said = stderr(&output);
        assert!(said.contains("No space left on device"), "{said}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "fill\n", "{said}");
        assert!(site.members().is_empty(), "{:?}", site.members());
    });
}

/// Returns the default networks of a mesh: those of the first member's addresses.
fn networks_of_the_mesh(site: &Site) -> Vec<String> {
    let first = site.host();
    let (output, written) = try_join(site, &first, "first", &[]);
    assert!(written, "{}", stderr(&output));
    let text = fs::read_to_string(first.file()).expect("a configuration");
    let line = text.lines().find_map(|l| l.strip_prefix("address = "));
    let nets: Vec<ipnet::IpNet> = serde_json::from_str(line.expect(&text)).expect("a list");
    site.administer(&["revoke", "first"]);
    nets.iter().map(|net| net.trunc().to_string()).collect()
}
