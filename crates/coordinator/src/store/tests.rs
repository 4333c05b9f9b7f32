//! The rules of the store. Here: the file, and what is kept; [`joining`], [`telling`], [`relays`] and [`policies`] have the rest,
//! [`shared`] how several coordinators are on etcd, [`living`] what they know of each other, [`restoring`] what becomes of them with a
//! backup, and [`moving`] how a mesh comes there.
//!
//! What holds for both stores is tested with both: what [`on_etcd`] lists is run again on a real cluster.

/// The same tests again, on etcd.
macro_rules! on_etcd {
    ($($test:ident)*) => {
        mod on_etcd {
            $(
                #[test]
                fn $test() {
                    crate::store::tests::shared::on_etcd(super::$test);
                }
            )*
        }
    };
}

mod joining;
mod living;
mod moving;
mod policies;
mod relays;
mod restoring;
mod shared;
pub(crate) mod telling;
pub(crate) mod ways;

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Credential, Digest, JoinRequest, Name, Token};
use seikan_proto::rng::Rng;
use tempfile::TempDir;

use super::*;

pub const NOW: u64 = 1_800_000_000;

/// Sets a flag when it is dropped, also by a panic: threads of a scope that go on until it is set would keep the scope from ending.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The same byte again and again.
struct Same(u8);

impl Rng for Same {
    fn fill(&mut self, destination: &mut [u8]) {
        destination.fill(self.0);
    }
}

pub fn token(n: u8) -> Token {
    Token::generate(&mut Same(n))
}

pub fn key(n: u32) -> PublicKey {
    let mut bytes = [0; 32];
    bytes[28..].copy_from_slice(&n.to_be_bytes());
    PublicKey::from_bytes(bytes)
}

/// What host `n` shows.
pub fn credential(n: u32) -> Credential {
    // 32 digits are base64url, too.
    format!("skc_{n:032}").parse().expect("a credential")
}

/// The digest of that.
pub fn shown(n: u32) -> Digest {
    credential(n).digest()
}

pub fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

pub fn request(with: u8, called: &str, n: u32) -> JoinRequest {
    JoinRequest {
        token: token(with),
        name: name(called),
        public_key: key(n),
        credential: credential(n),
    }
}

pub fn host() -> Actor {
    Actor::Host(IpAddr::from([192u8, 0, 2, 1]))
}

pub fn operator() -> Actor {
    Actor::Operator("root".to_owned())
}

pub fn networks(v4: &str) -> Networks {
    let v6 = "fd00::/64".parse().expect("a network");
    Networks::new(v4.parse().expect("a network"), v6).expect("networks")
}

/// A mesh with a token, number 1, that admits whoever comes.
pub struct Mesh {
    place: Place,
    pub store: Store,
}

/// Where it is.
pub enum Place {
    File(TempDir),
    Etcd(Etcd),
}

impl Place {
    /// Where nothing is yet.
    pub fn new() -> Place {
        match shared::prefix() {
            Some(settings) => Place::Etcd(settings),
            None => Place::File(tempfile::tempdir().expect("a folder")),
        }
    }

    pub fn path(&self) -> PathBuf {
        match self {
            Place::File(folder) => folder.path().join("state/mesh.db"),
            Place::Etcd(_) => unreachable!("a test of files alone"),
        }
    }

    pub fn open(&self) -> Store {
        match self {
            Place::File(_) => Store::open(&self.path()).expect("opened"),
            Place::Etcd(settings) => Store::open_etcd(settings).expect("opened"),
        }
    }
}

impl Mesh {
    pub fn new(v4: &str) -> Mesh {
        let place = Place::new();
        let store = place.open();
        store
            .init(networks(v4), &operator(), NOW)
            .expect("networks set");
        let mesh = Mesh { place, store };
        mesh.admit(1, NewToken::default());
        mesh
    }

    pub fn path(&self) -> PathBuf {
        self.place.path()
    }

    /// Another store of the same, which knows what this one does.
    pub fn again(&self) -> Store {
        self.place.open()
    }

