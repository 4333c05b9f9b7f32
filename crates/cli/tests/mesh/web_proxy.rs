//! A member whose network has no way out but a web proxy: tinyproxy.
//!
//! ```text
//! hub.test 192.0.2.1 --- switch --- 192.0.2.10 tinyproxy 10.0.0.1 --- 10.0.0.10 member
//! ```

use crate::common::{Tunnel, eventually, skip, stderr};
use crate::mesh::site::{Host, SOON, Site, at_a_site, while_answering};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, Write};
use std::net::{IpAddr, TcpStream};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// Address of the proxy in the member's network.
const PROXY: &str = "10.0.0.1:3128";
/// URL of the coordinator: a name that only the proxy can resolve.
const COORDINATOR: &str = "https://hub.test:7443";
/// Address of the relay.
const RELAY: &str = "192.0.2.1:3478";
const PASSWORD: &str = "Sesame7";
/// printf %s office:Sesame7 | base64
const CREDENTIALS: &str = "b2ZmaWNlOlNlc2FtZTc=";

/// The member's network.
struct Office {
    member: Host,
    proxy: Host,
    _tinyproxy: Tunnel,
}

impl Office {
    /// Starts a proxy that connects to these ports for a user with a password.
    fn open(site: &Site, ports: &[u16]) -> Office {
        let proxy = site.host();
        let lan = proxy.netlink.create_bridge("lan").expect("a bridge");
        let address = "10.0.0.1/24".parse().expect("an address");
        proxy.netlink.add_address(lan, address).expect("an address");
        proxy.netlink.set_up(lan).expect("up");
        // Nobody routes, so the member reaches nothing else.
        let member = site.host_at((&proxy.netlink, lan), "10.0.0.10/24");
        let hosts = "127.0.0.1 localhost\n192.0.2.1 hub.test\n";
        fs::write(proxy.folder.join("hosts"), hosts).expect("a file");
        fs::write(member.folder.join("hosts"), "127.0.0.1 localhost\n").expect("a file");
        let mut lines = format!(
            "Listen 10.0.0.1\nPort 3128\nTimeout 600\nMaxClients 20\nAllow 10.0.0.0/24\n\
             BasicAuth office {PASSWORD}\nLogLevel Connect\nLogFile \"{}\"\n",
            proxy.folder.join("log").display()
        );
        for port in ports {
            lines.push_str(&format!("ConnectPort {port}\n"));
        }
        let file = proxy.folder.join("tinyproxy.conf");
        fs::write(&file, lines).expect("a file");
        let file = file.to_str().expect("UTF-8");
        let tinyproxy = proxy.start(&mut proxy.program("tinyproxy", &["-d", "-c", file]));
        eventually("the proxy listens", || {
            let connected = proxy.netns.run(|| TcpStream::connect(PROXY));
            connected.expect("namespace").is_ok()
        });
        Office {
            member,
            proxy,
            _tinyproxy: tinyproxy,
        }
    }

    /// Returns a command on the member, with this user and password for the proxy.
    fn command(&self, credentials: &str, words: &[&str]) -> Command {
        let mut command = self.member.command(words);
        command.env("HTTPS_PROXY", format!("http://{credentials}{PROXY}"));
        command
    }

    fn join(&self, credentials: &str, [token, pin]: &[String; 2]) -> Output {
        let file = self.member.file();
        let words = ["join", COORDINATOR, "--token", token, "--pin", pin];
        let words = [
            &words[..],
            &["--name", "office", "--iface", &file, "--no-up"],
        ]
        .concat();
        let mut command = self.command(credentials, &words);
        let child = self.member.netns.spawn_command(&mut command);
        child.expect("start").wait_with_output().expect("an end")
    }

    /// Starts the tunnel, with its log in [`Self::log`].
    fn up(&self) -> Tunnel {
        let file = self.member.file();
        let credentials = format!("office:{PASSWORD}@");
        let mut command = self.command(&credentials, &["up", "--log", "trace", &file]);
        let log = File::create(self.member.folder.join("log")).expect("a file");
        let mut tunnel = self.member.start(command.stderr(Stdio::from(log)));
        let mut line = String::new();
        tunnel.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("is up"), "{line}: {}", self.log());
        tunnel
    }

    fn log(&self) -> String {
        fs::read_to_string(self.member.folder.join("log")).expect("a log")
    }

    /// Returns the connections that the proxy has logged.
    fn connections(&self) -> Vec<String> {
        let log = fs::read_to_string(self.proxy.folder.join("log")).expect("a log");
        // The level of a line is `CONNECT` as well.
        let hosts = log.lines().filter_map(|line| {
            let (_, request) = line.split_once(": CONNECT ")?;
            request.split(' ').next()
        });
        hosts.map(str::to_owned).collect()
    }
}

/// Runs a test at a site with a coordinator, a relay, and an office whose proxy connects to these ports.
fn at_an_office(ports: &[u16], test: impl FnOnce(&Site, &Office)) {
    if Command::new("tinyproxy").arg("-v").output().is_err() {
        return skip("no tinyproxy (Debian: tinyproxy-bin)");
    }
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay_by_tls(None);
        test(site, &Office::open(site, ports));
    });
}

