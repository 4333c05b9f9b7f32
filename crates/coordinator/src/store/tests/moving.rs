//! From a file to etcd and back.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;

use seikan_proto::mesh::{Endpoints, RelayKind, RelaySecret};

use super::super::etcd::cluster;
use super::super::etcd::testing::{begin_import, has, some, take_away};
use super::super::moving::mark;
use super::relays::{own, own_secret};
use super::shared::{mesh_at, names, settings, with_cluster};
use super::ways::{Fate, Way, set};
use super::*;

const PIN: &str = "sha256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";

/// A mesh in a file that has something of everything: members of whom one went and one was removed, tokens, relays, a policy.
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
    assert!(withdrawn.expect("asked"));
    for n in 1..=4 {
        join(&store, 1, &format!("m{n}"), n).expect("joined");
    }
    let web = join(&store, 2, "web", 5).expect("joined").id;
    join(&store, 1, "last", 6).expect("joined");
    let told = Endpoints {
        endpoints: vec!["192.0.2.7:51820".parse().expect("an endpoint")],
        relayed: Vec::new(),
    };
    store.set_endpoints(web, &told, NOW + 100).expect("set");
    // The highest id is nobody's any more.
    for gone in ["m3", "last"] {
        let removed = store.remove(Whom::Name(&name(gone)), &operator(), NOW);
        assert!(removed.expect("asked"));
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

/// All that can be asked of a mesh, but for what was noted of the move itself.
fn everything(store: &Store) -> String {
    let mut audit = store.audit(1000).expect("asked");
    audit.retain(|entry| entry.what != "moved to etcd");
    let asker = store.authenticate(&shown(1)).expect("a member");
    format!(
        "{:#?}",
        (
            store.networks().expect("asked"),
            store.revision().expect("asked"),
            store.members().expect("asked"),
            store.tokens().expect("asked"),
            store.relays().expect("asked"),
            store.policy().expect("asked"),
            store.changes(0, asker).expect("asked"),
            store.changes(3, asker).expect("asked"),
            audit,
        )
    )
}

fn move_file(file: &Path, into: &Etcd, replace: bool) -> Result<Moved, StoreError> {
    let pin = Some(PIN.parse().expect("a pin"));
    Store::move_to_etcd(file, into, pin, replace, &operator(), NOW)
}

/// Marks a file as a move does that is broken off right afterwards; the number that the mesh would have.
fn marked(file: &Path, into: &Etcd) -> u64 {
    let cluster = cluster(into).expect("asked");
    mark(&open_file(file).expect("opened"), into, cluster).expect("marked")
}

/// An etcd that nobody is at.
fn nowhere() -> Etcd {
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
fn everything_goes_to_etcd_and_back_and_goes_on_as_it_was() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (folder, file) = file_with_everything();
        let before = everything(&Store::open(&file).expect("opened"));

        let moved = move_file(&file, &settings, false).expect("moved");
        assert_eq!(everything(&moved.store), before);
        let away = moved.put_away().expect("renamed");
        assert!(!file.exists() && away.file.ends_with("mesh.db.moved"));
        assert!(away.marked.is_none());

        let store = Store::open_etcd(&settings).expect("opened");
        let audit = store.audit(1).expect("asked");
        assert_eq!(audit[0].what, "moved to etcd");
        let other = "sha256:BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBA";
        let pin = store.agree_on_pin(other.parse().expect("a pin"));
        assert_eq!(pin.expect("asked").to_string(), PIN);

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
fn a_mesh_that_is_there_stays_unless_it_is_to_be_replaced() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (_folder, file) = file_with_everything();
        let there = mesh_at(&settings);
        join(&there, 1, "there", 8).expect("joined");
        let (epoch, version) = (there.epoch(), there.data_version().expect("asked"));
        let error = move_file(&file, &settings, false).expect_err("there is one");
        assert!(matches!(error, StoreError::NotEmpty { .. }), "{error}");
        assert_eq!(names(&there), ["there"]);
        assert_eq!(
            (there.epoch(), there.data_version().expect("asked")),
            (epoch, version)
        );

        // Who looks all the time sees the one, nothing, or the other.
        let (begun, done) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            let over = SetOnDrop(&done);
            let looking = scope.spawn(|| {
                let mut seen = std::collections::BTreeSet::new();
                while !done.load(Ordering::Relaxed) {
                    if let Ok(members) = there.members() {
                        let names = members.iter().map(|m| m.member.name.to_string());
                        seen.insert(names.collect::<Vec<_>>().join(" "));
                        begun.store(true, Ordering::Relaxed);
                    }
                }
                seen
            });
            let until = Instant::now() + Duration::from_secs(60);
            while !begun.load(Ordering::Relaxed) {
                assert!(Instant::now() < until, "nobody looks");
                thread::sleep(Duration::from_millis(5));
            }
            move_file(&file, &settings, true).expect("moved");
            let until = Instant::now() + Duration::from_secs(15);
            while there.epoch() == epoch || there.networks().is_err() {
                assert!(Instant::now() < until, "it does not hear of it");
                thread::sleep(Duration::from_millis(20));
            }
            thread::sleep(Duration::from_millis(100));
            drop(over);
            let seen: Vec<String> = looking.join().expect("no panic").into_iter().collect();
            assert_eq!(seen, ["m1 m2 m4 web", "there"]);
        });
    });
}

