//! Tests of the HTTP routes without a network. [`secure`] tests the whole server over TLS,
//! [`shared`] servers that share a mesh over etcd.

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

use super::app::{App, run_background};
use super::routes::router;
use crate::store::tests::answers::add_members;
use crate::store::tests::policies::damage;
use crate::store::{Actor, MemberRef, NewToken, RelayInfo, Store};

/// Random number generator that returns one byte.
struct RepeatedByte(u8);

impl Rng for RepeatedByte {
    fn fill(&mut self, destination: &mut [u8]) {
        destination.fill(self.0);
    }
}

fn token(n: u8) -> Token {
    Token::generate(&mut RepeatedByte(n))
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

/// Creates a mesh with a token, number 1, without limits.
fn store(folder: &TempDir) -> Store {
    prepare(Store::open(&folder.path().join("mesh.db")).expect("opened"))
}

fn prepare(store: Store) -> Store {
    let networks = Networks::from_random([1, 2, 3, 4, 5]);
    store.init(networks, &operator(), 0).expect("networks set");
    let made = store.create_token(&token(1).digest(), &NewToken::default(), &operator(), 0);
    made.expect("a token");
    store
}

struct Mesh {
    folder: TempDir,
    router: Router,
    background: JoinHandle<()>,
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.background.abort();
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

/// Returns a request with the credential in the form that members use.
fn request(
    method: Method,
    path: &str,
    credential_text: Option<&str>,
    body: impl Into<Body>,
) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(credential_text) = credential_text {
        request = request.header(AUTHORIZATION, format!("Bearer {credential_text}"));
    }
    request.body(body.into()).expect("a request")
}

fn join_body(with: u8, host_name: &str, n: u8) -> Value {
    json!({
        "token": *token(with).reveal(), "name": host_name, "public_key": key(n).to_string(),
        "credential": credential(n),
    })
}

/// Returns the credential of host `n`.
fn credential(n: u8) -> String {
    Credential::generate(&mut RepeatedByte(n))
        .reveal()
        .to_string()
}

impl Mesh {
    async fn new() -> Mesh {
        let folder = tempfile::tempdir().expect("a folder");
        let store = store(&folder);
        Mesh::with_store(folder, store)
    }

    fn with_store(folder: TempDir, store: Store) -> Mesh {
        Mesh::with_app(folder, App::new(store))
    }

    fn with_app(folder: TempDir, app: App) -> Mesh {
        let app = Arc::new(app);
        Mesh {
            folder,
            router: router(Arc::clone(&app)),
            background: tokio::spawn(run_background(app)),
        }
    }

    /// Opens the same file as another process would.
    fn other(&self) -> Store {
        Store::open(&self.folder.path().join("mesh.db")).expect("opened again")
    }

    async fn send_from(&self, from: IpAddr, mut request: Request<Body>) -> Answer {
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

    async fn send(&self, request: Request<Body>) -> Answer {
        self.send_from(host(1), request).await
    }

    async fn try_join(&self, from: IpAddr, body: impl Into<Body>) -> Answer {
        self.send_from(from, request(Method::POST, "/v1/join", None, body))
            .await
    }

    async fn join(&self, host_name: &str, n: u8) -> String {
        let answer = self
            .try_join(host(1), join_body(1, host_name, n).to_string())
            .await;
        let _: Joined = answer.read();
        credential(n)
    }

    async fn changes(&self, credential_text: &str, since: u64, wait: u64) -> Answer {
        let path = format!("/v1/changes?since={since}&wait={wait}");
        self.send(request(Method::GET, &path, Some(credential_text), ""))
            .await
    }

    async fn post(&self, path: &str, credential_text: &str, body: Value) -> Answer {
        self.send(request(
            Method::POST,
            path,
            Some(credential_text),
            body.to_string(),
        ))
        .await
    }
}

fn names(changes: &Changes) -> Vec<&str> {
    changes.members.iter().map(|m| m.name.as_str()).collect()
}

/// Upper bound for the answer to a request that may wait for 30 seconds.
const PROMPTLY: Duration = Duration::from_secs(9);
/// Time after which a request has been sent and waits.
const MOMENT: Duration = Duration::from_millis(300);

#[tokio::test]
async fn a_host_joins_and_receives_the_other_members() {
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
    let changes: Changes = mesh.changes(&b, 0, 50).await.read();
    assert_eq!(
        (names(&changes), changes.whole, changes.revision),
        (vec!["a"], true, 2)
    );
    assert_eq!(changes.members[0].public_key, key(1));
}

#[tokio::test]
async fn malformed_requests_are_refused() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let status = |answer: Answer| {
        let (status, reason) = answer.refusal();
        assert_eq!(reason, Reason::Malformed);
        status.as_u16()
    };
    let ask = async |method: Method, path: &str, body: String| {
        status(
            mesh.send(request(method, path, Some(a.as_str()), body))
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
        let label = format!("{method} {path}");
        assert_eq!(ask(method, path, body).await, expected, "{label}");
    }
    // The credential is valid: the requests failed for the expected reason.
    assert_eq!(mesh.changes(&a, 0, 0).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_request_without_a_valid_credential_is_unauthorized() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let unknown = a.replace("skc_", "skc_A")[..a.len()].to_owned();
    let refused = (StatusCode::UNAUTHORIZED, Reason::NotAMember);
    for (method, path) in [
        (Method::GET, "/v1/changes"),
        (Method::POST, "/v1/endpoints"),
        (Method::POST, "/v1/leave"),
    ] {
        for credential_text in [None, Some(unknown.as_str()), Some("skc_short")] {
            let request = request(
                method.clone(),
                path,
                credential_text,
                r#"{"endpoints": []}"#,
            );
            let answer = mesh.send(request).await;
            assert_eq!(answer.refusal(), refused, "{path}");
            // RFC 6750, section 3.
            assert_eq!(answer.headers[WWW_AUTHENTICATE], "Bearer");
        }
    }
    // The scheme's name is case-insensitive (RFC 9110, section 11.1).
    let mut request = request(Method::GET, "/v1/changes", None, "");
    let value = format!("bEARER {a}").parse().expect("a header");
    request.headers_mut().insert(AUTHORIZATION, value);
    assert_eq!(mesh.send(request).await.status, StatusCode::OK);
}

#[tokio::test]
async fn refusals_have_their_http_status() {
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
async fn malformed_endpoints_are_refused() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    for bad in [
        json!(vec!["192.0.2.1:7"; MAX_ENDPOINTS + 1]),
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
}

#[tokio::test]
async fn one_unusable_endpoint_does_not_keep_the_others_from_being_reported() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    for (n, bad) in [
        "0.0.0.0:7",
        "[::]:7",
        "[::ffff:0.0.0.0]:7",
        "224.0.0.1:7",
        "[ff02::1]:7",
        "255.255.255.255:7",
        "[::ffff:255.255.255.255]:7",
        "192.0.2.1:0",
    ]
    .iter()
    .enumerate()
    {
        let [endpoint, relayed] = [1, 2].map(|host| format!("192.0.2.{host}:{}", 7 + n));
        let list = json!({"endpoints": [bad, endpoint], "relayed": [bad, relayed]});
        let answer = mesh.post("/v1/endpoints", &a, list).await;
        assert_eq!(answer.status, StatusCode::NO_CONTENT, "{bad}");
        let changes: Changes = mesh.changes(&b, 0, 0).await.read();
        let member = &changes.members[0];
        let reported = [&member.endpoints, &member.relayed];
        let expected = [endpoint, relayed].map(|at| vec![at.parse().expect("an address")]);
        assert_eq!(reported.map(Vec::clone), expected, "{bad}");
    }
}

#[tokio::test]
async fn endpoints_are_canonical() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let good = json!({"endpoints": ["[2001:db8::1]:7", "[::ffff:192.0.2.1]:7"], "relayed": ["192.0.2.9:9"]});
    let answer = mesh.post("/v1/endpoints", &a, good).await;
    assert_eq!(
        (answer.status, answer.body.len()),
        (StatusCode::NO_CONTENT, 0)
    );
    let changes: Changes = mesh.changes(&b, 0, 0).await.read();
    let endpoints: Vec<_> = changes.members[0]
        .endpoints
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(endpoints, ["[2001:db8::1]:7", "192.0.2.1:7"]);
    assert_eq!(changes.members[0].relayed[0].to_string(), "192.0.2.9:9");
}

#[tokio::test]
async fn failed_joins_are_limited_and_successful_ones_are_not() {
    let mesh = Mesh::new().await;
    for n in 0..10 {
        // Bad tokens and malformed requests share the limit.
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
    // Ten per minute are one in six seconds.
    assert_eq!(answer.headers[RETRY_AFTER], "6");
    assert_eq!(
        mesh.try_join(host(2), bad()).await.refusal().1,
        Reason::BadToken
    );
    for n in 1..=50 {
        mesh.join(&format!("m{n}"), n).await;
    }
    let log = mesh.other().audit(1000).expect("an audit");
    let refused = log.iter().filter(|e| e.change == "refused");
    assert!(refused.clone().count() <= 6, "the log is limited");
    assert!(refused.clone().count() > 0);
    assert!(refused.clone().all(|e| e.subject == "x"));
}

#[tokio::test]
async fn a_token_admits_hosts_at_a_limited_rate() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = store(&folder);
    let made = store.create_token(&token(2).digest(), &NewToken::default(), &operator(), 0);
    let id = made.expect("a token");
    let app = App::new(store);
    while app.limits.may_join(id) {}
    let mesh = Mesh::with_app(folder, app);
    let refused = (StatusCode::TOO_MANY_REQUESTS, Reason::TooMany);
    for n in 1..=20 {
        let answer = mesh.try_join(host(1), join_body(2, &format!("m{n}"), n).to_string());
        let answer = answer.await;
        if answer.status != StatusCode::OK {
            assert_eq!(answer.refusal(), refused);
            // Another token has a limit of its own.
            mesh.join("a", 100).await;
            // A host whose answer was lost repeats its request, which is not counted.
            mesh.join("a", 100).await;
            return;
        }
        // One more may join for each second that this takes.
    }
    panic!("all have joined");
}

#[tokio::test]
async fn bad_credentials_do_not_delay_members_of_the_same_address() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let ask = |from, credential_text: String| {
        let request = request(
            Method::GET,
            "/v1/changes?since=0&wait=0",
            Some(&credential_text),
            "",
        );
        mesh.send_from(from, request)
    };
    for n in 0..10 {
        // Unknown credentials and malformed ones share the limit.
        let credential_text = if n % 2 == 0 {
            credential(9)
        } else {
            "x".to_owned()
        };
        let refused = ask(host(1), credential_text).await.refusal();
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
async fn a_poll_waits_for_a_change() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let started = Instant::now();
    let changes: Changes = mesh.changes(&a, 1, 1).await.read();
    assert!(started.elapsed() >= Duration::from_secs(1));
    assert_ne!(changes.epoch, 0);
    assert_eq!(
        changes,
        Changes {
            revision: 1,
            epoch: changes.epoch,
            sight: 1,
            ..Changes::default()
        }
    );

    let (changes, joined) = tokio::join!(mesh.changes(&a, 1, 30), async {
        sleep(MOMENT).await;
        mesh.join("b", 2).await;
        Instant::now()
    });
    assert!(joined.elapsed() < PROMPTLY, "{:?}", joined.elapsed());
    assert_eq!(names(&changes.read()), ["b"]);
}

#[tokio::test]
async fn a_poll_reports_changes_of_another_process() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let other = mesh.other();
    let (changes, joined) = tokio::join!(mesh.changes(&a, 1, 30), async {
        sleep(MOMENT).await;
        let request = join_body(1, "b", 2);
        let request: JoinRequest = serde_json::from_value(request).expect("a request");
        other.join(&request, &operator(), 0).expect("joined");
        Instant::now()
    });
    assert!(joined.elapsed() < PROMPTLY, "{:?}", joined.elapsed());
    assert_eq!(names(&changes.read()), ["b"]);
}

#[tokio::test]
async fn a_poll_reports_policy_and_tags_set_by_another_process() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let other = mesh.other();
    let rule = "allow a -> tag:b tcp/1";
    let (changes, set) = tokio::join!(mesh.changes(&a, 1, 30), async {
        sleep(MOMENT).await;
        other.set_policy(rule, &operator(), 0).expect("set");
        Instant::now()
    });
    assert!(set.elapsed() < PROMPTLY, "{:?}", set.elapsed());
    let changes: Changes = changes.read();
    assert_eq!(changes.policy, Some(Policy::parse(rule).expect("a policy")));
    let [name, tag] = ["a", "web"].map(|text| text.parse::<Name>().expect(text));
    let tags = [tag];
    let (changes, _) = tokio::join!(mesh.changes(&a, 2, 30), async {
        sleep(MOMENT).await;
        other.set_tags(&name, &tags, &operator(), 0).expect("set")
    });
    let changes: Changes = changes.read();
    assert_eq!(changes.own.map(|own| own.tags), Some(tags.to_vec()));
}

