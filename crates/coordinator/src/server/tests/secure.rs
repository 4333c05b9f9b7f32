//! Tests of the whole server over TLS, on loopback.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::Ordering;

use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use rustls::{ClientConnection, StreamOwned};
use seikan_proto::mesh::Pin;
use socket2::{Domain, Socket, Type};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::*;
use crate::server::{Options, Pace, Server, ServerError, Sockets};
use seikan_tls::Certificate;

fn stream(socket: TcpStream, pin: Pin) -> StreamOwned<ClientConnection, TcpStream> {
    let config = seikan_tls::pinned(pin, &[&TLS13]).expect("a configuration");
    let name = ServerName::try_from("mesh.example.org").expect("a name");
    let connection = ClientConnection::new(Arc::new(config), name).expect("a client");
    StreamOwned::new(connection, socket)
}

/// Sends a request over a connection of its own; returns the answer with its head.
fn https(address: SocketAddr, pin: Pin, request: &str) -> io::Result<String> {
    let socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(Duration::from_secs(20)))?;
    let mut stream = stream(socket, pin);
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn sockets() -> Sockets {
    Sockets::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("bound")
}

struct Running {
    address: SocketAddr,
    pin: Pin,
    stop: oneshot::Sender<()>,
    server: JoinHandle<Result<(), ServerError>>,
}

fn start(folder: &TempDir) -> Running {
    start_with(folder, store(folder), |_| ())
}

fn start_with(folder: &TempDir, store: Store, set: impl FnOnce(&mut Server)) -> Running {
    let names = ["mesh.example.org".to_owned()];
    let certificate =
        Certificate::own(folder.path(), "a coordinator", &names).expect("a certificate");
    let pin = certificate.pin();
    let server = Server::new(Options {
        sockets: sockets(),
        store,
        certificate,
    });
    let mut server = server.expect("it listens");
    set(&mut server);
    let (stop, stopped) = oneshot::channel::<()>();
    Running {
        address: server.address(),
        pin,
        stop,
        server: tokio::spawn(server.serve(async move {
            let _ = stopped.await;
        })),
    }
}

async fn send(running: &Running, request: String) -> io::Result<String> {
    let (address, pin) = (running.address, running.pin);
    let answer = spawn_blocking(move || https(address, pin, &request));
    answer.await.expect("it has not panicked")
}

fn join_request(host_name: &str, n: u8) -> String {
    let body = join_body(1, host_name, n).to_string();
    let length = body.len();
    format!(
        "POST /v1/join HTTP/1.1\r\nHost: mesh\r\nConnection: close\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

fn changes_request(credential_text: &str, since: u64) -> String {
    format!(
        "GET /v1/changes?since={since}&wait=30 HTTP/1.1\r\nHost: mesh\r\nConnection: close\r\n\
         Authorization: Bearer {credential_text}\r\n\r\n"
    )
}

fn body_of(answer: &str) -> &str {
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    answer.split_once("\r\n\r\n").expect("a body").1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hosts_with_the_pin_join_and_receive_each_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let running = start(&folder);
    let answer = send(&running, join_request("a", 1))
        .await
        .expect("an answer");
    body_of(&answer);
    let credential_text = credential(1);

    let (changes, joined) = tokio::join!(
        send(&running, changes_request(&credential_text, 1)),
        async {
            sleep(MOMENT).await;
            let answer = send(&running, join_request("b", 2)).await;
            body_of(&answer.expect("an answer"));
            Instant::now()
        }
    );
    assert!(joined.elapsed() < PROMPTLY, "{:?}", joined.elapsed());
    let changes = changes.expect("an answer");
    let changes: Changes = serde_json::from_str(body_of(&changes)).expect("changes");
    assert_eq!(names(&changes), ["b"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_certificate_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let elsewhere = tempfile::tempdir().expect("a folder");
    let mut running = start(&folder);
    let other = Certificate::own(elsewhere.path(), "a coordinator", &[]).expect("a certificate");
    running.pin = other.pin();
    let answer = send(&running, join_request("a", 1)).await;
    let error = answer.expect_err("it is another one");
    assert!(error.to_string().contains("not the pinned one"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_polls_do_not_delay_the_shutdown() {
    let folder = tempfile::tempdir().expect("a folder");
    let running = start(&folder);
    let answer = send(&running, join_request("a", 1))
        .await
        .expect("an answer");
    body_of(&answer);
    let request = changes_request(&credential(1), 1);
    let (address, pin) = (running.address, running.pin);
    let waiting = spawn_blocking(move || https(address, pin, &request));
    sleep(MOMENT).await;
    running.stop.send(()).expect("the server runs");
    let ended = timeout(Duration::from_secs(4), running.server).await;
    let ended = ended.expect("in time").expect("it has not panicked");
    ended.expect("it ended well");
    let changes = waiting
        .await
        .expect("it has not panicked")
        .expect("an answer");
    let changes: Changes = serde_json::from_str(body_of(&changes)).expect("changes");
    assert_eq!(changes.revision, 1);
}

#[test]
fn a_mesh_without_networks_is_not_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let bound = Server::new(Options {
        sockets: sockets(),
        store: Store::open(&folder.path().join("mesh.db")).expect("opened"),
        certificate: Certificate::own(folder.path(), "a coordinator", &[]).expect("a certificate"),
    });
    let error = bound.err().expect("it has no networks");
    assert!(error.to_string().contains("no networks"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_is_disconnected_and_its_memory_released() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = store(&folder);
    // A list of some megabytes, more than the buffers of both ends hold.
    add_members(&store, 10_000);
    let mut app = None;
    let running = start_with(&folder, store, |server| {
        server.pace = Pace {
            grace: Duration::from_secs(2),
            rate: f64::from(4 << 20),
        };
        app = Some(Arc::clone(&server.app));
    });
    let app = app.expect("a server");
    let answer = send(&running, join_request("a", 1)).await;
    body_of(&answer.expect("an answer"));
    let request = changes_request(&credential(1), 0);
    let (address, pin) = (running.address, running.pin);
    let started_at = Instant::now();
    let slow = spawn_blocking(move || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_recv_buffer_size(4096).expect("set");
        socket.connect(&address.into()).expect("connected");
        let socket = TcpStream::from(socket);
        socket.set_read_timeout(Some(PROMPTLY)).expect("set");
        let mut stream = stream(socket, pin);
        stream.write_all(request.as_bytes()).expect("sent");
        for _ in 0..300 {
            stream.read_exact(&mut [0]).expect("still connected");
            std::thread::sleep(Duration::from_millis(20));
        }
        // Data that has arrived before the reset can still be read.
        stream.sock.read_to_end(&mut Vec::new())
    });
    let is_free = || app.answers.is_free();
    while is_free() {
        assert!(started_at.elapsed() < PROMPTLY, "it is answered");
        sleep(Duration::from_millis(20)).await;
    }
    while !is_free() {
        assert!(started_at.elapsed() < 2 * PROMPTLY, "it holds its answer");
        sleep(Duration::from_millis(20)).await;
    }
    // The grace period has passed.
    assert!(started_at.elapsed() >= Duration::from_secs(2));
    assert_eq!(app.limits.slow_connections.load(Ordering::Relaxed), 1);
    let end = slow.await.expect("it has not panicked");
    let end = end.expect_err("disconnected");
    assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
    // A client that reads at once gets the whole answer.
    let all = send(&running, changes_request(&credential(1), 0)).await;
    let changes: Changes =
        serde_json::from_str(body_of(&all.expect("an answer"))).expect("changes");
    assert_eq!(changes.members.len(), 4096);
}
