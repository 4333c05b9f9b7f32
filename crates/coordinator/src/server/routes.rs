//! The HTTP routes and their handlers.
//!
//! A handler authenticates the member, then reads and validates the body. The work on the store
//! looks up the credential again, within the same job. A poll for changes may wait; its credential
//! is looked up once more afterwards, so a member that was removed meanwhile is told so and
//! nothing else.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::to_bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{ConnectInfo, Query, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use seikan_proto::mesh::{
    BASE, Call, Credential, Cursor, Devices, Digest, Endpoints, JoinRequest, Joined, MAX_ENDPOINTS,
    MAX_RELAYED, MAX_REQUEST, MAX_WAIT, Reason, Rotation,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::app::{App, Pool};
use super::limit::{Attempt, RequestKind};
use super::refused::{Refused, json, long};
use crate::now;
use crate::store::{Actor, Answer, MemberId, MemberRef, Store, StoreError};

/// Address of the host that sent a request.
type Peer = ConnectInfo<SocketAddr>;

/// Timeout of a request's body.
const BODY: Duration = Duration::from_secs(10);

/// All routes. Connections must carry their address (`ConnectInfo<SocketAddr>`).
pub(super) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route(&format!("{BASE}/join"), post(join))
        .route(&format!("{BASE}/changes"), get(changes))
        .route(&format!("{BASE}/endpoints"), change_own(endpoints))
        .route(&format!("{BASE}/call"), post(call))
        .route(&format!("{BASE}/devices"), change_own(devices))
        .route(&format!("{BASE}/key"), change_own(key))
        .route(&format!("{BASE}/leave"), post(leave))
        .method_not_allowed_fallback(wrong_method)
        .fallback(not_found)
        .with_state(app)
}

async fn wrong_method() -> Refused {
    Refused::malformed("this path does not support this method")
        .with_status(StatusCode::METHOD_NOT_ALLOWED)
}

async fn not_found() -> Refused {
    Refused::malformed("no such path: this is the coordinator of a mesh")
        .with_status(StatusCode::NOT_FOUND)
}

async fn join(
    State(app): State<Arc<App>>,
    ConnectInfo(from): Peer,
    request: Request,
) -> Result<Response, Refused> {
    let from = from.ip().to_canonical();
    let request_body: JoinRequest = match body(request).await {
        Ok(request_body) => request_body,
        Err(refused) => {
            return Err(if app.limits.count_failure(from) {
                refused
            } else {
                Refused::too_many()
            });
        }
    };
    let name = request_body.name.clone();
    let request_body = Arc::new(request_body);
    let local_request = Arc::clone(&request_body);
    let is_refused_here = app.read(Pool::Reads, move |store| {
        store.is_refused_here(&local_request, now())
    });
    let is_refused_here = is_refused_here.await?;
    let limits = Arc::clone(&app.limits);
    let enter = move |store: &Store| {
        let may_join = |token| limits.may_join(token);
        store.join_if(&request_body, &Actor::Host(from), now(), may_join)
    };
    let joined = if is_refused_here {
        let attempt = app
            .limits
            .begin_attempt(from)
            .ok_or_else(Refused::too_many)?;
        conclude(attempt, app.change(Pool::Unauthenticated, enter).await)
    } else {
        app.change(Pool::Changes, enter).await
    };
    match joined {
        Ok(joining) => encoded(&Joined {
            addresses: joining.addresses.to_vec(),
        }),
        Err(error) => {
            if matches!(error, StoreError::BadToken) && app.limits.may_log() {
                // The host is refused even if the log cannot be written.
                let logged = app.read(Pool::Reads, move |store| {
                    store.log_refused(&name, from, now())
                });
                let _ = logged.await;
            }
            Err(error.into())
        }
    }
}

/// Ends an attempt. It is a failure unless the work succeeded, or the store was unavailable.
fn conclude<T>(attempt: Attempt<'_>, done: Result<T, StoreError>) -> Result<T, StoreError> {
    if done
        .as_ref()
        .err()
        .is_none_or(|error| error.refusal().reason == Reason::Unavailable)
    {
        attempt.forgive();
    }
    done
}

