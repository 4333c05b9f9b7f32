//! Servers that share a mesh over etcd.

use seikan_lab::etcd::Cluster;
use tokio::task::block_in_place;

use super::*;
use crate::store::Etcd;
use crate::store::tests::ways::{Fate, Way, set};

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

fn serving(store: Store) -> Mesh {
    Mesh::of(tempfile::tempdir().expect("a folder"), store)
}

fn question(shown: &str) -> Request<Body> {
    request(
        Method::GET,
        "/v1/changes?since=0&wait=0",
        Some(shown),
        Body::empty(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_not_asked_for_a_source_that_has_shown_too_much() {
    let Some(mut cluster) = cluster() else { return };
    let store = open(&settings(&cluster));
    let mesh = serving(block_in_place(|| prepared(store)));
    let a = mesh.join("a", 1).await;
    let asks = |from, shown: String| mesh.ask_from(from, question(&shown));
    for _ in 0..10 {
        let refused = asks(host(1), credential(9)).await.refusal();
        assert_eq!(refused.1, Reason::NotAMember);
    }
    (0..3).for_each(|member| cluster.kill(member));
    // Who is to be looked for there hears that it is away; who is not, hears the same as before.
    assert_eq!(
        asks(host(2), credential(9)).await.refusal().1,
        Reason::Unavailable
    );
    assert_eq!(
        asks(host(1), credential(9)).await.refusal().1,
        Reason::TooMany
    );
    let join = mesh.try_join(host(1), join_body(9, "x", 9).to_string());
    assert_eq!(join.await.refusal().1, Reason::TooMany);
    assert_eq!(asks(host(1), a).await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_tries_while_etcd_does_not_answer_has_ten_at_once_which_count_no_more_when_it_is_over()
{
    let Some(cluster) = cluster() else { return };
    let (ways, far) = Way::to_all(&settings(&cluster));
    let store = open(&far);
    let mesh = Arc::new(serving(block_in_place(|| prepared(store))));
    let a = mesh.join("a", 1).await;
    block_in_place(|| set(&ways, Fate::Mute));
    // Two show credentials, and two tokens.
    let tries = (0..12).flat_map(|_| 1..=4).map(|from| {
        let mesh = Arc::clone(&mesh);
        tokio::spawn(async move {
            let refused = match from {
                1 | 2 => mesh.ask_from(host(from), question(&credential(9))).await,
                _ => {
                    let body = join_body(9, "x", 9).to_string();
                    mesh.try_join(host(from), body).await
                }
            };
            refused.refusal().1
        })
    });
    let tries: Vec<_> = tries.collect();
    sleep(MOMENT).await;
    let asked = Instant::now();
    let told = mesh.ask_from(host(1), question(&a)).await;
    assert_eq!(told.status, StatusCode::OK);
    let took = asked.elapsed();
    assert!(took < Duration::from_millis(500), "{took:?}");
    let mut too_many = 0;
    for tried in tries {
        match tried.await.expect("no panic") {
            Reason::TooMany => too_many += 1,
            other => assert_eq!(other, Reason::Unavailable),
        }
    }
    // Two of each source's twelve.
    assert_eq!(too_many, 8);
    // What nobody looked at was no guess; what somebody does is.
    block_in_place(|| set(&ways, Fate::Open));
    for from in [1, 3] {
        let until = Instant::now() + Duration::from_secs(20);
        let mut wrong = 0;
        loop {
            let refused = match from {
                1 => mesh.ask_from(host(from), question(&credential(9))).await,
                _ => {
                    let body = join_body(9, "x", 9).to_string();
                    mesh.try_join(host(from), body).await
                }
            };
            match refused.refusal().1 {
                Reason::NotAMember | Reason::BadToken => wrong += 1,
                Reason::TooMany => break,
                // It is found again.
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
async fn who_asks_elsewhere_is_called_there_even_if_its_question_here_never_ended() {
    let Some(cluster) = cluster() else { return };
    let at = |address: &str| {
        open(&Etcd {
            advertise: Some(address.parse().expect("an address")),
            ..settings(&cluster)
        })
    };
    let one = at("one.example:7443");
    let one = Arc::new(serving(block_in_place(|| prepared(one))));
    let two = Arc::new(serving(at("two.example:7443")));
    let (a, b) = (one.join("a", 1).await, one.join("b", 2).await);
    let waits = |mesh: &Arc<Mesh>, shown: &str| {
        let (mesh, shown) = (Arc::clone(mesh), shown.to_owned());
        tokio::spawn(async move { mesh.changes(&shown, 2, 30).await })
    };
    let look = open(&settings(&cluster));
    let asks = async |place: &str| {
        let until = Instant::now() + Duration::from_secs(5);
        let is_there = || {
            let members = look.members().expect("members");
            members[1].at.as_deref() == Some(place)
        };
        while !block_in_place(is_there) {
            assert!(Instant::now() < until, "it asks {place}");
            sleep(MOMENT).await;
        }
    };
    // The host went away without a word, and asks another coordinator.
    let dead = waits(&one, &b);
    asks("one.example:7443").await;
    let alive = waits(&two, &b);
    asks("two.example:7443").await;
    sleep(MOMENT).await;
    let call = json!({"public_key": key(2).to_string()});
    let answer = one.post("/v1/call", &a, call).await;
    assert_eq!(answer.status, StatusCode::NO_CONTENT);
    let told = tokio::time::timeout(Duration::from_secs(5), alive).await;
    let told: Changes = told.expect("in time").expect("no panic").read();
    assert_eq!(told.calls, vec![key(1)]);
    dead.abort();
}
