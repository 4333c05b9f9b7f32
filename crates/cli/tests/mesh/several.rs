//! Several coordinators over etcd: with some of them stopped, and with all stopped.

use crate::common::{Tunnel, eventually, passable_folder, skip};
use crate::mesh::site::{SOON, Site, at_a_site, while_answering};
use seikan_lab::etcd::Cluster;
use seikan_mesh::client::{Client, wait_for};
use seikan_mesh::web_proxy::WebProxies;
use seikan_proto::mesh::{Cursor, Reason};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

fn with_etcd(test: impl FnOnce(&Site, &mut Cluster)) {
    at_a_site(|site| {
        if !Cluster::is_possible() {
            return skip("no etcd (Debian: etcd-server)");
        }
        let mut cluster = Cluster::start(Some(&site.netns)).expect("a cluster");
        test(site, &mut cluster);
    });
}

/// Echo requests without an answer, from the summary of ping: `120 packets transmitted, 119 received, ...`.
fn unanswered(summary: &str) -> u32 {
    let line = summary
        .lines()
        .find(|line| line.contains(" packets transmitted"));
    let mut counts = line
        .expect("a summary")
        .split_whitespace()
        .filter_map(|word| word.parse::<u32>().ok());
    let (sent, received) = (
        counts.next().expect("sent"),
        counts.next().expect("received"),
    );
    sent - received
}

#[test]
fn members_do_not_notice_that_a_coordinator_and_a_member_of_etcd_are_killed() {
    with_etcd(|site, cluster| {
        let urls = cluster.endpoints().join(",");
        let first = site.shared_coordinator(1, &urls);
        let second = site.shared_coordinator(2, &urls);
        let token = site.token(&["--reusable"]);
        let [a, b, c] = [site.host(), site.host(), site.host()];
        let at_a = a.join("a", &token);
        let at_b = b.join("b", &token);
        c.join("c", &token);
        let _running = [a.up(), b.up(), c.up()];
        while_answering(&[&a, &b], || {
            assert!(a.reaches(at_b[0], SOON) && b.reaches(at_a[0], SOON));
            assert_eq!(a.status()["mesh"]["coordinator"], "https://192.0.2.1:7443");
            eventually("both coordinators are known", || {
                let kept = a
                    .folder
                    .join("state")
                    .join(format!("{}/members.json", a.interface));
                fs::read_to_string(kept).is_ok_and(|text| text.contains("192.0.2.2:7443"))
            });
            eventually("it is known where each asks", || {
                let members = site.members();
                members
                    .iter()
                    .all(|member| member["at"] == "192.0.2.1:7443")
            });

            let mut ping = Command::new("ping");
            ping.args(["-i", "0.05", "-c", "120", "-W", "1", &at_b[0].to_string()])
                .stdout(Stdio::piped());
            let ping = a.netns.spawn_command(&mut ping).expect("start");
            first.signal("KILL");
            cluster.kill(cluster.leader().expect("a leader"));
            site.administer(&["revoke", "c"]);
            let mut waited = Duration::ZERO;
            while a.peers() != ["b"] {
                assert!(waited < Duration::from_secs(5), "{:?}", a.status()["mesh"]);
                std::thread::sleep(Duration::from_millis(50));
                waited += Duration::from_millis(50);
            }
            let mesh = &a.status()["mesh"];
            assert_eq!(mesh["contact"], "connected");
            assert_eq!(mesh["coordinator"], "https://192.0.2.2:7443");
            let pinged = ping.wait_with_output().expect("an end");
            let said = String::from_utf8_lossy(&pinged.stdout);
            assert_eq!(unanswered(&said), 0, "{said}");

            second.signal("KILL");
            (0..3).for_each(|member| cluster.kill(member));
            eventually("the loss is reported", || {
                !a.status()["mesh"]["contact"]["lost"].is_null()
            });
            assert!(a.reaches(at_b[0], SOON) && b.reaches(at_a[0], SOON));
            assert_eq!(a.peers(), ["b"]);
        });
    });
}