#[tokio::test]
async fn removal_ends_the_poll_of_the_member() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let other = mesh.other();
    let name: Name = "a".parse().expect("a name");
    let (removed, changes, since) =
        tokio::join!(mesh.changes(&a, 2, 30), mesh.changes(&b, 2, 30), async {
            sleep(MOMENT).await;
            assert!(
                other
                    .remove(MemberRef::Name(&name), &operator(), 0)
                    .expect("removed")
            );
            Instant::now()
        });
    assert!(since.elapsed() < PROMPTLY, "{:?}", since.elapsed());
    assert_eq!(
        removed.refusal(),
        (StatusCode::UNAUTHORIZED, Reason::NotAMember)
    );
    let changes: Changes = changes.read();
    assert_eq!((changes.members, changes.removed), (vec![], vec![key(1)]));
}

#[tokio::test]
async fn a_member_can_leave() {
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
    let changes: Changes = mesh.changes(&b, 2, 0).await.read();
    assert_eq!(changes.removed, [key(1)]);
    let last = &mesh.other().audit(1).expect("an audit")[0];
    assert_eq!(
        (last.change.as_str(), last.actor.as_str()),
        ("left", "192.0.2.1")
    );
}

#[tokio::test]
async fn changes_close_together_share_an_answer() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let (changes, ()) = tokio::join!(mesh.changes(&a, 1, 30), async {
        sleep(MOMENT).await;
        let other = mesh.other();
        for n in 2..5 {
            let request = join_body(1, &format!("m{n}"), n);
            let request: JoinRequest = serde_json::from_value(request).expect("a request");
            other.join(&request, &operator(), 0).expect("joined");
        }
    });
    assert_eq!(names(&changes.read()), ["m2", "m3", "m4"]);
}

