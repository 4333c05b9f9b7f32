//! Several stores on one cluster of etcd, and failures of the cluster.

use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use seikan_lab::etcd::Cluster;

use super::super::etcd::testing::{compact, put, remove};
use super::proxy::{Fate, Proxy, cut, set};
use super::*;

thread_local! {
    /// Whether this thread's test runs on etcd.
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

/// Returns an unused prefix on the cluster of all tests if this test runs on etcd.
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

/// Creates a mesh with a token without limits.
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

/// Returns the HTTP response of a member of the cluster.
fn http(endpoint: &str, request_line: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(&endpoint["http://".len()..]).expect("connected");
    let length = body.len();
    write!(
        stream,
        "{request_line} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn changes_reach_other_replicas() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let one = mesh_at(&settings);
        let other = Store::open_etcd(&settings).expect("opened");
        assert_eq!(one.epoch(), other.epoch());
        join(&one, 1, "a", 1).expect("joined");
        let until = Instant::now() + Duration::from_secs(2);
        while names(&other) != ["a"] {
            assert!(Instant::now() < until, "it does not notice");
            thread::sleep(Duration::from_millis(5));
        }
        // A new member is authenticated at its first request, whether or not the replica knows it
        // yet.
        for n in 2..50 {
            let id = join(&other, 1, &format!("m{n}"), n).expect("joined").id;
            assert_eq!(one.authenticate(&digest_of(n)).expect("a member"), id);
        }
    });
}

#[test]
fn acknowledged_changes_survive_the_death_of_the_leader() {
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
                            // Like members, repeats unacknowledged requests.
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
            let before = stores[0].revision().expect("queried");
            // The other two elect a leader within two to four seconds, or more on a busy machine.
            let killed = Instant::now();
            let until = killed + Duration::from_secs(60);
            while stores[0].revision().expect("queried") < before + 20 {
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
fn ids_and_revisions_continue_after_a_restart() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        let a = join(&store, 1, "a", 1).expect("joined").id;
        assert!(
            store
                .remove(MemberRef::Id(a), &host(), NOW)
                .expect("queried")
        );
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
        assert_eq!(store.revision().expect("queried"), 2);
        let b = join(&store, 1, "b", 2).expect("joined");
        assert!(b.id > a, "ids are never reused");
        assert_eq!(b.number, 2);
    });
}

#[test]
fn without_etcd_members_are_authenticated_and_others_get_unavailable() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let one = mesh_at(&direct);
        let (proxies, far) = Proxy::to_all(&direct);
        let other = Store::open_etcd(&far).expect("opened");
        let a = join(&other, 1, "a", 1).expect("joined").id;
        cut(&proxies, true);
        join(&one, 1, "b", 2).expect("joined");
        assert_eq!(other.authenticate(&digest_of(1)).expect("known"), a);
        for unknown in [2, 3] {
            let error = other
                .authenticate(&digest_of(unknown))
                .expect_err("not known here");
            assert!(
                matches!(error, StoreError::Unavailable(_)),
                "{unknown}: {error}"
            );
        }
        let started_at = Instant::now();
        let error = join(&other, 1, "c", 3).expect_err("etcd is unreachable");
        // It was never sent, so it is certainly not applied.
        assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
        assert!(started_at.elapsed() < Duration::from_secs(10));
        cut(&proxies, false);
        let until = Instant::now() + Duration::from_secs(10);
        while other.authenticate(&digest_of(2)).is_err() {
            assert!(Instant::now() < until, "it does not reconnect");
            thread::sleep(Duration::from_millis(20));
        }
        let error = other.authenticate(&digest_of(4)).expect_err("nobody");
        assert!(matches!(error, StoreError::NotAMember), "{error}");
    });
}

/// Returns the number of joins of a member in the log.
fn joins(store: &Store, name: &str) -> usize {
    let audit = store.audit(1000).expect("queried");
    let is_join = |entry: &&AuditEntry| entry.change == "joined" && entry.subject == name;
    audit.iter().filter(is_join).count()
}

