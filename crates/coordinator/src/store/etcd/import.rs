//! A whole mesh that is brought into etcd, and of which nobody sees a part.
//!
//! It takes many transactions. From the first to the last the head says that not all rows are there ([`UNFINISHED`]): who reads it then
//! answers nothing. Each counts only if that very head is still there, so what two bring in at once does not become one.

use std::collections::BTreeMap;
use std::time::Instant;

use rusqlite::Transaction;
use seikan_proto::mesh::Pin;
use tokio::time::sleep;

use super::Etcd;
use super::client::{Cluster, Connection, Fault, end_of};
use super::messages::{
    Compare, DeleteRangeRequest, KeyValue, Operand, RangeRequest, RangeResponse, Request,
    RequestOp, TxnRequest, target,
};
use super::replica::{Head, PATIENCE, PAUSE, UNFINISHED, delete, put, random};
use super::rows::Tables;
use crate::store::{SCHEMA, StoreError};

/// Operations of one transaction, at most: etcd takes 128.
const MAX_OPERATIONS: usize = 100;
/// Bytes of one transaction, at most, unless one operation has more: etcd takes 1.5 MiB.
const MAX_BYTES: usize = 512 << 10;

/// What goes with the rows.
pub(in crate::store) struct Beside {
    /// When members were heard last, in seconds since 1970, by their ids.
    pub seen: BTreeMap<i64, i64>,
    /// By which members know the coordinators; `None`: systems trust their certificate.
    pub pin: Option<Pin>,
}

/// Brings the rows of a database into etcd, as the mesh of this number, unless it is there already; `replace`: in the place of a mesh that
/// may be there. [`StoreError::Unknown`] if it may be there now, any other error if it is not by this.
pub(in crate::store) fn import(
    from: &Transaction<'_>,
    beside: &Beside,
    into: &Etcd,
    mesh: u64,
    replace: bool,
) -> Result<(), StoreError> {
    let rows = Tables::of(from)?.all(from)?;
    let key = |of: &str| format!("{}/{of}", into.prefix).into_bytes();
    let rows = rows.into_iter().filter_map(|(row, value)| {
        let key = key(&format!("state/rows/{row}"));
        value.map(|value| (key, value))
    });
    let seen = beside.seen.iter().map(|(member, at)| {
        let key = key(&format!("seen/{member}"));
        (key, at.to_string().into_bytes())
    });
    let pairs = rows.chain(seen);
    let mut import = Import::new(into, mesh)?;
    wait_for(async {
        if import.is_done().await? {
            return Ok(());
        }
        // Whatever becomes of this, what was there is gone with the first of it.
        let lost = |error| match replace {
            true => former_is_lost(&into.prefix, error),
            false => error,
        };
        let begun = import.begin(replace).await;
        let begun = begun.map_err(|error| match error {
            StoreError::Unknown(_) => not_done(lost(error)),
            other => other,
        })?;
        let brought = import.put_all(pairs, begun).await;
        brought.map_err(|error| lost(not_done(error)))?;
        import.end(beside.pin, begun).await.map_err(lost)
    })
}

/// The same, for who has to know what cannot be taken back.
fn former_is_lost(prefix: &str, error: StoreError) -> StoreError {
    let told = |why| {
        format!(
            "{why} (the mesh that was under {prefix} is gone, as --replace has it: --undo does not bring it back, a copy of before does)"
        )
    };
    match error {
        StoreError::Unavailable(why) => StoreError::Unavailable(told(why)),
        StoreError::Unknown(why) => StoreError::Unknown(told(why)),
        other => other,
    }
}

/// The number of the cluster that is asked.
pub(in crate::store) fn cluster(of: &Etcd) -> Result<u64, StoreError> {
    // No mesh is meant.
    let mut import = Import::new(of, 0)?;
    wait_for(async {
        let found = import.range("state/head").await?;
        let header = found.header.filter(|header| header.cluster_id != 0);
        let unnamed = || StoreError::Unavailable("it does not say which cluster it is".to_owned());
        Ok(header.ok_or_else(unnamed)?.cluster_id)
    })
}

/// Sees to it that what was broken off is never ended; [`StoreError::HasMoved`] if it has been.
pub(in crate::store) fn give_up(into: &Etcd, mesh: u64) -> Result<(), StoreError> {
    let mut import = Import::new(into, mesh)?;
    wait_for(async {
        let found = import.head().await?.filter(is_unfinished);
        if let Some(found) = found {
            let head = head(UNFINISHED)?;
            let success = vec![put(import.key("state/head"), head.clone(), 0)];
            let compare = vec![import.is_still(found.mod_revision)];
            import
                .settle(&TxnRequest { compare, success }, &head)
                .await?;
        }
        match import.is_done().await? {
            true => Err(StoreError::HasMoved {
                prefix: into.prefix.clone(),
            }),
            false => Ok(()),
        }
    })
}