#[tokio::test]
async fn an_approved_device_ends_the_polls_of_its_gateway_and_of_others() {
    let mesh = Mesh::new().await;
    let gateway = mesh.join("site-a", 1).await;
    let b = mesh.join("b", 2).await;
    let body = json!({"devices": ["plc", "printer"]});
    let reported = mesh.post("/v1/devices", &gateway, body).await;
    assert_eq!(reported.status, StatusCode::NO_CONTENT);
    let approve = async {
        sleep(MOMENT).await;
        let device = "plc.site-a".parse().expect("a name");
        let approved = mesh.other().approve_device(&device, None, &operator(), 0);
        assert!(approved.expect("approved"));
        Instant::now()
    };
    let polls = async { tokio::join!(mesh.changes(&gateway, 2, 30), mesh.changes(&b, 2, 30)) };
    let ((own, others), approved) = tokio::join!(polls, approve);
    assert!(approved.elapsed() < PROMPTLY);
    let (own, others): (Changes, Changes) = (own.read(), others.read());
    assert_eq!(own.own_devices.len(), 1);
    assert_eq!(others.members[0].devices, own.own_devices);
    // The device has the third number: members have the first two.
    let addresses = own.own_devices[0].addresses.iter().map(ToString::to_string);
    assert!(addresses.eq(["100.80.0.3", "fd01:203:405::3"]));
}

