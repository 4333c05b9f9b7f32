//! Client of a coordinator: JSON over HTTPS (`proto::mesh`), with bounds everywhere and without redirects.

use crate::causes::causes;
use crate::web_proxy::{Connector, ProxyError, THROUGH_WITHIN, WebProxies};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use seikan_config::{CoordinatorUrl, Host};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{
    BASE, Call, Changes, Credential, Cursor, Devices, Endpoints, JoinRequest, Joined, MAX_ANSWER,
    Pin, Reason, Refusal, RelayAddress, Rotation,
};
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use std::error::Error;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use zeroize::Zeroizing;

/// Maximum number of characters displayed of a refusal.
const MAX_MESSAGE: usize = 300;
/// Timeout of an answer, in addition to the time that the coordinator was asked to hold the request and to that of a
/// web proxy.
const PATIENCE: Duration = Duration::from_secs(10);
/// Timeout of a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// Why a coordinator gave no answer, or not the expected one.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The coordinator refuses the request.
    #[error("{0}")]
    Refused(Refusal),
    /// The coordinator cannot be reached.
    #[error("cannot reach {url}: {reason}")]
    Unreachable {
        /// Its URL.
        url: String,
        /// The reason, including its causes.
        reason: String,
        /// Whether the reason is a web proxy on the way, whose text says what to check.
        is_of_web_proxy: bool,
    },
    /// The server is not a coordinator.
    #[error("{url} is not a coordinator of this version: {reason}")]
    NotACoordinator {
        /// Its URL.
        url: String,
        /// The unexpected part of the answer.
        reason: String,
    },
    /// TLS cannot be set up.
    #[error("cannot set up TLS: {0}")]
    Tls(String),
    /// The asynchronous runtime cannot be started.
    #[error("cannot start the runtime of the coordinator's client: {0}")]
    Runtime(io::Error),
}

/// HTTP client; keeps connections open between requests.
type Http = legacy::Client<HttpsConnector<Connector>, Full<Bytes>>;

/// Client of one coordinator of a mesh at a time.
pub struct Client {
    connector: HttpsConnector<Connector>,
    http: Mutex<Http>,
    coordinators: Mutex<Coordinators>,
    authorization: Option<HeaderValue>,
    web_proxies: WebProxies,
}

/// Known coordinators of the mesh.
struct Coordinators {
    /// URLs, the configured one first.
    urls: Vec<String>,
    /// Index of the coordinator in use.
    current: usize,
}

