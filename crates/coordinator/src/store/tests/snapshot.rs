//! Snapshots, as exports and imports.

use seikan_proto::mesh::{Endpoints, RelayKind, RelaySecret};

use super::super::etcd::testing::{begin_import, has, put, remove, sample};
use super::proxy::{Fate, Proxy, set};
use super::relays::{own, own_secret};
use super::shared::{mesh_at, names, settings, with_cluster};
use super::*;

const PIN: &str = "sha256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";

/// Creates a mesh in a file with all kinds of rows: members, a member that left and one that was
/// removed, tokens, relays, and a policy.
fn file_with_everything() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("mesh.db");
    let store = Store::open(&file).expect("opened");
    let networks = networks("100.80.0.0/12");
    store.init(networks, &operator(), NOW).expect("set");
    let once = NewToken {
        uses: Some(1),
        tags: vec![name("web")],
        ..NewToken::default()
    };
    for (n, new) in [(1, NewToken::default()), (2, once.clone()), (3, once)] {
        let made = store.create_token(&token(n).digest(), &new, &operator(), NOW);
        made.expect("a token");
    }
    let withdrawn = store.withdraw_token(TokenId(3), &operator(), NOW);
    assert!(withdrawn.expect("queried"));
    for n in 1..=4 {
        join(&store, 1, &format!("m{n}"), n).expect("joined");
    }
    let web = join(&store, 2, "web", 5).expect("joined").id;
    join(&store, 1, "last", 6).expect("joined");
    let endpoints = Endpoints {
        endpoints: vec!["192.0.2.7:51820".parse().expect("an endpoint")],
        relayed: Vec::new(),
    };
    store
        .set_endpoints(web, &endpoints, NOW + 100)
        .expect("set");
    // The highest id is free.
    for gone in ["m3", "last"] {
        let removed = store.remove(MemberRef::Name(&name(gone)), &operator(), NOW);
        assert!(removed.expect("queried"));
    }
    let turn = RelayInfo {
        address: "turn.example:3478".parse().expect("an address"),
        kind: RelayKind::Turn,
        tls: None,
    };
    let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
    for (relay, secret) in [(turn, secret), (own(Some(443)), own_secret())] {
        let added = store.add_relay(&relay, &secret, &operator(), NOW);
        added.expect("added");
    }
    let policy = "allow m1 -> tag:web tcp/443\n";
    store.set_policy(policy, &operator(), NOW).expect("set");
    (folder, file)
}

/// Returns the whole state of a mesh, except the log entry of an import.
fn everything(store: &Store) -> String {
    let mut audit = store.audit(1000).expect("queried");
    audit.retain(|entry| entry.change != "imported");
    let asker = store.authenticate(&digest_of(1)).expect("a member");
    format!(
        "{:#?}",
        (
            store.networks().expect("queried"),
            store.revision().expect("queried"),
            store.members().expect("queried"),
            store.tokens().expect("queried"),
            store.relays().expect("queried"),
            store.policy().expect("queried"),
            store.changes(0, asker).expect("queried"),
            store.changes(3, asker).expect("queried"),
            audit,
        )
    )
}

/// Returns a snapshot of [`file_with_everything`].
fn snapshot() -> Vec<u8> {
    let (_folder, file) = file_with_everything();
    Store::open(&file)
        .expect("opened")
        .export()
        .expect("exported")
}

fn import(snapshot: &[u8], into: &Etcd) -> Result<Store, StoreError> {
    let pin = Some(PIN.parse().expect("a pin"));
    let mesh = Some(Store::import_etcd(snapshot, into, pin, &operator(), NOW)?);
    Store::open_etcd(&Etcd {
        mesh,
        ..into.clone()
    })
}

#[test]
fn a_mesh_moves_to_etcd_and_back_unchanged() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (folder, file) = file_with_everything();
        let former = Store::open(&file).expect("opened");
        let before = everything(&former);
        let store = import(&former.export().expect("exported"), &settings).expect("imported");
        assert_eq!(everything(&store), before);
        let audit = store.audit(1).expect("queried");
        assert_eq!(audit[0].change, "imported");
        let other = "sha256:BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBA";
        let pin = store.agree_on_pin(other.parse().expect("a pin"));
        assert_eq!(pin.expect("queried").to_string(), PIN);

        let back = folder.path().join("back/mesh.db");
        let snapshot = store.export().expect("exported");
        Store::import_file(&snapshot, &back, &operator(), NOW).expect("imported");
        let mode = fs::metadata(&back).expect("a file").permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        assert_eq!(everything(&Store::open(&back).expect("opened")), before);

        // Seven ids were given, of which the seventh is free, and seven numbers, of which none is.
        for store in [&store, &Store::open(&back).expect("opened")] {
            let new = join(store, 1, "new", 9).expect("joined");
            assert_eq!((new.id, new.number), (MemberId(7), 7));
        }
    });
}