#[tokio::test]
async fn reports_of_a_hostile_gateway_are_refused_with_a_reason() {
    let mesh = Mesh::new().await;
    let gateway = mesh.join("site-a", 1).await;
    let many = |count: usize| -> Vec<String> { (0..count).map(|n| format!("d{n}")).collect() };
    for (devices, status) in [
        (json!(many(10_000)), StatusCode::PAYLOAD_TOO_LARGE),
        (json!(many(65)), StatusCode::BAD_REQUEST),
        (json!(["plc", "plc"]), StatusCode::BAD_REQUEST),
        (json!(["plc", "PLC"]), StatusCode::BAD_REQUEST),
        (json!(["plc.site-b"]), StatusCode::BAD_REQUEST),
        (json!(["a\u{1b}[31m"]), StatusCode::BAD_REQUEST),
        (json!(["ä"]), StatusCode::BAD_REQUEST),
        (json!([""]), StatusCode::BAD_REQUEST),
        (json!(["x".repeat(64)]), StatusCode::BAD_REQUEST),
        (
            json!([{"name": "plc", "addresses": ["100.80.0.2"]}]),
            StatusCode::BAD_REQUEST,
        ),
        (json!(7), StatusCode::BAD_REQUEST),
    ] {
        let body = json!({"devices": devices});
        let answer = mesh.post("/v1/devices", &gateway, body).await;
        assert_eq!(answer.refusal(), (status, Reason::Malformed), "{devices}");
    }
    let stranger = mesh
        .post("/v1/devices", &credential(9), json!({"devices": []}))
        .await;
    let refused = (StatusCode::UNAUTHORIZED, Reason::NotAMember);
    assert_eq!(stranger.refusal(), refused);
    let members = mesh.other().members().expect("members");
    assert!(members[0].devices.is_empty());
}

