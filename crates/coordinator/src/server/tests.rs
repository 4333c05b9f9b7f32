//! The server as hosts meet it. Here: its paths, without a network; [`secure`] has the whole of it, [`shared`] what is different over etcd.

mod secure;
mod shared;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::ConnectInfo;
use axum::http::header::{AUTHORIZATION, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::{
    Changes, Credential, JoinRequest, Joined, MAX_ANSWER, MAX_ENDPOINTS, MAX_REQUEST, Name,
    Networks, Policy, Reason, Refusal, RelayKind, RelaySecret, Token,
};
use seikan_proto::rng::Rng;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tower::ServiceExt as _;

use super::app::{App, keep};
use super::routes::router;
use crate::store::tests::telling::crowd;
use crate::store::{Actor, NewToken, RelayInfo, Store, Whom};

/// The same byte again and again.
struct Same(u8);

impl Rng for Same {
    fn fill(&mut self, destination: &mut [u8]) {
        destination.fill(self.0);
    }
}

fn token(n: u8) -> Token {
    Token::generate(&mut Same(n))
}

fn key(n: u8) -> PublicKey {
    PublicKey::from_bytes([n; 32])
}

fn operator() -> Actor {
    Actor::Operator("root".to_owned())
}

fn host(n: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, n])
}

/// A mesh with a token, number 1, that admits whoever comes.
fn store(folder: &TempDir) -> Store {
    prepared(Store::open(&folder.path().join("mesh.db")).expect("opened"))
}

fn prepared(store: Store) -> Store {
    let networks = Networks::from_random([1, 2, 3, 4, 5]);
    store.init(networks, &operator(), 0).expect("networks set");
    let made = store.create_token(&token(1).digest(), &NewToken::default(), &operator(), 0);
    made.expect("a token");
    store
}

struct Mesh {
    folder: TempDir,
    router: Router,
    keeper: JoinHandle<()>,
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Answer {
    fn read<T: serde::de::DeserializeOwned>(&self) -> T {
        let text = String::from_utf8_lossy(&self.body);
        assert_eq!(self.status, StatusCode::OK, "{text}");
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    fn refusal(&self) -> (StatusCode, Reason) {
        let text = String::from_utf8_lossy(&self.body);
        let refusal: Refusal =
            serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(!refusal.message.is_empty());
        (self.status, refusal.reason)
    }
}

/// A request with a credential as a member shows it.
fn request(
    method: Method,
    path: &str,
    shown: Option<&str>,
    body: impl Into<Body>,
) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(shown) = shown {
        request = request.header(AUTHORIZATION, format!("Bearer {shown}"));
    }
    request.body(body.into()).expect("a request")
}

fn join_body(with: u8, called: &str, n: u8) -> Value {
    json!({
        "token": *token(with).reveal(), "name": called, "public_key": key(n).to_string(),
        "credential": credential(n),
    })
}

/// What host `n` shows.
fn credential(n: u8) -> String {
    Credential::generate(&mut Same(n)).reveal().to_string()
}

impl Mesh {
    async fn new() -> Mesh {
        let folder = tempfile::tempdir().expect("a folder");
        let store = store(&folder);
        Mesh::of(folder, store)
    }

    fn of(folder: TempDir, store: Store) -> Mesh {
        let app = Arc::new(App::new(store));
        Mesh {
            folder,
            router: router(Arc::clone(&app)),
            keeper: tokio::spawn(keep(app)),
        }
    }

    /// The same file as another process has it.
    fn other(&self) -> Store {
        Store::open(&self.folder.path().join("mesh.db")).expect("opened again")
    }

    async fn ask_from(&self, from: IpAddr, mut request: Request<Body>) -> Answer {
        let from = SocketAddr::new(from, 40_000);
        request.extensions_mut().insert(ConnectInfo(from));
        let response = self
            .router
            .clone()
            .oneshot(request)
            .await
            .expect("an answer");
        let (parts, body) = response.into_parts();
        Answer {
            status: parts.status,
            headers: parts.headers,
            body: to_bytes(body, MAX_ANSWER).await.expect("a body").to_vec(),
        }
    }

    async fn ask(&self, request: Request<Body>) -> Answer {
        self.ask_from(host(1), request).await
    }

