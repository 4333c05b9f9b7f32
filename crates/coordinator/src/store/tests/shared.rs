//! Several stores on one cluster of etcd, and what becomes of them when it is not well.

use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use seikan_lab::etcd::Cluster;

use super::super::etcd::testing::{compact, put, take_away};
use super::ways::{Fate, Way, cut, set};
use super::*;

thread_local! {
    /// Whether this thread's test is one on etcd.
    static ON_ETCD: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test with meshes on etcd.
pub fn on_etcd(test: fn()) {
    if is_possible() {
        ON_ETCD.set(true);
        test();
    }
}

fn is_possible() -> bool {
    if Cluster::is_possible() {
        return true;
    }
    let all = std::env::var_os("SEIKAN_REQUIRE_ALL").is_some();
    assert!(!all, "there is no etcd: make deps");
    eprintln!("skipped: there is no etcd (Debian: etcd-server)");
    false
}

/// A place on the cluster of all tests where nothing is yet, if this test is one on etcd.
pub fn prefix() -> Option<Etcd> {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    ON_ETCD.get().then(|| {
        let cluster = CLUSTER.get_or_init(|| Cluster::start(None).expect("a cluster"));
        settings(cluster)
    })
}

pub fn settings(cluster: &Cluster) -> Etcd {
    static MESHES: AtomicU32 = AtomicU32::new(0);
    Etcd {
        endpoints: cluster.endpoints(),
        prefix: format!("/test/{}", MESHES.fetch_add(1, Ordering::Relaxed)),
        ca: None,
        identity: None,
        user: None,
        mesh: None,
        advertise: None,
    }
}

/// Runs a test with a cluster of its own.
pub fn with_cluster(test: impl FnOnce(&mut Cluster)) {
    if is_possible() {
        test(&mut Cluster::start(None).expect("a cluster"));
    }
}

/// A mesh with a token that admits whoever comes.
pub fn mesh_at(settings: &Etcd) -> Store {
    let store = Store::open_etcd(settings).expect("opened");
    let networks = networks("100.80.0.0/12");
    store.init(networks, &operator(), NOW).expect("set");
    let made = store.create_token(&token(1).digest(), &NewToken::default(), &operator(), NOW);
    made.expect("a token");
    store
}

pub fn names(store: &Store) -> Vec<String> {
    let members = store.members().expect("members");
    members.iter().map(|m| m.member.name.to_string()).collect()
}

/// What a member of the cluster says to a question by HTTP.
fn http(endpoint: &str, question: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(&endpoint["http://".len()..]).expect("connected");
    let length = body.len();
    write!(
        stream,
        "{question} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn what_one_store_changes_the_other_knows_without_asking() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let one = mesh_at(&settings);
        let other = Store::open_etcd(&settings).expect("opened");
        assert_eq!(one.epoch(), other.epoch());
        join(&one, 1, "a", 1).expect("joined");
        let until = Instant::now() + Duration::from_secs(2);
        while names(&other) != ["a"] {
            assert!(Instant::now() < until, "it does not hear of it");
            thread::sleep(Duration::from_millis(5));
        }
        // And who is new elsewhere is known at the first question, whatever has come of it by then.
        for n in 2..50 {
            let id = join(&other, 1, &format!("m{n}"), n).expect("joined").id;
            assert_eq!(one.authenticate(&shown(n)).expect("a member"), id);
        }
    });
}

