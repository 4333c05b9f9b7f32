//! A coordinator as a client sees it: JSON over HTTPS (`proto::mesh`), everything bounded, nothing redirected.

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
    BASE, Call, Changes, Credential, Cursor, Endpoints, JoinRequest, Joined, MAX_ANSWER, Pin,
    Reason, Refusal, RelayAddress, Rotation,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::error::Error;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use zeroize::Zeroizing;

/// Characters of a refusal that are shown.
const MAX_MESSAGE: usize = 300;
/// How long a coordinator may take for an answer, what it is told to wait for aside.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take to be connected to.
const CONNECT: Duration = Duration::from_secs(5);

/// Why a coordinator gave no answer, or not the one that was wanted.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// It refuses.
    #[error("{0}")]
    Refused(Refusal),
    /// It cannot be reached.
    #[error("cannot reach {url}: {reason}")]
    Unreachable {
        /// Where it should be.
        url: String,
        /// Why not, causes included.
        reason: String,
    },
    /// What answers is no coordinator.
    #[error("{url} is not a coordinator of this version: {reason}")]
    NotACoordinator {
        /// Where it should be.
        url: String,
        /// What is odd about the answer.
        reason: String,
    },
    /// There is no way to speak TLS.
    #[error("cannot set up TLS: {0}")]
    Tls(String),
    /// There is no way to wait for it.
    #[error("cannot start the runtime of the coordinator's client: {0}")]
    Runtime(io::Error),
}

/// Connections, kept open between questions.
type Http = legacy::Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// Speaks to one coordinator of a mesh at a time.
pub struct Client {
    connector: HttpsConnector<HttpConnector>,
    http: Mutex<Http>,
    coordinators: Mutex<Coordinators>,
    authorization: Option<HeaderValue>,
}

/// Where coordinators of the mesh are.
struct Coordinators {
    /// The configured one first.
    urls: Vec<String>,
    /// Which of them is asked.
    asked: usize,
}

