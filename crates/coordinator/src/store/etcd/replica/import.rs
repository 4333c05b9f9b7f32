//! Import of a whole mesh into etcd, which others see completely or not at all.
//!
//! An import takes many proposals. All but the last have a head with the schema [`UNFINISHED`], and
//! coordinators that read it refuse requests. Each proposal requires the head of the one before, so
//! two concurrent imports cannot mix. An interrupted import is replaced by the next import.

use std::time::Instant;

use super::super::messages::{RequestOp, delete_all, put};
use super::change::Base;
use super::{Etcd, Replica, TIMEOUT, UNFINISHED, random};
use crate::store::StoreError;
use crate::store::file::SCHEMA;
use crate::store::rows::Rows;

/// Maximum number of operations of one proposal: etcd takes 128.
const MAX_OPERATIONS: usize = 100;
/// Maximum bytes of one proposal, unless a single operation is larger: etcd takes 1.5 MiB.
const MAX_BYTES: usize = 512 << 10;

/// Imports rows; returns the number of the new mesh. Returns [`StoreError::Unknown`] if the import
/// may be complete; after any other error it is not.
pub(in crate::store) fn import(rows: Rows, into: &Etcd) -> Result<u64, StoreError> {
    let pairs = rows.into_iter().filter_map(|(row, value)| {
        let key = match row.split_once('/')?.0 {
            "refused" => return None,
            "seen" => row,
            _ => format!("state/rows/{row}"),
        };
        Some((key, value?))
    });
    let mut pairs = pairs.peekable();

    let replica = Replica::connect(&Etcd {
        advertise: None,
        ..into.clone()
    })?;
    let prefix = &into.prefix;
    let key = |of: &str| format!("{prefix}/{of}").into_bytes();
    let mut base = replica.base_of_import()?;
    let mut operations = vec![
        delete_all(&format!("{prefix}/state/rows/")),
        delete_all(&format!("{prefix}/seen/")),
    ];
    loop {
        base.head = replica.write_part(UNFINISHED, operations, base)?;
        let mut bytes = 0;
        operations = Vec::new();
        while let Some((of, value)) = pairs.next_if(|(of, value)| {
            bytes += prefix.len() + of.len() + value.len();
            operations.is_empty() || operations.len() < MAX_OPERATIONS && bytes <= MAX_BYTES
        }) {
            operations.push(put(key(&of), value.into(), 0));
        }
        if operations.is_empty() {
            break;
        }
    }
    let mesh = random()?;
    let last = vec![put(key("state/mesh"), mesh.to_string().into_bytes(), 0)];
    match replica.write_part(SCHEMA, last, base) {
        // The copy may have it, even if the response was lost.
        Err(StoreError::Unknown(why)) => {
            let found = replica.wait(Instant::now() + TIMEOUT, |state| state.epoch.mesh == mesh);
            drop(found.map_err(|_| StoreError::Unknown(why))?);
        }
        written => drop(written?),
    }
    Ok(mesh)
}

impl Replica {
    /// Returns the state that an import begins with, if there is no mesh.
    fn base_of_import(&self) -> Result<Base, StoreError> {
        let state = self.state();
        if state.is_unfinished || (state.head, state.epoch.mesh) == (0, 0) {
            Ok(Base::of(&state))
        } else {
            Err(StoreError::NotEmpty {
                location: format!("etcd, under {},", self.shared.settings.prefix),
            })
        }
    }

    /// Writes a part of an import; returns the revision of its head.
    fn write_part(
        &self,
        schema: i64,
        operations: Vec<RequestOp>,
        base: Base,
    ) -> Result<i64, StoreError> {
        let written = self.commit((schema, 0), operations, base, Instant::now() + TIMEOUT);
        match written {
            // Without the last part, the import is not complete.
            Err(StoreError::Unknown(why)) if schema == UNFINISHED => {
                Err(StoreError::Unavailable(why))
            }
            written => written?.ok_or_else(|| {
                StoreError::Unavailable(
                    "another process imports a mesh under the same prefix".to_owned(),
                )
            }),
        }
    }
}