#[test]
fn nothing_acknowledged_is_lost_when_the_leader_is_killed() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let stores = [
            mesh_at(&settings),
            Store::open_etcd(&settings).expect("opened"),
        ];
        let done = AtomicBool::new(false);
        let joined: Vec<String> = thread::scope(|scope| {
            let over = SetOnDrop(&done);
            let joining: Vec<_> = (0..4)
                .map(|thread| {
                    let (store, done) = (&stores[thread % 2], &done);
                    scope.spawn(move || {
                        let mut joined = Vec::new();
                        let mut n = 1000 * thread as u32;
                        while !done.load(Ordering::Relaxed) {
                            n += 1;
                            let name = format!("m{n}");
                            // As members do: what was not acknowledged is asked for again.
                            if join(store, 1, &name, n).is_ok() {
                                joined.push(name);
                            }
                        }
                        joined
                    })
                })
                .collect();
            thread::sleep(Duration::from_secs(1));
            let leader = cluster.leader().expect("a leader");
            cluster.kill(leader);
            let before = stores[0].revision().expect("asked");
            // Changes go on with the two that are left. They elect one of them within two seconds or four, or more on a busy machine.
            let killed = Instant::now();
            let until = killed + Duration::from_secs(60);
            while stores[0].revision().expect("asked") < before + 20 {
                assert!(
                    Instant::now() < until,
                    "no changes after the leader was killed"
                );
                thread::sleep(Duration::from_millis(20));
            }
            eprintln!(
                "changes go on {:?} after the leader was killed",
                killed.elapsed()
            );
            drop(over);
            joining
                .into_iter()
                .flat_map(|t| t.join().expect("no panic"))
                .collect()
        });
        drop(stores);
        let store = Store::open_etcd(&settings).expect("opened");
        let known = names(&store);
        let lost: Vec<&String> = joined.iter().filter(|name| !known.contains(name)).collect();
        assert!(lost.is_empty(), "{lost:?} of {}", joined.len());
        let members = store.members().expect("members");
        let numbers: std::collections::BTreeSet<u32> = members.iter().map(|m| m.number).collect();
        assert_eq!(numbers.len(), members.len(), "no number twice");
    });
}

#[test]
fn ids_and_revisions_go_on_after_everything_was_away() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        let a = join(&store, 1, "a", 1).expect("joined").id;
        assert!(store.remove(Whom::Id(a), &host(), NOW).expect("asked"));
        let epoch = store.epoch();
        drop(store);
        for member in 0..3 {
            cluster.kill(member);
        }
        let away = Store::open_etcd(&settings).expect_err("nobody answers");
        assert!(matches!(away, StoreError::Unavailable(_)), "{away}");
        cluster.revive().expect("a leader");
        let store = Store::open_etcd(&settings).expect("opened");
        assert_eq!(store.epoch(), epoch);
        assert_eq!(store.revision().expect("asked"), 2);
        let b = join(&store, 1, "b", 2).expect("joined");
        assert!(b.id > a, "an id is never given twice");
        assert_eq!(b.number, 2);
    });
}

#[test]
fn without_etcd_members_are_known_and_others_are_not_refused_for_good() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let one = mesh_at(&direct);
        let (ways, far) = Way::to_all(&direct);
        let other = Store::open_etcd(&far).expect("opened");
        let a = join(&other, 1, "a", 1).expect("joined").id;
        cut(&ways, true);
        join(&one, 1, "b", 2).expect("joined");
        assert_eq!(other.authenticate(&shown(1)).expect("known"), a);
        for who in [2, 3] {
            let error = other.authenticate(&shown(who)).expect_err("not known here");
            assert!(
                matches!(error, StoreError::Unavailable(_)),
                "{who}: {error}"
            );
        }
        let begun = Instant::now();
        let error = join(&other, 1, "c", 3).expect_err("nobody to ask");
        // It was never sent, so it is certain that it is not done.
        assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(10));
        cut(&ways, false);
        let until = Instant::now() + Duration::from_secs(10);
        while other.authenticate(&shown(2)).is_err() {
            assert!(Instant::now() < until, "it does not come back");
            thread::sleep(Duration::from_millis(20));
        }
        let error = other.authenticate(&shown(4)).expect_err("nobody");
        assert!(matches!(error, StoreError::NotAMember), "{error}");
    });
}

/// How often somebody joined, as the log has it.
fn joins(store: &Store, name: &str) -> usize {
    let audit = store.audit(1000).expect("asked");
    let of_it = |entry: &&AuditEntry| entry.what == "joined" && entry.subject == name;
    audit.iter().filter(of_it).count()
}

#[test]
fn a_change_whose_answer_is_lost_is_done_once_and_known_to_be() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let one = mesh_at(&direct);
        let (ways, far) = Way::to_all(&direct);
        join(&one, 1, "a", 1).expect("joined");
        let other = Store::open_etcd(&far).expect("opened");
        other.catch_up().expect("caught up");
        set(&ways, Fate::Mute);
        thread::scope(|scope| {
            let removing = scope.spawn(|| other.remove(Whom::Name(&name("a")), &operator(), NOW));
            let until = Instant::now() + Duration::from_secs(2);
            while !names(&one).is_empty() {
                assert!(Instant::now() < until, "it was not sent");
                thread::sleep(Duration::from_millis(5));
            }
            // Somebody else goes on meanwhile.
            join(&one, 1, "b", 2).expect("joined");
            assert!(!removing.is_finished());
            set(&ways, Fate::Cut);
            set(&ways, Fate::Open);
            // Done by this change, and not found done: that would be `false`.
            let removed = removing.join().expect("no panic");
            assert!(removed.expect("it is done"));
        });
        other.catch_up().expect("caught up");
        assert_eq!(names(&other), ["b"]);
    });
}

