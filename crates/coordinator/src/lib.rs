//! The coordinator of a mesh: manages its members and distributes changes among them.
//!
//! An operator creates tokens ([`Store::create_token`]). A host presents a token with its name and
//! public key and becomes a member ([`Store::join`]) with addresses of its own. The host generates
//! a credential. With it the member polls for changes of the other members ([`Store::answer`]) and
//! publishes its endpoints ([`Store::set_endpoints`]) until it leaves or is removed
//! ([`Store::remove`]). Every change that members receive has a revision, one more than the last. A
//! member requests all changes after the last revision that it knows.
//!
//! [`store`] keeps all state in one SQLite file, which a server and the operator's commands may
//! open at the same time, or in etcd, which several servers share. [`server`] serves hosts: JSON
//! over HTTPS as defined in `seikan_proto::mesh`. [`Certificate`] authenticates the server.
//!
//! The store holds no private keys of hosts, and only digests of their tokens and credentials. A
//! reader of the file can neither join nor act as a member. It does hold the secrets of relays,
//! which sign tickets: a reader of the file can use the relays.
#![forbid(unsafe_code)]

pub mod server;
pub mod store;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

pub use seikan_tls::{Certificate, TlsError};
pub use server::{Options, Server, ServerError, Sockets};
pub use store::{
    Actor, Answer, AuditEntry, DeviceInfo, ETCD_PREFIX, Etcd, Joining, MemberId, MemberInfo,
    MemberRef, NewToken, RelayInfo, Store, StoreError, TokenId, TokenInfo,
};

/// Returns the current time, in seconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Locks; data behind a poisoned lock is still valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
