//! Moves between a file and etcd.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;

use seikan_proto::mesh::{Endpoints, RelayKind, RelaySecret};

use super::super::etcd::cluster;
use super::super::etcd::testing::{begin_import, has, remove, sample};
use super::super::moving::mark;
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

/// Returns the whole state of a mesh, except the log entry of the move.
fn everything(store: &Store) -> String {
    let mut audit = store.audit(1000).expect("queried");
    audit.retain(|entry| entry.change != "moved to etcd");
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

fn move_file(file: &Path, into: &Etcd, replace: bool) -> Result<Moved, StoreError> {
    let pin = Some(PIN.parse().expect("a pin"));
    Store::move_to_etcd(file, into, pin, replace, &operator(), NOW)
}

/// Marks a file like a move that is interrupted right afterwards; returns the number that the mesh
/// would have.
fn marked(file: &Path, into: &Etcd) -> u64 {
    let cluster = cluster(into).expect("queried");
    mark(&open_file(file).expect("opened"), into, cluster).expect("marked")
}

/// Settings of an etcd that does not answer.
fn unreachable() -> Etcd {
    Etcd {
        endpoints: vec!["http://127.0.0.1:1".to_owned()],
        prefix: "/test".to_owned(),
        ca: None,
        identity: None,
        user: None,
        mesh: None,
        advertise: None,
    }
}

#[test]
fn a_mesh_moves_to_etcd_and_back_unchanged() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (folder, file) = file_with_everything();
        let before = everything(&Store::open(&file).expect("opened"));

        let moved = move_file(&file, &settings, false).expect("moved");
        assert_eq!(everything(&moved.store), before);
        let away = moved.retire().expect("renamed");
        assert!(!file.exists() && away.file.ends_with("mesh.db.moved"));
        assert!(away.marked.is_none());

        let store = Store::open_etcd(&settings).expect("opened");
        let audit = store.audit(1).expect("queried");
        assert_eq!(audit[0].change, "moved to etcd");
        let other = "sha256:BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBA";
        let pin = store.agree_on_pin(other.parse().expect("a pin"));
        assert_eq!(pin.expect("queried").to_string(), PIN);

        let back = folder.path().join("back.db");
        fs::write(&back, store.export().expect("a copy")).expect("written");
        assert_eq!(everything(&Store::open(&back).expect("opened")), before);

        // Seven ids were given, of which the seventh is free, and seven numbers, of which none is.
        for store in [&store, &Store::open(&back).expect("opened")] {
            let new = join(store, 1, "new", 9).expect("joined");
            assert_eq!((new.id, new.number), (MemberId(7), 7));
        }
    });
}

#[test]
fn an_existing_mesh_is_replaced_only_on_request() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (_folder, file) = file_with_everything();
        let there = mesh_at(&settings);
        join(&there, 1, "there", 8).expect("joined");
        let (epoch, version) = (there.epoch(), there.data_version().expect("queried"));
        let error = move_file(&file, &settings, false).expect_err("there is one");
        assert!(matches!(error, StoreError::NotEmpty { .. }), "{error}");
        assert_eq!(names(&there), ["there"]);
        assert_eq!(
            (there.epoch(), there.data_version().expect("queried")),
            (epoch, version)
        );

        // A continuous reader sees the old mesh, an error, or the new one.
        let (started, done) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            let over = SetOnDrop(&done);
            let reader = scope.spawn(|| {
                let mut seen = std::collections::BTreeSet::new();
                while !done.load(Ordering::Relaxed) {
                    if let Ok(members) = there.members() {
                        let names = members.iter().map(|m| m.member.name.to_string());
                        seen.insert(names.collect::<Vec<_>>().join(" "));
                        started.store(true, Ordering::Relaxed);
                    }
                }
                seen
            });
            let until = Instant::now() + Duration::from_secs(60);
            while !started.load(Ordering::Relaxed) {
                assert!(Instant::now() < until, "the reader has not started");
                thread::sleep(Duration::from_millis(5));
            }
            move_file(&file, &settings, true).expect("moved");
            let until = Instant::now() + Duration::from_secs(15);
            while there.epoch() == epoch || there.networks().is_err() {
                assert!(Instant::now() < until, "it does not notice");
                thread::sleep(Duration::from_millis(20));
            }
            thread::sleep(Duration::from_millis(100));
            drop(over);
            let seen: Vec<String> = reader.join().expect("no panic").into_iter().collect();
            assert_eq!(seen, ["m1 m2 m4 web", "there"]);
        });
    });
}