fn wait_for<T>(work: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|source| StoreError::Io {
        path: "etcd".into(),
        source,
    })?;
    runtime.block_on(work)
}

/// Whatever became of it, there is no mesh yet.
fn not_done(error: StoreError) -> StoreError {
    match error {
        StoreError::Unknown(why) => StoreError::Unavailable(why),
        other => other,
    }
}

fn is_unfinished(head: &KeyValue) -> bool {
    let head: Option<Head> = serde_json::from_slice(&head.value).ok();
    head.is_some_and(|head| head.schema == UNFINISHED)
}

struct Import {
    cluster: Cluster,
    /// Counts through its members.
    turn: usize,
    connection: Option<Connection>,
    prefix: String,
    /// What it will be known by.
    mesh: u64,
}

impl Import {
    fn new(into: &Etcd, mesh: u64) -> Result<Import, StoreError> {
        Ok(Import {
            cluster: Cluster::new(into)?,
            turn: 0,
            connection: None,
            prefix: into.prefix.clone(),
            mesh,
        })
    }

    /// Whether all of it is there, as it was brought or changed since.
    async fn is_done(&mut self) -> Result<bool, StoreError> {
        let number = self.mesh.to_string();
        let mesh = self.value("state/mesh").await?;
        let is_this = mesh.is_some_and(|kv| kv.value == number.as_bytes());
        let head = self.head().await?;
        Ok(is_this && head.is_some_and(|kv| !is_unfinished(&kv)))
    }

    /// Takes away what is there, if that is wanted; the head's revision.
    async fn begin(&mut self, replace: bool) -> Result<i64, StoreError> {
        let found = self.head().await?;
        let at = found.as_ref().map_or(0, |kv| kv.mod_revision);
        // Also of what is replaced: what somebody else has brought in since it was asked for is not.
        let mut compare = vec![self.is_still(at)];
        if !replace {
            // What was broken off is no mesh.
            if !found.as_ref().is_some_and(is_unfinished) {
                compare.push(Compare {
                    target: target::CREATE,
                    key: self.key("state/mesh"),
                    operand: Some(Operand::CreateRevision(0)),
                    ..Compare::default()
                });
                if found.is_some() {
                    return Err(self.not_empty());
                }
            }
        }
        let head = head(UNFINISHED)?;
        let all = |folder: &str| RequestOp {
            request: Some(Request::Delete(DeleteRangeRequest {
                range_end: end_of(folder),
                key: folder.as_bytes().to_vec(),
            })),
        };
        let success = vec![
            put(self.key("state/head"), head.clone(), 0),
            all(&format!("{}/state/rows/", self.prefix)),
            all(&format!("{}/seen/", self.prefix)),
            delete(self.key("state/restored")),
            delete(self.key("pin")),
        ];
        let begun = self.settle(&TxnRequest { compare, success }, &head).await?;
        begun.ok_or_else(|| match replace {
            true => StoreError::Changing {
                prefix: self.prefix.clone(),
            },
            false => self.not_empty(),
        })
    }

    async fn put_all(
        &mut self,
        pairs: impl Iterator<Item = (Vec<u8>, Vec<u8>)>,
        begun: i64,
    ) -> Result<(), StoreError> {
        let mut pairs = pairs.peekable();
        while pairs.peek().is_some() {
            let (mut success, mut bytes) = (Vec::new(), 0);
            while let Some((key, value)) = pairs.next_if(|(key, value)| {
                let room =
                    success.len() < MAX_OPERATIONS && bytes + key.len() + value.len() <= MAX_BYTES;
                room || success.is_empty()
            }) {
                bytes += key.len() + value.len();
                success.push(put(key, value, 0));
            }
            let compare = vec![self.is_still(begun)];
            let put = self.settle(&TxnRequest { compare, success }, &[]).await?;
            put.ok_or_else(another)?;
        }
        Ok(())
    }

