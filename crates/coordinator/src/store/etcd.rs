//! A store that several coordinators share: etcd has the truth, each coordinator a replica of it in memory.
//!
//! ```text
//! PREFIX/state/head              the schema (0: not all rows are there yet), and the random number of the latest change
//! PREFIX/state/mesh              a random number: this mesh, and no other
//! PREFIX/state/restored          a random number, if etcd came back from a backup and somebody noticed
//! PREFIX/state/rows/TABLE/KEY    a row of the store's tables, as JSON
//! PREFIX/pin                     by which members know the certificate of every coordinator
//! PREFIX/live/..., present/...   what is gone with the coordinator that wrote it ([`live`])
//! ```
//!
//! [`replica`] decides changes on its copy and proposes what they did to the rows, [`rows`], as one transaction that etcd takes
//! only if the head is still the one that it was decided on. [`import()`] brings a whole
//! mesh in. [`client`] speaks to etcd, by [`messages`].

mod client;
mod import;
mod live;
mod messages;
mod replica;
mod rows;

use std::env;
use std::path::PathBuf;

pub(super) use import::{Beside, cluster, give_up, import};
#[cfg(fuzzing)]
pub use replica::fuzzing;
pub(super) use replica::{Replica, random};

/// Where etcd is, and who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Etcd {
    /// URLs of members of the cluster, one at least.
    pub endpoints: Vec<String>,
    /// What all keys begin with, without a slash at its end.
    pub prefix: String,
    /// File with what signs their certificates, PEM; `None`: what the system trusts.
    pub ca: Option<PathBuf>,
    /// Files with a certificate to show them and its key, PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// A user, and the file with the password.
    pub user: Option<(String, PathBuf)>,
    /// The mesh that is there, if one was known before: none is made in its place, and no other is taken for it.
    pub mesh: Option<u64>,
    /// Where members reach this coordinator, which the others then tell them; `None`: nobody is told of it.
    pub advertise: Option<seikan_proto::mesh::RelayAddress>,
}

impl Etcd {
    /// The files and folders that it names. Without a `ca`, the environment may name those with what the system trusts.
    pub fn files(&self) -> Vec<PathBuf> {
        let identity = self.identity.iter().flat_map(|(cert, key)| [cert, key]);
        let password = self.user.iter().map(|(_, file)| file);
        let all = self.ca.iter().chain(identity).chain(password).cloned();
        let of_system = || {
            let file = env::var_os("SSL_CERT_FILE").map(PathBuf::from);
            let folders = env::var_os("SSL_CERT_DIR").unwrap_or_default();
            let folders: Vec<PathBuf> = env::split_paths(&folders).collect();
            file.into_iter().chain(folders)
        };
        let of_system = self.ca.is_none().then(of_system);
        let of_system = of_system.into_iter().flatten();
        all.chain(of_system.filter(|path| !path.as_os_str().is_empty()))
            .collect()
    }
}

/// What keys begin with unless it is said otherwise.
pub const PREFIX: &str = "/seikan/mesh";

/// What tests do to etcd beside the store.
#[cfg(test)]
pub(super) mod testing {
    use seikan_proto::mesh::RelayAddress;

    use super::Etcd;
    use super::client::Cluster;
    use super::live::{Live, Writer};
    use super::messages::{PutRequest, RangeRequest, Request, RequestOp, TxnRequest};
    use super::replica::delete;

    fn wait_for<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(work)
    }

    /// Has etcd forget all revisions but the latest.
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

    /// Some keys, and their values.
    pub fn some(settings: &Etcd) -> Vec<(String, Vec<u8>)> {
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

    /// Whether there is such a key.
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

    /// Has a member ask `one`, then `two`, then neither; what `look` finds when it does not ask `one` any more, and then.
    pub fn move_member<T>(settings: &Etcd, member: i64, look: impl Fn() -> T) -> [T; 2] {
        wait_for(async {
            let cluster = Cluster::new(settings).expect("a cluster");
            let connection = cluster.connect(0).await.expect("a connection");
            let at = |address: &str| -> Option<RelayAddress> {
                Some(address.parse().expect("an address"))
            };
            let (one, two) = (Live::default(), Live::default());
            let mut first = Writer::new(&settings.prefix, at("one.example:7443"), 1);
            let mut second = Writer::new(&settings.prefix, at("two.example:7443"), 2);
            one.asks(member, 100);
            first.write(&one, &connection).await.expect("written");
            two.asks(member, 200);
            second.write(&two, &connection).await.expect("written");
            one.leave();
            first.write(&one, &connection).await.expect("written");
            let moved = look();
            two.leave();
            second.write(&two, &connection).await.expect("written");
            [moved, look()]
        })
    }

    /// As an import that is broken off right after it has begun.
    pub fn begin_import(settings: &Etcd) {
        put(
            settings,
            &format!("{}/state/head", settings.prefix),
            r#"{"schema":0,"id":1,"rows":0}"#,
        );
    }

    /// Takes away what is there.
    pub fn take_away(settings: &Etcd, key: &str) {
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

    /// Writes something there.
    pub fn put(settings: &Etcd, key: &str, value: &str) {
        wait_for(async {
            let cluster = Cluster::new(settings).expect("a cluster");
            let connection = cluster.connect(0).await.expect("a connection");
            let put = PutRequest {
                key: key.into(),
                value: value.into(),
                lease: 0,
            };
            let txn = TxnRequest {
                compare: Vec::new(),
                success: vec![RequestOp {
                    request: Some(Request::Put(put)),
                }],
            };
            connection.txn(txn).await.expect("written");
        });
    }
}