    async fn try_join(&self, from: IpAddr, body: impl Into<Body>) -> Answer {
        self.ask_from(from, request(Method::POST, "/v1/join", None, body))
            .await
    }

    async fn join(&self, called: &str, n: u8) -> String {
        let answer = self
            .try_join(host(1), join_body(1, called, n).to_string())
            .await;
        let _: Joined = answer.read();
        credential(n)
    }

    async fn changes(&self, shown: &str, since: u64, wait: u64) -> Answer {
        let path = format!("/v1/changes?since={since}&wait={wait}");
        self.ask(request(Method::GET, &path, Some(shown), "")).await
    }

    async fn post(&self, path: &str, shown: &str, body: Value) -> Answer {
        self.ask(request(Method::POST, path, Some(shown), body.to_string()))
            .await
    }
}

fn names(changes: &Changes) -> Vec<&str> {
    changes.members.iter().map(|m| m.name.as_str()).collect()
}

/// Who waits for half a minute is told of what happens long before; a busy machine takes its time.
const PROMPTLY: Duration = Duration::from_secs(9);
/// Enough for a question to be asked and to wait.
const MOMENT: Duration = Duration::from_millis(300);

#[tokio::test]
async fn a_host_joins_and_is_told_of_the_others() {
    let mesh = Mesh::new().await;
    let answer = mesh
        .try_join(host(1), join_body(1, "a", 1).to_string())
        .await;
    assert_eq!(answer.headers["content-type"], "application/json");
    assert_eq!(answer.headers["cache-control"], "no-store");
    let joined: Joined = answer.read();
    let addresses: Vec<_> = joined.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["100.80.0.1/12", "fd01:203:405::1/64"]);

    let b = mesh.join("b", 2).await;
    let told: Changes = mesh.changes(&b, 0, 50).await.read();
    assert_eq!(
        (names(&told), told.whole, told.revision),
        (vec!["a"], true, 2)
    );
    assert_eq!(told.members[0].public_key, key(1));
}

#[tokio::test]
async fn what_is_not_asked_as_it_should_be_is_malformed() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let status = |answer: Answer| {
        let (status, reason) = answer.refusal();
        assert_eq!(reason, Reason::Malformed);
        status.as_u16()
    };
    let ask = async |method: Method, path: &str, body: String| {
        status(
            mesh.ask(request(method, path, Some(a.as_str()), body))
                .await,
        )
    };
    let long = format!("{{\"name\": \"{}\"}}", "x".repeat(MAX_REQUEST));
    let odd_name = join_body(1, "a b", 2).to_string();
    for (method, path, body, expected) in [
        (Method::GET, "/", String::new(), 404),
        (Method::GET, "/v2/changes", String::new(), 404),
        (Method::GET, "/v1/join", String::new(), 405),
        (Method::POST, "/v1/changes", String::new(), 405),
        (Method::DELETE, "/v1/leave", String::new(), 405),
        (Method::POST, "/v1/join", "{".to_owned(), 400),
        (Method::POST, "/v1/join", "{}".to_owned(), 400),
        (Method::POST, "/v1/join", odd_name, 400),
        (Method::POST, "/v1/join", long.clone(), 413),
        (Method::POST, "/v1/endpoints", long, 413),
        (Method::POST, "/v1/endpoints", "[]".repeat(9), 400),
        (Method::GET, "/v1/changes?since=-1", String::new(), 400),
        (Method::GET, "/v1/changes?wait=soon", String::new(), 400),
    ] {
        let shown = format!("{method} {path}");
        assert_eq!(ask(method, path, body).await, expected, "{shown}");
    }
    // A member that knows all this is still one.
    assert_eq!(mesh.changes(&a, 0, 0).await.status, StatusCode::OK);
}

#[tokio::test]
async fn who_shows_no_credential_is_no_member() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let stranger = a.replace("skc_", "skc_A")[..a.len()].to_owned();
    let refused = (StatusCode::UNAUTHORIZED, Reason::NotAMember);
    for (method, path) in [
        (Method::GET, "/v1/changes"),
        (Method::POST, "/v1/endpoints"),
        (Method::POST, "/v1/leave"),
    ] {
        for shown in [None, Some(stranger.as_str()), Some("skc_short")] {
            let asked = request(method.clone(), path, shown, r#"{"endpoints": []}"#);
            let answer = mesh.ask(asked).await;
            assert_eq!(answer.refusal(), refused, "{path}");
            // RFC 6750, section 3.
            assert_eq!(answer.headers[WWW_AUTHENTICATE], "Bearer");
        }
    }
    // RFC 9110, section 11.1: the scheme's name is the same in capitals.
    let mut asked = request(Method::GET, "/v1/changes", None, "");
    let value = format!("bEARER {a}").parse().expect("a header");
    asked.headers_mut().insert(AUTHORIZATION, value);
    assert_eq!(mesh.ask(asked).await.status, StatusCode::OK);
}

