//! A member of a mesh without root.

use crate::common::{eventually, stderr};
use crate::mesh::site::{Host, Site, at_a_site};
use crate::userspace::client::{Echo, Target, assert_echo, connect, socks};
use crate::userspace::user::{NOBODY, User};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

const PROXY: &str = "127.0.0.1:1080";

/// Joins the mesh as `laptop` with these options, which starts the tunnel in the background.
/// Returns the file.
fn join(user: &User, host: &Host, site: &Site, words: &[&str]) -> PathBuf {
    let [token, pin] = site.token(&["--tag", "laptops"]);
    let file = user.home().join(format!("{}.toml", host.interface));
    let path = file.to_str().expect("UTF-8");
    let url = "https://192.0.2.1:7443";
    let join = [
        "join", url, "--token", &token, "--pin", &pin, "--name", "laptop",
    ];
    let own = ["--iface", path, "--userspace"];
    let said = user.succeed(&host.netns, &[&join[..], &own, words].concat());
    assert!(said.contains("is up"), "{said}");
    file
}

/// The first IPv4 address.
fn ipv4(addresses: &[IpAddr]) -> IpAddr {
    *addresses.iter().find(|ip| ip.is_ipv4()).expect("IPv4")
}

#[test]
fn it_finds_members_by_name_and_leaves_without_a_trace() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let [a, laptop] = [site.host(), site.host()];
        let at_a = a.join("a", &site.token(&["--tag", "laptops"]));
        let _a = a.up();
        let user = User::new(NOBODY);
        let file = join(&user, &laptop, site, &["--socks", "1080"]);
        let server = SocketAddr::new(ipv4(&at_a), 7000);
        let _server = Echo::at(&a.netns, &server.to_string());
        let proxy = PROXY.parse().expect("an address");
        for name in ["a", "A.seikan"] {
            let target = Target::Name(name, 7000);
            let mut found = None;
            eventually("the member answers", || {
                found = socks(&laptop.netns, proxy, &target).ok();
                found.is_some()
            });
            assert_echo(found.expect("connected"));
        }
        let unknown = socks(&laptop.netns, proxy, &Target::Name("b.seikan", 7000));
        assert!(unknown.is_err());
        let status = user.status(&laptop.netns, &laptop.interface);
        let state = user
            .home()
            .join(".local/state/seikan")
            .join(&laptop.interface);
        assert!(state.is_dir(), "{state:?}");
        assert_eq!(status["mesh"]["contact"], "connected", "{status:#}");
        let path = file.to_str().expect("UTF-8");
        let output = user.run(&laptop.netns, &["leave", path]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(!file.exists() && !state.exists());
        assert_eq!(site.members().len(), 1);
    });
}

#[test]
fn leaving_while_it_is_down_leaves_no_trace() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let laptop = site.host();
        let user = User::new(NOBODY);
        let file = join(&user, &laptop, site, &["--socks", "1080"]);
        let state = user.home().join(".local/state/seikan");
        let state = state.join(&laptop.interface);
        for words in [
            ["down", &laptop.interface],
            ["leave", file.to_str().expect("UTF-8")],
        ] {
            assert!(state.is_dir(), "{words:?}: {state:?}");
            let output = user.run(&laptop.netns, &words);
            assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        }
        assert!(!state.exists(), "{state:?}");
    });
}

#[test]
fn the_policy_of_the_mesh_holds_for_exposed_ports() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let [a, laptop] = [site.host(), site.host()];
        a.join("a", &site.token(&["--tag", "ops"]));
        let _a = a.up();
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "allow tag:ops -> tag:laptops tcp/8001\n").expect("written");
        let policy = file.path().to_str().expect("UTF-8");
        site.administer(&["policy", "set", policy]);
        let user = User::new(NOBODY);
        join(
            &user,
            &laptop,
            site,
            &["--expose", "8001:7000", "--expose", "8002:7000"],
        );
        let _server = Echo::at(&laptop.netns, "127.0.0.1:7000");
        let peers = || user.status(&laptop.netns, &laptop.interface)["peers"].clone();
        eventually("it knows a", || {
            peers().as_array().is_some_and(|peers| peers.len() == 1)
        });
        let members = site.members();
        let own = members.iter().find(|member| member["name"] == "laptop");
        let own = own.and_then(|member| member["addresses"].as_array());
        let own: Vec<IpAddr> = own
            .expect("addresses")
            .iter()
            .map(|ip| ip.as_str().expect("text").parse().expect("an address"))
            .collect();
        let mut stream = None;
        eventually("the open port answers", || {
            stream = connect(&a.netns, SocketAddr::new(ipv4(&own), 8001)).ok();
            stream.is_some()
        });
        assert_echo(stream.expect("connected"));
        let closed = SocketAddr::new(ipv4(&own), 8002);
        let pause = std::time::Duration::from_millis(500);
        let denied = a
            .netns
            .run(|| std::net::TcpStream::connect_timeout(&closed, pause));
        assert!(denied.expect("namespace").is_err());
        let drops = &peers()[0]["traffic"]["inbound"]["drops"];
        assert!(drops["policy_denied"].as_u64() > Some(0), "{drops}");
        user.succeed(&laptop.netns, &["down", &laptop.interface]);
    });
}
