//! The messages of etcd's API that are used here, numbered as in
//! etcd.io/docs/v3.4/dev-guide/api_reference_v3. Unused fields are omitted; decoders skip them.
//! `i64` stands for messages whose only field is a number with the tag 1: the request of a lease
//! with its lifetime in seconds, or of its revocation or renewal with its id. `()` stands for
//! responses whose fields are unused.

use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub struct Header {
    /// Id of the cluster, the same for all of its members. Another cluster usually has another id,
    /// including one that was restored with a new token.
    #[prost(uint64, tag = "1")]
    pub cluster_id: u64,
    /// Revision of the whole cluster, not of the mesh.
    #[prost(int64, tag = "3")]
    pub revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub value: Vec<u8>,
    /// 0: no lease.
    #[prost(int64, tag = "6")]
    pub lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub limit: i64,
    /// 0: the latest.
    #[prost(int64, tag = "4")]
    pub revision: i64,
}

impl RangeRequest {
    /// Requests one key.
    pub fn key(key: Vec<u8>) -> RangeRequest {
        RangeRequest {
            key,
            ..RangeRequest::default()
        }
    }

    /// Requests all keys that begin with `prefix`, which must end with a slash.
    pub fn all(prefix: &str) -> RangeRequest {
        RangeRequest {
            range_end: end_of(prefix),
            ..RangeRequest::key(prefix.into())
        }
    }
}

/// Returns the end of the range of all keys that begin with `prefix`, which must end with a slash.
pub fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    end
}

#[derive(Clone, PartialEq, Message)]
pub struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    #[prost(message, repeated, tag = "2")]
    pub kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
    /// 0: no lease.
    #[prost(int64, tag = "3")]
    pub lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RequestOp {
    #[prost(oneof = "Request", tags = "2, 3, 4")]
    pub request: Option<Request>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Request {
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
    #[prost(message, tag = "4")]
    Txn(TxnRequest),
}

/// Returns a put operation under a lease; `lease` is 0 for none.
pub fn put(key: Vec<u8>, value: Vec<u8>, lease: i64) -> RequestOp {
    RequestOp {
        request: Some(Request::Put(PutRequest { key, value, lease })),
    }
}

pub fn delete(key: Vec<u8>) -> RequestOp {
    let range_end = Vec::new();
    RequestOp {
        request: Some(Request::Delete(DeleteRangeRequest { key, range_end })),
    }
}

/// Returns the deletion of all keys that begin with `prefix`, which must end with a slash.
pub fn delete_all(prefix: &str) -> RequestOp {
    let (key, range_end) = (prefix.into(), end_of(prefix));
    RequestOp {
        request: Some(Request::Delete(DeleteRangeRequest { key, range_end })),
    }
}

/// Value of [`Compare::result`] other than 0, "equal".
const NOT_EQUAL: i32 = 3;

#[derive(Clone, PartialEq, Message)]
pub struct Compare {
    #[prost(int32, tag = "1")]
    pub result: i32,
    /// One of [`target`].
    #[prost(int32, tag = "2")]
    pub target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub key: Vec<u8>,
    #[prost(oneof = "Operand", tags = "6, 8")]
    pub operand: Option<Operand>,
}

impl Compare {
    /// Requires that a key was last changed at a revision; `revision` is 0 if the key must not
    /// exist.
    pub fn is_at(key: Vec<u8>, revision: i64) -> Compare {
        Compare {
            target: target::MOD,
            key,
            operand: Some(Operand::ModRevision(revision)),
            ..Compare::default()
        }
    }

    /// Requires that a key exists.
    pub fn exists(key: Vec<u8>) -> Compare {
        Compare {
            result: NOT_EQUAL,
            ..Compare::is_at(key, 0)
        }
    }

    /// Requires that a key is under a lease.
    pub fn is_under(key: Vec<u8>, lease: i64) -> Compare {
        Compare {
            target: target::LEASE,
            key,
            operand: Some(Operand::Lease(lease)),
            ..Compare::default()
        }
    }
}

mod target {
    pub const MOD: i32 = 2;
    pub const LEASE: i32 = 4;
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Operand {
    #[prost(int64, tag = "6")]
    ModRevision(i64),
    #[prost(int64, tag = "8")]
    Lease(i64),
}

#[derive(Clone, PartialEq, Message)]
pub struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub succeeded: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    pub create: Option<WatchCreateRequest>,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchCreateRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub start_revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchResponse {
    #[prost(bool, tag = "4")]
    pub canceled: bool,
    /// Oldest revision that is not compacted, if the watch asked for an earlier one.
    #[prost(int64, tag = "5")]
    pub compact_revision: i64,
    #[prost(string, tag = "6")]
    pub cancel_reason: String,
    #[prost(message, repeated, tag = "11")]
    pub events: Vec<Event>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// 0: put, 1: deleted.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    #[prost(message, optional, tag = "2")]
    pub kv: Option<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    pub id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct LeaseKeepAliveResponse {
    /// Seconds; 0: the lease does not exist.
    #[prost(int64, tag = "3")]
    pub ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub password: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    pub token: String,
}
