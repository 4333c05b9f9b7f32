//! Import of a whole mesh into etcd, which others see completely or not at all.
//!
//! An import takes many transactions. From the first to the last, the head has the schema
//! [`UNFINISHED`], and coordinators that read it refuse requests. Each transaction requires that
//! the head is unchanged, so two concurrent imports cannot mix.

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
use super::replica::{Head, PAUSE, TIMEOUT, UNFINISHED, delete, put, random};
use super::rows::Tables;
use crate::store::{SCHEMA, StoreError};

/// Maximum number of operations of one transaction: etcd takes 128.
const MAX_OPERATIONS: usize = 100;
/// Maximum bytes of one transaction, unless a single operation is larger: etcd takes 1.5 MiB.
const MAX_BYTES: usize = 512 << 10;

/// Data that is imported along with the rows.
pub(in crate::store) struct Extras {
    /// Times of members' latest activity, in seconds since 1970, by their ids.
    pub seen: BTreeMap<i64, i64>,
    /// Pin by which members verify the coordinators; `None`: a public CA signed the certificate.
    pub pin: Option<Pin>,
}

/// Imports the rows of a database as the mesh with the number `mesh`, unless that is complete
/// already. With `replace` it replaces an existing mesh. Returns [`StoreError::Unknown`] if the
/// import may be complete; after any other error it is not.
pub(in crate::store) fn import(
    from: &Transaction<'_>,
    extras: &Extras,
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
    let seen = extras.seen.iter().map(|(member, at)| {
        let key = key(&format!("seen/{member}"));
        (key, at.to_string().into_bytes())
    });
    let pairs = rows.chain(seen);
    let mut import = Import::new(into, mesh)?;
    wait_for(async {
        if import.is_done().await? {
            return Ok(());
        }
        // The first transaction deletes the former mesh, even if a later one fails.
        let lost = |error| match replace {
            true => note_former_deleted(&into.prefix, error),
            false => error,
        };
        let head_revision = import.begin(replace).await;
        let head_revision = head_revision.map_err(|error| match error {
            StoreError::Unknown(_) => incomplete(lost(error)),
            other => other,
        })?;
        let outcome = import.put_all(pairs, head_revision).await;
        outcome.map_err(|error| lost(incomplete(error)))?;
        import.end(extras.pin, head_revision).await.map_err(lost)
    })
}

/// Adds to an error that the former mesh has been deleted.
fn note_former_deleted(prefix: &str, error: StoreError) -> StoreError {
    let with_note = |why| {
        format!(
            "{why} (--replace has deleted the former mesh under {prefix}: only a backup restores it, --undo does not)"
        )
    };
    match error {
        StoreError::Unavailable(why) => StoreError::Unavailable(with_note(why)),
        StoreError::Unknown(why) => StoreError::Unknown(with_note(why)),
        other => other,
    }
}

/// Returns the id of the cluster.
pub(in crate::store) fn cluster(of: &Etcd) -> Result<u64, StoreError> {
    // The number of the mesh is not used.
    let mut import = Import::new(of, 0)?;
    wait_for(async {
        let found = import.range("state/head").await?;
        let header = found.header.filter(|header| header.cluster_id != 0);
        let unnamed =
            || StoreError::Unavailable("it does not report the id of its cluster".to_owned());
        Ok(header.ok_or_else(unnamed)?.cluster_id)
    })
}

/// Invalidates an interrupted import, so that it can never be completed; [`StoreError::HasMoved`]
/// if it is complete.
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

/// The outcome of this transaction does not matter: the import is not complete.
fn incomplete(error: StoreError) -> StoreError {
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
    /// Index of the member in use.
    member_index: usize,
    connection: Option<Connection>,
    prefix: String,
    /// Number of the new mesh.
    mesh: u64,
}

impl Import {
    fn new(into: &Etcd, mesh: u64) -> Result<Import, StoreError> {
        Ok(Import {
            cluster: Cluster::new(into)?,
            member_index: 0,
            connection: None,
            prefix: into.prefix.clone(),
            mesh,
        })
    }

    /// Returns whether the import is complete.
    async fn is_done(&mut self) -> Result<bool, StoreError> {
        let number = self.mesh.to_string();
        let mesh = self.value("state/mesh").await?;
        let is_this = mesh.is_some_and(|kv| kv.value == number.as_bytes());
        let head = self.head().await?;
        Ok(is_this && head.is_some_and(|kv| !is_unfinished(&kv)))
    }