#[test]
fn a_change_with_a_lost_response_is_applied_once() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let one = mesh_at(&direct);
        let (proxies, far) = Proxy::to_all(&direct);
        join(&one, 1, "a", 1).expect("joined");
        let other = Store::open_etcd(&far).expect("opened");
        other.catch_up().expect("caught up");
        set(&proxies, Fate::Mute);
        thread::scope(|scope| {
            let removing =
                scope.spawn(|| other.remove(MemberRef::Name(&name("a")), &operator(), NOW));
            let until = Instant::now() + Duration::from_secs(2);
            while !names(&one).is_empty() {
                assert!(Instant::now() < until, "it was not sent");
                thread::sleep(Duration::from_millis(5));
            }
            // Another change follows meanwhile.
            join(&one, 1, "b", 2).expect("joined");
            assert!(!removing.is_finished());
            set(&proxies, Fate::Cut);
            set(&proxies, Fate::Open);
            // `true`: applied by this change; `false` would mean that there was no such member.
            let removed = removing.join().expect("no panic");
            assert!(removed.expect("it is done"));
        });
        // A cluster beside other load may be late.
        let until = Instant::now() + Duration::from_secs(60);
        while let Err(error) = other.catch_up() {
            assert!(Instant::now() < until, "{error}");
        }
        assert_eq!(names(&other), ["b"]);
    });
}

#[test]
fn a_change_without_a_response_is_reported_as_unknown() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let one = mesh_at(&direct);
        let (proxies, far) = Proxy::to_all(&direct);
        let other = Store::open_etcd(&far).expect("opened");
        other.authenticate(&digest_of(9)).expect_err("nobody");
        set(&proxies, Fate::Mute);
        let error = join(&other, 1, "a", 1).expect_err("no answer");
        assert!(matches!(error, StoreError::Unknown(_)), "{error}");
        assert_eq!(names(&one), ["a"]);
        // It is not applied again after the connection is back.
        set(&proxies, Fate::Cut);
        set(&proxies, Fate::Open);
        let until = Instant::now() + Duration::from_secs(10);
        while names(&other) != ["a"] {
            assert!(Instant::now() < until, "it does not reconnect");
            thread::sleep(Duration::from_millis(20));
        }
        let again = join(&other, 1, "a", 1).expect("the same answer");
        assert!(again.was_member);
        assert_eq!(joins(&other, "a"), 1);
    });
}

#[test]
fn refused_writes_are_repeated_slowly() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (proxies, far) = Proxy::to_all(&direct);
        let far = Etcd {
            advertise: Some("one.example:7443".parse().expect("an address")),
            ..far
        };
        let store = mesh_at(&far);
        let a = join(&store, 1, "a", 1).expect("joined").id;
        let alarm = |action: u8| {
            // Each member has its own alarm: one stops writes, and all must be cleared.
            for endpoint in &direct.endpoints {
                let status = http(endpoint, "POST /v3/maintenance/status", "{}");
                let id = status.split("\"member_id\":\"").nth(1).expect("a member");
                let id = id.split('"').next().expect("a number");
                let body = format!(r#"{{"action":{action},"memberID":{id},"alarm":1}}"#);
                http(endpoint, "POST /v3/maintenance/alarm", &body);
            }
        };
        // The quota is exhausted.
        alarm(1);
        let started_at = Instant::now();
        let error = join(&store, 1, "b", 2).expect_err("refused");
        assert!(
            matches!(&error, StoreError::Unavailable(why) if why.contains("space")),
            "{error}"
        );
        assert!(
            started_at.elapsed() < Duration::from_secs(2),
            "it says so at once"
        );
        assert_eq!(store.authenticate(&digest_of(1)).expect("known"), a);
        // The replica writes this as well.
        store.touch(a, NOW).expect("recorded");
        let count_bytes = || -> u64 {
            proxies
                .iter()
                .map(|p| p.requested.load(Ordering::Relaxed))
                .sum()
        };
        let before = count_bytes();
        thread::sleep(Duration::from_secs(4));
        let bytes = count_bytes() - before;
        assert!(bytes < 4_000, "{bytes} bytes");

        alarm(2);
        join(&store, 1, "b", 2).expect("joined");
        let until = Instant::now() + Duration::from_secs(10);
        while store.members().expect("members")[0].coordinator.is_none() {
            assert!(Instant::now() < until, "it is not written any more");
            thread::sleep(Duration::from_millis(50));
        }
    });
}

#[test]
fn reconnects_are_paced() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (proxies, far) = Proxy::to_all(&direct);
        let store = mesh_at(&far);
        (0..3).for_each(|member| cluster.kill(member));
        let count_bytes = || -> u64 {
            proxies
                .iter()
                .map(|p| p.requested.load(Ordering::Relaxed))
                .sum()
        };
        let before = count_bytes();
        thread::sleep(Duration::from_secs(4));
        // Three members per round; pauses grow to two seconds.
        let attempts = count_bytes() - before;
        assert!(
            (3..100).contains(&attempts),
            "{attempts} connections and bytes"
        );
        cluster.revive().expect("a leader");
        let until = Instant::now() + Duration::from_secs(10);
        while join(&store, 1, "a", 1).is_err() {
            assert!(Instant::now() < until, "it does not reconnect");
        }
    });
}