/// Returns another member, which is up, with its address, and the output of `join` at the office.
fn both_joined(site: &Site, office: &Office) -> (Host, Tunnel, IpAddr, Output) {
    let token = site.token(&["--reusable"]);
    let other = site.host();
    let address = other.join("other", &token)[0];
    let running = other.up();
    let joined = office.join(&format!("office:{PASSWORD}@"), &token);
    assert!(joined.status.success(), "{}", stderr(&joined));
    (other, running, address, joined)
}

#[test]
fn a_member_behind_a_web_proxy_reaches_others_over_tls_to_a_relay() {
    at_an_office(&[443, 7443], |site, office| {
        let (other, _other, address, joined) = both_joined(site, office);
        let said = String::from_utf8(joined.stdout).expect("UTF-8");
        let unit = format!(
            "joined through web proxy {PROXY}: write its variable to /etc/seikan/environment"
        );
        assert!(said.contains(&unit), "{said}");
        let running = office.up();
        let member = &office.member;
        eventually("it knows the other", || member.peers() == ["other"]);
        while_answering(&[&other], || {
            assert!(member.reaches(address, SOON), "{}", member.status());
        });
        let status = member.status();
        assert_eq!(
            status["peers"][0]["path"]["tls"]["relay"], RELAY,
            "{status}"
        );
        let through = serde_json::json!({ "address": PROXY, "servers": [COORDINATOR, RELAY] });
        assert_eq!(status["mesh"]["web_proxy"], through);
        let connections = office.connections();
        for server in ["hub.test:7443", "192.0.2.1:443"] {
            let connected = connections.iter().any(|other| other == server);
            assert!(connected, "{server}: {connections:?}");
        }

        let texts = [
            &["netcheck", &member.interface][..],
            &["status", &member.interface],
        ];
        let [netcheck, shown] = texts.map(|words| {
            let output = member.run(words);
            String::from_utf8(output.stdout).expect("UTF-8")
        });
        assert!(
            netcheck.contains(&format!("web proxy: {PROXY}, to {COORDINATOR}")),
            "{netcheck}"
        );
        drop(running);
        let log = office.log();
        assert!(log.contains("coordinator answers"), "{log}");
        for text in [said, netcheck, shown, status.to_string(), log] {
            assert!(
                !text.contains(PASSWORD) && !text.contains(CREDENTIALS),
                "{text}"
            );
        }
    });
}

#[test]
fn a_host_without_its_web_proxy_does_not_join() {
    at_an_office(&[443, 7443], |site, office| {
        let token = site.token(&[]);
        let cases = [
            ("", "requires a user name and a password"),
            ("office:wrong@", "rejects the user name or password"),
            ("office:a#b@", "special characters"),
        ];
        for (credentials, reason) in cases {
            let output = office.join(credentials, &token);
            let errors = stderr(&output);
            assert!(
                !output.status.success() && errors.contains(reason),
                "{errors}"
            );
            assert!(!errors.contains("--host"), "{errors}");
        }
        let mut direct = office.command("", &["join", "https://192.0.2.1:7443"]);
        let file = office.member.file();
        let [token, pin] = &token;
        direct.args([
            "--token", token, "--pin", pin, "--name", "x", "--iface", &file, "--no-up",
        ]);
        direct.env("NO_PROXY", "192.0.2.0/24");
        let child = office
            .member
            .netns
            .spawn_command(&mut direct)
            .expect("start");
        let errors = stderr(&child.wait_with_output().expect("an end"));
        assert!(
            errors.contains("unreachable") && errors.contains("--host"),
            "{errors}"
        );
        assert_eq!(site.members().len(), 0);
    });
}

#[test]
fn an_unusable_web_proxy_ends_up_before_any_hook() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let member = site.host();
        member.join("typo", &site.token(&[]));
        let hooked = member.folder.join("hooked");
        let hook = format!("pre-up = [\"touch {}\"]\n", hooked.display());
        let mut file = OpenOptions::new().append(true).open(member.file());
        let file = file.as_mut().expect("a configuration");
        file.write_all(hook.as_bytes()).expect("written");
        let up = |proxy: &str| {
            let mut command = member.command(&["up", &member.file()]);
            command.env("HTTPS_PROXY", proxy);
            command
        };
        let mut unusable = up("http://office:a#b@10.0.0.1:3128");
        let child = member.netns.spawn_command(&mut unusable).expect("start");
        let output = child.wait_with_output().expect("an end");
        let errors = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(
            errors.contains("cannot use the web proxy in HTTPS_PROXY"),
            "{errors}"
        );
        assert!(!hooked.exists(), "the hook has run: {errors}");
        // The same hook runs if the variable names a proxy.
        let _running = member.start(&mut up("http://10.0.0.1:3128"));
        eventually("the hook runs", || hooked.exists());
    });
}

#[test]
fn a_relay_that_the_web_proxy_refuses_is_reported_with_the_reason() {
    at_an_office(&[7443], |site, office| {
        let (_other, _running, address, _) = both_joined(site, office);
        let _running = office.up();
        let reason = format!("by TLS: web proxy {PROXY} refuses connections to 192.0.2.1:443");
        eventually("it says why", || {
            assert!(!office.member.reaches(address, Duration::from_millis(200)));
            let relay = office.member.status()["mesh"]["relays"][RELAY].clone();
            relay["refuses"]
                .as_str()
                .is_some_and(|text| text.contains(&reason))
        });
    });
}
