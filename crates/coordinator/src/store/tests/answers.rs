//! Answers to polls.

use std::collections::HashSet;
use std::net::SocketAddr;

use seikan_proto::mesh::{
    Changes, Cursor, DeviceName, Devices, Endpoints, MAX_ANSWER, MAX_DEVICES, MAX_ENDPOINTS,
    MAX_MEMBERS, MAX_TAGS, Member, Party, Reason,
};

use super::super::changes::{Change, ChangeKind, MAX_ROWS, assemble, members_after};
use super::super::policy::Visibility;
use super::super::rows::{Former, Head, MemberRow};
use super::*;

fn endpoint(n: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, n], 51820))
}

pub fn at(endpoints: &[SocketAddr]) -> Endpoints {
    Endpoints {
        endpoints: endpoints.to_vec(),
        relayed: Vec::new(),
    }
}

fn names(changes: &Changes) -> Vec<&str> {
    changes.members.iter().map(|m| m.name.as_str()).collect()
}

#[test]
fn an_answer_lists_the_other_members() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    let b = mesh.join("b", 2);
    mesh.store
        .set_endpoints(
            b,
            &Endpoints {
                endpoints: vec![endpoint(7)],
                relayed: vec![endpoint(8)],
            },
            NOW,
        )
        .expect("set");
    let answer = mesh.store.changes(0, a).expect("changes");
    let addresses = ["100.80.0.2", "fd00::2"].map(|a| a.parse::<IpAddr>().expect("an address"));
    let expected = Member {
        name: name("b"),
        public_key: key(2),
        addresses: addresses.to_vec(),
        endpoints: vec![endpoint(7)],
        relayed: vec![endpoint(8)],
        tags: Vec::new(),
        devices: Vec::new(),
    };
    assert_eq!(answer.members, [expected]);
    assert_eq!(names(&mesh.store.changes(0, b).expect("changes")), ["a"]);
}

#[test]
fn an_answer_to_an_unknown_revision_is_whole() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    mesh.join("b", 2);
    mesh.join("c", 3);
    mesh.remove("b");
    // Four changes: three joins and a removal.
    for since in [0, 5, u64::MAX] {
        let answer = mesh.store.changes(since, a).expect("changes");
        assert_eq!(
            (answer.revision, answer.whole, answer.more),
            (4, true, false),
            "{since}"
        );
        assert_eq!(names(&answer), ["c"]);
        assert!(
            answer.removed.is_empty(),
            "a whole answer needs no removals"
        );
    }
    let answer = mesh.store.changes(4, a).expect("changes");
    let nothing = Changes {
        revision: 4,
        sight: 4,
        ..Changes::default()
    };
    assert_eq!(answer, nothing);
}

#[test]
fn an_answer_has_only_later_changes() {
    let mesh = Mesh::new("100.80.0.0/12");
    let store = &mesh.store;
    let a = mesh.join("a", 1);
    let b = mesh.join("b", 2);
    mesh.join("c", 3);
    assert_eq!(names(&store.changes(2, a).expect("changes")), ["c"]);

    assert!(
        store
            .set_endpoints(b, &at(&[endpoint(1)]), NOW)
            .expect("set")
    );
    let answer = store.changes(3, a).expect("changes");
    assert_eq!((names(&answer), answer.revision), (vec!["b"], 4));
    assert!(
        !store
            .set_endpoints(b, &at(&[endpoint(1)]), NOW)
            .expect("set"),
        "the same again"
    );
    assert_eq!(store.revision().expect("queried"), 4);

    mesh.remove("b");
    let answer = store.changes(4, a).expect("changes");
    assert_eq!((answer.members, answer.removed), (vec![], vec![key(2)]));
    let error = store
        .set_endpoints(b, &at(&[endpoint(2)]), NOW)
        .expect_err("no member any more");
    assert!(matches!(error, StoreError::NotAMember), "{error}");
    store.touch(b, NOW).expect_err("no member any more");
}

#[test]
fn a_removed_key_that_joins_again_is_a_member() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    mesh.join("b", 2);
    mesh.remove("b");
    mesh.join("b-again", 2);
    for since in 1..4 {
        let answer = mesh.store.changes(since, a).expect("changes");
        assert_eq!(names(&answer), ["b-again"], "{since}");
        assert!(answer.removed.is_empty(), "{since}");
    }
    mesh.remove("b-again");
    assert_eq!(mesh.store.changes(1, a).expect("changes").removed, [key(2)]);
}

/// Adds members `c100` and so on, with revisions and keys of the same numbers.
pub fn add_members(store: &Store, count: u32) {
    // As many at a time as one change may touch, with other rows.
    for first in (0..count).step_by(90) {
        add_member_range(store, first, count.min(first + 90));
    }
}