#[tokio::test]
async fn refusals_have_their_status() {
    let mesh = Mesh::new().await;
    mesh.join("a", 1).await;
    for (body, expected) in [
        (join_body(9, "b", 2), (403, Reason::BadToken)),
        (join_body(1, "a", 2), (409, Reason::NameTaken)),
        (join_body(1, "b", 1), (409, Reason::KeyTaken)),
    ] {
        let (status, reason) = mesh.try_join(host(1), body.to_string()).await.refusal();
        assert_eq!((status.as_u16(), reason), expected);
    }
}

#[tokio::test]
async fn endpoints_that_nobody_can_reach_are_refused() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let one_too_many = vec!["192.0.2.1:7"; MAX_ENDPOINTS + 1];
    for bad in [
        json!(one_too_many),
        json!(["0.0.0.0:7"]),
        json!(["[::]:7"]),
        json!(["224.0.0.1:7"]),
        json!(["[ff02::1]:7"]),
        json!(["255.255.255.255:7"]),
        json!(["192.0.2.1:0"]),
        json!(["192.0.2.1"]),
        json!(["host.example:7"]),
    ] {
        let answer = mesh
            .post("/v1/endpoints", &a, json!({"endpoints": bad}))
            .await;
        let refused = (StatusCode::BAD_REQUEST, Reason::Malformed);
        assert_eq!(answer.refusal(), refused, "{bad}");
        let relayed = json!({"endpoints": [], "relayed": bad});
        let answer = mesh.post("/v1/endpoints", &a, relayed).await;
        assert_eq!(answer.refusal(), refused, "{bad}");
    }
    let good = json!({"endpoints": ["[2001:db8::1]:7", "[::ffff:192.0.2.1]:7"], "relayed": ["192.0.2.9:9"]});
    let answer = mesh.post("/v1/endpoints", &a, good).await;
    assert_eq!(
        (answer.status, answer.body.len()),
        (StatusCode::NO_CONTENT, 0)
    );
    let told: Changes = mesh.changes(&b, 0, 0).await.read();
    let endpoints: Vec<_> = told.members[0]
        .endpoints
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(endpoints, ["[2001:db8::1]:7", "192.0.2.1:7"]);
    assert_eq!(told.members[0].relayed[0].to_string(), "192.0.2.9:9");
}

#[tokio::test]
async fn who_fails_too_often_is_held_up_and_who_does_not_fail_is_not() {
    let mesh = Mesh::new().await;
    for n in 0..10 {
        // Neither a bad token nor nonsense is a way around.
        let (body, expected) = match n % 2 {
            0 => (join_body(9, "x", 9).to_string(), Reason::BadToken),
            _ => ("nonsense".to_owned(), Reason::Malformed),
        };
        assert_eq!(mesh.try_join(host(1), body).await.refusal().1, expected);
    }
    let bad = || join_body(9, "x", 9).to_string();
    let answer = mesh.try_join(host(1), bad()).await;
    assert_eq!(
        answer.refusal(),
        (StatusCode::TOO_MANY_REQUESTS, Reason::TooMany)
    );
    // Ten in a minute are one in six seconds.
    assert_eq!(answer.headers[RETRY_AFTER], "6");
    assert_eq!(
        mesh.try_join(host(2), bad()).await.refusal().1,
        Reason::BadToken
    );
    for n in 1..=50 {
        mesh.join(&format!("m{n}"), n).await;
    }
    let noted = mesh.other().audit(1000).expect("an audit");
    let refused = noted.iter().filter(|e| e.what == "refused");
    assert!(
        refused.clone().count() <= 6,
        "what is too much is not noted"
    );
    assert!(refused.clone().count() > 0);
    assert!(refused.clone().all(|e| e.subject == "x"));
}

