//! Metrics for Prometheus: `GET /metrics` in the OpenMetrics text format.
//!
//! A thread of its own serves them, so that no scrape delays a packet. It handles one connection at a time, within limits on
//! time and length.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::Counters;

/// Maximum length of a request in bytes, including headers.
const MAX_REQUEST: usize = 8192;
/// Maximum number of header lines.
const MAX_HEADERS: usize = 64;
/// Time limit for reading the request, and for writing the reply.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Serves `counters` until the process ends.
///
/// # Errors
/// The thread could not be started.
pub fn serve(listener: TcpListener, counters: Arc<Mutex<Counters>>) -> io::Result<()> {
    let serve = move || {
        loop {
            match listener.accept() {
                // A broken connection concerns its client only.
                Ok((stream, _)) => drop(answer(stream, &counters)),
                // For example, there are no descriptors left. An immediate retry would fail as
                // well.
                Err(_) => thread::sleep(TIMEOUT),
            }
        }
    };
    thread::Builder::new()
        .name("metrics".to_owned())
        .spawn(serve)
        .map(drop)
}

fn answer(mut stream: TcpStream, counters: &Mutex<Counters>) -> io::Result<()> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    let status = request(&mut stream)?;
    let (kind, body) = match status {
        "200 OK" => {
            let counters = counters.lock().unwrap_or_else(PoisonError::into_inner);
            let counters = counters.clone();
            (
                "application/openmetrics-text; version=1.0.0",
                encode(&counters),
            )
        }
        _ => ("text/plain", format!("{status}: metrics are at /metrics\n")),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// Reads a request and returns the status of the answer.
fn request(stream: &mut TcpStream) -> io::Result<&'static str> {
    let until = Instant::now() + TIMEOUT;
    let mut input = [0; MAX_REQUEST];
    let mut length = 0;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut input[length..])? {
            0 if length == MAX_REQUEST => return Ok("431 Request Header Fields Too Large"),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => length += read,
        }
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(&input[..length]) {
            Ok(httparse::Status::Partial) => {}
            Ok(httparse::Status::Complete(_)) => {
                let path = request.path.unwrap_or_default();
                return Ok(match (request.method, path.split('?').next()) {
                    (Some("GET"), Some("/metrics")) => "200 OK",
                    (Some("GET"), _) => "404 Not Found",
                    _ => "405 Method Not Allowed",
                });
            }
            Err(_) => return Ok("400 Bad Request"),
        }
    }
}

fn encode(counters: &Counters) -> String {
    let mut registry = Registry::with_prefix("seikan_relay");
    let mut gauge = |name: &str, help: &str, value: usize| {
        registry.register(name, help, ConstGauge::new(value as i64));
    };
    gauge("pairs", "Pairs with a port", counters.pairs);
    gauge("members", "Members in these pairs", counters.members);
    let help = "Authenticated TLS connections";
    gauge("streams", help, counters.streams);
    let mut count = |name: &str, help: &str, value: u64| {
        registry.register(name, help, ConstCounter::new(value));
    };
    count("datagrams", "Datagrams forwarded", counters.datagrams);
    count("bytes", "Bytes forwarded, without headers", counters.bytes);
    count("answered", "Requests granted", counters.answered);
    let help = "TLS connections rejected, or without a valid ticket in time";
    count("turned_away", help, counters.turned_away);
    let help = "Datagrams dropped by the kernel at full receive buffers";
    count("receive_queue_drops", help, counters.receive_queue_drops);
    let drops = counters.drops.nonzero();
    let drops = drops.map(|(reason, count)| (reason.name().to_owned(), count));
    let drops = family("reason", drops);
    registry.register("drops", "Datagrams dropped, by reason", drops);
    let refused = counters.refused();
    let refused = refused.map(|(refusal, count)| (refusal.code().to_string(), count));
    let refused = family("error", refused);
    registry.register("refused", "Requests refused, by error", refused);
    let mut body = String::new();
    // Writing to memory cannot fail.
    let _ = text::encode(&mut body, &registry);
    body
}

type Labels = [(&'static str, String); 1];

fn family(
    label: &'static str,
    counts: impl Iterator<Item = (String, u64)>,
) -> Family<Labels, Counter> {
    let family = Family::<Labels, Counter>::default();
    for (name, count) in counts {
        family.get_or_create(&[(label, name)]).inc_by(count);
    }
    family
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use seikan_observe::DropReason;
    use seikan_proto::mesh::relay::RelayRefusal;

    use super::*;

    fn get(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).expect("connected");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }

    #[test]
    fn only_the_metrics_path_is_served() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("an address");
        let mut counters = Counters::default();
        (counters.pairs, counters.bytes) = (3, 70_000);
        (counters.streams, counters.turned_away) = (2, 9);
        counters.drops.add(DropReason::UnknownSource, 5);
        counters.refuse(RelayRefusal::Unauthorized);
        counters.refuse(RelayRefusal::Unauthorized);
        serve(listener, Arc::new(Mutex::new(counters))).expect("served");
        let answer = get(address, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        for line in [
            "seikan_relay_pairs 3",
            "seikan_relay_bytes_total 70000",
            "seikan_relay_streams 2",
            "seikan_relay_turned_away_total 9",
            "seikan_relay_drops_total{reason=\"unknown_source\"} 5",
            "seikan_relay_refused_total{error=\"401\"} 2",
            "# EOF",
        ] {
            assert!(answer.lines().any(|l| l == line), "{line} in {answer}");
        }
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("\u{16}\u{3}\r\n\r\n", "400"),
        ] {
            let answer = get(address, request);
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status} ")),
                "{answer}"
            );
        }
    }

    /// The generated part of docs/reference/metrics-relay.md follows this line.
    const MARK: &str = "<!-- generated from the program; `make golden` writes it anew -->\n";

    #[test]
    fn the_page_of_metrics_lists_every_family() {
        // A family by reason has no line before the first drop.
        let mut counters = Counters::default();
        counters.drops.add(DropReason::UnknownSource, 1);
        let text = encode(&counters);
        let mut table = "\n| metric | type | meaning |\n|---|---|---|\n".to_owned();
        let helps = text.lines().filter_map(|line| line.strip_prefix("# HELP "));
        for (name, help) in helps.filter_map(|line| line.split_once(' ')) {
            let kind = text
                .lines()
                .find_map(|line| line.strip_prefix("# TYPE ")?.strip_prefix(name))
                .expect("a type")
                .trim();
            let suffix = if kind == "counter" { "_total" } else { "" };
            table += &format!("| `{name}{suffix}` | {kind} | {help} |\n");
        }
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../docs/reference/metrics-relay.md"
        );
        let page = std::fs::read_to_string(path).expect("the page");
        let (introduction, shown) = page.split_once(MARK).expect("the mark");
        if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
            let page = format!("{introduction}{MARK}{table}");
            return std::fs::write(path, page).expect("written");
        }
        assert!(shown == table, "{path} is stale: run `make golden`");
    }
}
