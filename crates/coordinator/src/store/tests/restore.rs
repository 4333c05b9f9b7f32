//! Repair of a mesh whose etcd was restored from a backup.

use super::proxy::{Proxy, cut};
use super::shared::{mesh_at, names, settings, with_cluster};
use super::*;

/// Restores a backup under two coordinators. The second is cut off until etcd's revisions exceed
/// the revisions that it knew.
fn restore(is_new: bool) {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let one = mesh_at(&direct);
        let (proxies, far) = Proxy::to_all(&direct);
        let other = Store::open_etcd(&far).expect("opened");
        join(&one, 1, "a", 1).expect("joined");
        let b = join(&one, 1, "b", 2).expect("joined");
        let folder = tempfile::tempdir().expect("a folder");
        let backup = folder.path().join("backup");
        cluster.snapshot(&backup).expect("saved");

        // The backup lacks two members and a policy.
        let c = join(&one, 1, "c", 3).expect("joined");
        let d = join(&one, 1, "d", 4).expect("joined");
        let policy = "allow a -> b tcp/22\n";
        one.set_policy(policy, &operator(), NOW).expect("set");
        other.authenticate(&digest_of(4)).expect("known");
        other.catch_up().expect("caught up");
        let (epoch, revision) = (one.epoch(), one.revision().expect("queried"));
        assert_eq!(other.revision().expect("queried"), revision);
        cut(&proxies, true);
        cluster.restore(&backup, is_new).expect("restored");

        let until = Instant::now() + Duration::from_secs(15);
        while names(&one) != ["a", "b"] {
            assert!(Instant::now() < until, "{:?}", names(&one));
            thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(one.authenticate(&digest_of(2)).expect("a member"), b.id);
        let error = one
            .authenticate(&digest_of(3))
            .expect_err("not in the backup");
        assert!(matches!(error, StoreError::NotAMember), "{error}");

        // The next change repairs the mesh.
        let e = join(&one, 1, "e", 5).expect("joined");
        assert!(e.number > d.number && e.number > c.number, "{e:?} {d:?}");
        assert!(e.id > d.id);
        assert_ne!(one.epoch(), epoch, "members receive everything again");
        assert!(one.revision().expect("queried") > revision);
        let audit = one.audit(100).expect("queried");
        let logged: Vec<&AuditEntry> = audit
            .iter()
            .filter(|a| a.change == "etcd restored")
            .collect();
        assert_eq!(logged.len(), 1);
        let expected = format!("from revision {revision} to 2, with an earlier policy");
        assert_eq!(logged[0].subject, expected);

        for n in 6..30 {
            join(&one, 1, &format!("m{n}"), n).expect("joined");
        }
        cut(&proxies, false);
        let until = Instant::now() + Duration::from_secs(15);
        while names(&other) != names(&one) {
            assert!(Instant::now() < until, "{:?}", names(&other));
            thread::sleep(Duration::from_millis(20));
        }
        // Nothing is left to repair.
        other.repair().expect("queried");
        assert_eq!(other.epoch(), one.epoch());
        assert_eq!(other.policy().expect("queried"), "");
        let audit = other.audit(100).expect("queried");
        assert_eq!(
            audit.iter().filter(|a| a.change == "etcd restored").count(),
            1
        );
    });
}

#[test]
fn a_restored_mesh_is_repaired_in_a_new_cluster() {
    restore(true);
}

#[test]
fn a_restored_mesh_is_repaired_in_the_same_cluster() {
    restore(false);
}

#[test]
fn a_restore_without_losses_is_not_logged() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        join(&store, 1, "a", 1).expect("joined");
        let folder = tempfile::tempdir().expect("a folder");
        let backup = folder.path().join("backup");
        cluster.snapshot(&backup).expect("saved");
        let revision = store.revision().expect("queried");
        cluster.restore(&backup, true).expect("restored");
        join(&store, 1, "b", 2).expect("joined");
        assert_eq!(store.revision().expect("queried"), revision + 1);
        let audit = store.audit(100).expect("queried");
        assert!(audit.iter().all(|a| a.change != "etcd restored"));
    });
}