#[test]
fn a_change_whose_answer_never_comes_is_not_said_to_have_failed() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let one = mesh_at(&direct);
        let (ways, far) = Way::to_all(&direct);
        let other = Store::open_etcd(&far).expect("opened");
        other.authenticate(&shown(9)).expect_err("nobody");
        set(&ways, Fate::Mute);
        let error = join(&other, 1, "a", 1).expect_err("no answer");
        assert!(matches!(error, StoreError::Unknown(_)), "{error}");
        assert_eq!(names(&one), ["a"]);
        // Nor is it done again when the way is there again.
        set(&ways, Fate::Cut);
        set(&ways, Fate::Open);
        let until = Instant::now() + Duration::from_secs(10);
        while names(&other) != ["a"] {
            assert!(Instant::now() < until, "it does not come back");
            thread::sleep(Duration::from_millis(20));
        }
        let again = join(&other, 1, "a", 1).expect("told what it was not told");
        assert!(again.again);
        assert_eq!(joins(&other, "a"), 1);
    });
}

#[test]
fn an_etcd_that_refuses_is_not_asked_all_the_time_and_goes_on_when_it_takes_again() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (ways, far) = Way::to_all(&direct);
        let far = Etcd {
            advertise: Some("one.example:7443".parse().expect("an address")),
            ..far
        };
        let store = mesh_at(&far);
        let a = join(&store, 1, "a", 1).expect("joined").id;
        let alarm = |action: u8| {
            // Each member has its own: one is enough to have all refuse, and all are let off.
            for endpoint in &direct.endpoints {
                let status = http(endpoint, "POST /v3/maintenance/status", "{}");
                let id = status.split("\"member_id\":\"").nth(1).expect("a member");
                let id = id.split('"').next().expect("a number");
                let body = format!(r#"{{"action":{action},"memberID":{id},"alarm":1}}"#);
                http(endpoint, "POST /v3/maintenance/alarm", &body);
            }
        };
        // No room is left.
        alarm(1);
        let begun = Instant::now();
        let error = join(&store, 1, "b", 2).expect_err("refused");
        assert!(
            matches!(&error, StoreError::Unavailable(why) if why.contains("space")),
            "{error}"
        );
        assert!(
            begun.elapsed() < Duration::from_secs(2),
            "it says so at once"
        );
        assert_eq!(store.authenticate(&shown(1)).expect("known"), a);
        // This is to be written, too.
        store.touch(a, NOW).expect("noted");
        let asked = || -> u64 { ways.iter().map(|w| w.asked.load(Ordering::Relaxed)).sum() };
        let before = asked();
        thread::sleep(Duration::from_secs(4));
        let bytes = asked() - before;
        assert!(bytes < 4_000, "{bytes} bytes");

        alarm(2);
        join(&store, 1, "b", 2).expect("joined");
        let until = Instant::now() + Duration::from_secs(10);
        while store.members().expect("members")[0].at.is_none() {
            assert!(Instant::now() < until, "it is not written any more");
            thread::sleep(Duration::from_millis(50));
        }
    });
}

#[test]
fn an_etcd_that_is_gone_is_tried_now_and_then() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (ways, far) = Way::to_all(&direct);
        let store = mesh_at(&far);
        (0..3).for_each(|member| cluster.kill(member));
        let asked = || -> u64 { ways.iter().map(|w| w.asked.load(Ordering::Relaxed)).sum() };
        let before = asked();
        thread::sleep(Duration::from_secs(4));
        // Three members in a round; pauses grow to two seconds.
        let tries = asked() - before;
        assert!((3..100).contains(&tries), "{tries} connections and bytes");
        cluster.revive().expect("a leader");
        let until = Instant::now() + Duration::from_secs(10);
        while join(&store, 1, "a", 1).is_err() {
            assert!(Instant::now() < until, "it does not come back");
        }
    });
}