#[test]
fn concurrent_refusals_share_a_request() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        drop(mesh_at(&direct));
        let (proxies, far) = Proxy::to_all(&direct);
        let store = Store::open_etcd(&far).expect("opened");
        // Number of range requests by etcd's own count.
        let ranges = || -> f64 {
            let metrics = direct.endpoints.iter().map(|e| http(e, "GET /metrics", ""));
            let counts = metrics.map(|text| {
                let mut lines = text.lines();
                let line = lines.find_map(|l| l.strip_prefix("etcd_debugging_mvcc_range_total "));
                line.expect("a count").parse::<f64>().expect("a number")
            });
            counts.sum()
        };
        set(&proxies, Fate::Slow);
        let before = ranges();
        thread::scope(|scope| {
            for n in 0..64 {
                let store = &store;
                scope.spawn(move || {
                    let error = store.authenticate(&digest_of(100 + n)).expect_err("nobody");
                    assert!(matches!(error, StoreError::NotAMember), "{error}");
                });
            }
        });
        // One request started before some of the calls, one serves all others, and there may be
        // another one for threads that started late.
        let requests = ranges() - before;
        assert!((1.0..=4.0).contains(&requests), "{requests}");
    });
}

#[test]
fn a_replica_behind_a_compaction_loads_again() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let one = mesh_at(&direct);
        let (proxies, far) = Proxy::to_all(&direct);
        let other = Store::open_etcd(&far).expect("opened");
        join(&other, 1, "a", 1).expect("joined");
        cut(&proxies, true);
        join(&one, 1, "b", 2).expect("joined");
        assert!(
            one.remove(MemberRef::Name(&name("a")), &operator(), NOW)
                .expect("queried")
        );
        compact(&direct);
        cut(&proxies, false);
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
fn an_invalid_row_is_an_error_with_its_key() {
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
                Ok(_) => assert!(Instant::now() < until, "it is ignored"),
            }
            thread::sleep(Duration::from_millis(5));
        };
        assert!(error.to_string().contains("member/7"), "{error}");
        let error = Store::open_etcd(&settings).expect_err("invalid");
        assert!(
            matches!(&error, StoreError::CorruptRow { key } if key == "member/7"),
            "{error}"
        );
    });
}

#[test]
fn another_mesh_has_another_epoch_and_a_missing_one_is_an_error() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        let (epoch, version) = (store.epoch(), store.data_version().expect("queried"));
        let mesh = format!("{}/state/mesh", settings.prefix);
        let soon = |message: &str, is_so: &dyn Fn() -> bool| {
            let until = Instant::now() + Duration::from_secs(10);
            while !is_so() {
                assert!(Instant::now() < until, "{message}");
                thread::sleep(Duration::from_millis(5));
            }
        };
        put(&settings, &mesh, "7");
        soon("it does not notice", &|| store.epoch() != epoch);
        assert_ne!(store.data_version().expect("queried"), version);

        remove(&settings, &mesh);
        soon("it is ignored", &|| store.networks().is_err());
        // The replica has loaded again by then.
        thread::sleep(Duration::from_secs(6));
        let error = store.networks().expect_err("no mesh");
        assert!(error.to_string().contains("/mesh"), "{error}");
        put(&settings, &mesh, "7");
        soon("it stays unavailable", &|| store.networks().is_ok());
    });
}

/// Prints the cost of large meshes, for docs/internals/mesh-figures.md: `cargo test -p
/// seikan-coordinator --lib replica_cost -- --ignored --nocapture`.
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
        let started_at = Instant::now();
        super::answers::add_members(&store, MEMBERS);
        println!(
            "{MEMBERS} rows written in {:.1} s",
            started_at.elapsed().as_secs_f64()
        );
        drop(store);
        let (before, started_at) = (resident(), Instant::now());
        let store = Store::open_etcd(&settings).expect("opened");
        println!(
            "loaded in {:.1} s, {:.0} MB more",
            started_at.elapsed().as_secs_f64(),
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
        let started_at = Instant::now();
        for port in 1..=100u16 {
            let mut endpoints = endpoints.clone();
            endpoints[0].set_port(port);
            let endpoints = answers::at(&endpoints);
            store.set_endpoints(id, &endpoints, NOW).expect("set");
        }
        println!(
            "a change with four endpoints: {:.1} ms",
            started_at.elapsed().as_secs_f64() * 10.0
        );
        for (key, value) in super::super::etcd::testing::sample(&settings) {
            println!("{key}: {} bytes", value.len());
        }
    });
}

#[test]
fn tls_authenticates_etcd_and_the_coordinator() {
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
    for name in ["server", "client", "other"] {
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
    for (ca, identity) in [("server", "other"), ("other", "client")] {
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