#[tokio::test]
async fn a_call_ends_the_poll_of_the_callee() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let (changes, host_name) = tokio::join!(mesh.changes(&b, 2, 30), async {
        sleep(MOMENT).await;
        let call = json!({"public_key": key(2).to_string()});
        let answer = mesh.post("/v1/call", &a, call).await;
        assert_eq!(answer.status, StatusCode::NO_CONTENT);
        Instant::now()
    });
    assert!(host_name.elapsed() < PROMPTLY);
    let changes: Changes = changes.read();
    assert_eq!((changes.calls, changes.revision), (vec![key(1)], 2));
    // A call is reported once.
    let again: Changes = mesh.changes(&b, 2, 0).await.read();
    assert!(again.calls.is_empty());
}

#[tokio::test]
async fn another_epoch_reports_all_members() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    mesh.join("b", 2).await;
    mesh.join("c", 3).await;
    let changes: Changes = mesh.changes(&a, 2, 0).await.read();
    assert_eq!(names(&changes), ["c"]);
    assert!(!changes.whole);
    let ask = async |epoch: u64| -> Changes {
        let path = format!("/v1/changes?since=2&wait=30&epoch={epoch}");
        mesh.send(request(Method::GET, &path, Some(&a), ""))
            .await
            .read()
    };
    let same = ask(changes.epoch).await;
    assert!(!same.whole);
    let other = ask(changes.epoch ^ 1).await;
    assert!(other.whole);
    assert_eq!(names(&other), ["b", "c"]);
}

#[tokio::test]
async fn a_call_is_kept_until_the_next_poll() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let call = json!({"public_key": key(2).to_string()});
    mesh.post("/v1/call", &a, call).await;
    let started_at = Instant::now();
    let changes: Changes = mesh.changes(&b, 2, 30).await.read();
    assert_eq!(changes.calls, [key(1)]);
    assert!(started_at.elapsed() < PROMPTLY);
}

#[tokio::test]
async fn changes_of_endpoints_are_limited_per_member() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let b = mesh.join("b", 2).await;
    let at = |port: u16| json!({"endpoints": [format!("192.0.2.7:{port}")]});
    // On a slow machine more than these become due meanwhile.
    let mut accepted = 0;
    let refused = loop {
        let answer = mesh.post("/v1/endpoints", &a, at(accepted + 1)).await;
        if answer.status != StatusCode::NO_CONTENT || accepted == 600 {
            break answer;
        }
        accepted += 1;
    };
    assert!(accepted >= 60, "{accepted}");
    let too_many = (StatusCode::TOO_MANY_REQUESTS, Reason::TooMany);
    assert_eq!(refused.refusal(), too_many);
    let other = mesh.post("/v1/endpoints", &b, at(1)).await;
    assert_eq!(other.status, StatusCode::NO_CONTENT);
}

