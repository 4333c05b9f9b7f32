//! A mesh that several coordinators share: etcd has the authoritative state, and each coordinator a
//! replica in memory.
//!
//! ```text
//! PREFIX/state/head              schema (0: import in progress), and the random number of the latest change
//! PREFIX/state/mesh              random number that identifies the mesh
//! PREFIX/state/restored          random number of the latest restore from a backup
//! PREFIX/state/rows/TABLE/KEY    row of a table, as JSON
//! PREFIX/live/..., present/...   keys under the lease of a coordinator ([`live`])
//! ```
//!
//! [`replica`] decides changes on its copy and proposes the changed rows as one etcd transaction,
//! which succeeds only if the head has not changed since. [`import()`] copies a whole
//! mesh into etcd. [`client`] implements etcd's API with the messages of [`messages`].

mod client;
mod live;
mod messages;
mod replica;

use std::env;
use std::path::PathBuf;

pub(super) use live::Live;
#[cfg(fuzzing)]
pub use replica::fuzzing;
pub(super) use replica::{Replica, import};

/// Settings of an etcd cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Etcd {
    /// URLs of members of the cluster, at least one.
    pub endpoints: Vec<String>,
    /// Prefix of all keys, without a trailing slash.
    pub prefix: String,
    /// PEM file with the CA certificates of the cluster; `None`: the system's trust store.
    pub ca: Option<PathBuf>,
    /// PEM files with the client certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// User, and the file with its password.
    pub user: Option<(String, PathBuf)>,
    /// Number of the expected mesh: no other mesh is accepted, and none is created. `None` accepts
    /// any.
    pub mesh: Option<u64>,
    /// Address of this coordinator, which the coordinators send to members; `None`: it is not
    /// advertised.
    pub advertise: Option<seikan_proto::mesh::RelayAddress>,
}

impl Etcd {
    /// Returns the files and folders that the settings name. Without a `ca`, these include the
    /// values of the environment variables `SSL_CERT_FILE` and `SSL_CERT_DIR`.
    pub fn files(&self) -> Vec<PathBuf> {
        let identity = self.identity.iter().flat_map(|(cert, key)| [cert, key]);
        let password = self.user.iter().map(|(_, file)| file);
        let named = self.ca.iter().chain(identity).chain(password);
        let mut files: Vec<PathBuf> = named.cloned().collect();
        if self.ca.is_none() {
            files.extend(env::var_os("SSL_CERT_FILE").map(PathBuf::from));
            let folders = env::var_os("SSL_CERT_DIR").unwrap_or_default();
            files.extend(env::split_paths(&folders));
            files.retain(|path| !path.as_os_str().is_empty());
        }
        files
    }
}

/// Default prefix of keys.
pub const PREFIX: &str = "/seikan/mesh";

/// Direct access to etcd for tests.
#[cfg(test)]
pub(super) mod testing {
    use seikan_proto::mesh::RelayAddress;

    use super::Etcd;
    use super::client::Cluster;
    use super::live::{Live, Writer};
    use super::messages::put as put_operation;
    use super::messages::{RangeRequest, TxnRequest, delete};

    fn wait_for<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(work)
    }

    /// Compacts all revisions but the latest.
    pub fn compact(settings: &Etcd) {
        wait_for(async {
            let cluster = Cluster::new(settings).expect("a cluster");
            let connection = cluster.connect(0).await.expect("a connection");
            let range = RangeRequest {
                key: b"x".to_vec(),
                ..RangeRequest::default()
            };
            let now = connection.range(range).await.expect("an answer");
            let revision = now.header.expect("a header").revision;
            connection.compact(revision).await.expect("compacted");
        });
    }

    /// Returns sample keys and their values.
    pub fn sample(settings: &Etcd) -> Vec<(String, Vec<u8>)> {
        wait_for(async {
            let cluster = Cluster::new(settings).expect("a cluster");
            let connection = cluster.connect(0).await.expect("a connection");
            let mut all = Vec::new();
            for key in ["head", "rows/mesh/1", "rows/member/100000"] {
                let range = RangeRequest {
                    key: format!("{}/state/{key}", settings.prefix).into_bytes(),
                    ..RangeRequest::default()
                };
                let found = connection.range(range).await.expect("an answer").kvs;
                all.extend(
                    found
                        .into_iter()
                        .map(|kv| (String::from_utf8_lossy(&kv.key).into_owned(), kv.value)),
                );
            }
            all
        })
    }

    /// Returns whether a key exists.
    pub fn has(settings: &Etcd, key: &str) -> bool {
        wait_for(async {
            let cluster = Cluster::new(settings).expect("a cluster");
            let connection = cluster.connect(0).await.expect("a connection");
            let range = RangeRequest {
                key: key.into(),
                ..RangeRequest::default()
            };
            let found = connection.range(range).await.expect("an answer").kvs;
            !found.is_empty()
        })
    }

    /// Makes a member poll `one`, then `two`, then neither. Returns the results of `observe` after
    /// the member has left `one`, and after it has left `two`.
    pub fn move_member<T>(settings: &Etcd, member: i64, observe: impl Fn() -> T) -> [T; 2] {
        wait_for(async {
            let cluster = Cluster::new(settings).expect("a cluster");
            let connection = cluster.connect(0).await.expect("a connection");
            let at = |address: &str| -> Option<RelayAddress> {
                Some(address.parse().expect("an address"))
            };
            let (one, two) = (Live::default(), Live::default());
            let mut first = Writer::new(&settings.prefix, at("one.example:7443"), 1);
            let mut second = Writer::new(&settings.prefix, at("two.example:7443"), 2);
            one.note_poll(member, 100);
            first.write(&one, &connection).await.expect("written");
            two.note_poll(member, 200);
            second.write(&two, &connection).await.expect("written");
            one.stop_polling();
            first.write(&one, &connection).await.expect("written");
            let moved = observe();
            two.stop_polling();
            second.write(&two, &connection).await.expect("written");
            [moved, observe()]
        })
    }

    /// Leaves the state of an import that was interrupted right after its start.
    pub fn begin_import(settings: &Etcd) {
        put(
            settings,
            &format!("{}/state/head", settings.prefix),
            r#"{"schema":0,"id":1,"rows":0}"#,
        );
    }

    /// Deletes a key.
    pub fn remove(settings: &Etcd, key: &str) {
        wait_for(async {
            let cluster = Cluster::new(settings).expect("a cluster");
            let connection = cluster.connect(0).await.expect("a connection");
            let txn = TxnRequest {
                compare: Vec::new(),
                success: vec![delete(key.into())],
            };
            connection.txn(txn).await.expect("gone");
        });
    }

    /// Writes a key.
    pub fn put(settings: &Etcd, key: &str, value: &str) {
        wait_for(async {
            let cluster = Cluster::new(settings).expect("a cluster");
            let connection = cluster.connect(0).await.expect("a connection");
            let txn = TxnRequest {
                compare: Vec::new(),
                success: vec![put_operation(key.into(), value.into(), 0)],
            };
            connection.txn(txn).await.expect("written");
        });
    }
}
