//! Live state of several coordinators.

use super::super::etcd::testing::{has, move_member};
use super::shared::{mesh_at, settings, with_cluster};
use super::*;

#[test]
fn a_member_that_polls_elsewhere_stays_present() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        let member = join(&store, 1, "m", 1).expect("joined").id;
        let seen = move_member(&settings, member.0, || {
            let members = store.members().expect("members");
            (members[0].coordinator.clone(), members[0].seen)
        });
        let two = Some("two.example:7443".to_owned());
        assert_eq!(seen, [(two, 200), (None, 200)]);
    });
}

#[test]
fn coordinators_know_each_other_and_the_presence_of_members() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let member = join(&mesh_at(&settings), 1, "m", 1).expect("joined").id;
        let at = |address: &str| Etcd {
            advertise: Some(address.parse().expect("an address")),
            ..settings.clone()
        };
        let one = Store::open_etcd(&at("one.example:7443")).expect("opened");
        let two = Store::open_etcd(&at("two.example:7443")).expect("opened");
        let known = |store: &Store| -> Vec<String> {
            store
                .coordinators()
                .iter()
                .map(ToString::to_string)
                .collect()
        };
        let soon = |message: &str, is_so: &dyn Fn() -> bool| {
            let until = Instant::now() + Duration::from_secs(60);
            while !is_so() {
                assert!(Instant::now() < until, "{message}");
                thread::sleep(Duration::from_millis(10));
            }
        };
        let both = ["one.example:7443", "two.example:7443"];
        soon("both know both", &|| {
            known(&one) == both && known(&two) == both
        });

        one.touch(member, NOW + 100).expect("recorded");
        let seen = |store: &Store| {
            let members = store.members().expect("members");
            (members[0].coordinator.clone(), members[0].seen)
        };
        let here = (Some("one.example:7443".to_owned()), NOW + 100);
        soon("the presence is known", &|| seen(&two) == here);

        two.call(member, key(7));
        soon("the call arrives", &|| one.calls() == [(member, key(7))]);
        assert_eq!(two.calls(), [], "no coordinator receives its own call");

        drop(one);
        soon("a coordinator that ends is removed at once", &|| {
            known(&two) == ["two.example:7443"]
        });
        assert_eq!(seen(&two), (None, NOW + 100));
    });
}

#[test]
fn a_member_that_returns_stays_present_when_the_other_coordinator_ends() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let member = join(&mesh_at(&settings), 1, "m", 1).expect("joined").id;
        let at = |address: &str| {
            let settings = Etcd {
                advertise: Some(address.parse().expect("an address")),
                ..settings.clone()
            };
            Store::open_etcd(&settings).expect("opened")
        };
        let (one, two) = (at("one.example:7443"), at("two.example:7443"));
        let is_at = || one.members().expect("members")[0].coordinator.clone();
        let poll_until = |store: &Store, now: u64, location: &str| {
            let until = Instant::now() + Duration::from_secs(60);
            while is_at().as_deref() != Some(location) {
                assert!(Instant::now() < until, "it polls {location}");
                // Repeatedly, as members do.
                store.touch(member, now).expect("recorded");
                thread::sleep(Duration::from_millis(20));
            }
        };
        poll_until(&one, NOW + 1, "one.example:7443");
        poll_until(&two, NOW + 2, "two.example:7443");
        poll_until(&one, NOW + 3, "one.example:7443");
        drop(two);
        thread::sleep(Duration::from_secs(1));
        assert_eq!(is_at().as_deref(), Some("one.example:7443"));
    });
}

#[test]
fn the_activity_of_a_removed_member_is_deleted() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        let member = join(&store, 1, "m", 1).expect("joined").id;
        let key = format!("{}/seen/{}", settings.prefix, member.0);
        // A nested query needs a thread of its own.
        let is_recorded = || {
            let found_key = thread::scope(|scope| scope.spawn(|| has(&settings, &key)).join());
            found_key.expect("no panic")
        };
        let observe = || {
            let was_recorded = is_recorded();
            // The second coordinator does not know about the removal yet.
            let removed = store.remove(MemberRef::Id(member), &operator(), NOW);
            (was_recorded, removed.expect("queried"), is_recorded())
        };
        let found = move_member(&settings, member.0, observe);
        assert_eq!(found, [(true, true, false), (false, false, false)]);
    });
}

#[test]
fn many_members_may_leave_at_once() {
    with_cluster(|cluster| {
        let store = mesh_at(&settings(cluster));
        let all: Vec<MemberId> = (1..=64)
            .map(|n| join(&store, 1, &format!("m{n}"), n).expect("joined").id)
            .collect();
        // Together they exceed the operations of one transaction.
        thread::scope(|scope| {
            for id in &all {
                let store = &store;
                scope.spawn(move || {
                    let gone = store.remove(MemberRef::Id(*id), &host(), NOW);
                    assert!(gone.expect("queried"));
                });
            }
        });
        assert_eq!(store.members().expect("members"), []);
    });
}