#[tokio::test]
async fn a_member_has_at_most_eight_open_requests() {
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
async fn examined_members_count_against_the_rate_of_a_member() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = store(&folder);
    add_members(&store, 10_000);
    let rule = "allow c100 -> c101 *";
    store.set_policy(rule, &operator(), 0).expect("set");
    let mesh = Mesh::with_store(folder, store);
    let a = mesh.join("a", 1).await;
    let mut answered = 0;
    // The burst of polls.
    for _ in 0..128 {
        let answer = mesh.changes(&a, 0, 0).await;
        if answer.status != StatusCode::OK {
            let too_many = (StatusCode::TOO_MANY_REQUESTS, Reason::TooMany);
            assert_eq!(answer.refusal(), too_many);
            break;
        }
        let changes: Changes = answer.read();
        assert!(changes.members.is_empty());
        answered += 1;
    }
    // The limit is 64 MiB at first, and 1 MiB per second. A request costs 64 bytes for each of the
    // 10,000 members.
    assert!((100..120).contains(&answered), "{answered}");
    let b = mesh.join("b", 2).await;
    assert_eq!(mesh.changes(&b, 0, 0).await.status, StatusCode::OK);
}

#[tokio::test]
async fn calls_above_the_limit_cost_no_work() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    mesh.join("b", 2).await;
    damage(&mesh.other());
    let call = json!({"public_key": key(2).to_string()});
    // The work is an error. On a slow machine more than the burst of calls become due meanwhile.
    let mut worked = 0;
    let refused = loop {
        let answer = mesh.post("/v1/call", &a, call.clone()).await;
        if answer.refusal().1 != Reason::Unavailable || worked == 10_000 {
            break answer;
        }
        worked += 1;
    };
    assert!(worked >= 256, "{worked}");
    let too_many = (StatusCode::TOO_MANY_REQUESTS, Reason::TooMany);
    assert_eq!(refused.refusal(), too_many);
}

#[tokio::test]
async fn calls_need_a_member_at_both_ends() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let call = json!({"public_key": key(9).to_string()});
    let nobody = mesh.post("/v1/call", &a, call.clone()).await;
    assert_eq!(nobody.status, StatusCode::NO_CONTENT);
    let unknown = mesh.post("/v1/call", &credential(9), call).await;
    assert_eq!(
        unknown.refusal(),
        (StatusCode::UNAUTHORIZED, Reason::NotAMember)
    );
}

#[tokio::test]
async fn a_poll_reports_a_new_relay_and_every_answer_lists_it() {
    let mesh = Mesh::new().await;
    let a = mesh.join("a", 1).await;
    let other = mesh.other();
    let relay = RelayInfo {
        address: "relay.example.org:3478".parse().expect("an address"),
        kind: RelayKind::Turn,
        tls: None,
    };
    let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
    let (changes, added) = tokio::join!(mesh.changes(&a, 1, 30), async {
        sleep(MOMENT).await;
        let added = other.add_relay(&relay, &secret, &operator(), 0);
        added.expect("added");
        Instant::now()
    });
    assert!(added.elapsed() < PROMPTLY);
    let changes: Changes = changes.read();
    assert_eq!((changes.revision, changes.relays.len()), (2, 1));
    assert_eq!(changes.relays[0].address, relay.address);
    let name = &changes.relays[0].ticket.username;
    assert!(name.ends_with(&key(1).to_string()), "{name}");
    for since in [0, 2] {
        let again: Changes = mesh.changes(&a, since, 0).await.read();
        assert_eq!(again.relays.len(), 1, "since {since}");
    }
    let gone = other.remove_relay(&relay.address, &operator(), 0);
    assert!(gone.expect("removed"));
    let changes: Changes = mesh.changes(&a, 2, 30).await.read();
    assert_eq!((changes.revision, changes.relays), (3, vec![]));
}