    pub fn admit(&self, n: u8, good_for: NewToken) -> TokenId {
        let made = self
            .store
            .create_token(&token(n).digest(), &good_for, &operator(), NOW);
        made.expect("a token")
    }

    /// By the token that admits everybody.
    pub fn join(&self, called: &str, n: u32) -> MemberId {
        join(&self.store, 1, called, n).expect("joined").id
    }

    pub fn remove(&self, called: &str) {
        let name = name(called);
        let removed = self.store.remove(Whom::Name(&name), &operator(), NOW);
        assert!(removed.expect("asked"), "{called} was a member");
    }
}

pub fn join(store: &Store, with: u8, called: &str, n: u32) -> Result<Joining, StoreError> {
    store.join(&request(with, called, n), &host(), NOW)
}

#[test]
fn what_is_acknowledged_is_on_the_disk() {
    let mesh = Mesh::new("100.80.0.0/12");
    let Backing::File(connection) = &mesh.store.backing else {
        unreachable!("a file")
    };
    let asked = |name: &str| -> String {
        let value = |row: &rusqlite::Row<'_>| row.get::<_, rusqlite::types::Value>(0);
        let value = lock(connection).pragma_query_value(None, name, value);
        match value.expect("asked") {
            rusqlite::types::Value::Integer(number) => number.to_string(),
            rusqlite::types::Value::Text(text) => text,
            other => panic!("{other:?}"),
        }
    };
    // sqlite.org/pragma.html#pragma_synchronous: in WAL mode only FULL (2) syncs the log after each transaction.
    assert_eq!(
        (
            asked("journal_mode").as_str(),
            asked("synchronous").as_str()
        ),
        ("wal", "2")
    );
}

#[test]
fn file_and_folder_are_their_owners_only() {
    let mesh = Mesh::new("100.80.0.0/12");
    mesh.join("a", 1);
    let mode = |path: PathBuf| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    let folder = mesh.path().parent().expect("a folder").to_owned();
    assert_eq!(mode(folder), 0o700);
    for suffix in ["", "-wal", "-shm"] {
        let path = format!("{}{suffix}", mesh.path().display());
        assert_eq!(mode(path.clone().into()), 0o600, "{path}");
    }
}

#[test]
fn what_was_written_is_there_for_the_next_who_opens_it() {
    let mesh = Mesh::new("100.80.0.0/12");
    let id = mesh.join("a", 1);
    let Mesh { place, store } = mesh;
    drop(store);
    let store = place.open();
    assert_eq!(
        store.networks().expect("asked"),
        Some(networks("100.80.0.0/12"))
    );
    assert_eq!(store.authenticate(&shown(1)).expect("a member"), id);
}

#[test]
fn a_file_of_a_later_version_is_refused_and_left_alone() {
    let Mesh { place, store } = Mesh::new("100.80.0.0/12");
    drop(store);
    let path = place.path();
    let file = Connection::open(&path).expect("opened");
    file.pragma_update(None, "user_version", SCHEMA + 1)
        .expect("set");
    drop(file);
    let error = Store::open(&path).expect_err("of a later version");
    assert!(
        matches!(
            &error,
            StoreError::LaterVersion { found, known, .. } if (*found, *known) == (SCHEMA + 1, SCHEMA)
        ),
        "{error}"
    );
    assert!(
        error.to_string().contains("a later version of seikan"),
        "{error}"
    );
    let file = Connection::open(&path).expect("opened");
    let version: i64 = file
        .pragma_query_value(None, "user_version", |row| row.get(0))
        .expect("asked");
    assert_eq!(version, SCHEMA + 1);
}