fn set_revision(mesh: &mut rows::Mesh, revision: u64) -> Result<(), StoreError> {
    mesh.put(Head {
        revision,
        ..mesh.head()
    })
}

fn add_member_range(store: &Store, first: u32, end: u32) {
    let filled = store.change(move |mesh| {
        for number in 100 + first..100 + end {
            let name = Party {
                name: name(&format!("c{number}")),
                tags: Vec::new(),
                gateway: None,
            };
            mesh.put(MemberRow {
                id: number.into(),
                number,
                own: name,
                public_key: (&key(number)).into(),
                credential: (&key(number)).into(),
                token: 1,
                endpoints: Endpoints::default(),
                devices: Vec::new(),
                revision: number.into(),
                joined: 0,
                recent: Default::default(),
            })?;
        }
        set_revision(mesh, 99 + u64::from(end))
    });
    filled.expect("filled");
}

#[test]
fn a_long_list_is_split_into_answers() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    add_members(&mesh.store, 5000);
    let first = mesh.store.changes(0, a).expect("changes");
    assert_eq!(first.members.len(), MAX_MEMBERS);
    // c100 has revision 100, so the 4096th has 4195.
    assert_eq!(
        (first.revision, first.whole, first.more),
        (4195, true, true)
    );

    // A change between the parts is in a later one.
    mesh.remove("c100");
    let second = mesh.store.changes(first.revision, a).expect("changes");
    assert_eq!(
        (second.revision, second.whole, second.more),
        (5100, false, false)
    );
    assert_eq!(second.removed, [key(100)]);
    let answer: std::collections::BTreeSet<&str> =
        names(&first).into_iter().chain(names(&second)).collect();
    assert_eq!(answer.len(), 5000);
    assert_eq!(second.members.len(), 5000 - MAX_MEMBERS);
}

#[test]
fn short_answers_report_all_members_in_parts() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    add_members(&mesh.store, 3000);
    let most = 512 << 10;
    let mut reported = HashSet::new();
    let mut known = Cursor::default();
    loop {
        let changes = mesh
            .store
            .answer(known, a, most)
            .expect("an answer")
            .changes;
        assert!(serde_json::to_vec(&changes).expect("JSON").len() <= most);
        assert_eq!(changes.whole, reported.is_empty());
        assert!(!changes.members.is_empty());
        reported.extend(names(&changes).into_iter().map(str::to_owned));
        if !changes.more {
            break;
        }
        known = changes.cursor();
    }
    assert_eq!(reported.len(), 3000);
}

#[test]
fn invisible_members_are_examined_in_parts() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    let most = MAX_ROWS as u32;
    add_members(&mesh.store, most + 5000);
    let last = format!("c{}", most + 5099);
    let policy = format!("allow a -> {last} *");
    let set = mesh.store.set_policy(&policy, &operator(), NOW);
    assert!(set.expect("set"));
    let first = mesh.store.answer(0, a, MAX_ANSWER).expect("an answer");
    let rows = MAX_MEMBERS + 1 + MAX_ROWS;
    assert_eq!(first.rows, rows);
    assert!(first.changes.whole && first.changes.more);
    // The member itself was examined, too.
    assert_eq!(first.changes.revision, rows as u64 + 98);
    assert!(first.changes.members.is_empty());
    let known = first.changes.cursor();
    let second = mesh.store.answer(known, a, MAX_ANSWER).expect("an answer");
    assert_eq!(first.rows + second.rows, 1 + MAX_ROWS + 5000);
    assert!(!second.changes.whole && !second.changes.more);
    assert_eq!(names(&second.changes), [last]);
}

#[test]
fn invisible_removals_are_examined_in_parts() {
    let mesh = Mesh::new("100.80.0.0/12");
    let [a, b] = [("a", 1), ("b", 2)].map(|(name, n)| mesh.join(name, n));
    let set = mesh.store.set_policy("allow a -> b *", &operator(), NOW);
    assert!(set.expect("set"));
    let end = 1009 + MAX_ROWS as u64;
    let filled = mesh.store.change(move |mesh| {
        for revision in 1000..=end {
            mesh.put(Former {
                revision,
                member: 0,
                public_key: (&key(revision as u32)).into(),
                own: Some(Party {
                    name: name("gone"),
                    tags: Vec::new(),
                    gateway: None,
                }),
                devices: Vec::new(),
            })?;
        }
        set_revision(mesh, end)
    });
    filled.expect("filled");
    let moved = mesh.store.set_endpoints(b, &at(&[endpoint(1)]), NOW);
    assert!(moved.expect("set"));
    let first = mesh.store.answer(3, a, MAX_ANSWER).expect("an answer");
    assert_eq!(first.rows, MAX_ROWS + 1);
    // A later change of endpoints is reported with a later part.
    let answer = &first.changes;
    assert_eq!(
        (answer.revision, answer.more),
        (999 + MAX_ROWS as u64, true)
    );
    assert!(answer.members.is_empty() && answer.removed.is_empty());
    let second = mesh
        .store
        .answer(answer.cursor(), a, MAX_ANSWER)
        .expect("an answer");
    assert_eq!(second.rows, 11);
    let answer = &second.changes;
    assert_eq!((names(answer), answer.more), (vec!["b"], false));
    assert!(answer.removed.is_empty());
}

