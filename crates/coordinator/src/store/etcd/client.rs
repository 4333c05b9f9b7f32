//! A connection to one member of an etcd cluster: gRPC over HTTP/2, with TLS for `https` URLs.
//!
//! Every request has a timeout, and requires a member that has a leader: a member that is cut off
//! from the cluster then refuses instead of waiting.

use std::fs;
use std::path::Path;
use std::time::Duration;

use axum::http::uri::PathAndQuery;
use futures_util::{StreamExt as _, stream};
use prost::Message;
use tonic::client::Grpc;
use tonic::codec::Streaming;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use zeroize::Zeroizing;

use super::Etcd;
use super::messages::{
    AuthenticateRequest, AuthenticateResponse, Header, KeyValue, LeaseGrantResponse,
    LeaseKeepAliveResponse, RangeRequest, RangeResponse, TxnRequest, TxnResponse,
    WatchCreateRequest, WatchRequest, WatchResponse,
};
use crate::store::StoreError;

/// Timeout of connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of a response. Requests may be repeated on another member.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of keepalive pings. etcd forbids more than one in five seconds.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(6);
/// Timeout of a keepalive response.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(3);
/// Number of keys per request of [`Connection::range_all`].
const PAGE: i64 = 1000;
/// Maximum size of a message, in bytes: etcd sends up to a thousand revisions in one.
const MAX_MESSAGE: usize = 64 << 20;

/// Error text for a token from before a change of etcd's users (`ErrGRPCAuthOldRevision`). Its code
/// is the same as for invalid requests.
const OLD_TOKEN: &str = "revision of auth store is old";

/// Error of a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// No response in time, or the connection broke: the request may have been executed.
    #[error("{0}")]
    Lost(String),
    /// etcd refused: the request was not executed.
    #[error("{0}")]
    Refused(String),
}

impl From<Status> for Fault {
    fn from(status: Status) -> Fault {
        let text = match status.message() {
            "" => status.code().description().to_owned(),
            message => message.to_owned(),
        };
        match status.code() {
            // The token is from before a change of etcd's users: the next connection gets a new
            // one.
            Code::InvalidArgument if text.contains(OLD_TOKEN) => Fault::Lost(text),
            Code::InvalidArgument
            | Code::PermissionDenied
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::NotFound => Fault::Refused(text),
            // This includes an expired token: the next connection gets a new one.
            _ => Fault::Lost(text),
        }
    }
}

impl From<tonic::transport::Error> for Fault {
    fn from(error: tonic::transport::Error) -> Fault {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        Fault::Lost(text)
    }
}

/// The members of a cluster, and the credentials for them.
#[derive(Clone)]
pub(super) struct Cluster {
    endpoints: Vec<Endpoint>,
    user: Option<(String, Zeroizing<String>)>,
}

impl Cluster {
    /// Loads the files that the settings name.
    pub fn new(settings: &Etcd) -> Result<Cluster, StoreError> {
        let tls = tls(settings)?;
        let endpoints = settings.endpoints.iter().map(|url| {
            let invalid = |reason: String| StoreError::EtcdSettings(format!("{url}: {reason}"));
            let endpoint = Endpoint::from_shared(url.clone()).map_err(|e| invalid(e.to_string()))?;
            let endpoint = endpoint
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
                .keep_alive_timeout(KEEPALIVE_TIMEOUT)
                .keep_alive_while_idle(true);
            match endpoint.uri().scheme_str() {
                Some("https") => endpoint.tls_config(tls.clone()).map_err(|e| {
                    invalid(match Fault::from(e) {
                        Fault::Lost(why) | Fault::Refused(why) => why,
                    })
                }),
                Some("http") if settings.ca.is_some() || settings.identity.is_some() => Err(invalid(
                    "certificates need https:// URLs: use them for every member, or configure no certificates".to_owned(),
                )),
                Some("http") => Ok(endpoint),
                _ => Err(invalid(
                    "expected https://HOST:PORT, or http://HOST:PORT on a private network"
                        .to_owned(),
                )),
            }
        });
        let endpoints: Vec<Endpoint> = endpoints.collect::<Result<_, _>>()?;
        if endpoints.is_empty() {
            let why = "name at least one member of the cluster, such as https://etcd-1:2379";
            return Err(StoreError::EtcdSettings(why.to_owned()));
        }
        let user = match &settings.user {
            None => None,
            Some((name, file)) => {
                let password = Zeroizing::new(read(file)?);
                let password = String::from_utf8_lossy(&password).trim_end().to_owned();
                Some((name.clone(), Zeroizing::new(password)))
            }
        };
        Ok(Cluster { endpoints, user })
    }

    /// Returns the number of members.
    pub fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// Connects to a member; `index` is taken modulo their number.
    pub async fn connect(&self, index: usize) -> Result<Connection, Fault> {
        let endpoint = &self.endpoints[index % self.endpoints.len()];
        let with_url = |fault: Fault| match fault {
            Fault::Lost(why) => Fault::Lost(format!("{}: {why}", endpoint.uri())),
            Fault::Refused(why) => Fault::Refused(format!("{}: {why}", endpoint.uri())),
        };
        let channel = endpoint.connect().await.map_err(|e| with_url(e.into()))?;
        let mut connection = Connection {
            channel,
            token: None,
        };
        if let Some((name, password)) = &self.user {
            let request = AuthenticateRequest {
                name: name.clone(),
                password: password.to_string(),
            };
            let answer: AuthenticateResponse = connection
                .unary("/etcdserverpb.Auth/Authenticate", request)
                .await
                .map_err(with_url)?;
            let token = answer.token.parse();
            let token =
                token.map_err(|_| Fault::Refused("etcd sent an invalid token".to_owned()))?;
            connection.token = Some(token);
        }
        Ok(connection)
    }
}

