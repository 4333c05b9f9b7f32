//! The coordinator: who belongs to a mesh, and who tells them of each other.
//!
//! An operator gives out tokens ([`Store::create_token`]). A host shows one, with its name and its
//! public key, and becomes a member ([`Store::join`]): it gets addresses that nobody else has. With the
//! credential that it made itself it asks what changed among the others ([`Store::answer`]) and tells where it
//! may be reached ([`Store::set_endpoints`]), until it leaves or is removed ([`Store::remove`]). Every
//! change that members are told of has a revision, one more than the last; a member asks for what
//! came after the last it knows.
//!
//! [`store`] keeps all of it in one SQLite file, which a server and the operator's commands may have
//! open at the same time, or in etcd, which several servers share. [`server`] speaks to hosts: JSON over HTTPS, as `seikan_proto::mesh` has it.
//! [`Certificate`] is what they know it by. No private key of a host is ever here, and of
//! hosts' secrets only digests: who reads the file can neither join nor speak for a member (but can use the relays, whose secrets make
//! tickets).
#![forbid(unsafe_code)]

pub mod server;
pub mod store;

pub use seikan_tls::{Certificate, TlsError};
pub use server::{Options, Server, ServerError, Sockets};
pub use store::{
    Actor, Answer, AuditEntry, ETCD_PREFIX, Etcd, Hold, Joining, MemberId, MemberInfo, Moved,
    NewToken, PutAway, RelayInfo, Store, StoreError, TokenId, TokenInfo, Whom,
};