/// Creates a mesh with a network of a given size.
fn mesh_of(settings: &Etcd, v4: &str) -> Store {
    let store = Store::open_etcd(settings).expect("opened");
    let set = store.init(networks(v4), &operator(), NOW);
    set.expect("networks");
    let made = store.create_token(&token(1).digest(), &NewToken::default(), &operator(), NOW);
    made.expect("a token");
    store
}

#[test]
fn addresses_given_after_the_backup_are_reused_last() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_of(&settings, "10.0.0.0/29");
        let joins = |n: u32| join(&store, 1, &format!("m{n}"), n).expect("joined");
        let leaves = |n: u32| {
            let gone = store.remove(MemberRef::Name(&name(&format!("m{n}"))), &operator(), NOW);
            assert!(gone.expect("queried"));
        };
        (1..=6).for_each(|n| assert_eq!(joins(n).number, n));
        [3, 1, 5, 2].into_iter().for_each(leaves);
        let folder = tempfile::tempdir().expect("a folder");
        let backup = folder.path().join("backup");
        cluster.snapshot(&backup).expect("saved");
        // One of the two lowest free numbers is in use now, and the other was for a while.
        assert_eq!(joins(7).number, 3);
        assert_eq!(joins(8).number, 1);
        leaves(8);
        cluster.restore(&backup, true).expect("restored");
        let until = Instant::now() + Duration::from_secs(15);
        while names(&store) != ["m4", "m6"] {
            assert!(Instant::now() < until, "{:?}", names(&store));
            thread::sleep(Duration::from_millis(20));
        }
        let numbers = [9, 10, 11, 12].map(|n| joins(n).number);
        assert_eq!(numbers[..2], [5, 2]);
        let last: std::collections::BTreeSet<u32> = numbers[2..].iter().copied().collect();
        assert_eq!(last, [1, 3].into());
    });
}

#[test]
fn no_address_is_lost_with_many_members() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_of(&settings, "10.0.0.0/24");
        let folder = tempfile::tempdir().expect("a folder");
        let backup = folder.path().join("backup");
        cluster.snapshot(&backup).expect("saved");
        for n in 1..=250 {
            join(&store, 1, &format!("m{n}"), n).expect("joined");
        }
        cluster.restore(&backup, true).expect("restored");
        let until = Instant::now() + Duration::from_secs(15);
        while !names(&store).is_empty() {
            assert!(Instant::now() < until, "it does not notice");
            thread::sleep(Duration::from_millis(20));
        }
        let epoch = store.epoch();
        let all: std::collections::BTreeSet<u32> = (251..=504)
            .map(|n| join(&store, 1, &format!("m{n}"), n).expect("joined").number)
            .collect();
        assert_eq!(all, (1..=254).collect());
        assert_ne!(store.epoch(), epoch);
        let audit = store.audit(1000).expect("queried");
        let logged = audit.iter().filter(|entry| entry.change == "etcd restored");
        assert_eq!(logged.count(), 1);
    });
}

#[test]
fn no_reused_address_is_lost_with_many_members() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_of(&settings, "10.0.0.0/25");
        let joins = |n: u32| join(&store, 1, &format!("m{n}"), n).expect("joined").number;
        for n in 1..=126 {
            joins(n);
        }
        for n in 1..=60 {
            let gone = store.remove(MemberRef::Name(&name(&format!("m{n}"))), &operator(), NOW);
            assert!(gone.expect("queried"));
        }
        let folder = tempfile::tempdir().expect("a folder");
        let backup = folder.path().join("backup");
        cluster.snapshot(&backup).expect("saved");
        // Numbers that are free in the backup are in use again when it is restored.
        for n in 301..=360 {
            joins(n);
        }
        cluster.restore(&backup, true).expect("restored");
        let until = Instant::now() + Duration::from_secs(15);
        while names(&store).len() != 66 {
            assert!(Instant::now() < until, "it does not notice");
            thread::sleep(Duration::from_millis(20));
        }
        let all: std::collections::BTreeSet<u32> = (401..=460).map(joins).collect();
        assert_eq!(all, (1..=60).collect());
    });
}