#[test]
fn an_open_file_is_not_moved() {
    let (_folder, file) = file_with_everything();
    let store = Store::open(&file).expect("opened");
    let error = move_file(&file, &unreachable(), false).expect_err("in use");
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    drop(store);
    let error = move_file(&file, &unreachable(), false).expect_err("no etcd");
    assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
    // The file is unchanged.
    assert_eq!(names(&Store::open(&file).expect("opened")).len(), 4);
}

#[test]
fn an_interrupted_import_is_no_mesh_and_can_be_repeated() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (_folder, file) = file_with_everything();
        begin_import(&settings);
        let error = Store::open_etcd(&settings).expect_err("not all of it is there");
        assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
        let moved = move_file(&file, &settings, false).expect("moved");
        assert_eq!(names(&moved.store).len(), 4);
    });
}

#[test]
fn repeating_a_move_with_an_unknown_outcome_completes_it() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (proxies, far) = Proxy::to_all(&direct);
        let (_folder, file) = file_with_everything();
        let there = format!("{}/state/mesh", direct.prefix);
        // Everything arrives, and the last response is lost.
        set(&proxies, Fate::Slow);
        let error = thread::scope(|scope| {
            let moving = scope.spawn(|| move_file(&file, &far, false).map(drop));
            while !has(&direct, &there) && !moving.is_finished() {
                thread::sleep(Duration::from_millis(2));
            }
            set(&proxies, Fate::Mute);
            moving.join().expect("no panic")
        });
        let error = error.expect_err("no answer");
        assert!(matches!(error, StoreError::Unknown(_)), "{error}");
        let is_moving = |error: &StoreError| matches!(error, StoreError::Moving { prefix, .. } if *prefix == direct.prefix);
        let error = Store::open(&file).expect_err("it is being moved");
        assert!(is_moving(&error), "{error}");
        let elsewhere = Etcd {
            prefix: "/elsewhere".to_owned(),
            ..direct.clone()
        };
        let error = move_file(&file, &elsewhere, false).expect_err("once is enough");
        assert!(is_moving(&error), "{error}");
        let error = Store::undo_move(&file, &direct, |_| Ok(())).expect_err("it is there");
        assert!(matches!(error, StoreError::HasMoved { .. }), "{error}");

        // Another coordinator uses the mesh meanwhile.
        let other = Store::open_etcd(&direct).expect("opened");
        join(&other, 1, "new", 9).expect("joined");
        let moved = move_file(&file, &direct, false).expect("ended");
        assert!(names(&moved.store).contains(&"new".to_owned()));
        let away = moved.retire().expect("renamed");
        assert_eq!(names(&Store::open(&away.file).expect("opened")).len(), 4);
    });
}

#[test]
fn an_interrupted_move_can_be_cancelled() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (_folder, file) = file_with_everything();
        let error = Store::undo_move(&file, &settings, |_| Ok(())).expect_err("nobody moves it");
        assert!(matches!(error, StoreError::NotMoving { .. }), "{error}");
        let mesh = marked(&file, &settings);
        assert!(Store::is_moving(&file).expect("queried"));
        begin_import(&settings);
        let before = sample(&settings);
        // The move stays until `forget` succeeds.
        let error = Store::undo_move(&file, &settings, |_| Err(ErrorKind::Other.into()));
        assert!(matches!(error, Err(StoreError::Io { .. })), "{error:?}");
        assert!(Store::is_moving(&file).expect("queried"));
        let mut forgotten = None;
        let undone = Store::undo_move(&file, &settings, |mesh| {
            forgotten = Some(mesh);
            Ok(())
        });
        undone.expect("taken back");
        assert_eq!(forgotten, Some(mesh));
        // The import cannot continue, because its head is gone.
        assert_ne!(sample(&settings), before);
        assert_eq!(names(&Store::open(&file).expect("opened")).len(), 4);
    });
}

#[test]
fn an_interrupted_move_is_bound_to_its_cluster() {
    with_cluster(|one| {
        with_cluster(|other| {
            let here = settings(one);
            let there = Etcd {
                endpoints: other.endpoints(),
                ..here.clone()
            };
            let (_folder, file) = file_with_everything();
            marked(&file, &here);
            let at = here.endpoints.join(",");
            let assert_names_target = |error: StoreError| {
                assert!(matches!(error, StoreError::Moving { .. }), "{error}");
                assert!(error.to_string().contains(&at), "{error}");
            };
            assert_names_target(
                Store::undo_move(&file, &there, |_| Ok(())).expect_err("elsewhere"),
            );
            assert_names_target(move_file(&file, &there, false).expect_err("elsewhere"));
            assert_names_target(move_file(&file, &there, true).expect_err("elsewhere"));
            assert_names_target(Store::open(&file).expect_err("it is being moved"));
            assert!(!has(&there, &format!("{}/state/head", there.prefix)));
            move_file(&file, &here, false).expect("moved");
        });
    });
}