#[test]
fn removals_and_members_are_ordered_by_revision() {
    let member = |revision| Change {
        revision,
        cost: 1,
        kind: ChangeKind::Member(Box::new(Member {
            name: name("m"),
            public_key: key(1),
            addresses: Vec::new(),
            endpoints: Vec::new(),
            relayed: Vec::new(),
            tags: Vec::new(),
            devices: Vec::new(),
        })),
    };
    let removal = |revision| Change {
        revision,
        cost: 1,
        kind: ChangeKind::Removal(key(2)),
    };
    let last = MAX_MEMBERS as u64 + 1;
    let changes = (1..=last).map(|n| if n % 2 == 0 { member(n) } else { removal(n) });
    let answer = assemble(changes.collect(), 1 << 20, false, MAX_ANSWER);
    assert_eq!(answer.members.len() + answer.removed.len(), MAX_MEMBERS);
    assert_eq!((answer.more, answer.revision), (true, MAX_MEMBERS as u64));
    let answer = assemble((1..last).map(member).collect(), 1 << 20, false, MAX_ANSWER);
    assert_eq!((answer.more, answer.revision), (false, 1 << 20));
}

#[test]
fn an_answer_is_bounded() {
    let dear = (1..=4000).map(|revision| Change {
        revision,
        cost: 4096,
        kind: ChangeKind::Removal(key(2)),
    });
    let answer = assemble(dear.collect(), 4000, true, MAX_ANSWER);
    // 8 MiB hold 2048 of 4 KiB. Subtract 87: the longest policy in JSON, with 256 KiB and 2 KiB,
    // 19 for the devices of the requester, one for relays, one for coordinators and one for the
    // rest of the answer.
    assert_eq!(
        (answer.removed.len(), answer.revision, answer.more),
        (1961, 1961, true)
    );
}

#[test]
fn the_longest_member_is_within_its_cost() {
    let mesh = Mesh::new("100.80.0.0/12");
    let longest = "x".repeat(Name::MAX_LEN);
    let tags = vec![name(&longest); MAX_TAGS];
    mesh.admit(
        2,
        NewToken {
            tags,
            ..NewToken::default()
        },
    );
    let id = join(&mesh.store, 2, &longest, u32::MAX).expect("joined").id;
    let far = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535";
    let far: SocketAddr = far.parse().expect("an endpoint");
    mesh.store
        .set_endpoints(id, &at(&[far; MAX_ENDPOINTS]), NOW)
        .expect("set");
    let devices: Vec<Name> = (10..10 + MAX_DEVICES)
        .map(|n| name(&format!("{n}{}", &longest[2..])))
        .collect();
    let reported = Devices {
        devices: devices.clone(),
        ..Devices::default()
    };
    mesh.store
        .report_devices(id, &reported, &host(), NOW)
        .expect("reported");
    for device in devices {
        let device = DeviceName {
            device,
            gateway: name(&longest),
        };
        let tags = vec![name(&longest); MAX_TAGS];
        mesh.store
            .approve_device(&device, Some(&tags), &operator(), NOW)
            .expect("approved");
    }
    let networks = networks("100.80.0.0/12");
    let other = mesh.join("other", 1);
    // Without rules, members with the same tags see each other.
    let tags = [name(&longest)];
    mesh.store
        .set_tags(&name("other"), &tags, &operator(), NOW)
        .expect("set");
    let changes = mesh.store.read(|rows| {
        let visibility = Visibility::new(&mesh.store, rows, other);
        members_after(&visibility, 0, &networks, MAX_ROWS)
    });
    let changes = changes.expect("changes").changes;
    let [
        Change {
            cost,
            kind: ChangeKind::Member(member),
            ..
        },
    ] = &changes[..]
    else {
        panic!("there is one member");
    };
    let length = serde_json::to_vec(member).expect("JSON").len();
    // A comma follows; the addresses may have at most 15 and 39 characters.
    let addresses: usize = member.addresses.iter().map(|a| a.to_string().len()).sum();
    assert!(length + 1 + 15 + 39 - addresses <= *cost, "{length} {cost}");
}