#[test]
fn nothing_is_moved_that_somebody_has_open() {
    let (_folder, file) = file_with_everything();
    let store = Store::open(&file).expect("opened");
    let error = move_file(&file, &nowhere(), false).expect_err("in use");
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    drop(store);
    let error = move_file(&file, &nowhere(), false).expect_err("no etcd");
    assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
    // It is as it was.
    assert_eq!(names(&Store::open(&file).expect("opened")).len(), 4);
}

#[test]
fn what_was_broken_off_is_no_mesh_and_is_done_again() {
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
fn a_mesh_whose_move_is_not_known_to_be_done_is_in_one_place_and_the_same_again_ends_it() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (ways, far) = Way::to_all(&direct);
        let (_folder, file) = file_with_everything();
        let there = format!("{}/state/mesh", direct.prefix);
        // All arrives, and the last answer does not come.
        set(&ways, Fate::Slow);
        let error = thread::scope(|scope| {
            let moving = scope.spawn(|| move_file(&file, &far, false).map(drop));
            while !has(&direct, &there) && !moving.is_finished() {
                thread::sleep(Duration::from_millis(2));
            }
            set(&ways, Fate::Mute);
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

        // Nobody may know: somebody goes on with it.
        let other = Store::open_etcd(&direct).expect("opened");
        join(&other, 1, "new", 9).expect("joined");
        let moved = move_file(&file, &direct, false).expect("ended");
        assert!(names(&moved.store).contains(&"new".to_owned()));
        let away = moved.put_away().expect("renamed");
        assert_eq!(names(&Store::open(&away.file).expect("opened")).len(), 4);
    });
}

#[test]
fn a_move_that_was_broken_off_is_taken_back_and_not_ended_by_anybody() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (_folder, file) = file_with_everything();
        let error = Store::undo_move(&file, &settings, |_| Ok(())).expect_err("nobody moves it");
        assert!(matches!(error, StoreError::NotMoving { .. }), "{error}");
        let mesh = marked(&file, &settings);
        assert!(Store::is_moving(&file).expect("asked"));
        begin_import(&settings);
        let before = some(&settings);
        // It is not taken back before others know of it.
        let error = Store::undo_move(&file, &settings, |_| Err(ErrorKind::Other.into()));
        assert!(matches!(error, Err(StoreError::Io { .. })), "{error:?}");
        assert!(Store::is_moving(&file).expect("asked"));
        let mut told = None;
        let undone = Store::undo_move(&file, &settings, |mesh| {
            told = Some(mesh);
            Ok(())
        });
        undone.expect("taken back");
        assert_eq!(told, Some(mesh));
        // Who is not told yet finds another head than the one that it wrote.
        assert_ne!(some(&settings), before);
        assert_eq!(names(&Store::open(&file).expect("opened")).len(), 4);
    });
}

