//! The paths, and what is asked under them.
//!
//! A member shows its credential first; then what it sent is read and judged; then the store is asked,
//! which looks at the credential again within the same piece of work. A question for changes waits
//! until there are some, and its credential is looked at once more afterwards: who was removed
//! meanwhile hears of that, and of nothing else.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::to_bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{ConnectInfo, Query, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::{get, post};
use seikan_proto::mesh::{
    BASE, Call, Credential, Cursor, Digest, Endpoints, JoinRequest, Joined, MAX_ENDPOINTS,
    MAX_RELAYED, MAX_REQUEST, MAX_WAIT, Reason, Rotation,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::{sleep, timeout};

use super::app::{App, News};
use super::limit::{Doing, Try};
use super::refused::{Refused, json, long};
use crate::store::{Actor, Answer, MemberId, Store, StoreError, Whom};

/// How long the body of a request may take.
const BODY: Duration = Duration::from_secs(10);

/// All paths. Connections have to come with their address (`ConnectInfo<SocketAddr>`).
pub(super) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route(&format!("{BASE}/join"), post(join))
        .route(&format!("{BASE}/changes"), get(changes))
        .route(&format!("{BASE}/endpoints"), post(endpoints))
        .route(&format!("{BASE}/call"), post(call))
        .route(&format!("{BASE}/key"), post(key))
        .route(&format!("{BASE}/leave"), post(leave))
        .method_not_allowed_fallback(wrong_method)
        .fallback(nowhere)
        .with_state(app)
}

async fn wrong_method() -> Refused {
    Refused::malformed("this path is not asked with this method")
        .with_status(StatusCode::METHOD_NOT_ALLOWED)
}

async fn nowhere() -> Refused {
    Refused::malformed("there is nothing here: this is the coordinator of a mesh")
        .with_status(StatusCode::NOT_FOUND)
}

async fn join(
    State(app): State<Arc<App>>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    request: Request,
) -> Result<Response, Refused> {
    let from = from.ip().to_canonical();
    let asked: JoinRequest = match body(request).await {
        Ok(asked) => asked,
        Err(refused) => {
            return Err(match app.limits.count(from) {
                true => refused,
                false => Refused::too_many(),
            });
        }
    };
    let name = asked.name.clone();
    let asked = Arc::new(asked);
    let looked = Arc::clone(&asked);
    let is_stranger = app.ask(move |store| store.is_refused_here(&looked, now()));
    let is_stranger = is_stranger.await?;
    let enter = move |store: &Store| store.join(&asked, &Actor::Host(from), now());
    let joined = match is_stranger {
        false => app.change(enter).await,
        true => {
            let a_try = app.limits.begin(from).ok_or_else(Refused::too_many)?;
            judged(a_try, app.change_for_stranger(enter).await)
        }
    };
    match joined {
        Ok(joining) => encoded(&Joined {
            addresses: joining.addresses.to_vec(),
        }),
        Err(error) => {
            if matches!(error, StoreError::BadToken) && app.limits.may_note() {
                // A refusal is one even if it cannot be noted.
                let note = app.ask(move |store| store.note_refused(&name, from, now()));
                let _ = note.await;
            }
            Err(error.into())
        }
    }
}

/// What became of a try, which is a failure unless what was shown is good, or could not be looked at.
fn judged<T>(a_try: Try<'_>, done: Result<T, StoreError>) -> Result<T, StoreError> {
    if done
        .as_ref()
        .err()
        .is_none_or(|error| error.refusal().reason == Reason::Unavailable)
    {
        a_try.forgive();
    }
    done
}