/// Authenticates a member. Returns its id, the digest of its credential, and the result of `then`.
///
/// A credential that the local copy does not know counts as an open attempt before etcd is queried.
/// For a source that has used up its burst only the local copy is searched, so members behind the
/// same address continue, and etcd gets no more queries for it.
async fn member<T: Send + 'static>(
    app: &Arc<App>,
    from: SocketAddr,
    headers: &HeaderMap,
    then: impl FnOnce(&Store, MemberId) -> Result<T, StoreError> + Send + 'static,
) -> Result<(MemberId, Digest, T), Refused> {
    let from = from.ip().to_canonical();
    let Some(credential) = bearer_digest(headers) else {
        return Err(if app.limits.count_failure(from) {
            StoreError::NotAMember.into()
        } else {
            Refused::too_many()
        });
    };
    let known = app.read(Pool::Reads, move |store| {
        match store.authenticate_locally(&credential)? {
            Some(id) => Ok(Ok((id, then(store, id)?))),
            None => Ok(Err(then)),
        }
    });
    let then = match known.await? {
        Ok((id, done)) => return Ok((id, credential, done)),
        Err(then) => then,
    };
    let attempt = app
        .limits
        .begin_attempt(from)
        .ok_or_else(Refused::too_many)?;
    let found = app.read(Pool::Unauthenticated, move |store| {
        let id = store.authenticate(&credential)?;
        Ok((id, then(store, id)))
    });
    // The credential is valid even if `then` fails.
    let (id, done) = conclude(attempt, found.await)?;
    Ok((id, credential, done?))
}

/// Parameters of a poll for changes.
#[derive(Deserialize)]
struct ChangesQuery {
    /// Latest revision that the member knows.
    #[serde(default)]
    since: u64,
    /// Revision of the visibility that the member knows; default: `since`.
    sight: Option<u64>,
    /// Epoch of `since`; without it `since` is taken to be of the current epoch.
    epoch: Option<u64>,
    /// Maximum time to wait, in seconds.
    #[serde(default)]
    wait: u64,
}

async fn changes(
    State(app): State<Arc<App>>,
    ConnectInfo(from): Peer,
    headers: HeaderMap,
    query: Result<Query<ChangesQuery>, QueryRejection>,
) -> Result<Response, Refused> {
    let Query(ChangesQuery {
        since,
        sight,
        epoch,
        wait,
    }) = query.map_err(|rejection| Refused::malformed(rejection.body_text()))?;
    // The epoch is read before the store. If the store changes to another epoch meanwhile, this
    // answer has the old one, and the next poll reports all members.
    let own = app.epoch();
    let epochs_differ = epoch.is_some_and(|epoch| epoch != own);
    let since = if epochs_differ { 0 } else { since };
    let current = |store: &Store, id| {
        store.touch(id, now())?;
        store.revision()
    };
    let (id, credential, current) = member(&app, from, &headers, current).await?;
    allow(&app, id, RequestKind::Poll)?;
    let subscriber = app.subscriber(id);
    let open_request = subscriber.open_request().ok_or_else(Refused::too_often)?;
    // A member that knows nothing yet, or that does not ask to wait, is answered at once.
    if since > 0 && wait > 0 {
        let time = Duration::from_secs(wait.min(MAX_WAIT));
        app.wait_for_change(own, (since, current), &subscriber, time)
            .await;
    }
    if since > current {
        let catch_up = app.read(Pool::CatchUp, move |store| store.catch_up_to(since));
        catch_up.await?;
    }
    let reservation = app.answers.reserve(id, from.ip().to_canonical()).await;
    let mut reservation = reservation.ok_or_else(Refused::too_often)?;
    let known = Cursor {
        revision: since,
        epoch: own,
        sight: sight.unwrap_or(since),
    };
    let most = reservation.bytes;
    let answer = app.read(Pool::Reads, move |store| {
        let id = store.authenticate(&credential)?;
        let Answer { mut changes, rows } = store.answer(known, id, most)?;
        changes.calls = subscriber.take_callers();
        changes.epoch = own;
        changes.relays = store.tickets(id, now())?;
        changes.coordinators = store.coordinators();
        // Encoded on the blocking thread, so that a long answer does not delay the event loop.
        let body = serde_json::to_vec(&changes).map(Vec::into_boxed_slice);
        Ok(body.map(|body| (body, rows)))
    });
    match answer.await? {
        Ok((body, rows)) => {
            app.answers.count(id, body.len(), rows);
            reservation.shrink(body.len());
            Ok(long(body, (open_request, reservation)))
        }
        Err(_) => Err(StoreError::Corrupt("members").into()),
    }
}

fn endpoints(new: Endpoints) -> Result<OwnChange, Refused> {
    let new = Endpoints {
        endpoints: reachable(new.endpoints, MAX_ENDPOINTS)?,
        relayed: reachable(new.relayed, MAX_RELAYED)?,
    };
    Ok(Box::new(move |store, id, _| {
        store.set_endpoints(id, &new, now())
    }))
}

fn devices(new: Devices) -> Result<OwnChange, Refused> {
    Ok(Box::new(move |store, id, by| {
        store.report_devices(id, &new, by, now())
    }))
}

fn key(Rotation { public_key }: Rotation) -> Result<OwnChange, Refused> {
    Ok(Box::new(move |store, id, by| {
        store.set_key(id, &public_key, by, now())
    }))
}

/// A change of what others receive about a member, which the member may make.
type OwnChange = Box<dyn FnOnce(&Store, MemberId, &Actor) -> Result<bool, StoreError> + Send>;