#[test]
fn who_waits_to_be_refused_waits_together_with_others() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        drop(mesh_at(&direct));
        let (ways, far) = Way::to_all(&direct);
        let store = Store::open_etcd(&far).expect("opened");
        // What etcd was asked for, by its own count.
        let ranges = || -> f64 {
            let metrics = direct.endpoints.iter().map(|e| http(e, "GET /metrics", ""));
            let counts = metrics.map(|text| {
                let mut lines = text.lines();
                let line = lines.find_map(|l| l.strip_prefix("etcd_debugging_mvcc_range_total "));
                line.expect("a count").parse::<f64>().expect("a number")
            });
            counts.sum()
        };
        set(&ways, Fate::Slow);
        let before = ranges();
        thread::scope(|scope| {
            for n in 0..64 {
                let store = &store;
                scope.spawn(move || {
                    let error = store.authenticate(&shown(100 + n)).expect_err("nobody");
                    assert!(matches!(error, StoreError::NotAMember), "{error}");
                });
            }
        });
        // One that had begun before some of them asked, one for all others, and again for who was late to start.
        let asked = ranges() - before;
        assert!((1.0..=4.0).contains(&asked), "{asked}");
    });
}

#[test]
fn who_was_away_while_etcd_forgot_loads_again() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let one = mesh_at(&direct);
        let (ways, far) = Way::to_all(&direct);
        let other = Store::open_etcd(&far).expect("opened");
        join(&other, 1, "a", 1).expect("joined");
        cut(&ways, true);
        join(&one, 1, "b", 2).expect("joined");
        assert!(
            one.remove(Whom::Name(&name("a")), &operator(), NOW)
                .expect("asked")
        );
        compact(&direct);
        cut(&ways, false);
        let until = Instant::now() + Duration::from_secs(10);
        while names(&other) != ["b"] {
            assert!(Instant::now() < until, "{:?}", names(&other));
            thread::sleep(Duration::from_millis(20));
        }
        join(&other, 1, "c", 3).expect("joined");
        one.catch_up().expect("caught up");
        assert_eq!(names(&one), ["b", "c"]);
    });
}

#[test]
fn a_row_that_makes_no_sense_is_named_and_not_passed_over() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        join(&store, 1, "a", 1).expect("joined");
        let key = format!("{}/state/rows/member/7", settings.prefix);
        put(&settings, &key, r#"{"id": 7, "name": "odd"}"#);
        let until = Instant::now() + Duration::from_secs(2);
        let error = loop {
            match store.policy() {
                Err(error) => break error,
                Ok(_) => assert!(Instant::now() < until, "it is passed over"),
            }
            thread::sleep(Duration::from_millis(5));
        };
        assert!(error.to_string().contains("member/7"), "{error}");
        let error = Store::open_etcd(&settings).expect_err("no sense");
        assert!(
            matches!(&error, StoreError::CorruptRow { key } if key == "member/7"),
            "{error}"
        );
    });
}

#[test]
fn what_takes_the_place_of_a_mesh_has_another_epoch_and_nothing_does_not_take_it() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        let (epoch, version) = (store.epoch(), store.data_version().expect("asked"));
        let mesh = format!("{}/state/mesh", settings.prefix);
        let soon = |what: &str, is_so: &dyn Fn() -> bool| {
            let until = Instant::now() + Duration::from_secs(10);
            while !is_so() {
                assert!(Instant::now() < until, "{what}");
                thread::sleep(Duration::from_millis(5));
            }
        };
        put(&settings, &mesh, "7");
        soon("it does not hear of it", &|| store.epoch() != epoch);
        assert_ne!(store.data_version().expect("asked"), version);

        take_away(&settings, &mesh);
        soon("it is passed over", &|| store.networks().is_err());
        // It has loaded again then.
        thread::sleep(Duration::from_secs(6));
        let error = store.networks().expect_err("no mesh");
        assert!(error.to_string().contains("/mesh"), "{error}");
        put(&settings, &mesh, "7");
        soon("it stays away", &|| store.networks().is_ok());
    });
}

