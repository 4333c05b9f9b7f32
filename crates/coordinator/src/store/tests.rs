//! Tests of the store. This module tests the file and the log.
//!
//! - [`joining`], [`answers`], [`relays`], [`policies`], [`devices`]: members and what they receive
//! - [`shared`], [`live`], [`restore`]: several coordinators on etcd, their live state, and backups
//! - [`snapshot`]: exports and imports
//!
//! Tests listed in [`on_etcd`] run on a file, and again on a real etcd cluster.

/// Defines the same tests on etcd.
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

pub(crate) mod answers;
mod devices;
mod joining;
mod live;
pub(crate) mod policies;
pub(crate) mod proxy;
mod relays;
mod restore;
mod shared;
mod snapshot;

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{Credential, Digest, JoinRequest, Name, RelayKind, Token};
use seikan_proto::rng::Rng;
use tempfile::TempDir;

use super::file::{MIGRATIONS, SCHEMA, create_schema};
use super::*;

pub const NOW: u64 = 1_800_000_000;

/// Sets a flag on drop, also after a panic. Otherwise threads that run until it is set would block
/// the end of their scope.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Random number generator that returns one byte.
struct RepeatedByte(u8);

impl Rng for RepeatedByte {
    fn fill(&mut self, destination: &mut [u8]) {
        destination.fill(self.0);
    }
}

pub fn token(n: u8) -> Token {
    Token::generate(&mut RepeatedByte(n))
}

pub fn key(n: u32) -> PublicKey {
    let mut bytes = [0; 32];
    bytes[28..].copy_from_slice(&n.to_be_bytes());
    PublicKey::from_bytes(bytes)
}

/// Returns the credential of host `n`.
pub fn credential(n: u32) -> Credential {
    // Decimal digits are valid base64url.
    format!("skc_{n:032}").parse().expect("a credential")
}

/// Returns the digest of the credential of host `n`.
pub fn digest_of(n: u32) -> Digest {
    credential(n).digest()
}

pub fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

