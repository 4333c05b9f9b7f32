//! What several stores know of each other as long as they live.

use super::super::etcd::testing::{has, move_member};
use super::shared::{mesh_at, settings, with_cluster};
use super::*;

#[test]
fn who_asks_elsewhere_by_now_is_not_taken_for_gone() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        let member = join(&store, 1, "m", 1).expect("joined").id;
        let seen = move_member(&settings, member.0, || {
            let members = store.members().expect("members");
            (members[0].at.clone(), members[0].seen)
        });
        let two = Some("two.example:7443".to_owned());
        assert_eq!(seen, [(two, 200), (None, 200)]);
    });
}

#[test]
fn coordinators_know_of_each_other_and_who_asks_where() {
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
        let soon = |what: &str, is_so: &dyn Fn() -> bool| {
            let until = Instant::now() + Duration::from_secs(60);
            while !is_so() {
                assert!(Instant::now() < until, "{what}");
                thread::sleep(Duration::from_millis(10));
            }
        };
        let both = ["one.example:7443", "two.example:7443"];
        soon("both know both", &|| {
            known(&one) == both && known(&two) == both
        });

        one.touch(member, NOW + 100).expect("noted");
        let seen = |store: &Store| {
            let members = store.members().expect("members");
            (members[0].at.clone(), members[0].seen)
        };
        let here = (Some("one.example:7443".to_owned()), NOW + 100);
        soon("it is known where it asks", &|| seen(&two) == here);

        two.call(member, key(7));
        soon("the call arrives", &|| one.calls() == [(member, key(7))]);
        assert_eq!(two.calls(), [], "nobody calls itself");

        drop(one);
        soon("who ends is gone at once", &|| {
            known(&two) == ["two.example:7443"]
        });
        assert_eq!(seen(&two), (None, NOW + 100));
    });
}

#[test]
fn who_asks_elsewhere_and_comes_back_is_not_taken_for_gone_when_the_other_ends() {
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
        let is_at = || one.members().expect("members")[0].at.clone();
        let asks = |store: &Store, now: u64, place: &str| {
            let until = Instant::now() + Duration::from_secs(60);
            while is_at().as_deref() != Some(place) {
                assert!(Instant::now() < until, "it asks {place}");
                // Again and again, as members do.
                store.touch(member, now).expect("noted");
                thread::sleep(Duration::from_millis(20));
            }
        };
        asks(&one, NOW + 1, "one.example:7443");
        asks(&two, NOW + 2, "two.example:7443");
        asks(&one, NOW + 3, "one.example:7443");
        drop(two);
        thread::sleep(Duration::from_secs(1));
        assert_eq!(is_at().as_deref(), Some("one.example:7443"));
    });
}

#[test]
fn when_a_member_was_heard_goes_with_it_and_does_not_come_back() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        let member = join(&store, 1, "m", 1).expect("joined").id;
        let key = format!("{}/seen/{}", settings.prefix, member.0);
        // On a thread of its own, as this is asked while another question is.
        let is_noted = || {
            let asked = thread::scope(|scope| scope.spawn(|| has(&settings, &key)).join());
            asked.expect("no panic")
        };
        let look = || {
            let was_noted = is_noted();
            // The first time it asks, the other does not know yet that it is none any more.
            let removed = store.remove(Whom::Id(member), &operator(), NOW);
            (was_noted, removed.expect("asked"), is_noted())
        };
        let found = move_member(&settings, member.0, look);
        assert_eq!(found, [(true, true, false), (false, false, false)]);
    });
}

#[test]
fn as_many_as_like_may_go_at_once() {
    with_cluster(|cluster| {
        let store = mesh_at(&settings(cluster));
        let all: Vec<MemberId> = (1..=64)
            .map(|n| join(&store, 1, &format!("m{n}"), n).expect("joined").id)
            .collect();
        // Together they are more than etcd takes in a transaction.
        thread::scope(|scope| {
            for id in &all {
                let store = &store;
                scope.spawn(move || {
                    let gone = store.remove(Whom::Id(*id), &host(), NOW);
                    assert!(gone.expect("asked"));
                });
            }
        });
        assert_eq!(store.members().expect("members"), []);
    });
}