impl Client {
    /// Creates a client of the coordinator at `url`. The coordinator's certificate must match `pin`
    /// or, without a pin, be valid for its name by the system's roots. Other coordinators of the
    /// mesh ([`Self::set_others`]) must satisfy the same condition for the same name, so that the
    /// source of their addresses cannot make this host trust another server. A member authenticates
    /// with its credential. `web_proxies` are used for all coordinators.
    ///
    /// # Errors
    /// [`ClientError::Tls`].
    pub fn new(
        url: &CoordinatorUrl,
        pin: Option<Pin>,
        credential: Option<Credential>,
        web_proxies: WebProxies,
    ) -> Result<Client, ClientError> {
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_connect_timeout(Some(CONNECT));
        // A server that vanished is detected during a long poll after about nine seconds.
        http.set_keepalive(Some(Duration::from_secs(5)));
        http.set_keepalive_interval(Some(Duration::from_secs(2)));
        http.set_keepalive_retries(Some(2));
        http.set_nodelay(true);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(pin, &[&TLS13])?)
            .https_only()
            .with_server_name_resolver(FixedServerNameResolver::new(server_name(url)?))
            .enable_http1()
            .wrap_connector(Connector {
                http,
                web_proxies: web_proxies.clone(),
            });
        let authorization = credential.and_then(|credential| {
            let text = Zeroizing::new(format!("Bearer {}", *credential.reveal()));
            let mut value = HeaderValue::from_str(&text).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        let endpoint = url.endpoint();
        let port = endpoint.port;
        // A name may contain letters that only a hosts file allows; each request checks the URI.
        let url = match &endpoint.host {
            Host::Address(ip) if ip.is_ipv6() => format!("https://[{ip}]:{port}"),
            Host::Address(ip) => format!("https://{ip}:{port}"),
            Host::Name(name) => format!("https://{name}:{port}"),
        };
        Ok(Client {
            http: Mutex::new(connected(&connector)),
            connector,
            coordinators: Mutex::new(Coordinators {
                urls: vec![url],
                current: 0,
            }),
            authorization,
            web_proxies,
        })
    }

    /// Uses new connections from now on: the existing ones may be of an address that this host or its NAT no
    /// longer has.
    pub fn reconnect(&self) {
        *self.http() = connected(&self.connector);
    }

    fn http(&self) -> MutexGuard<'_, Http> {
        self.http.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the other coordinators of the mesh, in addition to the configured one.
    pub fn set_others(&self, others: &[RelayAddress]) {
        let mut coordinators = self.coordinators();
        let current = coordinators.urls[coordinators.current].clone();
        coordinators.urls.truncate(1);
        for other in others {
            let url = format!("https://{other}");
            if !coordinators.urls.contains(&url) {
                coordinators.urls.push(url);
            }
        }
        // The coordinator in use stays in use while it answers, even if it is not listed.
        let position = coordinators.urls.iter().position(|url| *url == current);
        coordinators.current = position.unwrap_or_else(|| {
            coordinators.urls.push(current);
            coordinators.urls.len() - 1
        });
    }

    /// Returns the number of known coordinators, at least one.
    pub fn count(&self) -> usize {
        self.coordinators().urls.len()
    }

    /// Switches to the next coordinator.
    pub fn use_next(&self) {
        let mut coordinators = self.coordinators();
        coordinators.current = (coordinators.current + 1) % coordinators.urls.len();
    }

    /// Returns the URL of the coordinator in use.
    pub fn url(&self) -> String {
        let coordinators = self.coordinators();
        coordinators.urls[coordinators.current].clone()
    }

    fn coordinators(&self) -> MutexGuard<'_, Coordinators> {
        self.coordinators
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins the mesh.
    ///
    /// # Errors
    /// Refused: the token is invalid, or another member has the name or key. Or the coordinator cannot be
    /// reached.
    pub async fn join(&self, request: &JoinRequest) -> Result<Joined, ClientError> {
        self.ask(Method::POST, "/join", Some(request), PATIENCE)
            .await
    }

    /// Requests the changes after `known` and waits for some up to `wait`; returns all members if the
    /// coordinator's epoch differs.
    ///
    /// # Errors
    /// Refused: this host is no longer a member. Or the coordinator cannot be reached.
    pub async fn changes(&self, known: Cursor, wait: Duration) -> Result<Changes, ClientError> {
        let Cursor {
            revision,
            epoch,
            sight,
        } = known;
        let wait_for = wait.as_secs();
        let path = format!("/changes?since={revision}&sight={sight}&epoch={epoch}&wait={wait_for}");
        self.ask(Method::GET, &path, None::<&()>, wait + PATIENCE)
            .await
    }

    /// Reports this host's endpoints.
    ///
    /// # Errors
    /// As [`Self::changes`].
    pub async fn report_endpoints(&self, endpoints: &Endpoints) -> Result<(), ClientError> {
        self.post("/endpoints", Some(endpoints)).await
    }

    /// Reports the devices behind this host, all of them.
    ///
    /// # Errors
    /// As [`Self::changes`]; refused if they are too many, or change too often.
    pub async fn report_devices(&self, devices: &Devices) -> Result<(), ClientError> {
        self.post("/devices", Some(devices)).await
    }

    /// Asks that another member be told that this host tries to reach it.
    ///
    /// # Errors
    /// As [`Self::changes`].
    pub async fn call(&self, call: &Call) -> Result<(), ClientError> {
        self.post("/call", Some(call)).await
    }

    /// Reports this host's key, which may be a new one.
    ///
    /// # Errors
    /// As [`Self::changes`]; refused if the key is another member's, or one of too many.
    pub async fn rotate(&self, public_key: PublicKey) -> Result<(), ClientError> {
        let rotation = Rotation { public_key };
        self.post("/key", Some(&rotation)).await
    }

    /// Leaves the mesh.
    ///
    /// # Errors
    /// As [`Self::changes`].
    pub async fn leave(&self) -> Result<(), ClientError> {
        self.post("/leave", None::<&()>).await
    }

    async fn post(&self, path: &str, body: Option<&impl Serialize>) -> Result<(), ClientError> {
        let answer = self.ask::<IgnoredAny>(Method::POST, path, body, PATIENCE);
        answer.await.map(drop)
    }

    async fn ask<A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        patience: Duration,
    ) -> Result<A, ClientError> {
        let url = self.url();
        let body = match body {
            Some(body) => serde_json::to_vec(body).map_err(|e| odd(&url, &e))?,
            None => Vec::new(),
        };
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{url}{BASE}{path}"))
            .header(CONTENT_TYPE, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization.clone());
        }
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| odd(&url, &e))?;
        let patience = match self.web_proxies.of_url(&url) {
            Some(_) => patience + THROUGH_WITHIN,
            None => patience,
        };
        let http = self.http().clone();
        let answered = async {
            let response = http
                .request(request)
                .await
                .map_err(|e| unreachable(&url, &e))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER)
                .collect()
                .await;
            let body = body.map_err(|e| unreachable(&url, &*e))?.to_bytes();
            Ok((status, body))
        };
        let (status, body) = match tokio::time::timeout(patience, answered).await {
            Ok(answered) => answered?,
            Err(_) => {
                let late = format!("no answer within {} s", patience.as_secs());
                return Err(unreachable(
                    &url,
                    &io::Error::new(io::ErrorKind::TimedOut, late),
                ));
            }
        };
        understood(&url, status, &body)
    }
}