/// `cargo test -p seikan-coordinator --lib replica_cost -- --ignored --nocapture`: what docs/internals/mesh-figures.md has of large meshes.
#[test]
#[ignore = "figures, of a minute"]
fn replica_cost() {
    const MEMBERS: u32 = 100_000;
    let resident = || -> f64 {
        let statm = fs::read_to_string("/proc/self/statm").expect("statm");
        let pages = statm.split_whitespace().nth(1).and_then(|n| n.parse().ok());
        pages.unwrap_or(0.0) * 4096.0 / 1e6
    };
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        let begun = Instant::now();
        super::telling::crowd(&store, MEMBERS);
        println!(
            "{MEMBERS} rows written in {:.1} s",
            begun.elapsed().as_secs_f64()
        );
        drop(store);
        let (before, begun) = (resident(), Instant::now());
        let store = Store::open_etcd(&settings).expect("opened");
        println!(
            "loaded in {:.1} s, {:.0} MB more",
            begun.elapsed().as_secs_f64(),
            resident() - before
        );
        assert_eq!(store.members().expect("members").len(), MEMBERS as usize);
        let id = store
            .authenticate(&Digest(
                [&[0; 29][..], &[1, 0x86, 0xa0]]
                    .concat()
                    .try_into()
                    .expect("32"),
            ))
            .expect("a member");
        let endpoints: Vec<SocketAddr> = (1..=4).map(|n| ([192, 0, 2, n], 51820).into()).collect();
        let begun = Instant::now();
        for port in 1..=100u16 {
            let mut endpoints = endpoints.clone();
            endpoints[0].set_port(port);
            let told = telling::at(&endpoints);
            store.set_endpoints(id, &told, NOW).expect("set");
        }
        println!(
            "a change with four endpoints: {:.1} ms",
            begun.elapsed().as_secs_f64() * 10.0
        );
        for (key, value) in super::super::etcd::testing::some(&settings) {
            println!("{key}: {} bytes", value.len());
        }
    });
}

#[test]
fn etcd_is_spoken_to_by_tls_with_certificates_at_both_ends() {
    struct Running(std::process::Child);
    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    if !is_possible() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name);
    for name in ["server", "client", "stranger"] {
        let key = rcgen::KeyPair::generate().expect("a key");
        let names = vec!["127.0.0.1".to_owned()];
        let parameters = rcgen::CertificateParams::new(names).expect("parameters");
        let certificate = parameters.self_signed(&key).expect("a certificate");
        fs::write(file(&format!("{name}.pem")), certificate.pem()).expect("written");
        fs::write(file(&format!("{name}.key")), key.serialize_pem()).expect("written");
    }
    let port = || {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("an address").port()
    };
    let url = format!("https://127.0.0.1:{}", port());
    let peer = format!("http://127.0.0.1:{}", port());
    let etcd = std::process::Command::new("etcd")
        .arg("--data-dir")
        .arg(file("data"))
        .args([
            "--listen-client-urls",
            &url,
            "--advertise-client-urls",
            &url,
        ])
        .args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ])
        .args(["--initial-cluster", &format!("default={peer}")])
        .args(["--client-cert-auth", "--cert-file"])
        .args([file("server.pem"), "--key-file".into(), file("server.key")])
        .args(["--trusted-ca-file".into(), file("client.pem")])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn();
    let _running = Running(etcd.expect("started"));
    let settings = |ca: &str, identity: &str| Etcd {
        endpoints: vec![url.clone()],
        prefix: "/test".to_owned(),
        ca: Some(file(&format!("{ca}.pem"))),
        identity: Some((
            file(&format!("{identity}.pem")),
            file(&format!("{identity}.key")),
        )),
        user: None,
        mesh: None,
        advertise: None,
    };
    let store = mesh_at(&settings("server", "client"));
    join(&store, 1, "a", 1).expect("joined");
    for (ca, identity) in [("server", "stranger"), ("stranger", "client")] {
        let error = Store::open_etcd(&settings(ca, identity)).expect_err("nobody is trusted");
        assert!(
            matches!(error, StoreError::Unavailable(_)),
            "{ca} {identity}: {error}"
        );
    }
    let plain = Etcd {
        endpoints: vec![url.replace("https", "http")],
        ..settings("server", "client")
    };
    let error = Store::open_etcd(&plain).expect_err("certificates without TLS");
    assert!(error.to_string().contains("https://"), "{error}");
}