impl Client {
    /// Of the coordinator at `url`, whose certificate is the one of `pin` or, without one, any that the system trusts for its
    /// name. Others of its mesh ([`Self::know`]) have to show the same, for the same name: who tells where they are cannot have this
    /// host trust anybody else. A member shows its credential.
    ///
    /// # Errors
    /// [`ClientError::Tls`].
    pub fn new(
        url: &CoordinatorUrl,
        pin: Option<Pin>,
        credential: Option<Credential>,
    ) -> Result<Client, ClientError> {
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_connect_timeout(Some(CONNECT));
        // Who is gone without a word is found out while a question waits: after some nine seconds.
        http.set_keepalive(Some(Duration::from_secs(5)));
        http.set_keepalive_interval(Some(Duration::from_secs(2)));
        http.set_keepalive_retries(Some(2));
        http.set_nodelay(true);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(pin, &[&TLS13])?)
            .https_only()
            .with_server_name_resolver(FixedServerNameResolver::new(server_name(url)?))
            .enable_http1()
            .wrap_connector(http);
        let authorization = credential.and_then(|credential| {
            let text = Zeroizing::new(format!("Bearer {}", *credential.reveal()));
            let mut value = HeaderValue::from_str(&text).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        let endpoint = url.endpoint();
        let port = endpoint.port;
        // A name may have letters that only a host file allows; the URI is checked with each question.
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
                asked: 0,
            }),
            authorization,
        })
    }

    /// Asks by new connections from now on: those that there are may be of an address that this host, or the NAT before it, has no more.
    pub fn connect_anew(&self) {
        *self.http() = connected(&self.connector);
    }

    fn http(&self) -> MutexGuard<'_, Http> {
        self.http.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes these, beside the configured one, for coordinators of the mesh.
    pub fn know(&self, others: &[RelayAddress]) {
        let mut coordinators = self.coordinators();
        let asked = coordinators.urls[coordinators.asked].clone();
        coordinators.urls.truncate(1);
        for other in others {
            let url = format!("https://{other}");
            if !coordinators.urls.contains(&url) {
                coordinators.urls.push(url);
            }
        }
        // The one that is asked goes on being asked while it answers, whether it is told of or not.
        let place = coordinators.urls.iter().position(|url| *url == asked);
        coordinators.asked = place.unwrap_or_else(|| {
            coordinators.urls.push(asked);
            coordinators.urls.len() - 1
        });
    }

    /// How many coordinators are known, at least one.
    pub fn known(&self) -> usize {
        self.coordinators().urls.len()
    }

    /// From now on the next one is asked.
    pub fn turn(&self) {
        let mut coordinators = self.coordinators();
        coordinators.asked = (coordinators.asked + 1) % coordinators.urls.len();
    }

    /// The coordinator that is asked.
    pub fn url(&self) -> String {
        let coordinators = self.coordinators();
        coordinators.urls[coordinators.asked].clone()
    }

    fn coordinators(&self) -> MutexGuard<'_, Coordinators> {
        self.coordinators
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Becomes a member.
    ///
    /// # Errors
    /// Refused: the token is not good, the name or the key another's; or the coordinator cannot be reached.
    pub async fn join(&self, request: &JoinRequest) -> Result<Joined, ClientError> {
        self.ask(Method::POST, "/join", Some(request), PATIENCE)
            .await
    }

    /// What changed after what is `known`, waited for up to `wait`; everybody if its epoch is not the coordinator's any more.
    ///
    /// # Errors
    /// Refused: this host is no member any more; or the coordinator cannot be reached.
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

    /// Tells where this host may be reached.
    ///
    /// # Errors
    /// As [`Self::changes`].
    pub async fn tell(&self, endpoints: &Endpoints) -> Result<(), ClientError> {
        self.ask::<serde::de::IgnoredAny>(Method::POST, "/endpoints", Some(endpoints), PATIENCE)
            .await
            .map(drop)
    }

    /// Has another member told that this host tries to reach it.
    ///
    /// # Errors
    /// As [`Self::changes`].
    pub async fn call(&self, call: &Call) -> Result<(), ClientError> {
        self.ask::<serde::de::IgnoredAny>(Method::POST, "/call", Some(call), PATIENCE)
            .await
            .map(drop)
    }

    /// Has another key from now on, or the same.
    ///
    /// # Errors
    /// As [`Self::changes`]; refused: it is another member's, or one of too many.
    pub async fn rotate(&self, public_key: PublicKey) -> Result<(), ClientError> {
        let rotation = Rotation { public_key };
        self.ask::<serde::de::IgnoredAny>(Method::POST, "/key", Some(&rotation), PATIENCE)
            .await
            .map(drop)
    }

    /// Ceases to be a member.
    ///
    /// # Errors
    /// As [`Self::changes`].
    pub async fn leave(&self) -> Result<(), ClientError> {
        self.ask::<serde::de::IgnoredAny>(Method::POST, "/leave", None::<&()>, PATIENCE)
            .await
            .map(drop)
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
        // No content is nothing, which reads as `null`.
        let body = if body.is_empty() { b"null" } else { body };
        return serde_json::from_slice(body).map_err(|e| odd(url, &e));
    }
    match serde_json::from_slice::<Refusal>(body) {
        Ok(mut refusal) => {
            // It is shown to people.
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
    ClientError::Unreachable {
        url: url.to_owned(),
        reason: causes(error),
    }
}

fn odd(url: &str, error: &(dyn Error + 'static)) -> ClientError {
    ClientError::NotACoordinator {
        url: url.to_owned(),
        reason: causes(error),
    }
}

impl ClientError {
    /// The kind of refusal, if it is one.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Refused(refusal) => Some(refusal.reason),
            _ => None,
        }
    }
}

/// Does one thing with a coordinator, and waits for it: for the command line.
///
/// # Errors
/// What `work` says; [`ClientError::Runtime`].
pub fn wait_for<T>(work: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(ClientError::Runtime)?
        .block_on(work)
}

/// An error and what it comes from: the innermost says what is wrong.
fn causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let told = cause.to_string();
        if !text.contains(&told) {
            text = format!("{text}: {told}");
        }
        source = cause.source();
    }
    text
}

fn connected(connector: &HttpsConnector<HttpConnector>) -> Http {
    legacy::Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(Duration::from_secs(30))
        .build(connector.clone())
}

/// What a certificate has to be for, whichever coordinator shows it.
fn server_name(url: &CoordinatorUrl) -> Result<ServerName<'static>, ClientError> {
    match &url.endpoint().host {
        Host::Address(ip) => Ok(ServerName::from(*ip)),
        Host::Name(name) => ServerName::try_from(name.clone())
            .map_err(|_| ClientError::Tls(format!("{name} is not a valid name of a certificate"))),
    }
}

/// What is trusted, and which versions of TLS: the coordinator's is 1.3.
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

/// What the system trusts, read once: a daemon asks for it before it gives up privileges, after which the files may be closed to it.
pub(crate) fn roots() -> Arc<RootCertStore> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    let read = || {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        Arc::new(roots)
    };
    Arc::clone(ROOTS.get_or_init(read))
}