#[test]
fn earlier_moved_files_are_not_overwritten() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (folder, file) = file_with_everything();
        for name in ["mesh.db.moved", "mesh.db.moved.2"] {
            fs::write(folder.path().join(name), name).expect("written");
        }
        let moved = move_file(&file, &settings, false).expect("moved");
        // As an operator may have done by hand.
        let connection = open_file(&file).expect("opened");
        connection.execute("DROP TABLE moving", []).expect("gone");
        drop(connection);
        let away = moved.retire().expect("renamed");
        assert!(away.file.ends_with("mesh.db.moved.3") && away.marked.is_none());
        assert_eq!(names(&Store::open(&away.file).expect("opened")).len(), 4);
        for name in ["mesh.db.moved", "mesh.db.moved.2"] {
            let text = fs::read_to_string(folder.path().join(name));
            assert_eq!(text.expect("a file"), name);
        }
    });
}

#[test]
fn a_mark_that_cannot_be_removed_is_reported() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (_folder, file) = file_with_everything();
        let moved = move_file(&file, &settings, false).expect("moved");
        fs::write(&file, "no database").expect("written");
        let away = moved.retire().expect("renamed");
        assert!(!file.exists() && away.file.exists());
        assert!(
            matches!(away.marked, Some(StoreError::Sqlite(_))),
            "{away:?}"
        );
    });
}

#[test]
fn a_locked_file_is_neither_created_nor_moved() {
    let (_folder, file) = file_with_everything();
    let locked = Store::lock_file(&file).expect("locked");
    let error = move_file(&file, &unreachable(), false).expect_err("locked");
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    Store::open_locked(locked).expect("opened");
    let new = file.with_file_name("new/mesh.db");
    drop(Store::lock_file(&new).expect("locked"));
    assert!(!new.exists() && new.parent().expect("a folder").exists());
}

#[test]
fn an_interrupted_replacement_reports_the_deleted_mesh() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (proxies, far) = Proxy::to_all(&direct);
        let (_folder, file) = file_with_everything();
        mesh_at(&direct);
        set(&proxies, Fate::Slow);
        let before = sample(&direct);
        let error = thread::scope(|scope| {
            let moving = scope.spawn(|| move_file(&file, &far, true).map(drop));
            while sample(&direct) == before && !moving.is_finished() {
                thread::sleep(Duration::from_millis(2));
            }
            set(&proxies, Fate::Mute);
            moving.join().expect("no panic")
        });
        let message = error.expect_err("no answer").to_string();
        assert!(message.contains("--undo does not"), "{message}");
    });
}

#[test]
fn a_mesh_that_changes_during_its_replacement_stays() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (proxies, far) = Proxy::to_all(&direct);
        let (_folder, file) = file_with_everything();
        let there = mesh_at(&direct);
        set(&proxies, Fate::Slow);
        let (error, joined) = thread::scope(|scope| {
            let moving = scope.spawn(|| move_file(&file, &far, true).map(drop));
            let mut joined = 0;
            while !moving.is_finished() {
                joined += 1;
                join(&there, 1, &format!("n{joined}"), joined).expect("joined");
            }
            (moving.join().expect("no panic"), joined)
        });
        let error = error.expect_err("it changes");
        assert!(matches!(error, StoreError::Changing { .. }), "{error}");
        assert_eq!(names(&there).len(), joined as usize);
        // The file is unchanged.
        assert_eq!(names(&Store::open(&file).expect("opened")).len(), 4);
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
        let (_folder, file) = file_with_everything();
        let other = move_file(&file, &settings, true)
            .expect("moved")
            .store
            .mesh();
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
        for key in ["head", "mesh"] {
            remove(&settings, &format!("{}/state/{key}", settings.prefix));
        }
        let error = Store::open_etcd(&known).expect_err("none");
        assert!(
            matches!(error, StoreError::OtherMesh { found: None, .. }),
            "{error}"
        );
        assert!(!has(&settings, &format!("{}/state/mesh", settings.prefix)));
    });
}