fn understood<A: DeserializeOwned>(
    url: &str,
    status: StatusCode,
    body: &[u8],
) -> Result<A, ClientError> {
    if status.is_success() {
        // An empty body parses as `null`.
        let body = if body.is_empty() { b"null" } else { body };
        return serde_json::from_slice(body).map_err(|e| odd(url, &e));
    }
    match serde_json::from_slice::<Refusal>(body) {
        Ok(mut refusal) => {
            // The text is displayed to a user.
            let shown = refusal.message.chars().filter(|c| !c.is_control());
            refusal.message = shown.take(MAX_MESSAGE).collect();
            Err(ClientError::Refused(refusal))
        }
        Err(_) => {
            let reason = format!("it answers with status {status}");
            Err(odd(url, &io::Error::other(reason)))
        }
    }
}

fn unreachable(url: &str, error: &(dyn Error + 'static)) -> ClientError {
    let mut chain = std::iter::successors(Some(error), |error| (*error).source());
    ClientError::Unreachable {
        url: url.to_owned(),
        reason: causes(error),
        is_of_web_proxy: chain.any(|error| error.is::<ProxyError>()),
    }
}

fn odd(url: &str, error: &(dyn Error + 'static)) -> ClientError {
    ClientError::NotACoordinator {
        url: url.to_owned(),
        reason: causes(error),
    }
}

impl ClientError {
    /// Returns the reason of a refusal.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Refused(refusal) => Some(refusal.reason),
            _ => None,
        }
    }
}

/// Runs one request to a coordinator to its end, for the command line.
///
/// # Errors
/// The error of `work`, or [`ClientError::Runtime`].
pub fn wait_for<T>(work: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(ClientError::Runtime)?
        .block_on(work)
}

fn connected(connector: &HttpsConnector<Connector>) -> Http {
    legacy::Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(Duration::from_secs(30))
        .build(connector.clone())
}

/// Returns the name for which a certificate must be valid, whichever coordinator presents it.
fn server_name(url: &CoordinatorUrl) -> Result<ServerName<'static>, ClientError> {
    match &url.endpoint().host {
        Host::Address(ip) => Ok(ServerName::from(*ip)),
        Host::Name(name) => ServerName::try_from(name.clone())
            .map_err(|_| ClientError::Tls(format!("{name} is not a valid name of a certificate"))),
    }
}

/// Returns the TLS configuration: the trusted certificates and the versions; coordinators use 1.3.
pub(super) fn tls(
    pin: Option<Pin>,
    versions: &[&'static SupportedProtocolVersion],
) -> Result<ClientConfig, ClientError> {
    let failed = |e: rustls::Error| ClientError::Tls(e.to_string());
    if let Some(pin) = pin {
        return seikan_tls::pinned(pin, versions).map_err(failed);
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_protocol_versions(versions).map_err(failed)?;
    Ok(builder
        .with_root_certificates(roots())
        .with_no_client_auth())
}

/// Returns the system's root certificates, read once. A daemon calls this before it gives up privileges, since
/// it may not be able to read the files afterwards.
pub fn roots() -> Arc<RootCertStore> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    let read = || {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        Arc::new(roots)
    };
    Arc::clone(ROOTS.get_or_init(read))
}