#[tokio::test]
async fn who_shows_bad_credentials_is_held_up_and_members_behind_the_same_address_are_not() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let ask = |from, shown: String| {
        let question = request(Method::GET, "/v1/changes?since=0&wait=0", Some(&shown), "");
        mesh.ask_from(from, question)
    };
    for n in 0..10 {
        // Neither one that might be good nor nonsense is a way around.
        let shown = if n % 2 == 0 {
            credential(9)
        } else {
            "x".to_owned()
        };
        let refused = ask(host(1), shown).await.refusal();
        assert_eq!(refused, (StatusCode::UNAUTHORIZED, Reason::NotAMember));
    }
    let too_many = (StatusCode::TOO_MANY_REQUESTS, Reason::TooMany);
    for path in ["/v1/endpoints", "/v1/call", "/v1/key", "/v1/leave"] {
        let refused = mesh.post(path, &credential(9), json!({})).await;
        assert_eq!(refused.refusal(), too_many, "{path}");
    }
    let join = mesh.try_join(host(1), join_body(9, "x", 9).to_string());
    assert_eq!(join.await.refusal(), too_many);

    assert_eq!(ask(host(1), a).await.status, StatusCode::OK);
    let b = mesh.join("b", 2).await;
    assert_eq!(ask(host(1), b).await.status, StatusCode::OK);
    let elsewhere = ask(host(2), credential(9)).await;
    assert_eq!(elsewhere.refusal().1, Reason::NotAMember);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_may_join_at_once_from_one_address() {
    let mesh = Arc::new(Mesh::new().await);
    let joins: Vec<_> = (0..100)
        .map(|n| {
            let mesh = Arc::clone(&mesh);
            tokio::spawn(async move { mesh.join(&format!("m{n}"), n).await })
        })
        .collect();
    for join in joins {
        join.await.expect("joined");
    }
    assert_eq!(mesh.other().members().expect("members").len(), 100);
}

#[tokio::test]
async fn a_question_waits_until_there_is_something_to_tell() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let started = Instant::now();
    let told: Changes = mesh.changes(&a, 1, 1).await.read();
    assert!(started.elapsed() >= Duration::from_secs(1));
    assert_ne!(told.epoch, 0);
    assert_eq!(
        told,
        Changes {
            revision: 1,
            epoch: told.epoch,
            sight: 1,
            ..Changes::default()
        }
    );

    let (told, joined) = tokio::join!(mesh.changes(&a, 1, 30), async {
        sleep(MOMENT).await;
        mesh.join("b", 2).await;
        Instant::now()
    });
    assert!(joined.elapsed() < PROMPTLY, "{:?}", joined.elapsed());
    assert_eq!(names(&told.read()), ["b"]);
}

#[tokio::test]
async fn what_another_process_writes_is_told_soon() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let other = mesh.other();
    let (told, joined) = tokio::join!(mesh.changes(&a, 1, 30), async {
        sleep(MOMENT).await;
        let asked = join_body(1, "b", 2);
        let asked: JoinRequest = serde_json::from_value(asked).expect("a request");
        other.join(&asked, &operator(), 0).expect("joined");
        Instant::now()
    });
    assert!(joined.elapsed() < PROMPTLY, "{:?}", joined.elapsed());
    assert_eq!(names(&told.read()), ["b"]);
}

#[tokio::test]
async fn a_policy_and_tags_that_an_administrator_sets_are_told_soon() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let other = mesh.other();
    let rule = "allow a -> tag:b tcp/1";
    let (told, set) = tokio::join!(mesh.changes(&a, 1, 30), async {
        sleep(MOMENT).await;
        other.set_policy(rule, &operator(), 0).expect("set");
        Instant::now()
    });
    assert!(set.elapsed() < PROMPTLY, "{:?}", set.elapsed());
    let told: Changes = told.read();
    assert_eq!(told.policy, Some(Policy::parse(rule).expect("a policy")));
    let [name, tag] = ["a", "web"].map(|text| text.parse::<Name>().expect(text));
    let tags = [tag];
    let (told, _) = tokio::join!(mesh.changes(&a, 2, 30), async {
        sleep(MOMENT).await;
        other.set_tags(&name, &tags, &operator(), 0).expect("set")
    });
    let told: Changes = told.read();
    assert_eq!(told.own.map(|own| own.tags), Some(tags.to_vec()));
}