fn tls(settings: &Etcd) -> Result<ClientTlsConfig, StoreError> {
    let config = match &settings.ca {
        Some(ca) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(ca)?)),
        None => ClientTlsConfig::new().with_native_roots(),
    };
    Ok(match &settings.identity {
        Some((certificate, key)) => {
            let key = Zeroizing::new(read(key)?);
            config.identity(Identity::from_pem(read(certificate)?, &*key))
        }
        None => config,
    })
}

fn read(path: &Path) -> Result<Vec<u8>, StoreError> {
    fs::read(path).map_err(|source| StoreError::Unreadable {
        path: path.to_owned(),
        source,
    })
}

/// Connection to one member. Clones share it.
#[derive(Clone)]
pub(super) struct Connection {
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
}

impl Connection {
    pub async fn range(&self, request: RangeRequest) -> Result<RangeResponse, Fault> {
        self.unary("/etcdserverpb.KV/Range", request).await
    }

    /// Requests all keys that begin with `prefix`, which must end with a slash, as of one revision.
    pub async fn range_all(&self, prefix: &str) -> Result<(Header, Vec<KeyValue>), Fault> {
        let mut range = RangeRequest {
            limit: PAGE,
            ..RangeRequest::all(prefix)
        };
        let (mut header, mut all) = (Header::default(), Vec::new());
        loop {
            let page = self.range(range.clone()).await?;
            if range.revision == 0 {
                header = page.header.unwrap_or_default();
                range.revision = header.revision;
            }
            let last = page.kvs.last().map(|kv| kv.key.clone());
            all.extend(page.kvs);
            match last {
                Some(last) if page.more => {
                    range.key = last;
                    range.key.push(0);
                }
                _ => return Ok((header, all)),
            }
        }
    }

    pub async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, Fault> {
        self.unary("/etcdserverpb.KV/Txn", request).await
    }

    /// Grants a lease for a number of seconds; returns its id.
    pub async fn grant(&self, ttl: i64) -> Result<i64, Fault> {
        let path = "/etcdserverpb.Lease/LeaseGrant";
        let answer: LeaseGrantResponse = self.unary(path, ttl).await?;
        Ok(answer.id)
    }

    /// Revokes a lease, which deletes its keys.
    pub async fn revoke(&self, id: i64) -> Result<(), Fault> {
        self.unary("/etcdserverpb.Lease/LeaseRevoke", id).await
    }

    /// Renews a lease; returns whether it still existed.
    pub async fn renew(&self, id: i64) -> Result<bool, Fault> {
        let path = "/etcdserverpb.Lease/LeaseKeepAlive";
        let renewed = async {
            let requests = stream::iter([id]);
            let mut answers = self.stream(path, requests).await?;
            let answer: Option<LeaseKeepAliveResponse> = answers.message().await?;
            Ok(answer.is_some_and(|answer| answer.ttl > 0))
        };
        with_timeout(renewed).await
    }

    /// Watches a range of keys, from the requested revision on.
    pub async fn watch(
        &self,
        create: WatchCreateRequest,
    ) -> Result<Streaming<WatchResponse>, Fault> {
        let create = WatchRequest {
            create: Some(create),
        };
        let requests = stream::iter([create]).chain(stream::pending());
        with_timeout(self.stream("/etcdserverpb.Watch/Watch", requests)).await
    }

    /// Compacts the revisions before `revision`.
    #[cfg(test)]
    pub async fn compact(&self, revision: i64) -> Result<(), Fault> {
        self.unary("/etcdserverpb.KV/Compact", revision).await
    }

    async fn unary<M, A>(&self, path: &'static str, message: M) -> Result<A, Fault>
    where
        M: Message + 'static,
        A: Message + Default + 'static,
    {
        with_timeout(async {
            let mut grpc = self.grpc().await?;
            let codec = ProstCodec::<M, A>::default();
            let request = self.with_metadata(message);
            let answer = grpc
                .unary(request, PathAndQuery::from_static(path), codec)
                .await?;
            Ok(answer.into_inner())
        })
        .await
    }

    async fn stream<M, A>(
        &self,
        path: &'static str,
        requests: impl stream::Stream<Item = M> + Send + 'static,
    ) -> Result<Streaming<A>, Fault>
    where
        M: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = self.grpc().await?;
        let codec = ProstCodec::<M, A>::default();
        let request = self.with_metadata(requests);
        let answers = grpc
            .streaming(request, PathAndQuery::from_static(path), codec)
            .await?;
        Ok(answers.into_inner())
    }

    async fn grpc(&self) -> Result<Grpc<Channel>, Fault> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE);
        grpc.ready().await?;
        Ok(grpc)
    }

    fn with_metadata<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        metadata.insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            metadata.insert("authorization", token.clone());
        }
        request
    }
}

async fn with_timeout<T>(work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    let late = |_| {
        Fault::Lost(format!(
            "no response within {} s",
            RESPONSE_TIMEOUT.as_secs()
        ))
    };
    tokio::time::timeout(RESPONSE_TIMEOUT, work)
        .await
        .map_err(late)?
}