/// The member that shows its credential, the credential's digest, and what the store says `then`. Who shows one that is not known here is
/// counted before others are asked for it; what a source shows that has had its share of that is looked for here alone, so members behind
/// it go on and etcd is asked no more for it.
async fn member<T: Send + 'static>(
    app: &Arc<App>,
    from: SocketAddr,
    headers: &HeaderMap,
    then: impl FnOnce(&Store, MemberId) -> Result<T, StoreError> + Send + 'static,
) -> Result<(MemberId, Digest, T), Refused> {
    let from = from.ip().to_canonical();
    let Some(credential) = shown(headers) else {
        return Err(match app.limits.count(from) {
            true => StoreError::NotAMember.into(),
            false => Refused::too_many(),
        });
    };
    let known = app.ask(move |store| match store.recognise(&credential)? {
        Some(id) => Ok(Ok((id, then(store, id)?))),
        None => Ok(Err(then)),
    });
    let then = match known.await? {
        Ok((id, done)) => return Ok((id, credential, done)),
        Err(then) => then,
    };
    let a_try = app.limits.begin(from).ok_or_else(Refused::too_many)?;
    let found = app.ask_for_stranger(move |store| {
        let id = store.authenticate(&credential)?;
        Ok((id, then(store, id)))
    });
    // Its credential is good, whatever becomes of what it wants.
    let (id, done) = judged(a_try, found.await)?;
    Ok((id, credential, done?))
}

/// A question for changes.
#[derive(Deserialize)]
struct Question {
    /// What the asker knows.
    #[serde(default)]
    since: u64,
    /// As of which revision it knows whom it may know; who does not say knows all of that.
    sight: Option<u64>,
    /// Of which epoch; who does not say takes revisions for what they are.
    epoch: Option<u64>,
    /// Seconds.
    #[serde(default)]
    wait: u64,
}

async fn changes(
    State(app): State<Arc<App>>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    question: Result<Query<Question>, QueryRejection>,
) -> Result<Response, Refused> {
    let Query(Question {
        since,
        sight,
        epoch,
        wait,
    }) = question.map_err(|rejection| Refused::malformed(rejection.body_text()))?;
    // Before the store is asked: should there be another one meanwhile, the asker does not get that, and at its next question is told
    // of everybody.
    let own = app.epoch();
    let epochs_differ = epoch.is_some_and(|epoch| epoch != own);
    let since = if epochs_differ { 0 } else { since };
    let current = |store: &Store, id| {
        store.touch(id, now())?;
        store.revision()
    };
    let (id, credential, current) = member(&app, from, &headers, current).await?;
    if !app.limits.may(id, Doing::Asking) {
        return Err(Refused::too_often());
    }
    let bell = app.doorbell(id);
    let question = bell.question().ok_or_else(Refused::too_often)?;
    // Who knows nothing yet, or asks in passing, is told at once.
    if since > 0 && wait > 0 {
        let _waiting = app.waiting();
        let time = Duration::from_secs(wait.min(MAX_WAIT));
        let news = match current == since {
            true => app.wait_for_news(own, since, &bell, time).await,
            false => News::Revision,
        };
        // A call is told at once: packets wait for it.
        if news == News::Revision {
            sleep(app.pause()).await;
        }
    }
    let room = app.answers.room(id, from.ip().to_canonical()).await;
    let mut room = room.ok_or_else(Refused::too_often)?;
    let known = Cursor {
        revision: since,
        epoch: own,
        sight: sight.unwrap_or(since),
    };
    let told = app.ask(move |store| {
        let id = store.authenticate(&credential)?;
        let Answer { mut changes, rows } = store.answer(known, id)?;
        changes.calls = bell.take();
        changes.epoch = own;
        changes.relays = store.tickets(id, now())?;
        changes.coordinators = store.coordinators();
        // Here, where a long answer holds up nobody. Room is counted for its length alone.
        let body = serde_json::to_vec(&changes).map(Vec::into_boxed_slice);
        Ok(body.map(|body| (body, rows)))
    });
    match told.await? {
        Ok((body, rows)) => {
            app.answers.count(id, body.len(), rows);
            room.shrink(body.len());
            Ok(long(body, (question, room)))
        }
        Err(_) => Err(StoreError::Corrupt("members").into()),
    }
}