#[tokio::test]
async fn who_is_removed_while_it_waits_hears_of_that_at_once() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let other = mesh.other();
    let name: Name = "a".parse().expect("a name");
    let (removed, told, since) =
        tokio::join!(mesh.changes(&a, 2, 30), mesh.changes(&b, 2, 30), async {
            sleep(MOMENT).await;
            assert!(
                other
                    .remove(Whom::Name(&name), &operator(), 0)
                    .expect("removed")
            );
            Instant::now()
        });
    assert!(since.elapsed() < PROMPTLY, "{:?}", since.elapsed());
    assert_eq!(
        removed.refusal(),
        (StatusCode::UNAUTHORIZED, Reason::NotAMember)
    );
    let told: Changes = told.read();
    assert_eq!((told.members, told.removed), (vec![], vec![key(1)]));
}

#[tokio::test]
async fn who_leaves_is_no_member_any_more() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    assert_eq!(
        mesh.post("/v1/leave", &a, json!({})).await.status,
        StatusCode::NO_CONTENT
    );
    let answer = mesh.post("/v1/leave", &a, json!({})).await;
    assert_eq!(
        answer.refusal(),
        (StatusCode::UNAUTHORIZED, Reason::NotAMember)
    );
    let told: Changes = mesh.changes(&b, 2, 0).await.read();
    assert_eq!(told.removed, [key(1)]);
    let last = &mesh.other().audit(1).expect("an audit")[0];
    assert_eq!(
        (last.what.as_str(), last.actor.as_str()),
        ("left", "192.0.2.1")
    );
}

#[tokio::test]
async fn changes_that_come_together_are_told_together() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let (told, ()) = tokio::join!(mesh.changes(&a, 1, 30), async {
        sleep(MOMENT).await;
        let other = mesh.other();
        for n in 2..5 {
            let asked = join_body(1, &format!("m{n}"), n);
            let asked: JoinRequest = serde_json::from_value(asked).expect("a request");
            other.join(&asked, &operator(), 0).expect("joined");
        }
    });
    assert_eq!(names(&told.read()), ["m2", "m3", "m4"]);
}

#[tokio::test]
async fn who_is_called_while_it_waits_hears_of_the_caller_at_once() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let (told, called) = tokio::join!(mesh.changes(&b, 2, 30), async {
        sleep(MOMENT).await;
        let call = json!({"public_key": key(2).to_string()});
        let answer = mesh.post("/v1/call", &a, call).await;
        assert_eq!(answer.status, StatusCode::NO_CONTENT);
        Instant::now()
    });
    assert!(called.elapsed() < PROMPTLY);
    let told: Changes = told.read();
    assert_eq!((told.calls, told.revision), (vec![key(1)], 2));
    // Once.
    let again: Changes = mesh.changes(&b, 2, 0).await.read();
    assert!(again.calls.is_empty());
}

#[tokio::test]
async fn who_knows_what_another_coordinator_told_is_told_of_everybody() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    mesh.join("b", 2).await;
    mesh.join("c", 3).await;
    let told: Changes = mesh.changes(&a, 2, 0).await.read();
    assert_eq!(names(&told), ["c"]);
    assert!(!told.whole);
    let ask = async |epoch: u64| -> Changes {
        let path = format!("/v1/changes?since=2&wait=30&epoch={epoch}");
        mesh.ask(request(Method::GET, &path, Some(&a), ""))
            .await
            .read()
    };
    let same = ask(told.epoch).await;
    assert!(!same.whole);
    let other = ask(told.epoch ^ 1).await;
    assert!(other.whole);
    assert_eq!(names(&other), ["b", "c"]);
}

#[tokio::test]
async fn a_call_waits_for_who_is_between_two_questions() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let call = json!({"public_key": key(2).to_string()});
    mesh.post("/v1/call", &a, call).await;
    let begun = Instant::now();
    let told: Changes = mesh.changes(&b, 2, 30).await.read();
    assert_eq!(told.calls, [key(1)]);
    assert!(begun.elapsed() < PROMPTLY);
}