#[test]
fn a_move_that_was_begun_in_one_etcd_is_ended_or_taken_back_there_and_in_no_other_of_the_same_prefix()
 {
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
            let is_told = |error: StoreError| {
                assert!(matches!(error, StoreError::Moving { .. }), "{error}");
                assert!(error.to_string().contains(&at), "{error}");
            };
            is_told(Store::undo_move(&file, &there, |_| Ok(())).expect_err("elsewhere"));
            is_told(move_file(&file, &there, false).expect_err("elsewhere"));
            is_told(move_file(&file, &there, true).expect_err("elsewhere"));
            is_told(Store::open(&file).expect_err("it is being moved"));
            assert!(!has(&there, &format!("{}/state/head", there.prefix)));
            move_file(&file, &here, false).expect("moved");
        });
    });
}

#[test]
fn what_was_moved_before_is_not_written_over_and_a_mark_that_is_gone_already_is_no_matter() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (folder, file) = file_with_everything();
        for name in ["mesh.db.moved", "mesh.db.moved.2"] {
            fs::write(folder.path().join(name), name).expect("written");
        }
        let moved = move_file(&file, &settings, false).expect("moved");
        // As whoever has mended it by hand.
        let connection = open_file(&file).expect("opened");
        connection.execute("DROP TABLE moving", []).expect("gone");
        drop(connection);
        let away = moved.put_away().expect("renamed");
        assert!(away.file.ends_with("mesh.db.moved.3") && away.marked.is_none());
        assert_eq!(names(&Store::open(&away.file).expect("opened")).len(), 4);
        for name in ["mesh.db.moved", "mesh.db.moved.2"] {
            let text = fs::read_to_string(folder.path().join(name));
            assert_eq!(text.expect("a file"), name);
        }
    });
}

#[test]
fn a_file_that_stays_marked_after_it_was_renamed_is_no_failure_but_told() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let (_folder, file) = file_with_everything();
        let moved = move_file(&file, &settings, false).expect("moved");
        fs::write(&file, "no database").expect("written");
        let away = moved.put_away().expect("renamed");
        assert!(!file.exists() && away.file.exists());
        assert!(
            matches!(away.marked, Some(StoreError::Sqlite(_))),
            "{away:?}"
        );
    });
}

#[test]
fn a_file_that_is_held_is_not_made_and_not_moved() {
    let (_folder, file) = file_with_everything();
    let held = Store::hold(&file).expect("held");
    let error = move_file(&file, &nowhere(), false).expect_err("held");
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    Store::open_held(held).expect("opened");
    let new = file.with_file_name("new/mesh.db");
    drop(Store::hold(&new).expect("held"));
    assert!(!new.exists() && new.parent().expect("a folder").exists());
}

#[test]
fn who_broke_a_replacement_off_is_told_what_is_gone() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (ways, far) = Way::to_all(&direct);
        let (_folder, file) = file_with_everything();
        mesh_at(&direct);
        set(&ways, Fate::Slow);
        let before = some(&direct);
        let error = thread::scope(|scope| {
            let moving = scope.spawn(|| move_file(&file, &far, true).map(drop));
            while some(&direct) == before && !moving.is_finished() {
                thread::sleep(Duration::from_millis(2));
            }
            set(&ways, Fate::Mute);
            moving.join().expect("no panic")
        });
        let said = error.expect_err("no answer").to_string();
        assert!(said.contains("--undo does not bring it back"), "{said}");
    });
}

#[test]
fn a_mesh_that_changes_while_it_is_to_be_replaced_stays() {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let (ways, far) = Way::to_all(&direct);
        let (_folder, file) = file_with_everything();
        let there = mesh_at(&direct);
        set(&ways, Fate::Slow);
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
        // The file is the mesh that it was.
        assert_eq!(names(&Store::open(&file).expect("opened")).len(), 4);
    });
}

#[test]
fn no_mesh_and_no_other_takes_the_place_of_one_that_was_known() {
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
        let said = error.to_string();
        assert!(
            matches!(error, StoreError::OtherMesh { noted, found, .. } if noted == mesh && found == other),
            "{said}"
        );
        let numbers = [mesh, other.expect("a number")].map(|number| number.to_string());
        assert!(numbers.iter().all(|number| said.contains(number)), "{said}");
        for key in ["head", "mesh"] {
            take_away(&settings, &format!("{}/state/{key}", settings.prefix));
        }
        let error = Store::open_etcd(&known).expect_err("none");
        assert!(
            matches!(error, StoreError::OtherMesh { found: None, .. }),
            "{error}"
        );
        assert!(!has(&settings, &format!("{}/state/mesh", settings.prefix)));
    });
}