#[test]
fn a_new_key_is_reported_as_a_removal_and_a_member() {
    let mesh = Mesh::new("100.80.0.0/12");
    let (a, b) = (mesh.join("a", 1), mesh.join("b", 2));
    let before = mesh.store.revision().expect("queried");
    let set = |n| mesh.store.set_key(a, &key(n), &host(), NOW);
    assert!(set(11).expect("set"));
    // Setting the same key changes nothing.
    let after = mesh.store.revision().expect("queried");
    assert!(!set(11).expect("set"));
    assert_eq!(mesh.store.revision().expect("queried"), after);
    let answer = mesh.store.changes(before, b).expect("changes");
    assert_eq!(answer.removed, [key(1)]);
    let [member] = answer.members.as_slice() else {
        panic!("{answer:?}")
    };
    assert_eq!((member.public_key, member.name.as_str()), (key(11), "a"));
    assert_eq!(member.addresses[0].to_string(), "100.80.0.1");
    // The credential stays the same.
    assert_eq!(mesh.store.authenticate(&digest_of(1)).expect("a member"), a);
    let audit = mesh.store.audit(1).expect("entries");
    assert_eq!(
        (audit[0].change.as_str(), audit[0].subject.as_str()),
        ("key changed", "a")
    );
    // With the first key again there is no removal of it.
    assert!(set(1).expect("set"));
    let answer = mesh.store.changes(before, b).expect("changes");
    assert_eq!(
        (answer.removed, answer.members[0].public_key),
        (vec![key(11)], key(1))
    );
}

#[test]
fn concurrent_changes_to_the_same_key_count_once() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    let set = || mesh.store.set_key(a, &key(11), &host(), NOW).expect("set");
    let times = thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(set)).collect();
        let set = threads.into_iter().map(|t| t.join().expect("no panic"));
        set.filter(|set| *set).count()
    });
    assert_eq!(times, 1);
}

#[test]
fn keys_are_unique_and_changes_are_limited() {
    let mesh = Mesh::new("100.80.0.0/12");
    let (a, b) = (mesh.join("a", 1), mesh.join("b", 2));
    let set = |id, n, now| mesh.store.set_key(id, &key(n), &host(), now);
    let taken = set(a, 2, NOW).expect_err("b's");
    assert_eq!(taken.refusal().reason, Reason::KeyTaken);
    for n in 0..10 {
        assert!(set(a, 100 + n, NOW).expect("set"));
    }
    let many = set(a, 200, NOW + 3599).expect_err("too many");
    assert_eq!(many.refusal().reason, Reason::TooMany);
    assert!(set(b, 201, NOW).expect("set"));
    assert!(set(a, 200, NOW + 3600).expect("set"));
    mesh.store
        .remove(MemberRef::Id(b), &host(), NOW)
        .expect("removed");
    let gone = set(b, 300, NOW).expect_err("no member");
    assert_eq!(gone.refusal().reason, Reason::NotAMember);
}

#[test]
fn other_log_entries_do_not_displace_counted_changes() {
    let mesh = Mesh::new("100.80.0.0/12");
    let a = mesh.join("a", 1);
    let set = |n| mesh.store.set_key(a, &key(n), &host(), NOW);
    let report = |n: u32| {
        let devices = vec![name(&format!("d{n}"))];
        let devices = Devices {
            devices,
            ..Devices::default()
        };
        mesh.store.report_devices(a, &devices, &host(), NOW)
    };
    for n in 0..10 {
        assert!(set(100 + n).expect("set"));
    }
    for n in 0..30 {
        assert!(report(n).expect("reported"));
    }
    let log = |mesh: &mut rows::Mesh| {
        for _ in 0..10_000 {
            audit::record(mesh, NOW, "joined", "x", &host())?;
        }
        Ok(())
    };
    mesh.store.change(log).expect("logged");
    for refused in [set(200), report(200)] {
        let refused = refused.expect_err("too many").refusal();
        assert_eq!(refused.reason, Reason::TooMany);
    }
}

on_etcd! {
    an_answer_lists_the_other_members
    an_answer_to_an_unknown_revision_is_whole
    an_answer_has_only_later_changes
    a_removed_key_that_joins_again_is_a_member
    a_long_list_is_split_into_answers
    removals_and_members_are_ordered_by_revision
    the_longest_member_is_within_its_cost
    a_new_key_is_reported_as_a_removal_and_a_member
    concurrent_changes_to_the_same_key_count_once
    keys_are_unique_and_changes_are_limited
}