#[tokio::test]
async fn a_member_that_moves_all_the_time_is_held_up_and_others_are_not() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let at = |port: u16| json!({"endpoints": [format!("192.0.2.7:{port}")]});
    for port in 1..=60 {
        let answer = mesh.post("/v1/endpoints", &a, at(port)).await;
        assert_eq!(answer.status, StatusCode::NO_CONTENT, "{port}");
    }
    let refused = mesh.post("/v1/endpoints", &a, at(61)).await;
    let too_many = (StatusCode::TOO_MANY_REQUESTS, Reason::TooMany);
    assert_eq!(refused.refusal(), too_many);
    let other = mesh.post("/v1/endpoints", &b, at(1)).await;
    assert_eq!(other.status, StatusCode::NO_CONTENT);
}

#[tokio::test]
async fn no_more_than_eight_questions_of_a_member_wait() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let waiting = futures_util::future::join_all((0..8).map(|_| mesh.changes(&a, 2, 1)));
    let (answers, (ninth, other)) = tokio::join!(waiting, async {
        sleep(MOMENT).await;
        let ninth = mesh.changes(&a, 2, 1).await;
        (ninth, mesh.changes(&b, 2, 1).await)
    });
    let too_many = (StatusCode::TOO_MANY_REQUESTS, Reason::TooMany);
    assert_eq!(ninth.refusal(), too_many);
    assert!(answers.iter().all(|answer| answer.status == StatusCode::OK));
    assert_eq!(other.status, StatusCode::OK);
    assert_eq!(mesh.changes(&a, 2, 1).await.status, StatusCode::OK);
}

#[tokio::test]
async fn who_may_know_nobody_has_no_more_members_looked_at_than_it_is_told_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = store(&folder);
    crowd(&store, 10_000);
    let rule = "allow c100 -> c101 *";
    store.set_policy(rule, &operator(), 0).expect("set");
    let mesh = Mesh::of(folder, store);
    let a = mesh.join("a", 1).await;
    let mut answered = 0;
    // So many questions may come at once.
    for _ in 0..128 {
        let answer = mesh.changes(&a, 0, 0).await;
        if answer.status != StatusCode::OK {
            let too_many = (StatusCode::TOO_MANY_REQUESTS, Reason::TooMany);
            assert_eq!(answer.refusal(), too_many);
            break;
        }
        let told: Changes = answer.read();
        assert!(told.members.is_empty());
        answered += 1;
    }
    // 64 MiB and 1 MiB a second, at 64 bytes for each of 10,000 members.
    assert!((100..120).contains(&answered), "{answered}");
    let b = mesh.join("b", 2).await;
    assert_eq!(mesh.changes(&b, 0, 0).await.status, StatusCode::OK);
}

#[tokio::test]
async fn only_members_call_and_only_members_are_called() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let call = json!({"public_key": key(9).to_string()});
    let nobody = mesh.post("/v1/call", &a, call.clone()).await;
    assert_eq!(nobody.status, StatusCode::NO_CONTENT);
    let stranger = mesh.post("/v1/call", &credential(9), call).await;
    assert_eq!(
        stranger.refusal(),
        (StatusCode::UNAUTHORIZED, Reason::NotAMember)
    );
}

#[tokio::test]
async fn members_that_wait_hear_of_a_relay_at_once_and_of_it_in_every_answer() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let other = mesh.other();
    let relay = RelayInfo {
        address: "relay.example.org:3478".parse().expect("an address"),
        kind: RelayKind::Turn,
        tls: None,
    };
    let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
    let (told, added) = tokio::join!(mesh.changes(&a, 1, 30), async {
        sleep(MOMENT).await;
        let added = other.add_relay(&relay, &secret, &operator(), 0);
        added.expect("added");
        Instant::now()
    });
    assert!(added.elapsed() < PROMPTLY);
    let told: Changes = told.read();
    assert_eq!((told.revision, told.relays.len()), (2, 1));
    assert_eq!(told.relays[0].address, relay.address);
    let name = &told.relays[0].ticket.username;
    assert!(name.ends_with(&key(1).to_string()), "{name}");
    for since in [0, 2] {
        let again: Changes = mesh.changes(&a, since, 0).await.read();
        assert_eq!(again.relays.len(), 1, "since {since}");
    }
    let gone = other.remove_relay(&relay.address, &operator(), 0);
    assert!(gone.expect("removed"));
    let told: Changes = mesh.changes(&a, 2, 30).await.read();
    assert_eq!((told.revision, told.relays), (3, vec![]));
}