    /// Now it is a mesh, and none that was there before.
    async fn end(&mut self, pin: Option<Pin>, begun: i64) -> Result<(), StoreError> {
        let head = head(SCHEMA)?;
        let mesh = self.mesh.to_string().into_bytes();
        let mut success = vec![
            put(self.key("state/head"), head.clone(), 0),
            put(self.key("state/mesh"), mesh, 0),
        ];
        if let Some(pin) = pin {
            success.push(put(self.key("pin"), pin.to_string().into_bytes(), 0));
        }
        let compare = vec![self.is_still(begun)];
        if (self.settle(&TxnRequest { compare, success }, &head).await?).is_some() {
            return Ok(());
        }
        // It may have been done, and changed by those who found it since.
        match self.is_done().await {
            Ok(true) => Ok(()),
            Ok(false) => Err(another()),
            Err(error) => Err(StoreError::Unknown(error.to_string())),
        }
    }

    /// Has etcd do it if what is compared is so; its revision then. If the head is this one by then it was done before, and the
    /// answer got lost. [`StoreError::Unknown`] if it got lost and nothing more is heard.
    async fn settle(&mut self, txn: &TxnRequest, head: &[u8]) -> Result<Option<i64>, StoreError> {
        let deadline = Instant::now() + PATIENCE;
        let mut is_sent = false;
        loop {
            let tried = match self.connection().await {
                Ok(connection) => {
                    let tried = connection.txn(txn.clone()).await;
                    is_sent |= matches!(tried, Err(Fault::Lost(_)));
                    tried
                }
                Err(fault) => Err(fault),
            };
            match tried {
                Ok(done) if done.succeeded => {
                    return Ok(Some(done.header.unwrap_or_default().revision));
                }
                Ok(_) => {
                    let found = self
                        .head()
                        .await
                        .map_err(|error| unknown_if(is_sent, error))?;
                    let found = found.filter(|kv| kv.value == head);
                    return Ok(found.map(|kv| kv.mod_revision));
                }
                Err(fault) => {
                    let recovered = self.recover(fault, deadline).await;
                    recovered.map_err(|error| unknown_if(is_sent, error))?;
                }
            }
        }
    }

    async fn head(&mut self) -> Result<Option<KeyValue>, StoreError> {
        self.value("state/head").await
    }

    async fn value(&mut self, of: &str) -> Result<Option<KeyValue>, StoreError> {
        Ok(self.range(of).await?.kvs.into_iter().next())
    }

    async fn range(&mut self, of: &str) -> Result<RangeResponse, StoreError> {
        let deadline = Instant::now() + PATIENCE;
        let range = RangeRequest {
            key: self.key(of),
            ..RangeRequest::default()
        };
        loop {
            let tried = match self.connection().await {
                Ok(connection) => connection.range(range.clone()).await,
                Err(fault) => Err(fault),
            };
            match tried {
                Ok(found) => return Ok(found),
                Err(fault) => self.recover(fault, deadline).await?,
            }
        }
    }

    async fn connection(&mut self) -> Result<Connection, Fault> {
        if let Some(connection) = &self.connection {
            return Ok(connection.clone());
        }
        let connection = self.cluster.connect(self.turn).await?;
        Ok(self.connection.insert(connection).clone())
    }

    /// Another member of the cluster may do better, for as long as there is time.
    async fn recover(&mut self, fault: Fault, deadline: Instant) -> Result<(), StoreError> {
        match fault {
            Fault::Lost(_) if Instant::now() < deadline => {
                self.connection = None;
                self.turn += 1;
                sleep(PAUSE).await;
                Ok(())
            }
            Fault::Lost(why) | Fault::Refused(why) => Err(StoreError::Unavailable(why)),
        }
    }

    /// That the head is the one of this revision; 0: that there is none.
    fn is_still(&self, head: i64) -> Compare {
        Compare {
            target: target::MOD,
            key: self.key("state/head"),
            operand: Some(Operand::ModRevision(head)),
            ..Compare::default()
        }
    }

    fn key(&self, of: &str) -> Vec<u8> {
        format!("{}/{of}", self.prefix).into_bytes()
    }

    fn not_empty(&self) -> StoreError {
        StoreError::NotEmpty {
            prefix: self.prefix.clone(),
        }
    }
}

fn head(schema: i64) -> Result<Vec<u8>, StoreError> {
    let (id, rows) = (random()?, 0);
    let head = Head { schema, id, rows };
    serde_json::to_vec(&head).map_err(|_| StoreError::Corrupt("head"))
}

fn unknown_if(is_sent: bool, error: StoreError) -> StoreError {
    match error {
        StoreError::Unavailable(why) if is_sent => StoreError::Unknown(why),
        other => other,
    }
}

fn another() -> StoreError {
    StoreError::Unavailable("somebody else brings a mesh into it".to_owned())
}