#[test]
fn a_mesh_moves_from_one_coordinator_to_several_and_its_members_stay_up() {
    with_etcd(|site, cluster| {
        let urls = cluster.endpoints().join(",");
        let alone = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b, c, d] = [site.host(), site.host(), site.host(), site.host()];
        let at_a = a.join("a", &token);
        let at_b = b.join("b", &token);
        c.join("c", &token);
        let _running = [a.up(), b.up(), c.up()];
        while_answering(&[&a, &b], || {
            assert!(a.reaches(at_b[0], SOON) && b.reaches(at_a[0], SOON));
            eventually("they know each other", || a.peers() == ["b", "c"]);
            let mut ping = Command::new("ping");
            ping.args(["-i", "0.05", "-W", "1", &at_b[0].to_string()])
                .stdout(Stdio::piped());
            let ping = a.netns.spawn_command(&mut ping).expect("start");

            let snapshot = site.folder().join("snapshot").display().to_string();
            let mut import = Command::new(env!("CARGO_BIN_EXE_seikan"));
            import
                .args([
                    "coordinator",
                    "import",
                    "/dev/null",
                    "--etcd",
                    &urls,
                    "--dir",
                ])
                .arg(site.store())
                .stderr(Stdio::piped());
            let refused = site.netns.spawn_command(&mut import).expect("start");
            let refused = refused.wait_with_output().expect("an end");
            let said = String::from_utf8_lossy(&refused.stderr);
            assert!(
                !refused.status.success() && said.contains("in use"),
                "{said}"
            );

            alone.signal("KILL");
            site.administer(&["export", &snapshot]);
            let database = Path::new(&site.store()).join("mesh.db");
            fs::rename(&database, database.with_extension("former")).expect("renamed");
            let etcd = ["--etcd", &urls, "--advertise", "192.0.2.1:7443"];
            site.administer(&[&["import", &snapshot][..], &etcd].concat());
            // The second coordinator copies the certificate from here.
            let folder = site.folder().join("coordinator1");
            fs::rename(site.store(), &folder).expect("renamed");
            std::os::unix::fs::symlink(&folder, site.store()).expect("a link");
            let first = site.coordinator();
            let second = site.shared_coordinator(2, &urls);
            eventually("both members are there again", || {
                [&a, &b].iter().all(|host| {
                    let mesh = &host.status()["mesh"];
                    mesh["contact"] == "connected"
                })
            });
            eventually("both coordinators are known, and no verb", || {
                let kept = format!("{}/members.json", a.interface);
                let kept = fs::read_to_string(a.folder.join("state").join(kept));
                kept.is_ok_and(|text| {
                    text.matches("192.0.2.1:7443").count() == 1
                        && text.matches("192.0.2.2:7443").count() == 1
                })
            });
            site.administer(&["revoke", "c"]);
            eventually("a change is reported", || a.peers() == ["b"]);
            // The token is from before the import.
            let at_d = d.join("d", &token);
            eventually("the new member is announced", || a.peers() == ["b", "d"]);
            let known = [&at_a, &at_b].map(|addresses| addresses[0]);
            assert!(!known.contains(&at_d[0]), "an address is given once");
            assert!(site.administer(&["audit"]).contains("imported"));

            first.signal("KILL");
            assert!(a.reaches(at_b[0], SOON) && b.reaches(at_a[0], SOON));
            assert_eq!(site.members().len(), 3);
            let pid = ping.id().to_string();
            let status = Command::new("kill").args(["-INT", &pid]).status();
            assert!(status.expect("kill").success());
            let pinged = ping.wait_with_output().expect("an end");
            let said = String::from_utf8_lossy(&pinged.stdout);
            // The last answer may still be on its way when ping is interrupted.
            assert!(unanswered(&said) <= 1, "{said}");

            // The mesh returns to one coordinator without etcd, at the address of the first.
            let back = site.folder().join("coordinator3");
            fs::create_dir(&back).expect("a folder");
            fs::remove_file(&snapshot).expect("removed");
            site.administer(&["export", &snapshot]);
            fs::copy(folder.join("tls.pem"), back.join("tls.pem")).expect("copied");
            second.signal("KILL");
            (0..3).for_each(|member| cluster.kill(member));
            fs::remove_file(site.store()).expect("a link");
            std::os::unix::fs::symlink(&back, site.store()).expect("a link");
            site.administer(&["import", &snapshot]);
            let _alone = site.coordinator();
            site.administer(&["revoke", "d"]);
            eventually("a change is reported again", || a.peers() == ["b"]);
            assert!(a.reaches(at_b[0], SOON) && b.reaches(at_a[0], SOON));
        });
    });
}

#[test]
fn members_continue_after_etcd_is_restored_and_those_not_in_the_backup_are_revoked() {
    with_etcd(|site, cluster| {
        let urls = cluster.endpoints().join(",");
        let _coordinators = [
            site.shared_coordinator(1, &urls),
            site.shared_coordinator(2, &urls),
        ];
        let token = site.token(&["--reusable"]);
        let [a, b, c, d] = [site.host(), site.host(), site.host(), site.host()];
        let at_a = a.join("a", &token);
        let at_b = b.join("b", &token);
        let backup = site.folder().join("backup");
        cluster.snapshot(&backup).expect("saved");
        let at_c = c.join("c", &token);
        let _running = [a.up(), b.up(), c.up()];
        while_answering(&[&a, &b, &c], || {
            assert!(a.reaches(at_b[0], SOON) && a.reaches(at_c[0], SOON));
            cluster.restore(&backup, true).expect("restored");
            eventually("the member outside of the backup is removed", || {
                a.peers() == ["b"] && b.peers() == ["a"]
            });
            assert!(a.reaches(at_b[0], SOON) && b.reaches(at_a[0], SOON));
            eventually("it is revoked", || {
                c.status()["mesh"]["contact"] == "revoked"
            });
            let at_d = d.join("d", &token);
            assert_ne!(at_d, at_c, "somebody still has that address");
            eventually("changes are reported", || a.peers() == ["b", "d"]);
            assert!(site.administer(&["audit"]).contains("etcd restored"));
        });
    });
}