#[test]
fn a_file_of_the_first_version_is_taken_over_with_all_that_is_in_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mesh.db");
    let file = Connection::open(&path).expect("opened");
    let first = include_str!("schema.sql");
    file.execute_batch(first).expect("laid out");
    file.pragma_update(None, "user_version", 1).expect("set");
    file.execute_batch(
        "UPDATE mesh SET v4 = '100.80.0.0/12', v6 = 'fd00::/64', revision = 7, highest = 1;
         INSERT INTO token (digest, used, created, tags) VALUES (x'00', 1, 0, '[]');
         INSERT INTO member (number, name, public_key, credential, token, tags, endpoints, revision, joined, seen)
         VALUES (1, 'old', zeroblob(32), zeroblob(32), 1, '[\"web\"]', '[]', 7, 0, 0);",
    )
    .expect("filled");
    drop(file);
    for _ in 0..2 {
        let store = Store::open(&path).expect("opened");
        let members = store.members().expect("members");
        assert_eq!(members[0].member.tags, [name("web")]);
        assert_eq!(store.revision().expect("asked"), 7);
        assert_eq!(store.policy().expect("asked"), "");
    }
    let store = Store::open(&path).expect("opened");
    assert!(
        store
            .set_policy("allow * -> * *", &operator(), NOW)
            .expect("set")
    );
}

#[test]
fn what_is_no_database_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mesh.db");
    fs::write(&path, "not a database at all".repeat(100)).expect("written");
    let error = Store::open(&path).expect_err("no database");
    assert!(matches!(error, StoreError::Sqlite(_)), "{error}");
}

#[test]
fn networks_are_set_once() {
    let place = Place::new();
    let store = place.open();
    assert_eq!(store.networks().expect("asked"), None);
    let made = store.create_token(&token(1).digest(), &NewToken::default(), &operator(), NOW);
    made.expect("a token");
    let error = join(&store, 1, "a", 1).expect_err("no networks yet");
    assert!(matches!(error, StoreError::NoNetworks), "{error}");

    let first = networks("10.0.0.0/16");
    for _ in 0..2 {
        store
            .init(first, &operator(), NOW)
            .expect("the same is no error");
    }
    let error = store.init(networks("10.1.0.0/16"), &operator(), NOW);
    let error = error.expect_err("others are set");
    assert!(
        matches!(error, StoreError::OtherNetworks { have } if have == first),
        "{error}"
    );
    assert_eq!(store.networks().expect("asked"), Some(first));
}

#[test]
fn another_stores_write_shows_and_an_own_one_does_not() {
    let mesh = Mesh::new("100.80.0.0/12");
    let other = mesh.again();
    let before = mesh.store.data_version().expect("asked");
    mesh.join("a", 1);
    assert_eq!(mesh.store.data_version().expect("asked"), before);
    join(&other, 1, "b", 2).expect("joined");
    mesh.store.catch_up().expect("caught up");
    assert_ne!(mesh.store.data_version().expect("asked"), before);
}

#[test]
fn secrets_are_not_in_the_file() {
    let mesh = Mesh::new("100.80.0.0/12");
    mesh.admit(7, NewToken::default());
    let credential = credential(9);
    join(&mesh.store, 7, "a", 9).expect("joined");
    let texts = [token(7).reveal(), credential.reveal()];
    let folder = mesh.path().parent().expect("a folder").to_owned();
    for file in fs::read_dir(folder).expect("a folder") {
        let bytes = fs::read(file.expect("a file").path()).expect("readable");
        assert!(!bytes.windows(24).any(|part| part == [7; 24]));
        for text in &texts {
            assert!(
                !bytes
                    .windows(text.len())
                    .any(|part| part == text.as_bytes())
            );
        }
    }
}

#[test]
fn a_member_that_is_heard_of_is_noted_once_a_minute() {
    let mesh = Mesh::new("100.80.0.0/12");
    let id = mesh.join("a", 1);
    let seen = || mesh.store.members().expect("members")[0].seen;
    for (heard, noted) in [(59, 0), (60, 60), (119, 60), (120, 120)] {
        mesh.store.touch(id, NOW + heard).expect("touched");
        assert_eq!(seen(), NOW + noted, "after {heard} s");
    }
    assert_eq!(mesh.store.revision().expect("asked"), 1, "nobody is told");
}