    /// Starts an import, and deletes an existing mesh with `replace`; returns the revision of the
    /// head.
    async fn begin(&mut self, replace: bool) -> Result<i64, StoreError> {
        let found = self.head().await?;
        let at = found.as_ref().map_or(0, |kv| kv.mod_revision);
        // Also with `replace`: a mesh that another process has imported meanwhile is not deleted.
        let mut compare = vec![self.is_still(at)];
        if !replace {
            // An interrupted import may be replaced.
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
        let head_revision = self.settle(&TxnRequest { compare, success }, &head).await?;
        head_revision.ok_or_else(|| match replace {
            true => StoreError::Changing {
                prefix: self.prefix.clone(),
            },
            false => self.not_empty(),
        })
    }

    async fn put_all(
        &mut self,
        pairs: impl Iterator<Item = (Vec<u8>, Vec<u8>)>,
        head_revision: i64,
    ) -> Result<(), StoreError> {
        let mut pairs = pairs.peekable();
        while pairs.peek().is_some() {
            let (mut success, mut bytes) = (Vec::new(), 0);
            while let Some((key, value)) = pairs.next_if(|(key, value)| {
                let fits =
                    success.len() < MAX_OPERATIONS && bytes + key.len() + value.len() <= MAX_BYTES;
                fits || success.is_empty()
            }) {
                bytes += key.len() + value.len();
                success.push(put(key, value, 0));
            }
            let compare = vec![self.is_still(head_revision)];
            let put = self.settle(&TxnRequest { compare, success }, &[]).await?;
            put.ok_or_else(concurrent_import)?;
        }
        Ok(())
    }

    /// Completes the import.
    async fn end(&mut self, pin: Option<Pin>, head_revision: i64) -> Result<(), StoreError> {
        let head = head(SCHEMA)?;
        let mesh = self.mesh.to_string().into_bytes();
        let mut success = vec![
            put(self.key("state/head"), head.clone(), 0),
            put(self.key("state/mesh"), mesh, 0),
        ];
        if let Some(pin) = pin {
            success.push(put(self.key("pin"), pin.to_string().into_bytes(), 0));
        }
        let compare = vec![self.is_still(head_revision)];
        if (self.settle(&TxnRequest { compare, success }, &head).await?).is_some() {
            return Ok(());
        }
        // It may be complete and changed since by others.
        match self.is_done().await {
            Ok(true) => Ok(()),
            Ok(false) => Err(concurrent_import()),
            Err(error) => Err(StoreError::Unknown(error.to_string())),
        }
    }

    /// Runs a transaction; returns its revision, or `None` if the comparisons fail. If the head is
    /// `head` then, an earlier attempt succeeded and its response was lost. Returns
    /// [`StoreError::Unknown`] if the response is lost and no later request succeeds.
    async fn settle(&mut self, txn: &TxnRequest, head: &[u8]) -> Result<Option<i64>, StoreError> {
        let deadline = Instant::now() + TIMEOUT;
        let mut is_sent = false;
        loop {
            let response = match self.connection().await {
                Ok(connection) => {
                    let response = connection.txn(txn.clone()).await;
                    is_sent |= matches!(response, Err(Fault::Lost(_)));
                    response
                }
                Err(fault) => Err(fault),
            };
            match response {
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
        let deadline = Instant::now() + TIMEOUT;
        let range = RangeRequest {
            key: self.key(of),
            ..RangeRequest::default()
        };
        loop {
            let response = match self.connection().await {
                Ok(connection) => connection.range(range.clone()).await,
                Err(fault) => Err(fault),
            };
            match response {
                Ok(found) => return Ok(found),
                Err(fault) => self.recover(fault, deadline).await?,
            }
        }
    }

    async fn connection(&mut self) -> Result<Connection, Fault> {
        if let Some(connection) = &self.connection {
            return Ok(connection.clone());
        }
        let connection = self.cluster.connect(self.member_index).await?;
        Ok(self.connection.insert(connection).clone())
    }

    /// Switches to another member of the cluster, until the deadline.
    async fn recover(&mut self, fault: Fault, deadline: Instant) -> Result<(), StoreError> {
        match fault {
            Fault::Lost(_) if Instant::now() < deadline => {
                self.connection = None;
                self.member_index += 1;
                sleep(PAUSE).await;
                Ok(())
            }
            Fault::Lost(why) | Fault::Refused(why) => Err(StoreError::Unavailable(why)),
        }
    }

    /// Compares the revision of the head; 0: no head.
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

fn concurrent_import() -> StoreError {
    StoreError::Unavailable("another process imports a mesh under the same prefix".to_owned())
}