/// Returns a handler of requests for such a change; `parse` gets it from the body.
fn change_own<B: DeserializeOwned + 'static>(
    parse: fn(B) -> Result<OwnChange, Refused>,
) -> MethodRouter<Arc<App>> {
    post(
        move |State(app): State<Arc<App>>, ConnectInfo(from): Peer, request: Request| async move {
            let (id, credential, ()) = member(&app, from, request.headers(), |_, _| Ok(())).await?;
            let work = parse(body(request).await?)?;
            let by = Actor::Host(from.ip().to_canonical());
            allow(&app, id, RequestKind::SetEndpoints)?;
            let set = app.change(Pool::Changes, move |store| {
                let id = store.authenticate(&credential)?;
                work(store, id, &by)
            });
            set.await?;
            Ok::<_, Refused>(StatusCode::NO_CONTENT)
        },
    )
}

async fn call(
    State(app): State<Arc<App>>,
    ConnectInfo(from): Peer,
    request: Request,
) -> Result<StatusCode, Refused> {
    let (id, _, ()) = member(&app, from, request.headers(), |_, _| Ok(())).await?;
    let Call { public_key } = body(request).await?;
    // Before the work: the members that it may call are found by the whole policy.
    allow(&app, id, RequestKind::Call)?;
    let pair = app.read(Pool::Reads, move |store| store.pair(id, &public_key));
    let (caller, callee) = pair.await?;
    // A member that was just removed needs no call.
    if let Some(callee) = callee {
        app.call(callee, caller);
    }
    Ok(StatusCode::NO_CONTENT)
}

async fn leave(
    State(app): State<Arc<App>>,
    ConnectInfo(from): Peer,
    headers: HeaderMap,
) -> Result<StatusCode, Refused> {
    let (_, credential, ()) = member(&app, from, &headers, |_, _| Ok(())).await?;
    let by = Actor::Host(from.ip().to_canonical());
    let left = app.change(Pool::Changes, move |store| {
        let id = store.authenticate(&credential)?;
        store.remove(MemberRef::Id(id), &by, now())
    });
    left.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Counts a request of a member.
fn allow(app: &App, id: MemberId, kind: RequestKind) -> Result<(), Refused> {
    let is_allowed = app.limits.allow(id, kind);
    is_allowed.then_some(()).ok_or_else(Refused::too_often)
}

/// Returns the digest of the credential in the bearer token (RFC 6750, section 2.1).
fn bearer_digest(headers: &HeaderMap) -> Option<Digest> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, secret) = value.split_once(' ')?;
    let bearer = scheme.eq_ignore_ascii_case("bearer");
    let secret = bearer.then(|| secret.trim().parse::<Credential>().ok())??;
    Some(secret.digest())
}

/// Reads a JSON body, with limits of size and time.
async fn body<T: DeserializeOwned>(request: Request) -> Result<T, Refused> {
    let bytes = match timeout(BODY, to_bytes(request.into_body(), MAX_REQUEST)).await {
        Ok(Ok(bytes)) => bytes,
        // If the connection broke instead, nobody reads this response.
        Ok(Err(_)) => {
            let message = format!("a request may have at most {MAX_REQUEST} bytes");
            return Err(Refused::malformed(message).with_status(StatusCode::PAYLOAD_TOO_LARGE));
        }
        Err(_) => {
            return Err(Refused::malformed("the request did not arrive in time")
                .with_status(StatusCode::REQUEST_TIMEOUT));
        }
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| Refused::malformed(format!("cannot parse the request: {error}")))
}

/// Returns the endpoints at which a host can be. IPv4-mapped addresses become IPv4, and zones are
/// dropped, because they are meaningless on other hosts.
///
/// Others are left out instead of refused: a member repeats what STUN and TURN servers say, and one
/// false answer must not keep it from reporting the rest.
fn reachable(endpoints: Vec<SocketAddr>, most: usize) -> Result<Vec<SocketAddr>, Refused> {
    if endpoints.len() > most {
        let message = format!(
            "a member may have at most {MAX_ENDPOINTS} endpoints and {MAX_RELAYED} relayed addresses"
        );
        return Err(Refused::malformed(message));
    }
    let plain = endpoints.into_iter();
    let plain = plain.map(|at| SocketAddr::new(at.ip().to_canonical(), at.port()));
    let usable = plain.filter(|at| {
        let broadcast = at.ip() == IpAddr::from([255u8; 4]);
        at.port() != 0 && !at.ip().is_unspecified() && !at.ip().is_multicast() && !broadcast
    });
    Ok(usable.collect())
}

fn encoded<T: Serialize>(answer: &T) -> Result<Response, Refused> {
    let body = serde_json::to_vec(answer).map_err(|_| StoreError::Interrupted)?;
    Ok(json(StatusCode::OK, body))
}