#[test]
fn an_existing_mesh_is_never_replaced() {
    let snapshot = snapshot();
    let (folder, file) = file_with_everything();
    let before = everything(&Store::open(&file).expect("opened"));
    let import_file = |file: &Path| Store::import_file(&snapshot, file, &operator(), NOW);
    let assert_refused = |file: &Path| {
        let error = import_file(file).expect_err("there is one");
        assert!(matches!(error, StoreError::NotEmpty { .. }), "{error}");
    };
    assert_refused(&file);
    assert_eq!(everything(&Store::open(&file).expect("opened")), before);
    // The log of a former file would be applied to the new one.
    let other = folder.path().join("other.db");
    fs::write(folder.path().join("other.db-wal"), "").expect("written");
    assert_refused(&other);
    assert!(!other.exists());
    // An interrupted import may be repeated.
    let new = folder.path().join("new.db");
    fs::write(folder.path().join("new.db.new"), "incomplete").expect("written");
    import_file(&new).expect("imported");
    assert_eq!(everything(&Store::open(&new).expect("opened")), before);
    assert!(!folder.path().join("new.db.new").exists());

    with_cluster(|cluster| {
        let settings = settings(cluster);
        let there = mesh_at(&settings);
        join(&there, 1, "there", 8).expect("joined");
        let (epoch, version) = (there.epoch(), there.data_version().expect("queried"));
        let error = import(&snapshot, &settings).expect_err("there is one");
        assert!(matches!(error, StoreError::NotEmpty { .. }), "{error}");
        assert_eq!(names(&there), ["there"]);
        assert_eq!(
            (there.epoch(), there.data_version().expect("queried")),
            (epoch, version)
        );
    });
}

#[test]
fn only_snapshots_of_a_mesh_are_imported() {
    let (folder, file) = file_with_everything();
    let store = Store::open(&file).expect("opened");
    let new = folder.path().join("new.db");
    let import = |snapshot: &[u8]| {
        let error = Store::import_file(snapshot, &new, &operator(), NOW);
        assert!(!new.exists());
        error.expect_err("no snapshot")
    };
    // A file of a coordinator may have changes in its log.
    let of_coordinator = fs::read(&file).expect("a file");
    for other in [&b""[..], b"not a database at all", &of_coordinator] {
        let error = import(other);
        assert!(matches!(error, StoreError::NotASnapshot), "{error}");
    }
    let truncated = store.export().expect("exported");
    let error = import(&truncated[..truncated.len() / 2]);
    assert!(matches!(error, StoreError::Sqlite(_)), "{error}");

    let mut later = Connection::open_in_memory().expect("a database");
    create_schema(&mut later, &new).expect("created");
    let error = import(&later.serialize("main").expect("serialized"));
    assert!(matches!(error, StoreError::NoNetworks), "{error}");
    later
        .pragma_update(None, "user_version", SCHEMA + 1)
        .expect("set");
    let error = import(&later.serialize("main").expect("serialized"));
    assert!(matches!(error, StoreError::LaterVersion { .. }), "{error}");
}

#[test]
fn an_interrupted_import_is_no_mesh_and_can_be_repeated() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        begin_import(&settings);
        let left = format!("{}/state/rows/member/99", settings.prefix);
        put(&settings, &left, "{}");
        let error = Store::open_etcd(&settings).expect_err("not all of it is there");
        assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
        let store = import(&snapshot(), &settings).expect("imported");
        assert_eq!(names(&store).len(), 4);
        assert!(!has(&settings, &left));
    });
}

#[test]
fn an_import_with_a_lost_response_is_reported_as_unknown() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (proxies, far) = Proxy::to_all(&direct);
        let snapshot = snapshot();
        let there = format!("{}/state/mesh", direct.prefix);
        // Everything arrives, and the last response is lost.
        set(&proxies, Fate::Slow);
        let error = thread::scope(|scope| {
            let importing = scope.spawn(|| import(&snapshot, &far).map(drop));
            while !has(&direct, &there) && !importing.is_finished() {
                thread::sleep(Duration::from_millis(2));
            }
            set(&proxies, Fate::Mute);
            importing.join().expect("no panic")
        });
        let error = error.expect_err("no answer");
        assert!(matches!(error, StoreError::Unknown(_)), "{error}");
        assert_eq!(names(&Store::open_etcd(&direct).expect("opened")).len(), 4);
        let error = import(&snapshot, &direct).expect_err("it is there");
        assert!(matches!(error, StoreError::NotEmpty { .. }), "{error}");
    });
}

#[test]
fn an_import_that_is_cut_off_is_not_applied() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (proxies, far) = Proxy::to_all(&direct);
        let snapshot = snapshot();
        set(&proxies, Fate::Slow);
        let before = sample(&direct);
        let error = thread::scope(|scope| {
            let importing = scope.spawn(|| import(&snapshot, &far).map(drop));
            while sample(&direct) == before && !importing.is_finished() {
                thread::sleep(Duration::from_millis(2));
            }
            set(&proxies, Fate::Mute);
            importing.join().expect("no panic")
        });
        let error = error.expect_err("no answer");
        assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
        let error = Store::open_etcd(&direct).expect_err("not all of it is there");
        assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
        import(&snapshot, &direct).expect("imported");
    });
}

#[test]
fn another_mesh_than_the_expected_one_is_refused() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let mesh = mesh_at(&settings).mesh().expect("a number");
        let known = Etcd {
            mesh: Some(mesh),
            ..settings.clone()
        };
        Store::open_etcd(&known).expect("the same");
        for key in ["head", "mesh"] {
            remove(&settings, &format!("{}/state/{key}", settings.prefix));
        }
        let error = Store::open_etcd(&known).expect_err("none");
        assert!(
            matches!(error, StoreError::OtherMesh { found: None, .. }),
            "{error}"
        );
        assert!(!has(&settings, &format!("{}/state/mesh", settings.prefix)));
        let other = import(&snapshot(), &settings).expect("imported").mesh();
        let error = Store::open_etcd(&known).expect_err("another");
        let message = error.to_string();
        assert!(
            matches!(error, StoreError::OtherMesh { expected, found, .. } if expected == mesh && found == other),
            "{message}"
        );
        let numbers = [mesh, other.expect("a number")].map(|number| number.to_string());
        assert!(
            numbers.iter().all(|number| message.contains(number)),
            "{message}"
        );
    });
}
