//! Tests of servers that share a mesh over etcd.

use seikan_lab::etcd::Cluster;
use tokio::task::block_in_place;

use super::*;
use crate::store::Etcd;
use crate::store::tests::proxy::{Fate, Proxy, set};

fn cluster() -> Option<Cluster> {
    if !Cluster::is_possible() {
        let all = std::env::var_os("SEIKAN_REQUIRE_ALL").is_some();
        assert!(!all, "there is no etcd: make deps");
        return None;
    }
    Some(block_in_place(|| Cluster::start(None).expect("a cluster")))
}

fn settings(cluster: &Cluster) -> Etcd {
    Etcd {
        endpoints: cluster.endpoints(),
        prefix: "/test".to_owned(),
        ca: None,
        identity: None,
        user: None,
        mesh: None,
        advertise: None,
    }
}

fn open(etcd: &Etcd) -> Store {
    block_in_place(|| Store::open_etcd(etcd).expect("opened"))
}

fn serve(store: Store) -> Mesh {
    Mesh::with_store(tempfile::tempdir().expect("a folder"), store)
}

fn poll(credential_text: &str) -> Request<Body> {
    request(
        Method::GET,
        "/v1/changes?since=0&wait=0",
        Some(credential_text),
        Body::empty(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_not_queried_for_a_source_above_its_limit() {
    let Some(mut cluster) = cluster() else { return };
    let store = open(&settings(&cluster));
    let mesh = serve(block_in_place(|| prepare(store)));
    let a = mesh.join("a", 1).await;
    let poll_from = |from, credential_text: String| mesh.send_from(from, poll(&credential_text));
    for _ in 0..10 {
        let refused = poll_from(host(1), credential(9)).await.refusal();
        assert_eq!(refused.1, Reason::NotAMember);
    }
    (0..3).for_each(|member| cluster.kill(member));
    // The server queries etcd for the second source, and reports that etcd is unavailable. The
    // first source is above its limit and is refused without a query.
    assert_eq!(
        poll_from(host(2), credential(9)).await.refusal().1,
        Reason::Unavailable
    );
    assert_eq!(
        poll_from(host(1), credential(9)).await.refusal().1,
        Reason::TooMany
    );
    let join = mesh.try_join(host(1), join_body(9, "x", 9).to_string());
    assert_eq!(join.await.refusal().1, Reason::TooMany);
    assert_eq!(poll_from(host(1), a).await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_while_etcd_is_unavailable_are_limited_and_not_counted() {
    let Some(cluster) = cluster() else { return };
    let (proxies, far) = Proxy::to_all(&settings(&cluster));
    let store = open(&far);
    let mesh = Arc::new(serve(block_in_place(|| prepare(store))));
    let a = mesh.join("a", 1).await;
    block_in_place(|| set(&proxies, Fate::Mute));
    // Two sources send credentials, and two send tokens.
    let attempts = (0..12).flat_map(|_| 1..=4).map(|from| {
        let mesh = Arc::clone(&mesh);
        tokio::spawn(async move {
            let refused = match from {
                1 | 2 => mesh.send_from(host(from), poll(&credential(9))).await,
                _ => {
                    let body = join_body(9, "x", 9).to_string();
                    mesh.try_join(host(from), body).await
                }
            };
            refused.refusal().1
        })
    });
    let attempts: Vec<_> = attempts.collect();
    sleep(MOMENT).await;
    let started_at = Instant::now();
    let changes = mesh.send_from(host(1), poll(&a)).await;
    assert_eq!(changes.status, StatusCode::OK);
    let elapsed = started_at.elapsed();
    assert!(elapsed < Duration::from_millis(500), "{elapsed:?}");
    let mut too_many = 0;
    for attempt in attempts {
        match attempt.await.expect("no panic") {
            Reason::TooMany => too_many += 1,
            other => assert_eq!(other, Reason::Unavailable),
        }
    }
    // Two of the twelve attempts of each of the four sources are refused.
    assert_eq!(too_many, 8);
    // Attempts that etcd did not answer are not failures; those that it answers are.
    block_in_place(|| set(&proxies, Fate::Open));
    for from in [1, 3] {
        let until = Instant::now() + Duration::from_secs(20);
        let mut wrong = 0;
        loop {
            let refused = match from {
                1 => mesh.send_from(host(from), poll(&credential(9))).await,
                _ => {
                    let body = join_body(9, "x", 9).to_string();
                    mesh.try_join(host(from), body).await
                }
            };
            match refused.refusal().1 {
                Reason::NotAMember | Reason::BadToken => wrong += 1,
                Reason::TooMany => break,
                // The replica reconnects.
                other => assert_eq!(other, Reason::Unavailable),
            }
            assert!(Instant::now() < until, "{wrong}");
            sleep(MOMENT).await;
        }
        // One more for each six seconds that this takes.
        assert!((10..=13).contains(&wrong), "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_reaches_the_coordinator_that_the_member_polls_now() {
    let Some(cluster) = cluster() else { return };
    let at = |address: &str| {
        open(&Etcd {
            advertise: Some(address.parse().expect("an address")),
            ..settings(&cluster)
        })
    };
    let one = at("one.example:7443");
    let one = Arc::new(serve(block_in_place(|| prepare(one))));
    let two = Arc::new(serve(at("two.example:7443")));
    let (a, b) = (one.join("a", 1).await, one.join("b", 2).await);
    let waits = |mesh: &Arc<Mesh>, credential_text: &str| {
        let (mesh, credential_text) = (Arc::clone(mesh), credential_text.to_owned());
        tokio::spawn(async move { mesh.changes(&credential_text, 2, 30).await })
    };
    let look = open(&settings(&cluster));
    let wait_until_polled = async |address: &str| {
        let until = Instant::now() + Duration::from_secs(5);
        let is_there = || {
            let members = look.members().expect("members");
            members[1].coordinator.as_deref() == Some(address)
        };
        while !block_in_place(is_there) {
            assert!(Instant::now() < until, "it polls {address}");
            sleep(MOMENT).await;
        }
    };
    // The host has vanished without closing its connection, and polls another coordinator.
    let dead = waits(&one, &b);
    wait_until_polled("one.example:7443").await;
    let alive = waits(&two, &b);
    wait_until_polled("two.example:7443").await;
    sleep(MOMENT).await;
    let call = json!({"public_key": key(2).to_string()});
    let answer = one.post("/v1/call", &a, call).await;
    assert_eq!(answer.status, StatusCode::NO_CONTENT);
    let changes = tokio::time::timeout(Duration::from_secs(5), alive).await;
    let changes: Changes = changes.expect("in time").expect("no panic").read();
    assert_eq!(changes.calls, vec![key(1)]);
    dead.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_name_future_revisions_delay_no_other() {
    let Some(cluster) = cluster() else { return };
    let (proxies, far) = Proxy::to_all(&settings(&cluster));
    let store = open(&far);
    let mesh = Arc::new(serve(block_in_place(|| prepare(store))));
    let (a, b) = (mesh.join("a", 1).await, mesh.join("b", 2).await);
    block_in_place(|| set(&proxies, Fate::Mute));
    // As many as a member may have, and more than there are jobs that read.
    let hostile = (0..8).map(|_| {
        let (mesh, a) = (Arc::clone(&mesh), a.clone());
        tokio::spawn(async move { mesh.changes(&a, u64::MAX, 0).await.refusal().1 })
    });
    let hostile: Vec<_> = hostile.collect();
    sleep(MOMENT).await;
    let started_at = Instant::now();
    let changes = mesh.changes(&b, 0, 0).await;
    assert_eq!(changes.status, StatusCode::OK);
    let elapsed = started_at.elapsed();
    assert!(elapsed < Duration::from_secs(1), "{elapsed:?}");
    for refused in hostile {
        assert_eq!(refused.await.expect("no panic"), Reason::Unavailable);
    }
}