#[test]
fn call_me_maybe_reaches_a_member_at_another_coordinator() {
    with_etcd(|site, cluster| {
        let urls = cluster.endpoints().join(",");
        let _coordinators = [
            site.shared_coordinator(1, &urls),
            site.shared_coordinator(2, &urls),
        ];
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        let at_b = b.join("b", &token);
        // The members use different coordinators.
        let text = fs::read_to_string(b.file()).expect("a configuration");
        fs::write(b.file(), text.replace("192.0.2.1:7443", "192.0.2.2:7443")).expect("written");
        let _running = [a.up(), b.up()];
        eventually("each asks its own", || {
            let at = |name: &str| {
                site.members().iter().any(|m| {
                    m["name"] == name
                        && m["at"] == format!("192.0.2.{}:7443", if name == "a" { 1 } else { 2 })
                })
            };
            at("a") && at("b")
        });
        while_answering(&[&b], || assert!(a.reaches(at_b[0], SOON)));
    });
}

#[test]
fn a_coordinator_with_another_certificate_is_refused() {
    with_etcd(|site, cluster| {
        let urls = cluster.endpoints().join(",");
        let _first = site.shared_coordinator(1, &urls);
        let folder = site.folder().join("stranger");
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command
            .args([
                "coordinator",
                "--listen",
                "192.0.2.1:7444",
                "--etcd",
                &urls,
                "--dir",
            ])
            .arg(folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let output = site.netns.spawn_command(&mut command).expect("start");
        let output = output.wait_with_output().expect("an end");
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("copy tls.pem"), "{said}");
    });
}

#[test]
fn another_coordinator_has_to_show_the_same_certificate() {
    let folder = passable_folder();
    // Each has its own mesh and its own certificate.
    let start = |name: &str| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_seikan"))
            .args(["coordinator", "--listen", "127.0.0.1:0", "--dir"])
            .arg(folder.path().join(name))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("read");
        let after = |word: &str| {
            let mut words = line.split([' ', ',', '\n']);
            words.find(|w| *w == word);
            words.find(|w| !w.is_empty()).expect("a word").to_owned()
        };
        (Tunnel { child, stdout }, after("on"), after("pin"))
    };
    let (_one, one, pin) = start("one");
    let (_two, two, _) = start("two");
    let url = format!("https://{one}").parse().expect("a URL");
    let pin = pin.parse().expect("a pin");
    let client = Client::new(&url, Some(pin), None, WebProxies::default()).expect("a client");
    let ask =
        || wait_for(client.changes(Cursor::default(), Duration::ZERO)).expect_err("no member");
    // The request has no credential: the coordinator refuses it.
    assert_eq!(ask().reason(), Some(Reason::NotAMember));
    client.set_others(&[two.parse().expect("an address")]);
    client.use_next();
    let error = ask().to_string();
    assert!(
        error.contains(&two) && error.contains("not the pinned one"),
        "{error}"
    );
    client.use_next();
    assert_eq!(ask().reason(), Some(Reason::NotAMember));
}

#[test]
fn a_coordinator_does_not_replace_a_mesh_that_etcd_has_lost() {
    if !Cluster::is_possible() {
        return skip("no etcd (Debian: etcd-server)");
    }
    let cluster = Cluster::start(None).expect("a cluster");
    let urls = cluster.endpoints().join(",");
    let folder = passable_folder();
    let start = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command
            .args(["coordinator", "--listen", "127.0.0.1:0", "--etcd", &urls])
            .args(more)
            .arg("--dir")
            .arg(folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("start");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("read");
        (Tunnel { child, stdout }, line)
    };
    let ctl = |words: &[&str]| {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &urls]);
        let output = command.args(words).output().expect("start");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let (first, line) = start(&["--etcd-prefix", "/our/mesh"]);
    let mesh = |line: &str| line.split(" listens").next().map(str::to_owned);
    assert!(line.contains("listens"), "{line}: {:?}", first.ended());
    first.signal("KILL");
    // The etcd options are stored.
    let (second, again) = start(&[]);
    assert_eq!(mesh(&again), mesh(&line));
    second.signal("KILL");
    assert_eq!(ctl(&["get", "--prefix", "/seikan", "--keys-only"]), "");

    let number = ctl(&["get", "--print-value-only", "/our/mesh/state/mesh"]);
    ctl(&["del", "--prefix", "/our"]);
    let (third, line) = start(&[]);
    let (code, said) = third.ended();
    assert_ne!(code, Some(0), "{line}");
    assert!(
        said.contains("no mesh") && said.contains(number.trim()) && said.contains("backup"),
        "{said}"
    );
    assert_eq!(ctl(&["get", "--prefix", "/our", "--keys-only"]), "");
}
