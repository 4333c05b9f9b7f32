//! One connection to one member of an etcd cluster: gRPC over HTTP/2, with TLS if its URL says so.
//!
//! Every question has its time, and is asked of members only that have a leader: one that is cut off from the others refuses
//! instead of waiting for them.

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
    AuthenticateRequest, AuthenticateResponse, LeaseGrantRequest, LeaseGrantResponse, LeaseId,
    LeaseKeepAliveResponse, Nothing, RangeRequest, RangeResponse, TxnRequest, TxnResponse,
    WatchCreateRequest, WatchRequest, WatchResponse,
};
use crate::store::StoreError;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(2);
/// How long an answer may take. Who then asks another member loses nothing.
const ANSWER: Duration = Duration::from_secs(2);
/// How often an idle connection is tried: etcd forbids more than one in five seconds.
const PROBE: Duration = Duration::from_secs(6);
/// How long an answer to that may take.
const PROBED: Duration = Duration::from_secs(3);
/// Longest message that is read, in bytes: etcd tells up to a thousand revisions in one.
const MAX_MESSAGE: usize = 64 << 20;

/// What etcd says of a token from before its users were others (`ErrGRPCAuthOldRevision`), by the same code as of nonsense.
const OLD_TOKEN: &str = "revision of auth store is old";

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// None within its time, or the connection broke: what was asked for may have been done.
    #[error("{0}")]
    Lost(String),
    /// It refuses: what was asked for was not done.
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
            // A token of before etcd's users were others: the next connection has another.
            Code::InvalidArgument if text.contains(OLD_TOKEN) => Fault::Lost(text),
            Code::InvalidArgument
            | Code::PermissionDenied
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::NotFound => Fault::Refused(text),
            // Also a token that is not good any more: the next connection has another.
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

/// The cluster's members, and how they are spoken to.
#[derive(Clone)]
pub(super) struct Cluster {
    endpoints: Vec<Endpoint>,
    user: Option<(String, Zeroizing<String>)>,
}

impl Cluster {
    /// Reads the files that the settings name.
    pub fn new(settings: &Etcd) -> Result<Cluster, StoreError> {
        let tls = tls(settings)?;
        let endpoints = settings.endpoints.iter().map(|url| {
            let wrong = |why: String| StoreError::EtcdSettings(format!("{url}: {why}"));
            let endpoint = Endpoint::from_shared(url.clone()).map_err(|e| wrong(e.to_string()))?;
            let endpoint = endpoint
                .connect_timeout(CONNECT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(PROBE)
                .keep_alive_timeout(PROBED)
                .keep_alive_while_idle(true);
            match endpoint.uri().scheme_str() {
                Some("https") => endpoint.tls_config(tls.clone()).map_err(|e| {
                    wrong(match Fault::from(e) {
                        Fault::Lost(why) | Fault::Refused(why) => why,
                    })
                }),
                Some("http") if settings.ca.is_some() || settings.identity.is_some() => Err(wrong(
                    "certificates are for https:// only: write that for each member, or name none".to_owned(),
                )),
                Some("http") => Ok(endpoint),
                _ => Err(wrong(
                    "write https://HOST:PORT, or http://HOST:PORT on a network that nobody else is in"
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

    /// How many members are known.
    pub fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// A connection to one of them; `turn` counts through them.
    pub async fn connect(&self, turn: usize) -> Result<Connection, Fault> {
        let endpoint = &self.endpoints[turn % self.endpoints.len()];
        let told = |fault: Fault| match fault {
            Fault::Lost(why) => Fault::Lost(format!("{}: {why}", endpoint.uri())),
            Fault::Refused(why) => Fault::Refused(format!("{}: {why}", endpoint.uri())),
        };
        let channel = endpoint.connect().await.map_err(|e| told(e.into()))?;
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
                .ask("/etcdserverpb.Auth/Authenticate", request)
                .await
                .map_err(told)?;
            let token = answer.token.parse();
            let token = token.map_err(|_| Fault::Refused("its token is none".to_owned()))?;
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

/// To one member. Copies share it.
#[derive(Clone)]
pub(super) struct Connection {
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
}

impl Connection {
    pub async fn range(&self, request: RangeRequest) -> Result<RangeResponse, Fault> {
        self.ask("/etcdserverpb.KV/Range", request).await
    }

    pub async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, Fault> {
        self.ask("/etcdserverpb.KV/Txn", request).await
    }

    /// A lease for so many seconds; its number.
    pub async fn grant(&self, ttl: i64) -> Result<i64, Fault> {
        let request = LeaseGrantRequest { ttl };
        let answer: LeaseGrantResponse =
            self.ask("/etcdserverpb.Lease/LeaseGrant", request).await?;
        Ok(answer.id)
    }

    /// Ends a lease, and what is kept under it.
    pub async fn revoke(&self, id: i64) -> Result<(), Fault> {
        let path = "/etcdserverpb.Lease/LeaseRevoke";
        let _: Nothing = self.ask(path, LeaseId { id }).await?;
        Ok(())
    }

    /// Begins a lease's time anew; whether it was still there.
    pub async fn renew(&self, id: i64) -> Result<bool, Fault> {
        let path = "/etcdserverpb.Lease/LeaseKeepAlive";
        let renewed = async {
            let requests = stream::iter([LeaseId { id }]);
            let mut answers = self.stream(path, requests).await?;
            let answer: Option<LeaseKeepAliveResponse> = answers.message().await?;
            Ok(answer.is_some_and(|answer| answer.ttl > 0))
        };
        in_time(renewed).await
    }

    /// What changes from now on, or from the revisions asked for.
    pub async fn watch(
        &self,
        watches: Vec<WatchCreateRequest>,
    ) -> Result<Streaming<WatchResponse>, Fault> {
        let create = |create| WatchRequest {
            create: Some(create),
        };
        let requests = stream::iter(watches.into_iter().map(create)).chain(stream::pending());
        in_time(self.stream("/etcdserverpb.Watch/Watch", requests)).await
    }

    /// Forgets what was before a revision.
    #[cfg(test)]
    pub async fn compact(&self, revision: i64) -> Result<(), Fault> {
        let request = super::messages::CompactionRequest { revision };
        let _: Nothing = self.ask("/etcdserverpb.KV/Compact", request).await?;
        Ok(())
    }

    async fn ask<Q, A>(&self, path: &'static str, question: Q) -> Result<A, Fault>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        in_time(async {
            let mut grpc = self.grpc().await?;
            let codec = ProstCodec::<Q, A>::default();
            let request = self.signed(question);
            let answer = grpc
                .unary(request, PathAndQuery::from_static(path), codec)
                .await?;
            Ok(answer.into_inner())
        })
        .await
    }

    async fn stream<Q, A>(
        &self,
        path: &'static str,
        questions: impl stream::Stream<Item = Q> + Send + 'static,
    ) -> Result<Streaming<A>, Fault>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = self.grpc().await?;
        let codec = ProstCodec::<Q, A>::default();
        let request = self.signed(questions);
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

    fn signed<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        metadata.insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            metadata.insert("authorization", token.clone());
        }
        request
    }
}

async fn in_time<T>(work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    let late = |_| Fault::Lost(format!("no answer within {} s", ANSWER.as_secs()));
    tokio::time::timeout(ANSWER, work).await.map_err(late)?
}

/// What ends the range of all keys that begin with `prefix`, which ends with a slash.
pub(super) fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    end
}