async fn endpoints(
    State(app): State<Arc<App>>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    request: Request,
) -> Result<StatusCode, Refused> {
    let (id, credential, ()) = member(&app, from, request.headers(), |_, _| Ok(())).await?;
    let Endpoints { endpoints, relayed } = body(request).await?;
    let told = Endpoints {
        endpoints: reachable(endpoints, MAX_ENDPOINTS)?,
        relayed: reachable(relayed, MAX_RELAYED)?,
    };
    if !app.limits.may(id, Doing::Moving) {
        return Err(Refused::too_often());
    }
    let set = app.change(move |store| {
        let id = store.authenticate(&credential)?;
        store.set_endpoints(id, &told, now())
    });
    set.await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn call(
    State(app): State<Arc<App>>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    request: Request,
) -> Result<StatusCode, Refused> {
    let (id, _, ()) = member(&app, from, request.headers(), |_, _| Ok(())).await?;
    let Call { public_key } = body(request).await?;
    let pair = app.ask(move |store| store.pair(id, &public_key));
    let (caller, callee) = pair.await?;
    if !app.limits.may(id, Doing::Calling) {
        return Err(Refused::too_often());
    }
    // Somebody who has just gone needs no call.
    if let Some(callee) = callee {
        app.call(callee, caller);
    }
    Ok(StatusCode::NO_CONTENT)
}

async fn key(
    State(app): State<Arc<App>>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    request: Request,
) -> Result<StatusCode, Refused> {
    let (id, credential, ()) = member(&app, from, request.headers(), |_, _| Ok(())).await?;
    let Rotation { public_key } = body(request).await?;
    let by = Actor::Host(from.ip().to_canonical());
    if !app.limits.may(id, Doing::Moving) {
        return Err(Refused::too_often());
    }
    let set = app.change(move |store| {
        let id = store.authenticate(&credential)?;
        store.set_key(id, &public_key, &by, now())
    });
    set.await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn leave(
    State(app): State<Arc<App>>,
    ConnectInfo(from): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
) -> Result<StatusCode, Refused> {
    let (_, credential, ()) = member(&app, from, &headers, |_, _| Ok(())).await?;
    let by = Actor::Host(from.ip().to_canonical());
    let left = app.change(move |store| {
        let id = store.authenticate(&credential)?;
        store.remove(Whom::Id(id), &by, now())
    });
    left.await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The digest of the credential that comes as a bearer token (RFC 6750, section 2.1).
fn shown(headers: &HeaderMap) -> Option<Digest> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, secret) = value.split_once(' ')?;
    let bearer = scheme.eq_ignore_ascii_case("bearer");
    let secret = bearer.then(|| secret.trim().parse::<Credential>().ok())??;
    Some(secret.digest())
}

/// What was sent, if it is short, in time, and understood.
async fn body<T: DeserializeOwned>(request: Request) -> Result<T, Refused> {
    let bytes = match timeout(BODY, to_bytes(request.into_body(), MAX_REQUEST)).await {
        Ok(Ok(bytes)) => bytes,
        // Or it broke off: then nobody is there to read this.
        Ok(Err(_)) => {
            let message = format!("a request has {MAX_REQUEST} bytes at most");
            return Err(Refused::malformed(message).with_status(StatusCode::PAYLOAD_TOO_LARGE));
        }
        Err(_) => {
            return Err(Refused::malformed("the request did not come in time")
                .with_status(StatusCode::REQUEST_TIMEOUT));
        }
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| Refused::malformed(format!("this is not what is asked here: {error}")))
}

/// Endpoints as others can use them: IPv4 addresses as such, and no zones, which mean something on
/// their host only.
fn reachable(endpoints: Vec<SocketAddr>, most: usize) -> Result<Vec<SocketAddr>, Refused> {
    if endpoints.len() > most {
        let message = format!(
            "a member has {MAX_ENDPOINTS} endpoints and {MAX_RELAYED} relayed addresses at most"
        );
        return Err(Refused::malformed(message));
    }
    let plain = endpoints.into_iter().map(|endpoint| {
        let (ip, port) = (endpoint.ip().to_canonical(), endpoint.port());
        let broadcast = ip == IpAddr::from([255u8; 4]);
        if port == 0 || ip.is_unspecified() || ip.is_multicast() || broadcast {
            let message = format!("nobody can be reached at {endpoint}");
            return Err(Refused::malformed(message));
        }
        Ok(SocketAddr::new(ip, port))
    });
    plain.collect()
}

fn encoded<T: Serialize>(answer: &T) -> Result<Response, Refused> {
    let body = serde_json::to_vec(answer).map_err(|_| StoreError::Interrupted)?;
    Ok(json(StatusCode::OK, body))
}

/// Seconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
