//! What becomes of a mesh when etcd comes back from a backup.

use super::shared::{mesh_at, names, settings, with_cluster};
use super::ways::{Way, cut};
use super::*;

/// What becomes of a mesh whose etcd comes back from a backup: two coordinators were there, of whom the second hears of it only when
/// etcd's revisions are ahead again of what it knew.
fn restore(is_new: bool) {
    with_cluster(|cluster| {
        let direct = settings(cluster);
        let one = mesh_at(&direct);
        let (ways, far) = Way::to_all(&direct);
        let other = Store::open_etcd(&far).expect("opened");
        join(&one, 1, "a", 1).expect("joined");
        let b = join(&one, 1, "b", 2).expect("joined");
        let folder = tempfile::tempdir().expect("a folder");
        let backup = folder.path().join("backup");
        cluster.snapshot(&backup).expect("saved");

        // What the backup does not have: two members, and a policy.
        let c = join(&one, 1, "c", 3).expect("joined");
        let d = join(&one, 1, "d", 4).expect("joined");
        let policy = "allow a -> b tcp/22\n";
        one.set_policy(policy, &operator(), NOW).expect("set");
        other.authenticate(&shown(4)).expect("known");
        other.catch_up().expect("caught up");
        let (epoch, revision) = (one.epoch(), one.revision().expect("asked"));
        assert_eq!(other.revision().expect("asked"), revision);
        cut(&ways, true);
        cluster.restore(&backup, is_new).expect("restored");

        let until = Instant::now() + Duration::from_secs(15);
        while names(&one) != ["a", "b"] {
            assert!(Instant::now() < until, "{:?}", names(&one));
            thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(one.authenticate(&shown(2)).expect("a member"), b.id);
        let error = one.authenticate(&shown(3)).expect_err("not in the backup");
        assert!(matches!(error, StoreError::NotAMember), "{error}");

        // By whatever is changed next.
        let e = join(&one, 1, "e", 5).expect("joined");
        assert!(e.number > d.number && e.number > c.number, "{e:?} {d:?}");
        assert!(e.id > d.id);
        assert_ne!(one.epoch(), epoch, "members are told of everybody anew");
        assert!(one.revision().expect("asked") > revision);
        let audit = one.audit(100).expect("asked");
        let noted: Vec<&AuditEntry> = audit.iter().filter(|a| a.what == "etcd restored").collect();
        assert_eq!(noted.len(), 1);
        let said = format!("from revision {revision} to 2, with an earlier policy");
        assert_eq!(noted[0].subject, said);

        for n in 6..30 {
            join(&one, 1, &format!("m{n}"), n).expect("joined");
        }
        cut(&ways, false);
        let until = Instant::now() + Duration::from_secs(15);
        while names(&other) != names(&one) {
            assert!(Instant::now() < until, "{:?}", names(&other));
            thread::sleep(Duration::from_millis(20));
        }
        // It has nothing to add.
        other.mend().expect("asked");
        assert_eq!(other.epoch(), one.epoch());
        assert_eq!(other.policy().expect("asked"), "");
        let audit = other.audit(100).expect("asked");
        assert_eq!(
            audit.iter().filter(|a| a.what == "etcd restored").count(),
            1
        );
    });
}

#[test]
fn a_mesh_goes_on_from_where_it_was_when_etcd_comes_back_from_a_backup() {
    restore(true);
}

#[test]
fn nor_does_it_help_that_the_cluster_has_the_same_number_as_before() {
    restore(false);
}

#[test]
fn nobody_is_told_of_a_restore_that_lost_nothing() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_at(&settings);
        join(&store, 1, "a", 1).expect("joined");
        let folder = tempfile::tempdir().expect("a folder");
        let backup = folder.path().join("backup");
        cluster.snapshot(&backup).expect("saved");
        let revision = store.revision().expect("asked");
        cluster.restore(&backup, true).expect("restored");
        join(&store, 1, "b", 2).expect("joined");
        assert_eq!(store.revision().expect("asked"), revision + 1);
        let audit = store.audit(100).expect("asked");
        assert!(audit.iter().all(|a| a.what != "etcd restored"));
    });
}

/// A mesh of so many addresses.
fn mesh_of(settings: &Etcd, v4: &str) -> Store {
    let store = Store::open_etcd(settings).expect("opened");
    let set = store.init(networks(v4), &operator(), NOW);
    set.expect("networks");
    let made = store.create_token(&token(1).digest(), &NewToken::default(), &operator(), NOW);
    made.expect("a token");
    store
}

#[test]
fn an_address_that_somebody_had_after_the_backup_is_given_after_all_others() {
    with_cluster(|cluster| {
        let settings = settings(cluster);
        let store = mesh_of(&settings, "10.0.0.0/29");
        let joins = |n: u32| join(&store, 1, &format!("m{n}"), n).expect("joined");
        let leaves = |n: u32| {
            let gone = store.remove(Whom::Name(&name(&format!("m{n}"))), &operator(), NOW);
            assert!(gone.expect("asked"));
        };
        (1..=6).for_each(|n| assert_eq!(joins(n).number, n));
        [3, 1, 5, 2].into_iter().for_each(leaves);
        let folder = tempfile::tempdir().expect("a folder");
        let backup = folder.path().join("backup");
        cluster.snapshot(&backup).expect("saved");
        // One has it still, and one had it for a while.
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
fn no_address_is_lost_with_however_many_members() {
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
            assert!(Instant::now() < until, "it does not hear of it");
            thread::sleep(Duration::from_millis(20));
        }
        let epoch = store.epoch();
        let all: std::collections::BTreeSet<u32> = (251..=504)
            .map(|n| join(&store, 1, &format!("m{n}"), n).expect("joined").number)
            .collect();
        assert_eq!(all, (1..=254).collect());
        assert_ne!(store.epoch(), epoch);
        let audit = store.audit(1000).expect("asked");
        let noted = audit.iter().filter(|entry| entry.what == "etcd restored");
        assert_eq!(noted.count(), 1);
    });
}