pub fn request(with: u8, member_name: &str, n: u32) -> JoinRequest {
    JoinRequest {
        token: token(with),
        name: name(member_name),
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

/// A mesh with a token, number 1, without limits.
pub struct Mesh {
    location: Location,
    pub store: Store,
}

/// Location of a mesh.
pub enum Location {
    File(TempDir),
    Etcd(Etcd),
}

impl Location {
    /// Returns an empty location.
    pub fn new() -> Location {
        match shared::prefix() {
            Some(settings) => Location::Etcd(settings),
            None => Location::File(tempfile::tempdir().expect("a folder")),
        }
    }

    pub fn path(&self) -> PathBuf {
        match self {
            Location::File(folder) => folder.path().join("state/mesh.db"),
            Location::Etcd(_) => unreachable!("a test of files alone"),
        }
    }

    pub fn open(&self) -> Store {
        match self {
            Location::File(_) => Store::open(&self.path()).expect("opened"),
            Location::Etcd(settings) => Store::open_etcd(settings).expect("opened"),
        }
    }
}

impl Mesh {
    pub fn new(v4: &str) -> Mesh {
        let location = Location::new();
        let store = location.open();
        store
            .init(networks(v4), &operator(), NOW)
            .expect("networks set");
        let mesh = Mesh { location, store };
        mesh.admit(1, NewToken::default());
        mesh
    }

    pub fn path(&self) -> PathBuf {
        self.location.path()
    }

    /// Opens another store of the same mesh.
    pub fn reopen(&self) -> Store {
        self.location.open()
    }

    pub fn admit(&self, n: u8, good_for: NewToken) -> TokenId {
        let made = self
            .store
            .create_token(&token(n).digest(), &good_for, &operator(), NOW);
        made.expect("a token")
    }

    /// Joins with the token without limits.
    pub fn join(&self, member_name: &str, n: u32) -> MemberId {
        join(&self.store, 1, member_name, n).expect("joined").id
    }

    pub fn remove(&self, member_name: &str) {
        let name = name(member_name);
        let removed = self.store.remove(MemberRef::Name(&name), &operator(), NOW);
        assert!(removed.expect("queried"), "{member_name} was a member");
    }
}

pub fn join(store: &Store, with: u8, member_name: &str, n: u32) -> Result<Joining, StoreError> {
    store.join(&request(with, member_name, n), &host(), NOW)
}

#[test]
fn committed_changes_are_synced_to_disk() {
    let mesh = Mesh::new("100.80.0.0/12");
    let Backing::File(file) = &mesh.store.backing else {
        unreachable!("a file")
    };
    let pragma = |name: &str| -> String {
        let value = |row: &rusqlite::Row<'_>| row.get::<_, rusqlite::types::Value>(0);
        let value = lock(file).connection.pragma_query_value(None, name, value);
        match value.expect("queried") {
            rusqlite::types::Value::Integer(number) => number.to_string(),
            rusqlite::types::Value::Text(text) => text,
            other => panic!("{other:?}"),
        }
    };
    // In WAL mode only FULL (2) syncs the log after each transaction
    // (sqlite.org/pragma.html#pragma_synchronous).
    assert_eq!(
        (
            pragma("journal_mode").as_str(),
            pragma("synchronous").as_str()
        ),
        ("wal", "2")
    );
}

#[test]
fn file_and_folder_are_private() {
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
fn state_survives_reopening() {
    let mesh = Mesh::new("100.80.0.0/12");
    let id = mesh.join("a", 1);
    let Mesh { location, store } = mesh;
    drop(store);
    let store = location.open();
    assert_eq!(
        store.networks().expect("queried"),
        Some(networks("100.80.0.0/12"))
    );
    assert_eq!(store.authenticate(&digest_of(1)).expect("a member"), id);
}

#[test]
fn a_file_of_a_later_version_is_refused_and_unchanged() {
    let Mesh { location, store } = Mesh::new("100.80.0.0/12");
    drop(store);
    let path = location.path();
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
        .expect("queried");
    assert_eq!(version, SCHEMA + 1);
}

#[test]
fn a_file_of_the_first_version_is_upgraded() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mesh.db");
    let file = Connection::open(&path).expect("opened");
    let first = include_str!("file/schema.sql");
    file.execute_batch(first).expect("created");
    file.pragma_update(None, "user_version", 1).expect("set");
    file.execute_batch(
        "UPDATE mesh SET v4 = '100.80.0.0/12', v6 = 'fd00::/64', revision = 6, highest = 1;
         INSERT INTO token (digest, used, created, tags) VALUES (zeroblob(32), 1, 0, '[]');
         INSERT INTO member (number, name, public_key, credential, token, tags, endpoints, revision, joined, seen)
         VALUES (1, 'old', zeroblob(32), zeroblob(32), 1, '[\"web\"]', '[]', 7, 0, 0);",
    )
    .expect("filled");
    // As after a crash: only the write-ahead log has the last commit, and a part of a copy is left.
    let mode: String = file
        .pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))
        .expect("set");
    assert_eq!(mode, "wal");
    file.execute_batch("UPDATE mesh SET revision = 7")
        .expect("written");
    let copy = folder.path().join("mesh.db.schema1");
    fs::write(&copy, "a former one").expect("written");
    fs::write(folder.path().join("mesh.db.schema1.new"), "a part").expect("written");
    // Also from the copy, as after a return to the version that wrote it.
    let mut writer = Some(file);
    for goes_back in [true, false] {
        let store = Store::open(&path).expect("opened");
        let members = store.members().expect("members");
        assert_eq!(members[0].member.tags, [name("web")]);
        assert_eq!(store.revision().expect("queried"), 7);
        assert_eq!(store.policy().expect("queried"), "");
        drop(store);
        drop(writer.take());
        let mode = fs::metadata(&copy).expect("a copy").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        if goes_back {
            let file = Connection::open(&copy).expect("opened");
            let version: i64 = file
                .pragma_query_value(None, "user_version", |row| row.get(0))
                .expect("queried");
            assert_eq!(version, 1);
            let revision: i64 = file
                .query_row("SELECT revision FROM mesh", [], |row| row.get(0))
                .expect("queried");
            assert_eq!(revision, 7);
            drop(file);
            fs::rename(&copy, &path).expect("moved");
        }
    }
    let store = Store::open(&path).expect("opened");
    assert!(
        store
            .set_policy("allow * -> * *", &operator(), NOW)
            .expect("set")
    );
}

