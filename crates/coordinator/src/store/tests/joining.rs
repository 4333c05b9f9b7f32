//! Joins.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use seikan_proto::mesh::{MAX_TAGS, Reason};

use super::*;

fn reason(joined: Result<Joining, StoreError>) -> Reason {
    joined.expect_err("refused").refusal().reason
}

fn once() -> NewToken {
    NewToken {
        uses: Some(1),
        ..NewToken::default()
    }
}

#[test]
fn concurrent_joins_get_unique_numbers() {
    let mesh = Mesh::new("100.80.0.0/12");
    let other = mesh.reopen();
    let stores = [&mesh.store, &other];
    let numbers: BTreeSet<u32> = thread::scope(|scope| {
        let threads: Vec<_> = (0..200)
            .map(|n| {
                let store = stores[n as usize % 2];
                scope.spawn(move || join(store, 1, &format!("m{n}"), n).expect("joined").number)
            })
            .collect();
        let numbers = threads
            .into_iter()
            .map(|t| t.join().expect("it has not panicked"));
        numbers.collect()
    });
    assert_eq!(numbers, (1..=200).collect());
    // A replica receives the changes of the other store a moment later.
    let until = Instant::now() + Duration::from_secs(60);
    for store in stores {
        let used = || store.tokens().expect("tokens")[0].used;
        while (store.revision().expect("queried"), used()) != (200, 200) {
            assert!(Instant::now() < until, "{:?}, {}", store.revision(), used());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn a_host_gets_the_addresses_of_its_number_and_the_tags_of_its_token() {
    let mesh = Mesh::new("100.80.0.0/12");
    mesh.join("a", 1);
    let tagged = NewToken {
        tags: vec![name("web"), name("eu")],
        ..NewToken::default()
    };
    mesh.admit(2, tagged);
    let joining = join(&mesh.store, 2, "b", 2).expect("joined");
    assert_eq!(joining.number, 2);
    assert!(!joining.was_member);
    let addresses = joining.addresses.map(|a| a.to_string());
    assert_eq!(addresses, ["100.80.0.2/12", "fd00::2/64"]);
    assert_eq!(
        mesh.store.authenticate(&digest_of(2)).expect("a member"),
        joining.id
    );
    let member = &mesh.store.members().expect("members")[1].member;
    assert_eq!(member.tags, [name("web"), name("eu")]);
}

#[test]
fn a_one_time_token_admits_one_host_repeatedly_until_it_expires() {
    let mesh = Mesh::new("100.80.0.0/12");
    let expires = Some(NOW + 100);
    mesh.admit(2, NewToken { expires, ..once() });
    let store = &mesh.store;
    let first = join(store, 2, "a", 1).expect("joined");
    assert_eq!(reason(join(store, 2, "b", 2)), Reason::BadToken);

    let ask = |request: JoinRequest, at| store.join(&request, &host(), at);
    let again = ask(request(2, "a", 1), NOW + 99).expect("again");
    assert_eq!(
        again,
        Joining {
            was_member: true,
            ..first
        }
    );
    store.authenticate(&digest_of(1)).expect("its credential");
    assert_eq!(store.tokens().expect("tokens")[0].used, 1);
    assert_eq!(store.audit(9).expect("entries")[0].change, "joined");

    assert_eq!(
        reason(join(store, 2, "c", 1)),
        Reason::BadToken,
        "under another name"
    );
    assert_eq!(
        reason(join(store, 2, "a", 3)),
        Reason::BadToken,
        "with another key"
    );
    let late = ask(request(2, "a", 1), NOW + 100);
    assert_eq!(reason(late), Reason::BadToken, "too late");
}

#[test]
fn name_and_key_of_a_member_do_not_admit_another_host() {
    let mesh = Mesh::new("100.80.0.0/12");
    mesh.join("a", 1);
    let other = JoinRequest {
        credential: credential(9),
        ..request(1, "a", 1)
    };
    let taken = mesh.store.join(&other, &host(), NOW);
    assert_eq!(reason(taken), Reason::KeyTaken);
    mesh.store
        .authenticate(&digest_of(1))
        .expect("its credential");
    mesh.store
        .authenticate(&digest_of(9))
        .expect_err("another's");
}

#[test]
fn a_used_up_token_does_not_readmit_a_removed_member() {
    let mesh = Mesh::new("100.80.0.0/12");
    mesh.admit(2, once());
    join(&mesh.store, 2, "a", 1).expect("joined");
    mesh.remove("a");
    assert_eq!(reason(join(&mesh.store, 2, "a", 1)), Reason::BadToken);
    mesh.store
        .authenticate(&digest_of(1))
        .expect_err("its credential is good for nothing");
}

#[test]
fn a_token_admits_a_limited_number_of_hosts() {
    let mesh = Mesh::new("100.80.0.0/12");
    let uses = Some(3);
    mesh.admit(2, NewToken { uses, ..once() });
    for n in 1..=3 {
        join(&mesh.store, 2, &format!("m{n}"), n).expect("joined");
    }
    assert_eq!(reason(join(&mesh.store, 2, "m4", 4)), Reason::BadToken);
    let info = &mesh.store.tokens().expect("tokens")[0];
    assert_eq!((info.uses, info.used, info.is_good(NOW)), (uses, 3, false));
}

#[test]
fn a_refusal_does_not_say_why_a_token_is_invalid() {
    let mesh = Mesh::new("100.80.0.0/12");
    let store = &mesh.store;
    mesh.admit(2, once());
    join(store, 2, "a", 1).expect("joined");
    let expires = Some(NOW);
    mesh.admit(3, NewToken { expires, ..once() });
    let withdrawn = mesh.admit(4, NewToken::default());
    assert!(
        store
            .withdraw_token(withdrawn, &operator(), NOW)
            .expect("queried")
    );
    let refusals: Vec<_> = [2, 3, 4, 99]
        .into_iter()
        .map(|with| join(store, with, "b", 2).expect_err("refused").refusal())
        .collect();
    assert!(refusals.iter().all(|r| r == &refusals[0]), "{refusals:?}");
    assert_eq!(refusals[0].reason, Reason::BadToken);
    let good: Vec<_> = store
        .tokens()
        .expect("tokens")
        .iter()
        .map(|t| t.is_good(NOW))
        .collect();
    assert_eq!(good, [false, false, false, true]);
}

#[test]
fn names_and_keys_are_unique() {
    let mesh = Mesh::new("100.80.0.0/12");
    mesh.join("a", 1);
    let store = &mesh.store;
    let before = (
        store.revision().expect("queried"),
        store.tokens().expect("tokens"),
    );
    assert_eq!(reason(join(store, 1, "a", 2)), Reason::NameTaken);
    assert_eq!(reason(join(store, 1, "b", 1)), Reason::KeyTaken);
    // Without a token a host does not learn which names and keys are in use.
    assert_eq!(reason(join(store, 99, "a", 2)), Reason::BadToken);
    assert_eq!(reason(join(store, 99, "b", 1)), Reason::BadToken);
    let after = (
        store.revision().expect("queried"),
        store.tokens().expect("tokens"),
    );
    assert_eq!(before, after, "nothing was changed");
}

#[test]
fn names_are_reused_at_once_and_addresses_last() {
    // Six addresses: a /29 has eight, and the first and the last are reserved.
    let mesh = Mesh::new("10.0.0.0/29");
    let number =
        |member_name: &str, n| join(&mesh.store, 1, member_name, n).expect("joined").number;
    for n in 1..=3 {
        assert_eq!(number(&format!("m{n}"), n), n);
    }
    mesh.remove("m2");
    mesh.remove("m1");
    assert_eq!(number("m2", 12), 4, "a new host with the old name");
    assert_eq!(number("m5", 5), 5);
    assert_eq!(number("m6", 6), 6);
    assert_eq!(number("m7", 7), 2, "free for longest");
    assert_eq!(number("m8", 8), 1);
    assert_eq!(reason(join(&mesh.store, 1, "m9", 9)), Reason::Full);
    mesh.remove("m7");
    assert_eq!(number("m9", 9), 2);
}

#[test]
fn tokens_are_bounded() {
    let mesh = Mesh::new("100.80.0.0/12");
    let no_use = NewToken {
        uses: Some(0),
        ..once()
    };
    let tags = NewToken {
        tags: vec![name("t"); MAX_TAGS + 1],
        ..once()
    };
    let label = NewToken {
        label: Some("ä".repeat(101)),
        ..once()
    };
    for bad in [no_use, tags, label] {
        let made = mesh
            .store
            .create_token(&token(2).digest(), &bad, &operator(), NOW);
        let error = made.expect_err("out of bounds");
        assert!(matches!(error, StoreError::OutOfBounds(_)), "{error}");
    }
    let longest = NewToken {
        label: Some("ä".repeat(100)),
        tags: vec![name("t"); MAX_TAGS],
        ..once()
    };
    mesh.admit(2, longest);
}

on_etcd! {
    concurrent_joins_get_unique_numbers
    a_host_gets_the_addresses_of_its_number_and_the_tags_of_its_token
    a_one_time_token_admits_one_host_repeatedly_until_it_expires
    name_and_key_of_a_member_do_not_admit_another_host
    a_used_up_token_does_not_readmit_a_removed_member
    a_token_admits_a_limited_number_of_hosts
    a_refusal_does_not_say_why_a_token_is_invalid
    names_and_keys_are_unique
    names_are_reused_at_once_and_addresses_last
    tokens_are_bounded
}