#[test]
fn members_are_listed_by_their_numbers() {
    let mesh = Mesh::new("100.80.0.0/12");
    for (called, n) in [("z", 1), ("a", 2)] {
        mesh.join(called, n);
    }
    let members = mesh.store.members().expect("members");
    let listed: Vec<_> = members
        .iter()
        .map(|m| (m.number, m.member.name.as_str()))
        .collect();
    assert_eq!(listed, [(1, "z"), (2, "a")]);
    assert_eq!(members[0].joined, NOW);
}

#[test]
fn the_audit_says_who_did_what_the_newest_first() {
    let mesh = Mesh::new("10.0.0.0/16");
    let store = &mesh.store;
    let labelled = NewToken {
        label: Some("ci".to_owned()),
        ..NewToken::default()
    };
    let id = store.create_token(&token(2).digest(), &labelled, &operator(), NOW + 1);
    let id = id.expect("a token");
    let joined = store
        .join(&request(2, "a", 1), &host(), NOW + 2)
        .expect("joined");
    store
        .note_refused(&name("b"), IpAddr::from([198u8, 51, 100, 7]), NOW + 4)
        .expect("noted");
    assert!(
        store
            .remove(Whom::Id(joined.id), &host(), NOW + 5)
            .expect("asked")
    );
    assert!(
        !store
            .remove(Whom::Id(joined.id), &host(), NOW + 6)
            .expect("asked")
    );
    assert!(
        store
            .withdraw_token(id, &operator(), NOW + 7)
            .expect("asked")
    );
    assert!(
        !store
            .withdraw_token(id, &operator(), NOW + 8)
            .expect("asked")
    );
    let told = store.audit(100).expect("an audit");
    let told: Vec<_> = told
        .iter()
        .map(|e| {
            (
                e.time - NOW,
                e.what.as_str(),
                e.subject.as_str(),
                e.actor.as_str(),
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            (7, "token withdrawn", "2 (ci)", "operator root"),
            (5, "left", "a", "192.0.2.1"),
            (4, "refused", "b", "198.51.100.7"),
            (2, "joined", "a", "192.0.2.1"),
            (1, "token created", "2 (ci)", "operator root"),
            (0, "token created", "1", "operator root"),
            (0, "networks set", "10.0.0.0/16 fd00::/64", "operator root"),
        ]
    );
    assert_eq!(store.audit(3).expect("an audit").len(), 3);
}

#[test]
fn strangers_fill_their_own_part_of_the_audit_only() {
    let mesh = Mesh::new("100.80.0.0/12");
    mesh.store
        .note(|transaction| {
            transaction.execute(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000)
                 INSERT INTO refused (at, what, subject, actor)
                 SELECT ?1, 'refused', 'x', 'y' FROM n",
                [seconds(NOW)],
            )?;
            Ok(())
        })
        .expect("filled");
    mesh.store
        .note_refused(&name("b"), IpAddr::from([192u8, 0, 2, 9]), NOW)
        .expect("noted");
    let entries = mesh.store.audit(10_000).expect("an audit");
    let refused = entries.iter().filter(|e| e.what == "refused").count();
    assert_eq!(refused, 1000);
    assert_eq!(entries.len() - refused, 2, "networks and a token");
}

#[test]
fn what_operators_must_know_is_not_told_to_strangers() {
    let path = PathBuf::from("/var/lib/seikan/mesh.db");
    let internal = StoreError::Io {
        path,
        source: io::Error::other("the disk burns"),
    };
    let refusal = internal.refusal();
    assert_eq!(refusal.reason, seikan_proto::mesh::Reason::Unavailable);
    for hidden in ["/var", "burns"] {
        assert!(internal.to_string().contains(hidden));
        assert!(!refusal.message.contains(hidden), "{}", refusal.message);
    }
}

on_etcd! {
    what_was_written_is_there_for_the_next_who_opens_it
    networks_are_set_once
    another_stores_write_shows_and_an_own_one_does_not
    members_are_listed_by_their_numbers
    the_audit_says_who_did_what_the_newest_first
    strangers_fill_their_own_part_of_the_audit_only
}