#[test]
fn a_file_of_tables_keeps_all_its_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mesh.db");
    let file = Connection::open(&path).expect("opened");
    for script in &MIGRATIONS[..10] {
        file.execute_batch(script).expect("created");
    }
    file.pragma_update(None, "user_version", 10).expect("set");
    file.execute_batch(
        r#"UPDATE mesh SET v4 = '100.80.0.0/12', v6 = 'fd00::/64', revision = 9, highest = 5;
        UPDATE policy SET text = 'allow * -> tag:web *', revision = 8;
        INSERT INTO token VALUES (3, zeroblob(32), 'ci', 7, 1, 10, 20, 30, '["web"]', 1);
        INSERT INTO member VALUES (6, 2, 'gw', x'0101010101010101010101010101010101010101010101010101010101010101',
            zeroblob(32), 3, '["web"]', '["192.0.2.7:51820"]', 9, 40, '["192.0.2.8:3478"]',
            '[{"name":"plc","number":3,"tags":["web"]},{"name":"new","families":"ipv4"}]');
        UPDATE sqlite_sequence SET seq = 7 WHERE name = 'member';
        INSERT INTO removed VALUES (zeroblob(32), 4, 'old', '["web"]', NULL);
        INSERT INTO removed VALUES (x'0202020202020202020202020202020202020202020202020202020202020202', 5, NULL, NULL, NULL);
        INSERT INTO former VALUES (6, 6, zeroblob(32), 'gw', '[]', NULL);
        INSERT INTO freed VALUES (4, 7, '{"name":"cam","gateway":"gw","token":3}'), (5, 8, NULL);
        INSERT INTO relay VALUES ('relay.example:7444', 'turn', 'north', NULL, NULL);
        INSERT INTO audit VALUES (100001, 50, 'joined', 'gw', '192.0.2.1');
        INSERT INTO refused VALUES (1001, 51, 'refused', 'x', '192.0.2.2');
        INSERT INTO seen VALUES (6, 60);"#,
    )
    .expect("filled");
    drop(file);
    let store = Store::open(&path).expect("opened");
    let info = &store.tokens().expect("tokens")[0];
    assert_eq!((info.id, info.label.as_deref()), (TokenId(3), Some("ci")));
    assert_eq!((info.uses, info.used, info.created), (Some(7), 1, 10));
    assert_eq!((info.expires, info.withdrawn), (Some(20), Some(30)));
    assert!(info.devices && info.tags == [name("web")]);
    let [member] = &store.members().expect("members")[..] else {
        panic!("there is one member")
    };
    assert_eq!((member.number, member.joined, member.seen), (2, 40, 60));
    assert_eq!(
        member.member.endpoints.len() + member.member.relayed.len(),
        2
    );
    assert_eq!(member.member.tags, [name("web")]);
    assert_eq!(member.member.public_key.as_bytes(), &[1; 32]);
    let addresses = member.member.devices.iter().flat_map(|d| &d.addresses);
    assert_eq!(addresses.count(), 2);
    assert_eq!(member.devices[1], DeviceInfo::Pending(name("new")));
    assert_eq!(store.relays().expect("relays")[0].kind, RelayKind::Turn);
    assert_eq!(store.policy().expect("queried"), "allow * -> tag:web *");
    let entries = store.audit(10).expect("an audit");
    let changes: Vec<_> = entries
        .iter()
        .map(|e| (e.time, e.change.as_str()))
        .collect();
    assert_eq!(changes, [(51, "refused"), (50, "joined")]);
    let changes = store.changes(3, MemberId(6)).expect("changes");
    // The tags of the member itself have changed at revision 6.
    assert!(changes.whole);
    let changes = store.read(|mesh| {
        let former: Vec<_> = mesh.former.all().map(|row| row.revision).collect();
        let freed: Vec<_> = mesh.freed.all().map(|row| row.number).collect();
        Ok((former, freed, mesh.head().last_member))
    });
    assert_eq!(changes.expect("read"), (vec![4, 5, 6], vec![4, 5], 7));
    let made = store.create_token(&token(9).digest(), &NewToken::default(), &operator(), NOW);
    made.expect("a token");
    let new = join(&store, 9, "b", 9).expect("joined");
    assert_eq!((new.id, new.number), (MemberId(8), 6));
}

#[test]
fn a_file_that_is_no_database_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mesh.db");
    fs::write(&path, "not a database at all".repeat(100)).expect("written");
    let error = Store::open(&path).expect_err("no database");
    assert!(matches!(error, StoreError::Sqlite(_)), "{error}");
}

#[test]
fn networks_are_set_once() {
    let location = Location::new();
    let store = location.open();
    assert_eq!(store.networks().expect("queried"), None);
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
    assert_eq!(store.networks().expect("queried"), Some(first));
}

#[test]
fn data_version_changes_with_writes_of_others() {
    let mesh = Mesh::new("100.80.0.0/12");
    let other = mesh.reopen();
    let before = mesh.store.data_version().expect("queried");
    mesh.join("a", 1);
    assert_eq!(mesh.store.data_version().expect("queried"), before);
    join(&other, 1, "b", 2).expect("joined");
    mesh.store.catch_up().expect("caught up");
    assert_ne!(mesh.store.data_version().expect("queried"), before);
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
fn activity_is_recorded_once_a_minute() {
    let mesh = Mesh::new("100.80.0.0/12");
    let id = mesh.join("a", 1);
    let seen = || mesh.store.members().expect("members")[0].seen;
    for (active, recorded) in [(59, 0), (60, 60), (119, 60), (120, 120)] {
        mesh.store.touch(id, NOW + active).expect("touched");
        assert_eq!(seen(), NOW + recorded, "after {active} s");
    }
    assert_eq!(
        mesh.store.revision().expect("queried"),
        1,
        "no change for members"
    );
}

#[test]
fn members_are_listed_in_the_order_of_their_numbers() {
    let mesh = Mesh::new("100.80.0.0/12");
    for (member_name, n) in [("z", 1), ("a", 2)] {
        mesh.join(member_name, n);
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
fn the_audit_lists_changes_newest_first() {
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
        .log_refused(&name("b"), IpAddr::from([198u8, 51, 100, 7]), NOW + 4)
        .expect("recorded");
    assert!(
        store
            .remove(MemberRef::Id(joined.id), &host(), NOW + 5)
            .expect("queried")
    );
    assert!(
        !store
            .remove(MemberRef::Id(joined.id), &host(), NOW + 6)
            .expect("queried")
    );
    assert!(
        store
            .withdraw_token(id, &operator(), NOW + 7)
            .expect("queried")
    );
    assert!(
        !store
            .withdraw_token(id, &operator(), NOW + 8)
            .expect("queried")
    );
    let entries = store.audit(100).expect("an audit");
    let entries: Vec<_> = entries
        .iter()
        .map(|e| {
            (
                e.time - NOW,
                e.change.as_str(),
                e.subject.as_str(),
                e.actor.as_str(),
            )
        })
        .collect();
    assert_eq!(
        entries,
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
fn refused_joins_do_not_displace_other_entries() {
    let mesh = Mesh::new("100.80.0.0/12");
    mesh.store
        .change_local(|mesh| {
            for id in 1..=3000 {
                let entry = AuditEntry {
                    time: NOW,
                    change: "refused".to_owned(),
                    subject: "x".to_owned(),
                    actor: "y".to_owned(),
                };
                mesh.put(rows::Logged::<{ audit::KEPT_REFUSED }> { id, entry })?;
            }
            Ok(())
        })
        .expect("filled");
    mesh.store
        .log_refused(&name("b"), IpAddr::from([192u8, 0, 2, 9]), NOW)
        .expect("recorded");
    let entries = mesh.store.audit(10_000).expect("an audit");
    let refused = entries.iter().filter(|e| e.change == "refused").count();
    assert_eq!(refused, 1000);
    assert_eq!(entries.len() - refused, 2, "networks and a token");
}

#[test]
fn internal_errors_are_not_sent_to_hosts() {
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
    state_survives_reopening
    networks_are_set_once
    data_version_changes_with_writes_of_others
    members_are_listed_in_the_order_of_their_numbers
    the_audit_lists_changes_newest_first
    refused_joins_do_not_displace_other_entries
}
